"""Plans in Lightning, with manual optimization.

    class Model(LightningModule):
        def __init__(self):
            self.automatic_optimization = False

        def training_step(self, step):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            for images, labels in planned_micro_batches(self, step):
                loss = criterion(self.network(images), labels)
                self.manual_backward(step.scale(loss))
            optimizer.step()

    loader = HeteroDataLoader(dataset, allocation=job, drop_last=True)
    trainer = Trainer(
        strategy="ddp", use_distributed_sampler=False, callbacks=[PlanCallback(loader)]
    )
    trainer.fit(model, loader)

Lightning gives a `Step` to ``training_step`` as it gives a batch. It calls DistributedDataParallel
once around the whole ``training_step``, so a rank without samples cannot take part with zeros:
plans with such steps are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from zeus_hetero.errors import TrainingError
from zeus_hetero.power_limit import HeteroPowerLimitOptimizer

if TYPE_CHECKING:
    from zeus_hetero.dataloader import HeteroDataLoader
    from zeus_hetero.gradients import Step
    from zeus_hetero.run_report import RunReport


def planned_micro_batches(module: LightningModule, step: Step) -> Iterator[Any]:
    """This worker's micro-batches, on its device; gradients are exchanged in the last one.

    Args:
        module: whose ``training_step`` this is.
        step: what ``training_step`` was given.

    Raises:
        TrainingError: a rank has no samples in this step.
    """
    idle = [rank for rank, sizes in enumerate(step.shape) if not sizes]
    if idle:
        raise TrainingError(
            f"rank {idle[0]} has no samples in this step, which Lightning cannot train. Pass "
            "drop_last=True to the loader, and use a plan in which every GPU has a share."
        )
    wrapped = module.trainer.strategy.model
    for batch in step.micro_batches(wrapped):
        yield module.transfer_batch_to_device(batch, module.device, 0)


class PlanCallback(Callback):
    """Holds the plan's power limit while training, and reports time and energy at the end.

    Args:
        loader: of the training; it knows the job, and measures its epochs.

    Attributes:
        report: of the training, after its end.
    """

    def __init__(self, loader: HeteroDataLoader) -> None:
        self.report: RunReport | None = None
        self._loader = loader
        self._limits: HeteroPowerLimitOptimizer | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the power limit."""
        job = self._loader.job
        if self._loader.monitor is not None and job is not None:
            self._limits = HeteroPowerLimitOptimizer(
                self._loader.monitor, allocation=job.allocation, rank=job.rank
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the report and put the power limit back."""
        self.report = self._loader.report()
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Put the power limit back."""
        self._close()

    def _close(self) -> None:
        if self._limits is not None:
            self._limits.close()
