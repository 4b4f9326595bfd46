"""Families of models. Each registers itself once, next to its classes; whatever goes by family looks here.

These are transformers' Auto classes, the auto map and the card of a saved model, `export`, `convert`, FLOPs, the
trainer, and the tests that run over every family.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import transformers

FAMILIES: dict[str, Family] = {}


@dataclass(frozen=True)
class Family:
    """A family of models.

    config_class: of all its models; its `model_type` is the family's name.
    models: by the name of the Auto class of transformers that makes it. "AutoModel" is the bare transformer.
    title, architecture: of model cards.
    takes: what its models take.
    flops: the function (config, image_size, prior, convention, num_prefix_tokens) that counts a model's FLOPs, or where
        it is, "module:name", because a saved model does not carry it; None: they are not counted.
    """

    config_class: type[transformers.PretrainedConfig]
    models: Mapping[str, type[transformers.PreTrainedModel]]
    title: str
    architecture: str
    takes: Literal["images", "clips"] = "images"
    flops: str | Callable[..., Any] | None = None

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
    def auto_map(self) -> dict[str, str]:
        """The classes that a saved folder offers to the Auto classes: "file.class" by Auto class."""
        classes = {"AutoConfig": self.config_class, **self.models}
        return {name: f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}" for name, cls in classes.items()}

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
    if __name__ == "hf_sparseprior.families":
        transformers.AutoConfig.register(family.name, family.config_class)
        for auto_class, cls in family.models.items():
            getattr(transformers, auto_class).register(family.config_class, cls)
    return family


def unregister_family(name: str) -> None:
    """Forget a family, as tests do that register one of their own."""
    family = FAMILIES.pop(name)
    transformers.models.auto.configuration_auto.CONFIG_MAPPING._extra_content.pop(name, None)
    for auto_class in family.models:
        getattr(transformers, auto_class)._model_mapping._extra_content.pop(family.config_class, None)


def family_of(config: Any) -> Family | None:
    """The family of a model's config; None: it is none of ours."""
    return FAMILIES.get(getattr(config, "model_type", None) or "")
