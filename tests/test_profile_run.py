"""The grid driver with real child processes: nothing is lost, mixed or left at a lower limit."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import zeus.device

from zeus_hetero import GPUBusyError, ProfilingError, load_trace, profile, simulation
from zeus_hetero.errors import DeviceError, PowerLimitError
from zeus_hetero.measure import Windows
from zeus_hetero.profile_folder import ProfileFolder
from zeus_hetero.profile_run import Grid, profile_with_script, reset
from zeus_hetero.restore import PreviousLimit
from zeus_hetero.simulation import Lost, simulated_gpu

ROOT = Path(__file__).resolve().parent.parent
BEFORE = 66
"""W, the power limit before every test; neither the default nor one that is profiled."""

SCRIPT = """
import os, signal, sys, time
from zeus_hetero import profile, simulation

simulation.install_from_environment()
size, result, behaviour, *limits = sys.argv[1:]
gpu = simulation.active()[0]
print("measuring", size, flush=True)

def step(batch_size):
    if not gpu.steps:
        print("stepping", flush=True)
    if behaviour == "slow":
        time.sleep(0.02)
    if behaviour == "killed" and size == "64":
        os.kill(os.getpid(), signal.SIGKILL)
    gpu.run_step(batch_size)

if behaviour == "crash" or (behaviour == "crash at 64" and size == "64"):
    raise RuntimeError("the data set is gone")
if behaviour == "forgets":
    sys.exit()
if behaviour == "partial":
    limits = limits[:1]
profile(step, [int(size)], [int(p) for p in limits], repeats=2).save(result)
"""


class Forked:
    """A child process as `subprocess.Popen` makes it, but forked: starts in no time."""

    def __init__(self, command, *, stdout, env, pass_fds, **_):
        self._status = None
        self.pid = os.fork()
        if self.pid:
            return
        status = 1
        try:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(env)
            for number in (1, 2):
                os.dup2(stdout.fileno(), number)
            for number in map(int, os.listdir("/proc/self/fd")):
                if number > 2 and number not in pass_fds:
                    with contextlib.suppress(OSError):
                        os.close(number)
            size, result, _, *limits = command[2:]
            gpus = simulation.parse_gpus(os.environ[simulation.SIMULATE])
            with simulation.use(*gpus) as installed:
                step = installed[0].run_step
                trace = profile(step, [int(size)], [int(p) for p in limits], repeats=2)
            trace.save(result)
            status = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)

    def poll(self):
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


@pytest.fixture
def state(tmp_path, monkeypatch, request):
    """Where the simulated GPU keeps its power limit, and its lock."""
    folder = tmp_path / "gpu"
    folder.mkdir()
    (folder / "gpu0.json").write_text(json.dumps([BEFORE * 1000, False]))
    monkeypatch.setenv("ZEUS_HETERO_SIMULATE_STATE", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield folder
    assert limit_in(folder) == BEFORE, "the power limit is not what it was"
    if "another_gpu" not in request.node.name:
        assert notes_in(folder) == []


@pytest.fixture
def t4(state):
    with simulation.use("T4") as gpus:
        yield gpus[0]


def limit_in(folder):
    return json.loads((folder / "gpu0.json").read_text())[0] / 1000


def notes_in(*folders):
    """Notes of power limits to put back, and links to them."""
    return [p for f in folders for pattern in ("limits-*", "restore*") for p in f.glob(pattern)]


def grid(folder, behaviour="well", sizes=(32, 64), limits=(70, 60), **more):
    folder.parent.mkdir(exist_ok=True)
    script = folder.parent / "script.py"
    script.write_text(SCRIPT)

    def command(size, result):
        arguments = [str(size), str(result), behaviour, *map(str, limits)]
        return [sys.executable, str(script), *arguments]

    more.setdefault("windows", Windows(repeats=2))
    more.setdefault("settings", {"arch": "net"})
    return Grid(folder, command, sizes, limits, **more)


def run(*arguments, launch=Forked, **options):
    """Returns exit status and what was printed."""
    out = io.StringIO()
    status = profile_with_script(grid(*arguments, **options), launch=launch, out=out)
    return status, out.getvalue()


def trace_in(folder):
    return json.loads((folder / "profiling.json").read_text())


def test_profile_of_real_child_processes_is_one_trace(t4, tmp_path):
    status, text = run(tmp_path / "p", launch=subprocess.Popen)
    assert status == 0, text
    trace = load_trace(tmp_path / "p" / "profiling.json")
    assert (trace.batch_sizes, trace.power_limits) == ((32, 64), (70, 60))
    assert trace.simulated
    for record in trace.extra:
        assert record["idle_power"] == pytest.approx(10, rel=0.02)
        assert record["wait_power"] == pytest.approx(27, rel=0.02)
    assert "measuring 32" in (tmp_path / "p" / "batch_32.log").read_text()
    assert "batch 64 at 60 W: 0.0333 s, 1.8" in text
    assert not (tmp_path / "p" / "restore.json").exists()


def test_forked_children_of_these_tests_measure_the_same_as_real_ones(t4, tmp_path):
    run(tmp_path / "a")
    run(tmp_path / "b", launch=subprocess.Popen)
    unlike = {"torch"}
    a, b = (
        [
            {k: v for k, v in record.items() if k not in unlike}
            for records in trace_in(tmp_path / name).values()
            for record in records
        ]
        for name in "ab"
    )
    assert a == b


def test_running_again_does_only_what_is_missing(t4, tmp_path):
    assert run(tmp_path / "p", sizes=[64])[0] == 0
    first = (tmp_path / "p" / "batch_64.json").stat().st_mtime_ns
    status, text = run(tmp_path / "p", sizes=[128, 64, 32])
    assert status == 0
    assert "To do: 2 batch sizes (1 are finished)" in text
    assert (tmp_path / "p" / "batch_64.json").stat().st_mtime_ns == first
    assert list(trace_in(tmp_path / "p")) == ["32", "64", "128"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": {"arch": "other"}}, "arch is 'other', there it is 'net'"),
        ({"limits": (70, 65)}, "power_limits is [70, 65], there it is [70, 60]"),
        ({"windows": Windows(repeats=5)}, "repeats is 5, there it is 2"),
    ],
)
def test_folder_of_other_settings_is_not_mixed(t4, tmp_path, change, message):
    run(tmp_path / "p", sizes=[32])
    before = trace_in(tmp_path / "p")
    with pytest.raises(ProfilingError) as caught:
        run(tmp_path / "p", **{"sizes": [64], **change})
    assert message in str(caught.value)
    assert "--overwrite" in str(caught.value)
    assert trace_in(tmp_path / "p") == before


def test_folder_of_another_gpu_is_not_mixed(state, tmp_path):
    with simulation.use("T4"):
        run(tmp_path / "p", sizes=[32])
    with (
        simulation.use(simulated_gpu("T4", noise=0.1)),
        pytest.raises(ProfilingError, match="simulation is"),
    ):
        run(tmp_path / "p", sizes=[64])
    other = simulation.SimulatedGPU("L4", simulated_gpu("T4").trace)
    with simulation.use(other), pytest.raises(ProfilingError, match="'L4', there it is 'T4'"):
        run(tmp_path / "p", sizes=[64])


def test_overwrite_deletes_results_and_nothing_else(t4, tmp_path):
    run(tmp_path / "p", sizes=[32])
    (tmp_path / "p" / "mine.txt").write_text("keep")
    out = io.StringIO()
    again = grid(tmp_path / "p", sizes=[64], limits=(70, 65))
    assert profile_with_script(again, overwrite=True, launch=Forked, out=out) == 0
    assert list(trace_in(tmp_path / "p")) == ["64"]
    assert (tmp_path / "p" / "mine.txt").read_text() == "keep"
    assert not (tmp_path / "p" / "batch_32.json").exists()


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_damaged_settings_are_an_error_that_overwrite_cures(t4, tmp_path, content):
    run(tmp_path / "p", sizes=[32])
    (tmp_path / "p" / "settings.json").write_text(content)
    with pytest.raises(ProfilingError, match=r"settings\.json: cannot be read.*--overwrite"):
        run(tmp_path / "p", sizes=[32])
    again = grid(tmp_path / "p", sizes=[32])
    assert profile_with_script(again, overwrite=True, launch=Forked, out=io.StringIO()) == 0


def test_launcher_between_driver_and_script_does_no_harm(t4, tmp_path):
    direct = grid(tmp_path / "p", sizes=[32])

    def through_a_launcher(size, result):
        command = direct.command(size, result)
        call = f"import subprocess, sys; sys.exit(subprocess.call({command!r}))"
        return [sys.executable, "-c", call]

    launched = dataclasses.replace(direct, command=through_a_launcher)
    out = io.StringIO()
    assert profile_with_script(launched, out=out) == 0
    assert "batch 32 at 60 W" in out.getvalue()


def test_resume_needs_something_to_resume(t4, tmp_path):
    with pytest.raises(ProfilingError, match="no profile to resume"):
        profile_with_script(grid(tmp_path / "p"), resume=True)
    with pytest.raises(ProfilingError, match="at most one"):
        profile_with_script(grid(tmp_path / "p"), resume=True, overwrite=True)
    assert not (tmp_path / "p").exists()


def test_folder_with_foreign_files_is_refused_and_untouched(t4, tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "thesis.tex").write_text("text")
    for overwrite in (False, True):
        with pytest.raises(ProfilingError, match=r"holds thesis\.tex but no profile"):
            profile_with_script(grid(tmp_path / "p"), overwrite=overwrite)
    assert os.listdir(tmp_path / "p") == ["thesis.tex"]


def test_folder_that_cannot_be_written_is_refused(t4, tmp_path):
    with pytest.raises(ProfilingError, match=r"/proc/x: (not writable|cannot be made)"):
        profile_with_script(Grid("/proc/x", lambda size, path: [], [32], [70]))
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfilingError, match="is a file"):
        profile_with_script(Grid(tmp_path / "file", lambda size, path: [], [32], [70]))
    if os.geteuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(ProfilingError, match="not writable"):
            profile_with_script(Grid(tmp_path / "locked" / "p", lambda s, p: [], [32], [70]))


def test_dry_run_prints_the_plan_and_changes_nothing(t4, tmp_path):
    out = io.StringIO()
    assert profile_with_script(grid(tmp_path / "p"), dry_run=True, out=out) == 0
    assert "GPU 0 (T4): batch sizes 32, 64 at 70, 60 W, 2 windows each" in out.getvalue()
    assert " min if a step" in out.getvalue()
    assert not (tmp_path / "p").exists()
    assert t4.steps == 0


def test_impossible_requests_are_refused_before_anything_is_written(t4, tmp_path):
    for change in ({"sizes": [0]}, {"limits": [10]}, {"sizes": [64], "dataset_size": 50}):
        with pytest.raises((ProfilingError, PowerLimitError)):
            run(tmp_path / "p", **change)
    with pytest.raises(ProfilingError, match="GPU 7"):
        run(tmp_path / "p", gpu_index=7)
    assert not (tmp_path / "p").exists()


def test_out_of_memory_is_recorded_as_the_limit_and_larger_sizes_skipped(state, tmp_path):
    with simulation.use(simulated_gpu("T4", largest_batch=64)):
        status, text = run(tmp_path / "p", sizes=[32, 64, 128, 256])
        assert status == 0, text
        assert "batch size 128: does not fit into memory" in text
        assert "batch size 256: skipped, 128 did not fit" in text
        assert not (tmp_path / "p" / "batch_256.log").exists()
        trace = load_trace(tmp_path / "p" / "profiling.json")
        assert trace.batch_sizes == (32, 64)
        assert {record["out_of_memory_at"] for record in trace.extra} == {128}
        log = (tmp_path / "p" / "batch_128.log").stat().st_mtime_ns
        assert run(tmp_path / "p", sizes=[32, 64, 128])[0] == 0
        assert (tmp_path / "p" / "batch_128.log").stat().st_mtime_ns == log


def test_not_even_the_smallest_batch_size_fits(state, tmp_path):
    with simulation.use(simulated_gpu("T4", largest_batch=16)):
        status, text = run(tmp_path / "p")
    assert status == 1
    assert "not even the smallest batch size fits" in text


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("crash at 64", "ended with status 1"),
        ("killed", "was killed by signal 9"),
    ],
)
def test_failure_of_one_child_leaves_the_rest_going(t4, tmp_path, behaviour, message):
    status, text = run(tmp_path / "p", behaviour, sizes=[32, 64, 128], launch=subprocess.Popen)
    assert status == 1
    assert f"batch size 64: FAILED: the training script {message}" in text
    assert list(trace_in(tmp_path / "p")) == ["32", "128"]
    assert (tmp_path / "p" / "batch_64.log").read_text().startswith("measuring 64")
    if behaviour != "killed":
        assert "RuntimeError: the data set is gone" in text
    assert run(tmp_path / "p", sizes=[32, 64, 128])[0] == 0
    assert list(trace_in(tmp_path / "p")) == ["32", "64", "128"]


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("crash", "RuntimeError: the data set is gone"),
        ("forgets", "it wrote no result"),
        ("partial", "does not hold every power limit"),
    ],
)
def test_script_that_gives_no_result_is_a_failure(t4, tmp_path, behaviour, message):
    status, text = run(tmp_path / "p", behaviour, sizes=[32], launch=subprocess.Popen)
    assert status == 1
    assert message in text
    assert not (tmp_path / "p" / "profiling.json").exists()


def test_script_that_does_not_exist_is_one_clear_error(t4, tmp_path):
    absent = Grid(tmp_path / "p", lambda size, path: ["/no/such/python"], [32], [70])
    with pytest.raises(ProfilingError, match="cannot start /no/such/python"):
        profile_with_script(absent, out=io.StringIO())


def test_lost_gpu_fails_its_batch_sizes_and_keeps_the_others(state, tmp_path):
    with simulation.use("T4"):
        assert run(tmp_path / "p", sizes=[32])[0] == 0
    with simulation.use(simulated_gpu("T4", faults=[Lost(at_step=100)])) as gpus:
        lost = ProfileFolder(tmp_path / "p")
        settings = json.loads((lost.path / "settings.json").read_text())
        settings["simulation"] = _simulation_digest()
        (lost.path / "settings.json").write_text(json.dumps(settings))
        status, text = run(tmp_path / "p", sizes=[32, 64])
        assert status == 1
        assert "GPU is lost" in text
        assert gpus[0].power_limit == BEFORE
    assert list(trace_in(tmp_path / "p")) == ["32"]
    # The child could not put its limit back, nor say so to anyone: the driver did.


def _simulation_digest():
    import hashlib

    return hashlib.sha256(os.environ[simulation.SIMULATE].encode()).hexdigest()[:16]


def test_busy_gpu_is_warned_about(state, tmp_path):
    with simulation.use(simulated_gpu("T4", idle_power=40.0)):
        _, text = run(tmp_path / "p", sizes=[32])
    assert "WARNING: GPU 0 (T4) draws 40 W before anything was started" in text


def test_noisy_points_are_named(state, tmp_path):
    with simulation.use(simulated_gpu("T4", noise=0.2)):
        status, text = run(tmp_path / "p", sizes=[32])
    assert status == 0
    assert "batch size 32: noisy at 70, 60 W" in text


# The bar has a thread that redraws it; the forked child never touches it.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_on_a_terminal_there_is_a_bar_with_time_left_and_the_last_measurement(t4, tmp_path):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    profile_with_script(grid(tmp_path / "p"), launch=Forked, out=out)
    text = out.getvalue()
    assert "8/8" in text
    assert "left" in text
    assert "batch 64 at 70 W" in text


# -- interrupted, killed, twice at once ----------------------------------------------------

DRIVER = """
import io, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_profile_run as here
from zeus_hetero import simulation
from zeus_hetero.profile_run import profile_with_script
with simulation.use("T4"):
    grid = here.grid(Path(sys.argv[1]), "slow")
    sys.exit(profile_with_script(grid))
"""


def start_driver(folder):
    """A driver process of its own whose child is in the middle of measuring."""
    code = DRIVER.format(tests=str(ROOT / "tests"))
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    # Not before its first step: until then limits are tried, and put back.
    wait_until(lambda: "stepping" in text_of(folder / "batch_32.log"))
    return process


def text_of(path):
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def is_gone(pid):
    """Whether a process has ended, be it that nobody has asked for its status."""
    stat = text_of(Path(f"/proc/{pid}/stat"))
    return not stat or ") Z " in stat


def children_of(pid):
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_driver_ends_its_child_and_puts_the_limit_back(state, tmp_path, number):
    driver = start_driver(tmp_path / "p")
    (child,) = children_of(driver.pid)
    driver.send_signal(number)
    _, text = driver.communicate(timeout=30)
    assert driver.returncode == 128 + number
    assert "run the same command again" in text
    assert is_gone(child)
    assert limit_in(state) == BEFORE
    assert not (tmp_path / "p" / "restore.json").exists()


def test_second_driver_on_the_gpu_or_the_folder_stops(state, tmp_path, monkeypatch):
    monkeypatch.setattr("zeus_hetero.gpu_lock.PATIENCE", 0.1)
    driver = start_driver(tmp_path / "p")
    with simulation.use("T4"), pytest.raises(GPUBusyError, match=f"process {driver.pid} "):
        run(tmp_path / "q")
    with simulation.use("T4"), pytest.raises(GPUBusyError, match="profile folder"):
        run(tmp_path / "p")
    with simulation.use("T4"), pytest.raises(DeviceError, match="still runs"):
        reset(tmp_path / "p")
    with simulation.use("T4"), pytest.raises(DeviceError, match="still runs"):
        reset()
    driver.terminate()
    driver.communicate(timeout=30)


def test_child_ends_with_a_killed_driver_and_the_next_run_goes_on(state, tmp_path):
    driver = start_driver(tmp_path / "p")
    (child,) = children_of(driver.pid)
    driver.kill()
    driver.communicate(timeout=30)
    wait_until(lambda: is_gone(child))
    with simulation.use("T4"):
        assert run(tmp_path / "p", windows=Windows(repeats=2))[0] == 0


@pytest.mark.parametrize("by", ["folder", "machine"])
def test_reset_repairs_after_everything_was_killed(state, tmp_path, by):
    driver = start_driver(tmp_path / "p")
    (child,) = children_of(driver.pid)
    for pid in (driver.pid, child):
        os.kill(pid, signal.SIGKILL)
    driver.communicate(timeout=30)
    wait_until(lambda: is_gone(child))
    assert limit_in(state) != BEFORE
    with simulation.use("T4"):
        sentence = reset(tmp_path / "p" if by == "folder" else None)
        assert f"to {BEFORE} W" in sentence
        assert limit_in(state) == BEFORE
        for place in (tmp_path / "p", None):
            assert "no run has left" in reset(place)
    assert notes_in(state, tmp_path / "p") == []


def test_reset_of_a_folder_that_is_not_there_is_refused(t4, tmp_path):
    with pytest.raises(ProfilingError, match="no such folder"):
        reset(tmp_path / "p")


def test_note_about_another_gpu_is_not_applied(t4, tmp_path):
    folder = ProfileFolder(tmp_path / "p")
    folder.make()
    folder.write_note(PreviousLimit(0, "A10", 300_000), zeus.device.get_gpus())
    note = json.loads(folder.note_path.read_text())
    folder.note_path.write_text(json.dumps({**note, "pid": 2**22 + 1}))
    for attempt in (reset, run):
        with pytest.raises(DeviceError, match="GPU 0 was A10 and is T4 here"):
            attempt(tmp_path / "p")
        assert folder.note_path.exists()


def test_note_from_before_a_power_cut_does_not_keep_a_profile_from_going_on(t4, tmp_path):
    run(tmp_path / "p", sizes=[32])
    folder = ProfileFolder(tmp_path / "p")
    folder.write_note(PreviousLimit(0, "T4", 60_000), zeus.device.get_gpus())
    note = json.loads(folder.note_path.read_text())
    folder.note_path.write_text(json.dumps({**note, "boot": "an earlier one"}))
    assert run(tmp_path / "p", sizes=[32, 64])[0] == 0
    assert t4.power_limit == BEFORE


def forked_run(folder, sizes):
    """A whole driver in a forked process, with its own simulated GPU; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        with simulation.use(simulated_gpu("T4", noise=0.03, seed=5)):
            status, _ = run(folder, sizes=sizes)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


@pytest.mark.slow
def test_sigkill_at_twenty_random_moments_and_a_second_run_give_the_undisturbed_trace(
    state, tmp_path
):
    sizes = [32, 64, 128]
    began = time.monotonic()
    assert os.waitpid(forked_run(tmp_path / "undisturbed", sizes), 0)[1] == 0
    duration = time.monotonic() - began
    expected = (tmp_path / "undisturbed" / "profiling.json").read_bytes()
    moments = random.Random(0)
    kills = left_lowered = tries = 0
    while kills < 20:
        tries += 1
        assert tries < 100, "most runs were over before they could be killed"
        folder = tmp_path / f"killed{tries}"
        driver = forked_run(folder, sizes)
        time.sleep(moments.uniform(0, duration))
        children = children_of(driver) if tries % 2 else []
        os.kill(driver, signal.SIGKILL)
        for child in children:
            os.kill(child, signal.SIGKILL)
        if not os.WIFSIGNALED(os.waitpid(driver, 0)[1]):
            duration *= 0.9  # It was over: the first run, by which we went, was a slow one.
            continue
        kills += 1
        left_lowered += limit_in(state) != BEFORE
        assert os.waitpid(forked_run(folder, sizes), 0)[1] == 0
        assert (folder / "profiling.json").read_bytes() == expected
        assert limit_in(state) == BEFORE
        assert notes_in(folder, state) == []
    assert left_lowered >= 3, "hardly a kill hit a run while it had lowered the limit"


def test_disk_full_while_writing_loses_nothing_and_is_one_clear_error(state, tmp_path):
    resource = pytest.importorskip("resource")
    folder = tmp_path / "p"
    with simulation.use("T4"):
        run(tmp_path / "other", sizes=[32])
    one = (tmp_path / "other" / "profiling.json").stat().st_size
    pid = os.fork()
    if not pid:
        status = 99
        try:
            # The results of one batch size fit into a file, those of two do not.
            resource.setrlimit(resource.RLIMIT_FSIZE, (one * 3 // 2, one * 3 // 2))
            with simulation.use("T4"):
                run(folder, sizes=[32, 64, 128])
        except ProfilingError as error:
            status = 7 if "cannot be written" in str(error) and "kept" in str(error) else 98
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert list(trace_in(folder)) == ["32"]
    assert limit_in(state) == BEFORE
    assert not [name for name in os.listdir(folder) if name.startswith(".profiling")]
    with simulation.use("T4"):
        status, text = run(folder, sizes=[32, 64, 128])
    assert status == 0
    assert "To do: 1 batch sizes (2 are finished)" in text
    assert list(trace_in(folder)) == ["32", "64", "128"]
