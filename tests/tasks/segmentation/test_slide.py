"""Slide mode on an image as ADE20K has them, by four layers of DeiT-B with a small head."""

import pytest
import torch

pytest.importorskip("mmseg", reason="the extra `dense` is not installed")

from tests.tasks.segmentation.slide import (
    CONFIG,
    HEIGHT,
    SLIDE,
    STRIDE,
    WIDTH,
    build,
    by_framework,
    by_hand,
    photograph,
)

pytestmark = pytest.mark.slow
SMALLER = ["model.decode_head.channels=32", "model.auxiliary_head.channels=8", "model.decode_head.num_classes=8"]
SMALLER += ["model.backbone.num_hidden_layers=4", "model.backbone.out_indices=[1,2,3,4]"]


def test_slide_mode_at_full_resolution_is_the_average_of_crops_by_hand():
    model, image = build(CONFIG, [*SMALLER, *SLIDE]), photograph()
    with torch.no_grad():
        found, expected = by_framework(model, image), by_hand(model, image)
    assert found.shape == (8, HEIGHT, WIDTH) and found.std() > 0.01
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.std()))
    shared = expected[:, :, 688 - 512 : 512]  # a model of one crop would say something else where two overlap
    assert STRIDE < 512 and (by_left(model, image)[:, :, 688 - 512 :] - shared).abs().max() > 1e-2 * expected.std()


def by_left(model, image):
    """Of the left crop alone."""
    with torch.no_grad():
        return by_framework(model, image[:, :, :512])
