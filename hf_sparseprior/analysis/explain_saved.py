"""`explain FOLDER`: the prior of a saved model, and the sizes that it is explained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.utils import CONFIG_NAME

from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.models.base_config import as_pair
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
        return content[PRIOR_RECORD]["prior"], _stock_sizes(content, folder), None
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


def _stock_sizes(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Sizes of a model of transformers, but for its prefix tokens, which its config does not say."""
    vision = content.get("vision_config") or content
    names = ("num_attention_heads", "hidden_size", "num_hidden_layers", "image_size", "patch_size")
    if missing := [name for name in names if not vision.get(name)]:
        raise ValueError(f"{folder / CONFIG_NAME} has no {missing[0]}; give the prior and the sizes instead")
    heads, width, layers, sides, patch = (vision[name] for name in names)
    grid = tuple(side // size for side, size in zip(as_pair(sides), as_pair(patch), strict=True))
    return {"heads": heads, "head_dim": width // heads, "layers": layers, "all_layers": layers, "grid": grid}
