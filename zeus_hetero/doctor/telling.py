"""How the doctor's findings are told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from zeus_hetero.doctor.finding import FAILED, OK, PROFILE, TRAIN, WARNING, Finding, can

if TYPE_CHECKING:
    from rich.table import Table


def as_table(findings: Iterable[Finding]) -> Table:
    """The findings as a table for the terminal."""
    from rich.table import Table
    from rich.text import Text

    colours = {OK: "green", WARNING: "yellow", FAILED: "red"}
    table = Table(show_lines=False)
    for header in ("", "what", "found", "to mend it"):
        table.add_column(header, overflow="fold")
    for finding in findings:
        table.add_row(
            Text(finding.status, style=colours[finding.status]),
            Text(finding.name),
            Text(finding.detail),
            Text(finding.remedy),
        )
    return table


def summary(findings: list[Finding]) -> str:
    """One line: what this machine can do."""
    answers = {True: "yes", False: "no"}
    return (
        f"can allocate: yes, can profile: {answers[can(findings, PROFILE)]}, "
        f"can train: {answers[can(findings, TRAIN)]}"
    )
