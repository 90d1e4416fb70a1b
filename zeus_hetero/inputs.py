"""What `allocate` is given, checked: traces, GPUs and what a step costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Union

import numpy as np

from zeus_hetero.arguments import between, per_gpu
from zeus_hetero.errors import AllocationError, TraceError
from zeus_hetero.objective import Independent, Objective, Synchronous
from zeus_hetero.trace import Trace, TraceSource, load_trace

GPUs = Union[Sequence[str], Mapping[str, int], None]
PerGPU = Union[float, Mapping[str, float], None]

OBJECTIVES = ("synchronous", "independent")
JOULES_PER_KWH = 3.6e6
SECONDS_PER_HOUR = 3600.0


def load_traces(traces: Mapping[str, TraceSource]) -> dict[str, Trace]:
    """Read the traces and check that they belong together.

    Args:
        traces: by GPU name.

    Returns:
        The traces by GPU name, in the same order.

    Raises:
        AllocationError: no traces.
        TraceError: one cannot be read, or they are of different workloads or units.
    """
    if not isinstance(traces, Mapping) or not traces:
        raise AllocationError(
            f"traces is {traces!r}; expected a mapping from GPU name to trace, strongest first."
        )
    loaded = {name: load_trace(source) for name, source in traces.items()}
    workloads = {name: trace.workload for name, trace in loaded.items() if trace.workload}
    most_said = max(workloads.values(), key=len, default="").split("/")
    # A trace that names only its data set may be of any network on it.
    if any(
        parts != most_said[: len(parts)] for parts in (w.split("/") for w in workloads.values())
    ):
        told = ", ".join(f"{name}: {workload}" for name, workload in workloads.items())
        raise TraceError(
            f"traces of different workloads ({told}); expected the same one on every GPU. "
            "Profile the workload that you will train on each of them."
        )
    if len({trace.relative for trace in loaded.values()}) > 1:
        told = ", ".join(name for name, trace in loaded.items() if trace.relative)
        raise TraceError(
            f"{told}: in relative units, the others in seconds and joules; expected the same for "
            "all. Load the CSV with dataset_size=..."
        )
    return loaded


def worker_names(gpus: GPUs, known: Sequence[str]) -> tuple[str, ...]:
    """The GPU name of each worker.

    Args:
        gpus: as for `allocate`.
        known: the GPU names that have a trace.
    """
    if gpus is None:
        return tuple(known)
    if isinstance(gpus, str):
        raise AllocationError(f"gpus is {gpus!r}; expected a list of names or a mapping to counts.")
    if isinstance(gpus, Mapping):
        for name, count in gpus.items():
            if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 0:
                raise AllocationError(f"gpus[{name!r}] is {count!r}; expected a whole number.")
        gpus = [name for name, count in gpus.items() for _ in range(count)]
    unknown = [name for name in gpus if name not in known]
    if unknown:
        raise AllocationError(
            f"no trace for GPU {unknown[0]!r}; expected one of {', '.join(known)}."
        )
    if not gpus:
        raise AllocationError("gpus is empty; expected at least one GPU.")
    return tuple(gpus)


def build_objective(
    workers: Sequence[str],
    traces: Mapping[str, Trace],
    *,
    objective: str,
    eta: float,
    wait_power: PerGPU,
    sync_time: float,
    release_idle: bool,
    electricity_price: float | None,
    gpu_hour_price: PerGPU,
    carbon_intensity: float | None,
) -> Objective:
    """What a step costs, from the arguments of `allocate`.

    Args:
        workers: GPU name of each worker.
        traces: by GPU name.
        objective: name; the other arguments are those of `allocate`.
        eta: weight of energy.
        wait_power: W.
        sync_time: s.
        release_idle: whether GPUs without samples are out of the job.
        electricity_price: money per kWh.
        gpu_hour_price: money per hour of a GPU.
        carbon_intensity: g of CO2 per kWh.
    """
    if objective not in OBJECTIVES:
        raise AllocationError(
            f"objective is {objective!r}; expected one of {', '.join(OBJECTIVES)}."
        )
    between("eta", eta, 0, 1)
    between("sync_time", sync_time, 0, math.inf, "s")
    hourly = per_gpu("gpu_hour_price", gpu_hour_price, traces, _price)
    in_money = electricity_price is not None or bool(hourly)
    priced = in_money or carbon_intensity is not None
    if in_money and carbon_intensity is not None:
        raise AllocationError(
            "carbon_intensity is given together with a price in money; expected one of them, "
            "since grams and money do not add up."
        )
    if priced and any(trace.relative for trace in traces.values()):
        raise AllocationError(
            "a price or carbon intensity needs seconds and joules, and the traces are in relative "
            "units. Load the CSV with dataset_size=..."
        )
    if objective == "independent":
        if priced or release_idle:
            raise AllocationError(
                "objective is 'independent'; expected 'synchronous' with prices or max_gpus."
            )
        return Independent(eta)
    if carbon_intensity is not None:
        unit = "g CO2"
        energy_price = between("carbon_intensity", carbon_intensity, 0, math.inf) / JOULES_PER_KWH
        time_prices = [0.0 for _ in workers]
    elif in_money:
        unit = "money"
        kwh_price = (
            0.0 if electricity_price is None else _price("electricity_price", electricity_price)
        )
        energy_price = kwh_price / JOULES_PER_KWH
        time_prices = [hourly.get(name, 0.0) / SECONDS_PER_HOUR for name in workers]
    else:
        unit = "J"
        energy_price = float(eta)
        time_prices = [(1 - eta) * traces[name].power_limits[0] for name in workers]
    measured = {
        name: float(trace.average_power.min()) if trace.wait_power is None else trace.wait_power
        for name, trace in traces.items()
    }
    waits = {**measured, **per_gpu("wait_power", wait_power, traces, _watts)}
    return Synchronous(
        energy_price=energy_price,
        time_prices=tuple(time_prices),
        wait_power=tuple(waits[name] for name in workers),
        sync_time=float(sync_time),
        release_idle=release_idle,
        unit=unit,
    )


def _watts(argument: str, value: Any) -> float:
    return between(argument, value, 0, math.inf, "W")


def _price(argument: str, value: Any) -> float:
    return between(argument, value, 0, math.inf)
