"""Train one model on different GPUs: profile, allocate shares and power limits, train.

Names are loaded when they are first used, so that importing the package costs next to nothing
and needs neither torch nor a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeus_hetero.adaptive import ProfilingGrid, plan_profiling, profile_adaptively
    from zeus_hetero.adaptive_run import profile_script_adaptively
    from zeus_hetero.allocation import Allocation, Worker
    from zeus_hetero.allocator import allocate, compare, plans_by_method
    from zeus_hetero.batchnorm import scale_batchnorm_momentum, sync_batchnorm
    from zeus_hetero.dataloader import HeteroDataLoader
    from zeus_hetero.errors import (
        AllocationError,
        DeviceError,
        GPUBusyError,
        InfeasibleError,
        PlanError,
        PowerLimitError,
        PowerLimitPermissionError,
        PowerLimitWarning,
        ProfilingError,
        SimulationError,
        TraceError,
        TraceWarning,
        TrainingError,
        ZeusHeteroError,
    )
    from zeus_hetero.explanation import Explanation, explain
    from zeus_hetero.fit_report import report_fit
    from zeus_hetero.gpu_model import GPUModel, fit
    from zeus_hetero.gradients import Step
    from zeus_hetero.job import Job, join
    from zeus_hetero.metrics import Mean
    from zeus_hetero.pareto import pareto_front
    from zeus_hetero.power_limit import HeteroPowerLimitOptimizer
    from zeus_hetero.profiling import profile
    from zeus_hetero.run_report import RunReport, write_report
    from zeus_hetero.sampler import HeteroBatchSampler
    from zeus_hetero.schedule import Schedule
    from zeus_hetero.trace import Trace, load_trace
    from zeus_hetero.uncertainty import Prediction, pessimistic

__version__ = "0.1.0"

_HOME = {
    "Allocation": "allocation",
    "AllocationError": "errors",
    "DeviceError": "errors",
    "Explanation": "explanation",
    "GPUBusyError": "errors",
    "GPUModel": "gpu_model",
    "HeteroBatchSampler": "sampler",
    "HeteroDataLoader": "dataloader",
    "HeteroPowerLimitOptimizer": "power_limit",
    "InfeasibleError": "errors",
    "Job": "job",
    "Mean": "metrics",
    "PlanError": "errors",
    "PowerLimitError": "errors",
    "PowerLimitPermissionError": "errors",
    "PowerLimitWarning": "errors",
    "Prediction": "uncertainty",
    "ProfilingError": "errors",
    "ProfilingGrid": "adaptive",
    "RunReport": "run_report",
    "Schedule": "schedule",
    "SimulationError": "errors",
    "Step": "gradients",
    "Trace": "trace",
    "TraceError": "errors",
    "TraceWarning": "errors",
    "TrainingError": "errors",
    "Worker": "allocation",
    "ZeusHeteroError": "errors",
    "allocate": "allocator",
    "compare": "allocator",
    "explain": "explanation",
    "fit": "gpu_model",
    "join": "job",
    "load_trace": "trace",
    "pareto_front": "pareto",
    "pessimistic": "uncertainty",
    "plan_profiling": "adaptive",
    "plans_by_method": "allocator",
    "profile": "profiling",
    "profile_adaptively": "adaptive",
    "profile_script_adaptively": "adaptive_run",
    "report_fit": "fit_report",
    "scale_batchnorm_momentum": "batchnorm",
    "sync_batchnorm": "batchnorm",
    "write_report": "run_report",
}

__all__ = [
    "Allocation",
    "AllocationError",
    "DeviceError",
    "Explanation",
    "GPUBusyError",
    "GPUModel",
    "HeteroBatchSampler",
    "HeteroDataLoader",
    "HeteroPowerLimitOptimizer",
    "InfeasibleError",
    "Job",
    "Mean",
    "PlanError",
    "PowerLimitError",
    "PowerLimitPermissionError",
    "PowerLimitWarning",
    "Prediction",
    "ProfilingError",
    "ProfilingGrid",
    "RunReport",
    "Schedule",
    "SimulationError",
    "Step",
    "Trace",
    "TraceError",
    "TraceWarning",
    "TrainingError",
    "Worker",
    "ZeusHeteroError",
    "allocate",
    "compare",
    "explain",
    "fit",
    "join",
    "load_trace",
    "pareto_front",
    "pessimistic",
    "plan_profiling",
    "plans_by_method",
    "profile",
    "profile_adaptively",
    "profile_script_adaptively",
    "report_fit",
    "scale_batchnorm_momentum",
    "sync_batchnorm",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOME[name]
    # zeus-ml 0.8.2 still has a data loader of its own, to be subclassed.
    if home == "dataloader" and importlib.util.find_spec("zeus.run") is not None:
        home = "legacy_dataloader"
    try:
        value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"zeus_hetero.{name} needs torch; install it with: pip install 'zeus-hetero[train]'"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
