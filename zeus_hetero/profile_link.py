"""How a training script that profiles talks to the driver that started it, and misses it."""

from __future__ import annotations

import json
import os
import select
from dataclasses import asdict, dataclass
from pathlib import Path

from zeus_hetero.errors import ProfilingError
from zeus_hetero.measure import Idle

PROFILER = "ZEUS_HETERO_PROFILER"
"""Environment variable by which the driver tells a training script that it runs for it."""


@dataclass(frozen=True)
class Progress:
    """A window that was just measured.

    Attributes:
        batch_size: samples.
        power_limit: W.
        done: windows measured so far.
        total: windows to measure.
        time: s per step.
        energy: J per step.
    """

    batch_size: int
    power_limit: int
    done: int
    total: int
    time: float
    energy: float


class Driver:
    """The driver, seen from the script: it holds the GPU's lock and knows the idle power.

    Args:
        pipe: the named pipe that it reads.
        idle: measured by it.

    Raises:
        ProfilingError: it is gone.
    """

    def __init__(self, pipe: str, idle: Idle) -> None:
        self.idle = idle
        try:
            # By name, not by number: a launcher in between may close what it does not know.
            self._pipe = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            raise ProfilingError(f"the profiler that started this is gone ({error}).") from None
        self._alive = select.poll()
        self._alive.register(self._pipe, 0)

    @classmethod
    def from_environment(cls) -> Driver | None:
        """The driver of this process; None where it was started by hand."""
        text = os.environ.get(PROFILER)
        if not text:
            return None
        values = json.loads(text)
        return cls(values["pipe"], Idle(**values["idle"]))

    def report(self, progress: Progress) -> None:
        """Tell it about a window."""
        os.write(self._pipe, (json.dumps(asdict(progress)) + "\n").encode())

    def check(self) -> None:
        """End with the driver: nobody would collect the result.

        Raises:
            ProfilingError: it is gone.
        """
        if self._alive.poll(0):  # A pipe that nobody reads any more reports an error.
            raise ProfilingError("the profiler that started this is gone.")


class Listener:
    """The driver's end of the pipe; a context manager.

    Args:
        path: the named pipe to make, in the place of one that a killed driver left.
        idle: told to the script.
    """

    def __init__(self, path: Path, idle: Idle) -> None:
        self._path = path
        self._idle = idle
        self._pending = b""

    def __enter__(self) -> Listener:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)
        os.mkfifo(self._path, 0o600)
        # For writing too, or the pipe would report its end whenever no script has it open.
        self._pipe = os.open(self._path, os.O_RDWR | os.O_NONBLOCK)
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._pipe)
        self._path.unlink(missing_ok=True)

    def environment(self) -> dict[str, str]:
        """What the script's environment must have."""
        link = {"pipe": str(self._path), "idle": asdict(self._idle)}
        return {PROFILER: json.dumps(link)}

    def receive(self, seconds: float) -> list[Progress] | None:
        """Wait for reports.

        Args:
            seconds: at most.

        Returns:
            The reports that came; None if nothing came.
        """
        ready, _, _ = select.select([self._pipe], [], [], seconds)
        if not ready:
            return None
        *lines, self._pending = (self._pending + os.read(self._pipe, 1 << 16)).split(b"\n")
        return [Progress(**json.loads(line)) for line in lines]
