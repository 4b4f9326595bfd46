import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file

import hf_sparseprior as sp
from hf_sparseprior.analysis import decays as of_decays
from hf_sparseprior.analysis.decays import learned_decays, position_names
from hf_sparseprior.patterns.curves import curve_rank
from hf_sparseprior.patterns.decay import resolve_decay
from tests.hf_sparseprior.adapters.stock_models import STOCK

SMALL = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 32}
CURVES = ["hilbert", "hilbert_t", "snake"]


def scattered(model):
    """The model with every scalar of its decays somewhere else."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2] in ("alpha", "beta", "prefix_beta", "order"):
                parameter.copy_(torch.empty(parameter.shape).uniform_(-2, 6, generator=generator))
    return model


def assert_gammas(decays, stored):
    """Those of the decays are the sigmoids of the stored betas."""
    for decay, beta in zip(decays, stored, strict=True):
        np.testing.assert_allclose(decay.gamma, 1 / (1 + np.exp(-beta.astype(np.float64))), rtol=1e-12)


def betas(model):
    return [value.numpy() for name, value in model.state_dict().items() if name.endswith(".beta")]


def ours(**settings):
    decay = {"name": "violin", "curves": CURVES, **settings}
    config = sp.SparsePriorViTConfig(image_size=(12, 20), patch_size=4, prior={"decay": decay}, **SMALL)
    return scattered(sp.SparsePriorViTModel(config))


def mask_by_formula(beta, alpha_head, grid):
    """M of one head pair by pair: the mean over curves of sigmoid(beta)^|rank difference|."""
    tokens = grid[0] * grid[1]
    mask = np.zeros((tokens, tokens))
    for curve, own in zip(CURVES, beta[:, alpha_head], strict=True):
        ranks = curve_rank(curve, grid).ravel()
        for j, k in np.ndindex(tokens, tokens):
            mask[j, k] += (1 / (1 + np.exp(-own))) ** abs(ranks[j] - ranks[k]) / len(CURVES)
    return mask


def test_gamma_and_alpha_are_those_of_the_saved_file(tmp_path):
    model = ours(learn_prefix=True)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    decays = learned_decays(model)
    assert [decay.layer for decay in decays] == [0, 1, 2]
    for decay in decays:
        names = {key.rpartition(".")[2]: key for key in stored if f"layers.{decay.layer}.attention.decay_bias." in key}
        beta = stored[names["beta"]].astype(np.float64)
        assert decay.curves == CURVES and decay.gamma.shape == (3, 4) and decay.gamma.dtype == torch.float64
        np.testing.assert_allclose(decay.gamma, 1 / (1 + np.exp(-beta)), rtol=1e-12)
        np.testing.assert_array_equal(decay.alpha, stored[names["alpha"]])
        np.testing.assert_array_equal(decay.prefix_beta, stored[names["prefix_beta"]])


def masks_of(decay):
    """M (H, N, N) of its rows."""
    return torch.stack([decay.mask_row(patch) for patch in range(decay.positions.shape[-1])], 1).numpy()


@pytest.mark.parametrize("block", [1, 100, 1 << 22])
def test_masks_are_the_mean_over_curves_of_powers_of_gamma(block, monkeypatch):
    monkeypatch.setattr(of_decays, "BLOCK", block)
    decay = learned_decays(ours())[1]
    masks = masks_of(decay)
    for head in (0, 3):
        np.testing.assert_allclose(masks[head], mask_by_formula(decay.beta.numpy(), head, (3, 5)), rtol=1e-9)
    ranks = curve_rank("hilbert_t", (3, 5)).ravel()
    expected = 0.9 ** np.abs(ranks[:, None] - ranks[None, :])
    for patch in (0, 7, 14):
        row = decay.curve_row(1, float(np.log(9)), patch)  # sigmoid(log 9) = 0.9
        np.testing.assert_allclose(row, expected[patch], rtol=1e-9)
    every = [mask_by_formula(decay.beta.numpy(), head, (3, 5)) for head in range(4)]
    assert decay.mask_mean_and_min() == pytest.approx((np.mean(every), np.min(every)), rel=1e-12)


def test_each_stage_of_a_model_with_windows_has_its_own_grid():
    sizes = {"embed_dim": 8, "depths": [1, 2], "num_heads": [2, 4], "window_size": 3, "image_size": (12, 20)}
    prior = {"decay": {"name": "violin", "curves": CURVES}}
    model = scattered(sp.SparsePriorSwinModel(sp.SparsePriorSwinConfig(prior=prior, **sizes)))
    decays = learned_decays(model)
    assert [decay.grid for decay in decays] == [(3, 3), (2, 2), (2, 2)]
    assert_gammas(decays, betas(model))
    for decay in decays:
        np.testing.assert_allclose(masks_of(decay)[1], mask_by_formula(decay.beta.numpy(), 1, decay.grid), rtol=1e-9)


def test_scalars_that_are_not_learned_and_names_of_positions():
    decay = learned_decays(ours(learn_alpha=False, learn_beta=False, gamma=0.75))[0]
    assert decay.alpha is None and decay.prefix_beta is None
    np.testing.assert_allclose(decay.gamma, 0.75, rtol=1e-6)
    assert position_names(resolve_decay("manhattan"), 1) == ["manhattan"]
    assert position_names(resolve_decay("random_order"), 2) == ["random_order", "random_order_t"]


def test_a_decay_of_a_stock_model_and_of_an_adapter():
    prior = {"support": "fibottention", "decay": {"name": "violin", "curves": CURVES}}
    model = scattered(sp.apply_prior(STOCK["vit"].build(), prior))
    assert_gammas(learned_decays(model), betas(model))
    for decay in learned_decays(model):
        np.testing.assert_allclose(masks_of(decay)[2], mask_by_formula(decay.beta.numpy(), 2, (8, 8)), rtol=1e-9)
    config = sp.ViolinAdapterConfig(decay={"name": "violin", "curves": CURVES}, decay_layers=[0, 2])
    adapted = scattered(peft.get_peft_model(STOCK["vit"].build(), config))
    decays = learned_decays(adapted)
    assert [decay.layer for decay in decays] == [0, 2]
    gates = [value.double().numpy() for name, value in adapted.state_dict().items() if name.endswith(".gate")]
    for decay, beta, gate in zip(decays, betas(adapted), gates, strict=True):  # `init: growing` is an adapter's
        gamma = 1 / (1 + np.exp(-beta.astype(np.float64)))
        np.testing.assert_allclose(decay.gamma, gamma ** np.abs(gate), rtol=1e-6)
    with adapted.disable_adapter(), pytest.raises(ValueError, match="has no decay, its prior is 'dense'"):
        learned_decays(adapted)


def test_a_learned_order_has_its_own_positions():
    prior = {"decay": {"name": "learned_order"}}
    model = scattered(
        sp.SparsePriorViTModel(sp.SparsePriorViTConfig(image_size=(12, 20), patch_size=4, prior=prior, **SMALL))
    )
    decays = learned_decays(model)
    for layer, decay in zip(model.layers, decays, strict=True):
        order = layer.attention.decay_bias.order.detach().double().flatten()
        assert decay.curves == ["learned_order"]
        expected = decay.gamma[0, 1].item() ** (order[:, None] - order[None, :]).abs().numpy()
        np.testing.assert_allclose(masks_of(decay)[1], expected, rtol=1e-9)
