"""A Panda arm of robosuite lifting a cube or sorting a can, commanded by absolute poses, rendered by software GL.

`environments.make_environment` makes it, and chooses MuJoCo's GL before this module imports mujoco.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import version
from typing import Any

import mujoco
import numpy as np

from tasks.robotics.actions import (
    POSE_ACTION_SIZE,
    axis_angle_from_matrix,
    matrix_from_6d,
    matrix_to_6d,
)
from tasks.robotics.environment import (
    BASE_FRAME,
    GL_PACKAGES,
    POSE_ACTION,
    Environment,
    Observation,
    bounds,
)
from tasks.robotics.registration import HORIZONS

# robosuite logs at import time what its own scripts may lack, and later which files it reads.
logging.disable(logging.WARNING)
_chosen_gl = os.environ.get("MUJOCO_GL")
try:
    import robosuite
    from robosuite.controllers import load_composite_controller_config
finally:
    logging.disable(logging.NOTSET)
    if _chosen_gl is not None:
        os.environ["MUJOCO_GL"] = _chosen_gl  # robosuite replaces everything but osmesa by egl
logging.getLogger("robosuite_logs").setLevel(logging.ERROR)

CAMERAS = {"agentview": "agentview_image", "robot0_eye_in_hand": "robot0_eye_in_hand_image"}
CONTROL_HZ = 20
TASKS = {"lift": ("Lift", "cube_main"), "can": ("PickPlaceCan", "Can_main")}  # name in robosuite, body of the object
FAR = 10.0  # metres; what falls off the table does not get there in an episode
# Multisampling, shadows and reflections take nine tenths of the time of software GL. With them images are robosuite's.
IMAGE_MODES = {
    "fast": {"renderer": "mujoco.Renderer", "samples": 0, "shadows": False, "reflections": False},
    "robosuite": {"renderer": "robosuite", "samples": 4, "shadows": True, "reflections": True},
}


def controller() -> dict[str, Any]:
    """robosuite's default operational space controller of the arm, for absolute poses in the robot's base frame."""
    config = load_composite_controller_config(controller="BASIC", robot="Panda")
    arm = {**config["body_parts"]["right"], "input_type": "absolute", "input_ref_frame": "base"}
    return {"type": config["type"], "body_parts": {"right": arm}}


class RobosuiteArm(Environment):
    """Lift or PickPlaceCan.

    Observations: robot0_eef_pos (3) of the grip site and robot0_eef_quat (4, scalar last) of the hand in the world,
    robot0_gripper_qpos (2), object: position (3) and quaternion (4) of the cube or can in the world, then for Lift the
    position relative to the grip site in the world's axes (3), for Can position (3) and quaternion (4) in the hand's
    frame; and an image per camera. The reward is 1 while the task is solved, otherwise 0.

    Args:
        name: "lift" or "can".
        cameras: some of CAMERAS.
        image_size: height and width of their images, pixels.
        rendering: one of IMAGE_MODES.

    Raises:
        ValueError: for another camera.
        OSError: if images are wanted and no GL library is found.
    """

    action_size = POSE_ACTION_SIZE
    fps = CONTROL_HZ
    action_bounds = bounds((-1, 1, POSE_ACTION_SIZE))  # the arm reaches 0.86 m

    def __init__(self, name: str, cameras: tuple[str, ...], image_size: int, rendering: str = "fast") -> None:
        if unknown := [camera for camera in cameras if camera not in CAMERAS]:
            raise ValueError(f"camera {unknown[0]!r} of {name} must be one of {', '.join(CAMERAS)}")
        task, body = TASKS[name]
        self.name, self.horizon = name, HORIZONS[name]
        place, turn = (-FAR, FAR, 3), (-1.0, 1.0, 4)
        relative = ((-2 * FAR, 2 * FAR, 3), *([turn] if name == "can" else []))
        self.state_bounds = {
            "robot0_eef_pos": bounds(place),
            "robot0_eef_quat": bounds(turn),
            "robot0_gripper_qpos": bounds((-1, 1, 2)),
            "object": bounds(place, turn, *relative),
        }
        self.cameras = {camera: CAMERAS[camera] for camera in cameras}
        self.image_size = image_size
        self._mode = IMAGE_MODES[rendering]
        config = controller()
        # The cube's size is drawn when the model is built, so the model always has the same seed.
        self._env = robosuite.make(
            task,
            robots="Panda",
            controller_configs=config,
            has_renderer=False,
            has_offscreen_renderer=False,
            use_camera_obs=False,
            control_freq=CONTROL_HZ,
            ignore_done=True,
            hard_reset=False,
            seed=0,
        )
        # robosuite's sensors run after each of an action's 25 simulation steps; ours only after the last.
        self._env._observables.clear()
        if hasattr(self._env, "object_id_to_sensors"):
            self._env.object_id_to_sensors.clear()
        self._model, self._data = self._env.sim.model._model, self._env.sim.data._data
        self._arm = self._env.robots[0]
        self._site = self._arm.eef_site_id["right"]
        self._hand = self._model.body(self._arm.robot_model.eef_name["right"]).id
        self._object = self._model.body(body).id
        self._fingers = self._arm._ref_gripper_joint_pos_indexes["right"]
        self._renderers: dict[int, mujoco.Renderer] = {}
        if cameras:
            self._renderer(image_size)
        self.settings = {
            "environment": name,
            "action": POSE_ACTION,
            "frame": BASE_FRAME,
            "controller": config,
            "control_hz": CONTROL_HZ,
            "versions": {package: version(package) for package in ("robosuite", "mujoco")},
            "image_mode": self._mode,
            "image_size": image_size,
            "cameras": list(cameras),
        }

    def reset(self, seed: int) -> Observation:
        """Place arm and object as this seed says, the same as in a fresh environment."""
        # In place, because the samplers of positions hold this generator.
        self._env.rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
        self._env.reset()
        return self._observe()

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Move towards a pose for 1 / CONTROL_HZ seconds."""
        action = self.checked_action(action)
        rotation = axis_angle_from_matrix(matrix_from_6d(action[3:9]))
        self._env.step(np.concatenate([action[:3], rotation, np.clip(action[9:], -1, 1)]))
        observation = self._observe()
        success = self.success()
        return observation, float(success), success, {"success": success}

    def playable(self, action: np.ndarray) -> np.ndarray:
        """The action; where its two rows are zero or parallel, so that they are no rotation, the hand's present one."""
        try:
            matrix_from_6d(action[3:9])
        except ValueError:
            action = np.concatenate([action[:3], matrix_to_6d(self.pose()[1]), action[9:]])
        return action

    def success(self) -> bool:
        """Lift: cube 4 cm above the table. Can: can in its bin and the gripper away from it."""
        return bool(self._env._check_success())

    def state(self) -> np.ndarray:
        """Time, joint positions and velocities, float64: what robomimic keeps as `states`."""
        return self._env.sim.get_state().flatten()

    def model_xml(self) -> str:
        """The model in MuJoCo's XML, as robomimic keeps it with each episode."""
        return self._env.model.get_xml()

    def pose(self) -> tuple[np.ndarray, np.ndarray]:
        """Position (3,) and rotation matrix (3, 3) of the grip site in the frame of the actions, the robot's base."""
        origin, axes = self._base()
        position = self._data.site_xpos[self._site] - origin
        return axes.T @ position, axes.T @ self._data.site_xmat[self._site].reshape(3, 3)

    def object_pose(self) -> tuple[np.ndarray, np.ndarray]:
        """Position and rotation matrix of the cube or can in the frame of the actions."""
        origin, axes = self._base()
        return (
            axes.T @ (self._data.xpos[self._object] - origin),
            axes.T @ self._data.xmat[self._object].reshape(3, 3),
        )

    def grasped(self) -> bool:
        """Whether both fingers touch the cube or can."""
        thing = self._env.cube if self.name == "lift" else self._env.objects[self._env.object_id]
        return bool(self._env._check_grasp(gripper=self._arm.gripper["right"], object_geoms=thing))

    def bin_centre(self) -> np.ndarray:
        """Centre (3,) of the can's bin, on its floor, in the frame of the actions."""
        origin, axes = self._base()
        return axes.T @ (self._env.target_bin_placements[self._env.object_id] - origin)

    def in_bin(self) -> bool:
        """Whether the can is in its bin, held or not."""
        return not self._env.not_in_bin(self._data.xpos[self._object], self._env.object_id)

    def render(self, size: int) -> np.ndarray:
        """The scene from the agent's camera."""
        return self._image("agentview", size)

    def close(self) -> None:
        """Free renderers and simulator."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()
        self._env.close()

    def _base(self) -> tuple[np.ndarray, np.ndarray]:
        return self._arm.base_pos, self._arm.base_ori

    def _observe(self) -> Observation:
        # A step ends with the integration of velocities, so poses of bodies and cameras are one step late.
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_camlight(self._model, self._data)
        data = self._data
        position, thing = data.site_xpos[self._site], data.xpos[self._object]
        # MuJoCo's own quaternions (scalar first) never jump to their negatives, as those made from matrices do.
        hand, turned = data.xquat[self._hand], data.xquat[self._object]
        relative = [thing - position]
        if self.name == "can":
            back, between = np.empty(4), np.empty(4)
            mujoco.mju_negQuat(back, hand)
            mujoco.mju_mulQuat(between, back, turned)
            relative = [data.xmat[self._hand].reshape(3, 3).T @ relative[0], np.roll(between, -1)]
        values = {
            "robot0_eef_pos": position,
            "robot0_eef_quat": np.roll(hand, -1),
            "robot0_gripper_qpos": data.qpos[self._fingers],
            "object": np.concatenate([thing, np.roll(turned, -1), *relative]),
        }
        images = {key: self._image(camera, self.image_size) for camera, key in self.cameras.items()}
        return {**{key: np.array(value, dtype=np.float32) for key, value in values.items()}, **images}

    def _image(self, camera: str, size: int) -> np.ndarray:
        renderer = self._renderer(size)
        options = mujoco.MjvOption()
        options.geomgroup[0] = 0  # collision shapes
        renderer.update_scene(self._data, camera=camera, scene_option=options)
        return renderer.render().copy()

    def _renderer(self, size: int) -> mujoco.Renderer:
        if size not in self._renderers:
            # A buffer of just the image's size: software GL pays for every pixel of it.
            self._model.vis.global_.offwidth = self._model.vis.global_.offheight = size
            self._model.vis.quality.offsamples = self._mode["samples"]
            try:
                renderer = mujoco.Renderer(self._model, size, size)
            except (AttributeError, ImportError, RuntimeError, OSError, TypeError) as error:
                raise OSError(f"no GL library renders here without a screen ({error}): {GL_PACKAGES}") from error
            renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = self._mode["shadows"]
            renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = self._mode["reflections"]
            self._renderers[size] = renderer
        return self._renderers[size]
