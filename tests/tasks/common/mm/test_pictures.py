"""Labels of objects in pictures: in the image and on no other label."""

import itertools

import numpy as np
import pytest

from hf_sparseprior.analysis.pictures import pyplot
from tasks.common.mm.pictures import draw_instances, free_place
from tests.each import each

SHAPE = (100, 120)  # height, width


def overlap(one, other):
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


@each(
    "box, expected",
    [
        ((10, 50, 60, 90), (10, 42)),  # above it
        ((10, 5, 60, 90), (10, 5)),  # no room above: at its top
        ((100, 50, 119, 90), (90, 42)),  # shifted to the left, so that it ends with the image
        ((-5, 50, 20, 90), (0, 42)),
    ],
)
def test_a_label_lies_at_its_box(box, expected):
    assert free_place((30, 8), box, SHAPE, [])[:2] == expected


def test_labels_of_one_box_lie_above_in_and_below_it_and_then_nowhere():
    box, taken = (10, 50, 60, 80), []
    for upper in (42, 50, 72, 80):
        place = free_place((30, 8), box, SHAPE, taken)
        assert place == (10, upper, 40, upper + 8)
        taken.append(place)
    assert free_place((30, 8), box, SHAPE, taken) is None
    assert free_place((30, 101), box, SHAPE, []) is None
    assert free_place((121, 8), box, SHAPE, []) is None


@pytest.mark.parametrize("size", [(3, 3), (6, 3), (3, 6)])
def test_labels_of_a_picture_do_not_overlap_and_the_highest_scores_are_written(size):
    random = np.random.default_rng(0)
    corners = random.uniform((0, 0), (SHAPE[1] - 20, SHAPE[0] - 20), (40, 2))
    boxes = np.concatenate([corners, corners + random.uniform(5, 20, (40, 2))], axis=1)
    scores, labels = random.permutation(np.linspace(0.3, 0.99, 40)), random.integers(0, 2, 40)
    masks = np.zeros((40, *SHAPE), bool)
    figure, axis = pyplot().subplots(figsize=size, dpi=100)
    draw_instances(axis, np.zeros((*SHAPE, 3), np.uint8), masks, boxes, labels, ("coin", "nucleus"), scores)
    assert len(axis.patches) == 40 > len(axis.texts) > 5
    assert f"{('coin', 'nucleus')[labels[scores.argmax()]]} 0.99" in [text.get_text() for text in axis.texts]
    figure.canvas.draw()
    shown = [text.get_window_extent() for text in axis.texts]
    places = [(box.x0, box.y0, box.x1, box.y1) for box in shown]
    assert not any(overlap(*pair) for pair in itertools.combinations(places, 2))
    image = axis.get_window_extent()
    assert all(image.x0 - 2 <= box.x0 and box.x1 <= image.x1 + 2 for box in shown)
    assert all(image.y0 - 2 <= box.y0 and box.y1 <= image.y1 + 2 for box in shown)
    pyplot().close(figure)
