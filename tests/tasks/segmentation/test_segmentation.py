import copy
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("mmengine", reason="the extra `dense` is not installed")
pytest.importorskip("mmcv", reason="the extra `dense` is not installed")
pytest.importorskip("mmseg", reason="the extra `dense` is not installed")

import mmcv
import mmseg
from mmcv.transforms import LoadImageFromFile
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import HOOKS, init_default_scope
from mmengine.structures import PixelData
from mmseg.datasets.transforms import LoadAnnotations
from mmseg.registry import DATASETS, MODELS, TRANSFORMS
from mmseg.structures import SegDataSample
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.mm.loading import read_checkpoint
from hf_sparseprior.runs.results import read_results
from hf_sparseprior.runs.run_folder import claim
from tasks.common.mm.config import fill_classes, for_frameworks, load_config, run_identity
from tasks.common.mm.evaluate import evaluate
from tasks.common.mm.reading import read_image
from tasks.common.mm.runner import QuietRunner, build_runner
from tasks.common.mm.saving import fill_model
from tasks.common.mm.train import run
from tasks.heads.data import PixelClasses
from tasks.segmentation.data import FolderSegmentation, ReadAnnotation
from tasks.segmentation.evaluate import main as evaluate_main
from tasks.segmentation.task import SEGMENTATION, constant_predictor, draw_predictions
from tasks.segmentation.train import main as train_main
from tests.each import each
from tests.hf_sparseprior.small import SMALL as SMALL_FAMILIES
from tests.tasks.common.mm.shapes import COUNTS, PARTS, data_roots, litter, write_shapes
from tests.tasks.segmentation.tiny import OVERRIDES, SMALL

pytestmark = pytest.mark.slow

CONFIGS = Path("configs/segmentation")
# Of all, the model is built: tests/tasks/fullsize.
FULL_SIZE = ["ade20k_deit_base.py#violin", "ade20k_swin_tiny.py#fibottention"]
READING = [{"type": "ReadImage"}, {"type": "ReadAnnotation", "num_classes": 3}]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_shapes(tmp_path_factory.mktemp("data") / "shapes")


def config_of(data, out, *overrides):
    return load_config(
        "segmentation", CONFIGS / "smoke.py", [*OVERRIDES, *data_roots(data), f"output_dir={out}", *overrides]
    )


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    return out, run(SEGMENTATION, config_of(data, out))


def tell_classes_apart(weights):
    """Changes a model's weights so that it finds several classes, if not rightly. Eight steps may not teach it that."""
    random = torch.Generator().manual_seed(4)
    for name in ("decode_head.conv_seg.weight", "decode_head.fpn_bottleneck.conv.weight"):
        weights[name] = torch.randn(weights[name].shape, generator=random)
    return weights


def test_a_run_leaves_everything_and_evaluate_reproduces_it(finished, data, tmp_path):
    out, results = finished
    assert results["steps"] == 8 and [entry["step"] for entry in results["history"]] == list(range(1, 9))
    assert {"test_mIoU", "test_aAcc", "test_mAcc"} <= set(results["metrics"])
    for name in ("results.json", "predictions.png", "model/model.safetensors", "model/backbone/config.json"):
        assert (out / name).stat().st_size > 0
    again = evaluate(SEGMENTATION, out / "model", out=tmp_path / "evaluation")
    assert again["metrics"] == results["metrics"] and again["model_sha256"] == results["model_sha256"]
    assert (tmp_path / "evaluation" / "predictions_test.png").exists()
    other = evaluate(SEGMENTATION, out, "validation")  # of a run, the model is meant
    assert other["model_sha256"] == results["model_sha256"] and (out / "evaluation/results_validation.json").is_file()
    new = f"val_dataloader.dataset.data_root={shutil.copytree(data, tmp_path / 'new')}"
    assert evaluate_main([str(out), "--split", "validation", new]) == 0
    first, named = sorted(out.glob("evaluation/results_validation*.json"), key=lambda path: len(path.name))
    assert read_results(first)["config"]["test_dataloader"]["dataset"]["data_root"] == f"{data}/"
    assert named.name.startswith("results_validation_data_root_") and len(list(first.parent.glob("*.png"))) == 2
    assert other["images"] == 3 and set(other["metrics"]) == {"validation_mIoU", "validation_aAcc", "validation_mAcc"}
    weights = read_checkpoint(out / "iter_8.pth")["state_dict"]
    backbone = SparsePriorViTForImageClassification.from_pretrained(out / "model" / "backbone").vit
    assert all(torch.equal(value, weights[f"backbone.{key}"]) for key, value in backbone.state_dict().items())


def test_mms_own_inference_takes_a_run_as_it_is(finished, data, tmp_path):
    """In an interpreter of its own: the saved model, a checkpoint of the run, and the config that mmengine wrote."""
    out = shutil.copytree(finished[0], tmp_path / "run")
    with safe_open(out / "model/model.safetensors", "pt") as file:
        about = file.metadata()
    weights = tell_classes_apart(load_file(out / "model/model.safetensors"))
    save_file(weights, out / "model/model.safetensors", about)
    checkpoint = read_checkpoint(out / "iter_8.pth")
    tell_classes_apart(checkpoint["state_dict"])
    torch.save(checkpoint, out / "iter_8.pth")
    image, script = str(data / "images/test/1.png"), Path(__file__).with_name("inference.py")
    trained = [out / "smoke.py", out / "iter_8.pth"]
    arguments = [image, tmp_path / "found.npy", out / "model/config.py", out / "model/model.safetensors", *trained]
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        [sys.executable, script, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    runner = build_runner(load_config("segmentation", out / "model/config.py", [f"output_dir={tmp_path}/own"]))
    fill_model(runner.model, out / "model")
    batch = next(item for item in runner.test_dataloader if "images/test/1.png" in item["data_samples"][1].img_path)
    with torch.no_grad():
        expected = runner.model.eval().test_step(batch)[1].pred_sem_seg.data[0].numpy()
    found = np.load(tmp_path / "found.npy")
    assert found.shape == (8, 32, 32) and len(np.unique(expected)) > 1
    assert all(np.array_equal(map_, expected) for map_ in found)


def views_by_hand(model, image):
    """Class probabilities (classes, height, width), averaged over three sizes of an image, each mirrored too."""
    total = 0
    for side in (32, 40, 48):
        for mirrored in (False, True):
            seen = mmcv.imresize(image, (side, side))
            seen = torch.from_numpy((seen[:, ::-1] if mirrored else seen).copy()).permute(2, 0, 1)
            sample = SegDataSample(metainfo={"img_shape": (side, side), "ori_shape": image.shape[:2]})
            with torch.no_grad():
                logits = model.test_step({"inputs": [seen], "data_samples": [sample]})[0].seg_logits.data
            total = total + (logits.flip(-1) if mirrored else logits).softmax(0)
    return total / 6


@pytest.mark.parametrize("tta", [False, True])
def test_classes_are_measured_one_by_one(finished, data, tmp_path, monkeypatch, tta):
    """By counting pixels, of the model's predictions and of those averaged by hand over several views."""
    monkeypatch.setattr("tasks.common.mm.tta.RATIOS", (1.0, 1.25, 1.5))  # the neck's smallest map needs 32 pixels
    out, results = finished
    assert list(results["classes"]) == ["background", "bright", "dark"]
    folder = shutil.copytree(out / "model", tmp_path / "model")
    save_file(tell_classes_apart(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    assert evaluate_main([str(folder), "--out", str(tmp_path / "found"), *(["--tta"] if tta else [])]) == 0
    found = read_results(tmp_path / "found" / f"results_test{'_tta' * tta}.json")
    assert found["tta"] is tta
    model = build_runner(load_config("segmentation", folder / "config.py", [f"output_dir={tmp_path}/own"])).model
    fill_model(model, folder)
    counts = np.zeros((3, 3), dtype=int)  # of each class: shared, predicted, true
    for path in sorted((data / "images/test").glob("*.png")):
        image = read_image(str(path))
        truth = np.asarray(Image.open(str(path).replace("images", "annotations"))).astype(int) - 1
        sample = SegDataSample(metainfo={"img_shape": (32, 32), "ori_shape": (32, 32)})
        inputs = torch.from_numpy(image.copy()).permute(2, 0, 1)
        with torch.no_grad():
            alone = model.eval().test_step({"inputs": [inputs], "data_samples": [sample]})[0].pred_sem_seg.data[0]
        labels = (views_by_hand(model, image).argmax(0) if tta else alone).numpy()
        for index in range(3):
            of_class = (labels == index) & (truth >= 0), truth == index
            counts[index] += [np.logical_and(*of_class).sum(), of_class[0].sum(), of_class[1].sum()]
    assert list(found["classes"]) == ["background", "bright", "dark"] and (counts[:, 1] > 0).sum() > 1
    for (shared, predicted, true), values in zip(counts, found["classes"].values(), strict=True):
        assert values["IoU"] == pytest.approx(shared / (predicted + true - shared), abs=2e-3)
        assert values["accuracy"] == pytest.approx(shared / true, abs=2e-3)
    mean = np.mean([values["IoU"] for values in found["classes"].values()])
    assert found["metrics"]["test_mIoU"] == pytest.approx(mean, abs=1e-4)


def test_an_image_that_is_too_small_is_named_and_may_be_padded(finished, tmp_path, capfd):
    """Three quarters of 32 pixels are too few for the neck's smallest map."""
    out, _ = finished
    arguments = [str(out), "--tta", "--out", str(tmp_path)]
    assert evaluate_main(arguments) == 2
    said = capfd.readouterr().err.strip().splitlines()[-1]
    assert re.search(r"the model does not take \S+/images/test/0\.png at 24x24 pixels \(.*too small\)", said), said
    padded = "model.data_preprocessor.test_cfg.size_divisor=32"
    assert padded in said and evaluate_main([*arguments, padded]) == 0
    assert read_results(tmp_path / "results_test_tta.json")["images"] == 4


def test_images_of_several_sizes_in_a_test_batch_are_named(finished, data, tmp_path, capfd):
    shutil.copytree(data, tmp_path / "data")
    for part in ("images", "annotations"):
        file = tmp_path / "data" / part / "test" / "1.png"
        Image.open(file).resize((48, 40), Image.Resampling.NEAREST).save(file)
    arguments = [str(finished[0]), "--out", str(tmp_path / "found")]
    arguments += [f"test_dataloader.dataset.data_root={tmp_path}/data"]
    assert evaluate_main(arguments) == 2
    assert "; test_dataloader.batch_size=1 takes each alone" in capfd.readouterr().err.strip().splitlines()[-1]
    assert evaluate_main([*arguments, "test_dataloader.batch_size=1"]) == 0


def test_own_data_of_odd_sizes_is_trained_evaluated_and_its_classes_are_counted(tmp_path, capfd):
    """The commands of the README's "Your own data", on four photographs of odd sizes, with a small model."""
    random = np.random.default_rng(0)
    for split in ("training", "validation", "test"):
        for part in ("images", "annotations"):
            (tmp_path / "own" / part / split).mkdir(parents=True)
        for number, (height, width) in enumerate([(45, 70), (64, 33)]):
            image = Image.fromarray(random.integers(0, 255, (height, width, 3), dtype=np.uint8))
            image.save(tmp_path / "own/images" / split / f"{number}.jpg")
            labels = random.integers(0, 3, (height, width), dtype=np.uint8)
            Image.fromarray(labels).save(tmp_path / "own/annotations" / split / f"{number}.png")
    (tmp_path / "own/classes.txt").write_text("road\nsky\n")
    text = (CONFIGS / "own_data.py").read_text().replace('"data/own"', f'"{tmp_path}/own"')
    text = text.replace("20000, 4, 512", "2, 2, 32").replace('["../mm', f'["{Path.cwd()}/configs/mm')
    text = text.replace('"base/upernet.py"', f'"{Path.cwd()}/configs/segmentation/base/upernet.py"')
    (tmp_path / "own_data.py").write_text(text)
    small = [f"model.backbone.{key}={value}" for key, value in {**SMALL, "patch_size": 4}.items()]
    small += ["model.backbone.out_indices=[1,2,3,4]", "model.neck.embed_dim=24", "model.decode_head.channels=8"]
    small += ["model.decode_head.in_channels=[24,24,24,24]", "model.auxiliary_head.in_channels=24"]
    small += [f"{part}_dataloader.{key}" for part in PARTS for key in ("num_workers=0", "persistent_workers=False")]
    run_folder = tmp_path / "run"
    config = str(tmp_path / "own_data.py")
    assert train_main(["--config", config, f"output_dir={run_folder}", *small]) == 0, capfd.readouterr().err
    (tmp_path / "own/images/validation/notes.txt").touch()
    capfd.readouterr()
    assert evaluate_main([str(run_folder), "--split", "validation"]) == 0, capfd.readouterr().err
    assert re.search(r"^left out: 1 not .*notes\.txt\)$", capfd.readouterr().out, re.MULTILINE)
    saved = load_config("segmentation", run_folder / "model/config.py")
    assert saved.model.decode_head.num_classes == saved.model.auxiliary_head.num_classes == 2
    assert list(read_results(run_folder / "results.json")["classes"]) == ["road", "sky"]
    (tmp_path / "own/classes.txt").unlink()
    assert train_main(["--config", config, f"output_dir={tmp_path}/other", *small]) == 2
    assert "classes.txt is missing; it holds one class a line" in capfd.readouterr().err


@pytest.mark.parametrize("split", ["training", "test"])
def test_masks_that_label_nothing_end_a_run_before_it_begins(split, data, tmp_path, capfd):
    root = shutil.copytree(data, tmp_path / "data")
    for number, file in enumerate(sorted((root / "annotations" / split).iterdir())):
        Image.fromarray(np.full((32, 32), number % 2 * 255, np.uint8)).save(file)
    said = last_line(capfd, [*data_roots(root), f"output_dir={tmp_path / 'run'}"])
    assert f"annotations/{split}: no pixel of the {COUNTS[split]} masks has a class; label 1 is 'background'" in said
    assert not (tmp_path / "run").exists()


def test_a_class_that_no_training_mask_has_is_named(data, tmp_path):
    root = shutil.copytree(data, tmp_path / "data")
    config = config_of(root, tmp_path / "run")
    init_default_scope("mmseg")
    for split, part, said in (("training", "train", 1), ("test", "test", 0)):
        for file in (root / "annotations" / split).iterdir():
            Image.fromarray(np.minimum(np.asarray(Image.open(file)), 2)).save(file)
        dataset = QuietRunner.build_dataloader(config[f"{part}_dataloader"]).dataset
        lines = SEGMENTATION.look(dataset, part == "train")
        assert [line.partition(": ")[2] for line in lines] == [
            "no pixel of the 7 masks is of the class ['dark']; label 1 is 'background', 0 is none"
        ] * said


def test_slide_mode_averages_the_crops(finished, data, tmp_path):
    """Evaluation of whole images by crops of the training size, two halves that share a quarter of it."""
    out, _ = finished
    options = ["model.test_cfg.mode=slide", "model.test_cfg.crop_size=(32,32)", "model.test_cfg.stride=(16,16)"]
    config = load_config("segmentation", out / "model/config.py", [*options, f"output_dir={tmp_path}/own"])
    model = build_runner(config).model.eval()
    fill_model(model, out / "model")
    images, size = torch.randn(1, 3, 48, 48), (48, 48)
    meta = [{"ori_shape": size, "img_shape": size, "pad_shape": size, "padding_size": [0] * 4}]
    logits, count = torch.zeros(1, 3, *size), torch.zeros(size)
    with torch.no_grad():
        found = model.inference(images, meta)
        for top in (0, 16):
            for left in (0, 16):
                crop = slice(top, top + 32), slice(left, left + 32)
                logits[..., *crop] += model.encode_decode(images[..., *crop], meta)
                count[crop] += 1
    torch.testing.assert_close(found, logits / count)
    assert found.std() > 0 and count.unique().tolist() == [1, 2, 4]


def test_mms_names_for_reading_are_checked_as_ours(data, tmp_path):
    """A user's config reads with LoadImageFromFile and LoadAnnotations; which file is broken is told all the same."""
    shutil.copytree(data, tmp_path / "data")
    config = config_of(tmp_path / "data", tmp_path / "run")
    ours = QuietRunner.build_dataloader(config.val_dataloader)
    config = for_frameworks(config)
    pipeline = config.val_dataloader.dataset.pipeline
    assert [step.type for step in pipeline[:2]] == ["LoadImageFromFile", "LoadAnnotations"]
    assert config.test_pipeline == pipeline and config.test_pipeline is not pipeline
    loader = QuietRunner.build_dataloader(config.val_dataloader)
    for one, other in zip(ours.dataset, loader.dataset, strict=True):
        assert torch.equal(one["inputs"], other["inputs"])
        assert torch.equal(one["data_samples"].gt_sem_seg.data, other["data_samples"].gt_sem_seg.data)
    _cut(tmp_path / "data/images/validation/1.png")
    Image.fromarray(np.full((32, 32), 4, dtype=np.uint8)).save(tmp_path / "data/annotations/validation/2.png")
    for index, said in ((1, r"1\.png is not a readable image"), (2, r"2\.png holds the label 4; with 3 classes")):
        with pytest.raises((OSError, ValueError), match=said):
            loader.dataset[index]
    pipeline[0].imdecode_backend = "cv2"  # OpenCV was asked for, so mm's own step reads
    mms_own = QuietRunner.build_dataloader(config.val_dataloader).dataset.pipeline.transforms
    assert type(mms_own[0]) is LoadImageFromFile and type(mms_own[1]) is ReadAnnotation


def test_runs_of_one_second_keep_to_their_own_folders(data, tmp_path, monkeypatch):
    """mmengine names a run by its config and the second, and hands out what it has under a name."""
    monkeypatch.setattr("mmengine.runner.runner.time.strftime", lambda *arguments: "20260101_000000")
    first, second = (build_runner(config_of(data, tmp_path / name)) for name in ("first", "second"))
    assert first.visualizer is not second.visualizer
    assert (tmp_path / "second" / "20260101_000000" / "vis_data" / "config.py").is_file()


def _claim_as(config, out):
    claim(out, run_identity(config))


def test_a_checkpoint_that_holds_code_is_refused(data, tmp_path, capsys):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "written"),)

    config = config_of(data, tmp_path / "run")
    (tmp_path / "run").mkdir()
    _claim_as(config, tmp_path / "run")
    torch.save({"state_dict": {}, "meta": Attack()}, tmp_path / "run" / "iter_3.pth")
    with pytest.raises(OSError, match=r"iter_3\.pth is refused: it holds .*mkdir"):
        run(SEGMENTATION, config)
    assert not (tmp_path / "written").exists() and (tmp_path / "run" / "iter_3.pth").exists()


def test_the_baseline_is_the_best_constant_by_mmsegs_metric(data, tmp_path):
    config = config_of(data, tmp_path)
    init_default_scope("mmseg")
    scores = {}
    for index, name in enumerate(("background", "bright", "dark")):
        counts = np.zeros((3, 2))  # intersection, union
        for path in sorted((data / "annotations" / "test").glob("*.png")):
            labels = np.asarray(Image.open(path)).astype(int) - 1
            for label in range(3):
                truth = labels == label
                predicted = (labels >= 0) & (index == label)
                counts[label] += ((truth & predicted).sum(), (truth | predicted).sum())
        scores[name] = (counts[:, 0] / counts[:, 1]).mean()
    best = max(scores, key=scores.get)
    assert constant_predictor(config) == {"test_mIoU": pytest.approx(scores[best], abs=1e-4), "class": best}


def test_the_mask_changes_what_is_segmented(data, tmp_path):
    init_default_scope("mmseg")
    config = config_of(data, tmp_path, "model.backbone.prior=fibottention")
    model = MODELS.build(config.model).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    config.model.backbone.prior = "dense"
    dense = MODELS.build(config.model).eval()
    dense.load_state_dict(model.state_dict(), strict=False)
    images = torch.randn(2, 3, 32, 48, generator=generator)
    with torch.no_grad():
        assert (model(images) - dense(images)).abs().max() > 1e-3


def test_a_checkpoint_travels_from_classification_to_segmentation_and_back(data, tmp_path):
    torch.manual_seed(5)
    classifier = SparsePriorViTForImageClassification(SparsePriorViTConfig(prior="fibottention+violin", **SMALL)).eval()
    classifier.save_pretrained(tmp_path / "classifier")
    config = config_of(
        data, tmp_path / "run", f"model.backbone.pretrained={tmp_path}/classifier", "train_cfg.max_iters=2",
        "optim_wrapper.optimizer.lr=0.0",
    )  # fmt: skip
    run(SEGMENTATION, config)
    back = SparsePriorViTForImageClassification.from_pretrained(tmp_path / "run" / "model" / "backbone").eval()
    for key, value in classifier.vit.state_dict().items():
        assert torch.equal(back.vit.state_dict()[key], value), key
    back.classifier.load_state_dict(classifier.classifier.state_dict())
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(back(images).logits, classifier(images).logits)


@pytest.mark.parametrize(
    ("damage", "said", "workers"),
    [
        (lambda root: _cut(root / "images/training/3.png"), r"images/training/3\.png is not a readable image", 0),
        (lambda root: _cut(root / "images/training/3.png"), r"images/training/3\.png is not a readable image", 1),
        (lambda root: _paint(root, (32, 32), 4), r"annotations/training/4\.png holds the label 4; .* highest is 3", 0),
    ],
)
def test_broken_files_are_named_in_one_line(data, tmp_path, capfd, damage, said, workers):
    root = shutil.copytree(data, tmp_path / "data")
    damage(root)
    options = [*data_roots(root), f"output_dir={tmp_path}/run", f"train_dataloader.num_workers={workers}"]
    last = last_line(capfd, options)
    assert re.search(said, last), last
    assert not (tmp_path / "run").exists()


def last_line(capfd, options):
    """What the command says last when it refuses its values."""
    assert train_main(["--config", str(CONFIGS / "smoke.py"), *OVERRIDES, *options]) == 2
    last = capfd.readouterr().err.replace("\r", "\n").strip().splitlines()[-1]
    assert last.startswith("python -m tasks.segmentation.train: "), last
    return last


@each(
    "damage, said",
    [
        (lambda root: _cut(root / "annotations/training/2.png"), r"training/2\.png is not a readable image \(no"),
        (lambda root: (root / "images/training/1.png").write_text("x"), r"1\.png is not a readable image"),
        (lambda root: (root / "annotations/training/0.png").unlink(), r"annotations/training/0\.png is missing"),
        (lambda root: _paint(root, (16, 32), 1), r"training/4\.png of shape \(16, 32\) must be .* \(32, 32\)"),
        (lambda root: (root / "classes.txt").unlink(), r"classes\.txt is missing"),
    ],
)
def test_folders_that_are_broken_are_not_read(data, tmp_path_factory, damage, said):
    root = shutil.copytree(data, tmp_path_factory.mktemp("broken") / "data")
    damage(root)
    init_default_scope("mmseg")
    with pytest.raises((OSError, ValueError), match=said):
        dataset = FolderSegmentation(str(root), "training", pipeline=READING)
        for index in range(len(dataset)):
            dataset[index]


def _cut(path):
    path.write_bytes(path.read_bytes()[:-200])


def _paint(root, shape, label):
    Image.fromarray(np.full(shape, label, dtype=np.uint8)).save(root / "annotations/training/4.png")


@each(
    "override, said",
    [
        ("model.backbone.prior=nonsense", "nonsense"),
        ("model.backbon.prior=violin", "there is no 'model.backbon' in the configuration; did you mean"),
        ("model.backbone.depth=3", "did you mean 'num_hidden_layers'"),
        ("train_dataloader.dataset.data_root=/nowhere", "data_root=/nowhere is not a folder"),
        ("model.backbone.pretrained=/nowhere", "pretrained=/nowhere is not a folder of a saved model"),
        ("model.decode_head.type=NoHead", "NoHead"),
        ("model.decode_head.depth=3", "unexpected keyword argument 'depth'"),
        ("train_dataloader.dataset.colour=3", "unexpected keyword argument 'colour'"),
        ("model.decode_head.num_classes=2", "model.decode_head.num_classes=2, the data has 3 classes: background, "),
        ("nonsense", "must be key=value"),
    ],
)
def test_bad_values_get_one_line(data, tmp_path, capfd, override, said):
    assert said in last_line(capfd, [*data_roots(data), f"output_dir={tmp_path}/run", override])
    assert not (tmp_path / "run").exists()


def test_a_damaged_model_folder_gets_one_line(finished, tmp_path, capfd):
    shutil.copytree(finished[0] / "model", tmp_path / "model")
    _cut(tmp_path / "model" / "model.safetensors")
    assert evaluate_main([str(tmp_path / "model")]) == 2
    assert "model.safetensors cannot be read, it is damaged" in capfd.readouterr().err
    (tmp_path / "empty").mkdir()
    assert evaluate_main([str(tmp_path / "empty")]) == 2
    assert "is not a folder of a saved model" in capfd.readouterr().err


@pytest.mark.parametrize("file", ["smoke.py", *FULL_SIZE])
def test_configs_parse_and_build(file):
    config = load_config("segmentation", CONFIGS / file)
    assert isinstance(config, Config) and config.default_scope == "mmseg"
    init_default_scope("mmseg")
    with torch.device("meta"):
        model = MODELS.build(config.model)
    assert model.backbone.config.num_hidden_layers == (4 if file == "smoke.py" else 12)
    wrapper = build_optim_wrapper(model, config.optim_wrapper)
    rates = {name: group["lr"] for group in wrapper.optimizer.param_groups for name in _names(model, group["params"])}
    factors = {"decode_head.conv_seg.weight": 30, "decode_head.bottleneck.conv.weight": 3}
    factors[f"backbone.{'stages.0.' if 'swin' in file else ''}layers.0.mlp.fc1.bias"] = 1
    for name, factor in factors.items():
        expected = config.optim_wrapper.optimizer.lr * (factor if file == "smoke.py" else 1)
        assert rates[name] == pytest.approx(expected)
    for group in wrapper.optimizer.param_groups:
        if any("decay_bias" in name for name in _names(model, group["params"])):
            assert group["weight_decay"] == 0
    for part in ("train", "val", "test"):
        dataset = config[f"{part}_dataloader"].dataset
        assert DATASETS.get(dataset.type) is not None
        assert [TRANSFORMS.build(step) for step in dataset.pipeline]
    assert config.param_scheduler[-1].end == config.train_cfg.max_iters
    for hook in config.custom_hooks:
        HOOKS.build(hook)


def test_the_papers_baseline_is_mmsegmentations_recipe():
    """VIOLIN Table 8, left: 45.24 is that recipe's published number. Heads, schedule, rates and decay are its own."""
    theirs = Config.fromfile(
        Path(mmseg.__file__).parent / ".mim/configs/vit/vit_deit-b16_upernet_8xb2-80k_ade20k-512x512.py"
    )
    ours = load_config("segmentation", CONFIGS / "ade20k_deit_base.py#dense")
    assert ours.model.neck is None and theirs.model.neck is None
    assert ours.model.decode_head == theirs.model.decode_head
    assert ours.model.auxiliary_head == theirs.model.auxiliary_head
    assert ours.model.backbone.drop_path_rate == theirs.model.backbone.drop_path_rate
    assert [index - 1 for index in ours.model.backbone.out_indices] == list(theirs.model.backbone.out_indices)
    assert ours.param_scheduler == theirs.param_scheduler
    assert ours.optim_wrapper.optimizer == theirs.optim_wrapper.optimizer
    assert ours.train_cfg.max_iters == theirs.train_cfg.max_iters == 80000
    assert ours.train_dataloader.batch_size * 4 == theirs.train_dataloader.batch_size * 8 == 16
    assert (ours.model.backbone.preset, ours.model.backbone.prior) == ("deit_base", "dense")
    violin = load_config("segmentation", CONFIGS / "ade20k_deit_base.py#violin").to_dict()
    assert violin["model"]["backbone"]["prior"] == {"decay": {"name": "violin", "init": "finetune"}}
    violin["model"]["backbone"]["prior"], violin["work_dir"] = "dense", ours.work_dir
    assert violin == ours.to_dict()


def _names(model, parameters):
    return [name for name, own in model.named_parameters() if any(own is parameter for parameter in parameters)]


@each(
    "content, name, message",
    [
        ("cells = dict(a=dict(x=1), b=dict())", "c.py", r"c.py is a matrix; name one of its cells, .*c.py#CELL: a, b"),
        ("cells = dict(abc=dict(x=1))", "c.py#abd", r"c.py has no cell 'abd'; did you mean 'abc'\?"),
        ("x = 1", "c.py#a", r"c.py has no cell 'a'"),
        ("x = 1\ncells = dict(a=dict(x=dict(y=1)))", "c.py#a", r"c.py#a: "),
    ],
)
def test_cells_are_named(tmp_path, content, name, message):
    (tmp_path / "c.py").write_text(content + "\n")
    with pytest.raises(ValueError, match=message):
        load_config("segmentation", tmp_path / name)


def test_a_cell_changes_its_file_and_overrides_come_after_it(tmp_path):
    (tmp_path / "c.py").write_text("model = dict(y=1, z=2)\ncells = dict(a=dict(model=dict(y=3)))\n")
    config = load_config("segmentation", tmp_path / "c.py#a", ["model.z=4"])
    assert config.model == {"y": 3, "z": 4} and config.work_dir == "outputs/segmentation/c_a" and "cells" not in config


def losses_of_a_step(model):
    """Of a segmentor, whose weights have gradients then; afterwards it predicts at the size of an image."""
    sample = SegDataSample(gt_sem_seg=PixelData(data=torch.randint(0, 150, (1, 64, 96))))
    sample.set_metainfo({"img_shape": (64, 96), "ori_shape": (64, 96)})
    losses = model.loss(torch.randn(2, 3, 64, 96), [sample, sample])
    total, _ = model.parse_losses(losses)
    total.backward()
    image = SegDataSample(metainfo={"img_shape": (45, 70), "ori_shape": (45, 70)})
    found = model.eval().test_step({"inputs": [torch.zeros(3, 45, 70, dtype=torch.uint8)], "data_samples": [image]})
    assert found[0].pred_sem_seg.data.shape == (1, 45, 70)
    return losses


SWIN = {**SMALL_FAMILIES["sparseprior_swin"], "depths": [1] * 4, "num_heads": [2] * 4, "image_size": 64}
SHARED = {"prior": "violin", "out_indices": [1, 2, 3, 4]}


@pytest.mark.parametrize("name", ["swin_tiny.py#violin", "heads.py#fcn", "heads.py#segformer", "heads.py#dpt"])
def test_heads_build_at_full_size_and_train(name):
    """UPerNet, FCN and SegFormer's head on Swin, DPT on the maps and class tokens of a ViT: a step of a small one."""
    config, cell = load_config("segmentation", CONFIGS / f"ade20k_{name}"), name.partition("#")[2]
    init_default_scope("mmseg")
    with torch.device("meta"):
        model = MODELS.build(config.model)
    assert build_optim_wrapper(model, config.optim_wrapper) is not None
    head, auxiliary = config.model.decode_head, config.model.auxiliary_head
    if cell == "dpt":
        config.model.backbone = {"type": "SparsePriorViT", **SMALL, **SHARED, "output_cls_token": True}
        head.update(in_channels=[24] * 4, embed_dims=24, post_process_channels=[4, 6, 8, 10])
    else:
        config.model.backbone = {"type": "SparsePriorSwin", **SWIN, **SHARED}
        head.in_channels = 64 if cell == "fcn" else [8, 16, 32, 64]
    if auxiliary:
        auxiliary.in_channels = 32
    for part in filter(None, (head, auxiliary)):
        part.channels, part.norm_cfg = 8, {"type": "BN"}
    torch.manual_seed(0)
    model = MODELS.build(config.model).train()
    losses = losses_of_a_step(model)
    assert losses["decode.loss_ce"] > 1 and ("aux.loss_ce" in losses) == (cell in ("violin", "fcn"))
    grads = {name: value.grad for name, value in model.named_parameters() if value.requires_grad}
    idle = ("backbone.layernorm.", "decode_head.fusion_blocks.0.res_conv_unit1")
    idle += ("backbone.map_norms.",) * (cell != "violin")
    used = {name: value for name, value in grads.items() if not name.startswith(idle)}
    assert all(value is not None and value.isfinite().all() for value in used.values())
    first = "layers.0" if cell == "dpt" else "stages.0.layers.0"
    if cell != "fcn":
        assert grads[f"backbone.{first}.attention.decay_bias.beta"].abs().sum() > 0


@pytest.mark.parametrize("cell", ["setr", "mask2former"])
def test_transformers_build_at_full_size_and_train(cell):
    """As the heads above, with mmsegmentation's own settings of head and optimizer."""
    config = load_config("segmentation", CONFIGS / f"ade20k_heads.py#{cell}")
    init_default_scope("mmseg")
    with torch.device("meta"):
        model = MODELS.build(copy.deepcopy(config.model))  # some heads change what they are built from
    head, auxiliary = config.model.decode_head, config.model.auxiliary_head
    assert head.in_channels == (768 if cell == "setr" else model.backbone.out_channels)
    assert build_optim_wrapper(model, config.optim_wrapper) is not None and config.train_cfg.max_iters == 160000
    if cell == "setr":
        config.model.backbone = {"type": "SparsePriorViT", **SMALL, **SHARED}
        for part in (head, *auxiliary):
            part.update(in_channels=24, channels=8, norm_cfg={"type": "BN"})
    else:
        config.model.backbone = {"type": "SparsePriorSwin", **SWIN, **SHARED}
        head.update(in_channels=[8, 16, 32, 64], num_queries=10)
        head.pixel_decoder.encoder.num_layers, head.transformer_decoder.num_layers = 1, 3
        head.train_cfg.num_points = 64
    torch.manual_seed(0)
    model = MODELS.build(config.model).train()
    model.init_weights()
    assert ("aux_2.loss_ce" if cell == "setr" else "decode.d1.loss_mask") in losses_of_a_step(model)
    grads = {name: value.grad for name, value in model.backbone.named_parameters() if value.requires_grad}
    used = {name: value for name, value in grads.items() if not name.startswith("layernorm.")}
    assert all(value is not None and value.isfinite().all() for value in used.values())
    first = "layers.0" if cell == "setr" else "stages.0.layers.0"
    assert grads[f"{first}.attention.decay_bias.beta"].abs().sum() > 0


@each("example", re.findall(r"```python\n(_base_.*?)```", Path("tasks/segmentation/README.md").read_text(), re.DOTALL))
def test_mmsegmentations_own_files_take_the_backbone(example):
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "own.py").write_text(example)
        config = load_config("segmentation", file)
    init_default_scope("mmseg")
    with torch.device("meta"):
        model = MODELS.build(config.model)
    assert model.backbone.config.prior_name == "violin" and config.train_dataloader.dataset.type == "ADE20KDataset"
    assert build_optim_wrapper(model, config.optim_wrapper) is not None
    assert [HOOKS.build(hook) for hook in config.custom_hooks]


def test_annotations_of_ade20k_are_read_as_mmseg_reads_them(tmp_path):
    stored = np.array([[0, 1, 2, 150, 255]] * 2, dtype=np.uint8)
    Image.fromarray(stored).save(tmp_path / "a.png")
    results = {
        "seg_map_path": str(tmp_path / "a.png"), "ori_shape": (2, 5), "reduce_zero_label": True, "seg_fields": [],
    }  # fmt: skip
    ours = ReadAnnotation(num_classes=150)(copy.deepcopy(results))["gt_seg_map"]
    theirs = LoadAnnotations()({**copy.deepcopy(results), "label_map": None})["gt_seg_map"]
    assert ours.tolist() == theirs.tolist() == 2 * [[255, 0, 1, 149, 255]]


@each(
    "override, message",
    [
        ("test_evaluator.iou_metrics=[mIoU,mFoo]", "mFoo"),
        ("val_evaluator.iou_metrics=[mIoU,mFoo]", "must be of mIoU, mDice, mFscore"),
        ("test_evaluator.iou_metrics=[mDice]", "test_evaluator must measure mIoU, by which runs are compared"),
        ("test_evaluator.format_only=True", "and not have format_only"),
        ("test_evaluator=None", "test_evaluator must be given: every run is tested at its end"),
        ("model.test_cfg.mode=slide", r"mode=slide needs model\.test_cfg\.crop_size and model\.test_cfg\.stride"),
    ],
)
def test_what_cannot_be_tested_ends_a_run_before_it_begins(override, message, data, tmp_path):
    config = config_of(data, tmp_path / "run", override)
    with pytest.raises(ValueError, match=message):
        run(SEGMENTATION, config)
    assert not (tmp_path / "run").exists()


def test_folders_are_read_as_people_have_them(data, tmp_path):
    """Endings in any case, folders, 16-bit images, and labels with a palette; what is left out is counted."""
    litter(shutil.copytree(data, tmp_path / "data"))
    dataset = FolderSegmentation(str(tmp_path / "data"), "training", pipeline=READING)
    assert len(dataset) == 9
    for index in (7, 8):
        assert (dataset[index]["img"] == 200).all() and (dataset[index]["gt_seg_map"] == np.eye(32)).all()
    folder = tmp_path / "data" / "images" / "training"
    line = dataset.passed_over.line()
    assert re.fullmatch(rf"left out: 3 hidden \({folder}/.*\), 1 not \.png \({folder}/notes\.txt\)", line), line


def test_a_missing_or_broken_test_file_ends_a_run_before_it_begins(data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    annotation = tmp_path / "data" / "annotations" / "test" / "1.png"
    _cut(annotation)
    with pytest.raises(OSError, match=r"1\.png"):
        run(SEGMENTATION, config_of(tmp_path / "data", tmp_path / "run"))
    annotation.unlink()
    with pytest.raises(OSError, match=r"1\.png is missing"):
        run(SEGMENTATION, config_of(tmp_path / "data", tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_the_first_metric_of_a_list_that_measures_it_has_the_baseline(data, tmp_path):
    config = config_of(data, tmp_path)
    alone = constant_predictor(config)
    config.test_evaluator = [{"type": "IoUMetric", "iou_metrics": ["mDice"]}, config.test_evaluator]
    assert constant_predictor(config) == alone


def test_classes_that_cannot_be_learned_are_refused(data, tmp_path):
    """Labels are bytes, and 255 is ignored: a label of 300 was read as 44."""
    root = shutil.copytree(data, tmp_path / "data")
    for lines, message in (
        (["one"], "names 1 classes and must name 2 to 254"),
        (map(str, range(255)), "names 255 classes and must name 2 to 254"),
        (["road", "sky", "road"], "names 'road' twice"),
    ):
        (root / "classes.txt").write_text("\n".join(lines))
        with pytest.raises(ValueError, match=message):
            run(SEGMENTATION, config_of(root, tmp_path / "run"))
        with pytest.raises(ValueError, match=message):
            PixelClasses(root, "train")


def test_a_head_with_one_output_is_drawn(finished, data, tmp_path):
    """mmsegmentation gives its classes as floats."""
    model = Mock()
    dataset = QuietRunner.build_dataloader(for_frameworks(config_of(data, tmp_path)).test_dataloader).dataset
    sample = dataset[0]["data_samples"]
    sample.pred_sem_seg = PixelData(data=(sample.gt_sem_seg.data == 1).float())
    model.eval.return_value.test_step = lambda batch: [sample]
    assert draw_predictions({"prediction": model}, dataset, tmp_path / "picture.png").stat().st_size > 5000


def test_data_that_is_repeated_or_joined_trains_and_is_tested(data, tmp_path, capfd):
    """With mmengine's RepeatDataset and ConcatDataset, whose parts have the folders and the names of classes."""
    config = config_of(data, tmp_path / "run", "train_cfg.max_iters=2")
    for part, name in (("train", "RepeatDataset"), ("test", "ConcatDataset")):
        own = config[f"{part}_dataloader"].dataset
        options = {"dataset": own, "times": 3} if part == "train" else {"datasets": [own, copy.deepcopy(own)]}
        config[f"{part}_dataloader"].dataset = {"type": name, **options}
    config.model.decode_head.num_classes = None
    fill_classes(config)
    results = run(SEGMENTATION, config)
    assert "trains on 21 images of 3 classes ['background', 'bright', 'dark'] (training)" in capfd.readouterr().out
    assert results["data"].endswith("trains on 21 images of 3 classes, tests on 8")
    assert len(results["classes"]) == 3
    config.train_dataloader.dataset.dataset.data_root = "/nowhere"
    config.work_dir = str(tmp_path / "other")
    with pytest.raises(OSError, match=r"train_dataloader\.dataset\.data_root=/nowhere is not a folder"):
        run(SEGMENTATION, config)
