"""Scripted demonstrations of PushT by pushes that are simulated first (imagined).

From the block's present pose, pushes at points along its outline are simulated in a second environment. The one that
brings the block's corners closest to the target's is carried out: the pusher moves around the block to where the push
starts, straight at the block, and back a little. Then the next push is chosen. Lengths are in the table's units (512 a
side), and a step is 0.1 s.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import shapely
from shapely.geometry import LineString, Point, Polygon

from tasks.robotics.pusht import TABLE, PushT

NOISE = 4.0  # standard deviation of the noise on the targets that are executed; recorded targets have none

_RADIUS = 15.0  # the pusher's
_CONTACTS = 24  # points along the outline
_CHECKED = 8  # how many of the imagined pushes are imagined again with the way back
_GAP = 6.0  # between pusher and block at the start of a push
_ADVANCE, _FINE_ADVANCE = 12.0, 4.0  # of the pusher's target in a step of a push, and of a short, last push
_PUSH_STEPS = 14
_WORSE = 8.0  # mean distance of the corners above the present one at which a push is not imagined further
_FINE = 14.0  # mean distance of the corners below which pushes are short
_LEAD = 45.0  # target ahead of the pusher on its way around
_ARRIVED, _NEAR = 4.0, 14.0  # distances within which the start of a push and a corner of the way count as reached
_BACK = 30.0  # way back after a push
_CLEARANCE = 26.0  # between block and the corners of the way around it
_LEAVES = 8.0  # a way that begins at the block has to get half this far from it within this length
_MARGIN = 21.0  # between the pusher's centre and the edge of the table
_SPEED = 20.0  # distance that the pusher moves on its way, in a step
_STEP_COST = 0.06  # mean distance of the corners that a step has to gain
_PATIENCE = 40  # steps on a way before another plan is made


@dataclass
class _Push:
    start: np.ndarray  # where the pusher starts
    targets: list[np.ndarray]
    cost: float


class PushTDemonstrator:
    """Chooses the action of the next step.

    Args:
        environment: where it reads the poses of pusher and block.
    """

    noise = NOISE

    def __init__(self, environment: PushT) -> None:
        self.environment = environment
        self._imagined = PushT((), 96)
        self._imagined.reset(0)
        self._imagined.ignore_contacts()
        goal = self._imagined._env.goal_pose
        self._imagined.restore(np.array([*np.zeros(2), *goal]))
        self._goal = self._imagined.keypoints()
        self._imagined.restore(np.zeros(5))
        self._contacts, self._normals = _contacts(_outline(self._imagined), _CONTACTS)

    def reset(self, seed: int) -> None:
        """Forget the plan."""
        self._generator = np.random.default_rng(seed)
        self._way: list[np.ndarray] = []
        self._targets: list[np.ndarray] = []
        self._waited = 0

    def act(self) -> np.ndarray:
        """The action (2,) for the state in which the environment is now."""
        pusher = self.environment.state()[:2]
        if (not self._way and not self._targets) or self._waited > _PATIENCE:
            self._plan()
        while self._way and np.linalg.norm(self._way[0] - pusher) < (_NEAR if len(self._way) > 1 else _ARRIVED):
            self._way.pop(0)
        if not self._way:
            return self._targets.pop(0)
        self._waited += 1
        way = self._way[0] - pusher
        return pusher + way * min(1.0, _LEAD / max(float(np.linalg.norm(way)), _LEAD))

    def disturbed(self, action: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """The action with noise, which is executed instead."""
        return np.clip(action + generator.normal(0, self.noise, 2), 0, TABLE)

    def _plan(self) -> None:
        """The best push from here and the way to it."""
        state = self.environment.state()
        block = _outline(self.environment)
        pushes = sorted(self._pushes(state, block), key=lambda push: push.cost)
        best, best_cost = None, np.inf
        for push in pushes[:_CHECKED]:
            way = self._way_around(state[:2], push.start, block)
            if way is None:
                continue
            length = sum(float(np.linalg.norm(b - a)) for a, b in zip([state[:2], *way], way, strict=False))
            cost = self._imagine(state, push)[-1] + _STEP_COST * (length / _SPEED + len(push.targets))
            if cost < best_cost:
                best, best_cost = (way, push), cost
        if best is None:
            # No start can be reached: leave the corner for the middle of the table.
            best = [np.full(2, TABLE / 2.0)], _Push(state[:2], [np.full(2, TABLE / 2.0)], 0.0)
        self._way, self._targets, self._waited = best[0], list(best[1].targets), 0

    def _pushes(self, state: np.ndarray, block: Polygon) -> list[_Push]:
        """Pushes at points along the outline, each with the length that helps most."""
        turn = np.array([[np.cos(state[4]), np.sin(state[4])], [-np.sin(state[4]), np.cos(state[4])]])
        contacts, normals = self._contacts @ turn + state[2:4], self._normals @ turn
        now = self._cost(self.environment)
        advance = _FINE_ADVANCE if now < _FINE else _ADVANCE
        pushes = []
        for contact, inward in zip(contacts, normals, strict=True):
            start = contact - inward * (_RADIUS + _GAP)
            if (start < _MARGIN).any() or (start > TABLE - _MARGIN).any() or block.distance(Point(start)) < _RADIUS + 1:
                continue
            targets = [start + inward * (_GAP + advance * step) for step in range(1, _PUSH_STEPS + 1)]
            costs = self._imagine(state, _Push(start, targets, 0.0), stop=now + _WORSE)
            steps = int(np.argmin(costs)) + 1
            back = targets[steps - 1] - inward * (_BACK + advance * 2)
            pushes.append(_Push(start, [*targets[:steps], back, back], costs[steps - 1]))
        return pushes

    def _imagine(self, state: np.ndarray, push: _Push, stop: float = np.inf) -> list[float]:
        """Cost after each step of a push, until it exceeds `stop`."""
        self._imagined.restore(np.array([*push.start, *state[2:]]))
        costs: list[float] = []
        for target in push.targets:
            self._imagined.pull(target)
            costs.append(self._cost(self._imagined))
            if costs[-1] > stop:
                break
        return costs

    def _cost(self, environment: PushT) -> float:
        """Mean distance between the corners of the block and those of the target."""
        return float(np.linalg.norm(environment.keypoints() - self._goal, axis=1).mean())

    def _way_around(self, start: np.ndarray, end: np.ndarray, block: Polygon) -> list[np.ndarray] | None:
        """The shortest way for the pusher past the block: corners and the end, or None if there is none."""
        closed = block.buffer(_RADIUS + 0.5)
        corners = np.array(block.buffer(_CLEARANCE, join_style="mitre").exterior.coords)[:-1]
        corners = corners[((corners > _MARGIN) & (corners < TABLE - _MARGIN)).all(1)]
        points = [start, *corners, end]
        inside = closed.contains(Point(start))
        shapely.prepare(closed)

        def reaches(a: int, b: int) -> bool:
            leg = LineString([points[a], points[b]])
            if a == 0 and inside:
                # It touches the block, so any leg that leaves the block at once will do.
                return block.distance(leg.interpolate(_LEAVES)) > block.distance(Point(start)) + _LEAVES / 2
            return not closed.intersects(leg)

        queue: list[tuple[float, int, list[int]]] = [(0.0, 0, [])]
        done: set[int] = set()
        while queue:
            length, point, way = heapq.heappop(queue)
            if point == len(points) - 1:
                return [points[index] for index in way]
            if point in done:
                continue
            done.add(point)
            for following in range(1, len(points)):
                if following not in done and reaches(point, following):
                    step = float(np.linalg.norm(points[following] - points[point]))
                    heapq.heappush(queue, (length + step, following, [*way, following]))
        return None


def _outline(environment: PushT) -> Polygon:
    """The block as one polygon."""
    bar, stem = environment.keypoints().reshape(2, 4, 2)
    return shapely.union(Polygon(bar).buffer(0.01), Polygon(stem).buffer(0.01)).simplify(0.5)


def _contacts(block: Polygon, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Points along an outline at equal distances (count, 2), and the directions into the block there (count, 2)."""
    outline = np.array(shapely.geometry.polygon.orient(block).exterior.coords)
    edges = np.diff(outline, axis=0)
    lengths = np.linalg.norm(edges, axis=1)
    ends = np.cumsum(lengths)
    distances = (np.arange(count) + 0.5) * ends[-1] / count
    edge = np.searchsorted(ends, distances)
    along = edges[edge] / lengths[edge, None]
    contacts = outline[edge] + along * (distances - ends[edge] + lengths[edge])[:, None]
    return contacts, np.stack([-along[:, 1], along[:, 0]], 1)  # left of an outline that runs counterclockwise
