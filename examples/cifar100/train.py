r"""Train a torchvision model on CIFAR-100, or profile a training step of it.

One model on two GPUs, with the shares and power limits of a plan (on simulated GPUs with
``--simulate A10,T4``; ``--data digits`` shows a real learning curve on a CPU)::

    torchrun --nproc_per_node 2 train.py --plan plan.json --epochs 10

One worker of the original scheme, which trains 40 percent of the data on this GPU alone::

    python train.py --epochs 10 --power_limit 60 --gpu_index 0 --gpu_split 40

A training step profiled at one batch size; ``run_profiling.py`` does this for every batch size::

    python train.py --profile True --profile_path batch_32.json --batch_size 32 \
        --power_limits 70 65 60
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import CIFAR100
from training import run_training_script

if __name__ == "__main__":
    sys.exit(run_training_script(__doc__, CIFAR100))
