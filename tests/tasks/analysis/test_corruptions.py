import colorsys
import io
import itertools
import subprocess
import sys
import types
from importlib import import_module

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from tasks.analysis import corruptions
from tasks.analysis.commands import SEVERITIES
from tasks.analysis.corruptions import BENCHMARKS, CORRUPTIONS, corrupt
from tests.each import each
from tests.tasks.analysis.saved_runs import NEEDS_CORRUPTIONS, natural_image

IMAGE = natural_image(7)
UNIT = IMAGE / 255.0
EVERY = each("severity", SEVERITIES)


def seeded(name, severity):
    return np.random.RandomState(corruptions._seed(IMAGE, name, severity))


def stored(unit):
    return (np.clip(unit, 0, 1) * 255).astype(np.uint8)


def same(found, expected, difference=0):
    """Equal, but for rounding before the cut to whole numbers."""
    assert np.abs(found.astype(int) - np.asarray(expected).astype(int)).max() <= difference


# ---- imagenet-c: the package as published ---------------------------------------------------------------------------


@pytest.fixture
def published(monkeypatch):
    """The package itself, imported into the NumPy, SciPy and scikit-image of its time."""
    for benchmark in BENCHMARKS:  # which are not to see what is changed here
        corruptions.adapted_package(benchmark)
    skimage = import_module("skimage")
    gaussian, random_noise = skimage.filters.gaussian, skimage.util.random_noise

    def old_gaussian(image, *args, multichannel=False, **options):
        return gaussian(image, *args, channel_axis=-1 if multichannel else None, **options)

    def old_random_noise(image, **options):
        return random_noise(image, rng=np.random.randint(2**31), **options)

    resources = types.ModuleType("pkg_resources")
    resources.resource_filename = lambda name, path: str(corruptions.Path(sys.modules[name].__file__).parent / path)
    interpolation = types.ModuleType("scipy.ndimage.interpolation")
    interpolation.map_coordinates = ndimage.map_coordinates
    monkeypatch.setitem(sys.modules, "pkg_resources", resources)
    monkeypatch.setitem(sys.modules, "scipy.ndimage.interpolation", interpolation)
    monkeypatch.setattr(np, "float_", np.float64, raising=False)
    monkeypatch.setattr(skimage.filters, "gaussian", old_gaussian)
    monkeypatch.setattr(skimage.util, "random_noise", old_random_noise)
    names = ("imagecorruptions", "imagecorruptions.corruptions")
    for name in names:  # which mmdet imports as well, without any of this
        monkeypatch.delitem(sys.modules, name, raising=False)
    package = import_module("imagecorruptions")
    yield package
    for name in names:
        sys.modules.pop(name)


@NEEDS_CORRUPTIONS
@pytest.mark.parametrize("shape", [(32, 32), (48, 40)])
def test_imagenet_c_is_what_the_package_gives(published, shape):
    image = natural_image(3, *shape)
    state = np.random.get_state()
    try:
        for name in published.get_corruption_names("all"):
            for severity in SEVERITIES:
                np.random.seed(corruptions._seed(image, name, severity))
                expected = published.corrupt(image, severity=severity, corruption_name=name)
                assert np.array_equal(corrupt(image, name, severity, "imagenet-c"), expected), (name, severity)
    finally:
        np.random.set_state(state)


@NEEDS_CORRUPTIONS
def test_the_names_are_the_packages(published):
    assert tuple(published.get_corruption_names("all")) == CORRUPTIONS
    assert tuple(published.get_corruption_names("common")) == corruptions.BENCHMARK_CORRUPTIONS


# ---- cifar-c: the constants of make_cifar_c.py in formulas of the test ----------------------------------------------

NOISE = {
    "gaussian_noise": (
        (0.04, 0.06, 0.08, 0.09, 0.10),
        lambda random, c: UNIT + random.normal(size=UNIT.shape, scale=c),
    ),
    "shot_noise": ((500, 250, 100, 75, 50), lambda random, c: random.poisson(UNIT * c) / c),
    "speckle_noise": (
        (0.06, 0.1, 0.12, 0.16, 0.2),
        lambda random, c: UNIT * (1 + random.normal(size=UNIT.shape, scale=c)),
    ),
}


@NEEDS_CORRUPTIONS
@each("name, severity", itertools.product(NOISE, SEVERITIES))
def test_noise(name, severity):
    constants, formula = NOISE[name]
    same(corrupt(IMAGE, name, severity), stored(formula(seeded(name, severity), constants[severity - 1])), 1)


@NEEDS_CORRUPTIONS
@EVERY
def test_impulse_noise_replaces_its_share_by_black_and_white(severity):
    image = np.full((32, 32, 3), 100, np.uint8)
    images = [image + np.uint8(number) for number in range(40)]
    found = [corrupt(image, "impulse_noise", severity) for image in images]
    hit = np.concatenate([pixels[pixels != image] for pixels, image in zip(found, images, strict=True)])
    assert set(hit) == {0, 255} and 0.45 < (hit == 255).mean() < 0.55
    assert hit.size / (40 * image.size) == pytest.approx((0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1], rel=0.1)


@NEEDS_CORRUPTIONS
@EVERY
def test_gaussian_blur(severity):
    sigma = (0.4, 0.6, 0.7, 0.8, 1)[severity - 1]
    same(
        corrupt(IMAGE, "gaussian_blur", severity),
        stored(ndimage.gaussian_filter(UNIT, (sigma, sigma, 0), mode="nearest")),
        1,
    )


@NEEDS_CORRUPTIONS
@EVERY
def test_defocus_blur(severity):
    radius, alias = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))[severity - 1]
    rows, columns = np.mgrid[-8:9, -8:9]
    disk = (rows**2 + columns**2 <= radius**2).astype(float)
    weights = np.exp(-(np.array([-1, 0, 1]) ** 2) / (2 * alias**2))
    weights /= weights.sum()
    kernel = ndimage.convolve(disk / disk.sum(), np.outer(weights, weights))
    same(corrupt(IMAGE, "defocus_blur", severity), stored(ndimage.convolve(UNIT, kernel[..., None], mode="mirror")), 1)


@NEEDS_CORRUPTIONS
@EVERY
def test_glass_blur(severity):
    sigma, reach, rounds = ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))[severity - 1]
    random = seeded("glass_blur", severity)
    pixels = (ndimage.gaussian_filter(UNIT, (sigma, sigma, 0), mode="nearest") * 255).astype(np.uint8)
    for _ in range(rounds):
        for row in range(32 - reach, reach, -1):
            for column in range(32 - reach, reach, -1):
                right, down = random.randint(-reach, reach, size=2)
                # A swap in name: the published code writes the other pixel to both places.
                pixels[row, column] = pixels[row + down, column + right]
    expected = stored(ndimage.gaussian_filter(pixels / 255, (sigma, sigma, 0), mode="nearest"))
    same(corrupt(IMAGE, "glass_blur", severity), expected, 1)


def half_gaussian_blur(image, radius, sigma, angle):
    """ImageMagick's motion blur: half a Gaussian along a line, the border continued."""
    angle, steps = np.deg2rad(angle), np.arange(2 * radius + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    rows, columns = np.mgrid[:32, :32]
    blurred = np.zeros(image.shape)
    for step, weight in zip(steps, weights / weights.sum(), strict=True):
        down, right = -np.ceil(step * np.sin(angle) - 0.5), -np.ceil(step * np.cos(angle) - 0.5)
        if max(abs(down), abs(right)) < 32:
            place = (np.clip(rows - down, 0, 31).astype(int), np.clip(columns - right, 0, 31).astype(int))
            blurred += weight * image[place]
    return blurred


@NEEDS_CORRUPTIONS
@EVERY
def test_motion_blur(severity):
    radius, sigma = ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))[severity - 1]
    angle = seeded("motion_blur", severity).uniform(-45, 45)
    same(corrupt(IMAGE, "motion_blur", severity), half_gaussian_blur(IMAGE, radius, sigma, angle), 1)


def enlarged_middle(image, factor):
    cut = int(np.ceil(32 / factor))
    start = (32 - cut) // 2
    layer = ndimage.zoom(image[start : start + cut, start : start + cut], (factor, factor, 1), order=1)
    trim = (len(layer) - 32) // 2
    return layer[trim : trim + 32, trim : trim + 32]


@NEEDS_CORRUPTIONS
@EVERY
def test_zoom_blur(severity):
    factors = np.arange(1, (1.06, 1.11, 1.16, 1.21, 1.26)[severity - 1], 0.01)
    layers = [UNIT, *(enlarged_middle(UNIT, factor) for factor in factors)]
    same(corrupt(IMAGE, "zoom_blur", severity), stored(np.mean(layers, 0)), 1)


@NEEDS_CORRUPTIONS
@EVERY
def test_snow(severity):
    mean, deviation, zoom, threshold, radius, sigma, weight = (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )[severity - 1]
    random = seeded("snow", severity)
    flakes = enlarged_middle(random.normal(mean, deviation, (32, 32))[..., None], zoom)[..., 0]
    flakes = np.where(flakes < threshold, 0, np.clip(flakes, 0, 1))
    flakes = half_gaussian_blur(flakes, radius, sigma, random.uniform(-135, -45))[..., None]
    grey = (UNIT @ [0.299, 0.587, 0.114])[..., None]
    veiled = weight * UNIT + (1 - weight) * np.maximum(UNIT, 1.5 * grey + 0.5)
    same(corrupt(IMAGE, "snow", severity), stored(veiled + flakes + flakes[::-1, ::-1]), 2)


@NEEDS_CORRUPTIONS
@EVERY
def test_frost_adds_a_part_of_a_frost_picture(severity):
    cv2 = pytest.importorskip("cv2")
    of_image, of_frost = ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))[severity - 1]
    folder = corruptions.Path(corruptions.importlib.util.find_spec("imagecorruptions").origin).parent / "frost"
    pictures = [cv2.imread(str(path)) for path in sorted(folder.glob("frost[1-5]*"))]
    assert len(pictures) == 5
    black = corrupt(np.zeros_like(IMAGE), "frost", severity)
    distances = []
    for picture in pictures:
        small = of_frost * cv2.resize(picture, None, fx=0.2, fy=0.2)[..., ::-1].astype(np.float32)
        squares = cv2.matchTemplate(small, black.astype(np.float32), cv2.TM_SQDIFF)
        distances.append(np.sqrt(squares.min() / black.size))
    assert min(distances) < 1
    grey = np.full_like(IMAGE, 60)  # the same seed would need the same image, so only what is left without frost
    assert corrupt(grey, "frost", severity).min() >= int(of_image * 60)


@NEEDS_CORRUPTIONS
@EVERY
def test_fog_spans_its_whole_range(severity):
    height = (0.2, 0.5, 0.75, 1, 1.5)[severity - 1]
    value = 0.4
    found = corrupt(np.full((32, 32, 3), round(value * 255), np.uint8), "fog", severity)
    scale = value / (value + height)  # the largest value of the image over that of image and fog
    assert found.min() == int(value * scale * 255) and abs(found.max() - value * 255) <= 1


@NEEDS_CORRUPTIONS
@each("name, severity", itertools.product(["brightness", "saturate"], SEVERITIES))
def test_value_and_saturation(name, severity):
    add = (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1]
    times, plus = ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))[severity - 1]
    expected = []
    for pixel in UNIT.reshape(-1, 3):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
        if name == "brightness":
            value = min(1, value + add)
        else:
            saturation = min(1, max(0, saturation * times + plus))
        expected.append(colorsys.hsv_to_rgb(hue, saturation, value))
    same(corrupt(IMAGE, name, severity), stored(np.reshape(expected, UNIT.shape)), 1)


@NEEDS_CORRUPTIONS
@EVERY
def test_contrast(severity):
    mean = UNIT.mean((0, 1))
    same(
        corrupt(IMAGE, "contrast", severity),
        stored(mean + (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1] * (UNIT - mean)),
        1,
    )


@NEEDS_CORRUPTIONS
@EVERY
def test_pixelate_and_jpeg(severity):
    picture = Image.fromarray(IMAGE)
    side = (30, 28, 27, 24, 20)[severity - 1]
    coarse = picture.resize((side, side), Image.Resampling.BOX).resize((32, 32), Image.Resampling.BOX)
    same(corrupt(IMAGE, "pixelate", severity), coarse)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=(80, 65, 58, 50, 40)[severity - 1])
    same(corrupt(IMAGE, "jpeg_compression", severity), Image.open(file))


@NEEDS_CORRUPTIONS
@EVERY
def test_elastic_transform(severity):
    shares = ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))[severity - 1]
    height, smooth, corner = (32 * share for share in shares)
    random = seeded("elastic_transform", severity)
    corners = np.array([[26, 26], [26, 6], [6, 6]])  # columns and rows: the centre, and a third of the side from it
    moved = corners + random.uniform(-corner, corner, size=(3, 2))
    back = np.linalg.solve(np.c_[moved, np.ones(3)], corners)  # (column, row, 1) of the result to where it was
    columns, rows = np.meshgrid(np.arange(32), np.arange(32))
    came_from = np.stack([columns, rows, np.ones((32, 32))], -1) @ back
    drawn = [random.uniform(-1, 1, size=(32, 32)) for _ in range(2)]
    right, down = (height * ndimage.gaussian_filter(noise, smooth, mode="reflect", truncate=3) for noise in drawn)
    expected = []
    for channel in np.moveaxis(UNIT, -1, 0):
        mapped = ndimage.map_coordinates(channel, [came_from[..., 1], came_from[..., 0]], order=1, mode="mirror")
        expected.append(ndimage.map_coordinates(mapped, [rows + down, columns + right], order=1, mode="reflect"))
    # OpenCV may round places to 1/32 pixel.
    same(corrupt(IMAGE, "elastic_transform", severity), stored(np.stack(expected, -1)), 3)


@NEEDS_CORRUPTIONS
@EVERY
def test_spatter_is_water_or_mud(severity):
    found = corrupt(np.full_like(IMAGE, 100), "spatter", severity).reshape(-1, 3).astype(int)
    changed = found[(np.abs(found - 100) > 2).any(1)]
    assert 0 < len(changed) < 1024
    if severity <= 3:  # pale turquoise (175, 238, 238) is added
        assert (changed >= 99).all() and (changed[:, 1:] >= changed[:, :1]).all()
    else:  # brown (63, 42, 20) covers
        assert (
            (changed <= 100).all() and (changed[:, 0] > changed[:, 1]).all() and (changed[:, 1] > changed[:, 2]).all()
        )


# ---- what holds for all ---------------------------------------------------------------------------------------------


@NEEDS_CORRUPTIONS
@each("name, benchmark", itertools.product(CORRUPTIONS, BENCHMARKS))
def test_an_image_is_corrupted_alike_whatever_happens_around_it(name, benchmark):
    first = corrupt(IMAGE, name, 3, benchmark)
    assert first.shape == IMAGE.shape and first.dtype == np.uint8 and not np.array_equal(first, IMAGE)
    before = np.random.get_state()[1].copy()
    corrupt(natural_image(8), name, 5, benchmark)
    np.testing.assert_array_equal(np.random.get_state()[1], before)
    np.random.random()
    assert np.array_equal(corrupt(IMAGE, name, 3, benchmark), first)


@NEEDS_CORRUPTIONS
def test_noise_differs_between_images_severities_and_corruptions():
    flat = np.full((32, 32, 3), 127, np.uint8)
    signs = [
        corrupt(flat + np.uint8(add), name, severity).astype(int) > 127 + add
        for add in (0, 1)
        for severity in (1, 2)
        for name in ("gaussian_noise", "speckle_noise")
    ]
    for place, one in enumerate(signs):
        for other in signs[:place]:
            assert 0.4 < (one == other).mean() < 0.6


@NEEDS_CORRUPTIONS
def test_without_a_drop_of_spatter_an_image_stays_as_it_is():
    images = [np.full((32, 32, 3), value, np.uint8) for value in range(1, 256)]
    found = [corrupt(image, "spatter", 1, "imagenet-c") for image in images]
    # The package divides zero by zero there, which makes the whole image black.
    assert all(pixels.any() for pixels in found)
    assert 0 < sum(np.array_equal(*pair) for pair in zip(found, images, strict=True)) < 50


@NEEDS_CORRUPTIONS
def test_other_modules_stay_as_they_are():
    code = (
        "import numpy as np, skimage.filters; gaussian = skimage.filters.gaussian; "
        "from tasks.analysis.corruptions import corrupt; corrupt(np.zeros((32, 32, 3), np.uint8), 'fog', 1); "
        "import sys; assert not hasattr(np, 'float_') and skimage.filters.gaussian is gaussian; "
        "assert not {'imagecorruptions', 'pkg_resources'} & set(sys.modules)"
    )
    root = corruptions.Path(__file__).parents[3]
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root)
    assert process.returncode == 0, process.stderr


@NEEDS_CORRUPTIONS
def test_the_versions_are_recorded():
    made_with = corruptions.versions()
    assert set(made_with) == {"imagecorruptions", "scikit-image", "scipy", "numpy", "pillow", "opencv"}
    assert made_with["numpy"] == np.__version__


def test_without_the_package_it_says_what_to_install(monkeypatch):
    corruptions.adapted_package.cache_clear()
    monkeypatch.setattr(corruptions.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'hf_sparseprior\[analysis\]' && pip install --no-deps"):
        corrupt(IMAGE, "fog", 1)


@each(
    "size, benchmark, message",
    [
        ((8, 8), "imagenet-c", "8x8 pixels; the corruptions need 32x32 or more"),
        ((64, 64), "cifar-c", "64x64 pixels; --benchmark cifar-c is for 32x32, imagenet-c for"),
        ((32, 31), "imagenet-c", "32x31"),
    ],
)
def test_sizes_that_a_benchmark_is_not_for(size, benchmark, message):
    with pytest.raises(ValueError, match=message):
        corruptions.check_size(*size, benchmark)
    corruptions.check_size(32, 32, benchmark)
    corruptions.check_size(64, 40, "imagenet-c")
