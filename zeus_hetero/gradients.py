"""Exact gradients from uneven shares: the loss weights, and steps without samples.

DistributedDataParallel averages the ranks' gradients, each counting alike. A micro-batch of m
samples therefore has its mean loss multiplied by m W / N (W ranks, N samples in this global
batch): the average over ranks and the sum over micro-batches then are the gradient of the mean
loss over the global batch. The weights are in the loss, not in a communication hook, because
layers that communicate in the forward pass need them in what they exchange.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zeus_hetero.errors import TrainingError
from zeus_hetero.step_clock import StepClock

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

Shape = tuple[tuple[int, ...], ...]
"""The micro-batches of every rank in one step, in samples."""

REDUCTIONS = ("mean", "sum", "tokens")


@dataclass
class StepContext:
    """What all steps of a training have in common.

    Attributes:
        world_size: number of ranks over which DistributedDataParallel averages.
        rank: this one.
        shapes: every kind of step that can occur.
        clock: told what happens in a step.
        group: for counts of tokens; None where there is one rank only.
    """

    world_size: int
    rank: int
    shapes: Sequence[Shape]
    clock: StepClock
    group: dist.ProcessGroup | None = None
    _checked: weakref.WeakSet[Module] = field(default_factory=weakref.WeakSet)

    def check(self, model: Module) -> None:
        """Refuse a model that these steps would train wrongly or hang; once per model.

        Raises:
            TrainingError: on every rank alike.
        """
        if model not in self._checked:
            check_model(model, self.shapes)
            self._checked.add(model)


class Step:
    """One training step of this worker: its micro-batches of one global batch.

        for inputs, targets in step.micro_batches(model):
            loss = step.backward(criterion(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()

    Args:
        batches: gives this rank's micro-batches.
        shape: samples of every rank's micro-batches.
        context: what all steps have in common.

    Attributes:
        global_batch_size: samples of all ranks together.
        sizes: samples of this rank's micro-batches; empty if it has nothing to do in this step.
    """

    def __init__(self, batches: Iterator[Any], shape: Shape, context: StepContext) -> None:
        self.shape = shape
        self.sizes = shape[context.rank]
        self.global_batch_size = sum(map(sum, shape))
        self._batches = batches
        self._taken = 0
        self._context = context
        self._model: Module | None = None
        self._scaler: torch.amp.GradScaler | None = None
        self._current: int | None = None
        self._used = False
        self._tokens: float | None = None
        self._over = False

    @property
    def batch_size(self) -> int:
        """Samples of this rank."""
        return sum(self.sizes)

    def micro_batches(
        self,
        model: Module | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        count_tokens: Callable[[Any], Any] | None = None,
    ) -> Iterator[Any]:
        """Go through this worker's micro-batches.

        The ranks exchange gradients in the last one only. A rank without samples takes part in
        the exchange with zeros: the model's layers, buffers and random numbers are untouched.

        Args:
            model: what `backward` trains, in DistributedDataParallel; leave it out to evaluate.
            scaler: of mixed precision; `backward` applies it.
            count_tokens: number of items in a micro-batch that the loss is a mean of, for
                ``reduction="tokens"``. The step's micro-batches then wait in memory until they
                are counted on all ranks.

        Raises:
            TrainingError: the model cannot be trained in such steps, or a micro-batch went by
                without `backward` or `scale`.
        """
        if self._over:
            raise TrainingError(
                "this step's micro-batches are gone, because the next step was asked for before. "
                "Take steps one by one, without a wrapper that fetches them ahead."
            )
        self._model, self._scaler = model, scaler
        if model is not None:
            self._context.check(model)
        batches: Iterator[Any] = self._arriving()
        if count_tokens is not None:
            waiting = list(batches)
            self._tokens = self._over_ranks(sum(float(count_tokens(batch)) for batch in waiting))
            batches = iter(waiting)
        if not self.sizes and model is not None and self._context.world_size > 1:
            self._ghost(model)
            return
        trained = False
        for number, (size, batch) in enumerate(zip(self.sizes, batches)):
            self._current, self._used = size, False
            with self._without_exchange(last=number == len(self.sizes) - 1):
                yield batch
            self._current = None
            if self._used:
                trained = True
                self._context.clock.micro_batch_done(size)
            elif model is not None:
                raise TrainingError(
                    f"micro-batch {number + 1} of {len(self.sizes)} went by without step.backward "
                    "or step.scale; the other ranks would wait for its gradients for ever. To "
                    "evaluate, call micro_batches() without the model."
                )
        if trained:
            self._context.clock.step_done()

    def backward(self, loss: Tensor, *, reduction: str = "mean") -> Tensor:
        """Add the gradient of this micro-batch's part of the global loss.

        Args:
            loss: of the micro-batch: its mean over samples, or its sum.
            reduction: what `loss` is, and what the global loss shall be: ``mean`` over samples,
                ``sum`` over samples, or ``tokens``: `loss` is a sum, the global loss the mean over
                what `count_tokens` counted.

        Returns:
            The loss as it was given, detached, for logging.

        Raises:
            TrainingError: outside `micro_batches`, or an unknown reduction.
        """
        scaled = self.scale(loss, reduction=reduction)
        if self._scaler is not None:
            scaled = self._scaler.scale(scaled)
        scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def scale(self, loss: Tensor, *, reduction: str = "mean") -> Tensor:
        """The loss with its weight, for a backward call of your own; see `backward`."""
        scaled = loss * self.weight(reduction)
        self._used = True
        self._context.clock.watch(scaled)
        return scaled

    def weight(self, reduction: str = "mean") -> float:
        """What the current micro-batch's loss is multiplied by; see `backward`."""
        if self._current is None:
            raise TrainingError("no micro-batch is open; use it in a loop over step.micro_batches.")
        world_size = self._context.world_size
        if self._model is None and world_size > 1 and len({len(sizes) for sizes in self.shape}) > 1:
            raise TrainingError(
                "the ranks have different numbers of micro-batches in this step, so gradients may "
                "only be exchanged in the last one: call step.micro_batches(model)."
            )
        if reduction == "mean":
            return self._current * world_size / self.global_batch_size
        if reduction == "sum":
            return float(world_size)
        if reduction != "tokens":
            raise TrainingError(f"reduction is {reduction!r}; expected one of {REDUCTIONS}.")
        if self._tokens is None:
            raise TrainingError(
                'reduction="tokens" needs to know how many there are: call '
                "step.micro_batches(model, count_tokens=...)."
            )
        # A step without a single token has no gradient.
        return world_size / self._tokens if self._tokens else 0.0

    def drain(self) -> None:
        """Drop the micro-batches that were not asked for, so that the next step gets its own."""
        self._over = True
        for _ in self._arriving():
            pass

    def _arriving(self) -> Iterator[Any]:
        while self._taken < len(self.sizes):
            try:
                batch = next(self._batches)
            except StopIteration:
                raise TrainingError(
                    f"the data loader ended before micro-batch {self._taken + 1} of "
                    f"{len(self.sizes)} of a step; was it changed while it ran?"
                ) from None
            self._taken += 1
            yield batch

    def _without_exchange(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        no_sync = getattr(self._model, "no_sync", None)
        return contextlib.nullcontext() if last or no_sync is None else no_sync()

    def _over_ranks(self, count: float) -> float:
        if self._context.group is None:
            return count
        total = torch.tensor(count, dtype=torch.float64)
        dist.all_reduce(total, group=self._context.group)
        return float(total)

    def _ghost(self, model: Module) -> None:
        loss = zero_loss(model)
        self._context.clock.watch(loss)
        if self._scaler is not None:
            loss = self._scaler.scale(loss)  # The scaler must have been used to step.
        loss.backward()  # type: ignore[no-untyped-call]
        self._context.clock.step_done()


def zero_loss(model: Module) -> Tensor:
    """A loss whose gradient is zero for every parameter, through DistributedDataParallel.

    The wrapper's forward takes part in the ranks' exchanges (buckets, buffers); the network's
    own layers do not run.

    Args:
        model: a network in DistributedDataParallel, or in a wrapper like it.
    """
    wrapper: Any = getattr(model, "_orig_mod", model)  # torch.compile
    network = wrapper.module
    before = network.__dict__.get("forward")
    network.forward = lambda: _zero_times_parameters(network)
    try:
        return wrapper()  # type: ignore[no-any-return]
    finally:
        del network.forward
        if before is not None:
            network.forward = before


def check_model(model: Module, shapes: Sequence[Shape]) -> None:
    """Refuse a model that would be trained wrongly in steps of these shapes.

    Raises:
        TrainingError: DistributedDataParallel with static_graph and several micro-batches, or
            SyncBatchNorm and different numbers of them.
    """
    uneven = next((shape for shape in shapes if len({len(sizes) for sizes in shape}) > 1), None)
    several = any(len(sizes) != 1 for shape in shapes for sizes in shape)
    if getattr(model, "static_graph", False) and several:
        raise TrainingError(
            "DistributedDataParallel(static_graph=True) fails when its first backward is one of "
            "several micro-batches, and this plan has steps of several (or of none) on some rank. "
            "Leave static_graph out, or plan without micro-batches."
        )
    synchronised = any(isinstance(part, torch.nn.SyncBatchNorm) for part in model.modules())
    if synchronised and uneven is not None:
        counts = ", ".join(str(len(sizes)) for sizes in uneven)
        raise TrainingError(
            "SyncBatchNorm exchanges statistics in every micro-batch, but in this plan the ranks "
            f"have {counts} micro-batches in a step: they would wait for each other for ever. Pass "
            "equal_micro_batches=True to the loader, or use GroupNorm, or BatchNorm with "
            "zeus_hetero.sync_batchnorm."
        )


def _zero_times_parameters(network: Module) -> Tensor:
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    device = trained[0].device
    zeros = [(parameter * 0).sum().to(device, torch.float32) for parameter in trained]
    return torch.stack(zeros).sum()
