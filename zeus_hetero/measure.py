"""How one point is measured: warm up, then windows long enough for the energy counter."""

from __future__ import annotations

import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zeus.monitor import ZeusMonitor

from zeus_hetero import simulation
from zeus_hetero.errors import ProfilingError
from zeus_hetero.profiled_gpu import ProfiledGPU

_WATCH_SECONDS = 2.0
_PATIENCE_SECONDS = 30.0
_POLL_SECONDS = 0.002
_SPIN_CYCLES = 10_000_000  # some 6 ms
_ATTEMPTS = 4
_PLAUSIBLE_POWER_RATIO = 1.5


@dataclass(frozen=True)
class Windows:
    """How long and how often to measure.

    Attributes:
        warmup_steps: steps before every window, at least 1.
        warmup_time: s before every window, so that clocks and temperature have settled.
        profile_steps: steps in a window, at least.
        counter_ticks: movements of the energy counter in a window, at least. The energy of a
            window is uncertain by one of them: 50 give 2 %.
        repeats: windows per point.
    """

    warmup_steps: int = 10
    warmup_time: float = 1.0
    profile_steps: int = 40
    counter_ticks: int = 50
    repeats: int = 3

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "profile_steps", "counter_ticks", "repeats"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ProfilingError(f"{name} is {value!r}; expected a whole number of at least 1.")
        if not 0 <= self.warmup_time < math.inf:
            raise ProfilingError(f"warmup_time is {self.warmup_time!r}; expected seconds.")


@dataclass(frozen=True)
class Window:
    """One measured window: `steps` steps in `time` s with `energy` J."""

    steps: int
    time: float
    energy: float


@dataclass(frozen=True)
class Idle:
    """What a GPU does while nothing runs on it.

    Attributes:
        power: W.
        counter_period: s between two movements of its energy counter.
    """

    power: float
    counter_period: float


class Meter:
    """Measures training steps on one GPU with Zeus's monitor.

    Args:
        gpu: the GPU.
        windows: how long and how often.
        idle: measured before anything runs.
    """

    def __init__(self, gpu: ProfiledGPU, windows: Windows, idle: Idle) -> None:
        self._gpu = gpu
        self._windows = windows
        self._idle = idle
        self._monitor = ZeusMonitor(gpu_indices=[gpu.index], cpu_indices=[])

    def measure(self, step: Callable[[], object]) -> Window:
        """Warm up and measure one window.

        Args:
            step: runs one training step.

        Raises:
            ProfilingError: the energy counter gives nonsense, time and again.
        """
        step_time = self._warm_up(step)
        wanted = self._windows.counter_ticks * self._idle.counter_period
        for _ in range(_ATTEMPTS):
            steps = max(self._windows.profile_steps, math.ceil(wanted / step_time))
            window = self._run(step, steps)
            if self._is_sound(window) and window.time >= 0.9 * wanted:
                return window
            step_time = window.time / window.steps
        raise ProfilingError(
            f"{self._gpu}: {_ATTEMPTS} windows in a row were unusable, the last "
            f"with {window.energy:.3f} J in {window.time:.3f} s; expected {wanted:.2f} s at "
            f"between {self._idle.power / 2:.0f} W and "
            f"{_PLAUSIBLE_POWER_RATIO * self._gpu.power_range[1]:.0f} W. "
            "Is the energy counter of this GPU reset or shared (MIG, virtual GPU)?"
        )

    def _warm_up(self, step: Callable[[], object]) -> float:
        """Run until steps and time suffice; returns the time of a step at the end, s."""
        # The first step may build the model and tune kernels: no measure of the others.
        step()
        steps, elapsed = self._windows.warmup_steps, 0.0
        while True:
            window = self._run(step, steps)
            elapsed += window.time
            if window.time <= 0:
                raise ProfilingError(
                    f"{self._gpu}: {steps} steps took no time. On a simulated GPU "
                    "the step has to call simulation.active()[gpu].run_step(batch_size)."
                )
            step_time = window.time / steps
            missing = self._windows.warmup_time - elapsed
            if missing <= 0:
                return step_time
            steps = math.ceil(missing / step_time)

    def _run(self, step: Callable[[], object], steps: int) -> Window:
        # The monitor waits for the GPU at both ends, so no step may synchronise in between.
        self._monitor.begin_window("zeus_hetero")
        try:
            for _ in range(steps):
                step()
        except BaseException:
            _cancel(self._monitor)
            raise
        with warnings.catch_warnings():
            # Warm-up may be shorter than a movement of the counter; windows are checked.
            warnings.filterwarnings("ignore", message="The energy consumption of one or more")
            measured = self._monitor.end_window("zeus_hetero")
        return Window(steps, measured.time, measured.gpu_energy[self._gpu.index])

    def _is_sound(self, window: Window) -> bool:
        power = window.energy / window.time if window.time > 0 else 0.0
        highest = _PLAUSIBLE_POWER_RATIO * self._gpu.power_range[1]
        return self._idle.power / 2 < power <= highest


def measure_idle(gpu: ProfiledGPU) -> Idle:
    """Measure the power of an idle GPU, and how often its energy counter moves (about 2 s).

    Raises:
        ProfilingError: the counter does not move.
    """
    power, period = _watch(gpu, lambda: sleep(_POLL_SECONDS))
    return Idle(power, period)


def measure_wait(gpu: ProfiledGPU) -> float | None:
    """Measure what the GPU draws while it waits for other GPUs (about 2 s).

    A collective waits in a small kernel that spins, so that is what runs here.

    Returns:
        W; None where it cannot be made to wait because the step does not use torch.
    """
    simulated = simulation.active()
    torch: Any = sys.modules.get("torch")
    if simulated is not None:
        card = simulated[gpu.index]
        return _watch(gpu, lambda: card.wait_until(card.clock + _POLL_SECONDS))[0]
    if torch is None or not torch.cuda.is_available():
        return None

    def spin() -> None:
        with torch.cuda.device(gpu.index):
            torch.cuda._sleep(_SPIN_CYCLES)
            torch.cuda.synchronize()

    return _watch(gpu, spin)[0]


def _watch(gpu: ProfiledGPU, pass_time: Callable[[], object]) -> tuple[float, float]:
    """Watch the energy counter: power (W) and time between two movements (s)."""
    begin, last = _now(), gpu.energy()
    moved: list[tuple[float, float]] = []
    while _now() < begin + _WATCH_SECONDS or len(moved) < 3:
        pass_time()
        reading = gpu.energy()
        if reading != last:
            moved.append((_now(), reading))
            last = reading
        if _now() > begin + _PATIENCE_SECONDS:
            raise ProfilingError(
                f"{gpu}: its energy counter moved {len(moved)} times in "
                f"{_PATIENCE_SECONDS:.0f} s; expected a movement every 0.02 to 0.1 s. Energy "
                "cannot be measured on this GPU."
            )
    # From movement to movement, where time and energy belong together.
    (start, low), (end, high) = moved[0], moved[-1]
    gaps = [after[0] - before[0] for before, after in zip(moved, moved[1:])]
    return (high - low) / (end - start), statistics.median(gaps)


def sleep(seconds: float) -> None:
    """Do nothing, on the virtual clock where GPUs are simulated."""
    simulated = simulation.active()
    if simulated is not None:
        simulated.sleep(seconds)
    else:
        time.sleep(seconds)


def _now() -> float:
    simulated = simulation.active()
    return simulated.clock.now if simulated is not None else time.monotonic()


def _cancel(monitor: ZeusMonitor) -> None:
    try:
        monitor.end_window("zeus_hetero", sync_execution=False, cancel=True)
    except Exception:
        # The step's own error is what matters; a lost GPU cannot even close the window.
        return
