"""The classifier that the `model` section of a configuration describes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from hf_sparseprior.adapters.lora import classifier_names
from hf_sparseprior.base.checks import check_finite
from hf_sparseprior.base.families import FAMILIES, Family
from hf_sparseprior.convert.checkpoint import converted, foreign_fields, is_foreign
from hf_sparseprior.images.stock import load_stock, stock_config
from hf_sparseprior.models.pretrained import check_saved_folder, load_changed_model, weights_sha256
from hf_sparseprior.priors.layer_priors import given_priors
from hf_sparseprior.priors.prior import parse_prior
from hf_sparseprior.runs.models import FAMILY_KEYS, alike_across_priors, section_family

# Keys of the section that are no fields of its family's config.
MODEL_EXTRAS = (*FAMILY_KEYS, "classifier_init_std")


def build_model(model: dict[str, Any], classes: Sequence[str], problem: str | None = None) -> Any:
    """The model of a configuration's `model` section, from scratch or from a saved folder.

    A model from a folder may have another prior, other classes and another image size (`load_changed_model`). One of
    transformers or timm is made ours, as `convert` does, or stays what it is where we have no counterpart.

    Args:
        model: the section.
        classes: names of the classes, or of the numbers.
        problem: transformers' `problem_type`; None: one class an image.

    Raises:
        ValueError: for bad options, or a folder that does not fit them.
        OSError: for a folder that is missing or damaged.
    """
    options = {key: value for key, value in model.items() if key not in MODEL_EXTRAS}
    _, preset, pretrained, std = map(model.get, MODEL_EXTRAS)
    if preset and pretrained:
        raise ValueError(f"model.preset={preset!r} and model.pretrained={pretrained!r} exclude each other")
    options["id2label"] = dict(enumerate(classes))
    options["label2id"] = {name: index for index, name in enumerate(classes)}
    options["problem_type"] = problem
    if pretrained:
        check_saved_folder(pretrained, "model.pretrained")
        built = _from_folder(pretrained, start_family(model), options)
    else:
        family = section_family(model)
        built = from_scratch(family.image_classifier, partial(family.make_config, preset), options)
    if std is not None:
        _draw_classifiers(built, classifier_names(built), std)
    return built


def start_family(model: dict[str, Any]) -> Family | None:
    """The family of a `model` section, which may start from a foreign checkpoint; None for a classifier of transformers
    without a counterpart of ours.

    Raises:
        ValueError, OSError: as `section_family` and `convert`.
    """
    folder, given = model.get("pretrained"), model.get("family")
    if folder is None or not is_foreign(folder):
        return section_family(model)
    try:
        family = FAMILIES[foreign_fields(folder)["model_type"]]
    except ValueError:
        if given is None and stock_config(folder) is not None:
            return None
        raise
    if family.takes != "images":
        raise ValueError(f"model.pretrained={folder} takes {family.takes}, not images")
    if given not in (None, family.name):
        raise ValueError(f"model.family={given!r}, and model.pretrained={folder} becomes a {family.name!r}")
    return family


def from_scratch(model_class: Any, make_config: Callable[..., Any], options: dict[str, Any]) -> Any:
    """A new model, which starts as the dense one of the same seed (`alike_across_priors`)."""
    return alike_across_priors(
        lambda changes: model_class(make_config(**{**options, **changes})),
        lambda model: model.config.prior_name == "dense",
    )


def _from_folder(folder: str, family: Family | None, options: dict[str, Any]) -> Any:
    if family is None:
        model, new = load_stock(folder, options)
        _draw_classifiers(model, new, model.config.initializer_range)
        return model
    with converted(folder) if is_foreign(folder) else nullcontext(folder) as source:
        model, anew = load_changed_model(str(source), family.image_classifier, **options)
    new = [name for name in classifier_names(model) if f"{name}.weight" in anew]
    _draw_classifiers(model, new, model.config.initializer_range)
    return model


@torch.no_grad()
def _draw_classifiers(model: Any, names: Sequence[str], std: float) -> None:
    """New weights from a normal distribution with this standard deviation, biases 0.

    They follow from torch's seed alone. Otherwise a decay, which draws before them, would make runs of one seed differ
    by their prior.

    Loaded weights carry a flag of transformers, and two threads that load models at the same time can leave its version
    of `torch.nn.init` in place, which skips what has the flag: so the values are drawn into new tensors.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch.initial_seed())
        for classifier in map(model.get_submodule, names):
            drawn = torch.zeros_like(classifier.weight)
            if std > 0:
                torch.nn.init.trunc_normal_(drawn, std=std)
            classifier.weight.copy_(drawn)
            classifier.bias.zero_()


def check_model(model: dict[str, Any]) -> None:
    """Let the configuration of a model from scratch check itself. A saved model need not exist yet."""
    options = {key: value for key, value in model.items() if key not in MODEL_EXTRAS}
    if model.get("preset") or not model.get("pretrained"):
        section_family(model).make_config(model.get("preset"), **options)


def check_pretrained(model: dict[str, Any]) -> None:
    """Let the configuration in `model.pretrained` check itself, with the options of this section over it.

    Raises:
        ValueError: for bad options.
        OSError: if the folder is missing or has no configuration.
    """
    if not (folder := model.get("pretrained")):
        return
    check_saved_folder(folder, "model.pretrained")
    if (family := start_family(model)) is None:
        if model.get("prior") is not None:
            for prior in given_priors(model["prior"]):
                parse_prior(prior)
        return
    config_class: Any = family.config_class
    saved = foreign_fields(folder) if is_foreign(folder) else config_class.get_config_dict(folder)[0]
    options = {key: value for key, value in model.items() if key not in MODEL_EXTRAS}
    config_class.from_dict({**saved, **options})


def model_keys(model: dict[str, Any]) -> list[str]:
    """Every key that a `model` section of its family may have."""
    if (family := start_family(model)) is None:
        config: Any = stock_config(model["pretrained"])
        return [*config.to_dict(), "prior", *MODEL_EXTRAS]
    return [*family.config_fields, "out_features", "out_indices", *MODEL_EXTRAS]


def check_classifier_init_std(model: dict[str, Any]) -> None:
    """Raise ValueError for a bad `classifier_init_std`; the other keys check themselves when the model is built."""
    std = model.get("classifier_init_std")
    if std is not None:
        check_finite("model.classifier_init_std", std)


def pretrained_sha256(model: dict[str, Any]) -> str | None:
    """SHA-256 of the weights that a run started from; None for a start from scratch or from several files."""
    folder = model.get("pretrained")
    return weights_sha256(folder) if folder else None
