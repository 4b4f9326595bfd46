"""What commands have in common: the arguments of those that train, and how all end."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from hf_sparseprior.cli.command import USER_ERRORS, report_error
from hf_sparseprior.cli.image_files import PassedOver, printable


class RunStopped(Exception):
    """SIGTERM ended the run, which saved a checkpoint and goes on from there."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it ends a command as Ctrl-C does."""


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM raises `Terminated` in the block, so that scratch files and compilers go before the process does.

    A second SIGTERM ends the process at once. Python has signal handlers in its main thread only; in another nothing is
    done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(signum: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    earlier = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


def run_command(program: str, work: Callable[[], None], goes_on: str | None = None) -> int:
    """Do the work of a command; a bad value, a missing package, SIGTERM and Ctrl-C end it with one line.

    SPARSEPRIOR_TRACEBACK=1 shows the traceback before that line. An error that no value of the user causes, such as a
    TypeError, is raised.

    Args:
        program: the command's name.
        work: what it does.
        goes_on: from where the same command goes on after Ctrl-C; None if it starts anew.

    Returns:
        The exit status: 0, 2 for a bad value or a missing package, 143 for SIGTERM, 130 for Ctrl-C.
    """
    try:
        work()
    except USER_ERRORS as error:
        return report_error(program, error)
    except RunStopped as stopped:
        print(f"{program}: {stopped}", file=sys.stderr)
        return 128 + signal.SIGTERM
    except KeyboardInterrupt as interrupt:
        after = "nothing was written" if goes_on is None else f"the same command goes on {goes_on}"
        terminated = isinstance(interrupt, Terminated)
        print(f"\n{program}: {'ended by SIGTERM' if terminated else 'interrupted'}; {after}", file=sys.stderr)
        return 128 + (signal.SIGTERM if terminated else signal.SIGINT)
    return 0


def tell_passed_over(*readers: PassedOver) -> None:
    """Print in one line what readers of a run's data left out, if they did. For one process of a run."""
    together = PassedOver()
    for passed_over in readers:
        together.join(passed_over)
    if (line := together.line()) is not None:
        print(line, flush=True)


def tell_data(
    examples: str,
    splits: Mapping[str, tuple[int | None, str]],
    classes: Sequence[str] | None = None,
    labels: str = "classes",
) -> None:
    """Print what a run is about to learn from and what it is judged by, in one line.

    Args:
        examples: what the data consists of, such as "images".
        splits: {"trains", "validates" or "tests": (number of examples, where the split comes from)}; a number is None
            where the data does not say it, and a part that a run does not have is left out.
        classes: their names; None where there are none.
        labels: what an example has: one of the "classes", "several" of them, or "numbers" of these names.
    """
    parts: list[str] = []
    kinds = {"classes": "of {} classes", "several": "with several of {} labels", "numbers": "with {} numbers"}
    for does, (count, name) in splits.items():
        number = "an unknown number of" if count is None else count
        noun = examples.removesuffix("s") if count == 1 else examples
        known = ""
        if classes is not None and not parts:
            known = f" {kinds[labels].format(len(classes))} {short(classes)}"
        parts.append(f"{does} on {number} {noun}{known} ({printable(name)})")
    print(", ".join(parts), flush=True)


def short(names: Sequence[str], count: int = 10) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return f"[{', '.join(map(shown, names[:count]))}]{more}"


def shown(value: object, length: int = 80) -> str:
    """A value as Python writes it, its end cut off where that is longer."""
    text = repr(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."
