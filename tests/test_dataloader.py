"""The data loader in one process: shares, order, resuming, epochs and what they cost."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: no data loader")

from torch.utils.data import DataLoader, Dataset, IterableDataset  # noqa: E402
from training_cases import data, global_batches, mean_loss, perceptron, plan  # noqa: E402
from zeus.utils.metric import zeus_cost  # noqa: E402

from zeus_hetero import HeteroDataLoader, PlanError, TrainingError, simulation  # noqa: E402


class Numbers(Dataset):
    """Sample i is i."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is not None:
            time.sleep(0.001 * (index % 3))  # Workers finish out of order.
        return index


def all_ranks(dataset, allocation, **options):
    return [
        HeteroDataLoader(dataset, allocation=allocation, rank=rank, **options)
        for rank in range(len(allocation.workers))
    ]


def samples_of(loader, stop=None):
    """Step by step, this rank's micro-batches as lists."""
    steps = []
    for number, step in enumerate(loader):
        steps.append([batch.tolist() for batch in step.micro_batches()])
        assert [len(batch) for batch in steps[-1]] == list(step.sizes)
        if stop is not None and number + 1 == stop:
            break
    return steps


def joined(lists):
    return [entry for entries in lists for entry in entries]


def flat(steps):
    return joined(joined(steps))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
        {"pin_memory": True},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_batches_and_weights_stay_together_however_they_are_loaded(options):
    loader = HeteroDataLoader(Numbers(205), allocation=plan((20, 21), (7, 21)), rank=0, **options)
    for epoch in (0, 1):
        expected = [
            batch[: step[0]].tolist()
            for step, batch in zip([(20,)] * 5, global_batches(Numbers(205), (20, 21), epoch))
        ]
        steps = samples_of(loader)
        assert [[s for batch in step for s in batch] for step in steps] == expected
        assert all([len(batch) for batch in step] == [7, 7, 6] for step in steps)


def test_every_sample_once_over_all_ranks():
    loaders = all_ranks(Numbers(100), plan((7, 0, 5), (3, 1, 5)))
    assert [len(loader) for loader in loaders] == [9, 9, 9]
    seen = [samples_of(loader) for loader in loaders]
    assert {len(steps) for steps in seen} == {9}
    assert sorted(sample for steps in seen for sample in flat(steps)) == list(range(100))


def test_drop_last():
    loaders = all_ranks(Numbers(100), plan((7, 5)), drop_last=True)
    assert [len(loader) for loader in loaders] == [8, 8]
    assert sum(len(flat(samples_of(loader))) for loader in loaders) == 96


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 4, 8, 9])
def test_resumes_anywhere_with_another_plan_and_number_of_ranks(stop, workers):
    first = all_ranks(Numbers(100), plan((7, 5), (3, 5)), seed=4, num_workers=workers)
    seen = [flat(samples_of(loader, stop)) for loader in first]
    states = [loader.state_dict() for loader in first]
    assert states[0] == states[1]

    then = all_ranks(Numbers(100), plan((4, 10, 2)), seed=4, num_workers=workers)
    for loader in then:
        loader.load_state_dict(states[0])
    if stop == 9:  # All of the epoch was used: the next one comes.
        assert states[0]["epoch"] == 1
        assert sorted(s for loader in then for s in flat(samples_of(loader))) == list(range(100))
        return
    rest = [flat(samples_of(loader)) for loader in then]
    assert sorted(joined(seen + rest)) == list(range(100))


def test_resumes_twice_and_in_a_later_epoch():
    straight = HeteroDataLoader(Numbers(50), allocation=plan((6,)), rank=0)
    expected = [flat(samples_of(straight)) for _ in range(4)]
    states, seen = None, []
    for stop in (2, 3, 4, 9, 9, None):
        loader = HeteroDataLoader(Numbers(50), allocation=plan((6,)), rank=0)
        if states:
            loader.load_state_dict(states)
        seen += flat(samples_of(loader, stop))
        states = loader.state_dict()
    assert seen == joined(expected)


@pytest.mark.parametrize(
    ("change", "name"),
    [({"seed": 1}, "seed"), ({"shuffle": False}, "shuffle"), ({"size": 99}, "dataset_size")],
)
def test_state_of_other_samples_is_refused(change, name):
    saved = HeteroDataLoader(Numbers(100), allocation=plan((7, 5)), rank=0).state_dict()
    size = change.pop("size", 100)
    loader = HeteroDataLoader(Numbers(size), allocation=plan((7, 5)), rank=0, **change)
    with pytest.raises(PlanError, match=f"saved position has {name}"):
        loader.load_state_dict(saved)


def test_epoch_that_was_left_after_its_last_step_is_over():
    loader = HeteroDataLoader(Numbers(24), allocation=plan((6,)), rank=0)
    expected = [flat(samples_of(loader)) for _ in range(2)]
    loader = HeteroDataLoader(Numbers(24), allocation=plan((6,)), rank=0)
    assert flat(samples_of(loader, len(loader))) == expected[0]
    assert flat(samples_of(loader)) == expected[1]


def test_new_allocation_from_the_next_iteration_on():
    loaders = all_ranks(Numbers(60), plan((7, 5)))
    before = [samples_of(loader, 2) for loader in loaders]
    for loader in loaders:
        loader.set_allocation(plan((2, 13), (2, 4)))
    after = [samples_of(loader) for loader in loaders]
    assert sorted(joined(map(flat, before + after))) == list(range(60))
    assert [len(batch) for batch in after[1][0]] == [4, 3, 3, 3]
    with pytest.raises(TrainingError, match="new plan has 3 workers; this job has 2 ranks"):
        loaders[0].set_allocation(plan((2, 5, 5)))


def test_is_torchs_loader_and_sampler_state_agrees():
    loader = HeteroDataLoader(Numbers(60), allocation=plan((7, 5)), rank=1)
    assert isinstance(loader, DataLoader)
    sampler = loader.batch_sampler
    sampler.set_epoch(3, 24)
    assert len(list(sampler)) == len(sampler) == 3
    saved = sampler.state_dict()
    sampler.set_epoch(0)
    sampler.load_state_dict(saved)
    assert (sampler.epoch, sampler.position) == (3, 24)


# -- the original modes ----------------------------------------------------------------------


def test_fixed_parts_of_the_data_set():
    parts = [
        HeteroDataLoader(Numbers(50), gpu_index=index, gpu_split=40, batch_size=8)
        for index in (0, 1)
    ]
    seen = [sorted(s for batch in part for s in batch.tolist()) for part in parts]
    assert seen == [list(range(20)), list(range(20, 50))]
    assert [len(part) for part in parts] == [3, 4]
    one, other = ([batch.tolist() for batch in parts[0]] for _ in range(2))
    assert one != other, "not shuffled anew"


def test_empty_part_trains_nothing():
    loader = HeteroDataLoader(Numbers(50), gpu_index=0, gpu_split=0, batch_size=8)
    assert list(loader) == []


def test_plain_batches_of_everything():
    loader = HeteroDataLoader(Numbers(10), batch_size=4, shuffle=False)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


# -- epochs ----------------------------------------------------------------------------------


def simulated_epochs(loader, model, max_epochs=None, metrics=()):
    metrics = iter(metrics)
    for _ in loader.epochs(max_epochs):
        for step in loader:
            for inputs, targets in step.micro_batches(model):
                step.backward(mean_loss(model, inputs, targets))
        metric = next(metrics, None)
        if metric is not None:
            loader.report_metric(metric)


def simulated_loader(gpus, **options):
    from zeus_hetero.job import Job

    allocation = plan((128,), (64,), gpus=["T4"], max_power=70.0, sync_time=0.01)
    return HeteroDataLoader(data(512), allocation=Job(allocation, gpu_index=0), **options)


def test_epochs_take_the_time_and_energy_of_the_gpu():
    with simulation.use("T4") as gpus:
        gpus[0].set_power_management_limit(60_000)
        loader = simulated_loader(gpus)
        simulated_epochs(loader, perceptron(), 2)
        duration, joules = gpus[0].plan_step(64)
        report = loader.report()
    assert [figures.epoch for figures in loader.history] == [0, 1]
    for figures in loader.history:
        assert figures.time == pytest.approx(4 * (2 * duration + 0.01))
        assert figures.cost == pytest.approx(zeus_cost(figures.energy, figures.time, 0.5, 70))
    assert report.gpus[0].power_limit == 60
    assert report.gpus[0].waited == pytest.approx(0.08 / report.time)
    # The counter moves every 0.1 s.
    expected = 2 * 4 * (2 * joules + 0.01 * gpus[0].wait_power)
    measured = sum(figures.energy for figures in loader.history)
    assert abs(measured - expected) < 0.1 * 70


def test_stops_at_the_target_metric():
    with simulation.use("T4") as gpus:
        loader = simulated_loader(gpus, target_metric=0.9, max_epochs=9)
        simulated_epochs(loader, perceptron(), metrics=[0.5, 0.91, 0.99])
        assert len(loader.history) == 2
        lower_is_better = simulated_loader(gpus, target_metric=0.3, max_epochs=9)
        for _ in lower_is_better.epochs():
            list(lower_is_better)
            lower_is_better.report_metric(0.6 - 0.1 * len(lower_is_better.history), False)
        assert len(lower_is_better.history) == 3


def test_stops_before_the_epoch_that_would_exceed_the_cost():
    with simulation.use("T4") as gpus:
        one = simulated_loader(gpus)
        simulated_epochs(one, perceptron(), 4)
        cost = sum(figures.cost for figures in one.history) / 4
        loader = simulated_loader(gpus, cost_threshold=3.5 * cost)
        simulated_epochs(loader, perceptron(), 100)
        assert len(loader.history) == 3
        assert "above the threshold" in loader.meter.reason_to_stop()


def test_cost_threshold_without_a_gpu_is_an_error():
    with pytest.raises(TrainingError, match="no GPU whose energy"):
        HeteroDataLoader(Numbers(20), allocation=plan((7,)), rank=0, cost_threshold=1.0)


def test_epochs_resume_where_the_checkpoint_was_taken():
    loader = HeteroDataLoader(Numbers(24), allocation=plan((6,)), rank=0)
    for epoch in loader.epochs(5):
        for number, _ in enumerate(loader):
            if epoch == 2 and number == 1:
                break
        if epoch == 2:
            saved = loader.state_dict()
            break
    resumed = HeteroDataLoader(Numbers(24), allocation=plan((6,)), rank=0)
    resumed.load_state_dict(saved)
    steps = {epoch: len(samples_of(resumed)) for epoch in resumed.epochs(5)}
    assert steps == {2: 2, 3: 4, 4: 4}


def test_plain_batches_run_on_the_simulated_gpu():
    with simulation.use("A10") as gpus:
        loader = HeteroDataLoader(data(100), gpu_index=1, gpu_split=20, batch_size=32)
        for _ in loader.epochs(2):
            for _ in loader:
                pass
        report = loader.report()
        expected = 2 * (2 * gpus[0].plan_step(32)[0] + gpus[0].plan_step(16)[0])
    assert report.time == pytest.approx(expected)
    assert report.steps == 6
    assert report.samples == 160
    assert "(simulated)" in str(report)


# -- bad input -------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dataset": Stream()}, TrainingError, "Stream is an IterableDataset"),
        ({"in_order": False}, TrainingError, "in_order=False"),
        ({"batch_size": 3}, TrainingError, "batch_size: not with this loader"),
        ({"sampler": [1]}, TrainingError, "sampler: not with this loader"),
        ({"gpu_split": 3}, TrainingError, "contradict allocation"),
        ({"rank": 2}, TrainingError, "rank is 2; the plan has 2 workers"),
        ({"dataset": Numbers(11)}, PlanError, "11 samples, less than the global batch of 12"),
        ({"allocation": "missing.json"}, PlanError, "missing.json: no such file"),
    ],
)
def test_bad_input(options, error, message):
    arguments = {"dataset": Numbers(50), "allocation": plan((7, 5)), "rank": 0, **options}
    with pytest.raises(error, match=message):
        HeteroDataLoader(**arguments)


def test_without_an_allocation_there_is_no_position():
    loader = HeteroDataLoader(Numbers(10), batch_size=2)
    for call in (loader.state_dict, lambda: loader.set_allocation(plan((3,)))):
        with pytest.raises(TrainingError, match="no allocation"):
            call()
    with pytest.raises(TrainingError, match="preflight is for"):
        loader.preflight(perceptron(), mean_loss)
