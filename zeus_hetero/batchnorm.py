"""BatchNorm on ranks with different shares.

BatchNorm normalises each micro-batch by itself, so its gradient is not that of the whole global
batch, on equal GPUs or on different ones. What can be made right is its running statistics: by
default DistributedDataParallel copies those of rank 0, which saw one share only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

if TYPE_CHECKING:
    from torch.nn import Module


def sync_batchnorm(model: Module, samples: float, group: dist.ProcessGroup | None = None) -> None:
    """Combine the running statistics of all ranks, weighted by their samples.

    Call it on every rank before evaluating or saving, with DistributedDataParallel's own copying
    of buffers off (`Job.wrap` sees to it). Means are averaged; variances too, plus the variance
    between the ranks' means (law of total variance).

    Args:
        model: in DistributedDataParallel or not.
        samples: this rank's weight, such as its share or the samples that it has seen.
        group: the ranks; the default group if None.
    """
    layers: list[Any] = [
        layer
        for layer in model.modules()
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None
    ]
    if not layers or not (dist.is_available() and dist.is_initialized()):
        return
    means = torch.cat([layer.running_mean for layer in layers]).double()
    variances = torch.cat([layer.running_var for layer in layers]).double()
    weight = torch.tensor([float(samples)], dtype=torch.float64, device=means.device)
    sums = torch.cat([weight, weight * means, weight * (variances + means**2)])
    dist.all_reduce(sums, group=group)
    counts = torch.stack([layer.num_batches_tracked for layer in layers])
    dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=group)
    mean, square = (sums[1:] / sums[0]).chunk(2)
    variance = (square - mean**2).clamp(min=0)
    start = 0
    for layer, count in zip(layers, counts):
        here = slice(start, start + layer.num_features)
        layer.running_mean.copy_(mean[here])
        layer.running_var.copy_(variance[here])
        layer.num_batches_tracked.copy_(count)
        start = here.stop


def scale_batchnorm_momentum(model: Module, micro_batches: int) -> None:
    """Make k micro-batches move the running statistics as far as one batch would.

    A rank that cuts its share into k updates them k times per step. With momentum
    1 - (1 - m)^(1/k) instead of m, old statistics keep the weight 1 - m per step on every rank.

    Args:
        model: changed in place.
        micro_batches: k, this worker's `accumulation_steps`.
    """
    for layer in model.modules():
        if isinstance(layer, _BatchNorm) and layer.momentum is not None and micro_batches > 1:
            layer.momentum = 1 - (1 - layer.momentum) ** (1 / micro_batches)
