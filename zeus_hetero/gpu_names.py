"""Names of GPU models: what drivers report against what traces and plans say."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from zeus_hetero.errors import PlanError

if TYPE_CHECKING:
    from zeus_hetero.allocation import Allocation, Worker

# Words that say who sold the card, how it is fitted and how much memory it has. NVML itself
# drops "Tesla" from a name with some driver versions, so they cannot tell models apart.
_NOISE = re.compile(
    r"\b(nvidia|tesla|amd|instinct|geforce|graphics|gpu|corporation"
    r"|pcie?|sxm\d*|hbm\d*e?|nvl|\d+ ?gb)\b"
)

# Models that behave alike under a power limit but go by another name.
_ALIASES = {"a10g": "a10"}


def canonical(name: str) -> str:
    """The short lower-case name of a GPU model.

    Args:
        name: as a driver, a trace or a plan gives it, such as "Tesla V100-SXM2-16GB".

    Returns:
        the model alone, such as "v100"; equal for every spelling of the same model.
    """
    words = re.sub(r"[-_/()]+", " ", name.lower())
    short = " ".join(_NOISE.sub(" ", words).split())
    return _ALIASES.get(short, short) or name.strip().lower()


def same_model(one: str, other: str) -> bool:
    """Whether two names mean the same GPU model."""
    return canonical(one) == canonical(other)


def worker_for(allocation: Allocation, gpu_name: str, rank: int | None = None) -> Worker:
    """The entry of a plan that belongs to one GPU.

    The worker of the same rank is taken if it is for this GPU model, else the one for this
    model, whatever its place in the plan: a launcher need not start ranks in the plan's order.

    Args:
        allocation: the plan.
        gpu_name: the GPU model as the driver reports it.
        rank: this process's rank, or None if it has none.

    Raises:
        PlanError: no worker is for this GPU model, or several are, with different entries.
    """
    workers = allocation.workers
    if rank is not None and 0 <= rank < len(workers) and same_model(workers[rank].gpu, gpu_name):
        return workers[rank]
    fitting = [worker for worker in workers if same_model(worker.gpu, gpu_name)]
    planned = ", ".join(worker.gpu for worker in workers)
    if not fitting:
        raise PlanError(
            f"the plan has no worker for {gpu_name!r} (known as {canonical(gpu_name)!r}); it is "
            f"for {planned}. Make a plan for this GPU, or run on one of these."
        )
    if any(worker != fitting[0] for worker in fitting):
        raise PlanError(
            f"the plan has {len(fitting)} different workers for {gpu_name!r} and rank {rank} is "
            f"none of them; it is for {planned}, in the order of ranks. Start the ranks in this "
            "order, or pass rank=."
        )
    return fitting[0]
