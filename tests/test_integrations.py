"""Other frameworks train uneven shares like one process, with the real libraries, on two ranks."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: no training")

from launch import ROOT, torchrun  # noqa: E402
from training_cases import data, distance, perceptron, plan, train_alone  # noqa: E402

from zeus_hetero import Allocation, TrainingError  # noqa: E402

LIBRARY = {"accelerate": "accelerate", "huggingface": "transformers", "lightning": "lightning"}


def made_plan(micro=(4, 5)):
    from dataclasses import replace

    made = plan((7, 5), micro, gpus=["A10", "T4"])
    limits = (200, 65)
    workers = [replace(worker, power_limit=watts) for worker, watts in zip(made.workers, limits)]
    return replace(made, workers=tuple(workers))


def train(framework, folder, drop_last):
    made_plan().save(folder / "plan.json")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = torchrun(
        ROOT / "tests" / "framework_rank.py", framework, folder, folder=folder, PYTHONPATH=path,
        ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    results = [torch.load(folder / f"{framework}{rank}.pt") for rank in (0, 1)]
    expected, _ = train_alone(
        perceptron(), data(62), (12,), optimizer_name="adamw", epochs=2, drop_last=drop_last
    )
    return results, expected


@pytest.mark.slow
@pytest.mark.parametrize("framework", LIBRARY)
def test_trains_like_one_process_at_the_planned_limits(framework, tmp_path):
    pytest.importorskip(LIBRARY[framework], reason=f"{LIBRARY[framework]} is not installed")
    drop_last = framework != "accelerate"
    results, expected = train(framework, tmp_path, drop_last)
    for result in results:
        assert torch.equal(result["parameters"], results[0]["parameters"])
        assert distance(result["parameters"], expected) < 1e-9
        assert result["steps"] == (10 if drop_last else 12)
        assert result["limits"] == [200, 65]
        assert result["time"] > 0


@pytest.mark.slow
def test_accelerate_example_runs(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    made_plan().save(tmp_path / "plan.json")
    script = ROOT / "examples" / "integrations" / "accelerate_train.py"
    done = torchrun(
        script, "--plan", "plan.json", "--simulate", "A10,T4", "--epochs", 1, folder=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "epoch 0: training loss" in done.stdout
    assert "Time (s):" in done.stdout


def test_trainer_needs_the_plans_number_of_micro_batches(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from framework_rank import Rows, WithLoss
    from transformers import TrainingArguments

    from zeus_hetero.integrations.huggingface import HeteroTrainer, accumulation_steps
    from zeus_hetero.job import Job

    job = Job(plan((12,), (5,)))
    assert isinstance(job.allocation, Allocation)
    assert accumulation_steps(job) == 3
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(TrainingError, match="steps is 1, but this plan needs 3"):
        HeteroTrainer(job=job, model=WithLoss(), args=arguments, train_dataset=Rows(data(24)))
