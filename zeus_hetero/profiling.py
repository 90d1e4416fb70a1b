"""Profile a training step: time and energy over batch sizes and power limits.

`profile` measures a callable in this process. `profile_run.profile_with_script` drives a
training script that calls `profile`, one child process per batch size, and can be interrupted.
"""

from __future__ import annotations

import re
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import zeus

from zeus_hetero import devices, simulation
from zeus_hetero.device_order import check_device_order
from zeus_hetero.errors import ProfilingError, TraceWarning
from zeus_hetero.gpu_lock import gpu_lock
from zeus_hetero.measure import Idle, Meter, Window, Windows, measure_idle, measure_wait
from zeus_hetero.profile_link import Driver, Progress
from zeus_hetero.profiled_gpu import ProfiledGPU, is_whole
from zeus_hetero.restore import Restorer, repair_from_notes
from zeus_hetero.trace import Trace, load_trace

OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE
)
"""How torch and CUDA say that the GPU's memory is too small."""

NOISY_SPREAD = 0.05
"""Relative standard deviation between the windows of a point above which it is called noisy."""


def profile(
    step: Callable[[int], object],
    batch_sizes: Sequence[int],
    power_limits: Sequence[int],
    *,
    gpu_index: int = 0,
    gpu: str | None = None,
    warmup_steps: int = 10,
    warmup_time: float = 1.0,
    profile_steps: int = 40,
    counter_ticks: int = 50,
    repeats: int = 3,
    fields: Mapping[str, Any] | None = None,
    on_progress: Callable[[Progress], object] | None = None,
) -> Trace:
    """Measure a training step at every batch size and power limit.

    Each point is measured in several windows. The power limits are gone through downward and
    upward in turn, so that a GPU that heats up does not make the last limit look bad. The power
    limit is what it was before when this returns, raises or is told to end.

    Args:
        step: runs one training step of that many samples; it need not wait for the GPU.
        batch_sizes: samples; they are sorted.
        power_limits: W, within the GPU's range.
        gpu_index: the GPU that `step` uses.
        gpu: name of the GPU model for the trace; Zeus's name for it by default.
        warmup_steps: steps before every window.
        warmup_time: s before every window, at least.
        profile_steps: steps in a window, at least.
        counter_ticks: movements of the energy counter in a window, at least.
        repeats: windows per point.
        fields: more to write into every record, such as ``{"arch": "resnet18"}``.
        on_progress: called after every window.

    Returns:
        The trace. Batch sizes that do not fit into memory are missing, and every record then
        says ``out_of_memory_at``.

    Raises:
        PowerLimitError: the GPU does not support a limit, or its driver refuses it.
        PowerLimitPermissionError: this process may not set power limits.
        DeviceError: there is no GPU, or CUDA and the driver number GPUs differently.
        ProfilingError: the figures make no sense, or not even the smallest batch size fits.
        GPUBusyError: another profiler is using the GPU.
    """
    windows = Windows(warmup_steps, warmup_time, profile_steps, counter_ticks, repeats)
    card = ProfiledGPU(gpu_index)
    sizes = check_batch_sizes(batch_sizes)
    limits = card.check_power_limits(power_limits)
    driver = Driver.from_environment()
    with _alone_on_gpu(card, driver):
        card.try_power_limits(limits)
        devices.set_persistence_mode(card.gpus, card.index)
        idle = driver.idle if driver else measure_idle(card)
        grid = _Grid(step, limits, card, windows, idle, driver, on_progress, len(sizes))
        common = {"gpu": gpu or card.name, **_origin(card), **(fields or {})}
        common["idle_power"] = round(idle.power, 3)
        records: list[dict[str, Any]] = []
        for size in sizes:
            try:
                measured = grid.measure(size)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                _note_out_of_memory(size, records, error)
                break
            wait = measure_wait(card)
            if wait is not None:
                common["wait_power"] = round(wait, 3)
            records += [{"batch_size": size, **point, **common} for point in measured]
    _warn_about_noise(records)
    return replace(load_trace(pd.DataFrame(records)), source=f"profile of {card}")


def check_batch_sizes(
    batch_sizes: Sequence[int], dataset_size: int | None = None
) -> tuple[int, ...]:
    """Sort batch sizes and drop duplicates.

    Args:
        batch_sizes: samples.
        dataset_size: samples in the training set, where it is known.

    Raises:
        ProfilingError: one of them is impossible.
    """
    if not batch_sizes:
        raise ProfilingError("no batch sizes; expected at least one, such as 32.")
    bad = [size for size in batch_sizes if not is_whole(size) or size < 1]
    if bad:
        raise ProfilingError(
            f"batch sizes {', '.join(map(str, bad))}; expected whole numbers of at least 1."
        )
    large = [size for size in batch_sizes if dataset_size is not None and size > dataset_size]
    if large:
        raise ProfilingError(
            f"batch sizes {', '.join(map(str, large))} are larger than the data set, which has "
            f"{dataset_size} samples; expected at most that."
        )
    return tuple(sorted({int(size) for size in batch_sizes}))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the GPU's memory is too small."""
    return bool(OUT_OF_MEMORY.search(f"{type(error).__name__} {error}"))


def driver_version(text: str) -> str | None:
    """The version in the text that NVIDIA's driver gives in /proc; None if there is none."""
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found.group() if found else None


@contextmanager
def _alone_on_gpu(gpu: ProfiledGPU, driver: Driver | None) -> Iterator[None]:
    """Hold the GPU's lock, and put its power limit back whatever ends the block."""
    # A driver holds the lock already, and this process holds it with it.
    lock = gpu_lock(gpu, "zeus_hetero.profile") if driver is None else None
    if lock is not None:
        lock.acquire()
    try:
        if lock is not None:
            repair_from_notes(gpus=[gpu.number])
        restorer = Restorer(gpu.gpus, [gpu.index])
        try:
            yield
        finally:
            restorer.restore()
    finally:
        if lock is not None:
            lock.release()


class _Grid:
    """Measures all power limits at one batch size after the other."""

    def __init__(
        self,
        step: Callable[[int], object],
        power_limits: tuple[int, ...],
        gpu: ProfiledGPU,
        windows: Windows,
        idle: Idle,
        driver: Driver | None,
        on_progress: Callable[[Progress], object] | None,
        sizes: int,
    ) -> None:
        self._step = step
        self._limits = power_limits
        self._gpu = gpu
        self._repeats = windows.repeats
        self._meter = Meter(gpu, windows, idle)
        self._driver = driver
        self._on_progress = on_progress
        self._done = 0
        self._ran = False
        self._total = sizes * len(power_limits) * windows.repeats

    def measure(self, batch_size: int) -> list[dict[str, Any]]:
        measured: dict[int, list[Window]] = {limit: [] for limit in self._limits}
        for repeat in range(self._repeats):
            for limit in self._limits if repeat % 2 == 0 else self._limits[::-1]:
                self._gpu.set_power_limit(limit)
                window = self._meter.measure(lambda: self._run(batch_size))
                measured[limit].append(window)
                self._report(batch_size, limit, window)
        return [_summary(limit, windows, self._gpu) for limit, windows in measured.items()]

    def _run(self, batch_size: int) -> None:
        if self._driver is not None:
            self._driver.check()
        self._step(batch_size)
        if not self._ran:
            # Only now CUDA is certain to be in use, and to have numbered its GPUs.
            check_device_order(self._gpu.gpus, [self._gpu.index])
            self._ran = True

    def _report(self, batch_size: int, limit: int, window: Window) -> None:
        self._done += 1
        progress = Progress(
            batch_size,
            limit,
            self._done,
            self._total,
            window.time / window.steps,
            window.energy / window.steps,
        )
        if self._driver is not None:
            self._driver.report(progress)
        if self._on_progress is not None:
            self._on_progress(progress)


def _summary(power_limit: int, windows: Sequence[Window], gpu: ProfiledGPU) -> dict[str, Any]:
    """The record of a point: sums over its windows, and how far these are apart."""
    record: dict[str, Any] = {
        "power_limit": power_limit,
        "energy": sum(window.energy for window in windows),
        "time": sum(window.time for window in windows),
        "steps": sum(window.steps for window in windows),
        "repeats": len(windows),
    }
    if len(windows) > 1:
        for figure in ("time", "energy"):
            per_step = [getattr(window, figure) / window.steps for window in windows]
            spread = statistics.stdev(per_step) / statistics.mean(per_step)
            record[f"{figure}_spread"] = round(spread, 5)
        record["noisy"] = max(record["time_spread"], record["energy_spread"]) > NOISY_SPREAD
    degrees = gpu.temperature()
    return record if degrees is None else {**record, "temperature": degrees}


def _origin(gpu: ProfiledGPU) -> dict[str, Any]:
    """Where figures come from, for every record."""
    origin: dict[str, Any] = {"gpu_name": gpu.name, "zeus": zeus.__version__}
    if "torch" in sys.modules:
        origin["torch"] = str(sys.modules["torch"].__version__)
    if simulation.active() is not None:
        return {**origin, "driver": "simulated", "simulated": True}
    path = Path("/proc/driver/nvidia/version")
    version = driver_version(path.read_text(encoding="utf-8")) if path.exists() else None
    if version:
        origin["driver"] = version
    return origin


def _note_out_of_memory(size: int, records: list[dict[str, Any]], error: Exception) -> None:
    if not records:
        raise ProfilingError(
            f"out of memory at batch size {size}, the smallest ({error}); profile smaller ones."
        ) from error
    for record in records:
        record["out_of_memory_at"] = size
    warnings.warn(
        f"out of memory at batch size {size}; profiled up to {records[-1]['batch_size']}.",
        TraceWarning,
        stacklevel=3,
    )
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.empty_cache()


def _warn_about_noise(records: Sequence[Mapping[str, Any]]) -> None:
    noisy = [f"{r['batch_size']} at {r['power_limit']} W" for r in records if r.get("noisy")]
    if noisy:
        warnings.warn(
            f"noisy points (batch size at power limit): {', '.join(noisy)}; their windows differ "
            f"by more than {NOISY_SPREAD:.0%}. Profile with more repeats or longer windows.",
            TraceWarning,
            stacklevel=3,
        )
