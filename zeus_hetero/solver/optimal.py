"""The proven optimum of an allocation problem.

For a fixed slowest time ``T`` the problem is separable: ``f(T)`` is the least sum of costs over
options that take at most ``T`` with shares adding up to the total. The optimum is the least
``f(T) + makespan_price * T`` over the times that options have. Three facts make that quick:

1. At a price ``λ`` of a unit the relaxation bounds ``f(T)`` from below. With options sorted by
   time, one running minimum gives the bound for *all* ``T`` at once, so that a handful of prices
   rules out nearly every ``T``.
2. An option is in the optimum only if its reduced cost (what it costs above the cheapest option
   at price ``λ``) is at most the distance between the best known cost and the bound. The options
   left are a core so small that dynamic programming over it is exact and quick.
3. ``f`` falls as ``T`` grows: its value at one ``T`` bounds it for all smaller ones.

Source: Lagrangian relaxation with reduced-cost fixing and a core, as for knapsack problems
(Martello and Toth, "Knapsack Problems", 1990; Pisinger, "A minimal algorithm for the
multiple-choice knapsack problem", 1995), here with a bottleneck term.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zeus_hetero.solver.core import CoreSolution, cheapest
from zeus_hetero.solver.options import Options
from zeus_hetero.solver.problem import Problem, Solution, relative_slack
from zeus_hetero.solver.relaxation import Relaxation, relax

# With more GPUs the dynamic program places most of them where the relaxation does.
_EXACT_GPUS = 64
_FREE_COPIES = 2


def solve(problem: Problem, gap: float = 0.0) -> Solution | None:
    """Find the cheapest allocation and prove it.

    Args:
        problem: any cost and time tables, monotone or not, with ties and forbidden options.
        gap: stop when the cost is proven to be within this relative distance of the optimum;
            0 proves the optimum itself, up to the rounding of sums in float64.

    Returns:
        The allocation with its lower bound; None if every allocation is forbidden.
    """
    options = [Options.of(kind) for kind in problem.kinds]
    search = _Search(problem, options, gap)
    search.run()
    return search.best


class _Search:
    """The best allocation so far, and the times that may still lead to a better one.

    A candidate is an option as the slowest of an allocation; its bound is on the cost of all
    allocations of which that is true.

    Attributes:
        best: the best allocation so far.
        upper: its cost.
        time: s, of the candidates left, ascending.
        bound: their bounds.
    """

    def __init__(self, problem: Problem, options: list[Options], gap: float) -> None:
        self.problem = problem
        self.options = options
        self.gap = gap
        self.best: Solution | None = None
        self.upper = np.inf
        self._floor = np.inf  # least bound of a candidate that was given up
        self._guess = 0.0
        kind = np.concatenate([np.full(len(o), k) for k, o in enumerate(options)])
        row = np.concatenate([np.arange(len(o)) for o in options])
        time = np.concatenate([o.time for o in options])
        order = np.argsort(time, kind="stable")
        self._kind, self._row, self.time = kind[order], row[order], time[order]
        self.bound = np.full(len(time), -np.inf)
        # Per kind, the number of options that are no slower than each candidate.
        self._fast = [np.searchsorted(o.time, self.time, side="right") for o in options]
        self._drop_unreachable()

    def run(self) -> None:
        """Improve the best allocation and the bounds until they meet."""
        improving = True
        sharpened = np.nan
        while len(self.time):
            # Most promising first finds good allocations. When that no longer helps, slowest
            # first proves fastest, since f(T) bounds f at all smaller T.
            at = int(self.bound.argmin()) if improving else len(self.time) - 1
            deadline = float(self.time[at])
            allowed = [o.until(deadline) for o in self.options]
            relaxation = relax(allowed, self.problem.total, self._guess)
            if relaxation is None:
                self._keep(self.time > deadline)
                continue
            if sharpened != deadline:
                sharpened = deadline
                self._sharpen(relaxation.price)
                continue
            before = self.upper
            self._settle(deadline, allowed, relaxation)
            improving = self.upper < before
        if self.best is not None:
            slack = relative_slack(self._scale())
            proven = self.upper if self._floor >= self.upper - slack else self._floor
            self.best = Solution(
                self.best.shares, self.best.limits, self.upper, min(proven, self.upper)
            )

    def _drop_unreachable(self) -> None:
        """Drop times within which all GPUs together cannot take the total, or must take more."""
        most = np.zeros(len(self.time))
        least = np.zeros(len(self.time))
        for option, fast in zip(self.options, self._fast):
            largest = np.concatenate([[-np.inf], np.maximum.accumulate(option.share)])
            smallest = np.concatenate([[np.inf], np.minimum.accumulate(option.share)])
            most += option.count * largest[fast]
            least += option.count * smallest[fast]
        self._keep((most >= self.problem.total) & (least <= self.problem.total))

    def _keep(self, alive: np.ndarray) -> None:
        if not alive.all():
            self.time, self.bound = self.time[alive], self.bound[alive]
            self._kind, self._row = self._kind[alive], self._row[alive]
            self._fast = [fast[alive] for fast in self._fast]

    def _prune(self) -> None:
        """Give up the candidates that lead to nothing cheaper than the best known."""
        worthwhile = self.upper
        if np.isfinite(self.upper):
            worthwhile -= max(relative_slack(self._scale()), self.gap * abs(self.upper))
        alive = self.bound < worthwhile
        if not alive.all():
            self._floor = min(self._floor, float(self.bound[~alive].min()))
            self._keep(alive)

    def _scale(self) -> float:
        """Size of the terms that add up to a cost, which sets its rounding."""
        slowest = max(float(o.time[-1]) for o in self.options)
        return self.problem.makespan_price * slowest + sum(
            o.count * float(np.abs(o.cost).max()) for o in self.options
        )

    def _sharpen(self, price: float) -> None:
        """Raise the bounds of all candidates by one price of a unit."""
        self._guess = price
        bound = self.problem.makespan_price * self.time + price * self.problem.total
        for k, (option, fast) in enumerate(zip(self.options, self._fast)):
            reduced = option.cost - price * option.share
            least = np.minimum.accumulate(reduced)[fast - 1]
            bound += option.count * least
            # One GPU of the candidate's own kind has exactly that option.
            ours = self._kind == k
            bound[ours] += reduced[self._row[ours]] - least[ours]
        np.maximum(self.bound, bound, out=self.bound)
        self._prune()

    def _settle(self, deadline: float, allowed: list[Options], relaxation: Relaxation) -> None:
        """Compute f at a deadline, or show that it is too high to matter."""
        price = self.problem.makespan_price
        room = self.upper - price * deadline - relaxation.value
        # Twice the room also settles the candidates that are a little faster.
        threshold = 2 * room if price > 0 else room
        exact = sum(o.count for o in allowed) <= _EXACT_GPUS
        if exact:
            found = cheapest(allowed, self.problem.total, relaxation.price, threshold)
        else:
            found = _mostly_relaxed(allowed, self.problem.total, relaxation)
        if found is not None:
            self._offer(allowed, found.rows)
        if exact:
            least = relaxation.value + (threshold if found is None else found.excess)
            settled = self.time <= deadline
            bound = price * self.time[settled] + least
            self.bound[settled] = np.maximum(self.bound[settled], bound)
        else:
            self._floor = min(self._floor, float(self.bound[self.time == deadline].min()))
            self._keep(self.time != deadline)
        self._prune()

    def _offer(self, allowed: Sequence[Options], rows: Sequence[Sequence[int]]) -> None:
        shares = tuple(int(o.share[r]) for o, rs in zip(allowed, rows) for r in rs)
        limits = tuple(int(o.limit[r]) for o, rs in zip(allowed, rows) for r in rs)
        cost = self.problem.cost(shares, limits)
        if cost < self.upper:
            self.upper = cost
            self.best = Solution(shares, limits, cost)


def _mostly_relaxed(
    options: Sequence[Options], total: int, relaxation: Relaxation
) -> CoreSolution | None:
    """A choice close to the relaxed one: all but a few GPUs have their option on its hull.

    With many GPUs of a kind the relaxed solution gives nearly all of them one of two options;
    the few others make the shares add up.
    """
    rest = total
    fixed: list[list[int]] = []
    free: list[Options] = []
    for option, low in zip(options, relaxation.low):
        copies = min(option.count, _FREE_COPIES)
        fixed.append([low] * (option.count - copies))
        rest -= int(option.share[low]) * (option.count - copies)
        free.append(option.copies(copies))
    for option, rows, low, high in zip(options, fixed, relaxation.low, relaxation.high):
        step = int(option.share[high] - option.share[low])
        if step > 0:
            raised = max(0, min(len(rows), (rest - _spread(free, relaxation)) // step))
            rows[:raised] = [high] * raised
            rest -= step * raised
    found = cheapest(free, rest, relaxation.price, np.inf)
    if found is None:
        return None
    chosen = tuple((*f, *r) for f, r in zip(fixed, found.rows))
    return CoreSolution(found.excess, chosen)


def _spread(free: Sequence[Options], relaxation: Relaxation) -> int:
    """Units that the free GPUs take at their lower hull options."""
    return sum(o.count * int(o.share[r]) for o, r in zip(free, relaxation.low))
