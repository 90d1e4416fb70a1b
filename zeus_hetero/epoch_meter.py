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

    Attributes:
        history: one entry per epoch.
        time: s of this rank's epochs.
        energy: J of this rank's GPU in them.
        gpu_index: Zeus's index of the GPU; None without one.
        max_power: sum of the GPUs' highest power limits, W.
    """

    def __init__(self, job: Job | None, monitor: ZeusMonitor | None, goal: Goal) -> None:
        self._job = job
        self._goal = goal
        self._monitor = _monitor(job) if monitor is None else monitor
        self._start = 0.0
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

    def begin(self) -> None:
        """An epoch begins."""
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

    def end(self, epoch: int) -> None:
        """An epoch is over; every rank has to call it."""
        mine = [time.perf_counter() - self._start, float("nan")]
        if self._monitor is not None:
            measured = self._monitor.end_window(_WINDOW)
            mine = [measured.time, sum(measured.gpu_energy.values())]
        self.time += mine[0]
        self.energy += mine[1]
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


def _monitor(job: Job | None) -> ZeusMonitor | None:
    if simulation.active() is None and not torch.cuda.is_available():
        return None
    index = 0 if job is None else job.gpu_index
    if index is None:
        return None
    from zeus.monitor import ZeusMonitor

    return ZeusMonitor(gpu_indices=[index], cpu_indices=[])
