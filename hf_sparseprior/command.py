"""How commands end when something goes wrong."""

from __future__ import annotations

import os
import sys
import traceback

# Errors that a user's values, files and machine cause: one line and exit status 2. Every other error is a mistake of
# the program and keeps its traceback.
USER_ERRORS = (ValueError, OSError, ImportError, MemoryError)
TRACEBACK = "SPARSEPRIOR_TRACEBACK"  # environment variable; 1 shows the traceback of a user's error, too


def report_error(program: str, error: BaseException) -> int:
    """Print one of `USER_ERRORS` as one line on stderr, after its traceback if SPARSEPRIOR_TRACEBACK=1.

    Returns:
        The exit status, 2.
    """
    if os.environ.get(TRACEBACK, "0") not in ("", "0"):
        traceback.print_exception(error)
    print(f"{program}: {one_line(error)}", file=sys.stderr)
    return 2


def one_line(error: BaseException) -> str:
    """An error's text, or its type if it has none. The text of an error in a data loader worker is the worker's
    traceback, so only its last line is taken.
    """
    text = str(error) or type(error).__name__
    return text.strip().splitlines()[-1].partition(": ")[2] if text.startswith("Caught ") else text
