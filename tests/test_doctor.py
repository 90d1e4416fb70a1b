"""The doctor names what is missing and the command that mends it, and never fails itself."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import types
from dataclasses import replace

import pytest
from conftest import REPOSITORY

from zeus_hetero import doctor, simulation
from zeus_hetero.doctor import FAILED, OK, WARNING, network, software
from zeus_hetero.doctor import gpus as gpu_checks
from zeus_hetero.doctor.finding import split
from zeus_hetero.restore import PreviousLimit, write_note
from zeus_hetero.simulation import NoPermission, SlowCounter, simulated_gpu


def versions(**installed):
    def version(package):
        try:
            return installed[package.replace("-", "_")]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(package) from None

    return version


@pytest.mark.parametrize(
    ("installed", "status", "remedy"),
    [
        ({"zeus": "0.16.0"}, OK, ""),
        ({"zeus": "0.11.0"}, FAILED, "pip install --upgrade 'zeus>=0.12'"),
        ({}, FAILED, "pip install 'zeus>=0.12'"),
        ({"zeus": "0.16.0", "zeus_ml": "0.8.2"}, FAILED, "pip uninstall -y zeus-ml zeus"),
        ({"zeus_ml": "0.8.2"}, WARNING, "pip uninstall -y zeus-ml"),
    ],
)
def test_zeus_versions(installed, status, remedy):
    (finding,) = software.check_zeus(versions(**installed))
    assert finding.status == status
    assert finding.remedy.startswith(remedy)


def test_driver(tmp_path):
    missing = software.check_driver(tmp_path / "version")
    assert missing.status == FAILED
    assert "nvidia-smi" in missing.remedy
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX  x86_64  570.86.15  Release")
    assert software.check_driver(tmp_path / "version").detail == "NVIDIA 570.86.15"


@pytest.mark.parametrize(
    ("variables", "status", "part"),
    [
        ({}, OK, "not set"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, OK, "0,1"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1234"}, FAILED, "whole GPU"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1234"}, FAILED, "nvidia-smi -L"),
        ({"CUDA_VISIBLE_DEVICES": ""}, FAILED, "Unset it"),
    ],
)
def test_visible_devices(variables, status, part):
    finding, *_ = gpu_checks.check_variables(variables)
    assert finding.status == status
    assert part in f"{finding.detail} {finding.remedy}"


def test_daemon_that_is_not_there(tmp_path):
    *_, finding = gpu_checks.check_variables({"ZEUSD_SOCK_PATH": str(tmp_path / "zeusd.sock")})
    assert finding.status == FAILED
    assert "Start zeusd" in finding.remedy


def by_name(findings, part):
    return next(finding for finding in findings if part in finding.name)


def test_simulated_gpus_are_healthy_and_marked():
    with simulation.use("A10", "T4"):
        findings = list(gpu_checks.check_gpus({}))
    assert {finding.status for finding in findings} == {OK}
    assert by_name(findings, "GPU 1 (T4) (simulated)").detail == (
        "power limit 70 W, between 60 and 70 W"
    )
    assert "moves every 100 ms" in by_name(findings, "energy counter").detail


def test_faulty_gpus():
    faulty = [
        simulated_gpu("A10", faults=[NoPermission()]),
        simulated_gpu("T4", faults=[SlowCounter(1.0)], idle_power=60.0),
    ]
    with simulation.use(*faulty):
        findings = list(gpu_checks.check_gpus({}))
    permission = by_name(findings, "GPU 0 (A10) (simulated): permission")
    assert permission.status == FAILED
    assert "--cap-add SYS_ADMIN" in permission.remedy
    counter = by_name(findings, "GPU 1 (T4) (simulated): energy counter")
    assert counter.status == WARNING
    assert "--counter_ticks" in counter.remedy
    idle = by_name(findings, "GPU 1 (T4) (simulated): idle")
    assert idle.status == WARNING
    assert "nvidia-smi" in idle.remedy
    assert not doctor.can(findings, doctor.TRAIN)


def test_permission_check_changes_nothing():
    with simulation.use("T4") as gpus:
        gpus[0].set_power_management_limit(65_000)
        list(gpu_checks.check_gpus({}))
        assert gpus[0].power_limit == 65


def test_no_gpu():
    findings = list(gpu_checks.check_gpus({}))
    assert [finding.status for finding in findings] == [FAILED]
    assert not doctor.can(findings, doctor.PROFILE)
    assert doctor.can(findings, "allocate")


def fake_torch(available=True, archs=("sm_80", "sm_86"), capability=(8, 6), nccl=True):
    cuda = types.SimpleNamespace(
        is_available=lambda: available, get_arch_list=lambda: list(archs), device_count=lambda: 1,
        get_device_capability=lambda index: capability, get_device_name=lambda index: "card",
    )  # fmt: skip
    distributed = types.SimpleNamespace(
        is_available=lambda: True, is_gloo_available=lambda: True, is_nccl_available=lambda: nccl
    )
    version = types.SimpleNamespace(cuda="12.9")
    return types.SimpleNamespace(
        __version__="2.14.1", cuda=cuda, distributed=distributed, version=version
    )


@pytest.mark.parametrize(
    ("torch", "name", "status", "part"),
    [
        (fake_torch(), "CUDA in torch", OK, "sm_86"),
        (fake_torch(capability=(8, 9)), "CUDA in torch", OK, "sm_89"),
        (fake_torch(capability=(7, 5)), "CUDA in torch", FAILED, "sm_75; this torch is built for"),
        (fake_torch(available=False), "CUDA in torch", FAILED, "built for CUDA 12.9"),
        (fake_torch(nccl=False), "torch.distributed", FAILED, "nccl and gloo are needed"),
    ],
)
def test_torch_and_cuda(torch, name, status, part):
    finding = by_name(list(software.check_torch(torch)), name)
    assert finding.status == status
    assert part in finding.detail
    assert bool(finding.remedy) == (status != OK)


def test_different_models_need_one_order(monkeypatch):
    with simulation.use("A10", "T4") as gpus:
        monkeypatch.setattr(simulation, "active", lambda: None)
        names = ["NVIDIA A10", "Tesla T4"]
        finding = gpu_checks.check_order(gpus, names, {})
        assert finding.status == WARNING
        assert finding.remedy.startswith("export CUDA_DEVICE_ORDER=PCI_BUS_ID")
        ordered = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        assert gpu_checks.check_order(gpus, names, ordered).status == OK


def test_what_a_killed_run_left(tmp_path, monkeypatch):
    with simulation.use("T4") as gpus:
        monkeypatch.setenv("ZEUS_HETERO_NOTES", str(tmp_path))
        assert gpu_checks.check_notes().status == OK
        path = tmp_path / "limits-1.json"
        write_note(path, [PreviousLimit(0, "T4", 60_000)], gpus)
        assert gpu_checks.check_notes().status == OK, "its process still runs"
        note = json.loads(path.read_text())
        path.write_text(json.dumps({**note, "pid": 2**22 + 1}))
        finding = gpu_checks.check_notes()
    assert finding.status == WARNING
    assert finding.remedy == "zeus-hetero reset"


def test_rendezvous_that_answers_and_that_does_not(monkeypatch):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert network.check_rendezvous(f"127.0.0.1:{port}").status == OK
    refused = network.check_rendezvous(f"127.0.0.1:{port}")
    assert refused.status == FAILED
    assert "Start torchrun on that node first" in refused.remedy
    unknown = network.check_rendezvous("no-such-host.invalid:29500")
    assert "cannot be resolved" in unknown.detail
    for address in ("here", "here:", ":29500", "here:99999"):
        assert network.check_rendezvous(address).detail == "no address"

    def silent(*_, **__):
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    silent_node = network.check_rendezvous("10.0.0.5:29500")
    assert "no answer" in silent_node.detail
    assert "Open port 29500" in silent_node.remedy


def command(*arguments, **variables):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ZEUS_HETERO")}
    return subprocess.run(
        [sys.executable, "-m", "zeus_hetero", "doctor", *arguments], text=True, timeout=120,
        capture_output=True, env={**clean, "PYTHONPATH": str(REPOSITORY), **variables},
    )  # fmt: skip


def test_command_without_a_gpu_says_what_to_do():
    done = command(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "can allocate: yes, can profile: no, can train: no" in done.stdout


def test_command_on_simulated_gpus():
    pytest.importorskip("torch", reason="torch is not installed: this machine cannot train")
    done = command("--simulate", "A10,T4")
    assert done.returncode == 0, done.stdout
    assert "can allocate: yes, can profile: yes, can train: yes" in done.stdout
    assert "SIMULATED" in done.stderr


def test_command_for_programs():
    done = command("--json", ZEUS_HETERO_SIMULATE="T4")
    findings = json.loads(done.stdout)
    assert {"name", "status", "detail", "remedy", "needed_for"} == set(findings[0])
    assert any("T4" in finding["name"] for finding in findings)


def test_error_is_split_into_what_and_remedy():
    text = "GPU 0 fails (none. At all.). Check `nvidia-smi`. Then wait."
    assert split(ValueError(text)) == (
        "GPU 0 fails (none. At all.).", "Check `nvidia-smi`. Then wait."
    )  # fmt: skip
    assert split(ValueError("odd"))[1]


def test_every_failure_has_a_remedy_and_what_it_is_needed_for():
    with simulation.use("A10"):
        healthy = doctor.examine(rendezvous="127.0.0.1:1", environment={})
    for finding in [*healthy, *doctor.examine(environment={"CUDA_VISIBLE_DEVICES": ""})]:
        assert (finding.status == OK) or finding.remedy, finding
        assert finding.status != FAILED or finding.needed_for, finding
    assert replace(healthy[0], status=FAILED).needed_for == ()
