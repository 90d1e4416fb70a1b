"""How long this worker waits for the others in its training steps."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


class StepClock:
    """Measures the wait at the end of a step.

    DistributedDataParallel waits for the other ranks after the last local gradient is there, at
    the end of the backward pass. So the moment when the graph is done is noted from inside the
    backward pass, before that wait, and the moment when the pass returns after it. What lies
    between is waiting and what is left of the exchange.

    On CUDA both are events on the current stream, read when the figure is asked for: nothing is
    synchronised while training.

    Args:
        device: where the model is trained.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._on_cuda = device is not None and device.type == "cuda"
        self._done: Any = None
        self._spans: list[tuple[Any, Any]] = []
        self._waited = 0.0

    def watch(self, loss: Tensor) -> None:
        """Note when the backward pass of this loss has computed its last local gradient."""
        if loss.requires_grad:
            loss.register_hook(self._when_graph_is_done)

    def micro_batch_done(self, size: int) -> None:
        """A forward-backward pass of so many samples has run."""

    def step_done(self) -> None:
        """The last micro-batch of a step has run, and gradients are exchanged."""
        if self._done is not None:
            self._spans.append((self._done, self._now()))
            self._done = None
        if len(self._spans) >= 1000 and not self._on_cuda:
            self.waited()

    def waited(self) -> float:
        """Time waited so far, s. On CUDA it waits until the GPU has run what was launched."""
        if self._spans and self._on_cuda:
            torch.cuda.synchronize()
        for start, end in self._spans:
            self._waited += start.elapsed_time(end) / 1000 if self._on_cuda else end - start
        self._spans.clear()
        return self._waited

    def _when_graph_is_done(self, gradient: Tensor) -> None:
        # Callbacks run in the order in which they were queued: this one, then the wait of
        # DistributedDataParallel, which queues its own with the first full bucket.
        torch.autograd.Variable._execution_engine.queue_callback(self._note)  # type: ignore[attr-defined]

    def _note(self) -> None:
        self._done = self._now()

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
