"""Solvers of the allocation problem: pure functions on arrays, free of GPUs and traces."""

from __future__ import annotations

from zeus_hetero.solver.enumeration import enumerate_all
from zeus_hetero.solver.optimal import solve
from zeus_hetero.solver.problem import Kind, Problem, Resource, Solution
from zeus_hetero.solver.restricted import (
    equal_shares,
    with_shares,
    with_strongest_at_lowest_limit,
)

__all__ = [
    "Kind",
    "Problem",
    "Resource",
    "Solution",
    "enumerate_all",
    "equal_shares",
    "solve",
    "with_shares",
    "with_strongest_at_lowest_limit",
]
