"""Running statistics of BatchNorm over ranks with different shares."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: no BatchNorm")

from ranks import run_cases  # noqa: E402
from training_cases import data, distance, global_batches  # noqa: E402

from zeus_hetero import scale_batchnorm_momentum, sync_batchnorm  # noqa: E402


@pytest.fixture(scope="module")
def two():
    return run_cases(2, ["running_statistics"])


@pytest.fixture(scope="module")
def three():
    return run_cases(3, ["batchnorm_with_different_counts"])


@pytest.fixture
def alone():
    layer = torch.nn.BatchNorm1d(6).double()
    dataset = data(820)
    for epoch in range(10):
        for batch in global_batches(dataset, (130, 75), epoch):
            layer(dataset.tensors[0][batch])
    return layer


def test_weighted_statistics_are_those_of_one_process(two, alone):
    for rank in two["running_statistics"]:
        assert distance(rank["mean"], alone.running_mean) < 1e-12
        assert distance(rank["variance"], alone.running_var) < 0.02
        assert rank["count"] == alone.num_batches_tracked == 40


def test_statistics_of_rank_0_are_not(two, alone):
    """Negative control: what DistributedDataParallel would keep."""
    assert distance(two["running_statistics"][0]["own"], alone.running_mean) > 1e-3


@pytest.mark.parametrize("name", ["own_buffers", "copied_buffers"])
def test_different_counts_neither_hang_nor_part_the_ranks(three, name):
    ranks = three["batchnorm_with_different_counts"]
    assert all(torch.equal(rank[name], ranks[0][name]) for rank in ranks)
    assert bool(torch.isfinite(ranks[0][name]).all())


def test_momentum_forgets_as_much_per_step_whatever_the_micro_batches():
    layer = torch.nn.BatchNorm1d(1, momentum=0.1)
    scale_batchnorm_momentum(torch.nn.Sequential(layer), 5)
    assert (1 - layer.momentum) ** 5 == pytest.approx(0.9)


def test_one_process_keeps_its_statistics():
    layer = torch.nn.BatchNorm1d(3)
    layer(torch.randn(8, 3))
    before = layer.running_mean.clone()
    sync_batchnorm(layer, 8)
    assert torch.equal(layer.running_mean, before)
