from __future__ import annotations

import time
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from synthetic import GPUS, SIZES, changed, part

from zeus_hetero import AllocationError, TraceWarning, allocate, fit, load_trace
from zeus_hetero.gpu_model import Interpolated
from zeus_hetero.smooth_model import Smooth
from zeus_hetero.uncertainty import leave_out_residuals, subset


@pytest.fixture(params=sorted(GPUS))
def gpu(request):
    return GPUS[request.param]


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TraceWarning)
        yield


def table(model, sizes, figure="time"):
    return np.array([getattr(model, figure)(np.array(sizes), p) for p in model.power_limits])


def test_fit_knows_the_model_by_its_name():
    assert isinstance(fit(GPUS["usual"].trace(), "auto"), Smooth)


def test_allocate_uses_it_like_any_model():
    traces = {"strong": GPUS["strong"].trace(), "weak": GPUS["weak"].trace(seed=1)}
    plan = allocate(traces, 1500, model="auto")
    assert plan.model == "auto"
    assert plan.gap == 0
    assert plan.workers[0].batch_size > plan.workers[1].batch_size > 0


def test_left_out_batch_sizes_are_predicted_nearly_to_the_noise(gpu):
    left = leave_out_residuals(gpu.trace(noise=0.02), Smooth)
    error = np.abs(np.expm1(-left.time))
    assert np.median(error) < 0.045
    assert np.quantile(error, 0.9) < 0.09


def test_far_off_errors_are_rarer_than_those_of_interpolation():
    ours, plain = [], []
    for gpu in GPUS.values():
        trace = gpu.trace(noise=0.02, seed=3)
        ours.extend(np.abs(leave_out_residuals(trace, Smooth).time))
        plain.extend(np.abs(leave_out_residuals(trace, Interpolated).time))
    assert np.quantile(ours, 0.9) < 0.75 * np.quantile(plain, 0.9)


def test_time_and_energy_never_fall_when_the_batch_grows(gpu):
    model = Smooth(gpu.trace(noise=0.05, seed=2))
    sizes = np.arange(1, SIZES[-1] + 1)
    for figure in ("time", "energy"):
        assert np.all(np.diff(table(model, sizes, figure), axis=1) >= -1e-12)


def test_time_never_rises_and_power_never_falls_when_the_limit_rises(gpu):
    model = Smooth(gpu.trace(noise=0.05, seed=2))
    time_, energy = (table(model, SIZES, figure) for figure in ("time", "energy"))
    # Power limits are in descending order.
    assert np.all(np.diff(time_, axis=0) >= -1e-12)
    # Energy is made monotone in the batch after that, which may move power by a little.
    assert np.all(np.diff(energy / time_, axis=0) <= 0.02 * energy[1:] / time_[1:])


def test_smooths_noise_away_from_measured_points():
    gpu = GPUS["usual"]
    trace = gpu.trace(noise=0.04, seed=5)
    truth = gpu.time(trace.batch_size, trace.power_limit)
    model = Smooth(trace)
    predicted = np.array(
        [float(model.time(int(b), int(p))) for b, p in zip(trace.batch_size, trace.power_limit)]
    )
    measured_error = np.sqrt(np.mean(np.log(trace.time / truth) ** 2))
    assert np.sqrt(np.mean(np.log(predicted / truth) ** 2)) < 0.85 * measured_error


def test_share_beyond_the_largest_batch_runs_as_micro_batches():
    model = Smooth(GPUS["usual"].trace())
    assert model.accumulation_steps(SIZES[-1], 250) == 1
    assert model.accumulation_steps(2 * SIZES[-1] + 1, 250) == 3
    assert model.time(3 * SIZES[-1], 150) == pytest.approx(3 * model.time(SIZES[-1], 150))
    assert model.energy(3 * SIZES[-1], 150) == pytest.approx(3 * model.energy(SIZES[-1], 150))


def test_largest_batch_is_that_of_the_trace_since_memory_knows_no_power_limit():
    trace = GPUS["usual"].trace()
    holed = subset(trace, ~((trace.power_limit == 100) & (trace.batch_size > 128)))
    model = Smooth(holed)
    assert model.accumulation_steps(1024, 100) == 1
    assert model.distance(1024, 100) == pytest.approx((1024 - 128) / 128)


def test_below_the_smallest_batch_no_sample_is_cheaper_than_in_it(gpu):
    model = Smooth(subset(gpu.trace(), gpu.trace().batch_size >= 64))
    below = np.arange(1, 64)
    for figure in ("time", "energy"):
        at = getattr(model, figure)(64, 250)
        values = getattr(model, figure)(below, 250)
        assert np.all(values <= at * (1 + 1e-9))
        assert np.all(values >= at * below / 64 * (1 - 1e-9))


def test_no_samples_take_neither_time_nor_energy():
    model = Smooth(GPUS["usual"].trace())
    assert model.time(0, 250) == 0
    assert model.energy(0, 250) == 0
    assert model.distance(0, 250) == 0


def test_unknown_power_limit_is_refused():
    with pytest.raises(AllocationError, match="no model for a power limit of 180 W"):
        Smooth(GPUS["usual"].trace()).time(8, 180)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("count", [14, 10])
def test_few_random_points_are_enough_for_a_rough_model(gpu, count, seed, quiet):
    trace = part(gpu.trace(), count, seed)
    model = Smooth(trace)
    # Within the measured batches, at limits that were measured at work.
    sizes = np.array([b for b in SIZES if trace.batch_sizes[0] <= b <= trace.batch_sizes[-1]])
    errors = np.concatenate(
        [np.abs(model.time(sizes, p) / gpu.time(sizes, p) - 1) for p in model.power_limits]
    )
    assert np.median(errors) < 0.08
    assert np.all(np.isfinite(errors))


@pytest.mark.parametrize("keep", ["one size", "one limit", "one point", "two points"])
def test_almost_nothing_measured_still_gives_finite_predictions(keep, quiet):
    trace = GPUS["usual"].trace()
    masks = {
        "one size": trace.batch_size == 256,
        "one limit": trace.power_limit == 175,
        "one point": np.array([9]),
        "two points": np.array([9, 33]),
    }
    model = Smooth(subset(trace, masks[keep]))
    known = model.trace
    for b, p, t in zip(known.batch_size, known.power_limit, known.time):
        assert float(model.time(int(b), int(p))) == pytest.approx(t, rel=0.1)
        prediction = model.predict(int(b), int(p))
        assert prediction.time_interval[0] < t < prediction.time_interval[1]
    for figure in ("time", "energy"):
        values = table(model, np.arange(1, 3000), figure)
        assert np.all(np.isfinite(values))
        assert np.all(values > 0)


def test_limit_measured_once_takes_its_shape_from_its_neighbours():
    gpu = GPUS["usual"]
    trace = gpu.trace(noise=0.01)
    once = subset(trace, (trace.power_limit != 150) | (trace.batch_size == 512))
    model = Smooth(once)
    for size in SIZES:
        assert float(model.time(size, 150)) == pytest.approx(float(gpu.time(size, 150)), rel=0.08)


def test_limit_never_measured_at_work_is_not_trusted():
    gpu = GPUS["starving"]  # its lowest limit leaves next to nothing for computing
    trace = gpu.trace(noise=0.01)
    idle = subset(trace, (trace.power_limit > 150) | (trace.batch_size == 16))
    model = Smooth(idle)
    most_likely = float(np.exp(model.surfaces["time"].mean(np.log([[1024.0, 100.0]]))[0]))
    assert float(model.time(1024, 100)) > 1.05 * most_likely
    assert model.spread(1024, 100)[0] > 3 * model.spread(1024, 200)[0]
    known = Smooth(trace)
    seen = float(np.exp(known.surfaces["time"].mean(np.log([[1024.0, 100.0]]))[0]))
    assert float(known.time(1024, 100)) == pytest.approx(seen, rel=0.02)


@pytest.mark.parametrize("factor", [0.6, 1.4, 2.5])
@pytest.mark.parametrize("point", [(16, 200), (256, 150), (512, 100), (1024, 250)])
def test_bad_point_is_named_and_does_not_matter(point, factor):
    gpu = GPUS["usual"]
    clean = gpu.trace(noise=0.01)
    with pytest.warns(TraceWarning, match=f"batch size {point[0]} at {point[1]} W"):
        model = Smooth(changed(clean, *point, factor))
    assert [(o.batch_size, o.power_limit, o.figure) for o in model.outliers] == [(*point, "time")]
    assert model.outliers[0].expected == pytest.approx(float(gpu.time(*point)), rel=0.1)
    assert np.allclose(table(model, SIZES), table(Smooth(clean), SIZES), rtol=0.06)


def test_good_points_are_not_called_bad():
    with warnings.catch_warnings():
        warnings.simplefilter("error", TraceWarning)
        for seed in range(5):
            for gpu in GPUS.values():
                assert Smooth(gpu.trace(noise=0.03, seed=seed)).outliers == ()


def test_follows_interpolation_where_the_data_are_anything_but_smooth(quiet):
    # A library that picks another algorithm at every other size: steps, without noise.
    sizes = np.arange(8, 8 * 25, 8)
    rows = [
        {"batch_size": int(b), "power_limit": p, "time": t, "energy": t * 0.9 * p}
        for p in (100, 90, 80)
        for b in sizes
        for t in [(1.0 if b < 96 else 3.0) * (1 + 0.004 * (b // 8)) * (100 / p) ** 0.1]
    ]
    model = Smooth(load_trace(pd.DataFrame(rows)))
    assert model.chosen == "interpolated"
    assert float(model.time(48, 100)) == pytest.approx(1.024, rel=1e-6)
    assert Smooth(GPUS["usual"].trace()).chosen == "smooth"


def test_unit_of_time_does_not_matter():
    trace = GPUS["usual"].trace()
    other = replace(trace, time=trace.time * 1e4, energy=trace.energy * 1e4, relative=True)
    assert np.allclose(table(Smooth(other), SIZES), 1e4 * table(Smooth(trace), SIZES), rtol=1e-3)


def test_score_is_the_error_at_left_out_batch_sizes():
    calm, noisy = (Smooth(GPUS["usual"].trace(noise=n)).score for n in (0.005, 0.06))
    assert 0 < 1.3 * calm < noisy < 0.1
    assert np.isnan(Smooth(GPUS["usual"].trace(), validate=False).score)


def test_fits_fast_enough_to_be_a_default():
    trace = GPUS["usual"].trace()
    Smooth(trace)  # imports
    began = time.perf_counter()
    for _ in range(3):
        Smooth(trace)
    # 0.1 s alone on a laptop core; the rest is for busy machines.
    assert (time.perf_counter() - began) / 3 < 1.0


@pytest.mark.parametrize("workload", ["cifar100", "imagenet"])
@pytest.mark.parametrize("name", ["A10", "T4"])
def test_bundled_traces_are_predicted_as_well_as_by_interpolation(aws, workload, name, quiet):
    ours = np.abs(leave_out_residuals(aws[workload][name], Smooth).time)
    plain = np.abs(leave_out_residuals(aws[workload][name], Interpolated).time)
    assert ours.mean() < 1.1 * plain.mean()
