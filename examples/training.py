"""Training in the examples: one model on all GPUs of a plan, or one worker of the original."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path

from common import (
    DIGITS,
    Workload,
    add_profiling_flags,
    add_workload_flags,
    build_model,
    check_data,
    profile_training_step,
    start_simulation,
    training_set,
    validation_set,
    yes_or_no,
)

import zeus_hetero
from zeus_hetero import (
    HeteroDataLoader,
    HeteroPowerLimitOptimizer,
    Mean,
    ZeusHeteroError,
    simulation,
    sync_batchnorm,
)


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plan", type=Path, help="train one model on the plan's GPUs (torchrun)")
    parser.add_argument("--gpu_index", type=int, help="0: the first part of the data, 1: the rest")
    parser.add_argument("--gpu_split", type=int, help="percent of the data in the first part")
    parser.add_argument("--power_limit", type=int, metavar="W", help="power limit of this GPU")
    parser.add_argument("--steps", type=int, help="stop after so many training steps")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="write what the training took, as JSON")
    parser.add_argument("--checkpoint", type=Path, help="save to it, resume from it")
    parser.add_argument(
        "--max_micro_batch",
        nargs="+",
        default=[],
        metavar="GPU=B",
        help="samples of a forward-backward pass at most, where memory is short",
    )


def train(args: argparse.Namespace, workload: Workload) -> None:
    """Train as the flags say, and print time and energy at the end."""
    if args.plan is not None:
        train_together(args, workload)
    else:
        train_alone(args, workload)


# -- one model on all GPUs ---------------------------------------------------------------------


def train_together(args: argparse.Namespace, workload: Workload) -> None:
    """One rank of data-parallel training with a plan; start it with torchrun."""
    import torch

    for flag in ("gpu_index", "gpu_split", "power_limit"):
        if getattr(args, flag) is not None:
            raise SystemExit(f"--{flag} contradicts --plan, which says what each GPU does.")
    micro_batches = micro_batch_limits(args.max_micro_batch)
    torch.manual_seed(args.seed)  # The same model on every rank ...
    with zeus_hetero.join(args.plan) as job:
        check_data(args, workload)
        model = job.wrap(build_model(args, workload))
        torch.manual_seed(args.seed + 1 + job.rank)  # ... but not the same dropout.
        loader = HeteroDataLoader(
            training_set(args, workload),
            allocation=job,
            seed=args.seed,
            min_batch_size=2,  # BatchNorm cannot train on one sample.
            max_micro_batch_size=micro_batches,
            max_epochs=args.epochs,
            **loading(args),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
        criterion = torch.nn.CrossEntropyLoss()
        evaluate = Evaluation(args, workload, job.device, job.rank, job.world_size, job.group)

        def loss_of(network, batch):
            images, labels = (part.to(job.device, non_blocking=True) for part in batch)
            return criterion(network(images), labels)

        loader.preflight(model, loss_of)
        resume(args, job.device, model=model, optimizer=optimizer, loader=loader)
        with HeteroPowerLimitOptimizer(loader.monitor, allocation=job.allocation, rank=job.rank):
            steps = 0
            for epoch in loader.epochs():
                mean_loss = Mean(job.group)
                for step in loader:
                    for batch in step.micro_batches(model):
                        mean_loss.update(step.backward(loss_of(model, batch)), len(batch[1]))
                    optimizer.step()
                    optimizer.zero_grad()
                    steps += 1
                    if steps == args.steps:
                        break
                sync_batchnorm(model, job.worker.batch_size, job.group)
                say(job.rank, epoch, mean_loss.compute(), evaluate(model))
                save(args, job.rank, model=model, optimizer=optimizer, loader=loader)
                if steps == args.steps:
                    break
            zeus_hetero.write_report(loader.report(), args.report, job.rank)


def micro_batch_limits(texts: list[str]) -> dict[str, int] | None:
    try:
        limits = {gpu: int(size) for gpu, _, size in (text.partition("=") for text in texts)}
    except ValueError:
        raise SystemExit(
            f"--max_micro_batch {' '.join(texts)}; expected GPU=B, such as T4=256."
        ) from None
    return limits or None


# -- one worker of the original scheme -----------------------------------------------------------


def train_alone(args: argparse.Namespace, workload: Workload) -> None:
    """A fixed part of the data set on one GPU, independent of other GPUs."""
    import torch

    if simulation.active() is None and not torch.cuda.is_available():
        raise SystemExit(
            "error: torch finds no CUDA GPU. Check nvidia-smi, or simulate one with --simulate T4."
        )
    check_data(args, workload)
    torch.manual_seed(args.seed)
    device = torch.device("cpu" if simulation.active() else f"cuda:{args.gpu}")
    model = build_model(args, workload).to(device)
    loader = HeteroDataLoader(
        training_set(args, workload),
        gpu_index=args.gpu_index,
        gpu_split=args.gpu_split,
        batch_size=args.batch_size,
        seed=args.seed,
        device_index=args.gpu,
        **loading(args),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    criterion = torch.nn.CrossEntropyLoss()
    evaluate = Evaluation(args, workload, device)
    limited = nullcontext()
    if args.power_limit is not None:
        limited = HeteroPowerLimitOptimizer(loader.monitor, power_limit=args.power_limit)
    with limited:
        steps = 0
        for epoch in loader.epochs(args.epochs):
            mean_loss = Mean()
            for images, labels in loader:
                images, labels = images.to(device), labels.to(device)
                loss = criterion(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                mean_loss.update(loss, len(labels))
                steps += 1
                if steps == args.steps:
                    break
            say(0, epoch, mean_loss.compute(), evaluate(model))
            if steps == args.steps:
                break
        zeus_hetero.write_report(loader.report(), args.report)


# -- shared by both ------------------------------------------------------------------------------


def loading(args: argparse.Namespace) -> dict:
    on_cpu = simulation.active() is not None
    workers = 0 if on_cpu else args.num_workers
    return {"num_workers": workers, "pin_memory": not on_cpu, "persistent_workers": workers > 0}


class Evaluation:
    """Accuracy on the validation set, where there is one; each rank takes every W-th sample."""

    def __init__(self, args, workload, device, rank=0, world_size=1, group=None) -> None:
        import torch

        dataset = validation_set(args, workload)
        self._device = device
        self._accuracy = Mean(group)
        self._loader = None
        if dataset is not None:
            part = torch.utils.data.Subset(dataset, range(rank, len(dataset), world_size))
            self._loader = torch.utils.data.DataLoader(part, batch_size=256)

    def __call__(self, model) -> float | None:
        """Accuracy between 0 and 1, over all ranks."""
        import torch

        if self._loader is None:
            return None
        network = getattr(model, "module", model)  # Evaluation needs no exchange of gradients.
        network.eval()
        self._accuracy.reset()
        with torch.no_grad():
            for images, labels in self._loader:
                right = network(images.to(self._device)).argmax(1).cpu() == labels
                self._accuracy.update(right.double().mean(), len(labels))
        network.train()
        return self._accuracy.compute()


def say(rank: int, epoch: int, loss: float, accuracy: float | None) -> None:
    if rank == 0:
        note = "" if accuracy is None else f", validation accuracy {accuracy:.1%}"
        print(f"epoch {epoch}: training loss {loss:.4f}{note}", flush=True)


def save(args: argparse.Namespace, rank: int, **parts) -> None:
    import torch

    if args.checkpoint is not None and rank == 0:
        fresh = args.checkpoint.with_suffix(".new")
        torch.save({name: part.state_dict() for name, part in parts.items()}, fresh)
        fresh.replace(args.checkpoint)


def resume(args: argparse.Namespace, device, **parts) -> None:
    import torch

    if args.checkpoint is not None and args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=device)
        for name, part in parts.items():
            part.load_state_dict(saved[name])


def parse_arguments(description: str, workload: Workload) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--batch_size", type=int, default=128, help="samples; a plan has its own")
    add_training_flags(parser)
    add_workload_flags(parser, workload)
    parser.add_argument("--profile", type=yes_or_no, default=False, metavar="True|False")
    parser.add_argument("--profile_path", type=Path, help="file for the result of --profile True")
    add_profiling_flags(parser)
    return parser.parse_args()


def run_training_script(description: str, workload: Workload) -> int:
    """Main program of the training script of an example; its first line describes it in --help.

    Under torchrun an error also reaches the launcher, which shows the one that came first.
    """
    args = parse_arguments(description, workload)

    def program() -> None:
        start_simulation(args, workload)
        chosen = DIGITS if args.data == "digits" else workload
        if args.profile:
            profile_training_step(args, chosen)
        else:
            train(args, chosen)

    if "TORCHELASTIC_RUN_ID" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import record

        program = record(program)
    try:
        program()
    except ZeusHeteroError as error:
        # In one piece, because all ranks write to the same terminal.
        sys.stderr.write(f"error: {error}\n")
        return 2
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Now and then gloo's threads abort an interpreter that ends normally, after all is done.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0
