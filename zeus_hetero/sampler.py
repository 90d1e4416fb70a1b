"""The uneven batch sampler: this rank's slices of the global batches, for a data loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from zeus_hetero.errors import PlanError
from zeus_hetero.schedule import Schedule

STATE_VERSION = 1


class HeteroBatchSampler(Sampler):
    """Yields the indices of one micro-batch after the other, for ``batch_sampler=``.

    Its position counts samples of the epoch over all ranks, so its state also fits another plan
    and another number of ranks. Read the position from the loader, which walks the schedule beside
    its iterator: a sampler runs ahead of the batches that have arrived.

    Args:
        schedule: who trains on what.
        rank: whose slices.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule = schedule
        self.rank = rank
        self.epoch = 0
        self.position = 0

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        """Choose what the next iteration yields.

        Args:
            epoch: number of the epoch; it decides the order of the samples.
            position: samples of the epoch that were used before, over all ranks.
        """
        self.epoch = epoch
        self.position = position

    def __len__(self) -> int:
        """Micro-batches of this rank that are left in the epoch."""
        return sum(len(sizes) for sizes in self.sizes())

    def sizes(self) -> Iterator[tuple[int, ...]]:
        """Samples of this rank's micro-batches, step by step; empty if a step gives it none."""
        for batch_size in self.schedule.batch_sizes(self.position):
            yield self.schedule.micro_batches(self.schedule.split(batch_size), self.rank)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.schedule.permutation(self.epoch)
        start = self.position
        for batch_size in self.schedule.batch_sizes(self.position):
            sizes = self.schedule.split(batch_size)
            here = start + sum(sizes[: self.rank])
            for size in self.schedule.micro_batches(sizes, self.rank):
                yield order[here : here + size].tolist()
                here += size
            start += batch_size

    def state_dict(self) -> dict[str, Any]:
        """Where it stands; the same on every rank."""
        return state(self.schedule, self.epoch, self.position)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where another sampler stood, perhaps with other shares or ranks.

        Raises:
            PlanError: that was another data set or another order of samples.
        """
        self.set_epoch(*position_in(saved, self.schedule))


def state(schedule: Schedule, epoch: int, position: int) -> dict[str, Any]:
    """A position in the training, as it is saved in checkpoints."""
    return {
        "version": STATE_VERSION,
        "epoch": epoch,
        "position": position,
        "dataset_size": schedule.dataset_size,
        "seed": schedule.seed,
        "shuffle": schedule.shuffle,
    }


def position_in(saved: dict[str, Any], schedule: Schedule) -> tuple[int, int]:
    """Epoch and position of a saved state, after a check that it is about the same samples.

    Raises:
        PlanError: that was another data set or another order of samples.
    """
    expected = state(schedule, 0, 0)
    for name in ("version", "dataset_size", "seed", "shuffle"):
        if saved.get(name) != expected[name]:
            raise PlanError(
                f"the saved position has {name} {saved.get(name)!r}, this loader has "
                f"{expected[name]!r}; samples would be lost or repeated. Use the same, or begin "
                "a new epoch with set_epoch."
            )
    return int(saved["epoch"]), int(saved["position"])
