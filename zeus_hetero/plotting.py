"""Every picture: traces with their fits, methods side by side, the Pareto front.

Needs matplotlib, which the extra ``plot`` installs. Colours are safe for colour-blind readers:
one per power limit, ordered by watts, and one per GPU, the same in every picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from zeus_hetero.allocation import Allocation
from zeus_hetero.errors import ZeusHeteroError
from zeus_hetero.gpu_model import GPUModel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette.
_GPU_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")


def plot_model(model: GPUModel, name: str) -> Figure:
    """Draw what was measured on one GPU, and the curves fitted to it.

    Args:
        model: the fitted model with its trace.
        name: GPU name for the title.

    Returns:
        A figure: time per step and average power against batch size, a colour per power limit.
    """
    figure, (time, power) = _subplots(1, 2, (10, 4.2))
    trace = model.trace
    grid = np.unique(np.geomspace(trace.batch_sizes[0], trace.batch_sizes[-1], 200).astype(int))
    limits = trace.power_limits
    for limit, colour in zip(limits, _by_watts(len(limits))):
        at = trace.power_limit == limit
        label = f"{limit} W"
        time.plot(trace.batch_size[at], trace.time[at], "o", color=colour, label=label)
        power.plot(trace.batch_size[at], trace.average_power[at], "o", color=colour, label=label)
        if limit in model.power_limits:
            seconds = model.time(grid, limit)
            time.plot(grid, seconds, color=colour)
            power.plot(grid, model.energy(grid, limit) / np.maximum(seconds, 1e-30), color=colour)
    units = " (relative)" if trace.relative else " (s)"
    time.set_ylabel("time per training step" + units)
    power.set_ylabel("average power (W)")
    for axes in (time, power):
        axes.set_xlabel("batch size (samples)")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    time.set_yscale("log")
    power.set_ylim(bottom=0)
    power.legend(title="power limit", loc="center left", bbox_to_anchor=(1.01, 0.5))
    simulated = ", simulated" if trace.simulated else ""
    figure.suptitle(f"{name}: measured points and {model.name} model{simulated}")
    return figure


def plot_methods(plans: Mapping[str, Allocation]) -> Figure:
    """Draw how the methods compare: each GPU's busy and waiting time, and the energy of a step.

    Args:
        plans: allocation per method, all for the same GPUs.

    Returns:
        A figure with a bar per method and GPU.
    """
    figure, (time, energy) = _subplots(1, 2, (11, 1.2 + 0.75 * len(plans)))
    methods = list(plans)
    gpus = [worker.gpu for worker in next(iter(plans.values())).workers]
    colours = gpu_colours(gpus)
    height = 0.8 / len(gpus)
    for row, plan in enumerate(plans.values()):
        for rank, worker in enumerate(plan.workers):
            y = row - 0.4 + (rank + 0.5) * height
            time.barh(y, worker.time, height, color=colours[worker.gpu])
            wait = plan.step_time - worker.time
            if plan.objective == "synchronous":
                time.barh(
                    y, wait, height, left=worker.time, color="none",
                    edgecolor=colours[worker.gpu], hatch="////", linewidth=0,
                )  # fmt: skip
            if len(gpus) <= 8:
                text = f" {worker.batch_size} at {worker.power_limit} W"
                end = plan.step_time if plan.objective == "synchronous" else worker.time
                time.text(end, y, text, va="center", fontsize=7)
        left = 0.0
        for rank, worker in enumerate(plan.workers):
            joules = worker.energy
            if plan.objective == "synchronous":
                joules += worker.wait_power * (plan.step_time - plan.workers[rank].time)
            energy.barh(row, joules, 0.7, left=left, color=colours[worker.gpu])
            left += joules
        energy.text(left, row, f" {left:.4g}", va="center", fontsize=8)
    relative = next(iter(plans.values())).relative
    time.set_xlabel(f"time of a step ({'relative' if relative else 's'}); hatched: waiting")
    energy.set_xlabel(f"energy of a step ({'relative' if relative else 'J'}), waiting included")
    for axes in (time, energy):
        axes.set_yticks(range(len(methods)), [method.replace("_", " ") for method in methods])
        axes.invert_yaxis()
    # Room for the figures behind the bars.
    time.set_xlim(0, 1.3 * max(plan.step_time for plan in plans.values()))
    energy.set_xlim(0, 1.2 * max(plan.step_energy for plan in plans.values()))
    _legend_of_gpus(energy, colours)
    figure.suptitle(_batch_title(next(iter(plans.values()))))
    return figure


def plot_pareto(front: pd.DataFrame, plans: Mapping[str, Allocation]) -> Figure:
    """Draw the trade-off between time and energy, with the methods' allocations beside it.

    Args:
        front: what `pareto_front` returns.
        plans: allocation per method.

    Returns:
        A figure.
    """
    figure, (axes,) = _subplots(1, 1, (7.5, 4.8))
    axes.step(
        front["step_time"], front["step_energy"], where="post", color="0.4", label="Pareto front"
    )
    axes.plot(front["step_time"], front["step_energy"], ".", color="0.4")
    knee = front[front["knee"]]
    axes.plot(
        knee["step_time"], knee["step_energy"], "o", color="0.2", fillstyle="none", markersize=13,
        label="knee",
    )  # fmt: skip
    markers = ("*", "s", "^", "D", "v", "P", "X")
    for (method, plan), marker, colour in zip(plans.items(), markers, _GPU_COLOURS):
        axes.plot(
            plan.step_time, plan.step_energy, marker, color=colour, markersize=9, alpha=0.8,
            label=method.replace("_", " "),
        )  # fmt: skip
    relative = next(iter(plans.values())).relative
    axes.set_xlabel(f"time of a step ({'relative' if relative else 's'})")
    axes.set_ylabel(f"energy of a step ({'relative' if relative else 'J'})")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.suptitle(_batch_title(next(iter(plans.values()))))
    return figure


def _subplots(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ZeusHeteroError(
            "pictures need matplotlib, which is not installed. "
            "Install it with: pip install 'zeus-hetero[plot]'"
        ) from None
    # Without pyplot there is no global state, no window and nothing to close.
    figure = Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _by_watts(count: int) -> Sequence[tuple[float, ...]]:
    import matplotlib

    # The last tenth of viridis is too light on white.
    return [matplotlib.colormaps["viridis"](x) for x in np.linspace(0, 0.9, count)]


def gpu_colours(gpus: Sequence[str]) -> dict[str, str]:
    """A colour for each GPU name, the same in every picture."""
    names = list(dict.fromkeys(gpus))
    return {name: _GPU_COLOURS[i % len(_GPU_COLOURS)] for i, name in enumerate(names)}


def _legend_of_gpus(axes: Axes, colours: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5))


def _batch_title(plan: Allocation) -> str:
    simulated = " (simulated)" if plan.simulated else ""
    return f"global batch {plan.global_batch_size}, {plan.objective} objective{simulated}"
