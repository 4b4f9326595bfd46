"""Tiny stock transformers models with random weights, one of each family that takes a prior."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import (
    BeitModel,
    CLIPConfig,
    CLIPModel,
    CLIPVisionModel,
    DeiTModel,
    Dinov2Model,
    Dinov2WithRegistersModel,
    DINOv3ViTModel,
    IJepaModel,
    SiglipVisionModel,
    SwinModel,
    TimesformerModel,
    VideoMAEModel,
    ViTMAEModel,
    ViTModel,
    ViTMSNModel,
    VivitModel,
)

from hf_sparseprior.adapters.stock_attention import StockPrior

SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
PATCHES = {"image_size": 32, "patch_size": 4}
TINY = {**SIZES, **PATCHES}
CLIP = (2, 4, 3, 32, 32)
MASKED = torch.stack([torch.randperm(128, generator=torch.Generator().manual_seed(seed)) < 64 for seed in (3, 4)])


@dataclass
class StockCase:
    """A family: how to build it, its inputs, and where its tokens lie."""

    model: type
    config: dict[str, Any]
    prefix: int = 1
    grid: tuple[int, int] = (8, 8)  # of the configured image, or of one frame
    frames: int = 1  # frames of patches that attention sees together: VideoMAE's patches are two frames deep
    shape: tuple[int, ...] = (2, 3, 32, 32)
    inputs: dict[str, Any] = field(default_factory=dict)

    def build(self, seed: int = 0) -> nn.Module:
        """A model in eval mode whose attention is far from uniform, so that a prior changes the output."""
        torch.manual_seed(seed)
        model = self.model(self.model.config_class(**self.config)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("q_proj.weight", "k_proj.weight", "query.weight", "key.weight")) or name.endswith(
                    ("register_tokens", "bias_table", "cls_token")
                ):
                    parameter.normal_(std=0.3)
                if name.endswith("qkv.weight"):
                    parameter[: 2 * len(parameter) // 3].normal_(std=0.3)
        return model

    def example(self, seed: int = 1) -> dict[str, Any]:
        """Inputs of the forward."""
        generator = torch.Generator().manual_seed(seed)
        return {"pixel_values": torch.randn(self.shape, generator=generator), **self.inputs}


def _noise(seed: int = 2) -> torch.Tensor:
    return torch.rand(2, 64, generator=torch.Generator().manual_seed(seed))


STOCK = {
    "vit": StockCase(ViTModel, TINY),
    "deit": StockCase(DeiTModel, TINY, prefix=2),
    "msn": StockCase(ViTMSNModel, TINY),
    "dinov2": StockCase(Dinov2Model, {**TINY, "mlp_ratio": 2}),
    "dinov2_registers": StockCase(Dinov2WithRegistersModel, {**TINY, "mlp_ratio": 2}, prefix=5),
    "dinov3": StockCase(DINOv3ViTModel, {**TINY, "hidden_size": 64, "num_register_tokens": 4}, prefix=5),
    "beit": StockCase(BeitModel, {**TINY, "use_relative_position_bias": True}),
    "clip": StockCase(CLIPVisionModel, TINY),
    "siglip": StockCase(SiglipVisionModel, TINY, prefix=0),
    "mae": StockCase(ViTMAEModel, {**TINY, "mask_ratio": 0.5}, inputs={"noise": _noise()}),
    "ijepa": StockCase(IJepaModel, TINY, prefix=0),
    "videomae": StockCase(VideoMAEModel, {**TINY, "num_frames": 4}, prefix=0, frames=2, shape=(2, 4, 3, 32, 32)),
    "videomae_masked": StockCase(
        VideoMAEModel,
        {**TINY, "num_frames": 4},
        prefix=0,
        frames=2,
        shape=(2, 4, 3, 32, 32),
        inputs={"bool_masked_pos": MASKED},
    ),
    "vivit": StockCase(
        VivitModel, {**SIZES, "image_size": 32, "tubelet_size": [2, 4, 4], "num_frames": 4}, frames=2, shape=CLIP
    ),
    "timesformer": StockCase(TimesformerModel, {**TINY, "num_frames": 4}, shape=CLIP),
    "timesformer_joint": StockCase(
        TimesformerModel,
        {**TINY, "num_frames": 2, "attention_type": "joint_space_time"},
        frames=2,
        shape=(2, 2, 3, 32, 32),
    ),
    "swin": StockCase(
        SwinModel,
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 24,
            "depths": [2, 2, 2],
            "num_heads": [2, 4, 4],
            "window_size": 4,
        },
        prefix=0,
        grid=(4, 4),
    ),
}


def visible_patches(name: str) -> torch.Tensor | None:
    """(B, n): which patches of the grid the tokens of a case are, in order; None: all patches in raster order."""
    case = STOCK[name]
    if "noise" in case.inputs:
        return case.inputs["noise"].argsort(1)[:, :32]
    if "bool_masked_pos" in case.inputs:
        return torch.stack([row.logical_not().nonzero()[:, 0] for row in case.inputs["bool_masked_pos"]])
    return None


def tiny_clip() -> nn.Module:
    """CLIP with a text tower, whose attention must stay as it is."""
    text = {**SIZES, "vocab_size": 50, "max_position_embeddings": 16}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=TINY)).eval()


def output(model: nn.Module, name: str, **extra: Any) -> torch.Tensor:
    """Hidden states of a case's example, without gradients."""
    with torch.no_grad():
        return model(**STOCK[name].example(), **extra).last_hidden_state


def move_decays(model: nn.Module, seed: int = 5) -> None:
    """Set decays far from the identity, different in each layer."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, StockPrior) and module.decay_bias is not None:
            with torch.no_grad():
                beta, alpha = module.decay_bias.beta, module.decay_bias.alpha
                beta.copy_(torch.rand(beta.shape, generator=generator) * 3)
                alpha.copy_(1 + torch.rand(alpha.shape, generator=generator))
