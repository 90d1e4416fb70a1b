"""Traces of imaginary GPUs: a physical formula, not the one that the models assume, plus noise.

And the real ones where the raw measurements are at hand.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from zeus_hetero.trace import Trace, load_trace
from zeus_hetero.uncertainty import subset

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
LIMITS = (250, 225, 200, 175, 150, 125, 100)


class ImaginaryGPU:
    """Launches kernels for `overhead` s while it computes `sample` s per sample at full clock.

    The clock falls with the cube root of the power that a limit leaves for computing.
    """

    def __init__(self, overhead=0.03, sample=2e-4, idle=45.0, compute=190.0, hidden=0.7):
        self.overhead, self.sample = overhead, sample
        self.idle, self.compute, self.hidden = idle, compute, hidden

    def time(self, batch, limit):
        batch, limit = np.asarray(batch, dtype=float), np.asarray(limit, dtype=float)
        clock = np.minimum(1.0, (np.maximum(limit - self.idle, 5) / self.compute) ** (1 / 2.2))
        work = self.sample * batch / clock
        # Part of the launches hides behind computing, part adds to it.
        longest = np.maximum(self.overhead, work)
        return longest + (1 - self.hidden) * np.minimum(self.overhead, work)

    def power(self, batch, limit):
        limit = np.asarray(limit, dtype=float)
        busy = np.minimum(1.0, self.sample * np.asarray(batch) / self.time(batch, 1e9))
        return np.minimum(self.idle + self.compute * busy, limit)

    def energy(self, batch, limit):
        return self.time(batch, limit) * self.power(batch, limit)

    def trace(self, noise=0.02, seed=0, sizes=SIZES, limits=LIMITS, gpu="imaginary") -> Trace:
        rng = np.random.default_rng(seed)
        batch, limit = (grid.ravel() for grid in np.meshgrid(sizes, limits, indexing="ij"))
        time = self.time(batch, limit) * np.exp(noise * rng.standard_normal(len(batch)))
        power = self.power(batch, limit) * np.exp(noise / 2 * rng.standard_normal(len(batch)))
        frame = pd.DataFrame(
            {"batch_size": batch, "power_limit": limit, "time": time, "energy": time * power}
        )
        return load_trace(frame, gpu=gpu)


GPUS = {
    "usual": ImaginaryGPU(),
    "strong": ImaginaryGPU(overhead=0.02, sample=9e-5, idle=60, compute=230),
    "weak": ImaginaryGPU(overhead=0.06, sample=4e-4, idle=30, compute=120),
    "starving": ImaginaryGPU(overhead=0.05, sample=3e-4, idle=88, compute=160),
}


def part(trace: Trace, count: int, seed: int) -> Trace:
    """Some random points of a trace."""
    drawn = np.random.default_rng(seed).permutation(len(trace))[:count]
    return subset(trace, np.sort(drawn))


def changed(trace: Trace, batch: int, limit: int, time_factor: float) -> Trace:
    """The trace with one measured time (and the energy with it) multiplied."""
    frame = trace.to_frame()
    at = (frame["batch_size"] == batch) & (frame["power_limit"] == limit)
    frame.loc[at, ["time", "energy"]] *= time_factor
    return load_trace(frame, gpu=trace.gpu)


# Of Zeus's public power traces.
VISIBLE = (
    ("cifar100", "shufflenetv2", "adadelta"),
    ("imagenet", "resnet50", "adadelta"),
    ("squad", "bert_base_uncased", "adamw"),
)
CARDS = ("a40", "p100", "rtx6000", "v100")


def real(shared_data, workload, gpu) -> Trace:
    """A real trace in relative units."""
    dataset, network, optimizer = workload
    return load_trace(
        shared_data / "zeus_power_traces" / f"summary_power_{gpu}.csv",
        gpu=gpu,
        dataset=dataset,
        network=network,
        optimizer=optimizer,
    )
