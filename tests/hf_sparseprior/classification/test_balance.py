"""Rare classes: each has the same weight in the loss, or comes as often."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hf_sparseprior.classification.config import check_config
from hf_sparseprior.classification.data import class_weights
from hf_sparseprior.classification.task import CLASSIFICATION
from hf_sparseprior.runs import hf_run
from hf_sparseprior.training import DrawSampler, Mixing, SoftTargetCollator
from hf_sparseprior.training.trainer import soft_target_loss

LABELS = np.array([0] * 70 + [1] * 25 + [2] * 5)


def test_an_epoch_has_as_many_of_each_class():
    sampler = DrawSampler(len(LABELS), seed=3, labels=LABELS)
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        draws = list(sampler)
        counts = Counter(LABELS[draw.index] for draw in draws)
        assert len(draws) == len(sampler) == 100 and sorted(counts.values()) == [33, 33, 34]
        assert [draw.position for draw in draws] == list(range(100)) and {draw.epoch for draw in draws} == {epoch}
        for label in range(3):
            own = [draw for draw in draws if LABELS[draw.index] == label]
            times = Counter(draw.index for draw in own)
            assert max(times.values()) - min(times.values()) <= (len(times) > 1)
            for index, number in times.items():  # each time it is augmented anew
                assert sorted(draw.repeat for draw in own if draw.index == index) == list(range(number))
        epochs.append([draw.index for draw in draws])
    assert epochs[0] != epochs[1] and {LABELS[i] for i in epochs[0][:20]} == {0, 1, 2}
    again = DrawSampler(len(LABELS), seed=3, labels=LABELS)
    assert [draw.index for draw in again] == epochs[0]


def test_whole_batches_of_as_many_of_each_class():
    assert len(list(DrawSampler(len(LABELS), multiple_of=8, labels=LABELS))) == 96


def test_a_weighted_loss_is_torchs():
    weights = class_weights(LABELS, 4)
    expected = [100 / (3 * count) for count in (70, 25, 5)]
    torch.testing.assert_close(weights, torch.tensor([*expected, 1.0]))
    labels, logits = torch.tensor([0, 2, 1, 0]), torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    samples = [{"pixel_values": torch.zeros(3, 4, 4), "labels": int(label)} for label in labels]
    for smoothing in (0.0, 0.1):
        batch = SoftTargetCollator(4, Mixing(), smoothing, class_weights=weights)(samples)
        found = soft_target_loss({"logits": logits}, batch["labels"])
        whole = F.cross_entropy(logits, labels, weight=weights, label_smoothing=smoothing, reduction="sum")
        torch.testing.assert_close(found, whole / 4)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"augmentation": {"balance": "weights"}}, "augmentation.balance='weights' must be one of loss, sampling"),
        ({"augmentation": {"balance": "sampling", "repeats": 3}}, "augmentation.repeats=3 cannot be used with"),
        (
            {"augmentation": {"balance": "loss"}, "distillation": {"teacher": "t"}},
            "augmentation.balance=loss weighs the labels' loss alone",
        ),
    ],
)
def test_bad_values_are_named(sections, message):
    with pytest.raises(ValueError, match=message):
        check_config({name: {} for name in CLASSIFICATION.sections} | sections)


def test_a_sampler_refuses_both_kinds_of_repetition():
    with pytest.raises(ValueError, match="repeats=2 cannot be used with samples that are drawn by class"):
        DrawSampler(100, repeats=2, labels=LABELS)


@pytest.mark.slow
@pytest.mark.parametrize("balance", ["loss", "sampling"])
def test_a_rare_class_is_found_more_often(balance, tmp_path):
    """Of digits with a tenth of the eights, recall of the eights grows; what is balanced is said in the report."""
    size = {"image_size": 8, "patch_size": 2, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    found = {}
    for own in (None, balance):
        config = {name: {} for name in CLASSIFICATION.sections} | {
            "data": {"source": "imagefolder", "path": str(write_rare(tmp_path / "data"))},
            "augmentation": {"balance": own},
            "model": {**size, "intermediate_size": 48, "prior": "fibottention"},
            "trainer": {
                **{"output_dir": str(tmp_path / str(own)), "max_steps": 60, "per_device_train_batch_size": 32},
                **{"learning_rate": 3e-3, "seed": 1, "use_cpu": True, "eval_strategy": "no", "save_strategy": "no"},
                **{"load_best_model_at_end": False, "disable_tqdm": True},
            },
        }
        found[own] = hf_run.run(CLASSIFICATION, config)
        assert {"report.md", "confusion.png", "curves.png"} <= {path.name for path in (tmp_path / str(own)).iterdir()}
    assert found[None]["classes"] == ["eight", "other"]
    assert found[balance]["confusion"][0][0] > found[None]["confusion"][0][0]
    key = "test_balanced_accuracy"
    assert found[balance]["metrics"][key] > found[None]["metrics"][key]


def write_rare(folder):
    """Folders of digits: 0 to 7 and 9 as "other", eights as "eight", of which training has few."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    for label, name, train in ((True, "eight", 12), (False, "other", 300)):
        places = np.flatnonzero((digits.target == 8) == label)
        for split, own in (("train", places[:train]), ("validation", places[-60:-40]), ("test", places[-40:])):
            for place in own:
                (folder / split / name).mkdir(parents=True, exist_ok=True)
                pixels = (16 * digits.images[place]).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).convert("RGB").save(folder / split / name / f"{place}.png")
    return folder


def test_streams_cannot_be_balanced():
    from hf_sparseprior.classification.data import _stream_inputs
    from hf_sparseprior.images.augmentation import AugmentationConfig

    with pytest.raises(ValueError, match=r"augmentation\.balance=loss needs images in any order, not a stream"):
        _stream_inputs(None, None, AugmentationConfig(balance="loss"), None, SimpleNamespace(), None)
