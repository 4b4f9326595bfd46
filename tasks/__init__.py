"""Downstream tasks: each folder trains and evaluates hf_sparseprior's models in one framework."""

import sys
from types import TracebackType


def _name_what_is_missing(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End a command whose own modules cannot be imported as `run_command` ends one that has begun."""
    from hf_sparseprior.command import INSTALLS, report_error

    if not isinstance(error, ImportError) or (error.name or "").partition(".")[0] not in INSTALLS:
        return sys.__excepthook__(kind, error, trace)
    command = sys.orig_argv[sys.orig_argv.index("-m") + 1]
    sys.exit(report_error(f"python -m {command}", error))


if sys.argv[:1] == ["-m"]:  # while `python -m tasks...` looks for its module
    sys.excepthook = _name_what_is_missing
