"""The lock that keeps two profilers off one GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from zeus_hetero import GPUBusyError, simulation
from zeus_hetero.gpu_lock import GPULock, gpu_lock, lock_folder
from zeus_hetero.profiled_gpu import ProfiledGPU

HOLDER = """
import sys, time
from pathlib import Path
from zeus_hetero.gpu_lock import GPULock
lock = GPULock(Path(sys.argv[1]), "GPU", "someone")
lock.acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "a.lock")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_second_holder_is_told_who_the_first_is(holder, tmp_path, monkeypatch):
    monkeypatch.setattr("zeus_hetero.gpu_lock.PATIENCE", 0.1)
    with pytest.raises(GPUBusyError, match=rf"GPU is in use.*process {holder.pid} \(someone\)"):
        GPULock(tmp_path / "a.lock", "GPU", "me").acquire()


def test_lock_of_a_killed_holder_is_free(holder, tmp_path):
    holder.kill()
    holder.wait()
    lock = GPULock(tmp_path / "a.lock", "GPU", "me")
    lock.acquire()
    lock.release()


def test_waits_for_a_holder_that_is_about_to_end(holder, tmp_path):
    subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {holder.pid}"]).wait()
    GPULock(tmp_path / "a.lock", "GPU", "me").acquire()


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"pid": 1'])
def test_damaged_lock_file_is_no_obstacle(tmp_path, content):
    (tmp_path / "c.lock").write_text(content)
    lock = GPULock(tmp_path / "c.lock", "GPU", "me")
    lock.acquire()
    assert json.loads((tmp_path / "c.lock").read_text())["pid"] == os.getpid()
    lock.release()


def test_lock_file_that_cannot_be_opened_says_which_variable_to_set(tmp_path):
    (tmp_path / "folder.lock").mkdir()
    with pytest.raises(GPUBusyError, match="ZEUS_HETERO_LOCK_FOLDER"):
        GPULock(tmp_path / "folder.lock", "GPU", "me").acquire()


def test_link_in_place_of_a_lock_file_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "d.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(GPUBusyError):
        GPULock(tmp_path / "d.lock", "GPU", "me").acquire()
    assert (tmp_path / "victim").read_text() == "precious"


def test_place_is_shared_by_all_users_of_a_real_gpu(tmp_path, monkeypatch):
    monkeypatch.delenv("ZEUS_HETERO_LOCK_FOLDER", raising=False)
    assert str(lock_folder()) == "/tmp/zeus-hetero"
    monkeypatch.setenv("ZEUS_HETERO_LOCK_FOLDER", str(tmp_path / "shared"))
    lock = GPULock(lock_folder() / "gpu-0.lock", "GPU", "me")
    lock.acquire()
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o777
    lock.release()


def test_every_gpu_has_its_own_lock():
    with simulation.use("A10", "T4"):
        first, second = (gpu_lock(ProfiledGPU(n), "me") for n in (0, 1))
        first.acquire()
        second.acquire()
        first.release()
        second.release()
