"""Starts scripts under torchrun in tests, with a bounded time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def environment(state, **variables):
    """The process's own without what other tests set; power limits are kept in `state`."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ZEUS_HETERO")}
    return {
        **clean,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "ZEUS_HETERO_SIMULATE_STATE": str(state),
        **variables,
    }


def start(command, folder, **variables):
    return subprocess.Popen(
        [str(part) for part in command], cwd=folder, text=True, start_new_session=True,
        env=environment(Path(folder) / "state", **variables),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process, timeout=120.0):
    """Wait for a process and kill what it started, whatever happens."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout} s:\n{out}\n{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def torchrun(script, *arguments, folder, ranks=2, timeout=120.0, **variables):
    command = [*TORCHRUN, "--standalone", "--nproc_per_node", ranks, script, *arguments]
    return finish(start(command, folder, **variables), timeout)


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def node(port, ranks, *arguments):
    """The command of one of two torchrun agents that meet on loopback."""
    return [
        *TORCHRUN, "--nnodes", 2, "--nproc_per_node", ranks, "--rdzv_id", "test",
        "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", *arguments,
    ]  # fmt: skip


def ranks_of(agent):
    """Pids of the ranks that a torchrun agent has started, by RANK."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (entry / "environ").read_text().split("\0")
        except (OSError, ValueError, IndexError):
            continue
        if parent == agent.pid:
            found.update({int(v[5:]): int(entry.name) for v in variables if v.startswith("RANK=")})
    return found


def wait_for(condition, timeout=60.0):
    """Poll until something is there; returns it."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError("waited in vain")
