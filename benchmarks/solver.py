"""Solvers side by side, measured in one run: time, cost and gap; growth; the time goals.

    python benchmarks/solver.py --output results [--quick] [--full]

Instances are made from the bundled A10 and T4 traces: further GPU models are these, slower or
faster and with another appetite. Peers get the same instance and the same time limit:

- the original's brute force, re-implemented as the loop that it is: shares and power limits of two
  GPUs, each prediction a call. It takes about a minute for two GPUs at 4096; without --full it is
  measured on a part of the shares and scaled up, and marked so;
- the original's heuristic: the same loop with the first GPU's lowest limit;
- HiGHS, through scipy.optimize.milp, with a variable per option;
- OR-Tools CP-SAT, if `ortools` is installed, with costs and priced times rounded to integers; its
  choice is judged exactly.

The time limit is for the two libraries; their time leaves out the making of tables, ours holds it.
"""

from __future__ import annotations

import argparse
import resource
import time
import tracemalloc
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import csr_matrix, vstack

import zeus_hetero
from zeus_hetero.bundled import bundled_trace
from zeus_hetero.case import Case
from zeus_hetero.formulation import formulations

TIME_LIMIT = 20.0  # s
VARIANTS = (("A10", 1.0, 1.0), ("T4", 1.0, 1.0), ("A10", 0.6, 0.8), ("T4", 1.6, 0.9),
            ("A10", 1.4, 0.7), ("T4", 0.7, 1.05), ("A10", 0.8, 0.95), ("T4", 2.2, 1.0))  # fmt: skip


def gpu_models(count):
    """So many GPU models, derived from the bundled traces."""
    traces = {}
    for number, (source, slower, appetite) in enumerate(VARIANTS[:count]):
        frame = bundled_trace(source).to_frame()
        frame = frame.assign(
            time=frame["time"] * slower,
            energy=frame["energy"] * slower * appetite,
            gpu=f"G{number}",
        )
        traces[f"G{number}"] = zeus_hetero.load_trace(frame)
    return traces


def original_loop(traces, batch, first_limits=None, part=1.0):
    """The original brute force: every share and power limit of two GPUs, one call a prediction.

    With the original's parabolas, and judged by the same objective as everything else here. The
    original program itself took 57 s for 4096 on such a machine: it also builds every prediction
    anew from a fit.
    """
    (first, second) = [zeus_hetero.fit(trace, "quadratic") for trace in traces.values()]
    case = Case.of(traces, batch)
    shares = range(1, batch, round(1 / part))
    best = (np.inf, None)
    for share in shares:
        for p in first_limits or first.power_limits:
            for q in second.power_limits:
                t = (float(first.time(share, p)), float(second.time(batch - share, q)))
                e = (float(first.energy(share, p)), float(second.energy(batch - share, q)))
                cost = case.objective.step(t, e, (p, q)).cost
                if cost < best[0]:
                    best = (cost, (share, p, q))
    share, p, q = best[1]
    return case.judge([share, batch - share], [p, q]).cost, (batch - 1) / len(shares)


def problem_of(traces, batch, gpus):
    (formulation,) = formulations(Case.of(traces, batch, gpus=gpus), np.inf)
    return formulation.problem


def highs(problem):
    """A binary variable per GPU and option, and one for the slowest time."""
    costs, shares, times, gpu = [], [], [], []
    for g, k in enumerate(problem.gpus):
        kind = problem.kinds[k]
        limit, share = np.nonzero(np.isfinite(kind.cost))
        costs.append(kind.cost[limit, share])
        shares.append(share)
        times.append(kind.time[limit, share])
        gpu.append(np.full(len(share), g))
    costs, shares, times, gpu = map(np.concatenate, (costs, shares, times, gpu))
    size, gpus = len(costs), len(problem.gpus)
    each = csr_matrix((np.ones(size), (gpu, np.arange(size))), shape=(gpus, size + 1))
    total = csr_matrix(np.append(shares, 0.0)[None])
    # The slowest time is at least that of every GPU's option.
    slowest = csr_matrix(
        (
            np.concatenate([times, -np.ones(gpus)]),
            (
                np.concatenate([gpu, np.arange(gpus)]),
                np.concatenate([np.arange(size), np.full(gpus, size)]),
            ),
        ),
        shape=(gpus, size + 1),
    )
    equal = np.append(np.ones(gpus), problem.total)
    low = np.concatenate([equal, np.full(gpus, -np.inf)])
    high = np.concatenate([equal, np.zeros(gpus)])
    result = milp(
        np.append(costs, problem.makespan_price),
        integrality=np.append(np.ones(size), 0),
        bounds=(0, np.append(np.ones(size), np.inf)),
        constraints=LinearConstraint(vstack([each, total, slowest]), low, high),
        options={"time_limit": TIME_LIMIT},
    )
    if result.x is None:
        return np.nan, np.nan
    return result.fun, result.mip_gap if result.mip_gap is not None else np.nan


def cp_sat(problem, scale=1e7):
    """Options as Booleans per GPU; costs, and times priced, in integers of 1e-7.

    The choice is judged exactly; the bound is good to the rounding of as many figures as GPUs.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    price = scale * problem.makespan_price
    horizon = int(price * max(kind.time.max() for kind in problem.kinds)) + 1
    slowest = model.NewIntVar(0, horizon, "priced T")
    shares, costs, choices = [], [], []
    for g, k in enumerate(problem.gpus):
        kind = problem.kinds[k]
        limit, share = np.nonzero(np.isfinite(kind.cost))
        picks = [model.NewBoolVar(f"{g}-{i}") for i in range(len(share))]
        model.AddExactlyOne(picks)
        shares.append(sum(int(s) * x for s, x in zip(share, picks)))
        costs.append(sum(round(scale * c) * x for c, x in zip(kind.cost[limit, share], picks)))
        busy = sum(round(price * t) * x for t, x in zip(kind.time[limit, share], picks))
        model.Add(slowest >= busy)
        choices.append((share, limit, picks))
    model.Add(sum(shares) == problem.total)
    model.Minimize(sum(costs) + slowest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = TIME_LIMIT
    solver.parameters.num_workers = 2
    if solver.Solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return np.nan, np.nan
    chosen = [next(i for i, x in enumerate(picks) if solver.Value(x)) for *_, picks in choices]
    cost = problem.cost(
        [int(share[i]) for (share, _, _), i in zip(choices, chosen)],
        [int(limit[i]) for (_, limit, _), i in zip(choices, chosen)],
    )
    return cost, max(0.0, (cost - solver.BestObjectiveBound() / scale) / abs(cost))


def timed(function, *args, **kwargs):
    start = time.perf_counter()
    result = function(*args, **kwargs)
    return time.perf_counter() - start, result


def ours(traces, batch, gpus, repeats=3, **options):
    times, plan = [], None
    for _ in range(repeats):
        seconds, plan = timed(zeus_hetero.allocate, traces, batch, gpus=gpus, **options)
        times.append(seconds)
    return float(np.median(times)), plan


def peers(quick, full):
    """The table of solvers on the same instances."""
    rows = []
    pair = gpu_models(2)
    both = dict.fromkeys(pair, 1)
    batch = 512 if quick else 4096
    seconds, plan = ours(pair, batch, both)
    rows.append((f"2 GPUs, {batch}", "zeus-hetero", seconds, plan.cost, plan.gap, ""))
    part = 1.0 if full else 1 / 16
    loop_seconds, (cost, scale) = timed(original_loop, pair, batch, part=part)
    note = "" if full else f"1 in {round(1 / part)} shares, time scaled up"
    rows.append((f"2 GPUs, {batch}", "original loop", loop_seconds * scale, cost, np.nan, note))
    lowest = [min(next(iter(pair.values())).power_limits)]
    fewer, (cost, scale) = timed(original_loop, pair, batch, lowest, part)
    rows.append((f"2 GPUs, {batch}", "original heuristic", fewer * scale, cost, np.nan, note))
    cases = (
        [(2, 1, 256), (4, 1, 256), (4, 2, 512)]
        if quick
        else [(2, 1, 512), (4, 1, 512), (4, 2, 1024)]
    )
    for kinds, count, size in cases:
        traces = gpu_models(kinds)
        gpus = dict.fromkeys(traces, count)
        name = f"{kinds * count} GPUs of {kinds} models, {size}"
        seconds, plan = ours(traces, size, gpus)
        rows.append((name, "zeus-hetero", seconds, plan.cost, plan.gap, ""))
        problem = problem_of(traces, size, gpus)
        seconds, (cost, gap) = timed(highs, problem)
        rows.append((name, "HiGHS", seconds, cost, gap, f"limit {TIME_LIMIT:g} s"))
        try:
            seconds, (cost, gap) = timed(cp_sat, problem)
            rows.append((name, "CP-SAT", seconds, cost, gap, f"limit {TIME_LIMIT:g} s"))
        except ImportError:
            print("CP-SAT is left out: pip install ortools to include it")
    columns = ["instance", "solver", "time (s)", "cost", "gap", "note"]
    table = pd.DataFrame(rows, columns=columns)
    first = table["instance"].map(lambda n: table[table["instance"] == n]["time (s)"].iloc[0])
    table["times ours"] = table["time (s)"] / first
    return table


def goals(quick):
    """The sizes that users and the issues name."""
    rows = []
    sizes = [
        (2, 1, 4096, 5),
        (4, 2, 4096, 300),
        (4, 16, 32_768, 500),
        (4, 256, 1_048_576, 2000),
    ]
    for kinds, count, batch, wanted in sizes[:2] if quick else sizes:
        traces = gpu_models(kinds)
        for eta in (0.0, 0.5, 1.0):
            seconds, plan = ours(traces, batch, dict.fromkeys(traces, count), eta=eta)
            rows.append(
                (kinds * count, kinds, batch, eta, 1000 * seconds, wanted, plan.gap, peak_memory())
            )
    columns = ["GPUs", "models", "batch", "eta", "time (ms)", "goal (ms)", "gap", "peak (MiB)"]
    return pd.DataFrame(rows, columns=columns)


def peak_memory():
    """Peak resident memory of this process so far, MiB; native memory included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def growth(quick):
    """Time and memory against one size at a time."""
    rows = []

    def measure(what, value, traces, batch, count, **options):
        gpus = dict.fromkeys(traces, count)
        seconds, plan = ours(traces, batch, gpus, **options)
        tracemalloc.start()
        zeus_hetero.allocate(traces, batch, gpus=gpus, **options)
        memory = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        rows.append((what, value, 1000 * seconds, memory, plan.gap))

    most = 16 if quick else 256
    for count in (c for c in (1, 2, 4, 16, 64, 256) if c <= most):
        measure("GPUs", 4 * count, gpu_models(4), 1024 * count, count)
    for kinds in (1, 2, 4, 8):
        measure("models", kinds, gpu_models(kinds), 4096, 1)
    for batch in (256, 1024, 4096) if quick else (256, 1024, 4096, 16_384, 65_536):
        measure("global batch", batch, gpu_models(4), batch, 2)
    for step in (None, 25, 10, 5):
        traces = gpu_models(2)
        limits = 0
        for trace in traces.values():
            limits += len(zeus_hetero.fit(trace, power_limits=step).power_limits)
        measure("power limits", limits, traces, 2048, 2, power_limits=step)
    return pd.DataFrame(rows, columns=["what", "value", "time (ms)", "Python memory (MiB)", "gap"])


def front(quick):
    """One call of pareto_front against an allocation for each of as many deadlines."""
    traces = gpu_models(2)
    gpus = dict.fromkeys(traces, 1 if quick else 4)
    seconds, found = timed(zeus_hetero.pareto_front, traces, 4096, gpus=gpus, error=1e-3)
    start = time.perf_counter()
    many = 4 * len(found)
    for deadline in np.linspace(found["step_time"].iloc[0], found["step_time"].iloc[-1], many):
        zeus_hetero.allocate(traces, 4096, gpus=gpus, eta=1, deadline=float(deadline) * (1 + 1e-9))
    return len(found), seconds, many, time.perf_counter() - start


def draw(table, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(2, 4)
    for column, (what, rows) in enumerate(table.groupby("what", sort=False)):
        for row, figure_name in enumerate(("time (ms)", "Python memory (MiB)")):
            axes[row, column].loglog(rows["value"], rows[figure_name], "o-", color="#0072B2")
            # Every second value where there are many, and no labels between them.
            ticks = rows["value"].tolist()[:: 2 if len(rows) > 5 else 1]
            axes[row, column].set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=7)
            axes[row, column].tick_params("x", which="minor", bottom=False, labelbottom=False)
            axes[row, column].set_ylabel(figure_name)
            axes[row, column].set_xlabel(what)
            axes[row, column].grid(alpha=0.3)
    figure.suptitle("zeus_hetero.allocate: growth")
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("benchmark_results"))
    parser.add_argument("--quick", action="store_true", help="small instances, under a minute")
    parser.add_argument("--full", action="store_true", help="run the original's loop to the end")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    args.output.mkdir(parents=True, exist_ok=True)
    zeus_hetero.allocate(gpu_models(4), 64)  # imports are not what is measured
    pd.set_option("display.width", 160)
    for name, measure in (
        ("goals", partial(goals, args.quick)),
        ("peers", partial(peers, args.quick, args.full)),
        ("growth", partial(growth, args.quick)),
    ):
        table = measure()
        print(f"\n{name}\n{table.to_string(index=False, float_format=lambda x: f'{x:.4g}')}")
        table.to_csv(args.output / f"{name}.csv", index=False)
    points, one, deadlines, many = front(args.quick)
    print(
        f"\npareto_front: {points} points in {one:.2f} s; {deadlines} deadlines one by one, which "
        f"may miss points, {many:.2f} s"
    )
    draw(pd.read_csv(args.output / "growth.csv"), args.output / "growth.png")
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
