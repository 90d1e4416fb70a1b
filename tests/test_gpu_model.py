from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeus_hetero import AllocationError, TraceError, TraceWarning, fit, load_trace
from zeus_hetero.gpu_model import Interpolated, Quadratic


def trace(batches, times, energies, limit=100):
    return load_trace(
        pd.DataFrame(
            {"batch_size": batches, "power_limit": limit, "time": times, "energy": energies}
        )
    )


SIMPLE = trace([8, 16, 32], [1.0, 2.0, 5.0], [50.0, 90.0, 210.0])


def test_interpolated_hits_measured_points_and_lines_between_them():
    model = fit(SIMPLE, "interpolated")
    assert model.time(np.array([8, 16, 24, 32]), 100).tolist() == [1.0, 2.0, 3.5, 5.0]
    assert float(model.energy(12, 100)) == pytest.approx(70)


def test_interpolated_repairs_what_falls_and_nothing_else():
    model = fit(trace([8, 16, 32, 64], [2.0, 1.0, 5.0, 9.0], [60, 60, 60, 90]))
    assert model.time(np.array([8, 16, 32, 64]), 100).tolist() == pytest.approx([1.5, 1.5, 5, 9])


def test_larger_shares_run_as_micro_batches_of_measured_size():
    model = fit(SIMPLE)
    assert int(model.accumulation_steps(32, 100)) == 1
    assert int(model.accumulation_steps(33, 100)) == 2
    assert int(model.accumulation_steps(100, 100)) == 4
    assert float(model.time(64, 100)) == pytest.approx(2 * 5.0)
    assert float(model.time(48, 100)) == pytest.approx(2 * 3.5)
    assert float(model.energy(100, 100)) == pytest.approx(4 * float(model.energy(25, 100)))
    assert model.micro_batch_size(100, 100) == 25
    assert model.micro_batch_size(33, 100) == 17
    assert model.micro_batch_size(0, 100) == 0


def test_no_step_is_cheaper_than_the_smallest_measured():
    model = fit(SIMPLE)
    assert model.time(np.array([1, 7, 8]), 100).tolist() == [1.0, 1.0, 1.0]
    assert model.energy(np.array([1, 8]), 100).tolist() == [50.0, 50.0]
    assert float(model.time(0, 100)) == 0
    assert float(model.energy(0, 100)) == 0


def test_distance_to_what_was_measured():
    model = fit(SIMPLE)
    measured = np.array([0, 8, 16, 32, 64])
    assert model.distance(measured, 100).tolist() == [0, 0, 0, 0, 0]
    assert float(model.distance(24, 100)) == pytest.approx(0.5)
    assert float(model.distance(4, 100)) == pytest.approx(0.5)


def test_each_power_limit_has_its_own_largest_batch():
    frame = pd.DataFrame(
        {"batch_size": [8, 16, 8], "power_limit": [200, 200, 100], "time": [1.0, 1.5, 2.0],
         "energy": [50.0, 80.0, 60.0]}
    )  # fmt: skip
    with pytest.warns(TraceWarning, match="100 W was not measured at batch sizes 16"):
        model = fit(load_trace(frame))
    assert float(model.time(16, 200)) == 1.5
    assert float(model.time(16, 100)) == 4.0
    assert int(model.accumulation_steps(16, 100)) == 2


positive = st.floats(0.01, 10)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=6), st.integers(1, 200))
def test_time_and_energy_rise_with_the_batch_within_the_measured_range(figures, share):
    batches = [4 * 2**i for i in range(len(figures))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TraceWarning)
        measured = trace(batches, [f[0] for f in figures], [f[1] for f in figures])
    model = fit(measured)
    inside = np.arange(1, batches[-1] + 1)
    for predicted, known in (
        (model.time(inside, 100), measured.time),
        (model.energy(inside, 100), measured.energy),
    ):
        assert (np.diff(predicted) >= -1e-12).all()
        assert predicted.min() >= known.min() - 1e-12
        assert predicted.max() <= known.max() + 1e-12
    # Scalars and arrays agree, and a share is worth its micro-batches.
    steps = int(model.accumulation_steps(share, 100))
    assert float(model.time(share, 100)) == float(model.time(np.array([share]), 100)[0])
    assert float(model.time(share, 100)) == pytest.approx(
        steps * float(np.interp(share / steps, inside, model.time(inside, 100)))
    )


def test_quadratic_is_numpys_parabola_clamped_and_extrapolated():
    model = fit(SIMPLE, "quadratic")
    time = np.polyfit([8, 16, 32], [1.0, 2.0, 5.0], 2)
    power = np.polyfit([8, 16, 32], [50.0, 45.0, 42.0], 2)
    for batch in (1, 8, 20, 1000):
        assert float(model.time(batch, 100)) == pytest.approx(max(np.polyval(time, batch), 0))
        energy = max(np.polyval(power, batch), 0) * max(np.polyval(time, batch), 0)
        assert float(model.energy(batch, 100)) == pytest.approx(energy)
    falling = fit(trace([8, 16, 32], [1.0, 3.0, 4.0], [50.0, 90.0, 210.0]), "quadratic")
    assert float(falling.time(500, 100)) == 0
    assert int(model.accumulation_steps(1000, 100)) == 1
    assert float(model.distance(64, 100)) == pytest.approx(1.0)


def test_quadratic_needs_three_batch_sizes_and_says_which_limits_it_drops():
    with pytest.raises(TraceError, match=r"batch sizes 8, 16; .*at least 3 batch sizes"):
        Quadratic(trace([8, 16], [1.0, 2.0], [50.0, 90.0]))
    frame = pd.concat([SIMPLE.to_frame(), trace([8, 16], [2.0, 3.0], [60.0, 70.0], 80).to_frame()])
    with pytest.warns(TraceWarning, match="dropped 80 W"):
        model = Quadratic(load_trace(frame))
    assert model.power_limits == (100,)


def test_unknown_models_and_limits_are_named():
    with pytest.raises(AllocationError, match=r"model is 'x'; expected one of .*interpolated"):
        fit(SIMPLE, "x")
    for model in (Interpolated(SIMPLE), Quadratic(SIMPLE)):
        for method in (model.time, model.energy, model.accumulation_steps, model.distance):
            with pytest.raises(AllocationError, match="power limit of 99 W; expected one of 100"):
                method(8, 99)


def test_a_single_batch_size_is_enough_to_run_micro_batches():
    model = fit(trace([8], [1.0], [50.0]))
    assert model.time(np.array([3, 8, 24]), 100).tolist() == [1.0, 1.0, 3.0]
