"""The training loop: what it draws, validates, averages and keeps."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers", reason="the robotics extra is not installed")
pytest.importorskip("h5py", reason="the robotics extra is not installed")

from tasks.robotics import train, training
from tasks.robotics.config import check_config
from tasks.robotics.data import Windows, read_episodes
from tasks.robotics.formats import open_demonstrations
from tests.tasks.robotics.walk import configuration, with_cameras, write_walk

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_accelerator")]


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory) -> Path:
    return write_walk(tmp_path_factory.mktemp("demonstrations"))


def test_a_batch_must_reach_every_process(demonstrations, tmp_path, monkeypatch):
    monkeypatch.setattr(training.Accelerator, "num_processes", 3)
    with pytest.raises(ValueError, match=r"trainer\.batch_size=2 of \d+ windows must be at least the 3 processes"):
        train.run(configuration(demonstrations, tmp_path / "run", batch_size=2))
    assert not (tmp_path / "run").exists()


def test_processes_wait_for_a_long_validation(demonstrations, tmp_path, monkeypatch):
    seen, accelerator = [], training.Accelerator

    def noted(**given):
        seen.extend(given["kwargs_handlers"])
        return accelerator()

    monkeypatch.setattr(training, "Accelerator", noted)
    train.run(configuration(demonstrations, tmp_path / "run", steps=1))
    assert seen[0].to_kwargs()["timeout"].total_seconds() == 24 * 3600


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
    assert losses[-1] < 0.9 * losses[0], losses  # the average, which follows slowly


def test_validation_loss_draws_the_same_every_time(demonstrations, tmp_path):
    config = with_cameras(configuration(demonstrations, tmp_path / "run"))
    loop, _ = train.make_training(config, open_demonstrations(demonstrations))
    policy = loop.policy.eval()
    first = training.validation_loss(policy, loop.validation, 8, 2)
    torch.randn(3)
    assert training.validation_loss(policy, loop.validation, 8, 2) == first


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
