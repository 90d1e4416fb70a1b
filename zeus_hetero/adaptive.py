"""Adaptive profiling: measure next what the allocation depends on most, stop when it is settled.

The models of what is known so far (`surface`) say how uncertain every point of the grid is, and
how points hang together. Possible truths are drawn from them; where a truth's best decision differs
from the one we would take now, we would regret ours. The mean of that over the draws is the
expected regret. The next point is the one that makes the decision's own points, and those that
would have been better, more certain per second of GPU time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zeus_hetero.case import Case
from zeus_hetero.errors import AllocationError, TraceWarning
from zeus_hetero.gpu_model import Interpolated
from zeus_hetero.smooth_model import Smooth
from zeus_hetero.solver import solve
from zeus_hetero.trace import Trace

# Possible truths per decision. The mean of 24 is good to a fifth of itself, enough to stop by.
_DRAWS = 24
# Shares are looked at in this many parts of a global batch: finer ones cost time, not insight.
_PARTS = 128
# A global step waits for the slower of two GPUs: of an error in the time of one of them about a
# third is regretted (on the public traces).
_SHARED_ERROR = 0.3


@dataclass(frozen=True)
class ProfilingGrid:
    """What can be measured on one GPU model.

    Attributes:
        batch_sizes: samples per training step, ascending.
        power_limits: W, descending.
    """

    batch_sizes: tuple[int, ...]
    power_limits: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, values in (
            ("batch_sizes", self.batch_sizes),
            ("power_limits", self.power_limits),
        ):
            if not len(values) or min(values) < 1:
                raise AllocationError(f"{name} is {values!r}; expected positive whole numbers.")
        sizes = tuple(sorted({int(b) for b in self.batch_sizes}))
        limits = tuple(sorted({int(p) for p in self.power_limits}, reverse=True))
        object.__setattr__(self, "batch_sizes", sizes)
        object.__setattr__(self, "power_limits", limits)

    @property
    def points(self) -> tuple[tuple[int, int], ...]:
        """Every (batch size, power limit)."""
        return tuple((b, p) for b in self.batch_sizes for p in self.power_limits)


@dataclass(frozen=True)
class Point:
    """One point to measure.

    Attributes:
        gpu: name of the GPU model.
        batch_size: samples per step.
        power_limit: W.
    """

    gpu: str
    batch_size: int
    power_limit: int


@dataclass(frozen=True)
class ProfilingPlan:
    """What to measure next.

    Attributes:
        points: the next points, most useful first; empty when `done`.
        expected_regret: how much more than the best the allocation is expected to cost that would
            be chosen now, relative; inf while a GPU has too few points to say.
        done: True if the expected regret is within the target, or nothing is left to measure that
            `most_of_grid` allows.
        reason: why, in words.
        measured_part: GPU seconds of what was measured, as a part of what the whole grid is
            predicted to take; of GPUs that are not fixed.
    """

    points: tuple[Point, ...]
    expected_regret: float
    done: bool
    reason: str
    measured_part: float = 0.0


def plan_profiling(
    grids: Mapping[str, ProfilingGrid],
    known: Mapping[str, Trace | None],
    *,
    global_batch_size: int | None = None,
    target: float = 0.01,
    most_of_grid: float = 0.25,
    count: int = 1,
    eta: float = 0.5,
    fixed: Sequence[str] = (),
    seed: int = 0,
) -> ProfilingPlan:
    """Choose the next points to measure, or say that enough is known.

    Args:
        grids: what can be measured, by GPU name. With one GPU the decision is its power limit for
            every batch size, for a partner that is not known yet; with several it is their
            allocation.
        known: what was measured so far, by GPU name; None or absent for nothing.
        global_batch_size: samples that the GPUs share; by default what they hold at once. Not used
            for one GPU.
        target: expected regret to stop at, such as 0.01.
        most_of_grid: stop before more than this part of the grid's GPU seconds was spent; 1 to go
            on until the target is met. The first points are always measured.
        count: points to choose at once, for measuring in batches.
        eta: weight of energy against time, as for `allocate`.
        fixed: GPUs whose trace is complete: nothing is asked of them.
        seed: of the draws; the same arguments give the same plan.

    Returns:
        The plan.

    Raises:
        AllocationError: a GPU without a grid, or an argument that makes no sense.
    """
    _check(grids, known, target, most_of_grid, count, fixed)
    traces = {gpu: known.get(gpu) for gpu in grids}
    first = [
        Point(gpu, b, p)
        for gpu, grid in grids.items()
        if gpu not in fixed
        for b, p in _first_points(grid)
        if not _has(traces[gpu], b, p)
    ]
    if first:
        return ProfilingPlan(tuple(first), float("inf"), False, "the first points are missing")
    beliefs = {gpu: _Belief(grid, traces[gpu]) for gpu, grid in grids.items()}
    rng = np.random.default_rng(seed)
    if len(grids) == 1:
        regret = _regret_alone(next(iter(beliefs.values())), eta, rng)
    else:
        regret = _regret_together(beliefs, global_batch_size, eta, rng)
    open_ones = {gpu: belief for gpu, belief in beliefs.items() if gpu not in fixed}
    total = sum(float(belief.seconds.sum()) for belief in open_ones.values())
    spent = sum(float(belief.trace.time.sum()) for belief in open_ones.values())
    part = spent / total if total else 1.0
    if regret <= target:
        reason = f"expected regret {regret:.2%} is within the target {target:.2%}"
        return ProfilingPlan((), regret, True, reason, part)
    budget = most_of_grid * total - spent if most_of_grid < 1 else float("inf")
    points = tuple(_most_useful(open_ones, count, budget))
    if points:
        reason = f"expected regret {regret:.2%}, target {target:.2%}"
        return ProfilingPlan(points, regret, False, reason, part)
    reason = (
        f"expected regret {regret:.2%} is above the target {target:.2%}, but nothing more fits in "
        f"{most_of_grid:.0%} of the grid's GPU seconds"
        if any(len(belief.unmeasured()) for belief in open_ones.values())
        else "the whole grid was measured"
    )
    return ProfilingPlan((), regret, True, reason, part)


def profile_adaptively(
    grids: Mapping[str, ProfilingGrid],
    measure: Callable[[Point], Trace],
    *,
    known: Mapping[str, Trace | None] | None = None,
    most_points: int | None = None,
    **options: object,
) -> Iterator[tuple[ProfilingPlan, dict[str, Trace]]]:
    """Measure point after point until the expected regret is within the target.

    Args:
        grids: as for `plan_profiling`.
        measure: measures one point and returns its trace of one record.
        known: what was measured before, by GPU name.
        most_points: stop after so many measurements.
        **options: of `plan_profiling`.

    Yields:
        Each plan, after its points were measured, with the traces so far; the last plan is done,
        or `most_points` were measured.
    """
    traces = {gpu: trace for gpu, trace in (known or {}).items() if trace is not None}
    measured = 0
    while True:
        plan = plan_profiling(grids, traces, **options)  # type: ignore[arg-type]
        for point in plan.points:
            if most_points is not None and measured >= most_points:
                break
            record = measure(point)
            before = traces.get(point.gpu)
            traces[point.gpu] = record if before is None else join(before, record)
            measured += 1
        yield plan, dict(traces)
        if plan.done or (most_points is not None and measured >= most_points):
            return


def join(left: Trace, right: Trace) -> Trace:
    """One trace of the records of two, of the same GPU and workload."""
    limits = np.concatenate([left.power_limit, right.power_limit])
    order = np.lexsort((-limits, np.concatenate([left.batch_size, right.batch_size])))

    def column(name: str) -> np.ndarray:
        values = np.concatenate([getattr(left, name), getattr(right, name)])[order]
        values.setflags(write=False)
        return np.asarray(values)

    extra = [*left.extra, *right.extra]
    return replace(
        left,
        batch_size=column("batch_size"),
        power_limit=column("power_limit"),
        time=column("time"),
        energy=column("energy"),
        steps=column("steps"),
        extra=tuple(extra[i] for i in order) if len(extra) == len(order) else (),
    )


class _Belief:
    """What is known about one GPU: mean and covariance over its grid, and what matters of it."""

    def __init__(self, grid: ProfilingGrid, trace: Trace | None) -> None:
        if trace is None:
            raise AllocationError("a fixed GPU has no trace; give its trace in `known`.")
        self.grid = grid
        self.trace = trace
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TraceWarning)
            inside = [
                p for p in grid.power_limits if trace.power_limits[-1] <= p <= trace.power_limits[0]
            ]
            self.model = Smooth(trace, power_limits=inside, validate=False)
        self.points = grid.points
        at = np.log(np.array(self.points, dtype=float))
        surfaces = self.model.surfaces
        self.mean = {figure: surface.mean(at) for figure, surface in surfaces.items()}
        self.covariance = {figure: s.covariance(at) for figure, s in surfaces.items()}
        self.noise = {figure: s.law.noise(at) for figure, s in surfaces.items()}
        # Predicted s per step of every point: what it costs to measure, in equal windows.
        self.seconds = np.exp(self.mean["time"])
        self.matters = np.zeros(len(self.points))
        self.index = {point: i for i, point in enumerate(self.points)}

    def draws(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Possible times (s) and average powers (W), shape (draws, points)."""
        figures = []
        for figure in ("time", "power"):
            sample = rng.multivariate_normal(
                self.mean[figure], self.covariance[figure], size=_DRAWS, method="eigh"
            )
            figures.append(np.exp(sample))
        return figures[0], figures[1]

    def note(self, share: int, power_limit: int, weight: float) -> None:
        """Say that a decision for this share and limit matters."""
        if not share:
            return
        micro = self.model.micro_batch_size(share, power_limit)
        sizes = np.array(self.grid.batch_sizes)
        above = min(int(np.searchsorted(sizes, micro)), len(sizes) - 1)
        for size in {int(sizes[above]), int(sizes[max(above - 1, 0)])}:
            self.matters[self.index[(size, power_limit)]] += weight

    def unmeasured(self) -> np.ndarray:
        """Indices of grid points that were not measured."""
        return np.array(
            [i for i, (b, p) in enumerate(self.points) if not _has(self.trace, b, p)], dtype=int
        )

    def gain(self, candidates: np.ndarray) -> np.ndarray:
        """By how much measuring a point would reduce what matters, per second."""
        total = np.zeros(len(candidates))
        for figure, covariance in self.covariance.items():
            columns = covariance[:, candidates]
            variance = covariance[candidates, candidates] + self.noise[figure][candidates] ** 2
            total += self.matters @ columns**2 / variance
        return np.asarray(total / self.seconds[candidates])

    def condition(self, point: int) -> None:
        """Take a point as measured, for choosing the one after it."""
        for figure, covariance in self.covariance.items():
            column = covariance[:, point]
            variance = column[point] + self.noise[figure][point] ** 2
            self.covariance[figure] = covariance - np.outer(column, column) / variance


def _first_points(grid: ProfilingGrid) -> list[tuple[int, int]]:
    """What to begin with: the range of batches at full power, and what low limits do at work."""
    sizes, limits = grid.batch_sizes, grid.power_limits
    # Half-way in the list computing outweighs overhead, and costs far less than the largest.
    half, most = len(sizes) // 2, len(sizes) - 1
    working = sizes[(half + most) // 2]
    points = [
        (sizes[0], limits[0]),
        (sizes[half], limits[0]),
        (sizes[most], limits[0]),
        (working, limits[len(limits) // 2]),
        (working, limits[-1]),
    ]
    return list(dict.fromkeys(points))


def _regret_alone(belief: _Belief, eta: float, rng: np.random.Generator) -> float:
    """Expected regret of choosing each batch size's power limit now, averaged over batch sizes."""
    shape = (-1, len(belief.grid.batch_sizes), len(belief.grid.power_limits))
    price = (1 - eta) * belief.grid.power_limits[0]
    times, powers = (figure.reshape(shape) for figure in belief.draws(rng))
    costs = times * (eta * powers + price)
    mean = np.exp(belief.mean["time"]).reshape(shape[1:])
    power = np.exp(belief.mean["power"]).reshape(shape[1:])
    chosen = np.argmin(mean * (eta * power + price), axis=1)
    sizes = np.arange(shape[1])
    wrong = costs[:, sizes, chosen] / costs.min(axis=2) - 1
    late = np.abs(np.log(times[:, sizes, chosen] / mean[sizes, chosen]))
    regret = wrong + _SHARED_ERROR * late
    matters = belief.matters.reshape(shape[1:])
    for b in sizes:
        matters[b, chosen[b]] += float(regret[:, b].mean())
        np.add.at(matters[b], np.argmin(costs[:, b], axis=1), wrong[:, b] / len(wrong))
    return float(regret.mean())


def _regret_together(
    beliefs: Mapping[str, _Belief], batch: int | None, eta: float, rng: np.random.Generator
) -> float:
    """Expected regret of the allocation that would be chosen now."""
    batch = batch or sum(belief.grid.batch_sizes[-1] for belief in beliefs.values())
    traces = {gpu: belief.trace for gpu, belief in beliefs.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TraceWarning)
        case = Case.of(traces, batch, eta=eta, granularity=max(1, batch // _PARTS))
        now = replace(case, models={gpu: b.model for gpu, b in beliefs.items()})
        plan = now.solve(solve)
        decision = [w.batch_size for w in plan.workers], [w.power_limit for w in plan.workers]
        draws = {gpu: belief.draws(rng) for gpu, belief in beliefs.items()}
        regrets = []
        for k in range(_DRAWS):
            models = {
                gpu: Interpolated(_as_trace(belief, draws[gpu][0][k], draws[gpu][1][k]))
                for gpu, belief in beliefs.items()
            }
            truth = replace(case, models=models)
            best = truth.solve(solve)
            regrets.append(max(truth.judge(*decision).cost / best.cost - 1, 0.0))
            for worker in (*plan.workers, *best.workers):
                beliefs[worker.gpu].note(worker.batch_size, worker.power_limit, regrets[-1])
    return float(np.mean(regrets))


def _as_trace(belief: _Belief, time: np.ndarray, power: np.ndarray) -> Trace:
    sizes, limits = np.array(belief.points).T
    return replace(
        belief.trace,
        batch_size=sizes,
        power_limit=limits,
        time=time,
        energy=time * power,
        steps=np.ones(len(time), dtype=np.int64),
        extra=(),
    )


def _most_useful(beliefs: Mapping[str, _Belief], count: int, budget: float) -> Iterator[Point]:
    """The most useful points of all GPUs that a budget in s per step allows, one after another."""
    left = {gpu: belief.unmeasured() for gpu, belief in beliefs.items()}
    for _ in range(count):
        best: tuple[float, str, int] | None = None
        for gpu, belief in beliefs.items():
            left[gpu] = left[gpu][belief.seconds[left[gpu]] <= budget * (1 + 1e-9)]
            if len(left[gpu]):
                gains = belief.gain(left[gpu])
                i = int(np.argmax(gains))
                if best is None or gains[i] > best[0]:
                    best = (float(gains[i]), gpu, int(left[gpu][i]))
        if best is None:
            return
        _, gpu, index = best
        yield Point(gpu, *beliefs[gpu].points[index])
        beliefs[gpu].condition(index)
        budget -= float(beliefs[gpu].seconds[index])
        left[gpu] = left[gpu][left[gpu] != index]


def _has(trace: Trace | None, batch_size: int, power_limit: int) -> bool:
    return trace is not None and bool(
        np.any((trace.batch_size == batch_size) & (trace.power_limit == power_limit))
    )


def _check(
    grids: Mapping[str, ProfilingGrid],
    known: Mapping[str, Trace | None],
    target: float,
    most_of_grid: float,
    count: int,
    fixed: Sequence[str],
) -> None:
    if not grids:
        raise AllocationError("grids is empty; expected what can be measured, by GPU name.")
    for gpu in [*known, *fixed]:
        if gpu not in grids:
            raise AllocationError(f"GPU {gpu!r} has no grid; expected one of {', '.join(grids)}.")
    for gpu in fixed:
        if known.get(gpu) is None:
            raise AllocationError(f"GPU {gpu!r} is fixed but has no trace; give it in `known`.")
    if not 0 < target < 1:
        raise AllocationError(f"target is {target!r}; expected a regret such as 0.01.")
    if not 0 < most_of_grid <= 1:
        raise AllocationError(f"most_of_grid is {most_of_grid!r}; expected a part such as 0.25.")
    if count < 1:
        raise AllocationError(f"count is {count!r}; expected at least 1 point.")
