from __future__ import annotations

import numpy as np
import pytest
from synthetic import GPUS

from zeus_hetero.physics import POWER, TIME

# Overhead 20 ms, 0.1 ms per sample, sharp change-over, slowdown below 180 W, 60 W drawn anyway.
THETA = np.array([np.log(0.02), np.log(1e-4), 1.0, np.log(8), 0.8, np.log(180), -3.0, np.log(60)])


def times(sizes, limit, theta=THETA):
    return np.exp(TIME.curve(theta, np.log(np.asarray(sizes, dtype=float)), np.log(limit)))


def test_small_batches_take_the_overhead_and_large_ones_the_work():
    assert times(1, 250) == pytest.approx(0.02, rel=1e-3)
    assert times(10_000, 250) == pytest.approx(1.0, rel=1e-2)


def test_power_limit_slows_only_the_computing():
    assert times(1, 100) == pytest.approx(times(1, 250), rel=1e-3)
    assert times(10_000, 100) > 1.5 * times(10_000, 250)


def test_limit_above_what_the_work_draws_changes_nothing():
    assert times(10_000, 300) == pytest.approx(times(10_000, 250), rel=0.01)


def test_limit_below_what_is_drawn_anyway_is_very_slow_but_finite():
    slow = times(10_000, 55)
    assert slow > 5 * times(10_000, 250)
    assert np.isfinite(slow)


@pytest.mark.parametrize("law", [TIME, POWER])
def test_one_point_is_enough_for_a_fit_through_it(law):
    points = np.log([[64.0, 150.0]])
    values = np.log([0.3 if law is TIME else 120.0])
    assert law.fit(points, values).mean(points) == pytest.approx(values, abs=0.05)


def test_single_bad_point_hardly_moves_the_curve():
    trace = GPUS["usual"].trace(noise=0.01)
    points = np.log(np.column_stack([trace.batch_size, trace.power_limit]).astype(float))
    values = np.log(trace.time)
    spoilt = values.copy()
    spoilt[30] += np.log(4)
    moved = TIME.fit(points, spoilt).mean(points) - TIME.fit(points, values).mean(points)
    assert np.max(np.abs(moved)) < 0.03


def test_curves_follow_an_imaginary_gpu_they_were_not_made_from():
    for gpu in GPUS.values():
        trace = gpu.trace(noise=0.0)
        points = np.log(np.column_stack([trace.batch_size, trace.power_limit]).astype(float))
        for law, figure in ((TIME, trace.time), (POWER, trace.average_power)):
            off = law.fit(points, np.log(figure)).mean(points) - np.log(figure)
            assert np.median(np.abs(off)) < 0.05


def test_launches_scatter_more_than_computing():
    fitted = TIME.fit(np.log([[8.0, 250.0], [4096.0, 250.0]]), np.log([0.02, 1.0]))
    launching, computing = fitted.noise(np.log([[1.0, 250.0], [1e5, 250.0]]))
    assert launching > 2 * computing


def test_slopes_are_the_derivatives():
    gpu = GPUS["usual"].trace()
    points = np.log(np.column_stack([gpu.batch_size, gpu.power_limit]).astype(float))
    fitted = TIME.fit(points, np.log(gpu.time))
    step = np.zeros(len(fitted.theta))
    step[1] = 0.01 * TIME.spread[1]
    moved = TIME.curve(fitted.theta + step, points[:, 0], points[:, 1]) - fitted.mean(points)
    assert 0.01 * fitted.slopes(points)[:, 1] == pytest.approx(moved, abs=1e-4)
