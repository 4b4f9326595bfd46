"""Heads of transformers on our backbones: which maps each takes, and one call that makes the model.

    from transformers import UperNetForSemanticSegmentation
    import hf_sparseprior as sp
    config = sp.SparsePriorViTConfig.from_preset("deit_small", prior="violin")
    model = sp.heads.make_head("upernet", config, num_labels=150)
    model.save_pretrained("FOLDER")                                # a folder of transformers' own class
    UperNetForSemanticSegmentation.from_pretrained("FOLDER")       # after `import hf_sparseprior`
    sp.heads.offer_code("FOLDER")                                  # for `trust_remote_code=True` instead

A head needs nothing of ours besides the config of its backbone, so `UperNetConfig(backbone_config=...)` does the same;
`make_head` chooses `out_features` and `map_scales` and refuses in one line what would fail within a head.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig
from transformers.backbone_utils import BackboneMixin

from hf_sparseprior.base.checks import check_keys, did_you_mean
from hf_sparseprior.base.config_keys import check_common_value
from hf_sparseprior.base.families import family_of
from hf_sparseprior.base.files import write_text
from hf_sparseprior.base.json_files import read_json_object
from hf_sparseprior.base.limits import check_size

Kind = Literal["maps", "tokens", "patches"]
Task = Literal["semantic", "panoptic", "detection", "depth", "pose", "matting"]
# Keys of every config that a head's options may have besides the fields of its own config.
COMMON_OPTIONS = ("num_labels", "id2label", "label2id")


@dataclass(frozen=True)
class Head:
    """A head of transformers.

    config, model: names of its classes in transformers.
    task: what it is for.
    takes: "maps"; or "tokens" with one class token before the patches, or "patches" alone, in layers of one width.
    strides: of the maps, in pixels; a backbone with patches of other sizes comes as near as doubling and halving can.
        An empty one: the last map, whatever its stride.
    exact: only maps of just these strides will do.
    count: of the layers whose tokens it takes.
    learns: whether transformers' class computes a loss.
    """

    config: str
    model: str
    task: Task
    takes: Kind = "maps"
    strides: tuple[int, ...] = ()
    exact: bool = False
    count: int = 1
    learns: bool = True

    @property
    def config_class(self) -> Any:
        """The class of its config."""
        return getattr(transformers, self.config)

    @property
    def model_class(self) -> Any:
        """The class of its model."""
        return getattr(transformers, self.model)

    @property
    def num_maps(self) -> int:
        """How many maps it takes."""
        return self.count if self.takes != "maps" else max(1, len(self.strides))


PYRAMID, LEVELS = (4, 8, 16, 32), (8, 16, 32)
HEADS: dict[str, Head] = {
    "upernet": Head("UperNetConfig", "UperNetForSemanticSegmentation", "semantic", strides=PYRAMID),
    "mask2former": Head("Mask2FormerConfig", "Mask2FormerForUniversalSegmentation", "panoptic", strides=PYRAMID),
    "maskformer": Head("MaskFormerConfig", "MaskFormerForInstanceSegmentation", "panoptic", strides=PYRAMID),
    "detr": Head("DetrConfig", "DetrForObjectDetection", "detection"),
    "conditional_detr": Head("ConditionalDetrConfig", "ConditionalDetrForObjectDetection", "detection"),
    "dab_detr": Head("DabDetrConfig", "DabDetrForObjectDetection", "detection"),
    "deformable_detr": Head("DeformableDetrConfig", "DeformableDetrForObjectDetection", "detection", strides=LEVELS),
    "rt_detr": Head("RTDetrConfig", "RTDetrForObjectDetection", "detection", strides=LEVELS),
    "rt_detr_v2": Head("RTDetrV2Config", "RTDetrV2ForObjectDetection", "detection", strides=LEVELS),
    "d_fine": Head("DFineConfig", "DFineForObjectDetection", "detection", strides=LEVELS),
    "dpt": Head("DPTConfig", "DPTForDepthEstimation", "depth", "tokens", count=4, learns=False),
    "depth_anything": Head(
        "DepthAnythingConfig", "DepthAnythingForDepthEstimation", "depth", "tokens", count=4, learns=False
    ),
    "vitpose": Head("VitPoseConfig", "VitPoseForPoseEstimation", "pose", "patches", learns=False),
    "vitmatte": Head("VitMatteConfig", "VitMatteForImageMatting", "matting", strides=(16,), exact=True, learns=False),
}


def make_head(name: str, backbone: PretrainedConfig, **options: Any) -> Any:
    """A model of transformers' class with this head on this backbone, its weights drawn.

    Args:
        name: one of HEADS.
        backbone: config of one of our families.
        options: fields of the head's config; those that follow from the backbone are filled in.

    Raises:
        ValueError: as `head_config`.
    """
    config = head_config(name, backbone, **options)
    return HEADS[name].model_class(config)


def head_config(name: str, backbone: PretrainedConfig, **options: Any) -> Any:
    """The config of a head on a backbone, in transformers' class.

    The backbone's `out_features`, if they are more than its last map, stay as they are, and so do its `map_scales`.

    Raises:
        ValueError: for a head or an option that there is not, and for a backbone that the head cannot take.
    """
    if not isinstance(name, str) or name not in HEADS:
        raise ValueError(f"head={name!r:.60} must be one of {', '.join(HEADS)}{did_you_mean(name, HEADS)}")
    head = HEADS[name]
    known = [field.name for field in fields(head.config_class) if field.name != "backbone_config"]
    check_keys(options, sorted({*known, *COMMON_OPTIONS}), head.config)
    for key in COMMON_OPTIONS:
        check_common_value(key, options.get(key))  # transformers takes -1 classes, and names of other numbers
    labels, num_labels = options.get("id2label"), options.get("num_labels")
    if num_labels is not None:
        check_size("num_labels", num_labels, 1, "labels")
    if labels is not None and num_labels not in (None, len(labels)):
        raise ValueError(f"num_labels={num_labels} must be the {len(labels)} classes of id2label")
    fitted = fitted_config(name, backbone)
    widths = {map_.name: map_.width for map_ in fitted.maps}
    derived: dict[str, Any] = {"backbone_config": fitted}
    if "encoder_in_channels" in known:
        derived["encoder_in_channels"] = [widths[feature] for feature in fitted.out_features]
    if name == "depth_anything":
        derived |= {"patch_size": fitted.patch_size, "reassemble_hidden_size": fitted.hidden_size}
    if name == "vitmatte":
        derived["hidden_size"] = widths[fitted.out_features[-1]]
    for key in sorted(options.keys() & derived.keys()):
        raise ValueError(f"{key}={options[key]!r:.60} follows from the backbone; leave it out")
    try:
        return head.config_class(**derived, **options)
    except StrictDataclassError as error:  # several lines
        raise ValueError(f"{head.config}: {' '.join(str(error).split())}") from None


def fitted_config(name: str, backbone: PretrainedConfig) -> Any:
    """A copy of a backbone's config with the maps that a head takes.

    Raises:
        ValueError: for a backbone that the head cannot take.
    """
    head, family = HEADS[name], family_of(backbone)
    if family is None or family.backbone is None:
        raise ValueError(f"{name} takes the config of a backbone, not a {getattr(backbone, 'model_type', backbone)!r}")
    config: Any = backbone
    changes = _maps(name, head, config) if head.takes == "maps" else _tokens(name, head, config)
    fitted = type(config).from_dict({**config.to_dict(), "out_indices": None, **changes})
    fitted._attn_implementation = config._attn_implementation  # no part of the dictionary
    return fitted


def backbone_of(model: Any) -> Any:
    """The backbone in a model with a head."""
    return next(module for module in model.modules() if isinstance(module, BackboneMixin))


# ---- saved folders --------------------------------------------------------------------------------------------------

CODE = "sparseprior_head"
CODE_TEXT = '''"""For `trust_remote_code=True`: the package of the backbone, and transformers' classes of the head."""

import hf_sparseprior  # noqa: F401  makes the backbone known
import transformers


class {config}(transformers.{config}):
    """As transformers has it."""


class {model}(transformers.{model}):
    """As transformers has it."""

    config_class = {config}
'''


def offer_code(folder: str | os.PathLike) -> None:
    """Let `trust_remote_code=True` import this package for a saved head.

    transformers looks for the config of a backbone among those that it knows, and never in the folder, so that without
    the package a head is `KeyError: 'sparseprior_vit'`. With the file that is written here, Auto classes and `pipeline`
    import the package if `trust_remote_code=True` is given, or say that it is missing.

    Args:
        folder: what `save_pretrained` of a head has written.

    Raises:
        ValueError: for a folder of another model. OSError: for a missing or broken config.json.
    """
    file = Path(folder) / "config.json"
    content = read_json_object(file)
    head = next((head for head in HEADS.values() if head.config_class.model_type == content.get("model_type")), None)
    if head is None:
        raise ValueError(f"{folder} holds a {content.get('model_type')!r} model, none of {', '.join(HEADS)}")
    mappings = {name: getattr(transformers, name) for name in dir(transformers) if name.startswith("AutoModelFor")}
    names = [
        name
        for name, auto in mappings.items()
        if head.config_class in auto._model_mapping and auto._model_mapping[head.config_class] is head.model_class
    ]
    classes = {"AutoConfig": head.config, **{name: head.model for name in names}}
    write_text(Path(folder) / f"{CODE}.py", CODE_TEXT.format(config=head.config, model=head.model))
    content["auto_map"] = {name: f"{CODE}.{class_name}" for name, class_name in classes.items()}
    write_text(file, json.dumps(content, indent=2, sort_keys=True) + "\n")


# ---- which maps -----------------------------------------------------------------------------------------------------


def _maps(name: str, head: Head, config: Any) -> dict[str, Any]:
    """The fields of a backbone's config that give it maps of a head's strides."""
    if name == "vitmatte" and config.num_channels != 4:
        raise ValueError(f"{name} takes images with their trimap, num_channels=4, not {config.num_channels}")
    if not getattr(config, "reshape_hidden_states", True):
        raise ValueError(f"{name} takes maps; reshape_hidden_states=False leaves tokens")
    if not head.strides:
        return {"out_features": config.out_features[-1:]}
    strides = {map_.name: _square(name, map_.stride) for map_ in config.maps}
    wanted = " ".join(map(str, head.strides))
    if len({*strides.values()}) > 1:
        map_names: list[Any] = [_last(strides, stride) for stride in head.strides]
        if None in map_names or map_names[-1] != config.map_names[-1]:
            there = " ".join(map(str, sorted({*strides.values()})))
            raise ValueError(
                f"{name} takes maps of strides {wanted}, up to the last stage; this {config.model_type!r} has {there}"
            )
        _check_unnamed(name, config, map_names)
        return {"out_features": map_names}
    features = _layers(name, head, config, list(strides)[1:])
    patch = next(iter(strides.values()))
    scales = config.map_scales or [2.0 ** round(math.log2(patch / stride)) for stride in head.strides]
    if head.exact and [patch / scale for scale in scales] != list(head.strides):
        raise ValueError(f"{name} takes a map of stride {wanted}, which patches of {patch} pixels cannot be brought to")
    return {"out_features": features, "map_scales": scales}


def _tokens(name: str, head: Head, config: Any) -> dict[str, Any]:
    """The fields of a backbone's config that leave the tokens of a head's layers as they are."""
    prefix = int(head.takes == "tokens")
    words = "tokens with one class token" if prefix else "tokens of patches alone"
    if not hasattr(config, "reshape_hidden_states"):
        raise ValueError(f"{name} takes {words} of layers of one width; a {config.model_type!r} has stages of several")
    patch = _square(name, config.maps[0].stride)
    layers = [map_.name for map_ in config.maps[1:] if map_.prefix == prefix]
    if not layers or layers[-1] != config.map_names[-1]:
        raise ValueError(
            f"{name} takes {words}; in the last layer of this {config.model_type!r} {config.maps[-1].prefix} tokens "
            "come before the patches"
        )
    changes = {"out_features": _layers(name, head, config, layers), "reshape_hidden_states": False, "map_scales": None}
    if name == "vitpose":  # it reads both as (height, width)
        side = config.image_size
        changes |= {"image_size": [side, side] if isinstance(side, int) else side, "patch_size": [patch, patch]}
    elif name in ("dpt", "depth_anything"):
        changes["patch_size"] = patch
    return changes


def _layers(name: str, head: Head, config: Any, layers: Sequence[str]) -> list[str]:
    """The layers whose maps a head takes: those that the config names, or the ends of equal parts of these."""
    count, given = head.num_maps, config.out_features
    if len(given) == count and set(given) <= {*layers}:
        return list(given)
    if len(layers) < count:
        raise ValueError(
            f"{name} takes the maps of {count} layers; this {config.model_type!r} has {len(layers)} for it"
        )
    chosen = [layers[round(len(layers) * part / count) - 1] for part in range(1, count + 1)]
    _check_unnamed(name, config, chosen)
    return chosen


def _check_unnamed(name: str, config: Any, chosen: Sequence[str]) -> None:
    """Refuse to replace maps that somebody has named."""
    if config.out_features not in (config.map_names[-1:], list(chosen)):
        raise ValueError(f"{name} does not go with out_features={config.out_features}; it takes, for example, {chosen}")


def _square(name: str, stride: tuple[int, int]) -> int:
    """The one number of a stride that is the same in both directions."""
    if stride[0] != stride[1]:
        raise ValueError(f"{name} takes maps of square strides; patch_size={list(stride)} must be square")
    return stride[0]


def _last(strides: dict[str, int], stride: int) -> str | None:
    """The last map of a stride; None: there is none."""
    return next((name for name in reversed(strides) if strides[name] == stride), None)
