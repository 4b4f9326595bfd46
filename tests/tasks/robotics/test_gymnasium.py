"""The simulators in gymnasium's own tools."""

import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium", reason="needs make robotics")

from gymnasium.utils.env_checker import check_env  # noqa: E402

import tasks.robotics  # noqa: E402, F401  registers
from tasks.robotics.environments import gl_library, make_environment  # noqa: E402
from tasks.robotics.registration import GYMNASIUM_IDS, HORIZONS, register_environments  # noqa: E402
from tests.each import each  # noqa: E402
from tests.processes import ROOT  # noqa: E402

pytestmark = pytest.mark.slow

SIMULATORS = {"lift": "robosuite", "can": "robosuite", "pusht": "gym_pusht"}
CAMERAS = {"lift": ("agentview",), "pusht": ("image",)}


def make(task, **options):
    pytest.importorskip(SIMULATORS[task], reason="needs make robotics")
    if task != "pusht" and gl_library() is None and {"cameras", "render_mode"} & options.keys():
        pytest.skip("no GL library: apt-get install libosmesa6")
    return gymnasium.make(GYMNASIUM_IDS[task], **options)


def test_importing_registers_three_names_and_loads_no_simulator():
    """In a process of its own; a second registration is silent."""
    script = """
import sys, warnings
warnings.simplefilter("error")
import gymnasium
before = set(gymnasium.registry)
import tasks.robotics
tasks.robotics.register_environments()
print(sorted(set(gymnasium.registry) - before))
print([name for name in ("torch", "mujoco", "robosuite", "gym_pusht", "pygame") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines() == [str(sorted(GYMNASIUM_IDS.values())), "[]"] and done.stderr == ""


@pytest.mark.parametrize("task", ["lift", "pusht"])
def test_gymnasiums_check_passes_without_a_warning(task):
    env = make(task, cameras=CAMERAS[task], render_mode="rgb_array")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*symmetric and normalized space")  # PushT's actions are places on the table
        check_env(env.unwrapped, skip_render_check=task == "lift")  # which makes it anew for every mode
    env.close()
    env.close()


@pytest.mark.parametrize("task", ["can", "pusht"])
def test_a_seed_is_the_episode_of_make_environment(task):
    """Also with gymnasium's wrappers around it, and again in an environment made by pickle."""
    env = make(task)
    actions = [env.action_space.sample() for _ in range(3)]
    with make_environment(task) as plain:
        expected = [plain.reset(11), *(plain.step(np.float64(plain.playable(action)))[0] for action in actions)]
    other = pickle.loads(pickle.dumps(env.unwrapped))
    for made in (env, other):
        observation, info = made.reset(seed=11)
        seen = [observation, *(made.step(action)[0] for action in actions)]
        assert info == {"seed": 11, "is_success": False, "success": False}
        for one, two in zip(expected, seen, strict=True):
            assert one.keys() == two.keys() and all(np.array_equal(one[key], two[key]) for key in one)
            assert made.observation_space.contains(two)
    # Without a seed the next one follows from the last.
    after = [(made.reset()[1]["seed"], made.reset()[1]["seed"]) for made in (env, other)]
    assert after[0] == after[1] and len({11, *after[0]}) == 3
    again = env.reset(seed=after[0][0])[0]
    assert all(np.array_equal(again[key], value) for key, value in other.reset(seed=after[0][0])[0].items())
    env.close()
    other.close()


@pytest.mark.parametrize("task", ["lift", "pusht"])
def test_every_action_of_the_space_can_be_executed(task):
    env = make(task)
    env.reset(seed=0)
    space = env.action_space
    for action in (space.low, space.high, np.zeros(space.shape, np.float32)):
        for _ in range(3):
            observation, reward, *_ = env.step(action)
            assert env.observation_space.contains(observation) and 0 <= reward <= 1
    env.close()


def test_a_rotation_that_is_none_keeps_the_hand_as_it_is():
    env = make("lift")
    env.reset(seed=0)
    arm = env.unwrapped.simulator
    position, before = arm.pose()
    for _ in range(10):
        env.step(np.concatenate([position, np.zeros(6), [-1]]).astype(np.float32))
    assert np.allclose(arm.pose()[1], before, atol=0.02)
    env.close()


def test_an_episode_is_cut_off_after_its_horizon():
    env = make("pusht")
    env.reset(seed=0)
    ends = [env.step(np.zeros(2, np.float32))[2:4] for _ in range(HORIZONS["pusht"])]
    assert ends == [(False, False)] * (HORIZONS["pusht"] - 1) + [(False, True)]
    horizons = {task: gymnasium.spec(name).max_episode_steps for task, name in GYMNASIUM_IDS.items()}
    assert horizons == HORIZONS
    env.close()


def test_a_solved_episode_is_terminated():
    env = make("pusht")
    env.reset(seed=0)
    table = env.unwrapped.simulator
    goal = table._env.goal_pose
    table.restore(np.array([20.0, 20.0, *goal]))
    _, reward, terminated, truncated, info = env.step(np.full(2, 20, np.float32))
    assert (terminated, truncated, reward) == (True, False, 1.0) and info["is_success"] and info["coverage"] > 0.95
    env.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_vector_environments_play_the_same_episodes(mode):
    pytest.importorskip("gym_pusht", reason="needs make robotics")
    vector = gymnasium.make_vec(GYMNASIUM_IDS["pusht"], num_envs=2, vectorization_mode=mode, cameras=("image",))
    seen, info = vector.reset(seed=[4, 9])
    actions = np.float32([[100, 200], [300, 400]])
    stepped = vector.step(actions)[0]
    vector.close()
    assert info["seed"].tolist() == [4, 9]
    with make_environment("pusht", ("image",)) as plain:
        for number, seed in enumerate((4, 9)):
            for batch, alone in ((seen, plain.reset(seed)), (stepped, plain.step(actions[number])[0])):
                assert all(np.array_equal(batch[key][number], alone[key]) for key in alone)


def test_pictures_have_the_size_that_was_asked_for():
    env = make("pusht", render_mode="rgb_array", render_size=64)
    env.reset(seed=1)
    before = env.render()
    env.step(np.float32([256, 256]))
    after = env.render()  # with a cross where the pusher shall go
    assert before.shape == after.shape == (64, 64, 3) and env.metadata["render_fps"] == 10
    assert after[32, 32].tolist() != before[32, 32].tolist()
    env.close()
    several = make("pusht", render_mode="rgb_array_list")
    several.reset(seed=1)
    several.step(np.float32([9, 9]))
    assert [frame.shape for frame in several.render()] == [(256, 256, 3)] * 2
    several.close()
    silent = make("pusht").unwrapped
    silent.reset(seed=1)
    with pytest.warns(UserWarning, match="render draws nothing"):
        assert silent.render() is None


def test_gymnasiums_wrappers_work_with_what_the_extra_installs(tmp_path):
    av = pytest.importorskip("av", reason="needs make robotics")
    pytest.importorskip("array_api_compat", reason="needs make robotics")
    from tasks.robotics.gymnasium_env import RecordVideo

    wrappers = gymnasium.wrappers
    env = RecordVideo(
        make("pusht", render_mode="rgb_array", render_size=64), str(tmp_path), name_prefix="table", disable_logger=True
    )
    assert isinstance(env, wrappers.RecordVideo)
    env = wrappers.NumpyToTorch(wrappers.RecordEpisodeStatistics(wrappers.FlattenObservation(env)))
    env.reset(seed=0)
    for _ in range(4):
        observation, *_ = env.step(torch.full((2,), 256.0))
    env.close()
    assert torch.is_tensor(observation) and observation.shape == env.observation_space.shape
    with av.open(str(tmp_path / "table-episode-0.mp4")) as film:
        frames = list(film.decode(video=0))
        assert film.streams.video[0].average_rate == 10
    assert len(frames) == 5 and frames[0].width == 64


@each(
    "options, message",
    [
        ({"cameras": ["front"]}, "camera 'front' of pusht must be one of image"),
        ({"cameras": "image"}, "cameras='image' must be a list of names"),
        ({"image_size": 8}, "image_size=8 must be an integer from 16 to 1024"),
        ({"render_size": 0}, "render_size=0 must be an integer from 16 to 1024"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make("pusht", **options)


def test_what_cannot_be_done_is_named():
    env = make("pusht").unwrapped
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(np.zeros(2, np.float32))
    with pytest.raises(ValueError, match=r"options=\{'state': 1\}: pusht has none"):
        env.reset(options={"state": 1})
    first = env.reset(seed=2**70)[1]["seed"]
    assert first == env.reset(seed=2**70)[1]["seed"] < 2**32
    register_environments()
    assert gymnasium.spec(GYMNASIUM_IDS["pusht"]).kwargs == {"task": "pusht"}
    env.close()
