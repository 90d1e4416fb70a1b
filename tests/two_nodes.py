"""A training that is crashed, restarted and resumed; started by two torchrun agents as two nodes.

Arguments: folder for checkpoint and results, names of the simulated GPUs of this node, and whether
the last rank shall crash in the middle of the second epoch of the first attempt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from training_cases import data, flat, mean_loss, perceptron

import zeus_hetero
from zeus_hetero import HeteroDataLoader, simulation

EPOCHS = 4
SAMPLES = 62


def main():
    folder, gpus, crash = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "crash"
    torch.set_num_threads(1)
    simulation.use(*gpus.split(",")).install()
    with zeus_hetero.join(folder / "plan.json") as job:
        model = perceptron()
        net = job.wrap(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        loader = HeteroDataLoader(data(SAMPLES), allocation=job, num_workers=1)
        checkpoint = folder / "checkpoint.pt"
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["loader"])
        for epoch in loader.epochs(EPOCHS):
            for number, step in enumerate(loader):
                for inputs, targets in step.micro_batches(net):
                    step.backward(mean_loss(net, inputs, targets))
                optimizer.step()
                optimizer.zero_grad()
                if job.rank == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                             "loader": loader.state_dict()}  # fmt: skip
                    torch.save(state, folder / "checkpoint.new")
                    (folder / "checkpoint.new").replace(checkpoint)
                torch.distributed.barrier()
                once = folder / "crashed"
                last = job.rank == job.world_size - 1
                if crash and last and epoch == 1 and number == 2 and not once.exists():
                    once.touch()
                    os._exit(1)
        report = loader.report()
        result = {
            "parameters": flat(model), "gpu": job.gpu_name, "share": job.worker.batch_size,
            "epochs": [figures.epoch for figures in loader.history],
            "simulated": report.simulated,
        }  # fmt: skip
        torch.save(result, folder / f"rank{job.rank}.pt")


if __name__ == "__main__":
    main()
