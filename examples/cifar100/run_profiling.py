"""Profile training on CIFAR-100 over batch sizes and power limits.

    python run_profiling.py --profile_folder t4 --batch_sizes 32 64 128 --power_limits 70 65 60

The result is t4/profiling.json. Add `--simulate T4` to try it without a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import CIFAR100, run_profiling

if __name__ == "__main__":
    sys.exit(run_profiling(Path(__file__).resolve().parent / "train.py", CIFAR100))
