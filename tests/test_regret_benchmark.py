from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic import GPUS

from zeus_hetero import TraceWarning


@pytest.fixture(scope="module")
def benchmark():
    path = Path(__file__).parent.parent / "benchmarks" / "regret.py"
    spec = importlib.util.spec_from_file_location("regret_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three GPUs in one workload, in the format of Zeus's public traces."""
    folder = tmp_path_factory.mktemp("traces")
    for seed, gpu in enumerate(("usual", "strong", "weak")):
        frame = GPUS[gpu].trace(seed=seed, limits=(250, 200, 150, 100)).to_frame()
        pd.DataFrame(
            {
                "dataset": "numbers",
                "network": "net",
                "batch_size": frame.batch_size,
                "optimizer": "adam",
                "power_limit": frame.power_limit,
                "time_per_epoch": frame.time * 1e5 / frame.batch_size,
                "average_power": frame.average_power,
            }
        ).to_csv(folder / f"summary_power_{gpu}.csv", index=False)
    return folder


@pytest.fixture(scope="module")
def results(benchmark, folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    benchmark.main([str(folder), "--quick", "--out", str(out)])
    return out, pd.read_csv(out / "errors.csv"), pd.read_csv(out / "regret.csv")


def test_leaves_out_batch_sizes_and_power_limits(results):
    _, errors, _ = results
    counts = errors[errors.model == "auto"].groupby("left_out").size()
    assert counts["inner batch size"] == 3 * 6 * 4
    assert counts["largest batch size"] == 3 * 4
    assert counts["power limit"] == 3 * 2 * 8
    assert set(errors.model) == {"quadratic", "interpolated", "auto"}


def test_judges_every_pair_grid_and_method(results, benchmark):
    _, _, regret = results
    decided = regret[regret.method != "optimum"]
    assert len(decided) == 3 * 2 * 3 * len(benchmark.METHODS)
    assert set(decided.method) == set(benchmark.METHODS)
    assert decided.regret.dropna().min() >= -1e-9


def test_models_beat_what_people_do_today(results, benchmark):
    _, _, regret = results
    mean = regret.groupby("method").regret.mean()
    assert mean["auto"] < mean[benchmark.PROPORTIONAL] < mean[benchmark.EQUAL]
    assert mean["auto"] < mean[benchmark.ORIGINAL]
    assert regret[regret.method == "optimum"].saved_energy.mean() > 0


def test_draws_a_picture(results):
    out, _, _ = results
    assert (out / "regret.png").read_bytes()[:4] == b"\x89PNG"


def test_goes_up_to_all_gpus(benchmark, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TraceWarning)
        workloads = benchmark.load_workloads(folder)
        regret = benchmark.regrets(workloads, 3, 1)
    assert sorted(regret["count"].unique()) == [2, 3]
    assert "strong+usual+weak" in set(regret.gpus)


def test_even_shares_add_up(benchmark):
    assert benchmark._round_shares(np.ones(3), 256) == [86, 85, 85]


def test_folder_without_traces_is_refused(benchmark, tmp_path):
    with pytest.raises(SystemExit, match="no Zeus power traces"):
        benchmark.main([str(tmp_path)])


def test_regret_of_real_pairs_is_within_the_target(benchmark, shared_data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TraceWarning)
        workloads = benchmark.load_workloads(shared_data / "zeus_power_traces")
        few = {
            key: {gpu: traces[gpu] for gpu in ("p100", "v100")}
            for key, traces in workloads.items()
            if len(traces) == 4
        }
        regret = benchmark.regrets(few, 2, 1)
    half = regret[(regret.grid == "every second batch size") & (regret.method == "auto")].regret
    assert half.mean() <= 0.005
    assert half.max() <= 0.03
