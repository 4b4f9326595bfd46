"""Models of one channel: their image processor makes one of any image, here and where the package is missing."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, pipeline

from hf_sparseprior.analysis.app_figures import attention_picture, open_model
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.cli.deployment import fitted_processor, saved_processor
from hf_sparseprior.cli.exportable import Exportable
from hf_sparseprior.images.processor import make_processor
from hf_sparseprior.saving.card import CARD
from hf_sparseprior.saving.image_processor import SparsePriorImageProcessor
from hf_sparseprior.saving.processor import PROCESSOR
from hf_sparseprior.saving.saved_processor import load_image_processor
from tests.each import each
from tests.hf_sparseprior.small import scatter, shipped_families, small
from tests.processes import run_script

IMAGES = sorted(name for name in shipped_families() if FAMILIES[name].takes == "images")
GREY = {"num_channels": 1, "image_mean": 0.3, "image_std": 0.2}


def photo(height=40, width=60):
    values = np.random.default_rng(0).integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((width, height))


def saved(family, folder):
    torch.manual_seed(0)
    model = scatter(FAMILIES[family].image_classifier(small(family, **GREY)), 0.05)
    model.save_pretrained(folder)
    return model


def expected_pixels(image, size):
    """By Pillow and numpy alone."""
    grey = np.asarray(image.convert("RGB").convert("L").resize((size, size), Image.Resampling.BICUBIC))
    return torch.from_numpy((grey[None, None] / 255 - 0.3) / 0.2).float()


@pytest.mark.parametrize("family", IMAGES)
def test_pipelines_classify_photos_by_a_model_of_one_channel(family, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "n")
    model = saved(family, tmp_path)
    photo().save(tmp_path / "photo.png")
    with torch.no_grad():
        probabilities = model(expected_pixels(photo(), model.config.image_size)).logits.softmax(-1)[0]
    found = pipeline("image-classification", model=str(tmp_path))(str(tmp_path / "photo.png"), top_k=None)
    assert not asked  # whether to run code of the folder
    by_label = {each["label"]: each["score"] for each in found}
    assert len(by_label) == model.config.num_labels
    for label, name in model.config.id2label.items():
        assert by_label[name] == pytest.approx(float(probabilities[label]), abs=1e-5)


REMOTE = """
import json, sys
from pathlib import Path
from transformers import AutoImageProcessor

example = Path("model/README.md").read_text().partition("```python\\n")[2].partition("```")[0]
example = example.replace("PATH_OR_NAME_OF_THIS_MODEL", "model").replace("image.png", "photo.png")
code, _, call = example.rstrip().rpartition("\\n")
exec(code)
found = eval(call)
processor = AutoImageProcessor.from_pretrained("model", trust_remote_code=True)
assert type(processor).__module__.startswith("transformers_modules.")
processor.save_pretrained("again")
Path("found.json").write_text(json.dumps(found))
assert not [name for name in sys.modules if name.partition(".")[0] == "hf_sparseprior"]
"""


def test_the_cards_example_runs_without_the_package(tmp_path):
    saved("sparseprior_vit", tmp_path / "model")
    assert len(list((tmp_path / "model").glob("*.py"))) == 8
    assert "pipeline" in (tmp_path / "model" / CARD).read_text()
    photo().save(tmp_path / "photo.png")
    run_script(REMOTE, folder=tmp_path)
    here = pipeline("image-classification", model=str(tmp_path / "model"))(str(tmp_path / "photo.png"))
    there = json.loads((tmp_path / "found.json").read_text())
    assert [each["label"] for each in there] == [each["label"] for each in here]
    assert [each["score"] for each in there] == pytest.approx([each["score"] for each in here], abs=1e-5)
    again = load_image_processor(tmp_path / "again")
    assert type(again) is SparsePriorImageProcessor and list(again.image_mean) == [0.3]


@each("mode, crop", [*((mode, None) for mode in ("RGB", "L", "P", "RGBA", "1", "CMYK", "LA")), ("P", 0.8)])
def test_any_mode_becomes_one_channel(mode, crop, tmp_path):
    processor = make_processor(small("sparseprior_vit", **GREY), crop)
    processor.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "sparseprior_vit", "num_channels": 1}')
    again = load_image_processor(tmp_path)
    assert type(again) is SparsePriorImageProcessor
    image = photo().convert(mode)
    pixels = again(image, return_tensors="pt")["pixel_values"]
    size = small("sparseprior_vit").image_size
    assert pixels.shape == (1, 1, size, size) and pixels.dtype == torch.float32
    grey = image.convert("RGB").convert("L")
    assert torch.equal(processor(np.asarray(grey)[..., None], return_tensors="pt")["pixel_values"], pixels)
    if crop is None:
        torch.testing.assert_close(pixels, expected_pixels(image, size), atol=1e-5, rtol=0)


def test_arrays_and_tensors_become_grey_as_pillow_does():
    processor = make_processor(small("sparseprior_vit", **GREY))
    plain = {"do_resize": False, "do_normalize": False, "do_rescale": False, "return_tensors": "np"}
    grey = np.asarray(photo().convert("L"), dtype=np.float32)
    colours = np.asarray(photo())
    first = np.moveaxis(colours, -1, 0)
    opaque = np.concatenate([first, np.full_like(first[:1], 7)])
    for given in (colours, first, torch.from_numpy(first.copy()), opaque, grey[None], grey[..., None]):
        pixels = processor(given, **plain)["pixel_values"]
        assert pixels.shape == (1, 1, 40, 60)
        assert abs(pixels[0, 0] - grey).max() <= 1  # Pillow computes in integers
    shares = processor([first / 255, colours / 255], **plain)["pixel_values"]
    assert shares.shape == (2, 1, 40, 60)
    np.testing.assert_allclose(shares[0], shares[1])
    np.testing.assert_allclose(shares[0, 0], first.transpose(1, 2, 0) @ [0.299, 0.587, 0.114] / 255, rtol=1e-6)
    kept = SparsePriorImageProcessor(do_grayscale=False, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    assert kept(photo(), return_tensors="np")["pixel_values"].shape == (1, 3, 224, 224)


def test_the_app_shows_a_photo_to_a_model_of_one_channel(tmp_path):
    saved("sparseprior_vit", tmp_path / "model")
    picture = attention_picture(np.asarray(photo()), open_model(str(tmp_path / "model")), tmp_path / "seen.png")
    assert Image.open(picture).size[0] > 100


def test_exported_files_name_a_processor_of_transformers(tmp_path):
    """They go where this package's code is not."""
    model = saved("sparseprior_vit", tmp_path)
    written = json.loads((tmp_path / PROCESSOR).read_text())
    assert written["auto_map"] == {"AutoImageProcessor": ["saving.SparsePriorImageProcessor", None]}
    settings = fitted_processor(saved_processor(tmp_path), Exportable(model))
    assert settings["image_processor_type"] == "ViTImageProcessor" and "auto_map" not in settings
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / PROCESSOR).write_text(json.dumps(settings))
    grey = photo().convert("L")
    exported = AutoImageProcessor.from_pretrained(tmp_path / "out")(grey, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(exported, load_image_processor(tmp_path)(grey, return_tensors="pt")["pixel_values"])


def test_models_of_three_channels_keep_the_class_of_transformers(tmp_path):
    FAMILIES["sparseprior_vit"].base(small("sparseprior_vit")).save_pretrained(tmp_path)
    written = json.loads((tmp_path / PROCESSOR).read_text())
    assert written["image_processor_type"] == "ViTImageProcessor" and "auto_map" not in written
