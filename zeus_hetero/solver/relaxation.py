"""Lagrangian relaxation of the demand that shares add up to the total.

For any price ``λ`` of a unit, ``λ total + sum_i min (cost - λ share)`` is at most the least sum
of costs. The best price is the slope of the lower convex hull of all reachable
``(sum of shares, sum of costs)`` where it crosses the total.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from zeus_hetero.solver.options import Options


@dataclass(frozen=True)
class Relaxation:
    """The relaxed problem at its best price.

    Attributes:
        price: cost per unit.
        value: lower bound of the sum of costs.
        low: per kind, the row of the option on the hull's edge below the total.
        high: likewise above it.
        penalties: cost per unit of each scarce resource; empty where nothing is scarce.
        support: per kind, rows of the options that the relaxed solution mixes, where known.
    """

    price: float
    value: float
    low: tuple[int, ...] = ()
    high: tuple[int, ...] = ()
    penalties: np.ndarray = field(default_factory=lambda: np.zeros(0))
    support: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class _Corner:
    """A corner of the hull: one option per kind, and what all GPUs together make of it."""

    share: int
    cost: float
    rows: tuple[int, ...]

    @classmethod
    def of(cls, options: Sequence[Options], rows: Sequence[int]) -> _Corner:
        return cls(
            sum(o.count * int(o.share[r]) for o, r in zip(options, rows)),
            sum(o.count * float(o.cost[r]) for o, r in zip(options, rows)),
            tuple(int(r) for r in rows),
        )


def relax(options: Sequence[Options], total: int, guess: float = 0.0) -> Relaxation | None:
    """Solve the relaxed problem.

    Args:
        options: per kind, the options that are allowed.
        total: units to share out.
        guess: a price to start from; a good one saves time and changes nothing else.

    Returns:
        The best price and its bound; None if no choice of options reaches the total.
    """
    if any(len(o) == 0 for o in options):
        return None
    low = _Corner.of(options, [_cheapest_of(o, int(o.share.min())) for o in options])
    high = _Corner.of(options, [_cheapest_of(o, int(o.share.max())) for o in options])
    if not low.share <= total <= high.share:
        return None
    price, on_edge = guess, False
    while True:
        middle = _Corner.of(options, [int((o.cost - price * o.share).argmin()) for o in options])
        if on_edge and not _below(middle, low, price):
            break
        if middle.share <= total:
            low = middle
        else:
            high = middle
        if low.share >= high.share:
            break
        price, on_edge = (high.cost - low.cost) / (high.share - low.share), True
    value = price * total + sum(o.count * float((o.cost - price * o.share).min()) for o in options)
    return Relaxation(price, value, low.rows, high.rows)


def _cheapest_of(option: Options, share: int) -> int:
    """Row of the cheapest option of a share."""
    rows = np.flatnonzero(option.share == share)
    return int(rows[option.cost[rows].argmin()])


def _below(middle: _Corner, corner: _Corner, price: float) -> bool:
    """Whether a corner lies below the line of this slope through another, beyond rounding."""
    ours, theirs = middle.cost - price * middle.share, corner.cost - price * corner.share
    scale = abs(middle.cost) + abs(price * middle.share)
    return ours < theirs - 1e-13 * scale
