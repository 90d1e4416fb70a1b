"""A few lines of GPU for tests: a backend of Zeus's device layer that keeps its state in a file.

The file lets one process see what another left behind. Both generations of Zeus's method names
are there. Time passes only by `FakeGPUs.step`.
"""

from __future__ import annotations

import json
from pathlib import Path

import zeus.device.gpu
import zeus.monitor.energy
from zeus.device.gpu import ZeusGPUInvalidArgError, ZeusGPUNoPermissionError
from zeus.device.gpu.common import GPU, GPUs
from zeus.monitor import ZeusMonitor

A10 = {"name": "NVIDIA A10", "low": 100, "high": 150, "limit": 120}
T4 = {"name": "Tesla T4", "low": 60, "high": 70, "limit": 66}
V100 = {"name": "Tesla V100-SXM2-16GB", "low": 100, "high": 300, "limit": 280}


class FakeGPU(GPU):
    def __init__(self, owner, index, name, low, high, limit):
        super().__init__(index)
        self.owner = owner
        self.name, self.low, self.high = name, low, high
        self.energy = 0.0  # mJ
        self._disable_sys_admin_warning = True

    @property
    def limit(self):
        return self.owner.read()["limits"][self.gpu_index]

    def power(self):
        """W: a GPU that is kept busy draws its limit."""
        return self.limit / 1000

    def speed(self):
        """Steps per second fall with the limit, less than in proportion."""
        return 10 * (self.limit / 1000 / self.high) ** 0.5

    supports_nonblocking_setters = property(lambda self: False)

    def get_name(self):
        return self.name

    def get_power_management_limit_constraints(self):
        return self.low * 1000, self.high * 1000

    def get_power_management_limit(self):
        return self.limit

    def set_power_management_limit(self, power_limit_mw, block=True):
        if not self.owner.permission:
            raise ZeusGPUNoPermissionError("Insufficient Permissions")
        if not self.low * 1000 <= power_limit_mw <= self.high * 1000:
            raise ZeusGPUInvalidArgError("Invalid Argument")
        state = self.owner.read()
        state["limits"][self.gpu_index] = power_limit_mw
        state["writes"].append([self.gpu_index, power_limit_mw])
        self.owner.write(state)

    def reset_power_management_limit(self, block=True):
        self.set_power_management_limit(self.high * 1000)

    def set_persistence_mode(self, enabled, block=True):
        self.persistence = enabled

    def get_persistence_mode(self):
        return getattr(self, "persistence", False)

    def supports_get_total_energy_consumption(self):
        return True

    def get_total_energy_consumption(self):
        tick = self.owner.tick
        return int(self.energy // tick * tick) if tick else int(self.energy)

    def get_supported_memory_clocks(self):
        return []

    def get_supported_graphics_clocks(self, memory_clock_mhz=None):
        return []

    def set_memory_locked_clocks(self, min_clock_mhz, max_clock_mhz, block=True): ...
    def reset_memory_locked_clocks(self, block=True): ...
    def set_gpu_locked_clocks(self, min_clock_mhz, max_clock_mhz, block=True): ...
    def reset_gpu_locked_clocks(self, block=True): ...

    def get_average_power_usage(self):
        return self.limit

    def get_instant_power_usage(self):
        return self.limit

    def get_average_memory_power_usage(self):
        return 0

    def get_gpu_temperature(self):
        return 50

    getName = get_name  # noqa: N815
    getPowerManagementLimitConstraints = get_power_management_limit_constraints  # noqa: N815
    setPowerManagementLimit = set_power_management_limit  # noqa: N815
    resetPowerManagementLimit = reset_power_management_limit  # noqa: N815
    setPersistenceMode = set_persistence_mode  # noqa: N815
    getSupportedMemoryClocks = get_supported_memory_clocks  # noqa: N815
    setMemoryLockedClocks = set_memory_locked_clocks  # noqa: N815
    resetMemoryLockedClocks = reset_memory_locked_clocks  # noqa: N815
    getSupportedGraphicsClocks = get_supported_graphics_clocks  # noqa: N815
    setGpuLockedClocks = set_gpu_locked_clocks  # noqa: N815
    resetGpuLockedClocks = reset_gpu_locked_clocks  # noqa: N815
    getAveragePowerUsage = get_average_power_usage  # noqa: N815
    getInstantPowerUsage = get_instant_power_usage  # noqa: N815
    getAverageMemoryPowerUsage = get_average_memory_power_usage  # noqa: N815
    supportsGetTotalEnergyConsumption = supports_get_total_energy_consumption  # noqa: N815
    getTotalEnergyConsumption = get_total_energy_consumption  # noqa: N815
    getGpuTemperature = get_gpu_temperature  # noqa: N815


class FakeGPUs(GPUs):
    """GPUs by their specifications.

    permission: whether limits may be set; tick: mJ by which the energy counter moves.
    """

    def __init__(self, specs=(), state: Path | None = None, permission=True, tick=0):
        self.state, self.permission, self.tick = Path(state), permission, tick
        self._disable_sys_admin_warning = True
        self.clock = 1000.0
        self._gpus = [FakeGPU(self, index, **spec) for index, spec in enumerate(specs)]
        if not self.state.exists():
            self.write({"limits": [int(spec["limit"] * 1000) for spec in specs], "writes": []})

    def __del__(self): ...

    @property
    def gpus(self):
        return self._gpus

    def read(self):
        return json.loads(self.state.read_text())

    def write(self, state):
        self.state.write_text(json.dumps(state))

    def limits(self):
        """W per GPU."""
        return [limit / 1000 for limit in self.read()["limits"]]

    def writes(self, index=0):
        """W that were set on one GPU, in order."""
        return [limit / 1000 for gpu, limit in self.read()["writes"] if gpu == index]

    def forget_writes(self):
        self.write({**self.read(), "writes": []})

    def step(self):
        """One synchronous training step: as long as the slowest GPU's."""
        seconds = max(1 / gpu.speed() for gpu in self._gpus)
        for gpu in self._gpus:
            gpu.energy += 1000 * gpu.power() * seconds
        self.clock += seconds

    def install(self):
        zeus.device.gpu._gpus = self
        zeus.monitor.energy.time = lambda: self.clock
        return self


class Monitor(ZeusMonitor):
    """Zeus's monitor, without a CUDA device to wait for."""

    def __init__(self, gpu_indices=None):
        super().__init__(gpu_indices=gpu_indices, cpu_indices=[])

    def begin_window(self, key, *args, **kwargs):
        super().begin_window(key, sync_execution=False)

    def end_window(self, key, *args, cancel=False, **kwargs):
        return super().end_window(key, sync_execution=False, cancel=cancel)
