"""The grid driver: one child process per batch size, and nothing lost whatever happens."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from zeus_hetero import simulation
from zeus_hetero.errors import ProfilingError
from zeus_hetero.gpu_lock import GPULock, gpu_lock
from zeus_hetero.measure import Idle, Windows, measure_idle
from zeus_hetero.profile_folder import ProfileFolder, delete_notes_of
from zeus_hetero.profile_link import Listener
from zeus_hetero.profile_progress import ProgressReport
from zeus_hetero.profile_signals import Interrupted, signals
from zeus_hetero.profiled_gpu import ProfiledGPU
from zeus_hetero.profiling import OUT_OF_MEMORY, check_batch_sizes
from zeus_hetero.restore import (
    PreviousLimit,
    note_folder,
    repair_from_notes,
    restore_from_note,
)

# Idle cards draw a tenth to a quarter of their limit; more means that something runs on it.
_BUSY_RATIO = 0.4
_SECONDS_TO_END = 15.0
_LAST_LINES = 15


class Process(Protocol):
    """What the driver needs of a child process; `subprocess.Popen` has it."""

    pid: int

    def poll(self) -> int | None:
        """Exit status, None while it runs."""

    def send_signal(self, number: int) -> None:
        """Send a signal."""


@dataclass(frozen=True)
class Grid:
    """What to profile, with which script, into which folder.

    Attributes:
        folder: where results go.
        command: gives the command line of the training script for a batch size and the file
            that it has to write its trace to (as `zeus_hetero.profile(...).save(file)` does).
        batch_sizes: samples.
        power_limits: W.
        gpu_index: the GPU.
        windows: how long and how often each point is measured.
        settings: what the figures depend on, such as arch and data set; a folder is only
            continued with the same.
        dataset_size: samples in the training set, where it is known.
    """

    folder: str | os.PathLike[str]
    command: Callable[[int, Path], Sequence[str]]
    batch_sizes: Sequence[int]
    power_limits: Sequence[int]
    gpu_index: int = 0
    windows: Windows = field(default_factory=Windows)
    settings: Mapping[str, Any] = field(default_factory=dict)
    dataset_size: int | None = None


def profile_with_script(
    grid: Grid,
    *,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    launch: Callable[..., Process] = subprocess.Popen,
    out: IO[str] | None = None,
) -> int:
    """Profile a training script over batch sizes and power limits.

    Run again after an interruption it does only what is missing.

    Args:
        grid: what to do.
        resume: fail if there is nothing to continue; without it a folder is begun or continued.
        overwrite: delete the results that are in the folder first.
        dry_run: only print the plan.
        launch: starts a child process; called like `subprocess.Popen`.
        out: where to print; stderr by default.

    Returns:
        Exit status: 0 if all is measured or does not fit into memory, 1 if a batch size failed,
        128 + n if signal n ended it.

    Raises:
        ProfilingError: the request is impossible; nothing was run.
        PowerLimitError: the GPU does not support a power limit.
        PowerLimitPermissionError: this process may not set power limits.
        DeviceError: there is no GPU.
        GPUBusyError: another profiler uses the GPU or the folder.
    """
    gpu = ProfiledGPU(grid.gpu_index)
    sizes = check_batch_sizes(grid.batch_sizes, grid.dataset_size)
    limits = gpu.check_power_limits(grid.power_limits)
    folder = ProfileFolder(grid.folder)
    settings = _settings(grid, gpu, limits)
    folder.check(settings, resume=resume, overwrite=overwrite)
    report = ProgressReport(out or sys.stderr)
    finished = {} if overwrite else folder.finished(limits)
    todo = [size for size in sizes if size not in finished]
    _print_plan(report, grid, gpu, sizes, limits, todo)
    if dry_run:
        return 0
    folder.make()
    run = _Run(grid, gpu, folder, limits, report, launch)
    try:
        with signals.caught(), _locked(folder, gpu, report) as lock:
            folder.start(settings, overwrite=overwrite)
            return run.all(todo, lock)
    except Interrupted as interrupted:
        report.line(
            f"Interrupted. {folder.trace_path} holds what is finished; run the same command "
            "again to go on."
        )
        return 128 + interrupted.number


def reset(folder: str | os.PathLike[str] | None = None) -> str:
    """Put back the power limits that killed runs left changed.

    Args:
        folder: a profile folder; None for all runs on this machine that left a note.

    Returns:
        A sentence about what was done.

    Raises:
        DeviceError: the run is still going, or its GPU is not here.
        PowerLimitPermissionError: this process may not set power limits.
        ProfilingError: there is no such folder.
    """
    if folder is None:
        restored: list[PreviousLimit] = []
        for path in sorted(note_folder().glob("limits-*.json")):
            if path.exists():  # A link may lead to a folder that is gone.
                restored += restore_from_note(path)
    elif Path(folder).is_dir():
        restored = list(ProfileFolder(folder).repair())
    else:
        raise ProfilingError(f"{folder}: no such folder; expected a profile folder.")
    where = folder if folder is not None else note_folder()
    if not restored:
        return f"{where}: no run has left a power limit changed."
    return " ".join(_put_back_sentence(entry) for entry in dict.fromkeys(restored))


class _Run:
    """One run of the driver, under its locks."""

    def __init__(
        self,
        grid: Grid,
        gpu: ProfiledGPU,
        folder: ProfileFolder,
        limits: tuple[int, ...],
        report: ProgressReport,
        launch: Callable[..., Process],
    ) -> None:
        self._grid = grid
        self._gpu = gpu
        self._folder = folder
        self._limits = limits
        self._report = report
        self._launch = launch

    def all(self, sizes: Sequence[int], lock: GPULock) -> int:
        before = self._gpu.previous_limit()
        self._gpu.try_power_limits(self._limits)
        idle = measure_idle(self._gpu)
        self._warn_if_busy(idle)
        common = {"idle_power": round(idle.power, 3)}
        failed = []
        points = len(self._limits) * self._grid.windows.repeats
        with self._report.bar(len(sizes) * points):
            for number, size in enumerate(sizes):
                limit = self._folder.out_of_memory_at()
                if limit is not None and size >= limit:
                    self._report.line(
                        f"batch size {size}: skipped, {limit} did not fit into memory"
                    )
                    continue
                self._report.at(number * points)
                status = self._child(size, lock, idle, before)
                if not self._take(size, status):
                    failed.append(size)
                self._folder.merge(self._limits, common)
            # Also when there was nothing to do: the last merge may have been cut short.
            count = self._folder.merge(self._limits, common)
        return self._conclude(count, failed)

    def _child(self, size: int, lock: GPULock, idle: Idle, before: PreviousLimit) -> int:
        """Measure one batch size in a child process; afterwards the power limit is `before`."""
        command = list(self._grid.command(size, self._folder.result_path(size)))
        process = None
        try:
            # The lock on the GPU makes the name ours.
            pipe = note_folder() / f"progress-gpu-{self._gpu.number}"
            with Listener(pipe, idle) as listener, self._folder.log_path(size).open("wb") as log:
                with signals.deferred():
                    process = self._launch(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        # The child holds the lock too: should this process be killed, nobody
                        # may profile before the child has noticed.
                        pass_fds=(lock.fileno(),),
                        # A Ctrl-C is for this process, which then ends the child in order.
                        start_new_session=True,
                        env={**os.environ, **listener.environment()},
                    )
                return self._follow(process, listener)
        except OSError as error:
            raise ProfilingError(f"cannot start {command[0]} ({error}).") from None
        finally:
            with signals.deferred():
                if process is not None:
                    _end(process)
                # A child that was killed could not do so itself.
                if self._gpu.put_back(before) and process is not None:
                    delete_notes_of(process.pid)

    def _follow(self, process: Process, listener: Listener) -> int:
        """Show progress until the child ends; returns its exit status."""
        while True:
            status = process.poll()
            reports = listener.receive(0.0 if status is not None else 0.05)
            for progress in reports or ():
                self._report.window(progress)
            if status is not None and reports is None:
                return status

    def _take(self, size: int, status: int) -> bool:
        """Look at what a child left behind; False if its batch size failed."""
        log = self._folder.log_path(size)
        text = log.read_text(encoding="utf-8", errors="replace")
        if status == 0:
            missing = self._folder.missing(size, self._limits)
            if missing is None:
                return True
            self._report.line(f"batch size {size}: FAILED: {missing}. Log: {log}")
            return False
        self._folder.result_path(size).unlink(missing_ok=True)
        if OUT_OF_MEMORY.search(text):
            self._folder.note_out_of_memory(size)
            self._report.line(
                f"batch size {size}: does not fit into memory; recorded, larger ones are skipped"
            )
            return True
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        self._report.line(f"batch size {size}: FAILED: the training script {how}. Log: {log}")
        for line in text.splitlines()[-_LAST_LINES:]:
            self._report.line(f"    {line}")
        return False

    def _warn_if_busy(self, idle: Idle) -> None:
        if idle.power > _BUSY_RATIO * self._gpu.power_range[1]:
            self._report.line(
                f"WARNING: {self._gpu} draws {idle.power:.0f} W before anything was "
                "started; another process seems to use it, and its work will be measured too."
            )

    def _conclude(self, count: int, failed: Sequence[int]) -> int:
        for size, records in self._folder.finished(self._limits).items():
            noisy = [str(record["power_limit"]) for record in records if record.get("noisy")]
            if noisy:
                self._report.line(
                    f"batch size {size}: noisy at {', '.join(noisy)} W; measure again with more "
                    "--repeats"
                )
        if count:
            self._report.line(f"{self._folder.trace_path}: {count} batch sizes")
        if failed:
            self._report.line(
                f"Failed: batch sizes {', '.join(map(str, failed))}. Run the same command again "
                "to repeat them."
            )
        elif not count:
            self._report.line("Nothing was measured: not even the smallest batch size fits.")
        return 1 if failed or not count else 0


def _settings(grid: Grid, gpu: ProfiledGPU, limits: tuple[int, ...]) -> dict[str, Any]:
    """What the figures in a folder depend on, as JSON gives it back."""
    settings: dict[str, Any] = {
        "gpu_name": gpu.name,
        "power_limits": list(limits),
        "simulated": simulation.active() is not None,
        **asdict(grid.windows),
        **grid.settings,
    }
    if settings["simulated"]:
        # Two simulated GPUs of one name may play different traces.
        gpus = os.environ[simulation.SIMULATE]
        settings["simulation"] = hashlib.sha256(gpus.encode()).hexdigest()[:16]
    return dict(json.loads(json.dumps(settings)))


def _print_plan(
    report: ProgressReport,
    grid: Grid,
    gpu: ProfiledGPU,
    sizes: Sequence[int],
    limits: Sequence[int],
    todo: Sequence[int],
) -> None:
    windows = grid.windows
    measured = len(todo) * len(limits) * windows.repeats
    # 0.1 s is the slowest counter; a step of 0.1 s is the guess for what is not known yet.
    window = max(windows.counter_ticks * 0.1, windows.profile_steps * 0.1)
    warmup = max(windows.warmup_time, windows.warmup_steps * 0.1)
    seconds = measured * (window + warmup) + len(todo) * 15
    report.line(
        f"{gpu}: batch sizes {', '.join(map(str, sizes))} at "
        f"{', '.join(map(str, limits))} W, {windows.repeats} windows each, into {grid.folder}"
    )
    done = len(sizes) - len(todo)
    report.line(
        f"To do: {len(todo)} batch sizes{f' ({done} are finished)' if done else ''}, about "
        f"{seconds / 60:.0f} min if a step takes 0.1 s"
        f"{'; simulated, so seconds' if simulation.active() else ''}"
    )


@contextmanager
def _locked(folder: ProfileFolder, gpu: ProfiledGPU, report: ProgressReport) -> Iterator[GPULock]:
    """Hold the locks, and leave a note while power limits may be changed."""
    with ExitStack() as stack:
        locks = (folder.lock(), gpu_lock(gpu, str(folder.path.absolute())))
        for lock in locks:
            lock.acquire()
            stack.callback(lock.release)
        for entry in (*folder.repair(), *repair_from_notes(gpus=[gpu.number])):
            report.line(_put_back_sentence(entry))
        before = gpu.previous_limit()
        folder.write_note(before, gpu.gpus)
        try:
            yield locks[1]
        finally:
            with signals.deferred():
                if gpu.put_back(before):
                    folder.delete_notes()
                else:
                    report.line(
                        f"{gpu}: its power limit could not be put back to "
                        f"{before.limit / 1000:g} W; run zeus-hetero reset {folder.path}"
                    )


def _put_back_sentence(entry: PreviousLimit) -> str:
    return (
        f"GPU {entry.gpu} ({entry.name}): power limit put back to {entry.limit / 1000:g} W, which "
        "a killed run had left changed."
    )


def _end(process: Process) -> None:
    """End a child in order, so that it can clean up, and by force if it does not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        deadline = time.monotonic() + _SECONDS_TO_END
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
