"""What the doctor checks of the GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zeus_hetero.device_order import FIX, check_device_order, check_visible_devices
from zeus_hetero.doctor.finding import FAILED, OK, PROFILE, TRAIN, WARNING, Finding, split
from zeus_hetero.errors import ZeusHeteroError
from zeus_hetero.gpu_names import canonical

_BUSY_RATIO = 0.4  # Idle cards draw a tenth to a quarter of their limit.
_SLOW_COUNTER = 0.2  # s; NVML's move every 0.02 to 0.1 s


def check_variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Environment variables that decide which GPU is meant."""
    try:
        check_visible_devices(environment)
    except ZeusHeteroError as error:
        yield Finding("CUDA_VISIBLE_DEVICES", FAILED, *split(error), (PROFILE, TRAIN))
    else:
        value = environment.get("CUDA_VISIBLE_DEVICES")
        yield Finding("CUDA_VISIBLE_DEVICES", OK, "not set" if value is None else value)
    daemon = [name for name in environment if name.startswith("ZEUSD_")]
    if daemon:
        yield Finding("zeusd", OK, f"{', '.join(sorted(daemon))}: it sets power limits")
    for name in ("ZEUSD_SOCK_PATH",):
        path = environment.get(name)
        if path and not Path(path).exists():
            yield Finding(
                "zeusd", FAILED, f"{name}={path} is not there",
                f"Start zeusd on the host, mount its socket, or unset {name}.", (PROFILE,),
            )  # fmt: skip


def check_gpus(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Every GPU: its limits, whether they may be set, its counter, and who else is on it."""
    from zeus_hetero import devices, simulation

    try:
        gpus = devices.get_gpus()
    except Exception as error:
        yield Finding("GPUs", FAILED, *split(error), (PROFILE, TRAIN))
        return
    if not len(gpus):
        yield Finding(
            "GPUs", FAILED, "Zeus sees none",
            "Check nvidia-smi and CUDA_VISIBLE_DEVICES; start containers with --gpus all.",
            (PROFILE, TRAIN),
        )  # fmt: skip
        return
    names = [devices.name(gpus, index) for index in range(len(gpus))]
    mark = " (simulated)" if simulation.active() is not None else ""
    for index, name in enumerate(names):
        who = f"GPU {index} ({name}){mark}"
        yield _check_limits(gpus, index, who)
        yield _check_permission(gpus, index, who)
        yield from _check_idle(index, who)
        yield from _check_processes(gpus, index, who)
    yield check_order(gpus, names, environment)


def _check_limits(gpus: Any, index: int, who: str) -> Finding:
    from zeus_hetero import devices

    try:
        low, high = devices.limit_range(gpus, index)
        now = devices.read_limit_mw(gpus, index)
    except Exception as error:
        return Finding(who, FAILED, *split(error), (PROFILE,))
    current = "unknown" if now is None else f"{now / 1000:g} W"
    return Finding(who, OK, f"power limit {current}, between {low} and {high} W")


def _check_permission(gpus: Any, index: int, who: str) -> Finding:
    from zeus_hetero import devices

    try:
        devices.check_permission(gpus, index)
    except Exception as error:
        return Finding(f"{who}: permission", FAILED, *split(error), (PROFILE, TRAIN))
    return Finding(f"{who}: permission", OK, "power limits may be set")


def _check_idle(index: int, who: str) -> Iterator[Finding]:
    from zeus_hetero.measure import measure_idle
    from zeus_hetero.profiled_gpu import ProfiledGPU

    try:
        gpu = ProfiledGPU(index)
        idle = measure_idle(gpu)
    except Exception as error:
        yield Finding(f"{who}: energy counter", FAILED, *split(error), (PROFILE,))
        return
    period = f"moves every {1000 * idle.counter_period:.0f} ms"
    if idle.counter_period > _SLOW_COUNTER:
        yield Finding(
            f"{who}: energy counter", WARNING, f"{period}, seldom",
            f"Profile with long windows: --warmup_time {max(5, round(5 * idle.counter_period))} "
            "--counter_ticks 20",
        )  # fmt: skip
    else:
        yield Finding(f"{who}: energy counter", OK, period)
    if idle.power > _BUSY_RATIO * gpu.power_range[1]:
        yield Finding(
            f"{who}: idle", WARNING,
            f"draws {idle.power:.0f} W while it should idle; something may be running on it",
            "See who it is with nvidia-smi, and wait or stop it before profiling.",
        )  # fmt: skip
    else:
        yield Finding(f"{who}: idle", OK, f"draws {idle.power:.0f} W")


def _check_processes(gpus: Any, index: int, who: str) -> Iterator[Finding]:
    """Other processes on the GPU, as NVML tells them, and its MIG mode."""
    from zeus_hetero import devices

    gpu = gpus.gpus[index]
    if not devices.is_nvidia(gpu):
        return
    from zeus.device.gpu import nvidia

    nvml, handle = nvidia.pynvml, getattr(gpu, "handle", None)
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        others = [str(process.pid) for process in running if process.pid != os.getpid()]
    except Exception:  # Not allowed to know, as in some containers.
        others = []
    if others:
        yield Finding(
            f"{who}: processes", WARNING, f"in use by process {', '.join(others)}",
            f"Wait for it, or end it: kill {' '.join(others)}",
        )  # fmt: skip
    try:
        mig, _ = nvml.nvmlDeviceGetMigMode(handle)
    except Exception:  # A GPU that has no MIG.
        return
    if mig:
        physical = devices.physical_index(gpus, index)
        yield Finding(
            f"{who}: MIG", FAILED, "is on; slices have no power limit and no energy counter",
            f"nvidia-smi -i {physical} -mig 0", (PROFILE, TRAIN),
        )  # fmt: skip


def check_order(gpus: Any, names: list[str], environment: Mapping[str, str]) -> Finding:
    """Whether CUDA and the driver number different GPUs alike."""
    try:
        check_device_order(gpus, range(len(names)))
    except ZeusHeteroError as error:
        return Finding("order of GPUs", FAILED, *split(error), (PROFILE, TRAIN))
    mixed = len({canonical(name) for name in names}) > 1
    from zeus_hetero import simulation

    by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if mixed and not by_bus and simulation.active() is None:
        return Finding(
            "order of GPUs",
            WARNING,
            "different models, and CUDA numbers them fastest first, the driver by PCI address",
            f"export CUDA_DEVICE_ORDER=PCI_BUS_ID ({FIX})",
        )
    return Finding("order of GPUs", OK, "CUDA and the driver agree" if mixed else "all alike")


def check_notes() -> Finding:
    """Power limits that killed runs have left changed."""
    from zeus_hetero.restore import note_folder, read_note

    folder = note_folder()
    left = []
    for path in sorted(folder.glob("limits-*.json")):
        try:
            if not read_note(path).owner_is_alive:
                left.append(path.name)
        except ZeusHeteroError:
            continue
    if left:
        detail = f"{folder}: {len(left)} killed runs have left power limits changed"
        return Finding("killed runs", WARNING, detail, "zeus-hetero reset")
    return Finding("killed runs", OK, "none has left a power limit changed")
