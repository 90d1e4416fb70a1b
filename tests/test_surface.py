from __future__ import annotations

import numpy as np
import pytest
from synthetic import GPUS

from zeus_hetero.physics import TIME
from zeus_hetero.surface import Smoothness, fit_surface


@pytest.fixture(scope="module")
def measured():
    trace = GPUS["usual"].trace(noise=0.02, seed=4)
    points = np.log(np.column_stack([trace.batch_size, trace.power_limit]).astype(float))
    return points, np.log(trace.time)


def everyone(points):
    return np.ones(len(points), dtype=bool)


def test_covariance_is_symmetric_and_positive():
    points = np.random.default_rng(0).uniform(0, 6, (20, 2))
    covariance = Smoothness().covariance(points, points)
    assert np.allclose(covariance, covariance.T)
    assert np.linalg.eigvalsh(covariance).min() > -1e-12


def test_uncertainty_grows_away_from_what_was_measured(measured):
    points, values = measured
    surface = fit_surface(points[:40], values[:40], TIME, everyone(points[:40]), Smoothness())
    near, far = surface.uncertainty(np.array([points[10], points[10] + [4.0, 0.0]]))
    assert far > 2 * near


def test_left_out_residual_is_that_of_a_fit_without_the_point(measured):
    points, values = measured
    surface = fit_surface(points, values, TIME, everyone(points), Smoothness())
    residual, deviation = surface.left_out()
    # With the same curve and noise: condition on the others by hand.
    i, rest = 20, np.delete(np.arange(len(points)), 20)
    slopes = surface.law.slopes(points)
    covariance = surface.smoothness.covariance(points, points) + slopes @ slopes.T
    known = covariance[np.ix_(rest, rest)] + np.diag(surface.noise[rest] ** 2)
    off = values - surface.law.mean(points)
    expected = off[i] - covariance[i, rest] @ np.linalg.solve(known, off[rest])
    assert residual[i] == pytest.approx(expected, abs=1e-8)
    assert deviation[i] > 0


def test_validation_leaves_whole_batch_sizes_out_but_not_the_ends(measured):
    points, values = measured
    surface = fit_surface(points, values, TIME, everyone(points))
    sizes = np.unique(points[:, 0])
    ends = np.isin(points[:, 0], [sizes[0], sizes[-1]])
    assert np.all(np.isnan(surface.validation.residual[ends]))
    assert np.all(np.isfinite(surface.validation.residual[~ends]))
    in_sample = np.abs(values - surface.mean(points))[~ends].mean()
    assert surface.validation.score > in_sample


def test_point_that_is_not_believed_has_no_influence(measured):
    points, values = measured
    believed = everyone(points)
    believed[17] = False
    spoilt = values.copy()
    spoilt[17] += 3.0
    one, other = (fit_surface(points, v, TIME, believed, Smoothness()) for v in (values, spoilt))
    assert np.allclose(one.mean(points), other.mean(points), atol=1e-3)


def test_covariance_of_the_truth_agrees_with_its_uncertainty(measured):
    points, values = measured
    surface = fit_surface(points[::3], values[::3], TIME, everyone(points[::3]), Smoothness())
    at = points[1:10]
    assert np.sqrt(np.diag(surface.covariance(at))) == pytest.approx(surface.uncertainty(at))
