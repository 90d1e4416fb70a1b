"""Relaxation and exact core when resources are scarce, by linear and integer programs of HiGHS.

A watt in a budget, or a place among at most so many GPUs, gets a price as a unit of the total
does; with these prices in the options' costs the problem is one without resources. The best prices
are the duals of a linear program over all options, found by generating its columns: few options
are ever needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import LinearConstraint, linprog, milp
from scipy.sparse import csr_matrix, vstack

from zeus_hetero.errors import AllocationError
from zeus_hetero.solver.core import CoreSolution
from zeus_hetero.solver.options import Options
from zeus_hetero.solver.relaxation import Relaxation

_ROUNDS = 200
_TIME_LIMIT = 60.0  # s for one integer program; most take milliseconds
_OUT_OF_TIME = 1  # scipy's status of a program that was stopped
_PROBE = 256  # options per kind in a first, narrow integer program


class Pricing:
    """Finds prices for one deadline after another; columns found once serve again.

    Args:
        capacities: of each resource.
        total: units to share out.
    """

    def __init__(self, capacities: np.ndarray, total: int) -> None:
        self._capacities = capacities
        self._total = total
        self._pool: dict[int, set[int]] = {}
        self._used = np.zeros(0, dtype=bool)

    def relax(self, options: Sequence[Options]) -> Relaxation | None:
        """Solve the linear program over options whose cost includes waiting.

        Returns:
            Its prices; None if even shares of options cannot satisfy total and capacities.
        """
        if any(len(o) == 0 for o in options):
            return None
        chosen = []
        for k, option in enumerate(options):
            pool = self._pool.setdefault(k, set())
            extremes = (option.share.argmin(), option.share.argmax(), option.cost.argmin())
            pool.update(int(row) for row in extremes)
            chosen.append(sorted(row for row in pool if row < len(option)))
        scale = 1 + max(float(np.abs(o.cost).max()) for o in options)
        for _ in range(_ROUNDS):
            price, penalties, worth, violated = self._program(options, chosen, 1e4 * scale)
            added = False
            for k, option in enumerate(options):
                reduced = option.cost + penalties @ option.usage - price * option.share
                row = int(reduced.argmin())
                if reduced[row] < worth[k] - 1e-9 * scale and row not in chosen[k]:
                    chosen[k].append(row)
                    self._pool[k].add(row)
                    added = True
            if not added:
                break
        if violated:
            return None
        value = (
            price * self._total
            - float(penalties @ self._capacities)
            + sum(
                o.count * float((o.cost + penalties @ o.usage - price * o.share).min())
                for o in options
            )
        )
        support = tuple(tuple(rows) for rows in self._support(chosen))
        return Relaxation(price, value, penalties=penalties, support=support)

    def _support(self, chosen: Sequence[Sequence[int]]) -> list[list[int]]:
        """Per kind, the columns that the last program used."""
        used = iter(self._used)
        return [[row for row in rows if next(used)] for rows in chosen]

    def _program(
        self, options: Sequence[Options], chosen: Sequence[Sequence[int]], penalty: float
    ) -> tuple[float, np.ndarray, np.ndarray, bool]:
        kinds = np.concatenate([np.full(len(rows), k) for k, rows in enumerate(chosen)])
        cost = np.concatenate([o.cost[rows] for o, rows in zip(options, chosen)])
        share = np.concatenate([o.share[rows] for o, rows in zip(options, chosen)])
        usage = np.concatenate([o.usage[:, rows] for o, rows in zip(options, chosen)], axis=1)
        resources = len(self._capacities)
        # Two columns let the total be missed and one per resource lets it be exceeded, at a price
        # that is paid only where nothing else is possible.
        equal = np.zeros((1 + len(options), len(cost) + 2 + resources))
        equal[0, : len(cost)] = share
        equal[0, len(cost) : len(cost) + 2] = (1, -1)
        equal[1 + kinds, np.arange(len(cost))] = 1
        counts = [o.count for o in options]
        within = np.hstack([usage, np.zeros((resources, 2)), -np.eye(resources)])
        largest = np.maximum(1, np.abs(usage).max(axis=1, initial=0))
        result = linprog(
            np.concatenate([cost, [penalty, penalty], penalty / largest]),
            A_ub=within if resources else None,
            b_ub=self._capacities if resources else None,
            A_eq=equal,
            b_eq=[self._total, *counts],
            method="highs",
        )
        if result.status != 0:
            raise RuntimeError(f"HiGHS could not solve the relaxation: {result.message}")
        self._used = result.x[: len(cost)] > 1e-9
        duals = np.asarray(result.eqlin.marginals)
        penalties = np.maximum(0, -np.asarray(result.ineqlin.marginals)) if resources else ()
        violated = bool((result.x[len(cost) :] > 1e-6).any())
        return float(duals[0]), np.asarray(penalties, dtype=float), duals[1:], violated


def cheapest_within_capacity(
    options: Sequence[Options],
    total: int,
    relaxation: Relaxation,
    capacities: np.ndarray,
    threshold: float,
) -> CoreSolution | None:
    """The cheapest choice that reaches the total within the capacities.

    Args:
        options: per kind, the options that are allowed; their costs include the penalties.
        total: units to share out.
        relaxation: the best prices.
        capacities: of each resource.
        threshold: look only for choices whose cost is at most this much above the relaxation's
            bound; may be inf.

    Returns:
        The cheapest choice, its `excess` above that bound; None if there is none within the
        threshold.
    """
    useful = [_undominated(o, relaxation.penalties) for o in options]
    reduced = [o.cost - relaxation.price * o.share for o in options]
    reduced = [r - r.min() for r in reduced]
    largest = max(float(r.max()) for r in reduced)
    everything = largest * sum(o.count for o in options)
    # Few options usually suffice, and an integer program over few is quick.
    limit = min(threshold, max(1e-6 * largest, threshold / 64 if np.isfinite(threshold) else 0))
    while True:
        rows = [u[r[u] <= limit] for u, r in zip(useful, reduced)]
        found = None
        if any(len(r) > _PROBE for r in rows):
            few = [_narrowed(*args) for args in zip(options, reduced, rows, relaxation.support)]
            found = _integer_program(options, reduced, few, total, relaxation, capacities)
            if found is not None and found.excess <= 1e-12 * everything:
                return found
            if found is not None and found.excess <= limit:
                rows = [u[r[u] <= found.excess] for u, r in zip(useful, reduced)]
        found = _integer_program(options, reduced, rows, total, relaxation, capacities) or found
        if found is not None and found.excess <= limit:
            return found
        if limit >= threshold or limit >= everything:
            return found if found is not None and found.excess <= threshold else None
        limit = min(threshold, 8 * limit if found is None else found.excess)


def _undominated(option: Options, penalties: np.ndarray) -> np.ndarray:
    """Rows for which no other of the same share is as cheap and uses as little.

    All options here are fast enough, so that their times no longer tell them apart. It is their
    cost without the penalties that counts: a choice pays no penalty while a capacity lasts.
    """
    order = np.lexsort((option.cost - penalties @ option.usage, option.share))
    share, usage = option.share[order], option.usage[:, order]
    dominated = np.zeros(len(order), dtype=bool)
    most_alike = int(np.unique(share, return_counts=True)[1].max())
    for apart in range(1, most_alike):
        # The earlier one of a pair with the same share is at least as cheap.
        alike = share[apart:] == share[:-apart]
        frugal = (usage[:, :-apart] <= usage[:, apart:]).all(axis=0)
        dominated[apart:] |= alike & frugal & ~dominated[:-apart]
    return np.sort(order[~dominated])


def _narrowed(
    option: Options, reduced: np.ndarray, rows: np.ndarray, support: Sequence[int]
) -> np.ndarray:
    """Few of the rows: the cheapest, some spread over all, and those around the relaxed choice."""
    cheapest_ones = rows[np.argsort(reduced[rows], kind="stable")[: _PROBE // 4]]
    spread = rows[np.linspace(0, len(rows) - 1, _PROBE // 4).astype(int)]
    near = [
        rows[
            (np.abs(option.share[rows] - option.share[s]) <= _PROBE // 8)
            & (option.limit[rows] == option.limit[s])
        ]
        for s in support
    ]
    return np.unique(np.concatenate([cheapest_ones, spread, *near]))


def _integer_program(
    options: Sequence[Options],
    reduced: Sequence[np.ndarray],
    rows: Sequence[np.ndarray],
    total: int,
    relaxation: Relaxation,
    capacities: np.ndarray,
) -> CoreSolution | None:
    """The cheapest choice among some rows of each kind."""
    penalties = relaxation.penalties
    sizes = [len(r) for r in rows]
    kind = np.repeat(np.arange(len(options)), sizes)
    size = sum(sizes)
    share = np.concatenate([o.share[r] for o, r in zip(options, rows)])
    usage = np.concatenate([o.usage[:, r] for o, r in zip(options, rows)], axis=1)
    counts = np.array([o.count for o in options])
    membership = csr_matrix((np.ones(size), (kind, np.arange(size))), shape=(len(options), size))
    matrix = vstack([csr_matrix(share[None].astype(float)), membership, csr_matrix(usage)])
    fixed = np.concatenate([[total], counts]).astype(float)
    free = np.full(len(capacities), -np.inf)
    constraint = LinearConstraint(
        matrix, np.concatenate([fixed, free]), np.concatenate([fixed, capacities])
    )
    # The bound charged for the whole of every capacity: what a choice leaves unused is excess.
    cost = np.concatenate([r[i] for r, i in zip(reduced, rows)]) - penalties @ usage
    result = milp(
        cost,
        integrality=np.ones(size),
        bounds=(0, counts[kind]),
        constraints=constraint,
        # The presolve of HiGHS 1.2 (in scipy 1.13, the newest for Python 3.9) calls some feasible
        # programs of this kind infeasible: 2x + y + 2z = 5, x = 1, y + z = 2, up to 2 of each.
        options={"mip_rel_gap": 0.0, "presolve": False, "time_limit": _TIME_LIMIT},
    )
    if result.status == _OUT_OF_TIME:
        # Nothing may be concluded from it, least of all that nothing is feasible.
        raise AllocationError(
            f"the constrained search did not finish: an integer program over {counts.sum()} GPUs "
            f"took longer than {_TIME_LIMIT:g} s. Use a coarser granularity, round the budget to "
            "what the power limits add up to, or allocate for a part of the fleet."
        )
    if result.x is None:
        return None
    chosen = np.rint(result.x).astype(int)
    if int(share @ chosen) != total or (membership @ chosen != counts).any():
        raise RuntimeError(f"HiGHS gave a choice that breaks its constraints: {result.message}")
    picked = [
        tuple(int(r) for r, n in zip(part, chosen[kind == k]) for _ in range(n))
        for k, part in enumerate(rows)
    ]
    return CoreSolution(float(cost @ chosen + penalties @ capacities), tuple(picked))
