"""The folder of a profile: every finished batch size is on disk, and nothing gets mixed.

- ``profiling.json``: the trace, all finished batch sizes;
- ``settings.json``: GPU, network, data set, windows; must agree when the run is continued;
- ``batch_32.json``: result of one batch size, written by the child process that measured it;
- ``batch_32.log``: what that process printed;
- ``out_of_memory.json``: the smallest batch size that did not fit;
- ``restore.json``: the power limit to put back, while a run is changing it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeus_hetero.errors import ProfilingError, TraceError
from zeus_hetero.gpu_lock import GPULock
from zeus_hetero.restore import (
    PreviousLimit,
    note_folder,
    read_note,
    repair_from_notes,
    restore_from_note,
    write_note,
)
from zeus_hetero.trace import format_records, load_trace, write_text_atomically

if TYPE_CHECKING:
    from zeus.device.gpu.common import GPUs

_SETTINGS = "settings.json"
_TRACE = "profiling.json"
_NO_MEMORY = "out_of_memory.json"
_LOCK = ".lock"


class ProfileFolder:
    """Results of one profile on disk.

    Args:
        path: the folder; made by `start` if it is not there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @property
    def trace_path(self) -> Path:
        """The merged trace."""
        return self.path / _TRACE

    def result_path(self, batch_size: int) -> Path:
        """Where the child process writes its result."""
        return self.path / f"batch_{batch_size}.json"

    def log_path(self, batch_size: int) -> Path:
        """What the child process printed."""
        return self.path / f"batch_{batch_size}.log"

    def lock(self) -> GPULock:
        """The lock that keeps two runs from sharing the folder."""
        return GPULock(self.path / _LOCK, f"profile folder {self.path}", str(self.path))

    def check(self, settings: Mapping[str, Any], *, resume: bool, overwrite: bool) -> None:
        """Check that a profile with these settings may go on or begin here; changes nothing.

        Args:
            settings: of this run.
            resume: insist that there is something to continue.
            overwrite: the results that are there will be deleted.

        Raises:
            ProfilingError: it holds another profile or other files, or cannot be written.
        """
        if resume and overwrite:
            raise ProfilingError("both --resume and --overwrite; expected at most one of them.")
        if self.path.exists() and not self.path.is_dir():
            raise ProfilingError(f"{self.path}: is a file; expected the name of a folder.")
        _check_writable(self.path)
        if not (self.path / _SETTINGS).exists():
            if resume:
                raise ProfilingError(
                    f"{self.path}: no profile to resume. Check the name, or leave out --resume."
                )
            self._check_no_foreign_files()
        elif not overwrite:
            _check_same(self.path, self._read(_SETTINGS) or {}, settings)

    def start(self, settings: Mapping[str, Any], *, overwrite: bool) -> None:
        """Begin or go on; comes after `check`, and under the folder's lock."""
        if overwrite:
            self._delete_results()
        if not (self.path / _SETTINGS).exists():
            self._write(_SETTINGS, json.dumps(dict(settings), indent=2) + "\n")

    def make(self) -> None:
        """Make the folder if it is not there."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ProfilingError(f"{self.path}: cannot be made ({error}).") from None

    # -- results -----------------------------------------------------------------------------

    def finished(self, power_limits: tuple[int, ...]) -> dict[int, list[dict[str, Any]]]:
        """Records of the batch sizes that are completely measured, ascending."""
        found = {}
        for path in self.path.glob("batch_*.json"):
            number = path.stem[len("batch_") :]
            if number.isdigit():
                records = self._records(int(number), power_limits)
                if records:
                    found[int(number)] = records
        return dict(sorted(found.items()))

    def missing(self, batch_size: int, power_limits: tuple[int, ...]) -> str | None:
        """What is wrong with the result of a batch size; None if it is complete."""
        path = self.result_path(batch_size)
        if not path.exists():
            return "it wrote no result"
        if not self._records(batch_size, power_limits):
            return f"its result {path.name} does not hold every power limit"
        return None

    def out_of_memory_at(self) -> int | None:
        """The smallest batch size that did not fit into memory, as far as is known."""
        note = self._read(_NO_MEMORY)
        return int(note["batch_size"]) if note else None

    def note_out_of_memory(self, batch_size: int) -> None:
        """Record that a batch size does not fit."""
        self._write(_NO_MEMORY, json.dumps({"batch_size": batch_size}) + "\n")

    def merge(self, power_limits: tuple[int, ...], common: Mapping[str, Any]) -> int:
        """Write the trace of all that is finished.

        Args:
            power_limits: W, that a finished batch size has.
            common: fields that the driver adds to every record.

        Returns:
            Number of batch sizes in it.
        """
        limit = self.out_of_memory_at()
        more = dict(common) if limit is None else {**common, "out_of_memory_at": limit}
        by_batch = {
            str(size): [{**record, **more} for record in records]
            for size, records in self.finished(power_limits).items()
        }
        if by_batch:
            self._write(_TRACE, format_records(by_batch))
        return len(by_batch)

    def _records(self, batch_size: int, limits: tuple[int, ...]) -> list[dict[str, Any]] | None:
        path = self.result_path(batch_size)
        try:
            load_trace(path)
            records = json.loads(path.read_text(encoding="utf-8"))[str(batch_size)]
        except (TraceError, KeyError):
            return None
        if {record["power_limit"] for record in records} != set(limits):
            return None
        return list(records)

    # -- notes for a repair ------------------------------------------------------------------

    @property
    def note_path(self) -> Path:
        """Where the driver writes the power limit to put back."""
        return self.path / "restore.json"

    def write_note(self, previous: PreviousLimit, gpus: GPUs) -> None:
        """Say what to put back if this process is killed.

        The note is in the folder, which may be all that outlives a container; a link in
        `restore.note_folder` leads other runs on this machine to it.
        """
        link = note_folder() / f"limits-{os.getpid()}-folder.json"
        try:
            write_note(self.note_path, [previous], gpus)
        except OSError as error:
            raise ProfilingError(f"{self.note_path}: cannot be written ({error}).") from None
        with suppress(OSError):  # Some file systems know no links; the note itself is there.
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(self.note_path.absolute())

    def delete_notes(self) -> None:
        """Everything is put back."""
        self.note_path.unlink(missing_ok=True)
        for link in note_folder().glob("limits-*-folder.json"):
            if link.is_symlink() and not link.exists():
                link.unlink(missing_ok=True)

    def repair(self) -> tuple[PreviousLimit, ...]:
        """Put back what the notes of a killed run say.

        Raises:
            DeviceError: that run is still going, or the GPU is not this one.
            PowerLimitPermissionError: this process may not set power limits.
        """
        if not self.note_path.exists():
            return ()
        if not read_note(self.note_path).is_of_this_boot:
            # After a power cut the driver starts with its default limit.
            self.note_path.unlink()
            return ()
        restored = restore_from_note(self.note_path)
        # The child has left one of its own, with the same limit.
        repair_from_notes(gpus=[entry.gpu for entry in restored])
        self.delete_notes()
        return restored

    # -- inside ------------------------------------------------------------------------------

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError(f"it is a {type(content).__name__}")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ProfilingError(
                f"{path}: cannot be read ({error}); expected JSON written by a profile. "
                "Choose another folder, or --overwrite."
            ) from None
        return content

    def _write(self, name: str, text: str) -> None:
        try:
            write_text_atomically(self.path / name, text)
            # The rename itself survives a power cut only once the folder is on disk.
            folder = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise ProfilingError(
                f"{self.path / name}: cannot be written ({error}). Batch sizes that are finished "
                "are kept; make room and run the same command again."
            ) from None

    def _check_no_foreign_files(self) -> None:
        if not self.path.exists():
            return
        # What a run leaves that was killed while it began.
        foreign = sorted(
            path.name
            for path in self.path.iterdir()
            if not path.name.startswith(".") and path != self.note_path
        )
        if foreign:
            raise ProfilingError(
                f"{self.path}: holds {', '.join(foreign[:5])}{', ...' if foreign[5:] else ''} but "
                "no profile; expected an empty or new folder. Choose another name."
            )

    def _delete_results(self) -> None:
        """Delete what a profile wrote, and nothing else."""
        for pattern in (_TRACE, _SETTINGS, _NO_MEMORY, "batch_*.json", "batch_*.log"):
            for path in self.path.glob(pattern):
                path.unlink()


def delete_notes_of(pid: int) -> None:
    """Delete the notes of a process that is gone and whose power limits are put back."""
    for path in note_folder().glob(f"limits-{pid}-*.json"):
        path.unlink(missing_ok=True)


def _check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    different = [
        f"{name} is {now.get(name)!r}, there it is {before.get(name)!r}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    if different:
        raise ProfilingError(
            f"{path}: holds a profile with other settings: {'; '.join(different)}. Choose another "
            "folder, the same settings, or --overwrite."
        )


def _check_writable(path: Path) -> None:
    # The nearest folder that exists is where the first file or folder will be made.
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ProfilingError(f"{path}: not writable ({existing} is not); choose another folder.")
