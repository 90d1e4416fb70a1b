from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path
from unittest import mock

import pytest
import zeus.device.gpu
import zeus.monitor.energy
import zeus.optimizer.power_limit as upstream
from fake_gpus import A10, T4, V100, FakeGPUs, Monitor
from zeus.optimizer.power_limit import Done, Energy, MaxSlowdownConstraint, Ready, Time, ZeusCost
from zeus.utils.testing import ReplayZeusMonitor

from zeus_hetero import power_limit as module
from zeus_hetero import restore
from zeus_hetero.allocation import Allocation, Worker
from zeus_hetero.errors import (
    DeviceError,
    PlanError,
    PowerLimitError,
    PowerLimitPermissionError,
    PowerLimitWarning,
)
from zeus_hetero.power_limit import HeteroPowerLimitOptimizer, HeteroZeusCost

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _isolated(monkeypatch, tmp_path):
    monkeypatch.setenv(restore.NOTE_FOLDER_VARIABLE, str(tmp_path / "notes"))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(zeus.device.gpu, "_gpus", None)
    monkeypatch.setattr(zeus.monitor.energy, "time", zeus.monitor.energy.time)
    # Zeus's own exit hook would write to the fake GPUs after their folder is gone.
    monkeypatch.setattr(upstream, "atexit", mock.Mock())


@pytest.fixture
def node(tmp_path):
    def build(*specs, **options):
        return FakeGPUs(specs, tmp_path / f"state{len(specs)}.json", **options).install()

    return build


@pytest.fixture
def optimize():
    """Build an optimizer that is closed after the test."""
    built = []

    def build(*args, **kwargs):
        built.append(HeteroPowerLimitOptimizer(*args, **kwargs))
        return built[-1]

    yield build
    for optimizer in reversed(built):
        optimizer.close()


def train(optimizer, gpus, steps, epoch=10**9):
    """Run training steps; returns after `steps` or once the optimizer is done."""
    for step in range(1, steps + 1):
        optimizer.on_step_begin()
        if isinstance(optimizer.state, Done):
            return step
        gpus.step()
        if step % epoch == 0:
            optimizer.on_epoch_end()
    return steps


# --- which limits are profiled ---


def test_exactly_the_listed_limits_are_profiled_in_their_order(node, optimize):
    gpus = node(V100)
    optimizer = optimize(Monitor(), Energy(), power_limits=[200, 300, 250])
    gpus.forget_writes()
    train(optimizer, gpus, 500)
    # The start is at the highest of them.
    assert gpus.writes() == [200, 300, 250, optimizer.state.optimal_power_limit / 1000]
    assert [window.power_limit for window in optimizer.windows] == [200, 300, 250]
    assert [m.power_limit for m in optimizer.measurements] == [200, 300, 250]
    assert optimizer.state.optimal_power_limit == 200_000  # the least energy on this fake


def test_windows_hold_what_the_gpu_used(node, optimize):
    gpus = node(V100)
    optimizer = optimize(Monitor(), power_limits=[300, 200])
    train(optimizer, gpus, 500)
    for window in optimizer.windows:
        seconds = 40 / (10 * (window.power_limit / 300) ** 0.5)
        assert window.steps == 40
        assert window.time == pytest.approx(seconds)
        assert window.energy == {0: pytest.approx(seconds * window.power_limit, rel=1e-3)}
        assert not window.approximate


def test_the_list_starts_at_its_highest_not_at_the_gpus_maximum(node, optimize):
    gpus = node(V100)
    optimize(Monitor(), power_limits=[250, 200])
    assert gpus.limits() == [250]
    assert 300 not in gpus.writes()


def test_without_a_list_the_whole_range_is_profiled(node, optimize):
    gpus = node(V100)
    optimizer = optimize(Monitor(), Energy(), pl_step=50)
    train(optimizer, gpus, 500)
    assert [window.power_limit for window in optimizer.windows] == [300, 250, 200, 150, 100]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ([150, 90, 160], r"90, 160 W is not supported by GPU 0 \(NVIDIA A10\): .* 100 to 150 W"),
        ([150, 125, 150], r"150 W for GPU 0 \(NVIDIA A10\) is given more than once"),
        ([], r"GPU 0 \(NVIDIA A10\) is empty.*100 and 150 W"),
        ([150, 120.5], r"120.5 for GPU 0 \(NVIDIA A10\): expected whole W"),
        ([150, float("nan")], "nan.*expected whole W"),
        ([True], "True.*expected whole W"),
        (["150"], "'150'.*expected whole W"),
        ("150", "'150'; expected a list"),
        (150, "150; expected a list"),
        ({"T4": [70]}, r"nothing for GPU 0 \(NVIDIA A10\), only for 'T4'"),
    ],
)
def test_bad_lists_are_refused_before_anything_is_changed(node, limits, message):
    gpus = node(A10)
    with pytest.raises(PowerLimitError, match=message):
        HeteroPowerLimitOptimizer(Monitor(), power_limits=limits)
    assert gpus.writes() == []


def test_contradicting_and_impossible_arguments_are_refused(node):
    gpus = node(A10)
    with pytest.raises(PowerLimitError, match="power_limits and power_limit contradict"):
        HeteroPowerLimitOptimizer(Monitor(), power_limits=[150], power_limit=150)
    with pytest.raises(ValueError, match="warmup_steps is 0"):
        HeteroPowerLimitOptimizer(Monitor(), warmup_steps=0)
    with pytest.raises(ValueError, match="pl_step"):
        HeteroPowerLimitOptimizer(Monitor(), pl_step=0)
    with pytest.raises(ValueError, match="profile_steps"):
        HeteroPowerLimitOptimizer(Monitor(), profile_steps=0)
    assert gpus.limits() == [120]


# --- different GPUs ---


def test_each_process_of_a_mixed_node_cares_for_its_own_gpu(node, optimize):
    gpus = node(A10, T4)
    optimizer = optimize(Monitor([1]), Energy(), power_limits={"A10": [150], "T4": [70, 65, 60]})
    train(optimizer, gpus, 500)
    assert [window.power_limit for window in optimizer.windows] == [70, 65, 60]
    assert gpus.writes(0) == []


def test_a_mixed_node_works_with_a_monitor_that_did_not_build_the_gpus(node, optimize, tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("start_time,window_name,elapsed_time,gpu0_energy\n0,w_70,4.0,280\n")
    node(T4, A10)
    optimizer = optimize(
        ReplayZeusMonitor(log_file=log, ignore_sync_execution=True, match_window_name=False),
        power_limits=[70],
    )
    for _ in range(60):
        optimizer.on_step_begin()
    assert optimizer.windows[0].energy == {0: 280}


def test_several_gpus_of_one_process_have_their_own_limits(node, optimize):
    gpus = node(A10, T4)
    optimizer = optimize(Monitor(), Energy(), power_limits={0: [150, 125, 100], 1: [70, 65, 60]})
    assert gpus.limits() == [150, 70]
    gpus.forget_writes()
    train(optimizer, gpus, 500)
    assert gpus.writes(0)[:2] == [125, 100]
    assert gpus.writes(1)[:2] == [65, 60]
    assert set(optimizer.windows[0].energy) == {0, 1}
    for window, measurement in zip(optimizer.windows, optimizer.measurements):
        assert measurement.energy == pytest.approx(sum(window.energy.values()))
    optimizer.close()
    assert gpus.limits() == [120, 66]


def test_whole_ranges_of_different_lengths_run_together(node, optimize):
    gpus = node(T4, A10)
    optimizer = optimize(Monitor(), Time(), pl_step=10)
    seen = []
    for _ in range(500):
        optimizer.on_step_begin()
        gpus.step()
        if gpus.limits() not in seen:
            seen.append(gpus.limits())
    assert seen[:6] == [[70, 150], [60, 140], [60, 130], [60, 120], [60, 110], [60, 100]]
    assert len(optimizer.windows) == 6


def test_lists_of_different_lengths_are_refused(node):
    node(A10, T4)
    with pytest.raises(PowerLimitError, match=r"different lengths \(GPU 0: 2, GPU 1: 1\)"):
        HeteroPowerLimitOptimizer(Monitor(), power_limits={"A10": [150, 100], "T4": [70]})


def test_the_cost_of_different_gpus_uses_the_sum_of_their_limits(node, optimize):
    node(A10, T4)
    selector = optimize(Monitor()).optimum_selector
    assert isinstance(selector, HeteroZeusCost)
    assert selector.max_power == 220
    fast = upstream.PowerLimitMeasurement(power_limit=150, energy=3000, time=10)
    slow = upstream.PowerLimitMeasurement(power_limit=100, energy=1000, time=20)
    # 0.5 x 3000 + 0.5 x 220 x 10 = 2600 against 0.5 x 1000 + 0.5 x 220 x 20 = 2700
    assert selector.select([fast, slow]) == 150


# --- fixed mode ---


def plan(*entries):
    workers = tuple(Worker(gpu, 8, 8, 1, limit, 1.0, 1.0) for gpu, limit in entries)
    return Allocation(workers, 1, 1, 1, 1, "test", "synchronous", 0.5, 8 * len(workers))


def test_a_fixed_limit_holds_from_the_first_step_without_profiling(node, optimize):
    gpus = node(A10)
    optimizer = optimize(Monitor(), power_limit=110)
    assert gpus.limits() == [110]
    assert isinstance(optimizer.state, Done)
    gpus.forget_writes()
    for _ in range(100):
        optimizer.on_step_begin()
        gpus.step()
    optimizer.on_epoch_end()
    assert gpus.writes() == []
    assert optimizer.measurements == []
    optimizer.close()
    assert gpus.limits() == [120]


def test_a_fixed_limit_does_not_touch_the_profile(node, optimize, tmp_path):
    node(A10)
    optimize(Monitor(), power_limit=110, profile_path=tmp_path / "profile.json")
    assert not (tmp_path / "profile.json").exists()


@pytest.mark.parametrize("limit", [{"T4": 62, "A10": 110}, {0: 110, 1: 62}])
def test_fixed_limits_per_gpu(node, optimize, limit):
    gpus = node(A10, T4)
    optimize(Monitor(), power_limit=limit)
    assert gpus.limits() == [110, 62]


def test_a_fixed_limit_out_of_range_is_refused(node):
    gpus = node(T4)
    with pytest.raises(PowerLimitError, match=r"150 W .*GPU 0 \(Tesla T4\).*60 to 70 W"):
        HeteroPowerLimitOptimizer(Monitor(), power_limit=150)
    assert gpus.writes() == []


def test_a_plan_sets_this_workers_limit(node, optimize, monkeypatch):
    gpus = node(A10, T4)
    allocation = plan(("A10", 130), ("A10", 110), ("T4", 65))
    first = optimize(Monitor([0]), allocation=allocation, rank=1)
    assert gpus.limits() == [110, 66]
    assert isinstance(first.state, Done)
    first.close()
    monkeypatch.setenv("RANK", "0")
    optimize(Monitor([0]), allocation=allocation).close()
    assert gpus.writes(0)[-2:] == [130, 120]
    # Whatever its rank, the T4 finds its entry.
    optimize(Monitor([1]), allocation=allocation)
    assert gpus.limits() == [120, 65]


def test_a_plan_for_several_gpus_of_one_process(node, optimize):
    gpus = node(A10, T4)
    optimize(Monitor(), allocation=plan(("A10", 130), ("T4", 65)))
    assert gpus.limits() == [130, 65]


def test_a_plan_without_this_gpu_is_refused(node):
    gpus = node(V100)
    with pytest.raises(PlanError, match="no worker for 'Tesla V100-SXM2-16GB'"):
        HeteroPowerLimitOptimizer(Monitor(), allocation=plan(("A10", 130)))
    assert gpus.writes() == []


# --- restore (what ends a process is tested in test_restore.py) ---


def test_close_restores_once_and_ends_the_optimizer(node, optimize):
    gpus = node(V100)
    optimizer = optimize(Monitor(), power_limits=[300, 200])
    train(optimizer, gpus, 20)
    optimizer.close()
    assert gpus.limits() == [280]
    gpus.forget_writes()
    optimizer.close()
    train(optimizer, gpus, 300)
    optimizer.on_epoch_end()
    optimizer._set_power_limit(200_000)  # as Zeus's own exit hook does with the maximum
    assert gpus.writes() == []
    assert optimizer.monitor.measurement_states == {}, "the open window was closed"


def test_a_with_block_restores_also_when_it_fails(node):
    gpus = node(V100)

    def fail():
        with HeteroPowerLimitOptimizer(Monitor(), power_limit=100):
            assert gpus.limits() == [100]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert gpus.limits() == [280]


def test_a_constructor_that_fails_half_way_restores(node, monkeypatch):
    gpus = node(V100)
    monkeypatch.setattr(upstream, "Ready", mock.Mock(side_effect=RuntimeError("half way")))
    monkeypatch.setattr(
        HeteroPowerLimitOptimizer,
        "optimum_selector",
        property(
            lambda self: None,
            lambda self, value: gpus.gpus[0].set_power_management_limit(100_000),
        ),
        raising=False,
    )
    with pytest.raises(RuntimeError, match="half way"):
        HeteroPowerLimitOptimizer(Monitor())
    assert gpus.limits() == [280]


def test_two_optimizers_one_after_the_other_restore_the_first_limit(node):
    gpus = node(V100)
    for limit in (100, 200):
        with HeteroPowerLimitOptimizer(Monitor(), power_limit=limit):
            assert gpus.limits() == [limit]
    assert gpus.limits() == [280]


# --- permission ---


def test_a_limit_that_the_driver_rejects_is_named_and_the_old_one_returns(
    node, optimize, monkeypatch
):
    gpus = node(V100)
    optimizer = optimize(Monitor(), power_limits=[300, 200])
    monkeypatch.setattr(gpus.gpus[0], "low", 250)
    with pytest.raises(PowerLimitError, match=r"GPU 0 .*rejects a power limit of 200 W.*250"):
        train(optimizer, gpus, 200)
    optimizer.close()
    assert gpus.limits() == [280]


def test_a_gpu_without_adjustable_limit_is_named(node, monkeypatch):
    gpus = node(A10)
    reject = mock.Mock(side_effect=zeus.device.gpu.ZeusGPUNotSupportedError("Not Supported"))
    monkeypatch.setattr(gpus.gpus[0], "get_power_management_limit_constraints", reject)
    monkeypatch.setattr(gpus.gpus[0], "getPowerManagementLimitConstraints", reject)
    with pytest.raises(DeviceError, match=r"GPU 0 \(NVIDIA A10\) has no adjustable power limit"):
        HeteroPowerLimitOptimizer(Monitor())


@pytest.mark.parametrize("options", [{}, {"power_limits": [120]}, {"power_limit": 120}])
def test_no_permission_is_one_error_before_any_step(node, options):
    gpus = node(A10, permission=False)
    with pytest.raises(PowerLimitPermissionError) as caught:
        HeteroPowerLimitOptimizer(Monitor(), **options)
    assert "--cap-add SYS_ADMIN" in str(caught.value)
    assert "zeusd" in str(caught.value)
    assert "GPU 0 (NVIDIA A10)" in str(caught.value)
    assert isinstance(caught.value, RuntimeError)  # as Zeus's own
    assert gpus.writes() == []
    assert not list(Path(os.environ[restore.NOTE_FOLDER_VARIABLE]).glob("*"))


def test_the_permission_is_probed_without_altering_the_limit(node, monkeypatch):
    gpus = node(A10)
    from zeus_hetero import devices

    devices.check_permission(gpus, 0)
    assert gpus.writes() == [120]


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(value)
        self.value = value


@pytest.fixture
def nvml(monkeypatch):
    """Zeus's real NVIDIA classes on a pretended driver: two cards, persistence mode on."""
    import pynvml
    from zeus.device.gpu import nvidia

    cards = [
        types.SimpleNamespace(name="Tesla T4", limit=70_000, range=(60_000, 70_000), bus=0x1E),
        types.SimpleNamespace(name="NVIDIA A10", limit=150_000, range=(100_000, 150_000), bus=0x65),
    ]
    driver = mock.create_autospec(pynvml)
    for constant in dir(pynvml):
        if constant.isupper() and isinstance(getattr(pynvml, constant), int):
            setattr(driver, constant, getattr(pynvml, constant))
    driver.NVMLError = pynvml.NVMLError
    driver.permission = True
    driver.cards = cards

    def set_limit(card, limit):
        if not driver.permission:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        card.limit = limit

    driver.nvmlDeviceGetCount.return_value = 2
    driver.nvmlDeviceGetHandleByIndex.side_effect = lambda index: cards[index]
    driver.nvmlDeviceGetName.side_effect = lambda card: card.name
    driver.nvmlDeviceGetPersistenceMode.return_value = pynvml.NVML_FEATURE_ENABLED
    driver.nvmlDeviceGetArchitecture.return_value = pynvml.NVML_DEVICE_ARCH_AMPERE
    driver.nvmlDeviceGetPowerManagementLimit.side_effect = lambda card: card.limit
    driver.nvmlDeviceGetPowerManagementLimitConstraints.side_effect = lambda card: card.range
    driver.nvmlDeviceSetPowerManagementLimit.side_effect = set_limit
    driver.nvmlDeviceGetTotalEnergyConsumption.return_value = 0
    driver.nvmlDeviceGetPciInfo.side_effect = lambda card: types.SimpleNamespace(
        domain=0, bus=card.bus, device=0
    )
    monkeypatch.setattr(nvidia, "pynvml", driver)
    monkeypatch.setattr(zeus.device.gpu, "nvml_is_available", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for variable in ("ZEUSD_SOCK_PATH", "ZEUSD_HOST_PORT"):
        monkeypatch.delenv(variable, raising=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*SYS_ADMIN")
        yield driver


def test_on_nvidia_missing_permission_shows_although_zeus_skips_equal_limits(nvml):
    nvml.permission = False
    with pytest.raises(PowerLimitPermissionError, match="--cap-add SYS_ADMIN"):
        HeteroPowerLimitOptimizer(Monitor([0]), power_limits=[70, 60])
    assert nvml.cards[0].limit == 70_000


def test_on_nvidia_the_limit_is_read_set_and_restored_through_zeus(nvml):
    nvml.cards[0].limit = 65_500
    with HeteroPowerLimitOptimizer(Monitor([0]), power_limit=60):
        assert nvml.cards[0].limit == 60_000
    assert nvml.cards[0].limit == 65_500


def test_swapped_numbering_stops_before_the_wrong_card_is_capped(nvml, monkeypatch):
    from zeus_hetero import device_order
    from zeus_hetero.device_order import Device

    cuda = [Device("NVIDIA A10", (0, 0x65, 0)), Device("Tesla T4", (0, 0x1E, 0))]
    monkeypatch.setattr(device_order, "cuda_devices", lambda: cuda)
    with pytest.raises(DeviceError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        HeteroPowerLimitOptimizer(Monitor([0]), power_limit=60)
    assert not nvml.nvmlDeviceSetPowerManagementLimit.called
    cuda.reverse()
    with HeteroPowerLimitOptimizer(Monitor([0]), power_limit=60):
        assert nvml.cards[0].limit == 60_000


def test_visible_devices_by_uuid_and_mig_get_a_clear_answer(nvml, monkeypatch):
    from zeus_hetero import devices

    for value, message in [("GPU-8932f937", "is a UUID"), ("MIG-GPU-1/2/3", "is a MIG slice")]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        with pytest.raises(DeviceError, match=message):
            devices.get_gpus()


# --- zero energy ---


def test_a_window_shorter_than_the_counters_tick_is_repeated_longer(node, optimize):
    # 2 steps of a V100 are about 60 J; the counter moves by 200 J.
    gpus = node(V100, tick=200_000)
    optimizer = optimize(Monitor(), Energy(), profile_steps=2, power_limits=[300, 200])
    with pytest.warns(PowerLimitWarning, match="too short for the energy counter"):
        train(optimizer, gpus, 200)
    assert isinstance(optimizer.state, Done)
    assert [window.power_limit for window in optimizer.windows] == [300, 200]
    for window, measurement in zip(optimizer.windows, optimizer.measurements):
        assert window.energy[0] > 0
        assert not window.approximate
        # Selectors compare equal work.
        assert measurement.energy == pytest.approx(window.energy[0] * 2 / window.steps)
        assert measurement.time == pytest.approx(window.time * 2 / window.steps)
    assert max(window.steps for window in optimizer.windows) > 2


def test_a_counter_that_never_moves_gives_a_marked_upper_bound(node, optimize, tmp_path):
    gpus = node(V100, tick=10**12)
    path = tmp_path / "profile.json"
    optimizer = optimize(Monitor(), profile_steps=2, power_limits=[300, 200], profile_path=path)
    with pytest.warns(PowerLimitWarning, match="marked as approximate"):
        train(optimizer, gpus, 1000)
    for window in optimizer.windows:
        assert window.approximate
        assert window.energy[0] == pytest.approx(window.power_limit * window.time)
    saved = json.loads(path.read_text())["measurements"]
    assert [entry["approximate"] for entry in saved] == [True, True]


def test_a_counter_that_was_reset_is_measured_again(node, optimize):
    gpus = node(V100)
    gpus.step()
    optimizer = optimize(Monitor(), power_limits=[300], warmup_steps=1, profile_steps=4)
    train(optimizer, gpus, 5)
    gpus.gpus[0].energy = -1e9
    with pytest.warns(PowerLimitWarning, match="counter was reset"):
        train(optimizer, gpus, 20)
    (window,) = optimizer.windows
    assert window.energy[0] == pytest.approx(300 * window.time, rel=1e-3)


def test_windows_last_as_long_as_asked(node, optimize):
    gpus = node(V100)
    optimizer = optimize(Monitor(), power_limits=[300, 150], profile_steps=2, min_window=1.95)
    train(optimizer, gpus, 200)
    assert [window.steps for window in optimizer.windows] == [20, 14]  # 0.1 and 0.141 s a step
    assert all(window.time >= 1.95 for window in optimizer.windows)


# --- files of measurements ---


def profile_into(path, gpus, optimize, monitor=None, **options):
    optimizer = optimize(monitor or Monitor(), Energy(), profile_path=path, **options)
    was_loaded = isinstance(optimizer.state, Done)
    train(optimizer, gpus, 2000)
    optimizer.close()
    return optimizer, was_loaded


def test_measurements_are_kept_and_loaded_for_the_same_gpu(node, optimize, tmp_path):
    gpus, path = node(V100), tmp_path / "profile.json"
    first, loaded = profile_into(path, gpus, optimize, batch_size=32)
    assert not loaded
    second, loaded = profile_into(path, gpus, optimize, batch_size=32)
    assert loaded
    assert second.measurements == first.measurements
    assert second.state == first.state
    # Zeus's own optimizer reads it as well.
    stock = upstream.GlobalPowerLimitOptimizer(Monitor(), Energy(), profile_path=path)
    assert stock.state == first.state


def test_a_profile_of_another_gpu_is_neither_used_nor_overwritten(node, optimize, tmp_path):
    gpus, path = node(A10, T4), tmp_path / "profile.json"
    profile_into(path, gpus, optimize, Monitor([0]), power_limits=[150, 100])
    content = path.read_text()
    with pytest.warns(PowerLimitWarning, match="it is of .'NVIDIA A10'., and here is .'Tesla T4'"):
        _, loaded = profile_into(path, gpus, optimize, Monitor([1]), power_limits=[70, 60])
    assert not loaded
    assert path.read_text() == content
    (beside,) = tmp_path.glob("profile.t4-*.json")
    with pytest.warns(PowerLimitWarning, match=f"are read from {re.escape(str(beside))}"):
        _, loaded = profile_into(path, gpus, optimize, Monitor([1]), power_limits=[70, 60])
    assert loaded


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"batch_size": 32}, {"batch_size": 64}, "of batch size 32, not 64"),
        ({"power_limits": [300, 200]}, {"power_limits": [300, 100]}, "of the power limits"),
    ],
)
def test_a_profile_of_other_settings_is_not_used(node, optimize, tmp_path, first, second, message):
    gpus, path = node(V100), tmp_path / "profile.json"
    profile_into(path, gpus, optimize, **first)
    content = path.read_text()
    with pytest.warns(PowerLimitWarning, match=message):
        _, loaded = profile_into(path, gpus, optimize, **second)
    assert not loaded
    assert path.read_text() == content


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"measurements": [{"power_limit": 100, "energy": 1, "time": 1}]}',
        '{"measurements": [{"power_limit": 100, "energy": 0, "time": 1}]}',
    ],
)
def test_a_profile_that_is_damaged_or_of_stock_zeus_is_not_trusted(node, optimize, tmp_path, text):
    gpus, path = node(T4), tmp_path / "profile.json"
    path.write_text(text)
    with pytest.warns(PowerLimitWarning, match="not used"):
        _, loaded = profile_into(path, gpus, optimize, power_limits=[70, 60])
    assert not loaded
    assert path.read_text() == text


def test_a_profile_written_meanwhile_by_another_rank_is_kept(node, optimize, tmp_path):
    gpus, path = node(A10, T4), tmp_path / "profile.json"
    one = optimize(Monitor([0]), profile_path=path, power_limits=[150, 100])
    two = optimize(Monitor([1]), profile_path=path, power_limits=[70, 60])
    train(one, gpus, 200)
    content = path.read_text()
    train(two, gpus, 200)
    assert path.read_text() == content
    assert len(list(tmp_path.glob("profile.t4-*.json"))) == 1


def test_measurements_that_cannot_be_saved_do_not_end_the_training(node, optimize, tmp_path):
    gpus = node(V100)
    optimizer = optimize(
        Monitor(), profile_path=tmp_path / "no folder" / "p.json", power_limits=[300, 200]
    )
    with pytest.warns(PowerLimitWarning, match=r"could not be saved .*'power_limit': 300"):
        train(optimizer, gpus, 500)
    assert isinstance(optimizer.state, Done)


def test_a_damaged_file_beside_is_measured_again_and_kept(node, optimize, tmp_path):
    gpus, path = node(T4), tmp_path / "profile.json"
    path.write_text("{}")
    for content in ("whole", "damaged"):
        with pytest.warns(PowerLimitWarning, match="not used"):
            _, loaded = profile_into(path, gpus, optimize, power_limits=[70, 60])
        assert not loaded, content
        (beside,) = tmp_path.glob("profile.t4-*.json")
        assert len(json.loads(beside.read_text())["measurements"]) == 2
        beside.write_text("{")
    assert [file.read_text() for file in tmp_path.glob("*.damaged")] == ["{"]


# --- distributed jobs ---


def test_no_collective_is_made_while_profiling(node, optimize, monkeypatch):
    gpus = node(V100)
    monkeypatch.setattr(upstream, "all_reduce", mock.Mock(side_effect=AssertionError("reduced")))
    optimizer = optimize(Monitor(), power_limits=[300, 200])
    train(optimizer, gpus, 500)
    assert isinstance(optimizer.state, Done)


def test_profiling_in_a_distributed_job_is_advised_against(node, optimize, monkeypatch, caplog):
    node(V100)
    monkeypatch.setattr(module, "is_distributed", lambda: True)
    optimize(Monitor(), power_limits=[300, 200])
    assert "Profile each GPU alone" in caplog.text
    caplog.clear()
    optimize(Monitor(), power_limit=200)
    assert "Profile each GPU alone" not in caplog.text


RANK = """
import sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
from fake_gpus import A10, T4, FakeGPUs, Monitor
from zeus.optimizer.power_limit import Done, Energy
from zeus_hetero.power_limit import HeteroPowerLimitOptimizer
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
)
gpus = FakeGPUs([A10, T4], f"{folder}/rank{rank}.json").install()
limits = {"A10": [150, 125, 100], "T4": [70, 60]}
optimizer = HeteroPowerLimitOptimizer(Monitor([rank]), Energy(), power_limits=limits)
sums = []
for step in range(200):
    optimizer.on_step_begin()
    gpus.step()
    gradient = torch.tensor([float(step)])
    dist.all_reduce(gradient)
    sums.append(gradient.item())
assert sums == [2.0 * step for step in range(200)], "somebody else's numbers were mixed in"
assert isinstance(optimizer.state, Done)
for window in optimizer.windows:
    assert set(window.energy) == {rank}
    assert abs(window.energy[rank] / window.time - window.power_limit) < 1
print([window.power_limit for window in optimizer.windows])
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_with_ladders_of_different_lengths_train_to_the_end(tmp_path):
    pytest.importorskip("torch")
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    # Zeus 0.12 logs to the output, too.
    profiled = [output.splitlines()[-1] for output, _ in outputs]
    assert profiled == ["[150, 125, 100]", "[70, 60]"]


# --- no framework, no GPU ---


def test_without_a_framework_the_error_says_what_to_install(node, monkeypatch):
    gpus = node(A10)
    monkeypatch.setattr(
        module, "is_distributed", mock.Mock(side_effect=RuntimeError("No framework is available."))
    )
    with pytest.raises(DeviceError, match="pip install torch"):
        HeteroPowerLimitOptimizer(Monitor())
    assert gpus.writes() == []


def test_a_monitor_without_gpus_is_refused(node):
    node(A10)
    with pytest.raises(DeviceError, match="the monitor has no GPU"):
        HeteroPowerLimitOptimizer(Monitor([]))


# --- the behaviour of Zeus's optimizer is kept ---


def replay(log):
    return ReplayZeusMonitor(log_file=log, ignore_sync_execution=True, match_window_name=False)


def read_log(log):
    """Power limits, total energies and times of a log, and its number of GPUs."""
    header, *rows = [line.split(",") for line in Path(log).read_text().split()]
    limits = [int(row[1].rsplit("_", 1)[1]) for row in rows]
    energies = [sum(map(float, row[3:])) for row in rows]
    return limits, energies, [float(row[2]) for row in rows], len(header) - 3


def epochs_for(interruption, rungs):
    """Steps per epoch and epochs, so that epochs end as the name says."""
    return {
        "never": (50 * rungs + 10, 3),
        "in warm-up": (50 * (rungs // 2) + 5, 4),
        "in a window": (50 * (rungs // 3) + 15, 5),
        "at the last step of each window": (100, rungs + 2),
    }[interruption]


def run_replay(optimizer_class, log, path, selector, interruption, state):
    """One training on replayed measurements: the limits that were set, and the final state."""
    limits, _, _, count = read_log(log)
    spec = {"name": "NVIDIA A40", "low": min(limits), "high": max(limits), "limit": max(limits)}
    state.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    gpus = FakeGPUs([spec] * count, state).install()
    # Not at the maximum, so that setting the maximum shows.
    for gpu in gpus.gpus:
        gpu.set_power_management_limit(min(limits) * 1000 + 500)
    optimizer = optimizer_class(replay(log), selector, profile_path=path)
    assert isinstance(optimizer.state, Ready)
    steps, epochs = epochs_for(interruption, len(limits))
    for _ in range(epochs):
        optimizer.on_epoch_begin()
        for _ in range(steps):
            optimizer.on_step_begin()
            optimizer.on_step_end()
        optimizer.on_epoch_end()
    whole = [write for write in gpus.read()["writes"] if write[1] % 1000 == 0]
    assert isinstance(optimizer.state, Done)
    return whole, optimizer.state.optimal_power_limit, optimizer.measurements


def check_like_upstream(log, folder, etas, interruptions):
    limits, energies, times, count = read_log(log)
    path, state = folder / "profile.json", folder / "state.json"
    for eta in etas:
        # Zeus's cost by hand: eta E + (1 - eta) MaxPower T
        max_power = max(limits) * count
        costs = [eta * e + (1 - eta) * max_power * t for e, t in zip(energies, times)]
        best = limits[costs.index(min(costs))] * 1000
        for interruption in interruptions:
            arguments = (log, path, ZeusCost(eta, count), interruption, state)
            stock = run_replay(upstream.GlobalPowerLimitOptimizer, *arguments)
            ours = run_replay(HeteroPowerLimitOptimizer, *arguments)
            assert ours[0] == stock[0], (eta, interruption)
            assert ours[1] == stock[1] == best
            assert [m.dict() for m in ours[2]] == [m.dict() for m in stock[2]]
    # The file of measurements serves other selectors.
    slowest = times[limits.index(max(limits))]
    for selector, expected in [
        (Energy(), limits[energies.index(min(energies))]),
        (Time(), limits[times.index(min(times))]),
        *(
            (
                MaxSlowdownConstraint(factor),
                min(p for p, t in zip(limits, times) if t <= factor * slowest),
            )
            for factor in (1.0, 1.1, 1.5, 100.0)
        ),
    ]:
        with HeteroPowerLimitOptimizer(replay(log), selector, profile_path=path) as optimizer:
            assert optimizer.state.optimal_power_limit == expected * 1000


@pytest.fixture
def _close_all(monkeypatch):
    """Undo the signal handlers of optimizers that a replay leaves open."""
    restorers = []
    take_over = HeteroPowerLimitOptimizer._take_over

    def remember(self, note):
        restorers.append(take_over(self, note))
        return restorers[-1]

    monkeypatch.setattr(HeteroPowerLimitOptimizer, "_take_over", remember)
    yield
    for restorer in reversed(restorers):
        restorer.restore()


INTERRUPTIONS = ("never", "in warm-up", "in a window", "at the last step of each window")


@pytest.mark.usefixtures("_close_all")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("interruption", INTERRUPTIONS)
def test_limits_and_choices_are_those_of_zeus(tmp_path, count, interruption):
    # A GPU whose time falls steeply at low limits, with a dent of noise at 175 W.
    header = "start_time,window_name,elapsed_time," + ",".join(
        f"gpu{index}_energy" for index in range(count)
    )
    lines = [header]
    for limit in range(300, 99, -25):
        seconds = 8 + 4e4 / limit**1.7 + (-0.5 if limit == 175 else 0)
        energies = [str(0.8 * limit * seconds + index) for index in range(count)]
        lines.append(f"0,window_{limit},{seconds}," + ",".join(energies))
    log = tmp_path / "log.csv"
    log.write_text("\n".join(lines) + "\n")
    check_like_upstream(log, tmp_path, [0.0, 0.25, 0.5, 0.75, 1.0], [interruption])


LOGS = [
    f"{gpu}+{rest}"
    for gpu, several in (("A40", "0,1,2,3"), ("V100", "0,1"))
    for rest in (
        "bert-base-uncased+gpu0.csv",
        f"resnet18+gpu{several}.csv",
        "resnet18+gpu0.csv",
        f"resnet50+gpu{several}.csv",
        "resnet50+gpu0.csv",
        "shufflenetv2+gpu0.csv",
    )
]


@pytest.mark.slow
@pytest.mark.usefixtures("_close_all")
@pytest.mark.parametrize("name", LOGS)
def test_real_logs_lead_to_the_limits_and_choices_of_zeus(shared_data, tmp_path, name):
    log = shared_data / "zeus_profile_logs" / name
    if not log.exists():
        pytest.skip(f"{log} is absent")
    check_like_upstream(log, tmp_path, [0.0, 0.25, 0.5, 0.75, 1.0], INTERRUPTIONS)


def test_the_parents_arguments_stand_in_the_parents_order():
    import inspect

    own = list(inspect.signature(HeteroPowerLimitOptimizer).parameters.values())
    stock = list(inspect.signature(upstream.GlobalPowerLimitOptimizer).parameters.values())
    assert [(p.name, p.default) for p in own[: len(stock)]] == [(p.name, p.default) for p in stock]
    assert all(p.kind is p.KEYWORD_ONLY for p in own[len(stock) :])


def test_the_package_offers_the_optimizer():
    assert importlib.import_module("zeus_hetero").HeteroPowerLimitOptimizer is (
        HeteroPowerLimitOptimizer
    )
