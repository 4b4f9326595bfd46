"""What lerobot is given: the policy's folder, the features of the simulators, the actions.

lerobot itself is in none of the project's environments (docs/lerobot.md). Two of its classes are stood in for.
"""

import dataclasses
import json
import sys
import types
import warnings
from importlib import import_module

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium", reason="the robotics extra is not installed")
pytest.importorskip("diffusers", reason="the robotics extra is not installed")
pytest.importorskip("gym_pusht", reason="the robotics extra is not installed")

import gymnasium
from gymnasium.utils.env_checker import check_env

import tasks.robotics
from tasks.robotics import lerobot_eval, lerobot_export
from tasks.robotics.environments import gl_library, make_environment
from tasks.robotics.normalizer import Normalizer
from tasks.robotics.observation_groups import GROUPS
from tasks.robotics.policy import CrosswayPolicy
from tests.tasks.robotics.tiny import tiny_config

pytestmark = pytest.mark.slow

PLUGIN = "tasks.robotics.lerobot_plugin"
CAMERAS = {"lift": ("agentview", "robot0_eye_in_hand"), "can": ("agentview",), "pusht": ("image",)}


def save(folder, task, observations, about=None):
    """A policy of these observations with random weights."""
    size = 2 if task == "pusht" else 10
    config = tiny_config(observations=observations, action_size=size, reconstruction_weight=0)
    bounds = {key: ([-1.0] * shape[0], [1.0] * shape[0]) for key, shape in observations.items() if len(shape) == 1}
    bounds["actions"] = ([-1.0] * size, [1.0] * size)
    torch.manual_seed(0)
    policy = CrosswayPolicy(config, Normalizer(bounds, dict.fromkeys(bounds, 1.0))).eval()
    policy.save_pretrained(folder, about or {"environment": {"name": task}, "settings": {}})
    return policy


SEEN = {
    "lift": {
        "robot0_eye_in_hand_image": [84, 84, 3], "robot0_gripper_qpos": [2], "robot0_eef_pos": [3],
        "agentview_image": [84, 84, 3], "object": [10],
    },
    "pusht": {"keypoints": [16], "image": [96, 96, 3], "agent_pos": [2]},
}  # fmt: skip


@pytest.fixture
def modeling(monkeypatch):
    """The plugin's policy, on stand-ins of lerobot's two base classes."""

    @dataclasses.dataclass
    class Config:
        n_obs_steps: int = 1
        device: str = "cpu"

        @staticmethod
        def register_subclass(name):
            return lambda kind: kind

        @classmethod
        def from_pretrained(cls, folder):
            return cls()

    class Policy(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config

    for name, content in (
        ("lerobot", {}), ("lerobot.configs", {}), ("lerobot.policies", {}),
        ("lerobot.configs.policies", {"PreTrainedConfig": Config}),
        ("lerobot.policies.pretrained", {"PreTrainedPolicy": Policy}),
    ):  # fmt: skip
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("configuration_sparseprior_crossway", "modeling_sparseprior_crossway"):
        monkeypatch.delitem(sys.modules, f"{PLUGIN}.{name}", raising=False)
    yield import_module(f"{PLUGIN}.modeling_sparseprior_crossway")
    for name in ("configuration_sparseprior_crossway", "modeling_sparseprior_crossway"):
        sys.modules.pop(f"{PLUGIN}.{name}", None)


def as_lerobot(observation):
    """As lerobot's `preprocess_observation` turns what a vector environment shows."""

    def image(values):
        return torch.from_numpy(values).permute(0, 3, 1, 2).contiguous().float() / 255

    pixels = observation["pixels"]
    several = pixels if isinstance(pixels, dict) else {}
    found = {f"observation.images.{key}": image(values) for key, values in several.items()}
    if not several:
        found["observation.image"] = image(pixels)
    found["observation.state"] = torch.from_numpy(observation["agent_pos"]).float()
    found["observation.environment_state"] = torch.from_numpy(observation["environment_state"]).float()
    return found


@pytest.mark.parametrize("task", SEEN)
def test_the_policy_acts_on_lerobots_features_as_on_the_simulators(tmp_path, modeling, task):
    if task == "lift":
        pytest.importorskip("robosuite", reason="needs make robotics")
        if gl_library() is None:
            pytest.skip("no GL library: apt-get install libosmesa6")
    expected = save(tmp_path / "model", task, SEEN[task])
    folder = lerobot_export.export(tmp_path / "model", tmp_path / "lerobot")
    policy = modeling.SparsePriorCrosswayPolicy.from_pretrained(folder)
    name = tasks.robotics.registration.GYMNASIUM_IDS[task]
    shown = gymnasium.make_vec(name, 2, vectorization_mode="sync", cameras=CAMERAS[task], obs_type="lerobot")
    named = gymnasium.make_vec(name, 2, vectorization_mode="sync", cameras=CAMERAS[task])
    for seed in (3, 8):
        policy.reset()
        expected.reset()
        first, second = (each.reset(seed=seed)[0] for each in (shown, named))
        for _ in range(2):
            torch.manual_seed(seed)
            action = policy.select_action(as_lerobot(first))
            torch.manual_seed(seed)
            assert torch.equal(action, expected.select_action(second))
            clipped = np.clip(action.numpy(), shown.single_action_space.low, shown.single_action_space.high)
            first, second = (each.step(clipped)[0] for each in (shown, named))
        assert policy.predict_action_chunk(as_lerobot(first)).shape == (2, 8, expected.config.action_size)
    with pytest.raises(ValueError, match=r"'observation.state' is missing, of which the policy needs"):
        policy.select_action({key: value for key, value in as_lerobot(first).items() if key != "observation.state"})
    shown.close()
    named.close()


def test_a_policy_from_nothing_and_training_are_refused_by_name(tmp_path, modeling):
    config = modeling.SparsePriorCrosswayConfig()
    with pytest.raises(ValueError, match=r"--policy\.path must name a folder of a saved policy"):
        modeling.SparsePriorCrosswayPolicy(config)
    save(tmp_path / "model", "pusht", SEEN["pusht"])
    policy = modeling.SparsePriorCrosswayPolicy(config, CrosswayPolicy.from_pretrained(tmp_path / "model"))
    for call in (lambda: policy.forward({}), policy.get_optim_params, config.get_optimizer_preset):
        with pytest.raises(NotImplementedError, match=r"tasks\.robotics\.train trains these policies"):
            call()
    assert config.observation_delta_indices == [0] and config.action_delta_indices == [*range(16)]


def test_what_lerobot_reads_is_written(tmp_path, capsys):
    save(tmp_path / "run" / "model", "lift", SEEN["lift"])
    assert lerobot_export.main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert f"policy for lerobot: {tmp_path / 'out'}" in capsys.readouterr().out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["type"] == "sparseprior_crossway" and config["n_obs_steps"] == 2
    assert config["input_features"] == {
        "observation.images.robot0_eye_in_hand": {"type": "VISUAL", "shape": [3, 84, 84]},
        "observation.images.agentview": {"type": "VISUAL", "shape": [3, 84, 84]},
        "observation.state": {"type": "STATE", "shape": [9]},
        "observation.environment_state": {"type": "ENV", "shape": [10]},
    }
    assert config["output_features"] == {"action": {"type": "ACTION", "shape": [10]}}
    before = json.loads((tmp_path / "out" / "policy_preprocessor.json").read_text())
    names = [step["registry_name"] for step in before["steps"]]
    assert names == ["rename_observations_processor", "to_batch_processor", "device_processor"]
    # It is still a policy of ours.
    assert CrosswayPolicy.from_pretrained(tmp_path / "out").config.action_size == 10
    assert lerobot_export.main([str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("observations", "about", "message"),
    [
        ({"state": [5]}, None, "sees 'state', which lerobot is not shown; it is shown agent_pos, keypoints"),
        ({"agent_pos": [2]}, {"environment": {"name": "walk"}}, "is a policy of environment 'walk'; lerobot is shown"),
        ({"agent_pos": [2]}, {"environment": None}, "is a policy of environment None"),
    ],
)
def test_policies_that_lerobot_could_not_run_are_refused(tmp_path, capsys, observations, about, message):
    save(tmp_path / "model", "pusht", observations, about)
    assert lerobot_export.main([str(tmp_path / "model"), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_without_lerobot_the_command_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lerobot", None)
    assert lerobot_eval.main(["--policy.path=none"]) == 2
    error = capsys.readouterr().err
    assert "lerobot cannot be imported" in error and "docs/lerobot.md" in error and error.count("\n") == 1


@pytest.mark.parametrize("task", ["can", "pusht"])
def test_observations_for_lerobot_pass_gymnasiums_check(task):
    pytest.importorskip("gym_pusht" if task == "pusht" else "robosuite", reason="needs make robotics")
    cameras = CAMERAS[task] if task == "pusht" or gl_library() is not None else ()
    name = tasks.robotics.registration.GYMNASIUM_IDS[task]
    env = gymnasium.make(name, cameras=cameras, obs_type="lerobot").unwrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*symmetric and normalized space")
        check_env(env, skip_render_check=True)
    observation, _ = env.reset(seed=5)
    with make_environment(task, cameras) as plain:
        values = plain.reset(5)
    state = {"agent_pos": "observation.state", "environment_state": "observation.environment_state"}
    for key, feature in state.items():
        parts = [values[part] for part in GROUPS[task][feature]]
        assert [len(part) for part in parts] == list(GROUPS[task][feature].values())
        assert np.array_equal(observation[key], np.concatenate(parts))
    env.close()


def test_another_type_of_observations_is_refused():
    with pytest.raises(ValueError, match="obs_type='pixels' must be one of named, lerobot"):
        gymnasium.make("sparseprior/PushT-v0", obs_type="pixels")
