import io

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from transformers import ViTImageProcessorPil

from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.data import ImageDataset, Preparation, load_data, stratified_cut

# Real images for every format: a few of scikit-learn's digits.
DIGITS = load_digits()


def digit(index, size=8):
    pixels = (DIGITS.images[index] * 255 / 16).round().astype(np.uint8)
    return Image.fromarray(pixels).resize((size, size)).convert("RGB")


def write_folder(root, classes=("3", "7"), per_class=6, splits=("train",)):
    for split in splits:
        for name in classes:
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in np.flatnonzero(DIGITS.target == int(name))[:per_class]:
                digit(index).save(folder / f"{index}.png")
    return root


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def write_parquet(root, labels, name="train.parquet", column="label"):
    root.mkdir(exist_ok=True)
    images = [png(digit(int(np.flatnonzero(DIGITS.target == int(label))[n]))) for n, label in enumerate(labels)]
    pyarrow.parquet.write_table(pyarrow.table({"image": images, column: list(labels)}), root / name)
    return root


def test_digits_are_scikit_learns_in_three_disjoint_stratified_splits():
    data = load_data(DataConfig())
    sizes = {split: len(images) for split, images in data.splits.items()}
    assert sum(sizes.values()) == len(DIGITS.target) == 1797
    assert abs(sizes["test"] - 1797 / 5) < 10 and abs(sizes["validation"] - 1797 / 5) < 10
    drawn = [np.asarray(images.read(n)).tobytes() for images in data.splits.values() for n in range(len(images))]
    own = sorted(np.asarray(digit(n)).tobytes() for n in range(1797))
    assert sorted(drawn) == own
    for images in data.splits.values():
        shares = np.bincount(images.labels) / len(images)
        assert np.abs(shares - np.bincount(DIGITS.target) / 1797).max() < 0.01
    # Image and label belong together after the cut.
    image = data.splits["test"].read(3)
    match = [n for n in range(1797) if np.asarray(digit(n)).tobytes() == np.asarray(image).tobytes()]
    assert data.splits["test"].labels[3] in DIGITS.target[match]


def test_the_cut_depends_on_its_seed_alone():
    one, two = load_data(DataConfig()), load_data(DataConfig())
    assert np.array_equal(one.splits["test"].labels, two.splits["test"].labels)
    other = load_data(DataConfig(split_seed=1))
    assert not np.array_equal(one.splits["test"].labels, other.splits["test"].labels)


def test_stratified_cut_keeps_at_least_one_image_of_each_side():
    labels = np.array([0, 0, 1, 1, 1, 2])
    kept, cut = stratified_cut(labels, 0.01, 0)
    assert sorted([*kept, *cut]) == list(range(6))
    assert sorted(labels[cut]) == [0, 1]


BAD_FOLDERS = [
    (lambda root: (root / "train" / "3").rename(root / "gone"), "two or more classes, found"),
    (lambda root: (root / "train").rename(root / "other"), "two or more classes|has no folder train"),
    (lambda root: [path.unlink() for path in (root / "train" / "3").iterdir()], "holds no image"),
    (lambda root: (root / "test" / "9").mkdir(parents=True), "class '9' is not among the training classes"),
    (lambda root: (root / "test").mkdir(), "holds no class folder"),
    (lambda root: digit(0).save(root / "train" / "stray.png"), r"stray\.png lies outside the class folders"),
]


def test_bad_folders_are_named(tmp_path):
    for number, (break_it, message) in enumerate(BAD_FOLDERS):
        break_it(root := write_folder(tmp_path / str(number)))
        with pytest.raises(ValueError, match=message) as error:
            load_data(DataConfig(source="imagefolder", path=str(root)))
        assert str(root) in str(error.value)


def test_missing_paths_and_columns_are_named(tmp_path):
    for source in ("imagefolder", "parquet"):
        with pytest.raises(OSError, match=r"nowhere is (not a folder|neither a folder nor a file)$"):
            load_data(DataConfig(source=source, path="nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no train\*.parquet"):
        load_data(DataConfig(source="parquet", path=str(tmp_path / "empty")))
    (tmp_path / "empty" / "train.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(OSError, match="the parquet files cannot be read"):
        load_data(DataConfig(source="parquet", path=str(tmp_path / "empty")))
    root = write_parquet(tmp_path / "p", ["3", "7"], column="digit")
    with pytest.raises(ValueError, match=r"label_column='label' is not among the columns \['image', 'digit'\]"):
        load_data(DataConfig(source="parquet", path=str(root), label_column="label"))
    write_parquet(tmp_path / "q", ["3", "7"] * 3)
    write_parquet(tmp_path / "q", ["3", "8"], "test.parquet")
    with pytest.raises(ValueError, match="label '8'"):
        load_data(DataConfig(source="parquet", path=str(tmp_path / "q")))


@pytest.mark.parametrize("channels", [1, 3])
def test_cached_images_equal_fresh_ones(channels):
    processor = ViTImageProcessorPil(
        size={"height": 8, "width": 8}, image_mean=[0.5] * channels, image_std=[0.5] * channels
    )
    images = load_data(DataConfig()).splits["test"].subset(np.arange(5))
    cached, fresh = (ImageDataset(images, Preparation(processor, channels), cache) for cache in (True, False))
    for index in range(5):
        assert torch.equal(cached[index]["pixel_values"], fresh[index]["pixel_values"])
        assert cached[index]["pixel_values"].shape == (channels, 8, 8)
        raw = np.asarray(images.read(index).convert("L" if channels == 1 else "RGB")).reshape(8, 8, channels)
        expected = torch.tensor((raw / 255.0 - 0.5) / 0.5).permute(2, 0, 1)
        assert torch.allclose(cached[index]["pixel_values"].double(), expected, atol=1e-6)


def test_parquet_with_one_class_or_no_images_is_refused(tmp_path):
    with pytest.raises(ValueError, match="two or more classes"):
        load_data(DataConfig(source="parquet", path=str(write_parquet(tmp_path / "q", ["3"] * 4))))
    (tmp_path / "r").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"image": [1, 2], "label": ["a", "b"]}), tmp_path / "r" / "train.parquet")
    with pytest.raises(ValueError, match="column 'image' holds no images"):
        load_data(DataConfig(source="parquet", path=str(tmp_path / "r")))


def test_workers_share_the_cache_and_never_fill_their_own():
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
    images = load_data(DataConfig()).splits["test"].subset(np.arange(12))
    dataset = ImageDataset(images, Preparation(processor))
    dataset.fill_cache()
    images.read = lambda index: pytest.fail("an image was read again")
    batches = list(torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=1))
    assert torch.equal(torch.cat([batch["pixel_values"] for batch in batches]), dataset.pixels)
