"""Policies in the simulator: what they see and do there, what is counted, and what is refused."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

for package in ("diffusers", "gym_pusht", "zarr"):
    pytest.importorskip(package, reason="the robotics extra is not installed")

from hf_sparseprior.base import own_files  # noqa: E402
from hf_sparseprior.patterns.decay import DECAYS  # noqa: E402
from hf_sparseprior.patterns.pattern import SUPPORTS  # noqa: E402
from tasks.robotics import evaluate, train, training  # noqa: E402
from tasks.robotics.environments import make_environment  # noqa: E402
from tasks.robotics.normalizer import Normalizer  # noqa: E402
from tasks.robotics.policy import CrosswayPolicy  # noqa: E402
from tasks.robotics.policy_config import PolicyConfig  # noqa: E402
from tasks.robotics.rollout import Episode, make_matching_environment, rollout, summary, wilson_interval  # noqa: E402
from tests.each import each  # noqa: E402
from tests.tasks.robotics.tiny import pusht_policy, write_pusht  # noqa: E402

pytestmark = pytest.mark.slow


class Scripted:
    """Pushes where it is told to, three actions a plan, and remembers what it saw."""

    def __init__(self, actions):
        self.actions, self.seen = iter(actions), []
        self.config = SimpleNamespace(observation_steps=2, seen={"agent_pos": [2], "keypoints": [16]})

    def act(self, observations, generator):
        self.seen.append(observations)
        return np.stack([next(self.actions) for _ in range(3)])


def test_the_policy_sees_the_last_two_observations_and_its_actions_are_executed():
    actions = np.random.default_rng(0).uniform(0, 512, (9, 2))
    policy = Scripted(actions)
    with make_environment("pusht") as environment:
        told = []
        episode = rollout(policy, environment, 5, 8, 96, on_step=lambda *step: told.append(step))
        history = [environment.reset(5)]
        rewards = []
        for action in actions[:8]:
            observation, reward, _, info = environment.step(action)
            history.append(observation)
            rewards.append(reward)
    assert (episode.steps, episode.success, len(episode.frames)) == (8, False, 9)
    assert told == [(step, 8) for step in range(1, 9)]
    assert episode.max_reward == max(rewards) and episode.coverage == info["coverage"]
    for plan, (before, now) in enumerate(((0, 0), (2, 3), (5, 6))):
        for key in ("agent_pos", "keypoints"):
            expected = np.stack([history[before][key], history[now][key]])
            assert np.array_equal(policy.seen[plan][key], expected)
    assert set(policy.seen[0]) == {"agent_pos", "keypoints"}


def test_an_episode_ends_when_it_is_solved():
    seen = {"agent_pos": np.zeros(2), "keypoints": np.zeros(16)}

    class Solved:
        horizon = 50

        def reset(self, seed):
            self.steps = 0
            return seen

        def step(self, action):
            self.steps += 1
            return seen, self.steps / 10, self.success(), {}

        def success(self):
            return self.steps == 4

    episode = rollout(Scripted(np.zeros((60, 2))), Solved(), seed=0)
    assert (episode.success, episode.steps, episode.max_reward, episode.coverage) == (True, 4, 0.4, None)


def test_wilson_interval_is_the_formula():
    z = 1.959963984540054
    for solved, episodes in ((0, 5), (19, 20), (20, 20), (25, 50)):
        rate = solved / episodes
        centre = (rate + z * z / (2 * episodes)) / (1 + z * z / episodes)
        half = z * math.sqrt(rate * (1 - rate) / episodes + z * z / (4 * episodes**2)) / (1 + z * z / episodes)
        assert wilson_interval(solved, episodes) == pytest.approx((centre - half, centre + half), abs=1e-12)


def test_summary_counts():
    episodes = [Episode(0, True, 1.0, 9, 0.96), Episode(1, False, 0.5, 300, 0.2), Episode(2, False, 0.3, 300, 0.1)]
    found = summary(episodes)
    assert found["success"] == pytest.approx(1 / 3)
    assert found["max_reward"] == pytest.approx(0.6)
    assert found["final_coverage"] == pytest.approx(0.42)
    assert "final_coverage" not in summary([Episode(0, True, 1.0, 9)])


def test_another_environment_is_refused(saved, tmp_path):
    policy = CrosswayPolicy.from_pretrained(saved)
    make_matching_environment(policy.about, str(saved)).close()
    for key, value in (("controller", {"k_p": 90, "k_v": 20}), ("frame", "another"), ("versions", {"pymunk": "1"})):
        about = {**policy.about, "settings": {**policy.about["settings"], key: value}}
        with pytest.raises(ValueError, match=f"{key}"):
            make_matching_environment(about, str(saved))
    other = tmp_path / "other"
    policy.save_pretrained(other, {**policy.about, "settings": {**policy.about["settings"], "control_hz": 5}})
    assert evaluate.main([str(other), "--episodes", "1", "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_the_command_writes_results_picture_and_film(saved, tmp_path, capsys):
    arguments = [str(saved), "--episodes", "2", "--seed", "70", "--max-steps", "20", "--sampling-steps", "2"]
    assert evaluate.main([*arguments, "--out", str(tmp_path / "trained")]) == 0
    said = capsys.readouterr()
    assert "0 of 2 solved (95 %: 0 to 66 %)" in said.out and "action=1/20" in said.err
    assert evaluate.main([*arguments, "--out", str(tmp_path / "untrained"), "--untrained"]) == 0
    trained, untrained = (
        json.loads((tmp_path / name / "results_test.json").read_text()) for name in ("trained", "untrained")
    )
    assert [episode["seed"] for episode in trained["episodes"]] == [70, 71]
    assert trained["metrics"]["success_interval"] == pytest.approx([0, 0.6576], abs=1e-4)
    assert trained["sampling_steps"] == 2 and trained["versions"]["torch"]
    assert untrained["untrained"] and untrained["model_sha256"] is None
    for name in ("trained", "untrained"):
        assert (tmp_path / name / "episodes.png").stat().st_size > 10_000
        assert (tmp_path / name / trained["film"]).stat().st_size > 1_000


def test_a_support_of_the_users_is_imported_in_every_process(own_file, tmp_path, capsys):
    own_files.import_files([own_file])
    config = replace(
        pusht_policy().config, observations={"image": [96, 96, 3], "agent_pos": [2]}, image_size=96, crop=96
    )
    encoder = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = replace(config, encoder={**encoder, "patch_size": 16, "prior": "cross"})
    bounds = {"agent_pos": ([0.0] * 2, [512.0] * 2), "actions": ([0.0] * 2, [512.0] * 2)}
    with make_environment("pusht", ["image"]) as environment:
        about = {"environment": {"name": "pusht", "cameras": ["image"]}, "settings": environment.settings}
    CrosswayPolicy(config, Normalizer(bounds, dict.fromkeys(bounds, 1.0))).save_pretrained(tmp_path / "policy", about)
    own_files.IMPORTED.clear()  # as in another process
    SUPPORTS.pop("cross")
    DECAYS.pop("columns")
    given = [str(tmp_path / "policy"), "--episodes", "2", "--max-steps", "3", "--sampling-steps", "2", "--jobs", "2"]
    given += ["--out", str(tmp_path / "out")]
    assert evaluate.main(given) == 2
    carried = tmp_path / "policy" / "encoders" / "image" / "own_cross.py"
    assert "cross" in capsys.readouterr().err and carried.is_file()
    assert evaluate.main([*given, "--import", str(carried)]) == 0
    assert "0 of 2 solved" in capsys.readouterr().out


def test_without_gl_pictures_alone_are_left_out(saved, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "picture_problem", lambda simulator: "no GL library: apt-get install libosmesa6")
    out = tmp_path / "out"
    assert evaluate.main([str(saved), "--episodes", "1", "--max-steps", "4", "--out", str(out)]) == 0
    written = capsys.readouterr()
    assert "no pictures: no GL library: apt-get install libosmesa6\n" in written.err and "film" not in written.out
    assert {path.name for path in out.iterdir()} == {"results_test.json", "episodes"}
    assert json.loads((out / "results_test.json").read_text())["film"] is None


@each(
    "damage, message",
    [
        ({"environment": None}, "does not say its environment"),
        ({"environment": {"name": "pusht", "colour": 1}}, "does not say its environment"),
        ({"settings": None}, "does not say the settings"),
        ({"settings": {}}, "does not say the settings"),
    ],
)
def test_a_policy_that_does_not_say_its_environment_is_named(saved, damage, message):
    about = {**CrosswayPolicy.from_pretrained(saved).about, **damage}
    with pytest.raises(ValueError, match=f"policy {message}"):
        make_matching_environment(about, "policy")


@each(
    "arguments, message",
    [
        (["none"], "not a folder of a saved policy"),
        (["SAVED", "--episodes", "0"], "--episodes 0 must be 1 or more"),
        (["SAVED", "--sampler", "euler"], "'euler' must be one of"),
        (["SAVED", "--sampling-steps", "500"], "500 must be at most"),
        (["SAVED", "--episodes", "1", "--seed", "-5"], "--seed -5 must be 0 or more"),
        (["SAVED", "--jobs", "0"], "--jobs 0 must be 1 or more"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(saved, tmp_path, capsys, arguments, message):
    arguments = [str(saved) if argument == "SAVED" else argument for argument in arguments]
    assert evaluate.main([*arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_training_chooses_on_validation_seeds(tmp_path, monkeypatch):
    """The saved policy is that of the best step, and no seed of evaluation is ever looked at."""
    write_pusht(tmp_path)
    seeds, scores = [], iter([0.5, 0.5, 0.9, 0.9, 0.2, 0.2])

    def scored(policy, environment, seed):
        seeds.append(seed)
        real = rollout(policy, environment, seed, max_steps=2)
        return Episode(seed, real.success, next(scores), real.steps)

    monkeypatch.setattr(training, "rollout", scored)
    policy = pusht_policy().config
    options = ("widths", "kernel_size", "groups", "step_embedding_size", "observations", "action_size")
    trainer = {"output_dir": str(tmp_path / "run"), "steps": 6, "validate_steps": 2, "validation_episodes": 2}
    results = train.run(
        {
            "data": {"path": str(tmp_path / "pusht.zarr")},
            "policy": {key: getattr(policy, key) for key in options},
            "encoder": {},
            "trainer": {**trainer, "batch_size": 8, "disable_tqdm": True},
        }
    )
    assert seeds == [50_000, 50_001] * 3
    assert results["metrics"]["policy_step"] == 4
    assert results["metrics"]["validation_max_reward"] == pytest.approx(0.9)
    assert CrosswayPolicy.from_pretrained(tmp_path / "run" / "model").about["step"] == 4


def test_lift_through_two_cameras(environment):
    """Images of the simulator reach the encoders, and the prior's mask reaches the arm."""
    cameras = ("agentview", "robot0_eye_in_hand")
    images = {"agentview_image": [84, 84, 3], "robot0_eye_in_hand_image": [84, 84, 3]}
    encoder = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    positions = []
    simulator = environment("lift", cameras)
    for prior in ("dense", {"support": {"name": "fibottention", "w_min": 81, "w_max": 81, "modified": True}}):
        config = PolicyConfig(
            observations={**images, "robot0_eef_pos": [3]},
            crop=76,
            widths=[16, 32],
            groups=4,
            step_embedding_size=8,
            reconstruction_weight=0,
            sampler="ddim",
            sampling_steps=2,
            encoder={**encoder, "initializer_range": 0.3, "prior": prior},
        )
        bounds = {"robot0_eef_pos": ([-1.0] * 3, [1.0] * 3), "actions": ([-1.0] * 10, [1.0] * 10)}
        torch.manual_seed(0)
        policy = CrosswayPolicy(config, Normalizer(bounds, dict.fromkeys(bounds, 0.1))).eval()
        episode = rollout(policy, simulator, 3, max_steps=8, picture_size=64)
        assert episode.steps == 8 and np.ptp(episode.frames[0]) > 50
        positions.append(simulator.pose()[0])
    assert not np.allclose(*positions, atol=1e-5)
