"""One allocation case: which GPUs, what to minimise and what to keep to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Optional

import numpy as np

from zeus_hetero.allocation import Allocation, Worker
from zeus_hetero.arguments import whole
from zeus_hetero.constraints import Constraints, Groups
from zeus_hetero.errors import AllocationError, InfeasibleError
from zeus_hetero.formulation import Formulation, formulations
from zeus_hetero.gpu_model import GPUModel, fit
from zeus_hetero.inputs import GPUs, PerGPU, build_objective, load_traces, worker_names
from zeus_hetero.objective import Objective, Synchronous
from zeus_hetero.power_limits import PowerLimits
from zeus_hetero.solver import Problem, Solution
from zeus_hetero.trace import TraceSource

Method = Callable[[Problem], Optional[Solution]]

# A deadline computed from a step's own time must admit that step in spite of rounding.
ROUNDING = 1 + 1e-12


def _cautious(model: GPUModel, risk: float | None) -> GPUModel:
    if risk is None:
        return model
    from zeus_hetero.uncertainty import pessimistic

    return pessimistic(model, risk)


@dataclass(frozen=True)
class Case:
    """The GPUs of a job with their models, the objective and the constraints.

    Attributes:
        gpus: GPU name of each worker.
        models: model per GPU name, strongest GPU first.
        risk: probability that a measurement exceeds what the decision counts with; None to count
            with the models' predictions.
        model_name: name of the kind of model.
        objective: what a global step costs.
        eta: weight of energy in it.
        global_batch_size: samples per global step.
        granularity: shares are multiples of it, but for one GPU's remainder.
        constraints: what an allocation must keep to.
    """

    gpus: tuple[str, ...]
    models: Mapping[str, GPUModel]
    risk: float | None
    model_name: str
    objective: Objective
    eta: float
    global_batch_size: int
    granularity: int
    constraints: Constraints

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
        min_share: int | Mapping[str, int] | None = None,
        must_use: bool | str | Sequence[str] = (),
        deadline: float | None = None,
        power_budget: float | Mapping[str, float] | None = None,
        groups: Groups | None = None,
        max_gpus: int | None = None,
        electricity_price: float | None = None,
        gpu_hour_price: PerGPU = None,
        carbon_intensity: float | None = None,
        power_limits: PowerLimits = None,
        risk: float | None = None,
    ) -> Case:
        """Check the arguments of `allocate` and fit the models."""
        batch = whole("global_batch_size", global_batch_size)
        unit = whole("granularity", granularity)
        if unit > batch:
            raise AllocationError(
                f"granularity is {unit}; expected at most the global batch size {batch}."
            )
        loaded = load_traces(traces)
        workers = worker_names(gpus, list(loaded))
        case = cls(
            gpus=workers,
            models={
                name: _cautious(fit(trace, model, power_limits=power_limits), risk)
                for name, trace in loaded.items()
                if name in workers
            },
            risk=risk,
            model_name=model,
            objective=build_objective(
                workers,
                loaded,
                objective=objective,
                eta=eta,
                wait_power=wait_power,
                sync_time=sync_time,
                release_idle=max_gpus is not None,
                electricity_price=electricity_price,
                gpu_hour_price=gpu_hour_price,
                carbon_intensity=carbon_intensity,
            ),
            eta=float(eta),
            global_batch_size=batch,
            granularity=unit,
            constraints=Constraints.of(
                workers,
                loaded,
                batch,
                max_batch_size=max_batch_size,
                min_share=min_share,
                must_use=must_use,
                deadline=deadline,
                power_budget=power_budget,
                groups=groups,
                max_gpus=max_gpus,
            ),
        )
        case._check_shares()
        return case

    def _check_shares(self) -> None:
        """Refuse at once what the shares alone make impossible."""
        batch, count = self.global_batch_size, len(self.gpus)
        least = sum(max(self.objective.min_share, self.constraints.least(n)) for n in self.gpus)
        if least > batch:
            raise InfeasibleError(
                f"global_batch_size is {batch}, but {count} GPUs must get at least {least} samples "
                f"together; expected at least {least}.",
                constraint="global_batch_size",
                nearest=least,
            )
        most = sum(self.constraints.max_share[name] for name in self.gpus)
        if most < batch:
            raise InfeasibleError(
                f"max_batch_size lets the GPUs take at most {most} samples together; the global "
                f"batch has {batch}. Raise max_batch_size (to {-(-batch // count)} on every GPU, "
                "say), add GPUs, or lower the global batch size.",
                constraint="max_batch_size",
                nearest=-(-batch // count),
            )

    @property
    def max_power(self) -> float:
        """Sum of the GPUs' maximum power limits, W."""
        return float(sum(self.models[name].trace.power_limits[0] for name in self.gpus))

    def tables(
        self, name: str, shares: np.ndarray, constrained: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Time (s) and separable cost of shares on a GPU.

        Args:
            name: of the GPU.
            shares: samples.
            constrained: whether shares that are not allowed cost inf.

        Returns:
            Two arrays of shape (power limits, shares).
        """
        model = self.models[name]
        gpu = self.gpus.index(name)
        time = np.array([model.time(shares, p) for p in model.power_limits])
        energy = np.array([model.energy(shares, p) for p in model.power_limits])
        limits = np.array(model.power_limits, dtype=float)[:, None]
        cost = self.objective.separable_cost(gpu, time, energy, limits)
        if isinstance(self.objective, Synchronous) and self.objective.release_idle:
            exchange = self.objective.presence_price(gpu) * self.objective.sync_time
            cost = cost + exchange * (shares > 0)
        if constrained:
            allowed = self.constraints.allows(name, shares) & (shares >= self.objective.min_share)
            cost[:, ~allowed] = np.inf
        return time, cost

    def solve(self, method: Method) -> Allocation:
        """Apply a method.

        Args:
            method: takes the problem, gives a solution or None.

        Returns:
            The allocation, named after nothing yet.

        Raises:
            InfeasibleError: no allocation satisfies the constraints.
        """
        plan = self._best(method)
        if plan is None:
            raise self._infeasible(method)
        goal = self.objective
        if isinstance(goal, Synchronous) and goal.energy_price == 0 and not goal.release_idle:
            # Among the fastest allocations take the one of least energy: nobody wants to burn
            # power on a GPU that waits anyway.
            frugal = self.minimising_energy().within(plan.step_time * ROUNDING)._best(method)
            if frugal is not None:
                judged = self.judge(
                    [w.batch_size for w in frugal.workers], [w.power_limit for w in frugal.workers]
                )
                # As fast but for rounding, so what was proven of one is proven of the other.
                bound = judged.cost if plan.gap == 0 else min(plan.lower_bound, judged.cost)
                return replace(judged, lower_bound=bound)
        return plan

    def _best(self, method: Method) -> Allocation | None:
        busy = self.constraints.deadline - self.objective.sync_time
        found: list[tuple[Solution, Formulation]] = []
        for formulation in formulations(self, busy):
            solution = method(formulation.problem)
            if solution is not None:
                found.append((solution, formulation))
        if not found:
            return None
        best, formulation = min(found, key=lambda pair: pair[0].cost)
        bound = min(solution.lower_bound for solution, _ in found)
        plan = self.judge(*formulation.choice(best))
        proven = bound >= best.cost
        bound = plan.cost if proven else min(bound + self.objective.constant, plan.cost)
        return replace(plan, lower_bound=float(bound))

    def minimising_energy(self) -> Case:
        """The same case with the energy of a step as its cost."""
        return self._with_prices(1.0, 0.0)

    def minimising_time(self) -> Case:
        """The same case with the time of a step as its cost."""
        return self._with_prices(0.0, 1.0 / len(self.gpus))

    def _with_prices(self, energy_price: float, time_price: float) -> Case:
        if not isinstance(self.objective, Synchronous):
            raise AllocationError(
                "objective is 'independent'; expected 'synchronous', since GPUs that do not wait "
                "for each other have no common step time."
            )
        goal = replace(
            self.objective,
            energy_price=energy_price,
            time_prices=(time_price,) * len(self.gpus),
            # Time is that of the step, however many GPUs are in the job.
            release_idle=self.objective.release_idle and energy_price > 0,
        )
        return replace(self, objective=goal)

    def keeps(self, plan: Allocation) -> bool:
        """Whether an allocation for these GPUs keeps to all constraints."""
        rules = self.constraints
        shares = [worker.batch_size for worker in plan.workers]
        watts = [worker.power_limit for worker in plan.workers]
        return (
            all(
                share >= self.objective.min_share and bool(rules.allows(name, np.array([share]))[0])
                for name, share in zip(self.gpus, shares)
            )
            and plan.step_time <= rules.deadline * ROUNDING
            and all(sum(watts[i] for i in b.members) <= b.watts for b in rules.budgets)
            and (rules.max_gpus is None or sum(s > 0 for s in shares) <= rules.max_gpus)
            and sum(share % self.granularity > 0 for share in shares) <= 1
        )

    def within(self, deadline: float) -> Case:
        """The same case with a deadline in s for a step, unless it has an earlier one."""
        tighter = min(self.constraints.deadline, deadline)
        return replace(self, constraints=replace(self.constraints, deadline=tighter))

    def judge(self, shares: Sequence[int], limits: Sequence[int]) -> Allocation:
        """Predict what given shares and power limits cost.

        Args:
            shares: samples per worker.
            limits: W per worker.

        Returns:
            The allocation, without a method's name and a lower bound.
        """
        workers = [
            self._worker(gpu, int(share), int(limit))
            for gpu, (share, limit) in enumerate(zip(shares, limits))
        ]
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
            sync_time=self.objective.sync_time,
            cost_unit=self.objective.unit,
            simulated=any(trace.simulated for trace in traces),
            relative=any(trace.relative for trace in traces),
        )

    def predicted(self, plan: Allocation, confidence: float = 0.9) -> Allocation:
        """A plan with the models' own predictions, and how sure they are.

        Args:
            plan: the decision; under a `risk` its figures are cautious ones.
            confidence: probability that each interval shall hold.

        Returns:
            The same shares and power limits with predicted figures and intervals. Where caution
            entered the decision nothing is proven of these figures.
        """
        from zeus_hetero.uncertainty import Pessimistic, step_intervals

        models = {n: m.model if isinstance(m, Pessimistic) else m for n, m in self.models.items()}
        shares = [w.batch_size for w in plan.workers]
        limits = [w.power_limit for w in plan.workers]
        judged = plan
        if self.risk is not None:
            judged = replace(self, models=models, risk=None).judge(shares, limits)
            judged = replace(judged, method=plan.method, solve_time=plan.solve_time)
        time, energy = step_intervals(
            [models[name] for name in self.gpus],
            shares,
            limits,
            wait_power=[w.wait_power for w in plan.workers],
            sync_time=self.objective.sync_time,
            confidence=confidence,
        )
        return replace(judged, time_interval=time, energy_interval=energy, confidence=confidence)

    def _worker(self, gpu: int, share: int, limit: int) -> Worker:
        model = self.models[self.gpus[gpu]]
        goal = self.objective
        waits = isinstance(goal, Synchronous) and (share > 0 or not goal.release_idle)
        return Worker(
            gpu=self.gpus[gpu],
            batch_size=share,
            micro_batch_size=model.micro_batch_size(share, limit),
            accumulation_steps=int(model.accumulation_steps(share, limit)),
            power_limit=limit,
            time=float(model.time(share, limit)),
            energy=float(model.energy(share, limit)),
            wait_power=goal.wait_power[gpu] if isinstance(goal, Synchronous) and waits else 0.0,
        )

    def _infeasible(self, method: Method) -> InfeasibleError:
        """Say which constraint cannot hold, by leaving out one after the other."""
        constraints = self.constraints
        told = f"{len(self.gpus)} GPUs, global batch {self.global_batch_size}" + (
            f", granularity {self.granularity}" if self.granularity > 1 else ""
        )
        if math.isfinite(constraints.deadline):
            free = replace(self, constraints=replace(constraints, deadline=math.inf))
            fastest = None
            if isinstance(self.objective, Synchronous):
                fastest = free.minimising_time()._best(method)
            if fastest is not None:
                return InfeasibleError(
                    f"deadline of {constraints.deadline:.6g} s per step cannot be met: the fastest "
                    f"allocation takes {fastest.step_time:.6g} s ({told}).",
                    constraint="deadline",
                    nearest=fastest.step_time,
                )
        for number, budget in enumerate(constraints.budgets):
            others = constraints.budgets[:number] + constraints.budgets[number + 1 :]
            free = replace(self, constraints=replace(constraints, budgets=others))
            if free._best(method) is not None:
                watts = self._least_usage(budget.name, method)
                return InfeasibleError(
                    f"power_budget of {budget.watts:g} W for {budget.name!r} cannot hold: at least "
                    f"{watts:g} W are needed ({told}).",
                    constraint="power_budget",
                    nearest=watts,
                )
        if constraints.max_gpus is not None:
            free = replace(self, constraints=replace(constraints, max_gpus=None))
            if free._best(method) is not None:
                places = self._least_usage("max_gpus", method)
                return InfeasibleError(
                    f"max_gpus of {constraints.max_gpus} cannot hold: at least {places:g} GPUs are "
                    f"needed ({told}).",
                    constraint="max_gpus",
                    nearest=places,
                )
        return InfeasibleError(
            f"no allocation keeps to all constraints at once ({told}; shares at most "
            f"{dict(constraints.max_share)}, at least {dict(constraints.min_share)} where there is "
            "work). Relax one of them.",
            constraint="combination",
        )

    def _least_usage(self, resource: str, method: Method) -> float:
        """The least of a resource that suffices while all other constraints hold."""
        least = math.inf
        for formulation in formulations(self, self.constraints.deadline - self.objective.sync_time):
            problem = formulation.problem
            wanted = next(r for r in problem.resources if r.name == resource)
            kinds = tuple(
                replace(kind, cost=np.where(np.isfinite(kind.cost), usage, np.inf), wait_price=0.0)
                for kind, usage in zip(problem.kinds, wanted.usage)
            )
            rest = tuple(r for r in problem.resources if r is not wanted)
            solution = method(replace(problem, kinds=kinds, resources=rest, makespan_price=0.0))
            if solution is not None:
                least = min(least, solution.cost)
        return least
