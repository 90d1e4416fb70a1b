"""Profiling in this process: the figures are right, bad requests are refused, limits put back."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from zeus_hetero import (
    GPUBusyError,
    ProfilingError,
    TraceWarning,
    fit,
    load_trace,
    profile,
    simulation,
)
from zeus_hetero.bundled import BUNDLED_GPUS, BUNDLED_WORKLOADS, bundled_trace
from zeus_hetero.errors import DeviceError, PowerLimitError, PowerLimitPermissionError
from zeus_hetero.measure import Windows, measure_idle, measure_wait
from zeus_hetero.profiled_gpu import ProfiledGPU
from zeus_hetero.profiling import check_batch_sizes, driver_version, is_out_of_memory
from zeus_hetero.simulation import (
    CounterReset,
    LimitRejected,
    Lost,
    NoPermission,
    SlowCounter,
    ThermalSlowdown,
    simulated_gpu,
)

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("workload", BUNDLED_WORKLOADS)
@pytest.mark.parametrize("name", BUNDLED_GPUS)
def test_profile_gives_the_truth_back_within_the_counters_resolution(name, workload):
    truth = bundled_trace(name, workload)
    with simulation.use(name, workload=workload) as gpus:
        measured = profile(gpus[0].run_step, truth.batch_sizes, truth.power_limits)
        period = gpus[0].counter_period
    assert measured.batch_size.tolist() == truth.batch_size.tolist()
    assert measured.power_limit.tolist() == truth.power_limit.tolist()
    np.testing.assert_allclose(measured.time, truth.time, rtol=1e-9)
    # Each of the windows may be wrong by one movement of the counter.
    windows = np.array([record["repeats"] for record in measured.extra])
    resolution = windows * period * truth.average_power / measured.steps
    assert np.all(np.abs(measured.energy - truth.energy) <= resolution * (1 + 1e-6))
    assert resolution.max() / truth.energy.max() < 0.025
    assert np.all(resolution / truth.energy <= 0.02 + 1e-6)


@pytest.mark.filterwarnings("ignore::zeus_hetero.TraceWarning")
def test_repeats_bring_three_percent_of_noise_under_one_and_a_half():
    errors: dict[str, list[float]] = {"time": [], "energy": []}
    for name in BUNDLED_GPUS:
        truth = bundled_trace(name)
        for seed in range(3):
            with simulation.use(simulated_gpu(name, noise=0.03, seed=seed)) as gpus:
                measured = profile(gpus[0].run_step, truth.batch_sizes, truth.power_limits)
            for figure, found in errors.items():
                found += list(abs(getattr(measured, figure) / getattr(truth, figure) - 1))
    assert 0.005 < statistics.median(errors["time"]) < 0.015
    assert 0.005 < statistics.median(errors["energy"]) < 0.015


@pytest.mark.filterwarnings("ignore::zeus_hetero.TraceWarning")
def test_single_windows_would_not_bring_the_noise_down():
    truth = bundled_trace("A10")
    with simulation.use(simulated_gpu("A10", noise=0.03)) as gpus:
        measured = profile(gpus[0].run_step, truth.batch_sizes, truth.power_limits, repeats=1)
    assert statistics.median(abs(measured.time / truth.time - 1)) > 0.015
    assert "time_spread" not in measured.extra[0]


def test_records_say_where_they_come_from(tmp_path):
    with simulation.use("T4") as gpus:
        trace = profile(gpus[0].run_step, [64], [70, 60], fields={"arch": "net", "dataset": "data"})
    trace.save(tmp_path / "t.json")
    record = load_trace(tmp_path / "t.json").extra[0]
    assert record["simulated"] is True
    assert record["driver"] == "simulated"
    assert (record["gpu"], record["arch"], record["repeats"]) == ("T4", "net", 3)
    assert record["idle_power"] == pytest.approx(10.0, rel=0.01)
    assert record["wait_power"] == pytest.approx(27.0, rel=0.01)
    assert {"zeus", "time_spread", "energy_spread", "noisy", "temperature"} <= set(record)
    loaded = load_trace(tmp_path / "t.json")
    assert (loaded.workload, loaded.simulated) == ("data/net", True)
    assert set(fit(loaded).power_limits) == {70, 60}


def test_window_holds_enough_movements_of_a_slow_counter():
    gpu = simulated_gpu("T4", faults=[SlowCounter(period=1.0)])
    with simulation.use(gpu):
        trace = profile(gpu.run_step, [32], [70], repeats=2)
    assert trace.time[0] * trace.steps[0] >= 2 * 50 * 1.0 * 0.99
    assert trace.energy[0] == pytest.approx(bundled_trace("T4").energy[0], rel=0.02)


def test_counter_that_never_moves_is_an_error():
    gpu = simulated_gpu("T4", faults=[SlowCounter(period=60.0)])
    with simulation.use(gpu), pytest.raises(ProfilingError, match="counter moved 0 times"):
        profile(gpu.run_step, [32], [70])


def test_window_with_a_counter_reset_is_measured_again():
    truth = bundled_trace("T4")
    gpu = simulated_gpu("T4", faults=[CounterReset(at_step=300)])
    with simulation.use(gpu):
        trace = profile(gpu.run_step, [32], [70, 65])
    expected = truth.energy[truth.batch_size == 32][:2]
    np.testing.assert_allclose(trace.energy, expected, rtol=0.02)


def test_thermal_slowdown_makes_its_points_noisy_and_says_so():
    gpu = simulated_gpu("T4", faults=[ThermalSlowdown(after=20.0, slowdown=1.5)])
    with simulation.use(gpu), pytest.warns(TraceWarning, match="noisy points.*32 at 70 W"):
        trace = profile(gpu.run_step, [32], [70, 60])
    assert all(record["noisy"] for record in trace.extra)


def test_warm_up_lasts_for_the_time_asked_for():
    gpu = simulated_gpu("T4")
    with simulation.use(gpu):
        profile(gpu.run_step, [32], [70], warmup_time=30.0, repeats=1)
        assert gpu.clock >= 30 + 5


def test_idle_and_wait_power_are_measured_and_so_is_the_counters_period():
    gpu = simulated_gpu("A10", counter_period=0.05)
    with simulation.use(gpu):
        card = ProfiledGPU(0)
        idle = measure_idle(card)
        assert idle.power == pytest.approx(16, rel=0.02)
        assert idle.counter_period == pytest.approx(0.05, rel=0.1)
        assert measure_wait(card) == pytest.approx(55, rel=0.02)


def test_limits_are_walked_down_and_up_in_turn():
    seen = []
    with simulation.use("T4") as gpus:
        profile(gpus[0].run_step, [32], [60, 70, 65], on_progress=seen.append)
    assert [p.power_limit for p in seen] == [70, 65, 60, 60, 65, 70, 70, 65, 60]
    assert [p.done for p in seen] == list(range(1, 10))
    assert {p.total for p in seen} == {9}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ([80], "power limits 80 W; GPU 0 (T4) supports whole numbers from 60 to 70 W"),
        ([70, 50, 40], "power limits 50, 40 W"),
        ([65.5], "power limits 65.5 W"),
        (["hot"], "power limits hot W"),
        ([True], "power limits True W"),
        ([70, 70], "each of them once"),
        ([], "no power limits"),
    ],
)
def test_impossible_power_limits_are_refused_before_anything_runs(limits, message):
    with simulation.use("T4") as gpus:
        with pytest.raises(PowerLimitError) as caught:
            profile(gpus[0].run_step, [32], limits)
        assert gpus[0].steps == 0
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([32, 0], "batch sizes 0; expected whole numbers of at least 1"),
        ([-4], "batch sizes -4"),
        ([1.5], "batch sizes 1.5"),
        ([], "no batch sizes"),
        ([32, 2048, 4096], "2048, 4096 are larger than the data set, which has 1000"),
    ],
)
def test_impossible_batch_sizes_are_refused(sizes, message):
    with pytest.raises(ProfilingError) as caught:
        check_batch_sizes(sizes, dataset_size=1000)
    assert message in str(caught.value)


def test_batch_sizes_are_sorted_and_duplicates_dropped():
    assert check_batch_sizes([128, 32, 64, 32]) == (32, 64, 128)


@pytest.mark.parametrize(
    "change", [{"warmup_steps": 0}, {"profile_steps": 1.5}, {"repeats": -1}, {"warmup_time": -1.0}]
)
def test_impossible_windows_are_refused(change):
    with pytest.raises(ProfilingError, match=next(iter(change))):
        Windows(**change)


def test_gpu_that_is_not_there_is_refused():
    with simulation.use("T4"), pytest.raises(ProfilingError, match=r"GPU 3; expected one from 0"):
        profile(lambda size: None, [32], [70], gpu_index=3)


def test_without_any_gpu_the_message_offers_a_simulated_one(monkeypatch):
    from zeus.device.gpu.common import ZeusGPUInitError

    def none(ensure_homogeneous=False):
        raise ZeusGPUInitError("no driver")

    monkeypatch.setattr("zeus.device.get_gpus", none)
    with pytest.raises(DeviceError, match="use simulated GPUs"):
        profile(lambda size: None, [32], [70])


def test_missing_permission_is_found_before_the_first_step_and_says_what_to_run():
    with simulation.use(simulated_gpu("T4", faults=[NoPermission()])) as gpus:
        with pytest.raises(PowerLimitPermissionError, match=r"--cap-add SYS_ADMIN.*zeusd"):
            profile(gpus[0].run_step, [32], [70, 60])
        assert gpus[0].steps == 0


def test_limit_that_the_driver_rejects_is_found_before_the_first_step():
    with simulation.use(simulated_gpu("T4", faults=[LimitRejected((60,))])) as gpus:
        gpus[0].set_power_management_limit(66_000)
        with pytest.raises(PowerLimitError, match="refuses a power limit of 60 W"):
            profile(gpus[0].run_step, [32], [70, 60])
        assert (gpus[0].steps, gpus[0].power_limit) == (0, 66)


def test_card_that_cuda_numbers_differently_stops_after_the_first_step(monkeypatch):
    def differ(gpus, indices):
        raise DeviceError(f"GPU {indices[0]} is another card for CUDA")

    # This machine may have no two cards to confuse; what the check finds is tested on its own.
    monkeypatch.setattr("zeus_hetero.profiling.check_device_order", differ)
    with simulation.use("T4") as gpus:
        gpus[0].set_power_management_limit(63_000)
        with pytest.raises(DeviceError, match="GPU 0 is another card"):
            profile(gpus[0].run_step, [32], [70])
        assert (gpus[0].steps, gpus[0].power_limit) == (1, 63)


def test_power_limit_is_what_it_was_after_success_and_after_an_exception():
    def crash(size):
        raise ZeroDivisionError

    with simulation.use("T4") as gpus:
        gpus[0].set_power_management_limit(63_000)
        profile(gpus[0].run_step, [32], [70, 60], repeats=1)
        assert gpus[0].power_limit == 63
        with pytest.raises(ZeroDivisionError):
            profile(crash, [32], [60])
        assert gpus[0].power_limit == 63
        # The failed window was closed: the next profile can open its own.
        profile(gpus[0].run_step, [32], [60], repeats=1)


def test_batch_size_that_does_not_fit_ends_the_profile_there():
    with simulation.use(simulated_gpu("T4", largest_batch=100)) as gpus:
        with pytest.warns(TraceWarning, match="out of memory at batch size 128.*up to 64"):
            trace = profile(gpus[0].run_step, [32, 64, 128, 256], [70], repeats=1)
        with pytest.raises(ProfilingError, match="batch size 256, the smallest"):
            profile(gpus[0].run_step, [256], [70])
    assert trace.batch_sizes == (32, 64)
    assert {record["out_of_memory_at"] for record in trace.extra} == {128}


def test_lost_gpu_raises_its_own_error_and_not_one_from_cleaning_up():
    from zeus.device.gpu.common import ZeusGPULostError

    gpu = simulated_gpu("T4", faults=[Lost(at_step=50)])
    with simulation.use(gpu), pytest.raises(ZeusGPULostError):
        profile(gpu.run_step, [32], [70, 60])


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug",
            "535.104.05",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95  Release", "580.95"),
        ("no driver", None),
    ],
)
def test_driver_version_is_read_from_the_kernel_modules_text(text, version):
    assert driver_version(text) == version


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 2 GiB", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate", True),
        ("DataLoader worker: out of shared memory (shm)", False),
    ],
)
def test_out_of_memory_of_the_gpu_is_told_from_others(text, expected):
    assert is_out_of_memory(RuntimeError(text)) is expected


def test_step_that_does_not_move_the_virtual_clock_is_explained():
    with simulation.use("T4"), pytest.raises(ProfilingError, match="run_step"):
        profile(lambda size: None, [32], [70])


def test_no_warning_about_empty_windows_reaches_the_user():
    with simulation.use("T4") as gpus, warnings.catch_warnings():
        warnings.simplefilter("error")
        profile(gpus[0].run_step, [32], [70], warmup_steps=1, repeats=1)


def test_second_gpu_is_profiled_with_its_own_limits():
    with simulation.use("A10", "T4") as gpus:
        trace = profile(gpus[1].run_step, [32], [65], gpu_index=1, repeats=1)
        assert gpus[0].power_limit == 300
    assert trace.gpu == "T4"


SCRIPT = """
import sys, time
from zeus_hetero import profile, simulation
simulation.install_from_environment()
gpu = simulation.active()[0]
def step(size):
    print("stepping", flush=True)
    time.sleep(0.02)
    gpu.run_step(size)
profile(step, [32], [60])
"""


@pytest.fixture
def busy_profiler(tmp_path):
    """A process that profiles a simulated T4, whose limit was 66 W; the state is in tmp_path."""
    (tmp_path / "gpu0.json").write_text("[66000, false]")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "ZEUS_HETERO_SIMULATE": "T4",
        "ZEUS_HETERO_SIMULATE_STATE": str(tmp_path),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.PIPE, text=True
    )
    # Zeus 0.12 prints its log before.
    assert any(line == "stepping\n" for line in process.stdout)
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def limit_in(folder):
    return int((folder / "gpu0.json").read_text().strip("[").split(",")[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_puts_the_power_limit_back(busy_profiler, tmp_path, number):
    assert limit_in(tmp_path) == 60_000
    busy_profiler.send_signal(number)
    assert busy_profiler.wait(20) != 0
    assert limit_in(tmp_path) == 66_000


def test_second_profiler_on_the_gpu_stops_and_names_the_first(busy_profiler, tmp_path, monkeypatch):
    monkeypatch.setenv("ZEUS_HETERO_SIMULATE_STATE", str(tmp_path))
    with simulation.use("T4") as gpus:
        began = time.monotonic()
        with pytest.raises(GPUBusyError, match=f"process {busy_profiler.pid} "):
            profile(gpus[0].run_step, [32], [70])
        assert time.monotonic() - began < 10
        assert gpus[0].steps == 0
    assert limit_in(tmp_path) == 60_000  # still the first one's


def test_profile_after_a_killed_one_puts_back_what_that_one_left(
    busy_profiler, tmp_path, monkeypatch
):
    busy_profiler.send_signal(signal.SIGKILL)
    busy_profiler.wait(20)
    assert limit_in(tmp_path) == 60_000
    monkeypatch.setenv("ZEUS_HETERO_SIMULATE_STATE", str(tmp_path))
    with simulation.use("T4") as gpus:
        profile(gpus[0].run_step, [32], [70], repeats=1)
        assert gpus[0].power_limit == 66
