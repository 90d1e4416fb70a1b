"""A process that is killed, with simulated GPUs whose power limits outlive it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading

import pytest
from launch import finish, start

from zeus_hetero import restore, simulation
from zeus_hetero.restore import PreviousLimit, repair_from_notes, restore_from_note, write_note

BEFORE, CAPPED = [250, 65], [150, 60]
SIMULATED = {simulation.SIMULATE: "A10,T4", simulation.STATE: "state"}

pytestmark = pytest.mark.timeout(60)

SCRIPT = """
import os, signal, sys, time
from zeus_hetero import devices, simulation
from zeus_hetero.restore import Restorer

simulation.install_from_environment()
gpus = devices.get_gpus()
for index, watts in enumerate({before}):
    devices.set_limit_mw(gpus, index, watts * 1000)
restorer = Restorer(gpus, [0, 1], guarded={guarded})
for index, watts in enumerate({capped}):
    devices.set_limit_mw(gpus, index, watts * 1000)
print("capped", flush=True)
{ending}
"""


@pytest.fixture
def run(tmp_path):
    processes = []

    def start_script(ending, guarded=True):
        code = SCRIPT.format(before=BEFORE, capped=CAPPED, guarded=guarded, ending=ending)
        process = start([sys.executable, "-c", code], tmp_path, **SIMULATED)
        processes.append(process)
        assert process.stdout.readline() == "capped\n", process.communicate()
        return process

    yield start_script
    for process in processes:
        process.kill()
        process.communicate()


def limits(folder):
    return [json.loads((folder / f"state/gpu{i}.json").read_text())[0] // 1000 for i in (0, 1)]


def notes(folder):
    return list((folder / "state").glob("limits-*"))


def guards_of(process):
    children = f"/proc/{process.pid}/task/{process.pid}/children"
    with open(children) as file:
        return [int(pid) for pid in file.read().split()]


@pytest.mark.parametrize(
    "ending",
    ["os.kill(os.getpid(), signal.SIGKILL)", "os.abort()", "os._exit(0)"],
    ids=["SIGKILL", "abort", "_exit"],
)
def test_limits_return_although_no_exit_hook_runs(run, tmp_path, ending):
    process = run(ending)
    done = finish(process, timeout=40)  # The guard holds stderr open until it is done.
    assert limits(tmp_path) == BEFORE, done.stderr
    assert notes(tmp_path) == []
    assert f"GPU 0 (A10): power limit put back to 250 W, which process {process.pid}" in done.stderr


def test_without_a_guard_they_do_not(run, tmp_path):
    finish(run("os._exit(0)", guarded=False), timeout=40)
    assert limits(tmp_path) == CAPPED
    assert len(notes(tmp_path)) == 1


def test_a_process_that_restores_by_itself_takes_its_guard_along(run, tmp_path):
    process = run("time.sleep(0.5); restorer.restore(); print('restored', flush=True); input()")
    (guard,) = guards_of(process)
    assert process.stdout.readline() == "restored\n"
    assert limits(tmp_path) == BEFORE
    assert guards_of(process) == []
    with pytest.raises(ProcessLookupError):
        os.kill(guard, 0)
    done = finish(process)
    assert "put back" not in done.stderr


def test_what_kills_the_whole_group_leaves_the_guard(run, tmp_path):
    process = run("time.sleep(50)")
    os.killpg(process.pid, signal.SIGKILL)
    finish(process, timeout=40)
    assert limits(tmp_path) == BEFORE


def test_a_users_files_of_the_same_names_are_not_imported(tmp_path):
    for name in ("zeus_hetero", "json", "zeus", "guard"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong file')\n")
    # -c has the working directory on its path, -P (Python 3.11) does not; the guard never has.
    (tmp_path / "elsewhere").mkdir()
    code = SCRIPT.format(before=BEFORE, capped=CAPPED, guarded=True, ending="os._exit(0)")
    script = tmp_path / "elsewhere" / "script.py"
    script.write_text(code)
    done = finish(start([sys.executable, script], tmp_path, **SIMULATED), timeout=40)
    assert limits(tmp_path) == BEFORE, done.stderr


def test_a_guard_that_fails_says_what_to_do(run, tmp_path):
    process = run("time.sleep(50)")
    (note,) = notes(tmp_path)
    record = json.loads(note.read_text())
    record["limits"][1]["name"] = "Tesla V100"
    note.write_text(json.dumps(record))
    process.kill()
    done = finish(process, timeout=40)
    assert "GPU 1 was Tesla V100 and is T4" in done.stderr
    assert "zeus-hetero reset" in done.stderr
    assert limits(tmp_path) == CAPPED
    assert note.exists()


def test_who_comes_second_waits_and_does_not_restore_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(simulation.STATE, str(tmp_path / "state"))
    with simulation.use("A10", "T4") as gpus:
        note = tmp_path / "limits-1.json"
        write_note(note, [PreviousLimit(0, "A10", 250_000)], gpus)
        note.write_text(json.dumps({**json.loads(note.read_text()), "pid": 2**22 + 1}))
        restored = []
        with open(note) as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # As the guard does while it restores.
            thread = threading.Thread(target=lambda: restored.append(repair_from_notes(tmp_path)))
            thread.start()
            thread.join(0.5)
            assert thread.is_alive(), "it did not wait"
            note.unlink()
        thread.join(10)
        assert restored == [()]
        assert gpus[0].get_power_management_limit() == 300_000
        assert caplog.records == []
        with pytest.raises(restore.DeviceError, match="no note"):
            restore_from_note(note)
