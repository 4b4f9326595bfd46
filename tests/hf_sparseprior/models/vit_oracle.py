"""A SparsePriorViT written out in float64, and small models of every prior to compare with it."""

import math
import random
from itertools import cycle

import numpy as np
import torch
from torch.nn import functional as F

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.patterns.curves import curve_rank
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.sequences import SEQUENCES
from hf_sparseprior.patterns.supports import SUPPORTS, build_mask
from tests.hf_sparseprior.small import noise

# Every support with every decay and without one, and the settings that run other code.
# The published stride of 65 leaves a small grid nothing but its diagonal, where no decay acts.
OWN = {name: {"name": "strided", "stride": 5} if name == "strided" else name for name in SUPPORTS}
PRIORS = {f"{name}+{decay}": {"support": support, "decay": decay} for name, support in OWN.items() for decay in DECAYS}
PRIORS |= {name: {"support": support} for name, support in OWN.items()}
PRIORS |= {name: {"support": {"name": "fibottention", "sequence": name}} for name in SEQUENCES if name != "wythoff"}
PRIORS |= {
    "zero fill": {"support": {"name": "fibottention", "mask_fill": "zero"}},
    "zero fill+violin": {"support": {"name": "fibottention", "mask_fill": "zero"}, "decay": "violin"},
    "modified": {"support": {"name": "fibottention", "modified": True}},
    "learned prefix": {"support": "fibottention", "decay": {"name": "violin", "learn_prefix": True}},
    "fixed gamma": {"decay": {"name": "violin", "learn_alpha": False, "learn_beta": False}},
}
# Every support, every decay and every setting once, for tests of what is the same for any two of them.
EACH = {name: prior for name, prior in PRIORS.items() if "+" not in name or "zero" in name}
EACH |= {name: PRIORS[name] for name in map("+".join, zip(SUPPORTS, cycle(DECAYS)))}
# For tests in which one prior of each kind of code is enough.
FOUR = ["dense", "fibottention", "dense+violin", "fibottention+violin"]
# Every kind of decay, and settings that add weights or buffers, for tests of what is saved or made elsewhere.
KEPT = [f"dense+{decay}" for decay in DECAYS] + ["fibottention", "zero fill+violin", "learned prefix", "fixed gamma"]
# Backends of whole models; diagonal is for supports with offsets.
PATHS = [(prior, "auto") for prior in FOUR]
PATHS += [("fibottention+violin", "reference"), ("fibottention+violin", "diagonal"), ("fibottention", "diagonal")]


def tiny(prior="dense", **settings):
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    prior = PRIORS.get(prior, prior) if isinstance(prior, str) else prior
    return SparsePriorViTConfig(
        prior=prior, **{**sizes, "image_size": 32, "patch_size": 4, "num_labels": 3, **settings}
    )


@torch.no_grad()
def stir(model, seed=1, amount=0.5):
    """Move every weight far from its initial value, so that attention is not uniform and masks matter."""
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor, low, high):
        return torch.rand(tensor.shape, generator=generator).to(tensor.dtype) * (high - low) + low

    for name, tensor in model.state_dict().items():
        if name.endswith("beta"):
            tensor.copy_(draw(tensor, 0.0, 4.0))
        elif name.endswith("alpha"):
            tensor.copy_(draw(tensor, 0.5, 2.0))
        else:
            tensor.add_(draw(tensor, -amount, amount))
    return model


def make(prior="dense", cls=SparsePriorViTForImageClassification, amount=0.5, **settings):
    torch.manual_seed(0)
    return stir(cls(tiny(prior, **settings)), amount=amount).eval()


def images(batch=2, size=(32, 32), channels=3, dtype=torch.float32):
    return noise(batch, channels, *size, dtype=torch.float64).to(dtype)


def decays(model):
    return [layer.attention.decay_bias for layer in model.base_model.layers]


# ---- the model written out by hand ----------------------------------------------------------------------------------


def decay_by_hand(config, scalars, grid, prefix):
    """alpha * M (H, T, T), VIOLIN Eqs. 11 to 13, from powers of gamma in float64."""
    decay, heads = config.prior["decay"], config.num_attention_heads
    gamma = torch.sigmoid(scalars["beta"])
    rows, columns = np.indices(grid).reshape(2, -1)
    if decay["name"] == "manhattan":
        distances = [abs(rows[:, None] - rows) + abs(columns[:, None] - columns)]
    elif decay["name"] == "random_order":
        order = list(range(len(rows)))
        random.Random(decay["seed"]).shuffle(order)
        turned = np.array(order).reshape(grid[::-1]).T.ravel()  # the order of the transposed grid
        distances = [abs(rank[:, None] - rank) for rank in (np.array(order), turned)]
    elif decay["name"] == "learned_order":
        assert list(grid) == decay["grid"]
        place = scalars["order"].flatten()
        distances = [abs(place[:, None] - place).numpy()]
    elif decay["name"] == "violin":
        ranks = [curve_rank(curve, grid).ravel() for curve in decay["curves"]]
        distances = [abs(rank[:, None] - rank) for rank in ranks]
    else:  # one that this does not know: by the positions that it declares
        positions = DECAYS[decay["name"]].positions(decay, grid)
        distances = [sum(abs(axis[:, None] - axis) for axis in curve) for curve in positions]
    powers = [gamma[c][:, None, None] ** torch.tensor(d) for c, d in enumerate(distances)]
    weights = torch.ones(heads, prefix + len(rows), prefix + len(rows), dtype=torch.float64)
    if "prefix_beta" in scalars:
        weights = weights * torch.sigmoid(scalars["prefix_beta"])[:, None, None]
    weights[:, prefix:, prefix:] = torch.stack(powers).mean(0)
    return weights * scalars["alpha"][:, None, None] if "alpha" in scalars else weights


def attend_by_hand(config, layer, q, k, v, scalars, grid):
    """Attention weights (B, H, T, T) and their output, dense tensors only."""
    prefix, support = config.num_prefix_tokens, config.prior["support"]
    logits = q @ k.mT / math.sqrt(q.shape[-1])
    if config.prior["decay"]:
        logits = logits * decay_by_hand(config, scalars, grid, prefix)
    tokens = grid[0] * grid[1]
    settings = {"num_heads": config.num_attention_heads, "num_tokens": tokens, "num_prefix_tokens": prefix}
    mask = torch.tensor(build_mask(support, layer=layer, **settings))
    logits = torch.where(mask, logits, -math.inf if support["mask_fill"] == "neg_inf" else 0.0)
    weights = logits.softmax(-1)
    return weights, weights @ v


def vit_by_hand(model, pixels):
    """Last hidden state (B, T, C), from the model's weights, in float64 and without the library's modules."""
    config = model.config
    weights = {name: tensor.double() for name, tensor in model.base_model.state_dict().items()}
    patch = config.patch_size if isinstance(config.patch_size, list) else [config.patch_size] * 2
    grid = (pixels.shape[2] // patch[0], pixels.shape[3] // patch[1])
    width, heads = config.hidden_size, config.num_attention_heads

    def linear(x, name):
        return F.linear(x, weights[name + ".weight"], weights.get(name + ".bias"))

    def norm(x, name):
        return F.layer_norm(x, (width,), weights[name + ".weight"], weights[name + ".bias"], config.layer_norm_eps)

    kernel, bias = weights["embeddings.projection.weight"], weights["embeddings.projection.bias"]
    patches = F.unfold(pixels.double(), patch, stride=patch).mT @ kernel.reshape(width, -1).T + bias
    positions = weights.get("embeddings.position_embeddings")
    prefix = [weights[f"embeddings.{name}_token"] for name in ("class", "distillation") if use(config, name)]
    if positions is not None:
        with_position = len(prefix) if config.position_embedding_for_class_token else 0
        prefix = [token + positions[:, n] if n < with_position else token for n, token in enumerate(prefix)]
        map_ = positions[:, with_position:].mT.reshape(1, width, *config.grid)
        if grid != config.grid:
            map_ = F.interpolate(map_, grid, mode=config.interpolation, align_corners=False)
        patches = patches + map_.flatten(2).mT
    if config.num_register_tokens:
        prefix.append(weights["embeddings.register_tokens"])
    x = torch.cat([token.expand(len(pixels), -1, -1) for token in prefix] + [patches], 1)
    attentions = []
    for n in range(config.num_hidden_layers):
        layer = f"layers.{n}."
        x_norm = norm(x, layer + "layernorm_before")
        q, k, v = (
            linear(x_norm, f"{layer}attention.{p}_proj").unflatten(-1, (heads, -1)).transpose(1, 2) for p in "qkv"
        )
        path = layer + "attention.decay_bias."
        scalars = {name.removeprefix(path): tensor for name, tensor in weights.items() if name.startswith(path)}
        attention, out = attend_by_hand(config, n, q, k, v, scalars, grid)
        attentions.append(attention)
        scale = weights.get(layer + "layerscale_attention.scale", 1.0)
        x = x + scale * linear(out.transpose(1, 2).flatten(2), layer + "attention.o_proj")
        hidden = F.gelu(linear(norm(x, layer + "layernorm_after"), layer + "mlp.fc1"))
        x = x + weights.get(layer + "layerscale_mlp.scale", 1.0) * linear(hidden, layer + "mlp.fc2")
    return norm(x, "layernorm"), attentions


def use(config, token):
    return getattr(config, f"use_{token}_token")


def observed_masks(model, batch=2):
    """Which pairs have weight, (L, H, T, T); the same for every image."""
    attentions = torch.stack(model(images(batch), output_attentions=True).attentions)
    masks = attentions != 0
    assert (masks == masks[:, :1]).all()
    return masks[:, 0]
