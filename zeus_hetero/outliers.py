"""Measured points that the others contradict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from zeus_hetero.surface import Surface
from zeus_hetero.trace import Trace

# A point is named as an outlier if it is off by this many robust standard deviations and by this
# much. Six: windows of a few steps have heavy tails, and a false alarm costs a GPU hour.
_DEVIATIONS = 6.0
_SIZE = 0.12
# More bad points than this are no single bad points, they are the trace.
_SHARE = 0.1
# Leaving out needs a crowd to judge by.
_FEWEST = 8


@dataclass(frozen=True)
class Outlier:
    """A measured point that its neighbours contradict.

    Attributes:
        batch_size: samples.
        power_limit: W.
        figure: "time" or "power".
        measured: s per step, or average W.
        expected: what the other points say.
    """

    batch_size: int
    power_limit: int
    figure: str
    measured: float
    expected: float

    def __str__(self) -> str:
        unit = "s" if self.figure == "time" else "W"
        return (
            f"batch size {self.batch_size} at {self.power_limit} W: {self.figure} "
            f"{self.measured:.4g} {unit}, expected about {self.expected:.4g} {unit}"
        )


def contradicted(
    trace: Trace, surfaces: Mapping[str, Surface], believed: np.ndarray
) -> dict[int, Outlier]:
    """Every point that lies far from what the surfaces through the others say.

    Args:
        trace: the measurements.
        surfaces: "time" and "power", fitted to them.
        believed: n booleans; the surfaces ignore the other points.

    Returns:
        By index, worst first; of a point's figures the one that is further off.
    """
    if len(trace) < _FEWEST:
        return {}
    measured = {"time": trace.time, "power": trace.average_power}
    found = []
    for figure, surface in surfaces.items():
        off, deviation = surface.left_out()
        z = np.abs(off / deviation)
        scale = max(1.4826 * float(np.median(z[believed])), 0.5)
        far = (z > _DEVIATIONS * scale) & (np.abs(off) > _SIZE)
        for i in np.flatnonzero(far & ~_common(trace, far, off > 0)):
            value = float(measured[figure][i])
            outlier = Outlier(
                int(trace.batch_size[i]),
                int(trace.power_limit[i]),
                figure,
                value,
                value * float(np.exp(-off[i])),
            )
            found.append((float(z[i] / scale), int(i), outlier))
    found.sort(key=lambda entry: -entry[0])
    by_index: dict[int, Outlier] = {}
    for _, index, outlier in found:
        by_index.setdefault(index, outlier)
    return by_index


def _common(trace: Trace, far: np.ndarray, above: np.ndarray) -> np.ndarray:
    """Whether most points of a batch size are off to the same side: that is how the GPU is."""
    common = np.zeros(len(trace), dtype=bool)
    for size in np.unique(trace.batch_size[far]):
        at = trace.batch_size == size
        for side in (far & above, far & ~above):
            count = np.count_nonzero(at & side)
            if count >= 2 and 2 * count > np.count_nonzero(at):
                common |= at & side
    return common


def worst_by_batch_size(
    trace: Trace, surfaces: Mapping[str, Surface], believed: np.ndarray
) -> list[int]:
    """Indices of believed points to believe no longer: one per batch size.

    Beside a very bad point good ones look bad. At most a tenth of the trace is disbelieved.
    """
    room = int(_SHARE * len(trace)) - int(np.count_nonzero(~believed))
    chosen: dict[int, int] = {}
    for index, outlier in contradicted(trace, surfaces, believed).items():
        if believed[index]:
            chosen.setdefault(outlier.batch_size, index)
    return list(chosen.values())[: max(room, 0)]
