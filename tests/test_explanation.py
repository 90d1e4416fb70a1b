from __future__ import annotations

import pytest
from test_constraints import BATCH, GPUS, TRACES

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
    (found,) = explanation.constraints
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
