"""One rank of a training with another framework: ``framework_rank.py FRAMEWORK FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from training_cases import data, flat, mean_loss, perceptron

import zeus_hetero
from zeus_hetero import HeteroDataLoader, HeteroPowerLimitOptimizer, simulation

EPOCHS = 2
SAMPLES = 62


def accelerate(job):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    network = perceptron()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01, weight_decay=0.1)
    model, optimizer = accelerator.prepare(network, optimizer)
    loader = HeteroDataLoader(data(SAMPLES), allocation=job)
    with HeteroPowerLimitOptimizer(loader.monitor, allocation=job.allocation, rank=job.rank):
        for _ in loader.epochs(EPOCHS):
            for step in loader:
                for inputs, targets in step.micro_batches(model):
                    accelerator.backward(step.scale(mean_loss(model, inputs, targets)))
                optimizer.step()
                optimizer.zero_grad()
        return network, loader.report()


class Rows(torch.utils.data.Dataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        inputs, labels = self.dataset[index]
        return {"inputs": inputs, "labels": labels}


class WithLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.network = perceptron()

    def forward(self, inputs, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.network(inputs), labels)}


def huggingface(job):
    from transformers import TrainingArguments

    from zeus_hetero.integrations.huggingface import HeteroTrainer, accumulation_steps

    model = WithLoss()
    arguments = TrainingArguments(
        output_dir=sys.argv[2], use_cpu=True, num_train_epochs=EPOCHS, report_to=[],
        gradient_accumulation_steps=accumulation_steps(job), save_strategy="no", seed=0,
        lr_scheduler_type="constant", max_grad_norm=0.0, disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    # Not Trainer's own optimizer, which exempts biases from weight decay.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    trainer = HeteroTrainer(
        job=job, model=model, args=arguments, train_dataset=Rows(data(SAMPLES)),
        optimizers=(optimizer, None),
    )  # fmt: skip
    trainer.train()
    return model.network, trainer.plan.report


def lightning(job):
    from lightning.pytorch import LightningModule, Trainer

    from zeus_hetero.integrations.lightning import PlanCallback, planned_micro_batches

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.network = perceptron()

        def training_step(self, step):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            for inputs, targets in planned_micro_batches(self, step):
                self.manual_backward(step.scale(mean_loss(self.network, inputs, targets)))
            optimizer.step()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)

    loader = HeteroDataLoader(data(SAMPLES), allocation=job, drop_last=True)
    callback = PlanCallback(loader)
    trainer = Trainer(
        accelerator="cpu", devices=job.world_size, strategy="ddp", max_epochs=EPOCHS, logger=False,
        use_distributed_sampler=False, callbacks=[callback], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[2],
    )  # fmt: skip
    module = Module()
    trainer.fit(module, loader)
    return module.network, callback.report


def main():
    framework, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    simulation.use("A10", "T4").install()
    with zeus_hetero.join(folder / "plan.json") as job:
        network, report = {"accelerate": accelerate, "huggingface": huggingface,
                           "lightning": lightning}[framework](job)  # fmt: skip
        result = {"parameters": flat(network), "steps": report.steps, "time": report.time,
                  "predicted": report.predicted_time,
                  "limits": [gpu.power_limit for gpu in report.gpus]}  # fmt: skip
        torch.save(result, folder / f"{framework}{job.rank}.pt")


if __name__ == "__main__":
    main()
