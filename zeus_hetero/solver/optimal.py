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

from zeus_hetero.solver.constrained import Pricing, cheapest_within_capacity
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
    search = (_Search if problem.plain else _ConstrainedSearch)(problem, gap)
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

    def __init__(self, problem: Problem, gap: float) -> None:
        self.problem = problem
        self.options = [
            Options.of(kind, [resource.usage[k] for resource in problem.resources])
            for k, kind in enumerate(problem.kinds)
        ]
        self.gap = gap
        self.best: Solution | None = None
        self.upper = np.inf
        self._floor = np.inf  # least bound of a candidate that was given up
        self._guess = 0.0
        self._only_time = problem.makespan_price > 0 and not any(
            o.cost.any() or o.wait_price.any() for o in self.options
        )
        kind = np.concatenate([np.full(len(o), k) for k, o in enumerate(self.options)])
        row = np.concatenate([np.arange(len(o)) for o in self.options])
        time = np.concatenate([o.time for o in self.options])
        order = np.argsort(time, kind="stable")
        self._kind, self._row, self.time = kind[order], row[order], time[order]
        self.bound = np.full(len(time), -np.inf)
        # Per kind, the number of options that are no slower than each candidate.
        self._fast = [np.searchsorted(o.time, self.time, side="right") for o in self.options]
        self._drop_unreachable()

    def run(self) -> None:
        """Improve the best allocation and the bounds until they meet."""
        improving = True
        sharpened = np.nan
        while len(self.time):
            # Most promising first finds good allocations. When that no longer helps, slowest
            # first proves fastest, since what is settled at one T bounds what smaller ones give.
            at = len(self.time) - 1
            if self._only_time:
                at //= 2  # what is possible within T is possible within more: bisection
            elif improving and np.isfinite(self.bound[-1]):
                at = int(self.bound.argmin())
            deadline = float(self.time[at])
            allowed = [o.until(deadline) for o in self.options]
            prices = self._relax(allowed, deadline)
            if prices is None:
                self._drop_infeasible(at)
                continue
            if sharpened != deadline:
                sharpened = deadline
                self._sharpen(prices)
                continue
            before = self.upper
            self._settle(deadline, allowed, prices)
            improving = self.upper < before
        if self.best is not None:
            slack = relative_slack(self._scale())
            proven = self.upper if self._floor >= self.upper - slack else self._floor
            self.best = Solution(
                self.best.shares, self.best.limits, self.upper, min(proven, self.upper)
            )

    def _drop_infeasible(self, at: int) -> None:
        """Drop all times that are too short, given one of them, by bisection."""
        too_short, enough = at, len(self.time)
        while enough - too_short > 1:
            middle = (too_short + enough) // 2
            deadline = float(self.time[middle])
            allowed = [o.until(deadline) for o in self.options]
            if self._relax(allowed, deadline) is None:
                too_short = middle
            else:
                enough = middle
        self._keep(self.time > self.time[too_short])

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
        price = self.problem.makespan_price + sum(
            kind.count * kind.wait_price for kind in self.problem.kinds
        )
        return price * slowest + sum(o.count * float(np.abs(o.cost).max()) for o in self.options)

    def _relax(self, allowed: list[Options], deadline: float) -> Relaxation | None:
        del deadline
        return relax(allowed, self.problem.total, self._guess)

    def _sharpen(self, prices: Relaxation) -> None:
        """Raise the bounds of all candidates by the prices that are best for one of them."""
        self._guess = prices.price
        bound = self.problem.makespan_price * self.time + prices.price * self.problem.total
        bound -= float(prices.penalties @ self._capacities)
        for k, option in enumerate(self.options):
            reduced = option.cost + prices.penalties @ option.usage - prices.price * option.share
            least = self._least(k, reduced)
            bound += option.count * least
            # One GPU of the candidate's own kind has exactly that option.
            ours = self._kind == k
            rows = self._row[ours]
            waiting = option.wait_price[rows] * self.time[ours]
            bound[ours] += reduced[rows] + waiting - least[ours]
        np.maximum(self.bound, bound, out=self.bound)
        self._prune()

    @property
    def _capacities(self) -> np.ndarray:
        return np.array([resource.capacity for resource in self.problem.resources], dtype=float)

    def _least(self, k: int, reduced: np.ndarray) -> np.ndarray:
        """Per candidate, the least reduced cost of a GPU of one kind that is no slower."""
        last = self._fast[k] - 1
        wait_price = self.problem.kinds[k].wait_price
        if not wait_price:
            return np.minimum.accumulate(reduced)[last]
        works = self.options[k].wait_price > 0
        busy = np.minimum.accumulate(np.where(works, reduced, np.inf))[last]
        idle = np.minimum.accumulate(np.where(works, np.inf, reduced))[last]
        return np.minimum(busy + wait_price * self.time, idle)

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
            self._close(deadline)
        else:
            self._floor = min(self._floor, float(self.bound[self.time == deadline].min()))
            self._keep(self.time != deadline)
        self._prune()

    def _close(self, deadline: float) -> None:
        """Note that a deadline was solved exactly, so that nothing cheaper is slowest at it.

        Its bound says so too, but for the rounding of sums, which must not let it come up again.
        """
        here = self.time == deadline
        self.bound[here] = np.maximum(self.bound[here], self.upper)

    def _offer(self, allowed: Sequence[Options], rows: Sequence[Sequence[int]]) -> None:
        shares = tuple(int(o.share[r]) for o, rs in zip(allowed, rows) for r in rs)
        limits = tuple(int(o.limit[r]) for o, rs in zip(allowed, rows) for r in rs)
        cost = self.problem.cost(shares, limits)
        if cost < self.upper:
            self.upper = cost
            self.best = Solution(shares, limits, cost)


class _ConstrainedSearch(_Search):
    """The same search with scarce resources, or with GPUs that cost only if they have work."""

    def __init__(self, problem: Problem, gap: float) -> None:
        super().__init__(problem, gap)
        self._pricing = Pricing(self._capacities, problem.total)
        self._settled = np.nan

    def _relax(self, allowed: list[Options], deadline: float) -> Relaxation | None:
        none = np.zeros(len(self._capacities))
        charged = [o.charged(deadline, none) for o in allowed]
        return self._pricing.relax(charged)

    def _settle(self, deadline: float, allowed: list[Options], relaxation: Relaxation) -> None:
        """Find the cheapest allocation in an interval of times that ends at a deadline.

        Waiting is charged for the start of the interval, so that the cost found bounds that of
        all allocations whose slowest time lies in it.
        """
        room = self.upper - self._bound_at(deadline, allowed, relaxation)
        slope = self.problem.makespan_price + sum(
            kind.count * kind.wait_price for kind in self.problem.kinds
        )
        start = deadline
        if deadline != self._settled and np.isfinite(room) and slope > 0:
            start = max(0.0, deadline - room / slope)
        self._settled = deadline
        bound = self._bound_at(start, allowed, relaxation)
        threshold = self.upper - bound
        found = cheapest_within_capacity(
            [o.charged(start, relaxation.penalties) for o in allowed],
            self.problem.total,
            relaxation,
            self._capacities,
            threshold,
        )
        if found is not None:
            self._offer(allowed, found.rows)
        least = bound + (threshold if found is None else found.excess)
        settled = self.time <= deadline
        # Before the interval waiting costs at most so much less.
        earlier = slope * np.maximum(0.0, start - self.time[settled])
        self.bound[settled] = np.maximum(self.bound[settled], least - earlier)
        if start == deadline:
            self._close(deadline)
        self._prune()

    def _bound_at(self, time: float, allowed: list[Options], relaxation: Relaxation) -> float:
        """Bound of the cost if the slowest GPU takes `time`, for the options that are allowed."""
        charged = [o.charged(time, relaxation.penalties) for o in allowed]
        return (
            self.problem.makespan_price * time
            + relaxation.price * self.problem.total
            - float(relaxation.penalties @ self._capacities)
            + sum(o.count * float((o.cost - relaxation.price * o.share).min()) for o in charged)
        )


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
