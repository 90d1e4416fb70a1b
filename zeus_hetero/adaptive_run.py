"""Adaptive profiling of a training script: the grid driver, asked for few points at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from zeus_hetero.adaptive import ProfilingGrid, join, plan_profiling
from zeus_hetero.profile_run import Grid, profile_with_script
from zeus_hetero.trace import Trace, load_trace

TRACE_NAME = "profiling.json"
_POINTS = "points"


def profile_script_adaptively(
    make_grid: Callable[[int, tuple[int, ...], Path], Grid],
    folder: str | Path,
    gpu: str,
    grid: ProfilingGrid,
    *,
    others: Mapping[str, Trace] | None = None,
    points_per_round: int = 4,
    overwrite: bool = False,
    out: IO[str] | None = None,
    driver: Callable[..., int] = profile_with_script,
    **options: Any,
) -> int:
    """Measure only the points that matter for the decision.

    Every round's points are measured by the grid driver in folders of their own below
    ``folder/points``, so that nothing finished is lost and the same command goes on after an
    interruption; ``folder/profiling.json`` always holds all of them.

    Args:
        make_grid: gives what the driver needs for one batch size, some power limits (W) and the
            folder for their results.
        folder: for all results.
        gpu: name of the GPU model that is measured.
        grid: what may be measured.
        others: traces of the GPUs that it will train with, by name.
        points_per_round: points to choose at once.
        overwrite: measure again what is there.
        out: where to tell what is decided; stderr by default.
        driver: `profile_with_script`.
        **options: of `plan_profiling`: target, most_of_grid, global_batch_size, eta.

    Returns:
        Exit status: 0 once the expected regret is within the target or the budget is spent, else
        the driver's.
    """
    told = out or sys.stderr
    folder = Path(folder)
    known: dict[str, Trace | None] = {gpu: None, **(others or {})}
    grids = {name: _grid_of(trace) for name, trace in (others or {}).items()}
    while True:
        plan = plan_profiling(
            {gpu: grid, **grids}, known, count=points_per_round, fixed=tuple(grids), **options
        )
        print(f"{gpu}: {plan.reason}; {plan.measured_part:.0%} of the grid's time", file=told)
        if plan.done:
            return 0
        points = sorted((point.batch_size, -point.power_limit) for point in plan.points)
        for size, group in groupby(points, key=lambda point: point[0]):
            limits = tuple(-negative for _, negative in group)
            place = folder / _POINTS / "-".join(map(str, (size, *limits)))
            place.parent.mkdir(parents=True, exist_ok=True)
            status = driver(make_grid(size, limits, place), overwrite=overwrite, out=told)
            if status:
                return status
            if not (place / TRACE_NAME).is_file():
                # The driver is content and there is no result: it does not fit into memory.
                smaller = tuple(b for b in grid.batch_sizes if b < size)
                if not smaller:
                    print(f"{gpu}: not even batch size {size} fits into memory.", file=told)
                    return 1
                grid = ProfilingGrid(smaller, grid.power_limits)
                break
            record = load_trace(place / TRACE_NAME)
            before = known[gpu]
            trace = record if before is None else join(before, record)
            trace.save(folder / TRACE_NAME)
            known[gpu] = trace


def _grid_of(trace: Trace) -> ProfilingGrid:
    return ProfilingGrid(trace.batch_sizes, trace.power_limits)
