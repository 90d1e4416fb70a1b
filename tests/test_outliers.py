from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
from synthetic import GPUS, changed

from zeus_hetero import TraceWarning, load_trace
from zeus_hetero.outliers import Outlier, contradicted
from zeus_hetero.smooth_model import Smooth


def outliers(trace):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TraceWarning)
        return Smooth(trace).outliers


def test_two_bad_points_are_both_found():
    trace = changed(changed(GPUS["weak"].trace(noise=0.01), 64, 200, 3.0), 512, 125, 0.5)
    assert {(o.batch_size, o.power_limit) for o in outliers(trace)} == {(64, 200), (512, 125)}


def test_bad_energy_is_found_as_power():
    frame = GPUS["usual"].trace(noise=0.01).to_frame()
    frame.loc[(frame.batch_size == 128) & (frame.power_limit == 150), "energy"] *= 0.55
    (found,) = outliers(load_trace(frame))
    assert (found.batch_size, found.power_limit, found.figure) == (128, 150, "power")
    assert found.measured < 0.7 * found.expected


def test_what_all_limits_of_a_batch_size_agree_on_is_no_outlier():
    frame = GPUS["usual"].trace(noise=0.01).to_frame()
    frame.loc[frame.batch_size == 128, ["time", "energy"]] *= 1.5  # a slower kernel there
    assert not [o for o in outliers(load_trace(frame)) if o.batch_size == 128]


def test_too_few_points_contradict_nobody():
    frame = pd.DataFrame(
        {"batch_size": [8, 16, 32], "power_limit": 100, "time": [1, 9, 1.2], "energy": [90, 99, 99]}
    )
    trace = load_trace(frame)
    assert outliers(trace) == ()
    assert contradicted(trace, {}, np.ones(3, dtype=bool)) == {}


@pytest.mark.parametrize("seed", range(3))
def test_at_most_a_tenth_of_a_trace_is_disbelieved(seed):
    trace = GPUS["usual"].trace(noise=0.01)
    rng = np.random.default_rng(seed)
    frame = trace.to_frame()
    bad = rng.permutation(len(trace))[: len(trace) // 3]
    frame.loc[bad, "time"] *= rng.uniform(0.3, 3, len(bad))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TraceWarning)
        assert len(outliers(load_trace(frame))) <= len(trace) // 10


def test_outlier_reads_well():
    text = str(Outlier(64, 150, "time", 0.5, 0.25))
    assert text == "batch size 64 at 150 W: time 0.5 s, expected about 0.25 s"
