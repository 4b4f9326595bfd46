"""A support, a decay and a family registered here, each in one place, are found everywhere."""

import json
import math
from typing import get_args

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification, ViTConfig, ViTModel
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput

import hf_sparseprior as sp
from hf_sparseprior.__main__ import main
from hf_sparseprior.analysis.flops import attention_parts, model_flops
from hf_sparseprior.attention import SparsePriorAttention
from hf_sparseprior.checks import check_integer
from hf_sparseprior.configuration_sparseprior_vit import SparsePriorViTConfig
from hf_sparseprior.convert import convert_checkpoint
from hf_sparseprior.curves import curve_rank
from hf_sparseprior.decay import DECAYS, PLACEMENTS, Decay, register_decay
from hf_sparseprior.export import export_folder
from hf_sparseprior.families import FAMILIES, Family, family_of, register_family, unregister_family
from hf_sparseprior.masks import attended_pairs
from hf_sparseprior.modeling_sparseprior_vit import SparsePriorViTEmbeddings, SparsePriorViTPreTrainedModel
from hf_sparseprior.prior import Stage, prior_names, resolve_prior, resolve_stages
from hf_sparseprior.resolved import Placement
from hf_sparseprior.supports import SUPPORTS, Pattern, register_support, support_notes, support_pattern

HEADS, WIDTH, GRID = 2, 8, (3, 4)


# ---- what is registered ---------------------------------------------------------------------------------------------


def near(a, b, grid, radius):
    """Whether two patches lie within a square of each other."""
    return abs(a // grid[1] - b // grid[1]) <= radius and abs(a % grid[1] - b % grid[1]) <= radius


def neighbours(num_heads, grid, *, radius: int = 1):
    """Each patch sees the square of 2 radius + 1 patches around it."""
    check_integer("radius", radius, 0)
    patches = range(grid[0] * grid[1])
    pairs = np.array([(a, b) for a in patches for b in patches if near(a, b, grid, radius)], dtype=np.int64)
    return Pattern([[] for _ in range(num_heads)], lambda layer: [pairs] * num_heads)


def neighbours_check(settings):
    return {"radius": check_integer("radius", settings["radius"], 0)}


def neighbours_notes(support, pattern, grid):
    return [f"radius={support['radius']} reaches beyond the grid"] if support["radius"] >= max(grid) else []


class Ranks(Decay):
    """Distance of two patches = difference of their ranks along the Hilbert curve, a multiple of `step`."""

    SETTINGS = {"step": 1, **Decay.SETTINGS}
    TENSORS = (*Decay.TENSORS, "origin")

    @classmethod
    def check_settings(cls, settings, grid):
        return {**super().check_settings(settings, grid), "step": check_integer("step", settings["step"], 1)}

    @classmethod
    def positions(cls, settings, grid):
        return settings["step"] * curve_rank("hilbert", grid).reshape(1, 1, -1)

    @classmethod
    def tensor_shapes(cls, settings, num_heads):
        return {**super().tensor_shapes(settings, num_heads), "origin": (2, "any")}


class TwoStageConfig(SparsePriorViTConfig):
    """The grid's sides halve after the first stage."""

    model_type = "toy_two_stage"

    @property
    def stages(self):
        return [Stage(self.num_attention_heads, self.grid), Stage(self.num_attention_heads, self.second_grid)]

    @property
    def second_grid(self):
        return self.grid[0] // 2, self.grid[1] // 2


class TwoStageModel(SparsePriorViTPreTrainedModel):
    """Two attention layers with the mean of 2x2 patches between them."""

    config_class = TwoStageConfig

    def __init__(self, config):
        super().__init__(config)
        self.embeddings = SparsePriorViTEmbeddings(config)
        self.layers = nn.ModuleList(
            SparsePriorAttention(config.hidden_size, config.num_attention_heads, prior, layer_idx=index)
            for index, prior in enumerate(config.stage_priors)
        )
        self.post_init()

    def forward(self, pixel_values):
        tokens, grid = self.embeddings(pixel_values)
        tokens = tokens + self.layers[0](tokens, grid)[0]
        tokens = merge(tokens, grid)
        tokens = tokens + self.layers[1](tokens, self.config.second_grid)[0]
        return BaseModelOutputWithPooling(last_hidden_state=tokens, pooler_output=tokens.mean(1))


class TwoStageForImageClassification(SparsePriorViTPreTrainedModel):
    config_class = TwoStageConfig

    def __init__(self, config):
        super().__init__(config)
        self.vit = TwoStageModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, pixel_values):
        return ImageClassifierOutput(logits=self.classifier(self.vit(pixel_values).pooler_output))


def merge(tokens, grid):
    """(B, N, C) to (B, N / 4, C)."""
    maps = tokens.transpose(1, 2).unflatten(2, grid)
    return nn.functional.avg_pool2d(maps, 2).flatten(2).transpose(1, 2)


def count_two_stages(config, image_size, prior, convention, num_prefix_tokens):
    """Q K^T, softmax and (softmax) V of both layers, per part."""
    assert image_size is None and prior is None and num_prefix_tokens is None
    width, counts = config.hidden_size // config.num_attention_heads, []
    for own, stage in zip(config.stage_priors, config.stages, strict=True):
        num_tokens = math.prod(stage.grid)
        pattern = support_pattern(own["support"], num_heads=stage.num_heads, num_tokens=num_tokens, grid=stage.grid)
        counts.append(attended_pairs(pattern.offsets, num_tokens, 0, pattern.layer_pairs(0)))
    return [attention_parts(pairs, width, convention) for pairs in counts]


@pytest.fixture
def toy_support():
    register_support("toy_neighbours", check=neighbours_check, notes=neighbours_notes)(neighbours)
    yield "toy_neighbours"
    del SUPPORTS["toy_neighbours"]


@pytest.fixture
def toy_decay():
    register_decay("toy_ranks")(Ranks)
    yield "toy_ranks"
    del DECAYS["toy_ranks"]


@pytest.fixture
def toy_family():
    models = {"AutoModel": TwoStageModel, "AutoModelForImageClassification": TwoStageForImageClassification}
    yield register_family(Family(TwoStageConfig, models, "TwoStage", "two stages", flops=count_two_stages))
    unregister_family("toy_two_stage")


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


@pytest.mark.parametrize("backend", ["reference", "gather", "auto"])
@pytest.mark.parametrize("prefix", [0, 1])
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
    assert support_notes(resolved, HEADS, GRID, 1) == ["radius=9 reaches beyond the grid"]
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


def test_every_placement_has_a_formula():
    assert get_args(Placement) == tuple(PLACEMENTS)


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
    assert model_flops(model.config) == [attention_parts(HEADS * pairs, WIDTH // HEADS) for pairs in counted]


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


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_can_be_made_by_its_auto_classes(name):
    family = FAMILIES[name]
    made = config("fibottention+violin", family.config_class)
    for auto_class, cls in family.models.items():
        model = getattr(__import__("transformers"), auto_class).from_config(made)
        assert type(model) is cls and cls.auto_map == family.auto_map
    assert type(AutoConfig.for_model(name)) is family.config_class
