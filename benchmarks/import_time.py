"""Time of `import zeus_hetero` against `import pandas`, in fresh interpreters."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

REPEATS = 7


def seconds(statement):
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def main():
    statements = {"nothing": "pass", "zeus_hetero": "import zeus_hetero", "pandas": "import pandas",
                  "allocate": "from zeus_hetero import allocate"}  # fmt: skip
    times = {name: [] for name in statements}
    for _ in range(REPEATS):
        for name, statement in statements.items():
            times[name].append(seconds(statement))
    start = statistics.median(times["nothing"])
    own = {name: statistics.median(values) - start for name, values in times.items()}
    for name in ("zeus_hetero", "allocate"):
        print(f"{name}: {1000 * own[name]:.0f} ms, {own[name] / own['pandas']:.2f} x import pandas")


if __name__ == "__main__":
    main()
