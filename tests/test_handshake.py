"""Ranks compare notes before they train; a mismatch is one error on all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="torch is not installed: no ranks")

from ranks import run_cases
from training_cases import plan

from zeus_hetero import PlanError
from zeus_hetero.handshake import Introduction, agree, assign, plan_fingerprint


def introductions(*gpus, **options):
    return [
        Introduction("node", rank, gpu, f"GPU-{rank}", (50, 150), "same", {"torch": "2"}, **options)
        for rank, gpu in enumerate(gpus)
    ]


def test_workers_find_their_entry_by_model_whatever_the_order_of_ranks():
    made = plan((4, 5, 3), gpus=["A10", "T4", "V100"])
    found = assign(made, introductions("Tesla V100-SXM2-16GB", "NVIDIA A10G", "Tesla T4"))
    assert [(worker.gpu, worker.batch_size) for worker in found.workers] == [
        ("V100", 3), ("A10", 4), ("T4", 5),
    ]  # fmt: skip
    assert found.global_batch_size == 12


def test_rank_keeps_its_own_place_among_equal_models():
    made = plan((4, 5, 3), gpus=["T4", "A10", "T4"])
    found = assign(made, introductions("A10", "T4", "T4"))
    assert [worker.batch_size for worker in found.workers] == [5, 4, 3]


@pytest.mark.parametrize(
    ("gpus", "change", "message"),
    [
        (("A10", "T4"), {}, r"plan is for 3 workers \(A10, T4, T4\), but 2 ranks were started"),
        (("A10", "T4", "V100"), {}, r"no entry for rank 2 .V100 .*left over for T4"),
        (("A10", "T4", "T4"), {"gpu_id": "GPU-0"}, r"ranks 0 and 1 use the same GPU \(GPU-0\)"),
        (("A10", "T4", "T4"), {"plan": "other"}, r"different plans: rank 0 \(node\) same, rank 1"),
        (("A10", "T4", "T4"), {"versions": {"torch": "1"}}, "torch differs: rank 0 2, rank 1 1"),
        (("A10", "T4", "T4"), {"power_range": (60, 90)},
         r"rank 1 .*power limit is 100 W, but this GPU accepts 60 to 90 W"),
    ],
)  # fmt: skip
def test_what_does_not_fit(gpus, change, message):
    ranks = introductions(*gpus)
    ranks[1] = replace(ranks[1], **change)
    with pytest.raises(PlanError, match=message):
        assign(plan((4, 5, 3), gpus=["A10", "T4", "T4"]), ranks)


def test_fingerprint_of_a_plan_changes_with_any_share():
    prints = {plan_fingerprint(plan(shares)) for shares in [(4, 5, 3), (4, 5, 3), (5, 4, 3)]}
    assert len(prints) == 2


def test_one_rank_alone_agrees_with_itself():
    agree("plan", "x", None)


@pytest.fixture(scope="module")
def three():
    return run_cases(3, ["failing_introduction", "wrong_gpus", "stale_plan",
                         "preflight_finds_lack_of_memory", "silent_rank"])  # fmt: skip


def same_error(ranks):
    errors = {rank["error"] for rank in ranks}
    assert len(errors) == 1, "the ranks say different things"
    return errors.pop()


def test_rank_that_cannot_take_part_ends_all_with_its_reason(three):
    error = same_error(three["failing_introduction"])
    assert error == "rank 2 (A10 on node, local rank 0): no plan"


def test_gpus_that_fit_no_entry_are_one_error_on_all_ranks(three):
    error = same_error(three["wrong_gpus"])
    assert "no entry for rank 2 (Tesla V100 on node" in error


def test_stale_plan_is_found_before_training(three):
    error = same_error(three["stale_plan"])
    assert "disagree about the schedule" in error
    assert "but rank 1 " in error


def test_silent_rank_is_named_in_time(three):
    for rank in (0, 2):
        assert "not all ranks answer" in three["silent_rank"][rank]["error"]
    assert "Ranks 1 failed" in three["silent_rank"][0]["error"]


def test_preflight_finds_lack_of_memory_on_one_rank(three):
    ranks = three["preflight_finds_lack_of_memory"]
    assert {str(rank["errors"]) for rank in ranks} == {str(ranks[0]["errors"])}
    first, second = ranks[0]["errors"]
    for part in ("rank 1 (T4)", "micro-batch of 4 samples", "share 4", "out of memory",
                 "--max_micro_batch T4=2", "--max-batch-size T4=2"):  # fmt: skip
        assert part in first
    assert second is None, "smaller micro-batches did not help"
    assert [rank["tried"] for rank in ranks] == [[6, 6], [4, 2], [2, 2]]


def test_preflight_leaves_no_traces(three):
    for rank in three["preflight_finds_lack_of_memory"]:
        assert rank["numbers_same"]
        assert rank["buffers_same"]
        assert rank["gradients_same"]
