"""Published data sets by their layouts and split rules, compared with listings written by hand. No video is opened."""

import json
import re

import numpy as np
import pytest

pytest.importorskip("av", reason="needs PyAV: pip install '.[video]'")
pytest.importorskip("matplotlib", reason="needs the extra classification")

from sklearn.metrics import balanced_accuracy_score

from hf_sparseprior.runs.metrics import confusion_matrix
from tasks.video.config import PROTOCOLS, SOURCES, DataConfig, check_config
from tasks.video.data import load_data
from tasks.video.sources import READERS
from tasks.video.task import extra_metrics
from tests.each import each

SMARTHOME = {  # file: (cs, cv1, cv2)
    "Cook.Cut_p02_r00_v02_c03": ("test", None, None),  # a class that cross-view lacks
    "Walk_p03_r00_v01_c01": ("train", "train", "train"),
    "Walk_p04_r00_v01_c02": ("train", "test", "test"),
    "Walk_p25_r03_v21_c03": ("validation", None, "train"),
    "Walk_p10_r02_02_c05": ("test", "validation", "validation"),  # as some are called
    "Drink.Fromcup_p17_r05_v12_c06": ("train", None, "train"),
    "Drink.Fromcup_p18_r05_v12_c07": ("test", None, "train"),
    "WatchTV_p19_r00_v03_c04": ("train", None, None),
    "Usetablet_p20_r00_v03_c04": ("test", None, "train"),
}
NUCLA = {  # file: (class, cs, cs without subject 3, cv)
    "a01/v01_s01_e00.avi": ("pick up with one hand", "train", "train", "train"),
    "a01/v03_s10_e01.avi": ("pick up with one hand", "test", "validation", "test"),
    "a08/v02_s09_e02.avi": ("donning", "validation", "train", "train"),
    "a12/v01_s03_e00.avi": ("carry", "train", "test", "train"),
    "a11/v02_s10_e04.avi": ("throw", "test", "validation", "validation"),
}
NTU = {  # file: (class, cs, cv)
    "S001C001P001R001A001_rgb.avi": ("drink water", "train", "test"),
    "S001C002P003R002A013_rgb.avi": ("tear up paper", "test", "train"),
    "S017C003P038R001A060_rgb.avi": ("walking apart", "validation", "validation"),
    "S017C001P038R001A060_rgb.avi": ("walking apart", "validation", "test"),
    "S010C002P019R001A050_rgb.avi": ("punch or slap", "train", "train"),
    "S010C003P040R001A031_rgb.avi": ("point to something", "test", "train"),
    "S018C001P008R001A061_rgb.avi": (None, None, None),  # of NTU RGB+D 120
    "S001C001P001R001A001_ir.avi": (None, None, None),
}


def touch(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_folders_are_read_as_people_have_them(tmp_path, capsys):
    """Splits by their usual names; what is no video, hidden or of no split is counted."""
    videos = [
        f"{split}/{name}/{place}0.MP4" for split in ("Training", "val", "Test") for name in "ab" for place in ("", "s/")
    ]
    touch(tmp_path, videos)
    hidden = ["__MACOSX/a/0.mp4", "Training/.ipynb_checkpoints/0.mp4", "Training/a/._0.mp4"]
    touch(tmp_path, [*hidden, "val/a/notes.txt", "raw/0.mp4"])
    data = load_data(DataConfig(source="folder", path=str(tmp_path)))
    assert {split: len(found) for split, found in data.splits.items()} == dict.fromkeys(data.splits, 4)
    assert data.classes == ["a", "b"] and data.origins == {
        "train": "folder Training", "validation": "folder val", "test": "folder Test"
    }  # fmt: skip
    [line] = capsys.readouterr().out.splitlines()
    counted = r"left out: 3 hidden \(.*\), 1 no video \(.*notes\.txt\), 1 folder of no split \(.*raw\)"
    assert re.fullmatch(counted, line), line
    touch(tmp_path, ["valid/a/0.mp4"])
    with pytest.raises(ValueError, match="one of them must go, 'val' and 'valid' are both for validation"):
        load_data(DataConfig(source="folder", path=str(tmp_path)))
    touch(tmp_path, ["Training/0.mp4"])
    (tmp_path / "valid").rename(tmp_path / "more")
    with pytest.raises(ValueError, match=r"Training/0\.mp4 lies outside the class folders"):
        load_data(DataConfig(source="folder", path=str(tmp_path)))


def read(folder, source, **fields):
    """{split: {file: class}} and the classes."""
    data = load_data(DataConfig(source=source, path=str(folder), **fields))
    splits = {}
    for split, videos in data.splits.items():
        names = [str(path.relative_to(folder)) for path in videos.paths]
        splits[split] = dict(zip(names, [data.classes[label] for label in videos.labels], strict=True))
        assert len(splits[split]) == len(names)
    return splits, data.classes


def expected(rows, column, classes):
    """{split: {file: class}} of a table above."""
    return {
        split: {name: classes[name] for name, row in rows.items() if row[column] == split}
        for split in ("train", "validation", "test")
    }


@pytest.mark.parametrize("protocol, column, count", [("cs", 0, 31), ("cv1", 1, 19), ("cv2", 2, 19)])
def test_toyota_smarthome(protocol, column, count, tmp_path):
    rows = {f"mp4/{name}.mp4": row for name, row in SMARTHOME.items()}
    touch(tmp_path, rows)
    splits, classes = read(tmp_path, "smarthome", protocol=protocol)
    assert splits == expected(rows, column, {name: name[4:].split("_p")[0] for name in rows})
    assert len(classes) == count and classes == sorted(classes)


@pytest.mark.parametrize("fields, column", [({"protocol": "cs"}, 1), ({"protocol": "cs", "held_out": 3}, 2)])
def test_northwestern_ucla_across_subjects(fields, column, tmp_path):
    rows = {f"multiview_action_videos/{name}": row for name, row in NUCLA.items()}
    touch(tmp_path, rows)
    splits, classes = read(tmp_path, "nucla", **fields)
    assert splits == expected(rows, column, {name: row[0] for name, row in rows.items()})
    assert len(classes) == 10 and classes.index("donning") == 6  # a07 and a10 do not exist


def test_northwestern_ucla_across_views(tmp_path):
    touch(tmp_path, NUCLA)
    splits, _ = read(tmp_path, "nucla", protocol="cv")
    assert splits == expected(NUCLA, 3, {name: row[0] for name, row in NUCLA.items()})


@pytest.mark.parametrize("protocol, column, below", [("cs", 1, ""), ("cv", 2, "nturgb+d_rgb/")])
def test_ntu_rgbd_60(protocol, column, below, tmp_path):
    rows = {f"{below}{name}": row for name, row in NTU.items()}
    touch(tmp_path, rows)
    splits, classes = read(tmp_path, "ntu60", protocol=protocol)
    assert splits == expected(rows, column, {name: row[0] for name, row in rows.items()})
    assert len(classes) == len(set(classes)) == 60


def test_ntu_splits_have_the_published_sizes_of_subjects(tmp_path):
    """Shahroudy et al. 2016: 20 of 40 subjects train, or two of three cameras."""
    touch(tmp_path, [f"S001C00{one}P{subject:03}R001A001_rgb.avi" for subject in range(1, 41) for one in (1, 2, 3)])
    for protocol, subjects, trains in (("cs", 20, 60), ("cv", 40, 80)):
        splits, _ = read(tmp_path, "ntu60", protocol=protocol, stage="final")
        assert len({name[8:12] for name in splits["train"]}) == subjects
        assert len(splits["train"]) == trains and len(splits["test"]) == 120 - trains


@pytest.mark.parametrize(
    "source, protocol, subjects, validates",
    [
        *[("ntu60", "cs", (1, 2, 3), 2), ("ntu60", "cv", (3, 5, 40), 5), ("ntu60", "cv", (3, 6), 6)],
        *[("smarthome", "cs", (3, 4, 5), 4), ("nucla", "cs", (1, 4, 7, 10), 7), ("nucla", "cv", (1, 4), 4)],
    ],
)
def test_a_subset_without_the_subject_who_validates_can_be_trained(source, protocol, subjects, validates, tmp_path):
    names = {
        "ntu60": "S001C00{camera}P{subject:03}R001A001_rgb.avi",
        "smarthome": "Walk_p{subject:02}_r00_v01_c0{camera}.mp4",
        "nucla": "a01/v0{camera}_s{subject:02}_e00.avi",
    }
    whose = {
        names[source].format(camera=camera, subject=subject): subject for subject in subjects for camera in (1, 2, 3)
    }
    touch(tmp_path, whose)
    splits, _ = read(tmp_path, source, protocol=protocol)
    assert {whose[name] for name in splits["validation"]} == {validates}
    assert splits["train"] and validates not in {whose[name] for name in splits["train"]}
    assert sum(map(len, splits.values())) == len(whose)


@pytest.mark.parametrize("folders, name", [("classes", "val"), ("flat", "validate"), ("one", "val")])
def test_kinetics_lists(folders, name, tmp_path):
    videos, lists = tmp_path / "videos", tmp_path / "lists"
    lists.mkdir()
    rows = {"train": [], name: []}
    for split, count in (("train", 45), (name, 3)):
        for label in ("riding a bike", "abseiling"):
            for number in range(count):
                stem = f"{split[:1]}{label[:1]}-_{number:06}_{number:06}_{number + 10:06}"
                place = {"classes": f"{split[:5]}/{label}/", "flat": f"{split[:5]}/", "one": ""}[folders]
                place = place.replace("valid", "val")
                if not (split == name and number == 1):  # which is no longer there
                    touch(videos, [f"{place}{stem}.mp4"])
                rows[split].append(f"{label},{stem[:-14]},{number},{number + 10},{split}")
    for split, lines in rows.items():
        (lists / f"{split}.csv").write_text("\n".join(["label,youtube_id,time_start,time_end,split", *lines]))
    config = DataConfig(source="kinetics", path=str(videos), lists=str(lists))
    data = load_data(config)
    assert data.classes == ["abseiling", "riding a bike"]
    sizes = {split: len(part.paths) for split, part in data.splits.items()}
    assert sizes == {"train": 86, "validation": 4, "test": 6}  # a twentieth of 45, of each class
    train, validation = set(data.splits["train"].paths), set(data.splits["validation"].paths)
    assert len(train | validation) == 90 and sum(data.splits["validation"].labels) == 2
    missing = [path for path in data.splits["test"].paths if not path.exists()]
    assert [path.name for path in missing] == ["vr-_000001_000001_000011.mp4", "va-_000001_000001_000011.mp4"]
    for part in data.splits.values():
        for path, label in zip(part.paths, part.labels, strict=True):
            assert path.name[1] == data.classes[label][0]
    assert load_data(config).splits["validation"].paths == data.splits["validation"].paths
    final = load_data(DataConfig(source="kinetics", path=str(videos), lists=str(lists), stage="final"))
    assert set(final.splits["train"].paths) == train | validation


@pytest.mark.parametrize("begin", ["something-something-v2-", ""])
def test_something_something(begin, tmp_path):
    videos, lists = tmp_path / "videos", tmp_path / "lists"
    lists.mkdir()
    templates = {"Putting [something] on a surface": 1, "Holding [something] behind [something]": 0}
    labels = {name.replace("[", "").replace("]", ""): str(number) for name, number in templates.items()}
    (lists / f"{begin}labels.json").write_text(json.dumps(labels))
    for split, first, count in (("train", 0, 20), ("validation", 100, 2)):
        entries = [
            {"id": str(first + number), "label": "x", "template": list(templates)[number % 2], "placeholders": []}
            for number in range(count)
        ]
        touch(videos, [f"{entry['id']}.webm" for entry in entries])
        (lists / f"{begin}{split}.json").write_text(json.dumps(entries))
    fields = {"source": "something_something_v2", "path": str(videos), "lists": str(lists)}
    data = load_data(DataConfig(**fields))
    assert data.classes == ["Holding something behind something", "Putting something on a surface"]
    assert [path.name for path in data.splits["test"].paths] == ["100.webm", "101.webm"]
    assert data.splits["test"].labels.tolist() == [1, 0]
    assert {split: len(part.paths) for split, part in data.splits.items()} == {"train": 18, "validation": 2, "test": 2}
    for path, label in zip(data.splits["train"].paths, data.splits["train"].labels, strict=True):
        assert label == 1 - int(path.stem) % 2
    with pytest.raises(ValueError, match="would make from left to right from right to left"):
        check_config({"data": fields, "augmentation": {"horizontal_flip": 0.5}, "model": {}, "trainer": {}})
    for content, message in (
        ('[{"id": 1, "template": "Throwing [something]"}]', ": 'Throwing something' of video 1 is no class"),
        ("[{", " is not JSON: "),
        ("{}", " must hold a list, not dict"),
    ):
        (lists / f"{begin}train.json").write_text(content)
        with pytest.raises(ValueError, match=rf"train\.json{message}"):
            load_data(DataConfig(**fields))


@pytest.mark.parametrize(
    "source, protocol, name, message",
    [
        ("smarthome", "cs", "Cook.Fry_p02_r00_v02_c03.mp4", "must be called like Cook.Cleandishes_p02_r00_v02_c03.mp4"),
        ("smarthome", "cs", "clip.mp4", "must be called like Cook.Cleandishes_p02_r00_v02_c03.mp4"),
        ("nucla", "cs", "a07/v01_s01_e00.avi", "must be called like a01/v01_s01_e00.avi, with an action of NUCLA"),
        ("ntu60", "cs", "S1C1P1R1A1_rgb.avi", "must be called like S001C001P001R001A001_rgb.avi"),
        ("ntu60", "cs", "S001C001P001R001A001_rgb.avi", "no video is of train .*; subject 1, who validates, is the o"),
        ("smarthome", "cv2", "notes.txt", "no video is of train by data.protocol cv2 of smarthome"),
    ],
)
def test_files_that_do_not_fit_are_named(source, protocol, name, message, tmp_path):
    touch(tmp_path, [name])
    with pytest.raises(ValueError, match=f"{tmp_path}.*{message}"):
        load_data(DataConfig(source=source, path=str(tmp_path), protocol=protocol))


@each(
    "fields, message",
    [
        ({"source": "smarthome"}, "data.protocol=None must be one of cs, cv1, cv2 for data.source smarthome"),
        ({"source": "ntu60", "protocol": "cv2"}, "data.protocol='cv2' must be one of cs, cv for data.source ntu60"),
        ({"source": "folder", "protocol": "cs"}, "data.protocol='cs' must be null for data.source folder"),
        ({"source": "nucla", "protocol": "cs", "held_out": 11}, "data.held_out=11 must be one of the 10 subjects"),
        ({"source": "nucla", "protocol": "cs", "held_out": 0}, "data.held_out=0"),
        ({"source": "nucla", "protocol": "cv", "held_out": 1}, "data.held_out=1 is for data.protocol cs"),
        ({"source": "kinetics"}, "data.lists=None must be the folder of the lists for data.source kinetics"),
        ({"source": "something_something_v2", "lists": ""}, "data.lists='' must be the folder of the lists for"),
        ({"source": "nucla", "protocol": "cs", "lists": "x"}, "data.lists='x' is for data.source csv"),
    ],
)
def test_settings_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(path="videos", **fields)


def test_every_source_has_a_reader():
    assert set(READERS) == set(SOURCES) and set(PROTOCOLS) < set(SOURCES)


def test_the_mean_of_the_classes_accuracies():
    """scikit-learn's balanced accuracy, over the classes that occur."""
    labels, guesses = [0, 0, 0, 0, 1, 1, 2], [0, 0, 0, 1, 1, 2, 0]
    metrics = extra_metrics(confusion_matrix(np.array(labels), np.array(guesses), 4), ["a", "b", "c", "d"])
    assert metrics == {"mean_class_accuracy": pytest.approx(balanced_accuracy_score(labels, guesses))}


def test_a_list_without_a_label_is_refused_by_its_line(tmp_path):
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.csv").write_text("path,label\na.mp4, jump \nb.mp4,sit\n")
    assert read(tmp_path, "csv", lists=str(tmp_path))[1] == ["jump", "sit"]  # without blanks around it
    for label, said in (("nan", "the label is missing, it is 'nan'"), ("  ", "path 'c.mp4' or label ''")):
        (tmp_path / "test.csv").write_text(f"path,label\na.mp4,jump\nc.mp4,{label}\n")
        with pytest.raises(ValueError, match=rf"test.csv, line 3: {said}$"):
            read(tmp_path, "csv", lists=str(tmp_path))
