"""Whole segmentors, and detectors up to their maps, as ONNX files.

Heads of transformers: tests/hf_sparseprior/cli/test_exportable.py.
"""

import io
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import init_default_scope
from torch.utils import _pytree

from tests.tasks.detection.tiny import OVERRIDES as DETECTION
from tests.tasks.segmentation.tiny import OVERRIDES as SEGMENTATION

pytestmark = pytest.mark.slow
CONFIGS = Path(__file__).parents[4] / "configs"


def build(task, overrides):
    """A small model of a task's smoke configuration, with weights that let all of it matter."""
    config = Config.fromfile(CONFIGS / task / "smoke.py")
    own = [entry.split("=", 1) for entry in overrides if entry.startswith("model.")]
    values = {key: Config.fromstring(f"value = {text}", ".py").value if text[:1] in "[(" else text for key, text in own}
    config.merge_from_dict({key: _number(value) for key, value in values.items()})
    registry = {"segmentation": "mmseg", "detection": "mmdet"}[task]
    init_default_scope(registry)
    models = pytest.importorskip(f"{registry}.registry").MODELS
    import_module(f"tasks.{task}")
    torch.manual_seed(0)
    model = models.build(config.model).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def _number(value):
    try:
        return float(value) if "." in value else int(value)
    except (TypeError, ValueError):
        return value


def check_export(model, size):
    """The file gives what the model gives for other images than those that it was written with."""
    runtime = pytest.importorskip("onnxruntime")
    first, other = torch.randn(2, 1, 3, size, size, generator=torch.Generator().manual_seed(1)).unbind()
    torch.onnx.export(model, (first,), file := io.BytesIO(), dynamo=True)
    session = runtime.InferenceSession(file.getvalue())
    found = session.run(None, {session.get_inputs()[0].name: other.numpy()})
    with torch.no_grad():
        outputs = model(other)
    outputs = dict(outputs) if hasattr(outputs, "keys") else outputs
    expected = [value.numpy() for value in _pytree.tree_leaves(outputs) if torch.is_tensor(value)]
    assert len(found) == len(expected) >= 1
    for one, another in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, another, rtol=1e-5, atol=1e-5)
    assert max(np.abs(value).max() for value in expected) > 0.01


def test_a_whole_segmentor():
    check_export(build("segmentation", SEGMENTATION), 32)


def test_a_detector_up_to_its_maps():
    from tasks.detection.maps import DetectorMaps

    detector = build("detection", DETECTION)
    check_export(DetectorMaps(detector), 32)
    detector.rpn_head = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="MaskRCNN with Linear has no maps before its boxes; mmdeploy exports whole"):
        DetectorMaps(detector)
