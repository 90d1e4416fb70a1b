"""Train with a plan and Hugging Face Accelerate, on scikit-learn's digits.

    torchrun --nproc_per_node 2 accelerate_train.py --plan plan.json --simulate A10,T4

Accelerate places and wraps the model and does mixed precision; it is not given the data loader,
which it would share out once more.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits

import zeus_hetero
from zeus_hetero import HeteroDataLoader, HeteroPowerLimitOptimizer, simulation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", required=True)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--simulate", help="simulate GPUs, such as A10,T4")
    args = parser.parse_args()
    if args.simulate:
        simulation.use(*simulation.parse_gpus(args.simulate)).install()

    images, labels = load_digits(return_X_y=True)
    dataset = torch.utils.data.TensorDataset(
        torch.from_numpy(images / 16).float(), torch.from_numpy(labels)
    )
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    criterion = torch.nn.CrossEntropyLoss()
    with zeus_hetero.join(args.plan) as job:
        accelerator = Accelerator(cpu=job.device.type == "cpu")
        loader = HeteroDataLoader(dataset, allocation=job, max_epochs=args.epochs)
        model, optimizer = accelerator.prepare(
            network, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        )
        with HeteroPowerLimitOptimizer(loader.monitor, allocation=job.allocation, rank=job.rank):
            for epoch in loader.epochs():
                mean_loss = zeus_hetero.Mean(job.group)
                for step in loader:
                    for batch in step.micro_batches(model):
                        inputs, targets = (part.to(accelerator.device) for part in batch)
                        loss = criterion(model(inputs), targets)
                        accelerator.backward(step.scale(loss))
                        mean_loss.update(loss, len(targets))
                    optimizer.step()
                    optimizer.zero_grad()
                value = mean_loss.compute()
                accelerator.print(f"epoch {epoch}: training loss {value:.4f}")
            report = loader.report()
            accelerator.print(report)


if __name__ == "__main__":
    main()
