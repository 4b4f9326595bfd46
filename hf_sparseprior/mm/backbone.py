"""Our families as backbones of mmsegmentation and mmdetection: one class for each that has a `Backbone`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from transformers.modeling_outputs import BackboneOutput
from transformers.utils import CONFIG_NAME

from hf_sparseprior.base.checks import check_boolean, check_integer
from hf_sparseprior.base.config_keys import check_key, config_keys
from hf_sparseprior.base.families import FAMILIES, Family, family_of, for_every_family, is_backbone_weight
from hf_sparseprior.mm.init_cfg import check_family, draw_weights, foreign_fields, is_ours, load_start, read_init_cfg
from hf_sparseprior.models.configuration_sparseprior_vit import as_pair
from hf_sparseprior.models.feature_maps import pad_to_patches
from hf_sparseprior.priors.predictor import Predictor
from hf_sparseprior.training.distillation import learns_from_scores

# Keys of mm's own transformers, and what does the same here: the first of these names that is a field of the family.
MM_KEYS: dict[str, str] = {
    "img_size": "image_size",
    "pretrain_img_size": "image_size",
    "patch_sizes": "patch_size",
    "num_layers": "num_hidden_layers depths conv_depths",
    "depths": "num_hidden_layers conv_depths",
    "num_heads": "num_attention_heads",
    "init_values": "layerscale_value layer_scale_init_value",
    "qv_bias": "qkv_bias",
    "final_norm": "apply_layernorm",
    "with_cls_token": "use_class_token",
    "out_type": "reshape_hidden_states",
    "interpolate_mode": "interpolation",
    "norm_cfg": "layer_norm_eps batch_norm_eps",
    "act_cfg": "hidden_act",
    "mlp_ratio": "intermediate_size",
    "embed_dims": "hidden_size embed_dim hidden_sizes",
    "in_channels": "num_channels",
    "drop_rate": "hidden_dropout_prob",
    "attn_drop_rate": "attention_probs_dropout_prob",
}
# Others of their keys: what they choose is the same in all models of a family here, or does not exist.
MM_ONLY = frozenset(
    {
        *("window_size", "shift_size", "strides", "num_stages", "sr_ratios", "qk_scale", "use_abs_pos_embed"),
        *("patch_pad", "patch_norm", "patch_bias", "pre_norm", "num_fcs", "out_origin", "frozen_exclude"),
        *("convert_weights", "patch_size", "qkv_bias"),
    }
)


def register_backbones(registry: Any) -> None:
    """Put the backbone of every family into a registry of mm, those included that are registered later."""

    def register(family: Family) -> None:
        if family.backbone is not None:
            registry.register_module(module=mm_backbone(family.backbone), force=True)

    for_every_family(register)


@functools.cache
def mm_backbone(backbone: Any) -> Any:
    """The class by which mm configs name a family's `Backbone`, whose name it has without that word."""
    name = backbone.__name__.removesuffix("Backbone")
    about = f'`{backbone.__name__}` as mm configs build it, `dict(type="{name}", prior="violin", ...)`.'
    return type(name, (MMBackbone, backbone), {"__doc__": about, "__module__": __name__})


def __getattr__(name: str) -> Any:
    # The classes are found here by their names, as if each were written down.
    for family in FAMILIES.values():
        if family.backbone is not None and mm_backbone(family.backbone).__name__ == name:
            return mm_backbone(family.backbone)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class MMBackbone:
    """What an mm backbone has besides its family's `Backbone`, before which it comes in the order of inheritance.

    The modules and their names are the family's, so a checkpoint moves between the tasks unchanged. Images of any size
    are padded to whole patches at bottom and right; the position embedding is interpolated to the grid, and the prior
    is laid out on it.

    Args:
        preset: architecture by name (`from_preset` of the family's config), which `config` changes; None: that of the
            `pretrained` folder or, without one, `config` alone.
        pretrained: what `init_weights` takes the weights of, which mm's Runner calls before training: the folder of a
            saved model of the family, safetensors only; a folder or file of transformers, timm or mmsegmentation that
            `convert` reads; or a file of weights of ours (.pth, .safetensors). What does not fit is refused when the
            model is built. With a preset that can be without the folder.
        init_cfg: mm's way to say the same, dict(type="Pretrained", checkpoint=FOLDER or FILE, prefix="backbone."), the
            prefix for files alone; or another initializer of mm; or a list of them, the checkpoint last.
        out_indices: stages of the feature maps, 0 the embedding and n the output of layer n, or of stage n of a model
            with stages. (mm's own count from 0: a ViT's 3, 5, 7, 11 are 4, 6, 8, 12 here, and a Swin's 0, 1, 2, 3 are
            1, 2, 3, 4.)
        with_cp: activation checkpointing: what layers compute is computed again for the gradient instead of kept.
        output_cls_token: each map becomes [map, class token (B, C)], as DPTHead reads it; for ViT and for the plain
            layers of ConViT.
        frozen_stages: 0 freezes the embedding, n also the first n layers or stages, as in mm's ViTs and Swin; with all
            of them, the last norm too. What is frozen has no gradient and stays in evaluation mode. -1 freezes nothing.
        norm_eval: keep batch norms, which an iFormer and a convolutional stem have, in evaluation mode. iFormer's
            published detectors do so.
        config: fields of the family's config. Without `prior` it is that of the `pretrained` folder.

    Raises:
        ValueError: for a bad field, or a prior that prunes tokens.
        OSError: for a `pretrained` folder that is needed and holds no saved model.
    """

    config_class: Any
    config: Any

    def __init__(
        self,
        preset: str | None = None,
        pretrained: str | None = None,
        init_cfg: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        out_indices: Sequence[int] | None = None,
        with_cp: bool = False,
        output_cls_token: bool = False,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        **config: Any,
    ) -> None:
        self._is_built = False  # torch.nn.Module is not initialised yet, but plain attributes can be set
        check_keys(self.config_class, config)
        start = read_init_cfg(pretrained, init_cfg)
        folder = start.folder
        options = {**config, "out_indices": None if out_indices is None else list(out_indices)}
        saved: dict[str, Any] = {}
        if folder is not None and (preset is None or (Path(folder) / CONFIG_NAME).is_file()):
            saved = self.config_class.get_config_dict(folder)[0] if is_ours(folder) else foreign_fields(folder)
            check_family(saved["model_type"], folder, self.config_class)
        if preset is not None:
            # Without the folder's own prior a model with a mask would be taken for dense.
            own = {"prior": saved["prior"]} if "prior" in saved else {}
            built = self.config_class.from_preset(preset, **{**own, **options})
        elif saved:
            maps = {"out_features": None, **({"map_scales": None} if "map_scales" in saved else {})}
            built = self.config_class.from_dict({**saved, **maps, **options})
        else:
            built = self.config_class(**options)
        model: Any = super()
        model.__init__(built)
        self.start = start
        self.output_cls_token = check_boolean("output_cls_token", output_cls_token)
        if self.output_cls_token:
            check_class_tokens(self)
        if check_boolean("with_cp", with_cp):
            # The older name is deprecated since transformers 5.23.
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        self.norm_eval = check_boolean("norm_eval", norm_eval)
        self.frozen_stages = check_integer("frozen_stages", frozen_stages, -1)
        for module in frozen_modules(self):
            module.requires_grad_(False)
        if start.checkpoint is not None and Path(start.checkpoint).exists():
            check_start(self)
        self._is_built = True

    def init_weights(self) -> None:
        """Draw the weights (transformers, at construction) or load the `pretrained` ones (mm, before training)."""
        if not self._is_built:
            model: Any = super()
            model.init_weights()
            return
        draw_weights(cast(nn.Module, self), self.start.drawn)
        load_start(self)

    @property
    def out_channels(self) -> list[int]:
        """Channels of each map, what necks and heads call `in_channels`."""
        return list(cast(Any, self).channels)

    @property
    def embed_dims(self) -> int | list[int]:
        """mm's name for the width: of a Swin that of the first stage, of an iFormer those of all."""
        known = config_keys(self.config_class)
        return getattr(self.config, next(name for name in MM_KEYS["embed_dims"].split() if name in known))

    def train(self, mode: bool = True) -> Any:
        """As in torch; what is frozen stays in evaluation mode."""
        model: Any = super()
        model.train(mode)
        if self._is_built and mode:
            norms = [module for module in model.modules() if isinstance(module, BatchNorm)] if self.norm_eval else []
            for module in [*frozen_modules(self), *norms]:
                module.train(False)
        return self

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, ...] | tuple[list[Tensor], ...]:
        """Turn (B, channels, height, width) into one map for each of `out_indices`.

        Those of a ViT are (B, C, ceil(height / patch), ceil(width / patch)). With `output_cls_token`, lists of a map
        and its class token (B, C).
        """
        model: Any = super()
        padded = pad_to_patches(pixel_values, as_pair(self.config.patch_size))
        wanted = {"output_hidden_states": True} if self.output_cls_token else {}
        output = model.forward(padded, return_dict=True, **wanted)
        # Tokens have their channels next to each other in memory. Convolutions keep that layout, and mmcv's roi_align
        # reads a CPU tensor as if it were contiguous: it would pool numbers from the wrong places.
        maps = tuple(map_.contiguous() for map_ in cast(BackboneOutput, output).feature_maps or ())
        if not self.output_cls_token:
            return maps
        tokens = [output.hidden_states[index][:, 0] for index in self.config.out_indices]
        if self.config.apply_layernorm:
            tokens = [cast(Any, self).layernorm(token) for token in tokens]
        return tuple([map_, token] for map_, token in zip(maps, tokens, strict=True))


def check_keys(config_class: Any, given: dict[str, Any]) -> None:
    """Raise ValueError for keys that are no fields of a family, with what does the same here for all of mm's keys."""
    known = config_keys(config_class)
    problems = []
    for key, value in given.items():
        instead = next((name for name in MM_KEYS.get(key, "").split() if name in known), None)
        if key not in known and instead:
            problems.append(f"{key}={value!r} is no key of this backbone; use {instead}")
        elif key not in known and key in MM_ONLY.union(MM_KEYS):
            problems.append(f"{key}={value!r} does nothing in this backbone; leave it out")
    if problems:
        raise ValueError(", ".join(problems))
    for key in given:
        check_key(config_class, key)


def check_start(model: Any) -> None:
    """Load the checkpoint once, so that one that does not fit ends a run before data are read; draws nothing.

    mm loads it again when training begins. A model without memory (torch.device("meta")) is not checked.
    """
    if next(model.parameters()).device.type != "meta":
        with torch.random.fork_rng(devices=[]):
            load_start(model)


def frozen_modules(model: Any) -> list[nn.Module]:
    """What `frozen_stages` of a backbone freezes.

    Raises:
        ValueError: for more stages than the model has layers or stages.
    """
    stages, sources = model.frozen_stages, model.map_sources
    if stages >= len(sources):
        raise ValueError(f"frozen_stages={stages} must be at most the {len(sources) - 1} layers or stages")
    if stages < 0:
        return []
    last = [model.layernorm] if stages == len(sources) - 1 and hasattr(model, "layernorm") else []
    return [*sources[: stages + 1], *last]


def check_predictors(model: nn.Module) -> None:
    """Raise ValueError if a predictor would not be trained, because it learns from a loss that mm's heads do not have.

    One that is frozen by `frozen_stages` stays as it was trained elsewhere.
    """
    for name, module in model.named_modules():
        if isinstance(module, Predictor) and learns_from_scores(module):
            raise ValueError(
                f"{name}: prior {module.name!r} learns from a loss of its scores, which segmentation and detection do "
                "not have: train it with tasks.classification, and freeze its layers (frozen_stages)"
            )


def check_class_tokens(model: Any) -> None:
    """Raise ValueError unless there is a class token wherever a backbone has a map."""
    config = model.config
    # In a ConViT it joins after the gated layers.
    first = getattr(config, "num_local_layers", -1) + 1
    without = [index for index in config.out_indices if index < first]
    if not getattr(config, "use_class_token", first > 0):
        raise ValueError(f"output_cls_token=True needs a class token, and this {type(model).__name__} has none")
    if getattr(config, "map_scales", None):
        raise ValueError(f"output_cls_token=True: with map_scales={config.map_scales} maps are not those of layers")
    if without:
        raise ValueError(f"output_cls_token=True: there is a class token from out_indices={first} on, not at {without}")


def has_own_parts(model: nn.Module) -> bool:
    """Whether a backbone has weights that a bare model does not have."""
    return any(map(is_backbone_weight, model.state_dict()))


def save_backbone(model: Any, folder: str) -> None:
    """Write a backbone as a folder that every other task loads: of its family's bare model, or of its backbone if that
    has weights of its own.

    The weights are the model's own, bit for bit. So is the config, except for the choice of feature maps of a bare
    model.
    """
    family = family_of(model.config)
    assert family is not None
    fields = model.config.to_dict()
    own_parts = has_own_parts(model)
    if not own_parts:
        fields |= {"out_features": None, "out_indices": None}
    cls = family.backbone if own_parts else family.base
    saved = cls(type(model.config).from_dict(fields)).to(model.dtype)
    saved.load_state_dict(model.state_dict())
    saved.save_pretrained(folder)
