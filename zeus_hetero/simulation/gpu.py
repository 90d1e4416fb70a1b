"""One simulated GPU: a trace played back through Zeus's device interface."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from zeus.device.gpu.common import (
    GPU,
    ZeusGPUInvalidArgError,
    ZeusGPULostError,
    ZeusGPUNoPermissionError,
    ZeusGPUNotSupportedError,
)

from zeus_hetero.errors import SimulationError
from zeus_hetero.gpu_model import fit
from zeus_hetero.simulation.clock import VirtualClock
from zeus_hetero.simulation.counter import EnergyCounter
from zeus_hetero.simulation.faults import (
    CounterReset,
    Fault,
    LimitRejected,
    Lost,
    NoPermission,
    OutOfMemory,
    SlowCounter,
    ThermalSlowdown,
    out_of_memory_error,
)
from zeus_hetero.simulation.state import DeviceState
from zeus_hetero.trace import Trace

_F = TypeVar("_F")


class SimulatedGPU(GPU):
    """A GPU that takes the time and the energy of a trace, on a virtual clock.

    At a profiled point a step takes exactly what the trace says; between points what the
    ``interpolated`` model says, linearly between power limits. What the GPU draws while it
    idles and waits is not in a trace, so it is assumed.

    Args:
        name: name of the GPU model, as `get_name` gives it.
        trace: its ground truth.
        power_range: smallest and largest power limit in W; those of the trace by default.
        idle_power: W while it has nothing to do.
        wait_power: W while it waits for other GPUs in a collective operation.
        largest_batch: samples of the largest step that fits into its memory; None for any.
        faults: what goes wrong with it.
        noise: standard deviation of a measurement relative to the truth, such as 0.03. Drawn
            anew for time and energy whenever the energy counter is read, because noise that
            changed from step to step would vanish in a window of many steps; it depends on
            nothing but the seed, the batch size, the power limit and the number of the reading.
        seed: of the noise.
        counter_period: s between two movements of the energy counter; 0 for a continuous one.
            NVML's moves every 0.02 to 0.1 s.

    Raises:
        SimulationError: a figure is impossible.
    """

    def __init__(
        self,
        name: str,
        trace: Trace,
        power_range: tuple[int, int] | None = None,
        *,
        idle_power: float = 10.0,
        wait_power: float = 25.0,
        largest_batch: int | None = None,
        faults: Sequence[Fault] = (),
        noise: float = 0.0,
        seed: int = 0,
        counter_period: float = 0.1,
    ) -> None:
        super().__init__(0)
        self.name = name
        self.trace = trace
        self.power_range = power_range or (min(trace.power_limits), max(trace.power_limits))
        self.idle_power = idle_power
        self.wait_power = wait_power
        self.largest_batch = largest_batch
        self.faults = tuple(faults)
        self.noise = noise
        self.seed = seed
        self.counter_period = counter_period
        self._check()
        self._disable_sys_admin_warning = True  # Zeus asks the process, not the GPU.
        self._model = fit(trace)
        self._measured = {
            (int(b), int(p)): (float(t), float(e))
            for b, p, t, e in zip(trace.batch_size, trace.power_limit, trace.time, trace.energy)
        }
        self.attach(VirtualClock(), 0)

    def attach(self, clock: VirtualClock, index: int, state: Path | None = None) -> None:
        """Put the GPU into a process's set of GPUs: a new start with an empty counter.

        Args:
            clock: the clock of the process.
            index: its number in the process.
            state: folder that keeps what a real GPU keeps when a process ends (power limit,
                persistence mode), shared by all processes that are given the same folder.
        """
        self.gpu_index = index
        self._clock = clock
        self._state = DeviceState(
            state / f"gpu{index}.json" if state else None, self.power_range[1] * 1000
        )
        slow = self._fault(SlowCounter)
        self._counter = EnergyCounter(
            slow.period if slow else self.counter_period, clock.now, self.idle_power
        )
        self._steps = 0
        self._batch_size = 0
        self._readings: Counter[tuple[int, int]] = Counter()
        self._lost = False

    @property
    def clock(self) -> float:
        """Seconds on the process's virtual clock."""
        return self._clock.now

    @property
    def steps(self) -> int:
        """Steps that the GPU has run in this process."""
        return self._steps

    @property
    def power_limit(self) -> float:
        """The power limit in force, W."""
        return self._state.power_limit / 1000

    # -- running ---------------------------------------------------------------------------

    def run_step(self, batch_size: int) -> float:
        """Run a training step; the other GPUs of the process idle meanwhile.

        Args:
            batch_size: samples; 0 takes no time.

        Returns:
            What it took on the virtual clock, s.

        Raises:
            torch.cuda.OutOfMemoryError: it does not fit (another RuntimeError without torch).
            ZeusGPULostError: the GPU is lost.
        """
        duration, energy = self.plan_step(batch_size)
        if duration > 0:
            end = self.clock + duration
            self.draw(end, energy / duration)
            self._clock.advance_to(end)
        self.finish_step()
        return duration

    def wait_until(self, moment: float) -> None:
        """Let the clock reach a moment (s) while the GPU waits for others, as in an all-reduce."""
        if moment > self.clock:
            self.draw(moment, self.wait_power)
            self._clock.advance_to(moment)

    def plan_step(self, batch_size: int) -> tuple[float, float]:
        """Time (s) and energy (J) of the next step, after the faults that keep it from running."""
        if batch_size < 0:
            raise SimulationError(f"{self}: batch size is {batch_size}; expected at least 0.")
        lost = self._fault(Lost)
        self._lost = self._lost or (lost is not None and self._steps + 1 >= lost.at_step)
        self._check_present()
        memory = self._fault(OutOfMemory)
        largest = [memory.above] if memory else []
        largest += [self.largest_batch] if self.largest_batch else []
        if largest and batch_size > min(largest):
            raise out_of_memory_error(
                f"{self}: CUDA out of memory (simulated): a step of {batch_size} samples; "
                f"at most {min(largest)} fit."
            )
        self._batch_size = batch_size
        duration, energy = self._truth(batch_size, self.power_limit)
        hot = self._fault(ThermalSlowdown)
        if hot and self.clock >= hot.after:
            duration *= hot.slowdown
        slower, hungrier = self._noise_factors()
        return duration * slower, energy * hungrier

    def finish_step(self) -> None:
        """Count a step that ran."""
        self._steps += 1
        reset = self._fault(CounterReset)
        if reset and self._steps == reset.at_step:
            self._counter.reset()

    def draw(self, until: float, power: float) -> None:
        """Take a power (W) from now until a moment (s)."""
        self._counter.idle(self.clock)  # Since its last work it had nothing to do.
        self._counter.draw(until, power)

    def _truth(self, batch_size: int, limit: float) -> tuple[float, float]:
        """Time (s) and energy (J) of a step without faults and noise."""
        known = self._model.power_limits[::-1]
        at = np.array([self._profiled(batch_size, p) for p in known])
        duration, energy = (float(np.interp(limit, known, figure)) for figure in at.T)
        return duration, energy

    def _profiled(self, batch_size: int, limit: int) -> tuple[float, float]:
        """The same at a profiled power limit."""
        if (batch_size, limit) in self._measured:
            return self._measured[batch_size, limit]
        model = self._model
        return float(model.time(batch_size, limit)), float(model.energy(batch_size, limit))

    def _noise_factors(self) -> tuple[float, float]:
        if not self.noise:
            return 1.0, 1.0
        limit = self._state.power_limit
        reading = self._readings[self._batch_size, limit]
        # Seeded by text: the same in every process and Python version.
        drawn = random.Random(f"{self.seed} {self.name} {self._batch_size} {limit} {reading}")
        slower, hungrier = (max(1.0 + self.noise * drawn.gauss(0, 1), 0.1) for _ in range(2))
        return slower, hungrier

    # -- Zeus's device interface: mW, mJ -----------------------------------------------------

    @property
    def supports_nonblocking_setters(self) -> bool:
        """Setters return when they are done."""
        return False

    def get_name(self) -> str:
        """Name of the GPU model."""
        self._check_present()
        return self.name

    def get_power_management_limit_constraints(self) -> tuple[int, int]:
        """Smallest and largest power limit, mW."""
        self._check_present()
        return self.power_range[0] * 1000, self.power_range[1] * 1000

    def get_power_management_limit(self) -> int:
        """The power limit in force, mW."""
        self._check_present()
        return self._state.power_limit

    def set_power_management_limit(
        self, power_limit_mw: int, block: bool = True, _block: bool = True
    ) -> None:
        """Set the power limit, mW."""
        self._check_present()
        self._check_permission()
        if self._state.power_limit == power_limit_mw:
            return
        low, high = (limit * 1000 for limit in self.power_range)
        if not low <= power_limit_mw <= high:
            raise ZeusGPUInvalidArgError(
                f"{self}: power limit {power_limit_mw} mW; supported are {low} to {high} mW."
            )
        rejected = self._fault(LimitRejected)
        if rejected and power_limit_mw != high:
            listed = rejected.power_limits
            if not listed or power_limit_mw / 1000 in listed:
                raise ZeusGPUInvalidArgError(
                    f"{self}: the driver rejected the power limit {power_limit_mw} mW (simulated)."
                )
        self._state.power_limit = power_limit_mw

    def reset_power_management_limit(self, block: bool = True, _block: bool = True) -> None:
        """Set the power limit to the default, the largest."""
        self.set_power_management_limit(self.power_range[1] * 1000)

    def set_persistence_mode(self, enabled: bool, block: bool = True, _block: bool = True) -> None:
        """Turn persistence mode on or off."""
        self._check_present()
        if self._state.persistence != enabled:
            self._check_permission()
            self._state.persistence = enabled

    def get_persistence_mode(self) -> bool:
        """Whether persistence mode is on."""
        self._check_present()
        return self._state.persistence

    def get_instant_power_usage(self) -> int:
        """What it drew last, mW."""
        self._check_present()
        self._counter.idle(self.clock)
        return round(self._counter.power * 1000)

    def get_average_power_usage(self) -> int:
        """The same as `get_instant_power_usage`."""
        return self.get_instant_power_usage()

    def supports_get_total_energy_consumption(self) -> bool:
        """There is an energy counter."""
        self._check_present()
        return True

    def get_total_energy_consumption(self) -> int:
        """The energy counter, mJ, as of its last movement."""
        self._check_present()
        self._counter.idle(self.clock)
        self._readings[self._batch_size, self._state.power_limit] += 1
        return round(self._counter.value * 1000)

    def get_gpu_temperature(self) -> int:
        """Made up from the power it draws, degrees Celsius."""
        self._check_present()
        hot = self._fault(ThermalSlowdown)
        if hot and self.clock >= hot.after:
            return 95
        return round(30 + 50 * self._counter.power / self.power_range[1])

    def get_average_memory_power_usage(self) -> int:
        """Not simulated."""
        raise self._not_simulated("memory power")

    def get_supported_memory_clocks(self) -> list[int]:
        """Not simulated."""
        raise self._not_simulated("memory clocks")

    def set_memory_locked_clocks(
        self, min_clock_mhz: int, max_clock_mhz: int, block: bool = True, _block: bool = True
    ) -> None:
        """Not simulated."""
        raise self._not_simulated("memory clocks")

    def reset_memory_locked_clocks(self, block: bool = True, _block: bool = True) -> None:
        """Not simulated."""
        raise self._not_simulated("memory clocks")

    def get_supported_graphics_clocks(self, memory_clock_mhz: int | None = None) -> list[int]:
        """Not simulated."""
        raise self._not_simulated("graphics clocks")

    def set_gpu_locked_clocks(
        self, min_clock_mhz: int, max_clock_mhz: int, block: bool = True, _block: bool = True
    ) -> None:
        """Not simulated."""
        raise self._not_simulated("graphics clocks")

    def reset_gpu_locked_clocks(self, block: bool = True, _block: bool = True) -> None:
        """Not simulated."""
        raise self._not_simulated("graphics clocks")

    # The names of Zeus 0.12, which newer versions keep as deprecated aliases.
    getName = get_name  # noqa: N815
    getPowerManagementLimitConstraints = get_power_management_limit_constraints  # noqa: N815
    setPowerManagementLimit = set_power_management_limit  # noqa: N815
    resetPowerManagementLimit = reset_power_management_limit  # noqa: N815
    setPersistenceMode = set_persistence_mode  # noqa: N815
    getSupportedMemoryClocks = get_supported_memory_clocks  # noqa: N815
    setMemoryLockedClocks = set_memory_locked_clocks  # noqa: N815
    resetMemoryLockedClocks = reset_memory_locked_clocks  # noqa: N815
    getSupportedGraphicsClocks = get_supported_graphics_clocks  # noqa: N815
    setGpuLockedClocks = set_gpu_locked_clocks  # noqa: N815
    resetGpuLockedClocks = reset_gpu_locked_clocks  # noqa: N815
    getAveragePowerUsage = get_average_power_usage  # noqa: N815
    getInstantPowerUsage = get_instant_power_usage  # noqa: N815
    getAverageMemoryPowerUsage = get_average_memory_power_usage  # noqa: N815
    supportsGetTotalEnergyConsumption = supports_get_total_energy_consumption  # noqa: N815
    getTotalEnergyConsumption = get_total_energy_consumption  # noqa: N815
    getGpuTemperature = get_gpu_temperature  # noqa: N815

    # -- inside ------------------------------------------------------------------------------

    def __str__(self) -> str:
        return f"simulated GPU {self.gpu_index} ({self.name})"

    def __repr__(self) -> str:
        low, high = self.power_range
        return f"SimulatedGPU({self.name!r}, {low}-{high} W, {self.trace})"

    def _check(self) -> None:
        if self.trace.relative:
            raise SimulationError(
                f"{self.name}: {self.trace.source} is in relative units; expected seconds and "
                "joules. Load the trace with dataset_size=..."
            )
        low, high = self.power_range
        if not 0 < low <= high or int(low) != low or int(high) != high:
            raise SimulationError(
                f"{self.name}: power_range is {self.power_range}; expected (smallest, largest) "
                "in whole W."
            )
        for name in ("idle_power", "wait_power", "noise", "counter_period"):
            value = getattr(self, name)
            if not value >= 0 or not math.isfinite(value):
                raise SimulationError(f"{self.name}: {name} is {value}; expected at least 0.")
        if self.largest_batch is not None and self.largest_batch < 1:
            raise SimulationError(
                f"{self.name}: largest_batch is {self.largest_batch}; expected at least 1."
            )

    def _fault(self, kind: type[_F]) -> _F | None:
        return next((fault for fault in self.faults if isinstance(fault, kind)), None)

    def _check_present(self) -> None:
        if self._lost:
            raise ZeusGPULostError(f"{self}: GPU is lost (simulated).")

    def _check_permission(self) -> None:
        if self._fault(NoPermission):
            raise ZeusGPUNoPermissionError(f"{self}: insufficient permissions (simulated).")

    def _not_simulated(self, what: str) -> Exception:
        return ZeusGPUNotSupportedError(f"{self}: {what}: not simulated.")
