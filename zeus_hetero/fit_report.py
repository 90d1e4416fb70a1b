"""How well a model fits a trace: behind ``zeus-hetero fit TRACE``."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from zeus_hetero.errors import TraceWarning
from zeus_hetero.gpu_model import GPUModel, fit
from zeus_hetero.outliers import Outlier
from zeus_hetero.smooth_model import Smooth
from zeus_hetero.trace import TraceSource, load_trace
from zeus_hetero.uncertainty import leave_out_residuals

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console, ConsoleOptions, RenderResult

# Median error of left-out times that is called good, fair, and poor beyond; half and full size of
# what window noise of a few percent explains.
_GOOD, _FAIR = 0.03, 0.08


@dataclass(frozen=True)
class FitReport:
    """Quality of a fit.

    Attributes:
        model: the fitted model.
        table: a row per power limit, highest first: power_limit (W), points, largest_time_residual
            (of fitted points), and of points whose batch size was left out: time_median, time_p90,
            energy_median, energy_p90. Relative; nan where nothing could be left out.
        outliers: points that the others contradict, whatever the model.
        left_out: number of predictions of left-out points.
        time_median: median relative error of time over all left-out points, nan if there are none.
    """

    model: GPUModel
    table: pd.DataFrame
    outliers: tuple[Outlier, ...]
    left_out: int
    time_median: float

    @property
    def verdict(self) -> str:
        """One sentence: is this enough to allocate by."""
        if not self.left_out:
            return "too few batch sizes to judge: profile at least 3 per power limit"
        if self.time_median <= _GOOD:
            return f"good: left-out times are predicted to {self.time_median:.1%} (median)"
        if self.time_median <= _FAIR:
            return f"fair: left-out times are predicted to {self.time_median:.1%} (median)"
        return (
            f"poor: left-out times are predicted to {self.time_median:.1%} (median); profile more "
            "batch sizes, or with longer windows"
        )

    def __str__(self) -> str:
        import io

        from rich.console import Console

        console = Console(width=110, record=True, file=io.StringIO())
        console.print(self)
        return console.export_text().rstrip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the report as a table, then the outliers."""
        from rich.table import Table

        trace = self.model.trace
        what = ", ".join(part for part in (trace.gpu, trace.workload) if part) or trace.source
        mark = " \\[SIMULATED]" if trace.simulated else ""
        table = Table(title=f"{self.model.name} model of {what}{mark}", title_justify="left")
        for header in (
            "power limit (W)",
            "points",
            "largest residual",
            "left out: time",
            "p90",
            "energy",
            "p90",
        ):
            table.add_column(header, justify="right")
        for row in self.table.itertuples(index=False):
            errors = ("-" if np.isnan(value) else f"{value:.1%}" for value in row[2:])
            table.add_row(str(row[0]), str(row[1]), *errors)
        yield table
        yield self.verdict
        for outlier in self.outliers:
            yield f"outlier: {outlier}"
        if not self.outliers:
            yield "no outliers"


def report_fit(source: TraceSource, model: str = "auto", **options: object) -> FitReport:
    """Fit a model to a trace and judge it by what it says about points it has not seen.

    Args:
        source: a trace, its path or a DataFrame.
        model: name of the model.
        **options: of `load_trace`.

    Returns:
        The report; print it.

    Raises:
        TraceError: the trace cannot be used.
        AllocationError: unknown model.
    """
    trace = load_trace(source, **options)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        # The report says all of it.
        warnings.simplefilter("ignore", TraceWarning)
        fitted = fit(trace, model)
        judge = fitted if isinstance(fitted, Smooth) else Smooth(trace)
        left = leave_out_residuals(trace, lambda part: fit(part, model))
    rows = []
    for limit in trace.power_limits:
        at = trace.power_limit == limit
        residual = np.nan
        if limit in fitted.power_limits:
            predicted = fitted.time(trace.batch_size[at], limit)
            residual = float(np.max(np.abs(predicted / trace.time[at] - 1)))
        out = left.power_limit == limit
        time, energy = (np.abs(np.expm1(-figure[out])) for figure in (left.time, left.energy))
        rows.append(
            {
                "power_limit": limit,
                "points": int(np.count_nonzero(at)),
                "largest_time_residual": residual,
                "time_median": _quantile(time, 0.5),
                "time_p90": _quantile(time, 0.9),
                "energy_median": _quantile(energy, 0.5),
                "energy_p90": _quantile(energy, 0.9),
            }
        )
    errors = np.abs(np.expm1(-left.time))
    return FitReport(
        model=fitted,
        table=pd.DataFrame(rows),
        outliers=judge.outliers,
        left_out=len(errors),
        time_median=_quantile(errors, 0.5),
    )


def draw_fit(report: FitReport) -> Figure:
    """The fit over its measurements, outliers marked by a red ring; needs matplotlib."""
    from zeus_hetero.plotting import plot_model

    trace = report.model.trace
    figure = plot_model(report.model, trace.gpu or trace.source)
    axes = {"time": figure.axes[0], "power": figure.axes[1]}
    for outlier in report.outliers:
        axes[outlier.figure].plot(
            outlier.batch_size,
            outlier.measured,
            "o",
            markersize=13,
            markerfacecolor="none",
            markeredgecolor="red",
            label="_outlier",
        )
    return figure


def _quantile(errors: np.ndarray, part: float) -> float:
    return float(np.quantile(errors, part)) if errors.size else float("nan")
