import json
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from tasks.robotics.formats import (
    Episode,
    check_environment,
    open_demonstrations,
    write_demonstrations,
)
from tests.each import each

h5py = pytest.importorskip("h5py", reason="needs make robotics")
zarr = pytest.importorskip("zarr", reason="needs make robotics")

numcodecs = pytest.importorskip("numcodecs", reason="needs make robotics")

IMAGES = np.random.default_rng(0).integers(0, 256, (7, 96, 96, 3)).astype(np.float32)
LENGTHS = [5, 3, 21, 4, 6, 2, 7, 3, 4, 5, 3, 4]  # more than one chunk of zarr images in an episode and across them


def file_of(folder, task, settings, make_episode, lengths=LENGTHS):
    sources = []
    for index, length in enumerate(lengths):
        sources.append(folder / f"{index}.npz")
        make_episode(100 + index, length, task).save(sources[-1])
    path = folder / ("demonstrations.zarr" if task == "pusht" else "demonstrations.hdf5")
    write_demonstrations(path, sources, settings)
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory, arm_settings, pusht_settings, make_episode):
    """A file of each task, of which tests have copies."""
    settings = {"lift": arm_settings, "pusht": pusht_settings}
    return {task: file_of(tmp_path_factory.mktemp(task), task, own, make_episode) for task, own in settings.items()}


@pytest.fixture
def lift_file(written, tmp_path):
    return Path(shutil.copy(written["lift"], tmp_path))


@pytest.fixture
def pusht_file(written, tmp_path):
    return Path(shutil.copytree(written["pusht"], tmp_path / "demonstrations.zarr"))


def test_an_episode_comes_back_from_disk(tmp_path, make_episode):
    episode = make_episode(3, 6)
    episode.save(tmp_path / "3.npz")
    back = Episode.load(tmp_path / "3.npz")
    assert back.seed == 3 and back.observations.keys() == episode.observations.keys()
    for name in ("actions", "executed", "states", "rewards", "dones"):
        assert np.array_equal(getattr(back, name), getattr(episode, name))
    assert [path.name for path in tmp_path.iterdir()] == ["3.npz"]


@each("task", ["lift", "pusht"])
def test_what_was_written_is_read(task, written, make_episode):
    demonstrations = open_demonstrations(written[task])
    assert list(demonstrations.lengths.values()) == LENGTHS
    assert demonstrations.action_size == (2 if task == "pusht" else 10)
    for index, (name, length) in enumerate(demonstrations.lengths.items()):
        episode = make_episode(100 + index, length, task)
        assert demonstrations.seeds[name] == 100 + index
        assert np.array_equal(demonstrations.read(name, "actions"), episode.actions.astype(np.float32))
        assert np.array_equal(demonstrations.read(name, "executed_actions"), episode.executed)
        assert demonstrations.shapes.keys() == episode.observations.keys()
        for key, values in episode.observations.items():
            assert demonstrations.shapes[key] == values.shape[1:]
            read = demonstrations.read(name, key, 1, length)
            assert read.dtype == values.dtype and np.array_equal(read, values[1:])


def test_robomimics_layout(lift_file):
    with h5py.File(lift_file) as file:
        assert set(file) == {"data", "mask"} and len(file["data"]) == len(LENGTHS)
        demo = file["data/demo_2"]
        assert set(demo) == {"actions", "executed_actions", "states", "rewards", "dones", "obs"}
        assert demo.attrs["num_samples"] == 21 == len(demo["rewards"]) and demo["actions"].shape == (21, 10)
        assert demo["obs/agentview_image"].shape == (21, 16, 16, 3) and demo["obs/agentview_image"].dtype == np.uint8
        assert file["data"].attrs["total"] == sum(LENGTHS)
        arguments = json.loads(file["data"].attrs["env_args"])
        assert {"env_name", "type", "env_kwargs"} <= arguments.keys()
        assert [name.decode() for name in file["mask/valid"]] == ["demo_9"]


def test_diffusion_policys_layout(pusht_file):
    assert json.loads((pusht_file / ".zgroup").read_text()) == {"zarr_format": 2}
    group = zarr.open_group(str(pusht_file), mode="r")
    assert group["meta/episode_ends"][:].tolist() == np.cumsum(LENGTHS).tolist()
    assert group["data/img"].shape == (sum(LENGTHS), 16, 16, 3)
    assert group["data/state"].shape == (sum(LENGTHS), 5) and group["data/action"].shape == (sum(LENGTHS), 2)
    assert group["data/keypoint"].shape == (sum(LENGTHS), 8, 2)


@pytest.fixture
def published_file(tmp_path):
    """As Diffusion Policy publishes it: images float32 from 0 to 255, Blosc, neither settings nor seeds."""
    group = zarr.open_group(str(tmp_path / "published.zarr"), mode="w", zarr_format=2)
    arrays = {"img": IMAGES, "state": np.ones((7, 5)), "action": np.ones((7, 2)), "n_contacts": np.ones((7, 1))}
    for name, values in arrays.items():
        group.create_array(
            f"data/{name}",
            data=values.astype(np.float32),
            chunks=(4, *values.shape[1:]),
            compressors=numcodecs.Blosc(cname="zstd", clevel=5, shuffle=2),
        )
    group.create_array("meta/episode_ends", data=np.array([4, 7]))
    return tmp_path / "published.zarr"


def test_a_published_pusht_file_is_read(published_file):
    demonstrations = open_demonstrations(published_file)
    assert demonstrations.environment == {"name": "pusht", "cameras": ("image",), "image_size": 96}
    assert demonstrations.lengths == {"demo_0": 4, "demo_1": 3} and demonstrations.seeds["demo_1"] is None
    read = demonstrations.read("demo_1", "image")
    assert read.dtype == np.uint8 and np.array_equal(read, IMAGES[4:])


def test_a_published_robomimic_file_is_read(robomimic_file):
    demonstrations = open_demonstrations(robomimic_file)
    assert demonstrations.environment == {
        **{"name": "lift", "cameras": ("agentview",), "image_size": 84, "rendering": "robosuite"}
    }
    assert demonstrations.action_size == 10 and demonstrations.split("validation") == ("demo_1",)
    with h5py.File(robomimic_file) as file:
        stored = file["data/demo_0/actions"][:]
    actions = demonstrations.read("demo_0", "actions", 1, 6)
    assert np.allclose(actions[:, :3] + [-0.56, 0, 0.912], stored[1:, :3], atol=1e-6)
    rows = Rotation.from_rotvec(stored[1:, 3:6]).as_matrix()[:, :2].reshape(-1, 6)
    assert np.allclose(actions[:, 3:9], rows, atol=1e-6) and (actions[:, 9] == 1).all()


def test_relative_actions_are_refused(robomimic_file):
    actions = np.random.default_rng(0).uniform(-1, 1, (6, 7))
    change(robomimic_file, lambda file: replace(file["data/demo_0"], "actions", actions))
    refused(robomimic_file, "has relative actions; convert them to absolute ones")


def test_a_published_file_without_masks_is_split(robomimic_file):
    change(robomimic_file, lambda file: file.pop("mask"))
    demonstrations = open_demonstrations(robomimic_file)
    assert demonstrations.split("train") == ("demo_0",) and demonstrations.split("validation") == ("demo_1",)


@pytest.mark.parametrize(("count", "valid"), [(1, 0), (2, 1), (9, 1), (20, 2)])
def test_few_episodes_are_split_too(tmp_path, arm_settings, make_episode, count, valid):
    demonstrations = open_demonstrations(file_of(tmp_path, "lift", arm_settings, make_episode, [2] * count))
    assert len(demonstrations.split("validation")) == valid and len(demonstrations.split("train")) == count - valid


@each("task", ["lift", "pusht"])
def test_splits_wrong_questions_and_a_copy_in_another_process(task, written):
    demonstrations = open_demonstrations(written[task])
    train, valid = demonstrations.split("train"), demonstrations.split("validation")
    assert valid == ("demo_9",) and len(train) == 11 and set(train) | set(valid) == set(demonstrations.episodes)
    with pytest.raises(ValueError, match="split 'test' must be one of train, valid"):
        demonstrations.split("test")
    with pytest.raises(ValueError, match="no episode 'demo_99' among 12"):
        demonstrations.read("demo_99", "actions")
    with pytest.raises(ValueError, match="no key 'depth'; it has actions, "):
        demonstrations.read("demo_0", "depth")
    for start, stop in ((3, 3), (0, 6), (-1, 2)):
        with pytest.raises(ValueError, match="must lie within its 5"):
            demonstrations.read("demo_0", "actions", start, stop)
    copy = pickle.loads(pickle.dumps(demonstrations))  # which opens the file anew
    assert np.array_equal(copy.read("demo_2", "actions"), demonstrations.read("demo_2", "actions"))


def test_an_existing_file_is_not_written_over(lift_file, arm_settings):
    with pytest.raises(OSError, match="exists already"):
        write_demonstrations(lift_file, [lift_file.parent / "0.npz"], arm_settings)


def test_nothing_half_written_stays(tmp_path, arm_settings, make_episode):
    make_episode(0, 3).save(tmp_path / "0.npz")
    (tmp_path / "1.npz").write_bytes((tmp_path / "0.npz").read_bytes()[:300])
    with pytest.raises(Exception):  # noqa: B017
        write_demonstrations(tmp_path / "out.hdf5", [tmp_path / "0.npz", tmp_path / "1.npz"], arm_settings)
    assert {path.name for path in tmp_path.iterdir()} == {"0.npz", "1.npz"}


# ---- broken files ---------------------------------------------------------------------------------------------------


def refused(path, words):
    """Opening names the file and what is wrong, in one line."""
    with pytest.raises((ValueError, OSError)) as caught:
        open_demonstrations(path)
    assert str(path) in str(caught.value) and words in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_no_demonstrations_is_refused(tmp_path, written):
    refused(tmp_path / "missing.hdf5", "no demonstrations at")
    whole = written["lift"].read_bytes()
    cut_off = [whole[: int(part * len(whole))] for part in (0.0, 0.3, 0.999)]
    for number, content in enumerate([*cut_off, b"\x80\x04pickle" * 100]):
        (tmp_path / f"{number}.hdf5").write_bytes(content)
        refused(tmp_path / f"{number}.hdf5", "is no whole HDF5 file")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "is no zarr group of version 2")


def change(path, edit):
    with h5py.File(path, "r+") as file:
        edit(file)


def replace(group, key, values):
    del group[key]
    group[key] = values


def drop(name):
    return lambda path: change(path, lambda file: file.pop(name))


def put(name, values):
    return lambda path: change(path, lambda file: replace(file, name, values))


def attribute(name, key, value):
    return lambda path: change(path, lambda file: file[name].attrs.create(key, value))


def in_every_episode(edit):
    return lambda path: change(path, lambda file: [edit(episode) for episode in list(file["data"].values())])


ACTIONS, OBJECT, IMAGE = "data/demo_1/actions", "data/demo_1/obs/object", "data/demo_1/obs/agentview_image"
HDF5_DAMAGE = [
    (drop("data"), "no group data"),
    (lambda path: change(path, lambda file: file["data"].clear()), "no group data with episodes"),
    (attribute("data", "env_args", '{"env_name": "Door", "type": 1, "env_kwargs": {}}'), "does not say its settings"),
    (lambda path: change(path, lambda file: file["data"].attrs.pop("env_args")), "no env_args in JSON"),
    (attribute("data", "env_args", "{"), "no env_args in JSON"),
    (drop("mask/valid"), "no mask/valid"),
    (put("mask/valid", np.array([b"demo_77"])), "name 'demo_77'"),
    (put("mask/valid", np.array([b"demo_0"])), "demo_0 is in mask"),
    (put("mask/train", np.array([], dtype="S6")), "mask train is empty"),
    (put("mask/train", np.array([b"demo_3"] * 2)), "mask train names demo_3 twice"),
    (put("mask/train", 3), "mask/train has shape (), it is no list of names"),
    (drop(ACTIONS), "data/demo_1 has no actions"),
    (drop("data/demo_1/obs"), "data/demo_1 has no obs"),
    (drop(OBJECT), "data/demo_1 has no obs/object"),
    (in_every_episode(lambda demo: demo.pop("obs/agentview_image")), "no agentview_image, which its settings promise"),
    (put(ACTIONS, np.zeros((3, 7))), "data/demo_1/actions has shape (3, 7), not (3, 10)"),
    (put("data/demo_0/actions", np.zeros(5)), "data/demo_0/actions has shape (5,)"),
    (put(ACTIONS, np.zeros((2, 10))), "not (3, 10)"),
    (put(ACTIONS, np.full((3, 10), np.nan)), "data/demo_1/actions has numbers that are not finite"),
    (put(ACTIONS, np.full((3, 10), b"x")), "data/demo_1/actions is |S1, not numbers"),
    (put(OBJECT, np.zeros((2, 10))), "data/demo_1/obs/object is float64 (2, 10), not (3, 10)"),
    (put(OBJECT, np.zeros((3, 14))), "data/demo_1/obs/object is float64 (3, 14), not (3, 10)"),
    (put(OBJECT, np.full((3, 10), b"x")), "data/demo_1/obs/object is |S1, not numbers"),
    (put(OBJECT, 3.0), "data/demo_1/obs/object is float64 (), not (3, 10)"),
    (
        in_every_episode(lambda demo: replace(demo, "obs/object", 3.0)),
        "data/demo_0/obs/object is float64 (), not (5,)",
    ),
    (put(IMAGE, np.zeros((3, 84, 84, 3), np.uint8)), "not uint8 (3, 16, 16, 3)"),
    (put(IMAGE, np.zeros((3, 16, 16, 3))), "is float64 (3, 16, 16, 3), not uint8"),
    (attribute("data/demo_1", "seed", "x"), "data/demo_1 cannot be read ("),
    (attribute("data/demo_1", "num_samples", "x"), "data/demo_1 cannot be read ("),
    (put("data/demo_1", 3), "data/demo_1 has no obs"),
]


def remove(name):
    return lambda path: shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink()


def array(name, values):
    def edit(path):
        group = zarr.open_group(str(path), mode="r+")
        del group[name]
        group.create_array(name, data=values, chunks=values.shape, config={"write_empty_chunks": True})

    return edit


ZARR_DAMAGE = [
    (remove(".zgroup"), "is no zarr group"),
    (lambda path: (path / "data" / "action" / ".zarray").write_text("{"), "has no data/action"),
    (remove("data/action"), "has no data/action"),
    (remove("meta/episode_ends"), "has no meta/episode_ends"),
    (remove("data/img"), "no data/img, which its settings promise"),
    (remove("data/img/2.0.0.0"), "data/img has 4 of its 5 chunks"),
    (array("data/action", np.array(3.0)), "is damaged ("),
    (array("meta/episode_ends", np.array([5, 4, 67])), "meta/episode_ends must rise and end at the 67 steps"),
    (array("meta/episode_ends", np.array([5, 99])), "meta/episode_ends must rise and end at the 67 steps"),
    (array("data/state", np.ones((66, 5))), "data/state has shape (66, 5), not (67, 5)"),
    (array("data/action", np.ones((67, 10))), "data/action has shape (67, 10), not (67, 2)"),
    (array("data/action", np.full((67, 2), np.inf)), "data/action has numbers that are not finite"),
    (array("data/img", np.ones((67, 96, 96, 3))), "not (67, 16, 16, 3)"),
    (array("meta/valid", np.zeros(3, bool)), "meta/valid has 3 episodes, not 12"),
]


@pytest.mark.parametrize(
    ("task", "edit", "words"),
    [*(("lift", *damage) for damage in HDF5_DAMAGE), *(("pusht", *damage) for damage in ZARR_DAMAGE)],
)
def test_damaged_files_are_refused(request, task, edit, words):
    path = request.getfixturevalue(f"{task}_file")
    edit(path)
    refused(path, words)


def test_a_damaged_image_is_named_when_it_is_read(lift_file):
    with h5py.File(lift_file) as file:
        images = file["data/demo_2/obs/agentview_image"]
        place = images.id.get_chunk_info_by_coord((7, 0, 0, 0))
    content = bytearray(lift_file.read_bytes())
    content[place.byte_offset + place.size // 2] ^= 0xFF
    lift_file.write_bytes(content)
    demonstrations = open_demonstrations(lift_file)
    assert demonstrations.read("demo_2", "agentview_image", 0, 7).shape == (7, 16, 16, 3)
    with pytest.raises(ValueError, match=r"demonstrations.hdf5: demo_2/agentview_image cannot be read"):
        demonstrations.read("demo_2", "agentview_image", 7, 8)


@pytest.mark.parametrize(
    ("task", "key", "value"),
    [("lift", "object", np.nan), ("pusht", "agent_pos", -np.inf), ("pusht", "keypoints", np.nan)],
)
def test_observations_that_are_not_finite_are_named_when_they_are_read(request, task, key, value):
    path = request.getfixturevalue(f"{task}_file")
    if task == "lift":
        change(path, lambda file: file["data/demo_2/obs/object"].__setitem__((7, 3), value))
    else:
        array = zarr.open_group(str(path), mode="r+")["data/state" if key == "agent_pos" else "data/keypoint"]
        array[(8 + 7, 1) if key == "agent_pos" else (8 + 7, 2, 0)] = value
    demonstrations = open_demonstrations(path)
    assert demonstrations.read("demo_2", key, 0, 7).shape[0] == 7
    with pytest.raises(ValueError) as caught:
        demonstrations.read("demo_2", key)
    assert str(caught.value) == f"{path}: demo_2/{key} has numbers that are not finite"


@pytest.mark.parametrize("damage", ["cut off", "one bit"])
def test_a_damaged_chunk_is_named_when_it_is_read(pusht_file, damage):
    chunk = pusht_file / "data" / "img" / "1.0.0.0"
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.write_bytes(content[:50] if damage == "cut off" else content)
    demonstrations = open_demonstrations(pusht_file)
    assert demonstrations.read("demo_0", "image").shape == (5, 16, 16, 3)
    with pytest.raises(ValueError, match=r"demonstrations.zarr: demo_2/image cannot be read"):
        demonstrations.read("demo_2", "image")


def test_a_cut_off_chunk_of_a_published_file_is_refused(published_file):
    open_demonstrations(published_file)
    chunk = published_file / "data" / "img" / "1.0.0.0"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    refused(published_file, "data/img/1.0.0.0 is cut off")


# ---- environments that do not fit -----------------------------------------------------------------------------------


def test_the_environment_of_a_file(lift_file, arm_settings):
    demonstrations = open_demonstrations(lift_file)
    assert demonstrations.environment == {"name": "lift", "cameras": ("agentview",), "image_size": 16}
    check_environment(demonstrations, SimpleNamespace(settings=arm_settings))
    # Without images, their mode does not matter.
    check_environment(demonstrations, SimpleNamespace(settings=arm_settings | {"cameras": [], "image_mode": {}}))


OTHER = {
    "environment": ("can", "environment 'lift', this environment has 'can'"),
    "frame": ("world", "frame 'robot base', this environment has 'world'"),
    "control_hz": (10, "control_hz 20, this environment has 10"),
    "versions": ({"robosuite": "1.5.2", "mujoco": "3.10.0"}, "versions mujoco '3.9.0', this environment has mujoco"),
    "controller": (
        {"type": "BASIC", "body_parts": {"right": {"kp": 150, "input_type": "delta"}}},
        "controller body_parts right input_type 'absolute', this environment has body_parts right input_type 'delta'",
    ),
    "image_mode": ({"samples": 4}, "image_mode samples 0, this environment has samples 4"),
    "image_size": (84, "image_size 16, this environment has 84"),
    "cameras": (["agentview", "robot0_eye_in_hand"], "no images of camera 'robot0_eye_in_hand'"),
}


@each("key", OTHER)
def test_another_environment_is_refused(lift_file, arm_settings, key):
    value, words = OTHER[key]
    with pytest.raises(ValueError) as caught:
        check_environment(open_demonstrations(lift_file), SimpleNamespace(settings=arm_settings | {key: value}))
    assert str(lift_file) in str(caught.value) and words in str(caught.value)
