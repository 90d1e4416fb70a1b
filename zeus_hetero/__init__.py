"""Train one model on different GPUs: profile, allocate shares and power limits, train.

Names are loaded when they are first used, so that importing the package costs next to nothing
and needs neither torch nor a GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeus_hetero.allocation import Allocation, Worker
    from zeus_hetero.allocator import allocate, compare, pareto_front
    from zeus_hetero.errors import (
        AllocationError,
        InfeasibleError,
        PlanError,
        TraceError,
        TraceWarning,
        ZeusHeteroError,
    )
    from zeus_hetero.gpu_model import GPUModel, fit
    from zeus_hetero.trace import Trace, load_trace

__version__ = "0.1.0"

_HOME = {
    "Allocation": "allocation",
    "AllocationError": "errors",
    "GPUModel": "gpu_model",
    "InfeasibleError": "errors",
    "PlanError": "errors",
    "Trace": "trace",
    "TraceError": "errors",
    "TraceWarning": "errors",
    "Worker": "allocation",
    "ZeusHeteroError": "errors",
    "allocate": "allocator",
    "compare": "allocator",
    "fit": "gpu_model",
    "load_trace": "trace",
    "pareto_front": "allocator",
}

__all__ = [
    "Allocation",
    "AllocationError",
    "GPUModel",
    "InfeasibleError",
    "PlanError",
    "Trace",
    "TraceError",
    "TraceWarning",
    "Worker",
    "ZeusHeteroError",
    "allocate",
    "compare",
    "fit",
    "load_trace",
    "pareto_front",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
