from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

import zeus_hetero

NEED_TORCH = {
    "HeteroBatchSampler", "HeteroDataLoader", "Job", "Mean", "RunReport", "Step", "join",
    "scale_batchnorm_momentum", "sync_batchnorm", "write_report",
}  # fmt: skip
HEAVY = ("torch", "matplotlib", "scipy", "pandas", "numpy", "zeus", "tyro", "rich", "sklearn")


def modules_after(code: str) -> set[str]:
    script = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_import_is_light():
    loaded = modules_after("import zeus_hetero")
    assert not loaded & set(HEAVY)


def test_allocating_needs_neither_torch_nor_zeus_nor_pictures():
    loaded = modules_after("import zeus_hetero\nzeus_hetero.allocate")
    assert "scipy" in loaded
    assert not loaded & {"torch", "zeus", "matplotlib", "tyro"}


@pytest.mark.parametrize("name", zeus_hetero.__all__)
def test_every_public_name_is_there(name):
    if name == "HeteroPowerLimitOptimizer":
        pytest.importorskip("zeus")
    if importlib.util.find_spec("torch") is None and name in NEED_TORCH:
        with pytest.raises(ImportError, match=rf"{name} needs torch.*zeus-hetero\[train\]"):
            getattr(zeus_hetero, name)
        return
    assert getattr(zeus_hetero, name).__doc__


def test_public_names_are_sorted_and_listed():
    assert list(zeus_hetero.__all__) == sorted(zeus_hetero.__all__)
    assert set(zeus_hetero.__all__) <= set(dir(zeus_hetero))


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        zeus_hetero.nothing
