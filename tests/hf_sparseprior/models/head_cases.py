"""Small models of every head on every family, what they learn from, and the table of which go together.

python -m tests.hf_sparseprior.models.head_cases        runs every cell and prints the table of docs/heads.md
"""

from functools import cache

import torch

from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.models import heads

PRIOR = "fibottention+violin"
SIDE = 64
LAYERS = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32, "image_size": SIDE, "patch_size": 16}
BACKBONES = {
    "sparseprior_vit": {**LAYERS, "num_hidden_layers": 4},
    "sparseprior_swin": {
        "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 2, 2], "window_size": 2, "image_size": SIDE,
        "patch_size": 4,
    },
    "sparseprior_convit": {**LAYERS, "num_hidden_layers": 5, "num_local_layers": 1},
    "sparseprior_iformer": {
        "image_size": SIDE, "hidden_sizes": [16, 16, 32, 32], "conv_depths": [1, 1, 0, 0],
        "attention_depths": [0, 0, 1, 1], "final_conv_depths": [0, 0, 0, 1], "key_reduction": [1, 1, 1, 1],
    },
}  # fmt: skip
# What a head asks of the config of its backbone.
ASKED = {
    "vitpose": {"sparseprior_vit": {"use_class_token": False, "pooling": "mean"}},
    "vitmatte": {name: {"num_channels": 4, "image_mean": 0.5, "image_std": 0.5} for name in BACKBONES},
}
# What a family has to be for a head that does not take it with its usual sizes.
THREE_STAGES = {
    "sparseprior_swin": {"depths": [1, 1, 1], "num_heads": [2, 2, 2]},
    "sparseprior_iformer": {
        "hidden_sizes": [16, 16, 32], "conv_depths": [1, 1, 0], "attention_depths": [0, 0, 1],
        "final_conv_depths": [0, 0, 0], "key_reduction": [1, 1, 1],
    },
}  # fmt: skip
DETR = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 6,
}  # fmt: skip
RT_DETR = {**DETR, "encoder_hidden_dim": 32, "decoder_in_channels": [32] * 3, "num_denoising": 4}
DEPTH = {"neck_hidden_sizes": [16] * 4, "fusion_hidden_size": 32}
OPTIONS = {
    "upernet": {"hidden_size": 16, "auxiliary_channels": 8, "num_labels": 3},
    "mask2former": {
        "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 32,
        "dim_feedforward": 32, "encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "num_queries": 6,
        "num_labels": 3, "train_num_points": 64,
    },
    "maskformer": {
        "fpn_feature_size": 32, "mask_feature_size": 32, "num_labels": 3,
        "decoder_config": {"model_type": "detr", **DETR},
    },
    **{name: {**DETR, "num_labels": 3} for name in ("detr", "conditional_detr", "deformable_detr")},
    **{name: {**RT_DETR, "num_labels": 3} for name in ("rt_detr", "rt_detr_v2", "d_fine")},
    "dab_detr": {**{key: value for key, value in DETR.items() if key != "d_model"}, "hidden_size": 32, "num_labels": 3},
    **{name: DEPTH for name in ("dpt", "depth_anything")},
    "vitpose": {"num_labels": 5},
    "vitmatte": {"convstream_hidden_sizes": [8, 8, 8], "fusion_hidden_sizes": [16, 16, 8, 8]},
}  # fmt: skip


def backbone_config(family, head=None, **changes):
    """A small backbone of a family, with what a head asks of it."""
    asked = ASKED.get(head, {}).get(family, {})
    return FAMILIES[family].make_config(**{**BACKBONES[family], "prior": PRIOR, **asked, **changes})


def make(head, family, options=None, **changes):
    """A small model of a head on a backbone; the weights follow from a seed."""
    torch.manual_seed(0)
    return heads.make_head(head, backbone_config(family, head, **changes), **{**OPTIONS[head], **(options or {})})


def pixels(head, height=SIDE, width=SIDE, batch=2):
    """Images that a head takes."""
    channels = 4 if head == "vitmatte" else 3
    return torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(7))


def labels(head, height=SIDE, width=SIDE):
    """What a head learns from, for two images; {} if transformers computes no loss for it."""
    task = heads.HEADS[head].task
    classes = torch.tensor([0, 2])
    if task == "semantic":
        maps = torch.zeros(2, height, width, dtype=torch.long)
        maps[:, height // 2 :] = 2
        return {"labels": maps}
    if task == "panoptic":
        masks = torch.zeros(2, height, width)
        masks[0, : height // 2], masks[1, height // 2 :] = 1, 1
        return {"mask_labels": [masks, masks], "class_labels": [classes, classes]}
    if task == "detection":
        boxes = torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.6, 0.6, 0.3, 0.4]])
        return {"labels": [{"class_labels": classes, "boxes": boxes}] * 2}
    return {}


def loss_of(head, model, **given):
    """A head's own loss or, where it has none, one of ours."""
    output = model(pixel_values=pixels(head), **given, **labels(head))
    return output.loss if heads.HEADS[head].learns else output[0].square().mean()


def trained_weights(head, model):
    """Names of the backbone's weights that a forward and a backward pass give a gradient other than 0."""
    model.train()
    loss = loss_of(head, model)
    assert loss.isfinite()
    loss.backward()
    named = heads.backbone_of(model).named_parameters()
    return {name for name, value in named if value.grad is not None and value.grad.abs().max() > 0}


def is_taken(head, family, **changes):
    """Whether a head takes a family."""
    try:
        heads.fitted_config(head, backbone_config(family, head, **changes))
    except ValueError:
        return False
    return True


@cache
def weights_without_gradient(head, family):
    """(names of the backbone's weights that get no gradient in a forward and a backward pass, the others)."""
    changes = {} if is_taken(head, family) else THREE_STAGES[family]
    model = make(head, family, **changes)
    names = {name for name, value in heads.backbone_of(model).named_parameters() if value.requires_grad}
    trained = trained_weights(head, model)
    return names - trained, trained


def cell(head, family):
    """What the table says about a head on a family, after a forward and a backward pass."""
    taken = is_taken(head, family)
    if not taken and not is_taken(head, family, **THREE_STAGES.get(family, {})):
        return "no"
    _, trained = weights_without_gradient(head, family)
    assert any(name.startswith("embeddings.") for name in trained)
    return ("trains" if heads.HEADS[head].learns else "runs") + ("" if taken else " of three stages")


def table():
    """The table as docs/heads.md has it."""
    titles = [FAMILIES[family].architecture for family in BACKBONES]
    lines = [
        f"| task head | class of transformers | maps | {' | '.join(titles)} |",
        "|---|---|---|" + "---|" * len(titles),
    ]
    for name, head in heads.HEADS.items():
        cells = " | ".join(cell(name, family) for family in BACKBONES)
        lines.append(f"| `{name}` | {head.model} | {needs(head)} | {cells} |")
    return "\n".join(lines)


def needs(head):
    """Which maps a head takes, in words."""
    if head.takes == "tokens":
        return f"tokens of {head.count} layers, with one class token"
    if head.takes == "patches":
        return "tokens of patches alone"
    words = ", ".join(map(str, head.strides))
    return f"stride{'s' * (len(head.strides) > 1)} {words}" if words else "the last one"


if __name__ == "__main__":
    print(table())
