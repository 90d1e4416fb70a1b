"""What the examples share: the two workloads, a training step, and the flags for profiling."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from zeus_hetero import (
    ProfilingGrid,
    ZeusHeteroError,
    load_trace,
    profile,
    profile_script_adaptively,
    simulation,
)

SYNTHETIC = "synthetic"


@dataclass(frozen=True)
class Workload:
    """A data set and the network that is trained on it by default.

    Attributes:
        name: as in traces.
        arch: name of a torchvision model.
        classes: number of classes.
        image_size: pixels, height and width.
        train_size: samples in the training set.
    """

    name: str
    arch: str
    classes: int
    image_size: int
    train_size: int


CIFAR100 = Workload("cifar100", "shufflenet_v2_x1_0", 100, 32, 50_000)
IMAGENET = Workload("imagenet", "resnet18", 1000, 224, 1_281_167)
# scikit-learn's 1,797 images of handwritten digits; the last 297 are for validation.
DIGITS = Workload("digits", "small_cnn", 10, 32, 1_500)


# -- flags ---------------------------------------------------------------------------------


def add_workload_flags(parser: argparse.ArgumentParser, workload: Workload) -> None:
    parser.add_argument(
        "--arch",
        help=f"name of a torchvision model ({workload.arch}), or small_cnn, which a CPU can train",
    )
    parser.add_argument(
        "--data",
        help=f"folder of the data set, '{SYNTHETIC}' for generated images, or '{DIGITS.name}' for "
        "the digits of scikit-learn; by default 'data', on simulated GPUs 'synthetic'",
    )
    parser.add_argument("--num_workers", type=int, default=4, help="data loader processes")
    parser.add_argument("--gpu", type=int, default=0, help="index of the GPU")
    parser.add_argument(
        "--simulate",
        metavar="NAMES",
        help="simulate GPUs: A10, T4, paths of traces; separated by commas",
    )


def add_profiling_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--power_limits", type=int, nargs="+", metavar="W", help="power limits to profile"
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=1,
        help="profiling goes on over further epochs until all windows are complete",
    )
    parser.add_argument("--warmup_steps", type=int, default=10, help="steps before a window")
    parser.add_argument("--warmup_time", type=float, default=1.0, help="s before a window")
    parser.add_argument("--profile_steps", type=int, default=40, help="steps in a window, at least")
    parser.add_argument(
        "--counter_ticks",
        type=int,
        default=50,
        help="movements of the energy counter in a window, at least; 50 keep its error below 2%%",
    )
    parser.add_argument("--repeats", type=int, default=3, help="windows per point")


def yes_or_no(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r}; expected True or False")
    return text.lower() == "true"


# -- devices, data, models -----------------------------------------------------------------


def start_simulation(args: argparse.Namespace, workload: Workload) -> None:
    """Simulate GPUs for the rest of this process, if flag or environment asks for it."""
    if args.simulate:
        simulation.use(*simulation.parse_gpus(args.simulate, workload.name)).install()
    else:
        simulation.install_from_environment()
    if args.data is None:
        args.data = SYNTHETIC if simulation.active() else "data"
    if args.arch is None:
        args.arch = DIGITS.arch if args.data == DIGITS.name else workload.arch


def check_data(args: argparse.Namespace, workload: Workload) -> int:
    """Check that the training set is there; returns its number of samples."""
    if args.data in (SYNTHETIC, DIGITS.name):
        return workload.train_size
    folder = Path(args.data)
    if workload is CIFAR100:
        if not (folder / "cifar-100-python" / "train").is_file():
            raise SystemExit(
                f"{folder}: no folder cifar-100-python with CIFAR-100 in it. Download it with "
                f"torchvision.datasets.CIFAR100({str(folder)!r}, download=True), or use "
                f"--data {SYNTHETIC}."
            )
        return workload.train_size
    if not any(path.is_dir() for path in folder.glob("train/*")):
        raise SystemExit(
            f"{folder / 'train'}: no folders of images, one per class. Give the folder of "
            f"ImageNet with --data, or use --data {SYNTHETIC}."
        )
    return sum(1 for path in folder.glob("train/*/*") if path.is_file())


def training_set(args: argparse.Namespace, workload: Workload):
    from torchvision import datasets, transforms

    if args.data == SYNTHETIC:
        size = (3, workload.image_size, workload.image_size)
        return datasets.FakeData(workload.train_size, size, workload.classes, transforms.ToTensor())
    if args.data == DIGITS.name:
        return digits(train=True)
    if workload is CIFAR100:
        augment = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
        transform = transforms.Compose([*augment, transforms.ToTensor()])
        return datasets.CIFAR100(args.data, train=True, transform=transform)
    augment = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
    transform = transforms.Compose([*augment, transforms.ToTensor()])
    return datasets.ImageFolder(str(Path(args.data) / "train"), transform)


def validation_set(args: argparse.Namespace, workload: Workload):
    """Images to measure accuracy on; None for generated ones and where there is no folder."""
    from torchvision import datasets, transforms

    if args.data == SYNTHETIC:
        return None
    if args.data == DIGITS.name:
        return digits(train=False)
    if workload is CIFAR100:
        return datasets.CIFAR100(args.data, train=False, transform=transforms.ToTensor())
    folder = Path(args.data) / "val"
    if not any(path.is_dir() for path in folder.glob("*")):
        return None
    crop = [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()]
    return datasets.ImageFolder(str(folder), transforms.Compose(crop))


def digits(train: bool):
    """Real images that come with scikit-learn, resized to those of CIFAR-100."""
    import torch
    from sklearn.datasets import load_digits

    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = images.float().reshape(-1, 1, 8, 8) / 16
    size = (DIGITS.image_size, DIGITS.image_size)
    images = torch.nn.functional.interpolate(images, size, mode="bilinear").expand(-1, 3, -1, -1)
    part = slice(0, DIGITS.train_size) if train else slice(DIGITS.train_size, None)
    return torch.utils.data.TensorDataset(images[part], labels[part])


def small_cnn(classes: int):
    """A network that a CPU trains in seconds."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * 16, classes),
    )  # fmt: skip


def build_model(args: argparse.Namespace, workload: Workload):
    from torchvision import models

    if args.arch == DIGITS.arch:
        return small_cnn(workload.classes)
    if args.arch not in models.list_models(module=models):
        raise SystemExit(f"--arch {args.arch}: no such model in torchvision.models.")
    return models.get_model(args.arch, weights=None, num_classes=workload.classes)


# -- profiling -----------------------------------------------------------------------------


class TrainingStep:
    """Forward, backward and optimizer step of one batch size, on the GPU.

    On a simulated GPU the model runs once, on two samples, so that an error in it shows; from
    then on only the virtual clock moves. Epochs follow each other without end.
    """

    def __init__(self, args: argparse.Namespace, workload: Workload) -> None:
        self._args = args
        self._workload = workload
        self._simulated = simulation.active()
        self._train: Callable[[], None] | None = None

    def __call__(self, batch_size: int) -> None:
        """Run one step."""
        first = self._train is None
        if self._train is None:
            # Not before: the profiler first looks at the GPU while nothing is on it.
            self._train = build_training_step(self._args, self._workload)
        if self._simulated is None or first:
            self._train()
        if self._simulated is not None:
            self._simulated[self._args.gpu].run_step(batch_size)


def build_training_step(args: argparse.Namespace, workload: Workload) -> Callable[[], None]:
    """A training step on the next batch of `--batch_size` (2 on a simulated GPU)."""
    import torch

    on_cpu = simulation.active() is not None
    device = torch.device("cpu" if on_cpu else f"cuda:{args.gpu}")
    model = build_model(args, workload).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = torch.nn.CrossEntropyLoss().to(device)
    loader = torch.utils.data.DataLoader(
        training_set(args, workload),
        batch_size=2 if on_cpu else args.batch_size,
        shuffle=True,
        num_workers=0 if on_cpu else args.num_workers,
        pin_memory=not on_cpu,
        drop_last=True,
    )
    batches = endless(loader)

    def train() -> None:
        images, labels = next(batches)
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        loss(model(images), labels).backward()
        optimizer.step()

    return train


def endless(loader: Iterable) -> Iterator:
    """One epoch after the other, so that no window is cut short."""
    while True:
        yield from loader


def profile_training_step(args: argparse.Namespace, workload: Workload) -> None:
    """Profiling mode of a training script: measure one batch size, write `--profile_path`."""
    if not args.profile_path or not args.power_limits:
        raise SystemExit("--profile True needs --profile_path and --power_limits.")
    check_data(args, workload)
    trace = profile(
        TrainingStep(args, workload),
        [args.batch_size],
        args.power_limits,
        gpu_index=args.gpu,
        fields={
            "dataset": workload.name,
            "arch": args.arch,
            "data": origin(args),
        },
        **windows(args),
    )
    trace.save(args.profile_path)
    print(trace)


def origin(args: argparse.Namespace) -> str:
    """What traces say of the data, which must not depend on where the files are."""
    return args.data if args.data in (SYNTHETIC, DIGITS.name) else "files"


def windows(args: argparse.Namespace) -> dict:
    names = ("warmup_steps", "warmup_time", "profile_steps", "counter_ticks", "repeats")
    return {name: getattr(args, name) for name in names}


def run_profiling(script: Path, workload: Workload, arguments: Sequence[str] | None = None) -> int:
    """Main program of the `run_profiling.py` of an example.

    Args:
        script: the training script to profile.
        workload: what it trains.
        arguments: of the command line.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(
        description=f"Profile {script.name} over batch sizes and power limits. Run it again after "
        "an interruption: only what is missing is measured."
    )
    parser.add_argument("--profile_folder", required=True, help="folder for the results")
    parser.add_argument("--batch_sizes", type=int, nargs="+", required=True, metavar="B")
    add_profiling_flags(parser)
    add_workload_flags(parser, workload)
    parser.add_argument("--resume", action="store_true", help="fail if there is nothing to resume")
    parser.add_argument("--overwrite", action="store_true", help="delete earlier results first")
    parser.add_argument("--dry_run", action="store_true", help="print the plan and its duration")
    parser.add_argument(
        "--adaptive",
        action="store_true",
        help="measure only the points that matter, until the expected regret is within --target",
    )
    parser.add_argument("--target", type=float, default=0.01, help="expected regret to stop at")
    parser.add_argument(
        "--with_trace",
        nargs="*",
        default=[],
        metavar="NAME=TRACE",
        help="with --adaptive: traces of the GPUs that this one will train with",
    )
    args = parser.parse_args(arguments)
    return friendly(lambda: _run_profiling(script, workload, args))


def _run_profiling(script: Path, workload: Workload, args: argparse.Namespace) -> int:
    from zeus_hetero.measure import Windows
    from zeus_hetero.profile_run import Grid, profile_with_script

    start_simulation(args, workload)
    if args.data == DIGITS.name:
        workload = DIGITS
    dataset_size = check_data(args, workload)

    def command(limits: Sequence[int], batch_size: int, result: Path) -> list[str]:
        flags = {
            "--profile": True,
            "--profile_path": result,
            "--batch_size": batch_size,
            "--epochs": args.epochs,
            "--arch": args.arch,
            "--data": args.data,
            "--num_workers": args.num_workers,
            "--gpu": args.gpu,
            **{f"--{name}": value for name, value in windows(args).items()},
        }
        pairs = [str(part) for pair in flags.items() for part in pair]
        return [sys.executable, str(script), *pairs, "--power_limits", *map(str, limits)]

    def grid(sizes: Sequence[int], limits: Sequence[int], folder: str | Path) -> Grid:
        return Grid(
            folder=folder,
            command=partial(command, limits),
            batch_sizes=sizes,
            power_limits=limits,
            gpu_index=args.gpu,
            windows=Windows(**windows(args)),
            settings={
                "dataset": workload.name,
                "arch": args.arch,
                "data": origin(args),
            },
            dataset_size=dataset_size,
        )

    limits = args.power_limits or ()
    if args.adaptive and not args.dry_run:
        return _run_adaptively(grid, args)
    return profile_with_script(
        grid(args.batch_sizes, limits, args.profile_folder),
        resume=args.resume,
        overwrite=args.overwrite,
        dry_run=args.dry_run,
    )


def _run_adaptively(grid: Callable, args: argparse.Namespace) -> int:
    others = dict(pair.partition("=")[::2] for pair in args.with_trace)
    return profile_script_adaptively(
        lambda size, limits, folder: grid([size], limits, folder),
        args.profile_folder,
        "this GPU",
        ProfilingGrid(tuple(args.batch_sizes), tuple(args.power_limits or ())),
        others={name: load_trace(path) for name, path in others.items()},
        overwrite=args.overwrite,
        target=args.target,
    )


def friendly(program: Callable[[], int | None]) -> int:
    """Run a program; an error that it foresees is one sentence, not a traceback."""
    try:
        return program() or 0
    except ZeusHeteroError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
