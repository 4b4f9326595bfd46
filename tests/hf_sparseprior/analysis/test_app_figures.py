"""What the app shows; no gradio here."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessor

from hf_sparseprior.analysis import app_figures
from hf_sparseprior.analysis.app_figures import attention_picture, open_model, prior_pictures, time_table
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.patterns.supports import build_mask
from tests.hf_sparseprior.small import small

IMAGE = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    config = small("sparseprior_vit", prior="fibottention+violin", num_hidden_layers=2)
    FAMILIES["sparseprior_vit"].image_classifier(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_prior_is_told_and_drawn(tmp_path, capsys):
    text, written = prior_pictures("fibottention+violin", tmp_path, 2, "4x4", 2, "w_min=2 w_max=7")
    assert capsys.readouterr().out == "" and "picture: " not in text
    support = {"name": "fibottention", "w_min": 2, "w_max": 7}
    mask = build_mask(support, num_heads=2, num_tokens=16, layer=1)
    assert f"{mask.sum()} patch tokens only" in text
    assert {path.name.partition("_")[0] for path in written} == {"support", "patch", "curves", "decay"}
    assert all(Image.open(path).size[0] > 100 for path in written)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("nonsense",), "nonsense"),
        (("violin", 2, "4"), "grid '4' must be HEIGHTxWIDTH"),
        (("violin", 2, "4x4", 0), "--layer=0 must be an integer of 1 or more"),
        (("violin", 2, "4x4", 1, "init"), "KEY=VALUE"),
    ],
)
def test_bad_values_of_a_prior_are_named(given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        prior_pictures(given[0], tmp_path, *given[1:])


def test_attention_is_what_the_model_gives(model, tmp_path, figures):
    opened = open_model(str(model))
    attention_picture(IMAGE, opened, tmp_path / "seen.png", layer=2, query=(1, 2))
    pixels = opened.processor(IMAGE, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        weights = opened.model(pixels, output_attentions=True).attentions[1][0]
    prefix = opened.model.config.num_prefix_tokens
    from_patch = weights[:, prefix + 1, prefix:]  # of the patch in row 1, column 2
    titles = [axis.get_title() for axis in figures[0].axes]
    for head, row in enumerate(from_patch, start=1):
        assert titles.count(f"head {head} sees {(row > 0).sum()}") == 1
        assert titles.count(f"head {head}, max {row.max():.2g}") == 1
    assert titles.count(f"all heads see {(from_patch > 0).any(0).sum()}") == 1
    assert Image.open(tmp_path / "seen.png").size[0] > 100


def opened_with(folder, **changes):
    config = small("sparseprior_vit", **changes)
    FAMILIES["sparseprior_vit"].image_classifier(config).save_pretrained(folder)
    return open_model(str(folder))


def spot_lands_in(opened, size, point):
    """The patch, from 1, that a spot of white in a black image reaches most."""
    image = np.zeros((*size, 3), np.uint8)
    image[max(point[0] - 2, 0) : point[0] + 3, max(point[1] - 2, 0) : point[1] + 3] = 255
    pixels = opened.processor(image, return_tensors="pt")["pixel_values"][0, 0].numpy()
    rows, columns = opened.model.config.grid
    patches = (pixels - pixels.min()).reshape(rows, len(pixels) // rows, columns, -1).sum((1, 3))
    row, column = np.unravel_index(patches.argmax(), patches.shape)
    return row + 1, column + 1


@pytest.mark.parametrize("size", [(80, 100), (150, 60)])
@pytest.mark.parametrize("crops", [False, True])
def test_a_click_chooses_the_patch_in_which_a_spot_of_the_image_lands(size, crops, tmp_path):
    opened = opened_with(tmp_path / "model", image_size=32 if crops else (24, 40))
    if crops:  # the middle square, as of CLIP and of timm's models
        edges = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
        opened = replace(opened, processor=CLIPImageProcessor(**edges))
    grid = opened.model.config.grid
    low, extent = ([(each - min(size)) // 2 if crops else 0 for each in size], [min(size)] * 2 if crops else size)
    for row, column in ((0, 0), (1, 4), (3, 2), (5, 5), (grid[0] - 1, grid[1] - 1)):
        middle = [
            round((place + 0.5) * length / count)
            for place, length, count in zip((row, column), extent, grid, strict=True)
        ]
        point = [start + offset for start, offset in zip(low, middle, strict=True)]
        patch = app_figures.patch_at(opened, size, point)
        assert patch == (row + 1, column + 1) == spot_lands_in(opened, size, point)
    assert app_figures.patch_at(opened, size, (0, 0)) == (1, 1)  # also where it is cut off
    assert app_figures.patch_at(opened, size, [each - 1 for each in size]) == grid


def test_a_patch_has_its_place_in_the_grid_of_another_model(tmp_path):
    coarse, fine = (opened_with(tmp_path / str(size), image_size=size) for size in (32, 64))  # 8x8 and 16x16 patches
    assert app_figures.same_place((3, 8), coarse, coarse) == (3, 8)
    assert app_figures.same_place((1, 8), coarse, fine) == (2, 16)
    assert app_figures.same_place((2, 15), fine, coarse) == (1, 8)


def test_the_example_is_a_photo():
    pixels = np.asarray(Image.open(app_figures.example_photo()))
    assert pixels.shape[2] == 3 and min(pixels.shape[:2]) > 224 and pixels.std() > 20


def test_times_of_models_come_one_by_one_and_are_measured_once(model, monkeypatch):
    measured = []
    monkeypatch.setattr(app_figures, "_MEASURED", {})
    monkeypatch.setattr(app_figures, "measured_seconds", lambda config: measured.append(config) or len(measured) / 10)
    ours = open_model(str(model))
    side = ours.model.config.image_size
    once, twice = (side, side), (2 * side, 2 * side)
    shown = list(app_figures.model_times([ours, ours]))
    times = [[[(row.size, row.seconds) for row in rows] for rows in models] for models in shown]
    assert times[0] == [[(once, None), (twice, None)]] * 2
    assert times[1] == [[(once, 0.1), (twice, None)], [(once, None), (twice, None)]]
    assert times[-1] == [[(once, 0.1), (twice, 0.2)]] * 2 and len(times) == 5
    assert [app_figures._pair(config.image_size) for config in measured] == [once, twice]
    assert all(config.prior_name == "fibottention+violin" for config in measured)
    assert ours.model.config.image_size == side


def test_a_model_of_transformers_is_timed_at_its_own_size(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"image_size": 32, "patch_size": 8, "hidden_size": 16, "intermediate_size": 16}
    config = ViTConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    ViTForImageClassification(config).save_pretrained(tmp_path)
    settings = app_figures.image_processor_settings(open_model("vit_tiny").model.config)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    [[row]] = list(app_figures.model_times([open_model(str(tmp_path))]))[-1]
    assert row.size == (32, 32) and 0 < row.seconds < 60


def test_models_with_random_weights_and_what_cannot_be_shown(model, tmp_path):
    opened = open_model("vit_tiny violin")
    assert opened.model.config.prior_name == "violin" and opened.processor.size["height"] == 224
    with pytest.raises(OSError, match="hf download somebody/model"):
        open_model("somebody/model")
    small_model = open_model(str(model))
    with pytest.raises(ValueError, match="layer 99 must be from 1 to"):
        attention_picture(IMAGE, small_model, tmp_path / "no.png", layer=99)
    with pytest.raises(ValueError, match="row 1, column 99 must be in the"):
        attention_picture(IMAGE, small_model, tmp_path / "no.png", query=(1, 99))
    torch.manual_seed(0)
    FAMILIES["sparseprior_timesformer"].classifier(small("sparseprior_timesformer")).save_pretrained(tmp_path / "clips")
    with pytest.raises((ValueError, OSError)):
        open_model(str(tmp_path / "clips"))


def test_times_are_predicted_and_measured_for_every_prior_and_size(tmp_path, monkeypatch, figures):
    asked = []

    def costs(config, images, device, passes, budget):
        asked.append((config.prior_name, config.image_size, images, passes))
        return {"forward": type("Cost", (), {"seconds": len(asked) / 10})}

    monkeypatch.setattr(app_figures, "predicted_costs", costs)
    monkeypatch.setattr(app_figures, "measured_seconds", lambda config: 0.5)
    rows, picture = time_table("vit_tiny", ["dense", "violin"], [64, 32], tmp_path, measure=True)
    assert rows == [
        ["dense", 32, 0.1, 0.5],
        ["dense", 64, 0.2, 0.5],
        ["violin", 32, 0.3, 0.5],
        ["violin", 64, 0.4, 0.5],
    ]
    assert asked == [(prior, size, 1, ("forward",)) for prior in ("dense", "violin") for size in (32, 64)]
    lines = {line.get_label(): line.get_xydata().tolist() for line in figures[0].axes[0].lines}
    assert lines["violin, predicted"] == [[32, 0.3], [64, 0.4]] and lines["dense, measured"] == [[32, 0.5], [64, 0.5]]
    assert picture == tmp_path / "times.png"
    with pytest.raises(ValueError, match="vit_tny"):
        time_table("vit_tny", ["dense"], [32], tmp_path)
    with pytest.raises(ValueError, match="at least one"):
        time_table("vit_tiny", [], [32], tmp_path)


def test_whole_models_are_timed():
    assert 0 < app_figures.measured_seconds(small("sparseprior_vit", prior="dense")) < 60
