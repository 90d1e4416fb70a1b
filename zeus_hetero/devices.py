"""Zeus's device layer under one set of names, in whole watts.

Zeus before 0.13 has camelCase names and no way to read the current limit; everything about
versions is in this file. Exact milliwatts appear only where a limit must be put back as it was.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import zeus.device
import zeus.device.gpu
from zeus.device.gpu import (
    ZeusGPUInvalidArgError,
    ZeusGPUNoPermissionError,
    ZeusGPUNotSupportedError,
)

from zeus_hetero.errors import DeviceError, PowerLimitError, PowerLimitPermissionError

if TYPE_CHECKING:
    from zeus.device.gpu.common import GPUs


def get_gpus() -> GPUs:
    """The GPUs that Zeus sees; the same object as every monitor uses.

    Raises:
        DeviceError: there is none.
    """
    from zeus_hetero.device_order import check_visible_devices

    # Once built, the GPUs stay what they are; and simulated ones do not read the variable.
    if getattr(zeus.device.gpu, "_gpus", None) is None:
        check_visible_devices()
    try:
        gpus = zeus.device.get_gpus()
    except Exception as error:
        raise DeviceError(
            f"Zeus finds no GPU ({error}). Check `nvidia-smi`, start the container with "
            "`--gpus all`, or use simulated GPUs."
        ) from error
    return gpus


def name(gpus: GPUs, index: int) -> str:
    """The model's name as the driver reports it."""
    return str(_method(gpus, "get_name", "getName")(index))


def physical_index(gpus: GPUs, index: int) -> int:
    """The driver's number of a GPU; Zeus's own starts again at 0 in CUDA_VISIBLE_DEVICES."""
    return int(getattr(gpus.gpus[index], "gpu_index", index))


def limit_range(gpus: GPUs, index: int) -> tuple[int, int]:
    """The lowest and the highest power limit that the GPU accepts, whole W.

    Raises:
        DeviceError: its power limit cannot be set at all, as on most laptops.
    """
    method = _method(
        gpus, "get_power_management_limit_constraints", "getPowerManagementLimitConstraints"
    )
    try:
        low, high = method(index)
    except ZeusGPUNotSupportedError as error:
        raise DeviceError(
            f"GPU {index} ({name(gpus, index)}) has no adjustable power limit ({error})."
        ) from error
    return math.ceil(low / 1000), high // 1000


def read_limit_mw(gpus: GPUs, index: int) -> int | None:
    """The current power limit in mW, or None where neither Zeus nor the driver can say."""
    gpu = gpus.gpus[index]
    if hasattr(gpu, "get_power_management_limit"):
        limit = gpu.get_power_management_limit()
    elif hasattr(gpu, "handle"):
        # Zeus 0.12 does not read limits. The handle and the binding are Zeus's.
        from zeus.device.gpu import nvidia

        limit = nvidia.pynvml.nvmlDeviceGetPowerManagementLimit(gpu.handle)
    else:
        return None
    return limit if isinstance(limit, int) else None


def set_limit_mw(gpus: GPUs, index: int, limit: int) -> None:
    """Set a power limit in mW and wait until the driver took it.

    Raises:
        PowerLimitPermissionError: this process may not.
        PowerLimitError: the driver rejects the limit.
    """
    try:
        _method(gpus, "set_power_management_limit", "setPowerManagementLimit")(index, limit)
    except ZeusGPUNoPermissionError as error:
        raise _no_permission(gpus, index) from error
    except ZeusGPUInvalidArgError as error:
        low, high = limit_range(gpus, index)
        raise PowerLimitError(
            f"GPU {index} ({name(gpus, index)}): the driver rejects a power limit of "
            f"{limit / 1000:g} W ({error}); it says that its range is {low} to {high} W."
        ) from error


def set_persistence_mode(gpus: GPUs, index: int) -> None:
    """Keep the driver loaded, without which it forgets the limit when no process uses the GPU.

    Raises:
        PowerLimitPermissionError: this process may not.
    """
    try:
        _method(gpus, "set_persistence_mode", "setPersistenceMode")(index, True)
    except ZeusGPUNoPermissionError as error:
        raise _no_permission(gpus, index) from error


def check_permission(gpus: GPUs, index: int) -> None:
    """Find out whether this process may set the GPU's power limit, without altering it.

    The current limit is written once more. Zeus from 0.13 on skips such a write on NVIDIA GPUs,
    so there the driver is asked through Zeus's handle; with zeusd, the daemon has the permission.

    Raises:
        PowerLimitPermissionError: it may not.
    """
    limit = read_limit_mw(gpus, index)
    if limit is None:
        return
    set_limit_mw(gpus, index, limit)
    gpu = gpus.gpus[index]
    if not is_nvidia(gpu) or getattr(gpu, "supports_nonblocking_setters", False):
        return
    from zeus.device.gpu import nvidia

    try:
        nvidia.pynvml.nvmlDeviceSetPowerManagementLimit(getattr(gpu, "handle", None), limit)
    except Exception as error:
        if getattr(error, "value", None) != nvidia.pynvml.NVML_ERROR_NO_PERMISSION:
            raise DeviceError(
                f"GPU {index} ({name(gpus, index)}): the driver rejects its own power limit of "
                f"{limit / 1000:g} W ({error}). Does `nvidia-smi -pl` work on this GPU?"
            ) from error
        raise _no_permission(gpus, index) from error


def is_nvidia(gpu: Any) -> bool:
    """Whether a GPU of Zeus's device layer is a real NVIDIA GPU, not AMD and not simulated."""
    from zeus.device.gpu.nvidia import NVIDIAGPU

    return isinstance(gpu, NVIDIAGPU)


def _method(gpus: GPUs, snake_case: str, camel_case: str) -> Any:
    return getattr(gpus, snake_case, None) or getattr(gpus, camel_case)


def _no_permission(gpus: GPUs, index: int) -> PowerLimitPermissionError:
    return PowerLimitPermissionError(
        f"GPU {index} ({name(gpus, index)}): no permission to set its power limit; that needs "
        "the capability SYS_ADMIN, which root in a container does not have. Start the container "
        "with `docker run --cap-add SYS_ADMIN`, or run Zeus's daemon zeusd on the host and set "
        "ZEUSD_SOCK_PATH. See https://ml.energy/zeus/getting_started/#system-privileges"
    )
