"""The energy counter of a simulated GPU, which moves in ticks like NVML's."""

from __future__ import annotations

import math


class EnergyCounter:
    """Adds up the power that a GPU draws over time.

    Args:
        period: s between two movements; 0 for a counter that moves continuously.
        start: s on the clock at which it begins.
        idle_power: W, drawn whenever nothing else is said.

    Attributes:
        value: J, as of the last movement.
        power: W, drawn last.
    """

    def __init__(self, period: float, start: float, idle_power: float) -> None:
        self.value = 0.0
        self.power = idle_power
        self._period = period
        self._idle_power = idle_power
        self._energy = 0.0
        self._until = start

    def idle(self, until: float) -> None:
        """Draw idle power until a moment, s; moments that were accounted for do not count."""
        self.draw(until, self._idle_power)

    def draw(self, until: float, power: float) -> None:
        """Draw a power (W) until a moment, s."""
        start = self._until
        if until <= start:
            return
        # A nanosecond's grace, so that no movement is lost to rounding.
        tick = math.floor(until / self._period + 1e-9) * self._period if self._period else until
        if tick > start:
            self.value = self._energy + power * (min(tick, until) - start)
        self._energy += power * (until - start)
        self._until = until
        self.power = power

    def reset(self) -> None:
        """Start from zero again."""
        self._energy = self.value = 0.0
