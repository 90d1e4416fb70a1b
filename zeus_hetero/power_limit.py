"""Zeus's power limit optimizer for nodes and jobs whose GPUs differ."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from zeus.monitor import energy as monitor_clock
from zeus.optimizer.power_limit import (
    Done,
    GlobalPowerLimitOptimizer,
    OptimumSelector,
    PowerLimitMeasurement,
    Profiling,
    Warmup,
    ZeusCost,
)
from zeus.utils.framework import is_distributed
from zeus.utils.metric import zeus_cost

from zeus_hetero import devices, ladder, rung_profile
from zeus_hetero.device_order import check_device_order
from zeus_hetero.errors import DeviceError, PowerLimitError, PowerLimitWarning
from zeus_hetero.gpu_names import worker_for
from zeus_hetero.restore import Restorer, repair_from_notes

if TYPE_CHECKING:
    from zeus.monitor import ZeusMonitor

    from zeus_hetero.allocation import Allocation

logger = logging.getLogger(__name__)

# A window without energy is measured again with twice the steps, at most so often. NVML's
# counter moves every 20 to 100 ms, so 40 steps of 1 ms need two doublings.
_MAX_REPEATS = 4


class HeteroZeusCost(ZeusCost):
    """Zeus's cost for several GPUs with limits of their own.

    MaxPower is the sum of the GPUs' highest limits; Zeus multiplies one GPU's by their number.
    """

    def __init__(self, eta_knob: float, max_power: int) -> None:
        super().__init__(eta_knob)
        self.max_power = max_power

    def select(self, measurements: list[PowerLimitMeasurement]) -> int:
        """The rung with the lowest cost, W."""
        best = min(
            measurements,
            key=lambda m: zeus_cost(m.energy, m.time, self.eta_knob, self.max_power),
        )
        return int(best.power_limit)


class HeteroPowerLimitOptimizer(GlobalPowerLimitOptimizer):
    r"""Profiles power limits while training, or holds a planned one, and restores them after.

    Used like Zeus's `GlobalPowerLimitOptimizer`: the training loop calls `on_step_begin` and
    `on_epoch_end`. What is different:

    - Power limits can be listed; GPUs of one process may have different ones. All GPUs of a
      process move together from rung to rung: the first entries of their lists, the second ones.
    - **Every process decides alone, for its own GPUs, and takes part in no collective
      operation.** Zeus adds up energies over all ranks and picks one limit for all; with
      different GPUs there is no such limit, ranks with ladders of different lengths would
      wait for each other for ever, and ranks that see different watts would draw different
      conclusions. The training loop's own collectives are untouched. Mind that under data
      parallelism every GPU's steps last as long as the slowest GPU's: profile each GPU alone,
      then train with `allocation`.
    - The power limits of before come back, not the maximum: at exit, on an exception, on SIGINT
      and SIGTERM, by `close`, at the end of a `with` block. Afterwards the optimizer does
      nothing more. A run that was killed is repaired by the next one, or from its note
      (`zeus_hetero.restore`).
    - A reading of zero energy repeats the window with more steps instead of ending the training.

    Args:
        monitor: Zeus's monitor of this process's GPUs.
        optimum_selector: picks a rung by its measurements; Zeus's cost with eta 0.5 if None.
        wait_steps: steps to let pass at the beginning.
        warmup_steps: steps on each rung before it is measured, at least 1.
        profile_steps: steps to measure on each rung.
        pl_step: stride of the power limits in W, where none are listed.
        profile_path: file of measurements. Read if it is of the same GPUs, batch size and power
            limits; if it is of others, it is left alone, with a warning, and a file beside it is
            used.
        power_limits: exactly these limits, in this order, W; for all GPUs, or a mapping from GPU
            index or model name to such lists of equal length.
        power_limit: no profiling: set this limit (W), or a mapping as above.
        allocation: no profiling: set this worker's limit of the plan.
        rank: this worker's place in the plan; torch's, or the variable RANK, if None.
        batch_size: samples per step; only distinguishes files of measurements.
        min_window: s; windows go on beyond `profile_steps` until they last as long.
        note: file for the previous limits while they are changed; in
            `zeus_hetero.restore.note_folder()` if None.

    Attributes:
        windows: what was measured, rung by rung, as it was read; `measurements` are the same
            scaled to `profile_steps`, summed over this process's GPUs.
        ladder: the rungs.

    Further attributes are Zeus's; of these, `pl_step`, `power_limits` and
    `current_power_limit` are in mW and mean the GPU `ladder.reference`.

    Raises:
        PowerLimitError: an unsupported, repeated, fractional or missing power limit.
        PowerLimitPermissionError: power limits may not be set; nothing was changed.
        DeviceError: no GPU, CUDA and the driver number GPUs differently, or no framework.
        PlanError: the plan has no worker for this GPU.
    """

    current_power_limit: int
    profile_path: Path | None

    def __init__(
        self,
        monitor: ZeusMonitor,
        optimum_selector: OptimumSelector | None = None,
        wait_steps: int = 1,
        warmup_steps: int = 10,
        profile_steps: int = 40,
        pl_step: int = 25,
        profile_path: str | Path | None = None,
        *,
        power_limits: Iterable[int] | ladder.PerGPU | None = None,
        power_limit: int | ladder.PerGPU | None = None,
        allocation: Allocation | None = None,
        rank: int | None = None,
        batch_size: int | None = None,
        min_window: float = 0.0,
        note: str | os.PathLike[str] | None = None,
    ) -> None:
        _check_arguments(warmup_steps, pl_step, power_limits, power_limit, allocation)
        distributed = _framework_is_distributed()
        self._gpus = devices.get_gpus()
        infos = _gpu_infos(self._gpus, monitor)
        check_device_order(self._gpus, [gpu.index for gpu in infos])
        if allocation is not None:
            power_limit = _planned_limits(allocation, infos, rank)
        self._fixed = power_limit is not None
        if power_limit is not None:
            self.ladder = ladder.fixed(infos, power_limit)
        elif power_limits is not None:
            self.ladder = ladder.explicit(infos, power_limits)
        else:
            self.ladder = ladder.full_range(infos, pl_step)

        self.windows: list[rung_profile.Window] = []
        self.min_window = min_window
        self._names = tuple(gpu.name for gpu in infos)
        self._key = rung_profile.ProfileKey(
            self._names, batch_size, tuple(self.ladder.limits[gpu.index] for gpu in infos)
        )
        self._repeats = 0
        self._window_steps = 0
        self._window_start = 0.0
        path = None if self._fixed or profile_path is None else self._usable(Path(profile_path))

        self._restorer = self._take_over(note)
        try:
            super().__init__(
                _OneGPU(monitor, self.ladder.reference),  # type: ignore[arg-type]
                optimum_selector or HeteroZeusCost(0.5, self.ladder.max_power()),
                wait_steps,
                warmup_steps,
                profile_steps,
                pl_step,
                path,
            )
        except BaseException:
            self._restorer.restore()
            raise
        # Zeus has registered an exit hook that sets the maximum; ours must come before it.
        self._restorer.arm()
        self.monitor = monitor
        if self._fixed:
            self.state = Done(optimal_power_limit=self.power_limits[0])
        elif distributed and not isinstance(self.state, Done):
            logger.warning(
                "Profiling in a distributed job: every rank decides for its own GPU, and its "
                "measurements include the wait for the slowest rank. Profile each GPU alone and "
                "train with a plan for better decisions."
            )

    @property
    def power_limits(self) -> list[int]:
        """The rungs as Zeus knows them: limits of the reference GPU, mW."""
        return [rung * 1000 for rung in self.ladder.rungs]

    @power_limits.setter
    def power_limits(self, value: list[int]) -> None:
        """Zeus's constructor assigns the reference GPU's whole range; the ladder stands."""

    def on_step_begin(self) -> None:
        """Mark the beginning of a training step."""
        if not self._restorer.is_active:
            return
        if not isinstance(self.state, Profiling):
            super().on_step_begin()
            if isinstance(self.state, Profiling):
                self._note_window_start(self.state.steps)
            return
        # Not left to Zeus: it would reduce over all ranks, and cannot repeat a window.
        remaining = self.state.steps - 1
        if remaining > 0:
            self.state.steps = remaining
        elif monitor_clock.time() - self._window_start < self.min_window:
            self._window_steps += 1
        else:
            self._end_window(self.state.current_power_limit)

    def on_epoch_end(self) -> None:
        """Mark the end of a training epoch; a window that was open is measured anew."""
        if not self._restorer.is_active:
            return
        if isinstance(self.state, (Warmup, Profiling)):
            logger.info(
                "The epoch ended before %d W was measured, which takes %d steps.",
                self.state.current_power_limit // 1000,
                self.warmup_steps + self.profile_steps,
            )
        super().on_epoch_end()

    def close(self) -> None:
        """Put back the power limits of before and stop; does nothing the second time."""
        if self._restorer.is_active and isinstance(self.state, Profiling):
            try:
                self.monitor.end_window(self._window_name(), cancel=True)
            except Exception as error:
                logger.warning("The open measurement window was not closed: %s", error)
        self._restorer.restore()

    def __enter__(self) -> HeteroPowerLimitOptimizer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _take_over(self, note: str | os.PathLike[str] | None) -> Restorer:
        """Repair what a killed run left, then remember the limits, before any is changed."""
        indices = list(self.ladder.limits)
        physical = [devices.physical_index(self._gpus, index) for index in indices]
        for index in indices:
            devices.check_permission(self._gpus, index)
        for entry in repair_from_notes(gpus=physical):
            logger.warning(
                "GPU %d (%s): power limit put back to %g W, which a killed run had left changed.",
                *(entry.gpu, entry.name, entry.limit / 1000),
            )
        for index in indices:
            devices.set_persistence_mode(self._gpus, index)
        return Restorer(self._gpus, indices, note, guarded=True)

    def _set_power_limit(self, power_limit: int) -> None:
        """Move all GPUs of this process to a rung.

        Args:
            power_limit: the rung's name, mW.
        """
        # Zeus's exit hook calls this after the restore, and so would a forked child's.
        if not self._restorer.is_active or self.current_power_limit == power_limit:
            return
        setting = self.ladder.setting(power_limit // 1000)
        logger.info("Setting power limits: %s", setting)
        for index, watts in setting.items():
            devices.set_limit_mw(self._gpus, index, watts * 1000)
        self.current_power_limit = power_limit

    def _window_name(self) -> str:
        assert isinstance(self.state, Profiling)
        return f"__GlobalPowerLimitOptimizer_{self.state.current_power_limit // 1000}"

    def _note_window_start(self, steps: int) -> None:
        self._window_steps = steps
        self._window_start = monitor_clock.time()

    def _end_window(self, rung: int) -> None:
        measured = self.monitor.end_window(self._window_name())
        window = rung_profile.Window(
            rung // 1000, self._window_steps, measured.time, dict(measured.gpu_energy)
        )
        if not _is_valid(window):
            if self._repeats < _MAX_REPEATS:
                self._repeat_window(window)
                return
            window = self._approximated(window)
        self._repeats = 0
        self._add(window)
        self._next_rung(rung)

    def _repeat_window(self, window: rung_profile.Window) -> None:
        self._repeats += 1
        steps = 2 * window.steps
        warnings.warn(
            f"{window.power_limit} W: a window of {window.steps} steps and {window.time:.3g} s "
            f"reads {dict(window.energy)} J; it is too short for the energy counter, or the "
            f"counter was reset. Measuring again with {steps} steps.",
            PowerLimitWarning,
            stacklevel=2,
        )
        self.state = Profiling(current_power_limit=window.power_limit * 1000, steps=steps)
        self.monitor.begin_window(self._window_name())
        self._note_window_start(steps)

    def _approximated(self, window: rung_profile.Window) -> rung_profile.Window:
        time = window.time if window.time > 0 else 1e-6
        setting = self.ladder.setting(window.power_limit)
        energy = {
            index: joules if joules > 0 else setting[index] * time
            for index, joules in window.energy.items()
        }
        warnings.warn(
            f"{window.power_limit} W: the energy counter still did not move in {window.steps} "
            f"steps. Power limit x time, {energy} J, stands in for it and is marked as "
            "approximate. Use larger profile_steps or min_window.",
            PowerLimitWarning,
            stacklevel=2,
        )
        return replace(window, time=time, energy=energy, approximate=True)

    def _add(self, window: rung_profile.Window) -> None:
        self.windows.append(window)
        # Zeus's selectors compare windows as they are, so these must hold equal work.
        scale = self.profile_steps / window.steps
        self.measurements.append(
            PowerLimitMeasurement(
                power_limit=window.power_limit,
                energy=sum(window.energy.values()) * scale,
                time=window.time * scale,
            )
        )

    def _next_rung(self, rung: int) -> None:
        rungs = self.power_limits
        position = rungs.index(rung) + 1
        if position < len(rungs):
            self._set_power_limit(rungs[position])
            self.state = Warmup(current_power_limit=rungs[position], steps=self.warmup_steps)
            return
        self.state = Done(optimal_power_limit=self._compute_optimal_power_limit())
        self._set_power_limit(self.state.optimal_power_limit)
        self._save_profile()

    def _usable(self, path: Path) -> Path:
        """The file itself, or the one beside it if it holds somebody else's measurements."""
        if not path.exists():
            beside = self._key.beside(path)
            return beside if beside.exists() else path
        reason = rung_profile.mismatch(path, self._key)
        if reason is None:
            return path
        beside = self._key.beside(path)
        found = beside.exists() and rung_profile.mismatch(beside, self._key) is None
        warnings.warn(
            f"{path}: not used, because {reason}. "
            + (f"Measurements are read from {beside}." if found else f"Measuring into {beside}."),
            PowerLimitWarning,
            stacklevel=3,
        )
        if beside.exists() and not found:
            # Its name says that it is ours, so it is damaged; Zeus would try to read it.
            beside.replace(beside.with_name(beside.name + ".damaged"))
        return beside

    def _save_profile(self) -> None:
        """Save the measurements; failing to must not end the training that they are part of."""
        if self.profile_path is None:
            return
        # Another rank, of another GPU, may have written it meanwhile.
        if self.profile_path.exists() and rung_profile.mismatch(self.profile_path, self._key):
            self.profile_path = self._key.beside(self.profile_path)
        entries = [
            {
                "power_limit": window.power_limit,
                "energy": measurement.energy,
                "time": measurement.time,
                "steps": window.steps,
                "approximate": window.approximate,
            }
            for window, measurement in zip(self.windows, self.measurements)
        ]
        try:
            rung_profile.save(self.profile_path, self._key, self.ladder.rungs, entries)
        except OSError as error:
            warnings.warn(
                f"{self.profile_path}: the measurements could not be saved ({error}). They are "
                f"{entries}",
                PowerLimitWarning,
                stacklevel=2,
            )


class _OneGPU:
    """A monitor as Zeus's constructor sees it: with one GPU, so that ranges cannot differ."""

    def __init__(self, monitor: ZeusMonitor, index: int) -> None:
        self._monitor = monitor
        self.gpu_indices = [index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._monitor, name)


def _check_arguments(
    warmup_steps: int, pl_step: int, power_limits: Any, power_limit: Any, allocation: Any
) -> None:
    if warmup_steps < 1:
        raise ValueError(f"warmup_steps is {warmup_steps}; expected at least 1 step.")
    if pl_step < 1 or pl_step != int(pl_step):
        raise ValueError(f"pl_step is {pl_step}; expected whole W, at least 1.")
    given = [
        name
        for name, value in (
            ("power_limits", power_limits),
            ("power_limit", power_limit),
            ("allocation", allocation),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise PowerLimitError(
            f"{' and '.join(given)} contradict each other; give power_limits to profile, or "
            "power_limit or allocation to hold one limit."
        )


def _is_valid(window: rung_profile.Window) -> bool:
    return window.time > 0 and all(joules > 0 for joules in window.energy.values())


def _framework_is_distributed() -> bool:
    try:
        return bool(is_distributed())
    except RuntimeError as error:
        raise DeviceError(
            f"Zeus's optimizer cannot work here ({error}): it needs torch or JAX in the same "
            "environment. Install one: pip install torch"
        ) from error


def _gpu_infos(gpus: Any, monitor: ZeusMonitor) -> list[ladder.GPUInfo]:
    if not monitor.gpu_indices:
        raise DeviceError(
            "the monitor has no GPU. Check `nvidia-smi`, CUDA_VISIBLE_DEVICES (MIG slices are "
            "not supported) and `docker run --gpus all`, or use simulated GPUs."
        )
    return [
        ladder.GPUInfo(index, devices.name(gpus, index), *devices.limit_range(gpus, index))
        for index in monitor.gpu_indices
    ]


def _planned_limits(
    allocation: Allocation, gpus: list[ladder.GPUInfo], rank: int | None
) -> dict[int | str, int]:
    """Each GPU's limit in the plan; several GPUs of one process are as many places in it."""
    first = _rank() if rank is None else rank
    return {
        gpu.index: worker_for(
            allocation, gpu.name, position if first is None else first + position
        ).power_limit
        for position, gpu in enumerate(gpus)
    }


def _rank() -> int | None:
    try:
        import torch.distributed as distributed
    except ImportError:
        pass
    else:
        if distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank())
    return int(os.environ["RANK"]) if os.environ.get("RANK", "").isdigit() else None
