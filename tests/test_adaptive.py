from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
from synthetic import CARDS, GPUS, VISIBLE, real

from zeus_hetero import (
    AllocationError,
    ProfilingGrid,
    TraceWarning,
    plan_profiling,
    profile_adaptively,
)
from zeus_hetero.adaptive import join
from zeus_hetero.case import Case
from zeus_hetero.solver import solve
from zeus_hetero.uncertainty import subset


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TraceWarning)
        yield


def grid_of(trace):
    return ProfilingGrid(trace.batch_sizes, trace.power_limits)


def player(traces):
    def measure(point):
        trace = traces[point.gpu]
        at = (trace.batch_size == point.batch_size) & (trace.power_limit == point.power_limit)
        return subset(trace, at)

    return measure


def play(traces, **options):
    """The last plan, and what was measured by then."""
    grids = {gpu: grid_of(trace) for gpu, trace in traces.items()}
    *_, last = profile_adaptively(grids, player(traces), **options)
    return last


def regret(full, known, batch):
    judge = Case.of(full, batch, model="interpolated")
    plan = Case.of(known, batch, model="auto").solve(solve)
    cost = judge.judge(
        [w.batch_size for w in plan.workers], [w.power_limit for w in plan.workers]
    ).cost
    return cost / judge.solve(solve).cost - 1


def seconds(known, full):
    return sum(t.time.sum() for t in known.values()) / sum(t.time.sum() for t in full.values())


def test_begins_with_the_range_of_batches_and_the_lowest_limit_at_work():
    grid = ProfilingGrid((32, 8, 16, 64), (100, 200, 150))
    plan = plan_profiling({"A": grid}, {})
    assert not plan.done
    assert plan.expected_regret == float("inf")
    points = {(p.batch_size, p.power_limit) for p in plan.points}
    assert {(8, 200), (64, 200)} <= points
    assert {p for _, p in points} == {200, 150, 100}
    assert len(points) <= 5


def test_asks_for_no_point_twice_and_only_for_the_grid():
    traces = {"usual": GPUS["usual"].trace(), "weak": GPUS["weak"].trace()}
    _, known = play(traces, target=0.001, most_points=40, count=5, most_of_grid=1)
    for gpu, trace in known.items():
        points = list(zip(trace.batch_size, trace.power_limit))
        assert len(set(points)) == len(points)
        assert set(points) <= set(grid_of(traces[gpu]).points)
    assert sum(map(len, known.values())) == 40


def test_stops_when_the_expected_regret_is_within_the_target():
    traces = {"usual": GPUS["usual"].trace(noise=0.01), "weak": GPUS["weak"].trace(noise=0.01)}
    rough, few = play(traces, target=0.05, count=2)
    fine, many = play(traces, target=0.02, count=2, most_of_grid=1)
    assert rough.done
    assert rough.expected_regret <= 0.05
    assert fine.done
    assert fine.expected_regret <= 0.02
    assert sum(map(len, few.values())) < sum(map(len, many.values()))


def test_same_arguments_give_the_same_plan():
    traces = {"usual": GPUS["usual"].trace(), "weak": GPUS["weak"].trace()}
    grids = {gpu: grid_of(trace) for gpu, trace in traces.items()}
    _, known = play(traces, most_points=12)
    one, other = (plan_profiling(grids, known, target=1e-6, count=3) for _ in range(2))
    assert one == other
    assert len(one.points) == 3


def test_ends_when_the_grid_is_exhausted():
    trace = GPUS["usual"].trace(sizes=(8, 64, 256), limits=(250, 150))
    plan, known = play({"usual": trace}, target=1e-9, most_of_grid=1)
    assert plan.done
    assert plan.reason == "the whole grid was measured"
    assert len(known["usual"]) == 6


def test_spends_no_more_of_the_grid_than_allowed():
    traces = {"usual": GPUS["usual"].trace(), "weak": GPUS["weak"].trace()}
    plan, known = play(traces, target=1e-6, most_of_grid=0.2, count=3)
    assert plan.done
    assert plan.expected_regret > 1e-6
    assert "nothing more fits in 20%" in plan.reason
    assert seconds(known, traces) == pytest.approx(0.2, abs=0.03)
    assert plan.measured_part == pytest.approx(seconds(known, traces), rel=0.1)


def test_asks_nothing_of_a_gpu_whose_trace_is_complete():
    traces = {"usual": GPUS["usual"].trace(), "weak": GPUS["weak"].trace()}
    grids = {gpu: grid_of(trace) for gpu, trace in traces.items()}
    runs = profile_adaptively(
        grids,
        player(traces),
        known={"usual": traces["usual"]},
        fixed=["usual"],
        most_points=9,
        target=1e-6,
    )
    asked = [point.gpu for plan, _ in runs for point in plan.points]
    assert set(asked) == {"weak"}


def test_measures_where_the_allocation_is_decided():
    # The weak GPU gets so little that its largest batches do not matter.
    traces = {"strong": GPUS["strong"].trace(noise=0.01), "weak": GPUS["weak"].trace(noise=0.01)}
    _, known = play(traces, target=0.002, global_batch_size=256, most_points=24)
    adaptive = regret(traces, known, 256)
    assert adaptive < 0.02
    for gpu, trace in known.items():
        large = (trace.batch_size > 256) & (trace.power_limit < 250)
        assert np.count_nonzero(large) <= 3, gpu


@pytest.mark.parametrize("pair", list(itertools.combinations(("usual", "strong", "weak"), 2)))
def test_pair_needs_a_quarter_of_the_seconds_for_a_percent(pair):
    traces = {gpu: GPUS[gpu].trace(noise=0.015, seed=7) for gpu in pair}
    _, known = play(traces, global_batch_size=1500, count=2)
    assert seconds(known, traces) < 0.25
    assert regret(traces, known, 1500) < 0.015


def test_one_gpu_alone_is_learnt_for_any_partner():
    traces = {gpu: GPUS[gpu].trace(noise=0.01, seed=9) for gpu in ("usual", "weak")}
    known = {}
    for gpu, trace in traces.items():
        plan, alone = play({gpu: trace}, count=2, target=0.015)
        assert plan.done
        known.update(alone)
    assert seconds(known, traces) < 0.26
    assert np.mean([regret(traces, known, batch) for batch in (200, 700, 1500)]) < 0.015


def test_set_of_three_is_planned_together():
    traces = {gpu: GPUS[gpu].trace(noise=0.015, seed=2) for gpu in ("usual", "strong", "weak")}
    plan, known = play(traces, global_batch_size=2000, count=3)
    assert plan.done
    assert seconds(known, traces) < 0.3
    assert regret(traces, known, 2000) < 0.02


def test_joined_traces_are_sorted_and_keep_their_fields():
    trace = GPUS["usual"].trace()
    mixed = join(subset(trace, np.arange(10, 20)), subset(trace, np.arange(0, 10)))
    assert np.array_equal(mixed.time, trace.time[:20])
    assert np.array_equal(mixed.power_limit, trace.power_limit[:20])
    assert not mixed.time.flags.writeable


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grids": {}}, "grids is empty"),
        ({"known": {"B": None}}, "'B' has no grid"),
        ({"fixed": ["A"]}, "fixed but has no trace"),
        ({"target": 0}, "target is 0"),
        ({"count": 0}, "count is 0"),
        ({"most_of_grid": 0}, "most_of_grid is 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(AllocationError, match=message):
        plan_profiling(**{"grids": {"A": ProfilingGrid((8,), (100,))}, "known": {}, **arguments})


def test_empty_grid_is_refused():
    with pytest.raises(AllocationError, match="batch_sizes"):
        ProfilingGrid((), (100,))


@pytest.mark.slow
def test_real_pairs_need_a_quarter_of_the_seconds_for_a_percent(shared_data):
    regrets, parts = [], []
    for workload in VISIBLE:
        traces = {gpu: real(shared_data, workload, gpu) for gpu in CARDS}
        # All six pairs are the benchmark's; these hold each GPU at least once.
        for pair in (("a40", "v100"), ("p100", "rtx6000")):
            full = {gpu: traces[gpu] for gpu in pair}
            batch = min(2 ** int(np.log2(sum(t.batch_sizes[-1] for t in full.values()))), 4096)
            _, known = play(full, global_batch_size=batch, count=2)
            regrets.append(regret(full, known, batch))
            parts.append(seconds(known, full))
    assert np.mean(regrets) < 0.01
    assert np.mean(parts) < 0.25
