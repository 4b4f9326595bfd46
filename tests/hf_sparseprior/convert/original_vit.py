"""A ViT under the names of DeiT's and DINO's original files: random weights, and its forward pass in float64."""

import math

import torch

WIDTH, HEADS, LAYERS, PATCH, CLASSES = 24, 3, 2, 4, 5
NORM_EPS = 1e-6


def random_weights(grid, class_token=True, positions=True, classes=CLASSES):
    """Weights of all parts but what a paper adds, in float64; `grid` patches in each direction."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / 3

    state = {"patch_embed.proj.weight": random(WIDTH, 3, PATCH, PATCH), "patch_embed.proj.bias": random(WIDTH)}
    if class_token:
        state["cls_token"] = random(1, 1, WIDTH)
    if positions:
        state["pos_embed"] = random(1, class_token + grid**2, WIDTH)
    for block in range(LAYERS):
        for norm in ("norm1", "norm2"):
            state |= {f"blocks.{block}.{norm}.weight": 1 + random(WIDTH), f"blocks.{block}.{norm}.bias": random(WIDTH)}
        for name, rows, columns in (("attn.qkv", 3, 1), ("attn.proj", 1, 1), ("mlp.fc1", 2, 1), ("mlp.fc2", 1, 2)):
            state[f"blocks.{block}.{name}.weight"] = random(rows * WIDTH, columns * WIDTH)
            state[f"blocks.{block}.{name}.bias"] = random(rows * WIDTH)
    state |= {"norm.weight": 1 + random(WIDTH), "norm.bias": random(WIDTH)}
    if classes:
        state |= {"head.weight": random(classes, WIDTH), "head.bias": random(classes)}
    return state


def normed(tokens, state, name):
    centred = tokens - tokens.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + NORM_EPS).sqrt()
    return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]


def linear(tokens, state, name):
    return tokens @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def forward(state, pixels, weights_of):
    """Tokens after the last norm. `weights_of(block, query, key)` gives a layer's attention weights (B, H, T, T) from
    queries and keys (B, H, T, D).
    """
    batch, channels, side, _ = pixels.shape
    grid = side // PATCH
    cells = pixels.reshape(batch, channels, grid, PATCH, grid, PATCH).permute(0, 2, 4, 1, 3, 5).reshape(
        batch, grid**2, -1
    )  # fmt: skip
    tokens = cells @ state["patch_embed.proj.weight"].flatten(1).T + state["patch_embed.proj.bias"]
    if "cls_token" in state:
        tokens = torch.cat([state["cls_token"].expand(batch, -1, -1), tokens], 1)
    tokens = tokens + state.get("pos_embed", 0.0)
    for block in range(LAYERS):
        name = f"blocks.{block}"
        qkv = linear(normed(tokens, state, f"{name}.norm1"), state, f"{name}.attn.qkv")
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
        attended = (weights_of(block, query, key) @ value).transpose(1, 2).flatten(2)
        tokens = tokens + linear(attended, state, f"{name}.attn.proj")
        hidden = linear(normed(tokens, state, f"{name}.norm2"), state, f"{name}.mlp.fc1")
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
        tokens = tokens + linear(hidden, state, f"{name}.mlp.fc2")
    return normed(tokens, state, "norm")


def images(grid):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, grid * PATCH, grid * PATCH, generator=generator, dtype=torch.float64)
