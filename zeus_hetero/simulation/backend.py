"""The simulated GPUs of a process, put in the place of Zeus's."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import zeus.device.gpu
from zeus.device.gpu.common import GPUs

from zeus_hetero.errors import SimulationError
from zeus_hetero.restore import NOTE_FOLDER_VARIABLE
from zeus_hetero.simulation.clock import VirtualClock, ZeusPatches
from zeus_hetero.simulation.environment import (
    ANNOUNCED,
    SIMULATE,
    STATE,
    simulated_gpu,
    to_json,
)
from zeus_hetero.simulation.gpu import SimulatedGPU

_installed: list[SimulatedGPUs] = []


class SimulatedGPUs(GPUs):
    """The simulated GPUs of this process, in the form in which Zeus sees GPUs.

    Args:
        gpus: in the order of their numbers.
        state: folder that keeps their power limits between processes.
    """

    def __init__(self, gpus: Sequence[SimulatedGPU], state: Path | None = None) -> None:
        self._disable_sys_admin_warning = True  # Zeus 0.12 asks here.
        self.state = state
        self.clock = VirtualClock()
        self._gpus = list(gpus)
        for index, gpu in enumerate(self._gpus):
            gpu.attach(self.clock, index, state)

    def __del__(self) -> None:
        """Nothing to shut down."""

    @property
    def gpus(self) -> Sequence[SimulatedGPU]:
        """The GPUs by number."""
        return self._gpus

    def __getitem__(self, index: int) -> SimulatedGPU:
        return self._gpus[index]

    def __iter__(self) -> Iterator[SimulatedGPU]:
        return iter(self._gpus)

    def run_steps(self, batch_sizes: Sequence[int]) -> float:
        """Run a step on all GPUs at once; who finishes early waits for the last.

        Args:
            batch_sizes: samples per GPU; 0 to wait all the time.

        Returns:
            Time until the last has finished, s.
        """
        if len(batch_sizes) != len(self):
            raise SimulationError(
                f"{len(batch_sizes)} batch sizes for {len(self)} simulated GPUs; expected one each."
            )
        plans = [gpu.plan_step(size) for gpu, size in zip(self, batch_sizes)]
        start = self.clock.now
        makespan = max(duration for duration, _ in plans)
        for gpu, (duration, energy) in zip(self, plans):
            if duration > 0:
                gpu.draw(start + duration, energy / duration)
            gpu.draw(start + makespan, gpu.wait_power)
            gpu.finish_step()
        self.clock.advance_to(start + makespan)
        return makespan

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass while every GPU idles."""
        self.clock.advance_to(self.clock.now + seconds)

    # Zeus 0.12 to 0.15 forward fewer calls than newer versions.

    def get_power_management_limit(self, gpu_index: int) -> int:
        """The power limit in force, mW."""
        return self._gpus[gpu_index].get_power_management_limit()

    def get_persistence_mode(self, gpu_index: int) -> bool:
        """Whether persistence mode is on."""
        return self._gpus[gpu_index].get_persistence_mode()

    def getAveragePowerUsage(self, gpu_index: int) -> int:  # noqa: N802
        """What a GPU draws, mW."""
        return self._gpus[gpu_index].get_average_power_usage()

    def getGpuTemperature(self, gpu_index: int) -> int:  # noqa: N802
        """Temperature of a GPU, degrees Celsius."""
        return self._gpus[gpu_index].get_gpu_temperature()


class Simulation:
    """GPUs that are going to be simulated: for a ``with`` block or, by `install`, for good.

    Args:
        gpus: the GPUs, in the order of their numbers.
    """

    def __init__(self, gpus: Sequence[SimulatedGPU]) -> None:
        if not gpus:
            raise SimulationError("no GPU to simulate; expected names such as 'A10', 'T4'.")
        if len({id(gpu) for gpu in gpus}) < len(gpus):
            raise SimulationError("the same SimulatedGPU twice; make one object per GPU.")
        self._gpus = list(gpus)
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> SimulatedGPUs:
        return self.install()

    def __exit__(self, *error: object) -> None:
        self.uninstall()

    def install(self) -> SimulatedGPUs:
        """Put the GPUs in the place of Zeus's, until `uninstall` or the end of the process.

        Returns:
            The GPUs, with their clock.
        """
        with contextlib.ExitStack() as undo:
            state = self._state_folder(undo)
            gpus = SimulatedGPUs(self._gpus, state)
            _set_variable(undo, SIMULATE, to_json(self._gpus))
            _set_variable(undo, STATE, str(state))
            # Notes of power limits to put back belong to these GPUs, not to the machine's.
            _set_variable(undo, NOTE_FOLDER_VARIABLE, str(state))
            undo.callback(ZeusPatches(gpus.clock).undo)
            undo.callback(setattr, zeus.device.gpu, "_gpus", zeus.device.gpu._gpus)
            zeus.device.gpu._gpus = gpus
            undo.callback(_installed.remove, gpus)
            _installed.append(gpus)
            # An optimizer of Zeus that was made meanwhile sets a limit when the process ends.
            undo.callback(atexit.register, _lend_to_exit_hooks, gpus)
            _announce(self._gpus)
            self._undo = undo.pop_all()
        return gpus

    def uninstall(self) -> None:
        """Put back what was there before."""
        self._undo.close()

    def _state_folder(self, undo: contextlib.ExitStack) -> Path:
        given = os.environ.get(STATE)
        if given:
            Path(given).mkdir(parents=True, exist_ok=True)
            return Path(given)
        if "LOCAL_RANK" in os.environ:
            return _folder_of_launcher()
        folder = Path(tempfile.mkdtemp(prefix="zeus-hetero-simulation-"))
        owner = os.getpid()

        def remove() -> None:
            if os.getpid() == owner:  # Not a forked data loader.
                shutil.rmtree(folder, ignore_errors=True)

        atexit.register(remove)
        undo.callback(remove)
        return folder


def use(*gpus: str | SimulatedGPU, workload: str = "cifar100") -> Simulation:
    """Simulate GPUs.

    Args:
        *gpus: names of bundled GPUs (``A10``, ``T4``), paths of trace files, or `SimulatedGPU`s.
        workload: which bundled trace a name stands for, ``cifar100`` or ``imagenet``.

    Returns:
        For use in a ``with`` block, or call its `install`.

    Raises:
        SimulationError: unknown name, or no GPU at all.
    """
    return Simulation(
        [gpu if isinstance(gpu, SimulatedGPU) else simulated_gpu(gpu, workload) for gpu in gpus]
    )


def active() -> SimulatedGPUs | None:
    """The simulated GPUs of this process, or None where GPUs are real."""
    return _installed[-1] if _installed else None


def _folder_of_launcher() -> Path:
    """One folder for all ranks that torchrun has started on this node, also after restarts.

    No rank knows when the last one is done, so folders of launchers that are gone are removed by
    the next job.
    """
    prefix = "zeus-hetero-simulation-of-"
    home = Path(tempfile.gettempdir())
    for other in home.glob(f"{prefix}*"):
        pid = other.name[len(prefix) :]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(other, ignore_errors=True)
    folder = home / f"{prefix}{os.getppid()}"
    folder.mkdir(exist_ok=True)
    return folder


def _set_variable(undo: contextlib.ExitStack, name: str, value: str) -> None:
    before = os.environ.get(name)

    def restore() -> None:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before

    undo.callback(restore)
    os.environ[name] = value


def _lend_to_exit_hooks(gpus: SimulatedGPUs) -> None:
    """At exit, stand in once more for the hooks that were registered in this `with` block."""
    now = zeus.device.gpu._gpus
    ended = isinstance(now, SimulatedGPUs) and now not in _installed
    if now is None or ended:
        for gpu in gpus:
            gpu.attach(gpus.clock, gpu.gpu_index)
        zeus.device.gpu._gpus = gpus


def _announce(gpus: Sequence[SimulatedGPU]) -> None:
    """Say it once per process tree and node, not once per rank and per child."""
    if os.environ.get(ANNOUNCED) or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    os.environ[ANNOUNCED] = "1"
    names = ", ".join(f"{gpu.name} ({gpu.trace.workload or gpu.trace.source})" for gpu in gpus)
    print(
        f"zeus-hetero: SIMULATED GPUs: {names}. Times and energies are played back from traces; "
        "nothing is measured.",
        file=sys.stderr,
        flush=True,
    )
