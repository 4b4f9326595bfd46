"""Downstream tasks: each folder trains and evaluates hf_sparseprior's models in one framework."""

import runpy
import sys
from pathlib import Path
from types import TracebackType


def _name_what_is_missing(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End a command whose own modules cannot be imported as `run_command` ends one that has begun."""
    from hf_sparseprior.cli.command import INSTALLS, report_error

    if not isinstance(error, ImportError) or (error.name or "").partition(".")[0] not in INSTALLS:
        return sys.__excepthook__(kind, error, trace)
    command = sys.orig_argv[sys.orig_argv.index("-m") + 1]
    sys.exit(report_error(f"python -m {command}", error))


def _answer_at_once() -> None:
    """End a command that asks for help, or whose arguments are wrong, before its own module is imported.

    That module imports torch, which takes seconds. The parser is in the file commands.py of its folder, which is run
    without the folder's own __init__. A folder that is a command itself has one of its own name.
    """
    command = sys.orig_argv[sys.orig_argv.index("-m") + 1] if "-m" in sys.orig_argv else ""
    package, *folders, name = command.split(".")
    folder = Path(__file__).parent.joinpath(*folders)
    own = folder / name if (folder / name / "__main__.py").is_file() else folder
    file = own / "commands.py"
    if package == __name__ and file.is_file() and (make_parser := runpy.run_path(str(file)).get(name)) is not None:
        make_parser().parse_known_args()


if sys.argv[:1] == ["-m"]:  # while `python -m tasks...` looks for its module
    sys.excepthook = _name_what_is_missing
    _answer_at_once()
