"""Try the largest micro-batch on every rank before the first exchange between ranks."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from zeus_hetero import simulation
from zeus_hetero.errors import TrainingError
from zeus_hetero.handshake import gather
from zeus_hetero.job import out_of_memory_advice
from zeus_hetero.profiling import is_out_of_memory

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from zeus_hetero.job import Job

# Adam and its kin keep two tensors per parameter, which they allocate in their first step.
_OPTIMIZER_TENSORS = 2
# The first step on a GPU may compile kernels; and GPUs differ.
_PATIENCE_SECONDS = 600.0


def preflight(
    job: Job,
    model: Module,
    loss: Callable[[Module, Any], Tensor],
    make_batch: Callable[[], Any],
    size: int,
) -> None:
    """Run a micro-batch once and undo its traces; every rank has to call it.

    Args:
        job: the ranks.
        model: as it will be trained.
        loss: of a network and a batch.
        make_batch: gives a batch of `size` samples.
        size: of this rank's largest micro-batch; 0 if it never gets a sample.

    Raises:
        TrainingError: on every rank, with what each failing rank says.
    """
    problem = None
    if size:
        try:
            with _without_traces(model) as network:
                _try(job, network, loss, make_batch, size)
        except Exception as error:
            problem = _explain(job, size, error)
    problems = (
        [problem]
        if job.group is None
        else gather(problem, job.group, max(job.timeout, _PATIENCE_SECONDS))
    )
    found = [
        f"rank {rank} ({job.allocation.workers[rank].gpu}): {text}"
        for rank, text in enumerate(problems)
        if text is not None
    ]
    if found:
        raise TrainingError("the plan cannot be trained. " + " ".join(found))


def _try(
    job: Job,
    network: Module,
    loss: Callable[[Module, Any], Tensor],
    make_batch: Callable[[], Any],
    size: int,
) -> None:
    simulated = simulation.active()
    if simulated is not None and job.gpu_index is not None:
        simulated[job.gpu_index].plan_step(size)  # Complains if it does not fit; no time passes.
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    reserved = [torch.empty_like(p) for p in parameters for _ in range(_OPTIMIZER_TENSORS)]
    loss(network, make_batch()).backward()  # type: ignore[no-untyped-call]
    if job.device.type == "cuda":
        torch.cuda.synchronize()
    del reserved


@contextlib.contextmanager
def _without_traces(model: Module) -> Iterator[Module]:
    """The network itself, outside DistributedDataParallel; afterwards all is as before."""
    wrapper: Any = getattr(model, "_orig_mod", model)
    network: Module = wrapper.module if hasattr(wrapper, "no_sync") else wrapper
    buffers = [(buffer, buffer.detach().clone()) for buffer in network.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in network.parameters()]
    # Layers that exchange statistics would wait for ranks that failed.
    silent = [
        part
        for part in network.modules()
        if isinstance(part, torch.nn.SyncBatchNorm) and part.training
    ]
    numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            for part in silent:
                part.eval()
            for parameter, _ in gradients:
                parameter.grad = None
            yield network
        finally:
            for part in silent:
                part.train()
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            random.setstate(numbers[0])
            np.random.set_state(numbers[1])


def _explain(job: Job, size: int, error: Exception) -> str:
    if is_out_of_memory(error):
        return out_of_memory_advice(job, size, error)
    return f"a micro-batch of {size} samples fails: {type(error).__name__}: {error}"
