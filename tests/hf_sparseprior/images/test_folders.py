"""Folders and tables of images as people have them: what systems leave in them, and what splits are called."""

import base64
import io
import os
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from PIL import Image

from hf_sparseprior.cli.image_files import ENDINGS, PassedOver, TooDeep, decode_image
from hf_sparseprior.cli.labelled_images import read_class_folders, read_image
from hf_sparseprior.images.config import DataConfig, Decoding
from hf_sparseprior.images.data import load_data
from hf_sparseprior.images.sources import READERS, decode, drop_corrupt, stream_data
from hf_sparseprior.runs.command import tell_data
from hf_sparseprior.runs.results import write_results
from tests.each import each

Image.new("RGB", (8, 8)).save(png := io.BytesIO(), "PNG")
PNG = png.getvalue()
COLOURS = {"cat": (200, 30, 30), "dog": (30, 200, 30)}


def draw(path: Path, colour=(1, 2, 3)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), colour).save(path)
    return path


def class_folders(root: Path, count: int = 3) -> None:
    for name, colour in COLOURS.items():
        for number in range(count):
            draw(root / name / f"{number}.png", colour)


def read(root: Path, source: str = "imagefolder", **settings):
    return READERS[source](DataConfig(source=source, path=str(root), **settings))


def test_what_systems_leave_in_folders_is_no_data(tmp_path, capsys):
    class_folders(tmp_path)
    junk = [
        *("__MACOSX/cat/._0.png", ".ipynb_checkpoints/x/0.png", "cat/.ipynb_checkpoints/0-checkpoint.png"),
        *("cat/._0.png", "cat/Thumbs.db", "dog/desktop.ini", "dog/@eaDir/0.png", ".DS_Store"),
    ]
    for name in junk:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"no image")
    (tmp_path / "dog" / "notes.txt").write_text("seen")
    data = load_data(DataConfig(source="imagefolder", path=str(tmp_path)))
    assert data.classes == ["cat", "dog"] and sum(map(len, data.splits.values())) == 6
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")]
    # Folders are counted once, whatever is in them; those of other classes' names are not looked into.
    assert re.fullmatch(r"left out: 8 hidden \(.*\), 1 no image \(.*notes\.txt\)", line), line
    assert read_class_folders(tmp_path, ["cat", "dog"]) == [
        (tmp_path / name / f"{number}.png", index) for index, name in enumerate(COLOURS) for number in range(3)
    ]


@each("ending", [*ENDINGS, ".PNG", ".Jpg", ".JFIF", ".AVIF"])
def test_every_ending_is_read_in_any_case(ending, tmp_path):
    formats = {".jfif": "JPEG", ".jpe": "JPEG", ".pgm": "PPM", ".pbm": "PPM", ".tif": "TIFF"}
    Image.init()
    kind = formats.get(ending.lower()) or Image.EXTENSION[ending.lower()]
    class_folders(root := tmp_path / ending[1:])
    mode = {".pgm": "L", ".pbm": "1"}.get(ending.lower(), "RGB")
    level = 255 if mode == "1" else 200
    Image.new("RGB", (8, 8), (level, level, level)).convert(mode).save(root / "cat" / f"more{ending}", kind)
    data = read(root)
    assert len(data.splits["train"]) == 7 and data.passed_over.line() is None
    names = [Path(data.splits["train"].name(index)).name for index in range(7)]
    pixels = np.asarray(data.splits["train"].read(names.index(f"more{ending}")))
    assert pixels.shape == (8, 8, 3) and abs(pixels.astype(int) - level).max() < 8


def test_names_that_are_no_utf8_are_printed_in_one_line():
    passed_over = PassedOver()
    for path in ("a/\udcff\udcfe.txt", "a/line\nbreak"):
        passed_over.add(f"of {path[2:3]!r}", path)
    line = passed_over.line()
    assert "\n" not in line and line.encode() and r"\udcff" in line and r"\n" in line


@each("text", ["Training Testing", "Train Test", "seg_train seg_test", "TRAIN TEST", "train Val test",
               "Training Valid Testing"])  # fmt: skip
def test_splits_are_known_by_their_usual_names(text, tmp_path):
    names, root = text.split(), tmp_path / text
    for name in names:
        class_folders(root / name, 1 + names.index(name))
    class_folders(root / "sketches")
    data = read(root)
    ours = ("train", "validation", "test") if len(names) == 3 else ("train", "test")
    assert {split: len(images) for split, images in data.splits.items()} == {
        split: 2 * (1 + number) for number, split in enumerate(ours)
    }
    assert data.classes == ["cat", "dog"]
    assert data.passed_over.line() == f"left out: 1 folder of no split ({root / 'sketches'})"


def test_a_split_that_lies_in_a_folder_of_its_own_name(tmp_path):
    for name in ("seg_train", "seg_test"):
        class_folders(tmp_path / name / name)
        (tmp_path / name / ".DS_Store").touch()
    (tmp_path / ".git").mkdir()
    (tmp_path / "README.txt").touch()
    data = read(tmp_path)
    assert set(data.splits) == {"train", "test"}
    line = data.passed_over.line()
    assert re.fullmatch(r"left out: 3 hidden \(.*\.DS_Store\), 1 file of no split \(.*README\.txt\)", line), line


def test_a_run_is_told_where_each_split_comes_from(tmp_path):
    for name in ("Training", "Testing"):
        class_folders(tmp_path / "folders" / name, 10)
    settings = {"source": "imagefolder", "path": str(tmp_path / "folders")}
    origins = {"train": "folder Training", "validation": "12.5 % cut from train", "test": "folder Testing"}
    assert load_data(DataConfig(**settings, validation_fraction=0.125)).origins == origins
    class_folders(tmp_path / "folders" / "valid", 10)
    both = load_data(DataConfig(**settings, stage="final")).origins
    assert both["train"] == "folder Training and folder valid"
    (tmp_path / "tables").mkdir()
    rows = "image,label\n../folders/Testing/cat/0.png,a\n../folders/Testing/dog/0.png,b\n"
    for name in ("train", "test", "more"):
        (tmp_path / "tables" / f"{name}.csv").write_text(rows)
    data = read(tmp_path / "tables", "csv")
    assert data.origins == {"train": "train.csv", "test": "test.csv"}
    assert data.passed_over.line() == f"left out: 1 table of no split ({tmp_path / 'tables' / 'more.csv'})"


@each(
    "text, message",
    [
        ("train val valid", "data.splits is needed, 'val' and 'valid' are both for validation"),
        ("Train training", "data.splits is needed, 'Train' and 'training' are both for train"),
        ("train eval", "data.splits is needed, 'eval' may be for validation or for the test"),
        ("Testing val", "has no training split named train or training, only Testing, val"),
    ],
)
def test_splits_that_are_not_clear_are_refused(text, message, tmp_path):
    root = tmp_path / text
    for name in text.split():
        class_folders(root / name)
    with pytest.raises(ValueError, match=re.escape(message)):
        read(root)
    if "eval" in text:
        assert set(read(root, splits={"train": "train", "test": "eval"}).splits) == {"train", "test"}


def test_files_and_classes_whose_names_are_no_utf8(tmp_path, capsys):
    """Names are bytes; printing, JSON and pictures take text alone."""
    for split in (b"Training", b"Testing"):
        for name in (b"caf\xe9", b"dog"):
            folder = os.path.join(os.fsencode(tmp_path), b"data", split, name)
            os.makedirs(folder)
            for number in range(4):
                with open(os.path.join(folder, b"x\xe9%d.png" % number), "wb") as file:
                    Image.new("RGB", (4, 4), (number, 0, 0)).save(file, "PNG")
    with open(os.path.join(folder, b"\xff.png"), "wb") as file:  # of the test
        file.write(b"no image")
    config = DataConfig(source="imagefolder", path=str(tmp_path / "data"), corrupt="skip")
    data = load_data(config)
    assert data.classes == [r"caf\udce9", "dog"]
    left_out = drop_corrupt(data, config)
    assert len(left_out["test"]) == 1 and len(data.splits["test"]) == 8
    assert {data.splits["test"].read(index).getpixel((0, 0))[0] for index in range(8)} == {0, 1, 2, 3}
    write_results(tmp_path / "results.json", {"corrupt": left_out, "classes": data.classes})
    assert r"\udcff.png" in (tmp_path / "results.json").read_text()
    assert len(read_class_folders(tmp_path / "data" / "Training", data.classes)) == 8
    tell_data("images", {"trains": (8, os.fsdecode(b"folder \xff"))}, data.classes)
    assert r"(folder \udcff)" in capsys.readouterr().out


# ---- one decoder ----------------------------------------------------------------------------------------------------


def scaled(values):
    return np.repeat((values // 256).astype(np.uint8)[..., None], 3, -1)


DEEP = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1040  # 0 to 65520
GREY = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
COLOUR = np.stack([GREY, GREY[::-1], GREY.T], -1)
PALETTE = np.random.default_rng(0).integers(0, 256, (256, 3), dtype=np.uint8)


def with_palette():
    image = Image.fromarray(GREY)
    image.putpalette(PALETTE.tobytes())
    return image


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    return {"exif": exif}


IMAGES = {  # name: image, how it is saved, the colours that readers must find
    "deep.png": (lambda: Image.fromarray(DEEP), {}, scaled(DEEP)),
    "deep.tif": (lambda: Image.fromarray(DEEP), {}, scaled(DEEP)),
    "deep.pgm": (lambda: Image.fromarray(DEEP), {}, scaled(DEEP)),
    "wide.tif": (lambda: Image.fromarray(DEEP.astype(np.int32)), {}, scaled(DEEP)),
    "palette.png": (with_palette, {}, PALETTE[GREY]),
    "clear.png": (with_palette, {"transparency": bytes(range(256))}, PALETTE[GREY]),
    "palette.gif": (with_palette, {}, PALETTE[GREY]),
    "alpha.png": (lambda: Image.fromarray(np.dstack([COLOUR, GREY])), {}, COLOUR),
    "grey_alpha.png": (lambda: Image.fromarray(np.dstack([GREY, GREY.T])), {}, scaled(GREY * np.uint16(256))),
    "bits.png": (lambda: Image.fromarray(GREY > 100), {}, scaled((GREY > 100) * np.uint16(65535))),
    "print.tif": (lambda: Image.fromarray(np.dstack([COLOUR, 0 * GREY]), "CMYK"), {}, 255 - COLOUR),
    "turned.png": (lambda: Image.fromarray(COLOUR), turned(), np.rot90(COLOUR, -1)),
}


def readers():
    """How each task reads an image file: (path) -> uint8 RGB."""
    yield "classification", lambda path: decode(path, path, Decoding(depth16="scale"))
    yield "export", lambda path: read_image(Path(path), SimpleNamespace(depth16="scale"), 3)
    if find_spec("pycocotools"):
        yield "heads", lambda path: import_module("tasks.heads.data").read_rgb(Path(path))
    if find_spec("mmcv"):
        yield "mm", lambda path: import_module("tasks.common.mm.reading").read_image(path)[..., ::-1]


@each("name", IMAGES)
@pytest.mark.filterwarnings("error:Palette")
def test_every_task_reads_the_same_colours(name, tmp_path):
    make, options, expected = IMAGES[name]
    make().save(tmp_path / name, **options)
    for task, read_file in readers():
        np.testing.assert_array_equal(np.asarray(read_file(str(tmp_path / name))), expected, task)


@each(
    "values, message",
    [
        (DEEP.astype(np.float32), "floating-point pixels have no known range; save 8-bit or 16-bit images"),
        (DEEP.astype(np.int32) * 2, "pixels from 0 to 131040 are not of 16 bits, 0 to 65535"),
        (DEEP.astype(np.int32) - 5, "pixels from -5 to 65515 are not of 16 bits, 0 to 65535"),
    ],
)
def test_pixels_without_a_known_range_are_refused_by_name(values, message, tmp_path):
    Image.fromarray(values).save(tmp_path / "pixels.tif")
    for _, read_file in readers():
        with pytest.raises(OSError, match=re.escape(f"pixels.tif is not a readable image ({message})")):
            read_file(str(tmp_path / "pixels.tif"))


def test_scaling_is_said_once_and_what_pipelines_cut_off_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("hf_sparseprior.cli.image_files._scaled", set())
    for number in range(2):
        Image.fromarray(DEEP).save(tmp_path / f"{number}.png")
        decode_image(tmp_path / f"{number}.png", f"{number}.png")
    said = "0.png has 16 bits a channel; such images are divided by 256\n"
    assert capsys.readouterr().err == said
    for read_file in (lambda path: decode(path, path), lambda path: read_image(Path(path), SimpleNamespace(), 3)):
        with pytest.raises(TooDeep, match=r"0\.png has more than 8 bits a channel"):
            read_file(str(tmp_path / "0.png"))


# ---- tables ---------------------------------------------------------------------------------------------------------


def table(tmp_path, rows, header="image,label"):
    for row in rows:
        draw(tmp_path / row.split(",")[0])
    file = tmp_path / "data.csv"
    file.write_text("\n".join([header, *rows]) + "\n")
    return file


@each("text", ["train val test", "Training dev Testing"])
def test_a_column_of_splits_is_used(text, tmp_path):
    names = text.split()
    splits = [names[0]] * 4 + [names[1]] * 2 + [names[2]] * 3
    rows = [f"{number}.png,{'ab'[number % 2]},{split}" for number, split in enumerate(splits)]
    data = read(table(tmp_path, rows, "image,label,Split"), "csv")
    assert data.origins["validation"] == f"rows of split {names[1]}"
    found = {split: [Path(images.name(n)).stem for n in range(len(images))] for split, images in data.splits.items()}
    assert found == {"train": list("0123"), "validation": list("45"), "test": list("678")}
    assert [data.classes[label] for label in data.splits["test"].labels] == ["a", "b", "a"]


def test_values_of_the_column_that_are_no_splits_are_refused(tmp_path):
    rows = [f"{number}.png,{'ab'[number % 2]},{split}" for number, split in enumerate(["train", "train", "unused"])]
    file = table(tmp_path, rows, "image,label,split")
    with pytest.raises(ValueError, match=r"data\.csv, column split: 'unused' is no split; data\.splits names others"):
        read(file, "csv")


# ---- labels ---------------------------------------------------------------------------------------------------------


def write_labels(root: Path, labels: list[str]) -> Path:
    """labels.csv in a folder, two images of each label; line 2 is the first row."""
    draw(root / "x.png")
    rows = "".join(f"x.png,{label}\n" for label in labels for _ in range(2))
    (root / "labels.csv").write_text(f"image,label\n{rows}")
    return root / "labels.csv"


@each(
    "labels, classes, said",
    [
        (["10", "2", "-1"], ["-1", "2", "10"], None),
        (["7", "007", "10"], ["007", "10", "7"], "line 4: label '007'"),
        (["1", "--1", "2"], ["--1", "1", "2"], "line 4: label '--1'"),
        (["1_0", "+1", "1.0"], ["+1", "1.0", "1_0"], None),
        (["\u0661", "1"], ["1", "\u0661"], "line 2: label '\u0661'"),
    ],
)
def test_labels_are_numbers_only_as_python_writes_them(labels, classes, said, tmp_path, capsys):
    data = read(write_labels(tmp_path, labels), "csv")
    assert data.classes == classes
    assert [data.classes[label] for label in data.splits["train"].labels] == [name for name in labels for _ in "ab"]
    printed = capsys.readouterr().out
    assert printed == (f"{tmp_path}/labels.csv, {said} is no whole number, so all labels are names\n" if said else "")
    (tmp_path / "names.txt").write_text("\n".join(classes))
    read(tmp_path / "labels.csv", "csv", classes=str(tmp_path / "names.txt"))
    assert not capsys.readouterr().out  # a list of classes says it


@each("value", ["nan", "NaN", "<NA>"])
def test_no_class_is_made_from_a_missing_value(value, tmp_path):
    table = write_labels(tmp_path, ["a", value, "b"])
    with pytest.raises(ValueError, match=rf"labels.csv, line 4: the label is missing, it is '{value}'$"):
        read(table, "csv")
    (tmp_path / "names.txt").write_text(f"{value}\na\nb\n")  # unless it is one
    assert read(table, "csv", classes=str(tmp_path / "names.txt")).classes[0] == value


COLUMNS = {
    "missing number": ([1.0, float("nan"), 2.0], "the label is missing, it is nan"),
    "missing text": (["a", "", "b"], "the label is missing, it is ''"),
    "null": (["a", None, "b"], "the label is missing, it is None"),
    "list": ([[1], [2, 3], [4]], r"label \[1\] must be one name or number, not several"),
    "record": ([{"name": "a"}] * 3, r"label {'name': 'a'} must be one name or number, not several"),
    "bytes": ([b"a" * 500] * 3, rf"label b'{'a' * 75}\.\.\. must be one name or number, not bytes"),
    "no label": ([0, -1, 1], r"label -1 is not among the classes \['a', 'b'\]; -1 marks images without labels"),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_bad_labels_of_tables_are_named_with_their_row(kind, tmp_path):
    labels, said = COLUMNS[kind]
    classes = datasets.ClassLabel(names=["a", "b"]) if kind == "no label" else None
    table = datasets.Dataset.from_dict({"image": [PNG] * 3, "label": labels})
    table = table.cast_column("label", classes) if classes else table
    table.to_parquet(tmp_path / "train.parquet")
    number = 0 if kind in ("list", "record", "bytes") else 1
    with pytest.raises(ValueError, match=rf"^{tmp_path}, train row {number}: {said}") as raised:
        read(tmp_path, "parquet", label_column="label")
    assert len(str(raised.value)) < len(str(tmp_path)) + 200
    table.to_parquet(tmp_path / "test.parquet")
    table.to_parquet(tmp_path / "validation.parquet")
    (tmp_path / "names.txt").write_text("a\nb\n")
    settings = {} if classes else {"classes": str(tmp_path / "names.txt")}
    config = DataConfig(source="parquet", path=str(tmp_path), label_column="label", streaming=True, **settings)
    with pytest.raises(ValueError, match=r"train shard 0 row \d: (the )?label "):
        list(stream_data(config).splits["train"])


def test_images_as_text_are_named_with_their_row_and_cut(tmp_path):
    text = base64.b64encode(PNG * 9).decode()
    (tmp_path / "labels.csv").write_text(f"image,label\n{text},a\n{text},b\n")
    with pytest.raises(ValueError, match=r"labels.csv, line 2: '.{76}\.\.\. does not exist \(2 of 2"):
        read(tmp_path / "labels.csv", "csv")
    datasets.Dataset.from_dict({"image": [text] * 2, "label": ["a", "b"]}).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(ValueError, match=rf"train row 0 holds {len(text)} characters of text, 'iVBOR.{{71}}\.\.\., in"):
        read(tmp_path, "parquet")
