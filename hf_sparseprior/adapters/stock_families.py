"""The families of stock transformers models that take a prior, one row each.

A further family needs one `register_stock_family(StockFamily(...))` and one case in
tests/hf_sparseprior/adapters/stock_models.py, where a test asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_sparseprior.base.families import VIT_NAMES, ProjectionNames

# Names as in transformers 5.
DINO_NAMES = ProjectionNames(mlp=("mlp.fc1", "mlp.fc2", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))
CLIP_NAMES = ProjectionNames(
    query_value=("self_attn.q_proj", "self_attn.v_proj"),
    attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
)
VIDEOMAE_NAMES = ProjectionNames(
    query_value=("attention.attention.query", "attention.attention.value"),
    attention=(
        *("attention.attention.query", "attention.attention.key", "attention.attention.value"),
        "attention.output.dense",
    ),
    mlp=("intermediate.dense", "output.dense"),
)

TIMESFORMER_NAMES = ProjectionNames(
    query_value=("attention.attention.qkv", "temporal_attention.attention.qkv"),  # one layer each
    attention=(
        *("attention.attention.qkv", "attention.output.dense"),
        *("temporal_attention.attention.qkv", "temporal_attention.output.dense"),
    ),
    mlp=("intermediate.dense", "output.dense"),
)


@dataclass(frozen=True)
class StockFamily:
    """What differs between families.

    name: as error messages show it.
    embeddings, attention: names of the class of the embeddings, by which a family is found, and of the attention.
    model_types: values of `config.model_type`, also those of configs with a second tower.
    projections: what LoRA adapts.
    windows: attention runs within square windows, whose size is the number of its tokens.
    support_stages: how many of the first stages take a support; the others stay dense (Fibottention section 4.1).
    shuffled: the embeddings return (tokens, mask, ids_restore) of a random part of the patches (ViTMAE).
    masked: the embeddings take `bool_masked_pos` and leave these patches out (VideoMAE).
    own_forward: attention computes itself, without `AttentionInterface`; `stock_timesformer` and `stock_timm` have the
        forwards that take its place.
    untouched: a part of the names of attention modules that stay as they are, because they see no grid.
    """

    name: str
    embeddings: str
    attention: str
    model_types: tuple[str, ...]
    projections: ProjectionNames = VIT_NAMES
    windows: bool = False
    support_stages: int | None = None
    shuffled: bool = False
    masked: bool = False
    own_forward: bool = False
    untouched: str | None = None


STOCK_FAMILIES: dict[str, StockFamily] = {}  # by the class of the embeddings


def register_stock_family(family: StockFamily) -> None:
    """Register a family for `apply_prior`, the adapters, `lora_config` and the analyses.

    Raises:
        ValueError: if another family has the same embeddings or model type.
    """
    taken = {model_type for other in STOCK_FAMILIES.values() for model_type in other.model_types}
    if family.embeddings in STOCK_FAMILIES or taken.intersection(family.model_types):
        raise ValueError(f"{family.name}: {family.embeddings} or one of {family.model_types} is registered already")
    STOCK_FAMILIES[family.embeddings] = family


for _family in (
    StockFamily("ViT", "ViTEmbeddings", "ViTAttention", ("vit",)),
    StockFamily("DeiT", "DeiTEmbeddings", "DeiTAttention", ("deit",)),
    StockFamily("ViT-MSN", "ViTMSNEmbeddings", "ViTMSNAttention", ("vit_msn",)),
    StockFamily("DINOv2", "Dinov2Embeddings", "Dinov2Attention", ("dinov2",), DINO_NAMES),
    StockFamily(
        "DINOv2 with registers",
        "Dinov2WithRegistersEmbeddings",
        "Dinov2WithRegistersAttention",
        ("dinov2_with_registers",),
        DINO_NAMES,
    ),
    StockFamily("DINOv3", "DINOv3ViTEmbeddings", "DINOv3ViTAttention", ("dinov3_vit",), DINO_NAMES),
    StockFamily("BEiT", "BeitEmbeddings", "BeitAttention", ("beit",)),
    StockFamily("CLIP", "CLIPVisionEmbeddings", "CLIPAttention", ("clip", "clip_vision_model"), CLIP_NAMES),
    StockFamily("SigLIP", "SiglipVisionEmbeddings", "SiglipAttention", ("siglip", "siglip_vision_model"), CLIP_NAMES),
    StockFamily("ViTMAE", "ViTMAEEmbeddings", "ViTMAEAttention", ("vit_mae",), shuffled=True),
    StockFamily("I-JEPA", "IJepaEmbeddings", "IJepaAttention", ("ijepa",)),
    StockFamily("VideoMAE", "VideoMAEEmbeddings", "VideoMAESelfAttention", ("videomae",), VIDEOMAE_NAMES, masked=True),
    StockFamily("ViViT", "VivitEmbeddings", "VivitAttention", ("vivit",)),
    StockFamily(
        "TimeSformer",
        "TimesformerEmbeddings",
        "TimesformerSelfAttention",
        ("timesformer",),
        TIMESFORMER_NAMES,
        own_forward=True,
        untouched="temporal_attention",
    ),
    StockFamily("Swin", "SwinEmbeddings", "SwinAttention", ("swin",), windows=True, support_stages=2),
):
    register_stock_family(_family)


# timm's, by the class of the whole encoder. `embeddings` is what it calls the module that sees the image, `model_types`
# are its classes, and `stock_timm.FORWARDS` has the attention that its layers may have.
TIMM_FAMILIES: dict[str, StockFamily] = {
    model_type: family
    for family in (
        StockFamily(
            "timm's ViT",
            "patch_embed",
            "Attention",
            ("VisionTransformer", "VisionTransformerDistilled"),
            own_forward=True,
        ),
        StockFamily("timm's Eva", "patch_embed", "EvaAttention", ("Eva",), own_forward=True),
        StockFamily("timm's NaFlexVit", "embeds", "Attention", ("NaFlexVit",), own_forward=True),
        StockFamily(
            "timm's Swin",
            "patch_embed",
            "WindowAttention",
            ("SwinTransformer",),
            windows=True,
            support_stages=2,
            own_forward=True,
        ),
    )
    for model_type in family.model_types
}


def family_names() -> str:
    """Every family's name, for error messages."""
    families = {family.name: None for family in (*STOCK_FAMILIES.values(), *TIMM_FAMILIES.values())}
    return ", ".join(families)


def stock_projections() -> dict[str, ProjectionNames]:
    """What LoRA adapts, by `config.model_type`."""
    return {model_type: family.projections for family in STOCK_FAMILIES.values() for model_type in family.model_types}
