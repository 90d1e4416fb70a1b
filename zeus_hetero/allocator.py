"""The whole decision: traces in, the best shares and power limits out.

The file is not called ``allocate.py``: a submodule of that name would take the place of the
function ``zeus_hetero.allocate`` as soon as anything imported it.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from zeus_hetero.allocation import Allocation
from zeus_hetero.arguments import between
from zeus_hetero.case import ROUNDING, Case, Method
from zeus_hetero.constraints import Groups
from zeus_hetero.errors import AllocationError, TraceError, TraceWarning
from zeus_hetero.inputs import GPUs, PerGPU
from zeus_hetero.power_limits import PowerLimits
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
_SMALL_TABLE = 1_000_000  # options
_PROVEN_GPUS = 64
_FLEET_GAP = 1e-4


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
    min_share: int | Mapping[str, int] | None = None,
    must_use: bool | str | Sequence[str] = (),
    deadline: float | None = None,
    power_budget: float | Mapping[str, float] | None = None,
    groups: Groups | None = None,
    max_gpus: int | None = None,
    electricity_price: float | None = None,
    gpu_hour_price: PerGPU = None,
    carbon_intensity: float | None = None,
    power_limits: PowerLimits = None,
    risk: float | None = None,
    confidence: float | None = None,
    gap: float | None = None,
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
        model: "interpolated"; "auto", which smooths noise and predicts better from few points but
            takes a tenth of a second per trace to fit; or "quadratic" (the original system's).
        eta: weight of energy against time: 1 minimises energy, 0 time (and among equally fast
            allocations energy).
        wait_power: W that a GPU draws while it waits for the slowest, one figure or one per GPU
            name; by default what its profile measured, or the lowest average power in its trace.
        sync_time: s per step in which gradients are exchanged.
        granularity: shares are multiples of this; where the global batch is none, one GPU takes
            the remainder on top.
        max_slowdown: minimise energy among allocations at most this many times slower than the
            fastest; `eta` and prices then do not matter.
        max_batch_size: largest share of a GPU, one figure or one per GPU name.
        min_share: smallest share of a GPU that gets work, likewise.
        must_use: names of GPUs that must get work, or True for all.
        deadline: s that a step may take.
        power_budget: W that the power limits may add up to, GPUs without work included: one
            figure for the whole fleet, or one per group; the group "all" is the whole fleet.
        groups: for each named group its workers, as GPU names or positions in `gpus`.
        max_gpus: use at most so many GPUs, the best ones; the others are not in the job and draw
            nothing.
        electricity_price: money per kWh. With this or `gpu_hour_price` the cost is money.
        gpu_hour_price: money per hour of a GPU, one figure or one per GPU name.
        carbon_intensity: g of CO2 per kWh. With it the cost is carbon.
        power_limits: W to choose from: the measured ones by default, "continuous" for every watt
            between them, a whole number for steps of so many W, or a list.
        risk: probability that a measured step exceeds what the decision counts with, such as 0.1:
            prefers allocations that are good even if the models are somewhat wrong. By default
            the decision is by the predictions themselves.
        confidence: probability with which the intervals of time and energy in the result shall
            hold; without it (and without `risk`) there are none.
        gap: relative distance from the optimum at which "optimal" may stop. By default 0, a full
            proof, for up to 64 GPUs and 1e-4 beyond.

    Returns:
        The allocation, one worker per GPU in the order of `gpus`.

    Raises:
        TraceError: a trace cannot be used.
        AllocationError: an argument makes no sense.
        InfeasibleError: no allocation satisfies the constraints; it says which one cannot hold
            and the nearest value that can.

    Example:
        >>> import zeus_hetero
        >>> plan = zeus_hetero.allocate(
        ...     {"A10": "trace_aws/cifar_a10.json", "T4": "trace_aws/cifar_t4.json"}, 4096
        ... )
        >>> sum(worker.batch_size for worker in plan.workers)
        4096
    """
    solver = _method(method)
    options: dict[str, Any] = {
        "gpus": gpus,
        "objective": objective,
        "model": model,
        "eta": eta,
        "wait_power": wait_power,
        "sync_time": sync_time,
        "granularity": granularity,
        "max_batch_size": max_batch_size,
        "min_share": min_share,
        "must_use": must_use,
        "deadline": deadline,
        "power_budget": power_budget,
        "groups": groups,
        "max_gpus": max_gpus,
        "electricity_price": electricity_price,
        "gpu_hour_price": gpu_hour_price,
        "carbon_intensity": carbon_intensity,
        "power_limits": power_limits,
        "risk": risk,
    }
    case = Case.of(traces, global_batch_size, **options)
    if gap is not None and method == "optimal":
        solver = functools.partial(_optimal, gap=between("gap", gap, 0, 1))
    started = time.perf_counter()
    plan = slowed(case, max_slowdown).solve(solver)
    plan = replace(plan, method=method, solve_time=time.perf_counter() - started)
    if confidence is not None or risk is not None:
        plan = case.predicted(plan, 0.9 if confidence is None else confidence)
    return plan.made_from(traces, {**options, "max_slowdown": max_slowdown})


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
    limited = slowed(case, max_slowdown)
    plans: dict[str, Allocation] = {}
    skipped: dict[str, str] = {}
    for method, solver in METHODS.items():
        started = time.perf_counter()
        try:
            plan = limited.solve(solver)
        except AllocationError as error:
            if method == "optimal":
                raise
            skipped[method] = str(error)
            continue
        plans[method] = replace(plan, method=method, solve_time=time.perf_counter() - started)
    today = _equal_at_max_power(limited)
    if today is None:
        skipped[EQUAL_MAX_POWER] = "an even split is not allowed by max_batch_size."
    else:
        plans[EQUAL_MAX_POWER] = today
    try:
        plans[PAPER] = _as_in_the_paper(traces, global_batch_size, limited, options)
    except (TraceError, AllocationError) as error:
        skipped[PAPER] = str(error)
    return plans, skipped


def _baseline(problem: Problem) -> Solution | None:
    even = with_shares(problem, equal_shares(problem.total, len(problem.gpus)))
    return None if even is None else _unproven(solve(even))


def _heuristic(problem: Problem) -> Solution | None:
    return _unproven(solve(with_strongest_at_lowest_limit(problem)))


def _unproven(solution: Solution | None) -> Solution | None:
    """The optimum of a restricted problem, which proves nothing about the whole one."""
    return solution and replace(solution, lower_bound=-math.inf)


def _optimal(problem: Problem, gap: float | None = None) -> Solution | None:
    # For two GPUs all allocations fit in one small array, which is quicker than any search.
    if len(problem.gpus) == 2 and sum(k.cost.size for k in problem.kinds) <= _SMALL_TABLE:
        return enumerate_all(problem)
    if gap is None:
        gap = 0.0 if len(problem.gpus) <= _PROVEN_GPUS else _FLEET_GAP
    return solve(problem, gap)


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


def slowed(case: Case, max_slowdown: float | None) -> Case:
    """The case of least energy within so many times the fastest step's time.

    Args:
        case: any case under the synchronous objective.
        max_slowdown: at least 1; None for the case itself.
    """
    if max_slowdown is None:
        return case
    slowdown = between("max_slowdown", max_slowdown, 1, math.inf)
    fastest = case.minimising_time().solve(_optimal)
    frugal = replace(case.minimising_energy(), eta=1.0)
    return frugal.within(fastest.step_time * slowdown * ROUNDING)


def _equal_at_max_power(case: Case) -> Allocation | None:
    shares = equal_shares(case.global_batch_size, len(case.gpus))
    if any(share > case.constraints.max_share[name] for share, name in zip(shares, case.gpus)):
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
            gpus=case.gpus,
            objective="independent",
            model="quadratic",
            eta=options.get("eta", 0.5),
        )
    choice = paper.solve(METHODS["optimal"])
    plan = case.judge(
        [w.batch_size for w in choice.workers], [w.power_limit for w in choice.workers]
    )
    return replace(plan, method=PAPER, solve_time=time.perf_counter() - started)
