"""The interactive pictures of a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zeus_hetero.errors import ZeusHeteroError
from zeus_hetero.html_report.content import ETAS, Subject, grid
from zeus_hetero.plotting import gpu_colours

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from zeus_hetero.allocation import Allocation
    from zeus_hetero.gpu_model import GPUModel

_WAITING = "rgba(120, 120, 120, 0.25)"
_EXCHANGE = "#555555"
MAX_LANES = 24


def need_plotly() -> None:
    """Say what to install where plotly is missing."""
    try:
        import plotly  # noqa: F401
    except ImportError:
        raise ZeusHeteroError(
            "a report needs plotly, which is not installed. Install it with: "
            "pip install 'zeus-hetero[report]'"
        ) from None


def trace_figure(name: str, model: GPUModel) -> Figure:
    """Measured points and the model's curves: time and average power against batch size."""
    from plotly.colors import sample_colorscale
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=1, cols=2, subplot_titles=("time of a step", "average power"))
    trace, sizes = model.trace, grid(model)
    limits = trace.power_limits
    colours = sample_colorscale("Viridis", list(np.linspace(0, 0.9, len(limits))))
    for limit, colour in zip(limits, colours):
        at = trace.power_limit == limit
        label = f"{limit} W"
        for column, figures in ((1, trace.time), (2, trace.average_power)):
            figure.add_trace(
                Scatter(
                    x=trace.batch_size[at].tolist(), y=figures[at].tolist(), mode="markers",
                    marker={"color": colour, "size": 8}, name=label, legendgroup=label,
                    showlegend=column == 1,
                    hovertemplate=f"{label}<br>batch %{{x}}: %{{y:.4g}}<extra>measured</extra>",
                ),
                row=1, col=column,
            )  # fmt: skip
        if limit not in model.power_limits:
            continue
        seconds = np.asarray(model.time(sizes, limit), dtype=float)
        watts = np.asarray(model.energy(sizes, limit), dtype=float) / np.maximum(seconds, 1e-30)
        for column, curve in ((1, seconds), (2, watts)):
            figure.add_trace(
                Scatter(
                    x=sizes.tolist(), y=curve.tolist(), mode="lines", line={"color": colour},
                    legendgroup=label, showlegend=False,
                    hovertemplate=f"{label}<br>batch %{{x}}: %{{y:.4g}}<extra>{model.name}</extra>",
                ),
                row=1, col=column,
            )  # fmt: skip
    ticks = list(trace.batch_sizes)
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[str(b) for b in ticks],
                        title="batch size")  # fmt: skip
    unit = "relative" if trace.relative else "s"
    figure.update_yaxes(type="log", title=unit, row=1, col=1)
    figure.update_yaxes(rangemode="tozero", title="W", row=1, col=2)
    return _styled(figure, 400).update_layout(margin={"t": 60})


def timeline_figure(plan: Allocation) -> Figure:
    """One step, GPU by GPU: micro-batches, waiting, and the exchange of gradients."""
    from plotly.graph_objects import Bar, Figure

    figure = Figure()
    colours = gpu_colours([worker.gpu for worker in plan.workers])
    lanes = plan.workers[:MAX_LANES]
    names = [f"{rank}: {worker.gpu}" for rank, worker in enumerate(lanes)]
    for name, worker in zip(names, lanes):
        passes = max(worker.accumulation_steps, 1)
        for number in range(passes if worker.batch_size else 0):
            figure.add_trace(
                Bar(
                    x=[worker.time / passes], y=[name], orientation="h", showlegend=False,
                    marker={"color": colours[worker.gpu], "line": {"color": "white", "width": 1}},
                    hovertemplate=f"micro-batch {number + 1} of {passes}, at most "
                    f"{worker.micro_batch_size} samples, {worker.power_limit} W: "
                    "%{x:.4g}<extra></extra>",
                )
            )  # fmt: skip
    busiest = plan.step_time - plan.sync_time
    waits = [max(busiest - worker.time, 0.0) for worker in lanes]
    for label, lengths, colour in (
        ("waiting", waits, _WAITING),
        ("exchange of gradients", [plan.sync_time] * len(lanes), _EXCHANGE),
    ):
        if max(lengths) > 0:
            figure.add_trace(
                Bar(
                    x=lengths, y=names, orientation="h", name=label, marker={"color": colour},
                    hovertemplate=f"{label}: %{{x:.4g}}<extra></extra>",
                )
            )  # fmt: skip
    unit = "relative" if plan.relative else "s"
    figure.update_layout(barmode="stack", yaxis={"autorange": "reversed"})
    figure.update_xaxes(title=f"time in a step ({unit})")
    return _styled(figure, 130 + 34 * len(lanes))


def savings_figure(plans: dict[str, Allocation]) -> Figure:
    """What each method saves against the even split at maximum power."""
    from plotly.graph_objects import Bar, Figure

    today = plans["equal_max_power"]
    names = [method.replace("_", " ") for method in plans]
    figure = Figure()
    for label, colour, saved in (
        ("time", "#0072B2", [1 - plan.step_time / today.step_time for plan in plans.values()]),
        ("energy", "#E69F00", [1 - p.step_energy / today.step_energy for p in plans.values()]),
    ):
        figure.add_trace(
            Bar(
                x=names, y=saved, name=label, marker={"color": colour},
                hovertemplate="%{x}: %{y:.1%} of " + label + "<extra></extra>",
            )
        )  # fmt: skip
    figure.update_yaxes(tickformat=".0%", title="saved")
    return _styled(figure, 340)


def pareto_figure(subject: Subject) -> Figure:
    """The trade-off between time and energy, with a slider over eta."""
    from plotly.graph_objects import Figure, Scatter

    front, plans = subject.front, subject.by_eta
    figure = Figure()
    points = [
        f"{' / '.join(map(str, shares[:8]))}<br>{' / '.join(map(str, limits[:8]))} W"
        for shares, limits in zip(front["shares"], front["power_limits"])
    ]
    figure.add_trace(
        Scatter(
            x=front["step_time"].tolist(), y=front["step_energy"].tolist(), mode="lines+markers",
            line={"shape": "hv", "color": "#777777"}, name="Pareto front", text=points,
            hovertemplate="%{text}<br>%{x:.4g}, %{y:.4g}<extra></extra>",
        )
    )  # fmt: skip
    start = min(range(len(ETAS)), key=lambda i: abs(ETAS[i] - subject.plan.eta))
    figure.add_trace(
        Scatter(
            x=[plans[start].step_time], y=[plans[start].step_energy], mode="markers",
            marker={"color": "#D55E00", "size": 16, "symbol": "star"}, name="optimum for eta",
            hovertemplate="%{x:.4g}, %{y:.4g}<extra></extra>",
        )
    )  # fmt: skip
    steps = [
        {
            "label": f"{eta:g}",
            "method": "update",
            "args": [
                {"x": [[plan.step_time]], "y": [[plan.step_energy]]},
                {"title.text": _caption(eta, plan)},
                [1],
            ],
        }
        for eta, plan in zip(ETAS, plans)
    ]
    figure.update_layout(
        title={"text": _caption(ETAS[start], plans[start]), "font": {"size": 13}},
        sliders=[
            {
                "active": start, "steps": steps, "currentvalue": {"prefix": "eta "},
                "pad": {"t": 55, "b": 10}, "len": 1.0, "x": 0,
            }
        ],
    )  # fmt: skip
    time, energy = ("relative", "relative") if subject.plan.relative else ("s", "J")
    figure.update_xaxes(title=f"time of a step ({time})")
    figure.update_yaxes(title=f"energy of a step ({energy})")
    styled = _styled(figure, 520)
    styled.update_layout(legend={"y": 1.0, "x": 1.0, "xanchor": "right", "yanchor": "top"},
                         margin={"t": 70})  # fmt: skip
    return styled


def _caption(eta: float, plan: Allocation) -> str:
    shares = " / ".join(str(worker.batch_size) for worker in plan.workers[:6])
    limits = " / ".join(str(worker.power_limit) for worker in plan.workers[:6])
    more = " ..." if len(plan.workers) > 6 else ""
    return f"eta {eta:g}: shares {shares}{more}<br>power limits {limits}{more} W"


def _styled(figure: Figure, height: int) -> Figure:
    figure.update_layout(
        height=height,
        template="plotly_white",
        margin={"l": 10, "r": 10, "t": 40, "b": 10},
        legend={"orientation": "h", "y": -0.25},
        font={"size": 13},
    )
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True)
    return figure
