from __future__ import annotations

import math

import pytest
from test_constraints import BATCH, CONSTRAINTS, GPUS, TRACES, every

import zeus_hetero
from zeus_hetero import AllocationError
from zeus_hetero.case import Case


def explained(**options):
    plan = zeus_hetero.allocate(TRACES, BATCH, gpus=GPUS, **options)
    return plan, plan.explain()


def test_pace_and_slack_are_those_of_the_step():
    plan, explanation = explained(eta=1)
    busiest = max(w.time for w in plan.workers)
    for rank, (worker, found) in enumerate(zip(plan.workers, explanation.workers)):
        assert found.slack == pytest.approx(busiest - worker.time)
        assert found.sets_pace == (worker.time == busiest)
        assert (rank in explanation.pace_setters) == found.sets_pace
    assert explanation.pace_setters


def test_spare_samples_do_not_lengthen_the_step_and_one_more_does():
    plan, explanation = explained()
    case = Case.of(TRACES, BATCH, gpus=GPUS)
    busiest = max(w.time for w in plan.workers)
    for worker, found in zip(plan.workers, explanation.workers):
        model = case.models[worker.gpu]
        most = worker.batch_size + found.spare_samples
        if found.spare_samples:
            assert float(model.time(most, worker.power_limit)) <= busiest
        if most < BATCH:
            assert float(model.time(most + 1, worker.power_limit)) > busiest


def test_one_more_sample_costs_what_re_evaluation_says():
    plan, explanation = explained()
    larger = Case.of(TRACES, BATCH + 1, gpus=GPUS)
    for rank, found in enumerate(explanation.workers):
        costs = []
        for limit in larger.models[GPUS[rank]].power_limits:
            shares = [w.batch_size + (i == rank) for i, w in enumerate(plan.workers)]
            limits = [limit if i == rank else w.power_limit for i, w in enumerate(plan.workers)]
            costs.append(larger.judge(shares, limits).cost)
        assert found.next_sample_cost == pytest.approx(min(costs) - plan.cost)
    best = zeus_hetero.allocate(TRACES, BATCH + 1, gpus=GPUS)
    assert explanation.next_sample_cost == pytest.approx(best.cost - plan.cost)
    cheapest = min(found.next_sample_cost for found in explanation.workers)
    assert explanation.next_sample_cost <= cheapest + 1e-12
    assert explanation.workers[explanation.next_sample_gpu].next_sample_cost == cheapest


@pytest.mark.parametrize(
    ("options", "relaxed"),
    [
        ({"deadline": 0.078, "eta": 1}, {"deadline": 0.078 * 1.01}),
        ({"max_gpus": 1}, {"max_gpus": 2}),
        ({"max_batch_size": 3}, {"max_batch_size": 4}),
        ({"min_share": 3, "must_use": True}, {"min_share": 2}),
        ({"granularity": 4}, {"granularity": 1}),
        ({"power_budget": 300}, None),
    ],
)
def test_relaxing_a_constraint_saves_what_solving_again_says(options, relaxed):
    plan, explanation = explained(**options)
    found, *others = explanation.constraints
    assert [c.name.startswith("must_use") for c in others] == [True] * len(others)
    if relaxed is None:
        watts = [w.power_limit for w in plan.workers]
        # The next higher limits are 50 W (100 to 150) or 30 W (60 to 90) away.
        steps = [50 for w in watts[:2] if w == 100] + [30 for w in watts[2:] if w == 60]
        assert found.unit == f"{min(steps)} W more"
        assert found.used == sum(watts)
        relaxed = {"power_budget": 300 + min(steps)}
    again = zeus_hetero.allocate(TRACES, BATCH, gpus=GPUS, **{**options, **relaxed})
    assert found.saving == pytest.approx(max(plan.cost - again.cost, 0), abs=1e-12)
    assert found.binds == (found.saving > 0)


def test_constraints_that_do_not_bind_save_nothing():
    _, explanation = explained(deadline=100.0, power_budget=10_000)
    assert [constraint.binds for constraint in explanation.constraints] == [False, False]
    assert "does not bind" in str(explanation)


def test_max_slowdown_is_a_constraint_too():
    options = {"max_slowdown": 1.1}
    plan = zeus_hetero.allocate(TRACES, BATCH, gpus=GPUS, **options)
    (found,) = plan.explain(TRACES, gpus=GPUS, **options).constraints
    assert found.name == "max_slowdown"
    assert found.used <= 1.1 + 1e-9
    looser = zeus_hetero.allocate(TRACES, BATCH, gpus=GPUS, max_slowdown=1.11)
    assert found.saving == pytest.approx(max(plan.step_energy - looser.step_energy, 0), abs=1e-9)


def test_it_reads_as_text():
    _, explanation = explained(power_budget=300)
    text = str(explanation)
    for expected in ("sets the pace", "A", "B", "power_budget['all'] 300", "one sample more"):
        assert expected in text


def test_a_plan_from_a_file_needs_its_traces_again(tmp_path):
    plan, explanation = explained(power_budget=300)
    plan.save(tmp_path / "plan.json")
    loaded = zeus_hetero.Allocation.load(tmp_path / "plan.json")
    assert loaded == plan
    with pytest.raises(zeus_hetero.PlanError, match="does not know the traces"):
        loaded.explain()
    assert loaded.explain(TRACES, gpus=GPUS, power_budget=300) == explanation


def test_an_allocation_of_other_gpus_is_refused():
    plan = zeus_hetero.allocate(TRACES, BATCH, gpus=GPUS)
    with pytest.raises(AllocationError, match="the allocation is for A, A, B, the traces"):
        plan.explain(TRACES)


def test_constraints_are_judged_by_the_optimum_not_by_the_plan():
    options = {"gpus": GPUS, "deadline": 1e6, "power_budget": 1e6}
    plan = zeus_hetero.allocate(TRACES, BATCH, method="baseline", **options)
    assert plan.cost > zeus_hetero.allocate(TRACES, BATCH, **options).cost
    assert [c.binds for c in plan.explain().constraints] == [False, False]


def test_a_gpu_at_its_cap_cannot_take_one_more_sample():
    plan, explanation = explained(max_batch_size={"A": 3, "B": 9})
    for worker, found in zip(plan.workers, explanation.workers):
        if worker.gpu == "A" and worker.batch_size == 3:
            assert found.next_sample_cost == math.inf
            assert found.spare_samples == 0
    assert plan.workers[explanation.next_sample_gpu].gpu == "B"
    assert "not allowed" in str(explanation)


def test_where_every_gpu_is_at_its_cap_there_is_no_next_sample():
    _, explanation = explained(max_batch_size=3)
    assert explanation.next_sample_gpu is None
    assert explanation.next_sample_cost == math.inf
    assert "is not possible under the constraints" in str(explanation)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("options", "holds"), CONSTRAINTS)
def test_no_gpus_next_sample_is_cheaper_than_the_best_one(options, holds, eta):
    plan, explanation = explained(eta=eta, **options)
    for rank, found in enumerate(explanation.workers):
        assert found.next_sample_cost >= explanation.next_sample_cost - 1e-9
        if math.isfinite(found.next_sample_cost):
            larger = Case.of(TRACES, BATCH + 1, gpus=GPUS, eta=eta, **options)
            shares = [w.batch_size + (i == rank) for i, w in enumerate(plan.workers)]
            limits = [w.power_limit for w in plan.workers]
            kept = [
                larger.judge(shares, [*limits[:rank], limit, *limits[rank + 1 :]])
                for limit in larger.models[GPUS[rank]].power_limits
            ]
            assert found.next_sample_cost == pytest.approx(
                min(p.cost for p in kept if holds(p)) - plan.cost
            )


@pytest.mark.parametrize(("options", "holds"), CONSTRAINTS)
def test_keeping_to_constraints_is_what_they_say(options, holds):
    case = Case.of(TRACES, BATCH, gpus=GPUS, **options)
    for plan in every(case):
        assert case.keeps(plan) == holds(plan)


def test_constraints_by_gpu_name_are_explained_one_by_one():
    options = {"max_batch_size": {"A": 3, "B": 9}, "must_use": "B"}
    plan, explanation = explained(**options)
    found = {constraint.name: constraint for constraint in explanation.constraints}
    assert set(found) == {"max_batch_size['A']", "max_batch_size['B']", "must_use['B']"}
    looser = zeus_hetero.allocate(
        TRACES, BATCH, gpus=GPUS, max_batch_size={"A": 4, "B": 9}, must_use="B"
    )
    assert found["max_batch_size['A']"].saving == pytest.approx(plan.cost - looser.cost)
    assert found["max_batch_size['A']"].binds
    assert found["max_batch_size['A']"].used == 3
    assert not found["max_batch_size['B']"].binds


def test_having_to_use_a_gpu_can_cost():
    _, explanation = explained(must_use="B", min_share={"B": 5}, eta=0.0)
    free = zeus_hetero.allocate(TRACES, BATCH, gpus=GPUS, min_share={"B": 5}, eta=0.0)
    forced = zeus_hetero.allocate(
        TRACES, BATCH, gpus=GPUS, min_share={"B": 5}, must_use="B", eta=0.0
    )
    (must,) = (c for c in explanation.constraints if c.name == "must_use['B']")
    assert must.saving == pytest.approx(forced.cost - free.cost)
    assert must.binds


def test_a_fleet_is_explained_without_judging_every_gpu_anew(aws, monkeypatch):
    plan = zeus_hetero.allocate(aws["cifar100"], 65_536, gpus={"A10": 32, "T4": 32})
    judged = []
    judge = Case.judge
    monkeypatch.setattr(Case, "judge", lambda *a: judged.append(1) or judge(*a))
    explanation = plan.explain()
    kinds = {(w.gpu, w.batch_size, w.power_limit) for w in plan.workers}
    assert len(explanation.workers) == 64
    assert len(judged) <= 8 * len(kinds) + 10
