"""The model "auto": physics, a smooth correction, and as much of each as the data support."""

from __future__ import annotations

import warnings

import numpy as np
from scipy.optimize import isotonic_regression

from zeus_hetero.errors import TraceWarning
from zeus_hetero.gpu_model import BatchSizes, GPUModel, Interpolated
from zeus_hetero.outliers import Outlier, contradicted, worst_by_batch_size
from zeus_hetero.physics import POWER, TIME
from zeus_hetero.power_limits import PowerLimits, resolve_power_limits
from zeus_hetero.surface import Smoothness, Surface, fit_surface
from zeus_hetero.trace import Trace
from zeus_hetero.uncertainty import conformal_quantile

# Knots of the tables that predictions are read from, per factor of e in the batch size.
_KNOTS_PER_E = 20
# Rounds of looking for bad points.
_OUTLIER_ROUNDS = 3
# Uncertainty (standard deviation, log units) of a guess that costs nothing extra.
_GUESS = 0.05


class Smooth(GPUModel):
    """Smooth in batch size and power limit, monotone, robust; fitted to the whole trace at once.

    - log time and log average power are each a physical curve (`physics`) plus a smooth correction
      (`surface`) whose freedom is chosen by leaving out one batch size at a time. If plain
      interpolation predicts left-out batch sizes clearly better, the tables follow it instead.
    - Time and energy do not fall when the batch grows; time does not rise and average power does
      not fall when the limit rises.
    - Time is cautious where a power limit's slowdown is a guess (neither it nor a lower limit was
      measured at a batch as large): the expected value, and up to a standard deviation more.
    - Single bad points have little influence; they are named in `outliers` and a `TraceWarning`.
    - A share beyond the largest measured batch of the trace (memory does not depend on the power
      limit) runs as micro-batches, as in `Interpolated`. Below the smallest, time and energy lie
      between those of the smallest and its proportional part: a smaller batch is never cheaper
      per sample.

    Args:
        trace: measurements; holes, few points, a single batch size or a single point will do.
        power_limits: limits in W to answer for, see `resolve_power_limits`; None for the
            measured ones.
        validate: False skips the cross-validation (and with it the calibration of intervals and
            the outliers): 10 times faster, for code that fits hundreds of times.

    Attributes:
        outliers: the points that their neighbours contradict.
        chosen: "smooth" or "interpolated", what the tables of time and energy follow.
        score: mean absolute relative error of time for left-out batch sizes, nan if unknown.
    """

    name = "auto"

    def __init__(
        self, trace: Trace, *, power_limits: PowerLimits = None, validate: bool = True
    ) -> None:
        self.trace = trace
        self.power_limits = resolve_power_limits(trace, power_limits)
        self.outliers: tuple[Outlier, ...] = ()
        self.chosen = "smooth"
        self._points = np.log(np.column_stack([trace.batch_size, trace.power_limit]).astype(float))
        self._logs = {"time": np.log(trace.time), "power": np.log(trace.average_power)}
        self._fit(validate)
        unknown = conformal_quantile(np.empty(0))
        self._factor = {"time": unknown, "energy": unknown}
        if validate:
            self._calibrate()
            self._compare_with_interpolation()
            self._warn()
        self._tabulate()

    def time(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:  # noqa: D102
        return self._read(batch_size, power_limit, self._log_time)

    def energy(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:  # noqa: D102
        return self._read(batch_size, power_limit, self._log_energy)

    def accumulation_steps(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:  # noqa: D102
        self._check_limit(power_limit)
        largest = int(self.trace.batch_size.max())
        return -(-np.asarray(batch_size, dtype=np.int64) // largest)

    def distance(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:  # noqa: D102
        batch = np.asarray(batch_size, dtype=float)
        micro = batch / np.maximum(self.accumulation_steps(batch_size, power_limit), 1)
        at = self.trace.power_limit == power_limit
        # Between the measured limits, any measured batch size is as near as another.
        knots = self.trace.batch_size[at if at.any() else slice(None)]
        nearest = knots[np.abs(micro[..., None] - knots).argmin(axis=-1)]
        return np.where(batch > 0, np.abs(micro - nearest) / nearest, 0.0)

    def spread(  # noqa: D102
        self, batch_size: BatchSizes, power_limit: int, confidence: float = 0.9
    ) -> tuple[np.ndarray, np.ndarray]:
        steps = np.maximum(self.accumulation_steps(batch_size, power_limit), 1)
        micro = np.maximum(np.asarray(batch_size, dtype=float) / steps, 1.0)
        at = np.column_stack([np.log(micro).ravel(), np.full(micro.size, np.log(power_limit))])
        time = self.surfaces["time"].deviation(at)
        energy = np.hypot(time, self.surfaces["power"].deviation(at))
        # Caution moves the prediction, not the truth.
        moved = self._caution(at)
        return (
            (self._factor["time"](confidence) * time + moved).reshape(micro.shape),
            (self._factor["energy"](confidence) * energy + moved).reshape(micro.shape),
        )

    def _fit(self, validate: bool) -> None:
        believed = np.ones(len(self.trace), dtype=bool)
        self._fit_surfaces(believed, Smoothness())
        if validate:
            # Each round disbelieves what the other points contradict; the next ones catch a bad
            # point that hid behind a worse one.
            for _ in range(_OUTLIER_ROUNDS):
                worst = worst_by_batch_size(self.trace, self.surfaces, believed)
                if not worst:
                    break
                believed[worst] = False
                self._fit_surfaces(believed, Smoothness())
            found = contradicted(self.trace, self.surfaces, believed)
            # Good points beside a bad one may have been disbelieved before it was.
            self.outliers = tuple(
                found[i] for i in np.flatnonzero(~believed).tolist() if i in found
            )
            believed = np.array([b or i not in found for i, b in enumerate(believed)])
            self._fit_surfaces(believed, None)
        self._believed = believed

    def _fit_surfaces(self, believed: np.ndarray, smoothness: Smoothness | None) -> None:
        self.surfaces = {
            figure: self._surface(figure, believed, smoothness) for figure in self._logs
        }

    def _surface(self, figure: str, believed: np.ndarray, smoothness: Smoothness | None) -> Surface:
        law = {"time": TIME, "power": POWER}[figure]
        return fit_surface(self._points, self._logs[figure], law, believed, smoothness)

    def _calibrate(self) -> None:
        """Scale the intervals so that they hold what was left out."""
        time, power = (self.surfaces[figure].validation for figure in ("time", "power"))
        if time is None or power is None:
            return
        energy = time.residual + power.residual
        groups = len(np.unique(self.trace.batch_size[np.isfinite(energy)]))
        self._factor = {
            "time": conformal_quantile(time.residual / time.deviation, groups),
            "energy": conformal_quantile(
                energy / np.hypot(time.deviation, power.deviation), groups
            ),
        }

    @property
    def score(self) -> float:
        """Mean absolute relative error of time for left-out batch sizes; nan if unknown."""
        validation = self.surfaces["time"].validation
        return validation.score if validation is not None else float("nan")

    def _compare_with_interpolation(self) -> None:
        validation = self.surfaces["time"].validation
        if validation is None:
            return
        plain = []
        ours = []
        for size in np.unique(self.trace.batch_size)[1:-1]:
            for i in np.flatnonzero((self.trace.batch_size == size) & self._believed):
                rest = (
                    (self.trace.power_limit == self.trace.power_limit[i])
                    & (self.trace.batch_size != size)
                    & self._believed
                )
                if rest.any() and np.isfinite(validation.residual[i]):
                    at = np.interp(size, self.trace.batch_size[rest], self.trace.time[rest])
                    plain.append(abs(self._logs["time"][i] - np.log(at)))
                    ours.append(abs(validation.residual[i]))
        # Interpolation hits the noise of the measured points, so it must win clearly, on many.
        if len(plain) >= 12 and np.mean(plain) < 0.8 * np.mean(ours):
            self.chosen = "interpolated"

    def _warn(self) -> None:
        if self.outliers:
            warnings.warn(
                f"{self.trace.source}: {len(self.outliers)} measured point"
                f"{'s do' if len(self.outliers) > 1 else ' does'} not fit the others and "
                f"{'are' if len(self.outliers) > 1 else 'is'} ignored: "
                f"{'; '.join(map(str, self.outliers))}. Profile again to be sure.",
                TraceWarning,
                stacklevel=4,
            )

    def _tabulate(self) -> None:
        """Predictions on a grid, made monotone; shape (power limits, knots), log units."""
        smallest, largest = self.trace.batch_size.min(), self.trace.batch_size.max()
        count = int(np.ceil(_KNOTS_PER_E * np.log(largest))) + 2
        self._knots = np.union1d(
            np.linspace(0.0, np.log(largest), count), np.log(self.trace.batch_sizes)
        )
        limits = np.log(np.array(self.power_limits, dtype=float))
        at = np.column_stack(
            [np.tile(self._knots, len(limits)), np.repeat(limits, len(self._knots))]
        )
        shape = (len(limits), len(self._knots))
        time = (self.surfaces["time"].mean(at) + self._caution(at)).reshape(shape)
        power = self.surfaces["power"].mean(at).reshape(shape)
        if self.chosen == "interpolated":
            time, power = self._interpolated_tables(time, power)
        # Power limits are in descending order.
        time = _rising(time, axis=0)
        power = -_rising(-power, axis=0)
        time = _rising(_bounded_below(time, self._knots, np.log(smallest)), axis=1)
        energy = _rising(_bounded_below(time + power, self._knots, np.log(smallest)), axis=1)
        self._log_time = dict(zip(self.power_limits, time))
        self._log_energy = dict(zip(self.power_limits, energy))

    def _caution(self, at: np.ndarray) -> np.ndarray:
        """What to add to the most likely log time where a power limit's slowdown is a guess.

        A power limit that starves the GPU makes it slower by a factor, and a step waits for the
        slowest: a plan must not rest on such a limit before it was measured at work. It was if
        this limit, or a lower one, was measured at a batch as large.
        """
        limits, which = np.unique(at[:, 1], return_inverse=True)
        # Logarithms of whole numbers: a little slack compares them as if they were those.
        largest = np.array(
            [self._points[self._points[:, 1] <= limit + 1e-9, 0].max() for limit in limits]
        )
        uncertainty = self.surfaces["time"].uncertainty(at)
        premium = uncertainty**2 / 2 + np.maximum(uncertainty - _GUESS, 0.0)
        return np.where(at[:, 0] > largest[which.ravel()] + 1e-9, premium, 0.0)

    def _interpolated_tables(
        self, time: np.ndarray, power: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TraceWarning)
            plain = Interpolated(self.trace)
        batch = np.exp(self._knots)
        time, power = time.copy(), power.copy()
        for row, limit in enumerate(self.power_limits):
            sizes = self.trace.batch_size[self.trace.power_limit == limit]
            if not sizes.size:
                continue  # between the measured limits there is nothing to interpolate
            inside = (batch >= sizes.min()) & (batch <= sizes.max())
            seconds = plain.time(batch[inside], limit)
            time[row, inside] = np.log(seconds)
            power[row, inside] = np.log(plain.energy(batch[inside], limit) / seconds)
        return time, power

    def _read(
        self, batch_size: BatchSizes, power_limit: int, table: dict[int, np.ndarray]
    ) -> np.ndarray:
        steps = self.accumulation_steps(batch_size, power_limit)
        micro = np.asarray(batch_size, dtype=float) / np.maximum(steps, 1)
        logs = np.interp(np.log(np.maximum(micro, 1.0)), self._knots, table[power_limit])
        return np.asarray(steps * np.exp(logs))


def _rising(values: np.ndarray, axis: int) -> np.ndarray:
    """The nearest values that never fall along an axis; themselves where they never do."""
    falls = np.any(np.diff(values, axis=axis) < 0, axis=axis)
    if not falls.any():
        return values
    values = values.copy()
    for i in np.flatnonzero(falls):
        line = (slice(None), i) if axis == 0 else (i, slice(None))
        values[line] = isotonic_regression(values[line]).x
    return values


def _bounded_below(values: np.ndarray, knots: np.ndarray, smallest: float) -> np.ndarray:
    """Below the smallest measured batch, between its value and its proportional part.

    Args:
        values: log figures, shape (power limits, knots).
        knots: log batch sizes.
        smallest: log of the smallest measured batch size; one of the knots.
    """
    first = int(np.searchsorted(knots, smallest))
    at = values[:, first : first + 1]
    below = np.clip(values[:, :first], at + (knots[:first] - smallest), at)
    return np.concatenate([below, values[:, first:]], axis=1)
