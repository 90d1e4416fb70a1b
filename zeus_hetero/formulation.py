"""A case as arrays: from names, watts and samples to the problem that solvers take, and back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zeus_hetero.errors import AllocationError
from zeus_hetero.objective import Synchronous
from zeus_hetero.solver import Kind, Problem, Resource, Solution

if TYPE_CHECKING:
    from zeus_hetero.case import Case

_LARGE_TABLE = 50_000  # options; below, bounding the shares costs more than it saves
_MAX_TABLE = 10_000_000  # options; each takes some 60 bytes
PLACES = "max_gpus"


@dataclass(frozen=True)
class _Part:
    """Workers that are alike: the same GPU, in the same groups, with or without the remainder."""

    name: str
    workers: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True)
class Formulation:
    """One problem, and what its kinds stand for.

    Attributes:
        case: where it comes from.
        problem: in units of the case's granularity.
        parts: the workers of each kind.
    """

    case: Case
    problem: Problem
    parts: tuple[_Part, ...]

    def choice(self, solution: Solution) -> tuple[list[int], list[int]]:
        """Samples and power limit (W) of each worker in a solution."""
        shares = [0] * len(self.case.gpus)
        limits = [0] * len(self.case.gpus)
        found: list[list[tuple[int, int]]] = [[] for _ in self.parts]
        for k, units, limit in zip(self.problem.gpus, solution.shares, solution.limits):
            part = self.parts[k]
            share = units * self.case.granularity + part.offset
            found[k].append((share, self.case.models[part.name].power_limits[limit]))
        for part, pairs in zip(self.parts, found):
            # Which of several equal GPUs gets which share is arbitrary: largest first.
            for worker, (share, limit) in zip(part.workers, sorted(pairs, reverse=True)):
                shares[worker], limits[worker] = share, limit
        return shares, limits


def formulations(case: Case, deadline: float) -> Iterator[Formulation]:
    """The problems whose best solution is the case's: one per kind that can take the remainder.

    Args:
        case: the case.
        deadline: s that the slowest GPU may be busy.
    """
    units, remainder = divmod(case.global_batch_size, case.granularity)
    largest = _worthwhile_shares(case, deadline)
    parts = _alike(case)
    for holder in range(len(parts)) if remainder else [None]:
        split = list(parts)
        if holder is not None:
            first, *others = parts[holder].workers
            split[holder : holder + 1] = [
                _Part(parts[holder].name, (first,), remainder),
                *([_Part(parts[holder].name, tuple(others))] if others else []),
            ]
        _check_size(case, [min(units, _units(case, part, largest)) for part in split], split)
        tables = [
            case.tables(part.name, _shares(case, part, min(units, _units(case, part, largest))))
            for part in split
        ]
        kinds = tuple(
            Kind(
                cost=cost,
                time=time,
                count=len(part.workers),
                wait_price=_wait_price(case, part),
                idle=part.offset == 0,
            )
            for part, (time, cost) in zip(split, tables)
        )
        problem = Problem(
            kinds, units, case.objective.makespan_price, _resources(case, split, kinds)
        )
        yield Formulation(case, problem.within(deadline), tuple(split))


def _check_size(case: Case, units: Sequence[int], parts: Sequence[_Part]) -> None:
    options = sum(
        (n + 1) * len(case.models[part.name].power_limits) for n, part in zip(units, parts)
    )
    if options > _MAX_TABLE:
        coarser = case.granularity * math.ceil(options / _MAX_TABLE)
        raise AllocationError(
            f"{options:,} combinations of share and power limit are too many to search under these "
            f"constraints; at most {_MAX_TABLE:,} fit in memory. Use granularity={coarser} or more."
        )


def _alike(case: Case) -> list[_Part]:
    """Workers by GPU name, strongest first, and by the power budgets that they fall under."""
    parts: dict[tuple[int, tuple[bool, ...]], list[int]] = {}
    rank = {name: number for number, name in enumerate(case.models)}
    for worker, name in enumerate(case.gpus):
        groups = tuple(worker in budget.members for budget in case.constraints.budgets)
        parts.setdefault((rank[name], groups), []).append(worker)
    return [
        _Part(case.gpus[workers[0]], tuple(workers))
        for _, workers in sorted(parts.items(), key=lambda item: (item[0][0], item[1]))
    ]


def _shares(case: Case, part: _Part, units: int) -> np.ndarray:
    return case.granularity * np.arange(max(units, 0) + 1) + part.offset


def _units(case: Case, part: _Part, largest: Mapping[str, int]) -> int:
    return (largest[part.name] - part.offset) // case.granularity


def _wait_price(case: Case, part: _Part) -> float:
    if isinstance(case.objective, Synchronous) and case.objective.release_idle:
        return case.objective.presence_price(part.workers[0])
    return 0.0


def _resources(case: Case, parts: Sequence[_Part], kinds: Sequence[Kind]) -> tuple[Resource, ...]:
    resources = []
    for budget in case.constraints.budgets:
        usage = []
        for part, kind in zip(parts, kinds):
            limits = np.array(case.models[part.name].power_limits, dtype=float)[:, None]
            inside = part.workers[0] in budget.members
            usage.append(np.broadcast_to(limits * inside, kind.cost.shape))
        resources.append(Resource(budget.name, tuple(usage), budget.watts))
    if case.constraints.max_gpus is not None:
        work = tuple(np.broadcast_to(kind.has_work * 1.0, kind.cost.shape) for kind in kinds)
        resources.append(Resource(PLACES, work, case.constraints.max_gpus))
    return tuple(resources)


def _worthwhile_shares(case: Case, deadline: float) -> Mapping[str, int]:
    """The largest share per GPU name that an optimum can hold.

    A step costs at least `makespan_price` times its slowest GPU's time, so no GPU takes longer
    than what a sensible allocation costs. For fleets this keeps the tables as short as the shares
    are, instead of as long as the global batch.
    """
    most = case.constraints.max_share
    size = case.global_batch_size * sum(len(m.power_limits) for m in case.models.values())
    if size < _LARGE_TABLE or any(m.extrapolates for m in case.models.values()):
        return most
    rates = {name: _least_rates(case, name) for name in case.models}
    longest = deadline
    known = _sensible_cost(case, rates)
    if case.objective.makespan_price > 0 and known is not None:
        # What the GPUs can at most save by computing instead of waiting.
        saved = case.global_batch_size * min(0.0, *(cost for _, cost in rates.values()))
        longest = min(longest, (known - saved) / case.objective.makespan_price)
    if not math.isfinite(longest):
        return most
    return {
        name: min(most[name], math.ceil(longest / time) + 1) for name, (time, _) in rates.items()
    }


def _least_rates(case: Case, name: str) -> tuple[float, float]:
    """The least time (s) and separable cost of a sample on a GPU, over all shares and limits.

    Up to twice the largest measured batch all shares are tried; beyond, micro-batches have sizes
    that occurred there.
    """
    shares = np.arange(1, 2 * case.models[name].trace.batch_sizes[-1] + 1)
    time, cost = case.tables(name, shares, constrained=False)
    return float((time / shares).min()), float((cost / shares).min())


def _sensible_cost(case: Case, rates: Mapping[str, tuple[float, float]]) -> float | None:
    """Cost of shares in proportion to speed; None if that is not allowed.

    At maximum power, or where there are power budgets, at the lowest limits, which are the first
    to keep to them.
    """
    constraints = case.constraints
    if case.granularity > 1 or constraints.max_gpus is not None:
        return None
    speed = np.array([1 / rates[name][0] for name in case.gpus])
    shares = np.floor(case.global_batch_size * speed / speed.sum()).astype(int)
    shares[: case.global_batch_size - shares.sum()] += 1
    at = -1 if constraints.budgets else 0
    limits = [case.models[name].power_limits[at] for name in case.gpus]
    if any(sum(limits[i] for i in b.members) > b.watts for b in constraints.budgets):
        return None
    plan = case.judge(shares.tolist(), limits)
    if plan.step_time > constraints.deadline or any(
        not constraints.allows(name, np.array([share]))[0] for name, share in zip(case.gpus, shares)
    ):
        return None
    return plan.cost - case.objective.constant
