"""A process that outlives ours and puts power limits back if ours ends without doing so.

For SIGKILL, an abort in C++ code and `os._exit`, after which no exit hook runs. It sleeps without
having loaded anything but this file.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

_POLL_SECONDS = 0.2


def start(note: Path) -> subprocess.Popen[bytes] | None:
    """Guard this process.

    Args:
        note: the file with the power limits to put back; who restores them removes it.

    Returns:
        The guard; None if no process can be started, which leaves the limits to the next run.
    """
    # Not -m, which would search the working directory before the installed packages.
    code = (
        f"import sys; sys.path[0] = {str(Path(__file__).resolve().parent.parent)!r}; "
        "from zeus_hetero import guard; sys.exit(guard.main())"
    )
    try:
        return subprocess.Popen(
            [sys.executable, "-c", code, str(os.getpid()), str(note.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # Neither Ctrl-C nor a launcher that kills its workers' process groups shall hit it.
            start_new_session=True,
        )
    except OSError:
        return None


def stop(guard: subprocess.Popen[bytes]) -> None:
    """End a guard that is not needed any more."""
    guard.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        guard.wait(timeout=5)


def main() -> int:
    """Wait until the parent process is gone, then restore what its note still says."""
    owner, note = int(sys.argv[1]), Path(sys.argv[2])
    while os.getppid() == owner:
        time.sleep(_POLL_SECONDS)
    if not note.exists():
        return 0
    from zeus_hetero import simulation
    from zeus_hetero.restore import restore_from_note

    try:
        simulation.install_from_environment()
        restored = restore_from_note(note)
    except Exception as error:
        if not note.exists():
            return 0  # The next run was faster.
        print(
            f"zeus-hetero: process {owner} ended and left power limits changed: {error} Put them "
            "back with: zeus-hetero reset",
            file=sys.stderr,
        )
        return 1
    for entry in restored:
        print(
            f"zeus-hetero: GPU {entry.gpu} ({entry.name}): power limit put back to "
            f"{entry.limit / 1000:g} W, which process {owner} had left changed.",
            file=sys.stderr,
        )
    return 0
