"""Published label maps: made files in their layout, against the targets of the published training code by formula."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from hf_sparseprior.training import LabelMaps
from hf_sparseprior.training.token_labels import map_probabilities
from tasks.classification import published_label_maps
from tasks.classification import train as training
from tests.each import each
from tests.hf_sparseprior.classification.test_label_maps import STUDENT, config_in

CLASSES, GRID = 7, 18
NAMES = ["n01440764", "n01443537", "n01484850", "n01491361", "n01494475", "n01496331", "n01498041"]


def made_map(seed, grid=GRID):
    """As generate_label.py saves them: the five highest logits and their classes, (2, 5, h, w) in half precision."""
    logits = 3 * torch.randn(grid, grid, CLASSES, generator=torch.Generator().manual_seed(seed))
    values, numbers = logits.topk(5)
    return torch.stack([values.half(), numbers.half()]).permute(0, 3, 1, 2)


@pytest.fixture
def folders(tmp_path):
    """Two training images of each class, their maps, and a configuration of the data."""
    (tmp_path / "data.yaml").write_text(f"data: {{source: imagefolder, path: {tmp_path / 'images'}}}\n")
    number = 0
    for name in NAMES:
        for split, images in (("train", 2), ("validation", 1), ("test", 1)):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for index in range(images):
                pixels = np.random.default_rng(number).integers(0, 255, (12, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{name}_{index}.JPEG")
                if split == "train":
                    (tmp_path / "published" / name).mkdir(parents=True, exist_ok=True)
                    torch.save(made_map(number), tmp_path / "published" / name / f"{name}_{index}.pt")
                    number += 1
    return tmp_path


def command(folders, *options):
    return [
        str(folders / "published"), "--config", str(folders / "data.yaml"), "--out", str(folders / "maps"), *options
    ]  # fmt: skip


def published_target(stored):
    """Class probabilities of each cell by the published training code, number by number: the softmax of a vector that
    is 0 but for the stored logits.
    """
    target = torch.zeros(GRID, GRID, CLASSES, dtype=torch.float64)
    for row in range(GRID):
        for column in range(GRID):
            vector = [0.0] * CLASSES
            for value, number in zip(stored[0, :, row, column], stored[1, :, row, column], strict=True):
                vector[int(number)] = float(value)
            total = sum(map(math.exp, vector))
            target[row, column] = torch.tensor([math.exp(value) / total for value in vector])
    return target


def test_our_maps_have_the_targets_of_the_published_code(folders, capsys):
    assert published_label_maps.main(command(folders, "--images-per-file", "4")) == 0
    assert "maps of 14 images, 18x18, top 5 classes" in capsys.readouterr().out
    maps = LabelMaps(folders / "maps")
    maps.verify()
    assert maps.header.classes == NAMES and maps.header.teacher == "published"
    for index in (0, 3, 13):
        classes, scores = maps.read(index)
        assert (scores.diff(dim=-1) <= 0).all() and scores.dtype == torch.float16
        own = map_probabilities(classes, scores, CLASSES)
        torch.testing.assert_close(own.double(), published_target(made_map(index)), rtol=0, atol=5e-4)


def test_it_goes_on_where_it_stopped(folders):
    assert published_label_maps.main(command(folders, "--images-per-file", "4")) == 0
    whole = {path.name: path.read_bytes() for path in (folders / "maps").glob("maps-*")}
    (folders / "maps" / sorted(whole)[2]).unlink()
    for name in sorted(whole)[:2]:  # what is done is not read again
        index = 4 * sorted(whole).index(name) + 1
        (folders / "published" / NAMES[index // 2] / f"{NAMES[index // 2]}_{index % 2}.pt").unlink()
    assert published_label_maps.main(command(folders, "--images-per-file", "4")) == 0
    assert {path.name: path.read_bytes() for path in (folders / "maps").glob("maps-*")} == whole


@pytest.mark.slow
def test_a_run_learns_from_them(folders):
    assert published_label_maps.main(command(folders)) == 0
    config = config_in(folders / "run", model=STUDENT, token_labels={"path": str(folders / "maps")})
    config["data"] = {"source": "imagefolder", "path": str(folders / "images")}
    config["trainer"]["per_device_train_batch_size"] = 7
    results = training.run(config)
    assert results["label_maps_teacher_sha256"] == "published"


class Hostile:
    def __reduce__(self):
        return print, ("executed",)


@each(
    "content, message",
    [
        (None, "n01443537_1.pt does not exist, the label map of an image"),
        (torch.zeros(2, 5, 18), r"(2, 5, 18) must be a tensor (2, classes, height, width)"),
        ([1], "list must be a tensor"),
        (Hostile(), "is no label map"),
        (made_map(0, grid=9), "is (height, width, classes) = (9, 9, 5), the first map (18, 18, 5)"),
        (torch.zeros(2, 5, 18, 18), "a cell names a class twice"),
        (torch.full((2, 5, 18, 18), torch.nan), "it must hold finite logits, and whole numbers of classes"),
        (made_map(0) + torch.tensor([0.0, 5.0]).view(2, 1, 1, 1), "and the data has the classes 0 to 6"),
        (made_map(0) + torch.tensor([0.0, 0.5]).view(2, 1, 1, 1), "whole numbers of classes"),
    ],
)
def test_what_is_no_map_of_these_images_is_refused_in_one_line(content, message, folders, capsys):
    file = folders / "published" / NAMES[1] / f"{NAMES[1]}_1.pt"
    file.unlink(missing_ok=True)
    if content is not None:
        torch.save(content, file)
    assert published_label_maps.main(command(folders)) == 2
    said = capsys.readouterr()
    assert message in said.err.strip().splitlines()[-1] and "executed" not in said.out
    assert not list((folders / "maps").glob("maps-*"))


def test_images_without_class_folders_are_refused(folders, capsys):
    (folders / "digits.yaml").write_text("data: {source: digits, limit_train: 20}\n")
    options = command(folders)
    options[2] = str(folders / "digits.yaml")
    assert published_label_maps.main(options) == 2
    assert "label maps are found by class folder and file name" in capsys.readouterr().err
