"""Published demonstrations and the simulator here, on made files in the layout of robomimic's."""

import copy
import json
import shutil
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from hf_sparseprior.cli.doctor import gl_library
from tasks.robotics import train
from tasks.robotics.config import load_config
from tasks.robotics.evaluate import Rollouts, evaluate
from tasks.robotics.formats import check_environment, open_demonstrations
from tasks.robotics.formats.robomimic_check import model_facts
from tests.configs import shipped
from tests.processes import Started
from tests.tasks.robotics.tiny import SMALL_TABLE_6

pytest.importorskip("h5py", reason="needs make robotics")

# As in published files; ranges of inputs and outputs do not act on absolute actions.
CONTROLLER = {
    "type": "OSC_POSE", "input_max": 1, "input_min": -1, "output_max": [0.05] * 3 + [0.5] * 3,
    "output_min": [-0.05] * 3 + [-0.5] * 3, "kp": 150, "damping_ratio": 1, "impedance_mode": "fixed",
    "kp_limits": [0, 300], "damping_ratio_limits": [0, 10], "position_limits": None, "orientation_limits": None,
    "uncouple_pos_ori": True, "control_delta": True, "interpolation": None, "ramp_ratio": 0.2,
}  # fmt: skip
OPTIONS = {
    "has_renderer": False, "has_offscreen_renderer": True, "ignore_done": True, "use_object_obs": True,
    "use_camera_obs": True, "control_freq": 20, "controller_configs": CONTROLLER, "robots": ["Panda"],
    "camera_depths": False, "camera_heights": 84, "camera_widths": 84, "reward_shaping": False,
}  # fmt: skip
HERE = """<mujoco><option impratio="20" density="1.2"/><worldbody>
<camera name="agentview" pos="0.5 0 1.35" quat="0.6532815 0.27059805 0.27059805 0.6532815"/>
<body name="robot0_base" pos="-0.56 0 0.912"><inertial pos="0 0 0" mass="3"/>
  <joint name="robot0_joint1" axis="0 0 1" damping="0.1" range="-2.8973 2.8973"/>
  <geom type="mesh" mesh="robot0_link0_vis" contype="0" conaffinity="0" name="seen"/>
  <geom type="box" size="0.1 0.1 0.1"/>
  <body name="gripper0_right_right_gripper" pos="0 0 0.1">
    <geom type="mesh" mesh="gripper0_right_hand" name="gripper0_right_hand_collision"/></body></body>
<body name="fixed_mount0_base" pos="0 0 0"/><body name="right_eef_target" mocap="true" pos="0 0 -1"/>
<body name="cube_main"><geom name="cube_g0" type="box" size="0.0213 0.0205 0.0201"/></body>
</worldbody><actuator><motor name="robot0_torq_j1" ctrlrange="-80 80"/>
<position name="gripper0_right_gripper_finger_joint1" kp="1000"/></actuator></mujoco>"""
# The same model as an earlier version writes it: other names, nothing to show targets, another cube drawn.
THERE = (
    HERE.replace("gripper0_right_right_gripper", "gripper0_right_gripper")
    .replace("gripper0_right_hand", "gripper0_hand")
    .replace("gripper0_right_gripper_finger", "gripper0_gripper_finger")
    .replace("fixed_mount0", "mount0")
    .replace('<body name="right_eef_target" mocap="true" pos="0 0 -1"/>', "")
    .replace("0.0213 0.0205 0.0201", "0.0200 0.0219 0.0211")
    .replace("-0.56 0 0.912", "-0.560 0.0 0.91200000001")
)


@pytest.fixture
def simulator(arm_settings):
    """What the check asks of an environment."""
    part = {**CONTROLLER, "input_type": "absolute", "input_ref_frame": "base"}
    settings = arm_settings | {
        "controller": {"type": "BASIC", "body_parts": {"right": part}},
        "image_mode": {"renderer": "robosuite"},
        "image_size": 84,
    }
    return SimpleNamespace(settings=settings, model_xml=lambda: HERE)


def test_an_environment_that_agrees_is_taken(write_robomimic_file, simulator):
    demonstrations = open_demonstrations(write_robomimic_file(options=OPTIONS, model=THERE))
    check_environment(demonstrations, simulator)
    assert demonstrations.environment["rendering"] == "robosuite"
    json.dumps(demonstrations.settings)  # a policy keeps them
    old = copy.deepcopy(OPTIONS)
    old["controller_configs"]["damping"] = old["controller_configs"].pop("damping_ratio")
    old["robots"] = "Panda"
    del demonstrations  # which has the file open
    check_environment(open_demonstrations(write_robomimic_file(options=old, model=THERE.encode())), simulator)


@pytest.mark.parametrize(
    ("options", "model", "found"),
    [
        ({"robots": ["Sawyer"]}, THERE, r"robots \['Sawyer'\], here \['Panda'\]$"),
        ({"control_freq": 10}, THERE, "control_freq 10, here 20$"),
        ({"controller_configs": {**CONTROLLER, "kp": 100}}, THERE, "controller kp 100, here 150$"),
        (
            {"controller_configs": {**CONTROLLER, "type": "IK_POSE", "interpolation": "linear"}},
            THERE,
            "controller type 'IK_POSE', here 'OSC_POSE'; controller interpolation 'linear', here None$",
        ),
        ({"table_full_size": [1, 1, 0.05]}, THERE, r"table_full_size=\[1, 1, 0.05\], which is not made here$"),
        ({}, None, "no model_file in its first episode"),
        ({}, THERE.replace("1.35", "1.45"), "camera agentview pos 0.5 0 1.45, here 0.5 0 1.35$"),
        ({}, THERE.replace("-80 80", "-87 87"), "motor robot0_torq_j1 ctrlrange -87 87, here -80 80$"),
        ({}, THERE.replace('damping="0.1"', ""), "joint robot0_joint1 damping None, here 0.1$"),
        ({}, THERE.replace("0.0219", "0.03"), "geom cube_g0 size 0.02 0.03 0.0211, here 0.0213 0.0205 0.0201$"),
        ({}, THERE.replace("cube_main", "ball_main"), "body ball_main is not here; body cube_main is only here$"),
        ({}, THERE.replace("0.1 0.1 0.1", "0.1 0.1 0.2"), "geom 0 of robot0_base size 0.1 0.1 0.2, here 0.1 0.1 0.1$"),
    ],
    ids=str,
)
def test_what_differs_is_named(options, model, found, write_robomimic_file, simulator):
    demonstrations = open_demonstrations(write_robomimic_file(options={**OPTIONS, **options}, model=model))
    with pytest.raises(ValueError, match=r"image_abs.hdf5: robomimic's environment is not made alike here: " + found):
        check_environment(demonstrations, simulator)


def test_another_renderer_or_size_is_refused_where_there_are_cameras(write_robomimic_file, simulator):
    demonstrations = open_demonstrations(write_robomimic_file(options=OPTIONS, model=THERE))
    simulator.settings |= {"image_mode": {"renderer": "mujoco.Renderer"}, "image_size": 64}
    with pytest.raises(ValueError, match=r"image size 84, here 64; renderer 'robosuite', here 'mujoco.Renderer'"):
        check_environment(demonstrations, simulator)
    simulator.settings["cameras"] = []
    check_environment(demonstrations, simulator)


def test_many_differences_of_the_model_are_counted(write_robomimic_file, simulator):
    bodies = "".join(f'<body name="extra{number}"/>' for number in range(11))
    model = THERE.replace("</worldbody>", bodies + "</worldbody>")
    with pytest.raises(ValueError, match=r"(body extra\d+ is not here; ){8}and 3 more of the model$"):
        check_environment(open_demonstrations(write_robomimic_file(options=OPTIONS, model=model)), simulator)


@pytest.mark.parametrize("model", ["<mujoco", "<mujoco/>"])
def test_a_damaged_model_is_refused(model, write_robomimic_file):
    with pytest.raises(ValueError, match=r"model_file of its first episode is no (XML|MuJoCo model)"):
        open_demonstrations(write_robomimic_file(options=OPTIONS, model=model))


# ---- with the simulator ---------------------------------------------------------------------------------------------


def earlier(xml):
    """A model of the simulator here as robosuite 1.4 writes it."""
    root = ElementTree.fromstring(xml.replace("gripper0_right_", "gripper0_").replace("fixed_mount", "mount"))
    world = root.find("worldbody")
    for target in [body for body in world if body.get("mocap") == "true"]:
        world.remove(target)
    return ElementTree.tostring(root, encoding="unicode")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "task"), [("lift", "Lift"), ("can", "PickPlaceCan")])
def test_the_simulators_own_model_agrees_with_itself_under_earlier_names(name, task, environment, write_robomimic_file):
    here = environment(name)
    model = earlier(here.model_xml())
    assert "gripper0_right_finger" not in model and "eef_target" not in model
    facts = model_facts(model)
    assert len(facts) > 80 and {"camera agentview", "body robot0_base", "joint robot0_joint7"} <= facts.keys()
    check_environment(open_demonstrations(write_robomimic_file(options=OPTIONS, model=model, task=task)), here)


@pytest.mark.slow
def test_images_are_robosuites_own_with_its_rendering(tmp_path):
    """Against its renderer, pixel by pixel, in a process of its own, because contexts of GL disturb one another."""
    pytest.importorskip("robosuite", reason="needs make robotics")
    if gl_library() is None:
        pytest.skip("no GL library: apt-get install libosmesa6")
    code = """
import numpy as np
from tasks.robotics.environments import make_environment
ours = make_environment("can", ("agentview", "robot0_eye_in_hand"), 64, "robosuite")
import robosuite
from tasks.robotics.robosuite_arm import TASKS, controller
seen = ours.reset(3)
theirs = robosuite.make(TASKS["can"][0], robots="Panda", controller_configs=controller(), has_renderer=False,
    has_offscreen_renderer=True, use_camera_obs=False, control_freq=20, hard_reset=False, seed=0)
theirs.reset()
theirs.sim.data.qpos[:] = ours._data.qpos
theirs.sim.forward()
for camera, key in ours.cameras.items():
    picture = theirs.sim.render(64, 64, camera_name=camera)[::-1]
    assert picture.std() > 5 and np.array_equal(picture, seen[key]), (camera, np.abs(picture - 1.0 * seen[key]).max())
print("alike")
"""
    process = Started(exec, code, {}, folder=tmp_path, log=tmp_path / "log")
    assert process.wait(200) == 0 and "alike" in (tmp_path / "log").read_text(), (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_policy_of_published_demonstrations_is_evaluated_or_refused(environment, write_robomimic_file, tmp_path):
    further = (("robot0_eef_quat", 4), ("robot0_gripper_qpos", 2), ("object", 10))
    cameras = ("agentview", "robot0_eye_in_hand")
    environment("lift", cameras)  # skips without a GL library
    model = earlier(environment("lift").model_xml())
    path = write_robomimic_file((20, 18), cameras, further, OPTIONS, model)
    where = [f"data.path={path}", f"trainer.output_dir={tmp_path / 'alike'}"]
    train.run(load_config(shipped.path("experiments/fib_table6.yaml#lift-dense"), [*SMALL_TABLE_6, *where]))
    other = shutil.copytree(tmp_path / "alike" / "model", tmp_path / "other")
    content = json.loads((other / "policy.json").read_text())
    content["about"]["settings"]["control_hz"] = 10
    (other / "policy.json").write_text(json.dumps(content))
    rollouts = Rollouts(episodes=1, max_steps=2, sampling_steps=2)
    results = evaluate(tmp_path / "alike", rollouts)
    assert results["environment"]["rendering"] == "robosuite" and len(results["episodes"]) == 1
    with pytest.raises(ValueError, match=r"robomimic's environment is not made alike here: control_freq 10, here 20$"):
        evaluate(other, rollouts)
