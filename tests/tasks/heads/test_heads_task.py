"""Training with heads of transformers: data against loops, metrics against other libraries, runs, `pipeline`."""

import json
import re
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from sklearn.metrics import jaccard_score

from tests.configs import shipped
from tests.each import each
from tests.processes import run_script
from tests.tasks.common.mm.shapes import litter, write_shapes

pytest.importorskip("pycocotools", reason="the extra `heads` is not installed")

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.models.heads import backbone_of, offer_code
from hf_sparseprior.runs.results import read_results
from hf_sparseprior.training.sampling import Draw
from tasks.common import annotated_folders
from tasks.common.coco import look_at_objects, read_coco
from tasks.common.coco_baseline import fit_constant
from tasks.heads import data as heads_data
from tasks.heads import evaluate, train
from tasks.heads.baseline import constant_objects
from tasks.heads.config import DataConfig, backbone_config, check_config
from tasks.heads.kinds import (
    IGNORED,
    KINDS,
    ObjectScore,
    PixelScore,
    collate,
    findings,
    indexed,
    make_processor,
    targets,
)
from tasks.heads.task import HEADS, Measure, build_model, check_batches, constant_score, loss_of
from tests.tasks.heads.tiny import HEAD_OPTIONS, tiny_config


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return write_shapes(tmp_path_factory.mktemp("shapes"))


def write(folder, content):
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return ["--config", str(folder / "config.yaml")]


@pytest.fixture(scope="module")
def runs(shapes, tmp_path_factory):
    """Folders of short runs by the name of the head, made when they are asked for."""
    done = {}

    def run(name):
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            content = tiny_config(shapes, name, max_steps=30 if name == "upernet" else 4)
            assert train.main([*write(folder, content), f"trainer.output_dir={folder / 'run'}"]) == 0
            done[name] = folder / "run"
        return done[name]

    return run


# ---- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_every_head_learns_from_a_batch_and_is_measured(shapes, name):
    config, kind = check_config(tiny_config(shapes, name)), KINDS[name]
    source = heads_data.read_source(kind, shapes, "test")
    torch.manual_seed(0)
    model = build_model(config, source.classes)
    processor = make_processor(kind, backbone_of(model).config)
    data = heads_data.Prepared(source, kind, processor, 0.5, 3)
    loss = model(**collate([data[Draw(index, 0, index)] for index in range(3)])).loss
    loss.backward()
    assert loss.isfinite() and backbone_of(model).embeddings.projection.weight.grad.abs().max() > 0
    measure = Measure(kind, processor, 3)
    metrics, again = measure(model, data), measure(model, data)
    assert metrics == again and model.training and 0 <= metrics[kind.metric] <= 1 and len(measure.found) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["upernet", "mask2former", "detr"])
def test_a_run_is_saved_and_measures_the_same_again(name, runs):
    run = runs(name)
    results = read_results(run / "results.json")
    metric = f"test_{KINDS[name].metric}"
    assert 0 <= results["metrics"][metric] <= 1 and results["head"] == name
    assert results["prior"] == "fibottention+violin" and results["parameters"] > 1000
    assert {"model", "curves.png", "predictions.png"} <= {path.name for path in run.iterdir()}
    assert evaluate.main([str(run)]) == 0
    again = read_results(run / "evaluation" / "results_test.json")
    assert again["metrics"] == results["metrics"]
    assert (run / "evaluation" / "predictions_test.png").stat().st_size > 5000


@pytest.mark.slow
def test_a_head_learns(runs):
    """UPerNet finds squares that are brighter and darker than anything else, on images that it has not seen."""
    results = read_results(runs("upernet") / "results.json")
    assert results["metrics"]["test_mIoU"] > 1.5 * results["baseline"]["test_mIoU"]
    losses = [entry["loss"] for entry in results["history"] if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
def test_a_backbone_comes_from_a_saved_classifier_and_keeps_its_prior(shapes, tmp_path):
    content = tiny_config(shapes, "upernet")
    torch.manual_seed(1)
    source = SparsePriorViTForImageClassification(SparsePriorViTConfig(**content["model"], num_labels=7))
    source.save_pretrained(tmp_path)
    model = build_model({**content, "model": {"pretrained": str(tmp_path)}}, ["a", "b"])
    state = backbone_of(model).state_dict()
    assert all(torch.equal(state[key], value) for key, value in source.vit.state_dict().items())
    assert backbone_of(model).config.prior == source.config.prior and model.config.num_labels == 2


FRESH = """
import json, sys
import hf_sparseprior
from transformers import pipeline

semantic = pipeline("image-segmentation", model="upernet", device="cpu")("image.png")
segment = pipeline("image-segmentation", model="mask2former", device="cpu")
instances = segment("image.png", subtask="instance", threshold=0.0)
boxes = pipeline("object-detection", model="detr", device="cpu")("image.png", threshold=0.0)
for part in semantic:
    part["mask"] = sum(value > 0 for value in part["mask"].getdata())
found = {"semantic": semantic, "instances": [part["label"] for part in instances], "boxes": boxes}
json.dump(found, open("found.json", "w"))
"""


@pytest.fixture(scope="module")
def pipelined(runs, shapes, tmp_path_factory):
    """A folder with saved models, an image, and what pipelines of a new process found in it."""
    folder = tmp_path_factory.mktemp("pipelines")
    for name in ("upernet", "mask2former", "detr"):
        shutil.copytree(runs(name) / "model", folder / name)
    shutil.copy(shapes / "images" / "test" / "0.png", folder / "image.png")
    run_script(FRESH, folder=folder, package=True)
    return folder


@pytest.mark.slow
def test_pipelines_of_a_new_process_take_the_saved_models(pipelined, runs, shapes):
    """What they find is what the run measured."""
    found = json.loads((pipelined / "found.json").read_text())
    classes = (shapes / "classes.txt").read_text().split()
    config = check_config(tiny_config(shapes, "upernet"))
    expected = _first_finding(runs("upernet") / "model", config)
    for part in found["semantic"]:
        assert part["mask"] == (expected == classes.index(part["label"])).sum() > 0
    assert sum(part["mask"] for part in found["semantic"]) == 32 * 32
    assert {box["label"] for box in found["boxes"]} <= {"bright", "dark"} and found["boxes"]
    assert set(found["instances"]) <= {"bright", "dark"}
    card = (runs("detr") / "model" / "README.md").read_text()
    assert "pipeline_tag: object-detection" in card and "import hf_sparseprior" in card


TRUSTING = """
import json, sys
from transformers import AutoModelForObjectDetection, pipeline

package = sys.argv[1] == "package"
options = {"device": "cpu", "trust_remote_code": True}
try:
    segment = pipeline("image-segmentation", model="upernet", **options)
except ImportError as error:
    assert not package and "hf_sparseprior" in str(error), error
else:
    assert package
    semantic = segment("image.png")
    found = [[part["label"], sum(value > 0 for value in part["mask"].getdata())] for part in semantic]
    segment = pipeline("image-segmentation", model="mask2former", **options)
    instances = [part["label"] for part in segment("image.png", subtask="instance", threshold=0.0)]
    boxes = pipeline("object-detection", model="detr", **options)("image.png", threshold=0.0)
    AutoModelForObjectDetection.from_pretrained("detr", trust_remote_code=True).save_pretrained("again")
    again = pipeline("object-detection", model="again", image_processor="detr", **options)
    assert again("image.png", threshold=0.0) == boxes
    json.dump({"semantic": found, "instances": instances, "boxes": boxes}, open("trusting.json", "w"))
try:
    pipeline("object-detection", model="detr", device="cpu")
except KeyError as error:
    assert not package and "sparseprior_vit" in str(error)
else:
    assert package
"""


@pytest.mark.slow
def test_code_of_a_folder_imports_the_package_or_says_that_it_is_missing(pipelined):
    """Of the folders of `test_pipelines_...`, in processes that do not import the package themselves."""
    run_script(TRUSTING, "none", folder=pipelined)
    run_script(TRUSTING, "package", folder=pipelined, package=True)
    found, expected = (json.loads((pipelined / f"{name}.json").read_text()) for name in ("trusting", "found"))
    assert found["semantic"] == [[part["label"], part["mask"]] for part in expected["semantic"]]
    assert found["instances"] == expected["instances"] and found["boxes"] == expected["boxes"]


def test_code_is_offered_for_heads_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ValueError, match="holds a 'vit' model, none of upernet, mask2former"):
        offer_code(tmp_path)
    with pytest.raises(OSError, match=r"config\.json"):
        offer_code(tmp_path / "none")


def _first_finding(folder, config):
    model = HEADS.model_class.from_pretrained(folder).eval()
    split = HEADS.read_split(config, "test", model, folder)
    prepared = split.dataset
    with torch.no_grad():
        outputs = model(prepared[0]["pixel_values"][None])
    return findings(prepared.kind, prepared.processor, outputs, [(32, 32)])[0]


# ---- data -----------------------------------------------------------------------------------------------------------


def test_pixels_have_the_classes_of_the_file(shapes):
    source = heads_data.PixelClasses(shapes, "test")
    stored = np.asarray(Image.open(shapes / "annotations" / "test" / "1.png"))
    found = source.annotation(1)
    for row in range(32):
        for column in range(32):
            assert found[row, column] == (255 if stored[row, column] == 0 else stored[row, column] - 1)
    assert source.classes == ["background", "bright", "dark"] and len(source) == 4


@pytest.mark.parametrize("mirrored", [False, True])
def test_targets_against_loops(shapes, mirrored):
    """A mask is mirrored with its image, and the box is the mask's."""
    source = heads_data.Objects(shapes, "train")
    masks, boxes, classes = source.annotation(0)
    assert sorted(classes) == [0, 1] and masks.shape == (2, 32, 32)
    found = targets(KINDS["mask2former"], (masks, boxes, classes), (64, 64), mirrored)
    placed = targets(KINDS["detr"], (masks, boxes, classes), (64, 64), mirrored)["labels"]
    for number, mask in enumerate(masks):
        big = np.kron(mask, np.ones((2, 2), bool))
        big = big[:, ::-1] if mirrored else big
        assert np.array_equal(found["mask_labels"][number].numpy().astype(bool), big)
        rows, columns = np.flatnonzero(big.any(1)), np.flatnonzero(big.any(0))
        centre = [(columns[0] + columns[-1] + 1) / 128, (rows[0] + rows[-1] + 1) / 128]
        size = [len(columns) / 64, len(rows) / 64]
        np.testing.assert_allclose(placed["boxes"][number].numpy(), [*centre, *size], atol=1e-6)
    assert torch.equal(placed["class_labels"], found["class_labels"])


def test_images_are_mirrored_with_their_labels_by_the_draw_alone(shapes):
    config = check_config(tiny_config(shapes, "upernet"))
    kind = KINDS["upernet"]
    processor = make_processor(kind, backbone_config(config["model"]))
    source = heads_data.PixelClasses(shapes, "train")
    prepared = heads_data.Prepared(source, kind, processor, mirrored=0.5, seed=3)
    plain = prepared[2]
    seen = set()
    for epoch in range(20):
        sample, again = (prepared[Draw(2, epoch, 0)] for _ in range(2))
        assert torch.equal(sample["pixel_values"], again["pixel_values"])
        flipped = not torch.equal(sample["labels"], plain["labels"])
        expected = {key: value.flip(-1) if flipped else value for key, value in plain.items()}
        assert all(torch.equal(sample[key], value) for key, value in expected.items())
        seen.add(flipped)
    assert seen == {False, True}


BROKEN = {
    "upernet": [
        (lambda root: (root / "classes.txt").unlink(), "classes.txt is missing; it holds one class a line"),
        (lambda root: shutil.rmtree(root / "images" / "test"), "images/test holds no images"),
        (lambda root: (root / "annotations/test/0.png").unlink(), "annotations/test/0.png is missing"),
        (lambda root: cut(root / "images/test/0.png"), "0.png is not a readable image"),
        (lambda root: (root / "classes.txt").write_text("a\nb\n"), "holds the label 3; the highest is 2"),
        (lambda root: resize(root / "annotations/test/0.png"), r"must be one channel of the image's \(32, 32"),
    ],
    "detr": [
        (lambda root: resize(root / "images/test/0.png"), "is of 16x16 pixels, the annotation file says 32x32"),
        (lambda root: (root / "annotations/instances_test.json").unlink(), "instances_test.json is missing"),
        (lambda root: cut(root / "annotations/instances_test.json"), "instances_test.json is no JSON"),
        (lambda root: change(root, "categories", []), "category_id 5, which is not among categories"),
        (lambda root: change(root, "images", [{}]), "is not COCO's layout"),
        (lambda root: change(root, "annotations", []), "has no image with objects, crowds aside"),
    ],
}


@each("kind, break_it, message", [(kind, *case) for kind, cases in BROKEN.items() for case in cases])
def test_broken_data_is_named_in_one_line(shapes, tmp_path, kind, break_it, message):
    root = tmp_path / "shapes"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(shapes, root)
    break_it(root)
    with pytest.raises((OSError, ValueError), match=message) as error:
        source = heads_data.read_source(KINDS[kind], root, "test")
        source.image(0), source.annotation(0)
    assert "\n" not in str(error.value) and str(root) in str(error.value)


# ---- what looks wrong before training -------------------------------------------------------------------------------


def masks_of(root, split, *values):
    """Images of 8 pixels whose masks hold one of these values each."""
    folder = {part: root / part / split for part in ("images", "annotations")}
    for number, value in enumerate(values):
        mask = np.full((8, 8), value, dtype=np.uint8)
        for part, pixels in (("images", np.zeros((8, 8, 3), np.uint8)), ("annotations", mask)):
            folder[part].mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder[part] / f"{number:03}.png")
    (root / "classes.txt").write_text("ground\nobject\n")
    return heads_data.PixelClasses(root, next(key for key, name in heads_data.SPLITS.items() if name == split))


@pytest.mark.parametrize(("most", "looked"), [(14, "14 masks"), (5, "5 masks looked at (of 14)")])
def test_masks_that_label_nothing_are_refused(most, looked, tmp_path, monkeypatch):
    monkeypatch.setattr(annotated_folders, "LOOKED_AT", most)
    where = f"{tmp_path}/annotations/training"
    source = masks_of(tmp_path, "training", *[0, 255] * 7)
    with pytest.raises(ValueError, match=f"^{where}: no pixel of the 14 masks has a class; label 1 is 'ground'"):
        source.look()
    # One that has a class is enough, wherever it lies: of every third mask it is none.
    empty, missing = masks_of(tmp_path, "training", *[0, 255] * 6, 0, 2).look()
    number, classes = (13, "['ground']") if most == 14 else (5, "['ground', 'object']")
    assert empty == f"{where}: {number} of the {looked} have no pixel of any class, nothing is learned from them"
    assert missing == f"{where}: no pixel of the {looked} is of the class {classes}; label 1 is 'ground', 0 is none"


def test_a_class_that_no_mask_has_is_named_for_training_alone(tmp_path):
    for split, lines in (("training", 1), ("test", 0)):
        assert len(masks_of(tmp_path, split, 1, 1).look()) == lines  # 0 and 1 where there were 1 and 2
        assert not masks_of(tmp_path, split, 1, 2).look()
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "training" / "001.jpg")
    [line] = heads_data.PixelClasses(tmp_path, "train").look()
    assert line == f"{tmp_path}/annotations/training: 1 masks are of several images: ['001']"


def test_images_without_a_labelled_pixel_have_no_loss(tmp_path):
    """The mean over no pixels would be 0 / 0."""
    config = tiny_config(tmp_path, "upernet")
    model = build_model(config, ["a", "b"])
    batch = {"pixel_values": torch.rand(2, 3, 32, 32), "labels": torch.full((2, 32, 32), IGNORED)}
    outputs = model(**batch)
    assert outputs.loss.isnan() and loss_of(outputs, batch).item() == 0
    loss_of(outputs, batch).backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
    batch["labels"][0, 0, 0] = 1
    outputs = model(**batch)
    assert loss_of(outputs, batch) is outputs.loss and outputs.loss > 0


def test_boxes_of_no_width_are_left_out_of_learning_and_counted_by_the_metric(shapes, tmp_path):
    root, path = shutil.copytree(shapes, tmp_path / "shapes"), "annotations/instances_training.json"
    content = json.loads((root / path).read_text())
    first, second, third = content["annotations"][:3]
    first["bbox"][2], second["bbox"][3], third["area"] = 0, 0.5, 0
    (root / path).write_text(json.dumps(content))
    source = heads_data.read_source(KINDS["detr"], root, "train")
    [line] = source.look()
    assert line == (
        f"{root}/{path}: 3 of 14 objects are less than a pixel wide or high or without area; nothing is learned from "
        f"them, but the metric counts them (first: annotation 1 of 0.png, bbox {first['bbox']})"
    )
    assert len(source) == 6 and len(source.annotation(0)[2]) == 1  # the first image had two objects, both are left out
    assert len(indexed(source.coco).anns) == 14


def test_what_appears_twice_in_an_annotation_file(shapes, tmp_path):
    content = json.loads((shapes / "annotations" / "instances_training.json").read_text())
    images, categories = content["images"], content["categories"]
    images.append({**images[0], "id": 99})
    categories += [{"id": 77, "name": "dark"}, {"id": 78, "name": "none"}]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content))
    assert look_at_objects(read_coco(path).content, path, training=True) == [
        f"{path}: several images have the same file_name, ['0.png']",
        f"{path}: several categories have the same name, ['dark']",
        f"{path}: no object to learn from is of the class ['dark', 'none']",
    ]
    assert len(look_at_objects(content, path, training=False)) == 2
    for table, entry in (("images", images[0]), ("categories", categories[0])):
        path.write_text(json.dumps({**content, table: [*content[table], entry]}))
        with pytest.raises(ValueError, match=f"a.json: 2 of the {table} have the id {entry['id']}$"):
            read_coco(path)
    for name in (None, " ", [1]):
        path.write_text(json.dumps({**content, "categories": [{"id": 5, "name": name}, *categories[1:]]}))
        with pytest.raises(ValueError, match=r"a.json: the name of the category 5 is missing, it is "):
            read_coco(path)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def resize(path):
    Image.open(path).resize((16, 16)).save(path)


def change(root, key, value):
    path = root / "annotations" / "instances_test.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


def test_polygons_and_packed_run_lengths_are_masks_too(shapes, tmp_path):
    from pycocotools import mask as coco_mask

    expected = np.zeros((6, 8), dtype=bool)
    expected[1:5, 2:7] = True
    packed = coco_mask.encode(np.asfortranarray(expected.astype(np.uint8)))
    outlines = [[[2, 1, 7, 1, 7, 5, 2, 5]], {"size": [6, 8], "counts": packed["counts"].decode()}]
    annotations = [
        {"id": number, "image_id": 1, "category_id": 1, "bbox": [2, 1, 5, 4], "segmentation": outline, "area": 20}
        for number, outline in enumerate(outlines)
    ]
    content = {
        "images": [{"id": 1, "file_name": "a.png", "height": 6, "width": 8}], "annotations": annotations,
        "categories": [{"id": 1, "name": "a"}],
    }  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(content))
    coco = read_coco(tmp_path / "a.json")
    assert all(np.array_equal(mask, expected) for mask in coco.masks(coco.images[0]))


def test_heads_that_find_boxes_need_no_masks(shapes, tmp_path):
    root = tmp_path / "shapes"
    shutil.copytree(shapes, root)
    for split in ("training", "validation", "test"):
        path = root / "annotations" / f"instances_{split}.json"
        content = json.loads(path.read_text())
        for number, annotation in enumerate(content["annotations"]):
            annotation["segmentation"] = []
            if number % 2:
                del annotation["segmentation"]
        path.write_text(json.dumps(content))
    for name in ("mask2former", "maskformer"):
        with pytest.raises(ValueError, match=r"annotation 1 of 0\.png has a polygon that is not pairs"):
            heads_data.read_source(KINDS[name], root, "test")
    without, whole = (heads_data.read_source(KINDS["detr"], folder, "test") for folder in (root, shapes))
    for index in range(len(whole)):
        (masks, *found), (expected, *others) = without.annotation(index), whole.annotation(index)
        assert all(np.array_equal(*pair) for pair in zip(found, others, strict=True))
        assert np.array_equal(masks, expected)  # the shapes are squares
    assert constant_objects(KINDS["detr"], without, without) == constant_objects(KINDS["detr"], whole, whole)
    arguments = write(tmp_path, tiny_config(root, "detr", max_steps=2))
    assert train.main([*arguments, f"trainer.output_dir={tmp_path / 'run'}"]) == 0


# ---- metrics --------------------------------------------------------------------------------------------------------


def test_mean_iou_is_that_of_scikit_learn():
    random = np.random.default_rng(0)
    labels, found = random.integers(0, 4, (2, 3, 9, 7))
    labels = labels.copy()
    hidden = random.random(labels.shape) < 0.1
    score = PixelScore(5)  # one class never occurs
    for truth, own, mask in zip(labels, found, hidden, strict=True):
        score.add(np.where(mask, 255, truth).astype(np.uint8), own)
    expected = jaccard_score(labels[~hidden], found[~hidden], average=None)
    assert score.metrics()["mIoU"] == pytest.approx(expected.mean())
    assert score.metrics()["pixel_accuracy"] == pytest.approx((labels == found)[~hidden].mean())
    assert list(score.by_class("abcde").values())[:4] == pytest.approx(expected.tolist())
    best = max(jaccard_score(labels[~hidden], np.full((~hidden).sum(), c), average=None).mean() for c in range(4))
    assert constant_score(score.counts) == pytest.approx(best)


@pytest.mark.parametrize("name", ["detr", "mask2former"])
def test_perfect_findings_have_precision_1_and_wrong_ones_0(shapes, name):
    kind, source = KINDS[name], heads_data.Objects(shapes, "test")

    def precision(swap):
        score = ObjectScore(kind, source.coco)
        for number, image in enumerate(source.images):
            masks, boxes, classes = source.annotation(number)
            corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)
            places = masks if name == "mask2former" else corners
            score.add(image, np.ones(len(classes)), 1 - classes if swap else classes, places)
        return list(score.metrics().values())

    assert precision(False) == pytest.approx([1.0, 1.0]) and precision(True) == pytest.approx([0.0, 0.0])
    assert list(ObjectScore(kind, source.coco).metrics().values()) == [0.0, 0.0]
    for annotation in source.coco.content["annotations"]:
        del annotation["area"]  # as many people's files have it
    assert precision(False) == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("name", ["detr", "maskformer"])
def test_the_constant_predictor_of_objects_is_measured_by_pycocotools(shapes, name):
    """Its detections in pycocotools' own formats; the squares hardly move, so they are right now and then."""
    from pycocotools import mask as coco_mask
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    train_file, test_file = (COCO(shapes / "annotations" / f"instances_{split}.json") for split in ("training", "test"))
    found = fit_constant(train_file, [5, 9]).predict(32, 32)
    detections = []
    for image in test_file.getImgIds():
        for (left, top, right, bottom), label, score, mask in zip(*found.values(), strict=True):
            one = {"image_id": image, "category_id": [5, 9][label], "score": score}
            encoded = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
            place = {"bbox": [left, top, right - left, bottom - top]} if name == "detr" else {"segmentation": encoded}
            detections.append({**one, **place})
    evaluation = COCOeval(test_file, test_file.loadRes(detections), "bbox" if name == "detr" else "segm")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    kind, sources = KINDS[name], [heads_data.Objects(shapes, split) for split in ("train", "test")]
    measured = constant_objects(kind, *sources)
    assert measured == {
        f"test_{kind.metric}": pytest.approx(evaluation.stats[0]),
        f"test_{kind.metric}_50": pytest.approx(evaluation.stats[1]),
    }
    assert measured[f"test_{kind.metric}"] > 0.05


# ---- settings --------------------------------------------------------------------------------------------------------


@each(
    "override, message",
    [
        ("head.name=dpt", r"head\.name='dpt' must be one of upernet, mask2former"),
        ("head.hiden_size=4", "section 'head' has no key 'hiden_size'; did you mean 'hidden_size'?"),
        ("head.hidden_size=four", "hidden_size"),
        ("model.num_hidden_layers=2", "upernet takes the maps of 4 layers; this 'sparseprior_vit' has 2"),
        ("model.prior=evit", "drops tokens"),
        ("model.preset=vit_huge_plus", r"preset='vit_huge_plus' must be one of"),
        ("data.horizontal_flip=2", r"data\.horizontal_flip=2 must be a probability"),
        ("data.scenes.size=4", "scenes"),
        ("data.path=null", r"data\.path=None must be the folder"),
        ("data.path=/nowhere", "data.path=/nowhere has no folder images"),
        ("head.loss_ignore_index=0", r"head\.loss_ignore_index=0 must be 255"),
        ("trainer.layer_decay=0.7", r"trainer\.layer_decay=0\.7 is not for heads"),
        ("trainer.metric_for_best_model=accuracy", r"metric_for_best_model='accuracy' must be loss"),
        ("model.pretrained=/nowhere", r"model\.pretrained=/nowhere is not a folder of a saved model"),
    ],
)
def test_bad_settings_end_in_one_line(shapes, tmp_path, capfd, override, message):
    arguments = write(tmp_path, tiny_config(shapes, "upernet"))
    assert train.main([*arguments, f"trainer.output_dir={tmp_path / 'run'}", override]) == 2
    assert re.search(message, capfd.readouterr().err.splitlines()[-1])
    assert not (tmp_path / "run").exists()


def test_every_head_that_learns_has_its_options_here_and_a_configuration():
    assert set(HEAD_OPTIONS) == set(KINDS) == {cell.partition("#")[2] for cell in shipped.cells("heads/smoke.yaml")}


def test_scenes_of_other_settings_are_refused(tmp_path):
    (tmp_path / "scenes.json").write_text(json.dumps({"training": 1}))
    with pytest.raises(ValueError, match="holds scenes of other settings"):
        heads_data.prepare_folder(DataConfig(path=str(tmp_path), scenes={"training": 2}))


@each("name", shipped.cells("heads/smoke.yaml"))
def test_shipped_configurations_are_good_and_name_every_head(name):
    config = HEADS.load_config(shipped.path(name))
    assert config["head"]["name"] == name.partition("#")[2]


@pytest.mark.parametrize(("head", "file"), [("upernet", "annotations/test/1.png"), ("detr", "images/test/1.png")])
def test_a_missing_test_file_ends_a_run_before_it_begins(head, file, shapes, tmp_path, capsys):
    shutil.copytree(shapes, tmp_path / "data")
    (tmp_path / "data" / file).unlink()
    content = tiny_config(tmp_path / "data", head, max_steps=1)
    assert train.main([*write(tmp_path, content), f"trainer.output_dir={tmp_path / 'run'}"]) == 2
    assert f"{file.rpartition('/')[2]} is missing" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_folders_are_read_as_people_have_them(shapes, tmp_path):
    """Upper-case endings, folders, 16-bit images, and labels with a palette; what is left out is counted."""
    litter(shutil.copytree(shapes, tmp_path / "data"))
    source = heads_data.PixelClasses(tmp_path / "data", "train")
    assert [file.name for file in source.files[-2:]] == ["8.PNG", "9.png"] and len(source) == 9
    for index in (7, 8):
        assert np.array_equal(source.image(index), np.full((32, 32, 3), 200, np.uint8))
        assert np.array_equal(source.annotation(index), np.eye(32))  # labels from 1
    images = tmp_path / "data" / "images" / "training"
    line = source.passed_over.line()
    assert re.fullmatch(rf"left out: 3 hidden \({images}/.*\), 1 no image \({images}/notes\.txt\)", line), line
    content = json.loads((tmp_path / "data" / "annotations" / "instances_training.json").read_text())
    content["annotations"] = [one for one in content["annotations"] if one["image_id"] != content["images"][2]["id"]]
    (tmp_path / "data" / "annotations" / "instances_training.json").write_text(json.dumps(content))
    objects = heads_data.Objects(tmp_path / "data", "train", with_objects=True)
    line = objects.passed_over.line()
    counted = rf"left out: 2 not in instances_training\.json \({images}/.*\), 1 without objects \({images}/2\.png\)"
    assert re.fullmatch(counted, line), line


def test_images_are_turned_as_their_orientation_says(tmp_path):
    pixels = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned to the right
    Image.fromarray(pixels).save(tmp_path / "image.png", exif=exif)
    assert np.array_equal(heads_data.read_rgb(tmp_path / "image.png"), np.rot90(pixels, -1))


@each(
    "size, images, drop_last, scales, refused",
    [
        *[(1, 8, False, [1, 2], True), (4, 1, False, [1, 2], True), (4, 9, False, [1, 2], True)],
        *[(4, 9, True, [1, 2], False), (4, 8, False, [1, 2], False), (1, 8, False, [2], False)],
        (1, 8, False, None, False),
    ],
)
def test_a_batch_of_one_image_is_refused_where_batch_norms_see_one_pixel(size, images, drop_last, scales, refused):
    model = SimpleNamespace(config=SimpleNamespace(pool_scales=scales))
    arguments = SimpleNamespace(
        train_batch_size=size, per_device_train_batch_size=size, world_size=1, dataloader_drop_last=drop_last
    )
    with pytest.raises(ValueError, match="per_device_train_batch_size") if refused else nullcontext():
        check_batches(model, images, arguments)
