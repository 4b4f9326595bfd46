"""Drawings: which files are read and how, who sees which, where an image has its drawing, a run on them."""

import dataclasses
import os

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from hf_sparseprior.runs.results import read_results
from hf_sparseprior.runs.run_folder import RESULTS
from tasks.canvases import contenders, drawings
from tasks.canvases.contenders import FOLDER, SCALES, VARIANTS, Group, runs_of
from tasks.canvases.data import SPLITS
from tasks.canvases.drawings import DRAWN, FOLDERS, FRAME, Album, Drawings, read_albums
from tasks.canvases.loop import do_run, run_folder
from tasks.canvases.run import main
from tests.each import each

EACH = 9  # drawings of a folder: two for the test, one for selection, six for training


def draw(path, number, size=(300, 260), mode="RGB"):
    """An ellipse and a bar of its number's own length, in the middle of a page."""
    page = Image.new("RGBA", (size[0] + 40, size[1] + 40), (255, 255, 255, 0 if mode == "RGBA" else 255))
    pen = ImageDraw.Draw(page)
    pen.ellipse((20, 20, 19 + size[0], 19 + size[1]), fill=(0, 0, 0, 255))
    pen.rectangle((60, 100, 70 + 2 * number, 130), fill=(255, 255, 255, 255))
    path.parent.mkdir(parents=True, exist_ok=True)
    page.convert(mode).save(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Nine drawings in each folder, and what is not read."""
    root = tmp_path_factory.mktemp("drawings")
    number = 0
    for name in FOLDERS:
        for mode in ("RGB", "RGBA", "L") * 3:
            draw(root / name / f"inner{number % 2}" / f"{number}.png", number, mode=mode)
            number += 1
    animals = root / FOLDERS[0]
    draw(animals / "small.png", 1, size=(223, 100))  # the page is larger
    Image.new("RGB", (400, 400), "white").save(animals / "empty.png")
    Image.new("RGB", (900, 900)).save(animals / "huge.png")
    (animals / "damaged.png").write_bytes((animals / "inner0" / "0.png").read_bytes()[:200])
    (animals / "text.png").write_text("no image")
    (animals / "notes.txt").write_text("no image")
    os.symlink(animals / "inner0" / "0.png", root / FOLDERS[1] / "link.png")
    (root / FOLDERS[1] / "copy.png").write_bytes((animals / "inner0" / "0.png").read_bytes())
    return root


@pytest.fixture
def albums(folder, monkeypatch):
    monkeypatch.setattr(drawings, "LARGEST", 500_000)
    return read_albums(str(folder))


def test_every_drawing_is_in_one_split_and_nothing_else_is(albums):
    pixels = torch.cat([albums[split].pixels for split in SPLITS]).flatten(1)
    assert len(pixels) == len(pixels.unique(dim=0)) == EACH * len(FOLDERS)
    for split, count in (("train", 6), ("selection", 1), ("test", 2)):
        assert torch.bincount(albums[split].labels).tolist() == [count] * len(FOLDERS)
        assert albums[split].moves == (split == "train")


def test_a_folder_gives_no_more_than_it_may(folder, monkeypatch):
    monkeypatch.setattr(drawings, "LARGEST", 500_000)
    monkeypatch.setattr(drawings, "MOST", 8)
    assert sum(len(album.labels) for album in read_albums(str(folder)).values()) == 8 * len(FOLDERS)


def test_ink_fills_the_square_and_paper_is_black(albums):
    """An ellipse of 300 by 260 pixels is 224 by 194, whatever page, mode and transparency it came with."""
    rows, columns = np.mgrid[:DRAWN, :DRAWN] + 0.5 - DRAWN / 2
    inside = (columns / (DRAWN / 2)) ** 2 + (rows / (DRAWN * 260 / 300 / 2)) ** 2
    for album in albums.values():
        for drawing in album.pixels.numpy():
            bar = np.zeros_like(inside, dtype=bool)
            bar[50:100, 25:] = True
            assert (drawing[(inside < 0.93) & ~bar] == 255).all() and (drawing[inside > 1.07] == 0).all()
            assert (drawing[bar & (inside < 0.93)] == 0).any()


def test_images_of_training_are_drawings_mirrored_and_moved(albums):
    album = albums["train"]
    images, labels = Drawings(album, FRAME, 3).batch(0, 200)
    seen = set()
    for image, label in zip(images[:, 0].numpy(), labels.tolist(), strict=True):
        places = [
            (number, mirrored, top, left)
            for number, mirrored, top, left in candidates(album, image)
            if np.array_equal(image, placed(album, number, mirrored, top, left))
        ]
        assert places and {album.labels[number].item() for number, *_ in places} == {label}
        seen.add(places[0])
    numbers, mirrored, tops, lefts = map(set, zip(*seen, strict=True))
    assert len(numbers) > 35 and mirrored == {False, True} and len(tops) > 20 and len(lefts) > 20
    assert min(lefts) <= 2 and max(lefts) >= FRAME - DRAWN - 2


def candidates(album, image):
    """Where the ink of an image is, with every drawing: the drawings are as wide as the square."""
    rows, columns = np.flatnonzero(image.max(1)), np.flatnonzero(image.max(0))
    for number, drawing in enumerate(album.pixels.numpy()):
        first = np.flatnonzero(drawing.max(1))[0]
        for mirrored in (False, True):
            yield number, mirrored, rows[0] - first, columns[0] - np.flatnonzero(drawing.max(0))[0]


def placed(album, number, mirrored, top, left):
    image = np.zeros((FRAME, FRAME), np.uint8)
    drawing = album.pixels[number].numpy()
    image[top : top + DRAWN, left : left + DRAWN] = drawing[:, ::-1] if mirrored else drawing
    return image


def test_fixed_sets_have_each_drawing_once_in_the_middle(albums):
    album, images = albums["test"], Drawings(albums["test"], FRAME, 9)
    assert images.size == len(album.labels) == 2 * len(FOLDERS)
    pixels, labels = images.batch(0, images.size)
    assert torch.equal(labels, album.labels)
    assert torch.equal(pixels[:, 0, 16:-16, 16:-16], album.pixels)
    assert pixels.flatten(1).sum(1).tolist() == album.pixels.flatten(1).sum(1).tolist()
    assert Drawings(albums["train"], FRAME, 9).size is None


@each("side", [128, 64, 32])
def test_smaller_images_are_means_in_the_same_order(albums, side):
    (large, labels), (small, same) = (Drawings(albums["train"], size, 0).batch(4, 20) for size in (FRAME, side))
    assert small.shape == (20, 1, side, side) and torch.equal(labels, same)
    part = (FRAME // side) ** 2
    assert torch.allclose(large.flatten(1).sum(1) / part, small.flatten(1).sum(1).float(), rtol=2e-3)


def test_images_are_the_same_in_every_batch_and_other_in_every_seed(albums):
    images = Drawings(albums["train"], 64, 0)
    pixels, labels = images.batch(0, 8)
    again, same = images.batch(3, 2)
    assert torch.equal(again, pixels[3:5]) and torch.equal(same, labels[3:5])
    assert not torch.equal(Drawings(albums["train"], 64, 1).batch(0, 8)[0], pixels)


@each("side", [96, 512, 4, 0])
def test_sides_that_a_drawing_does_not_have_are_refused(side):
    album = Album(torch.zeros(1, DRAWN, DRAWN, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64), True)
    with pytest.raises(ValueError, match=f"^side={side} "):
        Drawings(album, side, 0)


def test_folders_with_too_little_are_refused(folder, tmp_path):
    with pytest.raises(OSError, match=r"animals has 0 drawings of 224 pixels or more, and needs 8: apt-get install"):
        read_albums(str(tmp_path))


def drawings_alone(scale, *names):
    group = Group("drawings", 64, 2 / 60, 1 / 60, names, (0,))
    return dataclasses.replace(scale, groups=(group,), test_images=1000)


def test_a_run_learns_from_drawings_and_is_tested_on_all_there_are(albums, folder, small, tmp_path, monkeypatch):
    monkeypatch.setattr(contenders, "DRAWINGS", str(folder))
    scale = drawings_alone(small.scale, "half")
    start, run = runs_of(scale)
    for one in (start, run):
        do_run(one, scale, tmp_path)
    results = read_results(run_folder(tmp_path, run.group, run.row, 0) / RESULTS)
    assert results["test_images"] == 2 * len(FOLDERS) and results["chance"] == 1 / len(FOLDERS)
    assert results["data"] == "drawings of Open Clip Art on 64 pixels, by folder"


def test_a_machine_without_drawings_says_so_and_does_the_rest(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(contenders, "DRAWINGS", str(tmp_path / "missing"))
    groups = (*drawings_alone(small.scale, "half").groups, *small.scale.groups)
    monkeypatch.setitem(SCALES, "smoke", dataclasses.replace(small.scale, groups=groups))
    assert main(["--scale", "smoke", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"skipped: drawings, {tmp_path / 'missing'} is missing: apt-get install openclipart-png" in lines
    assert not [line for line in lines if "drawings/" in line or "start_drawings" in line]
    assert [line for line in lines if "64_class/half seed 0" in line]


def test_labels_are_the_folders():
    assert VARIANTS["drawings"].classes == len(FOLDERS)
    assert [name for name, variant in VARIANTS.items() if variant.label == FOLDER] == ["drawings"]
