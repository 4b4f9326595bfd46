"""Classifiers of transformers that have no counterpart of ours, such as BEiT: trained as they are, a prior in place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, AutoConfig, AutoModelForImageClassification

from hf_sparseprior.adapters.lora import classifier_names
from hf_sparseprior.adapters.stock import apply_prior, remove_prior
from hf_sparseprior.adapters.stock_attention import stock_priors
from hf_sparseprior.base.json_files import read_json_object
from hf_sparseprior.base.loading import load_pretrained, newly_initialised
from hf_sparseprior.models.base_config import IMAGENET
from hf_sparseprior.saving.processor import PROCESSOR

NEEDED = ("image_size", "num_channels")  # in the config, for the images


def stock_config(folder: str | os.PathLike) -> Any | None:
    """The config of a saved classifier of transformers whose images can be prepared; None for any other folder."""
    try:
        config = AutoConfig.from_pretrained(folder)
    except (ValueError, OSError, KeyError):  # of no known type, or damaged
        return None
    classifies = type(config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    return config if classifies and all(hasattr(config, name) for name in NEEDED) else None


def load_stock(folder: str | os.PathLike, options: dict[str, Any]) -> tuple[Any, list[str]]:
    """A classifier of transformers with other classes and, if `prior` is among the options, another prior.

    Its config gets `image_mean` and `image_std` of the image processor next to it, or ImageNet's.

    Returns:
        The model, and the names of its classifiers whose weights started anew.

    Raises:
        OSError: for a damaged folder. ValueError: for bad options, and if other weights than a classifier's would start
            anew.
    """
    options = dict(options)
    prior = options.pop("prior", None)
    model, info = load_pretrained(
        AutoModelForImageClassification.from_pretrained,
        folder,
        ignore_mismatched_sizes=True,
        use_safetensors=True,
        output_loading_info=True,
        **options,
    )
    anew = newly_initialised(info)
    classifiers = classifier_names(model)
    if other := [name for name in anew if name.rpartition(".")[0] not in classifiers]:
        raise ValueError(f"{folder} has no weights for {', '.join(other[:3])} ({len(other)} in all)")
    if prior is not None:
        if stock_priors(model):
            remove_prior(model)
        if prior != "dense":
            apply_prior(model, prior)
    processor = Path(folder) / PROCESSOR
    settings = read_json_object(processor) if processor.is_file() else {}
    for name, values in IMAGENET.items():
        setattr(model.config, name, list(settings.get(name, values)))
    return model, [name for name in classifiers if f"{name}.weight" in anew]
