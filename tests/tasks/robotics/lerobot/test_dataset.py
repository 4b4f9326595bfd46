"""LeRobotDataset: files of lerobot's writer are read, and ours are like them (make_fixture.py, check_written.py)."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("av", reason="the robotics extra is not installed")
pytest.importorskip("diffusers", reason="the robotics extra is not installed")
pytest.importorskip("h5py", reason="the robotics extra is not installed")

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.robotics import train
from tasks.robotics.formats import Episode, demonstrations_sha256, open_demonstrations, write_demonstrations
from tasks.robotics.formats import lerobot_files as files
from tasks.robotics.formats.lerobot_writer import write_lerobot
from tests.tasks.robotics.lerobot.make_fixture import FPS, LENGTHS, frame
from tests.tasks.robotics.walk import configuration, write_walk

pytestmark = pytest.mark.usefixtures("fresh_accelerator")

FIXTURE = Path(__file__).parents[3] / "fixtures" / "lerobot_v3"
KEYS = {
    "top": "observation.images.top", "image": "observation.image", "state": "observation.state",
    "environment_state": "observation.environment_state", "actions": "action",
}  # fmt: skip


@pytest.fixture
def theirs(tmp_path):
    """A copy of what lerobot's writer wrote."""
    return Path(shutil.copytree(FIXTURE, tmp_path / "theirs"))


# ---- reading --------------------------------------------------------------------------------------------------------


def test_files_of_lerobots_writer_are_read():
    data = open_demonstrations(FIXTURE)
    assert list(data.lengths.values()) == list(LENGTHS) and data.action_size == 2
    assert data.shapes == {"top": (64, 64, 3), "image": (16, 16, 3), "state": (3,), "environment_state": (2,)}
    assert data.split("train") == ("demo_0", "demo_1") and data.split("validation") == ("demo_2",)
    assert set(data.seeds.values()) == {None} and data.environment["name"] == "lerobot's table"
    for episode, length in enumerate(LENGTHS):
        steps = [frame(episode, step) for step in range(length)]
        for key, feature in KEYS.items():
            expected = np.stack([step[feature] for step in steps])
            for start, stop in ((0, length), (1, 3), (length - 1, length)):
                read = data.read(f"demo_{episode}", key, start, stop)
                assert read.dtype == expected.dtype and read.shape == expected[start:stop].shape
                loss = np.abs(read.astype(float) - expected[start:stop])
                assert loss.mean() < 3 and loss.max() < 12 if key == "top" else loss.max() == 0


def test_a_range_in_info_is_the_validation_split(theirs):
    edit(theirs, lambda info: info.update(splits={"train": "1:3", "val": "0:1"}))
    assert open_demonstrations(theirs).split("validation") == ("demo_0",)


def test_images_may_have_their_channels_first(theirs):
    def turn(info):
        info["features"]["observation.images.top"].update(shape=[3, 64, 64], names=["channels", "height", "width"])

    edit(theirs, turn)
    assert open_demonstrations(theirs).shapes["top"] == (64, 64, 3)


def test_another_data_set_is_learned_from_and_has_no_simulator(tmp_path):
    config = configuration(FIXTURE, tmp_path / "run", steps=2, batch_size=4, validate_steps=2, save_steps=2)
    config["policy"] |= {"observations": {"state": [3], "environment_state": [2]}, "action_size": 2}
    config["policy"] |= {"horizon": 4, "action_steps": 2}
    assert np.isfinite(train.run(config)["metrics"]["validation_loss"])
    config["trainer"] |= {"validation_episodes": 1, "output_dir": str(tmp_path / "simulated")}
    with pytest.raises(ValueError, match='environment "lerobot\'s table" must be one of lift, can, pusht'):
        train.run(config)


def edit(root: Path, change) -> None:
    info = json.loads((root / files.INFO).read_text())
    change(info)
    (root / files.INFO).write_text(json.dumps(info))


def change_table(path: Path, change) -> None:
    columns = pq.read_table(path).to_pydict()
    change(columns)
    pq.write_table(pa.table(columns), path)


def info(change):
    return lambda root: edit(root, change)


def column(name, change):
    return lambda root: change_table(root / name, change)


EPISODES = f"{files.EPISODES}/chunk-000/file-000.parquet"
DATA = "data/chunk-000/file-000.parquet"
VIDEO = "videos/observation.images.top/chunk-000/file-000.mp4"
DAMAGES = [
    (info(lambda i: i.update(codebase_version="v2.1")), "codebase_version='v2.1', v3.0 is read"),
    (info(lambda i: i.update(fps=0)), "fps=0, which must be a number above 0"),
    (info(lambda i: i.update(fps=20)), r"timestamp of frame \d is 0.\d+ s from where fps=20"),
    (info(lambda i: i.pop("features")), "has no features"),
    (info(lambda i: i["features"].pop("action")), "has no feature 'action'"),
    (info(lambda i: i["features"]["action"].update(shape=[0])), r"action has shape=\[0\]"),
    (info(lambda i: i["features"]["action"].update(shape=[3])), "6 numbers for 3 frames of 3"),
    (
        info(lambda i: i["features"].update({"observation.top": i["features"]["action"]})),
        "observation.top and another feature would both be called 'top'",
    ),
    (info(lambda i: i.update(total_frames=13)), "3 episodes of 12 frames, meta/info.json says 3"),
    (info(lambda i: i.update(data_path="../{chunk_index}.parquet")), "leads out of the data set"),
    (info(lambda i: i.update(data_path="/etc/passwd")), "leads out of the data set"),
    (info(lambda i: i.update(data_path="{chunk_index.__class__}")), "has a field"),
    (info(lambda i: i.update(data_path="{}")), "has a field ''"),
    (info(lambda i: i.update(video_path=None)), "video_path"),
    (
        info(lambda i: i["features"]["observation.images.top"].update(shape=[32, 64, 3])),
        "has 64x64 pixels, meta/info.json says 32x64",
    ),
    (lambda root: (root / VIDEO).unlink(), f"{VIDEO} is missing"),
    (lambda root: (root / VIDEO).write_bytes((root / VIDEO).read_bytes()[:700]), f"{VIDEO} is no whole video"),
    (lambda root: (root / DATA).unlink(), f"{DATA} is missing"),
    (lambda root: (root / DATA).write_bytes((root / DATA).read_bytes()[:900]), "is damaged"),
    (lambda root: shutil.rmtree(root / files.EPISODES), "has no meta/episodes"),
    (column(EPISODES, lambda c: c.pop("length")), "has no column length"),
    (column(EPISODES, lambda c: c["length"].__setitem__(0, 4)), "episode 0 is not where"),
    (column(DATA, lambda c: c.pop("action")), "has no column action"),
    (column(DATA, lambda c: c["frame_index"].__setitem__(2, 1)), "frame_index of data does"),
    (column(DATA, lambda c: c["action"].__setitem__(2, [0.0, float("inf")])), "action has numbers that are not finite"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_what_is_wrong_is_named(theirs, damage, message):
    damage(theirs)
    with pytest.raises(ValueError, match=message) as raised:
        open_demonstrations(theirs)
    assert str(raised.value).startswith(str(theirs)) and "\n" not in str(raised.value)


def test_a_frame_that_a_video_does_not_have_is_named(theirs):
    where = "videos/observation.images.top/from_timestamp"
    change_table(theirs / EPISODES, lambda columns: columns[where].__setitem__(1, 0.35))
    with pytest.raises(ValueError, match=r"demo_1/top cannot be read .* has no frame at 0.350 s"):
        open_demonstrations(theirs).read("demo_1", "top")


# ---- writing --------------------------------------------------------------------------------------------------------


def episodes_of(make_episode, task: str) -> list[Episode]:
    return [make_episode(100 + number, length, task) for number, length in enumerate((5, 3, 7))]


@pytest.mark.parametrize(("task", "images"), [("lift", "video"), ("pusht", "image")])
def test_what_was_written_is_read(tmp_path, request, make_episode, task, images):
    """One episode a file. Noise is the worst that a video can be asked to keep; other frames differ more."""
    settings = request.getfixturevalue("pusht_settings" if task == "pusht" else "arm_settings")
    episodes = episodes_of(make_episode, task)
    write_lerobot(tmp_path / "data", episodes, settings, images, megabytes=(0, 0))
    data = open_demonstrations(tmp_path / "data")
    assert data.settings == settings and data.split("validation") == ("demo_2",)
    assert data.shapes.keys() == episodes[0].observations.keys()
    for name, episode in zip(data.episodes, episodes, strict=True):
        assert data.seeds[name] == episode.seed
        assert np.array_equal(data.read(name, "actions"), episode.actions.astype(np.float32))
        assert np.array_equal(data.read(name, "executed_actions"), episode.executed)
        for key, values in episode.observations.items():
            read = data.read(name, key, 1)
            assert read.dtype == values.dtype and read.shape == values[1:].shape
            if values.ndim == 4 and images == "video":
                loss = np.abs(read.astype(float) - values[1:]).mean((1, 2, 3))
                assert (loss < 0.75 * np.abs(values[:-1].astype(float) - values[1:]).mean((1, 2, 3))).all()
            else:
                assert np.array_equal(read, values[1:])
    kinds = {"mp4": 3 * (images == "video"), "parquet": 5}
    assert {kind: len([*(tmp_path / "data").rglob(f"*.{kind}")]) for kind in kinds} == kinds
    assert len(demonstrations_sha256(tmp_path / "data")) == 64


@pytest.fixture(scope="module")
def both(tmp_path_factory, arm_settings, make_episode):
    """Our data set with images of both kinds."""
    folder = tmp_path_factory.mktemp("both")
    for images in ("video", "image"):
        write_lerobot(folder / images, episodes_of(make_episode, "lift"), arm_settings, images)
    return folder / "video", folder / "image"


def test_tables_have_lerobots_columns(both):
    ours, stored = (pq.read_table(root / DATA).schema for root in both)
    reference = pq.read_table(FIXTURE / DATA).schema
    kinds = {name: str(reference.field(name).type) for name in reference.names}
    for name in ("next.reward", "next.done", "timestamp", "frame_index", "episode_index", "index", "task_index"):
        assert str(ours.field(name).type) == kinds[name]
    assert str(stored.field("observation.images.agentview").type) == kinds["observation.image"]
    assert str(ours.field("action").type) == "fixed_size_list<element: float>[10]"
    assert kinds["action"] == "fixed_size_list<element: float>[2]"
    features, known = (
        json.loads(schema.metadata[b"huggingface"])["info"]["features"] for schema in (stored, reference)
    )
    assert features["observation.images.agentview"] == known["observation.image"]
    assert features["next.done"] == known["next.done"]
    assert features["action"] == {**known["action"], "length": 10}

    ours, reference = (pq.read_table(root / EPISODES).schema for root in (both[0], FIXTURE))
    renamed = [name.replace("images.agentview", "images.top") for name in ours.names]
    for name in reference.names:
        if not name.startswith("stats/observation.image/"):
            assert str(ours.field(renamed.index(name)).type) == str(reference.field(name).type), name
    ours, reference = (pq.read_table(root / files.TASKS) for root in (both[0], FIXTURE))
    assert ours.column_names == reference.column_names
    assert [key for key in ours.schema.metadata] == [key for key in reference.schema.metadata]


def test_info_is_lerobots(both):
    ours, reference = (json.loads((root / files.INFO).read_text()) for root in (both[0], FIXTURE))
    assert ours.keys() == reference.keys()
    for key in ("codebase_version", "chunks_size", "data_files_size_in_mb", "video_files_size_in_mb"):
        assert ours[key] == reference[key]
    assert (ours["data_path"], ours["video_path"]) == (reference["data_path"], reference["video_path"])
    video, known = ours["features"]["observation.images.agentview"], reference["features"]["observation.images.top"]
    assert video["info"].keys() == known["info"].keys() and video["names"] == known["names"]
    assert video["info"]["video.codec"] == "h264" and video["info"]["video.fps"] == 20
    for name in ("timestamp", "frame_index", "index", "next.done"):
        assert ours["features"][name] == reference["features"][name]


def test_statistics_are_lerobots():
    """Of lerobot's own frames, but not its quantiles, of which it has estimates, and its deviations of images, which
    are not those of the pixels. These are compared with numpy's.
    """
    stored = json.loads((FIXTURE / files.STATS).read_text())
    steps = [frame(episode, step) for episode, length in enumerate(LENGTHS) for step in range(length)]
    found = {
        name: files.number_statistics(np.stack([step[name] for step in steps]))
        for name in ("observation.state", "action", "next.reward")
    }
    found["observation.image"] = (
        files.ImageHistogram().add(np.stack([step["observation.image"] for step in steps])).statistics()
    )
    for name, statistics in found.items():
        assert statistics.keys() == stored[name].keys()
        for key in ("min", "max", "mean", "std", "count"):
            assert np.shape(statistics[key]) == np.shape(stored[name][key])
            if (name, key) != ("observation.image", "std"):
                assert np.allclose(statistics[key], stored[name][key], atol=1e-6), (name, key)
    pixels = np.stack([step["observation.image"] for step in steps]) / 255
    assert np.allclose(np.ravel(found["observation.image"]["std"]), pixels.std((0, 1, 2)))
    for key, share in files.QUANTILES.items():
        exact = np.quantile(pixels, share, axis=(0, 1, 2), method="inverted_cdf")
        assert np.array_equal(np.ravel(found["observation.image"][key]), exact)


def test_a_name_that_ends_in_lerobot_becomes_one(tmp_path):
    walk = open_demonstrations(write_walk(tmp_path))
    sources = [tmp_path / f"{seed}.npz" for seed in range(11)]
    write_demonstrations(tmp_path / "walk.lerobot", sources, walk.settings)
    data = open_demonstrations(tmp_path / "walk.lerobot")
    assert data.lengths == walk.lengths and data.split("validation") == walk.split("validation")
    config = configuration(tmp_path / "walk.lerobot", tmp_path / "run", steps=2, save_steps=2)
    other = configuration(tmp_path / "walk.hdf5", tmp_path / "other", steps=2, save_steps=2)
    runs = [train.run(each) for each in (config, other)]
    assert runs[0]["history"] == runs[1]["history"] and runs[0]["windows"] == runs[1]["windows"]


def test_what_cannot_be_written_is_named(tmp_path, arm_settings, make_episode):
    with pytest.raises(ValueError, match="images='gif' must be one of video, image"):
        write_lerobot(tmp_path / "data", [], arm_settings, "gif")
    with pytest.raises(ValueError, match="there is no episode to write"):
        write_lerobot(tmp_path / "data", [], arm_settings)
    episode = make_episode(0, 3)
    episode.observations["agentview_image"] = np.zeros((3, 15, 15, 3), np.uint8)
    with pytest.raises(ValueError, match="has 15x15 pixels; a video needs even sides, images='image' does not"):
        write_lerobot(tmp_path / "data", [episode], arm_settings)
    assert not [*tmp_path.iterdir()]
    write_lerobot(tmp_path / "data", [episode], arm_settings | {"image_size": 15}, "image")
    with pytest.raises(OSError, match="exists already"):
        write_lerobot(tmp_path / "data", [episode], arm_settings)


def test_frames_are_as_far_apart_as_fps_says():
    data = open_demonstrations(FIXTURE)
    video = FIXTURE / VIDEO
    first = files.video_frames(video, 0.3, 5, FPS)
    assert np.array_equal(first, data.read("demo_1", "top"))
    with pytest.raises(ValueError, match=r"has no frame at 1\.200 s"):
        files.video_frames(video, 1.0, 3, FPS)
