"""Demonstrations in another layout and back, whole or not at all."""

import json

import numpy as np
import pytest

pytest.importorskip("av", reason="the robotics extra is not installed")
pytest.importorskip("h5py", reason="the robotics extra is not installed")

import h5py

from tasks.fullsize.fixtures import fixture
from tasks.robotics import convert
from tasks.robotics.formats import Episode, open_demonstrations, write_demonstrations
from tasks.robotics.formats.zarr_layout import PUSHT_SETTINGS
from tests.tasks.robotics.lerobot.test_dataset import FIXTURE
from tests.tasks.robotics.walk import SETTINGS, write_walk


@pytest.fixture
def pusht(tmp_path):
    """Five episodes of PushT with images, in zarr."""
    random, paths = np.random.default_rng(1), []
    for seed in (7, 3, 11, 5, 2):
        length = int(random.integers(5, 9))
        state = random.uniform(50, 450, (length, 5)).astype(np.float32)
        seen = {"agent_pos": state[:, :2], "state": state, "keypoints": random.uniform(0, 512, (length, 16))}
        seen["image"] = np.tile(random.integers(0, 256, (length, 1, 1, 3)), (1, 96, 96, 1)).astype(np.uint8)
        rewards = np.linspace(0, 1, length)
        paths.append(tmp_path / f"{seed}.npz")
        actions = random.uniform(0, 512, (length, 2)).astype(np.float32).astype(np.float64)
        noisy = actions + random.normal(size=(length, 2))
        Episode(seed, actions, noisy, state.astype(np.float64), rewards, rewards >= 1, seen).save(paths[-1])
    settings = {**PUSHT_SETTINGS, "versions": {}, "cameras": ["image"], "image_size": 96}
    write_demonstrations(tmp_path / "pusht.zarr", paths, settings, held=[False, True, False, False, True])
    return tmp_path / "pusht.zarr"


@pytest.fixture
def walk(tmp_path):
    return write_walk(tmp_path)


def numbers(path):
    """All that a layout holds, by episode: what the file says, read by nothing of ours where it is HDF5."""
    data = open_demonstrations(path)
    return {name: data.episode(name) for name in data.episodes}


@pytest.mark.parametrize(("name", "images"), [("walk", "video"), ("pusht", "image")])
def test_there_and_back_is_what_it_was(name, images, request, tmp_path):
    source = request.getfixturevalue(name)
    there, back = tmp_path / f"{name}.lerobot", tmp_path / f"back{source.suffix}"
    assert convert.main([str(source), str(there), "--images", images]) == 0
    assert convert.main([str(there), str(back)]) == 0
    first, last = open_demonstrations(source), open_demonstrations(back)
    assert first.settings == last.settings and first.split("validation") == last.split("validation") != ()
    assert first.seeds == last.seeds and None not in last.seeds.values()
    own, again = numbers(source), numbers(back)
    assert own.keys() == again.keys()
    for episode, was in own.items():
        found = again[episode]
        for part in ("actions", "executed", "states", "rewards", "dones"):
            kind = np.float32 if part == "rewards" else None  # which lerobot has in float32
            assert np.array_equal(np.asarray(getattr(was, part), kind), np.asarray(getattr(found, part), kind)), part
        for key, values in was.observations.items():
            loss = np.abs(values.astype(float) - found.observations[key])
            lossy = images == "video" and values.ndim == 4
            assert loss.mean() < 3 if lossy else loss.max() == 0, key


def test_what_hdf5_holds_is_in_the_converted_file(walk, tmp_path):
    """Read by h5py alone."""
    convert.convert(walk, tmp_path / "walk.lerobot", "image")
    convert.convert(tmp_path / "walk.lerobot", tmp_path / "back.hdf5")
    with h5py.File(walk) as was, h5py.File(tmp_path / "back.hdf5") as found:
        names, others = [], []
        was.visit(names.append)
        found.visit(others.append)
        assert names == others and json.loads(was["data"].attrs["env_args"]) == json.loads(
            found["data"].attrs["env_args"]
        )
        for name in names:
            assert dict(was[name].attrs) == dict(found[name].attrs)
            if isinstance(was[name], h5py.Dataset):
                assert np.array_equal(was[name][:], found[name][:]) and was[name].dtype == found[name].dtype


@pytest.mark.parametrize("name", ["pusht", "can"])
def test_published_files_become_data_sets(name, tmp_path):
    """They have no seeds, executed actions or rewards; robomimic's actions are converted."""
    folder = fixture(name, tmp_path / "fixtures")
    (source,) = (path for path in folder.iterdir() if not path.name.startswith("."))
    out = tmp_path / f"{name}.lerobot"
    convert.convert(source, out, "image")
    was, found = open_demonstrations(source), open_demonstrations(out)
    assert was.action_size == found.action_size == {"pusht": 2, "can": 10}[name]
    for episode in was.episodes:
        assert np.array_equal(was.read(episode, "actions"), found.read(episode, "actions"))
        whole = found.episode(episode)
        assert (
            whole.seed is None
            and not whole.rewards.any()
            and whole.dones.tolist() == [False] * (found.lengths[episode] - 1) + [True]
        )
        assert np.array_equal(whole.executed, whole.actions)
    back = tmp_path / f"back{'.zarr' if name == 'pusht' else '.hdf5'}"
    convert.convert(out, back)
    assert open_demonstrations(back).split("train") == was.split("train")


def test_lerobots_own_files_are_written_again(tmp_path):
    loss = convert.convert(FIXTURE, tmp_path / "again.lerobot", "image")
    assert loss == {"top": 0.0, "image": 0.0}
    with pytest.raises(
        ValueError, match=r"is of environment \"lerobot's table\"; .hdf5 holds demonstrations of lift and"
    ):
        convert.convert(FIXTURE, tmp_path / "again.hdf5")


def test_what_does_not_come_back_has_no_name(walk, tmp_path, monkeypatch, capsys):
    """Neither where writing fails nor where the check does; nothing is left next to it."""
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(convert, "VIDEO_LOSS", 0.0)
    assert convert.main([str(walk), str(tmp_path / "out.lerobot")]) == 2
    assert "agentview_image of demo_0 did not come back as it was" in capsys.readouterr().err
    monkeypatch.setattr(convert, "compare", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
    assert convert.main([str(walk), str(tmp_path / "out.lerobot")]) == 130
    assert "interrupted; nothing was written" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("out.h5", r"must end in .lerobot (every environment), .hdf5 (lift and can), .zarr (pusht)"),
        ("out.zarr", "is of environment 'lift'; .zarr holds demonstrations of pusht"),
        ("walk.hdf5", "exists already; choose a new name"),
    ],
)
def test_bad_names_are_one_line(walk, out, said, tmp_path, capsys):
    assert convert.main([str(walk), str(tmp_path / out)]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and "\n" not in error


def test_damaged_and_missing_demonstrations_are_one_line(tmp_path, capsys):
    (tmp_path / "broken.hdf5").write_bytes(b"no file")
    for name, said in (("broken.hdf5", "is no whole HDF5 file"), ("missing.hdf5", "no demonstrations at")):
        assert convert.main([str(tmp_path / name), str(tmp_path / "out.lerobot")]) == 2
        assert said in capsys.readouterr().err
    assert SETTINGS["environment"] == "lift" and not (tmp_path / "out.lerobot").exists()
