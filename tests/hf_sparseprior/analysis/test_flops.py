import itertools

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import hf_sparseprior as sp
from hf_sparseprior.analysis.flops import (
    CONVENTIONS,
    attention_flops,
    attention_parts,
    decay_operations,
    dense_attention_flops,
    model_flops,
)
from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.patterns.decay import DECAYS, resolve_decay
from hf_sparseprior.patterns.masks import attended_pairs
from hf_sparseprior.patterns.sequences import SEQUENCES
from hf_sparseprior.patterns.supports import (
    DENSE,
    SUPPORTS,
    LayerKey,
    build_mask,
    head_offsets,
    layer_pattern,
    resolve_support,
)
from tasks.analysis.paper_numbers import (
    FIGURE_3,
    decay_share,
    paper_numbers,
    preset_flops,
    saving,
    unexplained_numbers,
)
from tests.each import each

SETTINGS = [
    *({"name": name} for name in SUPPORTS),
    {"name": "fibottention", "modified": True},
    {"name": "fibottention", "w_min": 1, "w_max": 1000},
    {"name": "fibottention", "w_min": 1, "w_max": 1},
    *({"name": "fibottention", "sequence": sequence} for sequence in SEQUENCES),
    {"name": "window", "w": 3, "diagonal": False},
    {"name": "window", "w": 0},
]
LONELY = ("random", "fibottention")  # with patches that see themselves alone
# One pruning of Fibottention's Tables 2 and 3.
PAPER = {"support": {"name": "fibottention", "w_min": 5, "w_max": 65}}


# ---- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_pairs_equal_the_mask_on_random_grids(settings):
    generator = np.random.default_rng(0)
    for prefix in (0, 1, 2, 3) * 3:
        height, width, heads, layer = (
            int(generator.integers(low, high)) for low, high in ((1, 13), (1, 13), (1, 9), (0, 4))
        )
        tokens = height * width
        support = resolve_support(settings, heads, tokens, (height, width))
        sizes = {"num_heads": heads, "num_tokens": tokens, "grid": (height, width)}
        mask = build_mask(support, **sizes, num_prefix_tokens=prefix, layer=layer)
        pattern = layer_pattern(support, LayerKey(heads, (height, width), layer))
        in_order = head_offsets(support, **sizes)
        counted = pattern.attended_pairs(prefix)
        assert counted == attended_pairs(in_order, tokens, prefix, pattern.pairs) == mask.sum()
        assert counted == sum(pattern.nonzeros(head, prefix) for head in range(heads))


def test_the_cost_of_counting_does_not_grow_with_the_tokens():
    tokens = 10**12
    # 2 (N - o) for each offset, and one prefix row and column: 2 N + 1.
    assert attended_pairs([[1, 3, 10**11]], tokens, 1) == 2 * (3 * tokens - 4 - 10**11) + 2 * tokens + 1


@pytest.mark.parametrize("support", SUPPORTS)
@each("prefix", (0, 2))
def test_flops_equal_a_count_of_the_mask(support, prefix):
    sizes = {"num_heads": 4, "num_tokens": 30, "grid": (5, 6)}
    pattern = layer_pattern(resolve_support(support, 4, 30, (5, 6)), LayerKey(4, (5, 6)))
    pairs = build_mask(support, **sizes, num_prefix_tokens=prefix).sum()
    for name, per_pair in (("multiply_adds", 2 * 8), ("torch", 4 * 8), ("torch_and_softmax", 4 * 8 + 5)):
        counted = attention_flops(pattern, prefix, head_dim=8, num_layers=2, convention=name)
        assert counted == 2 * per_pair * pairs


def test_dense_flops_of_vit_b():
    assert dense_attention_flops(12, 197, 64, 12) == 2 * 12 * 197**2 * 768
    dense = layer_pattern(DENSE, LayerKey(12, (14, 14)))
    for convention in CONVENTIONS:
        one_by_one = attention_flops(dense, 1, 64, 12, convention)
        assert dense_attention_flops(12, 197, 64, 12, convention) == one_by_one


def test_torch_counts_both_products_as_its_convention_does():
    q = k = v = torch.empty(3, 10, 8, device="meta")
    with FlopCounterMode(display=False) as counter:
        torch.softmax(q @ k.transpose(1, 2), -1) @ v
    assert counter.get_total_flops() == sum(attention_parts(3 * 10 * 10, 8, "torch").values())


# ---- models ---------------------------------------------------------------------------------------------------------


SMALL = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 40, "num_labels": 7}


def test_an_extra_that_does_not_say_what_it_computes_is_refused(monkeypatch):
    monkeypatch.setattr(EXTRAS["irpe_k"], "multiply_adds", lambda *sizes: None)
    with pytest.raises(ValueError, match=r"prior 'violin\+irpe_k': the FLOPs of 'irpe_k' are not counted"):
        model_flops(sp.SparsePriorViTConfig(), prior="violin+irpe_k")


def test_parts_by_hand():
    plain = model_flops(sp.SparsePriorViTConfig(image_size=32, patch_size=8, prior="fibottention+violin", **SMALL))
    assert plain.part("projections") == 3 * 4 * 17 * 24**2 and plain.part("mlp") == 3 * 2 * 17 * 24 * 40
    assert plain.patch_embedding == 16 * 3 * 64 * 24 and plain.classifier == 24 * 7
    values = plain.to_dict()
    assert values["num_tokens"] == 16 and len(values["layers"]) == 3


def test_counted_without_prefix_tokens():
    config = sp.SparsePriorViTConfig(image_size=32, patch_size=8, prior="fibottention", **SMALL)
    bare = sp.SparsePriorViTConfig(
        image_size=32, patch_size=8, prior="fibottention", use_class_token=False, pooling="mean", **SMALL
    )
    assert model_flops(config, num_prefix_tokens=0).total == model_flops(bare).total
    assert model_flops(config, num_prefix_tokens=0).tokens == "the patches only"


@pytest.mark.parametrize(
    ("name", "support"),
    [
        *(([*DECAYS][i % len(DECAYS)], support) for i, support in enumerate(SUPPORTS) if support not in LONELY),
        *itertools.product(DECAYS, LONELY),
    ],
)
@each("prefix", range(3))
def test_decay_operations_equal_a_count_of_the_mask(name, support, prefix):
    sizes = {"num_heads": 3, "num_tokens": 20, "grid": (4, 5)}
    in_order = resolve_support({"name": support, "shuffle_seed": None}, 3, 20, (4, 5))
    pattern = layer_pattern(in_order, LayerKey(3, (4, 5)))
    offsets, pairs = pattern.offsets, pattern.pairs
    mask = build_mask(support, **sizes, num_prefix_tokens=prefix, shuffle_seed=None)
    # M is not computed for a patch that attends to itself because it has no partner.
    lonely = sum(mask[head].diagonal().sum() for head in range(3) if 0 not in offsets[head]) if not prefix else 0
    if pairs is not None and not prefix:
        lonely -= sum((own[:, 0] == own[:, 1]).sum() for own in pairs if support == "random")
    patches = mask[:, prefix:, prefix:].sum() - lonely
    for learn_alpha, learn_prefix in itertools.product((True, False), repeat=2):
        decay = resolve_decay({"name": name, "learn_alpha": learn_alpha, "learn_prefix": learn_prefix})
        curves = len(decay.get("curves", [name])) * (1 + decay.get("with_transpose", False))
        counted = decay_operations(decay, pattern, prefix)
        applied = patches + learn_prefix * (mask.sum() - mask[:, prefix:, prefix:].sum()) + learn_alpha * mask.sum()
        assert counted == {"build": 3 * curves * patches, "apply": applied}


# ---- the papers' numbers --------------------------------------------------------------------------------------------


def test_fibottentions_dense_number_counts_the_class_token():
    assert preset_flops("vit_base").attention == 2 * 12 * 197**2 * 768 == 715_327_488
    assert round(preset_flops("vit_base").attention / 1e9, 2) == 0.72
    assert round(preset_flops("vit_base", num_prefix_tokens=0).attention / 1e9, 2) == 0.71


def test_fibottentions_sparse_number_counts_patch_tokens_only():
    # 9192 pairs of all heads without the class token, in 12 layers and two products of width 64.
    assert preset_flops("vit_base", prior=PAPER, num_prefix_tokens=0).attention == 2 * 12 * 9192 * 64
    assert round(2 * 12 * 9192 * 64 / 1e9, 3) == 0.014
    assert round(preset_flops("vit_base", prior=PAPER).attention / 1e9, 4) == 0.0214


def test_every_printed_number_comes_out_to_its_last_digit():
    for number in paper_numbers():
        text = f"{number.printed:g}"
        decimals = len(text.partition(".")[2])
        assert f"{number.count:.{decimals}f}" == text, number
        assert "token" in number.includes
    sources = [number.source for number in paper_numbers()]
    assert len(set(sources)) == len(sources) == 25


def test_violins_overheads_by_hand():
    """Buckets of 50 for T tokens; W R over 27^2 offsets; M at 196^2 pairs of 12 heads and 12 layers, alpha at 197^2."""
    counts = {number.source: number.count for number in unexplained_numbers() if "VIOLIN" in number.source}
    small, tiny, base = (preset_flops(f"deit_{size}").total for size in ("small", "tiny", "base"))
    on_keys, relative = 12 * 197 * 50 * 384, 12 * (729 * 384**2 + 196 * 729 * 384 + 197 * 384)
    shares = {
        **{
            f"26, FLOPs that irpe_{name} adds to deit_small": len(name) * on_keys / small for name in ("k", "qk", "qkv")
        },
        "26, FLOPs that transformer_xl adds to deit_small": relative / small,
        "27, FLOPs that irpe_k adds to deit_tiny": 12 * 197 * 50 * 192 / tiny,
        "26, FLOPs that VIOLIN adds to DeiT-S": 12 * 6 * (196**2 + 197**2) / small,
    }
    for source, share in shares.items():
        assert counts[f"VIOLIN Table {source}"] == pytest.approx(100 * share), source
    assert round(counts["VIOLIN Table 1, parameters added to DeiT-B"], 4) == 0.0015
    assert decay_share("deit_base", 224)["build"] == pytest.approx(100 * 144 * 196**2 * 8 * 3 / base)
    with torch.device("meta"):
        model = sp.SparsePriorViTForImageClassification(
            sp.SparsePriorViTConfig.from_preset("deit_base", num_labels=1000)
        )
    assert sum(parameter.numel() for parameter in model.parameters()) == 86_567_656


@each("attention, overall", [(1534.1, 3.58), (851.0, 2.89), (452.9, 2.49), (240.5, 2.28)])
def test_sparsifiners_overall_numbers_leave_out_the_projections(attention, overall):
    """Every row of its Table 3 (DeiT-T at 384 px) is its MHSA and the MLPs and classifier."""
    tiny = preset_flops("deit_tiny", 384)
    assert attention / 1e3 + (tiny.part("mlp") + tiny.classifier) / 1e9 == pytest.approx(overall, abs=0.0055)


def vit_by_hand(width, heads, size, sparse):
    """Multiply-adds of a ViT with class token and w 5..N // 3; pairs are counted patch by patch."""
    tokens = (size // 16) ** 2
    total = tokens + 1
    pairs = heads * total**2
    if sparse:
        position = np.arange(tokens)
        offsets = head_offsets("fibottention", num_heads=heads, num_tokens=tokens, w_max=tokens // 3)
        reach = sum(((position >= o).sum() + (position + o < tokens).sum() for own in offsets for o in own), 0)
        pairs = int(reach) + heads * (2 * tokens + 1)
    linear = 12 * 12 * total * width**2 + tokens * 768 * width + 1000 * width
    return linear + 12 * 2 * pairs * width // heads


@pytest.mark.parametrize(("preset", "width", "heads"), [("vit_base", 768, 12), ("vit_tiny", 192, 3)])
def test_figure_3_of_the_vits(preset, width, heads):
    assert preset in FIGURE_3
    savings = []
    for size in (224, 384, 512, 768, 1024, 1280, 1536):
        dense, sparse = preset_flops(preset, size), preset_flops(preset, size, "fibottention")
        assert dense.total == vit_by_hand(width, heads, size, sparse=False)
        assert sparse.total == vit_by_hand(width, heads, size, sparse=True)
        savings.append(saving(sparse, dense))
    # "rather limited at a 224x224 resolution", and growing with it.
    assert savings == sorted(savings) and savings[0] < 14 and savings[-1] > 60


def test_figure_3s_saving_of_48_percent_is_reached_by_vit_b_between_1040_and_1056_pixels():
    savings = {
        size: saving(preset_flops("vit_base", size, "fibottention"), preset_flops("vit_base", size))
        for size in (1024, 1040, 1056, 1072)
    }
    assert [round(value) for value in savings.values()] == [47, 47, 48, 49]
