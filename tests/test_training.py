"""The example scripts train as planned, under torchrun and alone, and fail in order."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

pytest.importorskip("torchvision", reason="torchvision is not installed: no examples")

from launch import (
    ROOT,
    TORCHRUN,
    environment,
    finish,
    free_port,
    node,
    ranks_of,
    start,
    torchrun,
    wait_for,
)

from zeus_hetero import Allocation, allocate, load_trace

TRAIN = ROOT / "examples" / "cifar100" / "train.py"
IMAGENET = ROOT / "examples" / "imagenet" / "train_single.py"
WAIT_POWER = {"A10": 55.0, "T4": 27.0}
MOST = [300, 70]
DIGITS = ("--data", "digits")
# The training lasts 2 s, in which counters that move every 0.1 s would be off by 5 %.
FINE_COUNTERS = json.dumps([{"name": gpu, "counter_period": 0.01} for gpu in WAIT_POWER])


@pytest.fixture(scope="module")
def traces():
    return {gpu: load_trace(ROOT / f"trace_aws/cifar_{gpu.lower()}.json") for gpu in ("A10", "T4")}


@pytest.fixture(scope="module")
def made_plan(traces):
    return allocate(traces, 300, wait_power=WAIT_POWER)


@pytest.fixture
def folder(tmp_path, made_plan):
    made_plan.save(tmp_path / "plan.json")
    return tmp_path


def limits(folder):
    """Power limits of the simulated GPUs, W."""
    files = [folder / "state" / f"gpu{index}.json" for index in (0, 1)]
    changed = [json.loads(file.read_text())[0] // 1000 if file.exists() else None for file in files]
    return [watts or most for watts, most in zip(changed, MOST)]


def failures(done):
    return re.findall(r"^error: (.*)", done.stderr, re.MULTILINE)


# -- one model on two GPUs -----------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory, made_plan):
    folder = tmp_path_factory.mktemp("trained")
    made_plan.save(folder / "plan.json")
    done = torchrun(
        TRAIN, "--plan", "plan.json", "--simulate", FINE_COUNTERS, *DIGITS, "--epochs", 10,
        "--report", "report.json", "--lr", 0.05, folder=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.mark.slow
def test_two_gpus_train_one_model_that_learns(trained):
    _, done = trained
    losses = [float(loss) for loss in re.findall(r"training loss ([\d.]+)", done.stdout)]
    accuracy = re.findall(r"accuracy ([\d.]+)%", done.stdout)
    assert len(losses) == 10
    assert losses[-1] < 0.3 * losses[0]
    assert float(accuracy[-1]) > 75


@pytest.mark.slow
def test_time_and_energy_are_as_planned_and_marked_as_simulated(trained):
    folder, done = trained
    report = json.loads((folder / "report.json").read_text())
    assert report["simulated"]
    assert report["time"] == pytest.approx(report["predicted_time"], rel=0.02)
    assert report["energy"] == pytest.approx(report["predicted_energy"], rel=0.02)
    time, joules = f"{report['time']:.2f}", f"{report['energy']:.2f}"
    assert done.stdout.rstrip().splitlines()[-3:-1] == [
        f"Time (s): {time} (simulated)", f"Energy (J): {joules} (simulated)"
    ]  # fmt: skip
    assert "[SIMULATED]" in done.stdout
    assert done.stderr.count("SIMULATED GPUs") == 1


@pytest.mark.slow
def test_planned_power_limits_hold_while_training_and_are_restored(trained, made_plan):
    folder, _ = trained
    report = json.loads((folder / "report.json").read_text())
    planned = [worker.power_limit for worker in made_plan.workers]
    assert [gpu["power_limit"] for gpu in report["gpus"]] == planned
    assert limits(folder) == MOST
    assert planned != MOST, "the plan changes no limit, so nothing was shown"


@pytest.mark.slow
def test_ranks_in_another_order_than_the_plan(folder):
    done = torchrun(
        TRAIN, "--plan", "plan.json", "--simulate", "T4,A10", *DIGITS, "--epochs", 1,
        "--report", "report.json", folder=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "report.json").read_text())
    assert [gpu["gpu"] for gpu in report["gpus"]] == ["T4", "A10"]
    assert report["time"] == pytest.approx(report["predicted_time"], rel=0.05)


@pytest.mark.slow
def test_resumes_from_a_checkpoint(folder):
    flags = ["--plan", "plan.json", "--simulate", "A10,T4", *DIGITS, "--checkpoint", "c.pt"]
    for epochs, expected in ((1, [0]), (3, [1, 2])):
        done = torchrun(TRAIN, *flags, "--epochs", epochs, folder=folder)
        assert done.returncode == 0, done.stderr
        assert [int(n) for n in re.findall(r"^epoch (\d+)", done.stdout, re.M)] == expected


@pytest.mark.slow
def test_imagenet_script_trains_on_a_simulated_gpu_of_its_own(folder):
    done = torchrun(
        IMAGENET, "--plan", "plan.json", "--simulate", "A10,T4", *DIGITS, "--epochs", 1,
        folder=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "SIMULATED GPUs: A10 (imagenet), T4 (imagenet)" in done.stderr


# -- the original scheme ---------------------------------------------------------------------


def alone(*flags, folder, script=TRAIN, **variables):
    command = [sys.executable, str(script), *map(str, flags)]
    return subprocess.run(
        command, cwd=folder, env=environment(folder / "state", **variables), text=True,
        capture_output=True, timeout=120,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("script", [TRAIN, IMAGENET], ids=["cifar100", "imagenet"])
def test_one_worker_of_the_original_scheme(tmp_path, script):
    times = {}
    for index in (0, 1):
        done = alone(
            "--epochs", 2, "--power_limit", 60, "--gpu_index", index, "--gpu_split", 40,
            "--simulate", "T4", *DIGITS, folder=tmp_path, script=script,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        *_, time, joules = done.stdout.rstrip().splitlines()
        times[index] = float(re.fullmatch(r"Time \(s\): ([\d.]+) \(simulated\)", time).group(1))
        assert re.fullmatch(r"Energy \(J\): [\d.]+ \(simulated\)", joules)
        assert re.search(r"T4 .* 60 ", done.stdout), "not at the power limit that was asked for"
    assert times[1] / times[0] == pytest.approx(60 / 40, rel=0.1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu_split", 101, "--gpu_index", 0], "gpu_split is 101; expected a percentage"),
        (["--gpu_split", 40, "--gpu_index", 2], "gpu_index is 2; expected 0"),
        (["--gpu_split", 40], "gpu_index and gpu_split go together"),
        (["--power_limit", 90], "90 W"),
        (["--data", "nowhere"], "nowhere: no folder cifar-100-python"),
        (["--max_micro_batch", "T4", "--plan", "plan.json"], "expected GPU=B"),
        (["--gpu_split", 40, "--plan", "plan.json"], "--gpu_split contradicts --plan"),
    ],
)
def test_bad_flags_are_one_sentence(folder, flags, message):
    done = alone("--simulate", "T4", *DIGITS, *flags, "--epochs", 1, folder=folder)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_no_gpu_names_the_flag(folder):
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    for flags in ([], ["--plan", "plan.json"]):
        done = alone(*DIGITS, *flags, folder=folder, **hidden)
        assert done.returncode != 0
        assert "no CUDA GPU" in done.stderr
        assert "--simulate" in done.stderr
        assert "Traceback" not in done.stderr


# -- failures of several ranks -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("simulate", "ranks", "edit", "message"),
    [
        ("A10,T4,T4", 3, None, "the plan is for 2 workers (A10, T4), but 3 ranks were started"),
        ("A10,A10", 2, None, "the plan has no entry for rank 1 (A10 on "),
        ("A10,T4", 2, lambda text: text[: len(text) // 2], "plan.json: not valid JSON"),
        ("A10,T4", 2, lambda text: text.replace('"version": 1', '"version": 7', 1), "version 7"),
        ("A10,T4", 2, lambda text: re.sub(r'"batch_size": \d+', '"batch_size": 9', text, count=1),
         "add up to"),
        ("A10", 2, None, "local rank 1 has no GPU"),
    ],
    ids=["three ranks", "wrong GPU", "truncated", "version", "shares", "too few GPUs"],
)  # fmt: skip
def test_a_plan_that_does_not_fit_is_the_same_error_on_every_rank(
    folder, simulate, ranks, edit, message
):
    if edit is not None:
        text = (folder / "plan.json").read_text()
        assert edit(text) != text
        (folder / "plan.json").write_text(edit(text))
    done = torchrun(
        TRAIN, "--plan", "plan.json", "--simulate", simulate, *DIGITS, folder=folder, ranks=ranks,
        timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    said = failures(done)
    assert said, done.stderr
    assert all(message in text for text in said)
    assert len(set(said)) == 1


@pytest.mark.slow
def test_plan_larger_than_the_data_set(folder, traces):
    allocate(traces, 4096).save(folder / "plan.json")
    done = torchrun(
        TRAIN, "--plan", "plan.json", "--simulate", "A10,T4", *DIGITS, folder=folder, timeout=60
    )
    assert done.returncode != 0
    assert "the data set has 1500 samples, less than the global batch of 4096" in done.stderr


def small_t4(largest):
    return json.dumps([{"name": "A10"}, {"name": "T4", "largest_batch": largest}])


@pytest.mark.slow
def test_lack_of_memory_is_found_before_training_and_the_flag_helps(folder, made_plan):
    share = made_plan.workers[1].batch_size
    flags = ["--plan", "plan.json", "--simulate", small_t4(share - 1), *DIGITS, "--epochs", 1]
    done = torchrun(TRAIN, *flags, folder=folder, timeout=60)
    assert done.returncode != 0
    said = failures(done)
    assert len(set(said)) == 1
    assert f"rank 1 (T4): out of memory in a micro-batch of {share} samples" in said[0]
    hint = re.search(r"--max_micro_batch (T4=\d+)", said[0]).group(1)
    assert limits(folder) == MOST
    done = torchrun(TRAIN, *flags, "--max_micro_batch", hint, folder=folder, timeout=90)
    assert done.returncode == 0, done.stderr


def first_failure(stderr):
    """The rank that torchrun calls the root cause."""
    return int(
        re.search(r"Root Cause \(first observed failure\):.*?rank\s*: (\d+)", stderr, re.S)[1]
    )


@pytest.mark.slow
def test_a_gpu_that_fails_ends_the_job_with_its_reason_first(folder):
    spec = json.dumps(
        [{"name": "A10"}, {"name": "T4", "faults": [{"fault": "lost", "at_step": 20}]}]
    )
    done = torchrun(
        TRAIN, "--plan", "plan.json", "--simulate", spec, *DIGITS, "--epochs", 50, folder=folder,
        timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    assert re.search(r"^rank 1 \(T4 on .*\): ZeusGPULostError: .*GPU is lost", done.stderr, re.M)
    assert first_failure(done.stderr) == 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_ends_the_job_and_all_power_limits_are_restored(folder, victim, made_plan):
    command = [*TORCHRUN, "--standalone", "--nproc_per_node", 2, TRAIN, "--plan", "plan.json",
               "--simulate", "A10,T4", *DIGITS, "--epochs", 100000]  # fmt: skip
    agent = start(command, folder)
    try:
        planned = [worker.power_limit for worker in made_plan.workers]
        wait_for(lambda: limits(folder) == planned)
        ranks = wait_for(lambda: len(ranks_of(agent)) == 2 and ranks_of(agent))
        os.kill(ranks[victim], signal.SIGKILL)
        done = finish(agent, timeout=40)
    finally:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
    assert done.returncode != 0
    assert first_failure(done.stderr) == victim
    assert "SIGKILL" in done.stderr
    assert limits(folder) == MOST


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_killed_only_rank_of_a_node_leaves_no_power_limit_behind(folder, made_plan):
    folders, agents, port = [folder / worker.gpu for worker in made_plan.workers], [], free_port()
    try:
        for where in folders:
            where.mkdir()
            training = [TRAIN, "--plan", folder / "plan.json", "--simulate", where.name, *DIGITS,
                        "--epochs", 100000]  # fmt: skip
            agents.append(start(node(port, 1, *training), where))
        planned = [worker.power_limit for worker in made_plan.workers]
        wait_for(lambda: [limits(where)[0] for where in folders] == planned)
        (killed,) = wait_for(lambda: ranks_of(agents[1])).values()
        os.kill(killed, signal.SIGKILL)
        ended = [finish(agent, timeout=100) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    assert all(done.returncode != 0 for done in ended)
    assert [limits(where)[0] for where in folders] == MOST, ended[1].stderr
    assert f"which process {killed} had left changed" in ended[1].stderr


def test_plan_of_the_tests_says_what_the_tests_need(made_plan):
    assert isinstance(made_plan, Allocation)
    assert all(worker.batch_size > 0 for worker in made_plan.workers)
