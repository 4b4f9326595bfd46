import json
from argparse import Namespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import BitImageProcessorPil

import hf_sparseprior as sp
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.data import load_data
from hf_sparseprior.images.sources import balanced_subset
from tasks.analysis.box_variance import main, patches_inside, read_boxes
from tasks.analysis.runs import open_models
from tests.each import each

LAYERS, GRID, PATCH = 2, 4, 4


def covered(box):
    """Patches (row, column) of a 16x16 image in 4x4 patches of which the box covers half, pixel by pixel."""
    left, top, width, height = box
    inside = np.zeros((16, 16), dtype=bool)
    inside[top : top + height, left : left + width] = True
    return [
        (row, column)
        for row in range(GRID)
        for column in range(GRID)
        if inside[row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH].sum() >= PATCH * PATCH / 2
    ]


def expected_values(folder, images, boxes):
    """Means over images of (mean, variance, that of each head, that of patches), for each layer, written out."""
    model = sp.SparsePriorViTForImageClassification.from_pretrained(folder / "model").eval()
    pixels = torch.tensor(images.transpose(0, 3, 1, 2) / 255, dtype=torch.float32) * 2 - 1
    with torch.no_grad():
        weights = [layer.double().numpy() for layer in model(pixels, output_attentions=True).attentions]
    per_image = []
    for number, own in enumerate(boxes):
        per_box = []
        for box in own:
            places = [1 + row * GRID + column for row, column in covered(box)]
            if len(places) < 2:
                continue
            layers = []
            for layer in weights:
                pairs = np.array([[[head[j, k] for k in places] for j in places] for head in layer[number]])
                mean_head = np.mean(pairs, axis=0)
                deviations = [np.mean((head - head.mean()) ** 2) for head in pairs]
                pair_variance = np.mean((mean_head - mean_head.mean()) ** 2)
                received = mean_head.mean(0)
                layers.append(
                    (pairs.mean(), pair_variance, np.mean(deviations), np.mean((received - received.mean()) ** 2))
                )
            per_box.append(layers)
        if per_box:
            per_image.append(np.mean(per_box, axis=0))
    return np.mean(per_image, axis=0), len(per_image)


def test_every_number_equals_numpy(boxed_runs, capsys, figures, tmp_path):
    folders, images, boxes = boxed_runs
    assert main([*map(str, folders), "--out", str(tmp_path)]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    results = json.loads((tmp_path / "box_variance.json").read_text())
    assert results["versions"]["torch"] and results["command"]
    for row, folder, found in zip(rows, folders, results["models"], strict=True):
        expected, count = expected_values(folder, images, boxes)
        # A third of the images have no box that covers two patches.
        assert found["images"] == count == 8 and found["boxes"] == 12 and found["boxes_of_less_than_two_patches"] == 4
        for layer, values in zip(found["layers"], expected, strict=True):
            assert list(layer) == ["mean", "variance", "head_variance", "patch_variance"]
            np.testing.assert_allclose(list(layer.values()), values, rtol=1e-4)
        np.testing.assert_allclose(list(found["all_layers"].values()), expected.mean(0), rtol=1e-4)
        assert found["last_layer"] == found["layers"][-1] and found["tokens"] == 17
        shown = [*expected[-1] * (1, 1e5, 1e5, 1e5), 1e5 * expected[:, 1].mean()]
        np.testing.assert_allclose([float(cell) for cell in row[3:8]], shown, rtol=2e-3)
    axes = np.array(figures["box_examples.png"].axes[:-1]).reshape(3, -1)
    assert [axis.get_ylabel() for axis in axes[:, 0]] == ["image", "dense", "fibottention"]
    np.testing.assert_allclose(axes[0, 0].images[0].get_array(), images[0] / 255, atol=1e-6)
    for line in axes:
        frame = line[0].patches[0]
        assert (*frame.get_xy(), frame.get_width(), frame.get_height()) == (0, 4, 8, 12)


def test_a_limit_takes_images_with_their_own_boxes(boxed_runs, tmp_path):
    folders, images, boxes = boxed_runs
    assert main([str(folders[0]), "--limit", "5", "--out", str(tmp_path)]) == 0
    (found,) = json.loads((tmp_path / "box_variance.json").read_text())["models"]
    chosen = balanced_subset(np.arange(12) % 2, 5, 0)
    expected, count = expected_values(folders[0], images[chosen], [boxes[number] for number in chosen])
    assert found["images"] == count
    np.testing.assert_allclose(list(found["last_layer"].values()), expected[-1], rtol=1e-4)


def test_tables_give_their_boxes(boxed_runs):
    folders, _, boxes = boxed_runs
    data = json.loads((folders[0] / "run_config.json").read_text())["data"]
    images = load_data(DataConfig(**data)).splits["test"]
    assert [images.boxes(index) for index in range(12)] == boxes
    part = images.subset(np.array([4, 1])).subset(np.array([1]))
    assert part.boxes(0) == boxes[1] and len(part) == 1


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_own_images_with_a_file_of_boxes(kind, boxed_runs, tmp_path):
    folders, images, boxes = boxed_runs
    (tmp_path / "photos" / "cats").mkdir(parents=True)
    names = [f"cats/{number}.png" for number in range(6)]
    for name, pixels in zip(names, images, strict=False):
        Image.fromarray(pixels).save(tmp_path / "photos" / name)
    file = tmp_path / f"boxes.{kind}"
    if kind == "json":
        file.write_text(json.dumps(dict(zip(names, boxes, strict=False))))
    else:
        lines = [f"{name},{','.join(map(str, box))}" for name, own in zip(names, boxes, strict=False) for box in own]
        file.write_text("\n".join(["image,left,top,width,height", *lines]))
    arguments = ["--images", str(tmp_path / "photos"), "--boxes", str(file), "--out", str(tmp_path / "out")]
    assert main([str(folders[1]), *arguments]) == 0
    (found,) = json.loads((tmp_path / "out" / "box_variance.json").read_text())["models"]
    expected, count = expected_values(folders[1], images[:6], boxes[:6])
    assert found["images"] == count == 4
    np.testing.assert_allclose(list(found["last_layer"].values()), expected[-1], rtol=1e-4)


def test_boxes_are_cut_and_scaled_with_the_image(boxed_runs, tmp_path):
    (saved,) = open_models(Namespace(models=[boxed_runs[0][0]], names=None, device="cpu"))
    wide = Image.new("RGB", (64, 32))
    # Scaled by a quarter across and a half down: columns 1 and 2, rows 0 and 1 of 4x4 patches.
    assert patches_inside([16, 0, 32, 16], wide, saved, "x").nonzero().tolist() == [[0, 1], [0, 2], [1, 1], [1, 2]]
    # 1.5 and 13.5 are both rounded up, to 16 of 15 pixels, but their sum is the edge of the image.
    inside = patches_inside([0, 1.5, 16, 13.5], Image.new("RGB", (16, 15)), saved, "x")
    assert inside.tolist() == [[False] * 4] + [[True] * 4] * 3
    saved.processor = BitImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, resample=3, do_center_crop=True
    )
    # Scaled by a half to 32x16, of which columns 8 to 24 are left: pixels 16 to 48 of the image.
    assert patches_inside([0, 0, 16, 32], wide, saved, "x").sum() == 0
    assert patches_inside([16, 8, 16, 8], wide, saved, "x").nonzero().tolist() == [[1, 0], [1, 1]]


@each(
    "name, text, message",
    [
        ("a.csv", "image,left,top,width\n", "has no column 'height'; its first line must be image,left,top"),
        ("a.csv", "image,left,top,width,height\nx.png,1,2,3,0\n", "line 2: box ['1', '2', '3', '0'] must have left"),
        ("a.csv", "image,left,top,width,height\nx.png,1,2,3\n", "line 2: box ['1', '2', '3', None] must be the"),
        ("a.csv", "image,left,top,width,height\n", "holds no boxes"),
        ("a.json", "[]", 'must be JSON like {NAME: [[left, top, width, height], ...]}'),
        ("a.json", "{", "must be JSON like"),
        ("a.json", '{"x.png": [[1, 2, 3]]}', "'x.png': box [1, 2, 3] must be the numbers left, top, width, height"),
        ("a.json", '{"x.png": [[-1, 2, 3, 4]]}', "must have left and top of 0 or more"),
        ("a.json", '{"x.png": [[1, 2, 3, 4]]}', "names 'x.png', which is no file in"),
    ],
)  # fmt: skip
def test_bad_boxes_give_one_line(name, text, message, boxed_runs, capsys, tmp_path):
    (tmp_path / name).write_text(text)
    arguments = ["--images", str(tmp_path), "--boxes", str(tmp_path / name), "--out", str(tmp_path / "out")]
    assert main([str(boxed_runs[0][0]), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error
    assert not (tmp_path / "out").exists()


def test_data_without_boxes_and_halves_of_options(runs, boxed_runs, capsys, tmp_path, picture):
    out = ["--out", str(tmp_path / "out")]
    boxes = tmp_path / "boxes.json"
    boxes.write_text('{"own.png": [[20, 0, 16, 4]]}')
    small = tmp_path / "small.json"
    small.write_text('{"own.png": [[0, 0, 2, 2]]}')
    cases = {
        (str(runs["dense"]),): "the images have no boxes; give a table with a column 'boxes'",
        (str(runs["dense"]), "--boxes", str(boxes)): "--images FOLDER and --boxes FILE go together",
        (str(runs["dense"]), "--images", str(tmp_path), "--boxes", str(boxes)): "leaves the image of 30x20 pixels",
        (str(runs["dense"]), "--images", str(tmp_path), "--boxes", str(small)): "no box holds two patches of the 4x4",
    }
    for arguments, message in cases.items():
        assert main([*arguments, *out]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error


def test_read_boxes_collects_the_lines_of_an_image(tmp_path):
    for encoding in ("utf-8", "utf-8-sig"):
        text = "image,width,height,left,top\nx,3,4,1,2\ny,1,1,0,0\nx,5,6,0,0.5\n"
        (tmp_path / "a.csv").write_text(text, encoding=encoding)
        assert read_boxes(tmp_path / "a.csv") == {"x": [[1, 2, 3, 4], [0, 0.5, 5, 6]], "y": [[0, 0, 1, 1]]}
