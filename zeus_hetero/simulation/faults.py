"""What can go wrong with a simulated GPU, on request."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Union

from zeus_hetero.errors import SimulationError


@dataclass(frozen=True)
class NoPermission:
    """Setting power limits and persistence mode needs a privilege that this process lacks."""

    name: ClassVar[str] = "no_permission"


@dataclass(frozen=True)
class LimitRejected:
    """The driver refuses power limits although they lie in the range it reports.

    Attributes:
        power_limits: the refused limits in W; empty for all but the default limit.
    """

    name: ClassVar[str] = "limit_rejected"
    power_limits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # JSON knows lists only.
        object.__setattr__(self, "power_limits", tuple(self.power_limits))


@dataclass(frozen=True)
class OutOfMemory:
    """A step of more samples than this does not fit into memory.

    Attributes:
        above: the largest batch size that fits.
    """

    name: ClassVar[str] = "out_of_memory"
    above: int


@dataclass(frozen=True)
class Lost:
    """The GPU falls off the bus: that step and every later call fail.

    Attributes:
        at_step: number of the step that fails, from 1.
    """

    name: ClassVar[str] = "lost"
    at_step: int


@dataclass(frozen=True)
class CounterReset:
    """The energy counter starts from zero again, as after a reload of the driver.

    Attributes:
        at_step: number of the step after which it does, from 1.
    """

    name: ClassVar[str] = "counter_reset"
    at_step: int


@dataclass(frozen=True)
class ThermalSlowdown:
    """From a moment on the GPU is too hot and runs slower, at the same energy per step.

    Attributes:
        after: s on the virtual clock.
        slowdown: factor on the time of a step, at least 1.
    """

    name: ClassVar[str] = "thermal_slowdown"
    after: float
    slowdown: float = 1.5


@dataclass(frozen=True)
class SlowCounter:
    """The energy counter moves seldom.

    Attributes:
        period: s between two movements.
    """

    name: ClassVar[str] = "slow_counter"
    period: float = 1.0


Fault = Union[
    NoPermission, LimitRejected, OutOfMemory, Lost, CounterReset, ThermalSlowdown, SlowCounter
]

_FAULTS: dict[str, Any] = {
    fault.name: fault
    for fault in (
        NoPermission,
        LimitRejected,
        OutOfMemory,
        Lost,
        CounterReset,
        ThermalSlowdown,
        SlowCounter,
    )
}


class SimulatedOutOfMemoryError(RuntimeError):
    """Stands for torch's error where torch is not loaded."""


def out_of_memory_error(message: str) -> Exception:
    """The exception that a training loop expects: torch's own where torch is in use."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda"):
        return torch.cuda.OutOfMemoryError(message)  # type: ignore[no-any-return]
    return SimulatedOutOfMemoryError(message)


def fault_to_json(fault: Fault) -> dict[str, Any]:
    """A fault as it stands in the environment."""
    return {"fault": fault.name, **asdict(fault)}


def fault_from_json(spec: Mapping[str, Any]) -> Fault:
    """Read a fault from ``{"fault": "<name>", <attribute>: <value>, ...}``.

    Raises:
        SimulationError: unknown fault or attribute.
    """
    values = dict(spec)
    kind = values.pop("fault", None)
    if kind not in _FAULTS:
        raise SimulationError(f"fault is {kind!r}; expected one of {', '.join(_FAULTS)}.")
    try:
        return _FAULTS[kind](**values)  # type: ignore[no-any-return]
    except TypeError:
        names = ", ".join(field.name for field in fields(_FAULTS[kind])) or "none"
        raise SimulationError(
            f"fault {kind}: attributes are {', '.join(values) or 'none'}; expected {names}."
        ) from None
