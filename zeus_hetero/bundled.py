"""The measurements that come with the package: A10 and T4 on AWS, CIFAR-100 and ImageNet."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from zeus_hetero.errors import TraceError
from zeus_hetero.trace import Trace, load_trace

# (GPU, workload): file below `trace_aws`. The networks are ShuffleNet V2 and ResNet.
_FILES = {
    ("A10", "cifar100"): "cifar_a10.json",
    ("T4", "cifar100"): "cifar_t4.json",
    ("A10", "imagenet"): "imagenet_a10.json",
    ("T4", "imagenet"): "imagenet_t4.json",
}

BUNDLED_GPUS = tuple(dict.fromkeys(gpu for gpu, _ in _FILES))
BUNDLED_WORKLOADS = tuple(dict.fromkeys(workload for _, workload in _FILES))


def bundled_trace(gpu: str, workload: str = "cifar100") -> Trace:
    """A trace that comes with the package.

    Args:
        gpu: one of `BUNDLED_GPUS`, in any case.
        workload: one of `BUNDLED_WORKLOADS`.

    Returns:
        The measurements of that GPU model in that workload.

    Raises:
        TraceError: there is none.
    """
    key = (gpu.upper(), workload.lower())
    if key not in _FILES:
        raise TraceError(
            f"no bundled trace of GPU {gpu!r} for workload {workload!r}; expected one of "
            f"{', '.join(BUNDLED_GPUS)} and one of {', '.join(BUNDLED_WORKLOADS)}. "
            "Give the path of a trace file for another."
        )
    return _load(*key)


def bundled_folder() -> Path:
    """The folder that holds the bundled trace files.

    Raises:
        TraceError: the installation is incomplete.
    """
    package = Path(__file__).resolve().parent
    # In a wheel the files lie inside the package, in a checkout beside it.
    for folder in (package / "trace_aws", package.parent / "trace_aws"):
        if folder.is_dir():
            return folder
    raise TraceError(
        f"{package}: no folder trace_aws in or beside it; expected the bundled traces. "
        "Install the package again."
    )


@cache
def _load(gpu: str, workload: str) -> Trace:
    return load_trace(bundled_folder() / _FILES[gpu, workload], gpu=gpu)
