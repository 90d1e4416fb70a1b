"""A training job: this process's place in it, its GPU, and an orderly end for all ranks."""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import zeus_hetero
from zeus_hetero import devices, simulation
from zeus_hetero.allocation import Allocation, Worker
from zeus_hetero.device_order import check_device_order
from zeus_hetero.errors import DeviceError, TrainingError, ZeusHeteroError
from zeus_hetero.handshake import TIMEOUT, Introduction, assign, introduce, plan_fingerprint
from zeus_hetero.profiling import is_out_of_memory
from zeus_hetero.simulation.step_clock import SimulatedStepClock
from zeus_hetero.step_clock import StepClock

if TYPE_CHECKING:
    from torch.nn import Module

# Longer than torchrun's agent needs to notice a dead worker (it looks every 0.1 s).
_GRACE_SECONDS = 3.0


class Job:
    """One rank of a training job; made by `join`.

        with zeus_hetero.join("plan.json") as job:
            model = job.wrap(model)
            loader = HeteroDataLoader(dataset, allocation=job)
            ...

    As a context manager it ends the job in order: when a rank fails, the others wait a moment
    before they complain of a lost connection, so that the launcher shows the real reason.

    Attributes:
        allocation: the plan, its workers in the order of the ranks.
        rank: this process's, over all nodes.
        world_size: number of ranks.
        gpu_index: Zeus's index of this process's GPU; None without one (a CPU in a test).
        gpu_name: its model.
        device: where torch trains; the CPU if GPUs are simulated.
        group: gloo group of all ranks for control messages; None if there is one rank only.
        timeout: s to wait for other ranks in them.
    """

    def __init__(
        self,
        allocation: Allocation,
        *,
        rank: int = 0,
        gpu_index: int | None = None,
        gpu_name: str = "",
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
        timeout: float = TIMEOUT,
        owns_process_group: bool = False,
    ) -> None:
        ranks = None if group is None else dist.get_world_size(group)
        if ranks is not None and ranks != len(allocation.workers):
            raise TrainingError(
                f"the plan has {len(allocation.workers)} workers, but there are {ranks} ranks."
            )
        self.allocation = allocation
        self.rank = rank
        self.gpu_index = gpu_index
        self.gpu_name = gpu_name or allocation.workers[rank].gpu
        self.device = device or torch.device("cpu")
        self.group = group
        self.timeout = timeout
        self._owns_process_group = owns_process_group

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.allocation.workers)

    @property
    def worker(self) -> Worker:
        """This rank's entry of the plan."""
        return self.allocation.workers[self.rank]

    def wrap(self, model: Module, **options: Any) -> Module:
        """Put a model on this rank's device and into DistributedDataParallel.

        Copying of rank 0's buffers is off unless asked for, because they know one share only; see
        `sync_batchnorm`.

        Args:
            model: the network.
            **options: of DistributedDataParallel.

        Returns:
            The wrapped model; the model itself where there is one rank only.
        """
        model = model.to(self.device)
        if self.group is None:
            return model
        if self.device.type == "cuda":
            options.setdefault("device_ids", [self.device.index])
        if not {"broadcast_buffers", "forward_sync_buffers"} & options.keys():
            options[_buffers_option()] = False
        return torch.nn.parallel.DistributedDataParallel(model, **options)

    def step_clock(self) -> StepClock:
        """The clock for this rank's training steps: virtual if its GPU is simulated."""
        simulated = simulation.active()
        if simulated is None or self.gpu_index is None:
            return StepClock(self.device)
        gpu = simulated[self.gpu_index]
        return SimulatedStepClock(gpu, self.group, self.allocation.sync_time)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            self._end_in_order(error)
        self.close()

    def close(self) -> None:
        """Leave the process group, if `join` made it."""
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()
            self._owns_process_group = False

    def _end_in_order(self, error: Exception) -> None:
        if not is_lost_connection(error):
            text = str(error)
            if is_out_of_memory(error):
                text = out_of_memory_advice(self, self.worker.micro_batch_size, error)
            elif not isinstance(error, ZeusHeteroError):
                text = f"{type(error).__name__}: {error}"
            self._say(text)
            return
        self._say("lost the connection to another rank; see that rank's error.")
        time.sleep(_GRACE_SECONDS)

    def _say(self, text: str) -> None:
        # In one piece, because all ranks write to the same terminal.
        who = f"rank {self.rank} ({self.gpu_name} on {socket.gethostname()})"
        sys.stderr.write(f"{who}: {text}\n")
        sys.stderr.flush()


def join(
    plan: Allocation | str | os.PathLike[str],
    *,
    backend: str | None = None,
    gpu_index: int | None = None,
    timeout: float = TIMEOUT,
) -> Job:
    """Take this process's place in a training job that torchrun has started.

    All ranks compare their GPUs, plans and versions over a gloo group; each gets the plan's entry
    for its GPU model. Whatever does not fit is one error, the same on every rank.

    Args:
        plan: the plan or its file.
        backend: of torch's process group, if the script has not made one: ``nccl`` on CUDA, else
            ``gloo``.
        gpu_index: this process's GPU; LOCAL_RANK if None.
        timeout: s to wait for the other ranks in control messages.

    Returns:
        This rank's job.

    Raises:
        PlanError: the plan is unreadable, or does not fit these ranks and GPUs.
        DeviceError: there is no GPU, and none is simulated.
        TrainingError: a rank could not take part, or did not answer in time.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    index = local_rank if gpu_index is None else gpu_index
    alone = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) == 1
    try:
        allocation = plan if isinstance(plan, Allocation) else Allocation.load(plan)
        device, mine = _introduce_myself(allocation, index, local_rank)
    except (ZeusHeteroError, OSError) as error:
        if alone:
            raise
        _first_group(backend or "gloo", timeout)
        mine = Introduction(socket.gethostname(), local_rank, error=str(error))
        introduce(mine, _control_group(timeout), timeout)
        raise
    if alone:
        return Job(assign(allocation, [mine]), gpu_index=index, gpu_name=mine.gpu, device=device)
    owns = _first_group(backend or ("nccl" if device.type == "cuda" else "gloo"), timeout)
    group = _control_group(timeout)
    ranks = introduce(mine, group, timeout)
    rank = dist.get_rank()
    assigned = assign(allocation, ranks)
    return Job(
        assigned,
        rank=rank,
        gpu_index=index,
        gpu_name=mine.gpu,
        device=device,
        group=group,
        timeout=timeout,
        owns_process_group=owns,
    )


def out_of_memory_advice(job: Job, size: int, error: Exception) -> str:
    """What to tell the user whose GPU has too little memory.

    Args:
        job: the rank.
        size: samples of the micro-batch, at most.
        error: torch's.
    """
    worker, half = job.worker, max(size // 2, 1)
    said = str(error).partition("\n")[0]
    return (
        f"out of memory in a micro-batch of {size} samples (share {worker.batch_size}, "
        f"{worker.accumulation_steps} micro-batches) on {worker.gpu} ({said}). "
        f"Cut its share into more micro-batches with --max_micro_batch {worker.gpu}={half} "
        "(max_micro_batch_size of the loader), or plan again with "
        f"--max-batch-size {worker.gpu}={worker.batch_size // 2}."
    )


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    if isinstance(error, TrainingError):
        return "not all ranks answer" in str(error)
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    signs = ("connection reset", "connection closed", "connection refused", "broken pipe",
             "timed out waiting", "socket closed", "remote process exited")  # fmt: skip
    return any(sign in text for sign in signs)


def _introduce_myself(
    allocation: Allocation, index: int, local_rank: int
) -> tuple[torch.device, Introduction]:
    simulated = simulation.active()
    if simulated is None and not torch.cuda.is_available():
        raise DeviceError(
            "torch finds no CUDA GPU to train on. Check nvidia-smi and torch.version.cuda, or "
            "simulate GPUs: --simulate A10,T4 in the examples, zeus_hetero.simulation.use in "
            "your own script."
        )
    host = socket.gethostname()
    gpus = devices.get_gpus()
    if index >= len(gpus):
        raise DeviceError(
            f"local rank {index} has no GPU: Zeus sees {len(gpus)}. Start at most that many "
            "processes on this node (torchrun --nproc_per_node)."
        )
    gpu_id = f"{host}, simulated GPU {index} of process group {os.environ.get('GROUP_RANK', '0')}"
    device = torch.device("cpu")
    if simulated is None:
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        check_device_order(gpus, [index])
        properties = torch.cuda.get_device_properties(device)
        gpu_id = str(getattr(properties, "uuid", f"{host}, GPU {index}"))
    return device, Introduction(
        host=host,
        local_rank=local_rank,
        gpu=devices.name(gpus, index),
        gpu_id=gpu_id,
        power_range=devices.limit_range(gpus, index),
        plan=plan_fingerprint(allocation),
        versions={
            "zeus-hetero": zeus_hetero.__version__,
            "torch": str(torch.__version__).partition("+")[0],
        },
    )


def _first_group(backend: str, timeout: float) -> bool:
    """Make the default process group unless the script has; returns whether it did."""
    if dist.is_initialized():
        return False
    if "RANK" not in os.environ:
        raise TrainingError(
            "this process has no RANK; start the script with torchrun --nproc_per_node N."
        )
    dist.init_process_group(backend, timeout=timedelta(seconds=max(timeout, 600.0)))
    return True


def _control_group(timeout: float) -> dist.ProcessGroup:
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    return group  # type: ignore[no-any-return]


def _buffers_option() -> str:
    import inspect

    parameters = inspect.signature(torch.nn.parallel.DistributedDataParallel.__init__).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"
