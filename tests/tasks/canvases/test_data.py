"""Canvases: the numbers they are drawn from, labels by brute force, what lies on what, who sees which objects."""

import numpy as np
import pytest
import torch

from hf_sparseprior.images.sources.images import ImageData, array_images
from tasks.canvases import data
from tasks.canvases.data import LABELS, PIECE, Canvases, Pool, as_input, below, draws, make_pool, read_pools, split_mix
from tests.each import each

BITS = 2**64
FRAME = 50
GOLDEN = [6, 7, 8, 9, 5, 2, 6, 6], 904740  # labels, sum of all pixels


TEN = np.zeros((10, 28, 28), np.uint8), np.arange(10)


def value_of(label):
    return 100 + 10 * label


def flat_pool(object_px=14, per_class=3):
    """Objects of one grey level by class, from 100 to 190, in frames of 50; all of that is brighter than noise."""
    labels = torch.arange(10).repeat_interleave(per_class)
    pixels = value_of(labels).to(torch.uint8)[:, None, None].repeat(1, object_px, object_px)
    pixels[:, [0, -1]] = pixels[:, :, [0, -1]] = FRAME
    return Pool(pixels, labels, torch.arange(10) * per_class, torch.full((10,), per_class))


def blocks(canvas, object_px):
    """{class: how many framed squares of `object_px` are of its grey level}, by trying every place."""
    counted = {}
    for row in range(canvas.shape[0] - object_px + 1):
        for column in range(canvas.shape[1] - object_px + 1):
            square = canvas[row : row + object_px, column : column + object_px]
            inside, level = square[1:-1, 1:-1], int(square[1, 1])
            framed = (square == FRAME).sum() == 4 * (object_px - 1)
            if level >= value_of(0) and framed and (inside == level).all():
                label = (level - value_of(0)) // 10
                counted[label] = counted.get(label, 0) + 1
    return counted


def plain_split_mix(state):
    """The published code of SplitMix64, with Python's integers."""
    z = (state + 0x9E3779B97F4A7C15) % BITS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % BITS
    return z ^ (z >> 31)


def test_numbers_are_those_of_split_mix():
    states = [0, 1, -1, 12345, 2**62, -(2**63), 2**63 - 1]
    numbers = [int(number) % BITS for number in split_mix(torch.tensor(states))]
    assert numbers == [plain_split_mix(state % BITS) for state in states]
    assert numbers[0] == 0xE220A8397B1DCDAF  # the first of Vigna's reference for seed 0


def test_draws_depend_on_seed_image_purpose_and_place_alone():
    images = torch.arange(5)
    numbers = draws(3, images, 1, 6)
    assert torch.equal(draws(3, images[2:4], 1, 4), numbers[2:4, :4])
    others = [draws(4, images, 1, 6), draws(3, images + 5, 1, 6), draws(3, images, 2, 6)]
    assert len(torch.stack([numbers, *others]).unique()) == 4 * 30


def test_draws_are_spread_evenly():
    counts = torch.bincount(below(draws(0, torch.arange(1000), 0, 20), 8).flatten(), minlength=8)
    assert (counts / 2500 - 1).abs().max() < 0.06


@each("label", LABELS)
def test_images_are_the_same_in_every_batch_and_other_in_every_seed(label):
    canvases = Canvases(flat_pool(), 64, label, 0)
    images, labels = canvases.batch(0, 6)
    for first, count in ((0, 1), (2, 3), (5, 1)):
        again, same = canvases.batch(first, count)
        assert torch.equal(again, images[first : first + count]) and torch.equal(same, labels[first : first + count])
    assert not torch.equal(Canvases(flat_pool(), 64, label, 1).batch(0, 6)[0], images)


def test_images_of_a_seed_stay_what_they_are():
    """Or records of before and after would be of other images."""
    images, labels = Canvases(flat_pool(), 64, "class", 7).batch(0, 8)
    assert (labels.tolist(), int(images.long().sum())) == GOLDEN


@each("label, side", [(label, side) for label in LABELS for side in (64, 100)])
def test_labels_are_what_is_on_the_canvas(label, side):
    images, labels = Canvases(flat_pool(), side, label, 5).batch(0, 12)
    for canvas, answer in zip(images[:, 0].numpy(), labels.tolist(), strict=True):
        counted = blocks(canvas, 14)
        if label == "class":
            assert counted == {answer: 1}
        elif label == "count":
            assert sum(counted.values()) == answer + 1
        else:
            assert sorted(counted.values()) == [1, 2, 2, 3] and counted[answer] == 3


@each("label", LABELS)
def test_every_class_is_asked_for(label):
    labels = Canvases(flat_pool(), 64, label, 0).batch(0, 400)[1]
    assert sorted(set(labels.tolist())) == list(range(LABELS[label][0]))


@each("label, side, object_px", [("class", 96, 28), ("count", 128, 14), ("repeated", 128, 7), ("class", 28, 28)])
def test_objects_and_pieces_do_not_touch(label, side, object_px):
    canvases = Canvases(flat_pool(object_px), side, label, 1)
    images = torch.arange(20)
    _, present, _ = canvases._contents(images)
    corners = canvases._object_corners(images)
    pieces, _, shown = canvases._pieces(images, corners, present)
    for image in range(20):
        covered = np.zeros((side, side), int)
        for places, which, size in ((corners, present, object_px), (pieces, shown, PIECE)):
            for (row, column), visible in zip(places[image].tolist(), which[image].tolist(), strict=True):
                if visible:
                    assert 0 <= row <= side - size and 0 <= column <= side - size
                    covered[row : row + size, column : column + size] += 1
        assert covered.max() == 1
    assert shown.any() or side < 40


def test_objects_are_everywhere_and_in_no_step_with_patches():
    canvases = Canvases(flat_pool(28), 128, "class", 0)
    corners = canvases._object_corners(torch.arange(2000))[:, 0]
    assert corners.amin(0).tolist() == [0, 0] and corners.amax(0).tolist() == [100, 100]
    for patch in (4, 8, 16):
        shares = torch.bincount(corners[:, 0] % patch, minlength=patch) / 2000 * patch
        assert shares.min() > 0.8 and shares.max() < 1.25


def fake_splits(monkeypatch):
    """Training objects with the grey levels 60, the last 5 of them 70, test objects 200."""
    train = np.full((30, 28, 28), 60, np.uint8)
    train[-10:] = 70
    test = np.full((20, 28, 28), 200, np.uint8)
    splits = {
        "train": array_images(train, np.arange(30) % 10, "train"),
        "test": array_images(test, np.arange(20) % 10, "test"),
    }
    monkeypatch.setattr(data, "read_fashion_mnist", lambda config: ImageData(splits, list("0123456789"), "fake"))
    monkeypatch.setattr(data, "SELECTION_OBJECTS", 10)


@each("label", LABELS)
def test_no_split_sees_an_object_or_a_piece_of_another(label, monkeypatch):
    fake_splits(monkeypatch)
    pools = read_pools(14)
    for split, level in (("train", 60), ("selection", 70), ("test", 200)):
        images, _ = Canvases(pools[split], 96, label, 0).batch(0, 30)
        assert images[images >= data.NOISE].unique().tolist() == [level]


def test_photographs_are_halved_between_training_and_test(monkeypatch):
    fake_splits(monkeypatch)
    photographs = np.zeros((2, 40, 60), np.uint8)
    photographs[:, :, :30], photographs[:, :, 30:] = 10, 20
    monkeypatch.setattr(data, "read_photographs", lambda: photographs)
    pools = read_pools(14, "photographs")
    for split, level in (("train", 10), ("selection", 20), ("test", 20)):
        images, _ = Canvases(pools[split], 128, "class", 0).batch(0, 4)
        assert images[images < 60].unique().tolist() == [level]


def test_a_photograph_is_mirrored_at_its_ends():
    pool = flat_pool()
    photograph = np.arange(35, dtype=np.uint8).reshape(1, 5, 7)
    canvases = Canvases(
        make_pool(np.zeros((10, 28, 28), np.uint8), np.arange(10), 14, "cpu", photograph), 30, "class", 0
    )
    image = canvases.batch(0, 1)[0][0, 0].numpy()
    mirrored = np.pad(photograph[0], ((0, 60), (0, 60)), mode="symmetric")
    places = [(r, c) for r in range(10) for c in range(14)]
    assert any(np.array_equal(mirrored[r : r + 30, c : c + 30], image) for r, c in places)
    assert pool.photographs is None


def test_the_two_photographs_are_dark():
    photographs = data.read_photographs()
    assert photographs.shape == (2, 427, 640) and photographs.max() <= 85 and photographs.std() > 5


def test_smaller_objects_are_means_of_the_stored_ones():
    pixels = np.random.default_rng(0).integers(0, 256, (10, 28, 28)).astype(np.uint8)
    pool = make_pool(pixels, np.arange(10)[::-1].copy(), 14)
    assert pool.labels.tolist() == list(range(10)) and pool.pixels.shape == (10, 14, 14)
    assert torch.equal(make_pool(pixels, np.arange(10), 28).pixels, torch.from_numpy(pixels))
    whole, small = pixels[::-1].astype(float), pool.pixels.double().numpy()
    assert np.abs(whole.mean((1, 2)) - small.mean((1, 2))).max() < 6


def test_input_is_normalised_and_made_smaller_by_means():
    images = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4)
    expected = torch.tensor([[2.5, 4.5], [10.5, 12.5]])
    assert torch.allclose(as_input(images, 2)[0, 0], (expected / 255 - 0.2) / 0.25)
    assert torch.allclose(as_input(images)[0, 0], (images[0, 0] / 255 - 0.2) / 0.25)


@each(
    "wrong, message",
    [
        (lambda: Canvases(flat_pool(28), 64, "count", 0), "side=64 has room for 4 objects of 28 pixels, and label"),
        (lambda: Canvases(flat_pool(), 10, "class", 0), "side=10 has room for 0 objects of 14 pixels"),
        (lambda: Canvases(flat_pool(), 64, "colour", 0), "label='colour' must be one of class, count, repeated"),
        (lambda: make_pool(*TEN, 6), "object_px=6 must be"),
        (lambda: make_pool(*TEN, 29), "object_px=29 must be at most 28"),
        (lambda: make_pool(np.zeros((2, 28, 28), np.uint8), np.array([0, 1]), 14), "each needs one"),
        (lambda: read_pools(14, "sky"), "background='sky' must be one of noise, photographs"),
    ],
)
def test_bad_settings_are_refused_in_one_line(wrong, message):
    with pytest.raises(ValueError) as error:
        wrong()
    assert message in str(error.value) and "\n" not in str(error.value)


def test_missing_data_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr("hf_sparseprior.images.sources.arrays.FASHION_MNIST", str(tmp_path / "none"))
    with pytest.raises(OSError, match="apt-get install dataset-fashion-mnist"):
        read_pools(28)
