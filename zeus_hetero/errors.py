"""The exceptions and warnings of zeus_hetero: few, and each also a builtin type."""

from __future__ import annotations


class ZeusHeteroError(Exception):
    """Base of everything that this package raises on purpose."""


class TraceError(ZeusHeteroError, ValueError):
    """A trace is missing, unreadable, or says something impossible."""


class AllocationError(ZeusHeteroError, ValueError):
    """An allocation problem is ill-posed: unknown name, bad figure, too large to enumerate."""


class InfeasibleError(AllocationError):
    """No allocation satisfies the constraints.

    Attributes:
        constraint: name of the constraint that cannot hold.
        nearest: the nearest value of it that could, or None where there is none.
    """

    def __init__(self, message: str, *, constraint: str, nearest: float | None = None) -> None:
        super().__init__(message)
        self.constraint = constraint
        self.nearest = nearest


class PlanError(ZeusHeteroError, ValueError):
    """A plan file is missing, of another version, or contradicts itself."""


class SimulationError(ZeusHeteroError, ValueError):
    """A simulated GPU is unknown, or was given impossible figures."""


class ProfilingError(ZeusHeteroError, RuntimeError):
    """A GPU cannot be profiled as asked, or its figures make no sense."""


class GPUBusyError(ProfilingError):
    """Another profiler is using the GPU or the folder."""


class TraceWarning(UserWarning):
    """A trace is usable, but something in it was repaired, dropped or looks wrong."""


class PowerLimitError(ZeusHeteroError, ValueError):
    """A power limit is outside the GPU's range, repeated, of no GPU here, or no whole number."""


class PowerLimitPermissionError(ZeusHeteroError, RuntimeError):
    """This process may not set power limits."""


class DeviceError(ZeusHeteroError, RuntimeError):
    """The GPUs are not there, or cannot be told apart safely."""


class PowerLimitWarning(UserWarning):
    """Power limits were set or measured, but something needs the user's attention."""


class TrainingError(ZeusHeteroError, RuntimeError):
    """A training job is set up so that it would compute the wrong thing, hang or run out of memory.

    Raised on every rank with the same text where the ranks have compared notes.
    """
