"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

APPEARED = "{} exists by now: something else was written there in the meantime"


def missing_path(path: str | os.PathLike, advice: str) -> str:
    """What to say of a file or folder that does not exist: its whole path, and what to give."""
    given, whole = os.fspath(path), os.path.abspath(path)
    return f"{given} does not exist{'' if given == whole else f' ({whole})'}; {advice}"


def file_sha256(path: str | os.PathLike) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    scratch = path.with_name(path.name + ".partial")
    scratch.write_bytes(content)
    replace_durably(scratch, path)


def replace_durably(scratch: Path, path: Path) -> None:
    """Put a file in the place of another; after this a power cut cannot take it."""
    sync(scratch)
    os.replace(scratch, path)
    _fsync(path.parent)


def sync(place: Path) -> None:
    """Wait until the disk has a file, or a folder with everything in it."""
    if place.is_dir():
        for path in place.iterdir():
            sync(path)
    _fsync(place)


def _fsync(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # one that may not be read, or a link to nowhere
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # of file systems that have no fsync
            raise
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    write_bytes(path, text.encode())


def check_new(out: Path) -> None:
    """Raise OSError if a folder to be written exists. Long work checks this before it begins."""
    if out.exists():
        raise OSError(f"{out} exists already; choose a new name")


@contextmanager
def whole_folder(out: str | os.PathLike) -> Iterator[Path]:
    """A scratch folder that becomes `out` if the block ends without an error, and is removed otherwise.

    Raises:
        OSError: if `out` exists.
    """
    out = Path(out)
    check_new(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        try:
            os.replace(scratch, out)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise OSError(APPEARED.format(out)) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def whole_file(out: str | os.PathLike) -> Iterator[Path]:
    """The same for a file: a scratch path with the same name, to which the block writes.

    Raises:
        OSError: if `out` exists.
    """
    out = Path(out)
    check_new(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        scratch = Path(folder) / out.name
        yield scratch
        try:
            os.link(scratch, out)  # unlike a renamed file, it replaces nothing
        except FileExistsError:
            raise OSError(APPEARED.format(out)) from None
        except OSError:  # a file system without hard links
            os.replace(scratch, out)
