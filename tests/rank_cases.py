"""One rank of the distributed tests; started by `ranks.run_cases` with a folder and case names."""

from __future__ import annotations

import os
import random
import sys
import traceback
import warnings
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from training_cases import (
    CLASSES,
    convolutional,
    data,
    flat,
    flat_gradient,
    mean_loss,
    optimizer,
    perceptron,
    plan,
    with_batchnorm,
)

from zeus_hetero import HeteroDataLoader, Mean, TrainingError, sync_batchnorm
from zeus_hetero.handshake import Introduction, agree, assign, introduce
from zeus_hetero.job import Job
from zeus_hetero.run_report import gather

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def job_for(allocation):
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
    return Job(allocation, rank=dist.get_rank(), group=group)


def train(allocation, model, dataset, *, optimizer_name="sgd", epochs=1, clip=None, loss=mean_loss,
          ddp=None, scaler=None, reduction="mean", count_tokens=None, steps=None,
          plans=None, **options):  # fmt: skip
    """The loop of the README; returns parameters and clip norms."""
    net = DistributedDataParallel(model, **{"broadcast_buffers": False, **(ddp or {})})
    loader = HeteroDataLoader(dataset, allocation=job_for(allocation), **options)
    optimise = optimizer(optimizer_name, model)
    norms, taken = [], 0
    for epoch in loader.epochs(epochs):
        if plans is not None:
            loader.set_allocation(plans[epoch])
        for step in loader:
            if taken == steps:
                break
            taken += 1
            for inputs, targets in step.micro_batches(
                net, scaler=scaler, count_tokens=count_tokens
            ):
                step.backward(loss(net, inputs, targets), reduction=reduction)
            if clip is not None:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
            optimise.step()
            optimise.zero_grad()
    return {"parameters": flat(model), "norms": norms}


# -- gradients -----------------------------------------------------------------------------


@case
def uneven():
    return train(plan((2600, 1496)), perceptron(), data(4096), steps=1)


@case
def uneven_convolutional():
    return train(plan((2600, 1496)), convolutional(), data(4096), steps=1)


@case
def naive():
    """What people do today: local mean losses and plain DistributedDataParallel."""
    model = perceptron()
    net = DistributedDataParallel(model)
    loader = HeteroDataLoader(data(4096), allocation=job_for(plan((2600, 1496))))
    optimise = optimizer("sgd", model)
    for step in loader:
        for inputs, targets in step.micro_batches():
            mean_loss(net, inputs, targets).backward()
        optimise.step()
    return {"parameters": flat(model)}


@case
def accumulation():
    """Five, two, eight and one micro-batches, over several steps and many buckets."""
    return train(
        plan((137, 64, 51, 4), (32, 32, 7, 32)), convolutional(), data(1024),
        ddp={"bucket_cap_mb": 0.001}, steps=4,
    )  # fmt: skip


@case
def rank_without_samples():
    return train(plan((5, 0, 3), (2, 1, 2)), perceptron(), data(24), steps=3)


@case
def only_ghosts_in_tail():
    """17 samples in batches of 8: the last one leaves all but one rank without samples."""
    return train(plan((3, 3, 2)), perceptron(), data(17), optimizer_name="adamw", epochs=2)


@case
def sum_of_losses():
    def loss(net, inputs, targets):
        return F.cross_entropy(net(inputs), targets, reduction="sum") / 100

    return train(plan((7, 2, 3), (3, 2, 1)), perceptron(), data(60), loss=loss, reduction="sum")


@case
def tokens():
    def loss(net, inputs, targets):
        return F.cross_entropy(net(inputs), targets, ignore_index=-100, reduction="sum")

    # Unshuffled: whole micro-batches, and the whole share of rank 1, are ignored.
    dataset = data(36)
    dataset.tensors[1][:7] = -100
    dataset.tensors[1][19:24] = -100
    return train(
        plan((6, 1, 5), (2, 1, 5)), perceptron(), dataset, loss=loss, reduction="tokens",
        count_tokens=lambda batch: (batch[1] != -100).sum(), shuffle=False,
    )  # fmt: skip


@case
def with_penalty():
    def loss(net, inputs, targets):
        penalty = sum((p**2).sum() for p in net.parameters())
        return mean_loss(net, inputs, targets) + 0.01 * penalty

    return train(plan((7, 2, 3), (3, 2, 1)), perceptron(), data(60), loss=loss)


@case
def trajectory_sgd():
    return train(plan((7, 2, 3), (3, 2, 1)), perceptron(), data(62), clip=1.0, epochs=3)


@case
def trajectory_adamw():
    return train(
        plan((7, 2, 3), (3, 2, 1)), perceptron(), data(62), clip=1.0, epochs=3,
        optimizer_name="adamw", num_workers=1, persistent_workers=True,
    )  # fmt: skip


@case
def new_plan_every_epoch():
    plans = [plan((7, 2, 3), (3, 2, 1)), plan((1, 10, 1)), plan((4, 4, 4), (1, 2, 3))]
    return train(plans[0], perceptron(), data(62), epochs=3, optimizer_name="adamw", plans=plans)


@case
def options_of_ddp():
    results = {}
    for name, ddp in {
        "find_unused": {"find_unused_parameters": True},
        "bucket_view": {"gradient_as_bucket_view": True},
        "synchronised_buffers": {"broadcast_buffers": True},
    }.items():
        results[name] = train(
            plan((7, 2, 3), (3, 2, 1)), convolutional(), data(62), ddp=ddp, epochs=2
        )["parameters"]
    return results


@case
def compressed():
    """DistributedDataParallel's own hook for half precision still works with weighted losses."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = perceptron(dtype=torch.float32)
    net = DistributedDataParallel(model)
    net.register_comm_hook(None, fp16_compress_hook)
    dataset = data(48)
    loader = HeteroDataLoader(dataset, allocation=job_for(plan((7, 2, 3), (3, 2, 1))))
    step = next(iter(loader))
    for inputs, targets in step.micro_batches(net):
        step.backward(mean_loss(net, inputs.float(), targets))
    return {"gradient": flat_gradient(model)}


@case
def exchange_in_every_micro_batch():
    """The user hands no model to micro_batches; exact all the same where counts are equal."""
    model = perceptron()
    net = DistributedDataParallel(model)
    job = job_for(plan((6, 2, 4), (3, 1, 2)))
    loader = HeteroDataLoader(data(48), allocation=job, shuffle=False)
    step = next(iter(loader))
    for inputs, targets in step.micro_batches():
        step.backward(mean_loss(net, inputs, targets))
    return {"gradient": flat_gradient(model)}


@case
def no_model_with_unequal_counts():
    loader = HeteroDataLoader(data(48), allocation=job_for(plan((6, 2, 4), (1, 1, 2))))
    net = DistributedDataParallel(perceptron())
    step = next(iter(loader))
    try:
        for inputs, targets in step.micro_batches():
            step.backward(mean_loss(net, inputs, targets))
    except TrainingError as error:
        return {"error": str(error)}
    return {"error": None}


# -- what a rank without samples leaves alone --------------------------------------------------


@case
def ghost_leaves_no_traces():
    model = with_batchnorm()
    net = DistributedDataParallel(model, broadcast_buffers=False)
    dataset = data(24)
    if dist.get_rank() == 1:
        dataset.tensors[0][:] = float("nan")  # Whatever a ghost read, it would show.
    loader = HeteroDataLoader(dataset, allocation=job_for(plan((5, 0, 3))))
    step = next(iter(loader))  # torch's loader draws a seed for its workers.
    numbers = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    before = [buffer.clone() for buffer in model.buffers()]
    hooked = []
    handle = model[0].register_forward_hook(lambda *_: hooked.append(1))
    for inputs, targets in step.micro_batches(net):
        step.backward(mean_loss(net, inputs, targets))
    handle.remove()
    return {
        "gradient": flat_gradient(model),
        "buffers_same": all(torch.equal(a, b) for a, b in zip(before, model.buffers())),
        "numbers_same": torch.equal(numbers[0], torch.get_rng_state())
        and numbers[1:] == (random.getstate(), str(np.random.get_state())),
        "layers_ran": len(hooked),
        "forward_is_its_own": "forward" not in model.__dict__,
    }


# -- mixed precision ---------------------------------------------------------------------------


@case
def half_precision():
    def loss(net, inputs, targets):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return mean_loss(net, inputs.float(), targets)

    model = perceptron(dtype=torch.float32)
    return train(plan((26, 15), (9, 15)), model, data(41), loss=loss, shuffle=False)


@case
def overflow_on_one_rank():
    """Rank 1's loss overflows in the second step; all skip that step and halve the scale."""
    model = perceptron(dtype=torch.float32)
    net = DistributedDataParallel(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loader = HeteroDataLoader(data(60), allocation=job_for(plan((7, 0, 5), (3, 1, 5))))
    optimise = optimizer("sgd", model)
    history = []
    for number, step in enumerate(loader):
        for inputs, targets in step.micro_batches(net, scaler=scaler):
            loss = mean_loss(net, inputs.float(), targets)
            if number == 1 and dist.get_rank() == 2:
                loss = loss * float("inf")
            step.backward(loss)
        before = flat(model)
        scaler.unscale_(optimise)
        scaler.step(optimise)
        scaler.update()
        optimise.zero_grad()
        history.append((bool(torch.equal(before, flat(model))), scaler.get_scale()))
        if number == 2:
            break
    return {"history": history, "parameters": flat(model)}


# -- layers that communicate in the forward pass -----------------------------------------------


class Exchange(torch.autograd.Function):
    """Sum over ranks whose backward pass sums too, as SyncBatchNorm's does."""

    @staticmethod
    def forward(context, value):
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class CommunicatingNorm(nn.Module):
    """SyncBatchNorm's arithmetic, which torch has on CUDA only."""

    def forward(self, inputs):
        sums = torch.cat([inputs.sum(0), (inputs**2).sum(0), inputs.new_tensor([len(inputs)])])
        sums = Exchange.apply(sums)
        mean, square = (sums[:-1] / sums[-1]).chunk(2)
        return (inputs - mean) / (square - mean**2 + 1e-5).sqrt()


def communicating(norm):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), norm, nn.ReLU(), nn.Linear(16, CLASSES)).double()


@case
def statistics_over_ranks():
    return train(plan((130, 75)), communicating(CommunicatingNorm()), data(410), steps=1)


@case
def synchronised_batchnorm_is_refused():
    model = communicating(nn.SyncBatchNorm(16))
    outcome = {}
    for name, options in {
        "unequal": {},
        "made_equal": {"equal_micro_batches": True},
    }.items():
        loader = HeteroDataLoader(
            data(80), allocation=job_for(plan((12, 8), (4, 8))), drop_last=True, **options
        )
        try:
            loader._context.check(model)
            outcome[name] = None
        except TrainingError as error:
            outcome[name] = str(error)
    return outcome


@case
def static_graph_is_refused():
    net = DistributedDataParallel(perceptron(), static_graph=True)
    outcome = {}
    for name, micro in {"several": (2, 4), "one": (6, 4)}.items():
        loader = HeteroDataLoader(data(40), allocation=job_for(plan((6, 4), micro)))
        try:
            loader._context.check(net)
            outcome[name] = None
        except TrainingError as error:
            outcome[name] = str(error)
    return outcome


# -- BatchNorm and metrics ---------------------------------------------------------------------


@case
def batchnorm_with_different_counts():
    results = {}
    for name, synchronise in {"own_buffers": False, "copied_buffers": True}.items():
        results[name] = train(
            plan((7, 2, 3), (3, 2, 3)), with_batchnorm(), data(48), epochs=2, min_batch_size=2,
            ddp={"broadcast_buffers": synchronise},
        )["parameters"]  # fmt: skip
    return results


@case
def running_statistics():
    """BatchNorm alone: what it sees does not depend on what was learnt."""
    model = nn.Sequential(nn.BatchNorm1d(6)).double()
    net = DistributedDataParallel(model, broadcast_buffers=False)
    loader = HeteroDataLoader(data(820), allocation=job_for(plan((130, 75))))
    for _ in loader.epochs(10):
        for step in loader:
            for inputs, _ in step.micro_batches(net):
                step.backward(net(inputs).sum())
    own = model[0].running_mean.clone()
    sync_batchnorm(net, step.batch_size)
    return {
        "own": own,
        "mean": model[0].running_mean,
        "variance": model[0].running_var,
        "count": int(model[0].num_batches_tracked),
    }


@case
def metrics():
    mean = Mean()
    sizes, values = [(26, 0.7), (15, 0.6), (0, float("nan"))][dist.get_rank()]
    mean.update(torch.tensor(values), sizes)
    tensor = Mean()
    tensor.update(values, sizes)
    nothing = Mean()
    nothing.update(float("nan"), 0)
    return {"mean": mean.compute(), "again": tensor.compute(), "nothing": nothing.compute()}


@case
def evaluation_without_exchange():
    """Different numbers of batches, none on one rank: nobody waits for anybody."""
    model = with_batchnorm().eval()
    accuracy = Mean()
    loader = HeteroDataLoader(
        data(21), allocation=job_for(plan((5, 0, 3), (2, 1, 3))), shuffle=False
    )
    seen = 0
    with torch.no_grad():
        for step in loader:
            for inputs, targets in step.micro_batches():
                accuracy.update((model(inputs).argmax(1) == targets).double().mean(), len(targets))
                seen += len(targets)
    return {"accuracy": accuracy.compute(), "seen": seen}


# -- comparing notes ---------------------------------------------------------------------------


@case
def stale_plan():
    """Rank 1 holds yesterday's plan."""
    stale = dist.get_rank() == 1
    loader = HeteroDataLoader(data(48), allocation=job_for(plan((5, 5, 2) if stale else (4, 5, 3))))
    try:
        next(iter(loader))
    except TrainingError as error:
        return {"error": str(error)}
    return {"error": None}


@case
def failing_introduction():
    """Rank 2 cannot read its plan: everybody hears of it."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
    mine = Introduction(host="node", gpu="A10", error="no plan" if dist.get_rank() == 2 else None)
    try:
        introduce(mine, group)
    except TrainingError as error:
        return {"error": str(error)}
    return {"error": None}


@case
def wrong_gpus():
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
    gpu = ["NVIDIA A10G", "Tesla T4", "Tesla V100"][dist.get_rank()]
    mine = Introduction(host="node", gpu=gpu, gpu_id=str(dist.get_rank()), plan="same")
    try:
        assign(plan((4, 5, 3), gpus=["T4", "A10", "T4"]), introduce(mine, group))
    except ValueError as error:
        return {"error": str(error)}
    return {"error": None}


@case
def silent_rank():
    """Rank 1 never comes; the others say so in time."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    if dist.get_rank() == 1:
        return {"error": None}
    try:
        agree("plan", "x", group, timeout=2.0)
    except TrainingError as error:
        return {"error": str(error)}
    return {"error": None}


@case
def preflight_finds_lack_of_memory():
    job = job_for(plan((6, 4, 2), gpus=["A10", "T4", "V100"]))
    model = with_batchnorm()
    net = DistributedDataParallel(model, broadcast_buffers=False)
    loader = HeteroDataLoader(data(48), allocation=job)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = torch.get_rng_state(), [b.clone() for b in model.buffers()]
    tried = []

    def loss(network, batch):
        tried.append(len(batch[0]))
        if job.rank == 1 and len(batch[0]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        torch.rand(3)
        return mean_loss(network, *batch)

    errors = []
    for options in ({}, {"max_micro_batch_size": {"T4": 3}}):
        loader = HeteroDataLoader(data(48), allocation=job, **options)
        try:
            loader.preflight(net, loss)
            errors.append(None)
        except TrainingError as error:
            errors.append(str(error))
    return {
        "errors": errors,
        "tried": tried,
        "numbers_same": torch.equal(state[0], torch.get_rng_state()),
        "buffers_same": all(torch.equal(a, b) for a, b in zip(state[1], model.buffers())),
        "gradients_same": all(bool((p.grad == 1).all()) for p in model.parameters()),
    }


@case
def report_without_gpu():
    loader = HeteroDataLoader(data(48), allocation=job_for(plan((6, 4, 2))))
    net = DistributedDataParallel(perceptron())
    import time

    for _ in loader.epochs(1):
        for step in loader:
            for inputs, targets in step.micro_batches(net):
                time.sleep(0.05 * dist.get_rank())
                step.backward(mean_loss(net, inputs, targets))
    report = gather(loader.job, loader.meter, loader._context.clock, 4, 48)
    return {"waited": [gpu.waited for gpu in report.gpus], "time": report.time, "text": str(report)}


def main():
    folder, *names = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]), timeout=timedelta(seconds=30),
    )  # fmt: skip
    status = 0
    try:
        for name in names:
            torch.save(CASES[name](), f"{folder}/{name}.{dist.get_rank()}.pt")
            dist.barrier()
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads now and then abort an interpreter that ends normally.
    os._exit(status)


if __name__ == "__main__":
    main()
