"""Files of JSON as others may have made them: each is read, or refused in one line before it costs time or memory."""

import os
import time

import pytest

from hf_sparseprior.base import json_files
from hf_sparseprior.base.json_files import read_json, read_json_object

MANY_KEYS = "{" + ",".join(f'"k{number}": 1' for number in range(20_000)) + ', "k5": 2}'
REFUSED = {
    "deep": ('{"a": ' + "[" * 100 + "]" * 100 + "}", "nested more than 100 levels deep"),
    "deeper": ("[" * 100_000, "nested too deep"),
    "objects": ('{"a": ' * 100_000, "nested too deep"),
    "twice": (MANY_KEYS, "key 'k5' is there twice"),
    "nan": ('{"a": NaN}', "a=nan must be a finite number"),
    "infinity": ('{"a": [-Infinity]}', "a.0=-inf must be a finite number"),
    "overflow": ('{"a": 1e999}', "a=inf must be a finite number"),
    "list": ("[1]", r"it holds \[1\]"),
    "digits": ('{"a": ' + "1" * 5000 + "}", "digits"),
    "bytes": (b"\xff{}", "decode"),
    "empty": ("", "Expecting value"),
}


@pytest.mark.parametrize(("content", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_plain_object_is_one_short_line(tmp_path, content, said):
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    start = time.process_time()
    with pytest.raises(OSError, match=said) as error:
        read_json_object(file)
    assert str(error.value).startswith(f"{file} is not a JSON object (") and len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 400 and time.process_time() - start < 2  # the keys once took 5 s


def pipe(file):
    os.mkfifo(file)


def device(file):
    file.symlink_to("/dev/zero")


def sparse(file):
    with file.open("wb") as opened:
        opened.truncate(json_files.CONFIG_BYTES + 1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (pipe, "must be a regular file; it is a pipe"),
        (device, "must be a regular file; it is a pipe, a socket or a device"),
        (os.mkdir, "must be a regular file; it is a folder"),
        (sparse, "has 16777217 bytes; files of its kind are read up to 16777216 bytes"),
    ],
)
def test_what_would_hang_or_fill_the_memory_is_not_read(tmp_path, make, said):
    make(tmp_path / "config.json")
    with pytest.raises(OSError, match=f"config.json {said}"):
        read_json(tmp_path / "config.json")


def test_what_is_allowed_is_read(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('{"a": ' + "[" * 99 + "1.5e3" + "]" * 99 + ', "\u00e4": null}')
    assert set(read_json(file)) == {"a", "\u00e4"}
    (tmp_path / "link.json").symlink_to(file)
    assert read_json(tmp_path / "link.json") == read_json(file)
    file.write_text('{"loss": NaN, "a": 1, "a": 2}')
    assert read_json(file, finite=False, strict=False)["a"] == 2
    sparse(file)
    with pytest.raises(ValueError, match="Expecting value"):
        read_json(file, json_files.RECORD_BYTES)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none.json")
