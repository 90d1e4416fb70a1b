"""The file in which `HeteroPowerLimitOptimizer` keeps its measurements, keyed by GPU.

Zeus's own optimizer reads it too: it holds all that Zeus's file does, and more.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zeus_hetero.gpu_names import canonical
from zeus_hetero.trace import write_text_atomically


@dataclass(frozen=True)
class Window:
    """One measured window.

    Attributes:
        power_limit: W, the rung's name.
        steps: training steps it held.
        time: s.
        energy: GPU index -> J.
        approximate: True if a GPU's energy was never more than 0 and power limit x time stands
            in for it: an upper bound.
    """

    power_limit: int
    steps: int
    time: float
    energy: Mapping[int, float]
    approximate: bool = False


@dataclass(frozen=True)
class ProfileKey:
    """What measurements hold for.

    Attributes:
        gpus: model names of the process's GPUs.
        batch_size: samples per step, or None if the user did not say.
        power_limits: per GPU, W per rung.
    """

    gpus: tuple[str, ...]
    batch_size: int | None
    power_limits: tuple[tuple[int, ...], ...]

    def difference(self, record: Any) -> str | None:
        """How a file's key differs from this one in words, or None if it is the same."""
        if not isinstance(record, dict):
            return "it does not say which GPU it is of (Zeus's own optimizer does not)"
        gpus = tuple(canonical(str(gpu)) for gpu in record.get("gpus", ()))
        if gpus != tuple(canonical(gpu) for gpu in self.gpus):
            return f"it is of {record.get('gpus')}, and here is {list(self.gpus)}"
        if record.get("batch_size") != self.batch_size:
            return f"it is of batch size {record.get('batch_size')}, not {self.batch_size}"
        if record.get("power_limits") != list(map(list, self.power_limits)):
            return (
                f"it is of the power limits {record.get('power_limits')}, "
                f"not {[list(limits) for limits in self.power_limits]}"
            )
        return None

    def beside(self, path: Path) -> Path:
        """The file to use where `path` holds somebody else's measurements."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:8]
        label = re.sub(r"[^a-z0-9]+", "-", canonical(self.gpus[0])).strip("-")
        return path.with_name(f"{path.stem}.{label}-{digest}{path.suffix}")


def mismatch(path: Path, key: ProfileKey) -> str | None:
    """Why a file cannot be used for this key, in words; None if it can."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        measured = {
            entry["power_limit"]
            for entry in record["measurements"]
            if entry["energy"] > 0 and entry["time"] > 0
        }
        difference = key.difference(record.get("key"))
        if difference is None and measured != set(record["key"]["rungs"]):
            return "some of its power limits have no valid measurement"
        return difference
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read ({error!r})"


def save(path: Path, key: ProfileKey, rungs: Sequence[int], entries: Sequence[dict]) -> None:
    """Write measurements, each at least with power_limit, energy and time as Zeus's are."""
    record = {"measurements": list(entries), "key": {**asdict(key), "rungs": list(rungs)}}
    write_text_atomically(path, json.dumps(record, indent=4) + "\n")
