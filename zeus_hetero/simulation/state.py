"""What a GPU keeps when a process ends: its power limit and its persistence mode."""

from __future__ import annotations

import json
from pathlib import Path


class DeviceState:
    """Settings of one GPU, in a file that several processes share, or in memory.

    Args:
        path: the file; None to keep them in memory.
        power_limit: mW, in force until another is set.
    """

    def __init__(self, path: Path | None, power_limit: int) -> None:
        self._path = path
        self._settings = (power_limit, False)

    @property
    def power_limit(self) -> int:
        """The power limit in force, mW."""
        return self._load()[0]

    @power_limit.setter
    def power_limit(self, value: int) -> None:
        self._save(value, self.persistence)

    @property
    def persistence(self) -> bool:
        """Whether persistence mode is on."""
        return self._load()[1]

    @persistence.setter
    def persistence(self, value: bool) -> None:
        self._save(self.power_limit, value)

    def _load(self) -> tuple[int, bool]:
        if self._path is not None and self._path.exists():
            limit, persistence = json.loads(self._path.read_text(encoding="utf-8"))
            self._settings = int(limit), bool(persistence)
        return self._settings

    def _save(self, power_limit: int, persistence: bool) -> None:
        self._settings = power_limit, persistence
        if self._path is not None:
            # Renamed into place, because other processes read it at any moment.
            fresh = self._path.with_suffix(".new")
            fresh.write_text(json.dumps(self._settings), encoding="utf-8")
            fresh.replace(self._path)
