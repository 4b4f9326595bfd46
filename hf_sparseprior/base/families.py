"""Families of models. Each registers itself once, next to its classes; whatever goes by family looks here.

These are transformers' Auto classes, the auto map and the card of a saved model, `export`, `convert`, FLOPs, LoRA, the
sections and presets of configurations, the backbones of mm configs, and the tests that run over every family.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import transformers

from hf_sparseprior.base.checks import did_you_mean
from hf_sparseprior.base.config_keys import check_key

FAMILIES: dict[str, Family] = {}
_LISTENERS: list[Callable[[Family], None]] = []
Takes = Literal["images", "clips"]


@dataclass(frozen=True)
class ProjectionNames:
    """Names of projections below a transformer layer, which LoRA adapts; those of ViT are the default.

    query_value, attention, mlp: of `targets` "query+value", "attention" and, with attention, "attention+mlp".
    """

    query_value: tuple[str, ...] = ("attention.q_proj", "attention.v_proj")
    attention: tuple[str, ...] = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj")
    mlp: tuple[str, ...] = ("mlp.fc1", "mlp.fc2")


VIT_NAMES = ProjectionNames()


@dataclass(frozen=True)
class Family:
    """A family of models.

    config_class: of all its models; its `model_type` is the family's name, its `presets` are architectures by name.
    models: by the name of the Auto class of transformers that makes it. "AutoModel" is the bare transformer.
    title, architecture: of model cards.
    takes: what its models take.
    flops: the function (config, image_size, prior, convention, num_prefix_tokens) that counts a model's FLOPs, or where
        it is, "module:name", because a saved model does not carry it; None: they are not counted.
    projections: what LoRA adapts.
    backbone_parts: modules that its backbone alone has. They start anew where another model of it is loaded.
    """

    config_class: type[transformers.PretrainedConfig]
    models: Mapping[str, type[transformers.PreTrainedModel]]
    title: str
    architecture: str
    takes: Takes = "images"
    flops: str | Callable[..., Any] | None = None
    projections: ProjectionNames = VIT_NAMES
    backbone_parts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The `model_type` of its configs."""
        return self.config_class.model_type

    @property
    def base(self) -> Any:
        """The bare transformer."""
        return self.models["AutoModel"]

    @property
    def classifier(self) -> Any:
        """The transformer with a classifier; None: there is none."""
        return next((cls for auto_class, cls in self.models.items() if auto_class.endswith("Classification")), None)

    @property
    def image_classifier(self) -> Any:
        """The classifier of images.

        Raises:
            ValueError: if there is none.
        """
        if self.takes != "images" or self.classifier is None:
            raise ValueError(f"{self.name!r} is a family without image classifiers")
        return self.classifier

    @property
    def backbone(self) -> Any:
        """The feature extractor for dense prediction; None: there is none."""
        return self.models.get("AutoBackbone")

    @property
    def config_fields(self) -> list[str]:
        """Fields of its configs, without those that every config of transformers has."""
        common = {field.name for field in fields(transformers.PretrainedConfig)}
        return [field.name for field in fields(self.config_class) if field.name not in common]

    @property
    def presets(self) -> Mapping[str, Any]:
        """The architectures that `from_preset` of its configs knows, by name."""
        return getattr(self.config_class, "presets", {})

    def make_config(self, preset: str | None = None, **options: Any) -> Any:
        """A config with these fields, of a preset where one is named.

        Raises:
            ValueError: for a name that is no field; the class itself keeps it, as transformers' do.
        """
        config_class: Any = self.config_class
        for key in options:
            check_key(config_class, key)
        return config_class.from_preset(preset, **options) if preset else config_class(**options)

    @property
    def auto_map(self) -> dict[str, str]:
        """The classes that a saved folder offers to the Auto classes: "file.class" by Auto class."""
        classes = {"AutoConfig": self.config_class, **self.models}
        return {name: f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}" for name, cls in classes.items()}

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules of its classes."""
        return tuple(sorted({cls.__module__ for cls in (self.config_class, *self.models.values())}))

    def class_named(self, name: str) -> Any:
        """The model class of this name; None: there is none."""
        return next((cls for cls in self.models.values() if cls.__name__ == name), None)

    def flop_counter(self) -> Callable[..., Any]:
        """The function that counts a model's FLOPs.

        Raises:
            ValueError: if they are not counted.
        """
        if self.flops is None:
            raise ValueError(f"the FLOPs of {self.title} are not counted")
        if callable(self.flops):
            return self.flops
        module, _, function = self.flops.partition(":")
        return getattr(importlib.import_module(module), function)


def register_family(family: Family) -> Family:
    """Make a family known, here and to transformers' Auto classes.

    Raises:
        ValueError: if another family has its name.
    """
    known = FAMILIES.get(family.name)
    # transformers may run a file of a saved model a second time; that is the same family again.
    if known is not None and known.auto_map != family.auto_map:
        raise ValueError(f"family {family.name!r} is registered already")
    FAMILIES[family.name] = family
    family.config_class.register_for_auto_class()
    for auto_class, cls in family.models.items():
        cls.register_for_auto_class(auto_class)
        cls.auto_map = family.auto_map
    # Code that came with a saved folder is found by the folder's auto map, and must not stand for all folders.
    if __name__ == "hf_sparseprior.base.families":
        transformers.AutoConfig.register(family.name, family.config_class)
        for auto_class, cls in family.models.items():
            getattr(transformers, auto_class).register(family.config_class, cls)
    for act in _LISTENERS:
        act(family)
    return family


def for_every_family(act: Callable[[Family], None]) -> None:
    """Call a function with each family, and with those that are registered later."""
    _LISTENERS.append(act)
    for family in list(FAMILIES.values()):
        act(family)


def unregister_family(name: str) -> None:
    """Forget a family, as tests do that register one of their own."""
    family = FAMILIES.pop(name)
    transformers.models.auto.configuration_auto.CONFIG_MAPPING._extra_content.pop(name, None)
    transformers.models.auto.image_processing_auto.IMAGE_PROCESSOR_MAPPING._extra_content.pop(family.config_class, None)
    for auto_class in family.models:
        getattr(transformers, auto_class)._model_mapping._extra_content.pop(family.config_class, None)


def family_of(config: Any) -> Family | None:
    """The family of a model's config; None: it is none of ours."""
    return FAMILIES.get(getattr(config, "model_type", None) or "")


def is_backbone_weight(name: str) -> bool:
    """Whether a weight of this name is of a part that only backbones have."""
    return any(name.partition(".")[0] in family.backbone_parts for family in FAMILIES.values())


def presets(takes: Takes = "images") -> dict[str, Family]:
    """The families of images or of clips by the names of their presets; the first one registered has a name."""
    by_preset: dict[str, Family] = {}
    for family in FAMILIES.values():
        if family.takes == takes:
            by_preset.update({name: family for name in family.presets if name not in by_preset})
    return by_preset


def preset_family(preset: str, takes: Takes = "images") -> Family:
    """The family that has a preset.

    Raises:
        ValueError: if none has it, with the names of all.
    """
    known = presets(takes)
    if not isinstance(preset, str) or preset not in known:
        raise ValueError(f"preset={preset!r} must be one of {', '.join(known)}{did_you_mean(preset, known)}")
    return known[preset]
