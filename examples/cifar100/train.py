"""Train a torchvision model on CIFAR-100, or profile a training step of it.

For example ``train.py --profile True --profile_path batch_32.json --batch_size 32
--power_limits 70 65 60``; ``run_profiling.py`` does this for every batch size.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import (
    CIFAR100,
    add_profiling_flags,
    add_workload_flags,
    friendly,
    profile_training_step,
    start_simulation,
    yes_or_no,
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--profile", type=yes_or_no, default=False, metavar="True|False")
    parser.add_argument("--profile_path", type=Path, help="file for the result of --profile True")
    add_profiling_flags(parser)
    add_workload_flags(parser, CIFAR100)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    start_simulation(args, CIFAR100)
    if args.profile:
        profile_training_step(args, CIFAR100)
        return
    raise SystemExit("only --profile True is here so far.")


if __name__ == "__main__":
    sys.exit(friendly(main))
