"""The whole way: traces, plans of several methods, training in real processes, measured figures."""

from __future__ import annotations

import subprocess
import sys

import pandas as pd
import pytest

pytest.importorskip("torchvision", reason="torchvision is not installed: no examples")

from launch import ROOT, environment


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_optimal_plan_saves_what_was_predicted(tmp_path):
    command = [
        sys.executable, str(ROOT / "examples" / "compare.py"), "--steps", "4",
        "--methods", "equal_max_power", "heuristic", "optimal", "--output", "table.csv",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path / "state"), text=True,
        capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "table.csv", index_col="method")
    assert (table["time off"].abs() < 0.02).all()
    assert (table["energy off"].abs() < 0.02).all()
    best = table.loc["optimal"]
    assert best["time saved"] == pytest.approx(0.36, abs=0.01)
    assert best["energy saved"] == pytest.approx(0.27, abs=0.01)
    assert best["time saved"] > table.loc["heuristic", "time saved"]
