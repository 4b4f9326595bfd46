"""Models for the tests of `sparsify`, and a timer whose seconds depend on names alone."""

import time

import torch
from transformers import ViTConfig, ViTForImageClassification

import hf_sparseprior as sp
from hf_sparseprior.sparsification import recovery, timing
from tests.timm_oracle import import_timm

SIZES = {
    "image_size": 32, "patch_size": 4, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 32,
}  # fmt: skip
CANDIDATES = [
    {"name": "window", "w": 2},
    {"name": "fibottention", "w_min": 5, "w_max": 20},
    {"name": "neighborhood", "window": 3},
]
NAMES = ["window w=2", "fibottention w_min=5 w_max=20", "neighborhood window=3"]
# Of a layer's attention, in units of the dense model's time.
SECONDS = {"dense attention": 0.25, **dict(zip(NAMES, (0.05, 0.1, 0.125), strict=True))}
STILL = "standing still"
SETTINGS = {"candidates": CANDIDATES, "calibration": 6, "device": "cpu"}


def _ours():
    return sp.SparsePriorViTForImageClassification(sp.SparsePriorViTConfig(**SIZES, num_labels=3))


def _stock():
    return ViTForImageClassification(ViTConfig(**SIZES, num_labels=3))


def _timm():
    options = {"img_size": 32, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 2, "num_classes": 3}
    return import_timm().create_model("vit_tiny_patch16_224", **options)


BUILDERS = {"ours": _ours, "transformers": _stock, "timm": _timm}


def model_of(kind, seed=0):
    """A model of three layers with random weights that are large enough for its attention to matter."""
    torch.manual_seed(seed)
    model = BUILDERS[kind]().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.3)
    return model


def images_of(count=24, seed=1):
    """Random images as the models take them."""
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


class Timer:
    """In place of `timing.seconds_of_rounds`: nothing runs, and seconds are known.

    scale: what the whole model saves, in units of what its layers save alone. calls: what was asked for, in order.
    """

    def __init__(self, scale=1.0):
        self.scale, self.calls = scale, []

    def __call__(self, calls, device, budget):
        names = list(calls)
        self.calls.append(names)
        return {name: [SECONDS[name] if name in SECONDS else self.whole(name)] for name in names}

    def whole(self, name):
        """Seconds of a whole model: the dense one takes 1."""
        kind, _, which = name.partition(" ")
        if kind == "resolution":
            return int(which.partition("x")[0]) ** 2 / 32**2
        if kind == "merging":  # by the share of the patches that is left
            return 0.25 + 0.75 * float(which)
        if kind == "dense":
            return 1.0
        seconds = list(SECONDS.values())
        return 1 - self.scale * sum(seconds[0] - seconds[int(own)] for own in which.split(","))


def search_until(out, line, minutes):
    """A search with recovery, for a process of its own: it stands still when it says a line that begins so, in recovery
    after the second step, when the first is saved.
    """
    timing.seconds_of_rounds, recovery.SAID_EVERY, recovery.SAVED_EVERY = Timer(), 0.0, 0.0

    def say(text):
        if text.startswith(line) and ", step 1," not in text:
            print(STILL, flush=True)
            time.sleep(1000)

    sp.sparsify(model_of("ours"), images_of(), 0.6, settings={**SETTINGS, "minutes": minutes}, out=out, say=say)
