"""A training process for test_restore.py: caps two fake GPUs, then ends as it is told."""

from __future__ import annotations

import os
import signal
import sys
import time

import zeus.optimizer.power_limit
from fake_gpus import A10, T4, FakeGPUs, Monitor

import zeus_hetero.power_limit
from zeus_hetero.power_limit import HeteroPowerLimitOptimizer

# The question alone loads torch, seconds in each process, and signals are what matters here.
zeus.optimizer.power_limit.is_distributed = lambda: False
zeus_hetero.power_limit.is_distributed = lambda: False


def main(state, ending):
    gpus = FakeGPUs([A10, T4], state).install()
    if ending == "ignored":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if ending == "chained":
        signal.signal(signal.SIGTERM, user_handler)
    optimizer = HeteroPowerLimitOptimizer(Monitor(), power_limit={"A10": 100, "T4": 60})
    if ending == "chained later":
        chain_later()
    assert gpus.limits() == [100, 60]
    optimizer.on_step_begin()
    if ending == "fork":
        fork(gpus)
    if ending == "exception":
        raise RuntimeError("the training failed")
    if ending == "exit":
        return
    if ending == "interrupt":
        signal.raise_signal(signal.SIGINT)
    print("capped", flush=True)
    time.sleep(60)


def user_handler(number, frame):
    print("user handler", flush=True)
    sys.exit(7)


def chain_later():
    ours = signal.getsignal(signal.SIGTERM)

    def handler(number, frame):
        print("later handler", flush=True)
        ours(number, frame)

    signal.signal(signal.SIGTERM, handler)


def fork(gpus):
    """A data-loader worker that ends by exit hooks, and one that is stopped by a signal."""
    for stop in (False, True):
        pid = os.fork()
        if pid == 0:
            if stop:
                time.sleep(60)
            sys.exit(0)
        if stop:
            time.sleep(0.2)
            os.kill(pid, signal.SIGTERM)
        status = os.waitpid(pid, 0)[1]
        assert status == (signal.SIGTERM if stop else 0), status
        assert gpus.limits() == [100, 60], "a forked child restored"
    print("children gone", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
