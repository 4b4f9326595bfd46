"""`predict` with the models of segmentation's and detection's runs, against mm's own inference."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import hf_sparseprior as sp
from hf_sparseprior.prediction.mm_models import plain_values
from tests.hf_sparseprior.mm.test_mm import BACKBONE, DETECTION, SEGMENTATION

mmseg = pytest.importorskip("mmseg", reason="mmsegmentation is not installed: make dense")
mmdet = pytest.importorskip("mmdet", reason="mmdetection is not installed: make dense")
from mmdet.apis import inference_detector, init_detector  # noqa: E402
from mmengine.config import Config  # noqa: E402
from mmseg.apis import inference_model, init_model  # noqa: E402

CLASSES = ["ant", "bee", "cat"]


def saved(text, tmp_path, make):
    """A run's folder with a model, which mm's own tools built."""
    (tmp_path / "written.py").write_text(BACKBONE + text)
    config = Config.fromfile(tmp_path / "written.py")
    torch.manual_seed(0)
    model = make(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    folder = tmp_path / "run" / "model"
    folder.mkdir(parents=True)
    config.dump(str(folder / "config.py"))
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"dataset_meta": json.dumps({"classes": CLASSES})})
    numbers = np.random.default_rng(0)
    files = []
    for number, sides in enumerate(((40, 56), (64, 48))):
        files.append(str(tmp_path / f"{number}.png"))
        Image.fromarray(numbers.integers(0, 256, (*sides, 3), dtype=np.uint8)).save(files[-1])
    return model, files


def test_segmentors(tmp_path):
    model, files = saved(SEGMENTATION, tmp_path, lambda config: init_model(config, device="cpu"))
    sp.predict(tmp_path / "run", files, tmp_path / "masks")
    rows = [line.split(",") for line in (tmp_path / "masks" / "masks.csv").read_text().splitlines()[1:]]
    for file, (path, mask) in zip(files, rows, strict=True):
        expected = inference_model(model, file).pred_sem_seg.data[0].numpy()
        assert path == file and len(np.unique(expected)) > 1
        np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "masks" / mask)), expected)
    assert [line.split(",")[1] for line in (tmp_path / "masks" / "legend.csv").read_text().splitlines()[1:]] == CLASSES


def test_detectors(tmp_path):
    make = lambda config: init_detector(config, palette="random", device="cpu")  # noqa: E731
    model, files = saved(DETECTION, tmp_path, make)
    sp.predict(tmp_path / "run" / "model", files, tmp_path / "out.json", threshold=0.0)
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["categories"] == [{"id": number, "name": name} for number, name in enumerate(CLASSES)]
    for number, file in enumerate(files, 1):
        expected = inference_detector(model, file).pred_instances
        own = [one for one in content["annotations"] if one["image_id"] == number]
        assert own and [one["category_id"] for one in own] == expected.labels.tolist()
        np.testing.assert_allclose([one["score"] for one in own], expected.scores, rtol=1e-5)
        boxes = [(left, top, left + width, top + height) for left, top, width, height in (one["bbox"] for one in own)]
        np.testing.assert_allclose(boxes, expected.bboxes, atol=0.02)
    with pytest.raises(ValueError, match="features='pooled' is not for models of mm"):
        sp.predict(tmp_path / "run", files, tmp_path / "out.npz", features="pooled")


def test_configs_are_read_and_not_run(tmp_path):
    file = tmp_path / "config.py"
    file.write_text("a = dict(b=[1, -2.5, (True, None)], **{'c': 'd'})\n")
    with pytest.raises(ValueError, match="line 1: only plain values are read"):
        plain_values(file)
    file.write_text("a = dict(dict({'x.y': 1}), b=[1, -2.5, (True, None)])\nc = 'd'\n")
    assert plain_values(file) == {"a": {"x.y": 1, "b": [1, -2.5, (True, None)]}, "c": "d"}
    for text in (
        f"a = open({str(tmp_path / 'made')!r}, 'w')\n",
        "import os\n",
        "a = dict(b=[own for own in ()])\n",
        "a = b = 1\n",
        "a = __import__('os').getcwd()\n",
    ):
        file.write_text("x = 1\n" + text)
        with pytest.raises(ValueError, match=r"config\.py, line 2: only"):
            plain_values(file)
    assert not (tmp_path / "made").exists()
    file.write_text("a = (\n")
    with pytest.raises(ValueError, match="is no config of mmengine"):
        plain_values(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("default_scope = 'other'\n", "default_scope='other' must be one of mmseg, mmdet"),
        ("default_scope = 'mmseg'\n", "must have model and test_pipeline"),
    ],
)
def test_other_folders_are_refused(text, message, tmp_path):
    (tmp_path / "config.py").write_text(text)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    Image.new("RGB", (8, 8)).save(tmp_path / "one.png")
    with pytest.raises(ValueError, match=message):
        sp.predict(tmp_path, tmp_path / "one.png", tmp_path / "out.json")


def test_weights_that_do_not_fit(tmp_path):
    _, files = saved(SEGMENTATION, tmp_path, lambda config: init_model(config, device="cpu"))
    weights = tmp_path / "run" / "model" / "model.safetensors"
    save_file({"a": torch.zeros(1)}, weights)
    with pytest.raises(ValueError, match=r"model\.safetensors does not fit its config\.py: Missing key"):
        sp.predict(tmp_path / "run", files, tmp_path / "masks")
    weights.write_bytes(b"damaged")
    with pytest.raises(OSError, match="cannot be read as a checkpoint"):
        sp.predict(tmp_path / "run", files, tmp_path / "masks")
