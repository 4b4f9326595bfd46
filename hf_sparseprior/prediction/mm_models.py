"""Segmentors and detectors that `tasks.segmentation` and `tasks.detection` trained: config.py and model.safetensors.

Their config.py is a file of Python that mmengine would run. What a run writes are plain values, which are read here
without running anything.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_sparseprior.base.files import file_sha256
from hf_sparseprior.base.json_files import CONFIG_BYTES, read_limited
from hf_sparseprior.prediction.predictor import Predictor, corner_and_sides

CONFIG, WEIGHTS = "config.py", "model.safetensors"
SCOPES = {"mmseg": "pixels", "mmdet": "objects"}
# Steps of a pipeline that read files; images come read.
READERS = ("LoadImage", "LoadAnnotations")


def plain_values(file: Path) -> dict[str, Any]:
    """The names that a file of Python gives plain values: numbers, texts, lists, tuples, dicts and calls of `dict`.

    Raises:
        OSError: for a file that cannot be read.
        ValueError: for anything else in it; the message has the line.
    """
    try:
        tree = ast.parse(read_limited(file, CONFIG_BYTES).decode())
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{file} is no config of mmengine ({error})") from None
    found: dict[str, Any] = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not isinstance(node.targets[0], ast.Name):
            raise ValueError(f"{file}, line {node.lineno}: only names with plain values are read, as a run writes them")
        found[node.targets[0].id] = _value(node.value, file)
    return found


def _value(node: ast.AST, file: Path) -> Any:
    if isinstance(node, (ast.List, ast.Tuple)):
        values = [_value(own, file) for own in node.elts]
        return values if isinstance(node, ast.List) else tuple(values)
    if isinstance(node, ast.Dict) and None not in node.keys:
        pairs = zip(node.keys, node.values, strict=True)
        return {_value(key, file): _value(value, file) for key, value in pairs if key is not None}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        given = [_value(own, file) for own in node.args]
        named = {own.arg: _value(own.value, file) for own in node.keywords if own.arg is not None}
        if len(given) <= 1 and len(named) == len(node.keywords):
            return dict(*given, **named)
    try:
        return ast.literal_eval(node)
    except ValueError:
        line = getattr(node, "lineno", 0)
        raise ValueError(f"{file}, line {line}: only plain values are read, as a run writes them") from None


@dataclass
class MMPredictor(Predictor):
    """A segmentor of mmsegmentation or a detector of mmdetection.

    Images go through the pipeline of the config's tests one by one: in a batch some would be padded, which changes
    what is found.
    """

    model: Any = None
    pipeline: Any = None
    scope: str = ""

    def results(self, images: Sequence[Any]) -> Iterator[Any]:
        """mm's samples of data with what was found."""
        for image in images:
            array = np.ascontiguousarray(np.asarray(image)[..., ::-1])  # mm's order is blue, green, red
            with _scope(self.scope), torch.no_grad():
                sample = self.pipeline({"img": array, "img_id": 0, "img_path": ""})
                given = {"inputs": [sample["inputs"]], "data_samples": [sample["data_samples"]]}
                yield self.model.test_step(given)[0]

    def masks(self, images: Sequence[Any]) -> list[np.ndarray]:
        """As `Predictor.masks`."""
        return [own.pred_sem_seg.data[0].cpu().numpy().astype(np.uint16) for own in self.results(images)]

    def objects(self, images: Sequence[Any], threshold: float) -> list[list[dict[str, Any]]]:
        """As `Predictor.objects`; with `segmentation`, COCO's run lengths, and `area` of a model that finds masks."""
        return [list(_objects(own.pred_instances.cpu(), threshold)) for own in self.results(images)]


def _objects(found: Any, threshold: float) -> Iterator[dict[str, Any]]:
    masks: Tensor | None = found.get("masks")
    for place in torch.where(found.scores >= threshold)[0].tolist():
        one: dict[str, Any] = {"category": int(found.labels[place]), "score": float(found.scores[place])}
        one["bbox"] = corner_and_sides(found.bboxes[place].tolist())
        if masks is not None:
            from pycocotools import mask as coco_masks

            coded = coco_masks.encode(np.asfortranarray(masks[place].numpy().astype(np.uint8)))
            one["segmentation"] = {"size": coded["size"], "counts": coded["counts"].decode()}
            one["area"] = float(masks[place].sum())
        yield one


@contextmanager
def _scope(name: str) -> Iterator[None]:
    from mmengine.registry import DefaultScope

    with DefaultScope.overwrite_default_scope(name):
        yield


def model_folder(folder: Path) -> Path | None:
    """The folder of a model of mm: this one, or that of a run; None: it is none."""
    for own in (folder, folder / "model"):
        if (own / CONFIG).is_file() and (own / WEIGHTS).is_file():
            return own
    return None


def load(folder: Path, device: Any = None) -> MMPredictor:
    """A predictor of a folder that a run of segmentation or detection saved.

    Raises:
        OSError: for damaged weights. ImportError: without mmsegmentation or mmdetection.
        ValueError: for a config that is no such run's, and weights that do not fit.
    """
    content = plain_values(folder / CONFIG)
    scope = content.get("default_scope")
    if scope not in SCOPES:
        raise ValueError(f"{folder / CONFIG}: default_scope={scope!r} must be one of {', '.join(SCOPES)}")
    if not isinstance(content.get("model"), dict) or not isinstance(content.get("test_pipeline"), list):
        raise ValueError(f"{folder / CONFIG} must have model and test_pipeline")
    from mmengine.config import ConfigDict
    from mmengine.dataset import Compose

    import hf_sparseprior.mm  # noqa: F401
    from hf_sparseprior.mm.loading import DATASET_META, read_safetensors

    if scope == "mmseg":
        from mmseg.registry import MODELS
    else:
        import mmdet.datasets
        import mmdet.models  # noqa: F401
        from mmdet.registry import MODELS
    stored = read_safetensors(folder / WEIGHTS)
    steps = [step for step in content["test_pipeline"] if not str(step.get("type")).startswith(READERS)]
    with _scope(scope):
        model = MODELS.build(ConfigDict(content["model"]))
        pipeline = Compose([ConfigDict(step) for step in ({"type": "LoadImageFromNDArray"}, *steps)])
    try:
        model.load_state_dict(stored["state_dict"])
    except RuntimeError as error:
        line = str(error).splitlines()[1].strip()
        raise ValueError(f"{folder / WEIGHTS} does not fit its {CONFIG}: {line}") from None
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    named = stored["meta"].get(DATASET_META, {}).get("classes")

    def call(pixels: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError("images of mm go through its own pipeline")

    return MMPredictor(
        title=f"{type(model).__name__} on {type(model.backbone).__name__}",
        digest=file_sha256(folder / WEIGHTS),
        kind="pixels" if scope == "mmseg" else "objects",
        labels=None if named is None else list(map(str, named)),
        call=call,
        processor=None,
        num_channels=3,
        device=place.type,
        model=model.to(place).eval(),
        pipeline=pipeline,
        scope=scope,
    )
