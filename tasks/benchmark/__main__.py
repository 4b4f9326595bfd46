"""One program for all benchmarks: python -m tasks.benchmark NAME [options]"""

from __future__ import annotations

import sys

from hf_sparseprior.runs.command import run_command
from tasks.benchmark import commands


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2, a wrong output returns 1."""
    parser = commands.benchmark()
    arguments = parser.parse_args(argv)
    if arguments.name is None or arguments.list:
        width = max(map(len, commands.ENTRIES))
        print("\n".join(f"{name:{width}}  {entry[0]}" for name, entry in commands.ENTRIES.items()))
        return 0
    from tasks.benchmark import runner  # after the answer to --help: it imports torch

    right: list[bool] = []

    def work() -> None:
        right.append(runner.run(runner.load(arguments.name), arguments))

    status = run_command(f"{parser.prog} {arguments.name}", work, "where it stopped")
    return status or int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
