"""pynvml's calls that Zeus 0.8.2 makes, answered by two imaginary GPUs, in mW and mJ."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pynvml
import torch
import zeus.monitor.energy

RANGES = {"NVIDIA A10G": (100_000, 300_000), "Tesla T4": (60_000, 70_000)}
POWER = 50.0  # W, whatever they do


class FakeNVML:
    """Puts itself in pynvml's place; power limits are kept in a file, for all processes."""

    def __init__(self, state: Path, names=tuple(RANGES)):
        self.names = names
        self.state = state
        self.started = time.time()
        if not state.exists():
            state.write_text(json.dumps([RANGES[name][1] for name in names]))

    def install(self):
        for name in ("Init", "Shutdown", "DeviceSetPersistenceMode"):
            setattr(pynvml, f"nvml{name}", lambda *_: None)
        for name in ("DeviceGetHandleByIndex", "DeviceGetName", "DeviceGetCount",
                     "DeviceGetPowerManagementLimitConstraints",
                     "DeviceGetPowerManagementLimit", "DeviceSetPowerManagementLimit",
                     "DeviceGetTotalEnergyConsumption", "DeviceGetPowerUsage",
                     "DeviceGetArchitecture"):  # fmt: skip
            setattr(pynvml, f"nvml{name}", getattr(self, name))
        torch.cuda.synchronize = lambda *_: None
        zeus.monitor.energy.cuda_sync = lambda *_: None

    def limits(self):
        return json.loads(self.state.read_text())

    def DeviceGetHandleByIndex(self, index):  # noqa: N802
        if not 0 <= index < len(self.names):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def DeviceGetCount(self):  # noqa: N802
        return len(self.names)

    def DeviceGetName(self, handle):  # noqa: N802
        return self.names[handle].encode()

    def DeviceGetArchitecture(self, handle):  # noqa: N802
        return pynvml.NVML_DEVICE_ARCH_AMPERE

    def DeviceGetPowerManagementLimitConstraints(self, handle):  # noqa: N802
        return RANGES[self.names[handle]]

    def DeviceGetPowerManagementLimit(self, handle):  # noqa: N802
        return self.limits()[handle]

    def DeviceSetPowerManagementLimit(self, handle, limit):  # noqa: N802
        low, high = RANGES[self.names[handle]]
        if not low <= limit <= high:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        limits = self.limits()
        limits[handle] = limit
        self.state.write_text(json.dumps(limits))

    def DeviceGetPowerUsage(self, handle):  # noqa: N802
        return int(POWER * 1000)

    def DeviceGetTotalEnergyConsumption(self, handle):  # noqa: N802
        return int((time.time() - self.started) * POWER * 1000)
