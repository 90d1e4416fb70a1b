"""Time and energy of each epoch, over all ranks, and whether another one is worth its cost."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from zeus.utils.metric import zeus_cost

from zeus_hetero import devices, simulation
from zeus_hetero.errors import TrainingError
from zeus_hetero.metrics import from_all_ranks

if TYPE_CHECKING:
    from zeus.monitor import ZeusMonitor

    from zeus_hetero.job import Job

_WINDOW = "zeus_hetero_epoch"


@dataclass(frozen=True)
class Goal:
    """When to stop training.

    Attributes:
        target_metric: reached, it ends the training.
        cost_threshold: Zeus's cost of the training must not exceed it, J.
        eta: weight of energy against time in that cost.
    """

    target_metric: float | None = None
    cost_threshold: float | None = None
    eta: float = 0.5


@dataclass(frozen=True)
class EpochFigures:
    """What one epoch took.

    Attributes:
        epoch: its number.
        time: s, of the slowest rank.
        energy: J, of all ranks' GPUs; NaN without a GPU.
        cost: Zeus's cost, J; NaN likewise.
    """

    epoch: int
    time: float
    energy: float
    cost: float


class EpochMeter:
    """Measures epochs with Zeus's monitor.

    Args:
        job: the ranks; None for training independent of others.
        monitor: of this process's GPU; made here if None and there is a GPU.
        goal: when to stop.
        device_index: Zeus's index of the GPU, without a job.

    Attributes:
        history: one entry per epoch.
        time: s of this rank's epochs.
        energy: J of this rank's GPU in them.
        gpu_index: Zeus's index of the GPU; None without one.
        max_power: sum of the GPUs' highest power limits, W.
    """

    def __init__(
        self, job: Job | None, monitor: ZeusMonitor | None, goal: Goal, device_index: int = 0
    ) -> None:
        self._job = job
        self._goal = goal
        if monitor is None:
            monitor = _monitor(device_index if job is None else job.gpu_index)
        self._monitor = monitor
        self._start = 0.0
        self._last = [0.0, 0.0]
        self._limit: float | None = None
        self._reached = False
        self.history: list[EpochFigures] = []
        self.time = 0.0
        self.energy = 0.0
        indices = self._monitor.gpu_indices if self._monitor is not None else []
        self.gpu_index = indices[0] if indices else None
        self.max_power = job.allocation.max_power if job is not None else 0.0
        if job is None and indices:
            gpus = devices.get_gpus()
            self.max_power = float(sum(devices.limit_range(gpus, index)[1] for index in indices))
        if goal.cost_threshold is not None and self.gpu_index is None:
            raise TrainingError(
                "cost_threshold needs energy, but there is no GPU whose energy could be measured."
            )

    @property
    def monitor(self) -> ZeusMonitor | None:
        """Zeus's monitor of this process's GPU; None without one."""
        return self._monitor

    def gpu(self) -> tuple[str, float | None]:
        """Name of this process's GPU, and its power limit in W at the end of the last epoch."""
        if self.gpu_index is None:
            return "no GPU", None
        return devices.name(devices.get_gpus(), self.gpu_index), self._limit

    def begin(self) -> None:
        """An epoch's steps begin."""
        self._start = time.perf_counter()
        if self._monitor is not None:
            self._monitor.begin_window(_WINDOW)

    def cancel(self) -> None:
        """The epoch ends in an error, which matters more than its figures."""
        if self._monitor is not None:
            try:
                self._monitor.end_window(_WINDOW, sync_execution=False, cancel=True)
            except Exception:
                return

    def stop(self) -> None:
        """The epoch's steps are over, or were left."""
        self._last = [time.perf_counter() - self._start, float("nan")]
        if self._monitor is not None:
            measured = self._monitor.end_window(_WINDOW)
            self._last = [measured.time, sum(measured.gpu_energy.values())]
        self.time += self._last[0]
        self.energy += self._last[1]
        # Now: when the report is made, the old limit may be back.
        self._limit = self._read_limit()

    def record(self, epoch: int) -> None:
        """Enter a complete epoch into the history; every rank has to call it."""
        mine = self._last
        ranks = (
            [mine]
            if self._job is None or self._job.group is None
            else from_all_ranks(mine, self._job.group)
        )
        slowest = max(duration for duration, _ in ranks)
        energy = sum(energy for _, energy in ranks)
        cost = zeus_cost(energy, slowest, self._goal.eta, self.max_power)
        self.history.append(EpochFigures(epoch, slowest, energy, cost))

    def report_metric(self, metric: float, higher_is_better: bool) -> None:
        """Take note of how good the model is."""
        target = self._goal.target_metric
        if target is not None:
            self._reached = metric >= target if higher_is_better else metric <= target

    def reason_to_stop(self) -> str | None:
        """Why there should be no further epoch; None if there is no reason."""
        if self._reached:
            return f"the target metric {self._goal.target_metric:g} is reached"
        threshold = self._goal.cost_threshold
        if threshold is not None and self.history:
            spent = sum(figures.cost for figures in self.history)
            following = spent / len(self.history)
            if spent + following > threshold:
                return (
                    f"another epoch would bring the cost from {spent:.6g} J to about "
                    f"{spent + following:.6g} J, above the threshold of {threshold:g} J"
                )
        return None

    def _read_limit(self) -> float | None:
        if self.gpu_index is None:
            return None
        limit = devices.read_limit_mw(devices.get_gpus(), self.gpu_index)
        return None if limit is None else limit / 1000


def _monitor(index: int | None) -> ZeusMonitor | None:
    if index is None or (simulation.active() is None and not torch.cuda.is_available()):
        return None
    from zeus.monitor import ZeusMonitor

    return ZeusMonitor(gpu_indices=[index], cpu_indices=[])
