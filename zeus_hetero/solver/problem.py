"""The allocation problem as arrays: what solvers take and return.

Choose for every GPU a share ``s`` and a power limit ``p`` so that the shares add up to ``total``
and ``sum cost[p, s] + makespan_price * max time[p, s]`` is least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Kind:
    """GPUs that are alike, and what each share and power limit costs on one of them.

    Attributes:
        cost: separable cost, shape (power limits, shares); inf where the option is forbidden.
            Column ``s`` is a share of ``s`` units.
        time: busy time in s, same shape; finite where `cost` is.
        count: number of GPUs of this kind.
    """

    cost: np.ndarray
    time: np.ndarray
    count: int = 1

    def within(self, max_time: float) -> Kind:
        """The same GPUs with every option forbidden that takes longer than `max_time` s."""
        if np.isinf(max_time):
            return self
        return Kind(np.where(self.time <= max_time, self.cost, np.inf), self.time, self.count)


@dataclass(frozen=True)
class Problem:
    """One allocation problem.

    Attributes:
        kinds: the GPUs, alike ones together.
        total: units to share out; shares add up to it exactly.
        makespan_price: cost per s of the slowest GPU's time, at least 0.
    """

    kinds: tuple[Kind, ...]
    total: int
    makespan_price: float

    @property
    def gpus(self) -> list[int]:
        """The kind of each GPU; GPUs of one kind stand together."""
        return [k for k, kind in enumerate(self.kinds) for _ in range(kind.count)]

    def cost(self, shares: Sequence[int], limits: Sequence[int]) -> float:
        """Cost of one allocation, given per GPU the share and the index of its power limit."""
        options = list(zip(self.gpus, limits, shares))
        separable = sum(float(self.kinds[k].cost[p, s]) for k, p, s in options)
        makespan = max(float(self.kinds[k].time[p, s]) for k, p, s in options)
        return separable + self.makespan_price * makespan

    def within(self, max_time: float) -> Problem:
        """The same problem with a deadline in s for the slowest GPU."""
        return Problem(
            tuple(kind.within(max_time) for kind in self.kinds), self.total, self.makespan_price
        )


@dataclass(frozen=True)
class Solution:
    """An allocation found by a solver.

    Attributes:
        shares: units per GPU, in the order of `Problem.gpus`.
        limits: index of the power limit per GPU.
        cost: its cost.
        lower_bound: no allocation of the problem costs less; -inf where nothing was proven.
    """

    shares: tuple[int, ...]
    limits: tuple[int, ...]
    cost: float
    lower_bound: float = -np.inf


def relative_slack(*magnitudes: float) -> float:
    """Difference below which two sums of costs of these magnitudes are equal but for rounding."""
    return 1e-12 * max(1e-300, *(abs(m) for m in magnitudes))
