"""What a check of the doctor found."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

OK, WARNING, FAILED = "ok", "warning", "failed"
PROFILE, TRAIN = "profile", "train"


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: what was looked at.
        status: `OK`, `WARNING` or `FAILED`.
        detail: what was found.
        remedy: the command or action that mends it; empty if nothing is to be mended.
        needed_for: what does not work if it failed: `PROFILE`, `TRAIN`.
    """

    name: str
    status: str
    detail: str
    remedy: str = ""
    needed_for: tuple[str, ...] = ()


def can(findings: Iterable[Finding], what: str) -> bool:
    """Whether nothing that is needed for it has failed."""
    return not any(f.status == FAILED and what in f.needed_for for f in findings)


def split(error: BaseException) -> tuple[str, str]:
    """An error's text as what was found and what to do: its first sentence, and the rest."""
    text = str(error).strip() or type(error).__name__
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if depth == 0 and sign == "." and re.match(r"\s+[A-Z]", text[place + 1 :]):
            return text[: place + 1], text[place + 1 :].strip()
    return text, "See the message."
