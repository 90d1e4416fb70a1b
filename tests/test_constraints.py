"""Constraints and prices, each against enumeration over all shares and limits."""

from __future__ import annotations

import itertools
import math

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zeus_hetero
from zeus_hetero import AllocationError, InfeasibleError
from zeus_hetero.case import Case
from zeus_hetero.trace import load_trace


def trace(scale, appetite, limits=(150, 100)):
    rows = [
        {
            "batch_size": b,
            "power_limit": p,
            "time": scale * (0.02 + b * 0.01 * (150 / p) ** 0.4),
            "energy": scale * (0.02 + b * 0.01) * appetite * p * 0.8,
        }
        for b in (2, 4)
        for p in limits
    ]
    return load_trace(pd.DataFrame(rows))


TRACES = {"A": trace(1.0, 1.0), "B": trace(1.7, 0.5, (90, 60))}
GPUS = ["A", "A", "B"]
BATCH = 9


def every(case: Case, batch: int = BATCH):
    """All allocations of a case, judged one by one, with no constraint applied."""
    limits = [case.models[name].power_limits for name in case.gpus]
    for shares in itertools.product(range(batch + 1), repeat=len(case.gpus)):
        if sum(shares) == batch:
            for watts in itertools.product(*limits):
                yield case.judge(shares, watts)


def watts(plan, members=None):
    return sum(w.power_limit for i, w in enumerate(plan.workers) if members is None or i in members)


def working(plan):
    return [w.batch_size for w in plan.workers if w.batch_size]


CONSTRAINTS = [
    ({"deadline": 0.09}, lambda plan: plan.step_time <= 0.09),
    ({"power_budget": 330}, lambda plan: watts(plan) <= 330),
    (
        {"power_budget": {"rack": 190, "all": 380}, "groups": {"rack": [1, 2]}},
        lambda plan: watts(plan, {1, 2}) <= 190 and watts(plan) <= 380,
    ),
    ({"power_budget": {"b": 60}, "groups": {"b": "B"}}, lambda plan: watts(plan, {2}) <= 60),
    ({"max_batch_size": {"A": 4}}, lambda plan: max(w.batch_size for w in plan.workers[:2]) <= 4),
    ({"min_share": 3}, lambda plan: min(working(plan)) >= 3),
    ({"min_share": 2, "must_use": True}, lambda plan: min(w.batch_size for w in plan.workers) >= 2),
    ({"must_use": "B"}, lambda plan: plan.workers[2].batch_size >= 1),
    ({"granularity": 4}, lambda plan: sum(w.batch_size % 4 > 0 for w in plan.workers) <= 1),
    ({"max_gpus": 2}, lambda plan: len(working(plan)) <= 2),
    ({"max_gpus": 1}, lambda plan: len(working(plan)) <= 1),
]


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("options", "holds"), CONSTRAINTS)
def test_each_constraint_alone(options, holds, eta):
    case = Case.of(TRACES, BATCH, gpus=GPUS, eta=eta, **options)
    allowed = [plan for plan in every(case) if holds(plan)]
    best = min(plan.cost for plan in allowed)
    plan = zeus_hetero.allocate(TRACES, BATCH, gpus=GPUS, eta=eta, **options)
    assert holds(plan)
    assert plan.cost == pytest.approx(best, rel=1e-9)
    assert plan.gap == pytest.approx(0, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_constraints_combined(data):
    chosen = data.draw(st.lists(st.sampled_from(CONSTRAINTS), min_size=2, max_size=4, unique_by=id))
    options = {}
    for extra, _ in chosen:
        if set(extra) & set(options):
            return
        options.update(extra)
    case = Case.of(TRACES, BATCH, gpus=GPUS, **options)
    allowed = [plan for plan in every(case) if all(holds(plan) for _, holds in chosen)]
    if not allowed:
        with pytest.raises(InfeasibleError):
            zeus_hetero.allocate(TRACES, BATCH, gpus=GPUS, **options)
        return
    plan = zeus_hetero.allocate(TRACES, BATCH, gpus=GPUS, **options)
    assert all(holds(plan) for _, holds in chosen)
    assert plan.cost == pytest.approx(min(p.cost for p in allowed), rel=1e-9)


def test_max_gpus_is_the_best_subset():
    """Leaving GPUs out of the job is as if they had not been given."""
    best = min(
        zeus_hetero.allocate(TRACES, BATCH, gpus=[GPUS[i] for i in subset], wait_power=25).cost
        for size in (1, 2)
        for subset in itertools.combinations(range(3), size)
    )
    plan = zeus_hetero.allocate(TRACES, BATCH, gpus=GPUS, wait_power=25, max_gpus=2)
    assert plan.cost == pytest.approx(best, rel=1e-9)
    out = [w for w in plan.workers if not w.batch_size]
    assert all(w.wait_power == 0 for w in out)


def test_methods_agree_under_constraints():
    options = {"power_budget": 330, "deadline": 0.12}
    plans = {
        method: zeus_hetero.allocate(TRACES, BATCH, gpus=GPUS, method=method, **options)
        for method in ("optimal", "brute_force", "heuristic", "baseline")
    }
    assert plans["brute_force"].cost == pytest.approx(plans["optimal"].cost, rel=1e-9)
    for plan in plans.values():
        assert plan.cost >= plans["optimal"].cost * (1 - 1e-12)
        assert watts(plan) <= 330
        assert plan.step_time <= 0.12
    assert [w.batch_size for w in plans["baseline"].workers] == [3, 3, 3]
    assert plans["heuristic"].workers[0].power_limit == 100


@pytest.mark.parametrize(
    ("options", "constraint", "nearest"),
    [
        ({"deadline": 0.001}, "deadline", None),
        ({"power_budget": 100}, "power_budget", 260),
        ({"power_budget": {"rack": 120}, "groups": {"rack": [1, 2]}}, "power_budget", 160),
        ({"max_gpus": 1, "max_batch_size": 5}, "max_gpus", 2),
        ({"max_batch_size": 2}, "max_batch_size", 3),
        ({"min_share": 4, "must_use": True}, "global_batch_size", 12),
    ],
)
def test_infeasible_names_the_constraint_and_the_nearest_value(options, constraint, nearest):
    with pytest.raises(InfeasibleError, match=constraint) as caught:
        zeus_hetero.allocate(TRACES, BATCH, gpus=GPUS, **options)
    assert caught.value.constraint == constraint
    if constraint == "deadline":
        nearest = min(plan.step_time for plan in every(Case.of(TRACES, BATCH, gpus=GPUS)))
        assert caught.value.nearest == pytest.approx(nearest)
    assert caught.value.nearest == pytest.approx(nearest)
    # What it calls nearest is feasible.
    if constraint in ("deadline", "max_gpus"):
        relaxed = {**options, constraint: caught.value.nearest * (1 + 1e-12)}
        relaxed = {k: int(v) if k == "max_gpus" else v for k, v in relaxed.items()}
        assert zeus_hetero.allocate(TRACES, BATCH, gpus=GPUS, **relaxed)


def test_constraints_that_only_clash_together_are_called_a_combination():
    options = {"max_gpus": 1, "max_batch_size": 5, "power_budget": 100}
    with pytest.raises(InfeasibleError, match="all constraints at once") as caught:
        zeus_hetero.allocate(TRACES, BATCH, gpus=GPUS, **options)
    assert caught.value.constraint == "combination"


@settings(max_examples=30, deadline=None)
@given(st.floats(0.06, 0.3), st.floats(1, 1.5), st.integers(260, 400), st.integers(0, 60))
def test_relaxing_a_constraint_never_raises_the_cost(deadline, factor, budget, more):
    def cost(**options):
        try:
            return zeus_hetero.allocate(TRACES, BATCH, gpus=GPUS, **options).cost
        except InfeasibleError:
            return math.inf

    tight = cost(deadline=deadline, power_budget=budget)
    loose = cost(deadline=deadline * factor, power_budget=budget + more)
    assert loose <= tight * (1 + 1e-9)


def test_money_is_electricity_plus_rent():
    rent = {"A": 2.0, "B": 0.5}
    case = Case.of(TRACES, BATCH, gpus=GPUS, electricity_price=0.3, gpu_hour_price=rent)
    plan = zeus_hetero.allocate(
        TRACES, BATCH, gpus=GPUS, electricity_price=0.3, gpu_hour_price=rent
    )
    by_hand = plan.step_energy / 3.6e6 * 0.3 + plan.step_time / 3600 * (2.0 + 2.0 + 0.5)
    assert plan.cost == pytest.approx(by_hand)
    assert plan.cost == pytest.approx(min(p.cost for p in every(case)), rel=1e-9)
    assert plan.cost_unit == "money"
    epoch = plan.per_epoch(50_000)
    assert epoch.cost == pytest.approx(plan.cost * 50_000 / BATCH)
    assert epoch.time == pytest.approx(plan.step_time * 50_000 / BATCH)


def test_rent_is_saved_on_gpus_that_are_left_out():
    dear = zeus_hetero.allocate(
        TRACES, BATCH, gpus=GPUS, gpu_hour_price={"A": 1.0, "B": 1000.0}, max_gpus=3
    )
    assert dear.workers[2].batch_size == 0
    by_hand = len(working(dear)) * dear.step_time / 3600
    assert dear.cost == pytest.approx(by_hand)


def test_carbon_is_energy_in_grams():
    plan = zeus_hetero.allocate(TRACES, BATCH, gpus=GPUS, carbon_intensity=400)
    energy = zeus_hetero.allocate(TRACES, BATCH, gpus=GPUS, eta=1)
    assert plan.cost == pytest.approx(energy.step_energy / 3.6e6 * 400)
    assert plan.cost_unit == "g CO2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadline": -1}, r"deadline is -1; expected a positive number of s"),
        ({"power_budget": 0}, r"power_budget\['all'\] is 0; expected a positive number of W"),
        ({"power_budget": {"x": 5}}, r"power_budget names group 'x'; expected one of all"),
        ({"groups": {"x": [0]}}, r"groups is given without power_budget"),
        (
            {"power_budget": {"x": 5}, "groups": {"x": [7]}},
            r"groups\['x'\] names 7; expected GPU names among A, B or worker numbers 0 to 2",
        ),
        ({"power_budget": {"x": 5}, "groups": {"x": "Z"}}, r"groups\['x'\] names 'Z'"),
        ({"min_share": -1}, r"min_share is -1"),
        ({"must_use": ["Z"]}, r"must_use names GPU 'Z'; expected one of A, B"),
        ({"max_gpus": 0}, r"max_gpus is 0; expected a positive whole number"),
        ({"electricity_price": 1, "carbon_intensity": 1}, r"carbon_intensity .* one of them"),
        ({"electricity_price": -1}, r"electricity_price is -1"),
        ({"gpu_hour_price": {"Z": 1}}, r"gpu_hour_price names GPU 'Z'"),
        ({"max_gpus": 1, "objective": "independent"}, r"objective is 'independent'; expected"),
        ({"gap": 2}, r"gap is 2; expected a number between 0 and 1"),
    ],
)
def test_bad_constraints_are_named(options, message):
    with pytest.raises(AllocationError, match=message):
        zeus_hetero.allocate(TRACES, BATCH, gpus=GPUS, **options)


def test_a_fleet_under_a_power_budget_keeps_its_gap(aws):
    gpus = {"A10": 12, "T4": 12}
    free = zeus_hetero.allocate(aws["cifar100"], 8192, gpus=gpus)
    used = sum(w.power_limit for w in free.workers)
    plan = zeus_hetero.allocate(aws["cifar100"], 8192, gpus=gpus, power_budget=0.85 * used)
    assert sum(w.power_limit for w in plan.workers) <= 0.85 * used
    assert free.cost <= plan.cost
    assert plan.gap <= 1e-6


def test_a_case_too_large_to_search_names_the_granularity_that_helps(aws):
    gpus = {"A10": 200, "T4": 200}
    options = {"gpus": gpus, "max_gpus": 300}
    with pytest.raises(AllocationError, match=r"too many .* Use granularity=") as caught:
        zeus_hetero.allocate(aws["cifar100"], 2_000_000, **options)
    granularity = int(str(caught.value).split("granularity=")[1].split()[0])
    assert 1 < granularity < 64


def test_a_large_fleet_under_a_power_budget(aws):
    gpus = {"A10": 128, "T4": 128}
    plan = zeus_hetero.allocate(aws["cifar100"], 262_144, gpus=gpus, power_budget=25_000)
    assert sum(w.power_limit for w in plan.workers) <= 25_000
    assert plan.gap <= 1e-4
