"""Power limits between the profiled ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

import numpy as np

from zeus_hetero.errors import AllocationError
from zeus_hetero.gpu_model import BatchSizes, GPUModel
from zeus_hetero.trace import Trace

PowerLimits = Union[None, str, int, Sequence[int]]


def resolve_power_limits(trace: Trace, power_limits: PowerLimits) -> tuple[int, ...]:
    """The power limits that a model of a trace shall answer for.

    Args:
        trace: the measurements.
        power_limits: None for the measured ones; "continuous" for every watt between the lowest
            and the highest measured one; a whole number for steps of so many W (the measured
            limits stay in); or the limits themselves, in W.

    Returns:
        W, descending; within the measured range.

    Raises:
        AllocationError: a limit outside the measured range, no whole number, or an unknown word.
    """
    measured = trace.power_limits
    if power_limits is None:
        return measured
    if isinstance(power_limits, str):
        if power_limits != "continuous":
            raise AllocationError(
                f"power_limits is {power_limits!r}; expected 'continuous', a step in W, or "
                "limits in W."
            )
        power_limits = 1
    lowest, highest = measured[-1], measured[0]
    if isinstance(power_limits, (int, np.integer)):
        if power_limits < 1:
            raise AllocationError(
                f"power_limits is {power_limits}; expected a step of at least 1 W."
            )
        return tuple(sorted({*range(lowest, highest + 1, int(power_limits)), *measured})[::-1])
    chosen = set()
    for limit in power_limits:
        if isinstance(limit, bool) or int(limit) != limit or not lowest <= limit <= highest:
            raise AllocationError(
                f"{trace.gpu or trace.source}: power limit {limit!r}; expected whole W between "
                f"{lowest} and {highest}, the measured range. Profile beyond it first."
            )
        chosen.add(int(limit))
    if not chosen:
        raise AllocationError("power_limits is empty; expected at least one limit in W.")
    return tuple(sorted(chosen)[::-1])


class BetweenLimits(GPUModel):
    """Any model, with more power limits: between two neighbours time and power change linearly.

    A share between two limits runs as more micro-batches where one of the neighbours needs them:
    both predictions are for shares that fit.

    Args:
        model: predicts the limits it knows.
        power_limits: see `resolve_power_limits`.
    """

    def __init__(self, model: GPUModel, power_limits: PowerLimits = "continuous") -> None:
        self.model = model
        self.name = model.name
        self.extrapolates = model.extrapolates
        self.trace = model.trace
        known = model.power_limits
        self.power_limits = tuple(
            p for p in resolve_power_limits(model.trace, power_limits) if known[-1] <= p <= known[0]
        )

    def time(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:  # noqa: D102
        below, above, part = self._neighbours(power_limit)
        low = self.model.time(batch_size, below)
        return low + part * (self.model.time(batch_size, above) - low)

    def energy(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:  # noqa: D102
        below, above, part = self._neighbours(power_limit)
        time = self.time(batch_size, power_limit)
        powers = [
            self.model.energy(batch_size, limit)
            / np.where(
                self.model.time(batch_size, limit) > 0, self.model.time(batch_size, limit), 1
            )
            for limit in (below, above)
        ]
        return time * (powers[0] + part * (powers[1] - powers[0]))

    def accumulation_steps(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:  # noqa: D102
        below, above, _ = self._neighbours(power_limit)
        return np.maximum(
            self.model.accumulation_steps(batch_size, below),
            self.model.accumulation_steps(batch_size, above),
        )

    def distance(self, batch_size: BatchSizes, power_limit: int) -> np.ndarray:  # noqa: D102
        below, above, _ = self._neighbours(power_limit)
        return np.maximum(
            self.model.distance(batch_size, below), self.model.distance(batch_size, above)
        )

    def spread(  # noqa: D102
        self, batch_size: BatchSizes, power_limit: int, confidence: float = 0.9
    ) -> tuple[np.ndarray, np.ndarray]:
        below, above, _ = self._neighbours(power_limit)
        low = self.model.spread(batch_size, below, confidence)
        high = self.model.spread(batch_size, above, confidence)
        return np.maximum(low[0], high[0]), np.maximum(low[1], high[1])

    def _neighbours(self, power_limit: int) -> tuple[int, int, float]:
        self._check_limit(power_limit)
        known = self.model.power_limits
        below = max(p for p in known if p <= power_limit)
        above = min(p for p in known if p >= power_limit)
        return below, above, (power_limit - below) / max(above - below, 1)
