import itertools
import random

import numpy as np
import pytest
import torch
from kornia.augmentation import RandomCrop, RandomResizedCrop
from PIL import Image
from scipy import stats
from sklearn.datasets import load_sample_image
from torch.utils.data import DataLoader

from hf_sparseprior import SparsePriorViTConfig
from hf_sparseprior.classification.data import make_collator
from hf_sparseprior.images.augmentation import Augmentation, AugmentationConfig, placed_box, resized_box, to_tensor
from hf_sparseprior.images.data import ImageDataset, Images, Preparation
from hf_sparseprior.images.processor import make_processor
from hf_sparseprior.training import Draw, DrawSampler, SparsePriorTrainingArguments
from tests.each import each

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
EVERYTHING = AugmentationConfig(
    crop="resized", flip=0.5, randaugment="rand-m9-mstd0.5-inc1", color_jitter=0.4, force_color_jitter=True, erasing=0.5
)


@pytest.fixture(scope="module")
def photo():
    return Image.fromarray(load_sample_image("china.jpg")).resize((60, 40))


def augmentation(size=(16, 16), mean=(0.0,) * 3, std=(1.0,) * 3, num_channels=3, **settings):
    """Without normalisation, so that pixel values are those of the image."""
    return Augmentation(AugmentationConfig(**settings), size, mean, std, num_channels)


def coordinates(width, height):
    """An image whose pixels hold their own column and row."""
    row, column = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([column, row, np.full_like(row, 255)], -1).astype(np.uint8))


def boxes(augment, image, number):
    """(left, top, right, bottom) of each crop, seen where the image is cut."""
    found, crop = [], image.crop
    image.crop = lambda box: (found.append(box), crop(box))[1]
    for seed in range(number):
        augment(image, np.random.default_rng(seed))
    del image.crop
    assert len(found) == number  # the cut is made by crop, not by resize
    return np.array(found)


# ---- what decides -------------------------------------------------------------------------------------------------


def dataset(number=12, config=EVERYTHING, cache=None):
    values = np.random.default_rng(0)
    pictures = [Image.fromarray(values.integers(0, 256, (20 + i, 30, 3), dtype=np.uint8)) for i in range(number)]
    images = Images(lambda index: pictures[index], np.arange(number) % 3)
    augment = Augmentation(config, (16, 16), MEAN, STD)
    return ImageDataset(images, Preparation(None, augmentation=augment, seed=7), cache)


def test_a_sample_follows_from_seed_epoch_index_and_repeat_whatever_came_before():
    data = dataset()
    draws = [Draw(index, epoch, position=0, repeat=repeat) for index in (0, 5) for epoch in (0, 1) for repeat in (0, 1)]
    forth = {draw: data[draw]["pixel_values"] for draw in draws}
    torch.manual_seed(5)
    back = {draw: dataset()[draw]["pixel_values"] for draw in reversed(draws)}
    assert all(torch.equal(forth[draw], back[draw]) for draw in draws)
    assert len({values.numpy().tobytes() for values in forth.values()}) == len(draws)
    other_place = Draw(0, 0, position=11)
    assert torch.equal(data[other_place]["pixel_values"], forth[Draw(0, 0, 0)])
    data.prepare.seed = 8
    assert not torch.equal(data[draws[0]]["pixel_values"], forth[draws[0]])


def test_workers_change_nothing():
    def epoch(number):
        sampler = DrawSampler(12, repeats=2)
        loader = DataLoader(dataset(), 3, sampler=sampler, num_workers=number, collate_fn=lambda samples: samples)
        return [sample for batch in loader for sample in batch]

    for one, other in zip(epoch(0), epoch(2), strict=True):
        assert one["draw"] == other["draw"] and torch.equal(one["pixel_values"], other["pixel_values"])


def test_the_cache_changes_nothing():
    for draw in DrawSampler(12):
        assert torch.equal(dataset(cache=True)[draw]["pixel_values"], dataset(cache=False)[draw]["pixel_values"])


def test_global_generators_are_left_alone(photo, monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)  # accelerators' too
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    first = Augmentation(EVERYTHING, (16, 16), MEAN, STD)(photo, np.random.default_rng(0))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1]) and random.getstate() == before[2]
    assert not seeded
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    assert torch.equal(first, Augmentation(EVERYTHING, (16, 16), MEAN, STD)(photo, np.random.default_rng(0)))


def test_the_image_is_left_alone(photo):
    before = np.array(photo)
    for seed in range(10):
        Augmentation(EVERYTHING, (16, 16), MEAN, STD)(photo, np.random.default_rng(seed))
    np.testing.assert_array_equal(before, photo)


def test_augmented_data_wants_draws():
    with pytest.raises(TypeError, match="indexed by Draw"):
        dataset()[0]


# ---- crops ----------------------------------------------------------------------------------------------------------


def test_resized_crops_have_the_wanted_area_and_ratio():
    """On a large image few draws are rejected: area uniform, log ratio uniform, place uniform."""
    image = Image.new("RGB", (600, 600))
    found = boxes(augmentation(crop="resized", scale=(0.1, 0.5), ratio=(0.67, 1.5)), image, 500)
    width, height = found[:, 2] - found[:, 0], found[:, 3] - found[:, 1]
    assert found.min() >= 0 and found.max() <= 600
    area, ratio = width * height / 600**2, width / height
    assert area.min() > 0.098 and area.max() < 0.502 and ratio.min() > 0.66 and ratio.max() < 1.52
    assert stats.kstest(area, stats.uniform(0.1, 0.4).cdf).pvalue > 0.01
    log_ratio = stats.uniform(np.log(0.67), np.log(1.5 / 0.67))
    assert stats.kstest(np.log(ratio), log_ratio.cdf).pvalue > 0.01
    assert stats.kstest(found[:, 0] / (600 - width), stats.uniform.cdf).pvalue > 0.01
    assert stats.kstest(found[:, 1] / (600 - height), stats.uniform.cdf).pvalue > 0.01


@each(
    "size, scale, ratio",
    [
        ((8, 8), (0.08, 1.0), (0.75, 4 / 3)),
        ((60, 40), (0.6, 1.0), (0.5, 0.9)),
        ((500, 20), (0.08, 1.0), (0.75, 4 / 3)),
        ((9, 300), (0.6, 1.0), (0.5, 0.9)),
    ],
)
def test_boxes_are_those_that_kornia_draws(size, scale, ratio):
    shape = torch.Size((1, 3, size[1], size[0]))
    resized = RandomResizedCrop((16, 16), scale, ratio)
    random_crop = RandomCrop((7, 5))
    for seed in range(40):
        for theirs, own in (
            (resized, lambda: resized_box(size, scale, ratio)),
            (random_crop, lambda: placed_box(size, (5, 7))),
        ):
            torch.manual_seed(seed)
            corners = theirs.forward_parameters(shape)["src"][0]
            expected = (*corners[0].tolist(), *(corners[2] + 1).tolist())
            state = torch.get_rng_state()
            torch.manual_seed(seed)
            assert own() == expected
            assert torch.equal(torch.get_rng_state(), state)  # what follows is drawn alike


def test_a_resized_crop_is_cut_and_then_resized_by_pillow(photo):
    augment = augmentation((24, 16), crop="resized")
    for seed, box in enumerate(boxes(augment, photo, 20).tolist()):
        expected = photo.crop(box).resize((16, 24), Image.Resampling.BICUBIC)
        assert torch.equal(augment(photo, np.random.default_rng(seed)), to_tensor(expected))


def test_full_scale_and_ratio_one_keep_the_whole_image(photo):
    square = photo.resize((32, 32))
    augment = augmentation((32, 32), crop="resized", scale=(1.0, 1.0), ratio=(1.0, 1.0))
    assert torch.equal(augment(square, np.random.default_rng(0)), to_tensor(square))


@each(
    "crop, size, num_channels",
    itertools.product(["none", "resized", "random"], [(1, 1), (1, 50), (50, 1), (3, 2), (15, 17), (200, 3)], [1, 3]),
)
def test_images_of_any_size_become_the_models(crop, size, num_channels):
    config = AugmentationConfig(crop=crop, flip=0.5, randaugment="rand-m9", erasing=1.0, padding=2)
    augment = Augmentation(config, (16, 12), (0.5,) * num_channels, (0.5,) * num_channels, num_channels)
    image = Image.new("RGB", size, (250, 5, 100))
    for seed in range(5):
        pixels = augment(image, np.random.default_rng(seed))
        assert pixels.shape == (num_channels, 16, 12) and pixels.dtype == torch.float32 and pixels.isfinite().all()


@pytest.mark.parametrize("padding", [0, 4])
def test_random_crops_are_all_windows_of_the_padded_image(padding):
    image, augment = coordinates(10, 12), augmentation((8, 8), crop="random", padding=padding)
    padded = np.zeros((12 + 2 * padding, 10 + 2 * padding, 3))
    padded[padding : padding + 12, padding : padding + 10] = image
    windows = {
        (padded[top : top + 8, left : left + 8] / 255).astype(np.float32).tobytes()
        for top in range(12 + 2 * padding - 7)
        for left in range(10 + 2 * padding - 7)
    }
    crops = [augment(image, np.random.default_rng(seed)) for seed in range(1500)]
    found = {crop.permute(1, 2, 0).contiguous().numpy().tobytes() for crop in crops}
    assert found == windows  # every window comes, and nothing else


def test_smaller_images_are_padded_with_black():
    pixels = augmentation((8, 8), crop="random")(Image.new("RGB", (3, 3), (255,) * 3), np.random.default_rng(0))
    assert sorted(pixels.unique().tolist()) == [0, 1] and pixels.sum() == 27


# ---- the rest ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_flips(photo, probability):
    augment = augmentation((40, 60), flip=probability)
    plain, flipped, number = to_tensor(photo), to_tensor(photo).flip(2), 400
    count = 0
    for seed in range(number):
        pixels = augment(photo, np.random.default_rng(seed))
        count += torch.equal(pixels, flipped)
        assert torch.equal(pixels, flipped) or torch.equal(pixels, plain)
    assert count / number == pytest.approx(probability, abs=0.08)


@pytest.mark.parametrize("num_channels", [1, 3])
def test_the_whole_image_is_prepared_as_for_evaluation(photo, num_channels):
    config = SparsePriorViTConfig(
        image_size=16, patch_size=4, num_channels=num_channels, image_mean=list(MEAN[:num_channels]),
        image_std=list(STD[:num_channels]), hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
    )  # fmt: skip
    images = Images(lambda index: photo, np.zeros(1))
    expected = ImageDataset(images, Preparation(make_processor(config, None), num_channels))[0]["pixel_values"]
    augment = augmentation(mean=config.image_mean, std=config.image_std, num_channels=num_channels, flip=1e-9)
    pixels = augment(photo, np.random.default_rng(0))
    # Grey: Pillow rounds before resizing, this after; a step of 1/255 is 0.017 of a standard deviation.
    tolerance = 1e-5 if num_channels == 3 else 0.03
    torch.testing.assert_close(pixels, expected, atol=tolerance, rtol=0)


def jittered(photo, strength, number=200):
    augment = augmentation((40, 60), color_jitter=strength)
    return [augment(photo, np.random.default_rng(seed)) for seed in range(number)]


def test_colour_jitter_stays_in_range_and_grows_with_its_strength(photo):
    plain = to_tensor(photo)
    spread = []
    for strength in (0.1, 0.4):
        results = jittered(photo, strength)
        assert all(pixels.min() >= 0 and pixels.max() <= 1 for pixels in results)
        spread.append(np.std([float(pixels.mean()) for pixels in results]) / float(plain.mean()))
    # Brightness alone, uniform in 1 -+ s, spreads the mean by s / sqrt(3); clipping takes some of it.
    assert spread[0] == pytest.approx(0.1 / 3**0.5, rel=0.25) and 2 < spread[1] / spread[0] < 4.5


def test_colour_jitter_of_a_grey_image_keeps_it_grey():
    pixels = jittered(Image.new("RGB", (60, 40), (90, 90, 90)), 0.4, 20)
    assert all((p - p[:1]).abs().max() < 1e-6 for p in pixels)


def test_beside_randaugment_colour_jitter_has_to_be_forced(photo):
    for force in (False, True):
        augment = augmentation(randaugment="rand-m9-p0", color_jitter=0.4, force_color_jitter=force)
        changed = not torch.equal(
            augment(photo, np.random.default_rng(0)), augmentation()(photo, np.random.default_rng(0))
        )
        assert changed == force


@pytest.mark.parametrize("mode", ["pixel", "constant"])
def test_erasing_replaces_one_rectangle_of_the_published_size(mode):
    image = Image.new("RGB", (64, 64), (255, 255, 255))
    augment = augmentation((64, 64), mean=MEAN, std=STD, erasing=1.0, erasing_mode=mode)
    untouched = ((1 - torch.tensor(MEAN)) / torch.tensor(STD)).view(3, 1, 1)
    areas, values = [], []
    for seed in range(400):
        pixels = augment(image, np.random.default_rng(seed))
        erased = (pixels != untouched).any(0)
        rows, columns = erased.any(1).nonzero().flatten(), erased.any(0).nonzero().flatten()
        top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
        assert erased[top:bottom, left:right].all()
        ratio = float(bottom - top) / float(right - left)
        assert 0.25 < ratio < 4
        areas.append(float((bottom - top) * (right - left)) / 64**2)
        values.append(pixels[:, top:bottom, left:right].flatten())
    assert stats.kstest(areas, stats.uniform(0.02, 1 / 3 - 0.02).cdf).statistic < 0.1  # some are cut to the image
    values = torch.cat(values)
    expected = (0.0, 0.0) if mode == "constant" else (0.0, 1.0)
    assert (float(values.mean()), float(values.std())) == pytest.approx(expected, abs=0.01)


def test_erasing_has_its_probability(photo):
    augment, plain = augmentation(erasing=0.25), augmentation()(photo, np.random.default_rng(0))
    changed = sum(not torch.equal(augment(photo, np.random.default_rng(seed)), plain) for seed in range(600))
    assert changed / 600 == pytest.approx(0.25, abs=0.06)


def test_grey_models_get_the_weighted_mean_of_the_colours(photo):
    pixels = augmentation((40, 60), mean=(0.0,), std=(1.0,), num_channels=1)(photo, np.random.default_rng(0))
    expected = np.asarray(photo.convert("L")) / 255
    np.testing.assert_allclose(pixels[0].numpy(), expected, atol=1 / 255)


def test_geometric_operations_uncover_the_mean_colour(photo):
    augment = augmentation((40, 60), mean=MEAN, std=STD, randaugment="rand-m9-p0")
    assert augment.fill == (124, 116, 104)
    assert augmentation(mean=(0.5,), std=(0.5,), num_channels=1).fill == (128, 128, 128)


# ---- settings -------------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
BAD = {
    "crop": ["center", None, 3],
    "scale": [(0.0, 1.0), (0.5, 1.5), (0.9, 0.1), (0.5,), 0.5, "ab", (0.5, "a"), (None, 1), (NAN, 1.0)],
    "ratio": [(-1, 1), (2, 1), (1, INF), "12", None, (0, 1), ("a", 1)],
    "padding": [-1, 1.5, True, "4", None],
    "interpolation": ["nearest", None],
    "flip": [-0.1, 1.1, True, "0.5", None, NAN],
    "randaugment": ["m9", "rand-n0", "rand-q1", 9, ""],
    "color_jitter": [-0.4, INF, NAN, "0.4", None, True],
    "force_color_jitter": ["yes", None, 1, 0.0],
    "erasing": [-0.1, 2, True, "1", None],
    "erasing_mode": ["rand", None],
    "mixup": [-0.8, INF, NAN, "0.8", None],
    "cutmix": [-1, INF, NAN, "1", None],
    "mixtoken": [-1, INF, NAN, "1", None, True],
    "mix_probability": [-0.1, 1.1, None, "1"],
    "switch_probability": [-0.1, 1.1, None, "1"],
    "label_smoothing": [-0.1, 1, NAN, None],
    "repeats": [0, 1.5, True, "3", None],
    "balance": ["both", 1, True],
    "eval_crop_ratio": [0, 1.1, "0.9", True],
}


def test_every_field_is_tried():
    assert BAD.keys() == AugmentationConfig.__dataclass_fields__.keys()


@each("field, value", [(field, value) for field, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_with_field_value_and_what_is_allowed(field, value):
    with pytest.raises(ValueError) as error:
        AugmentationConfig(**{field: value})
    message = str(error.value)
    assert message.startswith(f"augmentation.{field}=") and " must " in message
    ends = value if isinstance(value, tuple) else [value]
    assert repr(value) in message or any(repr(end) in message for end in ends)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_mixing_refuses_odd_batches(tmp_path, batch_size):
    arguments = SparsePriorTrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=batch_size, gradient_accumulation_steps=2, use_cpu=True
    )
    with pytest.raises(ValueError, match=f"per_device_train_batch_size={batch_size} must be even"):
        make_collator(AugmentationConfig(mixup=0.8), 10, arguments)
    assert make_collator(AugmentationConfig(label_smoothing=0.1), 10, arguments).label_smoothing == 0.1


def test_the_global_batch_is_mixed_alike(tmp_path):
    arguments = SparsePriorTrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=3, seed=5, use_cpu=True
    )
    collator = make_collator(AugmentationConfig(mixup=0.8, cutmix=1.0, mix_probability=0.5), 10, arguments)
    assert (collator.batch_size, collator.seed, collator.mixing.probability) == (12, 5, 0.5)
    # With repeated augmentation each process draws its own, as in DeiT.
    assert make_collator(AugmentationConfig(mixup=0.8, repeats=3), 10, arguments).batch_size == 4
