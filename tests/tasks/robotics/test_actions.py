import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from tasks.robotics import actions

RANDOM = Rotation.random(200, random_state=np.random.RandomState(0))
# Where formulas lose digits: no turn, tiny turns, half turns about axes and between them, nearly half turns.
AXES = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, -1, 1], [-1, 2, 0.001]], dtype=float)
AXES /= np.linalg.norm(AXES, axis=1, keepdims=True)
ANGLES = [0.0, 1e-12, 1e-6, np.pi / 2, np.pi - 1e-6, np.pi - 1e-12, np.pi]
SPECIAL = Rotation.from_rotvec([angle * axis for axis in AXES for angle in ANGLES])


@pytest.mark.parametrize("rotations", [RANDOM, SPECIAL], ids=["random", "special"])
def test_every_form_is_scipys(rotations):
    matrices = rotations.as_matrix()
    assert np.allclose(actions.matrix_from_quaternion(rotations.as_quat()), matrices, atol=1e-14)
    assert np.allclose(actions.matrix_from_quaternion(-3 * rotations.as_quat()), matrices, atol=1e-14)
    assert np.allclose(actions.matrix_from_axis_angle(rotations.as_rotvec()), matrices, atol=1e-14)
    assert (actions.quaternion_from_matrix(matrices)[:, 3] >= 0).all()
    for back in (
        Rotation.from_quat(actions.quaternion_from_matrix(matrices)),
        Rotation.from_rotvec(actions.axis_angle_from_matrix(matrices)),
        Rotation.from_matrix(actions.matrix_from_6d(actions.matrix_to_6d(matrices))),
    ):
        assert (back * rotations.inv()).magnitude().max() < 2e-8


def test_6d_is_the_first_two_rows():
    matrix = Rotation.from_euler("z", 90, degrees=True).as_matrix()
    assert np.allclose(actions.matrix_to_6d(matrix), [0, -1, 0, 1, 0, 0])
    # Worked by hand: the first row is normalised, the second made orthogonal to it, the third their product.
    assert np.allclose(actions.matrix_from_6d([0, 0, 2, 3, 0, 5]), [[0, 0, 1], [1, 0, 0], [0, 1, 0]])


def test_what_a_network_predicts_becomes_a_rotation():
    vectors = np.random.default_rng(0).normal(size=(50, 2, 6))
    matrices = actions.matrix_from_6d(vectors)
    assert np.allclose(matrices @ matrices.swapaxes(-1, -2), np.eye(3), atol=1e-12)
    assert np.allclose(np.linalg.det(matrices), 1)


@pytest.mark.parametrize("vector", [[0, 0, 0, 1, 0, 0], [1, 0, 0, 2, 0, 0]], ids=["zero", "parallel"])
def test_no_rotation_is_refused(vector):
    with pytest.raises(ValueError, match="is no rotation"):
        actions.matrix_from_6d(vector)


def test_axis_angles_stay_within_half_a_turn():
    turned = actions.axis_angle_from_matrix(actions.matrix_from_axis_angle(np.array([[0, 0, 1.5 * np.pi]])))
    assert np.allclose(turned, [[0, 0, -0.5 * np.pi]])


def test_pose_action():
    action = actions.pose_action(np.array([1.0, 2.0, 3.0]), np.eye(3), -1.0)
    assert action.tolist() == [1, 2, 3, 1, 0, 0, 0, 1, 0, -1] and len(action) == actions.POSE_ACTION_SIZE
