"""Measurements of one GPU model running one workload: read, check, write.

A trace is a table: batch size x power limit -> time and energy. Files hold what was
measured, sums over a profiling window of ``steps`` training steps; in memory every figure
is per training step.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Union

import numpy as np
import pandas as pd

from zeus_hetero.errors import TraceError, TraceWarning

TraceSource = Union["Trace", str, "os.PathLike[str]", pd.DataFrame]

_MEASURED = ("batch_size", "power_limit", "time", "energy", "steps")
_ZEUS_CSV = ("batch_size", "power_limit", "time_per_epoch", "average_power")
_WINDOW = "window_steps"
# Zeus's own A40 trace averages 107 W under a limit of 100 W, so only more than that is news.
_SUSPICIOUS_POWER_RATIO = 1.25


@dataclass(frozen=True)
class Trace:
    """What one GPU model needs for one training step of one workload.

    Records are sorted by batch size (ascending), then power limit (descending); the arrays
    are read-only and have one entry per record.

    Attributes:
        batch_size: samples per step, int64.
        power_limit: W, int64.
        time: s per training step, float64.
        energy: J per training step, float64.
        steps: training steps that the measured window held, int64.
        gpu: the GPU model's name, or None where the source does not say.
        workload: data set and network, such as "cifar100/shufflenetv2", or None.
        relative: True if time and energy are in an unknown but common unit per sample
            (a per-epoch trace read without its data set's size).
        extra: per record, the further fields of the source; kept by `save`.
        source: where it was read, for error messages.
    """

    batch_size: np.ndarray
    power_limit: np.ndarray
    time: np.ndarray
    energy: np.ndarray
    steps: np.ndarray
    gpu: str | None = None
    workload: str | None = None
    relative: bool = False
    extra: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    source: str = "Trace"

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The profiled batch sizes, ascending."""
        return tuple(int(b) for b in np.unique(self.batch_size))

    @property
    def power_limits(self) -> tuple[int, ...]:
        """The profiled power limits in W, descending."""
        return tuple(int(p) for p in np.unique(self.power_limit)[::-1])

    @property
    def average_power(self) -> np.ndarray:
        """Average power of each record, W."""
        return self.energy / self.time

    @property
    def simulated(self) -> bool:
        """Whether any record says that a simulated GPU made it."""
        return any(bool(record.get("simulated")) for record in self.extra)

    @property
    def wait_power(self) -> float | None:
        """What the GPU draws while it waits for others, W, if that was measured."""
        measured = [record["wait_power"] for record in self.extra if "wait_power" in record]
        usable = [
            float(watts)
            for watts in measured
            if isinstance(watts, (int, float)) and math.isfinite(watts) and watts >= 0
        ]
        return statistics.median(usable) if usable else None

    def __len__(self) -> int:
        return len(self.batch_size)

    def __str__(self) -> str:
        what = ", ".join(part for part in (self.gpu, self.workload) if part)
        return (
            f"Trace({what or self.source}: {len(self)} points, batch sizes "
            f"{', '.join(map(str, self.batch_sizes))}; power limits "
            f"{', '.join(map(str, self.power_limits))} W"
            f"{'; relative units' if self.relative else ''}"
            f"{'; simulated' if self.simulated else ''})"
        )

    def to_frame(self) -> pd.DataFrame:
        """The trace as a tidy table, a row per record.

        Returns:
            Columns batch_size, power_limit (W), time (s per step), energy (J per step),
            average_power (W), window_steps (steps that were measured together); then the extra
            fields. `load_trace` reads it back. There is no column steps, since that would say
            that time and energy are sums over so many steps.
        """
        frame = pd.DataFrame(
            {
                "batch_size": self.batch_size,
                "power_limit": self.power_limit,
                "time": self.time,
                "energy": self.energy,
                "average_power": self.average_power,
                _WINDOW: self.steps,
            }
        )
        extra = pd.DataFrame([dict(record) for record in self.extra])
        return pd.concat([frame, extra], axis=1) if len(extra.columns) else frame

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON form, which the original system's parser reads too.

        The file is complete or untouched: it is written beside its place and renamed.

        Args:
            path: file to write; its folder must exist.

        Raises:
            TraceError: the trace is in relative units, so its figures are no seconds or joules.
        """
        if self.relative:
            raise TraceError(
                f"{self.source}: a trace in relative units cannot be saved as seconds and joules. "
                "Load it with dataset_size=... to get absolute figures."
            )
        by_batch: dict[str, list[dict[str, Any]]] = {}
        extras: Iterable[Mapping[str, Any]] = self.extra or ({},) * len(self)
        for b, p, t, e, s, extra in zip(
            self.batch_size, self.power_limit, self.time, self.energy, self.steps, extras
        ):
            record = {
                "power_limit": int(p),
                "energy": float(e * s),
                "time": float(t * s),
                "steps": int(s),
                **extra,
            }
            by_batch.setdefault(str(int(b)), []).append(record)
        write_text_atomically(path, format_records(by_batch))


def format_records(by_batch: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Lay out records as JSON, one record a line, as people read and diff it."""
    groups = []
    for batch, records in by_batch.items():
        lines = ",\n        ".join(json.dumps(record) for record in records)
        groups.append(f"    {json.dumps(str(batch))}: [\n        {lines}\n    ]")
    return "{\n" + ",\n".join(groups) + "\n}\n"


def write_text_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Replace a file by another text so that a crash or full disk leaves the old one whole."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes the file private; a trace or a plan is meant to be shared.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def load_trace(
    source: TraceSource,
    *,
    gpu: str | None = None,
    steps: int | None = None,
    dataset: str | None = None,
    network: str | None = None,
    optimizer: str | None = None,
    dataset_size: int | None = None,
) -> Trace:
    """Read and check a trace.

    Args:
        source: one of

            - a path to JSON, ``{"32": [{"power_limit": 300, "energy": 23.4, "time": 0.249}]}``: W,
              J and s over a window of ``steps`` training steps;
            - a path to a CSV file with Zeus's columns ``dataset, network, batch_size, optimizer,
              power_limit, time_per_epoch, average_power``, or with the DataFrame's columns;
            - a DataFrame with ``batch_size, power_limit, time, energy`` and optionally ``steps``;
            - a Trace, which is returned as it is.
        gpu: name of the GPU model, where the source does not say.
        steps: training steps per window for records that do not say; 1 by default.
        dataset: of a Zeus CSV with several workloads, the data set to take.
        network: likewise the network.
        optimizer: likewise the optimizer.
        dataset_size: samples in an epoch of a Zeus CSV. Without it the trace is relative.

    Returns:
        The trace, per training step.

    Raises:
        TraceError: the source is missing, unreadable or holds something impossible; the message
            names the file, the record and what was expected.
    """
    if isinstance(source, Trace):
        return source
    for name, value in (("steps", steps), ("dataset_size", dataset_size)):
        if value is not None and (not _is_integral(value) or value < 1):
            raise TraceError(f"{name} is {value!r}; expected a positive whole number.")
    if isinstance(source, pd.DataFrame):
        return _from_frame(source, "DataFrame", gpu, steps)
    if not isinstance(source, (str, os.PathLike)):
        raise TraceError(
            f"trace is a {type(source).__name__}; expected a Trace, a path or a pandas DataFrame."
        )
    path = Path(source)
    where = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TraceError(
            f"{where}: no such file; expected a trace in JSON or CSV. "
            "Check the path, or profile the GPU first."
        ) from None
    except IsADirectoryError:
        raise TraceError(
            f"{where}: is a folder; expected a trace file, such as {path / 'profiling.json'}."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{where}: cannot be read ({error}); expected JSON or CSV text.") from None
    if path.suffix.lower() == ".csv":
        return _from_csv(path, where, gpu, steps, dataset, network, optimizer, dataset_size)
    return _from_json(text, where, gpu, steps)


def _from_json(text: str, where: str, gpu: str | None, steps: int | None) -> Trace:
    try:
        # A batch size that stands twice in the file would silently lose its first records in
        # a dict, so the top level is read as pairs.
        top = json.loads(text, object_pairs_hook=_Pairs)
    except json.JSONDecodeError as error:
        raise TraceError(
            f"{where}: not valid JSON (line {error.lineno}, column {error.colno}: {error.msg}); "
            'expected {"<batch size>": [{"power_limit": W, "energy": J, "time": s}, ...], ...}.'
        ) from None
    if not isinstance(top, _Pairs):
        raise TraceError(
            f"{where}: top level is a {type(top).__name__}; "
            'expected {"<batch size>": [...], ...}.'
        )
    records = []
    for key, group in top:
        batch = _batch_size(key, where)
        if not isinstance(group, list) or isinstance(group, _Pairs):
            raise TraceError(
                f"{where}: batch size {key}: is {_to_plain(group)!r}; expected a list of records."
            )
        for number, pairs in enumerate(group, start=1):
            place = f"batch size {key}, record {number}"
            if not isinstance(pairs, _Pairs):
                raise TraceError(
                    f"{where}: {place}: is {pairs!r}; "
                    'expected {"power_limit": W, "energy": J, "time": s}.'
                )
            records.append((place, {"batch_size": batch, **_to_plain(pairs)}))
    return _build(records, where, gpu, steps)


class _Pairs(list):  # type: ignore[type-arg]
    """A JSON object as its list of pairs, told apart from a JSON list by its type."""


def _to_plain(value: Any) -> Any:
    if isinstance(value, _Pairs):
        return {key: _to_plain(item) for key, item in value}
    if isinstance(value, list):
        return [_to_plain(item) for item in value]
    return value


def _from_csv(
    path: Path,
    where: str,
    gpu: str | None,
    steps: int | None,
    dataset: str | None,
    network: str | None,
    optimizer: str | None,
    dataset_size: int | None,
) -> Trace:
    try:
        frame = pd.read_csv(path)
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise TraceError(f"{where}: not a CSV table ({error}).") from None
    if "time_per_epoch" not in frame.columns:
        return _from_frame(frame, where, gpu, steps)
    missing = [column for column in _ZEUS_CSV if column not in frame.columns]
    if missing:
        raise TraceError(f"{where}: no column {', '.join(missing)}; expected Zeus's {_ZEUS_CSV}.")
    frame["row"] = np.arange(2, len(frame) + 2)
    for column, wanted in (("dataset", dataset), ("network", network), ("optimizer", optimizer)):
        frame = _select(frame, column, wanted, where)
    times = pd.to_numeric(frame["time_per_epoch"], errors="coerce")
    batches = pd.to_numeric(frame["batch_size"], errors="coerce")
    step_time = times * batches / (dataset_size or 1)
    frame = frame.assign(
        time=step_time,
        energy=step_time * pd.to_numeric(frame["average_power"], errors="coerce"),
        steps=1,
    ).drop(columns=["time_per_epoch", "average_power"])
    records = [
        (f"line {row.pop('row')}", {str(k): v for k, v in row.items()})
        for row in frame.to_dict("records")
    ]
    return _build(records, where, gpu, steps, relative=dataset_size is None)


def _select(frame: pd.DataFrame, column: str, wanted: str | None, where: str) -> pd.DataFrame:
    if column not in frame.columns:
        return frame
    known = sorted(map(str, frame[column].unique()))
    if wanted is None:
        if len(known) > 1:
            raise TraceError(
                f"{where}: holds several workloads, {column} is one of {', '.join(known)}; "
                f"select one with {column}=..."
            )
        return frame
    chosen = frame[frame[column].astype(str) == wanted]
    if chosen.empty:
        raise TraceError(
            f"{where}: no {column} {wanted!r} here; expected one of {', '.join(known)}."
        )
    return chosen


def _from_frame(frame: pd.DataFrame, where: str, gpu: str | None, steps: int | None) -> Trace:
    missing = [c for c in ("batch_size", "power_limit", "time", "energy") if c not in frame.columns]
    if missing:
        raise TraceError(
            f"{where}: no column {', '.join(missing)}; "
            "expected batch_size, power_limit (W), time (s), energy (J) and optionally steps."
        )
    # What `to_frame` derived must not become a stale extra field, and its figures are per step.
    frame = frame.drop(columns=["average_power"], errors="ignore")
    if _WINDOW in frame.columns and "steps" not in frame.columns:
        windows = frame[_WINDOW]
        frame = frame.drop(columns=[_WINDOW]).assign(
            time=frame["time"] * windows, energy=frame["energy"] * windows, steps=windows
        )
    records = [
        (f"row {number}", {str(k): v for k, v in row.items()})
        for number, row in enumerate(frame.to_dict("records"), start=1)
    ]
    return _build(records, where, gpu, steps)


def _build(
    records: Sequence[tuple[str, dict[str, Any]]],
    where: str,
    gpu: str | None,
    steps: int | None,
    relative: bool = False,
) -> Trace:
    if not records:
        raise TraceError(f"{where}: holds no records; expected at least one measured point.")
    merged: dict[tuple[int, int], list[_Point]] = {}
    for place, record in records:
        point = _check_record(record, f"{where}: {place}", steps or 1)
        merged.setdefault((point.batch_size, -point.power_limit), []).append(point)
    points = [_average(group, where) for _, group in sorted(merged.items())]
    _warn_about_power(points, where)
    extra = tuple(MappingProxyType(point.extra) for point in points)
    return Trace(
        batch_size=_column([p.batch_size for p in points], np.int64),
        power_limit=_column([p.power_limit for p in points], np.int64),
        time=_column([p.time / p.steps for p in points], np.float64),
        energy=_column([p.energy / p.steps for p in points], np.float64),
        steps=_column([p.steps for p in points], np.int64),
        gpu=gpu or _common(extra, ("gpu", "gpu_name"), where),
        workload=_workload(extra, where),
        relative=relative,
        extra=extra,
        source=where,
    )


@dataclass
class _Point:
    """One checked record; time (s) and energy (J) over the whole window of `steps` steps."""

    batch_size: int
    power_limit: int
    time: float
    energy: float
    steps: int
    extra: dict[str, Any]


def _check_record(record: dict[str, Any], place: str, default_steps: int) -> _Point:
    fields = dict(record)
    for name in ("power_limit", "energy", "time"):
        if name not in fields:
            raise TraceError(
                f"{place}: no {name}; expected power_limit (W), energy (J) and time (s)."
            )
    batch = _batch_size(fields.pop("batch_size"), place)
    limit = fields.pop("power_limit")
    if not _is_integral(limit) or limit <= 0:
        raise TraceError(
            f"{place}: power_limit is {limit!r}; expected a positive whole number of W."
        )
    steps = fields.pop("steps", None)
    if steps is None or (isinstance(steps, float) and math.isnan(steps)):
        steps = default_steps
    if not _is_integral(steps) or steps < 1:
        raise TraceError(
            f"{place}: steps is {steps!r}; expected a positive whole number of training steps."
        )
    figures = []
    for name, unit in (("time", "seconds"), ("energy", "joules")):
        value = fields.pop(name)
        if not _is_number(value) or not math.isfinite(value) or value <= 0:
            raise TraceError(
                f"{place}: {name} is {value!r}; expected a positive number of {unit}. "
                "Profile this point again or delete the record."
            )
        figures.append(float(value))
    return _Point(batch, int(limit), figures[0], figures[1], int(steps), fields)


def _average(group: list[_Point], where: str) -> _Point:
    first = group[0]
    if len(group) == 1:
        return first
    warnings.warn(
        f"{where}: batch size {first.batch_size} at {first.power_limit} W was measured "
        f"{len(group)} times; the average is used.",
        TraceWarning,
        stacklevel=5,
    )
    # Windows add up: the mean step is the whole time over all steps.
    return _Point(
        first.batch_size,
        first.power_limit,
        sum(p.time for p in group),
        sum(p.energy for p in group),
        sum(p.steps for p in group),
        first.extra,
    )


def _warn_about_power(points: Sequence[_Point], where: str) -> None:
    for point in points:
        power = point.energy / point.time
        if power > _SUSPICIOUS_POWER_RATIO * point.power_limit:
            warnings.warn(
                f"{where}: batch size {point.batch_size} at {point.power_limit} W: the average "
                f"power is {power:.0f} W, far above the limit; the window may be shorter than the "
                "energy counter's tick. Profile this point again with more steps.",
                TraceWarning,
                stacklevel=4,
            )


def _workload(extra: Sequence[Mapping[str, Any]], where: str) -> str | None:
    parts = (
        _common(extra, ("workload",), where),
        _common(extra, ("dataset",), where),
        _common(extra, ("network", "arch"), where),
    )
    return "/".join(part for part in parts if part) or None


def _common(extra: Sequence[Mapping[str, Any]], names: Sequence[str], where: str) -> str | None:
    """The value that all records give for a field; None where no record has it."""
    for name in names:
        values = sorted({str(record[name]) for record in extra if record.get(name) is not None})
        if len(values) > 1:
            raise TraceError(
                f"{where}: records of different {name}: {', '.join(values)}; "
                "expected one GPU model and one workload per trace. Split the file."
            )
        if values:
            return values[0]
    return None


def _batch_size(value: Any, place: str) -> int:
    if isinstance(value, str):
        value = int(value) if value.isascii() and value.strip().isdigit() else value
    if not _is_integral(value) or value < 1:
        raise TraceError(f"{place}: batch size is {value!r}; expected a positive whole number.")
    return int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _is_integral(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value) and float(value).is_integer()


def _column(values: Sequence[float], dtype: Any) -> np.ndarray:
    column = np.array(values, dtype=dtype)
    column.setflags(write=False)
    return column
