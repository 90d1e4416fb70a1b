"""Metrics over ranks with different numbers of samples: sums and counts, never means of means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor


class Mean:
    """The mean of a figure over the samples of all ranks.

        accuracy = Mean()
        for step in loader:
            for inputs, targets in step.micro_batches():
                accuracy.update(correct(model(inputs), targets), len(targets))
        print(accuracy.compute())

    Args:
        group: the ranks; the default group if None, and this process alone without one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.reset()

    def reset(self) -> None:
        """Forget what was added."""
        self._sum: Any = 0.0
        self._samples = 0

    def update(self, mean: float | Tensor, samples: int) -> None:
        """Add a micro-batch.

        Args:
            mean: of the figure over its samples. A tensor stays on its device until `compute`.
            samples: how many; 0 adds nothing, whatever the mean (of nothing it is NaN).
        """
        if samples:
            value = mean.detach().double() if isinstance(mean, torch.Tensor) else float(mean)
            self._sum = self._sum + value * samples
            self._samples += samples

    def compute(self) -> float:
        """The mean over all ranks: every rank has to call it. NaN if nothing was added."""
        total, samples = add_up([float(self._sum), float(self._samples)], self._group)
        return total / samples if samples else float("nan")


def add_up(figures: list[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Sums over all ranks, in float64; every rank has to call it.

    Args:
        figures: this rank's.
        group: the ranks; the default group if None, and this process alone without one.
    """
    return [sum(column) for column in zip(*from_all_ranks(figures, group))]


def from_all_ranks(
    figures: list[float], group: dist.ProcessGroup | None = None
) -> list[list[float]]:
    """Every rank's figures, in the order of the ranks, in float64; every rank has to call it.

    Args:
        figures: this rank's, as many as everybody's.
        group: the ranks; the default group if None, and this process alone without one.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [figures]
    on_gpu = dist.get_backend(group) == "nccl"
    mine = torch.tensor(figures, dtype=torch.float64, device="cuda" if on_gpu else "cpu")
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, mine, group=group)
    return [figures.tolist() for figures in everybody]
