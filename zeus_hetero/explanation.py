"""Why an allocation looks as it does: pace, slack, and the price of one unit more of everything."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from zeus_hetero.allocation import Allocation, Worker
from zeus_hetero.allocator import METHODS, slowed
from zeus_hetero.case import Case
from zeus_hetero.errors import AllocationError, InfeasibleError
from zeus_hetero.trace import TraceSource

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

# A worker that waits no longer than this part of a step sets the pace as well.
_PACE = 1e-6


@dataclass(frozen=True)
class WorkerSensitivity:
    """How one worker bears on the cost.

    Attributes:
        gpu: its GPU name.
        sets_pace: whether the step lasts as long as it does because of this worker.
        slack: s that it waits in each step for the slowest.
        spare_samples: samples that it could take in addition, at its power limit, without making
            the step longer.
        next_sample_cost: what a step costs more if this worker alone takes one more sample (the
            global batch grows by one), at its best power limit for that; inf where a constraint
            forbids it.
    """

    gpu: str
    sets_pace: bool
    slack: float
    spare_samples: int
    next_sample_cost: float


@dataclass(frozen=True)
class ConstraintSensitivity:
    """What a constraint does to the optimum.

    Attributes:
        name: of the constraint.
        value: what was asked for.
        used: how much of it the allocation uses.
        unit: what relaxing it by one unit means.
        saving: what the optimum costs less if it is relaxed by one unit, however good the explained
            allocation is; 0 where it does not bind.
    """

    name: str
    value: float
    used: float
    unit: str
    saving: float

    @property
    def binds(self) -> bool:
        """Whether relaxing it by one unit saves anything."""
        return self.saving > 0


@dataclass(frozen=True)
class Explanation:
    """Why an allocation looks as it does.

    Attributes:
        workers: one entry per worker.
        constraints: one entry per constraint that was given.
        next_sample_cost: what the optimum costs more for a global batch of one sample more.
        next_sample_gpu: the worker for which one more sample is cheapest; None if the constraints
            let none take it alone.
        cost_unit: unit of all costs.
    """

    workers: tuple[WorkerSensitivity, ...]
    constraints: tuple[ConstraintSensitivity, ...]
    next_sample_cost: float
    next_sample_gpu: int | None
    cost_unit: str

    @property
    def pace_setters(self) -> tuple[int, ...]:
        """The workers that set the pace."""
        return tuple(rank for rank, worker in enumerate(self.workers) if worker.sets_pace)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(width=110, file=text).print(self)
        return text.getvalue().rstrip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw workers as a table and constraints as sentences."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title="What each GPU does to the step", title_justify="left")
        table.add_column("GPU")
        table.add_column("sets the pace")
        table.add_column("slack (s)", justify="right")
        table.add_column("samples to spare", justify="right")
        table.add_column(f"one sample more ({self.cost_unit})", justify="right")
        for worker in self.workers:
            table.add_row(
                worker.gpu,
                "yes" if worker.sets_pace else "",
                f"{worker.slack:.3g}",
                str(worker.spare_samples),
                f"{worker.next_sample_cost:.4g}"
                if math.isfinite(worker.next_sample_cost)
                else "not allowed",
            )
        yield table
        more = (
            f"costs {self.next_sample_cost:.4g} {self.cost_unit}"
            if math.isfinite(self.next_sample_cost)
            else "is not possible under the constraints"
        )
        yield f"A global batch of one sample more {more}."
        for constraint in self.constraints:
            effect = (
                f"{constraint.unit} saves {constraint.saving:.4g} {self.cost_unit}"
                if constraint.binds
                else f"does not bind, {constraint.unit} saves nothing"
            )
            yield Text(
                f"{constraint.name} {constraint.value:g} (used: {constraint.used:.6g}): {effect}."
            )


def explain(
    traces: Mapping[str, TraceSource],
    allocation: Allocation,
    *,
    max_slowdown: float | None = None,
    **options: Any,
) -> Explanation:
    """Say what sets an allocation's cost and what a little more of everything would be worth.

    Args:
        traces: as they were given to `allocate`.
        allocation: its result.
        max_slowdown: as it was given to `allocate`, if it was.
        **options: further arguments that `allocate` was given, but for `method`, `gap` and
            `confidence`.

    Returns:
        The explanation. Each figure comes from evaluating or solving the changed case, not from a
        linearisation.

    Raises:
        AllocationError: the allocation is not of these GPUs.
    """

    def case_of(batch: int, slowdown: float | None = max_slowdown, **changes: Any) -> Case:
        return slowed(Case.of(traces, batch, **{**options, **changes}), slowdown)

    batch = allocation.global_batch_size
    case = case_of(batch)
    if tuple(worker.gpu for worker in allocation.workers) != case.gpus:
        raise AllocationError(
            f"the allocation is for {', '.join(w.gpu for w in allocation.workers)}, the traces and "
            f"gpus given are for {', '.join(case.gpus)}; expected the same."
        )
    plan = case.judge(
        [worker.batch_size for worker in allocation.workers],
        [worker.power_limit for worker in allocation.workers],
    )
    best = case.solve(METHODS["optimal"])
    workers = _workers(case, plan, lambda: case_of(batch + 1))
    cheapest = min(range(len(workers)), key=lambda rank: workers[rank].next_sample_cost)
    possible = math.isfinite(workers[cheapest].next_sample_cost)
    return Explanation(
        workers=workers,
        constraints=(
            *_figures(case_of, case, plan, best, options),
            *_budgets(case_of, case, plan, best),
            *_slowdown(case_of, plan, best, max_slowdown),
        ),
        next_sample_cost=_optimum(lambda: case_of(batch + 1)) - best.cost,
        next_sample_gpu=cheapest if possible else None,
        cost_unit=plan.cost_unit,
    )


def _workers(
    case: Case, plan: Allocation, larger_case: Callable[[], Case]
) -> tuple[WorkerSensitivity, ...]:
    """Every worker; those that are alike in all that matters are looked at once."""
    try:
        larger = larger_case()
    except InfeasibleError:
        larger = None
    busiest = max(w.time for w in plan.workers)
    known: dict[tuple[object, ...], tuple[int, float]] = {}
    found = []
    for rank, worker in enumerate(plan.workers):
        groups = tuple(rank in budget.members for budget in case.constraints.budgets)
        key = (worker.gpu, worker.batch_size, worker.power_limit, groups)
        if key not in known:
            one_more = math.inf if larger is None else _one_more(larger, plan, rank)
            known[key] = (_spare_samples(case, plan, rank), one_more - plan.cost)
        spare, cost = known[key]
        found.append(
            WorkerSensitivity(
                gpu=worker.gpu,
                sets_pace=worker.batch_size > 0 and busiest - worker.time <= _PACE * busiest,
                slack=busiest - worker.time if _is_there(case, worker) else 0.0,
                spare_samples=spare,
                next_sample_cost=cost,
            )
        )
    return tuple(found)


def _is_there(case: Case, worker: Worker) -> bool:
    """Whether a worker is in the job; one that `max_gpus` leaves out waits for nobody."""
    return worker.batch_size > 0 or not case.objective.release_idle


def _spare_samples(case: Case, plan: Allocation, rank: int) -> int:
    worker = plan.workers[rank]
    busiest = max(w.time for w in plan.workers)
    more = np.arange(worker.batch_size + 1, case.constraints.max_share[worker.gpu] + 1)
    too_slow = np.asarray(case.models[worker.gpu].time(more, worker.power_limit)) > busiest
    # Times may fall where a share is cut into more micro-batches: the first share that is too slow
    # ends the count.
    return int(too_slow.argmax()) if too_slow.any() else len(more)


def _one_more(larger: Case, plan: Allocation, rank: int) -> float:
    """Cost with one more sample on one worker, whose power limit may change for it.

    Args:
        larger: the case with a global batch of one sample more.
        plan: the allocation.
        rank: the worker.

    Returns:
        The cost; inf where the constraints do not let this worker alone take it.
    """
    shares = [w.batch_size + (i == rank) for i, w in enumerate(plan.workers)]
    limits = [w.power_limit for w in plan.workers]
    changed = (
        larger.judge(shares, [*limits[:rank], limit, *limits[rank + 1 :]])
        for limit in larger.models[larger.gpus[rank]].power_limits
    )
    return min((other.cost for other in changed if larger.keeps(other)), default=math.inf)


def _optimum(make: Callable[[], Case]) -> float:
    """Cost of the optimum of a case; inf where there is none."""
    try:
        return make().solve(METHODS["optimal"]).cost
    except InfeasibleError:
        return math.inf


def _figures(
    case_of: Callable[..., Case],
    case: Case,
    plan: Allocation,
    best: Allocation,
    options: Mapping[str, Any],
) -> Iterator[ConstraintSensitivity]:
    """Constraints that are a figure, or one per GPU name; to relax one is to change its figure."""
    for name, (relaxed, unit) in _RELAXED.items():
        value = options.get(name)
        if value is None or (name == "granularity" and value == 1):
            continue
        by_gpu = isinstance(value, Mapping)
        for gpu in [gpu for gpu in value if gpu in case.gpus] if by_gpu else [None]:
            changed = {**value, gpu: relaxed(value[gpu])} if by_gpu else relaxed(value)
            cost = _optimum(partial(case_of, plan.global_batch_size, **{name: changed}))
            shown = f"{name}[{gpu!r}]" if by_gpu else name
            figure = value[gpu] if by_gpu else value
            yield _sensitivity(best, shown, figure, _used(plan, name, gpu), unit, cost)
    for gpu in sorted(case.constraints.must_use & set(case.gpus)):
        others = sorted(case.constraints.must_use - {gpu})
        cost = _optimum(partial(case_of, plan.global_batch_size, must_use=others))
        working = sum(w.gpu == gpu and w.batch_size > 0 for w in plan.workers)
        unit = "not having to use it"
        yield _sensitivity(best, f"must_use[{gpu!r}]", case.gpus.count(gpu), working, unit, cost)


def _used(plan: Allocation, name: str, gpu: str | None) -> float:
    """How much of a constraint an allocation uses, on all GPUs or on those of one name."""
    shares = [w.batch_size for w in plan.workers if w.batch_size and gpu in (None, w.gpu)]
    figures: dict[str, Callable[[], float]] = {
        "deadline": lambda: plan.step_time,
        "max_gpus": lambda: len(shares),
        "max_batch_size": lambda: max(shares, default=0),
        "min_share": lambda: min(shares, default=0),
        "granularity": lambda: math.gcd(*shares),
    }
    return figures[name]()


# Per constraint that is a figure: its value relaxed by one unit, and what that unit means.
_RELAXED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "deadline": (lambda value: value * 1.01, "1 % more time"),
    "max_gpus": (lambda value: value + 1, "one GPU more"),
    "max_batch_size": (lambda value: value + 1, "one sample more per GPU"),
    "min_share": (lambda value: max(value - 1, 1), "one sample less per GPU"),
    "granularity": (lambda value: 1, "shares of any size"),
}


def _budgets(
    case_of: Callable[..., Case], case: Case, plan: Allocation, best: Allocation
) -> Iterator[ConstraintSensitivity]:
    """Power budgets; one watt buys nothing where limits are 25 W apart, so the unit is a step."""
    budgets = {budget.name: budget.watts for budget in case.constraints.budgets}
    for budget in case.constraints.budgets:
        steps = [
            higher - plan.workers[rank].power_limit
            for rank in budget.members
            for higher in case.models[case.gpus[rank]].power_limits
            if higher > plan.workers[rank].power_limit
        ]
        step = min(steps, default=1)
        relaxed = {**budgets, budget.name: budget.watts + step}
        cost = _optimum(partial(case_of, plan.global_batch_size, power_budget=relaxed))
        used = sum(plan.workers[rank].power_limit for rank in budget.members)
        name = f"power_budget[{budget.name!r}]"
        yield _sensitivity(best, name, budget.watts, used, f"{step} W more", cost)


def _slowdown(
    case_of: Callable[..., Case],
    plan: Allocation,
    best: Allocation,
    max_slowdown: float | None,
) -> Iterator[ConstraintSensitivity]:
    if max_slowdown is None:
        return
    batch = plan.global_batch_size
    fastest = case_of(batch, slowdown=None).minimising_time().solve(METHODS["optimal"])
    cost = _optimum(lambda: case_of(batch, slowdown=max_slowdown + 0.01))
    used = plan.step_time / fastest.step_time
    yield _sensitivity(best, "max_slowdown", max_slowdown, used, "0.01 more", cost)


def _sensitivity(
    best: Allocation, name: str, value: float, used: float, unit: str, relaxed_cost: float
) -> ConstraintSensitivity:
    # What lies between the optimum and its proven bound is not known to be saved by relaxing.
    surely = best.lower_bound - relaxed_cost > 1e-9 * abs(best.cost)
    saving = best.cost - relaxed_cost if surely else 0.0
    return ConstraintSensitivity(name, float(value), float(used), unit, saving)
