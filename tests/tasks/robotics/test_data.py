"""Windows against a brute-force cut, the normaliser's data, and refusals."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers", reason="the robotics extra is not installed")

from tasks.robotics.data import Windows, check_shapes, fit_normalizer, read_episodes, window_starts
from tests.tasks.robotics.tiny import tiny_config

LENGTHS = (20, 9, 31)


def episodes(config, lengths=LENGTHS):
    """Every value says which episode and step it is of."""
    result = []
    for number, length in enumerate(lengths):
        code = 1000 * number + np.arange(length)
        result.append(
            {
                "position": np.repeat(code[:, None], 3, 1).astype(np.float32),
                "actions": np.repeat(code[:, None], 4, 1).astype(np.float32),
                **{
                    key: np.broadcast_to(code[:, None, None, None] % 251, (length, 32, 32, 3)).astype(np.uint8)
                    for key in config.cameras
                },
            }
        )
    return result


@pytest.mark.parametrize(("observation_steps", "action_steps"), [(2, 8), (1, 8), (2, 4), (3, 14)])
def test_windows_are_those_of_diffusion_policy(observation_steps, action_steps):
    """Padded by hand, the first step repeated observation_steps - 1 times in front of it, the last one action_steps - 1
    times after it; then every window of 16.
    """
    config = tiny_config(observation_steps=observation_steps, action_steps=action_steps, reconstruction_weight=0)
    windows = Windows(episodes(config), config)
    expected = []
    for number, length in enumerate(LENGTHS):
        padded = [0] * (observation_steps - 1) + list(range(length)) + [length - 1] * (action_steps - 1)
        expected += [[1000 * number + step for step in padded[i : i + 16]] for i in range(len(padded) - 15)]
    assert len(windows) == len(expected)
    seen, actions = windows.batch(torch.arange(len(windows)))
    assert actions[:, :, 0].int().tolist() == expected
    assert seen["position"][:, :, 0].int().tolist() == [window[:observation_steps] for window in expected]
    assert seen["hand_image"].shape == (len(expected), observation_steps, 32, 32, 3)
    assert seen["hand_image"][:, :, 5, 5, 1].tolist() == [
        [step % 251 for step in window[:observation_steps]] for window in expected
    ]


def test_every_step_of_an_episode_is_executed_in_some_window():
    for length in (9, 16, 17, 40):
        executed = {
            min(max(start + 1 + step, 0), length - 1) for start in window_starts(length, 2, 16, 8) for step in range(8)
        }
        assert executed == set(range(length))


def test_too_short_episodes_are_refused():
    config = tiny_config()
    with pytest.raises(ValueError, match="hold no window of horizon=16"):
        Windows(episodes(config, (7,)), config)


class File(SimpleNamespace):
    """What a file of demonstrations gives, without a file."""

    def read(self, name, key):
        return {"actions": np.zeros((5, 4), np.float32), "position": np.ones((5, 3), np.float32)}.get(
            key, np.full((5, 40, 40, 3), int(name), np.uint8)
        )


def demonstrations(**changes):
    shapes = {"agentview_image": (40, 40, 3), "hand_image": (40, 40, 3), "position": (3,), "more": (7,)}
    return File(**{"path": "some.hdf5", "shapes": shapes, "action_size": 4, **changes})


def test_images_are_scaled_as_they_are_read():
    read = read_episodes(demonstrations(), ["7", "9"], tiny_config())
    assert [episode["hand_image"].shape for episode in read] == [(5, 32, 32, 3)] * 2
    assert [int(episode["hand_image"].max()) for episode in read] == [7, 9]
    assert "more" not in read[0]


def test_other_demonstrations_are_refused():
    config = tiny_config()
    check_shapes(demonstrations(), config)
    with pytest.raises(ValueError, match=r"some\.hdf5 has actions of 10 numbers"):
        check_shapes(demonstrations(action_size=10), config)
    with pytest.raises(ValueError, match=r"some\.hdf5 has no observation 'hand_image'"):
        check_shapes(demonstrations(shapes={"agentview_image": (40, 40, 3), "position": (3,)}), config)
    shapes = {**demonstrations().shapes, "position": (4,)}
    with pytest.raises(ValueError, match=r"position has shape \[4\], policy\.observations says \[3\]"):
        check_shapes(demonstrations(shapes=shapes), config)


def test_the_range_is_that_of_the_given_episodes_alone():
    config = tiny_config()
    normalizer = fit_normalizer(episodes(config)[:1], config, 0.02, {"actions": [1.0, 100.0, 1.0, 1.0]})
    assert normalizer("position", torch.tensor([[0.0, 9.5, 19.0]])).tolist() == [[-1, 0, 1]]
    assert normalizer("actions", torch.tensor([19.0, 59.5, 0, 0]))[:2].tolist() == [1, 1]
    kept = fit_normalizer(episodes(config), config, 0.02, {"position": None, "actions": [0.02, None, 0.02, None]})
    position, actions = torch.tensor([0.3, -0.9, 1.0]), torch.tensor([19.0, 0.7, 0.0, -0.4])
    assert torch.equal(kept("position", position), position) and torch.equal(kept.undo("position", position), position)
    assert kept("actions", actions)[[1, 3]].tolist() == actions[[1, 3]].tolist()
    assert kept("actions", actions)[0] != actions[0]
    with pytest.raises(ValueError, match=r"data\.floors has hand_image; allowed: position, actions"):
        fit_normalizer(episodes(config), config, 0.02, {"hand_image": 1})
    with pytest.raises(ValueError, match=r"actions=\[1, 2\] must be one number or 4"):
        fit_normalizer(episodes(config), config, 0.02, {"actions": [1, 2]})
