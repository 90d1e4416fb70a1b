"""What a report is about, and what is computed for it."""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from zeus_hetero.errors import AllocationError, PlanError
from zeus_hetero.gpu_model import GPUModel, fit

if TYPE_CHECKING:
    import pandas as pd

    from zeus_hetero.allocation import Allocation
    from zeus_hetero.trace import Trace

ETAS = tuple(round(step / 20, 2) for step in range(21))
_PACKAGES = ("zeus-hetero", "zeus", "numpy", "pandas", "scipy", "plotly")


@dataclass(frozen=True)
class Subject:
    """A plan, and the traces that it was made from, as far as they are given.

    Attributes:
        plan: the allocation.
        traces: by GPU name; empty if only the plan is known.
        options: further arguments of `allocate` that the plan was made with.
        inputs: what was read, for the record: file or flag, and its role.

    Raises:
        PlanError: a GPU of the plan has no trace although others have.
    """

    plan: Allocation
    traces: Mapping[str, Trace] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        missing = [name for name in self.counts if self.traces and name not in self.traces]
        if missing:
            raise PlanError(
                f"the plan is for {', '.join(self.counts)}, but there is no trace of "
                f"{', '.join(missing)}; give one as {missing[0]}=TRACE, or none at all."
            )

    @property
    def counts(self) -> dict[str, int]:
        """Number of workers per GPU name, in the plan's order."""
        return dict(Counter(worker.gpu for worker in self.plan.workers))

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `allocate` with which methods are compared."""
        plan = self.plan
        waits = {worker.gpu: worker.wait_power for worker in plan.workers}
        fixed = {"gpus": self.counts, "eta": plan.eta, "sync_time": plan.sync_time}
        if plan.objective == "synchronous":
            fixed["wait_power"] = waits
        return {**fixed, "model": plan.model, "objective": plan.objective, **self.options}

    @cached_property
    def models(self) -> dict[str, GPUModel]:
        """The fitted model of each trace."""
        return {name: fit(self.traces[name], self.plan.model) for name in self.counts}

    @cached_property
    def methods(self) -> tuple[dict[str, Allocation], dict[str, str]]:
        """The methods' allocations, and why some could not run."""
        from zeus_hetero.allocator import plans_by_method

        chosen = {name: self.traces[name] for name in self.counts}
        size = self.plan.global_batch_size
        return plans_by_method(chosen, size, **self.arguments)

    @cached_property
    def front(self) -> pd.DataFrame:
        """The Pareto front of the case."""
        from zeus_hetero.pareto import pareto_front

        options = {key: value for key, value in self.arguments.items() if key != "eta"}
        chosen = {name: self.traces[name] for name in self.counts}
        return pareto_front(chosen, self.plan.global_batch_size, **options)

    @cached_property
    def by_eta(self) -> list[Allocation]:
        """The optimum for each of `ETAS`."""
        from zeus_hetero.allocator import allocate

        chosen = {name: self.traces[name] for name in self.counts}
        size = self.plan.global_batch_size
        return [allocate(chosen, size, **{**self.arguments, "eta": eta}) for eta in ETAS]

    @cached_property
    def explanation(self) -> str:
        """Why the plan looks as it does; the reason if that cannot be said."""
        from zeus_hetero.explanation import explain

        chosen = {name: self.traces[name] for name in self.counts}
        try:
            return str(explain(chosen, self.plan, **self.arguments))
        except (AllocationError, PlanError) as error:
            return f"not explained: {error}"

    def versions(self) -> list[tuple[str, str]]:
        """Versions of what computed the report, and when."""
        found = [("Python", platform.python_version())]
        for package in _PACKAGES:
            try:
                found.append((package, importlib.metadata.version(package)))
            except importlib.metadata.PackageNotFoundError:
                continue
        now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        return [*found, ("made", now)]


def grid(model: GPUModel) -> np.ndarray:
    """Batch sizes at which a model's curve is drawn, shape (points,)."""
    sizes = model.trace.batch_sizes
    return np.unique(np.geomspace(sizes[0], sizes[-1], 60).round().astype(int))
