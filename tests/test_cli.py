from __future__ import annotations

import subprocess
import sys
import warnings

import pandas as pd
import pytest
from conftest import REPOSITORY

from zeus_hetero import Allocation, cli

A10 = str(REPOSITORY / "trace_aws" / "cifar_a10.json")
T4 = str(REPOSITORY / "trace_aws" / "cifar_t4.json")
PAIR = ["allocate", "--gpu1", "A10", "--trace1", A10, "--gpu2", "T4", "--trace2", T4]


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # cli.run replaces the way warnings are shown, as a program may.
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)


def test_flags_of_the_original_script(tmp_path, capsys):
    assert cli.run(PAIR) == 0
    out = capsys.readouterr().out
    for expected in ("optimal", "brute force", "heuristic", "baseline", "2791 / 1305", "150 / 70"):
        assert expected in out
    table = pd.read_csv(tmp_path / "A10_T4_results.csv", index_col="method")
    assert table.loc["optimal", "step_time"] == pytest.approx(0.44138, rel=1e-4)


def test_demo_as_a_program(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "zeus_hetero", "demo"],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "proven optimal" in result.stdout
    assert result.stderr == ""
    assert (tmp_path / "A10_T4_results.csv").exists()


def test_demo_of_the_other_workload(capsys):
    assert cli.run(["demo", "--workload", "imagenet"]) == 0
    assert "2470 / 1626" in capsys.readouterr().out


def test_paper_mode_prints_the_published_costs(capsys):
    assert cli.run([*PAIR, "--paper"]) == 0
    out = capsys.readouterr().out
    assert "10 steps" in out
    assert "brute_force 576.3" in out
    assert "baseline 645.6" in out
    assert "1874 / 2222" in out


def test_any_number_of_gpus_and_a_plan(tmp_path, capsys):
    status = cli.run(
        ["allocate", "--gpu", f"A10={A10}", "--gpu", f"T4={T4}:3", "--plan", "plan.json",
         "--results", "other.csv", "--global-batch-size", "2048", "--eta", "1"]
    )  # fmt: skip
    assert status == 0
    plan = Allocation.load(tmp_path / "plan.json")
    assert [w.gpu for w in plan.workers] == ["A10", "T4", "T4", "T4"]
    assert plan.global_batch_size == 2048
    assert plan.eta == 1
    assert (tmp_path / "other.csv").exists()
    assert "left out: brute_force would have to" in capsys.readouterr().out


def test_constraints_and_figures_by_gpu(tmp_path):
    status = cli.run(
        [*PAIR, "--plan", "plan.json", "--power-budget", "all=200", "t4=65", "--group", "t4=T4",
         "--wait-power", "A10=60", "T4=40", "--max-batch-size", "4000"]
    )  # fmt: skip
    assert status == 0
    plan = Allocation.load(tmp_path / "plan.json")
    assert plan.workers[1].power_limit <= 65
    assert sum(w.power_limit for w in plan.workers) <= 200
    assert [w.wait_power for w in plan.workers] == [60, 40]


def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need the extra plot")
    from matplotlib.image import imread

    assert cli.run(["demo", "--plots", "pictures"]) == 0
    names = sorted(p.name for p in (tmp_path / "pictures").iterdir())
    assert names == ["A10_fit.png", "T4_fit.png", "methods.png", "pareto.png"]
    for name in names:
        assert imread(tmp_path / "pictures" / name)[..., :3].std() > 0.02


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["allocate"], "no GPUs given"),
        (["allocate", "--gpu1", "A10"], "--trace1 is missing"),
        (["allocate", "--trace2", T4], "--gpu2 is missing"),
        (["allocate", "--gpu", "A10"], "--gpu 'A10'; expected NAME=TRACE"),
        (["allocate", "--gpu", f"A10={A10}:0"], "expected NAME=TRACE"),
        (["allocate", "--gpu", f"A={A10}", "--gpu", f"A={A10}"], "GPU 'A' is given twice"),
        (["allocate", "--gpu", "A10=/nowhere.json"], "/nowhere.json: no such file"),
        ([*PAIR, "--eta", "2"], "eta is 2.0; expected a number between 0 and 1"),
        ([*PAIR, "--global-batch-size", "0"], "global_batch_size is 0"),
        ([*PAIR, "--model", "x"], "model is 'x'; expected one of"),
        ([*PAIR, "--objective", "x"], "objective is 'x'; expected one of"),
        ([*PAIR, "--wait-power", "hot"], "--wait-power hot; expected one figure"),
        ([*PAIR, "--wait-power", "X=3"], "wait_power names GPU 'X'"),
        ([*PAIR, "--power-budget", "100"], "power_budget of 100 W for 'all' cannot hold"),
        ([*PAIR, "--power-budget", "9", "--group", "x"], "--group 'x'; expected NAME=WORKERS"),
        ([*PAIR, "--max-slowdown", "0.5"], "max_slowdown is 0.5"),
        ([*PAIR, "--plan", "/nowhere/plan.json"], "/nowhere"),
        ([*PAIR, "--results", "/nowhere/x.csv"], "/nowhere"),
        (["demo", "--workload", "x"], "no bundled trace"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, message):
    assert cli.run(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("zeus-hetero: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_wrong_flags_end_with_status_2(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.run(["allocate", "--no-such-flag"])
    assert caught.value.code == 2
    assert "no-such-flag" in capsys.readouterr().err


def test_interrupt_ends_with_status_130(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("zeus_hetero.allocator.plans_by_method", interrupted)
    assert cli.run(["demo"]) == 130
    assert capsys.readouterr().err == "zeus-hetero: interrupted\n"


def test_warnings_are_one_line_each(tmp_path, capsys):
    trace = tmp_path / "hot.csv"
    trace.write_text("batch_size,power_limit,time,energy\n8,10,1,50\n16,10,2,60\n32,10,4,90\n")
    assert cli.run(["allocate", "--gpu", f"X={trace}", "--global-batch-size", "32"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith("zeus-hetero: warning: ") for line in lines)


def test_fit_names_outliers_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="pictures need the extra plot")
    assert cli.run(["fit", T4, "--plots", "pictures"]) == 0
    out = capsys.readouterr().out
    assert "auto model of T4" in out
    assert "left out" in out
    assert (tmp_path / "pictures" / "cifar_t4_fit.png").stat().st_size > 10_000
    assert cli.run(["fit", "/nowhere.json"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_reset_tells_what_it_did(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ZEUS_HETERO_NOTES", str(tmp_path / "notes"))
    assert cli.run(["reset"]) == 0
    assert "no run has left a power limit changed" in capsys.readouterr().out
    assert cli.run(["reset", "/nowhere"]) == 2
    assert "/nowhere: no such folder" in capsys.readouterr().err
