"""Scripted demonstrations of Lift and Can, from the simulator's own state.

The controllers have no memory: where to go next follows from where gripper and object are, so a policy that sees both
can learn it, and whatever noise pushes the arm aside is answered in the same way in every episode. Actions are goals
at most REACH ahead of the gripper, which the arm's controller turns into some 0.3 m/s.
"""

from __future__ import annotations

import numpy as np

from tasks.robotics.actions import pose_action
from tasks.robotics.robosuite_arm import RobosuiteArm

OPEN, CLOSED = -1.0, 1.0
REACH = 0.05  # metres between gripper and goal
# The grip site's axes when the gripper points down with its fingers left and right of the object. The gripper stays
# like this: cube and can fit between the fingers (8 cm) however they are turned, and a constant rotation is learned at
# once.
DOWN = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, -1.0]])
NOISE = 0.02  # metres, standard deviation of the noise on the goals that are executed; recorded goals have none

_HOVER = 0.08  # metres above the object until the gripper is over it
_OVER = 0.012  # metres, sideways distance that counts as over the object
_FUNNEL = 3.0  # metres up for every metre sideways
_RAISED = 0.22  # metres above the floor of its bin at which the can travels
_CLEAR = 0.06  # metres below that height in which it begins to move sideways
_OVER_BIN = 0.03  # metres, sideways distance that counts as over the bin
_RELEASE = 0.06  # metres above the floor of its bin at which the can is let go,
_RELEASED = 0.02  # and this much above that already
_SHORT = 0.05  # metres short of the bin's centre: a can falls forward


class ArmDemonstrator:
    """Chooses the action of the next step.

    Args:
        environment: Lift or Can, from which it reads poses.
    """

    noise = NOISE

    def __init__(self, environment: RobosuiteArm) -> None:
        self.environment = environment
        self._choose = {"lift": self._lift, "can": self._can}[environment.name]

    def reset(self, seed: int) -> None:
        """Do nothing: the demonstrator remembers nothing from one step to the next."""

    def act(self) -> np.ndarray:
        """The action (10,) for the state in which the environment is now."""
        position, _ = self.environment.pose()
        target, gripper = self._choose(position, self.environment.object_pose()[0])
        way = target - position
        length = float(np.linalg.norm(way))
        return pose_action(position + way * min(1.0, REACH / max(length, REACH)), DOWN, gripper)

    def disturbed(self, action: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """The action with noise on its position, which is executed instead."""
        return np.concatenate([action[:3] + generator.normal(0, self.noise, 3), action[3:]])

    def _lift(self, position: np.ndarray, cube: np.ndarray) -> tuple[np.ndarray, float]:
        """Go over the cube, go down, close, go up."""
        if self.environment.grasped():
            return cube + np.array([0, 0, REACH]), CLOSED
        return self._approach(position, cube)

    def _can(self, position: np.ndarray, can: np.ndarray) -> tuple[np.ndarray, float]:
        """Go over the can, go down, close, go up, go over its bin, go down a little, open, go away."""
        bin_centre = self.environment.bin_centre()
        if self.environment.in_bin():
            # Hold still until the can is let go, or it would come up again.
            return position + np.array([0, 0, 0 if self.environment.grasped() else _RAISED]), OPEN
        if not self.environment.grasped():
            return self._approach(position, can)
        over_bin = bin_centre - [0, _SHORT, 0]
        sideways = np.linalg.norm(over_bin[:2] - position[:2])
        travel = bin_centre[2] + _RAISED
        if sideways > _OVER_BIN:
            # Up first; sideways only as far as the can has come up.
            clear = np.clip(1 - (travel - position[2]) / _CLEAR, 0, 1)
            return np.array([*(position[:2] + clear * (over_bin[:2] - position[:2])), travel]), CLOSED
        high = position[2] > bin_centre[2] + _RELEASE + _RELEASED
        return np.array([*over_bin[:2], bin_centre[2] + _RELEASE]), CLOSED if high else OPEN

    def _approach(self, position: np.ndarray, thing: np.ndarray) -> tuple[np.ndarray, float]:
        """Go down a funnel onto the object, and close the gripper at its bottom."""
        sideways = float(np.linalg.norm(position[:2] - thing[:2]))
        height = min(_HOVER, _FUNNEL * max(0.0, sideways - _OVER))
        at_object = sideways < _OVER and position[2] - thing[2] < _OVER
        return thing + np.array([0, 0, height]), CLOSED if at_object else OPEN
