"""Subcommands of ``zeus-hetero``.

Bad input ends in one line on stderr and exit status 2, never in a traceback.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, TextIO, Union

import tyro

from zeus_hetero.errors import AllocationError, TraceWarning, ZeusHeteroError

if TYPE_CHECKING:
    import pandas as pd

    from zeus_hetero.allocation import Allocation
    from zeus_hetero.html_report import Subject
    from zeus_hetero.trace import Trace


@dataclass
class Problem:
    """What to share out, and what matters."""

    global_batch_size: int = 4096
    """Samples per optimizer step over all GPUs."""
    eta: float = 0.5
    """Weight of energy against time: 1 minimises energy, 0 time."""
    max_slowdown: Optional[float] = None
    """Minimise energy among allocations at most this many times slower than the fastest."""
    wait_power: tuple[str, ...] = ()
    """W that a waiting GPU draws: one figure, or one per GPU as A10=60 T4=40; else as profiled."""
    sync_time: float = 0.0
    """s per step in which gradients are exchanged."""
    granularity: int = 1
    """Shares are multiples of this."""
    max_batch_size: tuple[str, ...] = ()
    """Largest share of a GPU: one figure, or one per GPU as A10=4096 T4=1024."""
    min_share: tuple[str, ...] = ()
    """Smallest share of a GPU that gets work, likewise."""
    must_use: tuple[str, ...] = ()
    """Names of GPUs that must get work."""
    deadline: Optional[float] = None
    """s that a step may take."""
    power_budget: tuple[str, ...] = ()
    """W that the power limits may add up to: one figure, or one per group as node1=500."""
    group: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Workers of a group, as node1=0,1,2 or node1=A10; repeat for each group."""
    max_gpus: Optional[int] = None
    """Use at most so many GPUs; the others are not in the job."""
    electricity_price: Optional[float] = None
    """Money per kWh; with this or the next the cost is money."""
    gpu_hour_price: tuple[str, ...] = ()
    """Money per hour of a GPU: one figure, or one per GPU as A10=1.0 T4=0.5."""
    carbon_intensity: Optional[float] = None
    """g of CO2 per kWh; with it the cost is carbon."""
    model: str = "interpolated"
    """Model of a GPU."""
    objective: str = "synchronous"
    """What a step costs: synchronous, or independent as in the original system."""
    paper: bool = False
    """Reproduce the original system: independent objective, quadratic model."""

    def options(self) -> dict[str, Any]:
        """The arguments of `allocate` that these flags stand for."""
        return {
            "objective": "independent" if self.paper else self.objective,
            "model": "quadratic" if self.paper else self.model,
            "eta": self.eta,
            "wait_power": _figures("wait-power", self.wait_power, float),
            "sync_time": self.sync_time,
            "granularity": self.granularity,
            "max_batch_size": _figures("max-batch-size", self.max_batch_size, int),
            "min_share": _figures("min-share", self.min_share, int),
            "must_use": self.must_use,
            "deadline": self.deadline,
            "power_budget": _figures("power-budget", self.power_budget, float),
            "groups": dict(_group(text) for text in self.group) or None,
            "max_gpus": self.max_gpus,
            "electricity_price": self.electricity_price,
            "gpu_hour_price": _figures("gpu-hour-price", self.gpu_hour_price, float),
            "carbon_intensity": self.carbon_intensity,
        }


@dataclass
class Output:
    """Where results go."""

    results: Optional[Path] = None
    """CSV table of the methods; <gpu1>_<gpu2>_results.csv by default."""
    plan: Optional[Path] = None
    """Write the optimal plan here, for training."""
    plots: Optional[Path] = None
    """Folder for pictures."""


@dataclass
class Allocate:
    """Find the best batch shares and power limits for a set of GPUs, and compare the methods."""

    gpu1: Optional[str] = None
    """Name of the strongest GPU."""
    trace1: Optional[Path] = None
    """Its trace."""
    gpu2: Optional[str] = None
    """Name of the other GPU."""
    trace2: Optional[Path] = None
    """Its trace."""
    gpu: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """GPUs as NAME=TRACE or NAME=TRACE:COUNT, strongest first; repeat for each kind."""
    steps: Optional[int] = None
    """Training steps per measured window, for traces that do not say."""
    dataset: Optional[str] = None
    """Of a Zeus CSV trace with several workloads, the data set to take."""
    network: Optional[str] = None
    """Likewise the network."""
    optimizer: Optional[str] = None
    """Likewise the optimizer."""
    dataset_size: Optional[int] = None
    """Samples in an epoch of a Zeus CSV trace."""
    problem: Annotated[Problem, tyro.conf.arg(name="")] = field(default_factory=Problem)
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> None:
        """Solve, print and write."""
        from zeus_hetero.trace import load_trace

        traces: dict[str, Trace] = {}
        counts: dict[str, int] = {}
        for name, path, count in self._gpus():
            if name in traces:
                raise AllocationError(
                    f"GPU {name!r} is given twice; expected each kind once, as NAME=TRACE:COUNT."
                )
            traces[name] = load_trace(
                path, gpu=name, steps=self.steps, dataset=self.dataset, network=self.network,
                optimizer=self.optimizer, dataset_size=self.dataset_size,
            )  # fmt: skip
            counts[name] = count
        _solve_and_show(traces, counts, self.problem, self.output)

    def _gpus(self) -> list[tuple[str, str, int]]:
        pairs = [("gpu1", self.gpu1, self.trace1), ("gpu2", self.gpu2, self.trace2)]
        gpus = []
        for flag, name, path in pairs:
            if (name is None) != (path is None):
                missing = f"--{flag}" if name is None else f"--trace{flag[-1]}"
                raise AllocationError(
                    f"{missing} is missing; --{flag} and --trace{flag[-1]} go together."
                )
            if name is not None:
                gpus.append((name, str(path), 1))
        gpus += [_gpu_argument(text) for text in self.gpu]
        if not gpus:
            raise AllocationError(
                "no GPUs given; expected --gpu1 NAME --trace1 PATH --gpu2 NAME --trace2 PATH, or "
                "--gpu NAME=PATH[:COUNT] for each kind. To try it: zeus-hetero demo"
            )
        return gpus


@dataclass
class Demo:
    """Allocate on the measurements that come with the package: A10 and T4 on AWS."""

    workload: str = "cifar100"
    """cifar100 or imagenet."""
    problem: Annotated[Problem, tyro.conf.arg(name="")] = field(default_factory=Problem)
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> None:
        """Solve, print and write."""
        from zeus_hetero.bundled import BUNDLED_GPUS, bundled_trace

        traces = {gpu: bundled_trace(gpu, self.workload) for gpu in BUNDLED_GPUS}
        _solve_and_show(traces, dict.fromkeys(traces, 1), self.problem, self.output)


@dataclass
class Fit:
    """Say how well a model fits a trace, name suspicious points, and draw it."""

    trace: Annotated[str, tyro.conf.Positional]
    """The trace."""
    model: str = "auto"
    """Model of a GPU."""
    plots: Optional[Path] = None
    """Folder for the picture."""
    steps: Optional[int] = None
    """Training steps per measured window, for traces that do not say."""
    dataset: Optional[str] = None
    """Of a Zeus CSV trace with several workloads, the data set to take."""
    network: Optional[str] = None
    """Likewise the network."""
    optimizer: Optional[str] = None
    """Likewise the optimizer."""
    dataset_size: Optional[int] = None
    """Samples in an epoch of a Zeus CSV trace."""

    def run(self) -> None:
        """Fit, print and draw."""
        from rich.console import Console

        from zeus_hetero.fit_report import draw_fit, report_fit

        report = report_fit(
            self.trace, self.model, steps=self.steps, dataset=self.dataset, network=self.network,
            optimizer=self.optimizer, dataset_size=self.dataset_size,
        )  # fmt: skip
        Console(width=None if sys.stdout.isatty() else 120).print(report)
        if self.plots:
            self.plots.mkdir(parents=True, exist_ok=True)
            picture = self.plots / f"{Path(self.trace).stem}_fit.png"
            draw_fit(report).savefig(picture, dpi=130)
            print(f"wrote {picture}")


@dataclass
class Reset:
    """Put back the power limits that killed profiling or training runs left changed."""

    folder: Annotated[Optional[Path], tyro.conf.Positional] = None
    """A profile folder; without it, all runs on this machine that left a note."""

    def run(self) -> None:
        """Restore and tell."""
        from zeus_hetero.profile_run import reset

        print(reset(self.folder))


@dataclass
class Doctor:
    """Say whether this machine can profile and train, and what mends what is missing."""

    rendezvous: Optional[str] = None
    """HOST:PORT of another node that must be reachable."""
    simulate: Optional[str] = None
    """Simulated GPUs instead of the machine's, such as A10,T4."""
    json: bool = False
    """Print JSON, for programs."""

    def run(self) -> int:
        """Examine and tell; 1 if something that is needed is missing."""
        import json

        from zeus_hetero import doctor, simulation

        if self.simulate:
            simulation.use(*simulation.parse_gpus(self.simulate)).install()
        else:
            simulation.install_from_environment()
        findings = doctor.examine(rendezvous=self.rendezvous)
        if self.json:
            print(json.dumps([vars(finding) for finding in findings], indent=2))
        else:
            from rich.console import Console

            Console(width=None if sys.stdout.isatty() else 120).print(doctor.as_table(findings))
            print(doctor.summary(findings))
        return int(any(finding.status == doctor.FAILED for finding in findings))


@dataclass
class Report:
    """Write one HTML file about a plan: traces, allocation, timeline, savings, Pareto front."""

    sources: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """A plan, traces as NAME=TRACE or NAME=TRACE:COUNT, or both. Without a plan one is made."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")
    """The file to write."""
    problem: Annotated[Problem, tyro.conf.arg(name="")] = field(default_factory=Problem)

    def run(self) -> None:
        """Read, compute and write."""
        from zeus_hetero.html_report import page
        from zeus_hetero.trace import write_text_atomically

        write_text_atomically(self.output, page(self._subject()))
        print(f"wrote {self.output} ({self.output.stat().st_size / 1e6:.1f} MB)")

    def _subject(self) -> Subject:
        from zeus_hetero.allocation import Allocation
        from zeus_hetero.allocator import allocate
        from zeus_hetero.html_report import Subject
        from zeus_hetero.trace import load_trace

        files = [source for source in self.sources if "=" not in source]
        given = [_gpu_argument(source) for source in self.sources if "=" in source]
        if len(files) > 1 or not self.sources:
            raise AllocationError(
                f"{len(files)} plans; expected one plan, or traces as NAME=TRACE, or both."
            )
        traces = {name: load_trace(path, gpu=name) for name, path, _ in given}
        inputs = [(f"trace of {name}", path) for name, path, _ in given]
        if files:
            plan = Allocation.load(files[0])
            return Subject(plan, traces, {}, (("plan", files[0]), *inputs))
        options = {**self.problem.options(), "gpus": {name: count for name, _, count in given}}
        slowdown = self.problem.max_slowdown
        plan = allocate(traces, self.problem.global_batch_size, max_slowdown=slowdown, **options)
        return Subject(plan, traces, options, tuple(inputs))


Command = Union[Allocate, Demo, Doctor, Fit, Report, Reset]


def run(arguments: Sequence[str]) -> int:
    """Run one command.

    Args:
        arguments: as on the command line, without the program's name.

    Returns:
        Exit status: 0, 1 if `doctor` found something missing, 2 for bad input, 130 if interrupted.
    """
    warnings.showwarning = _show_warning
    commands: dict[str, Any] = {
        "allocate": Allocate,
        "demo": Demo,
        "doctor": Doctor,
        "fit": Fit,
        "report": Report,
        "reset": Reset,
    }
    try:
        command = tyro.extras.subcommand_cli_from_dict(
            commands,
            prog="zeus-hetero",
            description="Batch shares and power limits for training on different GPUs.",
            args=arguments,
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
        )
        status: int | None = command.run()
    except (ZeusHeteroError, OSError) as error:
        print(f"zeus-hetero: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("zeus-hetero: interrupted", file=sys.stderr)
        return 130
    return status or 0


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    del filename, lineno, file, line
    name = "warning" if issubclass(category, TraceWarning) else category.__name__
    print(f"zeus-hetero: {name}: {message}", file=sys.stderr)


def _gpu_argument(text: str) -> tuple[str, str, int]:
    name, equals, rest = text.partition("=")
    path, colon, count = rest.rpartition(":")
    if not colon or not count.isdigit():
        path, count = rest, "1"
    if not name or not equals or not path or int(count) < 1:
        raise AllocationError(
            f"--gpu {text!r}; expected NAME=TRACE or NAME=TRACE:COUNT, such as T4=t4.json:4."
        )
    return name, path, int(count)


def _group(text: str) -> tuple[str, list[str | int]]:
    name, equals, members = text.partition("=")
    if not name or not equals or not members:
        raise AllocationError(
            f"--group {text!r}; expected NAME=WORKERS, such as node1=0,1 or node1=A10."
        )
    return name, [int(member) if member.isdigit() else member for member in members.split(",")]


def _figures(flag: str, texts: Sequence[str], kind: type) -> object:
    """Parse ``60`` or ``A10=60 T4=40``; None if nothing was given."""
    if not texts:
        return None
    try:
        if len(texts) == 1 and "=" not in texts[0]:
            return kind(texts[0])
        return {name: kind(value) for name, _, value in (text.partition("=") for text in texts)}
    except ValueError:
        raise AllocationError(
            f"--{flag} {' '.join(texts)}; expected one figure or NAME=FIGURE for each GPU."
        ) from None


def _solve_and_show(
    traces: dict[str, Trace], counts: dict[str, int], problem: Problem, output: Output
) -> None:
    from zeus_hetero.allocator import plans_by_method, tabulate

    options: dict[str, Any] = {"gpus": counts, **problem.options()}
    plans, skipped = plans_by_method(
        traces, problem.global_batch_size, max_slowdown=problem.max_slowdown, **options
    )
    table = tabulate(plans)
    _print(table, plans["optimal"], skipped)
    if problem.paper:
        _print_window(traces, plans)
    results = output.results or Path("_".join(list(traces)[:2]) + "_results.csv")
    table.to_csv(results)
    written = [results]
    if output.plan:
        plans["optimal"].save(output.plan)
        written.append(output.plan)
    if output.plots:
        written += _draw(traces, plans, output.plots, problem, options)
    print("wrote " + ", ".join(map(str, written)))


def _print_window(traces: dict[str, Trace], plans: dict[str, Allocation]) -> None:
    """The original system publishes the cost of a whole profiling window, not of a step."""
    windows = {int(steps) for trace in traces.values() for steps in trace.steps}
    if len(windows) == 1:
        steps = windows.pop()
        costs = ", ".join(
            f"{method} {steps * plans[method].cost:.4f}"
            for method in ("brute_force", "heuristic", "baseline")
            if method in plans
        )
        print(f"cost over the profiling window of {steps} steps, as published: {costs}")


def _print(table: pd.DataFrame, optimal: Allocation, skipped: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(optimal)
    time_unit, energy_unit = ("rel.", "rel.") if optimal.relative else ("s", "J")
    view = Table(
        title="Methods, judged alike; saved against the even split at maximum power",
        title_justify="left",
    )
    view.add_column("method")
    view.add_column("shares")
    view.add_column("limits (W)")
    for header in (f"step ({time_unit})", f"step ({energy_unit})", "cost", "time saved",
                   "energy saved", "solved in (ms)"):  # fmt: skip
        view.add_column(header, justify="right")
    for method, row in table.iterrows():
        view.add_row(
            str(method).replace("_", " "),
            _short(row["shares"]),
            _short(row["power_limits"]),
            f"{row['step_time']:.4g}",
            f"{row['step_energy']:.4g}",
            f"{row['cost']:.6g}",
            f"{row['time_saved_vs_equal_max_power']:.1%}",
            f"{row['energy_saved_vs_equal_max_power']:.1%}",
            f"{1000 * row['solve_time']:.1f}",
        )
    console.print(view)
    for method, reason in skipped.items():
        console.print(f"{method}: left out: {reason}", markup=False, highlight=False)


def _short(figures: Sequence[int]) -> str:
    """Figures in a row, equal neighbours counted: ``1140 / 812 / 4 x 536``."""
    runs = [(figure, len(list(group))) for figure, group in itertools.groupby(figures)]
    return " / ".join(f"{n} x {figure}" if n > 2 else " / ".join([str(figure)] * n)
                      for figure, n in runs)  # fmt: skip


def _draw(
    traces: dict[str, Trace],
    plans: dict[str, Allocation],
    folder: Path,
    problem: Problem,
    options: dict[str, Any],
) -> list[Path]:
    from zeus_hetero import plotting
    from zeus_hetero.gpu_model import fit
    from zeus_hetero.pareto import pareto_front

    folder.mkdir(parents=True, exist_ok=True)
    figures = {f"{name}_fit.png": plotting.plot_model(fit(trace, str(options["model"])), name)
               for name, trace in traces.items()}  # fmt: skip
    figures["methods.png"] = plotting.plot_methods(plans)
    if options["objective"] == "synchronous":
        front = pareto_front(traces, problem.global_batch_size, **options)
        figures["pareto.png"] = plotting.plot_pareto(front, plans)
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=130)
    return [folder / name for name in figures]
