"""The README's "Your own data": its configuration on photographs of odd sizes, and what files of one's own may hold."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("mmdet", reason="the extra `dense` is not installed", exc_type=ImportError)
pytest.importorskip("mmcv.ops", reason="the extra `dense` is not installed", exc_type=ImportError)

from mmdet.registry import DATASETS, METRICS
from mmengine.registry import init_default_scope
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from hf_sparseprior.runs.results import read_results
from tasks.common.mm.config import load_config
from tasks.common.mm.runner import build_runner
from tasks.common.mm.saving import fill_model
from tasks.detection.evaluate import main as evaluate_main
from tasks.detection.task import DETECTION
from tasks.detection.train import main as train_main
from tests.each import each
from tests.tasks.common.mm.shapes import PARTS
from tests.tasks.detection.tiny import SMALL

pytestmark = pytest.mark.slow

CONFIGS = Path.cwd() / "configs" / "detection"
SIZES = [(45, 70), (64, 33), (50, 50)]


def write_own(root, with_masks=True):
    """Three photographs for each split: two cats and dogs and a crowd in each of two of them, nothing in the third.

    Annotations count from 0 and say of crowds alone whether they are some.
    """
    random = np.random.default_rng(0)
    for split in ("training", "validation", "test"):
        (root / "images" / split).mkdir(parents=True)
        annotations = []
        for number, (height, width) in enumerate(SIZES):
            image = Image.fromarray(random.integers(0, 255, (height, width, 3), dtype=np.uint8))
            image.save(root / "images" / split / f"{number}.jpg")
            for category in (7, 3) if number < 2 else ():
                annotations.append({"category_id": category, "bbox": [5, 6, 20, 15], "area": 300, "image_id": number})
                outline = [[5, 6, 25, 6, 25, 21, 5, 21]] if with_masks else []
                annotations[-1]["segmentation"] = outline
            if number < 2:
                crowd = {"category_id": 3, "bbox": [0, 30, 30, 10], "area": 300, "image_id": number, "iscrowd": 1}
                runs = {"size": [height, width], "counts": [30, height * width - 30]}
                annotations.append({**crowd, "segmentation": runs if with_masks else []})
        content = {
            "images": [
                {"id": number, "file_name": f"{number}.jpg", "height": height, "width": width}
                for number, (height, width) in enumerate(SIZES)
            ],
            "annotations": [{"id": number, **annotation} for number, annotation in enumerate(annotations)],
            "categories": [{"id": 7, "name": "cat"}, {"id": 3, "name": "dog"}],
        }
        (root / "annotations").mkdir(exist_ok=True)
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return root


def own_config(root, folder, **changed):
    """The shipped file, changed above its line, in another folder."""
    head, line, rest = (CONFIGS / "own_data.py").read_text().partition("# ---")
    values = {"data_root": str(root), **changed}
    head = head.replace("steps, batch, side = 20000, 2, 800", "steps, batch, side = 2, 2, 48")
    for name, value in values.items():
        head, count = re.subn(rf"^{name} = \S*( *\(?[^\n#]*)?", f"{name} = {value!r}", head, flags=re.M)
        assert count == 1, name
    file = folder / "own_data.py"
    file.write_text(head.replace('"base/', f'"{CONFIGS}/base/') + line + rest)
    return str(file)


def options(folder, *more):
    small = [f"model.backbone.{key}={value}" for key, value in SMALL.items()]
    small += [
        "model.backbone.out_indices=[2]",
        "model.neck.in_channels=24",
        "model.roi_head.bbox_head.fc_out_channels=16",
    ]
    small += [f"{part}_dataloader.{key}" for part in PARTS for key in ("num_workers=0", "persistent_workers=False")]
    return [f"output_dir={folder}", *small, *more]


@pytest.mark.parametrize("masks", [True, False])
def test_the_commands_on_odd_sizes_crowds_and_images_without_objects(tmp_path, capfd, masks):
    root = write_own(tmp_path / "own", with_masks=masks)
    changed(root, "training", lambda content: content["annotations"][0].update(bbox=[5, 6, 0, 15]))
    config = own_config(root, tmp_path, masks=masks, max_per_img=3)
    empty = [] if masks else ["train_dataloader.dataset.filter_cfg.filter_empty_gt=False"]
    assert train_main(["--config", config, *options(tmp_path / "run", *empty)]) == 0, capfd.readouterr().err
    told = f"trains on {2 if masks else 3} images of 2 classes ['cat', 'dog']"
    printed = capfd.readouterr().out
    assert told in printed and printed.count("1 of 6 objects are less than a pixel wide") == 1
    assert evaluate_main([str(tmp_path / "run"), "--split", "validation"]) == 0, capfd.readouterr().err
    found = read_results(tmp_path / "run/evaluation/results_validation.json")
    kinds = {"bbox_AP", "segm_AP"} if masks else {"bbox_AP"}
    assert list(found["classes"]) == ["cat", "dog"] and set(found["classes"]["dog"]) == kinds
    assert (tmp_path / "run/evaluation/predictions_validation.png").stat().st_size > 5000
    saved = load_config("detection", tmp_path / "run/model/config.py", [f"output_dir={tmp_path}/own_run"])
    assert saved.model.roi_head.bbox_head.num_classes == 2
    runner = build_runner(saved)
    fill_model(runner.model, tmp_path / "run/model")
    counts = []
    for most in (3, 1):
        runner.model.roi_head.test_cfg.max_per_img = most
        runner.model.roi_head.test_cfg.score_thr = 0.0
        with torch.no_grad():
            results = [result for batch in runner.test_dataloader for result in runner.model.eval().test_step(batch)]
        counts.append([len(result.pred_instances) for result in results])
        assert [result.ori_shape for result in results] == SIZES
    assert counts == [[3] * 3, [1] * 3] and saved.model.test_cfg.rcnn.max_per_img == 3


def changed(root, split, change):
    file = root / "annotations" / f"instances_{split}.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@each(
    "part, split, change, said",
    [
        ("test", "test", lambda content: content["categories"].append({"id": 9, "name": "cat"}),
         "has 3 of the 2 classes cat, dog; its categories are cat, dog, cat"),
        ("test", "test", lambda content: content["images"][1].update(id=0), "2 of the images have the id 0"),
        ("train", "training", lambda content: content["categories"][0].update(name="Cat"),
         "has 1 of the 2 classes cat, dog; its categories are Cat, dog"),
        ("train", "training", lambda content: content["annotations"].clear(), "leaves none of its images"),
        ("train", "training", lambda content: content["annotations"][0].update(bbox=[60, 6, 20, 15]),
         "annotation 0 of 0.jpg has bbox [60, 6, 20, 15], which is not within its image of 45x70"),
        ("train", "training", lambda content: content["annotations"][1].update(segmentation=[]),
         "annotation 1 of 0.jpg has a polygon that is not pairs"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_are_named(tmp_path_factory, part, split, change, said):
    root = write_own(tmp_path_factory.mktemp("own"))
    changed(root, split, change)
    config = load_config("detection", own_config(root, root))
    init_default_scope("mmdet")
    with pytest.raises(ValueError, match=f"instances_{split}.json.*{re.escape(said)}"):
        DATASETS.build(config[f"{part}_dataloader"].dataset)


def test_a_file_that_does_not_fit_ends_a_run_in_one_line(tmp_path, capfd):
    root = write_own(tmp_path / "own")
    changed(root, "validation", lambda content: content["categories"].reverse())
    assert train_main(["--config", own_config(root, tmp_path), *options(tmp_path / "run")]) == 2
    said = "instances_validation.json has its categories in the order dog, cat, the classes are cat, dog"
    assert said in capfd.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_what_looks_wrong_is_said_in_lines(tmp_path):
    root = write_own(tmp_path / "own")

    def change(content):
        for annotation in content["annotations"][::3]:
            annotation["bbox"][2] = 0  # every cat
        content["images"].append({**content["images"][2], "id": 9})

    for split in ("training", "test"):
        changed(root, split, change)
    config = load_config("detection", own_config(root, tmp_path))
    init_default_scope("mmdet")
    for part, split, number in (("train", "training", 3), ("test", "test", 2)):
        data = DATASETS.build(config[f"{part}_dataloader"].dataset)
        lines = DETECTION.look(data, part == "train")
        assert all(line.startswith(f"{root}/annotations/instances_{split}.json: ") for line in lines)
        assert [line.partition(".json: ")[2] for line in lines] == [
            "2 of 6 objects are less than a pixel wide or high or without area; nothing is learned from them, but the "
            "metric counts them (first: annotation 0 of 0.jpg, bbox [5, 6, 0, 15])",
            "several images have the same file_name, ['2.jpg']",
            "no object to learn from is of the class ['cat']",
        ][:number]
        instances = [one["bbox_label"] for index in range(2) for one in data.get_data_info(index)["instances"]]
        assert instances == [1, 1] * 2  # as mmdetection, without the cats


def test_a_category_that_no_class_names_is_left_out(tmp_path):
    root = write_own(tmp_path / "own")
    config = load_config("detection", own_config(root, tmp_path, classes=("dog",)))
    init_default_scope("mmdet")
    data = DATASETS.build(config.train_dataloader.dataset)
    labels = [[one["bbox_label"] for one in data.get_data_info(index)["instances"]] for index in range(len(data))]
    assert labels == [[0, 0], [0, 0]] and config.model.roi_head.bbox_head.num_classes == 1


def test_annotations_of_the_id_0_and_without_iscrowd_are_measured_as_others(tmp_path):
    """Some right and some wrong boxes, by pycocotools alone on a file that counts from 1 and says what is a crowd."""
    root = write_own(tmp_path / "own")
    file = root / "annotations" / "instances_test.json"
    config = load_config("detection", own_config(root, tmp_path))
    init_default_scope("mmdet")
    metric = METRICS.build({**config.test_evaluator, "metric": ["bbox"]})
    metric.dataset_meta = DATASETS.build(config.test_dataloader.dataset).metainfo
    boxes = {0: [[5, 6, 20, 15], [30, 6, 20, 15]], 1: [[5, 6, 20, 15], [0, 30, 30, 10]], 2: [[1, 1, 9, 9]]}
    labels, scores = {0: [0, 1], 1: [1, 1], 2: [0]}, {0: [0.9, 0.8], 1: [0.7, 0.95], 2: [0.6]}
    detections = []
    for image, own in boxes.items():
        corners = torch.tensor(own, dtype=torch.float64)
        corners[:, 2:] += corners[:, :2]
        instances = {"bboxes": corners, "labels": torch.tensor(labels[image]), "scores": torch.tensor(scores[image])}
        metric.process({}, [{"img_id": image, "ori_shape": SIZES[image], "pred_instances": instances}])
        for box, label, score in zip(own, labels[image], scores[image], strict=True):
            detections.append({"image_id": image, "bbox": box, "category_id": [7, 3][label], "score": score})
    found = metric.evaluate(3)["coco/bbox_mAP"]
    content = json.loads(file.read_text())
    for number, annotation in enumerate(content["annotations"], start=1):
        annotation.update(id=number, iscrowd=annotation.get("iscrowd", 0))
    file.write_text(json.dumps(content))
    coco = COCO(file)
    evaluation = COCOeval(coco, coco.loadRes(detections), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    assert 0.3 < evaluation.stats[0] < 0.9 and found == pytest.approx(evaluation.stats[0], abs=6e-4)


def test_masks_are_missed_where_they_are_measured(tmp_path):
    root = write_own(tmp_path / "own", with_masks=False)
    config = load_config("detection", own_config(root, tmp_path, masks=False))
    init_default_scope("mmdet")
    metric = METRICS.build({**config.test_evaluator, "metric": ["bbox", "segm"]})
    metric.dataset_meta = DATASETS.build(config.test_dataloader.dataset).metainfo
    with pytest.raises(ValueError, match=r"6 annotations have no segmentation, which metric='segm' needs"):
        metric.process({}, [])
