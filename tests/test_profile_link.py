"""The pipe between the driver and the script that it started."""

from __future__ import annotations

import json

import pytest

from zeus_hetero import ProfilingError
from zeus_hetero.measure import Idle
from zeus_hetero.profile_link import PROFILER, Driver, Listener, Progress

WINDOW = Progress(32, 70, 1, 6, 0.1, 5.0)


def test_reports_arrive_and_the_idle_figures_go_the_other_way(tmp_path, monkeypatch):
    with Listener(tmp_path / "pipe", Idle(10.0, 0.1)) as listener:
        monkeypatch.setenv(PROFILER, listener.environment()[PROFILER])
        driver = Driver.from_environment()
        assert driver.idle == Idle(10.0, 0.1)
        assert listener.receive(0) is None
        driver.check()
        driver.report(WINDOW)
        driver.report(WINDOW)
        assert listener.receive(1) == [WINDOW, WINDOW]
    assert not (tmp_path / "pipe").exists()


def test_script_notices_that_its_driver_is_gone(tmp_path):
    with Listener(tmp_path / "pipe", Idle(10.0, 0.1)):
        driver = Driver(str(tmp_path / "pipe"), Idle(10.0, 0.1))
    with pytest.raises(ProfilingError, match="is gone"):
        driver.check()
    with pytest.raises(ProfilingError, match="is gone"):
        Driver(str(tmp_path / "pipe"), Idle(10.0, 0.1))


def test_pipe_of_a_killed_driver_is_replaced(tmp_path):
    (tmp_path / "pipe").write_text(json.dumps("left over"))
    with Listener(tmp_path / "pipe", Idle(10.0, 0.1)) as listener:
        Driver(str(tmp_path / "pipe"), Idle(10.0, 0.1)).report(WINDOW)
        assert listener.receive(1) == [WINDOW]


def test_script_started_by_hand_has_no_driver(monkeypatch):
    monkeypatch.delenv(PROFILER, raising=False)
    assert Driver.from_environment() is None
