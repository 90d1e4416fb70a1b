"""The example scripts profile as the original's do, and run as they stand."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from zeus_hetero import load_trace, simulation
from zeus_hetero.bundled import bundled_trace

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"

pytest.importorskip("torchvision")


@pytest.fixture(scope="module")
def common():
    spec = importlib.util.spec_from_file_location("examples_common", EXAMPLES / "common.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["examples_common"] = module
    spec.loader.exec_module(module)
    return module


def run(script, *arguments, cwd):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ZEUS_HETERO")}
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script), *map(str, arguments)],
        cwd=cwd,
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "gpu", "arch", "limits", "sizes"),
    [
        ("cifar100", "T4", "shufflenet_v2_x1_0", [70, 60], [64, 32]),
        ("imagenet", "A10", "resnet18", [300, 100], [32]),
    ],
)
def test_profiling_on_a_simulated_gpu_gives_its_trace_back(
    tmp_path, dataset, gpu, arch, limits, sizes
):
    flags = ["--profile_folder", "p", "--epochs", 1, "--batch_sizes", *sizes]
    flags += ["--power_limits", *limits, "--warmup_steps", 10, "--profile_steps", 40]
    done = run(f"{dataset}/run_profiling.py", *flags, "--simulate", gpu, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("SIMULATED") == 1
    measured = load_trace(tmp_path / "p" / "profiling.json")
    truth = bundled_trace(gpu, dataset)
    chosen = np.isin(truth.batch_size, sizes) & np.isin(truth.power_limit, limits)
    np.testing.assert_allclose(measured.time, truth.time[chosen], rtol=1e-9)
    np.testing.assert_allclose(measured.energy, truth.energy[chosen], rtol=0.02)
    assert (measured.gpu, measured.workload) == (gpu, f"{dataset}/{arch}")
    # The form that the original's parser reads: W, and J and s over the whole window.
    record = json.loads((tmp_path / "p" / "profiling.json").read_text())["32"][0]
    assert record["time"] / record["steps"] == pytest.approx(measured.time[0])
    assert {"power_limit", "energy", "time", "data", "arch", "idle_power"} <= set(record)


def test_training_script_profiles_when_started_by_hand(tmp_path):
    flags = ["--profile", "True", "--profile_path", "b.json", "--batch_size", 32]
    flags += ["--power_limits", 70, "--repeats", 1, "--simulate", "T4"]
    done = run("cifar100/train.py", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert load_trace(tmp_path / "b.json").batch_sizes == (32,)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--power_limits", "70", "--batch_sizes", "0"], "error: batch sizes 0;"),
        (["--power_limits", "90", "--batch_sizes", "32"], "supports whole numbers from 60 to 70 W"),
        (["--power_limits", "65.5", "--batch_sizes", "32"], "invalid int value: '65.5'"),
        (["--power_limits", "70", "--batch_sizes", "60000"], "which has 50000 samples"),
        (["--batch_sizes", "32"], "no power limits"),
    ],
)
def test_bad_flags_end_in_one_sentence(common, capsys, tmp_path, flags, message):
    arguments = ["--profile_folder", str(tmp_path / "p"), *flags]
    with simulation.use("T4"):
        try:
            status = common.run_profiling(Path("train.py"), common.CIFAR100, arguments)
        except SystemExit as stop:  # argparse
            status = stop.code
    assert status == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "p").exists()


def test_without_a_gpu_the_message_says_how_to_simulate_one(tmp_path):
    flags = ["--profile_folder", "p", "--batch_sizes", 32, "--power_limits", 70]
    done = run("cifar100/run_profiling.py", *flags, "--data", "synthetic", cwd=tmp_path)
    if done.returncode == 0:
        pytest.skip("this machine has a GPU")
    assert done.returncode == 2
    assert "use simulated GPUs" in done.stderr
    assert "Traceback" not in done.stderr


def test_dry_run_prints_a_plan(common, capsys, tmp_path):
    arguments = ["--profile_folder", str(tmp_path / "p"), "--batch_sizes", "32", "--dry_run"]
    with simulation.use("T4"):
        status = common.run_profiling(
            Path("train.py"), common.CIFAR100, [*arguments, "--power_limits", "70"]
        )
    assert status == 0
    assert "GPU 0 (T4): batch sizes 32 at 70 W, 3 windows each" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["CIFAR100", "IMAGENET"])
def test_data_that_is_not_there_is_found_before_anything_runs(common, tmp_path, name):
    args = argparse.Namespace(data=str(tmp_path))
    with pytest.raises(SystemExit, match="--data synthetic"):
        common.check_data(args, getattr(common, name))


@pytest.fixture
def tiny_imagenet(tmp_path):
    from PIL import Image

    for label in ("cat", "dog"):
        (tmp_path / "train" / label).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (40, 30)).save(tmp_path / "train" / label / f"{number}.png")
    return tmp_path


def test_number_of_images_is_counted(common, tiny_imagenet):
    args = argparse.Namespace(data=str(tiny_imagenet))
    assert common.check_data(args, common.IMAGENET) == 4


def test_steps_go_on_over_further_epochs(common, tiny_imagenet):
    import torch

    torch.set_num_threads(1)
    args = argparse.Namespace(data=str(tiny_imagenet), arch="resnet18", gpu=0)
    with simulation.use("T4"):
        train = common.build_training_step(args, common.IMAGENET)
        for _ in range(3):  # two batches of two samples are an epoch
            train()


def test_simulated_step_runs_the_model_once_and_then_only_the_clock(common, monkeypatch):
    runs = []
    monkeypatch.setattr(
        common, "build_training_step", lambda args, workload: lambda: runs.append(1)
    )
    with simulation.use("T4") as gpus:
        step = common.TrainingStep(argparse.Namespace(gpu=0), common.CIFAR100)
        for _ in range(5):
            step(64)
        assert gpus[0].steps == 5
    assert runs == [1]


def test_unknown_arch_is_one_sentence(common):
    with pytest.raises(SystemExit, match="--arch lenet: no such model"):
        common.build_model(argparse.Namespace(arch="lenet"), common.CIFAR100)
