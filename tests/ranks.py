"""Runs a test case in several real processes with a gloo group, within a bounded time.

A case is a function of `rank_cases.py`; what it returns is saved per rank and loaded here. One
launch serves several cases, because each process has to import torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent


def run_cases(world_size, names, timeout=120.0):
    """Results as ``{name: [what each rank returned]}``."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
            "WORLD_SIZE": str(world_size),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        ranks = []
        for rank in range(world_size):
            log = open(Path(folder) / f"log{rank}", "w")  # noqa: SIM115
            command = [sys.executable, str(HERE / "rank_cases.py"), folder, *names]
            here = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, env=here, stdout=log, stderr=log))
        deadline = time.monotonic() + timeout
        try:
            for process in ranks:
                process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in ranks:
                process.kill()
        logs = "\n".join(
            f"-- rank {rank}:\n" + (Path(folder) / f"log{rank}").read_text()[-3000:]
            for rank in range(world_size)
        )
        results = {}
        for name in names:
            files = [Path(folder) / f"{name}.{rank}.pt" for rank in range(world_size)]
            missing = [file.name for file in files if not file.exists()]
            assert not missing, f"no result of {missing}:\n{logs}"
            results[name] = [torch.load(file, weights_only=False) for file in files]
        return results
