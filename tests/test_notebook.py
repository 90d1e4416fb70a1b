"""The notebook runs anew, and what it shows is what the library says."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys

import pytest
from conftest import REPOSITORY

import zeus_hetero

NAME = "zeus_heterogeneous_detailed.ipynb"
NOTEBOOK = REPOSITORY / "notebooks" / NAME


def printed(notebook) -> str:
    """All text that the cells of a notebook have printed or returned."""
    texts = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            text = output.get("text") or output.get("data", {}).get("text/plain", "")
            texts.append(text if isinstance(text, str) else "".join(text))
    return "\n".join(texts)


def check_figures(text: str, aws) -> None:
    cifar = aws["cifar100"]
    plan = zeus_hetero.allocate(cifar, 4096)
    paper = zeus_hetero.compare(cifar, 4096).loc["paper"]
    assert f"optimal cost: {plan.cost:.3f} J per step, gap 0%" in text
    assert f"the original's plan costs {paper['cost'] / plan.cost - 1:.1%} more" in text
    original = zeus_hetero.allocate(cifar, 4096, objective="independent", model="quadratic")
    ours = re.findall(r"cifar100 +brute_force +([\d.]+) +([\d.]+)", text)
    assert [round(float(figure), 2) for figure in ours[0]] == [576.40, round(10 * original.cost, 2)]
    assert re.search(r"largest difference: 0\.\d+% of time, 0\.\d+% of energy", text)


def test_the_committed_outputs_are_what_the_library_says(aws):
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    check_figures(printed(notebook), aws)


def test_the_committed_notebook_is_small_complete_and_without_errors():
    assert NOTEBOOK.stat().st_size < 600_000
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 7


@pytest.mark.slow
def test_the_notebook_runs_anew_and_shows_the_same(aws, tmp_path, monkeypatch):
    for module in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(module, reason=f"{module} is not installed; the extra 'test' has it")
    import nbformat
    from nbclient import NotebookClient

    shutil.copy(NOTEBOOK, tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("ZEUS_HETERO_NOTES", str(tmp_path / "notes"))
    # The kernel of this interpreter, whatever kernel of this name the user has installed.
    kernel = tmp_path / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(
        json.dumps({"argv": command, "display_name": "Python 3", "language": "python"})
    )
    notebook = nbformat.read(tmp_path / NAME, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": os.fspath(tmp_path)}}
    NotebookClient(notebook, timeout=120, resources=resources).execute()
    check_figures(printed(notebook), aws)
