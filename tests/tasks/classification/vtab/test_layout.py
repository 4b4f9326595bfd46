"""The published layout, read and refused."""

import itertools
import re

import numpy as np
import pytest
import torch
from transformers.initialization import guard_torch_init_functions

from hf_sparseprior.classification.config import check_config
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.data import load_data
from hf_sparseprior.images.model import build_model
from hf_sparseprior.images.sources import READERS
from hf_sparseprior.images.vtab_tasks import LISTS, TASKS
from tasks.classification.train import run
from tests.each import each
from tests.tasks.classification.vtab.make_fixture import write_task, write_vtab

PARTS = {
    "selection": {"train": "train800", "validation": "val200", "test": "val200"},
    "final": {"train": "train800val200", "validation": "val200", "test": "test"},
}


def config(root, task="eurosat", stage="selection"):
    return DataConfig(source="vtab", path=str(root), task=task, stage=stage)


@each("task, stage", itertools.product(["eurosat", "kitti"], PARTS))
def test_each_split_is_the_list_of_the_stage(data, task, stage):
    read = load_data(config(data, task, stage))
    assert read.classes == [str(label) for label in range(TASKS[task].classes)]
    for split, name in PARTS[stage].items():
        lines = [line.split() for line in (data / task / f"{name}.txt").read_text().splitlines()]
        images = read.splits[split]
        assert [images.name(n) for n in range(len(images))] == [str(data / task / image) for image, _ in lines]
        assert images.labels.tolist() == [int(label) for _, label in lines] and images.labels.dtype == np.int64
        assert images.read(0).size == (8, 8) and images.read(0).mode == "RGB"


def test_the_script_writes_all_tasks(tmp_path):
    root = write_vtab(tmp_path, list(TASKS), {"train800": 2, "val200": 1, "test": 1})
    assert sorted(folder.name for folder in root.iterdir()) == sorted(TASKS)
    for name in TASKS:
        assert {path.stem for path in (root / name).glob("*.txt")} == set(LISTS)
        # The head has every class, also where the lists have but some.
        assert len(READERS["vtab"](config(root, name)).classes) == TASKS[name].classes


@pytest.fixture
def eurosat(tmp_path):
    """The folder of one task in `tmp_path`."""
    return write_task(tmp_path, "eurosat")


BAD_LINES = (
    ("3.jpg 10\n", "train800.txt, line 4: label 10 must be below the 10 classes of eurosat"),
    ("3.jpg -1\n", "line 4: 'images/train800/000003.jpg -1' is not an image and a label"),
    ("3.jpg 03\n", "line 4: 'images/train800/000003.jpg 03' is not an image and a label"),
    ("3.jpg\n", "line 4: 'images/train800/000003.jpg' is not an image and a label"),
    ("3.jpg three\n", "line 4: .* is not an image and a label"),
    ("3.jpg ³\n", "line 4: .* is not an image and a label"),
    ("3.jpg 3\n\n", r"line 5: '' is not an image and a label \(1 of 33 lines are bad\)"),
    ("none.jpg 3\n", r"line 4: .*images/train800/00000none.jpg does not exist \(1 of 32"),
)


@each("line, message", BAD_LINES)
def test_a_bad_line_is_named_with_its_list_and_number(eurosat, tmp_path, line, message):
    path = eurosat / "train800.txt"
    content = path.read_text()
    assert "3.jpg 3\n" in content
    path.write_text(content.replace("3.jpg 3\n", line, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        READERS["vtab"](config(tmp_path))
    path.write_text(content, encoding="utf-8")


def test_an_image_that_is_gone_is_named(eurosat, tmp_path):
    (eurosat / "images" / "test" / "000060.jpg").unlink()
    READERS["vtab"](config(tmp_path))  # not of this stage
    with pytest.raises(ValueError, match=r"test.txt, line 9: .*000060.jpg does not exist \(1 of 30 lines are bad\)"):
        READERS["vtab"](config(tmp_path, stage="final"))


def test_a_list_that_is_missing_empty_or_no_text_is_named(eurosat, tmp_path):
    for name in LISTS:
        path = eurosat / f"{name}.txt"
        path.rename(tmp_path / "kept")
        with pytest.raises(OSError, match=rf"eurosat has no list {name}.txt"):
            READERS["vtab"](config(tmp_path))
        (tmp_path / "kept").rename(path)
    (eurosat / "val200.txt").write_text("")
    with pytest.raises(ValueError, match=r"val200.txt lists no images"):
        READERS["vtab"](config(tmp_path))
    (eurosat / "val200.txt").write_bytes(b"\xff\xd8")
    with pytest.raises(ValueError, match=r"val200.txt is not text in UTF-8"):
        READERS["vtab"](config(tmp_path))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(OSError, match=rf"data.path={re.escape(str(tmp_path))} has no folder eurosat"):
        READERS["vtab"](config(tmp_path))
    with pytest.raises(OSError, match=r"data.path=.*none is not a folder"):
        READERS["vtab"](config(tmp_path / "none"))


@each(
    "options, message",
    [
        ({"task": "eurosta", "stage": "final"}, r"data.task='eurosta' must be one of cifar, .*, smallnorb_ele$"),
        ({"task": "eurosat", "stage": "test"}, r"data.stage='test' must be one of selection, final$"),
        ({"source": "csv", "task": "eurosat"}, r"data.task='eurosat' is for data.source vtab, not csv"),
        ({"stage": "final"}, r"data.source='vtab' needs data.task, one of cifar"),
        ({"task": "eurosat"}, r"data.source='vtab' needs data.stage, one of selection"),
    ],
)
def test_bad_values_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        READERS["vtab"](DataConfig(**{"source": "vtab", "path": str(tmp_path), **options}))


# ---- the new classifier ---------------------------------------------------------------------------------------------

MODEL = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "image_size": 8,
         "patch_size": 4}  # fmt: skip


def test_the_classifier_starts_anew_with_another_deviation(tmp_path):
    classes = [str(label) for label in range(397)]
    saved = build_model(dict(MODEL), classes)
    torch.nn.init.ones_(saved.classifier.bias)
    saved.save_pretrained(tmp_path)
    model = build_model({"pretrained": str(tmp_path), "classifier_init_std": 2e-5}, classes)
    weight = model.classifier.weight
    assert weight.shape == (397, 64) and model.classifier.bias.eq(0).all() and weight.requires_grad
    assert weight.std().item() == pytest.approx(2e-5, rel=0.03) and weight.mean().abs() < 1e-6
    for (name, value), (_, other) in zip(model.named_parameters(), saved.named_parameters(), strict=True):
        assert torch.equal(value, other) == (not name.startswith("classifier."))
    kept = build_model({"pretrained": str(tmp_path)}, classes)
    assert torch.equal(kept.classifier.weight, saved.classifier.weight)
    with guard_torch_init_functions():  # as two threads that load models can leave torch.nn.init
        guarded = build_model({"pretrained": str(tmp_path), "classifier_init_std": 0.0}, classes)
    assert not guarded.classifier.weight.any() and not guarded.classifier.bias.any()


@pytest.mark.parametrize("options", [{}, {"classifier_init_std": 0.1}])
def test_every_prior_starts_from_the_same_two_classifiers(tmp_path, options):
    build_model({**MODEL, "use_distillation_token": True}, ["a", "b", "c"]).save_pretrained(tmp_path)

    def weights(prior):
        torch.manual_seed(1)
        model = build_model({"pretrained": str(tmp_path), "prior": prior, **options}, ["a", "b"])
        return model.classifier.weight, model.distillation_classifier.weight

    first = weights("dense")
    for prior in ("violin", {"decay": {"name": "violin", "init": "finetune"}}):
        assert all(map(torch.equal, first, weights(prior)))
    assert not torch.equal(*first)


def test_a_classifier_may_start_at_zero():
    weight = build_model({**MODEL, "classifier_init_std": 0}, ["a", "b"]).classifier.weight
    assert weight.eq(0).all() and weight.requires_grad


@each("std", [-1, "small", True, float("nan")])
def test_a_bad_deviation_is_refused(std):
    with pytest.raises(ValueError, match=r"model.classifier_init_std=.* must be a number of 0 or more"):
        check_config({"model": {**MODEL, "classifier_init_std": std}})


def test_the_final_stage_chooses_no_epoch(data, tmp_path):
    settings = {"source": "vtab", "path": str(data), "task": "eurosat", "stage": "final"}
    trainer = {"output_dir": str(tmp_path / "run"), "use_cpu": True}
    with pytest.raises(ValueError, match=r"data.stage=final .*; set trainer.load_best_model_at_end=false"):
        run({"data": settings, "model": dict(MODEL), "trainer": trainer})
    assert not (tmp_path / "run").exists()
