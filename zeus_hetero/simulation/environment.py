"""How child processes learn which GPUs are simulated."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from zeus_hetero.bundled import BUNDLED_GPUS, bundled_trace
from zeus_hetero.errors import SimulationError
from zeus_hetero.simulation.faults import fault_from_json, fault_to_json
from zeus_hetero.simulation.gpu import SimulatedGPU
from zeus_hetero.trace import Trace, load_trace

SIMULATE = "ZEUS_HETERO_SIMULATE"
"""Names such as ``A10,T4``, paths of trace files, or a JSON list with every attribute."""
WORKLOAD = "ZEUS_HETERO_SIMULATE_WORKLOAD"
"""Which bundled trace a name stands for: ``cifar100`` (the default) or ``imagenet``."""
STATE = "ZEUS_HETERO_SIMULATE_STATE"
"""Folder that keeps the power limits of the simulated GPUs between processes."""
ANNOUNCED = "ZEUS_HETERO_SIMULATE_ANNOUNCED"
"""Set once a process of this tree has said that its figures are simulated."""

_OPTIONS = (
    "power_range",
    "idle_power",
    "wait_power",
    "largest_batch",
    "noise",
    "seed",
    "counter_period",
)
# Assumed, in W: what such cards are commonly seen to draw idle, and clocked up but waiting.
_IDLE_AND_WAIT_POWER = {"A10": (16.0, 55.0), "T4": (10.0, 27.0)}


def install_from_environment() -> bool:
    """Simulate GPUs for the rest of this process if the environment asks for it.

    Returns:
        Whether GPUs are simulated now.

    Raises:
        SimulationError: the environment names an unknown GPU or makes no sense.
    """
    from zeus_hetero.simulation.backend import active, use

    if active() is not None:
        return True
    if not os.environ.get(SIMULATE):
        return False
    use(*parse_gpus(os.environ[SIMULATE], os.environ.get(WORKLOAD) or "cifar100")).install()
    return True


def parse_gpus(text: str, workload: str = "cifar100") -> list[SimulatedGPU]:
    """Read the value of ``ZEUS_HETERO_SIMULATE`` or of a ``--simulate`` flag.

    Args:
        text: ``A10,T4``; or paths of trace files; or a JSON list of objects with ``name`` and
            any argument of `SimulatedGPU`, such as
            ``[{"name": "T4", "noise": 0.03, "faults": [{"fault": "lost", "at_step": 9}]}]``.
        workload: which bundled trace a name stands for.

    Raises:
        SimulationError: it cannot be understood.
    """
    if not text.lstrip().startswith("["):
        names = [name.strip() for name in text.split(",") if name.strip()]
        if not names:
            raise SimulationError(f"simulated GPUs are {text!r}; expected names such as A10,T4.")
        return [simulated_gpu(name, workload) for name in names]
    try:
        specs = json.loads(text)
    except json.JSONDecodeError as error:
        raise SimulationError(f"simulated GPUs are not valid JSON ({error}): {text}") from None
    if not specs or not all(isinstance(spec, dict) and "name" in spec for spec in specs):
        raise SimulationError(
            f'simulated GPUs are {text}; expected [{{"name": "T4", "noise": 0.03}}, ...].'
        )
    return [_from_json(spec, workload) for spec in specs]


def simulated_gpu(name: str, workload: str = "cifar100", **options: Any) -> SimulatedGPU:
    """A simulated GPU by the name of a bundled trace or the path of a trace file.

    Args:
        name: ``A10``, ``T4`` or a path.
        workload: which bundled trace a name stands for.
        **options: as for `SimulatedGPU`.

    Raises:
        SimulationError: no such GPU.
        TraceError: the file is no trace.
    """
    known = name.upper()
    if known in BUNDLED_GPUS:
        idle, wait = _IDLE_AND_WAIT_POWER[known]
        options = {"idle_power": idle, "wait_power": wait, **options}
        return SimulatedGPU(known, bundled_trace(known, workload), **options)
    if os.path.exists(name):
        trace = load_trace(name)
        return SimulatedGPU(trace.gpu or os.path.basename(name), trace, **options)
    raise SimulationError(
        f"no simulated GPU {name!r}; expected one of {', '.join(BUNDLED_GPUS)} or the path of a "
        "trace file."
    )


def to_json(gpus: Sequence[SimulatedGPU]) -> str:
    """GPUs as text that `parse_gpus` reads in another process."""
    return json.dumps([_to_json(gpu) for gpu in gpus])


def _to_json(gpu: SimulatedGPU) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "trace": _trace_to_json(gpu.trace),
        **{option: getattr(gpu, option) for option in _OPTIONS},
        "faults": [fault_to_json(fault) for fault in gpu.faults],
    }


def _from_json(spec: Mapping[str, Any], workload: str) -> SimulatedGPU:
    name, trace = spec["name"], spec.get("trace")
    unknown = [key for key in spec if key not in (*_OPTIONS, "name", "trace", "faults")]
    if unknown:
        raise SimulationError(
            f"simulated GPU {name}: unknown {', '.join(unknown)}; expected name, trace, faults, "
            f"{', '.join(_OPTIONS)}."
        )
    options = {option: spec[option] for option in _OPTIONS if option in spec}
    if options.get("power_range"):
        options["power_range"] = tuple(options["power_range"])
    options["faults"] = tuple(fault_from_json(fault) for fault in spec.get("faults", ()))
    if trace is None:
        return simulated_gpu(name, workload, **options)
    if isinstance(trace, str):
        return SimulatedGPU(name, load_trace(trace), **options)
    return SimulatedGPU(name, load_trace(pd.DataFrame(trace), gpu=name), **options)


def _trace_to_json(trace: Trace) -> dict[str, Any]:
    figures = {
        name: getattr(trace, name).tolist() for name in ("batch_size", "power_limit", "steps")
    }
    # The reader divides by the steps of the window.
    for name in ("time", "energy"):
        figures[name] = (getattr(trace, name) * trace.steps).tolist()
    return {**figures, **({"workload": trace.workload} if trace.workload else {})}
