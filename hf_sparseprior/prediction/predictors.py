"""A model that looks at images, wherever it comes from: a folder, the hub, an exported file, or Python."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_sparseprior.adapters.lora import CLASSIFIERS
from hf_sparseprior.adapters.token_layout import patch_projection
from hf_sparseprior.base.checks import first_line
from hf_sparseprior.base.families import family_of
from hf_sparseprior.base.files import file_sha256, missing_path, write_text
from hf_sparseprior.cli.deployment import fitted_processor, own_copy, saved_processor, stock_sides
from hf_sparseprior.cli.export import exported_source
from hf_sparseprior.cli.exportable import Exportable
from hf_sparseprior.cli.packages import DEPLOYMENT, read_deployment
from hf_sparseprior.cli.runtimes import FORMATS
from hf_sparseprior.prediction import mm_models
from hf_sparseprior.prediction.predictor import Kind, Predictor
from hf_sparseprior.saving.processor import PROCESSOR
from hf_sparseprior.saving.saved_processor import load_image_processor

FEATURES = ("pooled", "patches")


def load_predictor(
    model: Any, processor: Any = None, features: str | None = None, device: str | torch.device | None = None
) -> Predictor:
    """A predictor of a folder, of a name on the hub, or of a model.

    Args:
        model: folder of a training run, of a saved model of ours or of transformers, of an adapter, or of an exported
            file; a name on the hub; or a model of these kinds or of timm, which is copied.
        processor: an image processor or a folder that has one; default the model's.
        features: one of `FEATURES`, in place of what a head finds.
        device: default a GPU if there is one.

    Raises:
        OSError: for what is none of these.
        ValueError: for models that take no images, lack an image processor, or have no such features.
    """
    if features is not None and features not in FEATURES:
        raise ValueError(f"features={features!r} must be one of {', '.join(FEATURES)}")
    if isinstance(model, (str, os.PathLike)):
        folder = local_folder(model)
        if (folder / DEPLOYMENT).is_file():
            if features is not None:
                raise ValueError(f"features={features!r} needs a model, and {folder} holds an exported file")
            _refuse_processor(processor, folder)
            return _of_file(folder, device)
        if (own := mm_models.model_folder(folder)) is not None:
            if features is not None:
                raise ValueError(f"features={features!r} is not for models of mm; {own}/backbone is saved by itself")
            _refuse_processor(processor, folder)
            return mm_models.load(own, device)
        home, loaded = exported_source(folder)
        if processor is None and os.path.lexists(home / PROCESSOR):
            processor = home
        return _of_model(loaded, processor, features, device, str(folder))
    return _of_model(model, processor, features, device, None)


def _refuse_processor(processor: Any, folder: Path) -> None:
    if processor is not None:
        raise ValueError(f"processor={processor!r:.80} is for models, and {folder} says how its images are prepared")


def local_folder(source: str | os.PathLike) -> Path:
    """A local folder; of a name on the hub its snapshot, without files that are code or would be unpickled.

    Raises:
        OSError: for a name that is neither.
    """
    if os.path.isdir(source):
        return Path(source)
    name = os.fspath(source)
    if os.path.lexists(name) or name.count("/") > 1 or name.startswith((".", "/", "~")):
        advice = (
            "give the folder of a training run, a saved model, an adapter or an exported file, or a name on the hub"
        )
        if not os.path.lexists(name):
            raise OSError(missing_path(name, advice))
        raise OSError(f"{name} is no folder of a model; {advice}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # of the hub, of httpx and of names
        line = first_line(error)
        raise OSError(
            f"{name} does not exist here ({os.path.abspath(name)}), and the hub does not give it ({line}); give the "
            "folder of a training run, a saved model, an adapter or an exported file, or OWNER/NAME of the hub"
        ) from None


# ---- exported files -------------------------------------------------------------------------------------------------


def _of_file(folder: Path, device: Any) -> Predictor:
    about = read_deployment(folder)
    format_ = FORMATS.get(str(about.get("format")))
    if format_ is None or about.get("format") == "aoti":
        raise ValueError(
            f"{folder} holds a file for {about.get('format')!r}; predict takes those for "
            f"{', '.join(name for name in FORMATS if name != 'aoti')}, and run-package AOTInductor's, which are code"
        )
    if device not in (None, "cpu", torch.device("cpu")):
        raise ValueError(f"device={device!s} must be cpu for an exported file")
    format_.check_packages()
    if about.get("kernels") is not None:
        assert format_.library is not None
        format_.library()
    file, names = folder / format_.file, about["outputs"]
    if not file.is_file():
        raise OSError(f"{folder} has no {format_.file}, which its {DEPLOYMENT} names")
    try:
        run = format_.load(file, torch.get_num_threads())
    except Exception as error:  # each program has errors of its own for damaged files
        line = first_line(error)
        raise OSError(f"{file} cannot be loaded: {line}") from None

    def call(pixels: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            return {name: torch.from_numpy(value) for name, value in zip(names, run(pixels), strict=True)}

    if not os.path.lexists(folder / PROCESSOR):
        raise ValueError(f"{folder} has no {PROCESSOR}, so how its images are prepared is not known")
    shape = about["input"]["shape"][1:]
    return Predictor(
        title=f"{about['model']} with prior {about['prior']!r} in {format_.title}",
        digest=file_sha256(file),
        kind=_kind(call(torch.zeros(1, *shape)), about.get("problem_type")),
        labels=about["labels"],
        call=call,
        processor=load_image_processor(folder),
        num_channels=shape[-3],
        num_frames=shape[0] if len(shape) == 4 else None,
        one_class=about.get("problem_type") != "multi_label_classification",
    )


# ---- models ---------------------------------------------------------------------------------------------------------


def _of_model(model: Any, processor: Any, features: str | None, device: Any, source: str | None) -> Predictor:
    saved, model = saved_processor(processor), own_copy(model)
    exported = Exportable(model, stock_sides(model, saved))
    if exported.num_channels not in (1, 3):
        raise ValueError(f"{exported.title} takes {exported.num_channels} channels, and image files have 1 or 3")
    if exported.num_frames is not None and features == "patches":
        raise ValueError(f"features='patches' is for images, and {exported.title} takes clips")
    settings = fitted_processor(saved, exported)
    if settings is None:
        where = source or "the model"
        raise ValueError(f"{where} has no {PROCESSOR}, so how its images are prepared is not known (processor=)")
    with tempfile.TemporaryDirectory() as scratch:
        write_text(Path(scratch) / PROCESSOR, json.dumps(settings))
        images = load_image_processor(scratch)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    exported = exported.to(place)
    named = exported.named if features is None else lambda pixels: {"features": _features(exported, pixels, features)}

    def call(pixels: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            return {name: value.float().cpu() for name, value in named(pixels.to(place)).items()}

    problem = getattr(getattr(exported.model, "config", None), "problem_type", None)
    kind = _kind(call(exported.images(1)), problem) if features is None else "features"
    return Predictor(
        title=exported.title,
        digest=_digest(exported.model),
        kind=kind,
        labels=exported.labels if kind != "features" else None,
        call=call,
        processor=images,
        num_channels=exported.num_channels,
        one_class=problem != "multi_label_classification",
        per_image=_bytes_per_image(exported) * (exported.num_frames or 1),
        device=place.type,
        num_frames=exported.num_frames,
    )


def _digest(model: nn.Module) -> str:
    """Of all weights, so that work is gone on with for the same model alone."""
    import hashlib

    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _bytes_per_image(exported: Exportable) -> int:
    """What one image takes in a forward pass, roughly and rather too much."""
    config = getattr(exported.model, "config", None)
    config = getattr(config, "backbone_config", None) or getattr(config, "vision_config", None) or config
    height, width = exported.sides
    patch = getattr(config, "patch_size", None) or 16
    patch = patch if isinstance(patch, int) else patch[0]
    tokens = (height // patch) * (width // patch) + 1
    dim = getattr(config, "hidden_size", None) or 768
    heads = getattr(config, "num_attention_heads", None) or 12
    heads = heads if isinstance(heads, int) else max(heads)
    pairs = 0 if family_of(config) is not None and exported.prior != "dense" else 2 * heads * tokens**2
    return 4 * (12 * tokens * dim + pairs + 3 * height * width)


def _kind(outputs: Mapping[str, Tensor], problem: str | None) -> Kind:
    """What a model finds, by what it gives for one image."""
    logits = outputs.get("logits")
    if "pred_boxes" in outputs:
        return "objects"
    if "masks_queries_logits" in outputs or (logits is not None and logits.ndim == 4):
        return "pixels"
    if logits is not None and logits.ndim == 2:
        return "numbers" if problem == "regression" else "classes"
    return "features"


# ---- features -------------------------------------------------------------------------------------------------------


def _features(exported: Exportable, pixels: Tensor, which: str) -> Tensor:
    """(B, dim) that the classifier takes, or without one the pooled output; or (B, patches, dim) of the last layer.

    Raises:
        ValueError: for a model that has none.
    """
    model = exported.model
    if which == "patches":
        return _patches(exported, pixels)
    if exported.in_timm and hasattr(model, "forward_head"):
        return model.forward_head(model.forward_features(pixels), pre_logits=True).flatten(1)
    heads = (module for name, module in model.named_modules() if name.rpartition(".")[2] in CLASSIFIERS)
    head = next((module for module in heads if not isinstance(module, nn.Identity)), None)
    if head is None:
        output = exported.named(pixels)
        pooled = output.get("pooler_output", output.get("features"))
        if pooled is None and (states := output.get("last_hidden_state")) is not None:
            pooled = states.mean(1)
        if pooled is None or pooled.ndim != 2:
            raise ValueError(f"features='pooled': {exported.title} pools nothing; features='patches' is for backbones")
        return pooled
    seen: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    try:
        exported.named(pixels)
    finally:
        hook.remove()
    return seen[-1].flatten(1)


def _patches(exported: Exportable, pixels: Tensor) -> Tensor:
    model = exported.model
    if exported.in_timm:
        states = model.forward_features(pixels)
        return states.flatten(1, -2) if states.ndim == 4 else states[:, getattr(model, "num_prefix_tokens", 0) :]
    if getattr(model.config, "backbone_config", None) is not None:
        model = model.backbone
    output = (model if model.base_model is model else model.base_model)(pixel_values=pixels, **exported.options)
    if (maps := output.get("feature_maps")) is not None:
        return maps[-1].flatten(2).transpose(1, 2)
    if output.get("token_ids") is not None:
        raise ValueError(f"features='patches': {exported.title} drops or merges patches, others for each image")
    states = output.last_hidden_state
    if states.ndim == 4:
        return states.flatten(2).transpose(1, 2)
    down, across = patch_projection(model).stride
    count = (pixels.shape[-2] // down) * (pixels.shape[-1] // across)
    return states[:, -count:] if states.shape[1] >= count else states
