"""Why an allocation looks as it does: pace, slack, and the price of one unit more of everything."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zeus_hetero.allocation import Allocation
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
            global batch grows by one), at its best power limit for that.
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
        saving: what the optimum costs less if it is relaxed by one unit; 0 where it does not bind.
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
        next_sample_gpu: the worker for which one more sample is cheapest.
        cost_unit: unit of all costs.
    """

    workers: tuple[WorkerSensitivity, ...]
    constraints: tuple[ConstraintSensitivity, ...]
    next_sample_cost: float
    next_sample_gpu: int
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
                f"{worker.next_sample_cost:.4g}",
            )
        yield table
        more = f"{self.next_sample_cost:.4g} {self.cost_unit}"
        yield f"A global batch of one sample more costs {more}."
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
    workers = tuple(_worker(case, plan, rank) for rank in range(len(plan.workers)))
    return Explanation(
        workers=workers,
        constraints=(
            *_figures(case_of, plan, options),
            *_budgets(case_of, case, plan),
            *_slowdown(case_of, plan, max_slowdown),
        ),
        next_sample_cost=_optimum(lambda: case_of(batch + 1)) - plan.cost,
        next_sample_gpu=min(range(len(workers)), key=lambda rank: workers[rank].next_sample_cost),
        cost_unit=plan.cost_unit,
    )


def _worker(case: Case, plan: Allocation, rank: int) -> WorkerSensitivity:
    worker = plan.workers[rank]
    busiest = max(w.time for w in plan.workers)
    model = case.models[worker.gpu]
    # Times may fall where a share is cut into more micro-batches: the first share that is too slow
    # ends the count.
    spare = 0
    most = case.constraints.max_share[worker.gpu] - worker.batch_size
    while spare < most:
        if float(model.time(worker.batch_size + spare + 1, worker.power_limit)) > busiest:
            break
        spare += 1
    return WorkerSensitivity(
        gpu=worker.gpu,
        sets_pace=worker.batch_size > 0 and busiest - worker.time <= _PACE * busiest,
        slack=busiest - worker.time,
        spare_samples=spare,
        next_sample_cost=_one_more(case, plan, rank) - plan.cost,
    )


def _one_more(case: Case, plan: Allocation, rank: int) -> float:
    """Cost with one more sample on one worker, whose power limit may change for it."""
    larger = case.with_batch(plan.global_batch_size + 1)
    shares = [w.batch_size + (i == rank) for i, w in enumerate(plan.workers)]
    limits = [w.power_limit for w in plan.workers]
    return min(
        larger.judge(shares, [*limits[:rank], limit, *limits[rank + 1 :]]).cost
        for limit in case.models[case.gpus[rank]].power_limits
    )


def _optimum(make: Callable[[], Case]) -> float:
    """Cost of the optimum of a case; inf where there is none."""
    try:
        return make().solve(METHODS["optimal"]).cost
    except InfeasibleError:
        return math.inf


def _figures(
    case_of: Callable[..., Case], plan: Allocation, options: Mapping[str, Any]
) -> Iterator[ConstraintSensitivity]:
    """Constraints that are one figure; to relax one is to change that figure."""
    shares = [w.batch_size for w in plan.workers if w.batch_size]
    known: dict[str, tuple[float, Callable[[Any], Any], str]] = {
        "deadline": (plan.step_time, lambda value: value * 1.01, "1 % more time"),
        "max_gpus": (len(shares), lambda value: value + 1, "one GPU more"),
        "max_batch_size": (max(shares), lambda value: value + 1, "one sample more per GPU"),
        "min_share": (min(shares), lambda value: max(value - 1, 1), "one sample less per GPU"),
        "granularity": (math.gcd(*shares), lambda value: 1, "shares of any size"),
    }
    for name, (used, relaxed, unit) in known.items():
        value = options.get(name)
        if value is None or isinstance(value, Mapping) or (name == "granularity" and value == 1):
            continue
        changes = {name: relaxed(value)}
        cost = _optimum(lambda changes=changes: case_of(plan.global_batch_size, **changes))  # type: ignore[misc]
        yield _sensitivity(plan, name, value, used, unit, cost)


def _budgets(
    case_of: Callable[..., Case], case: Case, plan: Allocation
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
        cost = _optimum(
            lambda relaxed=relaxed: case_of(plan.global_batch_size, power_budget=relaxed)  # type: ignore[misc]
        )
        used = sum(plan.workers[rank].power_limit for rank in budget.members)
        name = f"power_budget[{budget.name!r}]"
        yield _sensitivity(plan, name, budget.watts, used, f"{step} W more", cost)


def _slowdown(
    case_of: Callable[..., Case], plan: Allocation, max_slowdown: float | None
) -> Iterator[ConstraintSensitivity]:
    if max_slowdown is None:
        return
    batch = plan.global_batch_size
    fastest = case_of(batch, slowdown=None).minimising_time().solve(METHODS["optimal"])
    cost = _optimum(lambda: case_of(batch, slowdown=max_slowdown + 0.01))
    used = plan.step_time / fastest.step_time
    yield _sensitivity(plan, "max_slowdown", max_slowdown, used, "0.01 more", cost)


def _sensitivity(
    plan: Allocation, name: str, value: float, used: float, unit: str, relaxed_cost: float
) -> ConstraintSensitivity:
    saving = plan.cost - relaxed_cost
    # Below the rounding of costs nothing is saved.
    saving = saving if saving > 1e-9 * abs(plan.cost) else 0.0
    return ConstraintSensitivity(name, float(value), float(used), unit, saving)
