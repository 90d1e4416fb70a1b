"""One profiler per GPU: a lock that the kernel releases when its holder dies."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeus_hetero.errors import GPUBusyError
from zeus_hetero.profiled_gpu import ProfiledGPU

LOCK_FOLDER = "ZEUS_HETERO_LOCK_FOLDER"
"""Environment variable with another folder than /tmp/zeus-hetero, where all users may write."""


PATIENCE = 3.0
"""s to wait for a holder that is just about to die: a child whose driver was killed."""


class GPULock:
    """Exclusive use of one GPU by a profiler, from `acquire` to `release`.

    Args:
        path: the lock file, made if it is not there.
        what: what is locked, for messages.
        owner: who locks it, for the messages of others.
    """

    def __init__(self, path: Path, what: str, owner: str) -> None:
        self.path = path
        self._what = what
        self._owner = owner
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
        self._write({"pid": os.getpid(), "owner": self._owner})

    def release(self) -> None:
        """Give the lock back; the file stays, empty."""
        if self._file is not None:
            self._write({})
            os.close(self._file)
            self._file = None

    def _write(self, content: Mapping[str, Any]) -> None:
        assert self._file is not None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(content).encode(), 0)

    def fileno(self) -> int:
        """The descriptor, for a child process that is to hold the lock too."""
        assert self._file is not None, "acquire() comes first"
        return self._file


def gpu_lock(gpu: ProfiledGPU, owner: str) -> GPULock:
    """The lock of a GPU, the same for all processes that see it, by whatever number."""
    return GPULock(lock_folder() / f"gpu-{gpu.number}.lock", str(gpu), owner)


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
