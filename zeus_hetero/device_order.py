"""Make sure that the GPU which is capped is the GPU which computes.

CUDA numbers GPUs fastest first, the driver library (NVML) by PCI address, and Zeus takes one
number for both. On a node with different cards they differ unless CUDA_DEVICE_ORDER says so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeus_hetero.errors import DeviceError
from zeus_hetero.gpu_names import same_model

if TYPE_CHECKING:
    from zeus.device.gpu.common import GPUs

FIX = (
    "Set CUDA_DEVICE_ORDER=PCI_BUS_ID in the environment before the program starts, so that "
    "both number GPUs alike."
)


@dataclass(frozen=True)
class Device:
    """One GPU as one library sees it.

    Attributes:
        name: the model's name.
        pci: domain, bus and device number, or None where the library does not say.
    """

    name: str
    pci: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        if self.pci is None:
            return self.name
        return "{} at PCI {:04x}:{:02x}:{:02x}".format(self.name, *self.pci)


def check_visible_devices(environment: Mapping[str, str] | None = None) -> None:
    """Explain values of CUDA_VISIBLE_DEVICES that Zeus cannot read.

    Call it before a `ZeusMonitor` is built: with a MIG slice Zeus silently measures nothing,
    with a UUID it fails while it parses a number.

    Args:
        environment: where to look; the process's own if None.

    Raises:
        DeviceError: the variable names a UUID or a MIG slice, is empty, or is no list of numbers.
    """
    value = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return
    shown = f"CUDA_VISIBLE_DEVICES={value}"
    if not value.strip():
        raise DeviceError(
            f"{shown} hides every GPU. Unset it, or list the numbers of the GPUs to use."
        )
    for entry in (part.strip() for part in value.split(",")):
        if entry.upper().startswith("MIG"):
            raise DeviceError(
                f"{shown}: {entry} is a MIG slice, which has neither a power limit nor an energy "
                "counter of its own. Use a whole GPU by its number."
            )
        if entry.upper().startswith("GPU-"):
            raise DeviceError(
                f"{shown}: {entry} is a UUID; Zeus reads numbers only. Find the GPU's number with "
                "`nvidia-smi -L`, set CUDA_VISIBLE_DEVICES to it, and CUDA_DEVICE_ORDER=PCI_BUS_ID."
            )
        if not entry.isdigit():
            raise DeviceError(
                f"{shown}: {entry!r} is no GPU number; expected numbers separated by commas, "
                "such as 0,1."
            )


def check_device_order(gpus: GPUs, indices: Sequence[int]) -> None:
    """Check that CUDA's and NVML's GPU of each index are the same card.

    Nothing is checked where they cannot differ or there is nothing to compare: no torch with
    CUDA in this process, one visible GPU only, or GPUs that are not NVIDIA's.

    Raises:
        DeviceError: they are not; the message says which and the fix.
    """
    from zeus_hetero.devices import is_nvidia

    if not any(is_nvidia(gpu) for gpu in gpus.gpus):
        return
    cuda = cuda_devices()
    # One visible GPU can be the wrong one too: CUDA_VISIBLE_DEVICES counts in CUDA's order.
    if cuda:
        compare_order(cuda, nvml_devices(gpus), indices)


def compare_order(cuda: Sequence[Device], nvml: Sequence[Device], indices: Sequence[int]) -> None:
    """Compare two numberings of the same GPUs: by PCI address where both know it, else by name.

    Raises:
        DeviceError: an index means different GPUs, or CUDA lacks it.
    """
    for index in indices:
        if index >= len(cuda):
            raise DeviceError(
                f"GPU {index} ({nvml[index]}): CUDA sees {len(cuda)} GPUs only. {FIX}"
            )
        one, other = cuda[index], nvml[index]
        same = one.pci == other.pci if one.pci and other.pci else same_model(one.name, other.name)
        if not same:
            raise DeviceError(
                f"GPU {index} is {one} for CUDA, which computes, but {other} for the driver, "
                f"which measures and sets power limits: the wrong card would be capped. {FIX}"
            )


def cuda_devices() -> list[Device]:
    """The GPUs in CUDA's order; empty if this process has not loaded torch or has no CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        # torch knows PCI addresses from 2.5 on.
        pci = None
        if hasattr(properties, "pci_bus_id"):
            pci = (
                int(properties.pci_domain_id),
                int(properties.pci_bus_id),
                int(properties.pci_device_id),
            )
        devices.append(Device(properties.name, pci))
    return devices


def nvml_devices(gpus: GPUs) -> list[Device]:
    """The GPUs in Zeus's order, which is NVML's."""
    from zeus.device.gpu import nvidia

    from zeus_hetero import devices

    found = []
    for index, gpu in enumerate(gpus.gpus):
        try:
            info = nvidia.pynvml.nvmlDeviceGetPciInfo(getattr(gpu, "handle", None))
            pci: tuple[int, int, int] | None = (int(info.domain), int(info.bus), int(info.device))
        except Exception:  # an old driver: names still tell different models apart
            pci = None
        found.append(Device(devices.name(gpus, index), pci))
    return found
