"""What the doctor checks of the installed software."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zeus_hetero.doctor.finding import FAILED, OK, PROFILE, TRAIN, WARNING, Finding


def check_python() -> Finding:
    """The version of Python."""
    return Finding("Python", OK, platform.python_version())


def check_zeus(version: Callable[[str], str] = importlib.metadata.version) -> list[Finding]:
    """Which Zeus is installed, and whether another one hides it.

    Args:
        version: gives the version of an installed package.
    """
    found: dict[str, str] = {}
    for package in ("zeus", "zeus-ml"):
        try:
            found[package] = version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if not found:
        return [
            Finding("Zeus", FAILED, "not installed", "pip install 'zeus>=0.12'", (PROFILE, TRAIN))
        ]
    if len(found) == 2:
        return [
            Finding(
                "Zeus",
                FAILED,
                f"zeus {found['zeus']} and zeus-ml {found['zeus-ml']} hide parts of each other",
                "pip uninstall -y zeus-ml zeus && pip install 'zeus>=0.12'",
                (PROFILE, TRAIN),
            )
        ]
    if "zeus-ml" in found:
        return [
            Finding(
                "Zeus",
                WARNING,
                f"zeus-ml {found['zeus-ml']}: only its data loader is supported",
                "pip uninstall -y zeus-ml && pip install 'zeus>=0.12'",
            )
        ]
    if _numbers(found["zeus"]) < (0, 12):
        detail = f"zeus {found['zeus']}; expected 0.12 or newer"
        remedy = "pip install --upgrade 'zeus>=0.12'"
        return [Finding("Zeus", FAILED, detail, remedy, (PROFILE, TRAIN))]
    return [Finding("Zeus", OK, f"zeus {found['zeus']}")]


def check_driver(path: Path = Path("/proc/driver/nvidia/version")) -> Finding:
    """The version of NVIDIA's driver.

    Args:
        path: where the driver says it.
    """
    from zeus_hetero import simulation
    from zeus_hetero.profiling import driver_version

    if simulation.active() is not None:
        return Finding("driver", OK, "none needed: GPUs are simulated")
    if path.exists():
        version = driver_version(path.read_text(encoding="utf-8"))
        return Finding("driver", OK, f"NVIDIA {version or 'of unknown version'}")
    if Path("/dev/kfd").exists():
        return Finding("driver", OK, "AMD")
    return Finding(
        "driver", FAILED, "no NVIDIA or AMD driver is loaded",
        "Install it on the host and check it with nvidia-smi; start containers with "
        "docker run --gpus all. Without a GPU: --simulate A10,T4.", (PROFILE, TRAIN),
    )  # fmt: skip


def check_torch(torch: Any = None) -> Iterator[Finding]:
    """Whether torch is there, and sees the GPUs.

    Args:
        torch: the module; imported if None.
    """
    from zeus_hetero import simulation

    if torch is None:
        try:
            import torch
        except ImportError as error:
            yield Finding(
                "torch", FAILED, f"cannot be imported ({error})",
                "pip install 'zeus-hetero[train]'", (TRAIN,),
            )  # fmt: skip
            return
    yield Finding("torch", OK, str(torch.__version__))
    try:
        import torchvision

        yield Finding("torchvision", OK, str(torchvision.__version__))
    except Exception as error:
        yield Finding(
            "torchvision", WARNING, f"cannot be imported ({error}); the examples need it",
            "pip install --upgrade torch torchvision",
        )  # fmt: skip
    simulated = simulation.active() is not None
    backends = [
        name
        for name in ("gloo", "nccl")
        if torch.distributed.is_available() and getattr(torch.distributed, f"is_{name}_available")()
    ]
    needed = "gloo" if simulated else "nccl"
    if "gloo" in backends and needed in backends:
        yield Finding("torch.distributed", OK, " and ".join(backends))
    else:
        yield Finding(
            "torch.distributed", FAILED, f"{', '.join(backends) or 'nothing'}; {needed} and gloo "
            "are needed", "Install a build of torch with CUDA: pip install torch", (TRAIN,),
        )  # fmt: skip
    if not simulated:
        yield from _check_cuda(torch)


def _check_cuda(torch: Any) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        yield Finding(
            "CUDA in torch", FAILED,
            "no GPU for torch" + (f", which is built for CUDA {built}" if built else
                                  ", which is built without CUDA"),
            "Compare torch.version.cuda with the CUDA version that nvidia-smi shows, and install "
            "a build of torch for it.", (TRAIN,),
        )  # fmt: skip
        return
    known = set(torch.cuda.get_arch_list())
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        # A binary for an older minor version of the same architecture runs too.
        fits = any(f"sm_{major}{older}" in known for older in range(minor + 1))
        if fits:
            yield Finding("CUDA in torch", OK, f"GPU {index} ({name}): sm_{major}{minor}")
        else:
            yield Finding(
                "CUDA in torch", FAILED,
                f"GPU {index} ({name}) is sm_{major}{minor}; this torch is built for "
                f"{', '.join(sorted(known))}",
                "Install a torch that still has this architecture.", (TRAIN,),
            )  # fmt: skip


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
