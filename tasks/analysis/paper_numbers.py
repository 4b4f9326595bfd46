"""The papers' FLOPs with what they include."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_sparseprior.analysis.flops import ModelFlops, model_flops
from hf_sparseprior.base.families import preset_family
from hf_sparseprior.models.configuration_sparseprior_convit import SparsePriorConvitConfig
from hf_sparseprior.models.configuration_sparseprior_iformer import SparsePriorIformerConfig
from hf_sparseprior.models.configuration_sparseprior_swin import SUPPORT_STAGES, SparsePriorSwinConfig
from hf_sparseprior.patterns.sequences import wythoff_start
from hf_sparseprior.patterns.supports import LayerKey, head_offsets
from hf_sparseprior.priors.prior import prior_pruning_ratio, resolve_prior
from hf_sparseprior.priors.sparsifiner import Sparsifiner
from hf_sparseprior.priors.token_pruning import EViT

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
    config = preset_family(preset).make_config(preset, num_labels=IMAGENET_CLASSES)
    return model_flops(config, image_size, prior, convention, num_prefix_tokens)


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
    """The papers' FLOPs with what they include. In all of them a multiply-add is 1 FLOP and softmax is not counted."""
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


# Sparsifiner's count has a part that depends on data: the products of A_down W_up without a zero. These are the shares
# of all products that its tables need, one for each base model. The paper gives neither these shares nor a formula.
UP_SHARES = {"DeiT-S": 0.1974, "LV-ViT-S": 0.2053, "DeiT-T at 384 px": 0.0043}


def sparsifiner_mhsa(
    num_layers: int, num_heads: int, width: int, num_tokens: int, budget: int, up_share: float, num_down: int = 32
) -> float:
    """MHSA as Sparsifiner's tables count it, in multiply-adds: the patches alone, B keys for each, and the prediction.

    Args:
        num_layers, num_heads, width: those of the model.
        num_tokens: N.
        budget: B.
        up_share: share of the products of A_down W_up that are counted; see `Sparsifiner.up_share`.
        num_down: R.
    """
    settings = {"num_down": num_down, "keep_rate": None}
    up = Sparsifiner.up_multiply_adds(settings, num_heads, num_tokens)
    prediction = (
        Sparsifiner.other_multiply_adds(settings, num_heads, width // num_heads, num_tokens, 0) - (1 - up_share) * up
    )
    return num_layers * (2 * budget * num_tokens * width + prediction)


def _sparsifiner_numbers() -> list[PaperNumber]:
    """The rows of Sparsifiner's tables that come out with one share for each base model."""
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

    The code masks them: the pruning block still attends to all 196, later blocks to ceil(keep_rate^s 196).
    """
    blocks = EViT.pruning_blocks(EViT.SETTINGS, num_layers)
    stages = [sum(block < layer for block in blocks) for layer in range(1, num_layers + 1)]
    return [EViT.count(keep_rate**stage, 196) for stage in stages]


def masked_pruning_flops(keep_rate: float, num_layers: int = 12) -> int:
    """Q K^T and (softmax) V of a pruned DeiT-S as Sparsifiner's Table 1 counts them.

    Patches are counted as in `masked_patches`. The class token's row keeps all 197 keys. Its column is not counted once
    patches are gone.
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
    return [
        *(_swin_number(), _iformer_number(), _convit_number(), _upop_number()),
        *_unexplained_sparsifiner_numbers(),
        *_violin_numbers(),
        *_rounded_sparsifiner_numbers(),
    ]


def published_pruning(stages: Sequence[tuple[int, int, int]], modified: bool, prefix: int = 0) -> float:
    """Percentage of the pairs that the masks of Fibottention's published code leave out, with windows of 5..N // 3.

    The code keeps the first term of a head even above its window, and its modified form has the diagonal. For one head
    it divides by 0; here the window is N // 3 then.

    Args:
        stages: how many masks there are, their heads, and N, of each stage.
        prefix: class tokens, which see everything, are seen by everything, and are counted.
    """
    kept = total = 0
    for count, heads, tokens in stages:
        for row in range(1, heads + 1):
            window = 5 + (tokens // 3 - 5) * (row - 1) // (heads - 1) if heads > 1 else tokens // 3
            terms = list(wythoff_start(row, modified))
            while terms[-1] <= window:
                terms.append(terms[-2] + terms[-1])
            offsets = {offset for offset in terms[:-1] if offset < tokens}
            kept += count * sum((tokens - offset) * (2 if offset else 1) for offset in offsets)
            kept += count * prefix * (2 * tokens + prefix)
        total += count * heads * (tokens + prefix) ** 2
    return 100.0 * (1 - kept / total)


def _as_published(stages: Sequence[tuple[int, int, int]], prefix: int = 0) -> str:
    """What the published code's masks give, in both forms."""
    default, modified = (published_pruning(stages, form, prefix) for form in (False, True))
    return f"{default:.2f} and modified {modified:.2f}"


def swin_pruning(w_max: int, window: int = 7, each_layer: bool = False, w_min: int = 5) -> float:
    """Percentage of the pairs of Swin-B's first two stages that Fibottention leaves out (its appendix C.1).

    A patch without a pair counts none here, while our models let it attend to itself.

    Args:
        w_max, w_min: of the support.
        window: patches in a window's side.
        each_layer: one window of each layer counts, instead of all windows of an image.
    """
    kept = total = 0
    config = SparsePriorSwinConfig.from_preset("swin_base", window_size=window)
    for stage in config.stages[:SUPPORT_STAGES]:
        tokens, heads = window**2, stage.num_heads
        offsets = head_offsets("fibottention", num_heads=heads, num_tokens=tokens, w_min=w_min, w_max=w_max)
        weight = stage.num_layers * (1 if each_layer else stage.num_windows)
        kept += weight * sum(2 * (tokens - offset) for own in offsets for offset in own)
        total += weight * heads * tokens**2
    return 100.0 * (1 - kept / total)


def _swin_number() -> PaperNumber:
    return PaperNumber(
        "Fibottention Table 3, pruning ratio of Swin-B",
        95.4,
        swin_pruning(16),
        "%",
        "pairs of the 49 patch tokens of each window, in all layers and windows of the first two stages at 224 px, at "
        f"w 5..16, where 16 is N // 3; {swin_pruning(16, each_layer=True):.2f} if each layer counts as much. At the "
        f"paper's 5..65, of which a window holds 5..49, {swin_pruning(49):.2f}, and only then does every head of both "
        "stages have a pair. Of all four stages these two have 38.7 % of the pairs, so the last two are NOT included. "
        f"5..7, where 7 is the window's side, gives {swin_pruning(7):.2f}, but then most heads have no pair at all. "
        f"The published code has no Swin; its masks give {_as_published([(128, 4, 49), (32, 8, 49)])}",
    )


def patch_pruning(num_heads: int, num_prefix_tokens: int = 0, w_max: int = 65, modified: bool = False) -> float:
    """Percentage of the pairs that Fibottention at w 5..w_max leaves out of 14x14 patches."""
    support = {"name": "fibottention", "w_min": 5, "w_max": w_max, "modified": modified}
    prior = resolve_prior({"support": support}, num_heads, (14, 14))
    return prior_pruning_ratio(prior, LayerKey(num_heads, (14, 14)), num_prefix_tokens, 64)


def _upop_number() -> PaperNumber:
    return PaperNumber(
        "Fibottention Table 3, pruning ratio of UPop",
        97.1,
        patch_pruning(6),
        "%",
        "pairs of the 196 patches at w 5..65 in DeiT-S, which UPop's published code compresses: it narrows the 6 heads "
        f"and takes none away. The paper names no model; 8 heads give {patch_pruning(8):.2f}, 12 heads with the class "
        f"token {patch_pruning(12, 1):.2f}",
    )


def _convit_number() -> PaperNumber:
    stages = SparsePriorConvitConfig.from_preset("convit_base").stages
    pairs = [stage.num_layers * (math.prod(stage.grid) + stage.has_prefix) ** 2 for stage in stages]
    heads = stages[-1].num_heads
    return PaperNumber(
        "Fibottention Table 3, pruning ratio of ConViT-B",
        96.6,
        patch_pruning(heads, modified=True),
        "%",
        "pairs of the 196 patches in the two plain layers, with the modified form at the paper's w 5..65; "
        f"{patch_pruning(heads, 1, modified=True):.2f} with the class token. The default form leaves out "
        f"{patch_pruning(heads):.2f}, {patch_pruning(heads, 1):.2f} with the class token. The modified form at 5..64 "
        f"leaves out {patch_pruning(heads, 0, 64, True):.2f}, but the paper has no 64. Of all layers the plain ones "
        f"have {100 * pairs[-1] / sum(pairs):.1f} % of the pairs, so the gated ones are NOT included. The published "
        f"code has no ConViT; its masks give {_as_published([(1, heads, 196)])}, with the class token "
        f"{_as_published([(1, heads, 196)], 1)}, which is what is printed for Swin-B",
    )


def iformer_pruning(preset: str, w_max: int | None) -> float:
    """Percentage of the pairs of an iFormer's attention that row 1 of the Wythoff array leaves out (appendix C.1).

    Args:
        preset: of `SparsePriorIformerConfig`, at 224 px.
        w_max: the window, which is cut to the places of a stage; None: a third of them.
    """
    kept = total = 0
    for stage in SparsePriorIformerConfig.from_preset(preset).stages:
        tokens = math.prod(stage.grid)
        window = tokens // 3 if w_max is None else min(w_max, tokens)
        (own,) = head_offsets("fibottention", num_heads=1, num_tokens=tokens, w_min=min(5, window), w_max=window)
        kept += stage.num_layers * sum(2 * (tokens - offset) for offset in own)
        total += stage.num_layers * tokens**2
    return 100.0 * (1 - kept / total)


def _iformer_number() -> PaperNumber:
    return PaperNumber(
        "Fibottention Table 3, pruning ratio of iFormer",
        94.4,
        iformer_pruning("iformer_small", None),
        "%",
        "pairs of the one head in all attention layers of iFormer-S at 224 px, 3 over 196 places and 2 over 49, at "
        f"windows of N // 3, 65 and 16; {iformer_pruning('iformer_medium', None):.2f} for iFormer-M. At the paper's "
        f"65, of which 49 places hold 49, {iformer_pruning('iformer_small', 65):.2f}. Only windows of 8 to 12, that is "
        f"offsets 1, 2, 3, 5 and 8, give what is printed, {iformer_pruning('iformer_small', 8):.2f}, with iFormer-S "
        "and -T alone. The paper names neither size nor window. The published code has no iFormer; its masks give "
        f"{_as_published([(3, 1, 196), (2, 1, 49)])}",
    )


def added_flops(preset: str, prior: str) -> float:
    """Percentage by which a prior's matrix products raise the FLOPs of a whole dense model at 224 px."""
    return -saving(preset_flops(preset, prior=prior), preset_flops(preset))


def decay_share(preset: str, image_size: int, num_prefix_tokens: int | None = None) -> dict[str, float]:
    """Operations of VIOLIN's M, "build" and "apply", in percent of a whole dense model's multiply-adds."""
    counted = preset_flops(preset, image_size, "violin", num_prefix_tokens=num_prefix_tokens)
    return {key: 100.0 * value / counted.total for key, value in (counted.decay or {}).items()}


def _violin_numbers() -> list[PaperNumber]:
    """VIOLIN's overheads (Tables 1, 26 and 27), which no count gives.

    Those of its FLOPs lie between two counts: M multiplied to the logits alone, and made for each image too.
    """
    scalars, parameters = 12 * 12 * 9, 86_567_656  # of DeiT-B: layers, heads, curves and alpha; with 1000 classes
    large, small = decay_share("deit_base", 384, 0), decay_share("deit_base", 224)
    numbers = [
        PaperNumber(
            "VIOLIN Table 1, parameters added to DeiT-B",
            0.0002,
            100.0 * scalars / parameters,
            "%",
            f"the {scalars} scalars of the table's own formula L h (|C| + 1), of {parameters} with the class token",
        ),
        PaperNumber(
            "VIOLIN Table 1, FLOPs added to DeiT-B",
            0.64,
            large["apply"],
            "%",
            "M and alpha multiplied to the logits of each image, at 384 px over the patch tokens, where the model has "
            f"the table's 55.4 G; making M, once for a whole batch, is {large['build']:.2f} more. At 224 px with the "
            f"class token {small['apply']:.2f} and {small['build']:.2f}. Each elementary operation is 1",
        ),
    ]
    own = decay_share("deit_small", 224)
    numbers.append(
        PaperNumber(
            "VIOLIN Table 26, FLOPs that VIOLIN adds to DeiT-S",
            0.7,
            own["apply"],
            "%",
            f"as above at 224 px, class token included; making M is {own['build']:.2f} more, once for a whole batch",
        )
    )
    for table, preset, printed in (
        (26, "deit_small", {"transformer_xl": 4.3, "irpe_k": 0.9, "irpe_qk": 2.2, "irpe_qkv": 5.9}),
        (27, "deit_tiny", {"irpe_k": 1.7}),
    ):
        numbers += [
            PaperNumber(
                f"VIOLIN Table {table}, FLOPs that {name} adds to {preset}",
                share,
                added_flops(preset, name),
                "%",
                "its matrix products over the patches and the class token, as torch counts them for one image"
                + ("; that of W and the sinusoids is needed once for a batch" if name == "transformer_xl" else ""),
            )
            for name, share in printed.items()
        ]
    tiny = decay_share("deit_tiny", 224)
    numbers.append(
        PaperNumber(
            "VIOLIN Table 27, FLOPs that VIOLIN and irpe_k add to deit_tiny",
            2.3,
            added_flops("deit_tiny", "irpe_k") + tiny["apply"],
            "%",
            f"both as above; making M is {tiny['build']:.2f} more, once for a whole batch",
        )
    )
    return numbers


def _rounded_sparsifiner_numbers() -> list[PaperNumber]:
    """The rows of Sparsifiner's Table 2 that miss the last digit with the share that fits the others."""
    share = UP_SHARES["DeiT-S"]
    return [
        PaperNumber(
            f"Sparsifiner Table 2, MHSA at B = {budget}",
            printed,
            sparsifiner_mhsa(12, 6, 384, 196, budget, share) / 1e6,
            "M",
            f"as the table's other rows, with {share:.2%} of A_down W_up; no share gives all rows to the last digit",
        )
        for budget, printed in {158: 360.6, 138: 324.6, 119: 290.3, 99: 254.2, 60: 183.6}.items()
    ]


def _unexplained_sparsifiner_numbers() -> list[PaperNumber]:
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
