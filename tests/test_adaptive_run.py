"""Adaptive profiling through the grid driver, which is played by a function here."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import zeus_hetero
from zeus_hetero import ProfilingGrid, load_trace
from zeus_hetero.uncertainty import subset

BATCHES = (32, 64, 128, 256, 512, 1024)


@dataclass
class Asked:
    size: int
    limits: tuple[int, ...]
    folder: Path


class Driver:
    """Plays a trace back; like the real one it measures nothing twice."""

    def __init__(self, trace, out_of_memory=10**9, fails_at=None):
        self.trace = trace
        self.out_of_memory = out_of_memory
        self.fails_at = fails_at
        self.measured = []

    def __call__(self, asked, *, overwrite, out):
        if asked.size == self.fails_at:
            return 1
        result = asked.folder / "profiling.json"
        if overwrite:
            result.unlink(missing_ok=True)
        if asked.size >= self.out_of_memory or (result.exists() and not overwrite):
            return 0
        asked.folder.mkdir(parents=True, exist_ok=True)
        wanted = (self.trace.batch_size == asked.size) & np.isin(
            self.trace.power_limit, asked.limits
        )
        subset(self.trace, wanted).save(result)
        self.measured += [(asked.size, limit) for limit in asked.limits]
        return 0


@pytest.fixture
def run(tmp_path):
    def start(driver, **options):
        limits = driver.trace.power_limits
        return zeus_hetero.profile_script_adaptively(
            Asked,
            tmp_path,
            "A10",
            ProfilingGrid(BATCHES, limits),
            driver=driver,
            out=io.StringIO(),
            **options,
        )

    return start


def test_it_measures_a_part_of_the_grid_and_decides_well(aws, run, tmp_path):
    full = aws["cifar100"]["A10"]
    driver = Driver(full)
    assert run(driver, others={"T4": aws["cifar100"]["T4"]}, global_batch_size=4096) == 0
    found = load_trace(tmp_path / "profiling.json")
    assert len(found) == len(driver.measured) == len(set(driver.measured))
    assert len(found) < len(full) * 0.6
    t4 = aws["cifar100"]["T4"]
    chosen = zeus_hetero.allocate({"A10": found, "T4": t4}, 4096, model="auto")
    case = zeus_hetero.case.Case.of({"A10": full, "T4": t4}, 4096)
    judged = case.judge(
        [w.batch_size for w in chosen.workers], [w.power_limit for w in chosen.workers]
    )
    best = zeus_hetero.allocate({"A10": full, "T4": t4}, 4096)
    assert judged.cost <= best.cost * 1.05


def test_run_again_it_measures_nothing_twice(aws, run, tmp_path):
    first = Driver(aws["cifar100"]["A10"])
    assert run(first) == 0
    before = (tmp_path / "profiling.json").read_bytes()
    again = Driver(aws["cifar100"]["A10"])
    assert run(again) == 0
    assert again.measured == []
    assert (tmp_path / "profiling.json").read_bytes() == before


def test_an_interrupted_run_goes_on_and_ends_the_same(aws, run, tmp_path):
    whole = Driver(aws["cifar100"]["A10"])
    largest = max(BATCHES)
    assert run(Driver(aws["cifar100"]["A10"], fails_at=largest)) == 1
    assert run(whole) == 0
    merged = load_trace(tmp_path / "profiling.json")
    assert largest in merged.batch_sizes


def test_batch_sizes_that_do_not_fit_are_left_out(aws, run, tmp_path):
    driver = Driver(aws["cifar100"]["A10"], out_of_memory=512)
    assert run(driver) == 0
    assert max(load_trace(tmp_path / "profiling.json").batch_sizes) <= 256
    assert run(Driver(aws["cifar100"]["A10"], out_of_memory=1), overwrite=True) == 1
