"""What an allocation must keep to, beside adding up to the global batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

import numpy as np

from zeus_hetero.arguments import per_gpu, positive, whole
from zeus_hetero.errors import AllocationError

Groups = Mapping[str, Union[str, int, Sequence[Union[str, int]]]]
WHOLE_FLEET = "all"


@dataclass(frozen=True)
class PowerBudget:
    """Watts for a group of workers.

    Attributes:
        name: of the group, such as a node or a rack.
        members: indices of its workers.
        watts: what their power limits may add up to.
    """

    name: str
    members: frozenset[int]
    watts: float


@dataclass(frozen=True)
class Constraints:
    """All constraints of a case.

    Attributes:
        deadline: s that a step may take, exchange of gradients included.
        budgets: power budgets.
        max_share: samples per GPU name at most.
        min_share: samples per GPU name at least, for GPUs that get work.
        must_use: names of the GPUs that must get work.
        max_gpus: GPUs that may get work; the others are not in the job. None: any number, and all
            are in the job.
    """

    max_share: Mapping[str, int]
    min_share: Mapping[str, int]
    must_use: frozenset[str] = frozenset()
    deadline: float = math.inf
    budgets: tuple[PowerBudget, ...] = ()
    max_gpus: int | None = None

    @classmethod
    def of(
        cls,
        workers: Sequence[str],
        names: Iterable[str],
        global_batch_size: int,
        *,
        max_batch_size: Any = None,
        min_share: Any = None,
        must_use: Any = (),
        deadline: Any = None,
        power_budget: Any = None,
        groups: Groups | None = None,
        max_gpus: Any = None,
    ) -> Constraints:
        """Check the constraints that `allocate` was given.

        Args:
            workers: GPU name of each worker.
            names: the known GPU names.
            global_batch_size: samples per global step.
            max_batch_size: as for `allocate`; so are the others.
            min_share: samples.
            must_use: names.
            deadline: s.
            power_budget: W.
            groups: workers of each group.
            max_gpus: count.
        """
        known = list(names)
        caps = per_gpu("max_batch_size", max_batch_size, known, whole)
        used = known if must_use is True else [must_use] if isinstance(must_use, str) else must_use
        for name in used or ():
            if name not in known:
                raise AllocationError(
                    f"must_use names GPU {name!r}; expected one of {', '.join(known)}."
                )
        return cls(
            max_share={n: min(global_batch_size, caps.get(n, global_batch_size)) for n in known},
            min_share=per_gpu("min_share", min_share, known, whole),
            must_use=frozenset(used or ()),
            deadline=math.inf if deadline is None else positive("deadline", deadline, "s"),
            budgets=_budgets(power_budget, groups, workers),
            max_gpus=None if max_gpus is None else whole("max_gpus", max_gpus),
        )

    def allows(self, name: str, shares: np.ndarray) -> np.ndarray:
        """Per share, whether a GPU of that name may have it."""
        least = self.min_share.get(name, 1)
        allowed = (shares >= least) & (shares <= self.max_share[name])
        return allowed if name in self.must_use else allowed | (shares == 0)

    def least(self, name: str) -> int:
        """The smallest share that a GPU of that name may have."""
        return self.min_share.get(name, 1) if name in self.must_use else 0


def _budgets(
    power_budget: Any, groups: Groups | None, workers: Sequence[str]
) -> tuple[PowerBudget, ...]:
    if power_budget is None:
        if groups:
            raise AllocationError(
                "groups is given without power_budget; expected a budget in W for each group."
            )
        return ()
    if not isinstance(power_budget, Mapping):
        power_budget = {WHOLE_FLEET: power_budget}
    members = {WHOLE_FLEET: frozenset(range(len(workers)))}
    for group, who in (groups or {}).items():
        members[group] = _members(group, who, workers)
    budgets = []
    for group, watts in power_budget.items():
        if group not in members:
            raise AllocationError(
                f"power_budget names group {group!r}; expected one of {', '.join(members)}. "
                "Say in groups which workers belong to it."
            )
        watts = positive(f"power_budget[{group!r}]", watts, "W")
        budgets.append(PowerBudget(group, members[group], watts))
    return tuple(budgets)


def _members(group: str, who: Any, workers: Sequence[str]) -> frozenset[int]:
    members: set[int] = set()
    for entry in [who] if isinstance(who, (str, int)) else who:
        if isinstance(entry, str):
            found = [rank for rank, name in enumerate(workers) if name == entry]
        else:
            found = [entry] if 0 <= entry < len(workers) else []
        if not found:
            raise AllocationError(
                f"groups[{group!r}] names {entry!r}; expected GPU names among "
                f"{', '.join(dict.fromkeys(workers))} or worker numbers 0 to {len(workers) - 1}."
            )
        members.update(found)
    return frozenset(members)
