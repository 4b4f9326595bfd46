"""A support, a decay and a family that are registered in one place (tests/hf_sparseprior/toys.py) are found everywhere.

tests/tasks/test_families.py looks for the family in the tasks.
"""

import json
import math
from typing import get_args

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification, ViTConfig, ViTModel

import hf_sparseprior as sp
from hf_sparseprior.__main__ import main
from hf_sparseprior.adapters import lora_config
from hf_sparseprior.analysis.decays import learned_decay_masks
from hf_sparseprior.analysis.flops import attention_parts, model_flops
from hf_sparseprior.analysis.layers import find_attention
from hf_sparseprior.base import families
from hf_sparseprior.base.families import (
    FAMILIES,
    Family,
    family_of,
    preset_family,
    presets,
    register_family,
    unregister_family,
)
from hf_sparseprior.base.resolved import Placement
from hf_sparseprior.cli.export import export_folder
from hf_sparseprior.convert import convert_checkpoint
from hf_sparseprior.models.configuration_sparseprior_vit import SparsePriorViTConfig
from hf_sparseprior.patterns.curves import curve_rank
from hf_sparseprior.patterns.decay import PLACEMENTS
from hf_sparseprior.patterns.supports import LayerKey, support_notes
from hf_sparseprior.priors.layer_priors import resolve_stages
from hf_sparseprior.priors.prior import prior_names, resolve_prior
from hf_sparseprior.training.distillation import Teacher
from hf_sparseprior.training.token_labels import patch_probabilities
from tests.hf_sparseprior.toys import (
    GRID,
    HEADS,
    WIDTH,
    TwoStageConfig,
    TwoStageForImageClassification,
    TwoStageModel,
    merge,
    near,
    registered_decay,
    registered_family,
    registered_support,
)


@pytest.fixture
def toy_support():
    with registered_support() as name:
        yield name


@pytest.fixture
def toy_decay():
    with registered_decay() as name:
        yield name


@pytest.fixture
def toy_family():
    with registered_family() as family:
        yield family


# ---- an oracle ------------------------------------------------------------------------------------------------------


def attend(q, k, v, keeps, weights):
    """Attention of float64 (H, T, D), query by query; keeps(a, b), weights(head, a, b) of tokens a and b."""
    out = torch.zeros_like(v)
    for head in range(q.shape[0]):
        for a in range(q.shape[1]):
            keys = [b for b in range(q.shape[1]) if keeps(a, b)]
            logits = [float(q[head, a] @ k[head, b]) / math.sqrt(q.shape[2]) * weights(head, a, b) for b in keys]
            largest = max(logits)
            shares = [math.exp(logit - largest) for logit in logits]
            for share, b in zip(shares, keys, strict=True):
                out[head, a] += share / sum(shares) * v[head, b]
    return out


def layer_oracle(layer, tokens, keeps, weights=lambda head, a, b: 1.0):
    """A `SparsePriorAttention` on float64 tokens (B, T, C)."""
    rows = []
    for own in tokens:
        q, k, v = (
            projection(own).view(len(own), layer.num_heads, -1).transpose(0, 1)
            for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        rows.append(layer.o_proj(attend(q, k, v, keeps, weights).transpose(0, 1).flatten(1)))
    return torch.stack(rows)


def config(prior, config_class=SparsePriorViTConfig, **settings):
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 12}
    image = {"image_size": (GRID[0] * 4, GRID[1] * 4), "patch_size": 4, "num_labels": 3}
    return config_class(prior=prior, **{**sizes, **image, **settings})


def scatter(model):
    """Weights far from their small initial values, so that the prior matters."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter) - 0.5)
    return model.eval()


def images(side=(12, 16)):
    return torch.randn(2, 3, *side, generator=torch.Generator().manual_seed(7))


# ---- the support ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "prefix"), [("reference", 0), ("gather", 1), ("auto", 1)])
def test_a_support_in_two_dimensions_is_what_attention_computes(backend, prefix, toy_support):
    total = prefix + math.prod(GRID)
    q, k, v = torch.randn(3, 1, HEADS, total, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    options = {"num_prefix_tokens": prefix, "grid": GRID, "backend": backend}
    out = sp.ops.attention(q, k, v, support={"name": toy_support, "radius": 1}, **options)

    def keeps(a, b):
        return min(a, b) < prefix or near(a - prefix, b - prefix, GRID, 1)

    expected = attend(q[0], k[0], v[0], keeps, lambda head, a, b: 1.0)
    torch.testing.assert_close(out[0], expected, atol=1e-12, rtol=0)
    mask = sp.supports.build_mask(
        toy_support, num_heads=HEADS, num_tokens=12, num_prefix_tokens=prefix, grid=GRID, radius=1
    )
    assert (mask == [[[keeps(a, b) for b in range(total)] for a in range(total)]] * HEADS).all()


def test_the_grid_of_a_support_in_two_dimensions_has_to_be_known(toy_support):
    q = torch.zeros(1, HEADS, 12, 4)
    with pytest.raises(ValueError, match="grid=None with this support needs a square number of patch tokens, got 12"):
        sp.ops.attention(q, q, q, support=toy_support)
    with pytest.raises(ValueError, match="grid=None with support 'toy_neighbours' needs a square number"):
        sp.supports.head_offsets(toy_support, num_heads=2, num_tokens=12)
    with pytest.raises(ValueError, match=r"grid=\(2, 5\) must be \(height, width\) with 12 patch tokens"):
        sp.supports.build_mask(toy_support, num_heads=2, num_tokens=12, grid=(2, 5))


def test_a_support_is_found_everywhere(toy_support, tmp_path, capsys):
    assert toy_support in prior_names()
    model = scatter(sp.SparsePriorViTForImageClassification(config(f"{toy_support}+violin")))
    assert model.config.prior["support"] == {
        **{"name": toy_support, "radius": 1},
        **{"shuffle_seed": 0, "mask_fill": "neg_inf"},
    }
    model.save_pretrained(tmp_path / "model")
    again = AutoModelForImageClassification.from_pretrained(tmp_path / "model")
    assert torch.equal(again(images()).logits, model(images()).logits)
    assert not torch.equal(again(images()).logits, scatter(type(model)(config("violin")))(images()).logits)
    with pytest.raises(ValueError, match=r"prior: radius=-1 must be an integer of 0 or more \(3x4 grid\)"):
        config({"support": {"name": toy_support, "radius": -1}})
    with pytest.raises(ValueError, match="has no setting 'radios'; did you mean 'radius'"):
        config({"support": {"name": toy_support, "radios": 1}})

    pairs = HEADS * (sum(near(a, b, GRID, 1) for a in range(12) for b in range(12)) + 2 * 12 + 1)
    assert model_flops(config(toy_support)).attended_pairs == [pairs] * 2
    assert config(toy_support).pruning_ratio == pytest.approx(100 * (1 - pairs / HEADS / 13**2))

    resolved = resolve_prior({"support": {"name": toy_support, "radius": 9}}, HEADS, GRID)["support"]
    assert support_notes(resolved, LayerKey(HEADS, GRID), 1) == ["radius=9 reaches beyond the grid"]
    assert main(["explain", toy_support, "--heads", "2", "--grid", "3x4", "--out", str(tmp_path)]) == 0
    assert f"{toy_support} on a 3x4 grid" in capsys.readouterr().out
    assert (tmp_path / f"support_{toy_support}_3x4.png").is_file()

    with pytest.raises(ValueError, match=f"prior '{toy_support}.*' has no place in vit"):
        convert_checkpoint(tmp_path / "model", tmp_path / "vit", to="vit")
    convert_checkpoint(tmp_path / "model", tmp_path / "other", prior=toy_support)
    assert AutoConfig.from_pretrained(tmp_path / "other").prior_name == toy_support


def test_a_support_is_given_to_a_stock_model(toy_support):
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS, "intermediate_size": 12}
    model = ViTModel(ViTConfig(image_size=(12, 16), patch_size=4, **sizes), add_pooling_layer=False).eval().double()
    pixels, seen = images().double(), {}
    sp.apply_prior(model, toy_support)
    attention = next(module for module in model.modules() if type(module).__name__ == "ViTAttention")
    attention.register_forward_hook(lambda module, given, out: seen.update(given=given, out=out))
    with torch.no_grad():
        model(pixels)

    def keeps(a, b):
        return min(a, b) < 1 or near(a - 1, b - 1, GRID, 1)

    names = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert names <= {name for name, _ in attention.named_children()}
    attention.num_heads = HEADS
    expected = layer_oracle(attention, seen["given"][0], keeps)
    torch.testing.assert_close(seen["out"][0], expected, atol=1e-12, rtol=0)


# ---- the decay ------------------------------------------------------------------------------------------------------


def test_a_decay_is_what_attention_computes(toy_decay):
    model = scatter(sp.SparsePriorViTModel(config({"decay": {"name": toy_decay, "step": 2}})).double())
    layer, tokens = model.layers[0].attention, torch.randn(2, 13, WIDTH, dtype=torch.float64)
    rank, decay = curve_rank("hilbert", GRID).ravel(), layer.decay_bias
    alpha, gamma = decay.alpha.tolist(), torch.sigmoid(decay.beta)[0].tolist()

    def weights(head, a, b):
        distance = 2 * abs(rank[a - 1] - rank[b - 1]) if min(a, b) else 0
        return alpha[head] * gamma[head] ** distance

    with torch.no_grad():
        expected = layer_oracle(layer, tokens, lambda a, b: True, weights)
        for backend in ("reference", "auto"):
            out = layer(tokens, GRID, 1, backend=backend)[0]
            torch.testing.assert_close(out, expected, atol=1e-9, rtol=0)


def test_a_decay_is_found_everywhere(toy_decay, tmp_path, capsys):
    assert toy_decay in prior_names()
    model = scatter(sp.SparsePriorViTModel(config({"decay": {"name": toy_decay, "step": np.int64(3)}})))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["prior"]["decay"]["step"] == 3
    again = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(again(images()).last_hidden_state, model(images()).last_hidden_state)
    with pytest.raises(ValueError, match="prior: step=0 must be an integer of 1 or more"):
        config({"decay": {"name": toy_decay, "step": 0}})
    assert main(["explain", toy_decay, "--grid", "4x4", "--no-picture", "--set", "step=2"]) == 0
    assert "toy_ranks on a 4x4 grid" in capsys.readouterr().out
    assert model_flops(config(toy_decay)).decay["build"] == 2 * 3 * HEADS * 12**2


def test_a_decay_names_its_tensors(toy_decay):
    q = torch.zeros(1, HEADS, 12, 4)
    beta = torch.zeros(1, HEADS)

    def attend(name=toy_decay, **tensors):
        return sp.ops.attention(q, q, q, grid=GRID, decay={"name": name, "beta": beta, **tensors})

    assert attend(origin=torch.zeros(2, 5)).shape == q.shape
    with pytest.raises(ValueError, match=r"decay origin=\(3, 5\) must be a tensor of shape \(2, any\)"):
        attend(origin=torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"decay 'violin' has no setting 'origin'"):
        attend("violin", origin=torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"decay 'manhattan' has no setting 'order'"):
        attend("manhattan", order=torch.zeros(1, *GRID))
    assert get_args(Placement) == tuple(PLACEMENTS)  # each has a formula


# ---- the family -----------------------------------------------------------------------------------------------------

EVEN = {"image_size": (16, 16), "use_class_token": False, "pooling": "mean"}


def two_stages(prior, cls=TwoStageForImageClassification):
    return scatter(cls(config(prior, TwoStageConfig, **EVEN)))


def test_a_prior_resolves_for_each_stage(toy_family):
    made = config("learned_order", TwoStageConfig, **EVEN)
    assert [prior["decay"]["grid"] for prior in made.prior] == [[4, 4], [2, 2]]
    mixed = config(["violin", {"support": {"name": "window", "w": 1}}], TwoStageConfig, **EVEN)
    assert mixed.prior_name == "violin, window"
    assert TwoStageConfig.from_dict(mixed.to_dict()).prior == mixed.prior == resolve_stages(mixed.prior, mixed.stages)
    dense, banded = HEADS * 16**2, HEADS * (4 + 2 * 3)
    assert mixed.pruning_ratio == pytest.approx(100 * (1 - (dense + banded) / (dense + HEADS * 4**2)))
    with pytest.raises(ValueError, match=r"w=-1 .*\(2x2 grid\) \(stage 2 of 2\)"):
        config(["dense", {"support": {"name": "window", "w": -1}}], TwoStageConfig, **EVEN)
    with pytest.raises(ValueError, match="a list of 1 must have one for each of 2 stages"):
        config(["dense"], TwoStageConfig, **EVEN)


def test_a_family_computes_each_stage_with_its_prior(toy_family, toy_support):
    model = two_stages([toy_support, {"support": {"name": "window", "w": 1}}], TwoStageModel).double()
    with torch.no_grad():
        tokens, grid = model.embeddings(images((16, 16)).double())
        tokens = tokens + layer_oracle(model.layers[0], tokens, lambda a, b: near(a, b, grid, 1))
        tokens = merge(tokens, grid)
        tokens = tokens + layer_oracle(model.layers[1], tokens, lambda a, b: abs(a - b) <= 1)
        out = model(images((16, 16)).double()).last_hidden_state
    torch.testing.assert_close(out, tokens, atol=1e-12, rtol=0)


def test_a_family_is_found_everywhere(toy_family, toy_support, tmp_path):
    model = two_stages(f"{toy_support}+violin")
    model.save_pretrained(tmp_path / "model")
    saved = json.loads((tmp_path / "model" / "config.json").read_text())
    assert saved["auto_map"] == toy_family.auto_map and len(saved["prior"]) == 2
    assert "# TwoStage, prior: toy_neighbours+violin" in (tmp_path / "model" / "README.md").read_text()
    assert type(AutoModel.from_pretrained(tmp_path / "model")) is TwoStageModel
    again = AutoModelForImageClassification.from_pretrained(tmp_path / "model")
    assert type(again) is TwoStageForImageClassification
    logits = model(images((16, 16))).logits
    assert torch.equal(again(images((16, 16))).logits, logits)

    export_folder(tmp_path / "model", tmp_path / "exported")
    exported = AutoModelForImageClassification.from_pretrained(tmp_path / "exported")
    assert torch.equal(exported(images((16, 16))).logits, logits)
    with pytest.raises(ValueError, match="is a toy_two_stage, which vit cannot express"):
        convert_checkpoint(tmp_path / "model", tmp_path / "vit", to="vit", prior="dense")
    convert_checkpoint(tmp_path / "model", tmp_path / "dense", prior="dense")
    dense = AutoModelForImageClassification.from_pretrained(tmp_path / "dense")
    assert type(dense) is TwoStageForImageClassification and dense.config.prior_name == "dense"
    assert torch.equal(dense.vit.layers[1].q_proj.weight, model.vit.layers[1].q_proj.weight)

    counted = [sum(near(a, b, (4, 4), 1) for a in range(16) for b in range(16)), 4 * 4]
    assert model_flops(model.config).layers == [attention_parts(HEADS * pairs, WIDTH // HEADS) for pairs in counted]


def test_a_family_is_adapted_by_lora(toy_family):
    import peft

    model = two_stages("violin")
    config = lora_config(model, rank=1, targets="attention")
    assert config.target_modules == {f"vit.layers.{n}.{name}_proj" for n in range(2) for name in "qkvo"}
    assert set(config.modules_to_save) == {"classifier", "decay_bias"}
    logits = model(images((16, 16))).logits
    adapted = peft.get_peft_model(model, config)
    assert torch.equal(adapted(images((16, 16))).logits, logits)  # B of B A starts as 0
    adapted(images((16, 16)), labels=torch.tensor([0, 2])).loss.backward()
    trained = [name for name, value in adapted.named_parameters() if value.requires_grad]
    assert len(trained) == 2 * (4 * 2 + 2) + 2  # A and B of four, alpha and beta; weight and bias of the classifier
    assert all(value.grad.abs().sum() > 0 for name, value in adapted.named_parameters() if "lora_B" in name)


def test_a_family_brings_its_presets(toy_family):
    assert presets()["toy_tiny"] is preset_family("toy_tiny") is toy_family
    assert presets()["deit_tiny"] is FAMILIES["sparseprior_vit"]
    assert toy_family.make_config("toy_tiny", prior="violin").grid == (4, 4)
    with pytest.raises(ValueError, match=r"preset='toy_tini' must be one of vit_tiny, .*; did you mean 'toy_tiny'\?$"):
        preset_family("toy_tini")


def test_a_listener_hears_of_families_that_are_there_and_that_come(monkeypatch):
    heard = []
    monkeypatch.setattr(families, "_LISTENERS", [])
    families.for_every_family(heard.append)
    assert heard == list(FAMILIES.values())
    added = register_family(Family(TwoStageConfig, {"AutoModel": TwoStageModel}, "Other", "other"))
    unregister_family("toy_two_stage")
    assert heard[-1] is added


def test_each_layer_has_the_decay_of_its_stage(toy_family):
    model = two_stages("violin")
    first, second = learned_decay_masks(model)
    assert first.shape == (HEADS, 16, 16) and second.shape == (HEADS, 4, 4)
    ranks = [curve_rank(name, (2, 2)).ravel() for name in model.config.prior[1]["decay"]["curves"]]
    gamma = torch.sigmoid(model.vit.layers[1].decay_bias.beta.double()).tolist()
    expected = sum(gamma[c][0] ** abs(int(rank[0]) - int(rank[3])) for c, rank in enumerate(ranks)) / len(ranks)
    assert second[0, 0, 3].item() == pytest.approx(expected, abs=1e-6)
    found = find_attention(model)
    assert [layer.grid for layer in found.layers] == [(4, 4), (2, 2)]
    with pytest.raises(ValueError, match="cannot be analysed in this way: its layers have grids of their own"):
        assert found.grid


def test_a_teacher_of_any_family(toy_family, tmp_path):
    model = two_stages("violin")
    model.save_pretrained(tmp_path / "teacher")
    teacher = Teacher.from_pretrained(tmp_path / "teacher", prior="dense").model
    assert type(teacher) is TwoStageForImageClassification and teacher.config.prior_name == "dense"
    shown = patch_probabilities(model, images((16, 16)))
    tokens = model.vit(images((16, 16))).last_hidden_state
    assert torch.equal(shown, model.classifier(tokens).softmax(-1)) and shown.shape == (2, 4, 3)
    ViTModel(ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(tmp_path / "vit")
    with pytest.raises(ValueError, match="holds a 'vit' model; make it ours first: python -m hf_sparseprior convert"):
        Teacher.from_pretrained(tmp_path / "vit")


def test_a_family_that_is_forgotten_is_gone():
    assert family_of(config("dense", TwoStageConfig, **EVEN)) is None
    with pytest.raises(ValueError, match="the FLOPs of a TwoStageConfig are not counted"):
        model_flops(config("dense", TwoStageConfig, **EVEN))
    with pytest.raises(ValueError, match="toy_two_stage"):
        AutoConfig.for_model("toy_two_stage")


def test_a_name_is_registered_once(toy_family):
    register_family(toy_family)  # as when transformers runs a file of a saved model again
    with pytest.raises(ValueError, match="family 'toy_two_stage' is registered already"):
        register_family(Family(TwoStageConfig, {"AutoModel": TwoStageModel}, "Other", "other"))


def test_every_family_is_known_to_the_auto_classes():
    """Each of them is saved and loaded by them in tests/hf_sparseprior/models/test_every_family.py."""
    for name, family in FAMILIES.items():
        assert all(cls.auto_map == family.auto_map for cls in family.models.values()), name
        assert type(AutoConfig.for_model(name)) is family.config_class
