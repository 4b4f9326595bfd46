"""List the cells of a configuration file: python -m tasks.common.config FILE (hf_sparseprior/runs/config.py)"""

from __future__ import annotations

import sys

from hf_sparseprior.cli.command import USER_ERRORS, report_error
from hf_sparseprior.runs.config import read_cells, read_rows
from tasks.common import commands


def main(argv: list[str] | None = None) -> int:
    """List the cells of a file and the rows of its comparisons, each as what follows FILE# in its name."""
    parser = commands.config()
    file = parser.parse_args(argv).file
    try:
        if file.suffix == ".py":  # of mmengine
            from mmengine.config import Config

            cells, rows = Config.fromfile(str(file)).get("cells", {}), {}
        else:
            cells = read_cells(file)
            rows = read_rows(cells, file)
    except USER_ERRORS as error:
        return report_error(parser.prog, error)
    print("\n".join([*filter(None, cells), *rows]) or f"{file} is a single configuration")
    return 0


if __name__ == "__main__":
    sys.exit(main())
