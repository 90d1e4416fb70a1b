"""The one GPU that is profiled, by its number, in W and J: readings, checks and power limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from zeus_hetero import devices
from zeus_hetero.errors import PowerLimitError, PowerLimitPermissionError, ProfilingError
from zeus_hetero.restore import PreviousLimit


class ProfiledGPU:
    """A GPU that Zeus sees.

    Args:
        index: its number for Zeus, which is that for CUDA.

    Raises:
        DeviceError: there is no GPU at all.
        ProfilingError: there is none of that number.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.gpus = devices.get_gpus()
        if not 0 <= index < len(self.gpus):
            raise ProfilingError(
                f"GPU {index}; expected one from 0 to {len(self.gpus) - 1}, the GPUs that Zeus "
                "sees."
            )
        self.name = devices.name(self.gpus, index)
        self.power_range = devices.limit_range(self.gpus, index)

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"

    @property
    def number(self) -> int:
        """The driver's number of it, whatever CUDA_VISIBLE_DEVICES says."""
        return devices.physical_index(self.gpus, self.index)

    def energy(self) -> float:
        """The energy counter, J."""
        return float(self._call("get_total_energy_consumption", "getTotalEnergyConsumption") / 1000)

    def temperature(self) -> int | None:
        """Degrees Celsius; None where Zeus or the GPU cannot tell."""
        try:
            return int(self._call("get_gpu_temperature", "getGpuTemperature"))
        except Exception:  # Not in Zeus 0.12.0; not supported by some GPUs.
            return None

    def previous_limit(self) -> PreviousLimit:
        """The power limit in force, to be put back.

        Raises:
            ProfilingError: it cannot be read, thus not be put back.
        """
        limit = devices.read_limit_mw(self.gpus, self.index)
        if limit is None:
            raise ProfilingError(
                f"{self}: its power limit cannot be read, so it could not be put back. Use Zeus "
                "0.13 or newer."
            )
        return PreviousLimit(self.number, self.name, limit)

    def set_power_limit(self, power_limit: int) -> None:
        """Set the power limit, W."""
        devices.set_limit_mw(self.gpus, self.index, power_limit * 1000)

    def put_back(self, previous: PreviousLimit) -> bool:
        """Set a former power limit if it is not in force; False if the GPU does not let it."""
        try:
            if devices.read_limit_mw(self.gpus, self.index) != previous.limit:
                devices.set_limit_mw(self.gpus, self.index, previous.limit)
        except Exception:  # A lost GPU; the note stays and names the limit.
            return False
        return True

    @contextmanager
    def power_limit_kept(self) -> Iterator[None]:
        """Put back the power limit that is in force now."""
        previous = self.previous_limit()
        try:
            yield
        finally:
            self.put_back(previous)

    def check_power_limits(self, power_limits: Sequence[int]) -> tuple[int, ...]:
        """Check that the GPU supports power limits, and sort them.

        Returns:
            The limits in W, descending.

        Raises:
            PowerLimitError: one is no whole number, out of range or there twice.
        """
        low, high = self.power_range
        expected = f"{self} supports whole numbers from {low} to {high} W"
        if not power_limits:
            raise PowerLimitError(f"no power limits; {expected}.")
        bad = [p for p in power_limits if not is_whole(p) or not low <= p <= high]
        if bad:
            raise PowerLimitError(f"power limits {', '.join(map(str, bad))} W; {expected}.")
        if len(set(power_limits)) < len(power_limits):
            raise PowerLimitError(
                f"power limits {', '.join(map(str, power_limits))} W; expected each of them once."
            )
        return tuple(sorted((int(p) for p in power_limits), reverse=True))

    def try_power_limits(self, power_limits: Sequence[int]) -> None:
        """Set every power limit once and put back what was there, before any time is spent.

        Raises:
            PowerLimitPermissionError: it is not permitted.
            PowerLimitError: the driver refuses a limit.
        """
        devices.check_permission(self.gpus, self.index)
        with self.power_limit_kept():
            for limit in power_limits:
                try:
                    self.set_power_limit(limit)
                except PowerLimitPermissionError:
                    raise
                except Exception as error:
                    raise PowerLimitError(
                        f"{self}: the driver refuses a power limit of {limit} W ({error}). "
                        "Leave it out."
                    ) from error

    def _call(self, method: str, before_0_13: str) -> Any:
        gpu = self.gpus.gpus[self.index]
        return (getattr(gpu, method, None) or getattr(gpu, before_0_13))()


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number."""
    if isinstance(value, bool):
        return False
    try:
        return math.isfinite(value) and int(value) == value
    except (TypeError, ValueError):
        return False
