"""Folders of runs without training: random models and a folder of 32x32 images."""

import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from PIL import Image

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from tasks.classification import evaluate

CLASSES = ("cat", "dog", "owl")
NEEDS_CORRUPTIONS = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("cv2", "skimage", "imagecorruptions")),
    reason="imagecorruptions or what it needs is not installed",
)


def natural_image(seed, height=32, width=32):
    """Smooth colours with a little noise, (height, width, 3) uint8."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[:height, :width] / 32
    waves = [
        np.sin(random.uniform(2, 9) * rows + random.uniform(2, 9) * columns + random.uniform(0, 6)) for _ in range(3)
    ]
    return np.clip(127 + 90 * np.stack(waves, -1) + random.normal(0, 8, (height, width, 3)), 0, 255).astype(np.uint8)


def write_images(folder, each=4, side=32, seed=0):
    """train, validation and test folders of three classes."""
    for split in ("train", "validation", "test"):
        for place, name in enumerate(CLASSES):
            (folder / split / name).mkdir(parents=True)
            for number in range(each):
                pixels = natural_image(1000 * seed + 100 * place + number + len(split), side, side)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


def write_run(folder, data, prior, seed, **processor):
    """A run's folder with a model that was never trained."""
    torch.manual_seed(seed)
    config = SparsePriorViTConfig(
        image_size=28, patch_size=7, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        initializer_range=0.5, prior=prior, id2label=dict(enumerate(CLASSES)),
        label2id={name: index for index, name in enumerate(CLASSES)},
    )  # fmt: skip
    SparsePriorViTForImageClassification(config).save_pretrained(folder / "model")
    if processor:
        file = folder / "model" / "preprocessor_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | processor))
    (folder / "run_config.json").write_text(json.dumps({"data": {"source": "imagefolder", "path": str(data)}}))
    return folder


def accuracy_by_evaluate(run, out):
    """What tasks.classification.evaluate finds on the test images."""
    assert evaluate.main([str(run / "model"), "--out", str(out)]) == 0
    return json.loads((out / "results_test.json").read_text())["metrics"]["test_accuracy"]
