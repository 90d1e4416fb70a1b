"""The bundled traces are found and are whole."""

from __future__ import annotations

import pytest

from zeus_hetero import TraceError
from zeus_hetero.bundled import BUNDLED_GPUS, BUNDLED_WORKLOADS, bundled_trace


@pytest.mark.parametrize(
    ("gpu", "workload", "points", "largest"),
    [
        ("A10", "cifar100", 30, 1024),
        ("T4", "cifar100", 18, 1024),
        ("A10", "imagenet", 25, 512),
        ("T4", "imagenet", 15, 512),
    ],
)
def test_every_bundled_trace_is_whole(gpu, workload, points, largest):
    trace = bundled_trace(gpu, workload)
    assert (trace.gpu, len(trace), max(trace.batch_sizes)) == (gpu, points, largest)
    assert not trace.simulated


def test_names_are_found_in_any_case():
    assert bundled_trace("a10", "CIFAR100") is bundled_trace("A10")


@pytest.mark.parametrize(("gpu", "workload"), [("H100", "cifar100"), ("A10", "squad")])
def test_unknown_trace_is_an_error_that_lists_the_known(gpu, workload):
    with pytest.raises(TraceError) as caught:
        bundled_trace(gpu, workload)
    for known in (*BUNDLED_GPUS, *BUNDLED_WORKLOADS, repr(gpu), repr(workload)):
        assert known in str(caught.value)
