"""Simulated GPUs: Zeus runs on them unmodified, and they play their trace back exactly."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import warnings
from pathlib import Path

import pandas as pd
import pytest
import zeus.device.gpu
import zeus.monitor.energy
from zeus.device import get_gpus
from zeus.device.gpu.common import (
    ZeusGPUInvalidArgError,
    ZeusGPULostError,
    ZeusGPUNoPermissionError,
)
from zeus.monitor import ZeusMonitor

from zeus_hetero import (
    HeteroPowerLimitOptimizer,
    PowerLimitPermissionError,
    SimulationError,
    load_trace,
    simulation,
)
from zeus_hetero.bundled import BUNDLED_GPUS, BUNDLED_WORKLOADS, bundled_trace
from zeus_hetero.simulation import (
    CounterReset,
    LimitRejected,
    Lost,
    NoPermission,
    OutOfMemory,
    SimulatedGPU,
    SlowCounter,
    ThermalSlowdown,
)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def trace():
    """0.1 s and 10 J a step at 100 W; half as fast and 8 J at 50 W; twice that at batch 64."""
    return load_trace(
        pd.DataFrame(
            {
                "batch_size": [32, 32, 64, 64],
                "power_limit": [100, 50, 100, 50],
                "time": [0.1, 0.2, 0.2, 0.4],
                "energy": [10.0, 8.0, 20.0, 16.0],
            }
        ),
        gpu="card",
    )


def measure(monitor, gpu, batch_size, steps):
    monitor.begin_window("w")
    for _ in range(steps):
        gpu.run_step(batch_size)
    return monitor.end_window("w")


def child(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("workload", BUNDLED_WORKLOADS)
@pytest.mark.parametrize("name", BUNDLED_GPUS)
def test_zeus_monitor_measures_what_the_trace_says_within_one_tick(name, workload):
    truth = bundled_trace(name, workload)
    with simulation.use(name, workload=workload) as gpus:
        monitor = ZeusMonitor(cpu_indices=[])
        for b, p, t, e in zip(truth.batch_size, truth.power_limit, truth.time, truth.energy):
            gpus[0].set_power_management_limit(int(p) * 1000)
            measured = measure(monitor, gpus[0], int(b), 200)
            assert measured.time == pytest.approx(200 * t, rel=1e-9)
            # A window begins and ends between two movements of the counter; before the window
            # the GPU drew the power of the point before, so bound it by the largest.
            one_tick = gpus[0].counter_period * truth.average_power.max()
            assert abs(measured.gpu_energy[0] - 200 * e) <= one_tick


def test_energy_is_exact_with_a_continuous_counter(trace):
    with simulation.use(SimulatedGPU("card", trace, counter_period=0)) as gpus:
        measured = measure(ZeusMonitor(cpu_indices=[]), gpus[0], 32, 7)
    assert measured.gpu_energy[0] == pytest.approx(70.0)


def test_counter_stands_still_between_two_ticks(trace):
    gpu = SimulatedGPU("card", trace, counter_period=0.25)
    with simulation.use(gpu):
        readings = []
        for _ in range(5):
            gpu.run_step(32)
            readings.append(gpu.get_total_energy_consumption())
    assert readings == [0, 0, 25_000, 25_000, 50_000]


def test_slow_counter_gives_a_short_window_no_energy(trace):
    with simulation.use(SimulatedGPU("card", trace, faults=[SlowCounter(period=5.0)])) as gpus:
        monitor = ZeusMonitor(cpu_indices=[])
        with pytest.warns(UserWarning, match="zero"):
            assert measure(monitor, gpus[0], 32, 10).gpu_energy[0] == 0.0
        assert measure(monitor, gpus[0], 32, 90).gpu_energy[0] > 0


def test_lower_power_limit_changes_time_and_energy(trace):
    gpu = SimulatedGPU("card", trace, counter_period=0)
    with simulation.use(gpu):
        assert gpu.run_step(32) == pytest.approx(0.1)
        gpu.set_power_management_limit(50_000)
        assert gpu.run_step(32) == pytest.approx(0.2)
        gpu.set_power_management_limit(75_000)
        before = gpu.get_total_energy_consumption()
        assert gpu.run_step(32) == pytest.approx(0.15)
        assert gpu.get_total_energy_consumption() - before == 9_000


def test_between_profiled_batch_sizes_the_interpolated_model_holds(trace):
    gpu = SimulatedGPU("card", trace)
    with simulation.use(gpu):
        assert gpu.run_step(48) == pytest.approx(0.15)
        assert gpu.run_step(0) == 0
        assert gpu.run_step(16) == pytest.approx(0.1)
        assert gpu.run_step(128) == pytest.approx(0.4)


def test_other_gpus_of_the_process_draw_idle_power(trace):
    first = SimulatedGPU("card", trace, counter_period=0)
    second = SimulatedGPU("other", trace, counter_period=0, idle_power=7.0)
    with simulation.use(first, second):
        for _ in range(10):
            first.run_step(32)
        assert second.get_total_energy_consumption() == 7_000
        second.run_step(32)
        assert second.get_total_energy_consumption() == 17_000
        assert first.get_total_energy_consumption() == 100_000 + 1_000


def test_wait_until_draws_wait_power_and_never_turns_the_clock_back(trace):
    gpu = SimulatedGPU("card", trace, counter_period=0, wait_power=30.0)
    with simulation.use(gpu):
        gpu.run_step(32)
        gpu.wait_until(1.1)
        assert gpu.clock == pytest.approx(1.1)
        assert gpu.get_total_energy_consumption() == 10_000 + 30_000
        gpu.wait_until(0.5)
        assert gpu.clock == pytest.approx(1.1)


def test_steps_on_all_gpus_at_once_last_as_long_as_the_slowest(trace):
    pair = [SimulatedGPU(n, trace, counter_period=0, wait_power=30.0) for n in ("a", "b")]
    with simulation.use(*pair) as gpus:
        assert gpus.run_steps([32, 64]) == pytest.approx(0.2)
        assert gpus[0].get_total_energy_consumption() == 10_000 + 3_000
        assert gpus[1].get_total_energy_consumption() == 20_000
        with pytest.raises(SimulationError, match="3 batch sizes for 2"):
            gpus.run_steps([1, 2, 3])


def test_zeus_optimizer_runs_unmodified_and_finds_the_cheapest_limit():
    pytest.importorskip("torch", reason="Zeus 0.16's optimizer needs a framework")
    from zeus.optimizer.power_limit import Done, Energy, GlobalPowerLimitOptimizer

    with simulation.use("T4") as gpus:
        monitor = ZeusMonitor(cpu_indices=[])
        optimizer = GlobalPowerLimitOptimizer(monitor, Energy(), pl_step=5, profile_steps=100)
        for _ in range(400):
            optimizer.on_step_begin()
            gpus[0].run_step(256)
        assert isinstance(optimizer.state, Done)
        measured = {m.power_limit: m.energy / 100 for m in optimizer.measurements}
        truth = bundled_trace("T4")
        expected = truth.energy[truth.batch_size == 256]
        assert list(measured) == [70, 65, 60]
        assert list(measured.values()) == pytest.approx(list(expected), abs=70 * 0.1 / 100)
        assert gpus[0].power_limit == 60


def test_zeus_optimizer_made_inside_the_block_ends_quietly_after_it():
    pytest.importorskip("torch", reason="Zeus 0.16's optimizer needs a framework")
    done = child(
        "from zeus_hetero import simulation\n"
        "from zeus.monitor import ZeusMonitor\n"
        "from zeus.optimizer.power_limit import Energy, GlobalPowerLimitOptimizer\n"
        "for name in 'T4', 'A10':\n"
        "    with simulation.use(name):\n"
        "        GlobalPowerLimitOptimizer(ZeusMonitor(cpu_indices=[]), Energy())\n"
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_noise_is_seeded_and_averages_out(trace):
    def errors(seed):
        gpu = SimulatedGPU("card", trace, noise=0.03, seed=seed, counter_period=0)
        with simulation.use(gpu):
            monitor = ZeusMonitor(cpu_indices=[])
            windows = [measure(monitor, gpu, 32, 10) for _ in range(200)]
        return [w.time / 1.0 - 1 for w in windows], [w.gpu_energy[0] / 100 - 1 for w in windows]

    times, energies = errors(1)
    assert (times, energies) == errors(1)
    assert times != errors(2)[0]
    for sample in (times, energies):
        assert statistics.stdev(sample) == pytest.approx(0.03, rel=0.2)
        assert abs(statistics.mean(sample)) < 0.01


@pytest.mark.parametrize("attribute", ["largest_batch", "faults"])
def test_too_large_a_batch_is_out_of_memory(trace, attribute):
    value = 48 if attribute == "largest_batch" else [OutOfMemory(above=48)]
    gpu = SimulatedGPU("card", trace, **{attribute: value})
    with simulation.use(gpu):
        gpu.run_step(48)
        with pytest.raises(RuntimeError, match=r"out of memory.*at most 48"):
            gpu.run_step(49)
        gpu.run_step(32)


def test_out_of_memory_is_torchs_own_error_where_torch_is_in_use(trace):
    torch = pytest.importorskip("torch")
    gpu = SimulatedGPU("card", trace, largest_batch=48)
    with simulation.use(gpu), pytest.raises(torch.cuda.OutOfMemoryError):
        gpu.run_step(49)


def test_without_permission_nothing_can_be_set_but_everything_read(trace):
    with simulation.use(SimulatedGPU("card", trace, faults=[NoPermission()])):
        gpu = get_gpus().gpus[0]
        with pytest.raises(ZeusGPUNoPermissionError):
            gpu.set_power_management_limit(50_000)
        with pytest.raises(ZeusGPUNoPermissionError):
            gpu.set_persistence_mode(True)
        assert gpu.get_power_management_limit() == 100_000
        assert gpu.get_total_energy_consumption() == 0


def test_driver_rejects_a_limit_in_range(trace):
    gpu = SimulatedGPU("card", trace, faults=[LimitRejected(power_limits=(60,))])
    with simulation.use(gpu):
        gpu.set_power_management_limit(70_000)
        with pytest.raises(ZeusGPUInvalidArgError, match="rejected"):
            gpu.set_power_management_limit(60_000)
        assert gpu.power_limit == 70
        with pytest.raises(ZeusGPUInvalidArgError, match="50000 to 100000"):
            gpu.set_power_management_limit(40_000)


def test_lost_gpu_answers_nothing_any_more(trace):
    gpu = SimulatedGPU("card", trace, faults=[Lost(at_step=3)])
    with simulation.use(gpu):
        gpu.run_step(32)
        gpu.run_step(32)
        with pytest.raises(ZeusGPULostError):
            gpu.run_step(32)
        for call in (gpu.get_total_energy_consumption, gpu.get_power_management_limit):
            with pytest.raises(ZeusGPULostError):
                call()


def test_counter_reset_makes_a_window_negative(trace):
    with simulation.use(SimulatedGPU("card", trace, faults=[CounterReset(at_step=15)])) as gpus:
        monitor = ZeusMonitor(cpu_indices=[])
        measure(monitor, gpus[0], 32, 10)
        assert measure(monitor, gpus[0], 32, 10).gpu_energy[0] < 0


def test_thermal_slowdown_begins_at_its_moment(trace):
    gpu = SimulatedGPU("card", trace, faults=[ThermalSlowdown(after=0.95, slowdown=2.0)])
    with simulation.use(gpu):
        assert [round(gpu.run_step(32), 3) for _ in range(12)] == [0.1] * 10 + [0.2] * 2
        assert gpu.get_gpu_temperature() > 90


def test_leaving_the_block_puts_everything_back(trace):
    before = (zeus.device.gpu._gpus, zeus.monitor.energy.time, dict(os.environ))
    with simulation.use("A10"):
        with simulation.use("T4", "T4") as inner:
            assert simulation.active() is inner
            assert len(get_gpus()) == 2
        assert len(get_gpus()) == 1
    assert simulation.active() is None
    after = dict(os.environ)
    after.pop("ZEUS_HETERO_SIMULATE_ANNOUNCED", None)
    before[2].pop("ZEUS_HETERO_SIMULATE_ANNOUNCED", None)
    assert (zeus.device.gpu._gpus, zeus.monitor.energy.time, after) == before


def test_second_block_on_the_same_gpu_starts_afresh(trace):
    gpu = SimulatedGPU("card", trace)
    for _ in range(2):
        with simulation.use(gpu):
            assert (gpu.clock, gpu.steps, gpu.power_limit) == (0, 0, 100)
            gpu.set_power_management_limit(50_000)
            gpu.run_step(32)


def test_children_inherit_every_attribute_and_share_the_power_limit(trace):
    code = (
        "from zeus_hetero import simulation\n"
        "assert simulation.install_from_environment()\n"
        "gpu, = simulation.active()\n"
        "print(gpu.name, gpu.noise, gpu.seed, gpu.faults, gpu.largest_batch, gpu.power_limit)\n"
        "gpu.set_power_management_limit(60_000)\n"
        "print(gpu.run_step(32))\n"
    )
    faults = [Lost(at_step=9), LimitRejected((55,))]
    gpu = SimulatedGPU("card", trace, noise=0.5, seed=3, faults=faults, largest_batch=40)
    with simulation.use(gpu):
        gpu.set_power_management_limit(80_000)
        done = child(code)
        assert done.returncode == 0, done.stderr
        first, second = done.stdout.splitlines()
        assert first == f"card 0.5 3 {gpu.faults} 40 80.0"
        assert gpu.power_limit == 60
        assert gpu.clock == 0  # every process has its own clock
        assert float(second) == gpu.run_step(32)  # same seed, same noise


def test_power_limit_outlives_a_killed_process_where_a_state_folder_is_given(tmp_path):
    code = (
        "import os, signal\n"
        "from zeus_hetero import simulation\n"
        "simulation.install_from_environment()\n"
        "simulation.active()[0].set_power_management_limit(60_000)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {"ZEUS_HETERO_SIMULATE": "T4", "ZEUS_HETERO_SIMULATE_STATE": str(tmp_path)}
    assert child(code, **environment).returncode == -9
    assert json.loads((tmp_path / "gpu0.json").read_text())[0] == 60_000


def test_says_once_per_process_tree_that_figures_are_simulated():
    code = (
        "import os, subprocess, sys\n"
        "from zeus_hetero import simulation\n"
        "simulation.install_from_environment()\n"
        "with simulation.use('A10'): pass\n"
        "if not sys.argv[1:]: subprocess.run([sys.executable, '-c', os.environ['CODE'], 'x'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CODE": code}
    environment.pop("ZEUS_HETERO_SIMULATE_ANNOUNCED", None)
    environment["ZEUS_HETERO_SIMULATE"] = "T4"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stderr.count("SIMULATED") == 1
    assert "T4 (cifar100" in done.stderr


def test_without_the_variable_nothing_is_simulated(monkeypatch):
    monkeypatch.delenv("ZEUS_HETERO_SIMULATE", raising=False)
    assert simulation.install_from_environment() is False
    assert simulation.active() is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("H100", "no simulated GPU 'H100'; expected one of A10, T4"),
        (" , ", "expected names"),
        ("[{]", "not valid JSON"),
        ("[1]", "expected"),
        ('[{"name": "T4", "colour": 1}]', "unknown colour"),
        ('[{"name": "T4", "faults": [{"fault": "fire"}]}]', "fault is 'fire'; expected one of"),
        ('[{"name": "T4", "faults": [{"fault": "lost", "when": 1}]}]', "expected at_step"),
        ('[{"name": "T4", "noise": -1}]', "noise is -1"),
        ('[{"name": "T4", "power_range": [80, 70]}]', "power_range"),
        ('[{"name": "T4", "largest_batch": -1}]', "largest_batch is -1"),
    ],
)
def test_nonsense_in_the_environment_is_one_clear_error(text, message):
    with pytest.raises(SimulationError) as caught:
        simulation.parse_gpus(text)
    assert message in str(caught.value)


def test_names_paths_and_json_all_name_gpus(tmp_path):
    bundled_trace("T4", "imagenet").save(tmp_path / "mine.json")
    by_name, by_path = simulation.parse_gpus(f"a10, {tmp_path / 'mine.json'}", "imagenet")
    assert by_name.trace.workload == "imagenet"
    assert by_path.name == "T4"
    (by_json,) = simulation.parse_gpus(
        json.dumps([{"name": "x", "trace": str(tmp_path / "mine.json")}])
    )
    assert (by_json.name, by_json.power_range) == ("x", (60, 70))


def test_wrong_use_is_refused(trace):
    gpu = SimulatedGPU("card", trace)
    with pytest.raises(SimulationError, match="twice"):
        simulation.use(gpu, gpu)
    with pytest.raises(SimulationError, match="no GPU"):
        simulation.use()
    with pytest.raises(SimulationError, match="at least 0"):
        gpu.run_step(-1)


def test_zeus_does_not_warn_about_privileges_or_old_names(trace):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with simulation.use(SimulatedGPU("card", trace)):
            gpu = get_gpus().gpus[0]
            gpu.setPersistenceMode(True, _block=True)
            gpu.setPowerManagementLimit(60_000)
            assert gpu.getName() == "card"
            assert gpu.get_persistence_mode() is True
            gpu.resetPowerManagementLimit()
            assert gpu.power_limit == 100


def test_hetero_optimizer_profiles_its_limits_and_puts_the_old_one_back():
    pytest.importorskip("torch", reason="Zeus 0.16's optimizer needs a framework")
    with simulation.use("A10", "T4") as gpus:
        gpus[1].set_power_management_limit(67_000)
        monitor = ZeusMonitor(gpu_indices=[1], cpu_indices=[])
        with HeteroPowerLimitOptimizer(monitor, power_limits=[70, 60]) as optimizer:
            for _ in range(200):
                optimizer.on_step_begin()
                gpus[1].run_step(256)
            assert [m.power_limit for m in optimizer.measurements] == [70, 60]
        assert (gpus[0].power_limit, gpus[1].power_limit) == (300, 67)


def test_hetero_optimizer_finds_missing_permission_before_the_first_step():
    pytest.importorskip("torch", reason="Zeus 0.16's optimizer needs a framework")
    with simulation.use(simulation.simulated_gpu("T4", faults=[NoPermission()])):
        monitor = ZeusMonitor(cpu_indices=[])
        with pytest.raises(PowerLimitPermissionError, match="SYS_ADMIN"):
            HeteroPowerLimitOptimizer(monitor, power_limits=[70])
