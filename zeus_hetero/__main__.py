"""The command ``zeus-hetero``; also ``python -m zeus_hetero``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and leave with its exit status."""
    from zeus_hetero.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
