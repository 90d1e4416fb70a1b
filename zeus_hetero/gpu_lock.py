"""One profiler per GPU: a lock that the kernel releases when its holder dies.

The lock file also carries a note: which power limit was in force before the profiler changed it.
A holder that ends in order deletes the note; one that was killed leaves it for the next holder,
or for `zeus-hetero reset`, to put the limit back.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeus.device import get_gpus

from zeus_hetero.errors import GPUBusyError

LOCK_FOLDER = "ZEUS_HETERO_LOCK_FOLDER"
"""Environment variable with another folder than /tmp/zeus-hetero, where all users may write."""


PATIENCE = 3.0
"""s to wait for a holder that is just about to die: a child whose driver was killed."""


class GPULock:
    """Exclusive use of one GPU by a profiler, from `acquire` to `release`.

    Args:
        path: the lock file, made if it is not there.
        what: what is locked, for messages.

    Attributes:
        found: the note that an earlier holder left because it was killed; None otherwise.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self.found: dict[str, Any] | None = None
        self._what = what
        self._file: int | None = None

    def acquire(self) -> None:
        """Take the lock, waiting `PATIENCE` at most.

        Raises:
            GPUBusyError: another process holds it, or the file cannot be opened.
        """
        try:
            _make_shared_folder(self.path.parent)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise GPUBusyError(
                f"{self._what}: lock file {self.path} cannot be opened ({error}). Set "
                f"{LOCK_FOLDER} to a folder where all users of this GPU may write."
            ) from None
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = _read(file)
                    os.close(file)
                    raise GPUBusyError(
                        f"{self._what} is in use by another profiler, process "
                        f"{holder.get('pid', '?')} ({holder.get('owner', 'just starting')}); two "
                        "on one GPU would measure each other. Wait until it has finished, or "
                        f"choose another GPU and folder. (Lock file: {self.path})"
                    ) from None
                time.sleep(0.05)
        self._file = file
        self.found = _read(file).get("note")

    def write(self, owner: str, note: Mapping[str, Any] | None) -> None:
        """Say who holds the lock, and what has to be put back if the holder is killed."""
        assert self._file is not None, "acquire() comes first"
        _write(self._file, {"pid": os.getpid(), "owner": owner, "note": note})

    def release(self, *, keep_note: bool = False) -> None:
        """Give the lock back; the file stays, empty unless the note is still of use."""
        if self._file is not None:
            if not keep_note:
                _write(self._file, {})
            os.close(self._file)
            self._file = None

    def fileno(self) -> int:
        """The descriptor, for a child process that is to hold the lock too."""
        assert self._file is not None, "acquire() comes first"
        return self._file


def gpu_lock(gpu_index: int, name: str) -> GPULock:
    """The lock of one of this process's GPUs.

    Args:
        gpu_index: its number for Zeus, which is that for CUDA.
        name: of its model, for messages.
    """
    # Zeus's `gpu_index` of the GPU object counts all cards of the machine, whatever
    # CUDA_VISIBLE_DEVICES says.
    number = get_gpus().gpus[gpu_index].gpu_index
    return GPULock(lock_folder() / f"gpu-{number}.lock", f"GPU {gpu_index} ({name})")


def lock_folder() -> Path:
    """Where the lock files of this machine's GPUs are."""
    from zeus_hetero import simulation

    simulated = simulation.active()
    if simulated is not None and simulated.state is not None:
        return simulated.state
    return Path(os.environ.get(LOCK_FOLDER) or "/tmp/zeus-hetero")


def _make_shared_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        # Every user of the GPUs takes part, so all may write; the sticky bit is left out
        # because Linux then forbids root to open another user's lock file.
        folder.chmod(0o777)


def _read(file: int) -> dict[str, Any]:
    try:
        content = json.loads(os.pread(file, 1 << 16, 0) or b"{}")
    except ValueError:  # Written by half when its holder was killed, or not ours.
        return {}
    return content if isinstance(content, dict) else {}


def _write(file: int, content: Mapping[str, Any]) -> None:
    text = json.dumps(content).encode()
    # Padded rather than truncated first: no moment at which a killed holder leaves no note.
    old = os.fstat(file).st_size
    os.pwrite(file, text.ljust(old), 0)
    os.ftruncate(file, len(text))
    os.fsync(file)
