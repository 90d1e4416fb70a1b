"""Draw the pictures of docs/concepts.md from the bundled measurements.

python docs/images/draw.py [FOLDER]
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import zeus_hetero
from zeus_hetero.bundled import bundled_trace

A10, T4, GRAY = "#0072B2", "#E69F00", "0.4"  # as in zeus_hetero.plotting
BATCH = 4096
TRACES = {gpu: bundled_trace(gpu) for gpu in ("A10", "T4")}
MODELS = {gpu: zeus_hetero.fit(trace) for gpu, trace in TRACES.items()}


def picture(width: float = 6.4, height: float = 3.2, columns: int = 1):
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(1, columns, squeeze=False).flat)
    for ax in axes:
        ax.grid(alpha=0.3)
    return figure, *axes


def step():
    plans, _ = zeus_hetero.plans_by_method(TRACES, BATCH)
    figure, ax = picture(height=2.6)
    ticks = []
    for row, (method, label) in enumerate(
        (("equal_max_power", "even shares,\nmaximum power"), ("optimal", "best plan"))
    ):
        plan = plans[method]
        for rank, (worker, colour) in enumerate(zip(plan.workers, (A10, T4))):
            y = 3 * row + rank
            ax.barh(y, worker.time, color=colour)
            ax.barh(y, plan.step_time - worker.time, left=worker.time, color="none",
                    edgecolor=colour, hatch="///", linewidth=0)  # fmt: skip
            ax.text(plan.step_time + 0.01, y, f"{worker.batch_size} at {worker.power_limit} W",
                    va="center", fontsize=8)  # fmt: skip
            ticks.append((y, f"{label}: {worker.gpu}".replace("\n", " ")))
    ax.set_yticks(*zip(*ticks))
    ax.invert_yaxis()
    ax.set_xlim(0, 1.0)
    ax.set_xlabel("time of a step (s); hatched: waiting")
    return figure


def share():
    shares = np.arange(64, BATCH - 63, 8)
    figure, ax = picture()
    a10 = MODELS["A10"].time(shares, 150)
    t4 = MODELS["T4"].time(BATCH - shares, 70)
    ax.plot(shares, a10, color=A10, label="A10 at 150 W")
    ax.plot(shares, t4, color=T4, label="T4 at 70 W")
    slowest = np.maximum(a10, t4)
    ax.plot(shares, slowest, color="0.2", linestyle=":", linewidth=3, label="step")
    best = slowest.argmin()
    ax.plot(shares[best], slowest[best], "o", color="0.2")
    ax.set(xlabel="samples for the A10 (the T4 gets the rest of 4096)", ylabel="time (s)")
    ax.set_ylim(bottom=0)
    ax.legend()
    return figure


def micro_batches():
    trace = TRACES["A10"]
    limit = 100
    grid = np.arange(32, BATCH + 1, 8)
    figure, ax = picture()
    at = trace.power_limit == limit
    parabola = zeus_hetero.fit(trace, "quadratic")
    ax.plot(grid, MODELS["A10"].energy(grid, limit), color=A10, label="interpolated, micro-batches")
    ax.plot(grid, parabola.energy(grid, limit), color="#D55E00", linestyle="--", label="parabola")
    ax.plot(trace.batch_size[at], trace.energy[at], "o", color="0.1", label="measured")
    ax.axvline(trace.batch_sizes[-1], color=GRAY, linestyle=":")
    ax.axhline(0, color=GRAY, linewidth=0.8)
    ax.set(xlabel="batch size (samples)", ylabel="energy of a step (J)")
    ax.set_title(f"A10 at {limit} W", fontsize=10)
    ax.legend()
    return figure


def power_limit():
    figure, time, energy = picture(7.2, 3.0, 2)
    for name, colour in (("A10", A10), ("T4", T4)):
        limits = MODELS[name].power_limits
        time.plot(limits, [1000 * MODELS[name].time(1024, p) / 1024 for p in limits], "o-",
                  color=colour, label=name)  # fmt: skip
        energy.plot(limits, [1000 * MODELS[name].energy(1024, p) / 1024 for p in limits], "o-",
                    color=colour, label=name)  # fmt: skip
    time.set_ylabel("time per sample (ms)")
    energy.set_ylabel("energy per sample (mJ)")
    for ax in (time, energy):
        ax.set_xlabel("power limit (W)")
        ax.set_ylim(bottom=0)
    energy.legend()
    return figure


def wait_power():
    plans, _ = zeus_hetero.plans_by_method(TRACES, BATCH)
    figure, ax = picture(height=2.4)
    names = {"equal_max_power": "even shares", "paper": "the original's plan",
             "optimal": "best plan"}  # fmt: skip
    for row, method in enumerate(names):
        left = 0.0
        for worker, colour in zip(plans[method].workers, (A10, T4)):
            wait = worker.wait_power * (plans[method].step_time - worker.time)
            for joules, hatched in ((worker.energy, False), (wait, True)):
                style = (
                    {"color": "none", "edgecolor": colour, "hatch": "////", "linewidth": 0}
                    if hatched
                    else {"color": colour}
                )
                label = f"{worker.gpu} {'waits' if hatched else 'works'}" if row == 0 else None
                ax.barh(row, joules, 0.7, left=left, label=label, **style)
                left += joules
    ax.set_yticks(range(len(names)), list(names.values()))
    ax.invert_yaxis()
    ax.set_xlabel("energy of a step (J)")
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def eta():
    etas = np.linspace(0, 1, 41)
    plans = [zeus_hetero.allocate(TRACES, BATCH, eta=float(x)) for x in etas]
    figure, time, energy = picture(7.2, 3.0, 2)
    time.step(etas, [plan.step_time for plan in plans], where="mid", color="0.2")
    energy.step(etas, [plan.step_energy for plan in plans], where="mid", color="0.2")
    time.set_ylabel("time of a step (s)")
    energy.set_ylabel("energy of a step (J)")
    for ax in (time, energy):
        ax.set_xlabel("eta")
    return figure


def best_cost(shares: np.ndarray) -> np.ndarray:
    """Least synchronous cost over the power limits, per share of the A10."""
    plan = zeus_hetero.allocate(TRACES, BATCH)
    wait_a10, wait_t4 = (worker.wait_power for worker in plan.workers)
    costs = []
    for a10 in MODELS["A10"].power_limits:
        for t4 in MODELS["T4"].power_limits:
            times = MODELS["A10"].time(shares, a10), MODELS["T4"].time(BATCH - shares, t4)
            slowest = np.maximum(*times)
            energy = (
                MODELS["A10"].energy(shares, a10)
                + MODELS["T4"].energy(BATCH - shares, t4)
                + wait_a10 * (slowest - times[0])
                + wait_t4 * (slowest - times[1])
            )
            costs.append(0.5 * energy + 0.5 * plan.max_power * slowest)
    return np.min(costs, axis=0)


def gap():
    shares = np.arange(1, BATCH)
    costs = best_cost(shares)
    plans, _ = zeus_hetero.plans_by_method(TRACES, BATCH)
    assert abs(costs.min() - plans["optimal"].cost) < 1e-6 * costs.min()
    figure, ax = picture()
    ax.plot(shares, costs, color=GRAY, label="best power limits at this share")
    bound = plans["optimal"].lower_bound
    ax.axhline(bound, color="#009E73", linestyle="--", label="lower bound")
    drawn = (
        ("optimal", "*", "#009E73"),
        ("heuristic", "^", "#CC79A7"),
        ("baseline", "s", "#56B4E9"),
        ("paper", "X", "#D55E00"),
    )
    for method, marker, colour in drawn:
        plan = plans[method]
        ax.plot(plan.workers[0].batch_size, plan.cost, marker, color=colour, markersize=9,
                label=f"{method}: gap {(plan.cost - bound) / plan.cost:.0%}")  # fmt: skip
    ax.set(xlabel="samples for the A10", ylabel="cost of a step (J)", ylim=(0, 400))
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    return figure


def regret():
    figure, ax = picture(height=2.6)
    best = zeus_hetero.allocate(TRACES, BATCH).cost
    some = {gpu: every_second(trace) for gpu, trace in TRACES.items()}
    choices = {
        "parabola, the original's objective": (TRACES, {"model": "quadratic",
                                                       "objective": "independent"}),
        "parabola": (TRACES, {"model": "quadratic"}),
        "interpolated, every 2nd batch size": (some, {}),
        "auto, every 2nd batch size": (some, {"model": "auto"}),
        "interpolated, all points": (TRACES, {}),
    }  # fmt: skip
    for row, (traces, options) in enumerate(choices.values()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = zeus_hetero.allocate(traces, BATCH, **options)
        value = 100 * (judged(plan) / best - 1)
        ax.barh(row, value, color=A10)
        ax.text(value, row, f" {value:.1f} %", va="center", fontsize=8)
    ax.set_yticks(range(len(choices)), list(choices))
    ax.invert_yaxis()
    ax.margins(x=0.15)
    ax.set_xlabel("regret (%)")
    return figure


def every_second(trace):
    frame = trace.to_frame()
    keep = trace.batch_sizes[1::2]
    return zeus_hetero.load_trace(frame[frame["batch_size"].isin(keep)], gpu=trace.gpu)


def judged(plan) -> float:
    """Cost of a plan by the interpolated model of all points."""
    from zeus_hetero.case import Case

    case = Case.of(TRACES, BATCH)
    return case.judge(
        [worker.batch_size for worker in plan.workers],
        [worker.power_limit for worker in plan.workers],
    ).cost


DRAWN = (step, share, micro_batches, power_limit, wait_power, eta, gap, regret)


def main(folder: Path) -> None:
    for draw in DRAWN:
        draw().savefig(folder / f"{draw.__name__}.png", dpi=85, metadata={"Software": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
