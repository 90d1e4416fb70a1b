"""Models, data and plans of the training tests, and the one-process training they are held to."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from zeus_hetero import Allocation, Schedule, Worker

CLASSES = 5
FEATURES = 6


def plan(shares, micro=None, gpus=None, **options):
    """A plan made by hand: shares, and the largest micro-batches (the shares themselves)."""
    workers = []
    for rank, share in enumerate(shares):
        cap = (micro or shares)[rank]
        passes = -(-share // cap) if share else 0
        size = -(-share // passes) if share else 0
        gpu = (gpus or [f"GPU{rank}" for rank in range(len(shares))])[rank]
        workers.append(Worker(gpu, share, size, passes, 100, 0.1, 1.0))
    figures = {"step_time": 0.1, "step_energy": 1.0, "cost": 1.0, "lower_bound": 1.0}
    return Allocation(
        tuple(workers), **figures, method="by hand", objective="synchronous", eta=0.5,
        global_batch_size=sum(shares), **options,
    )  # fmt: skip


def data(samples, seed=0):
    """Samples that are sorted by class, so that slices of the data differ from each other."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(samples) * CLASSES // samples
    inputs = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(inputs + targets[:, None], targets)


def perceptron(seed=1, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)).to(dtype)


def convolutional(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 8, 3, padding=1), nn.GroupNorm(2, 8),
        nn.ReLU(), nn.Flatten(), nn.Linear(8 * FEATURES, CLASSES),
    ).double()  # fmt: skip


def with_batchnorm(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(16, CLASSES),
    ).double()  # fmt: skip


def optimizer(name, model):
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def mean_loss(model, inputs, targets):
    return F.cross_entropy(model(inputs), targets)


def global_batches(dataset, shares, epoch, **options):
    """The global batches of an epoch as index tensors."""
    schedule = Schedule(len(dataset), tuple(shares), tuple(shares), **options)
    order = torch.from_numpy(schedule.permutation(epoch))
    start = 0
    for size in schedule.batch_sizes():
        yield order[start : start + size]
        start += size


def train_alone(model, dataset, shares, *, optimizer_name="sgd", epochs=1, clip=None,
                loss=mean_loss, steps=None, **options):  # fmt: skip
    """What one big GPU would do, every global batch at once: parameters and clip norms."""
    steps_left = steps if steps is not None else 10**9
    optimise = optimizer(optimizer_name, model)
    norms = []
    for epoch in range(epochs):
        for batch in global_batches(dataset, shares, epoch, **options):
            if steps_left == 0:
                break
            steps_left -= 1
            inputs, targets = dataset.tensors[0][batch], dataset.tensors[1][batch]
            loss(model, inputs, targets).backward()
            if clip is not None:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
            optimise.step()
            optimise.zero_grad()
    return flat(model), norms


def flat(model):
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def flat_gradient(model):
    return torch.cat([p.grad.flatten().double() for p in model.parameters()])


def distance(one, other):
    """Largest difference relative to the largest entry."""
    return float((one - other).abs().max() / other.abs().max())
