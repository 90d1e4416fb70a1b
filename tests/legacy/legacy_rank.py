"""One rank of a training with Zeus 0.8.2: ``legacy_rank.py FOLDER RANK``."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from fake_nvml import FakeNVML
from torch.nn.parallel import DistributedDataParallel
from training_cases import data, flat, mean_loss, optimizer, perceptron
from zeus.run import ZeusDataLoader

from zeus_hetero import HeteroDataLoader

EPOCHS = 3


def main():
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    fake = FakeNVML(folder / "limits.json")
    fake.install()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2,
        timeout=timedelta(seconds=30),
    )  # fmt: skip
    model = perceptron()
    net = DistributedDataParallel(model)
    loader = HeteroDataLoader(data(62), allocation=folder / "plan.json", max_epochs=EPOCHS)
    validation = torch.utils.data.DistributedSampler(data(20))
    evaluation = HeteroDataLoader(data(20), batch_size=5, sampler=validation, distributed="dp")
    optimise = optimizer("adamw", model)
    steps, during = [], None
    for _ in loader.epochs():
        for step in loader:
            for inputs, targets in step.micro_batches(net):
                step.backward(mean_loss(net, inputs, targets))
            optimise.step()
            optimise.zero_grad()
            steps.append(step.sizes)
        for _ in evaluation:
            pass
        during = fake.limits()
        loader.report_metric(0.5, higher_is_better=True)
    torch.save(
        {
            "parameters": flat(model), "steps": steps, "length": len(loader), "limits": during,
            "is_zeus": isinstance(loader, ZeusDataLoader),
            "energy": float(ZeusDataLoader.train_epoch_energy.sum()),
            "files": sorted(path.name for path in Path(os.environ["ZEUS_LOG_DIR"]).glob("*")),
        },
        folder / f"rank{rank}.pt",
    )  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
