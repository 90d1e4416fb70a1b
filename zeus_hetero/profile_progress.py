"""What a profiling run says while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from zeus_hetero.profile_link import Progress


class ProgressReport:
    """A progress bar on a terminal, a line per finished point elsewhere.

    Args:
        out: where to print.
    """

    def __init__(self, out: IO[str]) -> None:
        self._console = Console(file=out, highlight=False, soft_wrap=True)
        self._bar: Bar | None = None
        self._before = 0
        self._seen: set[tuple[int, int]] = set()

    def line(self, text: str) -> None:
        """Print a line, above the bar."""
        self._console.print(text, markup=False)

    @contextmanager
    def bar(self, total: int) -> Iterator[None]:
        """Show progress over this many windows."""
        if not self._console.is_terminal:
            yield
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=self._console) as bar:
            bar.add_task("starting", total=total)
            self._bar = bar
            try:
                yield
            finally:
                self._bar = None

    def at(self, windows: int) -> None:
        """Say how many windows the batch sizes before this one had."""
        self._before = windows
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=windows)

    def window(self, progress: Progress) -> None:
        """Show a window that was just measured."""
        measured = (
            f"batch {progress.batch_size} at {progress.power_limit} W: "
            f"{progress.time:.4f} s, {progress.energy:.3f} J a step"
        )
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0],
                completed=self._before + progress.done,
                description=measured,
            )
        elif (progress.batch_size, progress.power_limit) not in self._seen:
            self._seen.add((progress.batch_size, progress.power_limit))
            self.line(measured)
