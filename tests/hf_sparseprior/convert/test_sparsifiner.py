"""Sparsifiner's own checkpoints: made files in the published layout, against the formula in float64."""

import argparse
import math

import pytest
import torch

import hf_sparseprior as sp
from hf_sparseprior.convert import convert_checkpoint
from tests.hf_sparseprior.convert import original_vit, test_lvvit

GRID, DOWN = 4, 12
TOKENS = GRID**2 + 1


def with_predictors(state, layers, head_dim):
    """The mask predictors' tensors of the published code beside a ViT's weights."""
    generator = torch.Generator().manual_seed(3)
    for block in range(layers):
        name = f"blocks.{block}.attn.mask_predictor"
        shapes = {"proj_n": (TOKENS, DOWN), "proj_back_n": (TOKENS, DOWN)}
        for letter in "qk":
            shapes |= {f"proj_c_{letter}.weight": (head_dim // 2, head_dim), f"proj_c_{letter}.bias": (head_dim // 2,)}
        for part, shape in shapes.items():
            state[f"{name}.{part}"] = torch.randn(*shape, generator=generator, dtype=torch.float64) / 2
    return state


def published_weights(state, heads, keep_rate=0.25, top=8, least=0.02):
    """Attention weights of the published code; the class token sees everything."""
    budget = math.ceil(keep_rate * TOKENS)

    def weights_of(block, query, key):
        name = f"blocks.{block}.attn.mask_predictor"
        q, k = (
            tokens @ state[f"{name}.proj_c_{letter}.weight"].T + state[f"{name}.proj_c_{letter}.bias"]
            for letter, tokens in (("q", query), ("k", key))
        )
        down = ((q @ (k.mT @ state[f"{name}.proj_n"])) / math.sqrt(heads)).softmax(-1)
        least_coefficient = down.sort(-1, descending=True).values[..., top - 1 : top]
        basis = state[f"{name}.proj_back_n"].T.abs()
        scores = (down * (down >= least_coefficient)) @ (basis * (basis > least))
        lowest_score = scores.sort(-1, descending=True).values[..., budget - 1 : budget]
        seen = scores >= lowest_score
        seen[..., 0, :] = True
        assert (seen[..., 1:, :].sum(-1) == budget).all()  # no ties
        assert not seen[..., 1:, 0].all()  # the class token goes
        logits = query @ key.mT / math.sqrt(query.shape[-1])
        return logits.masked_fill(~seen, -math.inf).softmax(-1)

    return weights_of


def saved(state, folder):
    """As the published code saves a run."""
    arguments = argparse.Namespace(model="sparsifiner", input_size=16, lr=5e-4)
    content = {"model": state, "optimizer": {}, "epoch": 49, "scaler": {}, "args": arguments, "best": 79.7}
    torch.save(content, folder / "checkpoint-49.pth")
    return folder / "checkpoint-49.pth"


def loaded(folder):
    return sp.SparsePriorViTForImageClassification.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.mark.parametrize("keep_rate", [0.25, 0.5])
def test_a_deit_checkpoint_computes_what_the_published_formula_does(keep_rate, tmp_path):
    state = with_predictors(original_vit.random_weights(GRID), original_vit.LAYERS, original_vit.WIDTH // 3)
    predictor = {"name": "sparsifiner_published", "num_down": DOWN, "keep_rate": keep_rate}
    prior = None if keep_rate == 0.25 else {"predictor": predictor}
    lines = convert_checkpoint(saved(state, tmp_path), tmp_path / "ours", prior=prior)
    assert any("up_threshold are not in the file; 0.25, 8 and 0.02" in line for line in lines)
    model, pixels = loaded(tmp_path / "ours"), original_vit.images(GRID)
    tokens = original_vit.forward(state, pixels, published_weights(state, original_vit.HEADS, keep_rate))
    with torch.no_grad():
        logits = model(pixels).logits
    torch.testing.assert_close(logits, original_vit.linear(tokens[:, 0], state, "head"), rtol=1e-9, atol=1e-9)


def test_a_checkpoint_on_lvvit_computes_what_the_published_formula_does(tmp_path):
    state = test_lvvit.original_weights(width=240, layers=2, stem=8, side=32, patch=8, classes=5)
    state = with_predictors(state, layers=2, head_dim=60)
    convert_checkpoint(saved(state, tmp_path), tmp_path / "ours")
    pixels = test_lvvit.images(side=32, dtype=torch.float64)
    class_logits, token_logits = test_lvvit.rewrite(state, pixels, 4, 1.0, published_weights(state, 4))
    with torch.no_grad():
        logits = loaded(tmp_path / "ours")(pixels).logits
    torch.testing.assert_close(logits, class_logits + 0.5 * token_logits.max(1).values, rtol=1e-9, atol=1e-9)


def test_another_predictor_starts_anew_and_dense_has_none(tmp_path):
    state = with_predictors(original_vit.random_weights(GRID), original_vit.LAYERS, original_vit.WIDTH // 3)
    for prior in ("dense", "sparsifiner"):
        convert_checkpoint(saved(state, tmp_path), tmp_path / prior, prior=prior)
        assert loaded(tmp_path / prior).config.prior_name == prior


def test_widths_that_do_not_fit_are_refused(tmp_path):
    state = with_predictors(original_vit.random_weights(GRID), original_vit.LAYERS, 10)
    with pytest.raises(ValueError, match=r"proj_c_q.weight: 5 must divide 10, and 10 the width 24"):
        convert_checkpoint(saved(state, tmp_path), tmp_path / "ours")
