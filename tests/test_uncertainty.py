from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm
from synthetic import CARDS, GPUS, LIMITS, SIZES, VISIBLE, part, real

from zeus_hetero import AllocationError, ProfilingGrid, TraceWarning, fit, pessimistic
from zeus_hetero.case import Case
from zeus_hetero.gpu_model import MODELS, Interpolated
from zeus_hetero.smooth_model import Smooth
from zeus_hetero.solver import solve
from zeus_hetero.trace import load_trace
from zeus_hetero.uncertainty import (
    conformal_quantile,
    leave_out_residuals,
    step_intervals,
    subset,
)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TraceWarning)
        yield


def predict_left_out(traces, model="auto", confidence=0.9):
    """Columns: relative error of time; whether time, and energy, lie in their intervals."""
    rows = []
    for trace in traces:
        for size in trace.batch_sizes[1:-1]:
            left = trace.batch_size == size
            fitted = fit(subset(trace, ~left), model)
            for i in np.flatnonzero(left):
                p = fitted.predict(int(size), int(trace.power_limit[i]), confidence)
                rows.append(
                    (
                        p.time / trace.time[i] - 1,
                        p.time_interval[0] <= trace.time[i] <= p.time_interval[1],
                        p.energy_interval[0] <= trace.energy[i] <= p.energy_interval[1],
                    )
                )
    return np.array(rows, dtype=float).T


@pytest.mark.slow
def test_ninety_percent_intervals_hold_about_ninety_percent_of_left_out_points():
    traces = [gpu.trace(noise=0.03, seed=s) for s in range(2) for gpu in GPUS.values()]
    _, time, energy = predict_left_out(traces)
    assert 0.85 <= time.mean() <= 0.95
    assert 0.85 <= energy.mean() <= 0.95


@pytest.mark.slow
def test_real_left_out_points_meet_the_targets(shared_data):
    traces = [real(shared_data, workload, gpu) for workload in VISIBLE for gpu in CARDS]
    error, time, energy = predict_left_out(traces)
    assert np.median(np.abs(error)) < 0.02
    assert np.quantile(np.abs(error), 0.9) < 0.07
    assert 0.85 <= time.mean() <= 0.95
    assert 0.85 <= energy.mean() <= 0.95


@pytest.mark.parametrize("model", sorted(MODELS))
def test_every_model_predicts_with_intervals(model):
    fitted = fit(GPUS["usual"].trace(noise=0.02), model)
    p = fitted.predict(200, 150)
    assert p.time == float(fitted.time(200, 150))
    assert p.energy == float(fitted.energy(200, 150))
    assert p.time_interval[0] < p.time < p.time_interval[1]
    assert p.energy_interval[0] < p.energy < p.energy_interval[1]
    assert p.confidence == 0.9
    assert "at 90%" in str(p)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_more_confidence_needs_wider_intervals(model):
    fitted = fit(GPUS["usual"].trace(noise=0.02), model)
    widths = [fitted.spread(200, 150, c) for c in (0.5, 0.8, 0.95, 0.99)]
    assert all(low[0] <= high[0] for low, high in zip(widths, widths[1:]))
    assert widths[0][0] < widths[-1][0]
    assert widths[0][1] < widths[-1][1]


def test_noisier_measurements_give_wider_intervals():
    calm, noisy = (Smooth(GPUS["usual"].trace(noise=n)).spread(200, 150) for n in (0.003, 0.08))
    assert noisy[0] > 1.5 * calm[0]
    assert noisy[1] > 1.5 * calm[1]


def test_gap_between_measured_batches_is_less_sure_than_a_measured_one():
    trace = GPUS["usual"].trace()
    model = Smooth(subset(trace, ~np.isin(trace.batch_size, [64, 128, 256])))
    assert model.spread(128, 150)[0] > 1.3 * model.spread(512, 150)[0]


def test_spread_has_the_shape_of_the_batch_sizes():
    for model in sorted(MODELS):
        fitted = fit(GPUS["usual"].trace(), model)
        for half in fitted.spread(np.array([[8, 16, 32], [64, 0, 4096]]), 150):
            assert half.shape == (2, 3)
            assert np.all(half > 0)


def test_too_few_batch_sizes_to_learn_from_give_wide_intervals():
    trace = GPUS["usual"].trace()
    two = Interpolated(subset(trace, np.isin(trace.batch_size, [8, 1024])))
    assert two.spread(100, 150)[0] > 0.15


@pytest.mark.parametrize("confidence", [0, 1, 1.5, -0.1, "0.9"])
def test_confidence_that_is_none_is_refused(confidence):
    with pytest.raises(AllocationError, match="confidence is"):
        Smooth(GPUS["usual"].trace()).predict(8, 150, confidence)


def test_conformal_quantile_is_that_of_the_residuals():
    residuals = np.random.default_rng(0).standard_normal(20_000)
    assert conformal_quantile(residuals)(0.9) == pytest.approx(norm.ppf(0.95), rel=0.03)
    assert conformal_quantile(residuals)(0.5) == pytest.approx(norm.ppf(0.75), rel=0.03)


def test_few_residuals_give_more_than_the_largest_of_them():
    residuals = np.array([0.01, -0.02, 0.03])
    assert conformal_quantile(residuals)(0.99) > 0.03
    assert conformal_quantile(residuals, groups=1)(0.7) >= conformal_quantile(residuals)(0.7)


def test_left_out_residuals_are_those_of_inner_batch_sizes():
    trace = GPUS["usual"].trace()
    left = leave_out_residuals(trace, Interpolated)
    assert set(left.batch_size) == set(SIZES[1:-1])
    assert len(left.time) == (len(SIZES) - 2) * len(trace.power_limits)
    one = Interpolated(subset(trace, trace.batch_size != 64))
    at = (left.batch_size == 64) & (left.power_limit == 150)
    measured = trace.time[(trace.batch_size == 64) & (trace.power_limit == 150)]
    assert left.time[at] == pytest.approx(np.log(measured / one.time(64, 150)))


def test_pessimistic_answers_are_exceeded_as_rarely_as_asked():
    exceeded = []
    for seed in range(2):
        for gpu in GPUS.values():
            trace = gpu.trace(noise=0.03, seed=seed)
            for size in (32, 128, 512):
                left = trace.batch_size == size
                model = pessimistic(Smooth(subset(trace, ~left)), 0.1)
                exceeded.extend(
                    trace.time[i] > model.time(size, int(trace.power_limit[i]))
                    for i in np.flatnonzero(left)
                )
    assert 0.01 <= np.mean(exceeded) <= 0.17


def test_less_risk_means_more_pessimism_and_even_odds_change_nothing():
    model = Smooth(GPUS["usual"].trace())
    even, some, little = (pessimistic(model, risk) for risk in (0.5, 0.2, 0.02))
    for figure in ("time", "energy"):
        values = [float(getattr(m, figure)(300, 150)) for m in (model, even, some, little)]
        assert values[0] == values[1] < values[2] < values[3]
    assert pessimistic(model, None) is model


def test_pessimistic_model_still_says_how_a_share_runs():
    model = Smooth(GPUS["usual"].trace())
    wary = pessimistic(model, 0.05)
    assert wary.accumulation_steps(3000, 150) == model.accumulation_steps(3000, 150)
    assert wary.distance(3000, 150) == model.distance(3000, 150)
    assert wary.power_limits == model.power_limits
    assert wary.time(0, 150) == 0
    assert wary.predict(100, 150).time > model.predict(100, 150).time


@pytest.mark.parametrize("risk", [0, 0.6, -1, "low"])
def test_risk_that_is_none_is_refused(risk):
    with pytest.raises(AllocationError, match="risk is"):
        pessimistic(Smooth(GPUS["usual"].trace()), risk)


def test_a_wary_choice_avoids_the_limit_that_nobody_measured_at_work():
    trace = GPUS["starving"].trace(noise=0.01)
    idle = subset(trace, (trace.power_limit > 150) | (trace.batch_size == 16))
    model = Smooth(idle)

    def slowdown(m):
        return float(m.time(1024, 100)) / float(m.time(1024, 250))

    assert slowdown(pessimistic(model, 0.05)) > 1.15 * slowdown(model)


def test_allocation_under_risk_is_the_safer_one():
    traces = {
        "strong": GPUS["strong"].trace(noise=0.01),
        # Nobody saw it work under its low limits.
        "starving": subset(
            GPUS["starving"].trace(noise=0.01),
            np.array([p > 150 or b == 16 for b, p in ProfilingGrid(SIZES, LIMITS).points]),
        ),
    }
    case = Case.of(traces, 1500, model="auto")
    wary = replace(case, models={g: pessimistic(m, 0.02) for g, m in case.models.items()})
    plain, safe = case.solve(solve), wary.solve(solve)
    decisions = [
        ([w.batch_size for w in plan.workers], [w.power_limit for w in plan.workers])
        for plan in (plain, safe)
    ]
    # Judged by what may happen, the safe plan costs no more; judged by what is likely, no less.
    assert wary.judge(*decisions[1]).cost <= wary.judge(*decisions[0]).cost
    assert case.judge(*decisions[1]).cost >= case.judge(*decisions[0]).cost
    assert decisions[0] != decisions[1]


def test_step_interval_holds_measured_steps():
    inside, n = np.zeros(2), 0
    rng = np.random.default_rng(0)
    for seed in range(6):
        gpus = [GPUS["usual"], GPUS["weak"], GPUS["strong"]]
        models = [Smooth(gpu.trace(noise=0.03, seed=seed)) for gpu in gpus]
        for shares in ((300, 100, 700), (96, 48, 192), (800, 0, 900)):
            limits, wait = (175, 150, 200), (80, 60, 90)
            time, energy = step_intervals(models, shares, limits, wait_power=wait, sync_time=0.01)
            noise = np.exp(0.03 * rng.standard_normal(3))
            busy = [
                g.time(b, p) * e if b else 0.0 for g, b, p, e in zip(gpus, shares, limits, noise)
            ]
            step = max(busy) + 0.01
            joules = sum(
                (g.energy(b, p) * e if b else 0.0) + w * (step - t)
                for g, b, p, e, w, t in zip(gpus, shares, limits, noise, wait, busy)
            )
            inside += [time[0] <= step <= time[1], energy[0] <= joules <= energy[1]]
            n += 1
    assert np.all(inside / n >= 0.75)


def test_step_of_workers_that_may_all_be_late_is_later_than_one_of_them():
    one, *others = (Smooth(GPUS["usual"].trace(noise=0.05, seed=s)) for s in range(4))
    alone, _ = step_intervals([one], [256], [150], wait_power=[80])
    both, _ = step_intervals([one, one], [256, 256], [150, 150], wait_power=[80, 80])
    assert both == pytest.approx(alone, rel=0.02)  # alike: they are late together
    every, _ = step_intervals([one, *others], [256] * 4, [150] * 4, wait_power=[80] * 4)
    middle = [float(m.time(256, 150)) for m in (one, *others)]
    assert sum(every) / 2 > np.mean(middle)


def test_subset_keeps_extra_fields_with_their_records():
    frame = GPUS["usual"].trace().to_frame().assign(note=lambda f: f.index)
    trace = load_trace(frame)
    few = part(trace, 5, 0)
    kept = [r["note"] for r in few.extra]
    assert np.array_equal(few.time, trace.time[kept])
