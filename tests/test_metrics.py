"""Metrics over ranks with different numbers of samples."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: no metrics over ranks")

from ranks import run_cases  # noqa: E402
from training_cases import data, with_batchnorm  # noqa: E402

from zeus_hetero import Mean  # noqa: E402


@pytest.fixture(scope="module")
def three():
    return run_cases(3, ["metrics", "evaluation_without_exchange", "report_without_gpu"])


def test_mean_is_weighted_by_samples_on_every_rank(three):
    for rank in three["metrics"]:
        assert rank["mean"] == pytest.approx((26 * 0.7 + 15 * 0.6) / 41, rel=1e-7)
        assert rank["again"] == pytest.approx((26 * 0.7 + 15 * 0.6) / 41, rel=1e-12)
        assert math.isnan(rank["nothing"])


def test_evaluation_covers_each_sample_once_without_waiting(three):
    ranks = three["evaluation_without_exchange"]
    model, dataset = with_batchnorm().eval(), data(21)
    expected = (model(dataset.tensors[0]).argmax(1) == dataset.tensors[1]).double().mean()
    assert sum(rank["seen"] for rank in ranks) == 21
    assert ranks[1]["seen"] == 0
    for rank in ranks:
        assert rank["accuracy"] == pytest.approx(float(expected))


def test_mean_in_one_process():
    mean = Mean()
    mean.update(1.0, 3)
    mean.update(torch.tensor(5.0, requires_grad=True), 1)
    assert mean.compute() == 2.0
    mean.reset()
    assert math.isnan(mean.compute())


def test_waiting_is_measured_where_ranks_are_slow(three):
    """Ranks 0 and 1 wait 0.1 and 0.05 s per step for rank 2."""
    first, second, third = three["report_without_gpu"][0]["waited"]
    assert first > 0.5 > second > 0.2 > third
    assert "Energy (J): -" in three["report_without_gpu"][0]["text"]
