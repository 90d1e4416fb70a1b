"""Virtual time in a training job of several processes with a simulated GPU each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zeus_hetero.step_clock import StepClock

if TYPE_CHECKING:
    from torch import Tensor

    from zeus_hetero.simulation.gpu import SimulatedGPU


class SimulatedStepClock(StepClock):
    """Lets a simulated GPU run the training steps of this process.

    A micro-batch takes the GPU's time and energy. At the end of a step all ranks' clocks move to
    the slowest one's, plus the time of the exchange; who is early draws its wait power.

    Args:
        gpu: this process's.
        group: of all ranks, for their clocks; None where there is one rank only.
        sync_time: s of a step in which gradients are exchanged.
    """

    def __init__(
        self, gpu: SimulatedGPU, group: dist.ProcessGroup | None = None, sync_time: float = 0.0
    ) -> None:
        super().__init__()
        self._gpu = gpu
        self._group = group
        self._sync_time = sync_time

    def watch(self, loss: Tensor) -> None:
        """Nothing: only virtual time counts."""

    def micro_batch_done(self, size: int) -> None:
        """Run a pass of so many samples on the simulated GPU."""
        self._gpu.run_step(size)

    def step_done(self) -> None:
        """Wait for the slowest rank and exchange gradients, in virtual time."""
        latest = torch.tensor(self._gpu.clock, dtype=torch.float64)
        if self._group is not None:
            dist.all_reduce(latest, op=dist.ReduceOp.MAX, group=self._group)
        until = float(latest) + self._sync_time
        self._waited += until - self._gpu.clock
        self._gpu.wait_until(until)
