from __future__ import annotations

import numpy as np
import pytest
from synthetic import GPUS, LIMITS, SIZES

from zeus_hetero import AllocationError, fit
from zeus_hetero.gpu_model import Interpolated
from zeus_hetero.power_limits import BetweenLimits, resolve_power_limits
from zeus_hetero.smooth_model import Smooth
from zeus_hetero.uncertainty import subset


@pytest.fixture(scope="module")
def trace():
    return GPUS["usual"].trace(noise=0.01)


def test_measured_limits_are_the_default(trace):
    assert resolve_power_limits(trace, None) == LIMITS


def test_continuous_means_every_watt(trace):
    assert resolve_power_limits(trace, "continuous") == tuple(range(250, 99, -1))


def test_steps_keep_the_measured_limits(trace):
    limits = resolve_power_limits(trace, 40)
    assert limits == (250, 225, 220, 200, 180, 175, 150, 140, 125, 100)


def test_limits_can_be_given(trace):
    assert resolve_power_limits(trace, [110, 200, 110]) == (200, 110)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ([90], "between 100 and 250"),
        ([260], "Profile beyond it first"),
        ([120.5], "whole W"),
        ([], "empty"),
        (0, "at least 1 W"),
        ("all", "'continuous'"),
    ],
)
def test_limits_that_make_no_sense_are_refused(trace, limits, message):
    with pytest.raises(AllocationError, match=message):
        fit(trace, "auto", power_limits=limits)


@pytest.mark.parametrize("model", ["auto", "interpolated", "quadratic"])
def test_every_model_answers_between_the_limits(trace, model):
    fitted = fit(trace, model, power_limits="continuous")
    assert len(fitted.power_limits) == 151
    assert fitted.name == model
    low, between, high = (float(fitted.time(512, p)) for p in (125, 137, 150))
    assert high <= between <= low
    prediction = fitted.predict(512, 137)
    assert prediction.time_interval[0] < between < prediction.time_interval[1]


def test_smooth_left_out_limit_is_predicted_within_the_target():
    errors, plain = [], []
    for gpu in GPUS.values():
        trace = gpu.trace(noise=0.01, seed=1)
        for limit in LIMITS[1:-1]:
            left = trace.power_limit == limit
            rest = subset(trace, ~left)
            sizes = trace.batch_size[left]
            smooth = Smooth(rest, power_limits=[limit]).time(sizes, limit)
            linear = BetweenLimits(Interpolated(rest), [limit]).time(sizes, limit)
            errors.extend(np.abs(smooth / trace.time[left] - 1))
            plain.extend(np.abs(linear / trace.time[left] - 1))
    assert np.median(errors) < 0.02
    assert np.quantile(errors, 0.9) < 0.07
    assert np.quantile(errors, 0.9) < np.quantile(plain, 0.9)


def test_between_two_limits_time_and_power_are_linear():
    trace = GPUS["usual"].trace(noise=0.0)
    plain = Interpolated(trace)
    model = BetweenLimits(plain, [150, 160, 175])
    part = (160 - 150) / 25
    low, high = (float(plain.time(512, p)) for p in (150, 175))
    assert float(model.time(512, 160)) == pytest.approx(low + part * (high - low))
    watts = [float(plain.energy(512, p) / plain.time(512, p)) for p in (150, 175)]
    got = float(model.energy(512, 160) / model.time(512, 160))
    assert got == pytest.approx(watts[0] + part * (watts[1] - watts[0]))
    assert float(model.time(512, 150)) == float(plain.time(512, 150))
    assert float(model.time(0, 160)) == float(model.energy(0, 160)) == 0


def test_between_two_limits_a_share_fits_both():
    trace = GPUS["usual"].trace()
    holed = subset(trace, ~((trace.power_limit == 150) & (trace.batch_size > 256)))
    model = BetweenLimits(Interpolated(holed), [160])
    assert model.accumulation_steps(1024, 160) == 4
    assert float(model.distance(1024, 160)) == 0.0


def test_smooth_gpu_with_more_limits_agrees_at_the_measured_ones(trace):
    few, many = Smooth(trace), Smooth(trace, power_limits=5)
    for limit in LIMITS:
        assert np.allclose(
            few.time(np.array(SIZES), limit), many.time(np.array(SIZES), limit), 0.02
        )
    with pytest.raises(AllocationError, match="no model for a power limit of 133 W"):
        many.time(8, 133)
