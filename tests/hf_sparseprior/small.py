"""The smallest useful config of every family, for the tests that run over all of them."""

import torch

from hf_sparseprior.base.families import FAMILIES

VIT = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
SWIN = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "image_size": 16, "patch_size": 4}
CONVIT = {**VIT, "num_hidden_layers": 2, "num_local_layers": 1}
IFORMER = {
    "image_size": 16, "hidden_sizes": [4, 8], "conv_depths": [1, 0], "attention_depths": [1, 1],
    "final_conv_depths": [0, 1], "key_reduction": [1, 2],
}  # fmt: skip
SMALL = {
    "sparseprior_vit": VIT,
    "sparseprior_timesformer": VIT,
    "sparseprior_swin": SWIN,
    "sparseprior_convit": CONVIT,
    "sparseprior_iformer": IFORMER,
}


def known_family(family, table):
    """The family in a table of sizes whose config that of `family` is, or extends."""
    kinds = FAMILIES[family].config_class.__mro__
    return next(kind.model_type for kind in kinds if getattr(kind, "model_type", None) in table)


SMALL.update({name: SMALL[known_family(name, SMALL)] for name in FAMILIES})  # those that this table does not know, too
# Of each family a field, a value that is too large, the number in the message, and the limit that refuses it.
COMMON_SIZES = {
    "num_channels": (10**9, 10**9, "width"),
    "image_size": (160_000, 160_000, "tokens"),
    "num_labels": (10**7, 10**7, "labels"),
}
VIT_SIZES = {
    "num_hidden_layers": (10**7, 10**7, "layers"),
    "num_attention_heads": (2**30, 2**30, "heads"),
    "hidden_size": (2**40, 2**40, "width"),
    "intermediate_size": (10**9, 10**9, "width"),
    "stem_channels": (10**9, 10**9, "width"),
    "num_register_tokens": (10**6, 10**6, "tokens"),
    **COMMON_SIZES,
}
SIZES = {
    "sparseprior_vit": VIT_SIZES,
    "sparseprior_timesformer": VIT_SIZES,
    "sparseprior_convit": {
        name: VIT_SIZES[name] for name in VIT_SIZES if name not in ("stem_channels", "num_register_tokens")
    },
    "sparseprior_swin": {
        "depths": ([1, 10**7], 10**7, "layers"),
        "num_heads": ([2**30, 2], 2**30, "heads"),
        "embed_dim": (2**40, 2**40, "width"),
        "window_size": (10**9, 10**9, "tokens"),
        "mlp_ratio": (1e9, 1e9, "width"),
        **COMMON_SIZES,
    },
    "sparseprior_iformer": {
        "hidden_sizes": ([4, 2**40], 2**40, "width"),
        "conv_depths": ([1, 10**7], 10**7, "layers"),
        "attention_depths": ([1, 10**7], 10**7, "layers"),
        "final_conv_depths": ([1, 10**7], 10**7, "layers"),
        "key_reduction": ([1, 10**9], 10**9, "width"),
        "conv_ratio": (10**9, 10**9, "width"),
        "mlp_ratio": (10**9, 10**9, "width"),
        "stem_kernel_size": (10**9 + 1, 10**9 + 1, "width"),
        "kernel_size": (10**9 + 1, 10**9 + 1, "width"),
        "position_kernel_size": (10**9 + 1, 10**9 + 1, "width"),
        **COMMON_SIZES,
    },
}
SIZES.update({name: SIZES[known_family(name, SIZES)] for name in FAMILIES})


def shipped_families():
    """Names of the package's own families, for tests that state what each of them does."""
    return [name for name, family in FAMILIES.items() if family.config_class.__module__.startswith("hf_sparseprior.")]


def small(family, **options):
    """A small config of a family."""
    return FAMILIES[family].make_config(**{**SMALL[family], **options})


def scatter(model, amount=0.2, seed=0):
    """The model in evaluation mode, with weights far from their small initial values: every part of it matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(amount * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model.eval()


def noise(*shape, dtype=torch.float32):
    """Images, clips or tokens of this shape, the same in every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=dtype)
