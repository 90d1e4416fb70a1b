"""The original system's shortcut: fix the strongest GPU's power limit, search the rest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from zeus_hetero.solver.optimal import solve
from zeus_hetero.solver.problem import Problem, Solution


def strongest_at_lowest_limit(problem: Problem) -> Solution | None:
    """The best allocation in which the first GPU has its lowest power limit.

    Args:
        problem: the options; the first GPU of the first kind is the strongest, the last row of
            its tables its lowest power limit.

    Returns:
        The allocation, without a lower bound: the limit was not chosen for its cost. None if
        every such allocation is forbidden.
    """
    strongest, *others = problem.kinds
    cost = np.full_like(strongest.cost, np.inf)
    cost[-1] = strongest.cost[-1]
    kinds = [replace(strongest, cost=cost, count=1)]
    if strongest.count > 1:
        kinds.append(replace(strongest, count=strongest.count - 1))
    solution = solve(replace(problem, kinds=(*kinds, *others)))
    return solution and replace(solution, lower_bound=-np.inf)
