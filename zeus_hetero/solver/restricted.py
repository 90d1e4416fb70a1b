"""Problems in which something is decided already: shares, or the strongest GPU's power limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from zeus_hetero.solver.problem import Problem


def equal_shares(total: int, gpus: int) -> tuple[int, ...]:
    """Split a total evenly; the first GPUs get one more where it does not divide."""
    quotient, remainder = divmod(total, gpus)
    return tuple(quotient + (gpu < remainder) for gpu in range(gpus))


def with_shares(problem: Problem, shares: Sequence[int]) -> Problem | None:
    """The problem that is left when the shares are given: only power limits are open.

    Args:
        problem: the options.
        shares: units per GPU, in the order of `problem.gpus`.

    Returns:
        A problem with a kind per GPU, so that its solution keeps the order; None if a share is
        larger than a GPU's table.
    """
    if any(s >= problem.kinds[k].cost.shape[1] for k, s in zip(problem.gpus, shares)):
        return None
    kinds = []
    for k, share in zip(problem.gpus, shares):
        kind = problem.kinds[k]
        cost = np.full((kind.cost.shape[0], share + 1), np.inf)
        cost[:, share] = kind.cost[:, share]
        kinds.append(replace(kind, cost=cost, time=kind.time[:, : share + 1], count=1))
    resources = tuple(
        replace(r, usage=tuple(r.usage[k][:, : s + 1] for k, s in zip(problem.gpus, shares)))
        for r in problem.resources
    )
    return replace(problem, kinds=tuple(kinds), resources=resources)


def with_strongest_at_lowest_limit(problem: Problem) -> Problem:
    """The problem in which the first GPU has its lowest power limit, as in the original heuristic.

    Args:
        problem: the options; the first GPU of the first kind is the strongest, the last row of
            its tables its lowest power limit.

    Returns:
        A problem whose GPUs stand in the same order.
    """
    strongest, *others = problem.kinds
    cost = np.full_like(strongest.cost, np.inf)
    cost[-1] = strongest.cost[-1]
    alike = strongest.count - 1
    kinds = [replace(strongest, cost=cost, count=1)]
    if alike:
        kinds.append(replace(strongest, count=alike))
    resources = tuple(
        replace(r, usage=(r.usage[0],) * len(kinds) + r.usage[1:]) for r in problem.resources
    )
    return replace(problem, kinds=(*kinds, *others), resources=resources)
