from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import zeus.device.gpu
import zeus.monitor.energy
from fake_gpus import A10, T4, FakeGPUs, Monitor

from zeus_hetero import restore
from zeus_hetero.errors import DeviceError, PowerLimitPermissionError
from zeus_hetero.power_limit import HeteroPowerLimitOptimizer
from zeus_hetero.restore import (
    PreviousLimit,
    Restorer,
    read_note,
    repair_from_notes,
    restore_from_note,
    write_note,
)

TESTS = Path(__file__).parent
BEFORE = [120, 66]

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _isolated(monkeypatch, tmp_path):
    monkeypatch.setenv(restore.NOTE_FOLDER_VARIABLE, str(tmp_path / "notes"))
    monkeypatch.setattr(zeus.device.gpu, "_gpus", None)
    monkeypatch.setattr(zeus.monitor.energy, "time", zeus.monitor.energy.time)


@pytest.fixture
def gpus(tmp_path):
    return FakeGPUs([A10, T4], tmp_path / "state.json").install()


@pytest.fixture
def start(tmp_path):
    """Start a process that ends in the given way; its state file is tmp_path / child.json."""
    processes = []

    def start_process(ending):
        paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
        process = subprocess.Popen(
            [sys.executable, TESTS / "power_limit_process.py", tmp_path / "child.json", ending],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start_process
    for process in processes:
        process.kill()
        process.communicate()


def left_behind(tmp_path):
    return FakeGPUs([A10, T4], tmp_path / "child.json")


def until(process, said):
    """Read the process's output up to a line; Zeus 0.12 logs there too."""
    for line in process.stdout:
        if line.strip() == said:
            return
    raise AssertionError(process.communicate())


def until_capped(process):
    until(process, "capped")


@pytest.mark.parametrize(
    ("ending", "status"), [("exit", 0), ("exception", 1), ("interrupt", -signal.SIGINT)]
)
def test_limits_of_before_return_when_the_process_ends(start, tmp_path, ending, status):
    process = start(ending)
    _, errors = process.communicate(timeout=50)
    assert process.returncode == status, errors
    gpus = left_behind(tmp_path)
    assert gpus.limits() == BEFORE
    # The permission probe writes what was there, then the cap, then the restore: once, and
    # never the maximum.
    assert gpus.writes(0) == [120, 100, 120]
    assert gpus.writes(1) == [66, 60, 66]
    assert list((tmp_path / "notes").iterdir()) == []
    if ending == "exception":
        assert "the training failed" in errors


def test_sigterm_restores_and_still_ends_the_process_by_sigterm(start, tmp_path):
    process = start("wait")
    until_capped(process)
    process.terminate()
    process.communicate(timeout=50)
    assert process.returncode == -signal.SIGTERM
    assert left_behind(tmp_path).limits() == BEFORE
    assert left_behind(tmp_path).writes(0) == [120, 100, 120]


@pytest.mark.parametrize(
    ("ending", "said", "status"),
    [("chained", "user handler", 7), ("chained later", "later handler", -signal.SIGTERM)],
)
def test_handlers_of_others_still_run(start, tmp_path, ending, said, status):
    process = start(ending)
    until_capped(process)
    process.terminate()
    output, errors = process.communicate(timeout=50)
    assert said in output
    assert process.returncode == status, errors
    assert left_behind(tmp_path).limits() == BEFORE


def test_an_ignored_sigterm_changes_nothing(start, tmp_path):
    process = start("ignored")
    until_capped(process)
    process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    assert left_behind(tmp_path).limits() == [100, 60]


def test_forked_children_never_restore(start, tmp_path):
    process = start("fork")
    until(process, "children gone")
    until_capped(process)
    assert left_behind(tmp_path).limits() == [100, 60]
    process.terminate()
    process.communicate(timeout=50)
    assert left_behind(tmp_path).limits() == BEFORE


def killed_run(start, tmp_path):
    process = start("wait")
    until_capped(process)
    process.kill()
    process.wait(50)
    gpus = left_behind(tmp_path)
    assert gpus.limits() == [100, 60]
    (note,) = (tmp_path / "notes").iterdir()
    return gpus.install(), note


def test_after_sigkill_the_note_brings_the_limits_back(start, tmp_path):
    gpus, note = killed_run(start, tmp_path)
    assert restore_from_note(note) == (
        PreviousLimit(0, "NVIDIA A10", 120_000),
        PreviousLimit(1, "Tesla T4", 66_000),
    )
    assert gpus.limits() == BEFORE
    assert not note.exists()


def test_after_sigkill_the_next_run_restores_the_limits_of_before_the_first(start, tmp_path):
    pytest.importorskip("torch", reason="Zeus's power limit optimizer needs torch or JAX")
    gpus, note = killed_run(start, tmp_path)
    with HeteroPowerLimitOptimizer(Monitor(), power_limit={"A10": 125, "T4": 65}):
        assert gpus.limits() == [125, 65]
    assert gpus.limits() == BEFORE
    assert not note.exists()


def test_a_note_of_a_running_process_is_left_alone(start, tmp_path):
    process = start("wait")
    until_capped(process)
    gpus = left_behind(tmp_path).install()
    (note,) = (tmp_path / "notes").iterdir()
    assert repair_from_notes() == ()
    with pytest.raises(DeviceError, match=f"process {process.pid}.*still runs"):
        restore_from_note(note)
    assert gpus.limits() == [100, 60]
    restore_from_note(note, force=True)
    assert gpus.limits() == BEFORE


def test_a_reused_pid_is_not_taken_for_the_owner(gpus, tmp_path):
    note = tmp_path / "limits-1.json"
    write_note(note, [PreviousLimit(0, "NVIDIA A10", 123_400)], gpus)
    assert read_note(note).owner_is_alive
    record = json.loads(note.read_text())
    note.write_text(json.dumps({**record, "started": record["started"] - 1}))
    assert not read_note(note).owner_is_alive
    assert repair_from_notes(tmp_path, gpus=[1]) == ()
    assert len(repair_from_notes(tmp_path, gpus=[0])) == 1
    assert gpus.limits()[0] == 123.4  # to the milliwatt


def dead_note(gpus, path, **changes):
    write_note(path, [PreviousLimit(0, "NVIDIA A10", 130_000)], gpus)
    path.write_text(json.dumps({**json.loads(path.read_text()), "pid": 2**22 + 1, **changes}))
    return path


def test_a_note_of_another_gpu_or_backend_is_refused_and_kept(gpus, tmp_path):
    for changes, message in [
        ({"limits": [{"gpu": 0, "name": "Tesla T4", "limit": 70_000}]}, "was Tesla T4 and is"),
        ({"limits": [{"gpu": 5, "name": "Tesla T4", "limit": 70_000}]}, "is not visible"),
        ({"boot": "another"}, "of another machine, or from before a restart"),
        ({"backend": "zeus.device.gpu.nvidia.NVIDIAGPUs"}, "simulated GPU's limit is not for"),
    ]:
        note = dead_note(gpus, tmp_path / "limits-1.json", **changes)
        with pytest.raises(DeviceError, match=message):
            restore_from_note(note)
        assert repair_from_notes(tmp_path) == ()
        assert note.exists()
    assert gpus.writes() == []


def test_a_note_that_may_not_be_restored_is_kept(gpus, tmp_path):
    note = dead_note(gpus, tmp_path / "limits-1.json")
    gpus.permission = False
    with pytest.raises(PowerLimitPermissionError, match="SYS_ADMIN"):
        restore_from_note(note)
    assert note.exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "something else"}'])
def test_a_file_that_is_no_note_is_refused(tmp_path, text):
    path = tmp_path / "limits-1.json"
    path.write_text(text)
    with pytest.raises(DeviceError, match="no note of previous power limits"):
        read_note(path)
    with pytest.raises(DeviceError, match="no note"):
        read_note(tmp_path / "absent.json")


def test_restore_is_once_and_removes_handlers_and_note(gpus):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    restorer = Restorer(gpus, [0, 1])
    assert restorer.note.exists()
    gpus.gpus[0].set_power_management_limit(100_000)
    restorer.restore()
    restorer.restore()
    assert gpus.writes(0) == [100, 120]
    assert not restorer.note.exists()
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_one_lost_gpu_does_not_keep_the_others_from_being_restored(gpus, monkeypatch, caplog):
    restorer = Restorer(gpus, [0, 1])
    gpus.gpus[1].set_power_management_limit(60_000)

    def lost(*args, **kwargs):
        raise zeus.device.gpu.ZeusGPULostError("GPU is lost")

    monkeypatch.setattr(gpus.gpus[0], "set_power_management_limit", lost)
    monkeypatch.setattr(gpus.gpus[0], "setPowerManagementLimit", lost)
    restorer.restore()
    assert gpus.limits()[1] == 66
    assert "nvidia-smi -i 0 -pl 120" in caplog.text
    assert restorer.note.exists(), "the note still knows the lost GPU's limit"


def test_a_note_that_cannot_be_written_is_only_a_warning(gpus, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    restorer = Restorer(gpus, [0], tmp_path / "file" / "note.json")
    assert restorer.note is None
    assert "nothing remembers the previous power limits" in caplog.text
    restorer.restore()


def test_in_a_thread_exit_hooks_work_without_signal_handlers(gpus):
    handler = signal.getsignal(signal.SIGTERM)
    made = []
    thread = threading.Thread(target=lambda: made.append(Restorer(gpus, [0])))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is handler
    gpus.gpus[0].set_power_management_limit(100_000)
    made[0].restore()
    assert gpus.limits()[0] == 120
