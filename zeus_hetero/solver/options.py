"""The options of identical GPUs, sorted by time: what the exact search walks over."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from zeus_hetero.solver.problem import Kind


@dataclass(frozen=True)
class Options:
    """Undominated options of one kind of GPU, by ascending time.

    Attributes:
        share: units of each option.
        limit: index of its power limit.
        time: s, ascending.
        cost: separable cost.
        count: number of GPUs of this kind.
    """

    share: np.ndarray
    limit: np.ndarray
    time: np.ndarray
    cost: np.ndarray
    count: int

    @classmethod
    def of(cls, kind: Kind) -> Options:
        """Leave out options for which another of the same share is as fast and as cheap."""
        order = np.lexsort((kind.cost, kind.time), axis=0)
        cost = np.take_along_axis(kind.cost, order, axis=0)
        keep = np.isfinite(cost)
        keep[1:] &= cost[1:] < np.minimum.accumulate(cost, axis=0)[:-1]
        row, share = np.nonzero(keep)
        limit = order[row, share]
        time = kind.time[limit, share]
        by_time = np.argsort(time, kind="stable")
        return cls(
            share[by_time],
            limit[by_time],
            time[by_time],
            kind.cost[limit, share][by_time],
            kind.count,
        )

    def until(self, deadline: float) -> Options:
        """Those that take at most `deadline` s."""
        n = int(np.searchsorted(self.time, deadline, side="right"))
        return Options(self.share[:n], self.limit[:n], self.time[:n], self.cost[:n], self.count)

    def copies(self, count: int) -> Options:
        """The same options for another number of GPUs."""
        return replace(self, count=count)

    def __len__(self) -> int:
        return len(self.time)
