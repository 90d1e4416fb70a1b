"""What the profiler asks of a GPU, in W and J, through Zeus's device layer."""

from __future__ import annotations

from typing import Any

from zeus.device import get_gpus
from zeus.device.gpu.common import ZeusGPUInitError

from zeus_hetero.errors import ProfilingError


def check(gpu_index: int) -> None:
    """Check that there is such a GPU.

    Raises:
        ProfilingError: Zeus does not see it.
    """
    try:
        count = len(get_gpus())
    except ZeusGPUInitError as error:
        raise ProfilingError(
            f"Zeus finds no GPU ({error}); expected an NVIDIA or AMD GPU with its driver. "
            "Simulate one to try it: --simulate T4, or zeus_hetero.simulation.use('T4')."
        ) from None
    if not 0 <= gpu_index < count:
        raise ProfilingError(
            f"GPU {gpu_index}; expected one from 0 to {count - 1}, the GPUs that Zeus sees."
        )


def name(gpu_index: int) -> str:
    """Name of the GPU model."""
    return str(_call(gpu_index, "get_name", "getName"))


def describe(gpu_index: int) -> str:
    """A GPU in messages; works for one that is lost, too."""
    try:
        return f"GPU {gpu_index} ({name(gpu_index)})"
    except Exception:
        return f"GPU {gpu_index}"


def power_range(gpu_index: int) -> tuple[int, int]:
    """Smallest and largest power limit that the GPU supports, W."""
    low, high = _call(
        gpu_index, "get_power_management_limit_constraints", "getPowerManagementLimitConstraints"
    )
    return -(-low // 1000), high // 1000


def energy(gpu_index: int) -> float:
    """The energy counter, J."""
    return float(
        _call(gpu_index, "get_total_energy_consumption", "getTotalEnergyConsumption") / 1000
    )


def temperature(gpu_index: int) -> int | None:
    """Degrees Celsius; None where Zeus or the GPU cannot tell."""
    try:
        return int(_call(gpu_index, "get_gpu_temperature", "getGpuTemperature"))
    except Exception:  # Not in Zeus 0.12.0; not supported by some GPUs.
        return None


def set_power_limit(gpu_index: int, power_limit: float) -> None:
    """Set the power limit, W."""
    _call(
        gpu_index,
        "set_power_management_limit",
        "setPowerManagementLimit",
        round(power_limit * 1000),
    )


def power_limit(gpu_index: int) -> float:
    """The power limit in force, W."""
    gpu = get_gpus().gpus[gpu_index]
    if hasattr(gpu, "get_power_management_limit"):
        return float(gpu.get_power_management_limit() / 1000)
    # Zeus 0.12 can set it but not read it; its own handle and binding can.
    from zeus.device.gpu import nvidia

    return float(nvidia.pynvml.nvmlDeviceGetPowerManagementLimit(gpu.handle) / 1000)


def _call(gpu_index: int, method: str, before_0_13: str, *arguments: Any) -> Any:
    gpu = get_gpus().gpus[gpu_index]
    return (getattr(gpu, method, None) or getattr(gpu, before_0_13))(*arguments)
