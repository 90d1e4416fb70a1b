"""Models of a GPU: time and energy of one training step at (batch size, power limit).

A model is fitted to one `Trace` and answers for whole arrays of batch sizes, so that a solver
can look a share up instead of computing it.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Union

import numpy as np
from scipy.optimize import isotonic_regression

from zeus_hetero.errors import AllocationError, TraceError, TraceWarning
from zeus_hetero.trace import Trace

if TYPE_CHECKING:
    from zeus_hetero.power_limits import PowerLimits
    from zeus_hetero.uncertainty import Prediction

BatchSizes = Union[int, np.ndarray]


class GPUModel(ABC):
    """Predicts one training step of one GPU model, from its trace.

    Attributes:
        trace: the measurements.
        power_limits: the limits in W that the model can predict, descending.
        extrapolates: whether it predicts steps larger than any that was measured. Where not, a
            larger share is so many micro-batches of measured size, and what a sample costs
            there is what it costs in one of those.
    """

    name: str
    extrapolates = False
    trace: Trace
    power_limits: tuple[int, ...]

    @abstractmethod
    def time(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:
        """Time of one training step.

        Args:
            batch_size: samples, scalar or array, at least 0; no samples take no time.
            power_limit: W, one of `power_limits`.

        Returns:
            Seconds, float64, in the shape of `batch_size`.

        Raises:
            AllocationError: the model knows nothing about that power limit.
        """

    @abstractmethod
    def energy(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:
        """Energy of one training step in J; arguments and errors as for `time`."""

    @abstractmethod
    def accumulation_steps(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:
        """Micro-batches that a share runs as: 1 where it fits at once, 0 for no samples."""

    @abstractmethod
    def distance(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:
        """How far a prediction is from what was measured.

        Returns:
            Distance of the micro-batch size to the nearest batch size that was measured at this
            power limit, relative to that batch size: 0 at a measured point, 0.5 half as far away
            as the measured batch is large. 0 for no samples.
        """

    def predict(self, batch_size: int, power_limit: int, confidence: float = 0.9) -> Prediction:
        """Time and energy of one training step, with intervals.

        Args:
            batch_size: samples, at least 0.
            power_limit: W, one of `power_limits`.
            confidence: how often a measurement shall lie inside an interval.

        Returns:
            The prediction; a measurement lies inside its time interval, and likewise inside its
            energy interval, with that confidence.

        Raises:
            AllocationError: the model knows nothing about that power limit, or the confidence is
                not between 0 and 1.
        """
        from zeus_hetero.uncertainty import predict

        return predict(self, batch_size, power_limit, confidence)

    def spread(
        self, batch_size: BatchSizes, power_limit: int, confidence: float = 0.9
    ) -> tuple[np.ndarray, np.ndarray]:
        """Half-widths of the intervals of time and of energy.

        Learned from the model's own errors when batch sizes are left out of its trace, once, when
        first asked for.

        Args:
            batch_size: samples, scalar or array.
            power_limit: W, one of `power_limits`.
            confidence: how often a measurement shall lie inside.

        Returns:
            Of time and of energy, in the shape of `batch_size`: h stands for the interval from
            prediction * exp(-h) to prediction * exp(h).
        """
        from zeus_hetero.uncertainty import typical_spread

        self._check_limit(power_limit)
        if not hasattr(self, "_typical_spread"):
            self._typical_spread = typical_spread(self.trace, type(self))
        return (
            np.full(np.shape(batch_size), self._typical_spread[0](confidence)),
            np.full(np.shape(batch_size), self._typical_spread[1](confidence)),
        )

    def micro_batch_size(self, batch_size: int, power_limit: int) -> int:
        """Samples of the largest micro-batch of a share; micro-batches differ by at most 1."""
        steps = int(self.accumulation_steps(batch_size, power_limit))
        return -(-batch_size // steps) if steps else 0

    def _check_limit(self, power_limit: int) -> int:
        if power_limit not in self.power_limits:
            raise AllocationError(
                f"{self.trace.gpu or self.trace.source}: no model for a power limit of "
                f"{power_limit} W; expected one of {', '.join(map(str, self.power_limits))} W."
            )
        return power_limit


class Interpolated(GPUModel):
    """Piecewise linear through the measured points; never extrapolates.

    - Time and energy do not fall when the batch grows: measurements that say otherwise are noise
      and are replaced by their isotonic regression, all others are hit exactly.
    - A share beyond the largest measured batch ``b_max`` runs as ``n = ceil(b / b_max)``
      micro-batches of ``b / n`` samples: ``n`` times the prediction for one of them, which was
      measured nearby and is known to fit in memory.
    - Below the smallest measured batch time and energy stay what they are there: small batches
      are limited by the launch of kernels, and a lower promise would have no measurement behind.

    Args:
        trace: measurements; power limits may have been measured at different batch sizes.
    """

    name = "interpolated"

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.power_limits = trace.power_limits
        self._knots = {}
        for limit in self.power_limits:
            at = trace.power_limit == limit
            self._knots[limit] = (
                trace.batch_size[at].astype(float),
                _monotone(trace.time[at]),
                _monotone(trace.energy[at]),
            )
        _warn_about_holes(trace)

    def time(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:  # noqa: D102
        return self._accumulated(batch_size, power_limit, 1)

    def energy(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:  # noqa: D102
        return self._accumulated(batch_size, power_limit, 2)

    def accumulation_steps(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:  # noqa: D102
        largest = int(self._knots[self._check_limit(power_limit)][0][-1])
        return -(-np.asarray(batch_size, dtype=np.int64) // largest)

    def distance(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:  # noqa: D102
        batch = np.asarray(batch_size, dtype=float)
        micro = batch / np.maximum(self.accumulation_steps(batch_size, power_limit), 1)
        knots = self._knots[power_limit][0]
        nearest = knots[np.abs(micro[..., None] - knots).argmin(axis=-1)]
        return np.where(batch > 0, np.abs(micro - nearest) / nearest, 0.0)

    def _accumulated(self, batch_size: BatchSizes, power_limit: int, figure: int) -> np.ndarray:
        steps = self.accumulation_steps(batch_size, power_limit)
        knots = self._knots[power_limit]
        micro = np.asarray(batch_size, dtype=float) / np.maximum(steps, 1)
        return np.asarray(steps * np.interp(micro, knots[0], knots[figure]))


class Quadratic(GPUModel):
    """The original Zeus-squared model: parabolas in the batch size, one pair per power limit.

    Least-squares polynomials of degree 2 of time and of average power; predictions below zero
    are set to zero, and nothing stops them from being read far outside the measured range. Kept
    to reproduce published figures.

    Args:
        trace: measurements; power limits with fewer than 3 batch sizes are dropped.

    Raises:
        TraceError: no power limit was measured at 3 batch sizes.
    """

    name = "quadratic"
    extrapolates = True

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._time: dict[int, np.ndarray] = {}
        self._power: dict[int, np.ndarray] = {}
        dropped = []
        for limit in trace.power_limits:
            at = trace.power_limit == limit
            if np.count_nonzero(at) < 3:
                dropped.append(limit)
                continue
            batch = trace.batch_size[at].astype(float)
            self._time[limit] = np.polyfit(batch, trace.time[at], 2)
            self._power[limit] = np.polyfit(batch, trace.average_power[at], 2)
        self.power_limits = tuple(self._time)
        if not self.power_limits:
            raise TraceError(
                f"{trace.source}: batch sizes {', '.join(map(str, trace.batch_sizes))}; the "
                "quadratic model needs at least 3 batch sizes at one power limit. Profile more, "
                "or use model='interpolated'."
            )
        if dropped:
            warnings.warn(
                f"{trace.source}: dropped {', '.join(map(str, dropped))} W: measured at fewer "
                "than the 3 batch sizes that the quadratic model needs.",
                TraceWarning,
                stacklevel=3,
            )

    def time(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:  # noqa: D102
        return self._parabola(self._time, batch_size, power_limit)

    def energy(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:  # noqa: D102
        power = self._parabola(self._power, batch_size, power_limit)
        return power * self.time(batch_size, power_limit)

    def accumulation_steps(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:  # noqa: D102
        self._check_limit(power_limit)
        return np.minimum(np.asarray(batch_size, dtype=np.int64), 1)

    def distance(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:  # noqa: D102
        self._check_limit(power_limit)
        batch = np.asarray(batch_size, dtype=float)
        measured = self.trace.batch_size[self.trace.power_limit == power_limit]
        nearest = measured[np.abs(batch[..., None] - measured).argmin(axis=-1)]
        return np.where(batch > 0, np.abs(batch - nearest) / nearest, 0.0)

    def _parabola(
        self, fits: dict[int, np.ndarray], batch_size: BatchSizes, power_limit: int
    ) -> np.ndarray:
        batch = np.asarray(batch_size, dtype=float)
        values = np.maximum(np.polyval(fits[self._check_limit(power_limit)], batch), 0.0)
        return np.where(batch > 0, values, 0.0)


def _auto(trace: Trace) -> GPUModel:
    # Late: it needs the classes above.
    from zeus_hetero.smooth_model import Smooth

    return Smooth(trace)


MODELS: dict[str, Callable[[Trace], GPUModel]] = {
    "auto": _auto,
    Interpolated.name: Interpolated,
    Quadratic.name: Quadratic,
}


def fit(trace: Trace, model: str = "interpolated", *, power_limits: PowerLimits = None) -> GPUModel:
    """Fit a model of a GPU to its trace.

    Args:
        trace: the measurements.
        model: a name in `MODELS`.
        power_limits: limits in W that the model shall answer for: None for the measured ones,
            "continuous" for every watt between them, a whole number for steps of so many W, or
            the limits themselves.

    Returns:
        The fitted model.

    Raises:
        AllocationError: unknown model, or power limits outside the measured range.
        TraceError: too few measurements for it.
    """
    if model not in MODELS:
        raise AllocationError(f"model is {model!r}; expected one of {', '.join(MODELS)}.")
    if power_limits is None:
        return MODELS[model](trace)
    if model == "auto":
        from zeus_hetero.smooth_model import Smooth

        return Smooth(trace, power_limits=power_limits)
    from zeus_hetero.power_limits import BetweenLimits

    return BetweenLimits(MODELS[model](trace), power_limits)


def _monotone(values: np.ndarray) -> np.ndarray:
    """The nearest sequence that never falls; the values themselves where they never do."""
    if np.all(np.diff(values) >= 0):
        return values
    return np.asarray(isotonic_regression(values).x)


def _warn_about_holes(trace: Trace) -> None:
    sizes = set(trace.batch_sizes)
    for limit in trace.power_limits:
        missing = sizes - set(trace.batch_size[trace.power_limit == limit].tolist())
        if missing:
            warnings.warn(
                f"{trace.source}: {limit} W was not measured at batch sizes "
                f"{', '.join(map(str, sorted(missing)))}; its curve goes through the others.",
                TraceWarning,
                stacklevel=4,
            )
