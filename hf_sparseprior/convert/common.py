"""What every foreign format needs: refusals, weights without a prior, folders that transformers loads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from hf_sparseprior.adapters.stock_attention import PRIOR_MODULE, RECORD
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.base.files import write_text
from hf_sparseprior.base.formats import FORMAT_KEY, MODEL_FORMAT, check_format
from hf_sparseprior.base.loading import check_whole
from hf_sparseprior.models.base_config import as_pair
from hf_sparseprior.priors.prior import is_prior_weight
from hf_sparseprior.saving.processor import PROCESSOR, image_processor_settings

# Attention pooling of a source, which has no counterpart in ours: a part of the classifier, which can be dropped.
ATTENTION_POOLING = "classifier.attention_pooling."
LAYER = re.compile(r"layers\.\d+\.")
# What a model that cannot be converted can do.
IN_PLACE = "hf_sparseprior.apply_prior(model, prior) gives such a model of transformers or timm a prior in place"
# What SparsePriorViT has and the models of other libraries lack.
ONLY_OURS: dict[str, tuple[Any, ...]] = {
    **{"stem": ("patch",), "residual_scale": (1.0,), "token_classifier": (False,), "key_bias": (True,)},
}


def field_problems(config: Any, allowed: dict[str, tuple[Any, ...]]) -> list[str]:
    """One text for each field of a config whose value is not among the allowed ones."""
    return [
        f"{name}={getattr(config, name)!r} must be {' or '.join(map(repr, values))}"
        for name, values in allowed.items()
        if getattr(config, name) not in values
    ]


def square_problems(config: Any, *names: str) -> list[str]:
    """One text for each of these sizes of a config whose height and width differ."""
    return [
        f"{name}={getattr(config, name)} must be square"
        for name in names
        if len(set(as_pair(getattr(config, name)))) > 1
    ]


def recorded_prior(state: Mapping[str, Tensor], settings: dict[str, Any]) -> dict[str, Any] | None:
    """The prior with which `stock_saving` saved a stock model; None without one.

    Raises:
        ValueError: if config.json does not name the prior that the weights have.
    """
    if RECORD not in settings:
        if any(is_of_stock_prior(key) for key in state):
            raise ValueError(f"config.json lacks {RECORD!r}, and the weights are of a model with a prior")
        return None
    try:
        check_format("the model", settings.get(FORMAT_KEY, 1), MODEL_FORMAT)
    except ValueError as error:
        raise ValueError(f"config.json: {error}") from None
    record = settings[RECORD]
    if not isinstance(record, dict) or not isinstance(record.get("prior"), dict):
        raise ValueError(f"config.json: {RECORD}={record!r} must be like {{'prior': {{...}}}}")
    return record["prior"]


def prior_weight_name(name: str) -> str | None:
    """Our name of a prior's weight in a ViT that `stock_saving` saved, "layers.0.decay_bias.beta" in every one of them;
    None for any other weight.
    """
    layer = LAYER.match(name) if is_prior_weight(name) else None
    return None if layer is None else f"vit.{layer[0]}attention.{name[layer.end() :]}"


def is_of_stock_prior(key: str) -> bool:
    """Whether a stock model with a prior has this weight within its attention: a marker, by which a load without the
    prior is noticed, or a scalar, of which another file has the one that is read (`stock_saving`).
    """
    return PRIOR_MODULE in key.split(".")


def refuse(target: str, problems: Iterable[str]) -> None:
    """Raise ValueError with every problem in one line."""
    if problems := list(problems):
        raise ValueError(f"{target} cannot express this model: {'; '.join(problems)}")


def one_if_square(pair: Sequence[int]) -> int | list[int]:
    """(height, width) as one number if both are equal; most readers of configs expect that."""
    return pair[0] if pair[0] == pair[1] else list(pair)


def base_prefix(family: str) -> str:
    """What the names of a family's weights begin with in its classifier, "vit." or "swin."."""
    return f"{FAMILIES[family].base.base_model_prefix}."


def plain_weights(model: Any) -> dict[str, Tensor]:
    """The weights of one of our models under its classifier's names ("vit.layers.0..."), the prior's left out."""
    weights = {key: value for key, value in model.state_dict().items() if not is_prior_weight(key)}
    prefix = base_prefix(model.config.model_type)
    prefix = "" if any(key.startswith(prefix) for key in weights) else prefix
    return {prefix + key: value.contiguous() for key, value in weights.items()}


def save_for_transformers(cls: Any, config: Any, weights: dict[str, Tensor], folder: Path, ours: Any) -> None:
    """Write config.json, model.safetensors and, if there is none yet, preprocessor_config.json.

    Args:
        cls: the class of transformers that is to load the folder.
        config, weights: of that class.
        folder: an existing folder.
        ours: config of our model, which has the image size and the normalisation.

    Raises:
        OSError: if the class does not find exactly its weights in the folder.
    """
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if not (folder / PROCESSOR).exists():
        write_text(folder / PROCESSOR, json.dumps(image_processor_settings(ours), indent=2) + "\n")
    _, info = cls.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True)
    check_whole(folder, info)
    if info["unexpected_keys"]:
        raise OSError(f"{cls.__name__} has no place for {', '.join(sorted(info['unexpected_keys']))}")


def write_timm(weights: dict[str, Tensor], settings: dict[str, Any], out: Path) -> str:
    """Write a .safetensors file, or a folder with a config.json of these settings. Returns what was written."""
    if out.suffix == ".safetensors":
        save_file(weights, out, metadata={"format": "pt"})
        return "weights under timm's names"
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    write_text(out / "config.json", json.dumps(settings, indent=2) + "\n")
    return f"timm's {settings['architecture']} with arguments of its own"
