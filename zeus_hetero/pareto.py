"""The trade-off between the time and the energy of a global step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from zeus_hetero.allocation import Allocation
from zeus_hetero.allocator import METHODS
from zeus_hetero.case import Case
from zeus_hetero.errors import InfeasibleError
from zeus_hetero.trace import TraceSource

_EXACT_GPUS = 3
_FLEET_ERROR = 1e-3


def pareto_front(
    traces: Mapping[str, TraceSource],
    global_batch_size: int,
    *,
    error: float | None = None,
    **options: Any,
) -> pd.DataFrame:
    """The allocations of which none is both slower and hungrier than another.

    Every solve with a deadline gives the allocation of least energy within it, and shows that
    nothing better lies between its own time and the deadline. The gaps that are left between two
    found points are halved until none hides a saving of more than `error`.

    Args:
        traces: as for `allocate`.
        global_batch_size: samples per global step.
        error: the front may miss allocations that save less than this fraction of energy against
            the next faster one that it holds. 0 gives the exact set; the default is 0 for up to
            three GPUs and 0.001 beyond.
        **options: further arguments of `allocate`, but for `method`, `eta`, `max_slowdown` and
            `gap`.

    Returns:
        The points by ascending step_time (s): step_energy (J), shares and power_limits (W) as
        tuples, and knee, True for the point farthest below the line between the fastest and the
        most frugal one, both axes scaled to it. ``frame.attrs["error"]`` is the error that was
        kept.
    """
    case = Case.of(traces, global_batch_size, **options).minimising_energy()
    if error is None:
        error = 0.0 if len(case.gpus) <= _EXACT_GPUS else _FLEET_ERROR
    plans = _front(case, error)
    frame = pd.DataFrame(
        {
            "step_time": [plan.step_time for plan in plans],
            "step_energy": [plan.step_energy for plan in plans],
            "shares": [tuple(w.batch_size for w in plan.workers) for plan in plans],
            "power_limits": [tuple(w.power_limit for w in plan.workers) for plan in plans],
        }
    )
    frame["knee"] = _is_knee(frame["step_time"].to_numpy(), frame["step_energy"].to_numpy())
    frame.attrs["error"] = error
    return frame


@dataclass(frozen=True)
class _Interval:
    """Times between which an allocation may be hidden that the front lacks.

    Attributes:
        after: the point before it, the most frugal one known for its times.
        before: time in s of the next point.
        least: energy in J that nothing in the interval can undercut.
        start: s, from which on nothing is known, if later than the point's own time.
        at_end: whether to look right before its end instead of in its middle.
    """

    after: Allocation
    before: float
    least: float
    start: float = 0.0
    at_end: bool = False

    def deadline(self, exact: bool) -> float:
        """The deadline in s to solve for next."""
        if exact or self.at_end:
            return float(np.nextafter(self.before, 0))
        return (max(self.start, self.after.step_time) + self.before) / 2


def _front(case: Case, error: float) -> list[Allocation]:
    frugal = _least_energy(case, math.inf)
    quickest = case.minimising_time().solve(METHODS["optimal"])
    fastest = _least_energy(case, quickest.step_time * (1 + 1e-12)) or quickest
    assert frugal is not None  # the case was solved for time already
    found = {fastest.step_time: fastest, frugal.step_time: frugal}
    open_intervals = [_Interval(fastest, frugal.step_time, frugal.step_energy)]
    while open_intervals:
        interval = open_intervals.pop()
        known = interval.after
        if known.step_energy <= interval.least * (1 + max(error, 1e-12)):
            continue
        deadline = interval.deadline(exact=error == 0)
        plan = _least_energy(case, deadline)
        if plan is not None and plan.step_energy < known.step_energy * (1 - 1e-12):
            found[plan.step_time] = plan
            open_intervals.append(_Interval(known, plan.step_time, plan.step_energy))
            known = plan
        if deadline < interval.before * (1 - 1e-12):
            # Nothing better lies up to the deadline. Where the half before it was empty, bisection
            # would only close in on a jump, so the next try is right before the end.
            empty = known is interval.after
            open_intervals.append(
                _Interval(known, interval.before, interval.least, deadline, empty)
            )
    front: list[Allocation] = []
    for _, plan in sorted(found.items()):
        if not front or plan.step_energy < front[-1].step_energy * (1 - 1e-12):
            front.append(plan)
    return front


def _least_energy(case: Case, deadline: float) -> Allocation | None:
    try:
        return case.within(deadline).solve(METHODS["optimal"])
    except InfeasibleError:
        return None


def _is_knee(times: np.ndarray, energies: np.ndarray) -> np.ndarray:
    span_t, span_e = np.ptp(times), np.ptp(energies)
    if len(times) < 3 or span_t == 0 or span_e == 0:
        return np.arange(len(times)) == 0
    below = 1 - (times - times.min()) / span_t - (energies - energies.min()) / span_e
    return np.arange(len(times)) == int(below.argmax())
