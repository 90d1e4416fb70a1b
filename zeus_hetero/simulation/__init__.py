"""Simulated GPUs: Zeus's monitor and optimizers run on them as on real ones.

    from zeus.monitor import ZeusMonitor
    from zeus_hetero import simulation

    with simulation.use("A10") as gpus:
        monitor = ZeusMonitor()
        monitor.begin_window("steps")
        for _ in range(100):
            gpus[0].run_step(128)
        print(monitor.end_window("steps"))

A step takes the time and the energy that a trace says, on a virtual clock, however long the
CPU needs for it: hours of training pass in seconds. Child processes that call
`install_from_environment` get the same GPUs; each process has its own clock and its own energy
counters, while power limits are shared as those of real GPUs are. ``CUDA_VISIBLE_DEVICES`` has
no influence.
"""

from __future__ import annotations

from zeus_hetero.simulation.backend import SimulatedGPUs, Simulation, active, use
from zeus_hetero.simulation.environment import (
    SIMULATE,
    STATE,
    WORKLOAD,
    install_from_environment,
    parse_gpus,
    simulated_gpu,
    to_json,
)
from zeus_hetero.simulation.faults import (
    CounterReset,
    Fault,
    LimitRejected,
    Lost,
    NoPermission,
    OutOfMemory,
    SlowCounter,
    ThermalSlowdown,
)
from zeus_hetero.simulation.gpu import SimulatedGPU

__all__ = [
    "SIMULATE",
    "STATE",
    "WORKLOAD",
    "CounterReset",
    "Fault",
    "LimitRejected",
    "Lost",
    "NoPermission",
    "OutOfMemory",
    "SimulatedGPU",
    "SimulatedGPUs",
    "Simulation",
    "SlowCounter",
    "ThermalSlowdown",
    "active",
    "install_from_environment",
    "parse_gpus",
    "simulated_gpu",
    "to_json",
    "use",
]
