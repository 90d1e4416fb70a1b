"""Train with the plan of every method on simulated GPUs, and compare with what was predicted.

    python examples/compare.py --steps 8

Each method's plan trains one model for the same number of steps on a simulated A10 and T4, under
torchrun, with the power limits that it sets. What Zeus's monitor measures then stands beside what
the plan predicted: the whole way from traces to a trained model, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import pandas as pd
from common import CIFAR100, IMAGENET, SYNTHETIC, friendly
from rich.console import Console
from rich.table import Table

from zeus_hetero import Allocation, plans_by_method, simulation
from zeus_hetero.simulation import SimulatedGPU

EXAMPLES = Path(__file__).resolve().parent
SCRIPTS = {CIFAR100.name: "cifar100/train.py", IMAGENET.name: "imagenet/train_single.py"}
METHODS = ("equal_max_power", "baseline", "heuristic", "brute_force", "optimal")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=SCRIPTS, default=CIFAR100.name)
    parser.add_argument("--global_batch_size", type=int, default=4096)
    parser.add_argument("--granularity", type=int, default=16, help="shares are multiples of this")
    parser.add_argument("--eta", type=float, default=0.5, help="weight of energy against time")
    parser.add_argument("--steps", type=int, default=8, help="training steps per method")
    parser.add_argument(
        "--wait_power", type=float, nargs=2, default=(60.0, 40.0), metavar="W",
        help="what the waiting A10 and T4 draw",
    )  # fmt: skip
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--arch", default="small_cnn", help="see train.py; small for a CPU")
    parser.add_argument("--data", default=SYNTHETIC, help="see train.py")
    parser.add_argument("--output", type=Path, help="write the table as CSV")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    wait_power = dict(zip(("A10", "T4"), args.wait_power))
    cards = [
        simulation.simulated_gpu(name, args.workload, wait_power=watts, counter_period=0.02)
        for name, watts in wait_power.items()
    ]
    plans = make_plans(args, cards, wait_power)
    with tempfile.TemporaryDirectory() as folder:
        measured = {
            method: train(args, cards, plans[method], Path(folder)) for method in args.methods
        }
    show(args, plans, measured)


def train(args, cards: list[SimulatedGPU], plan: Allocation, folder: Path) -> dict:
    """Train in real processes; returns what was measured."""
    plan.save(folder / "plan.json")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc_per_node", str(len(cards)), str(EXAMPLES / SCRIPTS[args.workload]),
        "--plan", "plan.json", "--report", "report.json", "--steps", str(args.steps),
        "--epochs", "1000000", "--arch", args.arch, "--data", args.data, "--lr", "0.01",
        "--simulate", simulation.to_json(cards),
    ]  # fmt: skip
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"training with the {plan.method} plan failed:\n{done.stderr[-3000:]}")
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def make_plans(args, cards: list[SimulatedGPU], wait_power: dict) -> dict[str, Allocation]:
    plans, skipped = plans_by_method(
        {card.name: card.trace for card in cards},
        args.global_batch_size,
        eta=args.eta,
        wait_power=wait_power,
        granularity=args.granularity,
    )
    for method in set(args.methods) & set(skipped):
        raise SystemExit(f"error: {method}: {skipped[method]}")
    return plans


def show(args, plans: dict[str, Allocation], measured: dict[str, dict]) -> None:
    rows = []
    for method, report in measured.items():
        plan = plans[method]
        rows.append(
            {
                "method": method.replace("_", " "),
                "shares": " / ".join(str(worker.batch_size) for worker in plan.workers),
                "limits (W)": " / ".join(str(worker.power_limit) for worker in plan.workers),
                "time (s)": report["time"],
                "predicted (s)": report["predicted_time"],
                "energy (J)": report["energy"],
                "predicted (J)": report["predicted_energy"],
            }
        )
    frame = pd.DataFrame(rows)
    frame["time off"] = frame["time (s)"] / frame["predicted (s)"] - 1
    frame["energy off"] = frame["energy (J)"] / frame["predicted (J)"] - 1
    for unit, name in (("s", "time"), ("J", "energy")):
        frame[f"{name} saved"] = 1 - frame[f"{name} ({unit})"] / frame[f"{name} ({unit})"].iloc[0]
    table = Table(
        title=f"{args.steps} steps of {args.global_batch_size} samples on a simulated A10 and T4 "
        f"({args.workload}): measured, predicted, and saved against {rows[0]['method']}",
        title_justify="left",
    )
    for column in frame:
        table.add_column(column, justify="left" if frame[column].dtype == object else "right")
    for row in frame.itertuples(index=False):
        table.add_row(*(cell(name, value) for name, value in zip(frame, row)))
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    if args.output is not None:
        frame.to_csv(args.output, index=False)
        print(f"wrote {args.output}")


def cell(column: str, value) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.1%}" if column.endswith(("off", "saved")) else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(friendly(main))
