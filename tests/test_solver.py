"""The solvers against plain enumeration, which shares no code with them."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeus_hetero.errors import AllocationError
from zeus_hetero.solver import (
    Kind,
    Problem,
    Resource,
    enumerate_all,
    equal_shares,
    solve,
    with_shares,
    with_strongest_at_lowest_limit,
)


def allocations(problem: Problem):
    """Every allowed (shares, limits) with its cost, one by one."""
    tables = [problem.kinds[k].cost for k in problem.gpus]
    for shares in itertools.product(*(range(t.shape[1]) for t in tables)):
        if sum(shares) != problem.total:
            continue
        for limits in itertools.product(*(range(t.shape[0]) for t in tables)):
            cost = problem.cost(shares, limits)
            if math.isfinite(cost):
                yield shares, limits, cost


def cheapest(problem: Problem) -> float:
    return min((cost for _, _, cost in allocations(problem)), default=math.inf)


@st.composite
def problems(draw, max_gpus: int = 4):
    """Any tables: monotone or not, with ties, forbidden options, negative costs."""
    total = draw(st.integers(1, 6))
    counts = draw(
        st.lists(st.integers(1, 2), min_size=1, max_size=3).filter(lambda c: sum(c) <= max_gpus)
    )
    figures = draw(
        st.sampled_from([st.integers(-3, 6).map(float), st.floats(-5, 5, allow_subnormal=False)])
    )
    times = draw(st.sampled_from([st.integers(0, 4).map(float), st.floats(0, 5, width=16)]))
    kinds = []
    for count in counts:
        limits, shares = draw(st.integers(1, 3)), draw(st.integers(1, total + 1))
        size = limits * shares
        cost = np.array(draw(st.lists(figures, min_size=size, max_size=size)))
        time = np.array(draw(st.lists(times, min_size=size, max_size=size)))
        forbidden = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
        cost[np.array(forbidden) == 0] = np.inf
        kinds.append(Kind(cost.reshape(limits, shares), time.reshape(limits, shares), count))
    price = draw(st.sampled_from([0.0, 0.5, 1.0, 3.25]))
    return Problem(tuple(kinds), total, price)


@st.composite
def constrained_problems(draw):
    """With up to two scarce resources, and GPUs that cost only if they have work."""
    problem = draw(problems())
    amounts = st.integers(0, 5).map(float)
    kinds = []
    for kind in problem.kinds:
        wait_price = draw(st.sampled_from([0.0, 0.7, 2.0]))
        kinds.append(dataclasses.replace(kind, wait_price=wait_price, idle=draw(st.booleans())))
    resources = []
    for name in draw(st.sampled_from([(), ("watts",), ("watts", "places")])):
        usage = tuple(
            np.array(draw(st.lists(amounts, min_size=k.cost.size, max_size=k.cost.size))).reshape(
                k.cost.shape
            )
            for k in kinds
        )
        resources.append(Resource(name, usage, draw(st.integers(0, 14))))
    return dataclasses.replace(problem, kinds=tuple(kinds), resources=tuple(resources))


@settings(max_examples=300, deadline=None)
@given(constrained_problems())
def test_constrained_optimum_equals_enumeration(problem):
    best = cheapest(problem)
    for method in (solve, enumerate_all):
        solution = method(problem)
        if math.isinf(best):
            assert solution is None
            continue
        assert solution.cost == pytest.approx(best, rel=1e-9, abs=1e-9)
        assert solution.lower_bound == pytest.approx(solution.cost, rel=1e-9, abs=1e-9)
        assert solution.lower_bound <= solution.cost
        assert sum(solution.shares) == problem.total
        assert problem.cost(solution.shares, solution.limits) == solution.cost


@settings(max_examples=400, deadline=None)
@given(problems())
def test_optimum_equals_enumeration(problem):
    best = cheapest(problem)
    solution = solve(problem)
    if math.isinf(best):
        assert solution is None
        return
    assert solution.cost == pytest.approx(best, rel=1e-11, abs=1e-11)
    assert solution.lower_bound == solution.cost
    assert sum(solution.shares) == problem.total
    assert problem.cost(solution.shares, solution.limits) == solution.cost


@settings(max_examples=150, deadline=None)
@given(problems())
def test_brute_force_equals_enumeration(problem):
    best = cheapest(problem)
    solution = enumerate_all(problem)
    if math.isinf(best):
        assert solution is None
    else:
        assert solution.cost == pytest.approx(best, rel=1e-11, abs=1e-11)
        assert sum(solution.shares) == problem.total


@settings(max_examples=150, deadline=None)
@given(problems(), st.floats(0, 5, width=16))
def test_deadline_admits_exactly_what_is_fast_enough(problem, deadline):
    def makespan(shares, limits):
        return max(problem.kinds[k].time[p, s] for k, p, s in zip(problem.gpus, limits, shares))

    best = min((c for s, p, c in allocations(problem) if makespan(s, p) <= deadline), default=None)
    solution = solve(problem.within(deadline))
    if best is None:
        assert solution is None
    else:
        assert solution.cost == pytest.approx(best, rel=1e-11, abs=1e-11)
        assert makespan(solution.shares, solution.limits) <= deadline


@settings(max_examples=100, deadline=None)
@given(problems(), st.randoms())
def test_best_power_limits_for_given_shares(problem, random):
    every = list(allocations(problem))
    shares = random.choice(every)[0] if every else [0] * len(problem.gpus)
    if not every:
        return
    best = min(cost for s, _, cost in every if s == shares)
    solution = solve(with_shares(problem, shares))
    assert solution.shares == shares
    assert solution.cost == pytest.approx(best, rel=1e-11, abs=1e-11)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_heuristic_fixes_the_first_limit_and_searches_the_rest(problem):
    last = problem.kinds[0].cost.shape[0] - 1
    best = min((c for _, p, c in allocations(problem) if p[0] == last), default=None)
    solution = solve(with_strongest_at_lowest_limit(problem))
    if best is None:
        assert solution is None
    else:
        assert solution.cost == pytest.approx(best, rel=1e-11, abs=1e-11)
        assert solution.limits[0] == last


@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from([0.01, 0.3]))
def test_tolerated_gap_is_kept_and_its_bound_is_valid(problem, gap):
    best = cheapest(problem)
    solution = solve(problem, gap=gap)
    if math.isinf(best):
        assert solution is None
        return
    assert solution.lower_bound <= best + 1e-9
    assert best <= solution.cost + 1e-9
    assert solution.cost - solution.lower_bound <= gap * abs(solution.cost) + 1e-9


@settings(max_examples=60, deadline=None)
@given(problems(max_gpus=3), st.floats(0.5, 3))
def test_scaling_all_costs_and_times_scales_the_optimum(problem, factor):
    scaled = Problem(
        tuple(Kind(k.cost * factor, k.time * factor, k.count) for k in problem.kinds),
        problem.total,
        problem.makespan_price,
    )
    one, other = solve(problem), solve(scaled)
    assert (one is None) == (other is None)
    if one is not None:
        assert other.cost == pytest.approx(one.cost * factor, rel=1e-9, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_order_of_the_kinds_does_not_matter(problem):
    turned = Problem(problem.kinds[::-1], problem.total, problem.makespan_price)
    one, other = solve(problem), solve(turned)
    assert (one is None) == (other is None)
    if one is not None:
        assert other.cost == pytest.approx(one.cost, rel=1e-11, abs=1e-11)


def test_many_equal_gpus_are_solved_exactly_where_dynamic_programming_can():
    """Six GPUs in pairs, compared with a dynamic program over (deadline, GPU, samples)."""
    rng = np.random.default_rng(7)
    total = 60
    share = np.arange(total + 1)
    kinds = []
    for _ in range(3):
        speed = rng.uniform(0.5, 2, (3, 1))
        time = np.where(share > 0, 1 + speed * share, 0) * rng.uniform(0.97, 1.03, (3, total + 1))
        power = rng.uniform(20, 60, (3, 1)) / speed
        kinds.append(Kind(power * time, time, 2))
    problem = Problem(tuple(kinds), total, 55.0)
    best = math.inf
    for deadline in np.unique(np.concatenate([k.time.ravel() for k in kinds])):
        least = np.full(total + 1, np.inf)
        least[0] = 0
        for k in problem.gpus:
            option = problem.kinds[k].within(deadline).cost.min(axis=0)
            least = np.array([(least[: s + 1] + option[s::-1]).min() for s in range(total + 1)])
        best = min(best, least[total] + problem.makespan_price * deadline)
    solution = solve(problem)
    assert solution.cost == pytest.approx(best, rel=1e-12)
    assert solution.lower_bound == solution.cost


def test_equal_shares_spread_the_remainder():
    assert equal_shares(10, 4) == (3, 3, 2, 2)
    assert equal_shares(2, 3) == (1, 1, 0)


def test_brute_force_refuses_what_does_not_fit():
    tables = np.ones((5, 4097))
    problem = Problem((Kind(tables, tables, 8),), 4096, 1.0)
    with pytest.raises(AllocationError, match=r"brute_force .* 8 GPUs .*method='optimal'"):
        enumerate_all(problem)


def test_an_integer_program_that_old_highs_presolves_wrongly_is_solved():
    """2x + y + 2z = 5 with x = 1 and y + z = 2 has a solution."""
    none = np.inf
    one = Kind(np.array([[none, none, 0.0]]), np.zeros((1, 3)), 1, idle=False)
    two = Kind(np.array([[none, 0.0, 0.0]]), np.zeros((1, 3)), 2, wait_price=0.7, idle=False)
    solution = solve(Problem((one, two), 5, 0.0))
    assert solution.shares[0] == 2
    assert sorted(solution.shares[1:]) == [1, 2]


def test_a_search_that_runs_out_of_time_concludes_nothing(monkeypatch):
    monkeypatch.setattr("zeus_hetero.solver.constrained._TIME_LIMIT", 0.0)
    rng = np.random.default_rng(0)
    cost, time = rng.random((2, 3, 200))
    watts = np.broadcast_to(np.array([[300.0], [200.0], [100.0]]), cost.shape)
    problem = Problem((Kind(cost, time, 40),), 4001, 1.0, (Resource("watts", (watts,), 5000.0),))
    with pytest.raises(AllocationError, match="constrained search did not finish"):
        solve(problem)
