import copy
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("mmengine", reason="the extra `dense` is not installed")
pytest.importorskip("mmcv.ops", reason="the extra `dense` is not installed", exc_type=ImportError)
pytest.importorskip("mmdet", reason="the extra `dense` is not installed", exc_type=ImportError)

from mmdet.registry import DATASETS, METRICS, MODELS, TRANSFORMS
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import HOOKS, init_default_scope
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from hf_sparseprior import SparsePriorViTForImageClassification
from hf_sparseprior.mm.loading import read_checkpoint
from hf_sparseprior.patterns.supports import head_offsets
from hf_sparseprior.runs.command import tell_passed_over
from tasks.common.coco import annotation_damage, packed_pixels
from tasks.common.coco_baseline import fit_constant, overlaps
from tasks.common.mm.config import load_config
from tasks.common.mm.evaluate import evaluate
from tasks.common.mm.hooks import all_passed_over
from tasks.common.mm.runner import build_runner
from tasks.common.mm.saving import fill_model
from tasks.common.mm.train import run
from tasks.common.mm.tta import with_tta
from tasks.detection.data import NumberedEpochSampler, mirrored_back
from tasks.detection.evaluate import main as evaluate_main
from tasks.detection.task import DETECTION, constant_metrics
from tasks.detection.train import main as train_main
from tests.each import each
from tests.hf_sparseprior.small import SMALL as SMALL_FAMILIES
from tests.tasks.common.mm.shapes import PARTS, data_roots, litter, write_shapes
from tests.tasks.detection.inference import as_lists
from tests.tasks.detection.tiny import OVERRIDES

pytestmark = pytest.mark.slow

CONFIGS = Path("configs/detection")
VIT = {
    "image_size": 64, "patch_size": 16, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_shapes(tmp_path_factory.mktemp("data") / "shapes")


def options(data, out, *overrides):
    return [*OVERRIDES, *data_roots(data), f"output_dir={out}", *overrides]


def config_of(data, out, *overrides):
    config = load_config("detection", CONFIGS / "smoke.py", options(data, out, *overrides))
    init_default_scope("mmdet")
    return config


def built(config):
    """A detector whose every weight is moved from where it was initialised."""
    torch.manual_seed(0)
    model = MODELS.build(config.model).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


# ---- runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    return out, run(DETECTION, config_of(data, out))


def test_a_run_leaves_everything_and_evaluate_reproduces_it(finished, tmp_path):
    out, results = finished
    assert (results["task"], results["steps"]) == ("detection", 6)
    assert [entry["step"] for entry in results["history"]] == list(range(1, 7))
    weights = read_checkpoint(out / "iter_6.pth")["state_dict"]
    backbone = SparsePriorViTForImageClassification.from_pretrained(out / "model" / "backbone").vit
    assert all(torch.equal(value, weights[f"backbone.{key}"]) for key, value in backbone.state_dict().items())
    assert {"test_coco/bbox_mAP", "test_coco/segm_mAP"} <= set(results["metrics"])
    assert set(results["baseline"]) >= {"test_coco/bbox_mAP", "test_coco/segm_mAP"}
    for name in ("results.json", "predictions.png", "model/model.safetensors", "model/backbone/config.json"):
        assert (out / name).stat().st_size > 0
    again = evaluate(DETECTION, out / "model", out=tmp_path / "evaluation")
    assert again["metrics"] == results["metrics"]
    other = evaluate(DETECTION, out, "validation")  # of a run, the model is meant
    assert other["images"] == 3 and other["model_sha256"] == results["model_sha256"]
    assert (out / "evaluation/results_validation.json").is_file()


def test_mms_own_inference_takes_a_run_as_it_is(finished, data, tmp_path):
    """In an interpreter of its own: the saved model, a checkpoint of the run, and the config that mmengine wrote."""
    out, _ = finished
    image, script = str(data / "images/test/1.png"), Path(__file__).with_name("inference.py")
    trained = [out / "smoke.py", out / "iter_6.pth"]
    pairs = [out / "model/config.py", out / "model/model.safetensors", *trained]
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        [sys.executable, script, image, tmp_path / "found.json", out / "iter_6.pth", *pairs],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    overrides = [f"output_dir={tmp_path}/own", *data_roots(data)]
    runner = build_runner(load_config("detection", out / "model/config.py", overrides))
    fill_model(runner.model, out / "model")
    batch = next(iter(runner.test_dataloader))
    assert batch["data_samples"][1].img_path == image
    with torch.no_grad():
        expected = as_lists(runner.model.eval().test_step(batch)[1].pred_instances)
    assert len(expected[0]) > 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 2 * 2 + 2 * 2 * 3
    for detections in found:
        boxes, labels, scores, areas = (torch.tensor(part) for part in detections)
        torch.testing.assert_close(boxes, torch.tensor(expected[0]), rtol=0, atol=1e-3)
        torch.testing.assert_close(scores, torch.tensor(expected[2]), rtol=0, atol=1e-5)
        assert labels.tolist() == expected[1] and areas.tolist() == expected[3]


def test_epochs_number_their_draws():
    """Two epochs on two processes: every draw has a number of its own, whatever was drawn before."""
    numbers = []
    for rank in range(2):
        sampler = NumberedEpochSampler(range(7), shuffle=True, seed=3)
        sampler.rank, sampler.world_size, sampler.num_samples, sampler.total_size = rank, 2, 4, 8
        for epoch in range(2):
            sampler.set_epoch(epoch)
            draws = list(sampler)
            sampler.set_epoch(epoch)
            assert [(int(draw), draw.number, draw.seed) for draw in sampler] == [
                (int(draw), draw.number, 3) for draw in draws
            ]
            numbers += [draw.number for draw in draws]
    assert sorted(numbers) == list(range(16))


# ---- the backbone in the detector -----------------------------------------------------------------------------------


def test_the_mask_changes_what_is_detected(data, tmp_path):
    config = config_of(data, tmp_path, "model.backbone.prior=fibottention")
    model, images = built(config), torch.randn(2, 3, 32, 48)
    config.model.backbone.prior = "dense"
    dense = MODELS.build(config.model).eval()
    dense.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        maps = model.extract_feat(images)
        found, without = (own.rpn_head(own.extract_feat(images)) for own in (model, dense))
    assert [tuple(map_.shape[2:]) for map_ in maps] == [(8, 12), (4, 6), (2, 3), (1, 2)]
    for kind in zip(found, without, strict=True):  # scores and boxes
        scores, other = (torch.cat([part.flatten() for part in level]) for level in kind)
        assert (scores - other).abs().max() > 1e-3


def test_images_of_different_sizes_share_a_batch(data, tmp_path):
    """Padded at bottom and right, the detections come back in each image's own size."""
    model = built(config_of(data, tmp_path))
    sizes = [(32, 32), (45, 70), (24, 33)]
    samples = [
        DetDataSample(metainfo={"img_shape": size, "ori_shape": size, "scale_factor": (1.0, 1.0), "img_id": 0})
        for size in sizes
    ]
    images = [torch.full((3, *size), 200, dtype=torch.uint8) for size in sizes]
    with torch.no_grad():
        batch = model.data_preprocessor({"inputs": images, "data_samples": samples}, False)
        found = model.test_step({"inputs": images, "data_samples": samples})
    assert batch["inputs"].shape == (3, 3, 48, 72)
    assert any(len(sample.pred_instances) for sample in found)
    for sample, (height, width) in zip(found, sizes, strict=True):
        instances = sample.pred_instances
        assert instances.masks.shape[1:] == (height, width)
        assert (instances.bboxes >= 0).all() and (instances.bboxes[:, 2] <= width).all()
        assert (instances.bboxes[:, 3] <= height).all()


# ---- the constant predictor -----------------------------------------------------------------------------------------


def test_baseline_is_measured_as_pycocotools_does(data, tmp_path):
    """The same detections by pycocotools alone, with masks and boxes in its own formats."""
    measured = constant_metrics(config_of(data, tmp_path))
    train, test = (COCO(data / "annotations" / f"instances_{split}.json") for split in ("training", "test"))
    predictor = fit_constant(train, [5, 9]).predict(32, 32)
    for kind in ("bbox", "segm"):
        detections = [
            {
                "image_id": image,
                "category_id": [5, 9][label],
                "score": score,
                **(
                    {"bbox": [left, top, right - left, bottom - top]}
                    if kind == "bbox"
                    else {"segmentation": _encoded(mask)}
                ),
            }
            for image in test.getImgIds()
            for (left, top, right, bottom), label, score, mask in zip(
                predictor["bboxes"], predictor["labels"], predictor["scores"], predictor["masks"], strict=True
            )
        ]
        evaluation = COCOeval(test, test.loadRes(detections), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        assert measured[f"test_coco/{kind}_mAP"] == pytest.approx(evaluation.stats[0], abs=6e-4)
        assert measured[f"test_coco/{kind}_mAP"] > 0.05  # the squares hardly move


def _encoded(mask):
    from pycocotools import mask as coco_mask

    return coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))


def test_classes_are_measured_one_by_one(data, tmp_path):
    """Perfect boxes, and masks of half of each object: AP of a class that is never found is 0."""
    config, coco = config_of(data, tmp_path), COCO(data / "annotations" / "instances_test.json")
    metainfo = DATASETS.build(config.test_dataloader.dataset).metainfo
    for found, expected in (([5, 9], (1.0, 1.0)), ([5], (1.0, 0.0)), ([9], (0.0, 1.0))):
        metric = METRICS.build(config.test_evaluator)
        metric.dataset_meta = metainfo
        for image in coco.getImgIds():
            given = coco.loadAnns(coco.getAnnIds(image, catIds=found))
            boxes = np.array([one["bbox"] for one in given], dtype=float)
            boxes[:, 2:] += boxes[:, :2]
            masks = torch.tensor(np.array([coco.annToMask(one) for one in given])).bool()
            masks[:, ::2] = False
            labels = torch.tensor([[5, 9].index(one["category_id"]) for one in given])
            instances = {"bboxes": torch.from_numpy(boxes), "labels": labels, "scores": torch.ones(len(given))}
            instances["masks"] = masks
            metric.process({}, [{"img_id": image, "ori_shape": (32, 32), "pred_instances": instances}])
        metrics = metric.evaluate(4)
        assert tuple(metric.by_class[name]["bbox_AP"] for name in ("bright", "dark")) == expected
        assert metrics["coco/bbox_mAP"] == pytest.approx(sum(expected) / 2)
        assert all(values["segm_AP"] < 0.5 for values in metric.by_class.values())
        assert metric.metrics == ["bbox", "segm"] and not any("precision" in name for name in metrics)


def test_test_time_augmentation_merges_what_all_views_find(finished, data, tmp_path):
    out, results = finished
    assert list(results["classes"]) == ["bright", "dark"] and set(results["classes"]["dark"]) == {"bbox_AP", "segm_AP"}
    found = evaluate(DETECTION, out, out=tmp_path / "found", tta=True)
    assert (tmp_path / "found/results_test_tta.json").is_file() and found["tta"]
    assert {"test_coco/bbox_mAP", "test_coco/segm_mAP"} <= set(found["metrics"])
    config = with_tta(load_config("detection", out / "model/config.py", [f"output_dir={tmp_path}/own"]))
    runner = build_runner(config)
    fill_model(runner.model.module, out / "model")
    batch = next(iter(runner.test_dataloader))
    model = runner.model.eval()
    with torch.no_grad():
        merged = model.test_step(batch)[0].pred_instances
        boxes, scores, labels, masks = [], [], [], []
        for inputs, samples in zip(batch["inputs"], batch["data_samples"], strict=True):
            own = model.module.test_step({"inputs": inputs[:1], "data_samples": samples[:1]})[0].pred_instances
            left, top, right, bottom = own.bboxes.unbind(1)
            if samples[0].flip:
                left, right = 32 - right, 32 - left
            boxes.append(torch.stack([left, top, right, bottom], 1))
            scores.append(own.scores)
            labels.append(own.labels)
            masks += [mask.numpy()[:, ::-1] if samples[0].flip else mask.numpy() for mask in own.masks]
    assert len(boxes) == 6 and len({tuple(inputs[0].shape) for inputs in batch["inputs"]}) == 3
    boxes, scores, labels = torch.cat(boxes), torch.cat(scores), torch.cat(labels)
    kept = []
    for index in scores.argsort(descending=True, stable=True).tolist():  # greedy suppression, class by class
        others = [other for other in kept if labels[other] == labels[index]]
        if not others or overlaps(boxes[[index]].numpy(), boxes[others].numpy()).max() <= 0.5:
            kept.append(index)
    kept = kept[:20]
    torch.testing.assert_close(merged.scores, scores[kept])
    torch.testing.assert_close(merged.bboxes, boxes[kept], rtol=0, atol=1e-3)
    assert np.array_equal(merged.masks.numpy(), np.stack([masks[index] for index in kept])) and merged.masks.any()


@each(
    "direction, expected",
    [
        (None, [[1, 0], [0, 0]]),
        ("horizontal", [[0, 1], [0, 0]]),
        ("vertical", [[0, 0], [1, 0]]),
        ("diagonal", [[0, 0], [0, 1]]),
    ],
)
def test_masks_are_mirrored_back(direction, expected):
    sample = DetDataSample(metainfo={"flip": direction is not None, "flip_direction": direction})
    assert mirrored_back(sample, torch.tensor([[1, 0], [0, 0]])).tolist() == expected


def test_an_image_that_is_too_small_for_the_pyramid_is_named(finished, tmp_path, capfd):
    place = f"{finished[0]}"
    small = "test_dataloader.dataset.pipeline.1.scale=(6,6)"
    assert evaluate_main([place, "--tta", "--out", str(tmp_path), small]) == 2
    said = capfd.readouterr().err.strip().splitlines()[-1]
    assert re.search(r"the model does not take \S+/images/test/0\.png at 4x4 pixels \(.*too small\)", said), said
    padded = "model.data_preprocessor.pad_size_divisor=32"
    assert padded in said and evaluate_main([place, "--tta", "--out", str(tmp_path), small, padded]) == 0


# ---- what is broken is named ----------------------------------------------------------------------------------------


def _annotation(change):
    def damage(root):
        path = root / "annotations" / "instances_training.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return damage


def _cut(path):
    path.write_bytes(path.read_bytes()[:-200])


def last_line(capfd, arguments):
    """What the command says last when it refuses its values."""
    assert train_main(["--config", str(CONFIGS / "smoke.py"), *arguments]) == 2
    last = capfd.readouterr().err.replace("\r", "\n").strip().splitlines()[-1]
    assert last.startswith("python -m tasks.detection.train: "), last
    return last


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda root: _cut(root / "images/training/3.png"), r"images/training/3\.png is not a readable image"),
        (
            lambda root: Image.new("RGB", (40, 32)).save(root / "images/training/2.png"),
            r"images/training/2\.png is of 32x40 pixels, the annotation file says 32x32",
        ),
        (
            _annotation(lambda content: content["annotations"][2]["segmentation"]["counts"].append(7)),
            r"instances_training\.json: annotation 3 of 1\.png has run lengths that do not fill its image of 32x32",
        ),
    ],
)
def test_broken_files_are_named_in_one_line(data, tmp_path, capfd, damage, said):
    shutil.copytree(data, tmp_path / "data")
    damage(tmp_path / "data")
    last = last_line(capfd, options(tmp_path / "data", tmp_path / "run"))
    assert re.search(said, last), last


def test_data_sets_that_are_broken_do_not_build(data, tmp_path):
    config = config_of(data, tmp_path)
    for number, (damage, said) in enumerate(
        [
            (lambda root: (root / "images/training/1.png").unlink(), r"images/training/1\.png is missing"),
            (lambda root: _cut(root / "annotations/instances_training.json"), "is not readable"),
            (lambda root: (root / "annotations/instances_training.json").unlink(), "is not there; data_root="),
            (_annotation(lambda content: content["annotations"][0].pop("area")), "is not COCO's layout"),
            (
                _annotation(lambda content: content["annotations"][1].update(category_id=999)),
                "annotation 2 has category_id 999, which is not among categories",
            ),
            (
                _annotation(lambda content: content["annotations"][3].update(image_id=77)),
                "annotation 4 has image_id 77, which is not among images",
            ),
        ]
    ):
        root = shutil.copytree(data, tmp_path / str(number))
        damage(root)
        config.train_dataloader.dataset.data_root = f"{root}/"
        with pytest.raises((OSError, ValueError), match=said) as caught:
            DATASETS.build(config.train_dataloader.dataset)
        assert str(root) in str(caught.value) and "\n" not in str(caught.value)


@each(
    "change, said",
    [
        ({"bbox": [1, 2, 3]}, "four numbers"),
        ({"bbox": [1, 2, 3, float("nan")]}, "four numbers"),
        ({"bbox": [0, 0, -2, 3]}, "not within its image of 4x5"),
        ({"bbox": [3, 0, 4, 3]}, "not within its image of 4x5"),
        ({"bbox": [0, -0.5, 2, 4]}, None),
        ({"segmentation": []}, "polygon"),
        ({"segmentation": [[1, 2, 3, 4]]}, "polygon"),
        ({"segmentation": None}, "neither polygons nor run lengths"),
        ({"segmentation": {"size": [5, 4], "counts": [20]}}, r"size \[5, 4\]"),
        ({"segmentation": {"size": [4, 5], "counts": [-1, 21]}}, "do not fill"),
        ({"segmentation": {"size": [4, 5], "counts": [3, 17]}}, None),
        ({"segmentation": {"size": [4, 5], "counts": "abc"}}, "packed run lengths"),
        ({"segmentation": {"size": [4, 5], "counts": "zzz~"}}, "packed run lengths"),
        ({"segmentation": [[0, 0, 2, 0, 2, 3]]}, None),
    ],
)
def test_annotations_are_checked(change, said):
    annotation = {"bbox": [0, 0, 2, 3], "segmentation": [[0, 0, 2, 0, 2, 3]], **change}
    damage = annotation_damage(annotation, 4, 5)
    assert damage is None if said is None else re.search(said, damage)


# ---- configs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["smoke.py", "coco_mask_rcnn_vit_base.py#violin"])  # all: tests/tasks/fullsize
def test_configs_parse_and_build(file):
    config = load_config("detection", CONFIGS / file)
    assert isinstance(config, Config) and config.default_scope == "mmdet"
    init_default_scope("mmdet")
    with torch.device("meta"):
        model = MODELS.build(config.model)
    assert model.backbone.config.num_hidden_layers == (4 if file == "smoke.py" else 12)
    patch, scales = model.backbone.config.patch_size, config.model.neck.scales
    strides = [patch / scale for scale in scales]
    strides += [strides[-1] * 2**extra for extra in range(1, config.model.neck.num_outs - len(scales) + 1)]
    assert [stride[0] for stride in model.rpn_head.anchor_generator.strides] == strides
    assert model.roi_head.bbox_roi_extractor.featmap_strides == strides[:-1]
    wrapper = build_optim_wrapper(model, config.optim_wrapper)
    decayed = {
        name: group["weight_decay"]
        for group in wrapper.optimizer.param_groups
        for name, parameter in model.named_parameters()
        if any(parameter is member for member in group["params"])
    }
    assert decayed["backbone.embeddings.position_embeddings"] == 0 and decayed["backbone.layers.0.mlp.fc1.bias"] == 0
    assert decayed["backbone.layers.0.mlp.fc1.weight"] == 0.05
    assert not any(decay for name, decay in decayed.items() if "decay_bias" in name or "norm" in name)
    for part in PARTS:
        dataset = config[f"{part}_dataloader"].dataset
        assert DATASETS.get(dataset.type) is not None
        assert [TRANSFORMS.build(step) for step in dataset.pipeline]
        assert METRICS.get(config.test_evaluator.type) is not None
    for hook in config.custom_hooks:
        HOOKS.build(hook)


def test_full_size_configs_are_mask_rcnn_1x():
    dense, violin = (
        load_config("detection", CONFIGS / f"coco_mask_rcnn_vit_base.py#{prior}") for prior in ("dense", "violin")
    )
    assert dense.train_cfg.max_epochs == 12 and dense.param_scheduler[-1].milestones == [8, 11]
    assert dense.train_dataloader.batch_size * 8 == dense.auto_scale_lr.base_batch_size == 16
    assert dense.model.roi_head.bbox_head.num_classes == 80 and dense.model.backbone.preset == "deit_base"
    assert dense.model.backbone.prior == "dense"
    assert violin.model.backbone.prior == {"decay": {"name": "violin", "init": "finetune"}}
    same = violin.to_dict()
    same["model"]["backbone"]["prior"] = "dense"
    same["work_dir"] = dense.work_dir
    assert same == dense.to_dict()


def test_mask_rcnn_on_swin_is_the_papers():
    """VIOLIN Table 8: its scalars, none of which is decayed."""
    config = load_config("detection", CONFIGS / "coco_mask_rcnn_swin_tiny.py#violin")
    init_default_scope("mmdet")
    with torch.device("meta"):
        model = MODELS.build(config.model)
    assert model.backbone.config.num_hidden_layers == 12 and config.train_cfg.max_epochs == 12
    assert config.model.neck.in_channels == model.backbone.out_channels
    assert config.test_evaluator.metric == ["bbox", "segm"]
    scalars = [value.numel() for name, value in model.named_parameters() if "decay_bias" in name]
    wrapper = build_optim_wrapper(model, config.optim_wrapper)
    groups = [group for group in wrapper.optimizer.param_groups if not group["weight_decay"]]
    undecayed = {id(value) for group in groups for value in group["params"]}
    tables = [value for name, value in model.named_parameters() if "bias_table" in name or "decay_bias" in name]
    assert sum(scalars) == 1242 and len(tables) == 3 * 12 and all(id(value) in undecayed for value in tables)
    # mmdetection's recipe for Swin: norms and tables do not decay, other biases do. It starts from ImageNet's weights.
    trained = {id(value) for group in wrapper.optimizer.param_groups for value in group["params"]}
    decayed = {name for name, value in model.named_parameters() if id(value) in trained - undecayed}
    assert "backbone.stages.0.layers.0.mlp.fc1.bias" in decayed and "neck.lateral_convs.0.conv.bias" in decayed
    assert not [name for name in decayed if "norm" in name]
    assert config.model.backbone.pretrained == "checkpoints/swin_tiny"


def gradients_of_a_step(config, masks):
    """Gradients of the backbone after a step of a detector on two small images, by name; afterwards it predicts."""
    from mmdet.testing import demo_mm_inputs

    torch.manual_seed(0)
    model = MODELS.build(config.model).train()
    model.init_weights()
    inputs = demo_mm_inputs(2, [[3, 64, 96], [3, 64, 64]], num_items=[2, 3], num_classes=80, with_mask=masks)
    total, _ = model.parse_losses(model(**model.data_preprocessor(copy.deepcopy(inputs), True), mode="loss"))
    total.backward()
    grads = {name: value.grad for name, value in model.backbone.named_parameters() if value.requires_grad}
    model.eval()
    with torch.no_grad():
        found = model(**model.data_preprocessor(inputs, False), mode="predict")
    assert [("masks" in sample.pred_instances) for sample in found] == [masks] * 2
    return grads


@pytest.mark.parametrize(("cell", "kinds"), [("cascade_mask_rcnn", ["bbox", "segm"]), ("retinanet", ["bbox"])])
def test_detectors_on_swin_build_at_full_size_and_train(cell, kinds):
    """A step of a small one, with gradients of every weight but the norm that classification alone has."""
    config = load_config("detection", CONFIGS / f"coco_swin_tiny_detectors.py#{cell}")
    init_default_scope("mmdet")
    with torch.device("meta"):
        model = MODELS.build(config.model)
    assert config.model.neck.in_channels == model.backbone.out_channels
    assert build_optim_wrapper(model, config.optim_wrapper) is not None
    assert config.test_evaluator.metric == kinds
    with_mask = "segm" in kinds
    small = {**SMALL_FAMILIES["sparseprior_swin"], "prior": "fibottention+violin", "out_indices": [1, 2]}
    config.model.backbone = {"type": "SparsePriorSwin", **small, "with_cp": with_mask}
    config.model.neck.in_channels = [8, 16]
    for stage in config.model.train_cfg.get("rcnn", []):
        stage.sampler.num = 16  # boxes of an image that heads of full size learn from
    grads = gradients_of_a_step(config, with_mask)
    # RetinaNet's pyramid starts at the second map; the first one's norm has no part in it.
    used = {name: value for name, value in grads.items() if with_mask or not name.startswith("map_norms.")}
    assert all(value is not None and value.isfinite().all() for value in used.values())
    assert grads["stages.0.layers.0.attention.decay_bias.beta"].abs().sum() > 0
    assert "layernorm.weight" not in grads


@pytest.mark.parametrize(
    ("cell", "epochs", "masks"),
    [("detr", 150, False), ("dino", 12, False), ("mask2former", 50, True), ("vitdet", 100, True)],
)
def test_transformers_build_at_full_size_and_train(cell, epochs, masks):
    """A step of a small one, with gradients of the whole backbone."""
    config = load_config("detection", CONFIGS / f"coco_transformers.py#{cell}")
    init_default_scope("mmdet")
    with torch.device("meta"):
        model = MODELS.build(copy.deepcopy(config.model))  # some heads change what they are built from
    takes = config.model.panoptic_head if cell == "mask2former" else config.model.neck
    assert takes.in_channels == (768 if cell == "vitdet" else model.backbone.out_channels)
    assert build_optim_wrapper(model, config.optim_wrapper) is not None
    assert (config.train_cfg.max_epochs, "segm" in config.test_evaluator.metric) == (epochs, masks)
    assert [TRANSFORMS.build(step) for step in config.train_dataloader.dataset.pipeline]
    outputs = config.model.backbone.out_indices
    if cell == "vitdet":
        config.model.backbone = {"type": "SparsePriorViT", **VIT, "prior": "violin", "out_indices": [2]}
        takes.in_channels = 16
        config.model.train_cfg.rcnn.sampler.num = config.model.test_cfg.rpn.max_per_img = 16
    else:
        sizes = {**SMALL_FAMILIES["sparseprior_swin"], "depths": [1] * 4, "num_heads": [2] * 4, "image_size": 64}
        config.model.backbone = {"type": "SparsePriorSwin", **sizes, "prior": "violin", "out_indices": outputs}
        takes.in_channels = [4 * 2**stage for stage in outputs]
    if cell in ("detr", "dino"):
        config.model.num_queries = config.model.test_cfg.max_per_img = 10
        config.model.encoder.num_layers, config.model.decoder.num_layers = 1, 2
    if cell == "dino":
        config.model.dn_cfg.group_cfg.num_dn_queries = 4
    if cell == "mask2former":
        takes.num_queries, takes.pixel_decoder.encoder.num_layers, takes.transformer_decoder.num_layers = 10, 1, 3
        config.model.train_cfg.num_points = 64
    config.model.data_preprocessor.pop("batch_augments", None)  # to 1024 pixels
    grads = gradients_of_a_step(config, masks)
    assert all(value is not None and value.isfinite().all() for value in grads.values())
    first = "layers.0" if cell == "vitdet" else "stages.0.layers.0"
    assert grads[f"{first}.attention.decay_bias.beta"].abs().sum() > 0


@each("example", re.findall(r"```python\n(_base_.*?)```", Path("tasks/detection/README.md").read_text(), re.DOTALL))
def test_mmdetections_own_files_take_the_backbone(example):
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "own.py").write_text(example)
        config = load_config("detection", file)
    init_default_scope("mmdet")
    with torch.device("meta"):
        model = MODELS.build(config.model)
    assert model.backbone.config.prior_name != "dense" and config.train_dataloader.dataset.type == "CocoDataset"
    assert build_optim_wrapper(model, config.optim_wrapper) is not None
    assert [HOOKS.build(hook) for hook in config.custom_hooks]


def test_a_plain_vit_at_1024_pixels_takes_fibottention():
    """The full-size model of 4096 patches: its support is the default one of that grid."""
    config = load_config("detection", CONFIGS / "coco_mask_rcnn_vit_base_1024.py#fibottention")
    init_default_scope("mmdet")
    with torch.device("meta"):
        model = MODELS.build(config.model)
    assert model.backbone.config.grid == (64, 64) and model.backbone.config.prior_name == "fibottention"
    offsets = head_offsets("fibottention", num_heads=12, num_tokens=4096, w_min=5, w_max=None)
    assert max(map(max, offsets)) <= 4096 // 3 < 2 * max(map(max, offsets))
    assert [step.scale for step in config.test_pipeline if step.type == "Resize"] == [(1024, 1024)]
    assert config.model.data_preprocessor.batch_augments[0].size == (1024, 1024)


@each("seed", range(20))
def test_packed_run_lengths_are_pycocotools(seed):
    random = np.random.default_rng(seed)
    height, width = random.integers(1, 70, 2)
    mask = random.random((height, width)) < random.choice([0.0, 0.02, 0.5, 1.0])
    counts = _encoded(mask)["counts"].decode()
    assert packed_pixels(counts) == height * width
    annotation = {"bbox": [0, 0, 1, 1], "segmentation": {"size": [height, width], "counts": counts}}
    assert annotation_damage(annotation, height, width) is None
    assert annotation_damage(annotation, height, width + 1) is not None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.roi_head.bbox_head.num_classes=1", "model.roi_head.bbox_head.num_classes=1, the data has 2 classes"),
        ("model.backbone.image_mean=[0.5,0.5,0.5]", "model.data_preprocessor.mean=[123.675, 116.28, 103.53] must be"),
        ("model.neck.in_channels=32", "the configuration does not build: "),
    ],
)
def test_parts_that_do_not_fit_get_one_line(data, tmp_path, capfd, override, said):
    assert said in last_line(capfd, options(data, tmp_path / "run", override))
    assert not (tmp_path / "run").exists()


@each(
    "override, message",
    [
        ("test_evaluator.metric_items=[mAP_50]", r"metric_items=\['mAP_50'\] must hold mAP"),
        ("test_evaluator.metric=[segm]", "test_evaluator must measure bbox, by which runs are compared"),
        ("test_evaluator.format_only=True", "outfile_prefix|format_only"),
        ("test_dataloader=None", "test_dataloader must be given: every run is tested at its end"),
    ],
)
def test_what_cannot_be_tested_ends_a_run_before_it_begins(override, message, data, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(DETECTION, config_of(data, tmp_path / "run", override))
    assert not (tmp_path / "run").exists()


def test_images_that_are_not_trained_on_are_counted(data, tmp_path, capsys):
    litter(shutil.copytree(data, tmp_path / "data"))
    file = tmp_path / "data" / "annotations" / "instances_training.json"
    content = json.loads(file.read_text())
    content["annotations"] = [one for one in content["annotations"] if one["image_id"] != content["images"][2]["id"]]
    file.write_text(json.dumps(content))
    config = config_of(tmp_path / "data", tmp_path)
    config.train_dataloader.dataset.filter_cfg = {"filter_empty_gt": True}
    tell_passed_over(*all_passed_over(DATASETS.build(config.train_dataloader.dataset)))
    folder = tmp_path / "data" / "images" / "training"
    line = capsys.readouterr().out
    counted = rf"left out: 2 not in instances_training\.json \(.*\), 1 dropped by filter_cfg \({folder}/2\.png\)\n"
    assert re.fullmatch(counted, line), line


def test_a_missing_image_ends_a_run_before_it_begins(data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    image = next((tmp_path / "data" / "images" / "test").iterdir())
    image.unlink()
    with pytest.raises(OSError, match=rf"{re.escape(image.name)} is missing"):
        run(DETECTION, config_of(tmp_path / "data", tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_only_a_kind_that_was_measured_has_an_ap_of_zero(data, tmp_path):
    config = config_of(data, tmp_path)
    dataset = DATASETS.build(config.test_dataloader.dataset)
    metric = METRICS.build({**config.test_evaluator, "metric": ["bbox", "proposal"]})
    metric.dataset_meta = dataset.metainfo
    empty = {"bboxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.long)}
    for index in range(len(dataset)):
        info = dataset.get_data_info(index)
        sample = {"img_id": info["img_id"], "ori_shape": (info["height"], info["width"]), "pred_instances": empty}
        metric.process({}, [sample])
    found = metric.evaluate(len(dataset))
    assert found["coco/bbox_mAP"] == 0 and "coco/proposal_mAP" not in found
