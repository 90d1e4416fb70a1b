"""The options of identical GPUs, sorted by time: what the exact search walks over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from zeus_hetero.solver.problem import Kind


@dataclass(frozen=True)
class Options:
    """The options worth considering of one kind of GPU, by ascending time.

    Attributes:
        share: units of each option.
        limit: index of its power limit.
        time: s, ascending.
        cost: separable cost.
        usage: of each resource, shape (resources, options).
        wait_price: cost per s of the slowest GPU's time; 0 for options without work.
        count: number of GPUs of this kind.
    """

    share: np.ndarray
    limit: np.ndarray
    time: np.ndarray
    cost: np.ndarray
    usage: np.ndarray
    wait_price: np.ndarray
    count: int

    @classmethod
    def of(cls, kind: Kind, usage: Sequence[np.ndarray] = ()) -> Options:
        """Leave out options for which another of the same share is as fast and as cheap.

        Args:
            kind: the GPUs.
            usage: per resource what each option uses; with any, all options are kept, since a
                slower and dearer one may use less.
        """
        order = np.lexsort((kind.cost, kind.time), axis=0)
        cost = np.take_along_axis(kind.cost, order, axis=0)
        keep = np.isfinite(cost)
        if not usage:
            keep[1:] &= cost[1:] < np.minimum.accumulate(cost, axis=0)[:-1]
        row, share = np.nonzero(keep)
        limit = order[row, share]
        by_time = np.argsort(kind.time[limit, share], kind="stable")
        share, limit = share[by_time], limit[by_time]
        return cls(
            share=share,
            limit=limit,
            time=kind.time[limit, share],
            cost=kind.cost[limit, share],
            usage=np.array([u[limit, share] for u in usage]).reshape(len(usage), len(share)),
            wait_price=kind.wait_price * kind.has_work[share],
            count=kind.count,
        )

    def until(self, deadline: float) -> Options:
        """Those that take at most `deadline` s."""
        n = int(np.searchsorted(self.time, deadline, side="right"))
        return Options(
            self.share[:n],
            self.limit[:n],
            self.time[:n],
            self.cost[:n],
            self.usage[:, :n],
            self.wait_price[:n],
            self.count,
        )

    def charged(self, time: float, penalties: np.ndarray) -> Options:
        """The same options with waiting for `time` s and the use of resources in their cost.

        Args:
            time: s.
            penalties: cost per unit of each resource.
        """
        return replace(self, cost=self.cost + self.wait_price * time + penalties @ self.usage)

    def copies(self, count: int) -> Options:
        """The same options for another number of GPUs."""
        return replace(self, count=count)

    def __len__(self) -> int:
        return len(self.time)
