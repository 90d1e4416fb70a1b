"""What a GPU does, in formulas: the smooth curves that measurements scatter around.

Both curves live in logarithms, because measurement noise is a few percent of the value whatever
its size, and because relative units then change nothing.

Source: the shapes were read off Zeus's public power traces of A40, P100, RTX 6000 and V100; the
time curve alone follows them within 1 to 4 % (median), `surface` takes care of the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional, Union

import numpy as np
from scipy.optimize import least_squares

Floats = Union[float, np.ndarray]
Curve = Callable[[np.ndarray, Floats, Floats], np.ndarray]
Start = Optional[np.ndarray]

# Residuals beyond a few times the usual noise count linearly instead of squared.
_NOISE = 0.03
_LAUNCH_NOISE = 0.025
_COMPUTE_NOISE = 0.012
_POWER_NOISE = 0.01
# Least part of a power limit that is left for computing, so that its logarithm exists.
_LEAST_HEADROOM = 0.03
# Step of the numerical derivatives, in units of what a parameter may vary by.
_STEP = 1e-4


@dataclass(frozen=True)
class Law:
    """A kind of curve over (log batch size, log power limit).

    Attributes:
        curve: log of the figure, from parameters, log batch size and log power limit.
        noise: standard deviation of a measurement of it, likewise; log units.
        usual: usual parameters, from log batch size, log power limit and log figure of points.
        spread: by how much each parameter varies (standard deviation) between GPUs and workloads.
    """

    curve: Curve
    noise: Curve
    usual: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
    spread: tuple[float, ...]

    def fit(self, points: np.ndarray, values: np.ndarray, start: Start = None) -> FittedLaw:
        """Robust least squares with weak priors: a few points, even a single one, are enough.

        Args:
            points: shape (n, 2), log batch size and log power limit.
            values: log of the measured figure, n.
            start: parameters of a nearby fit, to begin there.
        """
        usual = self.usual(points[:, 0], points[:, 1], values)
        spread = np.array(self.spread)

        def residuals(theta: np.ndarray) -> np.ndarray:
            z = (self.curve(theta, points[:, 0], points[:, 1]) - values) / _NOISE
            # The square of this is the soft L1 loss. Given so, the priors stay quadratic, which
            # least_squares(loss="soft_l1") would not let them.
            robust = np.sign(z) * np.sqrt(2 * (np.sqrt(1 + z**2) - 1))
            return np.concatenate([robust, (theta - usual) / spread])

        begin = usual if start is None else start
        return FittedLaw(
            self, least_squares(residuals, begin, method="lm", ftol=1e-5, max_nfev=400).x
        )


@dataclass(frozen=True)
class FittedLaw:
    """A law with its parameters; `at` is of shape (m, 2), log batch size and log power limit."""

    law: Law
    theta: np.ndarray

    def mean(self, at: np.ndarray) -> np.ndarray:
        """Log of the figure, shape (m,)."""
        return self.law.curve(self.theta, at[:, 0], at[:, 1])

    def noise(self, at: np.ndarray) -> np.ndarray:
        """Standard deviation of one measurement, log units, shape (m,)."""
        return self.law.noise(self.theta, at[:, 0], at[:, 1])

    def slopes(self, at: np.ndarray) -> np.ndarray:
        """Change of `mean` for one standard deviation of each parameter, shape (m, parameters)."""
        base = self.mean(at)
        columns = []
        for k, spread in enumerate(self.law.spread):
            theta = self.theta.copy()
            theta[k] += _STEP * spread
            columns.append((self.law.curve(theta, at[:, 0], at[:, 1]) - base) / _STEP)
        return np.column_stack(columns)


def time_curve(theta: np.ndarray, log_batch: Floats, log_limit: Floats) -> np.ndarray:
    """Logarithm of the time of a step: launching kernels or computing, whichever takes longer.

    A step cannot be shorter than a fixed overhead, and the computing grows with the batch. A power
    limit slows only the computing, and only below the power that the computing would draw. What
    slows it is the power left after what the GPU draws anyway, so that the slowdown grows without
    bound when the limit comes close to that.

    Args:
        theta: log overhead, log time of one sample, exponent of the batch size (about 1),
            log sharpness of the change-over, slope of the slowdown, log of the limit below
            which it begins, log width of its bend, log of the power drawn anyway.
        log_batch: log of samples.
        log_limit: log of W.

    Returns:
        log of seconds.
    """
    overhead, sample, exponent, sharpness, slope, knee, width, anyway = theta
    bend = np.exp(width)
    missing = _headroom(knee, anyway) - _headroom(log_limit, anyway)
    slowdown = slope * bend * np.logaddexp(0.0, missing / bend)
    work = sample + exponent * log_batch + slowdown
    k = np.exp(sharpness)
    return np.asarray(np.logaddexp(k * overhead, k * work) / k)


def _headroom(log_limit: Floats, log_anyway: float) -> np.ndarray:
    """Log of the part of a limit above the power that is drawn anyway."""
    part = 1 - np.exp(log_anyway - np.asarray(log_limit))
    return log_limit + np.log(np.maximum(part, _LEAST_HEADROOM))


def time_noise(theta: np.ndarray, log_batch: Floats, log_limit: Floats) -> np.ndarray:
    """Standard deviation of one measured time, log units.

    Steps that wait for kernel launches scatter like the host that launches them, by about 2.5 %
    on the public traces; steps that wait for the GPU by about half of that.

    Args:
        theta: parameters of `time_curve`.
        log_batch: log of samples.
        log_limit: log of W.
    """
    overhead, k = theta[0], np.exp(theta[3])
    launching = np.exp(k * (overhead - time_curve(theta, log_batch, log_limit)))
    return np.asarray(_COMPUTE_NOISE + (_LAUNCH_NOISE - _COMPUTE_NOISE) * launching)


def power_noise(theta: np.ndarray, log_batch: Floats, log_limit: Floats) -> np.ndarray:
    """Standard deviation of one measured average power; arguments as for `time_noise`."""
    return np.full(np.broadcast(log_batch, log_limit).shape, _POWER_NOISE)


def power_curve(theta: np.ndarray, log_batch: Floats, log_limit: Floats) -> np.ndarray:
    """Logarithm of the average power: what the work would draw, or the limit if that is less.

    Args:
        theta: log of the power of an idle GPU, log of what full use adds, log of the batch size
            that uses it by half, log steepness of that rise, log of the part of a limit that is
            reached, log sharpness of the change-over.
        log_batch: log of samples.
        log_limit: log of W.

    Returns:
        log of W.
    """
    idle, dynamic, half, steepness, reached, sharpness = theta
    use = -np.logaddexp(0.0, -np.exp(steepness) * (log_batch - half))
    demand = np.logaddexp(idle, dynamic + use)
    k = np.exp(sharpness)
    return np.asarray(-np.logaddexp(-k * demand, -k * (log_limit + reached)) / k)


def _usual_time(log_batch: np.ndarray, log_limit: np.ndarray, log_time: np.ndarray) -> np.ndarray:
    largest = log_batch >= np.quantile(log_batch, 0.7)
    return np.array(
        [
            log_time.min() - 0.1,
            np.median((log_time - log_batch)[largest]),
            1.0,
            np.log(4.0),
            1.0,
            np.median(log_limit),
            np.log(0.15),
            log_limit.min() + np.log(0.6),
        ]
    )


def _usual_power(log_batch: np.ndarray, log_limit: np.ndarray, log_power: np.ndarray) -> np.ndarray:
    del log_power
    highest = log_limit.max()
    return np.array(
        [
            highest + np.log(0.25),
            highest + np.log(0.7),
            np.median(log_batch) - 1.5,
            0.0,
            -0.02,
            np.log(12.0),
        ]
    )


TIME = Law(time_curve, time_noise, _usual_time, (1.0, 1.5, 0.05, 0.5, 0.4, 0.3, 0.7, 0.3))
POWER = Law(power_curve, power_noise, _usual_power, (0.5, 0.7, 2.0, 0.7, 0.05, 0.7))
