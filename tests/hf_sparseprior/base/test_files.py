"""Files that appear whole or not at all, and that a power cut cannot take."""

import errno
import os

import pytest

from hf_sparseprior.base import files


def test_a_file_is_on_the_disk_before_it_takes_its_place_and_the_folder_after(tmp_path, monkeypatch):
    done, replace = [], os.replace
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: done.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    monkeypatch.setattr(files.os, "replace", lambda *paths: (done.append("replaced"), replace(*paths)))
    files.write_text(tmp_path / "a.json", "{}")
    assert done == [f"{tmp_path}/a.json.partial", "replaced", str(tmp_path)]
    assert (tmp_path / "a.json").read_text() == "{}" and list(tmp_path.iterdir()) == [tmp_path / "a.json"]


def test_a_folder_is_synced_with_all_it_holds_and_links_to_nowhere_are_left_alone(tmp_path, monkeypatch):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    done = []
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: done.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    files.sync(tmp_path)
    assert done == [f"{tmp_path}/deep/er/file", f"{tmp_path}/deep/er", f"{tmp_path}/deep", str(tmp_path)]


@pytest.mark.parametrize(("number", "raised"), [(errno.EINVAL, False), (errno.ENOSPC, True), (errno.EIO, True)])
def test_a_file_system_without_fsync_is_used_and_an_error_of_the_disk_is_raised(tmp_path, monkeypatch, number, raised):
    def fail(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "fsync", fail)
    if raised:
        with pytest.raises(OSError):
            files.write_text(tmp_path / "a", "x")
    else:
        files.write_text(tmp_path / "a", "x")
        assert (tmp_path / "a").read_text() == "x"


def test_a_folder_that_appears_while_another_is_written_is_left_alone(tmp_path):
    message = "a exists by now: something else was written there"
    with pytest.raises(OSError, match=message), files.whole_folder(tmp_path / "a") as scratch:
        (scratch / "mine").touch()
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "theirs").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "theirs"]


@pytest.mark.parametrize("links", [True, False])
def test_a_file_is_whole_or_not_there_and_two_writers_do_not_mix(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(files.os, "link", lambda *paths: os.open(tmp_path, os.O_WRONLY))  # fails as it would
    out = tmp_path / "a.csv"
    with files.whole_file(out) as first:
        first.write_text("first")
        with pytest.raises(ZeroDivisionError), files.whole_file(out) as other:
            other.write_text("other")
            assert 1 / 0
        assert not out.exists() and first.suffix == ".csv" and first != other
    assert out.read_text() == "first" and list(tmp_path.iterdir()) == [out]
    with pytest.raises(OSError, match="exists already"), files.whole_file(out):
        pass


def test_a_file_that_appears_while_another_is_written_is_left_alone(tmp_path):
    out = tmp_path / "a.csv"
    with pytest.raises(OSError, match=r"a\.csv exists by now"), files.whole_file(out) as scratch:
        scratch.write_text("mine")
        out.write_text("theirs")
    assert out.read_text() == "theirs" and list(tmp_path.iterdir()) == [out]
