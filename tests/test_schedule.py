"""Who trains on what: each sample once, the same steps everywhere, whatever the shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeus_hetero import Allocation, PlanError, Schedule, Worker
from zeus_hetero.schedule import contiguous_part


@st.composite
def schedules(draw):
    ranks = draw(st.integers(1, 8))
    shares = draw(
        st.lists(st.integers(0, 30), min_size=ranks, max_size=ranks).filter(lambda s: sum(s) > 0)
    )
    return Schedule(
        dataset_size=sum(shares) + draw(st.integers(0, 200)),
        shares=tuple(shares),
        micro_batch_sizes=tuple(draw(st.integers(1, 16)) for _ in shares),
        seed=draw(st.integers(0, 5)),
        shuffle=draw(st.booleans()),
        drop_last=draw(st.booleans()),
        min_batch_size=draw(st.integers(1, 4)),
    )


def walk(schedule, epoch, position=0):
    """Per step, per rank, the list of micro-batches as lists of samples."""
    order = schedule.permutation(epoch)
    for size in schedule.batch_sizes(position):
        sizes = schedule.split(size)
        ranks, here = [], position
        for rank in range(schedule.world_size):
            batches = []
            for micro in schedule.micro_batches(sizes, rank):
                batches.append(order[here : here + micro].tolist())
                here += micro
            ranks.append(batches)
        position += size
        yield ranks


def flatten(steps):
    return [sample for ranks in steps for batches in ranks for batch in batches for sample in batch]


@given(schedules(), st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_every_sample_once_in_as_many_steps_as_promised(schedule, epoch):
    steps = list(walk(schedule, epoch))
    assert len(steps) == schedule.steps()
    seen = flatten(steps)
    assert len(seen) == len(set(seen))
    dropped = schedule.dataset_size % schedule.global_batch_size if schedule.drop_last else 0
    assert len(seen) == schedule.dataset_size - dropped


@given(schedules())
@settings(max_examples=300, deadline=None)
def test_weights_of_a_global_batch_add_up_to_one_per_rank(schedule):
    for ranks in walk(schedule, 0):
        total = sum(len(batch) for batches in ranks for batch in batches)
        weights = [
            len(batch) * schedule.world_size / total for batches in ranks for batch in batches
        ]
        assert sum(weights) / schedule.world_size == pytest.approx(1.0, abs=1e-12)


@given(schedules())
@settings(max_examples=300, deadline=None)
def test_micro_batches_fit_and_differ_by_at_most_one(schedule):
    for ranks in walk(schedule, 0):
        for batches, limit in zip(ranks, schedule.micro_batch_sizes):
            lengths = [len(batch) for batch in batches]
            assert all(0 < length <= limit for length in lengths)
            assert not lengths or max(lengths) - min(lengths) <= 1
            assert len(lengths) == -(-sum(lengths) // limit)


@given(schedules(), st.data())
@settings(max_examples=200, deadline=None)
def test_contents_of_global_batches_do_not_depend_on_shares_and_ranks(schedule, data):
    cut = data.draw(st.integers(0, schedule.global_batch_size))
    shares = (cut, schedule.global_batch_size - cut)
    options = {"seed": schedule.seed, "shuffle": schedule.shuffle, "drop_last": schedule.drop_last}
    other = Schedule(schedule.dataset_size, shares, (7, 3), **options)
    ours = [sorted(flatten([step])) for step in walk(schedule, 1)]
    theirs = [sorted(flatten([step])) for step in walk(other, 1)]
    assert ours == theirs


@given(schedules(), st.data())
@settings(max_examples=200, deadline=None)
def test_going_on_at_any_position_loses_and_repeats_nothing(schedule, data):
    done = data.draw(st.integers(0, schedule.steps()))
    first = list(walk(schedule, 2))[:done]
    position = len(flatten(first))
    size = data.draw(st.integers(1, schedule.dataset_size))
    other = Schedule(
        schedule.dataset_size, (size,), (9,), seed=schedule.seed, shuffle=schedule.shuffle
    )
    seen = flatten(first) + flatten(walk(other, 2, position))
    assert sorted(seen) == list(range(schedule.dataset_size))


@given(schedules(), st.data())
@settings(max_examples=300, deadline=None)
def test_split_of_the_last_batch(schedule, data):
    size = data.draw(st.integers(1, schedule.global_batch_size))
    sizes = schedule.split(size)
    assert sum(sizes) == size
    assert all(0 <= part <= share for part, share in zip(sizes, schedule.shares))
    least = min(schedule.min_batch_size, size)
    if all(share == 0 or share >= schedule.min_batch_size for share in schedule.shares):
        enough = sum(sorted(schedule.shares)[-max(size // schedule.min_batch_size, 1) :]) >= size
        if enough:
            assert all(part == 0 or part >= least for part in sizes)


@given(schedules(), st.data())
@settings(max_examples=300, deadline=None)
def test_last_batch_is_split_in_proportion(schedule, data):
    size = data.draw(st.integers(1, schedule.global_batch_size))
    due = [size * share / schedule.global_batch_size for share in schedule.shares]
    if all(part == 0 or part >= schedule.min_batch_size for part in due):
        assert all(abs(part - d) < 1 for part, d in zip(schedule.split(size), due))


def test_last_batch_of_imagenet_in_proportion():
    schedule = Schedule(1_281_167, (2600, 1496), (512, 256))
    *_, last = schedule.batch_sizes()
    assert last == 3215
    assert schedule.split(last) == (2041, 1174)
    assert schedule.micro_batches((2600, 1496), 0) == (434, 434, 433, 433, 433, 433)
    assert schedule.micro_batches((2600, 1496), 1) == (250, 250, 249, 249, 249, 249)


def test_order_depends_on_seed_and_epoch_only():
    one = Schedule(50, (4, 6), (4, 6), seed=3)
    same = Schedule(50, (9, 1), (2, 1), seed=3)
    assert np.array_equal(one.permutation(4), same.permutation(4))
    assert not np.array_equal(one.permutation(4), one.permutation(5))
    assert not np.array_equal(one.permutation(4), Schedule(50, (4, 6), (4, 6)).permutation(4))
    plain = Schedule(50, (4, 6), (4, 6), shuffle=False)
    assert plain.permutation(9).tolist() == list(range(50))


def test_fingerprint_tells_schedules_apart():
    base = {"dataset_size": 50, "shares": (4, 6), "micro_batch_sizes": (4, 6)}
    changed = [
        {"dataset_size": 51}, {"shares": (6, 4)}, {"micro_batch_sizes": (4, 3)}, {"seed": 1},
        {"shuffle": False}, {"drop_last": True}, {"min_batch_size": 2},
    ]  # fmt: skip
    prints = [Schedule(**{**base, **change}).fingerprint() for change in [{}, *changed]]
    assert len(set(prints)) == len(prints)
    assert Schedule(**base).fingerprint() == prints[0]


def test_fingerprint_notices_another_permutation(monkeypatch):
    schedule = Schedule(50, (4, 6), (4, 6))
    before = schedule.fingerprint()
    monkeypatch.setattr(Schedule, "permutation", lambda self, epoch: np.arange(50)[::-1])
    assert schedule.fingerprint() != before


def test_equal_micro_batches_on_all_ranks():
    schedule = Schedule(80, (12, 8), (4, 8), equal_micro_batches=True)
    assert [schedule.micro_batches((12, 8), rank) for rank in (0, 1)] == [(4, 4, 4), (3, 3, 2)]
    with pytest.raises(PlanError, match="cannot all be cut into 3 micro-batches"):
        Schedule(80, (18, 2), (6, 8), equal_micro_batches=True)
    with pytest.raises(PlanError, match=r"drop_last=True"):
        Schedule(82, (12, 8), (4, 8), equal_micro_batches=True, min_batch_size=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset_size": 9}, "9 samples, less than the global batch of 10"),
        ({"shares": (0, 0)}, "at least one sample"),
        ({"shares": (-1, 11)}, "at least one sample"),
        ({"micro_batch_sizes": (4,)}, "2 shares and 1 micro-batch sizes"),
        ({"micro_batch_sizes": (0, 6)}, "rank 0: a micro-batch of 0 samples"),
        ({"min_batch_size": 0}, "min_batch_size is 0"),
    ],
)
def test_impossible_schedules(change, message):
    with pytest.raises(PlanError, match=message):
        Schedule(**{"dataset_size": 50, "shares": (4, 6), "micro_batch_sizes": (4, 6), **change})


def made_plan():
    workers = (Worker("A10", 8, 4, 2, 100, 0.1, 1.0), Worker("T4", 4, 4, 1, 60, 0.1, 1.0))
    return Allocation(workers, 0.1, 1.0, 1.0, 1.0, "by hand", "synchronous", 0.5, 12)


def test_smaller_micro_batches_than_planned():
    def micro(limit):
        return Schedule.of_plan(made_plan(), 50, max_micro_batch_size=limit).micro_batch_sizes

    assert micro(None) == (4, 4)
    assert micro(3) == (3, 3)
    assert micro({"NVIDIA A10G": 2}) == (2, 4)
    assert micro(100) == (4, 4)
    with pytest.raises(PlanError, match="of T4 is 0"):
        micro({"T4": 0})


def test_contiguous_parts_of_the_original_scheme():
    assert contiguous_part(50_000, 0, 40) == range(20_000)
    assert contiguous_part(50_000, 1, 40) == range(20_000, 50_000)
    assert len(contiguous_part(7, 0, 0)) == 0
    assert contiguous_part(7, None, None) == range(7)
    for index, split, message in [
        (2, 40, "gpu_index is 2; expected 0"),
        (0, 101, "gpu_split is 101; expected a percentage"),
        (0, -1, "gpu_split is -1"),
        (0, None, "go together"),
    ]:
        with pytest.raises(PlanError, match=message):
            contiguous_part(7, index, split)
