"""Training on a small file of demonstrations: it learns, stops, goes on and refuses what does not fit."""

import gzip
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("diffusers", reason="the robotics extra is not installed")
pytest.importorskip("h5py", reason="the robotics extra is not installed")

from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from hf_sparseprior.patterns.supports import head_offsets, pruning_ratio
from hf_sparseprior.runs.command import RunStopped
from tasks.robotics import train, training
from tasks.robotics.config import check_config, load_config
from tasks.robotics.formats import demonstrations_sha256
from tasks.robotics.normalizer import Normalizer
from tasks.robotics.policy import CrosswayPolicy
from tests.configs import shipped
from tests.each import each
from tests.tasks.robotics.tiny import SMALL_TABLE_6
from tests.tasks.robotics.walk import SETTINGS, configuration, with_cameras, write_walk

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_accelerator")]
ROOT = Path(__file__).parents[3]
SMOKE, TABLE_6 = (shipped.runs(name) for name in reversed(shipped.ROBOTICS))
LIFT_DENSE = shipped.path("experiments/fib_table6.yaml#lift-dense")


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory) -> Path:
    return write_walk(tmp_path_factory.mktemp("demonstrations"))


@pytest.fixture(scope="module")
def whole_run(demonstrations, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    train.run(with_cameras(configuration(demonstrations, out)))
    return out


def test_a_run_leaves_results_picture_and_policy(whole_run):
    results = json.loads((whole_run / "results.json").read_text())
    assert [entry["step"] for entry in results["history"] if "loss" in entry] == [3, 6, 9, 10]
    assert [entry["step"] for entry in results["history"] if "validation_loss" in entry] == [5, 10]
    assert results["metrics"]["validation_loss"] == results["history"][-1]["validation_loss"]
    assert results["episodes"] == {"train": 10, "validation": 1}
    assert results["versions"]["torch"] and results["prior"] == "fibottention"
    assert (whole_run / "curves.png").stat().st_size > 5000
    assert [path.name for path in whole_run.glob("checkpoint-*")] == ["checkpoint-10"]
    policy = CrosswayPolicy.from_pretrained(whole_run / "model")
    assert policy.about["settings"] == SETTINGS and policy.about["environment"]["name"] == "lift"
    averages = load_file(whole_run / "checkpoint-10" / "ema.safetensors")
    assert all(torch.equal(policy.state_dict()[name], value) for name, value in averages.items())


def test_a_support_of_the_users_is_saved_with_each_encoder(demonstrations, own_file, tmp_path, capsys):
    config = with_cameras(configuration(demonstrations, tmp_path / "run", steps=2, validate_steps=2))
    config["encoder"]["prior"] = "cross+columns"
    (tmp_path / "cross.yaml").write_text(yaml.safe_dump(config))
    options = ["--config", str(tmp_path / "cross.yaml")]
    assert train.main(options) == 2 and "cross" in capsys.readouterr().err
    assert train.main([*options, "--import", str(own_file)]) == 0
    assert json.loads((tmp_path / "run" / "results.json").read_text())["prior"] == "cross+columns"
    carried = sorted(path.parent.name for path in (tmp_path / "run" / "model").glob("encoders/*/own_cross.py"))
    assert carried == ["agentview_image", "robot0_eye_in_hand_image"]


def spoiled(demonstrations: Path, folder: Path) -> Path:
    """A copy under the same name in which only the first action differs; it is far outside the range of all."""
    h5py = pytest.importorskip("h5py")
    other = folder / "other.hdf5"
    shutil.copy(demonstrations, other)
    with h5py.File(other, "r+") as file:
        file["data/demo_0/actions"][0] = 50.0
    return other.replace(folder / demonstrations.name)  # a run before may have the file open


def test_a_finished_run_of_other_demonstrations_is_not_taken_for_this_one(demonstrations, tmp_path, monkeypatch):
    mine, out = tmp_path / demonstrations.name, tmp_path / "run"
    shutil.copy(demonstrations, mine)
    first = train.run(configuration(mine, out, steps=2))
    expected = hashlib.sha256(mine.read_bytes()).hexdigest()
    assert first["demonstrations_sha256"] == expected
    spoiled(demonstrations, tmp_path)
    with pytest.raises(ValueError) as caught:
        train.run(configuration(mine, out, steps=2))
    assert f"data.path={mine} holds other demonstrations than those that {out} was trained on" in str(caught.value)
    AcceleratorState._reset_state(reset_partial_state=True)
    train.run(configuration(mine, out, steps=2), overwrite=True)
    assert CrosswayPolicy.from_pretrained(out / "model").normalizer.bounds["actions"][1] == [50.0] * 4
    # Without the file, nothing says that it was another.
    mine.unlink()
    monkeypatch.setattr(train, "Training", None)
    assert train.run(configuration(mine, out, steps=2))["steps"] == 2


def test_a_stopped_run_does_not_go_on_with_other_demonstrations(demonstrations, tmp_path, monkeypatch):
    mine, out, update = tmp_path / demonstrations.name, tmp_path / "run", training.Training._update
    shutil.copy(demonstrations, mine)

    def update_and_stop(loop):
        losses = update(loop)
        loop.stop.requested = loop.step == 2
        return losses

    with monkeypatch.context() as patch:
        patch.setattr(training.Training, "_update", update_and_stop)
        with pytest.raises(RunStopped):
            train.run(configuration(mine, out, steps=4))
    AcceleratorState._reset_state(reset_partial_state=True)
    spoiled(demonstrations, tmp_path)
    with pytest.raises(ValueError, match=r"data\.path=.* holds other demonstrations"):
        train.run(configuration(mine, out, steps=4))
    shutil.copy(demonstrations, mine)
    # A run from before demonstrations were noted goes by its configuration.
    stored = json.loads((out / "run_config.json").read_text())
    del stored["demonstrations"]
    (out / "run_config.json").write_text(json.dumps(stored))
    assert train.run(configuration(mine, out, steps=4))["resumed_from"] == "checkpoint-2"


def test_a_zarr_folder_is_known_by_names_and_content(tmp_path):
    (tmp_path / "data").mkdir()
    for name, content in (("data/b", b"1"), ("data/a", b"2"), (".zgroup", b"{}")):
        (tmp_path / name).write_bytes(content)
    listed = "".join(
        f"{name}\0{hashlib.sha256(content).hexdigest()}\n"
        for name, content in ((".zgroup", b"{}"), ("data/a", b"2"), ("data/b", b"1"))
    )
    first = demonstrations_sha256(tmp_path)
    assert first == hashlib.sha256(listed.encode()).hexdigest()
    (tmp_path / "data" / "a").rename(tmp_path / "data" / "c")
    assert demonstrations_sha256(tmp_path) != first


def test_the_same_demonstrations_recorded_at_another_time_are_the_same(tmp_path):
    found = {}
    for name, content, mtime in (("first", b"1", 1), ("second", b"1", 2), ("other", b"2", 1)):
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "data" / "0.0").write_bytes(gzip.compress(content, mtime=mtime))
        found[name] = demonstrations_sha256(tmp_path / name)
    assert found["first"] == found["second"] != found["other"]
    assert len({demonstrations_sha256(tmp_path / name, dated=True) for name in found}) == 3


def test_a_run_that_noted_a_dated_checksum_goes_on(tmp_path):
    chunk, out = tmp_path / "data.zarr" / "0.0", tmp_path / "run"
    chunk.parent.mkdir()
    chunk.write_bytes(gzip.compress(b"1", mtime=1))
    out.mkdir()
    config = {"data": {"path": str(chunk.parent)}}
    noted = {"sha256": demonstrations_sha256(chunk.parent, dated=True)}
    (out / train.RUN_CONFIG).write_text(json.dumps({**config, train.DEMONSTRATIONS: noted}))
    assert train.run_identity(config, out, False)[train.DEMONSTRATIONS] == noted
    chunk.write_bytes(gzip.compress(b"2", mtime=1))
    with pytest.raises(ValueError, match="other demonstrations"):
        train.run_identity(config, out, False)


def test_a_full_configuration_starts_on_published_demonstrations(write_robomimic_file, tmp_path):
    """Made smaller, and on a file of robomimic's layout, whose environment is not the one here."""
    further = (("robot0_eef_quat", 4), ("robot0_gripper_qpos", 2), ("object", 10))
    path = write_robomimic_file((20, 18), ("agentview", "robot0_eye_in_hand"), further)
    where = [f"data.path={path}", f"trainer.output_dir={tmp_path / 'run'}"]
    results = train.run(load_config(LIFT_DENSE, [*SMALL_TABLE_6, *where]))
    assert results["steps"] == 1 and results["episodes"] == {"train": 1, "validation": 1}
    assert CrosswayPolicy.from_pretrained(tmp_path / "run" / "model").config.crop == 76


# ---- configurations -------------------------------------------------------------------------------------------------


@each("name", SMOKE)
def test_the_pages_record_and_train_what_small_configurations_read(name):
    readme = "".join(page.read_text() for page in (ROOT / "tasks" / "robotics").glob("*.md"))
    config = load_config(shipped.path(name))
    (line,) = (line for line in readme.splitlines() if f" {config['data']['path']} --episodes" in line)
    cameras = {key.removesuffix("_image") for key, shape in config["policy"]["observations"].items() if len(shape) == 3}
    assert cameras <= set(line.partition("--cameras")[2].split())
    assert f"--config configs/{name}\n" in readme and f"`{name.partition('#')[2]}`" in readme


@each("name", [*SMOKE, *(name for name in TABLE_6 if name.endswith("-dense"))])
def test_configurations_build(name):
    """On the meta device: the full ones have hundreds of millions of weights. All of them: tests/tasks/fullsize."""
    _, policy, _ = check_config(load_config(shipped.path(name)))
    bounds = {key: ([0.0] * policy.observations[key][0], [1.0] * policy.observations[key][0]) for key in policy.states}
    bounds["actions"] = ([0.0] * policy.action_size, [1.0] * policy.action_size)
    with torch.device("meta"):
        built = CrosswayPolicy(policy, Normalizer(bounds, dict.fromkeys(bounds, 0.1)))
    assert len(built.encoders) == len(policy.cameras)
    if name in SMOKE:
        return
    sizes = {"lift": (2, 9), "can": (2, 9), "pusht": (1, 10)}
    cameras, grid = sizes[name.partition("#")[2].partition("-")[0]]
    assert (len(built.encoders), built.encoders[policy.cameras[0]].config.grid[0]) == (cameras, grid)
    # Twelve layers of 12 d^2 + 13 d, the last norm, patches of 8x8x3 and their bias, positions and class token.
    d, patches = 768, grid**2
    counted = 12 * (12 * d * d + 13 * d) + 2 * d + (192 + 1) * d + (patches + 1) * d + d
    for encoder in built.encoders.values():
        assert sum(parameter.numel() for parameter in encoder.parameters()) == counted


def test_windows_of_table_6():
    """Three readings. With 5..N/3 the share of pairs is the older paper's 2 to 6 %, rounded."""
    windows = {"": (5, None), "_all": None, "_65": (5, 65)}
    for name in TABLE_6:
        task, _, prior = name.partition("#")[2].partition("-")
        if not prior.startswith("fibottention"):
            continue
        encoder = check_config(load_config(shipped.path(name)))[1].encoder
        support = encoder["prior"]["support"]
        patches = 100 if task == "pusht" else 81
        reading, modified = prior.removeprefix("fibottention").removesuffix("_modified"), prior.endswith("_modified")
        assert (support["w_min"], support.get("w_max")) == (windows[reading] or (patches, patches))
        assert support.get("modified", False) == modified
        kept = 100 - pruning_ratio(head_offsets(support, num_heads=12, num_tokens=patches), patches)
        printed = {"": (2.6, 2.5, 6.3, 5.8), "_all": (6.8, 6.2, 10.8, 9.6), "_65": (4.1, 3.5, 8.1, 6.9)}[reading]
        assert round(kept, 1) == printed[2 * modified + (task == "pusht")]
        assert 2 <= round(kept) <= 6 or reading


@each(
    "override, message",
    [
        ("trainer.stepz=3", "did you mean 'steps'"),
        ("data.pth=x", "did you mean 'path'"),
        ("policy.encoder={}", "no key 'encoder'"),
        ("robot.x=1", "no key 'robot'"),
        ("trainer.steps=0", "steps=0 must be an integer of 1"),
        ("trainer.learning_rate=fast", "learning_rate='fast' must be a number"),
        ("trainer.betas=[1, 2]", "must be two numbers in"),
        ("trainer.mixed_precision=half", "must be one of no, bf16, fp16"),
        ("trainer.ema_decay=1", r"must be a number in \[0, 1\)"),
        ("data.floor=0", "data.floor=0 must be a number above 0"),
        ("data.floors={actions: -1}", "actions=-1 must be"),
        ("data.path=", "must name a file"),
        ("policy.crop=90", "crop=90 must be at most"),
        ("encoder.prior=fibonacci", "fibonacci"),
        ("encoder.hiden_size=3", "hidden_size"),
        ("policy.observations=3", r"policy\.observations=3 must be keys with their shapes"),
        ("policy.observations={a: 3}", r"policy\.observations: a=3 must be \[size\]"),
        ("policy.groups=7", r"policy\.widths=\[512, 1024, 2048\] must be multiples of groups=7"),
        ("policy.decoder_width=9", r"policy\.decoder_width=9 must be a multiple of groups=8"),
        ("policy.kernel_size=4", r"policy\.kernel_size=4 must be odd"),
        ("policy.step_embedding_size=abc", r"policy\.step_embedding_size='abc' must be an integer"),
        ("policy.step_embedding_size=7", r"policy\.step_embedding_size=7 must be even"),
        ("policy.horizon=18", r"policy\.horizon=18 must be a multiple of 4"),
        ("encoder.patch_size=0", r"encoder\.patch_size=0 must be an integer of 1 or more"),
        ("encoder.patch_size=[8]", r"encoder\.patch_size=\[8\] must be an integer of 1 or more"),
        ("encoder.patch_size=90", r"encoder\.patch_size=\[90, 90\] must be at most the 76x76 pixels"),
        ("trainer.betas=[a, b]", r"trainer\.betas=\['a', 'b'\] must be two numbers in"),
        ("trainer.steps=3", r"trainer\.steps=3 and trainer\.epochs=501 exclude each other"),
        ("encoder.num_channels=1", r"encoder\.num_channels=1 must be 3"),
    ],
)
def test_bad_values_are_refused(override, message):
    with pytest.raises(ValueError, match=message):
        load_config(LIFT_DENSE, [override])


@each("override, name", [("encoder.prior=violin", "encoder.prior='violin'"), ("policy.crop=9", "policy.crop=9")])
def test_settings_of_images_are_refused_without_a_camera(override, name):
    with pytest.raises(ValueError, match=rf"{name} is of images, and policy.observations has no camera"):
        load_config(shipped.path("robotics/smoke.yaml#lift_state"), [override])


@each(
    "section, values, message",
    [
        ("encoder", {"prior": "sparsifiner"}, "encoder.prior='sparsifiner' has a predictor that learns from dense"),
        ("data", {"episodes": 11}, "data.episodes=11 must be at most the 10 for training"),
        ("trainer", {"mixed_precision": "fp16"}, "mixed_precision='fp16' is for GPUs"),
    ],
)
def test_what_would_do_nothing_ends_a_run_before_it_begins(demonstrations, tmp_path, section, values, message):
    AcceleratorState._reset_state(reset_partial_state=True)
    config = with_cameras(configuration(demonstrations, tmp_path / "run"))
    config[section] |= values
    with pytest.raises(ValueError, match=message):
        train.run(config)
    assert not (tmp_path / "run").exists()


def test_missing_and_broken_files_are_one_line_and_status_2(tmp_path, demonstrations, capsys):
    smoke = str(shipped.path("robotics/smoke.yaml#lift_state"))
    out = f"trainer.output_dir={tmp_path / 'out'}"
    assert train.main(["--config", smoke, out, f"data.path={tmp_path / 'none.hdf5'}"]) == 2
    assert "none.hdf5" in capsys.readouterr().err
    (tmp_path / "broken.hdf5").write_bytes(demonstrations.read_bytes()[:5000])
    assert train.main(["--config", smoke, out, f"data.path={tmp_path / 'broken.hdf5'}"]) == 2
    assert "broken.hdf5" in capsys.readouterr().err
    assert train.main(["--config", smoke, out, f"data.path={demonstrations}"]) == 2
    error = capsys.readouterr().err
    assert "walk.hdf5 has no observation 'object'" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_simulator_of_other_versions_ends_a_run_with_a_test_before_it_begins(demonstrations, tmp_path, monkeypatch):
    def refuse(about, source):
        raise ValueError(f"{source} was recorded with pymunk=1")

    monkeypatch.setattr(train, "make_matching_environment", refuse)
    config = with_cameras(configuration(demonstrations, tmp_path / "run"))
    config["trainer"]["test_episodes"] = 1
    with pytest.raises(ValueError, match="was recorded with pymunk=1"):
        train.run(config)
    assert not (tmp_path / "run").exists()
