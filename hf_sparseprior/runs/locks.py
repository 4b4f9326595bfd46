"""The system's lock on a file: one process has it until it lets go or dies, however it dies.

It is flock. NFS has it on Linux from version 3 on, with its lock daemon; file systems that are mounted with locks of
their own machine only, or with none, do not keep processes of two machines apart.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from hf_sparseprior.runs.environment import command_line

T = TypeVar("T")
REPORT_LOCK = "report.lock"  # in a folder of records, of whoever writes its tables


class NoLocks(OSError):
    """The file system has no locks."""


_held: set[int] = set()  # descriptors of this process
_begun: set[int] = set()  # processes that have had a lock, or would have had one where files can be locked


def _let_go_of_copies() -> None:
    """A forked worker that outlives its parent must not keep the parent's lock."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_of_copies)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Whether this process got the lock of a file, which is made with its folder and removed at the end of the block.

    Raises:
        NoLocks: where files cannot be locked.
    """
    descriptor = _open(path)
    _held.add(descriptor)
    try:
        # Its owner may have removed it after we opened and before we locked it.
        try:
            mine = _take(descriptor, fcntl.LOCK_EX, path) and _is_file(path, descriptor)
        except NoLocks:  # who asked goes on without
            _begun.add(os.getpid())
            raise
        if mine:
            _begun.add(os.getpid())
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{socket.gethostname()} {os.getpid()} {command_line()}\n".encode())
        try:
            yield mine
        finally:
            if mine and _is_file(path, descriptor):
                path.unlink(missing_ok=True)
    finally:
        if descriptor in _held:
            _held.remove(descriptor)
            os.close(descriptor)


def has_begun() -> bool:
    """Whether this process has had a lock, or would have had one where files can be locked."""
    return os.getpid() in _begun


@contextmanager
def turn(path: Path) -> Iterator[None]:
    """Wait for the lock of a file. Where files cannot be locked nothing is waited for."""
    while True:
        with ExitStack() as held:
            with suppress(NoLocks):
                if not held.enter_context(locked(path)):
                    time.sleep(0.05)
                    continue
            yield
            return


def make_once(folder: Path, is_there: Callable[[], bool], make: Callable[[], T]) -> T | None:
    """Make a folder that several processes may find missing; all but one of them wait.

    Returns:
        What `make` returns; None if the folder is there, or was made by another process.
    """
    if is_there():
        return None
    folder = folder.resolve()  # "." has no name
    with turn(folder.with_name(f".{folder.name}.lock")):
        return None if is_there() else make()


def holder(path: Path) -> str | None:
    """Which process has the lock of a file, in words; None if none has it, or if files cannot be locked there."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # it does not exist, or cannot
        return None
    try:
        if _take(descriptor, fcntl.LOCK_SH, path):
            return None
        host, _, rest = os.read(descriptor, 10_000).decode(errors="replace").strip().partition(" ")
        process, _, command = rest.partition(" ")
        return f"process {process} on {host} ({command})" if process else "another process"
    except NoLocks:
        return None
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    for _ in range(9):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # a command that ended removed the folder, which was empty, in between
            continue
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def _take(descriptor: int, how: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise NoLocks(f"{path} cannot be locked ({error.strerror}); choose a folder on another disk") from None
    return True


def _is_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
