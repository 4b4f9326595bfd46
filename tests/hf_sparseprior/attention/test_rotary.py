"""Rotary positions: against transformers' own, against complex numbers, and in every path of a model."""

import copy

import pytest
import torch
from transformers import DINOv3ViTConfig
from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTRopePositionEmbedding, apply_rotary_pos_emb

import hf_sparseprior as sp
from hf_sparseprior.attention.rotary import RotaryPositions, rotate
from hf_sparseprior.compression.units import Units

SMALL = {
    **{"image_size": (24, 32), "patch_size": 4, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3},
    **{"intermediate_size": 64, "position_embedding": "rotary", "num_register_tokens": 2},
}
PRIORS = ["dense", "fibottention", "violin", "fibottention+violin", "topk", "bigbird"]


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def small(**fields: object) -> sp.SparsePriorViTModel:
    torch.manual_seed(0)
    return sp.SparsePriorViTModel(sp.SparsePriorViTConfig(**{**SMALL, "prior": "dense", **fields})).eval()


@pytest.mark.parametrize(("grid", "prefix", "base"), [((4, 4), 0, 100.0), ((3, 5), 5, 1e4), ((1, 7), 5, 100.0)])
def test_rotation_is_that_of_complex_numbers(grid: tuple[int, int], prefix: int, base: float) -> None:
    """Channels d and d + D / 2 are real and imaginary part, turned by exp(i angle); float64."""
    width = 16
    q = tokens(2, prefix + grid[0] * grid[1], 3, width, dtype=torch.float64)
    found = rotate(q, RotaryPositions(width, base)([grid], prefix, q)[0])
    expected = q.clone()
    for row in range(grid[0]):
        for column in range(grid[1]):
            y, x = 2 * (row + 0.5) / grid[0] - 1, 2 * (column + 0.5) / grid[1] - 1
            periods = [base ** (4 * n / width) for n in range(width // 4)]
            angles = torch.tensor([2 * torch.pi * place / period for place in (y, x) for period in periods])
            token = q[:, prefix + row * grid[1] + column]
            turned = torch.complex(token[..., : width // 2], token[..., width // 2 :]) * torch.exp(1j * angles)
            expected[:, prefix + row * grid[1] + column] = torch.cat([turned.real, turned.imag], -1)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)  # angles are float32


ALL_CHANGES = {"shift": 0.1, "jitter": 1.5, "rescale": 2.0}


@pytest.mark.parametrize(
    ("change", "training"),
    [
        *((change, True) for change in ({}, {"shift": 0.2}, {"jitter": 1.3}, {"rescale": 2.0}, ALL_CHANGES)),
        (ALL_CHANGES, False),
    ],
)
def test_as_in_transformers(change: dict, training: bool) -> None:
    """Also the changes of training, drawn from the same random numbers."""
    names = {f"pos_embed_{name}": change.get(name) for name in ("shift", "jitter", "rescale")}
    config = DINOv3ViTConfig(hidden_size=48, num_attention_heads=3, image_size=32, patch_size=8, **names)
    theirs = DINOv3ViTRopePositionEmbedding(config).train(training)
    ours = RotaryPositions(16, config.rope_theta, **change).train(training)
    q, k = tokens(2, 21, 3, 16), tokens(2, 21, 3, 16)
    torch.manual_seed(5)
    expected = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *theirs(torch.zeros(1, 3, 32, 32)))
    torch.manual_seed(5)
    [rotation] = ours([(4, 4)], 5, q)
    for own, other in zip((q, k), expected, strict=True):
        found = rotate(own, rotation).transpose(1, 2)
        torch.testing.assert_close(found, other, atol=1e-5, rtol=1e-5)  # angles of float32
    changed = bool(change) and training
    still = RotaryPositions(16)([(4, 4)], 5, q)[0]
    assert torch.equal(rotation.cosines, still.cosines) != changed


@pytest.mark.parametrize("prior", [*PRIORS, {"support": {"name": "fibottention", "order": "hilbert"}}], ids=str)
def test_every_backend_turns_alike(prior: str | dict, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = small(prior=prior), tokens(2, 3, 24, 32)
    with torch.no_grad():
        monkeypatch.setenv("SPARSEPRIOR_BACKEND", "reference")
        expected = model(images).last_hidden_state
        monkeypatch.delenv("SPARSEPRIOR_BACKEND")
        torch.testing.assert_close(model(images).last_hidden_state, expected, atol=1e-5, rtol=1e-5)
        plain = copy.deepcopy(model)
        plain.rotary_positions = None
        assert (plain(images).last_hidden_state - expected).abs().max() > 1e-3


def test_an_order_of_the_patches_changes_nothing_of_dense_attention() -> None:
    """Fibottention along Hilbert's curve with a support of all pairs would be dense: positions follow the patches."""
    images = tokens(2, 3, 32, 32)
    model = small(image_size=32, prior={"support": {"name": "window", "w": 64, "order": "hilbert"}})
    plain = small(image_size=32)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = plain(images).last_hidden_state
        torch.testing.assert_close(model(images).last_hidden_state, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prior", ["dense", "fibottention", "violin"])
def test_images_of_several_sizes_are_as_each_alone(prior: str) -> None:
    model = small(prior=prior)
    images = [tokens(3, 24, 32), tokens(3, 16, 40), tokens(3, 24, 32) + 1, tokens(3, 8, 8)]
    with torch.no_grad():
        packed = model(images)
        for number, image in enumerate(images):
            alone = model(image[None]).last_hidden_state[0]
            found = packed.last_hidden_state[number, : len(alone)]
            torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-5)


def test_training_with_checkpointing_gives_the_same_gradients() -> None:
    model = small(prior="fibottention", rotary_rescale=2.0, rotary_shift=0.1).train()
    images, gradients = tokens(2, 3, 24, 32), []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        torch.manual_seed(3)
        model(images).last_hidden_state.square().sum().backward()
        gradients.append(
            {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    for name, value in gradients[0].items():
        torch.testing.assert_close(value, gradients[1][name], atol=1e-5, rtol=1e-4)


def test_saved_and_loaded(tmp_path) -> None:
    model = small(prior="fibottention", key_bias=False, rotary_base=50.0)
    model.save_pretrained(tmp_path)
    loaded = sp.SparsePriorViTModel.from_pretrained(tmp_path)
    assert loaded.layers[0].attention.k_proj.bias is None
    assert loaded.layers[0].attention.q_proj.bias is not None
    with torch.no_grad():
        assert torch.equal(loaded(tokens(1, 3, 24, 32))[0], model(tokens(1, 3, 24, 32))[0])
    assert loaded.rotary_positions.base == 50.0
    assert not any("rotary" in name or "position" in name for name in model.state_dict())


def test_compiled() -> None:
    model, images = small(prior="fibottention"), tokens(2, 3, 24, 32)
    with torch.no_grad():
        expected = model(images).last_hidden_state
        found = torch.compile(model, fullgraph=True, backend="eager")(images).last_hidden_state
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_half_precision_is_near_float32() -> None:
    model, images = small(), tokens(2, 3, 24, 32)
    with torch.no_grad():
        expected = model(images).last_hidden_state
        found = model.to(torch.bfloat16)(images).last_hidden_state
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).abs().max() < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("prior", [*PRIORS, "sparsifiner"])
def test_autocast_is_near_float32_and_trains(prior: str, dtype: torch.dtype) -> None:
    """The rotation has the dtype of the tokens, float32; queries and keys must have that of the values."""
    model, images = small(prior=prior).train(), tokens(2, 3, 24, 32)
    expected = model(images).last_hidden_state
    with torch.autocast("cpu", dtype):
        found = model(images).last_hidden_state
    assert (found.float() - expected).abs().mean() < 0.05 < expected.abs().mean()
    found.float().square().mean().backward()
    grad = model.layers[0].attention.q_proj.weight.grad
    assert grad.isfinite().all() and grad.abs().max() > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 18}, "is 6; position_embedding='rotary' needs a multiple of 4"),
        ({"rotary_base": 0}, "rotary_base=0 must be above 0"),
        ({"rotary_jitter": 0.5}, "rotary_jitter=0.5 must be a number"),
        ({"rotary_shift": -1}, "rotary_shift=-1 must be a number"),
        ({"position_embedding": "none", "rotary_rescale": 2.0}, "rotary_rescale=2.0 needs position_embedding='rotary'"),
        ({"prior": "linformer"}, "mixer 'linformer' has no pairs"),
        ({"prior": "evit"}, "drops tokens"),
    ],
)
def test_what_has_no_meaning_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sp.SparsePriorViTConfig(**{**SMALL, **fields})


def test_other_families_and_compression_refuse_it() -> None:
    with pytest.raises(ValueError, match="position_embedding='rotary' must be learned or none"):
        sp.SparsePriorTimesformerConfig(**SMALL)
    with pytest.raises(ValueError, match="key_bias=False must be True"):
        sp.SparsePriorTimesformerConfig(**{**SMALL, "position_embedding": "learned", "key_bias": False})
    with pytest.raises(ValueError, match="position_embedding='rotary' turns pairs"):
        Units(small())
