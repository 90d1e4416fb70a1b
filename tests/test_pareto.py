from __future__ import annotations

import itertools

import pytest
from test_constraints import BATCH, GPUS, TRACES, every

import zeus_hetero
from zeus_hetero.case import Case


def non_dominated(plans):
    """Points (time, energy) by pairwise comparison of all allocations."""
    points = sorted({(round(p.step_time, 12), round(p.step_energy, 9)) for p in plans})
    front, least = [], float("inf")
    for time, energy in points:
        if energy < least - 1e-9:
            front.append((time, energy))
            least = energy
    return front


@pytest.mark.parametrize("options", [{}, {"wait_power": 5}, {"power_budget": 330}])
def test_front_is_exactly_the_non_dominated_set(options):
    case = Case.of(TRACES, BATCH, gpus=GPUS, **options)
    plans = every(case)
    if "power_budget" in options:
        plans = (p for p in plans if sum(w.power_limit for w in p.workers) <= 330)
    wanted = non_dominated(plans)
    front = zeus_hetero.pareto_front(TRACES, BATCH, gpus=GPUS, error=0, **options)
    found = list(zip(front["step_time"], front["step_energy"]))
    assert len(found) == len(wanted)
    for (t, e), (time, energy) in zip(found, wanted):
        assert t == pytest.approx(time, abs=1e-10)
        assert e == pytest.approx(energy, abs=1e-8)


def test_front_spans_the_extremes(aws):
    front = zeus_hetero.pareto_front(aws["cifar100"], 4096)
    assert front["step_time"].is_monotonic_increasing
    assert front["step_energy"].is_monotonic_decreasing
    fastest = zeus_hetero.allocate(aws["cifar100"], 4096, eta=0)
    frugal = zeus_hetero.allocate(aws["cifar100"], 4096, eta=1)
    assert front["step_time"].iloc[0] == pytest.approx(fastest.step_time)
    assert front["step_energy"].iloc[0] == pytest.approx(fastest.step_energy)
    assert front["step_energy"].iloc[-1] == pytest.approx(frugal.step_energy)
    assert front["knee"].sum() == 1


def test_a_fleets_front_misses_no_more_than_its_error(aws):
    gpus = {"A10": 3, "T4": 5}
    front = zeus_hetero.pareto_front(aws["cifar100"], 4096, gpus=gpus, error=0.01)
    assert front.attrs["error"] == 0.01
    times = front["step_time"].to_numpy()
    # Whatever deadline is asked for, the front has an allocation within 1 % of the best for it.
    for earlier, later in (
        itertools.pairwise(times) if hasattr(itertools, "pairwise") else zip(times, times[1:])
    ):
        deadline = earlier + 0.7 * (later - earlier)
        best = zeus_hetero.allocate(aws["cifar100"], 4096, gpus=gpus, eta=1, deadline=deadline)
        held = front[front["step_time"] <= deadline]["step_energy"].min()
        assert held <= best.step_energy * 1.01 * (1 + 1e-9)
