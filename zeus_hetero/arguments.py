"""Checks of figures that users give, with one wording for what was expected."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from zeus_hetero.errors import AllocationError

_Number = TypeVar("_Number", int, float)


def whole(argument: str, value: Any) -> int:
    """A positive whole number, or an AllocationError."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise AllocationError(f"{argument} is {value!r}; expected a positive whole number.")
    return int(value)


def between(argument: str, value: Any, low: float, high: float, unit: str = "") -> float:
    """A finite number in a range, or an AllocationError."""
    if not _is_number(value) or not math.isfinite(value) or not low <= value <= high:
        span = f"of at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
        told = f"{argument} is {value!r}; expected a number {span} {unit}"
        raise AllocationError(f"{told.rstrip()}.")
    return float(value)


def positive(argument: str, value: Any, unit: str) -> float:
    """A finite number above 0, or an AllocationError."""
    if not _is_number(value) or not math.isfinite(value) or value <= 0:
        raise AllocationError(f"{argument} is {value!r}; expected a positive number of {unit}.")
    return float(value)


def per_gpu(
    argument: str, value: Any, names: Iterable[str], check: Callable[[str, Any], _Number]
) -> dict[str, _Number]:
    """One checked figure per GPU name; GPUs that a mapping leaves out are left out.

    Args:
        argument: name for messages.
        value: None, one figure for all, or a mapping by GPU name.
        names: the known GPU names.
        check: turns one figure into a checked one.
    """
    known = list(names)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return dict.fromkeys(known, check(argument, value))
    for name in value:
        if name not in known:
            raise AllocationError(
                f"{argument} names GPU {name!r}; expected one of {', '.join(known)}."
            )
    return {name: check(f"{argument}[{name!r}]", figure) for name, figure in value.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
