"""The whole decision: traces in, the best shares and power limits out.

The file is not called ``allocate.py``: a submodule of that name would take the place of the
function ``zeus_hetero.allocate`` as soon as anything imported it.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from zeus_hetero.allocation import Allocation
from zeus_hetero.case import Case, GPUs, Method, PerGPU
from zeus_hetero.errors import AllocationError, TraceError, TraceWarning
from zeus_hetero.solver import (
    Problem,
    Solution,
    enumerate_all,
    equal_shares,
    solve,
    with_shares,
    with_strongest_at_lowest_limit,
)
from zeus_hetero.trace import TraceSource

EQUAL_MAX_POWER = "equal_max_power"
PAPER = "paper"


def allocate(
    traces: Mapping[str, TraceSource],
    global_batch_size: int,
    *,
    gpus: GPUs = None,
    method: str = "optimal",
    objective: str = "synchronous",
    model: str = "interpolated",
    eta: float = 0.5,
    wait_power: PerGPU = None,
    sync_time: float = 0.0,
    granularity: int = 1,
    max_slowdown: float | None = None,
    max_batch_size: int | Mapping[str, int] | None = None,
) -> Allocation:
    """Find how many samples of a global batch and which power limit each GPU should get.

    Args:
        traces: a trace (or its path, or a DataFrame) per GPU name, strongest GPU first.
        global_batch_size: samples per optimizer step over all GPUs.
        gpus: the GPUs there are, as a list of names or a mapping from name to count; one of each
            trace by default.
        method: "optimal" (proven), "brute_force", "heuristic" (the strongest GPU at its lowest
            power limit, all else searched) or "baseline" (equal shares, best power limits).
        objective: "synchronous" (all wait for the slowest) or "independent" (the original
            system's).
        model: "interpolated", or "quadratic" (the original system's).
        eta: weight of energy against time: 1 minimises energy, 0 time (and among equally fast
            allocations energy).
        wait_power: W that a GPU draws while it waits for the slowest, one figure or one per GPU
            name; by default the lowest average power in its trace.
        sync_time: s per step in which gradients are exchanged.
        granularity: shares are multiples of this; where the global batch is none, one GPU takes
            the remainder on top.
        max_slowdown: minimise energy among allocations at most this many times slower than the
            fastest; `eta` then does not matter.
        max_batch_size: largest share of a GPU, one figure or one per GPU name.

    Returns:
        The allocation, one worker per GPU in the order of `gpus`.

    Raises:
        TraceError: a trace cannot be used.
        AllocationError: an argument makes no sense.
        InfeasibleError: no allocation satisfies the constraints.

    Example:
        >>> import zeus_hetero
        >>> plan = zeus_hetero.allocate(
        ...     {"A10": "trace_aws/cifar_a10.json", "T4": "trace_aws/cifar_t4.json"}, 4096
        ... )
        >>> sum(worker.batch_size for worker in plan.workers)
        4096
    """
    solver = _method(method)
    case = Case.of(
        traces,
        global_batch_size,
        gpus=gpus,
        objective=objective,
        model=model,
        eta=eta,
        wait_power=wait_power,
        sync_time=sync_time,
        granularity=granularity,
        max_batch_size=max_batch_size,
    )
    started = time.perf_counter()
    plan = _solve(case, solver, max_slowdown)
    return replace(plan, method=method, solve_time=time.perf_counter() - started)


def compare(
    traces: Mapping[str, TraceSource],
    global_batch_size: int,
    *,
    max_slowdown: float | None = None,
    **options: Any,
) -> pd.DataFrame:
    """Put the methods side by side, all judged by the same model and objective.

    Beside the methods of `allocate` there are "equal_max_power" (the even split at maximum power
    that people run today) and "paper" (what the original system chooses: quadratic model,
    independent objective).

    Args:
        traces: as for `allocate`.
        global_batch_size: samples per optimizer step over all GPUs.
        max_slowdown: as for `allocate`.
        **options: further arguments of `allocate`, but for `method`.

    Returns:
        A row per method, indexed by its name: shares and power_limits (tuples, one entry per
        GPU), step_time (s), step_energy (J), cost, gap (to the optimum's proven lower bound),
        solve_time (s), and the time, energy and cost saved against "baseline" and against
        "equal_max_power" as fractions (0.2: a fifth less). ``frame.attrs["skipped"]`` maps the
        methods that cannot run on this case to the reason.
    """
    plans, skipped = plans_by_method(
        traces, global_batch_size, max_slowdown=max_slowdown, **options
    )
    frame = tabulate(plans)
    frame.attrs["skipped"] = skipped
    return frame


def tabulate(plans: Mapping[str, Allocation]) -> pd.DataFrame:
    """Lay out allocations of one case as `compare` does.

    Args:
        plans: allocation per method; "optimal" must be among them.

    Returns:
        The table of `compare`.
    """
    bound = plans["optimal"].lower_bound
    frame = pd.DataFrame(
        {
            "shares": [tuple(w.batch_size for w in plan.workers) for plan in plans.values()],
            "power_limits": [tuple(w.power_limit for w in plan.workers) for plan in plans.values()],
            "step_time": [plan.step_time for plan in plans.values()],
            "step_energy": [plan.step_energy for plan in plans.values()],
            "cost": [plan.cost for plan in plans.values()],
            "gap": [replace(plan, lower_bound=bound).gap for plan in plans.values()],
            "solve_time": [plan.solve_time for plan in plans.values()],
        },
        index=pd.Index(plans, name="method"),
    )
    for reference in ("baseline", EQUAL_MAX_POWER):
        for figure, column in (("time", "step_time"), ("energy", "step_energy"), ("cost", "cost")):
            frame[f"{figure}_saved_vs_{reference}"] = (
                1 - frame[column] / frame.loc[reference, column]
                if reference in frame.index
                else np.nan
            )
    return frame


def plans_by_method(
    traces: Mapping[str, TraceSource],
    global_batch_size: int,
    *,
    max_slowdown: float | None = None,
    **options: Any,
) -> tuple[dict[str, Allocation], dict[str, str]]:
    """The allocations that `compare` tabulates.

    Args:
        traces: as for `compare`; so are the other arguments.
        global_batch_size: samples per global step.
        max_slowdown: as for `compare`.
        **options: as for `compare`.

    Returns:
        Allocation per method, and the reason per method that could not run.
    """
    case = Case.of(traces, global_batch_size, **options)
    plans: dict[str, Allocation] = {}
    skipped: dict[str, str] = {}
    for method, solver in METHODS.items():
        started = time.perf_counter()
        try:
            plan = _solve(case, solver, max_slowdown)
        except AllocationError as error:
            if method == "optimal":
                raise
            skipped[method] = str(error)
            continue
        plans[method] = replace(plan, method=method, solve_time=time.perf_counter() - started)
    today = _equal_at_max_power(case)
    if today is None:
        skipped[EQUAL_MAX_POWER] = "an even split is not allowed by max_batch_size."
    else:
        plans[EQUAL_MAX_POWER] = today
    try:
        plans[PAPER] = _as_in_the_paper(traces, global_batch_size, case, options)
    except (TraceError, AllocationError) as error:
        skipped[PAPER] = str(error)
    return plans, skipped


def pareto_front(
    traces: Mapping[str, TraceSource],
    global_batch_size: int,
    *,
    points: int = 50,
    **options: Any,
) -> pd.DataFrame:
    """The trade-off between time and energy of a global step.

    Args:
        traces: as for `allocate`.
        global_batch_size: samples per global step.
        points: number of deadlines to solve for.
        **options: further arguments of `allocate`, but for `method`, `eta` and `max_slowdown`.

    Returns:
        The non-dominated allocations by ascending step_time (s): step_energy (J), shares,
        power_limits (W), and knee, True for the point farthest from the line between the
        fastest and the most frugal one.
    """
    case = Case.of(traces, global_batch_size, **options).with_eta(1.0)
    frugal = case.solve(METHODS["optimal"])
    fastest = case.with_eta(0.0).solve(METHODS["optimal"])
    front = [
        case.solve(METHODS["optimal"], deadline)
        for deadline in np.linspace(fastest.step_time, frugal.step_time, points)[1:-1]
    ]
    rows = [
        {
            "step_time": plan.step_time,
            "step_energy": plan.step_energy,
            "shares": tuple(w.batch_size for w in plan.workers),
            "power_limits": tuple(w.power_limit for w in plan.workers),
        }
        for plan in (fastest, *front, frugal)
    ]
    frame = pd.DataFrame(rows).sort_values(["step_time", "step_energy"], ignore_index=True)
    least = frame["step_energy"].cummin().shift(fill_value=np.inf)
    frame = frame[frame["step_energy"] < least].reset_index(drop=True)
    frame["knee"] = _is_knee(frame["step_time"].to_numpy(), frame["step_energy"].to_numpy())
    return frame


def _is_knee(times: np.ndarray, energies: np.ndarray) -> np.ndarray:
    span_t, span_e = np.ptp(times), np.ptp(energies)
    if len(times) < 3 or span_t == 0 or span_e == 0:
        return np.arange(len(times)) == 0
    below = 1 - (times - times.min()) / span_t - (energies - energies.min()) / span_e
    return np.arange(len(times)) == int(below.argmax())


def _baseline(problem: Problem) -> Solution | None:
    even = with_shares(problem, equal_shares(problem.total, len(problem.gpus)))
    return None if even is None else _unproven(solve(even))


def _heuristic(problem: Problem) -> Solution | None:
    return _unproven(solve(with_strongest_at_lowest_limit(problem)))


def _unproven(solution: Solution | None) -> Solution | None:
    """The optimum of a restricted problem, which proves nothing about the whole one."""
    return solution and replace(solution, lower_bound=-math.inf)


def _optimal(problem: Problem) -> Solution | None:
    # For two GPUs all allocations fit in one small array, which is quicker than any search.
    if len(problem.gpus) == 2 and sum(k.cost.size for k in problem.kinds) <= 1_000_000:
        return enumerate_all(problem)
    return solve(problem)


METHODS: dict[str, Method] = {
    "optimal": _optimal,
    "brute_force": enumerate_all,
    "heuristic": _heuristic,
    "baseline": _baseline,
}


def _method(name: str) -> Method:
    if name not in METHODS:
        raise AllocationError(f"method is {name!r}; expected one of {', '.join(METHODS)}.")
    return METHODS[name]


def _solve(case: Case, method: Method, max_slowdown: float | None) -> Allocation:
    if max_slowdown is None:
        return case.solve(method)
    if not (math.isfinite(max_slowdown) and max_slowdown >= 1):
        raise AllocationError(f"max_slowdown is {max_slowdown!r}; expected a number of at least 1.")
    fastest = case.with_eta(0.0).solve(METHODS["optimal"])
    # A deadline computed from the fastest step must admit that step in spite of rounding.
    return case.with_eta(1.0).solve(method, fastest.step_time * max_slowdown * (1 + 1e-12))


def _equal_at_max_power(case: Case) -> Allocation | None:
    shares = equal_shares(case.global_batch_size, len(case.gpus))
    if any(share > case.max_share[name] for share, name in zip(shares, case.gpus)):
        return None
    limits = [case.models[name].power_limits[0] for name in case.gpus]
    return replace(case.judge(shares, limits), method=EQUAL_MAX_POWER)


def _as_in_the_paper(
    traces: Mapping[str, TraceSource],
    global_batch_size: int,
    case: Case,
    options: Mapping[str, Any],
) -> Allocation:
    started = time.perf_counter()
    with warnings.catch_warnings():
        # The traces were checked and complained about once already.
        warnings.simplefilter("ignore", TraceWarning)
        paper = Case.of(
            traces,
            global_batch_size,
            **{**options, "objective": "independent", "model": "quadratic"},
        )
    choice = paper.solve(METHODS["optimal"])
    plan = case.judge(
        [w.batch_size for w in choice.workers], [w.power_limit for w in choice.workers]
    )
    return replace(plan, method=PAPER, solve_time=time.perf_counter() - started)
