"""RandAugment against the published definition (timm's formulas, written out here per level) and against Pillow."""

from collections import Counter

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps
from scipy import stats
from sklearn.datasets import load_sample_image

from hf_sparseprior.images import randaugment as module
from hf_sparseprior.images.randaugment import OPERATIONS, Policy, parse_policy, randaugment
from tests.each import each

BICUBIC, FILL = Image.Resampling.BICUBIC, (124, 116, 104)
LEVELS = [0.0, 0.3, 2.5, 4.99, 5.0, 7.7, 9.0, 9.999, 10.0]


@pytest.fixture(scope="module")
def photo():
    return Image.fromarray(load_sample_image("china.jpg")).resize((48, 32))


def affine(image, *coefficients):
    return image.transform(image.size, Image.Transform.AFFINE, coefficients, resample=BICUBIC, fillcolor=FILL)


def enhanced(kind):
    def apply(image, level, sign, increasing):
        factor = max(0.1, 1.0 + sign * level / 10 * 0.9) if increasing else level / 10 * 1.8 + 0.1
        return kind(image).enhance(factor)

    return apply


def posterized(image, level, sign, increasing):
    bits = 4 - int(level / 10 * 4) if increasing else int(level / 10 * 4)
    kept = np.asarray(image) & (0xFF << (8 - bits) & 0xFF)
    return Image.fromarray(kept.astype(np.uint8))


def solarized(image, level, sign, increasing):
    threshold = min(256, int(level / 10 * 256))
    values = np.asarray(image).astype(int)
    return Image.fromarray(
        np.where(values < (256 - threshold if increasing else threshold), values, 255 - values).astype(np.uint8)
    )


def solarize_added(image, level, sign, increasing):
    values = np.asarray(image).astype(int)
    added = np.minimum(255, values + min(128, int(level / 10 * 110)))
    return Image.fromarray(np.where(values < 128, added, values).astype(np.uint8))


PUBLISHED = {
    "AutoContrast": lambda image, level, sign, inc: ImageOps.autocontrast(image),
    "Equalize": lambda image, level, sign, inc: ImageOps.equalize(image),
    "Invert": lambda image, level, sign, inc: Image.fromarray(255 - np.asarray(image)),
    "Rotate": lambda image, level, sign, inc: image.rotate(sign * level / 10 * 30, resample=BICUBIC, fillcolor=FILL),
    "Posterize": posterized,
    "Solarize": solarized,
    "SolarizeAdd": solarize_added,
    "Color": enhanced(ImageEnhance.Color),
    "Contrast": enhanced(ImageEnhance.Contrast),
    "Brightness": enhanced(ImageEnhance.Brightness),
    "Sharpness": enhanced(ImageEnhance.Sharpness),
    "ShearX": lambda image, level, sign, inc: affine(image, 1, sign * level / 10 * 0.3, 0, 0, 1, 0),
    "ShearY": lambda image, level, sign, inc: affine(image, 1, 0, 0, sign * level / 10 * 0.3, 1, 0),
    "TranslateX": lambda image, level, sign, inc: affine(image, 1, 0, sign * level / 10 * 0.45 * image.width, 0, 1, 0),
    "TranslateY": lambda image, level, sign, inc: affine(image, 1, 0, 0, 0, 1, sign * level / 10 * 0.45 * image.height),
}


def test_the_operations_are_the_published_fifteen():
    assert set(OPERATIONS) == set(PUBLISHED)


@each("name", PUBLISHED)
def test_an_operation_is_the_published_one_at_every_level(photo, name):
    for level in LEVELS:
        for sign in (-1.0, 1.0):
            for increasing in (False, True):
                found = OPERATIONS[name](photo, level / 10, sign, increasing, BICUBIC, FILL)
                expected = PUBLISHED[name](photo, level, sign, increasing)
                assert found.size == photo.size and found.mode == "RGB"
                np.testing.assert_array_equal(np.asarray(found), np.asarray(expected), f"{level} {sign} {increasing}")


def recorded(monkeypatch, policy, number, seed=0):
    """What `randaugment` did to `number` images: per image a list of (name, level share, sign)."""
    calls = []

    def operation(name):
        def apply(image, share, sign, increasing, resample, fill):
            calls[-1].append((name, share, sign))
            return image

        return apply

    monkeypatch.setattr(module, "OPERATIONS", {name: operation(name) for name in PUBLISHED})
    random = np.random.default_rng(seed)
    for _ in range(number):
        calls.append([])
        randaugment(None, policy, random)
    return calls


def test_operations_are_drawn_evenly_with_replacement_and_applied_half_the_time(monkeypatch):
    number = 6000
    calls = recorded(monkeypatch, Policy(operations=2), number)
    counts = Counter(len(call) for call in calls)
    assert [counts[k] / number for k in range(3)] == pytest.approx([0.25, 0.5, 0.25], abs=0.02)
    names = Counter(name for call in calls for name, _, _ in call)
    assert stats.chisquare([names[name] for name in PUBLISHED]).pvalue > 0.001
    pairs = [call for call in calls if len(call) == 2]
    assert sum(a[0] == b[0] for a, b in pairs) / len(pairs) == pytest.approx(1 / 15, abs=0.02)
    signs = [sign for call in calls for _, _, sign in call]
    assert np.mean(np.array(signs) > 0) == pytest.approx(0.5, abs=0.03) and set(signs) == {-1.0, 1.0}


@pytest.mark.parametrize(("magnitude", "std"), [(9, 0.5), (9, 0.0), (15, 1.0), (1, 2.0), (5, 1.0)])
def test_levels_are_gaussian_clipped_to_ten(monkeypatch, magnitude, std):
    policy = Policy(magnitude=magnitude, magnitude_std=std, probability=1.0)
    levels = np.array([10 * share for call in recorded(monkeypatch, policy, 3000) for _, share, _ in call])
    assert levels.min() >= 0 and levels.max() <= 10
    if std == 0:
        assert set(levels) == {float(magnitude)}
        return
    inside = levels[(levels > 0) & (levels < 10)]
    normal = stats.norm(magnitude, std)
    assert (levels == 10).mean() == pytest.approx(normal.sf(10), abs=0.02)
    assert (levels == 0).mean() == pytest.approx(normal.cdf(0), abs=0.02)
    if len(inside) > 100:
        bounds = [(0 - magnitude) / std, (10 - magnitude) / std]
        assert stats.kstest(inside, stats.truncnorm(*bounds, loc=magnitude, scale=std).cdf).pvalue > 0.005


@each(
    "text, policy",
    [
        ("rand-m15-n2-mstd1.0-inc1", Policy(15.0, 2, 1.0, True, 0.5)),  # Fibottention, Table 9
        ("rand-m9-mstd0.5-inc1", Policy(9.0, 2, 0.5, True, 0.5)),  # DeiT, Table 9
        ("rand-inc1-mstd.5-m9", Policy(9.0, 2, 0.5, True, 0.5)),
        ("rand", Policy(10.0, 2, 0.0, False, 0.5)),  # timm's defaults
        ("rand-n3-p1", Policy(10.0, 3, 0.0, False, 1.0)),
        ("rand-m9-inc0", Policy(9.0, 2, 0.0, False, 0.5)),  # but timm takes any number for on
    ],
)
def test_the_notation_is_read_as_timm_does(text, policy):
    assert parse_policy(text) == policy


@each(
    "text",
    ["m9", "rand-", "rand-x3", "rand-m", "rand-m9-n0", "rand-m9-n2.5", "rand-n-1", "rand-p1.5", "rand-mnan",
     "rand-ninf", "rand-mstdnan", "rand-mstdinf", "rand-mmax10", "rand-tweights",
     "original-mstd0.5", "rand-inc0.5", "", 9, None],
)  # fmt: skip
def test_anything_else_is_refused_with_the_text(text):
    with pytest.raises(ValueError, match=r"randaugment=") as error:
        parse_policy(text)
    assert repr(text) in str(error.value) and "must" in str(error.value)


def test_all_randomness_comes_from_the_generator(photo):
    policy = parse_policy("rand-m9-n4-mstd0.5-inc1-p1")
    results = [np.asarray(randaugment(photo, policy, np.random.default_rng(5), FILL)) for _ in range(2)]
    np.testing.assert_array_equal(*results)
    assert not np.array_equal(results[0], np.asarray(randaugment(photo, policy, np.random.default_rng(6), FILL)))


@each("size", [(1, 1), (1, 9), (9, 1)])
def test_tiny_images_survive_every_operation(size):
    image = Image.new("RGB", size, (200, 10, 90))
    for name, operation in OPERATIONS.items():
        for share in (0.0, 0.5, 1.0):
            assert operation(image, share, -1.0, True, BICUBIC, FILL).size == size, name
