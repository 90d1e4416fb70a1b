"""What keeps this machine from profiling and training, and the command that mends it.

Each check is a function that looks at one thing and says what it found; none changes anything, and
none may raise.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from zeus_hetero.doctor.finding import FAILED, OK, PROFILE, TRAIN, WARNING, Finding, can
from zeus_hetero.doctor.gpus import check_gpus, check_notes, check_variables
from zeus_hetero.doctor.network import check_rendezvous
from zeus_hetero.doctor.software import check_driver, check_python, check_torch, check_zeus
from zeus_hetero.doctor.telling import as_table, summary

__all__ = [
    "FAILED",
    "OK",
    "PROFILE",
    "TRAIN",
    "WARNING",
    "Finding",
    "as_table",
    "can",
    "examine",
    "summary",
]


def examine(
    *, rendezvous: str | None = None, environment: Mapping[str, str] | None = None
) -> list[Finding]:
    """Run all checks.

    Args:
        rendezvous: HOST:PORT that must be reachable to train over several nodes.
        environment: variables of the process; its own if None.
    """
    variables = os.environ if environment is None else environment
    findings = [check_python(), *check_zeus(), check_driver()]
    findings += check_variables(variables)
    findings += check_gpus(variables)
    findings += check_torch()
    findings += [check_notes()]
    if rendezvous is not None:
        findings.append(check_rendezvous(rendezvous))
    return findings
