"""Ranks compare notes before they train: GPUs, plan, versions; a mismatch is one error on all."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from zeus_hetero.errors import PlanError, TrainingError
from zeus_hetero.gpu_names import canonical, same_model

if TYPE_CHECKING:
    import torch.distributed as dist

    from zeus_hetero.allocation import Allocation, Worker


TIMEOUT = 60.0
"""Seconds to wait for other ranks in control messages."""


@dataclass(frozen=True)
class Introduction:
    """What one rank says of itself.

    Attributes:
        host: name of the machine.
        local_rank: number of the process on it.
        gpu: name of the GPU model, as Zeus reports it.
        gpu_id: tells GPUs of the job apart (UUID, or host and index).
        power_range: smallest and largest power limit, W; None where there is none.
        plan: fingerprint of the plan.
        versions: of what has to be alike on all ranks.
        error: why this rank cannot take part; the others learn it here instead of hanging.
    """

    host: str = ""
    local_rank: int = 0
    gpu: str = ""
    gpu_id: str = ""
    power_range: tuple[int, int] | None = None
    plan: str = ""
    versions: Mapping[str, str] | None = None
    error: str | None = None

    def __str__(self) -> str:
        return f"{self.gpu or 'unknown GPU'} on {self.host}, local rank {self.local_rank}"


def plan_fingerprint(plan: Allocation) -> str:
    """A hash of what ranks have to agree on in a plan."""
    text = json.dumps([asdict(worker) for worker in plan.workers], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def introduce(
    mine: Introduction, group: dist.ProcessGroup, timeout: float = TIMEOUT
) -> list[Introduction]:
    """Exchange introductions over all ranks.

    Args:
        mine: this rank's.
        group: all ranks.
        timeout: s to wait for the others.

    Returns:
        One per rank.

    Raises:
        TrainingError: a rank says that it cannot take part, or does not answer in time.
    """
    everybody = gather(mine, group, timeout)
    failed = [(rank, one) for rank, one in enumerate(everybody) if one.error is not None]
    if failed:
        raise TrainingError("; ".join(f"rank {rank} ({one}): {one.error}" for rank, one in failed))
    return everybody


def assign(plan: Allocation, ranks: Sequence[Introduction]) -> Allocation:
    """The plan with its workers in the order of the ranks, after all checks.

    A launcher need not start ranks in the plan's order, so each takes an entry for its GPU
    model: the one at its own place if that fits, else the next that is free.

    Args:
        plan: as it was made.
        ranks: what each rank says of itself.

    Raises:
        PlanError: the plan does not fit these GPUs, or the ranks have different plans.
    """
    problems = [
        *_check_plans(ranks),
        *_check_size(plan, ranks),
        *_check_distinct(ranks),
        *_check_versions(ranks),
    ]
    if problems:
        raise PlanError(" ".join(problems))
    workers = _match(plan.workers, ranks)
    problems = [
        f"rank {rank} ({one}): the plan's power limit is {worker.power_limit} W, but this GPU "
        f"accepts {one.power_range[0]} to {one.power_range[1]} W."
        for rank, (one, worker) in enumerate(zip(ranks, workers))
        if one.power_range and not one.power_range[0] <= worker.power_limit <= one.power_range[1]
    ]
    if problems:
        raise PlanError(" ".join(problems))
    return replace(plan, workers=tuple(workers))


def agree(what: str, mine: str, group: dist.ProcessGroup | None, timeout: float = TIMEOUT) -> None:
    """Make sure that all ranks hold the same; every rank has to call it.

    Args:
        what: its name, for the error.
        mine: what this rank holds.
        group: all ranks; None if there is one only.
        timeout: s to wait for the others.

    Raises:
        TrainingError: they do not, or a rank does not answer in time.
    """
    if group is None:
        return
    everybody = gather(mine, group, timeout)
    if len(set(everybody)) > 1:
        common, _ = Counter(everybody).most_common(1)[0]
        others = ", ".join(
            f"rank {rank} {value}" for rank, value in enumerate(everybody) if value != common
        )
        raise TrainingError(
            f"the ranks disagree about the {what}: most have {common}, but {others}. They would "
            "train on wrong samples without a word. Give all ranks the same plan, data set and "
            "arguments of the loader."
        )


def gather(mine: Any, group: dist.ProcessGroup, timeout: float = TIMEOUT) -> list[Any]:
    """What every rank holds, in the order of the ranks; every rank has to call it.

    Raises:
        TrainingError: a rank does not answer in time.
    """
    import torch.distributed as dist

    everybody: list[Any] = [None] * dist.get_world_size(group)
    try:
        # Names the ranks that do not come, which a gather that times out does not.
        # It does not use the group's own timeout.
        limit = timedelta(seconds=timeout)
        dist.monitored_barrier(group, timeout=limit, wait_all_ranks=True)
        dist.all_gather_object(everybody, mine, group=group)
    except RuntimeError as error:
        raise TrainingError(
            f"not all ranks answer ({str(error).splitlines()[0]}). Did one of them end, or was it "
            "started with other arguments?"
        ) from error
    return everybody


def _check_plans(ranks: Sequence[Introduction]) -> list[str]:
    plans = [one.plan for one in ranks]
    if len(set(plans)) == 1:
        return []
    held = ", ".join(f"rank {rank} ({one.host}) {one.plan}" for rank, one in enumerate(ranks))
    return [f"the ranks have different plans: {held}. Copy one plan file to all nodes."]


def _check_size(plan: Allocation, ranks: Sequence[Introduction]) -> list[str]:
    if len(plan.workers) == len(ranks):
        return []
    planned = ", ".join(worker.gpu for worker in plan.workers)
    found = ", ".join(one.gpu for one in ranks)
    return [
        f"the plan is for {len(plan.workers)} workers ({planned}), but {len(ranks)} ranks were "
        f"started ({found}). Start {len(plan.workers)} (torchrun --nproc_per_node, --nnodes), or "
        "make a plan for these GPUs."
    ]


def _check_distinct(ranks: Sequence[Introduction]) -> list[str]:
    repeated = [
        gpu_id for gpu_id, count in Counter(one.gpu_id for one in ranks).items() if count > 1
    ]
    return [
        "ranks "
        + " and ".join(str(rank) for rank, one in enumerate(ranks) if one.gpu_id == gpu_id)
        + f" use the same GPU ({gpu_id}); expected a GPU for each. Check CUDA_VISIBLE_DEVICES and "
        "that the script uses LOCAL_RANK."
        for gpu_id in repeated
    ]


def _check_versions(ranks: Sequence[Introduction]) -> list[str]:
    problems = []
    for name in sorted(set().union(*(one.versions or {} for one in ranks))):
        found = [(one.versions or {}).get(name) for one in ranks]
        if len(set(found)) > 1:
            listed = ", ".join(f"rank {rank} {version}" for rank, version in enumerate(found))
            problems.append(f"{name} differs: {listed}. Install the same everywhere.")
    return problems


def _match(workers: Sequence[Worker], ranks: Sequence[Introduction]) -> list[Worker]:
    free = dict(enumerate(workers))
    matched: dict[int, Worker] = {}
    for rank, one in enumerate(ranks):
        if same_model(workers[rank].gpu, one.gpu):
            matched[rank] = free.pop(rank)
    missing = []
    for rank, one in enumerate(ranks):
        if rank in matched:
            continue
        place = next((p for p, worker in free.items() if same_model(worker.gpu, one.gpu)), None)
        if place is None:
            missing.append(f"rank {rank} ({one}, known as {canonical(one.gpu)!r})")
        else:
            matched[rank] = free.pop(place)
    if missing:
        left = ", ".join(worker.gpu for worker in free.values())
        raise PlanError(
            f"the plan has no entry for {', '.join(missing)}; it has one left over for {left}. "
            "Make a plan for the GPUs that are there."
        )
    return [matched[rank] for rank in range(len(ranks))]
