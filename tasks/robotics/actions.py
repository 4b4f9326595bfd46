"""Rotations of end-effector poses as matrices, quaternions (x, y, z, w), axis angles and 6-D vectors.

All functions take any leading dimensions and compute in float64. The 6-D form is the first two rows of the matrix (Zhou
et al. 2019, "On the Continuity of Rotation Representations in Neural Networks", in pytorch3d's order, as Diffusion
Policy uses it). It is continuous, so that a network can predict it; Gram-Schmidt makes a rotation of it again.
"""

from __future__ import annotations

import numpy as np

POSE_ACTION_SIZE = 10  # position 3, 6-D rotation, gripper 1
_SMALL = 1e-8


def matrix_to_6d(matrix: np.ndarray) -> np.ndarray:
    """Turn (..., 3, 3) into (..., 6)."""
    matrix = np.asarray(matrix, dtype=np.float64)
    return matrix[..., :2, :].reshape(*matrix.shape[:-2], 6).copy()


def matrix_from_6d(vector: np.ndarray) -> np.ndarray:
    """Turn (..., 6) into (..., 3, 3), a rotation by Gram-Schmidt.

    Raises:
        ValueError: for rows that are zero or parallel, of which no rotation can be made.
    """
    vector = np.asarray(vector, dtype=np.float64)
    first, second = vector[..., :3], vector[..., 3:]
    first = _unit(first, vector)
    second = _unit(second - (first * second).sum(-1, keepdims=True) * first, vector)
    return np.stack([first, second, np.cross(first, second)], axis=-2)


def matrix_from_quaternion(quaternion: np.ndarray) -> np.ndarray:
    """Turn (..., 4), scalar last and of any norm but 0, into (..., 3, 3)."""
    x, y, z, w = np.moveaxis(_unit(np.asarray(quaternion, dtype=np.float64), quaternion), -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ]
    return np.stack([np.stack(row, -1) for row in rows], -2)


def quaternion_from_matrix(matrix: np.ndarray) -> np.ndarray:
    """Turn (..., 3, 3) into (..., 4), scalar last and not negative.

    The diagonal gives the size of each of the four numbers. The others are divided by the largest, so that nothing is
    lost near half turns.
    """
    m = np.asarray(matrix, dtype=np.float64)
    diagonal = np.diagonal(m, axis1=-2, axis2=-1)
    signs = np.array([[1, -1, -1], [-1, 1, -1], [-1, -1, 1], [1, 1, 1]])
    squares = 1 + diagonal @ signs.T  # 4 times the squares of x, y, z, w
    largest = squares.argmax(-1)
    sums = [m[..., i, j] + m[..., j, i] for i, j in ((0, 1), (0, 2), (1, 2))]  # 4xy, 4xz, 4yz
    differences = [m[..., 2, 1] - m[..., 1, 2], m[..., 0, 2] - m[..., 2, 0], m[..., 1, 0] - m[..., 0, 1]]  # 4xw 4yw 4zw
    products = np.stack(
        [
            np.stack([squares[..., 0], sums[0], sums[1], differences[0]], -1),
            np.stack([sums[0], squares[..., 1], sums[2], differences[1]], -1),
            np.stack([sums[1], sums[2], squares[..., 2], differences[2]], -1),
            np.stack([*differences, squares[..., 3]], -1),
        ],
        -2,
    )
    chosen = np.take_along_axis(products, largest[..., None, None], -2)[..., 0, :]
    quaternion = chosen / np.linalg.norm(chosen, axis=-1, keepdims=True)
    return np.where(quaternion[..., 3:] < 0, -quaternion, quaternion)


def matrix_from_axis_angle(vector: np.ndarray) -> np.ndarray:
    """Turn (..., 3), axis times angle in radians, into (..., 3, 3)."""
    vector = np.asarray(vector, dtype=np.float64)
    half = np.linalg.norm(vector, axis=-1, keepdims=True) / 2
    # sin(half) / (2 half) by sinc, which is defined at 0.
    return matrix_from_quaternion(np.concatenate([vector * np.sinc(half / np.pi) / 2, np.cos(half)], -1))


def axis_angle_from_matrix(matrix: np.ndarray) -> np.ndarray:
    """Turn (..., 3, 3) into (..., 3), axis times an angle in [0, pi]."""
    quaternion = quaternion_from_matrix(matrix)
    sine = np.linalg.norm(quaternion[..., :3], axis=-1, keepdims=True)
    half = np.arctan2(sine, quaternion[..., 3:])
    return quaternion[..., :3] * 2 * half / np.maximum(sine, _SMALL) if sine.size else quaternion[..., :3]


def pose_action(position: np.ndarray, rotation: np.ndarray, gripper: float) -> np.ndarray:
    """An action, float64 (10,), from position (3,), rotation matrix (3, 3) and gripper in [-1, 1]."""
    return np.concatenate([position, matrix_to_6d(rotation), [gripper]])


def _unit(vector: np.ndarray, given: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(vector, axis=-1, keepdims=True)
    if not (length > _SMALL).all():
        raise ValueError(f"{np.asarray(given).tolist()} is no rotation: a row is zero, or its two rows are parallel")
    return vector / length
