from __future__ import annotations

import signal
from pathlib import Path

import pytest

from zeus_hetero.trace import load_trace

REPOSITORY = Path(__file__).parent.parent
SHARED = REPOSITORY.parent / "shared" / "data"


@pytest.fixture(scope="session")
def aws():
    """The bundled traces per workload: strongest GPU first."""

    def load(workload: str):
        stem = {"cifar100": "cifar", "imagenet": "imagenet"}[workload]
        folder = REPOSITORY / "trace_aws"
        return {gpu: load_trace(folder / f"{stem}_{gpu.lower()}.json") for gpu in ("A10", "T4")}

    return {workload: load(workload) for workload in ("cifar100", "imagenet")}


@pytest.fixture(scope="session")
def shared_data():
    """The folder of raw measurements, which is not part of the project."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is absent: raw measurements are not shipped with the project")
    return SHARED


def pytest_configure():
    # A shell script's background job (`make test &`) ignores Ctrl-C, and so would what tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
