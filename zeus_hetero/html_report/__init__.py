"""One HTML file about a plan: traces, allocation, a step's timeline, savings, the Pareto front.

The file needs no network. Pictures are made by plotly, which the extra ``report`` installs.
"""

from __future__ import annotations

from zeus_hetero.html_report.content import Subject
from zeus_hetero.html_report.page import page

__all__ = ["Subject", "page"]
