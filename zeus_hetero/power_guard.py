"""Power limits while a GPU is profiled: checked before, put back after, noted in between."""

from __future__ import annotations

import math
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from zeus.device.gpu.common import ZeusGPUNoPermissionError

from zeus_hetero import device
from zeus_hetero.errors import ProfilingError


def check_power_limits(gpu_index: int, power_limits: Sequence[int]) -> tuple[int, ...]:
    """Check that a GPU supports power limits.

    Returns:
        The limits in W, descending.

    Raises:
        ProfilingError: one is no whole number, out of range or there twice.
    """
    low, high = device.power_range(gpu_index)
    expected = f"{device.describe(gpu_index)} supports whole numbers from {low} to {high} W"
    if not power_limits:
        raise ProfilingError(f"no power limits; {expected}.")
    bad = [p for p in power_limits if not is_whole(p) or not low <= p <= high]
    if bad:
        raise ProfilingError(f"power limits {', '.join(map(str, bad))} W; {expected}.")
    if len(set(power_limits)) < len(power_limits):
        raise ProfilingError(
            f"power limits {', '.join(map(str, power_limits))} W; expected each of them once."
        )
    return tuple(sorted((int(p) for p in power_limits), reverse=True))


def check_permission(gpu_index: int, power_limits: Sequence[int]) -> None:
    """Set every power limit once and put back what was there, before any time is spent.

    Raises:
        ProfilingError: it is not permitted, or the driver refuses a limit.
    """
    with power_limit_kept(gpu_index):
        for limit in power_limits:
            try:
                device.set_power_limit(gpu_index, limit)
            except ZeusGPUNoPermissionError:
                raise ProfilingError(
                    f"{device.describe(gpu_index)}: this process may not set power limits. Start "
                    "the container with --cap-add SYS_ADMIN (or run as root outside one), or "
                    "start zeusd and set ZEUSD_SOCK_PATH."
                ) from None
            except Exception as error:
                raise ProfilingError(
                    f"{device.describe(gpu_index)}: power limit {limit} W is refused ({error}); "
                    "leave it out."
                ) from error


@contextmanager
def power_limit_kept(gpu_index: int) -> Iterator[float]:
    """Put the power limit back that is in force now, also when told to end (SIGTERM).

    Yields:
        The power limit in force, W.
    """
    before = device.power_limit(gpu_index)
    with _exit_on_sigterm():
        try:
            yield before
        finally:
            device.set_power_limit(gpu_index, before)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def note_of(gpu_index: int) -> dict[str, Any]:
    """What has to be put back if this process is killed."""
    return {
        "gpu_index": gpu_index,
        "gpu_name": device.name(gpu_index),
        "power_limit": device.power_limit(gpu_index),
    }


def put_back(gpu_index: int, power_limit: float) -> bool:
    """Set a power limit if it is not in force; False if the GPU does not let it be set."""
    try:
        if device.power_limit(gpu_index) != power_limit:
            device.set_power_limit(gpu_index, power_limit)
    except Exception:  # A lost GPU; the note stays and names the limit.
        return False
    return True


def restore_from_note(note: Mapping[str, Any] | None) -> str | None:
    """Put back the power limit that a killed profiler left changed.

    Args:
        note: what it left; None for nothing.

    Returns:
        A sentence about what was done, None if there was nothing to do.

    Raises:
        ProfilingError: the GPU is another one, or does not let its limit be set.
    """
    if not note:
        return None
    index, before = int(note["gpu_index"]), float(note["power_limit"])
    if device.name(index) != note["gpu_name"]:
        raise ProfilingError(
            f"GPU {index} is a {device.name(index)}; the note of a killed profiler is about a "
            f"{note['gpu_name']}. Give the right card with CUDA_VISIBLE_DEVICES."
        )
    found = device.power_limit(index)
    if found == before:
        return None
    try:
        device.set_power_limit(index, before)
    except Exception as error:
        raise ProfilingError(
            f"{device.describe(index)}: a killed profiler left the power limit at {found:g} W and "
            f"it cannot be put back to {before:g} W ({error}). Do it with the rights to."
        ) from error
    return (
        f"{device.describe(index)}: power limit put back from {found:g} W to {before:g} W, which "
        "a killed profiler had left."
    )


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number."""
    if isinstance(value, bool):
        return False
    try:
        return math.isfinite(value) and int(value) == value
    except (TypeError, ValueError):
        return False
