"""The subclass of Zeus's own data loader, with the real zeus-ml 0.8.2 and imaginary GPUs.

Run it where that Zeus is installed (.ci/run makes such an environment).
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("zeus.run") is None:
    pytest.skip(
        "this Zeus has no data loader to subclass; needs zeus-ml 0.8.2", allow_module_level=True
    )
torch = pytest.importorskip("torch", reason="torch is not installed: no data loader")

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from fake_nvml import FakeNVML  # noqa: E402
from training_cases import data, distance, perceptron, plan, train_alone  # noqa: E402
from zeus.run import ZeusDataLoader  # noqa: E402

from zeus_hetero import HeteroDataLoader, PlanError, TrainingError  # noqa: E402


def made_plan(limits=(150, 65)):
    from dataclasses import replace

    made = plan((7, 5), (3, 5), gpus=["A10", "T4"], max_power=370.0)
    workers = [replace(worker, power_limit=watts) for worker, watts in zip(made.workers, limits)]
    return replace(made, workers=tuple(workers))


def environment(folder):
    path = os.pathsep.join(map(str, (HERE.parent.parent, HERE.parent, HERE)))
    return {
        **os.environ, "PYTHONPATH": path, "ZEUS_TARGET_METRIC": "0.99", "OMP_NUM_THREADS": "1",
        "ZEUS_LOG_DIR": str(folder / "log"), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("legacy")
    made_plan().save(folder / "plan.json")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "legacy_rank.py"), str(folder), str(rank)],
            env=environment(folder),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        errors = [process.communicate(timeout=100)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    results = [folder / f"rank{rank}.pt" for rank in (0, 1)]
    assert all(path.exists() for path in results), errors
    return folder, [torch.load(path) for path in results]


def test_it_is_zeus_own_loader_and_trains_like_one_process(trained):
    _, results = trained
    expected, _ = train_alone(perceptron(), data(62), (12,), optimizer_name="adamw", epochs=3)
    for result in results:
        assert result["is_zeus"]
        assert distance(result["parameters"], expected) < 1e-12


def test_shares_micro_batches_and_equal_steps(trained):
    _, (first, second) = trained
    assert first["length"] == second["length"] == 6
    assert len(first["steps"]) == len(second["steps"]) == 18
    assert first["steps"][:6] == [(3, 2, 2)] * 5 + [(1,)]
    assert second["steps"][:6] == [(5,)] * 5 + [(1,)]


def test_zeus_measures_all_gpus_and_writes_its_files(trained):
    _, (first, _) = trained
    assert first["energy"] > 0


def test_planned_limits_while_training_and_the_old_ones_after(trained):
    folder, (first, _) = trained
    assert first["limits"] == [150_000, 65_000]
    assert FakeNVML(folder / "limits.json").limits() == [300_000, 70_000]
    assert [path.name for path in (folder / "log").glob("*")] == ["zeus+bs12.train.json"]


@pytest.fixture
def nvml(tmp_path, monkeypatch):
    import pynvml

    before = dict(vars(pynvml)), torch.cuda.synchronize
    monkeypatch.setenv("ZEUS_TARGET_METRIC", "0.9")
    monkeypatch.setenv("ZEUS_LOG_DIR", str(tmp_path / "log"))
    handler = signal.getsignal(signal.SIGTERM)
    fake = FakeNVML(tmp_path / "limits.json")
    fake.install()
    ZeusDataLoader.train_batch_size = 0
    HeteroDataLoader.job_has_plan = False
    yield fake
    vars(pynvml).update(before[0])
    torch.cuda.synchronize = before[1]
    signal.signal(signal.SIGTERM, handler)
    ZeusDataLoader.train_batch_size = 0
    HeteroDataLoader.job_has_plan = False


def test_fixed_part_of_the_data_set(nvml):
    loader = HeteroDataLoader(data(50), batch_size=4, max_epochs=1, gpu_index=1, gpu_split=40)
    assert isinstance(loader, ZeusDataLoader)
    assert len(loader.dataset) == 30
    assert len(loader) == 8


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 4, "max_epochs": 1}, TrainingError, "contradict allocation"),
        ({}, TrainingError, "give it max_epochs"),
        ({"max_epochs": 1}, PlanError, "plan is for 2 workers .A10, T4., but 1 ranks"),
    ],
)
def test_bad_input(nvml, options, error, message):
    with pytest.raises(error, match=message):
        HeteroDataLoader(data(50), allocation=made_plan(), **options)


def test_two_packages_of_zeus_are_refused(nvml, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1")
    with pytest.raises(TrainingError, match="zeus 1 and zeus-ml 1 are both installed"):
        HeteroDataLoader(data(50), batch_size=4, max_epochs=1)
