"""Virtual time, and how Zeus is brought to read it."""

from __future__ import annotations

import importlib
from typing import Any

# Zeus has no seam for the clock, for waiting on the GPU and for collectives on a CPU-only
# torch, but reads each through a name of one of its modules.
_MONITOR = "zeus.monitor.energy"
_OPTIMIZER = "zeus.optimizer.power_limit"


class VirtualClock:
    """A clock that moves when a simulated GPU works, and only then.

    Attributes:
        now: s since the start.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        """Stands in for `time.time`."""
        return self.now

    def advance_to(self, moment: float) -> None:
        """Move forward to a moment, s."""
        self.now = max(self.now, moment)


class ZeusPatches:
    """Lets Zeus run on a virtual clock and without CUDA; undone by `undo`."""

    def __init__(self, clock: VirtualClock) -> None:
        self._before: list[tuple[Any, str, Any]] = []
        self._replace(_MONITOR, "time", clock.time)
        self._replace(_MONITOR, "sync_execution_fn", _nothing_to_wait_for)
        self._replace(_OPTIMIZER, "all_reduce", _all_reduce_on_cpu)

    def undo(self) -> None:
        """Put everything back, last change first."""
        while self._before:
            module, name, value = self._before.pop()
            setattr(module, name, value)

    def _replace(self, module_name: str, name: str, value: Any) -> None:
        module = importlib.import_module(module_name)
        self._before.append((module, name, getattr(module, name)))
        setattr(module, name, value)


def _nothing_to_wait_for(gpu_devices: list[int], sync_with: str = "torch") -> None:
    """A simulated step is over when `run_step` returns."""


def _all_reduce_on_cpu(object: list[Any], operation: str) -> list[Any]:
    """Zeus's reduction without its `.cuda()`, for gloo groups."""
    import torch.distributed as dist
    from torch import float64, tensor

    if not dist.is_available() or not dist.is_initialized():
        return object
    values = tensor(object, dtype=float64)
    dist.all_reduce(values, op=dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX)
    return list(values.tolist())
