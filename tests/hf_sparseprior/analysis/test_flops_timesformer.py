"""FLOPs of models of clips against torch's own count."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import hf_sparseprior as sp
from hf_sparseprior.analysis.flops import model_flops
from hf_sparseprior.patterns.supports import build_mask
from tests.each import each

TYPES = ["divided_space_time", "joint_space_time", "space_only"]
SIZES = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40,
    "image_size": (12, 20), "patch_size": 4, "num_frames": 5, "num_labels": 7,
}  # fmt: skip


def config(kind, prior="dense", **options):
    return sp.SparsePriorTimesformerConfig(**{**SIZES, "attention_type": kind, "prior": prior, **options})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {"num_register_tokens": 2, "pooling": "mean"}) for kind in TYPES),
        *(("divided_space_time", {}), ("joint_space_time", {"prior": "localvit"}), ("space_only", {})),
    ],
)
def test_it_is_what_torch_counts(kind, options):
    own = config(kind, **options)
    model = sp.SparsePriorTimesformerForVideoClassification(own).eval()
    model.config._attn_implementation = "eager"
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(torch.randn(1, 5, 3, 12, 20))
    counted = counter.get_total_flops()
    found = model_flops(own)
    if kind == "divided_space_time":  # torch counts no attention on CPUs, and attention over time is its own
        over_time = 2 * 2 * 2 * 15 * 5**2 * 24
        if counted != 2 * found.total:
            counted += over_time
    assert 2 * found.total == counted
    assert found.frames == 5 and found.num_tokens == 75
    assert found.to_dict()["frames"] == 5


@pytest.mark.parametrize(
    ("kind", "prior", "time"),
    [
        *((kind, "fibottention", "frame") for kind in TYPES),
        *(("joint_space_time", f"fibottention+{time}", time) for time in ("clip", "axes")),
        ("joint_space_time", "radial", "clip"),
    ],
)
def test_attended_pairs_are_those_of_the_masks(kind, prior, time):
    own = config(kind, prior)
    support = {**own.prior["support"], "shuffle_seed": None}
    grid, frames = ((5, 3, 5), 1) if kind == "joint_space_time" else ((3, 5), 5)
    tokens = 75 if kind == "joint_space_time" else 15
    mask = build_mask(support, num_heads=3, num_tokens=tokens, num_prefix_tokens=1, grid=grid, time=time)
    found = model_flops(own)
    assert found.attended_pairs == [frames * mask.sum()] * 2
    assert found.layers[0]["qk"] == frames * mask.sum() * 8
    ratio = 100 * (1 - mask.mean())
    assert own.pruning_ratio == pytest.approx(ratio)
    dense = model_flops(own, prior="dense")
    assert dense.total - found.total == 2 * 2 * 8 * frames * int((~mask).sum())


def test_a_decay_over_a_clip():
    frame, clip = (model_flops(config("joint_space_time", prior)).decay for prior in ("violin", "violin+clip"))
    alone = model_flops(config("space_only", "violin")).decay
    assert frame == clip and frame["build"] == 25 * alone["build"] and alone["apply"] > 0
    assert model_flops(config("space_only", "violin"), image_size=(24, 20)).grid == (6, 5)


@each("prior", ["fibottention+violin", "bigbird+violin", "window+manhattan"])
def test_what_is_counted_of_one_frame_is_what_all_pairs_give(prior):
    """The decay's operations by loops over the pairs of the mask, without those that are there for want of others."""
    own = config("joint_space_time", prior)
    support = {**own.prior["support"], "shuffle_seed": None}
    mask = build_mask(support, num_heads=3, num_tokens=75, num_prefix_tokens=1, grid=(5, 3, 5))
    found = model_flops(own)
    curves = {"violin": len(own.prior["decay"].get("curves", [0])), "manhattan": 1}[own.prior["decay"]["name"]]
    weighed = int(mask[:, 1:, 1:].sum())
    assert found.attended_pairs == [int(mask.sum())] * 2
    assert found.decay["build"] == 2 * 3 * curves * weighed
    assert found.decay["apply"] == 2 * (weighed + int(mask.sum()))  # M and alpha


def test_long_clips_are_counted_without_a_list_of_their_pairs():
    support = {"name": "fibottention", "w_min": 5, "w_max": 65}
    sizes = {"image_size": 224, "patch_size": 16, "num_frames": 96, "hidden_size": 768, "num_attention_heads": 12}
    own = config("joint_space_time", {"support": support, "decay": "violin"}, **sizes)
    one = sp.SparsePriorTimesformerConfig(**{**own.to_dict(), "num_frames": 1})
    mask = build_mask({**support, "shuffle_seed": None}, num_heads=12, num_tokens=196, num_prefix_tokens=1)
    of_frame, prefix = int(mask[:, 1:, 1:].sum()), 12 * (2 * 96 * 196 + 1)
    assert model_flops(own).attended_pairs == [96**2 * of_frame + prefix] * 2
    assert model_flops(one).attended_pairs == [int(mask.sum())] * 2
