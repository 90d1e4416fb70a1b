"""The answer: which GPU gets how many samples and which power limit."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from zeus_hetero.errors import PlanError
from zeus_hetero.objective import StepFigures
from zeus_hetero.trace import write_text_atomically

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from zeus_hetero.explanation import Explanation
    from zeus_hetero.trace import TraceSource

PLAN_FORMAT = "zeus-hetero plan"
PLAN_VERSION = 1


@dataclass(frozen=True)
class Worker:
    """One GPU's part of every global batch.

    Attributes:
        gpu: name of the GPU model.
        batch_size: its share in samples; 0 if it gets no work.
        micro_batch_size: samples of its largest forward-backward pass; passes differ by at most 1.
        accumulation_steps: forward-backward passes per training step.
        power_limit: W.
        time: predicted busy time per training step, s.
        energy: predicted energy while busy, J per training step.
        wait_power: power it draws while it waits for the slowest worker, W.
    """

    gpu: str
    batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    power_limit: int
    time: float
    energy: float
    wait_power: float = 0.0


@dataclass(frozen=True)
class Allocation:
    """A plan for one global batch, with what it is predicted to cost.

    Attributes:
        workers: one per GPU, in the order in which the GPUs were given.
        step_time: predicted time of a global step, s.
        step_energy: predicted energy of a global step over all GPUs, J.
        cost: value of the objective per global step.
        lower_bound: no allocation costs less than this; -inf where the method proves nothing.
        method: how it was found.
        objective: what was minimised.
        eta: weight of energy against time in the cost.
        global_batch_size: samples per optimizer step over all workers.
        solve_time: time the method took, s.
        model: the GPU model behind the predictions.
        max_power: sum of the GPUs' maximum power limits, W (Zeus's MaxPower).
        sync_time: time per step for exchanging gradients, s.
        cost_unit: unit of the cost: J (Zeus's cost), money or g CO2.
        simulated: True if the predictions rest on measurements of simulated GPUs.
        relative: True if they rest on traces without absolute units.
        time_interval: s between which a measured step's time will lie with probability
            `confidence`; None where it was not asked for.
        energy_interval: J, likewise.
        confidence: probability that each interval holds.
    """

    workers: tuple[Worker, ...]
    step_time: float
    step_energy: float
    cost: float
    lower_bound: float
    method: str
    objective: str
    eta: float
    global_batch_size: int
    solve_time: float = 0.0
    model: str = "interpolated"
    max_power: float = 0.0
    sync_time: float = 0.0
    cost_unit: str = "J"
    simulated: bool = False
    relative: bool = False
    time_interval: tuple[float, float] | None = None
    energy_interval: tuple[float, float] | None = None
    confidence: float = 0.9

    _origin: ClassVar[tuple[Mapping[str, TraceSource], dict[str, Any]] | None] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "workers", tuple(self.workers))
        for name in ("time_interval", "energy_interval"):
            interval = getattr(self, name)
            object.__setattr__(self, name, interval and (float(interval[0]), float(interval[1])))
        total = sum(worker.batch_size for worker in self.workers)
        if total != self.global_batch_size:
            raise PlanError(
                f"shares {', '.join(str(w.batch_size) for w in self.workers)} add up to {total}; "
                f"expected the global batch size {self.global_batch_size}."
            )
        for rank, worker in enumerate(self.workers):
            _check_micro_batches(worker, rank)

    @property
    def gap(self) -> float:
        """Relative distance between the cost and its proven lower bound; 0 means optimal."""
        if self.cost <= self.lower_bound:
            return 0.0
        if self.cost == 0 or not math.isfinite(self.lower_bound):
            return math.inf
        return (self.cost - self.lower_bound) / abs(self.cost)

    @property
    def gpu_split(self) -> tuple[int, ...]:
        """Shares in whole percent that add up to 100, smallest first.

        The original training scripts take them as ``--gpu_split``, the smaller one for the GPU
        with ``--gpu_index 0``.
        """
        exact = sorted(100 * worker.batch_size / self.global_batch_size for worker in self.workers)
        whole = [math.floor(share) for share in exact]
        by_remainder = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])
        for i in by_remainder[: 100 - sum(whole)]:
            whole[i] += 1
        return tuple(sorted(whole))

    def per_epoch(self, dataset_size: int) -> StepFigures:
        """What an epoch is predicted to take.

        Args:
            dataset_size: samples in the data set; the last, smaller step counts as its part.

        Returns:
            Time in s, energy in J and cost in `cost_unit`.
        """
        steps = dataset_size / self.global_batch_size
        return StepFigures(self.step_time * steps, self.step_energy * steps, self.cost * steps)

    def waiting(self, rank: int) -> float:
        """Share of a step that a worker waits for the slowest one, between 0 and 1."""
        if self.step_time == 0:
            return 0.0
        return 1 - self.workers[rank].time / self.step_time

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; the file is complete or untouched.

        Args:
            path: file to write; its folder must exist.
        """
        plan = {"format": PLAN_FORMAT, "version": PLAN_VERSION, **asdict(self)}
        if not math.isfinite(self.lower_bound):
            plan["lower_bound"] = None  # JSON has no infinity
        write_text_atomically(path, json.dumps(plan, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Allocation:
        """Read a plan that `save` wrote.

        Raises:
            PlanError: the file is missing, truncated, of another version, or its shares do not
                add up.
        """
        where = Path(path)
        try:
            plan = json.loads(where.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise PlanError(
                f"{where}: no such file; expected a plan. "
                "Make one with: zeus-hetero allocate ... --plan plan.json"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"{where}: cannot be read ({error}).") from None
        except json.JSONDecodeError as error:
            raise PlanError(
                f"{where}: not valid JSON (line {error.lineno}: {error.msg}); the file may be "
                "truncated. Make the plan again."
            ) from None
        if not isinstance(plan, dict) or plan.get("format") != PLAN_FORMAT:
            raise PlanError(f'{where}: is no plan; expected "format": "{PLAN_FORMAT}".')
        if plan.get("version") != PLAN_VERSION:
            raise PlanError(
                f"{where}: plan version {plan.get('version')!r}; this zeus-hetero reads version "
                f"{PLAN_VERSION}. Make the plan again."
            )
        try:
            return cls._from_dict(plan)
        except PlanError as error:
            raise PlanError(f"{where}: {error}") from None

    @classmethod
    def _from_dict(cls, plan: Mapping[str, Any]) -> Allocation:
        workers = plan.get("workers")
        if not isinstance(workers, list) or not workers:
            raise PlanError(f"workers is {workers!r}; expected a list with one entry per GPU.")
        arguments = _typed(cls, plan, "plan", skip=("workers",))
        return cls(
            workers=tuple(
                Worker(**_typed(Worker, worker, f"worker {rank}"))
                for rank, worker in enumerate(workers)
            ),
            **arguments,
        )

    def explain(
        self, traces: Mapping[str, TraceSource] | None = None, **options: Any
    ) -> Explanation:
        """Say why the plan looks as it does; see `zeus_hetero.explain`.

        Args:
            traces: those that it was made from; not needed for what `allocate` just returned.
            **options: the further arguments of `allocate`, likewise.

        Raises:
            PlanError: a plan that was read from a file or made by hand does not know its traces.
        """
        from zeus_hetero.explanation import explain

        if traces is None:
            if self._origin is None:
                raise PlanError(
                    "this plan does not know the traces that it was made from; give them, and the "
                    "options, as they were given to allocate."
                )
            traces, known = self._origin
            options = {**known, **options}
        return explain(traces, self, **options)

    def made_from(
        self, traces: Mapping[str, TraceSource], options: Mapping[str, Any]
    ) -> Allocation:
        """The same plan, knowing where it comes from; neither compared nor saved."""
        plan = replace(self)
        object.__setattr__(plan, "_origin", (traces, dict(options)))
        return plan

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(width=110, file=text).print(self)
        return text.getvalue().rstrip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the plan as a table."""
        from rich.table import Table

        time_unit, energy_unit = ("rel.", "rel.") if self.relative else ("s", "J")
        table = Table(title=self._title(), caption=self._caption(), title_justify="left")
        table.add_column("GPU")
        for header in (
            "share",
            "micro-batches",
            "power limit (W)",
            f"time ({time_unit})",
            f"energy ({energy_unit})",
            "waits",
        ):
            table.add_column(header, justify="right")
        for rank, worker in enumerate(self.workers):
            micro = f"{worker.accumulation_steps} x {worker.micro_batch_size}"
            table.add_row(
                worker.gpu,
                str(worker.batch_size),
                micro if worker.batch_size else "-",
                str(worker.power_limit),
                f"{worker.time:.4g}",
                f"{worker.energy:.4g}",
                f"{self.waiting(rank):.1%}" if worker.batch_size or worker.wait_power else "not in",
            )
        yield table

    def _title(self) -> str:
        mark = " [SIMULATED]" if self.simulated else ""
        return (
            f"{self.method}: global batch {self.global_batch_size}, {self.objective} objective, "
            f"{self.model} model, eta {self.eta:g}{mark}".replace("[", "\\[")
        )

    def _caption(self) -> str:
        proof = (
            "proven optimal"
            if self.gap == 0
            else f"gap {self.gap:.2g}"
            if math.isfinite(self.gap)
            else "no bound"
        )
        time_unit, energy_unit = ("(rel.)", "(rel.)") if self.relative else ("s", "J")
        between = ""
        if self.time_interval and self.energy_interval:
            between = (
                f"{self.confidence:.0%} of measured steps: {self.time_interval[0]:.4g} to "
                f"{self.time_interval[1]:.4g} {time_unit}, {self.energy_interval[0]:.4g} to "
                f"{self.energy_interval[1]:.4g} {energy_unit}\n"
            )
        return between + (
            f"step: {self.step_time:.4g} {time_unit}, {self.step_energy:.4g} {energy_unit}, "
            f"cost {self.cost:.6g} {self.cost_unit} ({proof})"
        )


def _check_micro_batches(worker: Worker, rank: int) -> None:
    steps, largest = worker.accumulation_steps, worker.micro_batch_size
    fits = (
        steps == largest == 0
        if worker.batch_size == 0
        else worker.batch_size > 0 and steps > 0 and largest == -(-worker.batch_size // steps)
    )
    if not fits:
        raise PlanError(
            f"worker {rank} ({worker.gpu}): a share of {worker.batch_size} as {steps} "
            f"micro-batches of at most {largest}; expected micro_batch_size = ceil(batch_size / "
            "accumulation_steps)."
        )


_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "tuple[float, float] | None": (list, type(None)),
}


def _typed(cls: type, record: Any, where: str, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """The record's entries for a dataclass's fields, each of its declared type."""
    if not isinstance(record, dict):
        raise PlanError(f"{where} is {record!r}; expected an object.")
    arguments: dict[str, Any] = {}
    for entry in fields(cls):
        if entry.name in skip:
            continue
        if entry.name not in record:
            raise PlanError(f"{where}: no {entry.name}; the file was edited or truncated.")
        value: Any = record[entry.name]
        if entry.name == "lower_bound" and value is None:
            value = -math.inf
        known = _JSON_TYPES[str(entry.type)]
        if list in known and isinstance(value, list):
            value = value if [type(v) in (int, float) for v in value] == [True, True] else "?"
        if type(value) not in known:
            raise PlanError(f"{where}: {entry.name} is {value!r}; expected {entry.type}.")
        arguments[entry.name] = float(value) if entry.type == "float" else value
    return arguments
