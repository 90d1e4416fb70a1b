"""How good are the models: errors of left-out points, and what wrong predictions cost.

    python benchmarks/regret.py FOLDER [--quick] [--out DIR]

FOLDER holds Zeus's public power traces, one CSV file per GPU model
(``summary_power_<gpu>.csv``); a workload is a (dataset, network, optimizer). Three tables:

1. Leave one batch size out: error of time and energy at it, for inner batch sizes and for the
   largest one (which then runs as micro-batches of what is left, as a plan would run it).
2. Leave one power limit out: error at it, of models that answer between the measured limits.
3. Regret: fit on a part of the grid, allocate, judge the allocation by the full measurements:
   cost over the best cost, minus 1. The best is the optimum of the full measurements.

Prints the tables, writes ``errors.csv``, ``regret.csv`` and ``regret.png``.
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from zeus_hetero import TraceWarning, ZeusHeteroError, fit, load_trace
from zeus_hetero.case import Case
from zeus_hetero.solver import solve
from zeus_hetero.trace import Trace
from zeus_hetero.uncertainty import subset

MODELS = ("quadratic", "interpolated", "auto")
# Label of each column of the regret table, in order.
EQUAL = "equal split, max power"
PROPORTIONAL = "proportional, max power"
ORIGINAL = "original algorithm"
METHODS = (EQUAL, PROPORTIONAL, ORIGINAL, "interpolated", "auto")
LARGEST_GLOBAL_BATCH = 4096
TEN = 10

Workload = tuple[str, str, str]


def load_workloads(folder: Path) -> dict[Workload, dict[str, Trace]]:
    """Every workload of a folder: GPU name to trace.

    The traces are relative: neither errors nor regret depend on the unit.
    """
    workloads: dict[Workload, dict[str, Trace]] = {}
    for path in sorted(folder.glob("*.csv")):
        frame = pd.read_csv(path)
        if "time_per_epoch" not in frame.columns:
            continue
        gpu = path.stem.split("_")[-1]
        for key, _ in frame.groupby(["dataset", "network", "optimizer"]):
            dataset, network, optimizer = map(str, key)
            trace = load_trace(path, gpu=gpu, dataset=dataset, network=network, optimizer=optimizer)
            workloads.setdefault((dataset, network, optimizer), {})[gpu] = trace
    if not workloads:
        raise SystemExit(f"{folder}: no Zeus power traces; expected summary_power_<gpu>.csv files.")
    return workloads


def left_out_errors(workloads: Mapping[Workload, Mapping[str, Trace]]) -> pd.DataFrame:
    """Relative errors of time and energy at left-out batch sizes and power limits.

    Returns:
        A row per prediction: what was left out, workload, gpu, model, batch_size, power_limit (W),
        time_error and energy_error (predicted over measured, minus 1), time_inside and
        energy_inside (whether the 90 % interval holds the measurement).
    """
    rows = []
    for workload, traces in workloads.items():
        for gpu, trace in traces.items():
            for what, model, left, fitted in _left_out_fits(trace):
                for i in np.flatnonzero(left):
                    limit, batch = int(trace.power_limit[i]), int(trace.batch_size[i])
                    if limit not in fitted.power_limits:
                        continue
                    p = fitted.predict(batch, limit, 0.9)
                    t, e = trace.time[i], trace.energy[i]
                    rows.append(
                        {
                            "left_out": what,
                            "workload": "/".join(workload),
                            "gpu": gpu,
                            "model": model,
                            "batch_size": batch,
                            "power_limit": limit,
                            "time_error": p.time / t - 1,
                            "energy_error": p.energy / e - 1,
                            "time_inside": p.time_interval[0] <= t <= p.time_interval[1],
                            "energy_inside": p.energy_interval[0] <= e <= p.energy_interval[1],
                        }
                    )
    return pd.DataFrame(rows)


def _left_out_fits(trace: Trace) -> Iterator[tuple[str, str, np.ndarray, object]]:
    sizes, limits = trace.batch_sizes, trace.power_limits
    for size in sizes[1:]:
        left = trace.batch_size == size
        what = "largest batch size" if size == sizes[-1] else "inner batch size"
        for model in MODELS:
            yield what, model, left, fit(subset(trace, ~left), model)
    for limit in limits[1:-1]:
        left = trace.power_limit == limit
        for model in MODELS:
            yield "power limit", model, left, fit(subset(trace, ~left), model, power_limits=[limit])


def sub_grids(trace: Trace, draws: int) -> Iterator[tuple[str, int, Trace]]:
    """Parts of a trace's grid: their name, the number of the draw, and the trace."""
    sizes = trace.batch_sizes
    kept = [*sizes[::2], sizes[-1]]
    yield "every second batch size", 0, subset(trace, np.isin(trace.batch_size, kept))
    for name, count in (("a quarter of the points", round(len(trace) / 4)), ("10 points", TEN)):
        for draw in range(draws):
            drawn = np.random.default_rng(draw).permutation(len(trace))[:count]
            yield name, draw, subset(trace, np.sort(drawn))


def global_batch_sizes(traces: Mapping[str, Trace]) -> tuple[int, ...]:
    """A large global batch that the GPUs can hold at once, and a quarter of it.

    The quarter is at least twice what the smallest measured batches add up to: smaller shares
    were not measured, so nobody can be judged by them.
    """
    held = sum(trace.batch_sizes[-1] for trace in traces.values())
    large = min(LARGEST_GLOBAL_BATCH, 2 ** int(np.log2(held)))
    least = 2 * sum(trace.batch_sizes[0] for trace in traces.values())
    return (large, min(max(large // 4, least), large))


def regrets(
    workloads: Mapping[Workload, Mapping[str, Trace]], most_gpus: int, draws: int
) -> pd.DataFrame:
    """Regret of every method, for every set of GPU models and every part of the grid.

    Returns:
        A row per decision: workload, gpus, global_batch_size, grid, draw, method, regret; nan
        where the method cannot decide (too few points for parabolas). For the best allocation's
        row, method "optimum": saved_time and saved_energy against the equal split.
    """
    rows: list[dict[str, object]] = []
    for workload, traces in workloads.items():
        parts = {gpu: list(sub_grids(trace, draws)) for gpu, trace in traces.items()}
        for count in range(2, most_gpus + 1):
            for gpus in itertools.combinations(traces, count):
                chosen = {gpu: traces[gpu] for gpu in gpus}
                for batch in global_batch_sizes(chosen):
                    where = {"workload": "/".join(workload), "gpus": "+".join(gpus)}
                    where.update(count=count, global_batch_size=batch)
                    found = _regrets_of(chosen, {gpu: parts[gpu] for gpu in gpus}, batch)
                    rows.extend({**where, **row} for row in found)
    return pd.DataFrame(rows)


def _regrets_of(
    traces: Mapping[str, Trace],
    parts: Mapping[str, list[tuple[str, int, Trace]]],
    batch: int,
) -> Iterator[dict[str, object]]:
    judge = Case.of(traces, batch, model="interpolated")
    best = judge.solve(solve)
    highest = [trace.power_limits[0] for trace in traces.values()]
    even = _round_shares(np.ones(len(traces)), batch)
    today = judge.judge(even, highest)
    yield {
        "method": "optimum",
        "regret": 0.0,
        "saved_time": 1 - best.step_time / today.step_time,
        "saved_energy": 1 - best.step_energy / today.step_energy,
    }
    for grids in zip(*parts.values()):
        name, draw, _ = grids[0]
        known = dict(zip(parts, (part for _, _, part in grids)))
        for method in METHODS:
            decision = _decide(method, known, batch, even, highest)
            regret = np.nan
            if decision is not None:
                regret = judge.judge(*decision).cost / best.cost - 1
            yield {"grid": name, "draw": draw, "method": method, "regret": regret}


def _decide(
    method: str, known: Mapping[str, Trace], batch: int, even: list[int], highest: list[int]
) -> tuple[list[int], list[int]] | None:
    """Shares and power limits in W; None if the method cannot decide."""
    if method == EQUAL:
        return even, highest
    if method == PROPORTIONAL:
        # Best samples per second that was measured, at the highest power limit that was.
        speeds = []
        for trace in known.values():
            at = trace.power_limit == trace.power_limits[0]
            speeds.append(float(np.max(trace.batch_size[at] / trace.time[at])))
        return _round_shares(np.array(speeds), batch), highest
    kind = {"objective": "independent", "model": "quadratic"}
    try:
        # The minimum is exact in both cases; the original finds it by enumeration.
        options = kind if method == ORIGINAL else {"model": method}
        plan = _case(known, batch, options).solve(solve)
    except ZeusHeteroError:
        return None
    return [w.batch_size for w in plan.workers], [w.power_limit for w in plan.workers]


_FITTED: dict[tuple[str, int], object] = {}


def _case(known: Mapping[str, Trace], batch: int, options: Mapping[str, str]) -> Case:
    """The case of these traces; a trace is fitted once for all cases it is part of."""
    model = options["model"]
    case = Case.of(known, batch, **{**options, "model": "interpolated"})
    models = {}
    for gpu, trace in known.items():
        key = (model, id(trace))
        if key not in _FITTED:
            _FITTED[key] = (fit(trace, model), trace)  # holding the trace keeps its id its own
        models[gpu] = _FITTED[key][0]
    return Case(**{**vars(case), "models": models, "model_name": model})


def _round_shares(weights: np.ndarray, total: int) -> list[int]:
    """Whole shares in proportion to weights, largest remainders first."""
    exact = total * weights / weights.sum()
    shares = np.floor(exact).astype(int)
    for i in np.argsort(shares - exact, kind="stable")[: total - shares.sum()]:
        shares[i] += 1
    return [int(share) for share in shares]


def error_table(errors: pd.DataFrame) -> pd.DataFrame:
    """Median and 90th percentile of absolute errors, and coverage of 90 % intervals, in %."""
    groups = errors.groupby(["left_out", "model"])
    table = pd.DataFrame(
        {
            f"{figure} {label}": 100
            * groups[f"{figure}_error"].agg(lambda e, q=q: e.abs().quantile(q))
            for figure in ("time", "energy")
            for label, q in (("median", 0.5), ("p90", 0.9))
        }
    )
    for figure in ("time", "energy"):
        table[f"{figure} in 90% interval"] = 100 * groups[f"{figure}_inside"].mean()
    table["points"] = groups.size()
    return table.reindex(
        pd.MultiIndex.from_product(
            [["inner batch size", "largest batch size", "power limit"], MODELS]
        )
    ).dropna()


def regret_table(regret: pd.DataFrame) -> pd.DataFrame:
    """Mean and largest regret in %, and decisions that could not be made, by grid and method."""
    decided = regret[regret["method"] != "optimum"]
    groups = decided.groupby(["grid", "method"], sort=False)["regret"]
    return pd.DataFrame(
        {
            "mean": 100 * groups.mean(),
            "median": 100 * groups.median(),
            "max": 100 * groups.max(),
            "decisions": groups.size(),
            "impossible": groups.agg(lambda r: int(r.isna().sum())),
        }
    )


def draw(errors: pd.DataFrame, regret: pd.DataFrame, path: Path) -> None:
    """The picture: spread of the errors, and regret by method and grid."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colours = ("#999999", "#56B4E9", "#D55E00", "#E69F00", "#0072B2")
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.8), width_ratios=(1, 1.5))
    inner = errors[errors["left_out"] == "inner batch size"]
    for model, colour in zip(MODELS, colours[2:]):
        size = np.sort(100 * inner.loc[inner["model"] == model, "time_error"].abs())
        left.plot(size, np.linspace(0, 100, len(size)), color=colour, label=model)
    left.set(
        xscale="log",
        xlim=(0.1, 100),
        xlabel="absolute error of time at a left-out batch size (%)",
        ylabel="points with at most that error (%)",
    )
    left.legend()
    left.grid(alpha=0.3)
    decided = regret[regret["method"] != "optimum"]
    grids = list(decided["grid"].unique())
    for row, (method, colour) in enumerate(zip(METHODS, colours)):
        for column, grid in enumerate(grids):
            at = (decided["method"] == method) & (decided["grid"] == grid)
            values = 100 * decided.loc[at, "regret"].dropna().to_numpy()
            x = column + (row - 2) / 6.5
            jitter = np.random.default_rng(0).uniform(-0.05, 0.05, len(values))
            right.plot(x + jitter, np.maximum(values, 0.01), ".", color=colour, alpha=0.25, ms=4)
            if len(values):
                label = method if column == 0 else None
                right.plot(
                    x, max(values.mean(), 0.01), "_", color=colour, ms=22, mew=3, label=label
                )
    right.set(yscale="log", ylabel="regret (%); bars: means; 0.01 stands for less")
    right.set_xticks(range(len(grids)), grids)
    right.grid(alpha=0.3, axis="y")
    right.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="folder of Zeus power traces (CSV)")
    parser.add_argument("--quick", action="store_true", help="pairs and one draw per grid only")
    parser.add_argument("--draws", type=int, default=3, help="random draws per grid")
    parser.add_argument("--out", type=Path, default=Path("regret"), help="folder to write to")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TraceWarning)
        workloads = load_workloads(options.path)
        errors = left_out_errors(workloads)
        regret = regrets(
            workloads, 2 if options.quick else 4, 1 if options.quick else options.draws
        )
    errors.to_csv(options.out / "errors.csv", index=False)
    regret.to_csv(options.out / "regret.csv", index=False)
    print("Errors of what was left out (%)\n")
    print(error_table(errors).round(2).to_string(), "\n")
    if not regret.empty:
        draw(errors, regret, options.out / "regret.png")
        print("Regret (%)\n")
        print(regret_table(regret).round(2).to_string(), "\n")
        best = regret[regret["method"] == "optimum"]
        print(
            f"Best allocation against the equal split at maximum power, mean over {len(best)} "
            f"cases: {best['saved_energy'].mean():.1%} less energy, "
            f"{best['saved_time'].mean():.1%} less time."
        )
    print(f"{time.perf_counter() - began:.0f} s; wrote {options.out}/")


if __name__ == "__main__":
    main()
