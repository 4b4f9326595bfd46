"""Training on a small file of demonstrations: it learns, stops, goes on and refuses what does not fit."""

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers", reason="the robotics extra is not installed")
pytest.importorskip("h5py", reason="the robotics extra is not installed")

from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from tasks.common.command import RunStopped
from tasks.robotics import train, training
from tasks.robotics.config import check_config, load_config
from tasks.robotics.data import Windows, read_episodes
from tasks.robotics.formats import Episode, demonstrations_sha256, open_demonstrations, write_demonstrations
from tasks.robotics.normalizer import Normalizer
from tasks.robotics.policy import CrosswayPolicy
from tests.configs import shipped
from tests.tasks.robotics.tiny import tiny_config

ROOT = Path(__file__).parents[3]
SMOKE, TABLE_6 = (shipped.runs(name) for name in reversed(shipped.ROBOTICS))
LIFT_DENSE = shipped.path("experiments/fib_table6.yaml#lift-dense")
SETTINGS = {
    "environment": "lift",
    "action": "of this test",
    "frame": "none",
    "controller": {},
    "control_hz": 20,
    "versions": {},
    "image_mode": {},
    "image_size": 40,
    "cameras": ["agentview", "robot0_eye_in_hand"],
}


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """accelerate keeps the precision of the first run in a process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory) -> Path:
    """Eleven episodes whose actions follow from their observations."""
    folder, paths = tmp_path_factory.mktemp("demonstrations"), []
    generator = np.random.default_rng(0)
    for seed in range(11):
        length = int(generator.integers(20, 26))
        walk = np.cumsum(generator.normal(0, 0.2, (length, 3)), 0)
        images = np.broadcast_to(np.clip(128 + 60 * walk[:, 0], 0, 255)[:, None, None, None], (length, 40, 40, 3))
        paths.append(folder / f"{seed}.npz")
        Episode(
            seed=seed,
            actions=np.concatenate([walk, walk[:, :1]], 1),
            executed=np.zeros((length, 4)),
            states=walk,
            rewards=np.zeros(length),
            dones=np.zeros(length, bool),
            observations={
                "agentview_image": images.astype(np.uint8),
                "robot0_eye_in_hand_image": images.astype(np.uint8),
                "position": walk.astype(np.float32),
            },
        ).save(paths[-1])
    write_demonstrations(folder / "walk.hdf5", paths, SETTINGS)
    return folder / "walk.hdf5"


def configuration(demonstrations: Path, out: Path, **trainer) -> dict:
    """Ten steps from the state alone, a checkpoint every four."""
    config = tiny_config()
    policy = {"action_size": 4, "observations": {"position": [3]}}
    for key in ("widths", "kernel_size", "groups", "step_embedding_size", "sampler", "sampling_steps"):
        policy[key] = getattr(config, key)
    trainer = {
        "output_dir": str(out),
        **{"steps": 10, "batch_size": 16, "learning_rate": 1e-3, "warmup_steps": 2, "log_steps": 3},
        **{"save_steps": 4, "validate_steps": 5, "disable_tqdm": True, **trainer},
    }
    return {"data": {"path": str(demonstrations)}, "policy": policy, "encoder": {}, "trainer": trainer}


def with_cameras(config: dict) -> dict:
    """The same with two cameras, whose encoders drop paths: the order of all draws counts."""
    tiny = tiny_config()
    images = {"agentview_image": [40, 40, 3], "robot0_eye_in_hand_image": [40, 40, 3]}
    config["policy"]["observations"] |= images
    for key in ("image_size", "crop", "reconstruction_size", "decoder_width", "decoder_positions"):
        config["policy"][key] = getattr(tiny, key)
    config["encoder"] = {**tiny.encoder, "drop_path_rate": 0.2}
    return config


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


def test_a_finished_run_is_not_done_again(whole_run, demonstrations, monkeypatch):
    monkeypatch.setattr(train, "Training", None)
    results = train.run(with_cameras(configuration(demonstrations, whole_run)))
    assert results["steps"] == 10
    with pytest.raises(ValueError, match=r"trainer\.steps: 10 there, 11 here"):
        train.run(with_cameras(configuration(demonstrations, whole_run, steps=11)))


def spoiled(demonstrations: Path, folder: Path) -> Path:
    """A copy under the same name whose first action alone is another, far outside the range of all."""
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


def test_a_batch_must_reach_every_process(demonstrations, tmp_path, monkeypatch):
    monkeypatch.setattr(training.Accelerator, "num_processes", 3)
    with pytest.raises(ValueError, match=r"trainer\.batch_size=2 of \d+ windows must be at least the 3 processes"):
        train.run(configuration(demonstrations, tmp_path / "run", batch_size=2))
    assert not (tmp_path / "run").exists()


def test_processes_wait_for_a_long_validation(demonstrations, tmp_path, monkeypatch):
    seen, accelerator = [], training.Accelerator
    monkeypatch.setattr(
        training, "Accelerator", lambda **given: (seen.extend(given["kwargs_handlers"]), accelerator())[1]
    )
    train.run(configuration(demonstrations, tmp_path / "run", steps=1))
    assert seen[0].to_kwargs()["timeout"].total_seconds() == 24 * 3600


@pytest.mark.parametrize("task", ["lift", "can"])
def test_the_full_configurations_start_on_published_demonstrations(write_robomimic_file, tmp_path, task):
    """Made smaller, and on a file of robomimic's layout, whose environment is not the one here."""
    further = (("robot0_eef_quat", 4), ("robot0_gripper_qpos", 2), ("object", 10))
    path = write_robomimic_file((20, 18), ("agentview", "robot0_eye_in_hand"), further)
    small = ["policy.widths=[16, 32]", "policy.decoder_width=8", "trainer.epochs=null", "trainer.steps=1"]
    small += ["encoder.preset=null", "encoder.hidden_size=16", "encoder.num_hidden_layers=1"]
    small += ["encoder.num_attention_heads=2", "encoder.intermediate_size=16", "trainer.batch_size=2"]
    small += ["policy.step_embedding_size=8", "trainer.disable_tqdm=true"]
    where = [f"data.path={path}", f"trainer.output_dir={tmp_path / 'run'}"]
    config = load_config(shipped.path(f"experiments/fib_table6.yaml#{task}-dense"), [*small, *where])
    results = train.run(config)
    assert results["steps"] == 1 and results["episodes"] == {"train": 1, "validation": 1}
    assert CrosswayPolicy.from_pretrained(tmp_path / "run" / "model").config.crop == 76


def test_training_lowers_the_validation_loss(demonstrations, tmp_path):
    results = train.run(
        configuration(
            demonstrations,
            tmp_path / "run",
            steps=80,
            log_steps=80,
            validate_steps=20,
            save_steps=80,
            learning_rate=5e-3,
        )
    )
    losses = [entry["validation_loss"] for entry in results["history"] if "validation_loss" in entry]
    assert losses[-1] < 0.9 * losses[0], losses  # of the average, which lags behind


def test_validation_loss_draws_the_same_every_time(demonstrations, whole_run):
    policy = CrosswayPolicy.from_pretrained(whole_run / "model")
    file = open_demonstrations(demonstrations)
    windows = Windows(read_episodes(file, file.split("validation"), policy.config), policy.config)
    first = training.validation_loss(policy, windows, 8, 2)
    torch.randn(3)
    assert training.validation_loss(policy, windows, 8, 2) == first


def test_an_epoch_takes_every_window_once_and_processes_share_each_batch(demonstrations):
    _, policy, trainer = check_config(configuration(demonstrations, Path("unused"), batch_size=16))
    file = open_demonstrations(demonstrations)
    windows = Windows(read_episodes(file, file.split("train"), policy), policy)
    loop = training.Training.__new__(training.Training)
    loop.config, loop.train, loop.epoch_steps = trainer, windows, len(windows) // 16

    def drawn(step: int, process: int, processes: int) -> list[int]:
        loop.step = step
        loop.accelerator = SimpleNamespace(process_index=process, num_processes=processes)
        return loop._windows().tolist()

    epochs = []
    for epoch in range(2):
        steps = range(epoch * loop.epoch_steps, (epoch + 1) * loop.epoch_steps)
        epochs.append([window for step in steps for window in drawn(step, 0, 1)])
        assert len(set(epochs[-1])) == len(epochs[-1]) == 16 * loop.epoch_steps
        for step in steps:
            parts = [drawn(step, process, 3) for process in range(3)]
            assert sorted(window for part in parts for window in part) == sorted(drawn(step, 0, 1))
            assert {len(part) for part in parts} == {5, 6}
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("options", [{"mixed_precision": "bf16"}, {"epochs": 2, "max_grad_norm": 0.1}])
def test_other_ways_to_train(demonstrations, tmp_path, options):
    results = train.run(configuration(demonstrations, tmp_path / "run", steps=2, batch_size=32, **options))
    assert results["steps"] == (2 * (results["windows"] // 32) if "epochs" in options else 2)
    assert np.isfinite(results["metrics"]["validation_loss"])


def test_the_moving_average_is_diffusers():
    """Decays and averages of the published recipe's EMAModel (power 0.75)."""
    from diffusers.training_utils import EMAModel

    from hf_sparseprior.training import WeightAverage

    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    average = WeightAverage(layer, 0.9)
    reference = EMAModel(layer.parameters(), decay=0.9, use_ema_warmup=True, inv_gamma=1.0, power=0.75)
    for step in range(1, 40):
        with torch.no_grad():
            layer.weight.add_(torch.randn(2, 3))
        reference.step(layer.parameters())
        decay = training.ema_decay(step, 0.75, 0.9)
        average.update(decay)
        assert decay == pytest.approx(reference.cur_decay_value)
        assert torch.allclose(average.averages["weight"], reference.shadow_params[0], atol=1e-6)


def test_the_better_policy_is_kept():
    def entry(success, reward):
        return {"validation_success": success, "validation_max_reward": reward}

    assert training.is_better(entry(0, 0), None)
    assert training.is_better(entry(0.5, 0.1), entry(0.4, 0.9))
    assert training.is_better(entry(0.5, 0.3), entry(0.5, 0.2))
    assert training.is_better(entry(0.5, 0.2), entry(0.5, 0.2))
    assert not training.is_better(entry(0.5, 0.1), entry(0.5, 0.2))


# ---- configurations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMOKE)
def test_the_readme_records_and_trains_what_small_configurations_read(name):
    readme = (ROOT / "tasks" / "robotics" / "README.md").read_text()
    config = load_config(shipped.path(name))
    (line,) = (each for each in readme.splitlines() if f" {config['data']['path']} --episodes" in each)
    cameras = {key.removesuffix("_image") for key, shape in config["policy"]["observations"].items() if len(shape) == 3}
    assert cameras <= set(line.partition("--cameras")[2].split())
    assert f"--config configs/{name}\n" in readme and f"`{name.partition('#')[2]}`" in readme


@pytest.mark.parametrize("name", [*SMOKE, *TABLE_6])
def test_every_configuration_builds(name):
    """On the meta device: the full ones have hundreds of millions of weights."""
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


def test_windows_of_table_6_are_all_patches():
    for name in TABLE_6:
        support = check_config(load_config(shipped.path(name)))[1].encoder.get("prior")
        if "fibottention" in name:
            patches = 100 if "pusht" in name else 81
            assert support["support"]["w_min"] == support["support"]["w_max"] == patches
            assert support["support"].get("modified", False) == name.endswith("modified")


@pytest.mark.parametrize(
    ("override", "message"),
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
    ],
)
def test_bad_values_are_refused(override, message):
    with pytest.raises(ValueError, match=message):
        load_config(LIFT_DENSE, [override])


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
