import sys
from types import ModuleType

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from tasks.robotics import environments
from tasks.robotics.actions import matrix_from_axis_angle, pose_action
from tasks.robotics.environments import ENVIRONMENTS, make_environment
from tasks.robotics.formats.hdf5_layout import BASE_POSITIONS
from tests.processes import Started

pytestmark = pytest.mark.slow

CAMERAS = {"lift": ("agentview", "robot0_eye_in_hand"), "can": ("agentview", "robot0_eye_in_hand"), "pusht": ("image",)}
LOW = {
    "lift": {"robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2, "object": 10},
    "can": {"robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2, "object": 14},
    "pusht": {"agent_pos": 2, "state": 5, "keypoints": 16},
}


def hold(environment):
    """An action that stays where it is."""
    return environment.state()[:2] if environment.name == "pusht" else pose_action(*environment.pose(), -1.0)


def wander(environment, seed, steps):
    """Observations of an episode of random actions around where the robot is."""
    generator = np.random.default_rng(seed)
    seen = [environment.reset(seed)]
    for _ in range(steps):
        action = hold(environment)
        scale = 60.0 if environment.name == "pusht" else 0.05
        width = 2 if environment.name == "pusht" else 3
        action[:width] += generator.normal(0, scale, width)
        seen.append(environment.step(action)[0])
    return seen


# ---- all environments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_interface(environment, name):
    with_images = environment(name, CAMERAS[name])
    observation = with_images.reset(0)
    size = environments.IMAGE_SIZES[name]
    images = {key: (size, size, 3) for key in with_images.cameras.values()}
    assert {key: values.shape for key, values in observation.items()} == {
        **{key: (width,) for key, width in LOW[name].items()},
        **images,
    }
    for key, values in observation.items():
        assert values.dtype == (np.uint8 if key in images else np.float32)
        assert key not in images or values.std() > 5
    following, reward, done, info = with_images.step(hold(with_images))
    assert following.keys() == observation.keys() and 0 <= reward <= 1 and done is info["success"] is False
    assert not with_images.success()
    picture = with_images.render(120)
    assert picture.shape == (120, 120, 3) and picture.dtype == np.uint8
    assert with_images.settings["cameras"] == list(CAMERAS[name])


@pytest.mark.parametrize("name", ["lift", "pusht"])
def test_a_seed_gives_the_same_episode_fresh_and_after_others(environment, name):
    used = environment(name)
    wander(used, 5, 8)
    again = wander(used, 3, 8)
    with make_environment(name) as fresh:
        first = wander(fresh, 3, 8)
    for one, other in zip(first, again, strict=True):
        for key in one:
            assert np.array_equal(one[key], other[key]), key
    other_start = used.reset(4)
    key = "state" if name == "pusht" else "object"
    assert not np.allclose(other_start[key], first[0][key], atol=1e-3)


@pytest.mark.parametrize("name", ["lift", "pusht"])
def test_images_are_the_same_every_time_and_change_nothing(environment, name):
    seen, blind = environment(name, CAMERAS[name]), environment(name)
    first, again, without = (wander(each, 3, 4) for each in (seen, seen, blind))
    for one, two, three in zip(first, again, without, strict=True):
        assert all(np.array_equal(one[key], two[key]) for key in one)
        assert all(np.array_equal(one[key], three[key]) for key in three)


@pytest.mark.parametrize("name", ["lift", "pusht"])
def test_wrong_actions_are_refused(environment, name):
    made = environment(name)
    made.reset(0)
    for action in (np.zeros(7), np.full(made.action_size, np.nan)):
        with pytest.raises(ValueError, match=f"of {name} must be {made.action_size} finite numbers"):
            made.step(action)


def test_wrong_names_are_refused(environment):
    with pytest.raises(ValueError, match="environment 'push' must be one of lift, can, pusht"):
        make_environment("push")
    for size in (8, 2000, 84.0, True):
        with pytest.raises(ValueError, match="must be an integer from 16 to 1024"):
            make_environment("lift", (), size)
    with pytest.raises(ValueError, match="camera 'front' of pusht must be one of image"):
        environment("pusht", ("front",))
    with pytest.raises(ValueError, match="camera 'image' of lift must be one of agentview"):
        environment("lift", ("image",))


def test_what_is_covered_does_not_depend_on_the_order_of_a_set(environment):
    """The block's two shapes lie in a set, whose order follows from addresses. A sum of their areas must not."""
    table, generator = environment("pusht"), np.random.default_rng(0)
    table.reset(0)
    shapes, different = table._env._block_shapes, 0
    from gym_pusht.envs.pusht import PushTEnv, pymunk_to_shapely

    for _ in range(200):
        table.restore(np.array([20, 20, *generator.uniform(200, 300, 2), generator.uniform(0, 6)]))
        goal = table._env.get_goal_pose_body(table._env.goal_pose)
        orders = (shapes, shapes[::-1])
        areas = [[pymunk_to_shapely(body, order) for body in (goal, table._env.block)] for order in orders]
        values = [target.intersection(block).area / target.area for target, block in areas]
        assert table._covered() == table._env._get_coverage() == values[0]
        assert PushTEnv._get_coverage(table._env) == pytest.approx(values[1], abs=1e-15)
        different += values[0] != values[1]
    assert different


# ---- arms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "task"), [("lift", "Lift"), ("can", "PickPlaceCan")])
def test_observations_are_robosuites(environment, name, task):
    ours = environment(name)
    from tasks.robotics.robosuite_arm import CONTROL_HZ, controller, robosuite

    theirs = robosuite.make(
        task,
        robots="Panda",
        controller_configs=controller(),
        has_renderer=False,
        has_offscreen_renderer=False,
        use_camera_obs=False,
        control_freq=CONTROL_HZ,
        hard_reset=False,
        seed=0,
    )
    theirs.rng.bit_generator.state = np.random.default_rng(11).bit_generator.state
    theirs.reset()
    # Twice: its poses in the hand's frame are those of the time before.
    expected, observation = theirs._get_observations(force_update=True), ours.reset(11)
    parts = {
        "lift": ["cube_pos", "cube_quat", "gripper_to_cube_pos"],
        "can": ["Can_pos", "Can_quat", "Can_to_robot0_eef_pos", "Can_to_robot0_eef_quat"],
    }[name]
    values = np.split(observation["object"], np.cumsum([len(expected[part]) for part in parts])[:-1])
    pairs = [(expected[key], observation[key]) for key in list(LOW[name])[:3]]
    for wanted, value in [*pairs, *zip([expected[part] for part in parts], values, strict=True)]:
        if len(wanted) == 4 and np.dot(wanted, value) < 0:
            value = -value
        assert np.allclose(wanted, value, atol=2e-6)
    theirs.close()


@pytest.mark.parametrize("name", ["lift", "can"])
def test_the_base_stands_where_published_actions_expect_it(environment, name):
    arm = environment(name)
    arm.reset(0)
    position, axes = arm._base()
    assert np.allclose(position, BASE_POSITIONS[name], atol=1e-6) and np.allclose(axes, np.eye(3), atol=1e-6)


def test_an_action_is_a_pose_that_is_reached(environment):
    arm = environment("lift")
    arm.reset(2)
    position, rotation = arm.pose()
    position = position + np.array([0.04, -0.05, 0.03])
    rotation = matrix_from_axis_angle(np.array([0.0, 0.0, np.radians(25)])) @ rotation
    for _ in range(60):
        arm.step(pose_action(position, rotation, -1.0))
    there, turned = arm.pose()
    assert np.linalg.norm(there - position) < 0.01
    assert (Rotation.from_matrix(turned) * Rotation.from_matrix(rotation).inv()).magnitude() < np.radians(4)


def test_the_gripper_opens_and_closes(environment):
    arm = environment("lift")
    width = {}
    for gripper in (-1.0, 1.0):
        arm.reset(0)
        for _ in range(15):
            seen = arm.step(pose_action(*arm.pose(), gripper))[0]
        width[gripper] = np.abs(seen["robot0_gripper_qpos"]).sum()
    assert width[-1.0] > 0.07 and width[1.0] < 0.01


def test_images_stand_upright(environment):
    """The cube's middle, projected by a pinhole camera, is red; mirrored or upside down, nothing is."""
    arm = environment("lift", CAMERAS["lift"])
    hits = {camera: [] for camera in CAMERAS["lift"]}
    for seed in range(4):
        seen = arm.reset(seed)
        for camera, own in hits.items():
            image, view = seen[arm.cameras[camera]].astype(int), arm._data.camera(camera)
            x, y, z = view.xmat.reshape(3, 3).T @ (arm._data.xpos[arm._object] - view.xpos)
            focal = image.shape[0] / 2 / np.tan(np.radians(arm._model.camera(camera).fovy[0]) / 2)
            column, row = (image.shape[0] / 2 + focal * np.array([x, -y]) / -z).astype(int)
            red = (image[..., 0] > 100) & (image[..., 1] < 80)
            assert red[row, column]
            own.append([flipped[row, column] for flipped in (red[::-1], red[:, ::-1], red[::-1, ::-1])])
    assert not any(np.all(own, axis=0).any() for own in hits.values())


def in_new_process(folder, code, **variables):
    """(exit status, output) of Python code with these variables and without MUJOCO_GL otherwise. No simulator was
    imported there."""
    forget = "import os\nfor key in ('MUJOCO_GL', 'PYOPENGL_PLATFORM'): os.environ.pop(key, None)\n"
    set_them = "".join(f"os.environ[{key!r}] = {value!r}\n" for key, value in variables.items())
    process = Started(exec, forget + set_them + code, {}, folder=folder, log=folder / "log")
    return process.wait(200), (folder / "log").read_text()


def test_mujoco_imported_too_early_is_refused(monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setitem(sys.modules, "mujoco", ModuleType("mujoco"))
    with pytest.raises(ValueError, match="mujoco was imported before MUJOCO_GL was set"):
        make_environment("lift")


def test_without_gl_everything_but_images_works(tmp_path):
    pytest.importorskip("robosuite", reason="needs make robotics")
    # As on a machine without the libraries: ctypes finds neither, neither for us nor for PyOpenGL.
    code = (
        "import ctypes, ctypes.util\n"
        "ctypes.util.find_library = lambda name: None\n"
        "load, ctypes.CDLL.__init__ = ctypes.CDLL.__init__, lambda self, name, *rest, **more: (\n"
        "    load(self, name, *rest, **more) if not any(gl in str(name) for gl in ('OSMesa', 'EGL')) else 1 / 0)\n"
        "from tasks.robotics.environments import gl_library, make_environment, picture_problem\n"
        "made = make_environment('lift')\n"
        "print(len(made.reset(0)), gl_library(), picture_problem(made))\n"
        "try: make_environment('lift', ('agentview',))\n"
        "except OSError as error: print(error)"
    )
    status, output = in_new_process(tmp_path, code)
    lines = output.splitlines()
    assert not status and lines[0].startswith("4 None no GL library: apt-get install libosmesa6"), output
    assert lines[1].startswith("no GL library renders here") and "apt-get install libosmesa6" in lines[1]


def test_a_gl_library_that_is_not_there_is_one_line(tmp_path):
    pytest.importorskip("robosuite", reason="needs make robotics")
    code = (
        "from tasks.robotics.environments import make_environment\n"
        "try: make_environment('lift')\n"
        "except OSError as error: print(error)"
    )
    status, output = in_new_process(tmp_path, code, MUJOCO_GL="no-such-library")
    assert not status and "lift cannot be imported with MUJOCO_GL=no-such-library" in output


# ---- PushT ----------------------------------------------------------------------------------------------------------


def test_pusht_is_gym_pushts(environment):
    """The same seed and actions through gymnasium's own front door."""
    ours = environment("pusht", ("image",))
    gymnasium = pytest.importorskip("gymnasium", reason="needs make robotics")
    theirs = gymnasium.make("gym_pusht/PushT-v0", obs_type="pixels_agent_pos", disable_env_checker=True)
    expected, observation = theirs.reset(seed=9)[0], ours.reset(9)
    for step in range(12):
        assert np.array_equal(observation["image"], expected["pixels"])
        assert np.allclose(observation["agent_pos"], expected["agent_pos"], atol=1e-4)
        action = np.array([100.0 + 25 * step, 300.0])
        expected, reward, _, _, info = theirs.step(action)
        observation, our_reward, _, our_info = ours.step(action)
        assert our_reward == pytest.approx(reward) and our_info["coverage"] == pytest.approx(info["coverage"])
    theirs.close()


def test_pushts_coverage_and_success_at_the_target(environment):
    pusht = environment("pusht")
    pusht.reset(0)
    assert not pusht.success()
    # The target is at (256, 256), an eighth of a turn round; the pusher is far away and stays there.
    pusht.restore(np.array([50.0, 50.0, 256.0, 256.0, np.pi / 4]))
    _, reward, done, info = pusht.step(np.array([50.0, 50.0]))
    assert info["coverage"] > 0.999 and reward == 1.0 and done and pusht.success()


def test_restore_places_what_the_state_says(environment):
    pusht = environment("pusht")
    pusht.reset(1)
    state = np.array([120.0, 130.0, 300.0, 210.0, 2.5])
    pusht.restore(state)
    assert np.allclose(pusht.state(), state, atol=1e-9)
    # Corners of the T by hand: a bar of 120 x 30 and a stem of 30 x 90 below its middle, turned about (300, 210).
    corners = [(-60, 0), (60, 0), (60, 30), (-60, 30), (-15, 30), (15, 30), (15, 120), (-15, 120)]
    turned = np.array(corners) @ np.array([[np.cos(2.5), np.sin(2.5)], [-np.sin(2.5), np.cos(2.5)]]) + [300, 210]
    found = pusht.keypoints()
    assert all(np.linalg.norm(found - corner, axis=1).min() < 1e-6 for corner in turned)
