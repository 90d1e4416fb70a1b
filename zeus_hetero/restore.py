"""Put power limits back to what they were, whatever ends the process.

A `Restorer` does it while the process can still act. What it cannot act on (SIGKILL, the end of
the container) is left to a note: a small file with the previous limits, removed after a restore,
from which the process's guard, the next run or `restore_from_note` repairs.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from zeus_hetero import devices, guard
from zeus_hetero.errors import DeviceError
from zeus_hetero.trace import write_text_atomically

if TYPE_CHECKING:
    from zeus.device.gpu.common import GPUs

logger = logging.getLogger(__name__)

NOTE_FORMAT = "zeus-hetero previous power limits"
NOTE_FOLDER_VARIABLE = "ZEUS_HETERO_NOTES"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class PreviousLimit:
    """What a GPU's power limit was before we came.

    Attributes:
        gpu: the driver's number of the GPU, whatever CUDA_VISIBLE_DEVICES says.
        name: the GPU model's name, checked before anything is written back.
        limit: mW, because it must return exactly as it was.
    """

    gpu: int
    name: str
    limit: int


@dataclass(frozen=True)
class Note:
    """Previous limits on disk, and who owes their return.

    Attributes:
        limits: one entry per GPU.
        pid: the process that changed them.
        started: when that process started, in the kernel's ticks since boot; a pid alone may
            by now be another program's. None where the system does not say.
        boot: the machine's boot, which containers on it share. Elsewhere the pid means nothing,
            and a restart has reset the limits.
        backend: the class of Zeus's device layer, so that a simulated GPU's limit is never
            written to a real one.
    """

    limits: tuple[PreviousLimit, ...]
    pid: int
    started: int | None
    boot: str
    backend: str

    @property
    def is_of_this_boot(self) -> bool:
        """Whether the machine is the same and has not been restarted since."""
        return self.boot == _boot()

    @property
    def owner_is_alive(self) -> bool:
        """Whether the process that changed the limits still runs and will restore them itself."""
        if not self.is_of_this_boot:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # somebody else's process: it runs
        return _start_time(self.pid) == self.started


def note_folder() -> Path:
    """Where notes lie unless a run is given a place: per user, gone after a reboot like limits.

    The environment variable ZEUS_HETERO_NOTES moves it, for instance onto a volume that
    outlives the container.
    """
    chosen = os.environ.get(NOTE_FOLDER_VARIABLE)
    if chosen:
        return Path(chosen)
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"zeus-hetero-{user}"


def write_note(path: str | os.PathLike[str], limits: Sequence[PreviousLimit], gpus: GPUs) -> None:
    """Write down previous limits in this process's name, before they are changed."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    note = Note(
        limits=tuple(limits),
        pid=os.getpid(),
        started=_start_time(os.getpid()),
        boot=_boot(),
        backend=_backend(gpus),
    )
    write_text_atomically(
        target, json.dumps({"format": NOTE_FORMAT, **asdict(note)}, indent=2) + "\n"
    )


def read_note(path: str | os.PathLike[str]) -> Note:
    """Read what `write_note` wrote.

    Raises:
        DeviceError: the file is missing or is no note.
    """
    where = Path(path)
    try:
        record = json.loads(where.read_text(encoding="utf-8"))
        if record["format"] != NOTE_FORMAT:
            raise ValueError(f"format is {record['format']!r}")
        return Note(
            limits=tuple(
                PreviousLimit(int(entry["gpu"]), str(entry["name"]), int(entry["limit"]))
                for entry in record["limits"]
            ),
            pid=int(record["pid"]),
            started=None if record["started"] is None else int(record["started"]),
            boot=str(record["boot"]),
            backend=str(record["backend"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DeviceError(
            f"{where}: no note of previous power limits ({error!r}); expected a file that a "
            "profiling or training run left behind."
        ) from None


def restore_from_note(
    path: str | os.PathLike[str], *, force: bool = False
) -> tuple[PreviousLimit, ...]:
    """Put back the limits of a run that could not do so itself, then remove its note.

    Args:
        path: the note.
        force: restore even if the process that wrote the note still runs, or if the note is of
            another machine or from before a restart.

    Returns:
        the limits that were put back.

    Raises:
        DeviceError: no such note, its process still runs, or its GPUs are not (all) visible
            here. The note is kept.
        PowerLimitPermissionError: this process may not set power limits. The note is kept.
    """
    with _alone_with(path):
        return _restore_from_note(path, force)


def _restore_from_note(path: str | os.PathLike[str], force: bool) -> tuple[PreviousLimit, ...]:
    note = read_note(path)
    if not note.is_of_this_boot and not force:
        raise DeviceError(
            f"{path}: this note is of another machine, or from before a restart, which resets "
            "power limits. If the GPU is not as it should be, use force, else delete the note."
        )
    if note.owner_is_alive and not force:
        raise DeviceError(
            f"{path}: process {note.pid}, which changed these power limits, still runs and will "
            "restore them when it ends. Stop it first."
        )
    gpus = devices.get_gpus()
    if note.backend != _backend(gpus):
        raise DeviceError(
            f"{path}: these limits are of {note.backend}, but here are {_backend(gpus)}; a "
            "simulated GPU's limit is not for a real one, nor the other way round."
        )
    here = {devices.physical_index(gpus, i): i for i in range(len(gpus.gpus))}
    for entry in note.limits:
        found = devices.name(gpus, here[entry.gpu]) if entry.gpu in here else "not visible"
        if found != entry.name:
            raise DeviceError(
                f"{path}: GPU {entry.gpu} was {entry.name} and is {found} here. Run this where "
                "the GPU is, with CUDA_VISIBLE_DEVICES unset."
            )
    for entry in note.limits:
        devices.set_limit_mw(gpus, here[entry.gpu], entry.limit)
    # A note in a profile folder has a link here: both have done their duty.
    Path(path).resolve().unlink(missing_ok=True)
    Path(path).unlink(missing_ok=True)
    return note.limits


@contextlib.contextmanager
def _alone_with(path: str | os.PathLike[str]) -> Iterator[None]:
    """Keep others from restoring from the same note, who could undo what is set afterwards."""
    with contextlib.ExitStack() as stack:
        # Without locks (some network file systems) or without the file there is nobody to wait for.
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(path))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def repair_from_notes(
    folder: str | os.PathLike[str] | None = None, *, gpus: Iterable[int] | None = None
) -> tuple[PreviousLimit, ...]:
    """Restore from the notes in a folder whose process is gone; note by note, best effort.

    Args:
        folder: where to look; `note_folder()` if None.
        gpus: the driver's numbers of the GPUs to care for; all if None. Ranks that start
            together each repair their own, or one would undo what another has just set.

    Returns:
        the limits that were put back.
    """
    wanted = None if gpus is None else set(gpus)
    restored: list[PreviousLimit] = []
    for path in sorted(Path(folder or note_folder()).glob("limits-*.json")):
        try:
            note = read_note(path)
            ours = wanted is None or any(entry.gpu in wanted for entry in note.limits)
            if ours and note.is_of_this_boot and not note.owner_is_alive:
                restored += restore_from_note(path)
        except Exception as error:
            if path.exists():  # Otherwise another process was faster.
                logger.warning("Power limits were not restored from %s: %s", path, error)
    return tuple(restored)


class Restorer:
    """Remembers the power limits of some GPUs and puts them back, once.

    At normal exit, after an uncaught exception, on SIGINT and SIGTERM (then the handler that
    was there before runs, or the signal's default), or when `restore` is called. Never in a
    forked child, which inherits all of this but owns nothing.

    A user's handler that lets the program go on after the signal finds the limits restored.

    Args:
        gpus: Zeus's GPUs.
        indices: which of them.
        note: where to write the previous limits down; in `note_folder()` if None.
        guarded: start a process that restores them from the note if this one is killed.

    Attributes:
        note: the file with the previous limits, or None if none could be written.
    """

    def __init__(
        self,
        gpus: GPUs,
        indices: Sequence[int],
        note: str | os.PathLike[str] | None = None,
        *,
        guarded: bool = False,
    ) -> None:
        self._gpus = gpus
        self._pid = os.getpid()
        self._previous: dict[int, int] = {}
        for index in indices:
            limit = devices.read_limit_mw(gpus, index)
            if limit is None:
                logger.warning("GPU %d: its power limit cannot be read nor restored.", index)
            else:
                self._previous[index] = limit
        self.restored = False
        self.note = self._leave_note(note)
        self._guard: subprocess.Popen[bytes] | None = None
        if guarded and self.note is not None:
            self._guard = guard.start(self.note)
        self._handlers: dict[int, Any] = {}
        self.arm()

    @property
    def previous(self) -> dict[int, int]:
        """The limits that are still to be restored: GPU index -> mW."""
        return dict(self._previous)

    @property
    def is_active(self) -> bool:
        """Whether this process still owes the limits' return."""
        return not self.restored and os.getpid() == self._pid

    def arm(self) -> None:
        """Hook into exit and signals; again, to come before exit hooks registered since."""
        atexit.unregister(self.restore)
        atexit.register(self.restore)
        if self._handlers or threading.current_thread() is not threading.main_thread():
            return  # Python sets handlers from the main thread only
        for number in _SIGNALS:
            before = signal.getsignal(number)
            # Ignored signals do not end the process; None is a handler set by C code, which
            # cannot be called back.
            if before is signal.SIG_IGN or before is None:
                continue
            self._handlers[number] = before
            signal.signal(number, self._on_signal)

    def restore(self) -> None:
        """Put the limits back; does nothing the second time and in a forked child.

        Best effort: at exit the driver may be gone already, and one GPU that fails must not
        keep the others from being restored. The note stays if any did fail.
        """
        if not self.is_active:
            return
        for index, limit in list(self._previous.items()):
            try:
                # Removed after it was set: a signal in between may run this loop once more.
                devices.set_limit_mw(self._gpus, index, limit)
                self._previous.pop(index, None)
            except Exception as error:
                logger.error(
                    "GPU %d: its power limit could not be restored to %g W (%s). "
                    "Set it with: nvidia-smi -i %d -pl %g",
                    *(index, limit / 1000, error),
                    *(devices.physical_index(self._gpus, index), limit / 1000),
                )
        self.restored = True
        if self.note is not None and not self._previous:
            self.note.unlink(missing_ok=True)
            # Where a limit is still owed, the guard tries once more when this process is gone.
            if self._guard is not None:
                guard.stop(self._guard)
        self._disarm()

    def _disarm(self) -> None:
        atexit.unregister(self.restore)
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._handlers.items():
            # Somebody may have chained to ours since; then it stays and only passes signals on.
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        before = self._handlers[number]
        self.restore()
        if callable(before):
            before(number, frame)
            return
        # The default action ends the process with a status that names the signal.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _leave_note(self, note: str | os.PathLike[str] | None) -> Path | None:
        if not self._previous:
            return None
        # One file per restorer: a process may have several after one another.
        path = Path(note) if note else note_folder() / f"limits-{os.getpid()}-{id(self):x}.json"
        limits = [
            PreviousLimit(
                devices.physical_index(self._gpus, index), devices.name(self._gpus, index), limit
            )
            for index, limit in self._previous.items()
        ]
        try:
            write_note(path, limits, self._gpus)
        except OSError as error:
            logger.warning(
                "%s: cannot be written (%s); if this process is killed by SIGKILL, nothing "
                "remembers the previous power limits. Set %s to a writable folder.",
                *(path, error, NOTE_FOLDER_VARIABLE),
            )
            return None
        return path


def _backend(gpus: GPUs) -> str:
    return f"{type(gpus).__module__}.{type(gpus).__qualname__}"


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot (field 22 of its stat file).

    None if it does not run.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    # A zombie has ended, though nobody has taken note: common where a container has no init.
    return None if fields[0] == "Z" else int(fields[19])
