"""Slide mode on an image as ADE20K has them, by DeiT-B at full size with a narrow head."""

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
NARROW = ["model.decode_head.channels=32", "model.auxiliary_head.channels=8"]


def test_slide_mode_at_full_size_is_the_average_of_crops_by_hand():
    model, image = build(CONFIG, [*NARROW, *SLIDE]), photograph()
    assert model.backbone.config.hidden_size == 768 and model.backbone.config.num_hidden_layers == 12
    with torch.no_grad():
        found, expected = by_framework(model, image), by_hand(model, image)
    assert found.shape == (150, HEIGHT, WIDTH) and found.std() > 0.01
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.std()))
    shared = expected[:, :, 688 - 512 : 512]  # a model of one crop would say something else where two overlap
    assert STRIDE < 512 and (by_left(model, image)[:, :, 688 - 512 :] - shared).abs().max() > 1e-2 * expected.std()


def by_left(model, image):
    """Of the left crop alone."""
    with torch.no_grad():
        return by_framework(model, image[:, :, :512])
