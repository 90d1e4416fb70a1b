"""The allocation problem as arrays: what solvers take and return.

Choose for every GPU a share ``s`` and a power limit ``p`` so that the shares add up to ``total``
and ``sum cost[p, s] + makespan_price * max time[p, s]`` is least, within the capacity of every
resource.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Kind:
    """GPUs that are alike, and what each share and power limit costs on one of them.

    Attributes:
        cost: separable cost, shape (power limits, shares); inf where the option is forbidden.
            Column ``s`` is a share of ``s`` units.
        time: busy time in s, same shape; finite where `cost` is.
        count: number of GPUs of this kind.
        wait_price: cost per s of the slowest GPU's time for each GPU of this kind that has work:
            what it costs to have one in the job at all. For GPUs that are there anyway it is part
            of `Problem.makespan_price`.
        idle: whether column 0 means that the GPU has no work.
    """

    cost: np.ndarray
    time: np.ndarray
    count: int = 1
    wait_price: float = 0.0
    idle: bool = True

    @property
    def has_work(self) -> np.ndarray:
        """Per share, whether it is work at all."""
        return np.arange(self.cost.shape[1]) >= (1 if self.idle else 0)

    def within(self, max_time: float) -> Kind:
        """The same GPUs with every option forbidden that takes longer than `max_time` s."""
        if np.isinf(max_time):
            return self
        return replace(self, cost=np.where(self.time <= max_time, self.cost, np.inf))


@dataclass(frozen=True)
class Resource:
    """Something that options use and of which there is only so much, such as watts in a rack.

    Attributes:
        name: for messages.
        usage: per kind, what each option uses, shape (power limits, shares).
        capacity: what all GPUs together may use.
    """

    name: str
    usage: tuple[np.ndarray, ...]
    capacity: float


@dataclass(frozen=True)
class Problem:
    """One allocation problem.

    Attributes:
        kinds: the GPUs, alike ones together.
        total: units to share out; shares add up to it exactly.
        makespan_price: cost per s of the slowest GPU's time, at least 0.
        resources: what is scarce.
    """

    kinds: tuple[Kind, ...]
    total: int
    makespan_price: float
    resources: tuple[Resource, ...] = ()

    @property
    def gpus(self) -> list[int]:
        """The kind of each GPU; GPUs of one kind stand together."""
        return [k for k, kind in enumerate(self.kinds) for _ in range(kind.count)]

    @property
    def plain(self) -> bool:
        """Whether nothing is scarce and every GPU is in the job anyway."""
        return not self.resources and not any(kind.wait_price for kind in self.kinds)

    def cost(self, shares: Sequence[int], limits: Sequence[int]) -> float:
        """Cost of one allocation, given per GPU the share and the index of its power limit.

        Returns:
            The cost; inf if a resource does not suffice.
        """
        options = list(zip(self.gpus, limits, shares))
        for resource in self.resources:
            if sum(float(resource.usage[k][p, s]) for k, p, s in options) > resource.capacity:
                return float("inf")
        price = self.makespan_price + sum(
            self.kinds[k].wait_price for k, _, s in options if self.kinds[k].has_work[s]
        )
        separable = sum(float(self.kinds[k].cost[p, s]) for k, p, s in options)
        makespan = max(float(self.kinds[k].time[p, s]) for k, p, s in options)
        return separable + price * makespan

    def within(self, max_time: float) -> Problem:
        """The same problem with a deadline in s for the slowest GPU."""
        return replace(self, kinds=tuple(kind.within(max_time) for kind in self.kinds))


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
