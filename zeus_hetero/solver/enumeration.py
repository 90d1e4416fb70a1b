"""Exhaustive search: every share and power limit of every GPU."""

from __future__ import annotations

import math

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
    best = _Best(problem)
    _search(kinds, problem.total, (), np.zeros(1), np.zeros(1), best)
    if best.shares is None:
        return None
    cost = problem.cost(best.shares, best.limits)
    return Solution(best.shares, best.limits, cost, lower_bound=cost)


class _Best:
    """The cheapest allocation so far."""

    def __init__(self, problem: Problem) -> None:
        self.price = problem.makespan_price
        self.shape = tuple(problem.kinds[k].cost.shape[0] for k in problem.gpus)
        self.cost = np.inf
        self.shares: tuple[int, ...] | None = None
        self.limits: tuple[int, ...] = ()

    def offer(self, shares: tuple[int, ...], flat: int, cost: float) -> None:
        """Keep an allocation if it is cheaper; `flat` numbers its combination of limits."""
        if cost < self.cost:
            self.cost = cost
            self.shares = shares
            self.limits = tuple(int(i) for i in np.unravel_index(flat, self.shape))


def _search(
    kinds: list[Kind],
    rest: int,
    shares: tuple[int, ...],
    cost: np.ndarray,
    time: np.ndarray,
    best: _Best,
) -> None:
    """Place the GPUs after the first ``len(shares)``; arrays are over the placed GPUs' limits."""
    left = kinds[len(shares) :]
    if len(left) == 1:
        if rest < left[0].cost.shape[1]:
            c = cost[:, None] + left[0].cost[:, rest]
            t = np.maximum(time[:, None], left[0].time[:, rest])
            total = (c + best.price * t).ravel()
            flat = int(total.argmin())
            best.offer((*shares, rest), flat, float(total[flat]))
    elif len(left) == 2:
        first, second = left
        # Shares of the first of the two for which the second's share is on its table as well.
        low = max(0, rest - second.cost.shape[1] + 1)
        high = min(rest, first.cost.shape[1] - 1)
        if low > high:
            return
        ours = slice(low, high + 1)
        theirs = rest - np.arange(low, high + 1)
        c = (
            cost[:, None, None, None]
            + first.cost[None, :, None, ours]
            + second.cost[:, theirs][None, None]
        )
        t = np.maximum(first.time[:, None, ours], second.time[:, theirs][None])
        total = c + best.price * np.maximum(time[:, None, None, None], t[None])
        flat = int(total.argmin())
        limits, at = divmod(flat, high - low + 1)
        value = float(total.ravel()[flat])
        best.offer((*shares, low + at, rest - low - at), limits, value)
    else:
        for share in range(min(rest, left[0].cost.shape[1] - 1) + 1):
            c = (cost[:, None] + left[0].cost[:, share]).ravel()
            t = np.maximum(time[:, None], left[0].time[:, share]).ravel()
            if np.isfinite(c).any():
                _search(kinds, rest - share, (*shares, share), c, t, best)
