from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zeus_hetero
from zeus_hetero import AllocationError, InfeasibleError, TraceError, TraceWarning
from zeus_hetero.gpu_model import fit
from zeus_hetero.trace import load_trace

# Published by the original system for a global batch of 4096 and eta = 0.5: cost over the
# profiling window, with shares and power limits (W) as A10/T4.
PUBLISHED = [
    ("cifar100", "brute_force", (1874, 2222), (100, 60), 576.395617243483),
    ("cifar100", "heuristic", (1874, 2222), (100, 60), 576.395617243483),
    ("cifar100", "baseline", (2048, 2048), (100, 60), 645.6321966993021),
    ("imagenet", "brute_force", (1661, 2435), (100, 60), 45226.929032574924),
    ("imagenet", "heuristic", (1661, 2435), (100, 60), 45226.929032574924),
    ("imagenet", "baseline", (2048, 2048), (100, 60), 46720.851359780274),
]
STEPS = {"cifar100": 10, "imagenet": 40}
PAPER = {"objective": "independent", "model": "quadratic", "eta": 0.5}


def split(plan):
    return tuple(w.batch_size for w in plan.workers), tuple(w.power_limit for w in plan.workers)


def frame(times, energies, batches=(8, 16), limits=(100,)):
    rows = [
        {"batch_size": b, "power_limit": p, "time": t, "energy": e}
        for (p, b), t, e in zip(itertools.product(limits, batches), times, energies)
    ]
    return pd.DataFrame(rows)


@pytest.mark.parametrize(("workload", "method", "shares", "limits", "cost"), PUBLISHED)
def test_published_figures_from_the_transcribed_traces(aws, workload, method, shares, limits, cost):
    plan = zeus_hetero.allocate(aws[workload], 4096, method=method, **PAPER)
    assert split(plan) == (shares, limits)
    assert plan.cost * STEPS[workload] == pytest.approx(cost, rel=1e-4)


@pytest.mark.parametrize(("workload", "method", "shares", "limits", "cost"), PUBLISHED)
def test_published_figures_from_the_raw_traces(shared_data, workload, method, shares, limits, cost):
    stem = {"cifar100": "cifar", "imagenet": "imagenet"}[workload]
    traces = {
        gpu: load_trace(
            shared_data / "trace_aws" / f"{stem}_{gpu.lower()}.json", steps=STEPS[workload]
        )
        for gpu in ("A10", "T4")
    }
    plan = zeus_hetero.allocate(traces, 4096, method=method, **PAPER)
    assert split(plan) == (shares, limits)
    assert plan.cost * STEPS[workload] == pytest.approx(cost, rel=1e-9)


@pytest.mark.parametrize("workload", STEPS)
def test_optimum_of_the_original_problem_is_what_it_published(aws, workload):
    brute = zeus_hetero.allocate(aws[workload], 4096, method="brute_force", **PAPER)
    optimal = zeus_hetero.allocate(aws[workload], 4096, method="optimal", **PAPER)
    assert split(optimal) == split(brute)
    assert optimal.gap == 0


def test_the_faster_gpu_gets_more_work_and_all_finish_together(aws):
    plan = zeus_hetero.allocate(aws["cifar100"], 4096)
    a10, t4 = plan.workers
    assert a10.batch_size > 2 * t4.batch_size
    assert plan.waiting(0) < 0.01
    assert plan.waiting(1) < 0.01
    assert plan.gap == 0


def test_the_original_split_takes_almost_twice_the_optimums_time(aws):
    table = zeus_hetero.compare(aws["cifar100"], 4096)
    assert table.loc["paper", "shares"] == (1874, 2222)
    assert table.loc["paper", "step_time"] / table.loc["optimal", "step_time"] == pytest.approx(
        1.95, abs=0.01
    )


def test_savings_against_the_even_split_at_maximum_power(aws):
    table = zeus_hetero.compare(aws["cifar100"], 4096, wait_power={"A10": 60, "T4": 40})
    best = table.loc["optimal"]
    assert best["time_saved_vs_equal_max_power"] == pytest.approx(0.36, abs=0.01)
    assert best["energy_saved_vs_equal_max_power"] == pytest.approx(0.27, abs=0.01)
    assert table.loc["equal_max_power", "shares"] == (2048, 2048)
    assert table.loc["equal_max_power", "power_limits"] == (300, 70)
    assert table.loc["equal_max_power", "cost_saved_vs_equal_max_power"] == 0
    assert list(table.index) == [
        "optimal", "brute_force", "heuristic", "baseline", "equal_max_power", "paper",
    ]  # fmt: skip
    assert (table["gap"] >= 0).all()
    assert table.loc["optimal", "gap"] == 0
    assert table.loc["brute_force", "cost"] == pytest.approx(best["cost"], rel=1e-12)


def test_compare_says_why_a_method_is_left_out(aws):
    table = zeus_hetero.compare(aws["cifar100"], 4096, gpus={"A10": 2, "T4": 2})
    assert "brute_force" not in table.index
    assert "4 GPUs" in table.attrs["skipped"]["brute_force"]
    two_sizes = frame([0.1, 0.2], [5, 9])
    table = zeus_hetero.compare({"A": two_sizes, "B": two_sizes}, 32)
    assert "at least 3 batch sizes" in table.attrs["skipped"]["paper"]


def test_savings_are_missing_where_an_even_split_is_not_allowed(aws):
    table = zeus_hetero.compare(aws["cifar100"], 4096, max_batch_size={"T4": 512})
    assert "equal_max_power" in table.attrs["skipped"]
    assert table["time_saved_vs_equal_max_power"].isna().all()


def test_eight_gpus_of_four_kinds_are_proven(aws):
    traces = four_kinds(aws)
    plan = zeus_hetero.allocate(traces, 4096, gpus=dict.fromkeys(traces, 2))
    assert plan.gap == 0
    assert sum(w.batch_size for w in plan.workers) == 4096
    # A neighbour is never cheaper: move a few samples between any two GPUs.
    case = zeus_hetero.case.Case.of(traces, 4096, gpus=dict.fromkeys(traces, 2))
    shares, limits = map(list, split(plan))
    for giver, taker in itertools.permutations(range(8), 2):
        for samples in (1, 7, 64):
            moved = shares.copy()
            moved[giver] -= samples
            moved[taker] += samples
            if moved[giver] >= 0:
                assert case.judge(moved, limits).cost >= plan.cost * (1 - 1e-12)


def four_kinds(aws):
    """The A10 and T4, and two more made from them: slower and of other appetite."""
    traces = dict(aws["cifar100"])
    for name, source, slower, hungrier in (("B", "A10", 1.3, 0.9), ("C", "T4", 0.8, 1.05)):
        base = traces[source].to_frame()
        traces[name] = load_trace(
            base.assign(
                time=base["time"] * slower, energy=base["energy"] * slower * hungrier, gpu=name
            )
        )
    return traces


@st.composite
def small_cases(draw):
    gpus = draw(st.integers(2, 3))
    positive = st.floats(0.05, 2)
    traces = {}
    for name in "ABC"[:gpus]:
        limits = draw(st.sampled_from([(100,), (150, 100)]))
        size = 2 * len(limits)
        times = draw(st.lists(positive, min_size=size, max_size=size))
        powers = draw(st.lists(st.floats(20, 110), min_size=size, max_size=size))
        energies = [t * p for t, p in zip(times, powers)]
        traces[name] = frame(times, energies, batches=(2, 5), limits=limits)
    return traces, draw(st.integers(gpus, 9))


@settings(max_examples=60, deadline=None)
@given(
    small_cases(),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([None, 0.0, 35.0]),
    st.sampled_from(["synchronous", "independent"]),
)
def test_optimum_equals_enumeration_from_traces(case, eta, wait_power, objective):
    traces, batch = case
    plan = zeus_hetero.allocate(traces, batch, eta=eta, wait_power=wait_power, objective=objective)
    best = math.inf
    loaded = {name: load_trace(data) for name, data in traces.items()}
    models = {name: fit(trace) for name, trace in loaded.items()}
    least = 1 if objective == "independent" else 0
    max_power = sum(t.power_limits[0] for t in loaded.values())
    for shares in itertools.product(range(least, batch + 1), repeat=len(traces)):
        if sum(shares) != batch:
            continue
        for limits in itertools.product(*(t.power_limits for t in loaded.values())):
            chosen = list(zip(models.values(), shares, limits))
            t = [float(m.time(b, p)) for m, b, p in chosen]
            e = [float(m.energy(b, p)) for m, b, p in chosen]
            if objective == "independent":
                cost = sum(eta * ei + (1 - eta) * p * ti for ti, ei, p in zip(t, e, limits))
            else:
                waits = [
                    trace.average_power.min() if wait_power is None else wait_power
                    for trace in loaded.values()
                ]
                joules = sum(e) + sum(w * (max(t) - ti) for w, ti in zip(waits, t))
                cost = eta * joules + (1 - eta) * max_power * max(t)
            best = min(best, cost)
    assert plan.cost == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert plan.gap == 0


def test_eta_zero_takes_the_least_energy_among_the_fastest(aws):
    fastest = zeus_hetero.allocate(aws["cifar100"], 4096, eta=0.0)
    for method in ("optimal", "brute_force"):
        again = zeus_hetero.allocate(aws["cifar100"], 4096, eta=0.0, method=method)
        assert again.step_time == fastest.step_time
    anything = zeus_hetero.allocate(aws["cifar100"], 4096, eta=1e-9)
    assert fastest.step_time <= anything.step_time * (1 + 1e-9)
    assert fastest.step_energy <= anything.step_energy * (1 + 1e-9)


def test_eta_moves_from_time_to_energy(aws):
    plans = [zeus_hetero.allocate(aws["imagenet"], 4096, eta=eta) for eta in (0, 0.5, 1)]
    times = [plan.step_time for plan in plans]
    energies = [plan.step_energy for plan in plans]
    assert times == sorted(times)
    assert energies == sorted(energies, reverse=True)
    assert energies[2] < energies[0]


def test_max_slowdown_minimises_energy_within_it(aws):
    fastest = zeus_hetero.allocate(aws["cifar100"], 4096, eta=0)
    frugal = zeus_hetero.allocate(aws["cifar100"], 4096, eta=1)
    within = zeus_hetero.allocate(aws["cifar100"], 4096, max_slowdown=1.1)
    assert within.step_time <= 1.1 * fastest.step_time * (1 + 1e-9)
    assert frugal.step_energy <= within.step_energy <= fastest.step_energy
    assert within.gap == 0
    exact = zeus_hetero.allocate(aws["cifar100"], 4096, max_slowdown=1.0)
    assert exact.step_time == pytest.approx(fastest.step_time, rel=1e-9)
    loose = zeus_hetero.allocate(aws["cifar100"], 4096, max_slowdown=100)
    assert loose.step_energy == pytest.approx(frugal.step_energy, rel=1e-9)


def test_sync_time_makes_every_gpu_wait(aws):
    plain = zeus_hetero.allocate(aws["cifar100"], 4096, wait_power=50)
    longer = zeus_hetero.allocate(aws["cifar100"], 4096, wait_power=50, sync_time=0.2)
    assert split(longer) == split(plain)
    assert longer.step_time == pytest.approx(plain.step_time + 0.2)
    assert longer.step_energy == pytest.approx(plain.step_energy + 2 * 50 * 0.2)
    assert longer.gap == 0


def test_a_useless_gpu_gets_no_samples_and_still_waits():
    fast = frame([0.1, 0.2], [5.0, 10.0])
    useless = frame([50.0, 60.0], [5000.0, 6000.0])
    plan = zeus_hetero.allocate({"fast": fast, "slow": useless}, 16, wait_power=10)
    assert split(plan)[0] == (16, 0)
    assert plan.workers[1].accumulation_steps == plan.workers[1].micro_batch_size == 0
    assert plan.step_energy == pytest.approx(10.0 + 10 * 0.2)


def test_shares_larger_than_profiled_run_as_micro_batches(aws):
    plan = zeus_hetero.allocate(aws["cifar100"], 8192)
    for worker in plan.workers:
        assert worker.micro_batch_size <= 1024
        assert worker.accumulation_steps == math.ceil(worker.batch_size / 1024)


def test_granularity_leaves_the_remainder_to_one_gpu(aws):
    plan = zeus_hetero.allocate(aws["cifar100"], 4099, granularity=64, gpus={"A10": 1, "T4": 2})
    off = [w.batch_size % 64 for w in plan.workers]
    assert sorted(off) == [0, 0, 4099 % 64]
    assert plan.gap == 0
    free = zeus_hetero.allocate(aws["cifar100"], 4099, gpus={"A10": 1, "T4": 2})
    assert free.cost <= plan.cost


def test_granularity_optimum_equals_enumeration():
    traces = {"A": frame([0.1, 0.25], [5, 9]), "B": frame([0.2, 0.3], [4, 7])}
    plan = zeus_hetero.allocate(traces, 23, granularity=5)
    case = zeus_hetero.case.Case.of(traces, 23)
    costs = [
        case.judge([a, 23 - a], [100, 100]).cost
        for a in range(24)
        if a % 5 == 0 or (23 - a) % 5 == 0
    ]
    assert plan.cost == pytest.approx(min(costs), rel=1e-12)


def test_max_batch_size_caps_the_share(aws):
    plan = zeus_hetero.allocate(aws["cifar100"], 4096, max_batch_size={"A10": 1500})
    assert plan.workers[0].batch_size <= 1500
    everyone = zeus_hetero.allocate(aws["cifar100"], 4096, max_batch_size=2048)
    assert split(everyone)[0] == (2048, 2048)
    with pytest.raises(InfeasibleError, match=r"max_batch_size.*at most 3000.*4096") as caught:
        zeus_hetero.allocate(aws["cifar100"], 4096, max_batch_size=1500)
    assert caught.value.constraint == "max_batch_size"
    assert caught.value.nearest == 2048


def test_gpus_given_as_list_keep_their_order(aws):
    plan = zeus_hetero.allocate(aws["cifar100"], 1024, gpus=["T4", "A10", "T4"])
    assert [w.gpu for w in plan.workers] == ["T4", "A10", "T4"]
    counted = zeus_hetero.allocate(aws["cifar100"], 1024, gpus={"A10": 1, "T4": 2})
    assert counted.cost == pytest.approx(plan.cost, rel=1e-12)


def test_a_gpu_more_never_costs_more_where_idle_gpus_are_free(aws):
    costs = [
        zeus_hetero.allocate(aws["cifar100"], 2048, gpus={"A10": 1, "T4": n}, wait_power=0, eta=1)
        for n in (0, 1, 2, 3)
    ]
    energies = [plan.step_energy for plan in costs]
    assert energies == sorted(energies, reverse=True)


def test_traces_can_be_paths_frames_and_traces(aws, tmp_path):
    path = tmp_path / "t4.json"
    aws["cifar100"]["T4"].save(path)
    mixed = {"A10": aws["cifar100"]["A10"].to_frame(), "T4": str(path)}
    assert zeus_hetero.allocate(mixed, 4096).cost == pytest.approx(
        zeus_hetero.allocate(aws["cifar100"], 4096).cost, rel=1e-9
    )


def test_simulated_measurements_mark_the_plan():
    measured = frame([0.1, 0.2], [5, 9])
    simulated = load_trace(measured.assign(simulated=True))
    plan = zeus_hetero.allocate({"A": measured, "B": simulated}, 16)
    assert plan.simulated
    assert "SIMULATED" in str(plan)
    assert not zeus_hetero.allocate({"A": measured}, 16).simulated


def test_all_times_scaled_scale_the_cost(aws):
    plan = zeus_hetero.allocate(aws["cifar100"], 4096)
    scaled = {
        name: dataclasses.replace(trace, time=3 * trace.time, energy=3 * trace.energy)
        for name, trace in aws["cifar100"].items()
    }
    again = zeus_hetero.allocate(scaled, 4096)
    assert again.cost == pytest.approx(3 * plan.cost, rel=1e-9)
    assert split(again) == split(plan)


ONE = frame([0.1, 0.2], [5, 9])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "magic"}, r"method is 'magic'; expected one of optimal, brute_force, heur"),
        ({"objective": "joy"}, r"objective is 'joy'; expected one of synchronous, independent"),
        ({"model": "oracle"}, r"model is 'oracle'; expected one of .*interpolated, quadratic"),
        ({"eta": 1.5}, r"eta is 1.5; expected a number between 0 and 1"),
        ({"eta": -0.1}, r"eta is -0.1"),
        ({"eta": math.nan}, r"eta is nan"),
        ({"eta": "0.5"}, r"eta is '0.5'"),
        ({"gpus": ["A", "X"]}, r"no trace for GPU 'X'; expected one of A, B"),
        ({"gpus": {"A": -1}}, r"gpus\['A'\] is -1; expected a whole number"),
        ({"gpus": {"A": 0}}, r"gpus is empty"),
        ({"gpus": "A"}, r"gpus is 'A'; expected a list"),
        ({"wait_power": {"X": 3}}, r"wait_power names GPU 'X'; expected one of A, B"),
        ({"wait_power": -3}, r"wait_power is -3; expected a number of at least 0 W"),
        ({"wait_power": {"A": "hot"}}, r"wait_power\['A'\] is 'hot'"),
        ({"sync_time": -1}, r"sync_time is -1; expected a number of at least 0 s"),
        ({"granularity": 0}, r"granularity is 0; expected a positive whole number"),
        ({"granularity": 99}, r"granularity is 99; expected at most the global batch size 16"),
        ({"max_slowdown": 0.9}, r"max_slowdown is 0.9; expected a number of at least 1"),
        ({"max_slowdown": math.nan}, r"max_slowdown is nan"),
        ({"max_batch_size": 0}, r"max_batch_size is 0; expected a positive whole number"),
        ({"max_slowdown": 1.1, "objective": "independent"}, r"objective is 'independent'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(AllocationError, match=message):
        zeus_hetero.allocate({"A": ONE, "B": ONE}, 16, **arguments)


@pytest.mark.parametrize("batch", [0, -4, 2.5, True, "8", None, math.nan])
def test_bad_global_batch_size_is_named(batch):
    with pytest.raises(AllocationError, match=r"global_batch_size is .*positive whole number"):
        zeus_hetero.allocate({"A": ONE}, batch)


def test_numpy_integers_are_integers():
    assert zeus_hetero.allocate({"A": ONE}, np.int64(16)).global_batch_size == 16


def test_no_traces():
    with pytest.raises(AllocationError, match=r"traces is \{\}"):
        zeus_hetero.allocate({}, 16)


def test_a_batch_too_small_for_gpus_that_must_get_work():
    with pytest.raises(InfeasibleError, match="global_batch_size is 1, but 2 GPUs must") as caught:
        zeus_hetero.allocate({"A": ONE, "B": ONE}, 1, objective="independent")
    assert caught.value.nearest == 2
    assert split(zeus_hetero.allocate({"A": ONE, "B": ONE}, 1))[0] in ((1, 0), (0, 1))


def test_traces_of_different_workloads_are_refused():
    one = ONE.assign(dataset="cifar100")
    other = ONE.assign(dataset="imagenet")
    with pytest.raises(TraceError, match=r"different workloads .*A: cifar100.*B: imagenet"):
        zeus_hetero.allocate({"A": one, "B": other}, 16)


def test_a_trace_that_names_only_its_data_set_goes_with_any_network():
    known = ONE.assign(dataset="cifar100", arch="resnet18")
    vague = ONE.assign(dataset="cifar100")
    assert zeus_hetero.allocate({"A": vague, "B": known}, 16)
    with pytest.raises(TraceError, match="different workloads"):
        zeus_hetero.allocate({"A": known, "B": known.assign(arch="resnet50")}, 16)


def test_relative_and_absolute_traces_do_not_mix():
    relative = dataclasses.replace(load_trace(ONE), relative=True)
    with pytest.raises(TraceError, match=r"B: in relative units.*dataset_size"):
        zeus_hetero.allocate({"A": ONE, "B": relative}, 16)
    assert zeus_hetero.allocate({"B": relative}, 16).relative


def test_the_quadratic_model_needs_three_batch_sizes():
    with pytest.raises(TraceError, match="at least 3 batch sizes"):
        zeus_hetero.allocate({"A": ONE}, 16, model="quadratic")


def test_a_hole_in_the_grid_is_told_and_allowed():
    holed = frame([0.1, 0.2, 0.15, 0.3], [5, 9, 4, 8], limits=(150, 100)).drop(index=1)
    with pytest.warns(TraceWarning, match="150 W was not measured at batch sizes 16"):
        plan = zeus_hetero.allocate({"A": holed}, 16)
    assert plan.gap == 0


def test_intervals_hold_the_prediction_and_widen_with_confidence(aws):
    plain = zeus_hetero.allocate(aws["cifar100"], 4096)
    assert plain.time_interval is None
    narrow = zeus_hetero.allocate(aws["cifar100"], 4096, confidence=0.5)
    wide = zeus_hetero.allocate(aws["cifar100"], 4096, confidence=0.95)
    assert split(narrow) == split(wide) == split(plain)
    assert wide.cost == plain.cost
    assert wide.gap == 0
    for name, figure in (
        ("time_interval", plain.step_time),
        ("energy_interval", plain.step_energy),
    ):
        low, high = getattr(wide, name)
        assert low < figure < high
        assert low < getattr(narrow, name)[0] < getattr(narrow, name)[1] < high
    assert "95% of measured steps" in str(wide)


def test_intervals_survive_saving(aws, tmp_path):
    plan = zeus_hetero.allocate(aws["cifar100"], 4096, confidence=0.9)
    plan.save(tmp_path / "plan.json")
    assert zeus_hetero.Allocation.load(tmp_path / "plan.json") == plan


def test_risk_prefers_the_gpu_whose_model_is_sure():
    """Two GPUs of equal speed; the figures of one scatter."""
    batches = [8, 16, 32, 64, 128]
    sure = pd.DataFrame(
        {"batch_size": batches, "power_limit": 100, "time": [0.01 * b for b in batches],
         "energy": [0.8 * b for b in batches]}
    )  # fmt: skip
    scatter = [1.3, 0.7, 1.25, 0.8, 1.0]
    unsure = sure.assign(time=[t * s for t, s in zip(sure["time"], scatter)])
    traces = {"sure": sure, "unsure": unsure}
    bold = zeus_hetero.allocate(traces, 128, eta=0)
    careful = zeus_hetero.allocate(traces, 128, eta=0, risk=0.05)
    assert careful.workers[0].batch_size > bold.workers[0].batch_size
    # The figures are predictions all the same, and nothing is called proven of them.
    assert careful.gap == math.inf
    assert careful.time_interval is not None


def test_power_limits_between_the_profiled_ones_are_used_when_asked_for(aws):
    measured = zeus_hetero.allocate(aws["cifar100"], 4096, model="auto")
    finer = zeus_hetero.allocate(aws["cifar100"], 4096, model="auto", power_limits=25)
    assert finer.cost <= measured.cost * (1 + 1e-9)
    assert all(w.power_limit in (300, 250, 200, 150, 100, 70, 65, 60) for w in measured.workers)
    only = zeus_hetero.allocate({"T4": aws["cifar100"]["T4"]}, 512, power_limits=[68])
    assert only.workers[0].power_limit == 68
    watt_by_watt = zeus_hetero.allocate(
        {"T4": aws["cifar100"]["T4"]}, 512, power_limits="continuous", eta=1
    )
    assert 60 <= watt_by_watt.workers[0].power_limit <= 70


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"risk": 0.9}, r"risk is 0.9; expected a probability"),
        ({"risk": 0}, r"risk is 0"),
        ({"confidence": 1.5}, r"confidence is 1.5"),
        ({"power_limits": "some"}, r"power_limits is 'some'; expected 'continuous'"),
        ({"power_limits": [20]}, r"20"),
    ],
)
def test_bad_options_of_trust_are_named(aws, options, message):
    with pytest.raises(AllocationError, match=message):
        zeus_hetero.allocate({"T4": aws["cifar100"]["T4"]}, 512, **options)


def test_profiled_wait_power_counts_unless_it_is_given(aws):
    profiled = {
        name: load_trace(trace.to_frame().assign(wait_power=watts), gpu=name)
        for (name, trace), watts in zip(aws["cifar100"].items(), (60.0, 40.0))
    }
    given = zeus_hetero.allocate(aws["cifar100"], 512, wait_power={"A10": 60.0, "T4": 40.0})
    assert zeus_hetero.allocate(profiled, 512).cost == pytest.approx(given.cost)
    assert [w.wait_power for w in zeus_hetero.allocate(profiled, 512).workers] == [60.0, 40.0]
    other = zeus_hetero.allocate(profiled, 512, wait_power=5.0)
    assert {w.wait_power for w in other.workers} == {5.0}
