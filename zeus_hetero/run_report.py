"""What a training took, beside what its plan predicts."""

from __future__ import annotations

import io
import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from zeus_hetero import simulation
from zeus_hetero.metrics import from_all_ranks
from zeus_hetero.trace import write_text_atomically

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from zeus_hetero.allocation import Allocation
    from zeus_hetero.epoch_meter import EpochMeter
    from zeus_hetero.job import Job
    from zeus_hetero.step_clock import StepClock

REPORT_FORMAT = "zeus-hetero training report"
REPORT_VERSION = 1


@dataclass(frozen=True)
class GPURun:
    """One GPU's part of a training.

    Attributes:
        gpu: name of the GPU model.
        batch_size: its share of a global batch, samples.
        power_limit: W, in force at the end of the last epoch; None where there is no GPU.
        planned_power_limit: W; None without a plan.
        time: s of its epochs.
        energy: J; NaN where it was not measured.
        waited: share of that time that it waited for others, between 0 and 1.
        predicted_energy: J that the plan predicts; None without a plan.
        predicted_waiting: share that the plan predicts; None without a plan.
    """

    gpu: str
    batch_size: int | None
    power_limit: int | None
    planned_power_limit: int | None
    time: float
    energy: float
    waited: float
    predicted_energy: float | None = None
    predicted_waiting: float | None = None


@dataclass(frozen=True)
class RunReport:
    """A training as it was measured.

    Attributes:
        gpus: one entry per rank.
        steps: training steps.
        samples: over all ranks.
        time: s, epochs of the slowest rank.
        energy: J, of all GPUs; NaN where it was not measured.
        predicted_time: s that the plan predicts for so many samples; None without a plan.
        predicted_energy: J, likewise.
        simulated: whether GPUs and time were simulated.
    """

    gpus: tuple[GPURun, ...]
    steps: int
    samples: int
    time: float
    energy: float
    predicted_time: float | None
    predicted_energy: float | None
    simulated: bool

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON; the file is complete or untouched."""
        report = {"format": REPORT_FORMAT, "version": REPORT_VERSION, **asdict(self)}
        if self.energy != self.energy:  # JSON has no NaN.
            report["energy"] = None
            report["gpus"] = [{**gpu, "energy": None} for gpu in report["gpus"]]
        write_text_atomically(path, json.dumps(report, indent=2) + "\n")

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(width=110, file=text).print(self)
        return text.getvalue().rstrip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw a table of the GPUs, then the two lines of the original scripts."""
        from rich.table import Table
        from rich.text import Text

        mark = " [SIMULATED]" if self.simulated else ""
        title = f"training: {self.steps} steps, {self.samples} samples{mark}"
        table = Table(title=title.replace("[", "\\["), title_justify="left")
        table.add_column("GPU")
        for header in ("share", "power limit (W)", "time (s)", "energy (J)", "predicted (J)",
                       "waited", "predicted"):  # fmt: skip
            table.add_column(header, justify="right")
        for gpu in self.gpus:
            table.add_row(
                gpu.gpu,
                _or_dash(gpu.batch_size),
                _limit(gpu),
                f"{gpu.time:.5g}",
                _joules(gpu.energy),
                _joules(gpu.predicted_energy),
                f"{gpu.waited:.1%}",
                "-" if gpu.predicted_waiting is None else f"{gpu.predicted_waiting:.1%}",
            )
        yield table
        if self.predicted_time is not None and self.predicted_energy is not None:
            yield Text(
                f"the plan predicts {self.predicted_time:.5g} s and {self.predicted_energy:.5g} J"
            )
        note = " (simulated)" if self.simulated else ""
        yield Text(f"Time (s): {self.time:.2f}{note}")
        yield Text(f"Energy (J): {_joules(self.energy)}{note}")


def gather(
    job: Job | None, meter: EpochMeter, clock: StepClock, steps: int, samples: int
) -> RunReport:
    """Collect the report from all ranks; every rank has to call it.

    Args:
        job: the ranks; None for training independent of others.
        meter: this rank's measured epochs.
        clock: this rank's waiting.
        steps: training steps so far.
        samples: that they had, over all ranks.
    """
    name, limit = meter.gpu()
    mine = [meter.time, meter.energy, clock.waited(), float(limit or 0)]
    group = None if job is None else job.group
    ranks = [mine] if group is None else from_all_ranks(mine, group)
    plan = None if job is None else job.allocation
    gpus = [_gpu_run(name, plan, rank, samples, *figures) for rank, figures in enumerate(ranks)]
    full_steps = 0.0 if plan is None else samples / plan.global_batch_size
    return RunReport(
        gpus=tuple(gpus),
        steps=steps,
        samples=samples,
        time=max(gpu.time for gpu in gpus),
        energy=sum(gpu.energy for gpu in gpus),
        predicted_time=None if plan is None else full_steps * plan.step_time,
        predicted_energy=None if plan is None else full_steps * plan.step_energy,
        simulated=simulation.active() is not None,
    )


def write_report(report: RunReport, path: str | os.PathLike[str] | None, rank: int = 0) -> None:
    """Print a report and save it, on the first rank only.

    Args:
        report: the same on all ranks.
        path: file to write; None for none.
        rank: this process's.
    """
    if rank != 0:
        return
    print(report)
    if path is not None:
        report.save(path)
        print(f"wrote {path}")


def _gpu_run(
    name: str,
    plan: Allocation | None,
    rank: int,
    samples: int,
    time: float,
    energy: float,
    waited: float,
    limit: float,
) -> GPURun:
    measured = (time, energy, waited / time if time > 0 else 0.0)
    in_force = round(limit) or None
    if plan is None:
        return GPURun(name, None, in_force, None, *measured)
    worker = plan.workers[rank]
    step = worker.energy + worker.wait_power * (plan.step_time - worker.time)
    return GPURun(
        worker.gpu,
        worker.batch_size,
        in_force,
        worker.power_limit,
        *measured,
        step * samples / plan.global_batch_size,
        plan.waiting(rank),
    )


def _limit(gpu: GPURun) -> str:
    if gpu.planned_power_limit in (None, gpu.power_limit) or gpu.power_limit is None:
        return _or_dash(gpu.power_limit)
    return f"{gpu.power_limit} (plan: {gpu.planned_power_limit})"


def _or_dash(figure: int | None) -> str:
    return "-" if figure is None else str(figure)


def _joules(figure: float | None) -> str:
    return "-" if figure is None or figure != figure else f"{figure:.2f}"
