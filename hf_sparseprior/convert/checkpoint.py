"""Reading a foreign checkpoint and writing it as a SparsePriorViT."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hf_sparseprior.configuration_sparseprior_vit import SparsePriorViTConfig
from hf_sparseprior.convert import timm_vit, transformers_vit
from hf_sparseprior.hub import check_new, whole_folder
from hf_sparseprior.modeling_sparseprior_vit import SparsePriorViTForImageClassification, SparsePriorViTModel

SOURCES: tuple[ModuleType, ...] = (transformers_vit, timm_vit)


def read_checkpoint(source: str | os.PathLike) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Weights and, where there is one, config of a folder, a .safetensors file or a .pth or .bin file.

    PyTorch files are read with `weights_only=True`: tensors come out, nothing in them is executed. Weights may lie
    below "model", "teacher" or "state_dict" and behind "module." or "backbone.", as DeiT and DINO save them.

    Raises:
        OSError: for a missing or unreadable file.
    """
    source = Path(source)
    config = None
    if source.is_dir():
        if (source / "config.json").is_file():
            config = json.loads((source / "config.json").read_text(encoding="utf-8"))
            preprocessor = source / "preprocessor_config.json"
            if preprocessor.is_file():
                settings = json.loads(preprocessor.read_text(encoding="utf-8"))
                config.update({key: settings[key] for key in ("image_mean", "image_std") if key in settings})
        files = sorted(source.glob("*.safetensors"))
        if not files:
            raise OSError(f"{source} holds no .safetensors file")
    else:
        files = [source]
    state: dict[str, Tensor] = {}
    for file in files:
        state.update(_read_file(file))
    return state, config


def _read_file(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise OSError(f"{file} does not exist")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, EOFError, ValueError) as error:
        raise OSError(f"{file} cannot be read ({str(error).splitlines()[0]})") from None
    except Exception as error:  # pickle's own errors, for files that hold more than tensors
        raise OSError(f"{file} holds more than tensors and is not read ({type(error).__name__})") from None
    nested = next((key for key in ("model", "teacher", "state_dict") if isinstance(content.get(key), dict)), None)
    state = content[nested] if nested else content
    cleaned = {}
    for key, value in state.items():
        name = key.removeprefix("module.").removeprefix("backbone.")
        # DINO's projection head belongs to pretraining.
        if isinstance(value, Tensor) and not (nested == "teacher" and name.startswith("head.")):
            cleaned[name] = value
    return cleaned


def convert_checkpoint(
    source: str | os.PathLike,
    out: str | os.PathLike,
    prior: str | dict[str, Any] = "dense",
    image_size: int | None = None,
    num_attention_heads: int | None = None,
    drop_classifier: bool = False,
) -> list[str]:
    """Write a foreign checkpoint as a SparsePriorViT folder; with `prior="dense"` it computes what the source does.

    Args:
        source: see `read_checkpoint`.
        out: new folder.
        prior: of the new model; a decay is new and starts as its `init` says.
        image_size: another one than the source's; the position embedding is interpolated.
        num_attention_heads: for timm files of other widths than the published ones.
        drop_classifier: write the base model alone.

    Returns:
        Lines for the user.

    Raises:
        OSError: for files that cannot be read or an existing `out`.
        ValueError: for names that are not known, missing or left-over weights; nothing is written.
    """
    out = Path(out)
    check_new(out)
    state, config = read_checkpoint(source)
    module = next((module for module in SOURCES if module.matches(state)), None)
    if module is None:
        raise ValueError(f"{source}: names like {', '.join(sorted(state)[:3])} are of no known source")
    if num_attention_heads is not None:
        config = {**(config or {}), "num_attention_heads": num_attention_heads}
    fields = module.fields(state, config)
    notes = []
    for name, imagenet in (("image_mean", (0.485, 0.456, 0.406)), ("image_std", (0.229, 0.224, 0.225))):
        fields[name] = list((config or {}).get(name, imagenet))
        if name not in (config or {}):
            notes.append(f"note: {name} is not in the source; ImageNet's {imagenet} is assumed")
    model = _fill(module.rename(state), fields, prior, drop_classifier, source)
    if image_size is not None and image_size != model.config.image_size:
        model = _resize(model, image_size)
    with whole_folder(out) as scratch:
        model.save_pretrained(scratch)
    return [f"{out}: {type(model).__name__}, prior {model.config.prior_name}, from {Path(str(source)).name}", *notes]


def _fill(state: dict[str, Tensor], fields: dict[str, Any], prior: Any, drop_classifier: bool, source: Any) -> Any:
    """A model with exactly these weights, or an error that lists what is missing and what is left over."""
    config = SparsePriorViTConfig(**fields, prior=prior)
    heads = {key for key in state if key.split(".")[0] in ("classifier", "distillation_classifier")}
    if drop_classifier or not heads:
        model: Any = SparsePriorViTModel(config)
        state = {key.removeprefix("vit."): value for key, value in state.items() if key not in heads}
    else:
        model = SparsePriorViTForImageClassification(config)
    expected = {key: value.shape for key, value in model.state_dict().items() if "decay_bias" not in key.split(".")}
    missing = sorted(set(expected) - set(state))
    left_over = sorted(set(state) - set(expected))
    shapes = [
        f"{key} {tuple(state[key].shape)} instead of {tuple(expected[key])}"
        for key in sorted(set(expected) & set(state))
        if state[key].shape != expected[key]
    ]
    problems = [
        f"{what}: {', '.join(names)}"
        for what, names in (("missing", missing), ("left over", left_over), ("of another shape", shapes))
        if names
    ]
    if problems:
        hint = " (--drop-classifier leaves classifiers out)" if any("classifier" in text for text in problems) else ""
        raise ValueError(f"{source} does not fit SparsePriorViT; {'; '.join(problems)}{hint}")
    model.load_state_dict(state, strict=False)
    return model.eval()


@torch.no_grad()
def _resize(model: Any, image_size: int) -> Any:
    """The same model for another image size."""
    config = SparsePriorViTConfig.from_dict({**model.config.to_dict(), "image_size": image_size})
    resized = type(model)(config)
    state = model.state_dict()
    prefix = "vit." if isinstance(model, SparsePriorViTForImageClassification) else ""
    embeddings = model.vit.embeddings if prefix else model.embeddings
    state[prefix + "embeddings.position_embeddings"] = embeddings.resized_positions(config.grid)
    resized.load_state_dict(state)
    return resized.eval()
