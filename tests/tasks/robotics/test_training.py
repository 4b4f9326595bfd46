"""The training loop: what it draws, validates, averages and keeps."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers", reason="the robotics extra is not installed")
pytest.importorskip("h5py", reason="the robotics extra is not installed")

from hf_sparseprior.runs.results import read_results
from tasks.robotics import train, training
from tasks.robotics.config import check_config
from tasks.robotics.data import Windows, read_episodes
from tasks.robotics.formats import open_demonstrations
from tasks.robotics.rollout import Episode
from tests.processes import Started, launched
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
    train.make_training(configuration(demonstrations, tmp_path / "run"), open_demonstrations(demonstrations))
    assert seen[0].to_kwargs()["timeout"].total_seconds() == 24 * 3600


def test_training_lowers_the_validation_loss(demonstrations, tmp_path):
    often = {"steps": 80, "log_steps": 80, "validate_steps": 20, "save_steps": 80, "learning_rate": 5e-3}
    results = train.run(configuration(demonstrations, tmp_path / "run", **often))
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

    assert sum(drawn(0, process, 3) and loop._share() for process in range(3)) == pytest.approx(3)
    drawn(0, 0, 3)
    assert loop._share() == pytest.approx(6 * 3 / 16)  # 6, 5 and 5 of 16
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


def test_half_precision_clipped_gradients_and_epochs(demonstrations, tmp_path):
    options = {"mixed_precision": "bf16", "max_grad_norm": 0.1, "epochs": 2, "steps": None, "batch_size": 32}
    results = train.run(configuration(demonstrations, tmp_path / "run", **options))
    assert results["steps"] == 2 * (results["windows"] // 32) > 0
    assert np.isfinite(results["metrics"]["validation_loss"])


def train_with_scored_seeds(config, notes):
    """A training whose validation episodes have rewards that follow from their seeds, and are noted."""

    def scored(policy, environment, seed):
        assert not policy.training
        with open(notes, "a") as file:
            file.write(f"{os.environ.get('RANK', '0')} {seed}\n")
        return Episode(seed, seed % 3 == 0, (seed % 7) / 7, 5)

    training.rollout = scored
    train.make_matching_environment = lambda *given: SimpleNamespace(close=lambda: None)
    train.run(config)


def test_processes_share_the_validation_episodes(demonstrations, tmp_path):
    """Two processes of torchrun play each seed once, and the results are those of one."""
    histories, notes = [], []
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        trainer = {"steps": 4, "validate_steps": 2, "validation_episodes": 5}
        config = configuration(demonstrations, folder / "run", **trainer)
        how = {"folder": folder, "log": folder / "log", "here": True}
        arguments = (train_with_scored_seeds, config, str(folder / "notes"))
        process = Started(*arguments, **how) if count == 1 else launched(2, *arguments, **how)
        assert process.wait(200) == 0, (folder / "log").read_text()
        history = read_results(folder / "run" / "results.json")["history"]
        histories.append([{k: v for k, v in entry.items() if "success" in k or "reward" in k} for entry in history])
        notes.append(sorted(line.split() for line in (folder / "notes").read_text().splitlines()))
    assert histories[0] == histories[1]
    seeds = range(50_000, 50_005)
    assert {"validation_success": 2 / 5, "validation_max_reward": np.mean([s % 7 / 7 for s in seeds])} in histories[0]
    assert sorted(seed for _, seed in notes[1]) == sorted(2 * [str(seed) for seed in seeds])
    assert [rank for rank, _ in notes[1]] == 6 * ["0"] + 4 * ["1"]


def test_the_moving_average_is_diffusers():
    """Averages of diffusers' EMAModel (power 0.75); its decays, one update later, as Diffusion Policy counts from 0."""
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
        average.update(reference.cur_decay_value)
        assert training.ema_decay(step + 1, 0.75, 0.9) == pytest.approx(reference.cur_decay_value)
        assert torch.allclose(average.averages["weight"], reference.shadow_params[0], atol=1e-6)
    assert training.ema_decay(1, 0.75, 0.9) == training.ema_decay(2, 0.75, 0.9) == 0


def test_the_better_policy_is_kept():
    def entry(success, reward):
        return {"validation_success": success, "validation_max_reward": reward}

    assert training.is_better(entry(0, 0), None)
    assert training.is_better(entry(0.5, 0.1), entry(0.4, 0.9))
    assert training.is_better(entry(0.5, 0.3), entry(0.5, 0.2))
    assert training.is_better(entry(0.5, 0.2), entry(0.5, 0.2))
    assert not training.is_better(entry(0.5, 0.1), entry(0.5, 0.2))


def test_the_metrics_of_a_chosen_policy_are_of_its_step():
    history = [{"step": 1, "loss": 2.0}, {"step": 1, "validation_loss": 3.0}, {"step": 2, "loss": 1.0}]
    best = {"step": 1, "validation_loss": 3.0, "validation_success": 0.5}
    found = training.Training.metrics(SimpleNamespace(history=history, best=best))
    assert found == {"validation_loss": 3.0, "validation_success": 0.5, "policy_step": 1}
    assert training.Training.metrics(SimpleNamespace(history=history, best=None)) == {
        "loss": 1.0,
        "validation_loss": 3.0,
    }


def test_checkpoints_are_saved_where_nothing_says_when(demonstrations, tmp_path, monkeypatch):
    saved, save = [], training.Training._save_checkpoint
    monkeypatch.setattr(training, "SAVE_STEPS", 4)
    monkeypatch.setattr(training.Training, "_save_checkpoint", lambda loop: (saved.append(loop.step), save(loop)))
    train.run(configuration(demonstrations, tmp_path / "run", save_steps=None, validate_steps=None))
    assert saved == [4, 8, 10]
