"""How sure a prediction is: intervals that hold what was left out as often as they say.

The intervals are conformal: a model's own leave-out residuals are sorted, and the half-width is
the residual that the asked part of them does not exceed. No distribution is assumed, and few
residuals give wide intervals.

Source: Vovk, Gammerman, Shafer, Algorithmic Learning in a Random World (split conformal
prediction), with residuals normalised by the expected deviation where a model knows one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtri

from zeus_hetero.errors import AllocationError, TraceError, TraceWarning
from zeus_hetero.gpu_model import BatchSizes, GPUModel
from zeus_hetero.trace import Trace

# Relative noise of a measurement where there is nothing to learn it from. Three times the few
# percent of a good window: nothing is known about this trace.
_UNKNOWN_NOISE = 0.1
# Draws of a global step's errors: enough for its quantiles to stand still at 1 % of themselves.
_DRAWS = 4000
# Predictions below this part of a measurement are taken as this part.
_LEAST_RATIO = 0.05
# Below this many residuals the largest one decides, with a margin.
_FEW = 10


@dataclass(frozen=True)
class Prediction:
    """Time and energy of a training step, with how sure they are.

    Attributes:
        time: s.
        energy: J.
        time_interval: lowest and highest plausible time, s.
        energy_interval: likewise energy, J.
        confidence: how often a measurement should lie inside each interval.
    """

    time: float
    energy: float
    time_interval: tuple[float, float]
    energy_interval: tuple[float, float]
    confidence: float

    def __str__(self) -> str:
        return (
            f"{self.time:.4g} s ({self.time_interval[0]:.4g} to {self.time_interval[1]:.4g}), "
            f"{self.energy:.4g} J ({self.energy_interval[0]:.4g} to "
            f"{self.energy_interval[1]:.4g}) at {self.confidence:.0%}"
        )


def check_confidence(confidence: float) -> float:
    """The confidence, if it is one.

    Raises:
        AllocationError: not between 0 and 1.
    """
    if not isinstance(confidence, (int, float)) or not 0 < confidence < 1:
        raise AllocationError(f"confidence is {confidence!r}; expected a number between 0 and 1.")
    return float(confidence)


def predict(
    model: GPUModel, batch_size: int, power_limit: int, confidence: float = 0.9
) -> Prediction:
    """Time and energy of a step with their intervals; behind `GPUModel.predict`."""
    check_confidence(confidence)
    time = float(model.time(batch_size, power_limit))
    energy = float(model.energy(batch_size, power_limit))
    wide = [float(half) for half in model.spread(batch_size, power_limit, confidence)]
    return Prediction(
        time,
        energy,
        (time * math.exp(-wide[0]), time * math.exp(wide[0])),
        (energy * math.exp(-wide[1]), energy * math.exp(wide[1])),
        float(confidence),
    )


def conformal_quantile(
    residuals: np.ndarray, groups: int | None = None
) -> Callable[[float], float]:
    """The half-width that a part of the residuals does not exceed, as a function of that part.

    Args:
        residuals: signed or not, any scale; nan are left out.
        groups: number of batch sizes that were left out, if fewer than residuals: those of one
            batch size err together, so that they count as about two (on the
            public traces).

    Returns:
        From a confidence between 0 and 1 to the half-width. With fewer residuals than a
        confidence needs, the largest one grown as a normal tail grows; with none, that of a
        normal distribution with standard deviation 1.5.
    """
    sizes = np.sort(np.abs(residuals[np.isfinite(residuals)]))
    independent = max(min(2 * groups if groups else sizes.size, sizes.size), 1)

    def half_width(confidence: float) -> float:
        normal = float(ndtri(0.5 + confidence / 2))
        if sizes.size == 0:
            return 1.5 * normal
        rank = sizes.size * confidence * (1 + 1 / independent)
        if rank <= sizes.size:
            return float(sizes[math.ceil(rank) - 1])
        last = independent / (independent + 1)
        grown = max(normal / float(ndtri(0.5 + last / 2)), 1.0)
        return float(sizes[-1]) * grown * (1.0 if sizes.size >= _FEW else 1.2)

    return half_width


@dataclass(frozen=True)
class LeftOut:
    """What a model says about batch sizes that were left out of its trace; arrays by point.

    Attributes:
        batch_size: samples per step.
        power_limit: W.
        time: log(measured / predicted) of time.
        energy: log(measured / predicted) of energy.
    """

    batch_size: np.ndarray
    power_limit: np.ndarray
    time: np.ndarray
    energy: np.ndarray


def leave_out_residuals(trace: Trace, make: Callable[[Trace], GPUModel]) -> LeftOut:
    """Leave out each inner batch size in turn and predict it.

    Args:
        trace: the measurements.
        make: fits a model to a trace.

    Returns:
        The residuals of every prediction that could be made; none with fewer than 3 batch sizes.
    """
    rows = []
    for size in trace.batch_sizes[1:-1]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TraceWarning)
            try:
                model = make(subset(trace, trace.batch_size != size))
            except TraceError:
                continue
        for i in np.flatnonzero(trace.batch_size == size):
            limit = int(trace.power_limit[i])
            if limit not in model.power_limits:
                continue
            residuals = [
                # A parabola may predict nothing at all; that is as wrong as a factor of e^3.
                math.log(measured / max(float(predicted), measured * _LEAST_RATIO))
                for measured, predicted in (
                    (trace.time[i], model.time(int(size), limit)),
                    (trace.energy[i], model.energy(int(size), limit)),
                )
            ]
            rows.append((size, limit, *residuals))
    sizes, limits, times, energies = np.array(rows, dtype=float).reshape(-1, 4).T
    return LeftOut(sizes.astype(np.int64), limits.astype(np.int64), times, energies)


def typical_spread(
    trace: Trace, make: Callable[[Trace], GPUModel]
) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """Half-widths (log units) of time and energy as functions of the confidence.

    With fewer than 3 batch sizes there is nothing to leave out: then those of 10 % noise.
    """
    left = leave_out_residuals(trace, make)
    if not left.time.size:
        unknown = conformal_quantile(np.empty(0))
        return (lambda c: _UNKNOWN_NOISE * unknown(c),) * 2
    return conformal_quantile(left.time), conformal_quantile(left.energy)


def subset(trace: Trace, keep: np.ndarray) -> Trace:
    """Some records of a trace.

    Args:
        trace: the measurements.
        keep: a boolean per record, or indices.
    """
    indices = np.arange(len(trace))[keep]
    return replace(
        trace,
        batch_size=trace.batch_size[indices],
        power_limit=trace.power_limit[indices],
        time=trace.time[indices],
        energy=trace.energy[indices],
        steps=trace.steps[indices],
        extra=tuple(trace.extra[i] for i in indices) if trace.extra else (),
    )


def step_intervals(
    models: Sequence[GPUModel],
    shares: Sequence[int],
    power_limits: Sequence[int],
    *,
    wait_power: Sequence[float],
    sync_time: float = 0.0,
    confidence: float = 0.9,
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Intervals of the time and the energy of a synchronous global step.

    A step lasts as long as its slowest worker, so errors of several workers do not average out:
    the interval comes from draws of all workers' errors. Workers of one model with equal share and
    limit err alike; what lengthens a worker's time lengthens its energy too.

    Args:
        models: per worker, its GPU's model; one object for GPUs that are alike.
        shares: per worker, samples; 0 for none.
        power_limits: per worker, W.
        wait_power: per worker, W while it waits.
        sync_time: s per step for exchanging gradients.
        confidence: how often a measured step shall lie inside each interval.

    Returns:
        Lowest and highest plausible step time in s, and likewise energy in J.
    """
    check_confidence(confidence)
    rng = np.random.default_rng(0)
    normal = float(ndtri(0.5 + confidence / 2))
    alike: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}
    times, energies = [], []
    for model, share, limit in zip(models, shares, power_limits):
        key = (id(model), share, limit)
        if key not in alike:
            wide = [float(half) / normal for half in model.spread(share, limit, confidence)]
            error = wide[0] * rng.standard_normal(_DRAWS)
            rest = math.sqrt(max(wide[1] ** 2 - wide[0] ** 2, 0.0))
            alike[key] = (
                float(model.time(share, limit)) * np.exp(error),
                float(model.energy(share, limit))
                * np.exp(error + rest * rng.standard_normal(_DRAWS)),
            )
        times.append(alike[key][0])
        energies.append(alike[key][1])
    step_time = np.max(times, axis=0) + sync_time
    waiting = [w * (step_time - t) for w, t in zip(wait_power, times)]
    step_energy = np.sum(energies, axis=0) + np.sum(waiting, axis=0)
    ends = ((1 - confidence) / 2, (1 + confidence) / 2)
    low_time, high_time = (float(np.quantile(step_time, end)) for end in ends)
    low_energy, high_energy = (float(np.quantile(step_energy, end)) for end in ends)
    return (low_time, high_time), (low_energy, high_energy)


class Pessimistic(GPUModel):
    """A model that answers with times and energies that are exceeded with a small probability.

    An allocation found with it avoids points that are cheap only if the model is right.

    Args:
        model: the model to take the predictions and their spread from.
        risk: probability, between 0 and 0.5, that a measurement exceeds an answer; 0.5 changes
            nothing.
    """

    def __init__(self, model: GPUModel, risk: float) -> None:
        if not isinstance(risk, (int, float)) or not 0 < risk <= 0.5:
            raise AllocationError(
                f"risk is {risk!r}; expected a probability above 0 and at most 0.5, such as 0.05."
            )
        self.model = model
        self.risk = float(risk)
        self.name = model.name
        self.extrapolates = model.extrapolates
        self.trace = model.trace
        self.power_limits = model.power_limits

    def time(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:  # noqa: D102
        return self.model.time(batch_size, power_limit) * self._margin(batch_size, power_limit, 0)

    def energy(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:  # noqa: D102
        return self.model.energy(batch_size, power_limit) * self._margin(batch_size, power_limit, 1)

    def accumulation_steps(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:  # noqa: D102
        return self.model.accumulation_steps(batch_size, power_limit)

    def distance(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:  # noqa: D102
        return self.model.distance(batch_size, power_limit)

    def spread(  # noqa: D102
        self, batch_size: BatchSizes, power_limit: int, confidence: float = 0.9
    ) -> tuple[np.ndarray, np.ndarray]:
        return self.model.spread(batch_size, power_limit, confidence)

    def _margin(self, batch_size: BatchSizes, power_limit: int, figure: int) -> np.ndarray:
        if self.risk == 0.5:
            return np.ones(np.shape(batch_size))
        # An interval that holds 1 - 2 risk leaves risk on each side.
        return np.exp(self.model.spread(batch_size, power_limit, 1 - 2 * self.risk)[figure])


def pessimistic(model: GPUModel, risk: float | None) -> GPUModel:
    """The model itself without a risk (None), else its `Pessimistic` form."""
    return model if risk is None else Pessimistic(model, risk)
