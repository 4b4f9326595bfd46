"""Train low, run high: what a model that learned on small images computes on larger ones."""

import copy

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForImageClassification

import hf_sparseprior as sp
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.models.pretrained import load_changed_model
from hf_sparseprior.patterns.pattern import SUPPORTS
from hf_sparseprior.patterns.supports import LayerKey, layer_pattern
from tests.each import each
from tests.hf_sparseprior.small import small

CLASSIFIERS = [name for name, family in FAMILIES.items() if family.classifier is not None]
PRIOR = "fibottention+violin"


def make(name, prior=PRIOR, **options):
    torch.manual_seed(0)
    model = FAMILIES[name].classifier(small(name, prior=prior, num_labels=3, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def pixels_of(model, size):
    frames = (model.config.num_frames,) if hasattr(model.config, "num_frames") else ()
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, *frames, 3, *size, generator=generator)


def bicubic(positions, grid, to, prefix):
    """Positions (1, prefix + N, C) for another grid, written out."""
    own = positions[:, prefix:].mT.unflatten(2, grid)
    resized = F.interpolate(own, size=to, mode="bicubic", align_corners=False)
    return torch.cat([positions[:, :prefix], resized.flatten(2).mT], 1)


def made_for(model, image_size):
    """A model that was never of another size, with the weights of `model` and positions as torch interpolates them."""
    config = copy.deepcopy(model.config)
    config.image_size = image_size
    config.prior = PRIOR
    large = type(model)(config).eval()
    weights = {
        key: bicubic(value, model.config.grid, large.config.grid, value.shape[1] - model.config.grid[0] ** 2)
        if key.endswith("position_embeddings")
        else value
        for key, value in model.state_dict().items()
    }
    large.load_state_dict(weights)
    return large


@each("name", CLASSIFIERS)
def test_each_family_runs_at_a_larger_size_as_a_model_that_is_made_for_it(name, tmp_path):
    model, side = make(name), small(name).image_size
    model.save_pretrained(tmp_path / name)
    low, high = pixels_of(model, (side, side)), pixels_of(model, (2 * side, 2 * side))
    with torch.no_grad():
        before = model(low).logits
        oracle = made_for(model, 2 * side)(high).logits
        as_it_is = model(high).logits
        assert torch.equal(model(low).logits, before)  # what ran at another size left nothing
        classes = (FAMILIES[name].classifier, AutoModelForImageClassification)
        for loader in classes if FAMILIES[name].takes == "images" else classes[:1]:
            again = loader.from_pretrained(tmp_path / name, image_size=2 * side)
            assert again.config.image_size == 2 * side and not again.training
            torch.testing.assert_close(again(high).logits, oracle, rtol=0, atol=0)
        same = FAMILIES[name].classifier.from_pretrained(tmp_path / name, image_size=side)
        assert torch.equal(same(low).logits, before)
    torch.testing.assert_close(as_it_is, oracle, rtol=0, atol=0)
    assert (oracle[0] - oracle[1]).abs().max() > 1e-4


def test_bare_models_and_sides_of_any_ratio(tmp_path):
    model = make("sparseprior_vit", use_class_token=True).vit
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path, image_size=[12, 8])
    expected = bicubic(model.embeddings.position_embeddings, (2, 2), (3, 2), 1)
    torch.testing.assert_close(again.embeddings.position_embeddings, expected, rtol=0, atol=0)
    smaller = AutoModel.from_pretrained(tmp_path, image_size=4, dtype=torch.float64)
    assert smaller.dtype == torch.float64 and smaller.config.grid == (1, 1)
    again.save_pretrained(tmp_path / "again")
    back = sp.SparsePriorViTModel.from_pretrained(tmp_path / "again")
    assert back.config.grid == (3, 2) and str(again.name_or_path) == str(tmp_path)


def test_positions_of_half_precision_are_interpolated_in_float32(tmp_path):
    model = make("sparseprior_vit", prior="fibottention").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, image_size=16)
    positions = model.vit.embeddings.position_embeddings
    assert again.dtype == torch.bfloat16
    expected = bicubic(positions.float(), (2, 2), (4, 4), 1).bfloat16()
    torch.testing.assert_close(again.vit.embeddings.position_embeddings, expected, rtol=0, atol=0)


def test_what_else_changes_with_the_size_is_as_without_it(tmp_path):
    model = make("sparseprior_vit")
    model.save_pretrained(tmp_path)
    options = {"num_labels": 5, "prior": "violin", "ignore_mismatched_sizes": True, "output_loading_info": True}
    again, info = type(model).from_pretrained(tmp_path, image_size=16, **options)
    assert {own[0] for own in info["mismatched_keys"]} == {"classifier.weight", "classifier.bias"}
    assert again.config.prior_name == "violin" and again.config.prior["support"]["name"] == "dense"
    found, anew = load_changed_model(tmp_path, type(model), image_size=16, num_labels=5)
    assert anew == ["classifier.bias", "classifier.weight"] and found.config.image_size == 16
    model.vit.save_pretrained(tmp_path / "bare")
    _, anew = load_changed_model(tmp_path / "bare", type(model), image_size=16)
    assert anew == ["classifier.bias", "classifier.weight"]  # not what the loaded source has drawn
    with pytest.raises(RuntimeError, match=r"lacks weights that fit its config: classifier.bias \(3,\) for \(5,\)"):
        type(model).from_pretrained(tmp_path, image_size=16, num_labels=5)
    with pytest.raises(ValueError, match="image_size=10 must be a multiple of patch_size=4"):
        type(model).from_pretrained(tmp_path, image_size=10)
    with pytest.raises(ValueError, match="image_size='large' must be an integer"):
        type(model).from_pretrained(tmp_path, image_size="large")


def offsets_at(prior, grid, num_heads):
    return layer_pattern(prior["support"], LayerKey(num_heads, grid)).offsets


@each("support", [name for name, own in SUPPORTS.items() if not own.sees_time])
def test_default_settings_of_every_support_are_those_of_the_grid_it_runs_on(support, tmp_path):
    """As of a prior that was made for the larger grid."""
    options = {"image_size": 32, "patch_size": 4, "prior": support}
    model = make("sparseprior_vit", **options)
    folder = tmp_path / support
    model.save_pretrained(folder)
    large = type(model).from_pretrained(folder, image_size=64)
    fresh = small("sparseprior_vit", **{**options, "image_size": 64})
    assert large.config.prior == fresh.prior
    assert offsets_at(large.config.prior, (16, 16), 2) == offsets_at(fresh.prior, (16, 16), 2)


@each("w_max, low, high", [(None, 21, 85), (10, 10, 10), (30, 30, 30)])
def test_a_window_that_is_given_stays_and_the_default_is_a_third_of_the_patches(w_max, low, high, tmp_path):
    support = {"name": "fibottention", "w_min": 1, "w_max": w_max, "shuffle_seed": None, "order": "hilbert"}
    model = make("sparseprior_vit", image_size=32, patch_size=4, prior={"support": support})
    folder = tmp_path / str(w_max)
    model.save_pretrained(folder)
    large = type(model).from_pretrained(folder, image_size=64)
    assert large.config.prior["support"]["w_max"] == w_max and large.config.prior["support"]["order"] == "hilbert"
    for grid, window in (((8, 8), low), ((16, 16), high)):
        given = {**support, "w_max": window}
        expected = sp.supports.head_offsets("fibottention", num_heads=2, num_tokens=grid[0] ** 2, w_min=1, w_max=window)
        assert offsets_at(large.config.prior, grid, 2) == expected
        one = sp.supports.build_mask(given, num_heads=2, num_tokens=grid[0] ** 2, grid=grid)
        assert (layer_pattern(large.config.prior["support"], LayerKey(2, grid)).mask() == one).all()
