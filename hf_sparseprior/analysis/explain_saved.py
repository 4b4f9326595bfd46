"""`explain FOLDER`: the prior of a saved model, and the sizes that it is explained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel
from transformers.utils import CONFIG_NAME

from hf_sparseprior.adapters.stock_encoder import find_encoder, head_dim_of, num_heads_of
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.priors.prior import parse_prior
from hf_sparseprior.saving.saved_config import PRIOR_RECORD, check_saved_config


def saved_folder(prior: Any) -> Path | None:
    """The folder of a saved model, or of a training run's, that stands where a prior may; None: it is no such folder.

    Names of priors come first.
    """
    if not isinstance(prior, str):
        return None
    homes = [home for home in (Path(prior), Path(prior) / "model") if (home / CONFIG_NAME).is_file()]
    try:
        parse_prior(prior)
    except ValueError:
        return homes[0] if homes else None
    return None


def of_folder(folder: Path) -> tuple[Any, dict[str, Any], Any]:
    """The prior of a saved model, its sizes as `explain` names them, and its config if it is one of ours.

    Raises:
        OSError: for a damaged config.json. ValueError: for a bad field, and a model without a prior.
    """
    content = check_saved_config(folder)
    family = FAMILIES.get(content["model_type"])
    if family is None:
        if PRIOR_RECORD not in content:
            raise ValueError(f"{folder} holds a model of transformers without a prior")
        return content[PRIOR_RECORD]["prior"], _stock_sizes(folder), None
    config = family.config_class.from_pretrained(folder)
    return config.prior, {**sizes_of(config), "grid": _first_stage(config)[1].grid}, config


def sizes_of(config: Any) -> dict[str, Any]:
    """Sizes of the first stage of a model of ours that takes a prior, all layers that do, and how many stages."""
    place, stage = _first_stage(config)
    takers = [each for each in config.stages if each.takes_prior]
    return {
        "heads": stage.num_heads,
        "prefix": config.prefix_tokens(stage),
        "head_dim": config.widths[place] // stage.num_heads,
        "layers": stage.num_layers,
        "all_layers": sum(each.num_layers for each in takers),
        "stages": len(takers),
    }


def _first_stage(config: Any) -> tuple[int, Any]:
    return next((place, stage) for place, stage in enumerate(config.stages) if stage.takes_prior)


def _stock_sizes(folder: Path) -> dict[str, Any]:
    """Sizes of a model of transformers, from the modules of its class; of Swin those of its first stage."""
    with torch.device("meta"):
        encoder = find_encoder(AutoModel.from_config(AutoConfig.from_pretrained(folder)))
    attention = list(encoder.attention.values())
    heads = [num_heads_of(each) for each in attention]
    return {
        "heads": heads[0],
        "prefix": encoder.num_prefix_tokens,
        "head_dim": head_dim_of(attention[0]),
        "layers": heads.count(heads[0]),
        "all_layers": len(heads),
        "stages": len(set(heads)),
        "grid": tuple(encoder.grid_of(attention[0])),
    }
