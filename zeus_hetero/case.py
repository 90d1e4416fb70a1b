"""One allocation case: which GPUs, what each share costs on them, and what to minimise.

This is the seam between names, watts and samples on one side and the arrays of `solver` on the
other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional, TypeVar, Union

import numpy as np

from zeus_hetero.allocation import Allocation, Worker
from zeus_hetero.errors import AllocationError, InfeasibleError, TraceError
from zeus_hetero.gpu_model import GPUModel, fit
from zeus_hetero.objective import Independent, Objective, Synchronous
from zeus_hetero.solver import Kind, Problem, Solution
from zeus_hetero.trace import Trace, TraceSource, load_trace

GPUs = Union[Sequence[str], Mapping[str, int], None]
PerGPU = Union[float, Mapping[str, float], None]
Method = Callable[[Problem], Optional[Solution]]

OBJECTIVES = ("synchronous", "independent")

_LARGE_TABLE = 200_000  # options; below, bounding the shares costs more than it saves

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class Case:
    """The GPUs of a job with their models, and the objective.

    Attributes:
        gpus: GPU name of each worker.
        models: model per GPU name, strongest GPU first.
        model_name: name of the kind of model.
        objective: what a global step costs.
        eta: weight of energy in it.
        global_batch_size: samples per global step.
        granularity: shares are multiples of it, but for one GPU's remainder.
        max_share: largest share per GPU name.
    """

    gpus: tuple[str, ...]
    models: Mapping[str, GPUModel]
    model_name: str
    objective: Objective
    eta: float
    global_batch_size: int
    granularity: int
    max_share: Mapping[str, int]

    @classmethod
    def of(
        cls,
        traces: Mapping[str, TraceSource],
        global_batch_size: int,
        *,
        gpus: GPUs = None,
        objective: str = "synchronous",
        model: str = "interpolated",
        eta: float = 0.5,
        wait_power: PerGPU = None,
        sync_time: float = 0.0,
        granularity: int = 1,
        max_batch_size: int | Mapping[str, int] | None = None,
    ) -> Case:
        """Check the arguments of `allocate` and fit the models."""
        batch = _whole("global_batch_size", global_batch_size)
        unit = _whole("granularity", granularity)
        _between("eta", eta, 0, 1)
        _between("sync_time", sync_time, 0, math.inf, unit="s")
        if unit > batch:
            raise AllocationError(
                f"granularity is {unit}; expected at most the global batch size {batch}."
            )
        if objective not in OBJECTIVES:
            raise AllocationError(
                f"objective is {objective!r}; expected one of {', '.join(OBJECTIVES)}."
            )
        loaded = _load(traces)
        names = _workers(gpus, loaded)
        caps = _per_gpu("max_batch_size", max_batch_size, loaded, _whole)
        goal: Objective
        if objective == "independent":
            goal = Independent(eta)
        else:
            lowest = {name: float(trace.average_power.min()) for name, trace in loaded.items()}
            waits = {**lowest, **_per_gpu("wait_power", wait_power, loaded, _watts)}
            max_power = sum(loaded[name].power_limits[0] for name in names)
            goal = Synchronous(
                energy_price=eta,
                time_price=(1 - eta) * max_power,
                wait_power=tuple(waits[name] for name in names),
                sync_time=sync_time,
            )
        case = cls(
            gpus=names,
            models={name: fit(trace, model) for name, trace in loaded.items() if name in names},
            model_name=model,
            objective=goal,
            eta=float(eta),
            global_batch_size=batch,
            granularity=unit,
            max_share={name: min(batch, caps.get(name, batch)) for name in loaded},
        )
        case._check_feasible()
        return case

    def _check_feasible(self) -> None:
        least = self.objective.min_share * len(self.gpus)
        if least > self.global_batch_size:
            raise InfeasibleError(
                f"global_batch_size is {self.global_batch_size}, but {len(self.gpus)} GPUs must "
                f"get at least {self.objective.min_share} sample each; expected at least {least}.",
                constraint="global_batch_size",
                nearest=least,
            )
        most = sum(self.max_share[name] for name in self.gpus)
        if most < self.global_batch_size:
            raise InfeasibleError(
                f"max_batch_size lets the GPUs take at most {most} samples together; the global "
                f"batch has {self.global_batch_size}. Raise max_batch_size, add GPUs, or lower "
                "the global batch size.",
                constraint="max_batch_size",
                nearest=most,
            )

    def solve(self, method: Method, deadline: float = math.inf) -> Allocation:
        """Apply a method.

        Args:
            method: takes the problem, gives a solution or None.
            deadline: s that a global step may take.

        Returns:
            The allocation, named after nothing yet.

        Raises:
            InfeasibleError: no allocation satisfies the constraints.
        """
        if self._only_time_matters():
            # Among the fastest allocations take the one of least energy: nobody wants to burn
            # power on a GPU that waits anyway.
            fastest = self._solve(method, deadline)
            energy = self.with_eta(1.0)
            frugal = energy._solve(method, fastest.step_time * (1 + 1e-12))
            plan = self.judge(
                [w.batch_size for w in frugal.workers], [w.power_limit for w in frugal.workers]
            )
            return replace(plan, lower_bound=min(fastest.lower_bound, plan.cost))
        return self._solve(method, deadline)

    def _only_time_matters(self) -> bool:
        return isinstance(self.objective, Synchronous) and self.objective.energy_price == 0

    def _solve(self, method: Method, deadline: float) -> Allocation:
        busy = deadline - getattr(self.objective, "sync_time", 0.0)
        found: list[tuple[Solution, list[tuple[int, int]]]] = []
        for problem, places in self._problems(self._worthwhile_shares(busy)):
            solution = method(problem.within(busy))
            if solution is not None:
                found.append((solution, places(solution)))
        if not found:
            raise InfeasibleError(
                "no allocation satisfies the constraints"
                + (f" within {deadline:.4g} s per step" if math.isfinite(deadline) else "")
                + f": {len(self.gpus)} GPUs, global batch {self.global_batch_size}, granularity "
                f"{self.granularity}, largest shares {dict(self.max_share)}.",
                constraint="deadline" if math.isfinite(deadline) else "max_batch_size",
            )
        best, choice = min(found, key=lambda item: item[0].cost)
        bound = min(solution.lower_bound for solution, _ in found)
        plan = self.judge([share for share, _ in choice], [limit for _, limit in choice])
        proven = bound >= best.cost
        bound = plan.cost if proven else min(bound + self.objective.constant, plan.cost)
        return replace(plan, lower_bound=float(bound))

    def with_eta(self, eta: float) -> Case:
        """The same GPUs under the synchronous objective with another weight of energy."""
        if not isinstance(self.objective, Synchronous):
            raise AllocationError(
                "objective is 'independent'; expected 'synchronous', since GPUs that do not wait "
                "for each other have no common step time."
            )
        goal = Synchronous(
            eta, (1 - eta) * self.max_power, self.objective.wait_power, self.objective.sync_time
        )
        return replace(self, objective=goal, eta=eta)

    @property
    def max_power(self) -> float:
        """Sum of the GPUs' maximum power limits, W."""
        return float(sum(self.models[name].trace.power_limits[0] for name in self.gpus))

    def _worthwhile_shares(self, deadline: float) -> Mapping[str, int]:
        """The largest share per GPU name that an optimum can hold.

        A step costs at least `makespan_price` times its slowest GPU's time, so no GPU takes
        longer than what a sensible allocation costs. For fleets this keeps the tables as short
        as the shares are, instead of as long as the global batch.

        Args:
            deadline: s that the slowest GPU may take.
        """
        size = self.global_batch_size * sum(len(m.power_limits) for m in self.models.values())
        if size < _LARGE_TABLE or any(m.extrapolates for m in self.models.values()):
            return self.max_share
        rates = {name: self._least_rates(name) for name in self.models}
        longest = deadline
        known = self._sensible_cost(rates)
        if self.objective.makespan_price > 0 and known is not None:
            # What the GPUs can at most save by computing instead of waiting.
            saved = self.global_batch_size * min(0.0, *(cost for _, cost in rates.values()))
            longest = min(longest, (known - saved) / self.objective.makespan_price)
        if not math.isfinite(longest):
            return self.max_share
        return {
            name: min(self.max_share[name], math.ceil(longest / time) + 1)
            for name, (time, _) in rates.items()
        }

    def _least_rates(self, name: str) -> tuple[float, float]:
        """The least time (s) and separable cost of a sample on a GPU, over all shares and limits.

        Up to twice the largest measured batch all shares are tried; beyond, micro-batches have
        sizes that occurred there.
        """
        model = self.models[name]
        shares = np.arange(1, 2 * model.trace.batch_sizes[-1] + 1)
        time, cost = self._tables(name, shares)
        return float((time / shares).min()), float((cost / shares).min())

    def _sensible_cost(self, rates: Mapping[str, tuple[float, float]]) -> float | None:
        """Cost of shares in proportion to speed at maximum power; None if they are not allowed."""
        speed = np.array([1 / rates[name][0] for name in self.gpus])
        shares = np.floor(self.global_batch_size * speed / speed.sum()).astype(int)
        shares[: self.global_batch_size - shares.sum()] += 1
        if self.granularity > 1 or any(
            not self.objective.min_share <= share <= self.max_share[name]
            for share, name in zip(shares, self.gpus)
        ):
            return None
        limits = [self.models[name].power_limits[0] for name in self.gpus]
        return self.judge(shares.tolist(), limits).cost - self.objective.constant

    def _problems(
        self, largest: Mapping[str, int]
    ) -> Iterator[tuple[Problem, Callable[[Solution], list[tuple[int, int]]]]]:
        """The case in units of `granularity`: one problem per kind of GPU that can take the rest.

        Args:
            largest: share per GPU name beyond which nothing needs to be tried.

        Yields:
            The problem, and what turns its solution into (share, power limit) per worker.
        """
        units, rest = divmod(self.global_batch_size, self.granularity)
        for holder in [*self.models] if rest else [None]:
            kinds, names, offsets = [], [], []
            for name in self.models:
                count = self.gpus.count(name)
                parts = [(1, rest), (count - 1, 0)] if name == holder else [(count, 0)]
                for copies, offset in parts:
                    if copies:
                        kinds.append(
                            self._kind(
                                name,
                                min(units, (largest[name] - offset) // self.granularity),
                                offset,
                                copies,
                            )
                        )
                        names.append(name)
                        offsets.append(offset)
            problem = Problem(tuple(kinds), units, self.objective.makespan_price)
            yield problem, self._places(problem, names, offsets)

    def _kind(self, name: str, units: int, offset: int, count: int) -> Kind:
        shares = self.granularity * np.arange(max(units, 0) + 1) + offset
        time, cost = self._tables(name, shares)
        cost[:, (shares < self.objective.min_share) | (shares > self.max_share[name])] = np.inf
        return Kind(cost, time, count)

    def _tables(self, name: str, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Time (s) and separable cost of shares on a GPU, shape (power limits, shares)."""
        model = self.models[name]
        time = np.array([model.time(shares, p) for p in model.power_limits])
        energy = np.array([model.energy(shares, p) for p in model.power_limits])
        limits = np.array(model.power_limits, dtype=float)[:, None]
        cost = self.objective.separable_cost(self.gpus.index(name), time, energy, limits)
        return time, cost

    def _places(
        self, problem: Problem, names: Sequence[str], offsets: Sequence[int]
    ) -> Callable[[Solution], list[tuple[int, int]]]:
        def places(solution: Solution) -> list[tuple[int, int]]:
            by_name: dict[str, list[tuple[int, int]]] = {}
            for k, units, limit in zip(problem.gpus, solution.shares, solution.limits):
                share = units * self.granularity + offsets[k]
                watts = self.models[names[k]].power_limits[limit]
                by_name.setdefault(names[k], []).append((share, watts))
            # Which of several equal GPUs gets which part is arbitrary: largest first.
            queues = {name: iter(sorted(parts, reverse=True)) for name, parts in by_name.items()}
            return [next(queues[name]) for name in self.gpus]

        return places

    def judge(self, shares: Sequence[int], limits: Sequence[int]) -> Allocation:
        """Predict what given shares and power limits cost.

        Args:
            shares: samples per worker.
            limits: W per worker.

        Returns:
            The allocation, without a method's name and a lower bound.
        """
        workers = []
        for gpu, (name, share, limit) in enumerate(zip(self.gpus, shares, limits)):
            model = self.models[name]
            workers.append(
                Worker(
                    gpu=name,
                    batch_size=int(share),
                    micro_batch_size=model.micro_batch_size(int(share), limit),
                    accumulation_steps=int(model.accumulation_steps(int(share), limit)),
                    power_limit=int(limit),
                    time=float(model.time(int(share), limit)),
                    energy=float(model.energy(int(share), limit)),
                    wait_power=self._wait_power(gpu),
                )
            )
        figures = self.objective.step(
            [w.time for w in workers], [w.energy for w in workers], [w.power_limit for w in workers]
        )
        traces = [model.trace for model in self.models.values()]
        return Allocation(
            workers=tuple(workers),
            step_time=float(figures.time),
            step_energy=float(figures.energy),
            cost=float(figures.cost),
            lower_bound=-math.inf,
            method="",
            objective=self.objective.name,
            eta=self.eta,
            global_batch_size=self.global_batch_size,
            model=self.model_name,
            max_power=self.max_power,
            sync_time=float(getattr(self.objective, "sync_time", 0.0)),
            simulated=any(trace.simulated for trace in traces),
            relative=any(trace.relative for trace in traces),
        )

    def _wait_power(self, gpu: int) -> float:
        waits = getattr(self.objective, "wait_power", None)
        return float(waits[gpu]) if waits else 0.0


def _load(traces: Mapping[str, TraceSource]) -> dict[str, Trace]:
    if not isinstance(traces, Mapping) or not traces:
        raise AllocationError(
            f"traces is {traces!r}; expected a mapping from GPU name to trace, strongest first."
        )
    loaded = {name: load_trace(source) for name, source in traces.items()}
    workloads = {name: trace.workload for name, trace in loaded.items() if trace.workload}
    if len(set(workloads.values())) > 1:
        told = ", ".join(f"{name}: {workload}" for name, workload in workloads.items())
        raise TraceError(
            f"traces of different workloads ({told}); expected the same one on every GPU. "
            "Profile the workload that you will train on each of them."
        )
    if len({trace.relative for trace in loaded.values()}) > 1:
        told = ", ".join(name for name, trace in loaded.items() if trace.relative)
        raise TraceError(
            f"{told}: in relative units, the others in seconds and joules; expected the same for "
            "all. Load the CSV with dataset_size=..."
        )
    return loaded


def _workers(gpus: GPUs, traces: Mapping[str, Trace]) -> tuple[str, ...]:
    if gpus is None:
        return tuple(traces)
    if isinstance(gpus, str):
        raise AllocationError(f"gpus is {gpus!r}; expected a list of names or a mapping to counts.")
    if isinstance(gpus, Mapping):
        for name, count in gpus.items():
            if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 0:
                raise AllocationError(f"gpus[{name!r}] is {count!r}; expected a whole number.")
        gpus = [name for name, count in gpus.items() for _ in range(count)]
    unknown = [name for name in gpus if name not in traces]
    if unknown:
        raise AllocationError(
            f"no trace for GPU {unknown[0]!r}; expected one of {', '.join(traces)}."
        )
    if not gpus:
        raise AllocationError("gpus is empty; expected at least one GPU.")
    return tuple(gpus)


def _per_gpu(
    argument: str,
    value: Any,
    traces: Mapping[str, Trace],
    check: Callable[[str, Any], _Number],
) -> dict[str, _Number]:
    """One checked figure per GPU name; GPUs that a mapping leaves out are left out."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return dict.fromkeys(traces, check(argument, value))
    for name in value:
        if name not in traces:
            raise AllocationError(
                f"{argument} names GPU {name!r}; expected one of {', '.join(traces)}."
            )
    return {name: check(f"{argument}[{name!r}]", figure) for name, figure in value.items()}


def _whole(argument: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise AllocationError(f"{argument} is {value!r}; expected a positive whole number.")
    return int(value)


def _watts(argument: str, value: Any) -> float:
    return _between(argument, value, 0, math.inf, unit="W")


def _between(argument: str, value: Any, low: float, high: float, unit: str = "") -> float:
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(
        value, bool
    )
    if not number or not math.isfinite(value) or not low <= value <= high:
        span = f"at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
        raise AllocationError(
            f"{argument} is {value!r}; expected a number {span} {unit}".rstrip() + "."
        )
    return float(value)
