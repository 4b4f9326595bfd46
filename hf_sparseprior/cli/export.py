"""`python -m hf_sparseprior export SOURCE OUT`: a folder that can be uploaded as it is."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME, CONFIG_NAME

from hf_sparseprior.adapters.lora import CLASSIFIERS
from hf_sparseprior.adapters.saved_adapter import load_adapter
from hf_sparseprior.adapters.stock_attention import stock_priors
from hf_sparseprior.adapters.stock_loading import from_pretrained
from hf_sparseprior.base.families import FAMILIES, family_of
from hf_sparseprior.base.files import check_new, file_sha256, whole_folder, write_text
from hf_sparseprior.base.json_files import RECORD_BYTES, read_json, read_json_object
from hf_sparseprior.models.pretrained import hub_hint, load_whole_model
from hf_sparseprior.saving.card import CARD, model_card
from hf_sparseprior.saving.processor import PROCESSOR
from hf_sparseprior.saving.saved_config import check_saved_config
from hf_sparseprior.saving.saved_processor import load_image_processor

RESULTS = "results.json"


def export_folder(source: str | os.PathLike, out: str | os.PathLike, license_name: str | None = None) -> list[str]:
    """Copy a saved model into a new folder with today's code, its image processor and a new model card.

    The card takes data, metrics and command from `results.json` in the source or in the folder above it, if that file
    has the hash of these weights. A model of transformers with a prior gets the card that its saving writes. The new
    folder appears whole or not at all.

    Returns:
        Lines for the user: what was written and how to load it.

    Raises:
        OSError: for a source that is not a saved model, or an existing `out`.
        ValueError: for a bad field of the source's config.json or preprocessor_config.json, for a model of transformers
            without a prior, and for a licence of one with a prior.
    """
    out = Path(out)
    check_new(out)
    source, model = saved_source(source) if (Path(source) / ADAPTER_CONFIG_NAME).is_file() else exported_source(source)
    ours = family_of(model.config) is not None
    if not ours and not stock_priors(model):
        raise ValueError(f"{source} holds a {type(model).__name__} of transformers without a prior; upload it itself")
    if not ours and license_name is not None:
        raise ValueError(
            f"--license {license_name} is for cards of our models; this {type(model).__name__} has its own"
        )
    if os.path.lexists(source / PROCESSOR):  # refused as it would be by what reads the new folder
        load_image_processor(source)
    results = _results_of(source)
    with whole_folder(out) as scratch:
        if (source / PROCESSOR).is_file():
            shutil.copyfile(source / PROCESSOR, scratch / PROCESSOR)
        model.save_pretrained(scratch)
        if ours:
            write_text(scratch / CARD, model_card(model.config, results, license_name or "apache-2.0"))
    files = sorted(path.name for path in out.iterdir())
    return [
        f"{out}: {', '.join(files)}",
        "metrics in the card: "
        + (", ".join(results.get("metrics", {}) if ours else {}) or "none, no results.json of these weights"),
        f"upload: hf upload USER/NAME {out}",
    ]


def saved_source(source: str | os.PathLike) -> tuple[Path, Any]:
    """The folder of a saved model of ours, or of a training run's model, and the model.

    Raises:
        OSError: for anything else.
    """
    source = Path(source)
    if not (source / "config.json").is_file() and (source / "model" / "config.json").is_file():
        source = source / "model"  # of a training run
    if not (source / "config.json").is_file():
        raise OSError(f"{source} is no saved model: it has no config.json{hub_hint(source)}")
    content = read_json_object(source / "config.json")
    names, model_type = content.get("architectures") or [], content.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family:
        check_saved_config(source)
    cls = family.class_named(str(names[0])) if family and names else None
    if cls is None:
        titles = ", ".join(family.title for family in FAMILIES.values())
        raise OSError(f"{source} holds {names or 'no architecture'}; export takes the classes of {titles}")
    return source, load_whole_model(source, cls)


def exported_source(source: str | os.PathLike) -> tuple[Path, Any]:
    """The folder of a saved model that has its image processor, and the model.

    Args:
        source: folder of a model of ours or of transformers, with a prior or without; of an adapter of peft, whose base
            model is a folder or a name on the hub; or of a training run.

    Raises:
        OSError: for anything else.
        ValueError: for a bad field of a config.
    """
    source = Path(source)
    if (source / ADAPTER_CONFIG_NAME).is_file():
        return _adapted(source)
    home = source if (source / CONFIG_NAME).is_file() else source / "model"  # of a training run
    if not (home / CONFIG_NAME).is_file():
        return saved_source(source)
    cls = _stock_class((read_json_object(home / CONFIG_NAME).get("architectures") or [None])[0])
    return saved_source(source) if cls is None else (home, load_whole_model(home, cls))


def _stock_class(name: Any) -> Any:
    """The class of transformers of this name; None: it has no model of this name."""
    cls = getattr(transformers, name, None) if isinstance(name, str) else None
    return cls if isinstance(cls, type) and issubclass(cls, PreTrainedModel) else None


def _adapted(folder: Path) -> tuple[Path, Any]:
    """The model of a folder of an adapter, which is on it, and where its image processor is."""
    written = read_json_object(folder / ADAPTER_CONFIG_NAME)
    base, made = written.get("base_model_name_or_path"), written.get("auto_mapping") or {}
    if not isinstance(base, str) or not base:
        raise OSError(f"{folder / ADAPTER_CONFIG_NAME}: base_model_name_or_path={base!r} must name the model")
    name = made.get("base_model_class") if isinstance(made, Mapping) else None
    cls = _stock_class(name) or next((own for one in FAMILIES.values() if (own := one.class_named(str(name)))), None)
    if cls is None:
        raise OSError(
            f"{folder / ADAPTER_CONFIG_NAME}: the adapter was made on {name!r}, and models of transformers and of ours "
            "are known; load it in Python, and take hf_sparseprior.export"
        )
    model = load_adapter(from_pretrained(cls, base, **_classes(folder)), folder)
    return (folder if os.path.lexists(folder / PROCESSOR) else Path(base)), model


def _classes(folder: Path) -> dict[str, Any]:
    """How many classes an adapter's own classifier has, as options of `from_pretrained`; peft saves no config."""
    weights = folder / ADAPTER_SAFE_WEIGHTS_NAME
    with contextlib.suppress(SafetensorError), safe_open(weights, "pt") as stored:
        for name in stored.keys():  # noqa: SIM118
            if name.rpartition(".")[0].rpartition(".")[2] in CLASSIFIERS and name.endswith(".weight"):
                return {"num_labels": stored.get_slice(name).get_shape()[0], "ignore_mismatched_sizes": True}
    return {}


def _results_of(source: Path) -> dict[str, Any]:
    """results.json in the source or above it, if it belongs to these weights."""
    weights = source / "model.safetensors"
    for folder in (source, source.parent):
        if not (folder / RESULTS).is_file() or not weights.is_file():
            continue
        try:
            results = read_json(folder / RESULTS, RECORD_BYTES, finite=False)
            same = results["model_sha256"] == file_sha256(weights)
        except (ValueError, KeyError, TypeError):
            continue
        if same and isinstance(results.get("metrics"), dict):
            return results
    return {}
