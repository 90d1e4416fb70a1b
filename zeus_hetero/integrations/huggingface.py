"""Plans in Hugging Face's Trainer.

    job = zeus_hetero.join("plan.json")
    trainer = HeteroTrainer(
        job=job,
        model=model,
        args=TrainingArguments(..., gradient_accumulation_steps=accumulation_steps(job)),
        train_dataset=dataset,
    )
    trainer.train()
    print(trainer.plan.report)

The Trainer knows one number of micro-batches for all ranks, so all shares are cut into equally
many. It does not know batches of different sizes: the last, smaller global batch of an epoch is
dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from zeus_hetero.epoch_meter import EpochMeter, Goal
from zeus_hetero.errors import TrainingError
from zeus_hetero.handshake import agree
from zeus_hetero.power_limit import HeteroPowerLimitOptimizer
from zeus_hetero.run_report import gather
from zeus_hetero.sampler import HeteroBatchSampler
from zeus_hetero.schedule import Schedule

if TYPE_CHECKING:
    from zeus_hetero.job import Job
    from zeus_hetero.run_report import RunReport


def accumulation_steps(job: Job) -> int:
    """The value of ``gradient_accumulation_steps`` that a job's plan needs."""
    return max(worker.accumulation_steps for worker in job.allocation.workers)


class PlanCallback(TrainerCallback):
    """Holds the plan's power limit while training, and measures time and energy of the epochs.

    It serves any Trainer, also one with equal shares.

    Args:
        job: this rank's.

    Attributes:
        report: of the training, after its end.
    """

    def __init__(self, job: Job) -> None:
        self.report: RunReport | None = None
        self.clock = job.step_clock()
        self._job = job
        self._meter = EpochMeter(job, None, Goal())
        self._limits: HeteroPowerLimitOptimizer | None = None
        self._steps = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Set the power limit."""
        if self._meter.monitor is not None:
            plan, rank = self._job.allocation, self._job.rank
            self._limits = HeteroPowerLimitOptimizer(
                self._meter.monitor, allocation=plan, rank=rank
            )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Begin to measure."""
        self._meter.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """A training step is over."""
        self._steps += 1
        self.clock.step_done()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """End the measurement."""
        self._meter.stop()
        self._meter.record(len(self._meter.history))

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Put the power limit back and gather the report."""
        samples = self._steps * self._job.allocation.global_batch_size
        self.report = gather(self._job, self._meter, self.clock, self._steps, samples)
        if self._limits is not None:
            self._limits.close()


class HeteroTrainer(Trainer):
    """Hugging Face's Trainer with a plan's share on each rank and exact gradients.

    Models that are told the number of items in the batch (``num_items_in_batch``, as language
    models are) already divide by the global count; for all others the mean loss of a micro-batch
    is weighted as `Step.backward` does it.

    Args:
        job: this rank's.
        **options: of Trainer.

    Attributes:
        plan: the callback, with the report.

    Raises:
        TrainingError: a rank has no share, or ``gradient_accumulation_steps`` is not what the
            plan needs.
        PlanError: the data set is too small for the plan.
    """

    def __init__(self, *, job: Job, **options: Any) -> None:
        self.job = job
        super().__init__(**options)
        needed = accumulation_steps(job)
        if self.args.gradient_accumulation_steps != needed:
            raise TrainingError(
                f"gradient_accumulation_steps is {self.args.gradient_accumulation_steps}, but "
                f"this plan needs {needed}; pass accumulation_steps(job) to TrainingArguments."
            )
        if self.args.n_gpu > 1:
            raise TrainingError(
                f"this process sees {self.args.n_gpu} GPUs; start one process per GPU (torchrun)."
            )
        dataset: Any = self.train_dataset
        self._schedule = Schedule.of_plan(
            job.allocation,
            len(dataset),
            seed=self.args.seed,
            drop_last=True,
            equal_micro_batches=True,
        )
        self.plan = PlanCallback(job)
        self.add_callback(self.plan)

    def get_train_dataloader(self) -> DataLoader:
        """This rank's micro-batches of every global batch."""
        agree("schedule", self._schedule.fingerprint(), self.job.group, self.job.timeout)
        # Not prepared by Accelerate, which would share the batches out once more.
        dataset: Any = self.train_dataset
        return _SharesLoader(
            dataset,
            batch_sampler=HeteroBatchSampler(self._schedule, self.job.rank),
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
        )

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss of a micro-batch, weighted by its part of the global batch."""
        size = _batch_size(inputs)
        result = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        loss, outputs = result
        counted = num_items_in_batch is not None and (
            self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        )
        if model.training and not counted:
            # The Trainer divides by the number of micro-batches, DDP by the number of ranks.
            passes, ranks = self.args.gradient_accumulation_steps, self.job.world_size
            loss = loss * (size * ranks * passes / self._schedule.global_batch_size)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """Forward and backward of a micro-batch."""
        size = _batch_size(inputs)
        loss = super().training_step(model, inputs, *arguments, **options)
        self.plan.clock.micro_batch_done(size)
        return loss


class _SharesLoader(DataLoader):
    """A loader whose epochs the Trainer counts."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


def _batch_size(inputs: Any) -> int:
    return next(len(value) for value in inputs.values() if isinstance(value, torch.Tensor))
