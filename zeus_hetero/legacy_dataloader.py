"""Zeus's own data loader for GPUs that differ, on the last Zeus that has one (zeus-ml 0.8.2).

It stands alone: that Zeus has no device layer, so simulation and the power limit optimizer of this
package are not there, and limits are set through pynvml as Zeus itself does.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, ClassVar

import pynvml
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, Subset
from torch.utils.data.distributed import DistributedSampler
from zeus.run import ZeusDataLoader

from zeus_hetero.allocation import Allocation
from zeus_hetero.errors import TrainingError
from zeus_hetero.gradients import Step, StepContext
from zeus_hetero.handshake import Introduction, agree, assign, introduce, plan_fingerprint
from zeus_hetero.sampler import HeteroBatchSampler
from zeus_hetero.schedule import Schedule, contiguous_part
from zeus_hetero.step_clock import StepClock


class HeteroDataLoader(ZeusDataLoader):
    """Zeus's data loader with a mode for different GPUs.

    With an allocation an iteration yields one `Step` per training step, as on newer versions of
    Zeus: see `zeus_hetero.dataloader.HeteroDataLoader`. Power limits are the plan's, instead of
    being profiled, and are restored when the process ends. Without one it is Zeus's loader,
    perhaps on a fixed part of the data set.

    Zeus's own rules hold: ``ZEUS_TARGET_METRIC`` must be set, `max_epochs` belongs to the train
    loader alone, and a train and an eval loader are iterated in every epoch.

    Args:
        dataset: indexable.
        batch_size: of plain batches; not with an allocation.
        max_epochs: of the train loader.
        allocation: a plan or its file, for all ranks of the default process group.
        seed: of the shuffling.
        shuffle: whether to shuffle each epoch.
        drop_last: leave out the last, smaller global batch.
        min_batch_size: samples that a rank gets at least in the last global batch, if any.
        max_micro_batch_size: samples of a forward-backward pass at most; for all, or a mapping
            from GPU name.
        gpu_index: 0 for the first `gpu_split` percent of the data set, 1 for the rest.
        gpu_split: percent of the data set that go to index 0.
        **options: of Zeus's and torch's DataLoader.

    Raises:
        PlanError: the plan does not fit the data set, the GPUs or the ranks.
        TrainingError: contradicting arguments, or a rank does not answer.
    """

    # Like all of Zeus's state, shared by the train and the eval loader of the process.
    job_has_plan: ClassVar[bool] = False

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int | None = None,
        max_epochs: int = -1,
        allocation: Allocation | str | os.PathLike[str] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        min_batch_size: int = 1,
        max_micro_batch_size: int | Mapping[str, int] | None = None,
        gpu_index: int | None = None,
        gpu_split: int | None = None,
        **options: Any,
    ) -> None:
        check_one_zeus()
        self.allocation: Allocation | None = None
        self._shares: HeteroBatchSampler | None = None
        if allocation is None:
            part = contiguous_part(len(dataset), gpu_index, gpu_split)  # type: ignore[arg-type]
            if "sampler" not in options:
                options["shuffle"] = shuffle and len(part) > 0
            super().__init__(
                Subset(dataset, part),
                batch_size=batch_size or 1,
                max_epochs=max_epochs,
                drop_last=drop_last,
                **options,
            )
            return
        if batch_size is not None or gpu_split is not None or gpu_index is not None:
            raise TrainingError("batch_size, gpu_index and gpu_split contradict allocation.")
        if max_epochs == -1:
            raise TrainingError("allocation is for the train loader; give it max_epochs.")
        plan = allocation if isinstance(allocation, Allocation) else Allocation.load(allocation)
        distributed = dist.is_available() and dist.is_initialized()
        group: Any = dist.new_group(backend="gloo") if distributed else None
        self._group: dist.ProcessGroup | None = group
        rank = dist.get_rank() if distributed else 0
        self.allocation = _assigned(plan, rank, group)
        schedule = Schedule.of_plan(
            self.allocation,
            len(dataset),  # type: ignore[arg-type]
            max_micro_batch_size=max_micro_batch_size,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            min_batch_size=min_batch_size,
        )
        self._shares = HeteroBatchSampler(schedule, rank)
        HeteroDataLoader.job_has_plan = True
        self._context = StepContext(
            schedule.world_size, rank, schedule.shapes(), StepClock(), group
        )
        restore = _Restore(len(plan.workers)) if rank == 0 else None
        if distributed:
            # Zeus insists on a sampler of this type; which samples come is decided above.
            options["sampler"] = DistributedSampler(dataset)
            options["distributed"] = "dp"
        super().__init__(
            dataset,
            batch_size=max(self.allocation.workers[rank].batch_size, 1),
            max_epochs=max_epochs,
            **options,
        )
        # Registered after Zeus's own hook, which ends the use of NVML, so that it runs before.
        if restore is not None:
            restore.arm()
        ZeusDataLoader.train_batch_size = schedule.global_batch_size
        self.train_json = f"{self.logdir}/{self.job_id}+bs{self.train_batch_size}.train.json"

    @property
    def batch_sampler(self) -> Any:
        """What gives the indices of each (micro-)batch."""
        return self._torch_sampler if self._shares is None else self._shares

    @batch_sampler.setter
    def batch_sampler(self, value: Any) -> None:
        """Torch's constructor assigns one with batches of equal size; the shares stand."""
        self._torch_sampler = value

    def __len__(self) -> int:
        """Training steps of an epoch; plain batches without an allocation."""
        return super().__len__() if self._shares is None else self._shares.schedule.steps()

    def __iter__(self) -> HeteroDataLoader:
        """Begin an epoch."""
        if self._shares is None:
            return super().__iter__()  # type: ignore[no-any-return]
        schedule = self._shares.schedule
        agree("schedule", f"{schedule.fingerprint()} in epoch {self.epoch_num}", self._group)
        self._shares.set_epoch(self.epoch_num)
        batches: Any = super().__iter__()
        # Zeus takes what it hands out, and counts, from here.
        self.iter = self._steps(batches.iter)
        return self

    def _steps(self, batches: Iterator[Any]) -> Iterator[Step]:
        assert self._shares is not None
        schedule = self._shares.schedule
        for size in schedule.batch_sizes():
            sizes = schedule.split(size)
            ranks = range(schedule.world_size)
            shape = tuple(schedule.micro_batches(sizes, rank) for rank in ranks)
            step = Step(batches, shape, self._context)
            yield step
            step.drain()

    # -- Zeus's power limits, replaced by the plan's -------------------------------------------

    @property
    def _should_profile(self) -> bool:
        """Whether to profile power limits; a plan has them, also for the eval loader."""
        if HeteroDataLoader.job_has_plan:
            return False
        return not os.path.exists(self.power_json)

    def _load_power_results(self) -> None:
        """Let Zeus predict the next epoch from the plan instead of a profile."""
        plan = self.allocation
        if plan is None:
            super()._load_power_results()
            return
        # Zeus's name for a setting of all GPUs is one limit, mW.
        setting = 1000 * max(worker.power_limit for worker in plan.workers)
        ZeusDataLoader.optimal_pl = setting
        for tput in (ZeusDataLoader.train_tput_result, ZeusDataLoader.eval_tput_result):
            tput[setting] = 1 / plan.step_time
        for power in (ZeusDataLoader.train_power_result, ZeusDataLoader.eval_power_result):
            power[setting] = plan.step_energy / plan.step_time

    def _set_gpu_power_limit(self, power_limit: int) -> None:
        """Set each GPU's own limit of the plan (rank 0 does it for all GPUs of the node)."""
        if self.allocation is None:
            super()._set_gpu_power_limit(power_limit)
            return
        if self.current_gpu_pl != power_limit:
            for handle, worker in zip(self.gpu_handles, self.allocation.workers):
                pynvml.nvmlDeviceSetPowerManagementLimit(handle, 1000 * worker.power_limit)
            ZeusDataLoader.current_gpu_pl = power_limit


def check_one_zeus() -> None:
    """Refuse an environment with two Zeus packages, of which one hides parts of the other.

    Raises:
        TrainingError: both zeus and zeus-ml are installed.
    """
    found = []
    for name in ("zeus", "zeus-ml"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    if len(found) > 1:
        raise TrainingError(
            f"{' and '.join(found)} are both installed and hide parts of each other. Keep one: "
            "pip uninstall zeus-ml zeus, then install the one that you want."
        )


def _assigned(plan: Allocation, rank: int, group: Any) -> Allocation:
    """The plan in the order of the ranks; NVML's index is the rank, as Zeus 0.8.2 has it."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(rank)
    name = pynvml.nvmlDeviceGetName(handle)
    low, high = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
    mine = Introduction(
        local_rank=rank,
        gpu=name.decode() if isinstance(name, bytes) else str(name),
        gpu_id=f"NVML index {rank}",
        power_range=(-(-low // 1000), high // 1000),
        plan=plan_fingerprint(plan),
        versions={"torch": str(torch.__version__)},
    )
    return assign(plan, [mine] if group is None else introduce(mine, group))


class _Restore:
    """Puts back the power limits of before at exit and on SIGTERM; Zeus 0.8.2 does not."""

    def __init__(self, gpus: int) -> None:
        self._limits = {}
        for index in range(gpus):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            self._limits[index] = pynvml.nvmlDeviceGetPowerManagementLimit(handle)
        self._owner = os.getpid()
        self._before: Any = None

    def arm(self) -> None:
        atexit.register(self._restore)
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_sigterm)

    def _restore(self) -> None:
        if os.getpid() != self._owner:  # a forked worker of the data loader
            return
        for index, limit in self._limits.items():
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            pynvml.nvmlDeviceSetPowerManagementLimit(handle, limit)
        self._limits = {}

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._restore()
        if callable(self._before):
            self._before(number, frame)
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
