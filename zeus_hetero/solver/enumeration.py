"""Exhaustive search: every share and power limit of every GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from zeus_hetero.errors import AllocationError
from zeus_hetero.solver.problem import Kind, Problem, Solution

MAX_OPTIONS = 2_000_000_000
_MAX_ARRAY = 1 << 25  # elements of one vectorised evaluation: 256 MiB of float64


def enumerate_all(problem: Problem) -> Solution | None:
    """The cheapest allocation, by evaluating all of them.

    The last two GPUs are searched as one array over all their options, the shares of the others
    in a loop around it.

    Args:
        problem: the options.

    Returns:
        The optimum, proven; None if every allocation is forbidden.

    Raises:
        AllocationError: more allocations than `MAX_OPTIONS`, or than fit in memory.
    """
    kinds = [problem.kinds[k] for k in problem.gpus]
    limits = math.prod(kind.cost.shape[0] for kind in kinds)
    splits = math.comb(problem.total + len(kinds) - 1, len(kinds) - 1)
    if limits * splits > MAX_OPTIONS or limits * (problem.total + 1) > _MAX_ARRAY:
        raise AllocationError(
            f"brute_force would have to evaluate {limits * splits:.3g} allocations "
            f"({splits:.3g} splits of {problem.total} over {len(kinds)} GPUs x {limits:.3g} "
            f"combinations of power limits); at most {MAX_OPTIONS:.3g} fit in time and memory. "
            "Use method='optimal', or a coarser granularity."
        )
    search = _Search(problem, kinds)
    search.place((), _Placed.none(len(problem.resources)))
    if search.shares is None:
        return None
    cost = problem.cost(search.shares, search.limits)
    return Solution(search.shares, search.limits, cost, lower_bound=cost)


@dataclass(frozen=True)
class _Placed:
    """GPUs with given shares, over all combinations of their power limits (one axis).

    Attributes:
        cost: sum of separable costs.
        time: of the slowest, s.
        price: cost per s of the slowest of all GPUs.
        usage: of each resource.
    """

    cost: np.ndarray
    time: np.ndarray
    price: np.ndarray
    usage: tuple[np.ndarray, ...]

    @classmethod
    def none(cls, resources: int) -> _Placed:
        return cls(np.zeros(1), np.zeros(1), np.zeros(1), (np.zeros(1),) * resources)

    def joined(self, other: _Placed) -> _Placed:
        """Both together: every combination of one with every combination of the other.

        The other may have a further axis, over shares.
        """
        mine = (slice(None), None) + (None,) * (other.cost.ndim - 1)
        return _Placed(
            _merge(self.cost[mine] + other.cost),
            _merge(np.maximum(self.time[mine], other.time)),
            _merge(self.price[mine] + other.price),
            tuple(_merge(a[mine] + b) for a, b in zip(self.usage, other.usage)),
        )


def _merge(table: np.ndarray) -> np.ndarray:
    """Make one axis of the first two."""
    return table.reshape(-1, *table.shape[2:])


class _Search:
    """The cheapest allocation so far, and the GPUs it is made of."""

    def __init__(self, problem: Problem, kinds: list[Kind]) -> None:
        self._problem = problem
        self._kinds = kinds
        self._shape = tuple(kind.cost.shape[0] for kind in kinds)
        self._cost = np.inf
        self.shares: tuple[int, ...] | None = None
        self.limits: tuple[int, ...] = ()

    def place(self, shares: tuple[int, ...], placed: _Placed) -> None:
        """Try all shares and limits of the GPUs that follow those placed."""
        rest = self._problem.total - sum(shares)
        left = self._kinds[len(shares) :]
        if len(left) == 1:
            if rest < left[0].cost.shape[1]:
                ours = np.array([rest])
                self._offer(shares, placed.joined(self._options(len(shares), ours)), ours)
        elif len(left) == 2:
            # Shares of the first of the two for which the second's is on its table as well.
            low = max(0, rest - left[1].cost.shape[1] + 1)
            ours = np.arange(low, min(rest, left[0].cost.shape[1] - 1) + 1)
            if len(ours):
                first = self._options(len(shares), ours)
                second = self._options(len(shares) + 1, rest - ours)
                self._offer(shares, placed.joined(_paired(first, second)), ours)
        else:
            for share in range(min(rest, left[0].cost.shape[1] - 1) + 1):
                option = self._options(len(shares), np.array([share]))
                if np.isfinite(option.cost).any():
                    flat = _Placed(
                        option.cost[:, 0],
                        option.time[:, 0],
                        option.price[:, 0],
                        tuple(usage[:, 0] for usage in option.usage),
                    )
                    self.place((*shares, share), placed.joined(flat))

    def _options(self, gpu: int, shares: np.ndarray) -> _Placed:
        """One GPU's options, shape (power limits, shares)."""
        kind = self._kinds[gpu]
        number = self._problem.gpus[gpu]
        wait_price = kind.wait_price * kind.has_work[shares]
        price = np.broadcast_to(wait_price, (len(kind.cost), len(shares)))
        usage = tuple(resource.usage[number][:, shares] for resource in self._problem.resources)
        return _Placed(kind.cost[:, shares], kind.time[:, shares], price, usage)

    def _offer(self, shares: tuple[int, ...], placed: _Placed, ours: np.ndarray) -> None:
        """Keep the cheapest of the allocations; their second axis is over shares of one GPU."""
        total = placed.cost + (self._problem.makespan_price + placed.price) * placed.time
        for resource, usage in zip(self._problem.resources, placed.usage):
            total = np.where(usage <= resource.capacity, total, np.inf)
        flat = int(total.argmin())
        if total.flat[flat] < self._cost:
            self._cost = float(total.flat[flat])
            combination, at = divmod(flat, total.shape[1])
            share = int(ours[at])
            last = self._problem.total - sum(shares) - share
            full = len(shares) + 1 == len(self._kinds)
            self.shares = (*shares, share) if full else (*shares, share, last)
            self.limits = tuple(int(i) for i in np.unravel_index(combination, self._shape))


def _paired(first: _Placed, second: _Placed) -> _Placed:
    """Two GPUs whose shares go together, element by element of the last axis."""
    return _Placed(
        _merge(first.cost[:, None] + second.cost[None]),
        _merge(np.maximum(first.time[:, None], second.time[None])),
        _merge(first.price[:, None] + second.price[None]),
        tuple(_merge(a[:, None] + b[None]) for a, b in zip(first.usage, second.usage)),
    )
