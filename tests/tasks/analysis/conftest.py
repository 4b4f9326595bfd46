"""Saved models that were never trained, in folders as runs leave them."""

import json
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification

import hf_sparseprior as sp
from hf_sparseprior.analysis import image_maps, pictures
from hf_sparseprior.images.sources.tables import write_parquet

SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
DIGITS = {"image_size": 8, "patch_size": 2, "num_labels": 10, **SMALL}
BOXED = {"image_size": 16, "patch_size": 4, "num_labels": 2, **SMALL}


def write_run(folder, data, seed=0, **options):
    """A run's folder; attention is far from uniform."""
    torch.manual_seed(seed)
    config = sp.SparsePriorViTConfig(initializer_range=0.3, **options)
    sp.SparsePriorViTForImageClassification(config).save_pretrained(folder / "model")
    (folder / "run_config.json").write_text(json.dumps({"data": data}))
    return folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Folders of runs on digits by prior."""
    root = tmp_path_factory.mktemp("runs")
    return {
        prior: write_run(root / prior / "seed0", {"source": "digits"}, prior=prior, **DIGITS)
        for prior in ("dense", "fibottention+violin")
    }


@pytest.fixture(scope="session")
def boxed_runs(tmp_path_factory):
    """Folders of runs on 16x16 images with boxes, and the images (count, 16, 16, 3) and boxes of their test split."""
    root = tmp_path_factory.mktemp("boxed")
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (12, 16, 16, 3), dtype=np.uint8)
    boxes = [[[0, 4, 8, 12]], [[2, 2, 9, 5], [8, 8, 8, 8]], [[5, 5, 3, 3]]] * 4  # the third lies in no patch's half
    (root / "data").mkdir()
    for split in ("train", "validation", "test"):
        write_parquet(images, np.arange(12) % 2, ["a", "b"], root / "data" / f"{split}.parquet", {"boxes": boxes})
    data = {"source": "parquet", "path": str(root / "data")}
    folders = [write_run(root / prior, data, prior=prior, **BOXED) for prior in ("dense", "fibottention")]
    return folders, images, boxes


@pytest.fixture(scope="session")
def stock(tmp_path_factory):
    """The folder of a ViT of transformers with an image processor."""
    folder = tmp_path_factory.mktemp("stock") / "vit"
    torch.manual_seed(0)
    sizes = {"image_size": 16, "patch_size": 4, **SMALL}
    ViTForImageClassification(ViTConfig(initializer_range=0.3, **sizes)).save_pretrained(folder)
    processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


@pytest.fixture
def picture(tmp_path):
    """The file of an image of 20x30 pixels."""
    pixels = np.random.default_rng(1).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "own.png")
    return tmp_path / "own.png"


@contextmanager
def kept_figures():
    """The figures that are written meanwhile, still open, by the name of their file."""
    drawn = {}

    def keep(figure, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.set_layout_engine("none")  # takes longer than to draw
        figure.savefig(path, dpi=30)
        drawn[path.name] = figure
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "save", keep)
        patch.setattr(image_maps, "save", keep)
        yield drawn
    for figure in drawn.values():
        pictures.pyplot().close(figure)


@pytest.fixture
def figures():
    with kept_figures() as drawn:
        yield drawn
