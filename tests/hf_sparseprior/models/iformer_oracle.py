"""iFormer written out from its paper (Zheng 2025) with the names of its published files, in plain functions.

A network is `blocks`: for each of four stages a word with a letter for each block, C convolution, E position encoding,
A attention, F MLP.
"""

import torch
from torch.nn import functional as F

EPS = 1e-5
DIMS, BLOCKS, REDUCTION = (4, 6, 8, 16), ("C", "CC", "CEAFEAFC", "EAF"), (1, 1, 2, 4)
# The same as fields of our config.
SMALL = {
    "image_size": 64, "hidden_sizes": DIMS, "conv_depths": (1, 2, 1, 0), "attention_depths": (0, 0, 2, 1),
    "final_conv_depths": (0, 0, 1, 0), "key_reduction": REDUCTION, "conv_ratio": 3, "mlp_ratio": 2, "num_labels": 5,
}  # fmt: skip


def published_state(gamma=False, distilled=False, labels=5, seed=0):
    """Random weights and statistics, none of them near 0 or 1, in float64."""
    generator = torch.Generator().manual_seed(seed)
    state = {}

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def norm(name, width):
        state[f"{name}.weight"], state[f"{name}.bias"] = 1 + 0.3 * random(width), 0.3 * random(width)
        state[f"{name}.running_mean"], state[f"{name}.running_var"] = 0.3 * random(width), 0.5 + random(width) ** 2
        state[f"{name}.num_batches_tracked"] = torch.tensor(7)

    def convolution(name, outputs, inputs, kernel):
        state[f"{name}.c.weight"] = random(outputs, inputs, kernel, kernel) / (inputs * kernel**2) ** 0.5
        norm(f"{name}.bn", outputs)

    convolution("downsample_layers.0.0", DIMS[0] // 2, 3, 5)
    convolution("downsample_layers.0.2.conv_exp_bn1", DIMS[0] * 2, DIMS[0] // 2, 5)
    convolution("downsample_layers.0.2.conv_pwl_bn2", DIMS[0], DIMS[0] * 2, 1)
    for stage, (width, word) in enumerate(zip(DIMS, BLOCKS, strict=True)):
        if stage:
            convolution(f"downsample_layers.{stage}.0", width, DIMS[stage - 1], 3)
        for number, kind in enumerate(word):
            name = f"stages.{stage}.{number}.block"
            mixer = f"{name}.{'channel_mixer' if kind == 'F' else 'token_channel_mixer'}"
            if kind == "C":
                convolution(f"{mixer}.m.0", width, 1, 7)
                convolution(f"{mixer}.m.1", 3 * width, width, 1)
                convolution(f"{mixer}.m.3", width, 3 * width, 1)
            elif kind == "E":
                convolution(f"{name}.cpe.m", width, 1, 3)
            elif kind == "A":
                keys = width // REDUCTION[stage]
                for part, outputs in (("q", keys), ("k", keys), ("proj", width), ("v_gate", 2 * width)):
                    convolution(f"{mixer}.m.{part}", outputs, width, 1)
            else:
                convolution(f"{mixer}.m.0", 2 * width, width, 1)
                convolution(f"{mixer}.m.2", width, 2 * width, 1)
            if gamma and kind != "E":
                state[f"{mixer}.gamma"] = 0.5 + random(1, width, 1, 1).abs()
    for name in ("classifier", *(["classifier_dist"] if distilled else [])) if labels else ():
        norm(f"classifier.{name}.bn", DIMS[-1])
        state[f"classifier.{name}.l.weight"], state[f"classifier.{name}.l.bias"] = random(labels, 16), random(labels)
    return state


def normed(state, name, values, training):
    """Batch norm of dimension 1."""
    others = [axis for axis in range(values.dim()) if axis != 1]
    shape = (1, -1, *(1,) * (values.dim() - 2))
    mean, variance = state[f"{name}.running_mean"], state[f"{name}.running_var"]
    if training:
        mean, variance = values.mean(others), values.var(others, unbiased=False)
    values = (values - mean.view(shape)) / (variance.view(shape) + EPS).sqrt()
    return values * state[f"{name}.weight"].view(shape) + state[f"{name}.bias"].view(shape)


def published_forward(state, pixels, training=False, pair_weights=None, maps=None):
    """Logits of one classifier, or the mean of two; without classifiers the mean over the last map.

    pair_weights: (layer, grid) -> mask (N, N) of the pairs that are seen, and what multiplies their logits.
    maps: a list to which the maps of stem and stages are added.
    """

    def convolution(values, name, stride=1, depthwise=False):
        weight = state[f"{name}.c.weight"]
        groups = len(weight) if depthwise else 1
        values = F.conv2d(values, weight, stride=stride, padding=weight.shape[-1] // 2, groups=groups)
        return normed(state, f"{name}.bn", values, training)

    def attention(values, name):
        nonlocal layer
        batch, width, *grid = values.shape
        q, k = (convolution(values, f"{name}.{part}").flatten(2) for part in "qk")
        joint = torch.sigmoid(convolution(values, f"{name}.v_gate")).flatten(2)
        v, gate = joint[:, :width], joint[:, width:]
        logits = torch.einsum("bcn,bcm->bnm", q, k) / q.shape[1] ** 0.5
        if pair_weights is not None:
            mask, factor = pair_weights(layer, tuple(grid))
            logits = (logits * factor).masked_fill(~mask, -torch.inf)
        out = torch.einsum("bnm,bcm->bcn", torch.softmax(logits, -1), v) * gate
        layer += 1
        return convolution(out.view(batch, width, *grid), f"{name}.proj")

    layer = 0
    values = F.gelu(convolution(pixels, "downsample_layers.0.0", 2))
    values = F.gelu(convolution(values, "downsample_layers.0.2.conv_exp_bn1", 2))
    values = convolution(values, "downsample_layers.0.2.conv_pwl_bn2")
    seen = [values]
    for stage, word in enumerate(BLOCKS):
        if stage:
            values = convolution(values, f"downsample_layers.{stage}.0", 2)
        for number, kind in enumerate(word):
            name = f"stages.{stage}.{number}.block"
            mixer = f"{name}.{'channel_mixer' if kind == 'F' else 'token_channel_mixer'}"
            if kind == "C":
                branch = convolution(values, f"{mixer}.m.0", depthwise=True)
                branch = convolution(F.gelu(convolution(branch, f"{mixer}.m.1")), f"{mixer}.m.3")
            elif kind == "E":
                branch = convolution(values, f"{name}.cpe.m", depthwise=True)
            elif kind == "A":
                branch = attention(values, f"{mixer}.m")
            else:
                branch = convolution(F.gelu(convolution(values, f"{mixer}.m.0")), f"{mixer}.m.2")
            values = values + state.get(f"{mixer}.gamma", 1.0) * branch
        seen.append(values)
    if maps is not None:
        maps += seen
    pooled = values.mean((2, 3))
    logits = [
        normed(state, f"classifier.{name}.bn", pooled, training) @ state[f"classifier.{name}.l.weight"].T
        + state[f"classifier.{name}.l.bias"]
        for name in ("classifier", "classifier_dist")
        if f"classifier.{name}.l.weight" in state
    ]
    return sum(logits) / len(logits) if logits else pooled
