"""Solvers of the allocation problem: pure functions on arrays, free of GPUs and traces."""

from __future__ import annotations

from zeus_hetero.solver.enumeration import enumerate_all
from zeus_hetero.solver.fixed_shares import best_power_limits, equal_shares
from zeus_hetero.solver.heuristic import strongest_at_lowest_limit
from zeus_hetero.solver.optimal import solve
from zeus_hetero.solver.problem import Kind, Problem, Solution

__all__ = [
    "Kind",
    "Problem",
    "Solution",
    "best_power_limits",
    "enumerate_all",
    "equal_shares",
    "solve",
    "strongest_at_lowest_limit",
]
