"""FLOPs of attention and of whole models, in closed form, for one image.

Counted: stem and patch projection, linear layers, Q K^T and (softmax) V over the attended pairs, and softmax where the
convention says so. Never counted: biases, norms, activations, residuals, the interpolation of positions. A support
costs 2 nnz d_h multiply-adds a layer, nnz the attended pairs of all heads. `mask_fill="zero"` adds sums of V, no
multiply-add. What a predictor or mixer computes beside the pairs is "chooser". Where tokens are pruned, the linear
layers that decide it, or the class token's logits once more, are "pruning".

What the papers' numbers count is in `paper_numbers`.

Symbols: N patch tokens, P prefix tokens, T = P + N, L layers, h heads, d width, d_h width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from hf_sparseprior.checks import check_integer
from hf_sparseprior.configuration_sparseprior_vit import SparsePriorViTConfig, as_pair
from hf_sparseprior.decay import DECAYS
from hf_sparseprior.extras import PriorModule
from hf_sparseprior.prior import chooser_of, prior_name, pruning_of, resolve_prior
from hf_sparseprior.sparsifiner import Sparsifiner
from hf_sparseprior.supports import Pairs, attended_pairs, head_offsets, layer_pairs
from hf_sparseprior.token_pruning import EViT


@dataclass(frozen=True)
class Convention:
    """What is counted as how many FLOPs: a multiply-add, and softmax for each attended pair."""

    multiply_add: int
    softmax: int
    text: str


CONVENTIONS = {
    "multiply_adds": Convention(1, 0, "a multiply-add is 1 FLOP, softmax is not counted (as in the papers)"),
    "torch": Convention(2, 0, "a multiply-add is 2 FLOPs, softmax is not counted (as in torch.utils.flop_counter)"),
    "torch_and_softmax": Convention(
        2, 5, "a multiply-add is 2 FLOPs, softmax 5 a pair (maximum, subtraction, exponential, sum, division)"
    ),
}


def convention_of(name: str) -> Convention:
    """A convention by its name; ValueError for another name."""
    if name not in CONVENTIONS:
        raise ValueError(f"convention={name!r} must be one of {', '.join(CONVENTIONS)}")
    return CONVENTIONS[name]


# ---- attention ------------------------------------------------------------------------------------------------------


def attention_parts(pairs: int, head_dim: int, convention: str = "multiply_adds") -> dict[str, int]:
    """FLOPs of Q K^T, softmax and (softmax) V over attended pairs, without the projections."""
    rule = convention_of(convention)
    product = rule.multiply_add * pairs * head_dim
    return {"qk": product, "softmax": rule.softmax * pairs, "av": product}


def attention_flops(
    offsets: Sequence[Sequence[int]],
    num_tokens: int,
    num_prefix_tokens: int,
    head_dim: int,
    num_layers: int = 1,
    convention: str = "multiply_adds",
    pairs: Pairs = None,
) -> int:
    """FLOPs of Q K^T, softmax and (softmax) V over a support in `num_layers` layers.

    Args:
        offsets, num_tokens, num_prefix_tokens, pairs: as in `supports.attended_pairs`.
        head_dim: d_h.
        num_layers: L.
        convention: one of CONVENTIONS.
    """
    kept = attended_pairs(offsets, num_tokens, num_prefix_tokens, pairs)
    return num_layers * sum(attention_parts(kept, head_dim, convention).values())


def dense_attention_flops(
    num_heads: int, total: int, head_dim: int, num_layers: int = 1, convention: str = "multiply_adds"
) -> int:
    """The same of dense attention over `total` tokens, prefix included."""
    return num_layers * sum(attention_parts(num_heads * total**2, head_dim, convention).values())


# ---- models ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a model for one image.

    image_size, grid: (height, width) in pixels and in patches.
    tokens: in words, which tokens the layers count. num_prefix_tokens: P of the last layer.
    attended_pairs: of each layer, all heads. patch_embedding (stem and projection), classifier (of class and patch
    tokens): FLOPs.
    layers: of each layer the FLOPs of "projections" (Q, K, V, output), "qk", "softmax", "av", "mlp" and, where there
    is such a thing, "chooser", "pruning" and "positions" (of gated positional attention).
    decay: operations of VIOLIN's mask M in all layers, none of them a multiply-add of a matrix product and so not in
    `total`: "build" once a step for the whole batch, "apply" for each image.
    """

    image_size: tuple[int, int]
    grid: tuple[int, int]
    tokens: str
    num_prefix_tokens: int
    convention: str
    attended_pairs: list[int]
    patch_embedding: int
    layers: list[dict[str, int]]
    classifier: int
    decay: dict[str, int] | None = None

    def part(self, *names: str) -> int:
        """FLOPs of these parts in all layers."""
        return sum(layer.get(name, 0) for layer in self.layers for name in names)

    @property
    def num_tokens(self) -> int:
        """Patch tokens N."""
        return self.grid[0] * self.grid[1]

    @property
    def attention(self) -> int:
        """Q K^T, positions, softmax, (softmax) V and "chooser" of all layers, without the projections."""
        return self.part("qk", "positions", "softmax", "av", "chooser")

    @property
    def total(self) -> int:
        """Everything but `decay`."""
        return self.patch_embedding + sum(sum(layer.values()) for layer in self.layers) + self.classifier

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the sums included."""
        return {**asdict(self), "num_tokens": self.num_tokens, "attention": self.attention, "total": self.total}


def model_flops(
    config: SparsePriorViTConfig,
    image_size: int | Sequence[int] | None = None,
    prior: str | dict[str, Any] | None = None,
    convention: str = "multiply_adds",
    num_prefix_tokens: int | None = None,
) -> ModelFlops:
    """FLOPs of `SparsePriorViTForImageClassification` for one image.

    Args:
        config: of the model; without labels it is the base model.
        image_size: pixels, one number or (height, width); None: the config's.
        prior: None: the config's; "dense" for the same model without one.
        convention: one of CONVENTIONS.
        num_prefix_tokens: None: the config's; 0 counts the patch tokens only.

    Raises:
        ValueError: for an image that is no multiple of the patch, an unknown convention, a bad prior, or one whose
            FLOPs differ between images: a support or a decay on what token pruning leaves.
    """
    size, grid = _image_grid(config, config.image_size if image_size is None else image_size)
    prefix = config.num_prefix_tokens if num_prefix_tokens is None else num_prefix_tokens
    prefix = check_integer("num_prefix_tokens", prefix, 0)
    heads, width, num_layers = config.num_attention_heads, config.hidden_size, config.num_hidden_layers
    num_tokens = grid[0] * grid[1]
    resolved = resolve_prior(config.prior if prior is None else prior, heads, grid)
    offsets = head_offsets(resolved["support"], num_heads=heads, num_tokens=num_tokens)
    sizes = layer_tokens(resolved, num_layers, num_tokens)
    if (found := chooser_of(resolved)) is not None:
        found = found[1].settings_for(found[0], num_tokens + prefix), found[1]
    pairs = [
        _layer_pairs(resolved, found, offsets, attended, prefix, width // heads, layer)
        for layer, (attended, _) in enumerate(sizes)
    ]
    layers = [
        _layer_flops(attended + prefix, left + prefix, width, config.intermediate_size, own, heads, convention)
        for own, (attended, left) in zip(pairs, sizes, strict=True)
    ]
    if found is not None:
        settings, kind = found
        rule = convention_of(convention).multiply_add
        for layer, (attended, _) in zip(layers, sizes, strict=True):
            layer["chooser"] = rule * kind.products(settings, heads, width // heads, attended, prefix)
            layer["projections"] += rule * kind.projection_change(settings, heads, width, attended + prefix)
    _add_pruning(layers, resolved, num_tokens, prefix, width, convention)
    multiply_add = convention_of(convention).multiply_add
    inputs = config.pooled_size
    if config.use_distillation_token and config.use_distillation_classifier:
        inputs += width
    if config.token_classifier:
        inputs += sizes[-1][1] * width
    decay = resolved["decay"]
    return ModelFlops(
        image_size=size,
        grid=grid,
        tokens=_tokens_in_words(prefix, num_tokens, sizes),
        num_prefix_tokens=prefix,
        convention=convention,
        attended_pairs=pairs,
        patch_embedding=multiply_add * _embedding_products(config, num_tokens),
        layers=layers,
        classifier=multiply_add * inputs * config.num_labels,
        decay=None if decay is None else _decay_sums(resolved, offsets, grid, prefix, num_layers),
    )


def layer_tokens(prior: dict[str, Any], num_layers: int, num_tokens: int) -> list[tuple[int, int]]:
    """Tokens beside the prefix in the attention and in the MLP of each layer, of N patches; `prior` is resolved.

    Raises:
        ValueError: for what is not counted: other extras, and supports and decays on pruned tokens.
    """
    if (found := pruning_of(prior)) is None:
        if prior["extras"]:
            raise ValueError(f"prior {prior_name(prior)!r}: the FLOPs of extras are not counted")
        return [(num_tokens, num_tokens)] * num_layers
    settings, kind = found
    sizes = kind.layer_tokens(settings, num_layers, num_tokens)
    if sizes[-1][0] < num_tokens and (prior["support"]["name"] != "dense" or prior["decay"] is not None):
        raise ValueError(
            f"prior {prior_name(prior)!r}: which pairs are left among the kept patches differs between images and is "
            "not counted"
        )
    return sizes


def _add_pruning(
    layers: list[dict[str, int]], prior: dict[str, Any], num_tokens: int, prefix: int, width: int, convention: str
) -> None:
    """Put what deciding costs into the layers that prune."""
    if (found := pruning_of(prior)) is None:
        return
    settings, kind = found
    rule = convention_of(convention).multiply_add
    for layer, products in kind.pruning_products(settings, len(layers), width, num_tokens, prefix).items():
        layers[layer]["pruning"] = rule * products


def _tokens_in_words(prefix: int, num_tokens: int, sizes: Sequence[tuple[int, int]]) -> str:
    words = f"{prefix} prefix token{'' if prefix == 1 else 's'} and the patches" if prefix else "the patches only"
    counts = [num_tokens, *(attended for attended, _ in sizes)]
    if changes := [(layer, now) for layer, (was, now) in enumerate(pairwise(counts), 1) if was != now]:
        words += "; of these " + ", ".join(f"{now} from layer {layer} on" for layer, now in changes)
    return words


def _embedding_products(config: SparsePriorViTConfig, num_tokens: int) -> int:
    """Multiply-adds of stem and patch projection."""
    height, width = as_pair(config.patch_size)
    if config.stem == "patch":
        return num_tokens * config.num_channels * height * width * config.hidden_size
    channels, pixels = config.stem_channels, num_tokens * height * width // 4
    convolutions = pixels * channels * (config.num_channels * 7**2 + 2 * channels * 3**2)
    return convolutions + pixels * channels * config.hidden_size


def _layer_pairs(
    prior: dict[str, Any],
    found: tuple[dict[str, Any], type[PriorModule]] | None,
    offsets: Sequence[Sequence[int]],
    num_tokens: int,
    num_prefix_tokens: int,
    head_dim: int,
    layer: int,
) -> int:
    """Pairs of all heads of a layer, or what a predictor or mixer does that costs as much as so many pairs.

    `found` is what `chooser_of` found.
    """
    heads = len(offsets)
    if prior["support"]["name"] == "dense" and found is None:
        return heads * (num_tokens + num_prefix_tokens) ** 2
    if found is not None:
        settings, kind = found
        return heads * kind.kept_pairs(settings, head_dim, num_tokens, num_prefix_tokens)
    pairs = layer_pairs(prior["support"], num_heads=heads, num_tokens=num_tokens, layer=layer)
    return attended_pairs(offsets, num_tokens, num_prefix_tokens, pairs)


def _decay_sums(
    prior: dict[str, Any], offsets: Sequence[Sequence[int]], grid: tuple[int, int], prefix: int, num_layers: int
) -> dict[str, int]:
    """`decay_operations` of all layers of a model."""
    num_tokens = grid[0] * grid[1]
    sums = {"build": 0, "apply": 0}
    for layer in range(num_layers):
        pairs = layer_pairs(prior["support"], num_heads=len(offsets), num_tokens=num_tokens, layer=layer)
        for key, value in decay_operations(prior["decay"], offsets, grid, prefix, pairs=pairs).items():
            sums[key] += value
    return sums


def decay_operations(
    decay: dict[str, Any],
    offsets: Sequence[Sequence[int]],
    grid: tuple[int, int],
    num_prefix_tokens: int,
    num_layers: int = 1,
    pairs: Pairs = None,
) -> dict[str, int]:
    """Elementary operations of a decay in `num_layers` layers, each counted as one.

    "build": M at the attended pairs of patches, once a step: for each head, pair and curve a multiplication of distance
    and log gamma, an exponential, and an addition or the division of the mean. "apply": for each image a multiplication
    of the logits of those pairs by M, of the prefix's too where its gamma is learned, and one by alpha of every logit
    (VIOLIN Eq. 12).
    """
    num_tokens = grid[0] * grid[1]
    prefix_pairs = len(offsets) * ((num_tokens + num_prefix_tokens) ** 2 - num_tokens**2)
    # Not `attended_pairs`: where a patch has no partner but itself, M is 1 and not computed.
    weighed = sum(num_tokens if offset == 0 else 2 * (num_tokens - offset) for own in offsets for offset in own)
    weighed += sum(map(len, pairs or ()))
    curves = DECAYS[decay["name"]].positions(decay, (1, 1)).shape[0]
    apply = weighed + prefix_pairs * decay["learn_prefix"]
    if decay["learn_alpha"]:
        apply += attended_pairs(offsets, num_tokens, num_prefix_tokens, pairs)
    return {"build": num_layers * 3 * curves * weighed, "apply": num_layers * apply}


def _layer_flops(
    total: int, mlp_total: int, width: int, hidden: int, pairs: int, heads: int, convention: str
) -> dict[str, int]:
    """FLOPs of a transformer block with so many tokens in attention and in the MLP."""
    multiply_add = convention_of(convention).multiply_add
    return {
        "projections": multiply_add * 4 * total * width**2,
        **attention_parts(pairs, width // heads, convention),
        "mlp": multiply_add * 2 * mlp_total * width * hidden,
    }


def _image_grid(config: SparsePriorViTConfig, image_size: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """(height, width) of an image in pixels and in patches."""
    sides = image_size if isinstance(image_size, Sequence) else (image_size, image_size)
    if len(sides) != 2:
        raise ValueError(f"image_size={image_size!r} must be one number or (height, width)")
    height, width = (check_integer("image_size", side, 1) for side in sides)
    patch = as_pair(config.patch_size)
    if height % patch[0] or width % patch[1]:
        raise ValueError(f"image_size={height}x{width} must be a multiple of the {patch[0]}x{patch[1]} patch")
    return (height, width), (height // patch[0], width // patch[1])


# ---- the papers' numbers --------------------------------------------------------------------------------------------

# Fibottention Figure 3: the models whose cost it draws over the resolution.
FIGURE_3 = ("vit_base", "vit_tiny", "convit_base")
IMAGENET_CLASSES = 1000


def preset_flops(
    preset: str,
    image_size: int | Sequence[int] = 224,
    prior: str | dict[str, Any] = "dense",
    convention: str = "multiply_adds",
    num_prefix_tokens: int | None = None,
) -> ModelFlops:
    """`model_flops` of one of the papers' architectures with ImageNet's 1000 classes."""
    config = SparsePriorViTConfig.from_preset(preset, num_labels=IMAGENET_CLASSES)
    return model_flops(config, image_size, prior, convention, num_prefix_tokens)


def convit_base_flops(
    image_size: int | Sequence[int] = 224,
    prior: str | dict[str, Any] = "dense",
    convention: str = "multiply_adds",
) -> ModelFlops:
    """FLOPs of ConViT-B (d'Ascoli et al. 2021; Fibottention section 6.3) for one image.

    ViT-B with 16 heads of width 48, whose first 10 layers are gated positional attention over the patch tokens: a
    second attention map from three numbers a pair, a linear layer 3 -> h ("positions") and its own softmax. The class
    token joins before the last 2 layers, plain ones, and the prior's support changes only those.
    """
    config = SparsePriorViTConfig.from_preset("vit_base", num_attention_heads=16, num_labels=IMAGENET_CLASSES)
    heads, width, hidden = config.num_attention_heads, config.hidden_size, config.intermediate_size
    plain = model_flops(config, image_size, prior, convention)
    if plain.decay is not None:
        raise ValueError("convit_base is counted with a support, not with a decay")
    rule, tokens = convention_of(convention), plain.num_tokens
    gated = _layer_flops(tokens, tokens, width, hidden, heads * tokens**2, heads, convention)
    gated["positions"] = rule.multiply_add * 3 * heads * tokens**2
    gated["softmax"] *= 2
    return ModelFlops(
        image_size=plain.image_size,
        grid=plain.grid,
        tokens="the patches only in layers 1 to 10, the class token too in 11 and 12",
        num_prefix_tokens=plain.num_prefix_tokens,
        convention=convention,
        attended_pairs=[heads * tokens**2] * 10 + plain.attended_pairs[10:],
        patch_embedding=plain.patch_embedding,
        layers=[gated] * 10 + plain.layers[10:],
        classifier=plain.classifier,
    )


def saving(sparse: ModelFlops, dense: ModelFlops) -> float:
    """Percentage of a whole model's FLOPs that the prior saves."""
    return 100.0 * (1 - sparse.total / dense.total)


@dataclass(frozen=True)
class PaperNumber:
    """A number that a paper prints, our count of it, and what that count includes."""

    source: str
    printed: float
    count: float
    unit: str
    includes: str


def paper_numbers() -> list[PaperNumber]:
    """The papers' FLOPs with what they include; in all of them a multiply-add is 1 FLOP and softmax none."""
    return [
        *_fibottention_numbers(),
        *_other_numbers(),
        *_sparsifiner_numbers(),
        *_token_pruning_numbers(),
    ]


def _fibottention_numbers() -> list[PaperNumber]:
    paper_prior = {"support": {"name": "fibottention", "w_min": 5, "w_max": 65}}
    dense, dense_patches = preset_flops("vit_base"), preset_flops("vit_base", num_prefix_tokens=0)
    sparse = preset_flops("vit_base", prior=paper_prior)
    sparse_patches = preset_flops("vit_base", prior=paper_prior, num_prefix_tokens=0)
    scaled = dense.attention * sparse_patches.attention / dense_patches.attention
    savings = {
        (preset, size): saving(preset_flops(preset, size, "fibottention"), preset_flops(preset, size))
        for preset, size in (("vit_base", 1024), ("vit_base", 1056), ("vit_tiny", 528), ("vit_tiny", 544))
    }
    return [
        PaperNumber(
            "Fibottention Table 2 and section 4.2, dense ViT-B",
            0.72,
            dense.attention / 1e9,
            "G",
            "Q K^T and (softmax) V of 12 layers, 12 heads of width 64, over 197 tokens: class token included "
            f"({dense_patches.attention / 1e9:.4f} without it); no projections",
        ),
        PaperNumber(
            "Fibottention Table 2 and section 4.2, sparse ViT-B",
            0.014,
            sparse_patches.attention / 1e9,
            "G",
            "the same products, layers and heads at w 5..65 over the 196 patch tokens: class token NOT included "
            f"({sparse.attention / 1e9:.4f} with it); the dense number times the patch-only share of pairs, "
            f"{scaled / 1e9:.4f}, rounds to 0.014 too",
        ),
        PaperNumber(
            "Fibottention section 6.3, 'up to 48 %' in Figure 3",
            48,
            savings["vit_base", 1056],
            "%",
            "whole ViT-B with class token, patch embedding and classifier at 1056 px, the size at which it rounds to "
            "48; the text gives no resolution, and the saving grows with it: ViT-B "
            f"{savings['vit_base', 1024]:.1f} at 1024 px, ViT-T {savings['vit_tiny', 528]:.1f} at 528 and "
            f"{savings['vit_tiny', 544]:.1f} at 544",
        ),
    ]


def _other_numbers() -> list[PaperNumber]:
    tiny, base = preset_flops("deit_tiny", 384), preset_flops("deit_base", 384)
    return [
        PaperNumber(
            "Sparsifiner Table 2, MHSA of dense DeiT-S",
            357.7,
            preset_flops("deit_small").attention / 1e6,
            "M",
            "Q K^T and (softmax) V of 12 layers over 197 tokens: class token included; no projections",
        ),
        PaperNumber(
            "Sparsifiner Table 3, MHSA of dense DeiT-T at 384 px",
            1534.1,
            tiny.attention / 1e6,
            "M",
            "the same products over 577 tokens: class token included",
        ),
        PaperNumber(
            "Sparsifiner Table 3, dense DeiT-T at 384 px overall",
            3.58,
            (tiny.attention + tiny.part("mlp") + tiny.classifier) / 1e9,
            "G",
            "those products, MLP and classifier over 577 tokens; projections and patch embedding NOT included "
            f"({tiny.total / 1e9:.2f} with them)",
        ),
        PaperNumber(
            "Sparsifiner Table 1, MHSA of dense LV-ViT-S",
            476.9,
            preset_flops("lvvit_small").attention / 1e6,
            "M",
            "Q K^T and (softmax) V of 16 layers over 197 tokens: class token included; no projections",
        ),
        PaperNumber(
            "VIOLIN Table 1, DeiT-B",
            55.4,
            preset_flops("deit_base", 384, num_prefix_tokens=0).total / 1e9,
            "G",
            "the whole model at 384 px over 576 patch tokens: class token NOT included "
            f"({base.total / 1e9:.2f} with it; at 224 px {preset_flops('deit_base').total / 1e9:.2f})",
        ),
    ]


# Sparsifiner's count has a part that its data decide: the products of A_down W_up without a zero. The share of them all
# that its tables need, one for each base model; the paper gives neither these shares nor a formula.
UP_SHARES = {"DeiT-S": 0.1974, "LV-ViT-S": 0.2053, "DeiT-T at 384 px": 0.0043}


def sparsifiner_mhsa(
    num_layers: int, num_heads: int, width: int, num_tokens: int, budget: int, up_share: float, num_down: int = 32
) -> float:
    """MHSA as Sparsifiner's tables count it, in multiply-adds: the patches alone, B keys for each, and the prediction.

    Args:
        num_layers, num_heads, width: of the model.
        num_tokens: N.
        budget: B.
        up_share: share of the products of A_down W_up that are counted; see `Sparsifiner.up_share`.
        num_down: R.
    """
    settings = {"num_down": num_down, "keep_rate": None}
    up = Sparsifiner.up_products(settings, num_heads, num_tokens)
    prediction = Sparsifiner.products(settings, num_heads, width // num_heads, num_tokens, 0) - (1 - up_share) * up
    return num_layers * (2 * budget * num_tokens * width + prediction)


def _sparsifiner_numbers() -> list[PaperNumber]:
    """Those rows of its tables that come out with one share for each base model."""
    small = {178: 396.8, 79: 218.0, 40: 147.5, 20: 111.4, 10: 93.3, 2: 78.9}
    includes = (
        "B keys for each of 196 patch tokens, W_down K, Q (W_down K)^T and {:.2%} of A_down W_up, in {} layers; class "
        "token NOT included"
    )
    numbers = [
        PaperNumber(
            f"Sparsifiner Table 2, MHSA at B = {budget}",
            printed,
            sparsifiner_mhsa(12, 6, 384, 196, budget, UP_SHARES["DeiT-S"]) / 1e6,
            "M",
            includes.format(UP_SHARES["DeiT-S"], 12)
            + "; at B = 158, 138, 119, 99 and 60 within 0.1 of what is printed",
        )
        for budget, printed in small.items()
    ]
    numbers += [
        PaperNumber(
            f"Sparsifiner Table 1, MHSA of Sparsif-LV-S at B = {budget}",
            printed,
            sparsifiner_mhsa(16, 6, 384, 196, budget, UP_SHARES["LV-ViT-S"]) / 1e6,
            "M",
            includes.format(UP_SHARES["LV-ViT-S"], 16),
        )
        for budget, printed in {99: 339.7, 50: 221.7, 20: 149.5}.items()
    ]
    mlp = preset_flops("deit_tiny", 384).part("mlp")
    for keep_rate, budget, printed, overall in (
        (0.5, 288, 851.0, 2.89),
        (0.25, 138, 452.9, 2.49),
        (0.1, 58, 240.5, 2.28),
    ):
        count = sparsifiner_mhsa(12, 3, 192, 576, budget, UP_SHARES["DeiT-T at 384 px"])
        where = f"Sparsifiner Table 3, DeiT-T at 384 px, keep rate {keep_rate}"
        other = "" if keep_rate == 0.1 else f", where ceil({keep_rate} 577) is {math.ceil(keep_rate * 577)}"
        text = (
            f"{budget} keys{other}, for each of 576 patch tokens, W_down K, Q (W_down K)^T and "
            f"{UP_SHARES['DeiT-T at 384 px']:.2%} of A_down W_up; class token NOT included"
        )
        numbers += [
            PaperNumber(f"{where}, MHSA", printed, count / 1e6, "M", text),
            PaperNumber(
                f"{where}, overall",
                overall,
                (count + mlp) / 1e9,
                "G",
                "the same and the MLPs over 577 tokens; projections, patch embedding and classifier NOT included",
            ),
        ]
    return numbers


# Sparsifiner Table 1, MHSA in MFLOPs by token keep rate: DeiT-S, DeiT-S at attention keep rate 0.25, LV-ViT-S.
_TABLE_1_PLAIN = {0.7: 193.1, 0.5: 149.1}
_TABLE_1_SPARSE = {0.7: 113.3, 0.5: 86.6}
_TABLE_1_LVVIT = {0.7: 256.0, 0.5: 198.8}


def masked_patches(keep_rate: float, num_layers: int = 12) -> list[int]:
    """Patches that see one another in each layer of the code published with Sparsifiner, which prunes as EViT does.

    It masks them: the pruning block still attends to all 196, those behind it to ceil(keep_rate^s 196).
    """
    blocks = EViT.pruning_blocks(EViT.SETTINGS, num_layers)
    stages = [sum(block < layer for block in blocks) for layer in range(1, num_layers + 1)]
    return [EViT.count(keep_rate**stage, 196) for stage in stages]


def masked_pruning_flops(keep_rate: float, num_layers: int = 12) -> int:
    """Q K^T and (softmax) V of a pruned DeiT-S as Sparsifiner's Table 1 counts them.

    Of `masked_patches`; the row of the class token keeps all 197 keys, its column is not counted once patches are gone.
    """
    patches = masked_patches(keep_rate, num_layers)
    return 2 * 384 * sum(197**2 if own == 196 else 197 + own**2 for own in patches)


def _token_pruning_numbers() -> list[PaperNumber]:
    return [
        PaperNumber(
            f"Sparsifiner Table 1, MHSA of EViT and DynamicViT on DeiT-S at {rate}",
            printed,
            masked_pruning_flops(rate) / 1e6,
            "M",
            "Q K^T and (softmax) V as its code masks them: 4 layers over 197 tokens, then 3, 3 and 2 in which the kept "
            "patches see one another and the class token sees all 197, the class token's column NOT included. "
            f"Computed really: {_pruned_attention('evit', rate):.1f} by evit, its fused token included, "
            f"{_pruned_attention('evit', rate, fuse=False):.1f} without it, "
            f"{_pruned_attention('dynamicvit', rate):.1f} by dynamicvit, which prunes before block 4, not within it",
        )
        for rate, printed in _TABLE_1_PLAIN.items()
    ]


def _pruned_attention(name: str, keep_rate: float, **settings: Any) -> float:
    prior = {"extras": [{"name": name, "keep_rate": keep_rate, **settings}]}
    return preset_flops("deit_small", prior=prior).attention / 1e6


def unexplained_numbers() -> list[PaperNumber]:
    """Numbers that no formula was found for, with the nearest count that follows from what the paper says."""
    share = UP_SHARES["DeiT-S"]
    sparse = [
        PaperNumber(
            f"Sparsifiner Table 1, MHSA of Sparsifiner on DeiT-S at token keep rate {rate}, attention keep rate 0.25",
            printed,
            sum(sparsifiner_mhsa(1, 6, 384, own, min(50, own), share) for own in masked_patches(rate)) / 1e6,
            "M",
            f"what gives Table 2, for the patches that are left and with its {share:.2%} of A_down W_up, that of a "
            "model that drops no tokens; the shares of these models are not printed",
        )
        for rate, printed in _TABLE_1_SPARSE.items()
    ]
    return sparse + [
        PaperNumber(
            f"Sparsifiner Table 1, MHSA of EViT and DynamicViT on LV-ViT-S at {rate}",
            printed,
            masked_pruning_flops(rate, num_layers=16) / 1e6,
            "M",
            "what gives DeiT-S's numbers, with 16 layers that prune at a quarter, half and three quarters; no choice "
            "of three blocks gives both printed numbers",
        )
        for rate, printed in _TABLE_1_LVVIT.items()
    ]
