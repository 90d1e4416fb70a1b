from __future__ import annotations

import pytest

from zeus_hetero.allocation import Allocation, Worker
from zeus_hetero.errors import PlanError
from zeus_hetero.gpu_names import canonical, same_model, worker_for


@pytest.mark.parametrize(
    ("reported", "model"),
    [
        ("NVIDIA A10G", "A10"),
        ("NVIDIA A10", "A10"),
        ("Tesla T4", "T4"),
        ("NVIDIA A40", "A40"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-PCIE-32GB", "V100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("Quadro RTX 6000", "Quadro RTX 6000"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_driver_names_are_their_models(reported, model):
    assert same_model(reported, model)


@pytest.mark.parametrize(
    ("one", "other"), [("NVIDIA A100", "NVIDIA A10"), ("Quadro RTX 6000", "NVIDIA RTX 6000"),
                       ("NVIDIA L4", "NVIDIA L40"), ("NVIDIA RTX A4000", "NVIDIA RTX 4000")]
)  # fmt: skip
def test_different_models_stay_apart(one, other):
    assert not same_model(one, other)


def test_a_name_of_vendor_words_only_is_still_a_name():
    assert canonical("NVIDIA Graphics") == "nvidia graphics"


def plan(*entries):
    workers = tuple(Worker(gpu, share, share, 1, limit, 1.0, 1.0) for gpu, share, limit in entries)
    total = sum(worker.batch_size for worker in workers)
    return Allocation(workers, 1.0, 1.0, 1.0, 1.0, "test", "synchronous", 0.5, total)


def test_the_worker_of_the_rank_is_taken_if_the_gpu_fits():
    both = plan(("T4", 10, 60), ("T4", 20, 70))
    assert worker_for(both, "Tesla T4", 0).power_limit == 60
    assert worker_for(both, "Tesla T4", 1).power_limit == 70


def test_ranks_in_another_order_than_the_plan_find_their_gpu():
    mixed = plan(("A10", 10, 150), ("T4", 20, 70))
    assert worker_for(mixed, "Tesla T4", 0).power_limit == 70
    assert worker_for(mixed, "NVIDIA A10G", 1).power_limit == 150
    assert worker_for(mixed, "NVIDIA A10G").power_limit == 150


def test_a_gpu_that_the_plan_does_not_know_is_named():
    with pytest.raises(PlanError, match=r"no worker for 'NVIDIA A40'.*A10, T4"):
        worker_for(plan(("A10", 10, 150), ("T4", 20, 70)), "NVIDIA A40", 0)


def test_an_ambiguous_plan_is_refused():
    with pytest.raises(PlanError, match="2 different workers for 'Tesla T4'"):
        worker_for(plan(("A10", 10, 150), ("T4", 20, 70), ("T4", 20, 60)), "Tesla T4", 0)
