"""Which samples each worker gets at each training step: the same arithmetic on every rank.

One permutation of the data set per epoch, drawn from (seed, epoch), is cut into global batches;
each is cut into one contiguous slice per rank, by shares. So what a global batch contains depends
neither on the shares nor on the number of ranks, and a position in the permutation is all that is
needed to go on in the middle of an epoch, with another plan if need be.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from zeus_hetero.errors import PlanError
from zeus_hetero.gpu_names import same_model

if TYPE_CHECKING:
    from zeus_hetero.allocation import Allocation, Worker


@dataclass(frozen=True)
class Schedule:
    """Who trains on what.

    Attributes:
        dataset_size: samples in the data set.
        shares: samples of a full global batch, per rank.
        micro_batch_sizes: samples of the largest forward-backward pass, per rank; anything for a
            rank whose share is 0.
        seed: of the shuffling.
        shuffle: whether to shuffle.
        drop_last: leave out the last, smaller global batch of an epoch.
        min_batch_size: samples that a rank gets at least in the last batch, if it gets any; 2 for
            models with BatchNorm, which cannot train on a single sample.
        equal_micro_batches: cut all ranks' slices into equally many micro-batches, as layers need
            that communicate in the forward pass (SyncBatchNorm).

    Raises:
        PlanError: the figures contradict each other.
    """

    dataset_size: int
    shares: tuple[int, ...]
    micro_batch_sizes: tuple[int, ...]
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    min_batch_size: int = 1
    equal_micro_batches: bool = False

    def __post_init__(self) -> None:
        for name in ("shares", "micro_batch_sizes"):
            object.__setattr__(self, name, tuple(int(size) for size in getattr(self, name)))
        self._check()

    @classmethod
    def of_plan(
        cls,
        plan: Allocation,
        dataset_size: int,
        *,
        max_micro_batch_size: int | Mapping[str, int] | None = None,
        **options: Any,
    ) -> Schedule:
        """The schedule of a plan.

        Args:
            plan: its workers in the order of the ranks.
            dataset_size: samples in the data set.
            max_micro_batch_size: samples of a forward-backward pass at most, if fewer than
                planned; for all GPUs, or a mapping from their names.
            **options: further attributes.

        Raises:
            PlanError: the plan does not fit the data set, or a limit is impossible.
        """
        micro = tuple(_cap(worker, max_micro_batch_size) for worker in plan.workers)
        shares = tuple(worker.batch_size for worker in plan.workers)
        return cls(dataset_size, shares, micro, **options)

    @property
    def global_batch_size(self) -> int:
        """Samples per training step over all ranks."""
        return sum(self.shares)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.shares)

    def steps(self, position: int = 0) -> int:
        """Training steps that are left in an epoch.

        Args:
            position: samples of the epoch that were used before.
        """
        left = self.dataset_size - position
        return left // self.global_batch_size + (not self.drop_last and self._tail(position) > 0)

    def batch_sizes(self, position: int = 0) -> Iterator[int]:
        """Samples of the global batches that are left in an epoch, in their order."""
        for _ in range((self.dataset_size - position) // self.global_batch_size):
            yield self.global_batch_size
        if not self.drop_last and self._tail(position):
            yield self._tail(position)

    def permutation(self, epoch: int) -> np.ndarray:
        """The order of the samples in an epoch, shape (dataset_size,)."""
        if not self.shuffle:
            return np.arange(self.dataset_size)
        return np.random.default_rng([self.seed, epoch]).permutation(self.dataset_size)

    def split(self, batch_size: int) -> tuple[int, ...]:
        """Samples of a global batch that each rank gets, in proportion to the shares.

        Args:
            batch_size: samples of the global batch, at most `global_batch_size`.

        Returns:
            One figure per rank, none above its share; they add up to `batch_size`. No rank gets
            fewer than `min_batch_size`, but for 0, unless the batch itself is smaller.
        """
        return _apportion(batch_size, self.shares, self.min_batch_size)

    def micro_batches(self, sizes: Sequence[int], rank: int) -> tuple[int, ...]:
        """Samples of each forward-backward pass of a rank; they differ by at most 1.

        Args:
            sizes: samples per rank, as `split` gives them.
            rank: whose passes.

        Returns:
            Nothing for a rank without samples.
        """
        count = self._passes(sizes, rank)
        if self.equal_micro_batches:
            count = max(self._passes(sizes, other) for other in range(self.world_size))
        return _even_parts(sizes[rank], count)

    def fingerprint(self) -> str:
        """A hash that is equal on two ranks exactly if they would train on matching slices.

        It covers the permutation itself, because another version of numpy may draw another one.
        """
        text = json.dumps(asdict(self), sort_keys=True).encode()
        drawn = np.ascontiguousarray(self.permutation(0)[:4096], dtype="<i8").tobytes()
        return hashlib.sha256(text + drawn).hexdigest()[:16]

    def shapes(self) -> list[tuple[tuple[int, ...], ...]]:
        """Every kind of step that can occur in an epoch: the micro-batches of each rank."""
        kinds = {self.global_batch_size: None}
        kinds.update(dict.fromkeys(self.batch_sizes()))
        shapes = []
        for size in kinds:
            sizes = self.split(size)
            ranks = range(self.world_size)
            shapes.append(tuple(self.micro_batches(sizes, rank) for rank in ranks))
        return shapes

    def _passes(self, sizes: Sequence[int], rank: int) -> int:
        return -(-sizes[rank] // self.micro_batch_sizes[rank]) if sizes[rank] else 0

    def _tail(self, position: int) -> int:
        return (self.dataset_size - position) % self.global_batch_size

    def _check(self) -> None:
        if len(self.shares) != len(self.micro_batch_sizes):
            raise PlanError(
                f"{len(self.shares)} shares and {len(self.micro_batch_sizes)} micro-batch sizes; "
                "expected one of each per rank."
            )
        if not self.shares or min(self.shares) < 0 or self.global_batch_size < 1:
            raise PlanError(f"shares are {self.shares}; expected at least one sample in all.")
        if self.min_batch_size < 1:
            raise PlanError(f"min_batch_size is {self.min_batch_size}; expected at least 1.")
        for rank, (share, micro) in enumerate(zip(self.shares, self.micro_batch_sizes)):
            if share and micro < 1:
                raise PlanError(
                    f"rank {rank}: a micro-batch of {micro} samples for a share of {share}; "
                    "expected at least 1."
                )
        if self.dataset_size < self.global_batch_size:
            raise PlanError(
                f"the data set has {self.dataset_size} samples, less than the global batch of "
                f"{self.global_batch_size} (shares {', '.join(map(str, self.shares))}). Make a "
                "plan with a smaller --global-batch-size."
            )
        if self.equal_micro_batches:
            self._check_equal_micro_batches()

    def _check_equal_micro_batches(self) -> None:
        for size in {self.global_batch_size, *self.batch_sizes()}:
            sizes = self.split(size)
            passes = max(self._passes(sizes, rank) for rank in range(self.world_size))
            if min(sizes) < passes:
                last = "" if size == self.global_batch_size else " Use drop_last=True."
                raise PlanError(
                    f"a global batch of {size} gives the ranks {sizes} samples, which cannot all "
                    f"be cut into {passes} micro-batches; layers that communicate in the forward "
                    f"pass need equally many on every rank.{last}"
                )


def contiguous_part(dataset_size: int, gpu_index: int | None, gpu_split: int | None) -> range:
    """The fixed part of a data set that one worker of the original scheme trains on.

    Args:
        dataset_size: samples in the data set.
        gpu_index: 0 for the first part, 1 for the rest; None, with `gpu_split`, for all of it.
        gpu_split: percent of the data set in the first part.

    Returns:
        Indices of samples.

    Raises:
        PlanError: another index, or no percentage.
    """
    if gpu_index is None and gpu_split is None:
        return range(dataset_size)
    if gpu_index is None or gpu_split is None:
        raise PlanError("gpu_index and gpu_split go together; give both, or neither.")
    if gpu_index not in (0, 1):
        raise PlanError(f"gpu_index is {gpu_index}; expected 0 (the first part) or 1 (the rest).")
    if not 0 <= gpu_split <= 100:
        raise PlanError(f"gpu_split is {gpu_split}; expected a percentage between 0 and 100.")
    border = round(dataset_size * gpu_split / 100)
    return range(border) if gpu_index == 0 else range(border, dataset_size)


def _cap(worker: Worker, limit: int | Mapping[str, int] | None) -> int:
    if isinstance(limit, Mapping):
        limit = next((size for name, size in limit.items() if same_model(name, worker.gpu)), None)
    if limit is None:
        return worker.micro_batch_size
    if limit < 1:
        raise PlanError(f"max_micro_batch_size of {worker.gpu} is {limit}; expected at least 1.")
    return min(worker.micro_batch_size, limit)


def _apportion(total: int, shares: Sequence[int], least: int) -> tuple[int, ...]:
    """Split a number in proportion to shares, by largest remainder."""
    whole = sum(shares)
    if total == whole:
        return tuple(shares)
    # As many ranks as can have `least` samples each, the ones with the largest shares first.
    order = sorted((i for i, share in enumerate(shares) if share), key=lambda i: -shares[i])
    count = max(total // least, 1)
    # More only if these have too little room.
    while sum(shares[i] for i in order[:count]) < total:
        count += 1
    return _largest_remainder(total, shares, sorted(order[:count]), least)


def _largest_remainder(
    total: int, shares: Sequence[int], chosen: Sequence[int], least: int
) -> tuple[int, ...]:
    sizes = [0] * len(shares)
    whole = sum(shares[i] for i in chosen)
    floor = least if least * len(chosen) <= total else 1
    exact = {i: total * shares[i] / whole for i in chosen}
    for i in chosen:
        sizes[i] = min(max(int(exact[i]), floor), shares[i])
    while sum(sizes) != total:
        missing = total > sum(sizes)
        able = [
            i
            for i in chosen
            if (sizes[i] < shares[i] if missing else sizes[i] > min(floor, shares[i]))
        ]
        # The rank whose part is furthest from its due takes or gives a sample.
        pick = max(able, key=lambda i: (exact[i] - sizes[i]) * (1 if missing else -1))
        sizes[pick] += 1 if missing else -1
    return tuple(sizes)


def _even_parts(total: int, count: int) -> tuple[int, ...]:
    if not count:
        return ()
    size, larger = divmod(total, count)
    return (size + 1,) * larger + (size,) * (count - larger)
