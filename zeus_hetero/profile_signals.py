"""SIGINT and SIGTERM as an exception that never comes in the middle of cleaning up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Interrupted(BaseException):
    """SIGINT or SIGTERM came; like KeyboardInterrupt no error that code should handle.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """Turns SIGINT and SIGTERM into `Interrupted`, but not in the middle of cleaning up."""

    def __init__(self) -> None:
        self._depth = 0
        self._pending: int | None = None

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catch them in this block, if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Hold them back until the end of this block."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._pending is not None and not self._depth:
            number, self._pending = self._pending, None
            raise Interrupted(number)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._depth:
            self._pending = number
        else:
            raise Interrupted(number)


signals = Signals()
