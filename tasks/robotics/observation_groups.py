"""Which observations of a simulator are lerobot's state of the robot, which its state of the environment."""

from __future__ import annotations

_PANDA = {"robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2}
STATE, ENVIRONMENT = "observation.state", "observation.environment_state"
# {feature: {observation: size}}, in the order in which a feature holds them.
GROUPS: dict[str, dict[str, dict[str, int]]] = {
    "lift": {STATE: _PANDA, ENVIRONMENT: {"object": 10}},
    "can": {STATE: _PANDA, ENVIRONMENT: {"object": 14}},
    "pusht": {STATE: {"agent_pos": 2}, ENVIRONMENT: {"keypoints": 16}},
}
# What is asked of the robot, in words.
INSTRUCTIONS = {
    "lift": "Lift the cube.",
    "can": "Put the can into its bin.",
    "pusht": "Push the T-shaped block onto the T-shaped target.",
}


def image_feature(key: str) -> str:
    """lerobot's name for a camera's images, "observation.images.agentview" for agentview_image."""
    return "observation.image" if key == "image" else f"observation.images.{key.removesuffix('_image')}"
