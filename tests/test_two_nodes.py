"""Two torchrun agents with a rendezvous on loopback: as two nodes with one and two GPUs."""

from __future__ import annotations

import os
import signal
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: no training")

from launch import ROOT, finish, free_port, node, start  # noqa: E402
from training_cases import data, distance, perceptron, plan, train_alone  # noqa: E402

SCRIPT = ROOT / "tests" / "two_nodes.py"


def two_nodes(folder, crash):
    port = free_port()
    agents = []
    for number, gpus in enumerate(("A10", "T4,T4")):
        ranks = len(gpus.split(","))
        command = node(port, ranks, "--max_restarts", 2, SCRIPT, folder, gpus, crash)
        # Without it a restart over several nodes hangs: pytorch/pytorch issue 135712.
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        (folder / f"node{number}").mkdir()
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        agents.append(start(command, folder / f"node{number}", PYTHONPATH=path, **variables))
    try:
        return [finish(agent, timeout=150) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_crash_restart_and_resume_end_where_one_process_ends(tmp_path):
    assert sys.platform.startswith("linux")
    made = plan((7, 2, 3), (3, 2, 1), gpus=["A10", "T4", "T4"])
    for name, watts in (("T4", 65), ("A10", 200)):
        made = with_limit(made, name, watts)
    made.save(tmp_path / "plan.json")
    for done in two_nodes(tmp_path, "crash"):
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "crashed").exists(), "nothing crashed, so nothing was resumed"
    results = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(3)]
    expected, _ = train_alone(perceptron(), data(62), (12,), optimizer_name="adamw", epochs=4)
    for result in results:
        assert torch.equal(result["parameters"], results[0]["parameters"])
        assert distance(result["parameters"], expected) < 1e-12
        assert result["epochs"] == [1, 2, 3], "the first epoch was trained again"
    assert sorted((r["gpu"], r["share"]) for r in results) == [("A10", 7), ("T4", 2), ("T4", 3)]


def with_limit(made, name, watts):
    from dataclasses import replace

    workers = [
        replace(worker, power_limit=watts) if worker.gpu == name else worker
        for worker in made.workers
    ]
    return replace(made, workers=tuple(workers))
