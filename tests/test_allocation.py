from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeus_hetero import Allocation, PlanError, Worker


def worker(gpu="A10", share=30, steps=2, **changes):
    figures = {
        "gpu": gpu,
        "batch_size": share,
        "micro_batch_size": -(-share // steps) if steps else 0,
        "accumulation_steps": steps,
        "power_limit": 150,
        "time": 1.0,
        "energy": 100.0,
        "wait_power": 40.0,
    }
    return Worker(**{**figures, **changes})


def plan(*workers, **changes):
    workers = workers or (worker(), worker("T4", 10, 1, time=0.5, energy=30.0))
    figures = {
        "step_time": 1.0,
        "step_energy": 150.0,
        "cost": 200.0,
        "lower_bound": 190.0,
        "method": "optimal",
        "objective": "synchronous",
        "eta": 0.5,
        "global_batch_size": sum(w.batch_size for w in workers),
    }
    return Allocation(workers=workers, **{**figures, **changes})


def test_shares_must_add_up():
    with pytest.raises(PlanError, match=r"shares 30, 10 add up to 40; expected .* 41"):
        plan(global_batch_size=41)


@pytest.mark.parametrize(("steps", "micro"), [(2, 16), (2, 14), (0, 30), (-1, 30)])
def test_micro_batches_must_make_up_the_share(steps, micro):
    bad = worker(accumulation_steps=steps, micro_batch_size=micro)
    with pytest.raises(PlanError, match=r"worker 0 \(A10\): a share of 30"):
        plan(bad)


def test_gap():
    assert plan().gap == pytest.approx(0.05)
    assert plan(lower_bound=200.0).gap == 0
    assert plan(lower_bound=-math.inf).gap == math.inf


def test_waiting_and_epochs():
    allocation = plan()
    assert allocation.waiting(0) == 0
    assert allocation.waiting(1) == pytest.approx(0.5)
    epoch = allocation.per_epoch(100)
    assert (epoch.time, epoch.energy, epoch.cost) == pytest.approx((2.5, 375, 500))


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=6).filter(any))
def test_gpu_split_is_whole_percent_smallest_first(shares):
    split = plan(*(worker(share=s, steps=1 if s else 0) for s in shares)).gpu_split
    assert sum(split) == 100
    assert list(split) == sorted(split)
    for percent, share in zip(split, sorted(shares)):
        assert abs(percent - 100 * share / sum(shares)) < 1


def test_two_gpus_split_as_the_original_scripts_want_it():
    assert plan(worker(share=1874), worker("T4", 2222)).gpu_split == (46, 54)


def test_save_and_load(tmp_path):
    for allocation in (plan(), plan(lower_bound=-math.inf, simulated=True, cost_unit="money")):
        allocation.save(tmp_path / "plan.json")
        assert Allocation.load(tmp_path / "plan.json") == allocation
        json.loads((tmp_path / "plan.json").read_text(), parse_constant=pytest.fail)


def test_str_shows_every_gpu_and_marks_simulation():
    text = str(plan())
    for expected in ("A10", "T4", "30", "150", "2 x 15", "50.0%", "gap 0.05"):
        assert expected in text
    assert "SIMULATED" in str(plan(simulated=True))
    assert "proven optimal" in str(plan(lower_bound=200.0))


def edited(tmp_path, **changes):
    plan().save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    content.update(changes)
    (tmp_path / "plan.json").write_text(json.dumps(content))
    return tmp_path / "plan.json"


WORKER = dataclasses.asdict(worker())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, r"plan version 2; this zeus-hetero reads version 1"),
        ({"version": None}, r"plan version None"),
        ({"format": "x"}, r"is no plan"),
        ({"global_batch_size": 41}, r"add up to 40; expected the global batch size 41"),
        ({"global_batch_size": 40.0}, r"global_batch_size is 40.0; expected int"),
        ({"workers": []}, r"workers is \[\]; expected a list with one entry per GPU"),
        ({"workers": [5]}, r"worker 0 is 5; expected an object"),
        ({"workers": [{**WORKER, "batch_size": 29}]}, r"micro_batch_size = ceil|add up"),
        ({"workers": [{**WORKER, "power_limit": "150"}]}, r"worker 0: power_limit is '150'"),
        ({"workers": [{"gpu": "A10"}]}, r"worker 0: no batch_size; the file was edited"),
        ({"cost": "much"}, r"cost is 'much'; expected float"),
        ({"simulated": 1}, r"simulated is 1; expected bool"),
    ],
)
def test_bad_plans_are_named(tmp_path, changes, message):
    path = edited(tmp_path, **changes)
    with pytest.raises(PlanError, match=message) as caught:
        Allocation.load(path)
    assert "plan.json" in str(caught.value)


def test_missing_and_truncated_plans(tmp_path):
    with pytest.raises(PlanError, match=r"nowhere.json: no such file.*zeus-hetero allocate"):
        Allocation.load(tmp_path / "nowhere.json")
    path = edited(tmp_path)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(PlanError, match=r"not valid JSON.*truncated"):
        Allocation.load(path)
    path.write_text("[]")
    with pytest.raises(PlanError, match="is no plan"):
        Allocation.load(path)
