"""The HTML of a report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from zeus_hetero.html_report import figures
from zeus_hetero.html_report.content import Subject

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from zeus_hetero.allocation import Allocation

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 0 1rem 3rem;
       color: #1b1b1b; background: #fff; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
table { border-collapse: collapse; } th, td { padding: .3rem .7rem; text-align: right;
       border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.box { overflow-x: auto; } .figure { width: 100%; min-width: 0; }
.lead { font-size: 1.15rem; } .simulated { background: #b00020; color: #fff; padding: .1rem .5rem;
       border-radius: .3rem; } pre { overflow-x: auto; font-size: .8rem; }
.note { color: #555; }
"""


def page(subject: Subject) -> str:
    """The whole report as one HTML document that loads nothing.

    Args:
        subject: what it is about.

    Raises:
        ZeusHeteroError: plotly is not installed.
    """
    figures.need_plotly()
    from plotly.offline import get_plotlyjs

    plan = subject.plan
    gpus = ", ".join(f"{n} x {name}" if n > 1 else name for name, n in subject.counts.items())
    title = f"Plan for {gpus}: global batch {plan.global_batch_size}"
    parts = [_lead(subject), _section("Allocation", _workers(plan))]
    step = _figure(figures.timeline_figure(plan), "timeline")
    parts.append(_section("One step", step + _timeline_note(plan)))
    if subject.traces:
        parts += _with_traces(subject)
    else:
        parts.append(
            _section(
                "Methods, savings, Pareto front, traces",
                "<p>These need the traces that the plan was made from. Give them as NAME=TRACE "
                "after the plan.</p>",
            )
        )
    parts.append(_section("Inputs and versions", _inputs(subject)))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n"
        f"<script>{get_plotlyjs()}</script>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _with_traces(subject: Subject) -> list[str]:
    plans, skipped = subject.methods
    left_out = "".join(
        f'<p class="note">{escape(method)}: left out: {escape(reason)}</p>'
        for method, reason in skipped.items()
    )
    parts = [_section("Methods", _methods(plans) + left_out)]
    if "equal_max_power" in plans:
        savings = _figure(figures.savings_figure(plans), "savings")
        note = '<p class="note">Against the even split at maximum power.</p>'
        parts.append(_section("Savings", savings + note))
    if subject.plan.objective == "synchronous":
        front = _figure(figures.pareto_figure(subject), "pareto")
        note = (
            '<p class="note">No allocation is faster and more frugal than a point of the front. '
            "Move the slider to weigh energy against time.</p>"
        )
        parts.append(_section("Pareto front", front + note))
    drawn = [
        f"<h3>{escape(name)}</h3>" + _figure(figures.trace_figure(name, model), f"trace{number}")
        for number, (name, model) in enumerate(subject.models.items())
    ]
    note = '<p class="note">Points were measured, lines are the model.</p>'
    parts.append(_section("Traces and fits", "".join(drawn) + note))
    parts.append(_section("Why this plan", f"<pre>{escape(subject.explanation)}</pre>"))
    return parts


def _lead(subject: Subject) -> str:
    plan = subject.plan
    time, energy = ("rel.", "rel.") if plan.relative else ("s", "J")
    mark = '<p><span class="simulated">SIMULATED</span> The predictions rest on measurements of '
    mark = mark + "simulated GPUs.</p>" if plan.simulated else ""
    proof = "proven optimal" if plan.gap == 0 else f"gap {plan.gap:.2g}"
    saved = ""
    today = subject.methods[0].get("equal_max_power") if subject.traces else None
    if today is not None:
        saved = (
            f" Against the even split at maximum power it saves "
            f"<strong>{1 - plan.step_time / today.step_time:.1%}</strong> of the time and "
            f"<strong>{1 - plan.step_energy / today.step_energy:.1%}</strong> of the energy."
        )
    return (
        f'{mark}<p class="lead">A step takes {plan.step_time:.4g} {time} and '
        f"{plan.step_energy:.4g} {energy} ({escape(plan.method)}, {proof}).{saved}</p>"
        f'<p class="note">{escape(plan.objective)} objective, {escape(plan.model)} model, '
        f"eta {plan.eta:g}, cost {plan.cost:.6g} {escape(plan.cost_unit)}.</p>"
    )


def _workers(plan: Allocation) -> str:
    time, energy = ("rel.", "rel.") if plan.relative else ("s", "J")
    header = ("GPU", "share", "micro-batches", "power limit (W)", f"time ({time})",
              f"energy ({energy})", "waits")  # fmt: skip
    rows = [
        (
            worker.gpu,
            str(worker.batch_size),
            f"{worker.accumulation_steps} x {worker.micro_batch_size}",
            str(worker.power_limit),
            f"{worker.time:.4g}",
            f"{worker.energy:.4g}",
            f"{plan.waiting(rank):.1%}",
        )
        for rank, worker in enumerate(plan.workers)
    ]
    return _table(header, rows)


def _methods(plans: dict[str, Allocation]) -> str:
    header = ("method", "shares", "limits (W)", "step time", "step energy", "cost")
    rows = [
        (
            method.replace("_", " "),
            _few(worker.batch_size for worker in plan.workers),
            _few(worker.power_limit for worker in plan.workers),
            f"{plan.step_time:.4g}",
            f"{plan.step_energy:.4g}",
            f"{plan.cost:.6g}",
        )
        for method, plan in plans.items()
    ]
    return _table(header, rows)


def _timeline_note(plan: Allocation) -> str:
    left = len(plan.workers) - figures.MAX_LANES
    more = f" {left} further GPUs are not drawn." if left > 0 else ""
    return (
        '<p class="note">White lines part micro-batches; grey is waiting for the slowest GPU.'
        f"{more}</p>"
    )


def _inputs(subject: Subject) -> str:
    options = [
        (f"option {name}", str(value))
        for name, value in subject.arguments.items()
        if value not in (None, (), "")
    ]
    rows = [*subject.inputs, *options, *subject.versions()]
    return _table(("what", "value"), rows)


def _few(figures_of_workers: Iterable[int]) -> str:
    listed = [str(figure) for figure in figures_of_workers]
    return " / ".join(listed[:8]) + (" ..." if len(listed) > 8 else "")


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="box"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _figure(figure: Figure, name: str) -> str:
    drawn = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=name,
        config={"responsive": True, "displayModeBar": False},
    )
    return f'<div class="figure">{drawn}</div>'
