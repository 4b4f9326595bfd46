"""What a saved model carries beside its weights: auto map, image processor, model card.

Part of the saved folder itself, so a model saved again where this package is not installed stays complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers.utils import CONFIG_NAME

CARD = "README.md"
PROCESSOR = "preprocessor_config.json"
AUTOMATIC = "<!-- written on saving, and again on every saving until this line is removed -->"


def complete_folder(folder: str | os.PathLike, config: Any) -> None:
    """Write the image processor of a saved model where there is none, and the model card unless somebody edited it."""
    folder = Path(folder)
    if not (folder / PROCESSOR).exists():
        write_text(folder / PROCESSOR, json.dumps(image_processor_settings(config), indent=2) + "\n")
    card = folder / CARD
    # A card that nobody has added to goes with the model it describes; any other is its owner's.
    if not card.exists() or AUTOMATIC in card.read_text(encoding="utf-8"):
        write_text(card, model_card(config) + AUTOMATIC + "\n")


def file_sha256(path: str | os.PathLike) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    scratch = path.with_name(path.name + ".partial")
    scratch.write_bytes(content)
    os.replace(scratch, path)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    write_bytes(path, text.encode())


def check_new(out: Path) -> None:
    """Raise OSError if a folder to be written exists; long work asks before it begins."""
    if out.exists():
        raise OSError(f"{out} exists already; choose a new name")


@contextmanager
def whole_folder(out: str | os.PathLike) -> Iterator[Path]:
    """A scratch folder that becomes `out` when the block ends well, and vanishes when it does not.

    Raises:
        OSError: if `out` exists.
    """
    out = Path(out)
    check_new(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        os.replace(scratch, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def whole_file(out: str | os.PathLike) -> Iterator[Path]:
    """The same for a file: a scratch path of the same suffix for the block to write.

    Raises:
        OSError: if `out` exists.
    """
    out = Path(out)
    check_new(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(f".partial.{out.name}")
    try:
        yield scratch
        os.replace(scratch, out)
    finally:
        scratch.unlink(missing_ok=True)


def made_up_keys(loading_info: dict[str, Any]) -> list[str]:
    """Weights that `from_pretrained` initialised because the checkpoint had none, or none of that shape."""
    return sorted({*loading_info["missing_keys"], *(mismatch[0] for mismatch in loading_info["mismatched_keys"])})


def check_whole(folder: Any, loading_info: dict[str, Any]) -> None:
    """Raise OSError if `from_pretrained` made up a weight, as its loading info says."""
    if fresh := made_up_keys(loading_info):
        raise OSError(f"{folder} lacks weights that fit its config: {', '.join(fresh[:3])} ({len(fresh)} in all)")


def image_processor_settings(config: Any) -> dict[str, Any]:
    """preprocessor_config.json of a ViT image processor for this model, of VideoMAE's for one that takes clips.

    Both work with and without torchvision.
    """
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    if takes_clips(config):
        kind = {"image_processor_type": "VideoMAEImageProcessor", "do_center_crop": False}
    else:
        kind = {"image_processor_type": "ViTImageProcessor", "do_convert_rgb": config.num_channels == 3}
    return {
        **kind,
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(config.image_mean),
        "image_std": list(config.image_std),
    }


def takes_clips(config: Any) -> bool:
    """Whether a config is of a video model."""
    return hasattr(config, "num_frames")


def model_card(config: Any, results: dict[str, Any] | None = None, license_name: str = "apache-2.0") -> str:
    """Text of the model card.

    Args:
        config: of the model.
        results: results.json of the run that trained it: its data, metrics and command go into the card.
        license_name: for the card's header.
    """
    results = results or {}
    classifies = any("Classification" in name for name in config.architectures or [])
    clips = takes_clips(config)
    tag = ("video" if clips else "image") + "-classification"
    if not classifies:
        tag = "feature-extraction" if clips else "image-feature-extraction"
    lines = [
        "---",
        "library_name: transformers",
        f"pipeline_tag: {tag}",
        f"license: {license_name}",
        "tags: [vision-transformer, sparse-attention, spatial-prior]",
        "---",
        "",
        f"# {'SparsePriorTimesformer' if clips else 'SparsePriorViT'}, prior: {config.prior_name}",
        "",
        "| | |",
        "|---|---|",
        f"| architecture | {_architecture(config)} |",
        f"| image, patch, grid | {config.image_size}, {config.patch_size}, {config.grid[0]}x{config.grid[1]} patches |",
        *([f"| frames | {config.num_frames} |"] if clips else []),
        f"| prior | `{json.dumps(config.prior)}` |",
        f"| pruning ratio | {config.pruning_ratio:.2f} % of {_pruned(config)}, prefix tokens included |",
        *([f"| classes | {config.num_labels} |"] if classifies else []),
        f"| data | {results.get('data', 'not recorded')} |",
    ]
    metrics = results.get("metrics", {})
    lines += [f"| {name} | {value} |" for name, value in metrics.items()] or ["| metrics | not recorded |"]
    if "command" in results:
        lines.append(f"| trained with | `{results['command']}` |")
    lines += [
        "",
        "```python",
        *(_FEATURES if not classifies else _CLASSIFY_CLIPS if clips else _CLASSIFY),
        "```",
        "",
        "Where hf_sparseprior is installed and imported, `trust_remote_code` is not needed.",
        "",
    ]
    return "\n".join(lines)


_CLASSIFY = (
    "from transformers import pipeline",
    'classify = pipeline("image-classification", model="PATH_OR_NAME_OF_THIS_MODEL", trust_remote_code=True)',
    'classify("image.png")',
)
# Decoding needs PyAV (pip install av).
_CLASSIFY_CLIPS = (
    "from transformers import pipeline",
    'classify = pipeline("video-classification", model="PATH_OR_NAME_OF_THIS_MODEL", trust_remote_code=True)',
    'classify("clip.mp4")',
)
_FEATURES = (
    "from transformers import AutoModel",
    'model = AutoModel.from_pretrained("PATH_OR_NAME_OF_THIS_MODEL", trust_remote_code=True)',
    "features = model(pixel_values).last_hidden_state",
)


def _pruned(config: Any) -> str:
    """What the pruning ratio is a percentage of (`prior.prior_pruning_ratio`)."""
    if config.prior["mixer"] == "softmax":
        return "query-key pairs left out"
    return "dense attention's multiply-adds over query-key pairs saved"


def _architecture(config: Any) -> str:
    prefix = ", ".join(name for name, used in _prefix_tokens(config) if used) or "none"
    layers, heads, width = config.num_hidden_layers, config.num_attention_heads, config.hidden_size
    stem = ", convolutional stem" if config.stem == "convolution" else ""
    kind = "TimeSformer, divided space-time attention" if takes_clips(config) else "ViT"
    return f"{kind}, {layers} layers, {heads} heads, width {width}{stem}, {config.pooling} pooling, prefix: {prefix}"


def _prefix_tokens(config: Any) -> list[tuple[str, Any]]:
    return [
        ("class token", config.use_class_token),
        ("distillation token", config.use_distillation_token),
        (f"{config.num_register_tokens} register tokens", config.num_register_tokens),
    ]


def check_source(source: Any, options: dict[str, Any]) -> None:
    """Refuse a folder without a config: transformers would take the default one and a model nobody asked for.

    Args:
        source: what `from_pretrained` was given, a folder, a name on the hub or None.
        options: its keyword arguments.
    """
    if source is None or "config" in options:
        return
    folder = Path(source) / options.get("subfolder", "")
    if folder.is_dir() and not (folder / CONFIG_NAME).is_file():
        raise OSError(f"{folder} holds no {CONFIG_NAME}")


@contextmanager
def load_errors_in_one_line(source: Any) -> Iterator[None]:
    """Turn a damaged safetensors file into one error that names the folder."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(
            f"{source}: the safetensors checkpoint cannot be read, it is damaged or cut off ({error})"
        ) from error
