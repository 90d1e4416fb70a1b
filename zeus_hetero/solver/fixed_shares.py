"""Power limits for given shares: the part of the problem that the baseline has left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zeus_hetero.solver.problem import Problem, Solution


def equal_shares(total: int, gpus: int) -> tuple[int, ...]:
    """Split a total evenly; the first GPUs get one more where it does not divide."""
    quotient, remainder = divmod(total, gpus)
    return tuple(quotient + (gpu < remainder) for gpu in range(gpus))


def best_power_limits(problem: Problem, shares: Sequence[int]) -> Solution | None:
    """The cheapest power limits for fixed shares, by trying every possible slowest time.

    Once the slowest GPU's time is fixed, each GPU takes its cheapest limit that is fast enough;
    that time is one of the at most GPUs x limits times that occur.

    Args:
        problem: the options.
        shares: units per GPU, in the order of `problem.gpus`.

    Returns:
        The best allocation with these shares, or None if they are forbidden.
    """
    if any(s >= problem.kinds[k].cost.shape[1] for k, s in zip(problem.gpus, shares)):
        return None
    costs = [problem.kinds[k].cost[:, s] for k, s in zip(problem.gpus, shares)]
    times = [problem.kinds[k].time[:, s] for k, s in zip(problem.gpus, shares)]
    deadlines = np.unique(np.concatenate([t[np.isfinite(c)] for c, t in zip(costs, times)]))
    best: tuple[float, tuple[int, ...]] | None = None
    # Columns are deadlines; per GPU and deadline the cheapest limit that meets it.
    within = [np.where(t[:, None] <= deadlines, c[:, None], np.inf) for c, t in zip(costs, times)]
    if deadlines.size:
        choices = np.array([w.argmin(axis=0) for w in within])
        totals = sum(w.min(axis=0) for w in within) + problem.makespan_price * deadlines
        at = int(np.argmin(totals))
        if np.isfinite(totals[at]):
            best = (float(totals[at]), tuple(int(c) for c in choices[:, at]))
    if best is None:
        return None
    return Solution(tuple(int(s) for s in shares), best[1], problem.cost(shares, best[1]))
