"""Zeus's data loader for GPUs that differ, on a Zeus that has none any more."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from zeus_hetero import simulation
from zeus_hetero.allocation import Allocation
from zeus_hetero.epoch_meter import EpochMeter, Goal
from zeus_hetero.errors import TrainingError
from zeus_hetero.gradients import Step, StepContext
from zeus_hetero.handshake import agree
from zeus_hetero.job import Job, join
from zeus_hetero.preflight import preflight
from zeus_hetero.sampler import HeteroBatchSampler, position_in, state
from zeus_hetero.schedule import Schedule, contiguous_part
from zeus_hetero.simulation.step_clock import SimulatedStepClock
from zeus_hetero.step_clock import StepClock

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from zeus.monitor import ZeusMonitor

    from zeus_hetero.epoch_meter import EpochFigures
    from zeus_hetero.run_report import RunReport


class HeteroDataLoader(DataLoader):
    """A data loader that gives each GPU its share.

    With an allocation an iteration yields one `Step` per training step; each holds this worker's
    micro-batches of one global batch, and gives the losses their weights:

        loader = HeteroDataLoader(dataset, allocation=job, num_workers=4)
        for epoch in loader.epochs(10):
            for step in loader:
                for inputs, targets in step.micro_batches(model):
                    step.backward(criterion(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
        print(loader.report())

    All ranks get the same number of steps, also where the last batch leaves one without samples.
    ``len(loader)`` is that number, for learning rate schedules. Over all ranks each sample comes
    once per epoch; which samples a global batch holds depends on `seed` and epoch alone.

    The two modes of the original system are kept: with `gpu_index` and `gpu_split` it yields
    plain batches of a fixed contiguous part of the data set, for training independent of others;
    with `batch_size` alone plain batches of all of it.

    Args:
        dataset: indexable.
        allocation: a `Job` (from `zeus_hetero.join`), or a plan or its file. Without `rank` a
            plan is joined here.
        rank: this process's place in the plan, where ranks need not compare notes.
        gpu_index: 0 for the first `gpu_split` percent of the data set, 1 for the rest.
        gpu_split: percent of the data set that go to index 0.
        batch_size: of plain batches.
        shuffle: whether to shuffle each epoch.
        seed: of the shuffling.
        drop_last: leave out the last, smaller (global) batch.
        min_batch_size: samples that a rank gets at least in the last global batch, if any: 2
            for networks with BatchNorm.
        equal_micro_batches: cut all shares into equally many micro-batches, for SyncBatchNorm.
        max_micro_batch_size: samples of a forward-backward pass at most; for all, or a mapping
            from GPU name. The shares stay as planned.
        max_epochs: stop after so many; also an argument of `epochs`.
        target_metric: stop when `report_metric` reaches it.
        cost_threshold: stop before an epoch with which Zeus's cost so far would exceed it, J.
        eta: weight of energy against time in that cost.
        monitor: Zeus's monitor of this process's GPU; made here if None.
        device_index: Zeus's index of that GPU, without an allocation.
        **options: of torch's DataLoader, such as ``num_workers`` and ``pin_memory``.

    Raises:
        PlanError: the plan does not fit the data set, the GPUs or the ranks.
        TrainingError: contradicting arguments.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        allocation: Job | Allocation | str | os.PathLike[str] | None = None,
        rank: int | None = None,
        gpu_index: int | None = None,
        gpu_split: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        min_batch_size: int = 1,
        equal_micro_batches: bool = False,
        max_micro_batch_size: int | Mapping[str, int] | None = None,
        max_epochs: int | None = None,
        target_metric: float | None = None,
        cost_threshold: float | None = None,
        eta: float = 0.5,
        monitor: ZeusMonitor | None = None,
        device_index: int = 0,
        **options: Any,
    ) -> None:
        _check_options(dataset, options, allocation is not None, batch_size)
        self.max_epochs = max_epochs
        self.job: Job | None = None
        self._sampler: HeteroBatchSampler | None = None
        self._epoch = 0
        self._position = 0
        self._steps_taken = 0
        self._samples_taken = 0
        if allocation is None:
            part = contiguous_part(len(dataset), gpu_index, gpu_split)  # type: ignore[arg-type]
            generator = torch.Generator()
            generator.manual_seed(seed)
            super().__init__(
                Subset(dataset, part),
                batch_size=batch_size or 1,
                # torch cannot shuffle nothing.
                shuffle=shuffle and len(part) > 0,
                drop_last=drop_last,
                generator=options.pop("generator", generator),
                **options,
            )
        else:
            if gpu_split is not None or gpu_index is not None:
                raise TrainingError("gpu_index and gpu_split contradict allocation; give one.")
            self.job = _job(allocation, rank)
            self._cuts: dict[str, Any] = {
                "dataset_size": len(dataset),  # type: ignore[arg-type]
                "seed": seed,
                "shuffle": shuffle,
                "drop_last": drop_last,
                "min_batch_size": min_batch_size,
                "equal_micro_batches": equal_micro_batches,
                "max_micro_batch_size": max_micro_batch_size,
            }
            schedule = Schedule.of_plan(self.job.allocation, **self._cuts)
            self._sampler = HeteroBatchSampler(schedule, self.job.rank)
            super().__init__(dataset, batch_sampler=self._sampler, **options)
        goal = Goal(target_metric, cost_threshold, eta)
        self.meter = EpochMeter(self.job, monitor, goal, device_index)
        self._context = self._new_context()

    # -- epochs ------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Number of the epoch that comes next, or runs."""
        return self._epoch

    @property
    def monitor(self) -> ZeusMonitor | None:
        """Zeus's monitor of this process's GPU; None without a GPU."""
        return self.meter.monitor

    @property
    def history(self) -> list[EpochFigures]:
        """Time and energy of each epoch so far: energy over all ranks, time of the slowest."""
        return self.meter.history

    def epochs(self, max_epochs: int | None = None) -> Iterator[int]:
        """Go through epochs until there is a reason to stop.

        Reasons are the number of epochs, the target metric, and the cost threshold. A loader that
        was resumed goes on in its epoch.

        Args:
            max_epochs: number of epochs, counted from the first; of the constructor if None.
        """
        last = self.max_epochs if max_epochs is None else max_epochs
        while (last is None or self._epoch < last) and not self.meter.reason_to_stop():
            epoch = self._epoch
            yield epoch
            if self._epoch == epoch:  # Not gone through to its end.
                self.set_epoch(epoch + 1)

    def report_metric(self, metric: float, higher_is_better: bool = True) -> None:
        """Say how good the model is after an epoch; see `target_metric`.

        Args:
            metric: the same on every rank, such as `zeus_hetero.Mean.compute` gives.
            higher_is_better: False for a loss.
        """
        self.meter.report_metric(metric, higher_is_better)

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        """Choose the epoch of the next iteration.

        Args:
            epoch: its number, which decides the order of the samples.
            position: samples of it that were used before, over all ranks.
        """
        self._epoch = epoch
        self._position = position

    def state_dict(self) -> dict[str, Any]:
        """The position in the training, for a checkpoint; the same on every rank.

        The step that the loop is in counts as done: save it after ``optimizer.step()``.
        """
        return state(self._need_sampler().schedule, *self._where_to_go_on())

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint, perhaps with other shares or another number of ranks.

        Raises:
            PlanError: it is of another data set or another order of samples.
        """
        self.set_epoch(*position_in(saved, self._need_sampler().schedule))

    def set_allocation(self, allocation: Allocation) -> None:
        """Go on with another plan for the same GPUs, from the next iteration on.

        Args:
            allocation: its workers in the order of the ranks; every rank has to give the same.
        """
        sampler = self._need_sampler()
        assert self.job is not None
        if len(allocation.workers) != self.job.world_size:
            raise TrainingError(
                f"the new plan has {len(allocation.workers)} workers; this job has "
                f"{self.job.world_size} ranks. Start the job anew, with load_state_dict."
            )
        self.job.allocation = allocation
        sampler.schedule = Schedule.of_plan(allocation, **self._cuts)
        self._context = self._new_context()

    # -- iterating ---------------------------------------------------------------------------

    def __len__(self) -> int:
        """Training steps of an epoch (plain batches without an allocation)."""
        if self._sampler is None:
            return super().__len__()
        return self._sampler.schedule.steps()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._sampler is None:
            return self._measured(self._plain())
        self.set_epoch(*self._where_to_go_on())
        return self._measured(self._steps())

    def _measured(self, steps: Iterator[Any]) -> Iterator[Any]:
        """Measure the time and the energy that an epoch's steps take, and nothing around them."""
        epoch = self._epoch
        self.meter.begin()
        try:
            yield from steps
        except GeneratorExit:  # The loop was left early.
            self.meter.stop()
            raise
        except BaseException:
            self.meter.cancel()
            raise
        self.meter.stop()
        self.meter.record(epoch)

    def _plain(self) -> Iterator[Any]:
        left = len(self.dataset)  # type: ignore[arg-type]
        for batch in super().__iter__():
            size = min(self.batch_size or 1, left)
            left -= size
            self._samples_taken += size
            self._steps_taken += 1
            yield batch
            self._context.clock.micro_batch_done(size)
        self.set_epoch(self._epoch + 1)

    def _steps(self) -> Iterator[Step]:
        sampler, job = self._need_sampler(), self.job
        assert job is not None
        schedule = sampler.schedule
        where = f"{schedule.fingerprint()} at {self._epoch}:{self._position}"
        agree("schedule", where, job.group, job.timeout)
        sampler.set_epoch(self._epoch, self._position)
        batches = super().__iter__()
        ranks = range(schedule.world_size)
        # Sizes are computed here, beside the iterator, because the sampler runs ahead.
        for size in schedule.batch_sizes(self._position):
            sizes = schedule.split(size)
            shape = tuple(schedule.micro_batches(sizes, rank) for rank in ranks)
            step = Step(batches, shape, self._context)
            self._position += size
            self._samples_taken += size
            self._steps_taken += 1
            yield step
            step.drain()
        self.set_epoch(self._epoch + 1)

    def _where_to_go_on(self) -> tuple[int, int]:
        """Epoch and position; where the last iteration was left at its end, of the next epoch."""
        if self._position and not self._need_sampler().schedule.steps(self._position):
            return self._epoch + 1, 0
        return self._epoch, self._position

    # -- before and after --------------------------------------------------------------------

    def preflight(self, model: Module, loss: Callable[[Module, Any], Tensor]) -> None:
        """Run this rank's largest micro-batch once, before it can hang the others.

        Forward and backward run without any exchange; parameters, buffers, gradients and random
        numbers are as before.

        Args:
            model: as it will be trained, after the optimizer was made.
            loss: of a network and a micro-batch, such as
                ``lambda model, batch: criterion(model(batch[0]), batch[1])``.

        Raises:
            TrainingError: on every rank, naming the ranks whose GPU has too little memory, or
                whose step fails.
        """
        if self.job is None:
            raise TrainingError("preflight is for training with an allocation.")
        job = self.job
        self._context.check(model)
        mine = (sizes[job.rank] for sizes in self._context.shapes)
        largest = max((size for sizes in mine for size in sizes), default=0)

        def first_samples() -> Any:
            return self.collate_fn([self.dataset[index] for index in range(largest)])

        preflight(job, model, loss, first_samples, largest)

    def report(self) -> RunReport:
        """What the training took, per GPU and in all, beside what the plan predicts.

        Every rank has to call it.
        """
        from zeus_hetero.run_report import gather

        return gather(
            self.job, self.meter, self._context.clock, self._steps_taken, self._samples_taken
        )

    def _new_context(self) -> StepContext:
        if self.job is None:
            return StepContext(1, 0, [((1,),)], self._clock_of_plain_batches())
        return StepContext(
            self.job.world_size,
            self.job.rank,
            self._need_sampler().schedule.shapes(),
            self.job.step_clock(),
            self.job.group,
        )

    def _clock_of_plain_batches(self) -> StepClock:
        simulated, index = simulation.active(), self.meter.gpu_index
        if simulated is None or index is None:
            return StepClock()
        return SimulatedStepClock(simulated[index])

    def _need_sampler(self) -> HeteroBatchSampler:
        if self._sampler is None:
            raise TrainingError("this loader has no allocation; make it with allocation=...")
        return self._sampler


def _job(allocation: Job | Allocation | str | os.PathLike[str], rank: int | None) -> Job:
    if isinstance(allocation, Job):
        return allocation
    if rank is None:
        return join(allocation)
    plan = allocation if isinstance(allocation, Allocation) else Allocation.load(allocation)
    if not 0 <= rank < len(plan.workers):
        raise TrainingError(
            f"rank is {rank}; the plan has {len(plan.workers)} workers, counted from 0."
        )
    return Job(plan, rank=rank)


def _check_options(
    dataset: Dataset[Any], options: Mapping[str, Any], planned: bool, batch_size: int | None
) -> None:
    if isinstance(dataset, IterableDataset):
        raise TrainingError(
            f"{type(dataset).__name__} is an IterableDataset, which cannot be shared out by index. "
            "Use a data set with __getitem__ and __len__."
        )
    if not options.get("in_order", True):
        raise TrainingError(
            "in_order=False lets batches arrive in another order than their weights; leave it out."
        )
    taken = [name for name in ("sampler", "batch_sampler") if name in options]
    if planned and batch_size is not None:
        taken.append("batch_size")
    if taken:
        raise TrainingError(
            f"{', '.join(taken)}: not with this loader, which decides who gets which samples."
        )
