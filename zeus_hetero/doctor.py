"""What keeps this machine from profiling and training, and the command that mends it.

Each check is a function that looks at one thing and says what it found; none changes anything, and
none may raise.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeus_hetero.device_order import FIX, check_device_order, check_visible_devices
from zeus_hetero.errors import ZeusHeteroError
from zeus_hetero.gpu_names import canonical

if TYPE_CHECKING:
    from rich.table import Table

OK, WARNING, FAILED = "ok", "warning", "failed"
PROFILE, TRAIN = "profile", "train"

_BUSY_RATIO = 0.4  # Idle cards draw a tenth to a quarter of their limit.
_SLOW_COUNTER = 0.2  # s; NVML's move every 0.02 to 0.1 s
_CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: what was looked at.
        status: `OK`, `WARNING` or `FAILED`.
        detail: what was found.
        remedy: the command or action that mends it; empty if nothing is to be mended.
        needed_for: what does not work if it failed: `PROFILE`, `TRAIN`.
    """

    name: str
    status: str
    detail: str
    remedy: str = ""
    needed_for: tuple[str, ...] = ()


def examine(
    *, rendezvous: str | None = None, environment: Mapping[str, str] | None = None
) -> list[Finding]:
    """Run all checks.

    Args:
        rendezvous: HOST:PORT that must be reachable to train over several nodes.
        environment: variables of the process; its own if None.
    """
    variables = os.environ if environment is None else environment
    findings = [check_python(), *check_zeus(), check_driver()]
    findings += check_variables(variables)
    findings += check_gpus(variables)
    findings += check_torch()
    findings += [check_notes()]
    if rendezvous is not None:
        findings.append(check_rendezvous(rendezvous))
    return findings


def can(findings: Iterable[Finding], what: str) -> bool:
    """Whether nothing that is needed for it has failed."""
    return not any(f.status == FAILED and what in f.needed_for for f in findings)


# -- software ------------------------------------------------------------------------------


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


# -- GPUs ----------------------------------------------------------------------------------


def check_variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Environment variables that decide which GPU is meant."""
    try:
        check_visible_devices(environment)
    except ZeusHeteroError as error:
        yield Finding("CUDA_VISIBLE_DEVICES", FAILED, *_split(error), (PROFILE, TRAIN))
    else:
        value = environment.get("CUDA_VISIBLE_DEVICES")
        yield Finding("CUDA_VISIBLE_DEVICES", OK, "not set" if value is None else value)
    daemon = [name for name in environment if name.startswith("ZEUSD_")]
    if daemon:
        yield Finding("zeusd", OK, f"{', '.join(sorted(daemon))}: it sets power limits")
    for name in ("ZEUSD_SOCK_PATH",):
        path = environment.get(name)
        if path and not Path(path).exists():
            yield Finding(
                "zeusd", FAILED, f"{name}={path} is not there",
                f"Start zeusd on the host, mount its socket, or unset {name}.", (PROFILE,),
            )  # fmt: skip


def check_gpus(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Every GPU: its limits, whether they may be set, its counter, and who else is on it."""
    from zeus_hetero import devices, simulation

    try:
        gpus = devices.get_gpus()
    except Exception as error:
        yield Finding("GPUs", FAILED, *_split(error), (PROFILE, TRAIN))
        return
    if not len(gpus):
        yield Finding(
            "GPUs", FAILED, "Zeus sees none",
            "Check nvidia-smi and CUDA_VISIBLE_DEVICES; start containers with --gpus all.",
            (PROFILE, TRAIN),
        )  # fmt: skip
        return
    names = [devices.name(gpus, index) for index in range(len(gpus))]
    mark = " (simulated)" if simulation.active() is not None else ""
    for index, name in enumerate(names):
        who = f"GPU {index} ({name}){mark}"
        yield _check_limits(gpus, index, who)
        yield _check_permission(gpus, index, who)
        yield from _check_idle(index, who)
        yield from _check_processes(gpus, index, who)
    yield _check_order(gpus, names, environment)


def _check_limits(gpus: Any, index: int, who: str) -> Finding:
    from zeus_hetero import devices

    try:
        low, high = devices.limit_range(gpus, index)
        now = devices.read_limit_mw(gpus, index)
    except Exception as error:
        return Finding(who, FAILED, *_split(error), (PROFILE,))
    current = "unknown" if now is None else f"{now / 1000:g} W"
    return Finding(who, OK, f"power limit {current}, between {low} and {high} W")


def _check_permission(gpus: Any, index: int, who: str) -> Finding:
    from zeus_hetero import devices

    try:
        devices.check_permission(gpus, index)
    except Exception as error:
        return Finding(f"{who}: permission", FAILED, *_split(error), (PROFILE, TRAIN))
    return Finding(f"{who}: permission", OK, "power limits may be set")


def _check_idle(index: int, who: str) -> Iterator[Finding]:
    from zeus_hetero.measure import measure_idle
    from zeus_hetero.profiled_gpu import ProfiledGPU

    try:
        gpu = ProfiledGPU(index)
        idle = measure_idle(gpu)
    except Exception as error:
        yield Finding(f"{who}: energy counter", FAILED, *_split(error), (PROFILE,))
        return
    period = f"moves every {1000 * idle.counter_period:.0f} ms"
    if idle.counter_period > _SLOW_COUNTER:
        yield Finding(
            f"{who}: energy counter", WARNING, f"{period}, seldom",
            f"Profile with long windows: --warmup_time {max(5, round(5 * idle.counter_period))} "
            "--counter_ticks 20",
        )  # fmt: skip
    else:
        yield Finding(f"{who}: energy counter", OK, period)
    if idle.power > _BUSY_RATIO * gpu.power_range[1]:
        yield Finding(
            f"{who}: idle", WARNING,
            f"draws {idle.power:.0f} W while it should idle; something may be running on it",
            "See who it is with nvidia-smi, and wait or stop it before profiling.",
        )  # fmt: skip
    else:
        yield Finding(f"{who}: idle", OK, f"draws {idle.power:.0f} W")


def _check_processes(gpus: Any, index: int, who: str) -> Iterator[Finding]:
    """Other processes on the GPU, as NVML tells them, and its MIG mode."""
    from zeus_hetero import devices

    gpu = gpus.gpus[index]
    if not devices.is_nvidia(gpu):
        return
    from zeus.device.gpu import nvidia

    nvml, handle = nvidia.pynvml, getattr(gpu, "handle", None)
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        others = [str(process.pid) for process in running if process.pid != os.getpid()]
    except Exception:  # Not allowed to know, as in some containers.
        others = []
    if others:
        yield Finding(
            f"{who}: processes", WARNING, f"in use by process {', '.join(others)}",
            f"Wait for it, or end it: kill {' '.join(others)}",
        )  # fmt: skip
    try:
        mig, _ = nvml.nvmlDeviceGetMigMode(handle)
    except Exception:  # A GPU that has no MIG.
        return
    if mig:
        physical = devices.physical_index(gpus, index)
        yield Finding(
            f"{who}: MIG", FAILED, "is on; slices have no power limit and no energy counter",
            f"nvidia-smi -i {physical} -mig 0", (PROFILE, TRAIN),
        )  # fmt: skip


def _check_order(gpus: Any, names: list[str], environment: Mapping[str, str]) -> Finding:
    try:
        check_device_order(gpus, range(len(names)))
    except ZeusHeteroError as error:
        return Finding("order of GPUs", FAILED, *_split(error), (PROFILE, TRAIN))
    mixed = len({canonical(name) for name in names}) > 1
    from zeus_hetero import simulation

    by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if mixed and not by_bus and simulation.active() is None:
        return Finding(
            "order of GPUs",
            WARNING,
            "different models, and CUDA numbers them fastest first, the driver by PCI address",
            f"export CUDA_DEVICE_ORDER=PCI_BUS_ID ({FIX})",
        )
    return Finding("order of GPUs", OK, "CUDA and the driver agree" if mixed else "all alike")


def check_notes() -> Finding:
    """Power limits that killed runs have left changed."""
    from zeus_hetero.restore import note_folder, read_note

    folder = note_folder()
    left = []
    for path in sorted(folder.glob("limits-*.json")):
        try:
            if not read_note(path).owner_is_alive:
                left.append(path.name)
        except ZeusHeteroError:
            continue
    if left:
        detail = f"{folder}: {len(left)} killed runs have left power limits changed"
        return Finding("killed runs", WARNING, detail, "zeus-hetero reset")
    return Finding("killed runs", OK, "none has left a power limit changed")


# -- network -------------------------------------------------------------------------------


def check_rendezvous(address: str, timeout: float = _CONNECT_SECONDS) -> Finding:
    """Whether another node's rendezvous can be reached.

    Args:
        address: HOST:PORT, as for ``torchrun --rdzv_endpoint``.
        timeout: s.
    """
    name = f"rendezvous {address}"
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        return Finding(
            name, FAILED, "no address", "Give HOST:PORT, such as --rendezvous 10.0.0.5:29500.",
            (TRAIN,),
        )  # fmt: skip
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout):
            return Finding(name, OK, "reachable")
    except socket.gaierror as error:
        detail = f"the name cannot be resolved ({error.strerror})"
        remedy = "Use the node's address instead of its name."
    except ConnectionRefusedError:
        detail = "the node answers, but nobody listens on this port"
        remedy = (
            "Start torchrun on that node first (it waits for the others), with the same "
            "--rdzv_endpoint."
        )
    except (TimeoutError, socket.timeout):
        detail = f"no answer in {timeout:g} s"
        remedy = (
            f"Open port {port} between the nodes (security group, firewall); in containers use "
            "--network host."
        )
    except OSError as error:
        detail = str(error.strerror or error)
        remedy = (
            "Check the network; several interfaces: export GLOO_SOCKET_IFNAME=eth0 "
            "NCCL_SOCKET_IFNAME=eth0"
        )
    return Finding(name, FAILED, detail, remedy, (TRAIN,))


# -- telling -------------------------------------------------------------------------------


def as_table(findings: Iterable[Finding]) -> Table:
    """The findings as a table for the terminal."""
    from rich.table import Table
    from rich.text import Text

    colours = {OK: "green", WARNING: "yellow", FAILED: "red"}
    table = Table(show_lines=False)
    for header in ("", "what", "found", "to mend it"):
        table.add_column(header, overflow="fold")
    for finding in findings:
        table.add_row(
            Text(finding.status, style=colours[finding.status]),
            Text(finding.name),
            Text(finding.detail),
            Text(finding.remedy),
        )
    return table


def summary(findings: list[Finding]) -> str:
    """One line: what this machine can do."""
    answers = {True: "yes", False: "no"}
    return (
        f"can allocate: yes, can profile: {answers[can(findings, PROFILE)]}, "
        f"can train: {answers[can(findings, TRAIN)]}"
    )


def _split(error: BaseException) -> tuple[str, str]:
    """An error's text as what was found and what to do: its first sentence, and the rest."""
    text = str(error).strip() or type(error).__name__
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if depth == 0 and sign == "." and re.match(r"\s+[A-Z]", text[place + 1 :]):
            return text[: place + 1], text[place + 1 :].strip()
    return text, "See the message."


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
