"""What one global step costs.

Both objectives split into a part that each GPU adds by itself and a price on the slowest GPU's
time; that shape is all that a solver needs to know::

    cost = sum_i separable_cost(i) + makespan_price * max_i t_i + constant
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

import numpy as np


@dataclass(frozen=True)
class StepFigures:
    """A global step: time in s, energy in J over all GPUs, and cost by the objective."""

    time: float
    energy: float
    cost: float


@dataclass(frozen=True)
class Synchronous:
    """Data-parallel training in which every GPU waits for the slowest.

    ``T = max_i t_i + sync_time``, ``E = sum_i (e_i + w_i (T - t_i))`` and
    ``cost = energy_price * E + sum_i time_prices_i * T``, sums over the GPUs in the job.

    With ``energy_price = eta`` and ``time_prices_i = (1 - eta) * (maximum power limit of i)`` this
    is Zeus's cost (You et al., "Zeus: Understanding and Optimizing GPU Energy Consumption of DNN
    Training", NSDI 2023, eq. 2) carried over to different GPUs: ``P_max`` is the sum of their
    maximum power limits. With a price of a J and of a GPU's s it is money, with grams of CO2 per J
    it is carbon: one formula.

    Attributes:
        energy_price: cost per J.
        time_prices: cost per s of the step for each GPU, in the order of the GPUs.
        wait_power: W that each GPU draws while it waits.
        sync_time: s per step in which gradients are exchanged and no GPU computes.
        release_idle: whether a GPU without samples is not in the job and costs nothing; else it
            waits through the step as every other does.
        unit: of the cost.
    """

    energy_price: float
    time_prices: tuple[float, ...]
    wait_power: tuple[float, ...]
    sync_time: float = 0.0
    release_idle: bool = False
    unit: str = "J"

    name = "synchronous"
    min_share = 0

    def presence_price(self, gpu: int) -> float:
        """Cost per s of the slowest GPU's time for having one GPU in the job."""
        return self.time_prices[gpu] + self.energy_price * self.wait_power[gpu]

    @property
    def makespan_price(self) -> float:
        """Cost per s by which the slowest GPU's time grows, for GPUs that are there anyway."""
        if self.release_idle:
            return 0.0
        return sum(self.presence_price(gpu) for gpu in range(len(self.wait_power)))

    @property
    def constant(self) -> float:
        """Cost that no choice changes: waiting while gradients are exchanged."""
        return self.makespan_price * self.sync_time

    def separable_cost(
        self, gpu: int, time: np.ndarray, energy: np.ndarray, power_limit: np.ndarray
    ) -> np.ndarray:
        """Cost that one GPU adds by itself; its busy time is time in which it does not wait.

        Args:
            gpu: its index in `wait_power`.
            time: busy time, s.
            energy: energy while busy, J, in the shape of `time`.
            power_limit: W, in a shape that broadcasts; not needed here.

        Returns:
            Cost, in the shape of `time`; negative where computing draws less than waiting.
        """
        del power_limit
        return self.energy_price * (energy - self.wait_power[gpu] * time)

    def step(
        self, times: Sequence[float], energies: Sequence[float], power_limits: Sequence[float]
    ) -> StepFigures:
        """Figures of a global step, from each GPU's busy time (s), energy (J) and limit (W)."""
        del power_limits
        step_time = max(times) + self.sync_time
        there = [gpu for gpu, t in enumerate(times) if t > 0 or not self.release_idle]
        waiting = sum(self.wait_power[gpu] * (step_time - times[gpu]) for gpu in there)
        step_energy = sum(energies) + waiting
        time_price = sum(self.time_prices[gpu] for gpu in there)
        cost = self.energy_price * step_energy + time_price * step_time
        return StepFigures(step_time, step_energy, cost)


@dataclass(frozen=True)
class Independent:
    """The original Zeus-squared objective: GPUs that train by themselves and never wait.

    ``cost = sum_i (eta * average_power_i + (1 - eta) * power_limit_i) * t_i``, and each GPU gets
    at least one sample.

    Attributes:
        eta: weight of energy against time.
    """

    eta: float

    name = "independent"
    min_share = 1
    makespan_price = 0.0
    constant = 0.0
    release_idle = False
    sync_time = 0.0
    unit = "J"

    def separable_cost(
        self, gpu: int, time: np.ndarray, energy: np.ndarray, power_limit: np.ndarray
    ) -> np.ndarray:
        """Cost that one GPU adds by itself; arguments as for `Synchronous`."""
        del gpu
        return self.eta * energy + (1 - self.eta) * power_limit * time

    def step(
        self, times: Sequence[float], energies: Sequence[float], power_limits: Sequence[float]
    ) -> StepFigures:
        """Figures of a step; its time is that of the GPU that finishes last."""
        cost = sum(
            self.eta * e + (1 - self.eta) * p * t for t, e, p in zip(times, energies, power_limits)
        )
        return StepFigures(max(times), sum(energies), cost)


Objective = Union[Synchronous, Independent]
