"""What a GPU does, in formulas: the smooth curves that measurements scatter around.

Both curves live in logarithms, because measurement noise is a few percent of the value whatever
its size, and because relative units then change nothing.

Source: the shapes were read off Zeus's public power traces of A40, P100, RTX 6000 and V100; the
time curve alone follows them within 1 to 4 % (median), `surface` takes care of the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional, Union

import numpy as np
from scipy.optimize import least_squares

Curve = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
Start = Optional[np.ndarray]
Floats = Union[float, np.ndarray]

# Residuals beyond a few times the usual noise count linearly instead of squared.
_NOISE = 0.03
_LAUNCH_NOISE = 0.025
_COMPUTE_NOISE = 0.006
_POWER_NOISE = 0.01


def time_curve(theta: np.ndarray, log_batch: Floats, log_limit: Floats) -> np.ndarray:
    """Logarithm of the time of a step: launching kernels or computing, whichever takes longer.

    A step cannot be shorter than a fixed overhead, and the computing grows with the batch. A power
    limit slows only the computing, and only below the power that the computing would draw.

    Args:
        theta: log overhead, log time of one sample, exponent of the batch size (about 1),
            log sharpness of the change-over, slope of the slowdown, log of the limit below
            which it begins, log width of its bend.
        log_batch: log of samples.
        log_limit: log of W.

    Returns:
        log of seconds.
    """
    overhead, sample, exponent, sharpness, slope, knee, width = theta
    bend = np.exp(width)
    slowdown = slope * bend * np.logaddexp(0.0, (knee - log_limit) / bend)
    work = sample + exponent * log_batch + slowdown
    k = np.exp(sharpness)
    return np.asarray(np.logaddexp(k * overhead, k * work) / k)


def time_noise(theta: np.ndarray, log_batch: Floats, log_limit: Floats) -> np.ndarray:
    """Standard deviation of one measured time, log units.

    Steps that wait for kernel launches scatter like the host that launches them, by about 2.5 %
    on the public traces; steps that wait for the GPU by about 0.6 %.

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


def fit_time_curve(
    log_batch: np.ndarray, log_limit: np.ndarray, log_time: np.ndarray, start: Start = None
) -> np.ndarray:
    """Parameters of `time_curve`, by robust least squares with weak priors.

    The priors say what is usual (linear work, a change-over over one octave, no slowdown above
    the middle of the limits), so that a few points, even a single one, are enough.

    Args:
        log_batch: log of samples, one per point.
        log_limit: log of W, one per point.
        log_time: log of seconds, one per point.
        start: parameters of a nearby fit, to begin there.

    Returns:
        The 7 parameters.
    """
    largest = log_batch >= np.quantile(log_batch, 0.7)
    prior = np.array(
        [
            log_time.min() - 0.1,
            np.median((log_time - log_batch)[largest]),
            1.0,
            np.log(4.0),
            1.0,
            np.median(log_limit),
            np.log(0.1),
        ]
    )
    spread = np.array([1.0, 1.5, 0.05, 0.5, 0.7, 0.3, 0.7])
    return _fit(time_curve, log_batch, log_limit, log_time, prior, spread, start)


def fit_power_curve(
    log_batch: np.ndarray, log_limit: np.ndarray, log_power: np.ndarray, start: Start = None
) -> np.ndarray:
    """Parameters of `power_curve`; arguments as for `fit_time_curve` with log of W."""
    highest = log_limit.max()
    prior = np.array(
        [
            highest + np.log(0.25),
            highest + np.log(0.7),
            np.median(log_batch) - 1.5,
            0.0,
            -0.02,
            np.log(12.0),
        ]
    )
    spread = np.array([0.5, 0.7, 2.0, 0.7, 0.05, 0.7])
    return _fit(power_curve, log_batch, log_limit, log_power, prior, spread, start)


def _fit(
    curve: Curve,
    log_batch: np.ndarray,
    log_limit: np.ndarray,
    values: np.ndarray,
    prior: np.ndarray,
    spread: np.ndarray,
    start: Start,
) -> np.ndarray:
    def residuals(theta: np.ndarray) -> np.ndarray:
        z = (curve(theta, log_batch, log_limit) - values) / _NOISE
        # The square of this is the soft L1 loss. Given so, the priors stay quadratic, which
        # least_squares(loss="soft_l1") would not let them.
        robust = np.sign(z) * np.sqrt(2 * (np.sqrt(1 + z**2) - 1))
        return np.concatenate([robust, (theta - prior) / spread])

    result = least_squares(residuals, prior if start is None else start, method="lm", max_nfev=400)
    return np.asarray(result.x)
