"""The power limits to profile, per GPU: checked, and numbered in rungs.

A rung is one setting of all GPUs of a process. Zeus's optimizer knows a rung by one number of
mW, so it gets the reference GPU's limit; the other GPUs' limits belong to it by position.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

from zeus_hetero.errors import PowerLimitError
from zeus_hetero.gpu_names import same_model

# Per GPU: its index or its model's name.
PerGPU = Mapping[Union[int, str], Any]


@dataclass(frozen=True)
class GPUInfo:
    """What a ladder must know of a GPU: Zeus's index, model name, accepted range in whole W."""

    index: int
    name: str
    low: int
    high: int

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"


@dataclass(frozen=True)
class Ladder:
    """Rungs of power limits.

    Attributes:
        reference: index of the GPU whose limits name the rungs.
        limits: GPU index -> W per rung; all of one length.
    """

    reference: int
    limits: Mapping[int, tuple[int, ...]]

    @property
    def rungs(self) -> tuple[int, ...]:
        """The rungs' names in order: the reference GPU's limits in W, each once."""
        return self.limits[self.reference]

    def setting(self, rung: int) -> dict[int, int]:
        """The power limit of each GPU on a rung: GPU index -> W."""
        position = self.rungs.index(rung)
        return {index: limits[position] for index, limits in self.limits.items()}

    def max_power(self) -> int:
        """Sum of the GPUs' highest limits in W: the Zeus cost's MaxPower."""
        return sum(max(limits) for limits in self.limits.values())


def full_range(gpus: Sequence[GPUInfo], step: int) -> Ladder:
    """Every GPU's whole range from the top, in steps; a shorter ladder stays on its last rung.

    Args:
        gpus: at least one.
        step: W.
    """
    limits = {gpu.index: tuple(range(gpu.high, gpu.low - 1, -step)) for gpu in gpus}
    reference = max(limits, key=lambda index: len(limits[index]))
    length = len(limits[reference])
    return Ladder(
        reference,
        {i: rungs + rungs[-1:] * (length - len(rungs)) for i, rungs in limits.items()},
    )


def explicit(gpus: Sequence[GPUInfo], power_limits: Iterable[int] | PerGPU) -> Ladder:
    """Exactly these limits, in this order.

    Args:
        gpus: at least one.
        power_limits: W, for all GPUs alike or per GPU (by index or model name).

    Raises:
        PowerLimitError: a list is empty, repeats itself, holds something else than whole W in
            the GPU's range, or the GPUs' lists differ in length.
    """
    limits = {}
    for gpu in gpus:
        own = _of_gpu(gpu, power_limits, "power_limits")
        if isinstance(own, (str, bytes)) or not isinstance(own, Iterable):
            raise PowerLimitError(
                f"power_limits for {gpu} is {own!r}; expected a list of W, such as [70, 65, 60]."
            )
        limits[gpu.index] = _checked(gpu, list(own))
    lengths = {index: len(rungs) for index, rungs in limits.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"GPU {index}: {length}" for index, length in lengths.items())
        raise PowerLimitError(
            f"power_limits has lists of different lengths ({counts}); expected as many for each "
            "GPU, because all GPUs of one process are measured together, rung by rung."
        )
    return Ladder(gpus[0].index, limits)


def fixed(gpus: Sequence[GPUInfo], power_limit: int | PerGPU) -> Ladder:
    """One rung.

    Args:
        gpus: at least one.
        power_limit: W, for all GPUs alike or per GPU (by index or model name).

    Raises:
        PowerLimitError: not whole W in the GPU's range, or none for a GPU.
    """
    return Ladder(
        gpus[0].index,
        {gpu.index: _checked(gpu, [_of_gpu(gpu, power_limit, "power_limit")]) for gpu in gpus},
    )


def _of_gpu(gpu: GPUInfo, value: Any, argument: str) -> Any:
    if not isinstance(value, Mapping):
        return value
    if gpu.index in value:
        return value[gpu.index]
    for key, own in value.items():
        if isinstance(key, str) and same_model(key, gpu.name):
            return own
    raise PowerLimitError(
        f"{argument} has nothing for {gpu}, only for {', '.join(map(repr, value))}; expected an "
        "entry for each GPU's index or model name."
    )


def _checked(gpu: GPUInfo, limits: Sequence[Any]) -> tuple[int, ...]:
    if not limits:
        raise PowerLimitError(
            f"power_limits for {gpu} is empty; expected at least one between {gpu.low} and "
            f"{gpu.high} W, or no power_limits for the whole range."
        )
    fractional = [
        limit
        for limit in limits
        if isinstance(limit, bool)
        or not isinstance(limit, numbers.Real)
        or not float(limit).is_integer()
    ]
    if fractional:
        raise PowerLimitError(
            f"power limit {', '.join(map(repr, fractional))} for {gpu}: expected whole W."
        )
    whole = tuple(int(limit) for limit in limits)
    outside = [str(limit) for limit in whole if not gpu.low <= limit <= gpu.high]
    if outside:
        raise PowerLimitError(
            f"power limit {', '.join(outside)} W is not supported by {gpu}: its range is "
            f"{gpu.low} to {gpu.high} W."
        )
    repeated = sorted({limit for limit in whole if whole.count(limit) > 1}, reverse=True)
    if repeated:
        raise PowerLimitError(
            f"power limit {', '.join(map(str, repeated))} W for {gpu} is given more than once; "
            "expected each once."
        )
    return whole
