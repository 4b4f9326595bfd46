"""Mixup, CutMix and label smoothing against brute force over single pixels and images."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from hf_sparseprior.training import Draw, DrawSampler, Mixing, SoftTargetCollator
from hf_sparseprior.training.mixing import cut_box
from tests.each import each

CLASSES = 5


def samples(draws, height=6, width=10):
    """Image i holds the number i + 1 everywhere, so that a mixed pixel says what it was made of."""
    return [
        {"pixel_values": torch.full((3, height, width), draw.index + 1.0), "labels": draw.index % CLASSES, "draw": draw}
        for draw in draws
    ]


def epoch(number=16, epoch=0, repeats=1):
    sampler = DrawSampler(number, repeats=repeats)
    sampler.set_epoch(epoch)
    return list(sampler)


def collate(draws, mixing, batch_size=16, smoothing=0.0, seed=0):
    return SoftTargetCollator(CLASSES, mixing, smoothing, seed, batch_size)(samples(draws))


def share_of_own_pixels(batch, draws):
    """For each image the share of its own pixels, computed from the mixed values; for mixup and CutMix."""
    own = torch.tensor([draw.index + 1.0 for draw in draws])
    partner = own.view(-1, 2).flip(1).flatten()
    mean = batch["pixel_values"].double().mean((1, 2, 3))
    return (mean - partner) / (own - partner)


@each(
    "mixing, smoothing",
    itertools.product([Mixing(mixup=0.8), Mixing(cutmix=1.0), Mixing(mixup=0.8, cutmix=1.0)], [0.0, 0.1]),
)
def test_a_label_has_the_share_that_the_pixels_have(mixing, smoothing):
    for number in range(20):
        draws = epoch(epoch=number)
        batch = collate(draws, mixing, smoothing=smoothing)
        share = share_of_own_pixels(batch, draws)
        labels = torch.tensor([draw.index % CLASSES for draw in draws])
        own = torch.nn.functional.one_hot(labels, CLASSES).double()
        expected = share[:, None] * own + (1 - share[:, None]) * own.view(-1, 2, CLASSES).flip(1).flatten(0, 1)
        expected = (1 - smoothing) * expected + smoothing / CLASSES
        torch.testing.assert_close(batch["labels"].double(), expected, atol=2e-6, rtol=0)
        torch.testing.assert_close(batch["labels"].sum(1), torch.ones(16))
        assert batch["labels"].dtype == torch.float32
        # One share for the whole batch, and partners exchange what they give.
        assert share.max() - share.min() < 1e-5


def test_cutmix_exchanges_one_box():
    for number in range(50):
        draws = epoch(epoch=number)
        pixels = collate(draws, Mixing(cutmix=1.0))["pixel_values"]
        taken = pixels != torch.tensor([draw.index + 1.0 for draw in draws]).view(-1, 1, 1, 1)
        assert (taken == taken[0]).all()  # the same place in every image
        mask = taken[0, 0]
        rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
        if len(rows):
            assert mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
        partner = torch.tensor([draw.index + 1.0 for draw in draws]).view(-1, 2).flip(1).flatten()
        assert all((image[mask.expand(3, -1, -1)] == value).all() for image, value in zip(pixels, partner, strict=True))


@each("share, size", itertools.product([0.0, 0.25, 0.9999, 1.0], [(224, 224), (6, 10), (1, 1)]))
def test_cutmix_box_is_the_published_one(share, size):
    """CutMix appendix A: centre uniform, sides sqrt(1 - share) of the image's, clipped, share corrected."""
    height, width = size
    for seed in range(200):
        mix = cut_box(share, np.random.default_rng(seed), height, width)
        random = np.random.default_rng(seed)
        row, column = random.integers(height), random.integers(width)
        half = [int(side * np.sqrt(1 - share)) // 2 for side in size]
        top, bottom = max(row - half[0], 0), min(row + half[0], height)
        left, right = max(column - half[1], 0), min(column + half[1], width)
        assert mix.box == (top, bottom, left, right)
        assert mix.share == 1 - (bottom - top) * (right - left) / (height * width)
        assert 0 <= mix.share <= 1


@each("alpha", [0.2, 0.8, 1.0])
def test_shares_of_mixup_follow_beta(alpha):
    mixing = Mixing(mixup=alpha)
    shares = [mixing.draw(np.random.default_rng([0, seed]), 8, 8).share for seed in range(3000)]
    assert stats.kstest(shares, stats.beta(alpha, alpha).cdf).pvalue > 0.01


@each("probability, switch", [(1.0, 0.5), (0.5, 0.5), (0.3, 0.8), (0.0, 0.5), (1.0, 0.0)])
def test_probability_and_switch(probability, switch):
    mixing, number = Mixing(0.8, 1.0, probability, switch), 4000
    mixes = [mixing.draw(np.random.default_rng([1, seed]), 32, 32) for seed in range(number)]
    cut = sum(mix.box is not None for mix in mixes) / number
    mixed_up = sum(mix.box is None and mix.share < 1 for mix in mixes) / number
    assert cut == pytest.approx(probability * switch, abs=0.03)
    assert mixed_up == pytest.approx(probability * (1 - switch), abs=0.03)


def test_the_switch_counts_only_where_both_are_on():
    for mixing, boxes in ((Mixing(mixup=1.0), False), (Mixing(cutmix=1.0), True)):
        assert all((mixing.draw(np.random.default_rng(s), 8, 8).box is not None) == boxes for s in range(50))


@each("mixing, micro, repeats", itertools.product([Mixing(mixup=0.8), Mixing(cutmix=1.0)], [2, 4, 8], [1, 3]))
def test_a_global_batch_is_the_same_however_it_is_split(mixing, micro, repeats):
    draws = epoch(48, repeats=repeats)
    whole = [collate(draws[start : start + 16], mixing) for start in (0, 16, 32)]
    parts = [collate(draws[start : start + micro], mixing) for start in range(0, 48, micro)]
    for key in ("pixel_values", "labels"):
        assert torch.equal(torch.cat([b[key] for b in whole]), torch.cat([b[key] for b in parts])), key
    shares = [share_of_own_pixels(batch, draws[16 * i : 16 * i + 16])[0] for i, batch in enumerate(whole)]
    assert len({round(float(share), 4) for share in shares}) == 3  # each global batch has its own


def test_mixing_differs_by_seed_and_epoch():
    mixing = Mixing(mixup=0.8)
    found = {
        round(float(share_of_own_pixels(collate(epoch(epoch=e), mixing, seed=s), epoch(epoch=e))[0]), 5)
        for s, e in itertools.product((0, 1, 2), (0, 1, 2))
    }
    assert len(found) == 9


@each("number", [1, 3, 7])
def test_in_an_odd_batch_the_last_image_stays_as_it_is(number):
    draws = epoch()[:number]
    batch = collate(draws, Mixing(mixup=0.8), smoothing=0.1)
    assert (batch["pixel_values"][-1] == draws[-1].index + 1).all()
    assert batch["labels"][-1].max() == pytest.approx(0.92)
    torch.testing.assert_close(batch["labels"].sum(1), torch.ones(number))


def test_the_samples_are_left_alone():
    given = samples(epoch())
    before = [sample["pixel_values"].clone() for sample in given]
    SoftTargetCollator(CLASSES, Mixing(0.8, 1.0), 0.1, 0, 16)(given)
    assert all(torch.equal(sample["pixel_values"], value) for sample, value in zip(given, before, strict=True))


def test_without_mixing_and_smoothing_labels_are_class_indices():
    for mixing in (Mixing(), Mixing(mixup=0.8, probability=0.0)):
        batch = SoftTargetCollator(CLASSES, mixing)([{"pixel_values": torch.zeros(3, 2, 2), "labels": 4}])
        assert batch["labels"].tolist() == [4] and batch["labels"].dtype == torch.int64


@each("smoothing", [0.1, 0.5])
def test_smoothed_targets_give_the_loss_of_torch(smoothing):
    labels, logits = torch.tensor([0, 3, 4]), torch.randn(3, CLASSES, dtype=torch.float64)
    targets = SoftTargetCollator(CLASSES, Mixing(), smoothing).targets(labels).double()
    expected = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)
    torch.testing.assert_close(torch.nn.functional.cross_entropy(logits, targets), expected, atol=1e-7, rtol=1e-7)


@each("field", ["mixup", "cutmix", "probability", "switch_probability"])
def test_bad_settings_are_named(field):
    for value in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"{field}={value!r} must be"):
            Mixing(**{field: value})


@each("size", [1, 3, 15, 0])
def test_mixing_wants_an_even_batch(size):
    with pytest.raises(ValueError, match=f"batch_size={size} must be even"):
        SoftTargetCollator(CLASSES, Mixing(mixup=1.0), batch_size=size)
    SoftTargetCollator(CLASSES, Mixing(), batch_size=size)


def test_mixing_wants_draws():
    """Without them every batch would be mixed in the same way."""
    sample = {"pixel_values": torch.zeros(3, 2, 2), "labels": 1}
    with pytest.raises(ValueError, match="mixing needs samples that carry their draw"):
        SoftTargetCollator(CLASSES, Mixing(mixup=1.0))([sample, {**sample, "draw": Draw(0, 0, 0)}])


@each("smoothing", [-0.1, 1.0, float("nan")])
def test_bad_smoothing_is_named(smoothing):
    with pytest.raises(ValueError, match=rf"label_smoothing={smoothing!r} must be in \[0, 1\)"):
        SoftTargetCollator(CLASSES, Mixing(), smoothing)
