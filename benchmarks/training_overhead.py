"""What exact uneven training costs per step, beside plain DistributedDataParallel, in one run.

    python benchmarks/training_overhead.py

Two processes train the same network on the same samples, with equal shares, so that both ways
do the same work: plain (DistributedSampler, DataLoader, mean loss) and ours (HeteroDataLoader,
weighted loss). Steps of both alternate in the same processes, so that whatever else the machine
does hits both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from zeus_hetero import Allocation, HeteroDataLoader, Worker
from zeus_hetero.job import Job


def plan(share: int, ranks: int) -> Allocation:
    workers = tuple(Worker("CPU", share, share, 1, 100, 0.1, 1.0) for _ in range(ranks))
    return Allocation(workers, 0.1, 1.0, 1.0, 1.0, "equal", "synchronous", 0.5, share * ranks)


def plain_step(net, optimizer, criterion, batches):
    inputs, targets = next(batches)
    criterion(net(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()


def our_step(net, optimizer, criterion, steps):
    step = next(steps)
    for inputs, targets in step.micro_batches(net):
        step.backward(criterion(net(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()


def rank_main(args) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=2
    )
    torch.manual_seed(0)
    width = args.width
    network = nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )
    net = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss()
    samples = args.batch * 2 * args.steps
    dataset = TensorDataset(torch.randn(samples, width), torch.randint(0, 10, (samples,)))
    plain = DataLoader(dataset, batch_size=args.batch, sampler=DistributedSampler(dataset))
    job = Job(plan(args.batch, 2), rank=args.rank, group=dist.new_group(backend="gloo"))
    ours = HeteroDataLoader(dataset, allocation=job)
    times: dict[str, list[float]] = {"plain": [], "ours": []}
    for epoch in range(args.epochs):
        ways = [("plain", plain_step, iter(plain)), ("ours", our_step, iter(ours))]
        for number in range(args.steps):
            for name, run, batches in ways[:: 1 if number % 2 else -1]:
                dist.barrier()
                start = time.perf_counter()
                run(net, optimizer, criterion, batches)
                if epoch or number > 10:  # The first ones warm up.
                    times[name].append(time.perf_counter() - start)
    if args.rank == 0:
        plain_time, our_time = (1000 * statistics.median(times[name]) for name in times)
        ratios = [ours / plain for ours, plain in zip(times["ours"], times["plain"])]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"median step of {len(ratios)}: plain {plain_time:.2f} ms, ours {our_time:.2f} ms, "
            f"ratio {our_time / plain_time:.3f}; ratios of pairs: median {middle:.3f}, half of "
            f"them between {low:.3f} and {high:.3f}"
        )
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort an interpreter that ends normally.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024, help="of the network's layers")
    parser.add_argument("--batch", type=int, default=128, help="samples per rank and step")
    parser.add_argument("--steps", type=int, default=100, help="steps per epoch")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--store", f"{folder}/store", "--rank"]
        ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
        for process in ranks:
            process.wait()


if __name__ == "__main__":
    main()
