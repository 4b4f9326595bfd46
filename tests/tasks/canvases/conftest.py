"""A Fashion-MNIST of noise, a scale of seconds, and a clock that counts calls, so that no test depends on speed."""

from types import SimpleNamespace

import numpy as np
import pytest

from hf_sparseprior.images.sources.images import ImageData, array_images
from tasks.canvases import data, loop, run
from tasks.canvases.contenders import SCALES, Group, Scale, Stage

CONTENDERS = ("dense", "half", "fibottention")


class Ticks:
    """Half a second from one call to the next, so a step takes half a second."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.5
        return self.now


def scale_of(contenders=CONTENDERS, seeds=(0,), stages=(32,)):
    """A start of 8 steps, and runs of 12 with an evaluation after every third."""
    model = {
        "num_channels": 1,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    start = tuple(Stage(side, 4 / 60, 4, 1e-3) for side in stages)
    groups = (Group("class", 64, 6 / 60, 1.5 / 60, tuple(contenders), tuple(seeds)),)
    return Scale(
        "smoke", "cpu", model, 4, start, groups, batch=2, selection_images=8, test_images=16, reference="dense"
    )


@pytest.fixture
def objects(monkeypatch):
    """Sixty training and twenty test objects; twenty of the first are for selection."""
    generator = np.random.default_rng(0)
    splits = {
        name: array_images(generator.integers(0, 256, (count, 28, 28)).astype(np.uint8), np.arange(count) % 10, name)
        for name, count in (("train", 60), ("test", 20))
    }

    def read(config):
        return ImageData(splits, list("0123456789"), "noise")

    monkeypatch.setattr(data, "read_fashion_mnist", read)
    monkeypatch.setattr(run, "read_fashion_mnist", read)
    monkeypatch.setattr(data, "SELECTION_OBJECTS", 20)
    return splits


@pytest.fixture
def ticks(monkeypatch):
    monkeypatch.setattr(loop, "clock_of", lambda device: Ticks())


@pytest.fixture
def small(objects, ticks, monkeypatch):
    """The scale in place of smoke's."""
    monkeypatch.setitem(SCALES, "smoke", scale_of())
    return SimpleNamespace(scale=SCALES["smoke"], of=scale_of)
