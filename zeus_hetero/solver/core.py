"""Exact dynamic programming over the few options that an optimum can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zeus_hetero.solver.options import Options

_GATHER = 1 << 20  # elements of one vectorised step: 8 MiB of float64
_PROBE = 48  # options per GPU in a narrow first try


@dataclass(frozen=True)
class CoreSolution:
    """A choice of options whose shares add up to the total.

    Attributes:
        excess: its cost above the relaxation's bound, at least 0.
        rows: per kind, the rows of the options taken, one per GPU.
    """

    excess: float
    rows: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Core:
    """Options of one kind that survive: distinct shares, ascending, with their reduced costs."""

    share: np.ndarray
    reduced: np.ndarray
    row: np.ndarray
    count: int

    def narrowed(self) -> _Core:
        """At most `_PROBE` of them: half spread over the cheapest ties, half the next cheapest."""
        if len(self.share) <= _PROBE:
            return self
        by_cost = np.argsort(self.reduced, kind="stable")
        ties = int(np.count_nonzero(self.reduced <= 0))
        spread = np.unique(np.linspace(0, max(ties - 1, 0), _PROBE // 2).astype(int))
        next_ones = np.arange(ties, min(ties + _PROBE // 2, len(by_cost)))
        pick = np.sort(by_cost[np.concatenate([spread, next_ones]).astype(int)])
        return _Core(self.share[pick], self.reduced[pick], self.row[pick], self.count)


def cheapest(
    options: Sequence[Options], total: int, price: float, threshold: float
) -> CoreSolution | None:
    """The cheapest choice that reaches the total, if it is within a threshold of the bound.

    Args:
        options: per kind, the options that are allowed; none empty.
        total: units to share out.
        price: of a unit, from the relaxation.
        threshold: look only for choices whose cost is at most this much above the relaxation's
            bound; may be inf.

    Returns:
        The cheapest choice; None if there is none within the threshold.
    """
    rounding = 1e-13 * max(
        max(float(np.abs(o.cost).max()), abs(price) * float(o.share.max())) for o in options
    )
    cores = [_core(o, price, threshold, rounding) for o in options]
    best = _dynamic_program(cores, total, threshold, narrow=True)
    if best is not None and best.excess <= rounding * len(cores):
        return best
    if any(len(c.share) > _PROBE for c in cores):
        limit = threshold if best is None else min(threshold, best.excess)
        tighter = [_core(o, price, limit, rounding) for o in options]
        best = _dynamic_program(tighter, total, limit, narrow=False) or best
    return best


def _core(option: Options, price: float, threshold: float, rounding: float) -> _Core:
    reduced = option.cost - price * option.share
    reduced -= reduced.min()
    reduced[reduced <= rounding] = 0.0
    row = np.nonzero(reduced <= threshold)[0]
    row = row[np.lexsort((reduced[row], option.share[row]))]
    share = option.share[row]
    first = np.ones(len(row), dtype=bool)
    first[1:] = share[1:] != share[:-1]
    row = row[first]
    return _Core(option.share[row].astype(np.int64), reduced[row], row, option.count)


def _dynamic_program(
    cores: Sequence[_Core], total: int, threshold: float, narrow: bool
) -> CoreSolution | None:
    """Place GPU after GPU; the last, of the kind with most options, takes what is left.

    ``sums[s]`` is the least reduced cost with which the GPUs placed so far take ``low + s`` units.
    """
    kinds = sorted(range(len(cores)), key=lambda k: len(cores[k].share))
    order = [k for k in kinds for _ in range(cores[k].count)]
    used = [core.narrowed() if narrow else core for core in cores]
    last = cores[order[-1]]
    # What the GPUs not yet placed can take at least and at most.
    least, most = int(last.share[0]), int(last.share[-1])
    rest = []
    for k in reversed(order[:-1]):
        rest.append((least, most))
        least += int(used[k].share[0])
        most += int(used[k].share[-1])
    rest.reverse()
    stages = [(0, np.zeros(1))]
    for k, (least, most) in zip(order[:-1], rest):
        stage = _place(stages[-1], used[k], total - most, total - least, threshold)
        if stage is None:
            return None
        stages.append(stage)
    low, sums = stages[-1]
    at = np.searchsorted(last.share, total - low - np.arange(len(sums)))
    at = np.minimum(at, len(last.share) - 1)
    fits = last.share[at] == total - low - np.arange(len(sums))
    excess = np.where(fits, sums + last.reduced[at], np.inf)
    s = int(excess.argmin())
    if not excess[s] <= threshold or np.isinf(excess[s]):
        return None
    rows: list[list[int]] = [[] for _ in cores]
    rows[order[-1]].append(int(last.row[at[s]]))
    taken = low + s
    for k, (low, sums) in zip(reversed(order[:-1]), reversed(stages[:-1])):
        before = taken - used[k].share - low
        inside = (before >= 0) & (before < len(sums))
        cost = np.where(inside, sums[np.where(inside, before, 0)] + used[k].reduced, np.inf)
        choice = int(cost.argmin())
        rows[k].append(int(used[k].row[choice]))
        taken -= int(used[k].share[choice])
    return CoreSolution(float(excess[s]), tuple(tuple(r) for r in rows))


def _place(
    stage: tuple[int, np.ndarray], core: _Core, at_least: int, at_most: int, threshold: float
) -> tuple[int, np.ndarray] | None:
    """Add one GPU; keep the sums between two limits from which the total can be reached."""
    low, sums = stage
    new_low = max(low + int(core.share[0]), at_least)
    new_high = min(low + len(sums) - 1 + int(core.share[-1]), at_most)
    if new_low > new_high:
        return None
    width = new_high - new_low + 1
    best = np.full(width, np.inf)
    before = np.arange(new_low, new_high + 1) - low
    chunk = max(1, _GATHER // width)
    padded = np.concatenate([[np.inf], sums, [np.inf]])
    for start in range(0, len(core.share), chunk):
        part = slice(start, start + chunk)
        index = before - core.share[part, None]
        np.clip(index, -1, len(sums), out=index)
        reached = padded[index + 1] + core.reduced[part, None]
        np.minimum(best, reached.min(axis=0), out=best)
    best[best > threshold] = np.inf
    alive = np.nonzero(np.isfinite(best))[0]
    if not len(alive):
        return None
    return new_low + int(alive[0]), best[alive[0] : alive[-1] + 1]
