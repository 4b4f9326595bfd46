"""Several labels an image and numbers: from a table to a report, as `data.labels` says."""

import csv
import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import average_precision_score, mean_absolute_error

import hf_sparseprior as sp
from hf_sparseprior.classification.config import check_config, load_config
from hf_sparseprior.classification.task import CLASSIFICATION
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.data import load_data
from hf_sparseprior.images.sources import READERS, strata, tables
from hf_sparseprior.runs import hf_run
from tasks.classification.evaluate import main as evaluate_main

COLOURS = ("red", "green", "blue")
PLACES = np.random.default_rng(0).random((150, 3)) < 0.4


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """150 images with bright bars of up to three colours, and tables of them in each form."""
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    forms = {"names": [], "flags": [], "numbers": []}
    for number, own in enumerate(PLACES):
        pixels = generator.integers(0, 60, (16, 16, 3), np.uint8)
        widths = generator.integers(3, 9, 3)
        for channel in np.flatnonzero(own):
            pixels[4 * channel + 1 : 4 * channel + 4, : widths[channel], channel] = 250
        Image.fromarray(pixels).save(folder / f"{number}.png")
        image = f"{number}.png"
        forms["names"].append({"image": image, "labels": "; ".join(COLOURS[i] for i in np.flatnonzero(own))})
        forms["flags"].append({"image": image, **{name: int(own[i]) for i, name in enumerate(COLOURS)}})
        sizes = {f"{name} size": f"{(widths[i] - 5) / 3 if own[i] else -2:.3f}" for i, name in enumerate(COLOURS[:2])}
        forms["numbers"].append({"image": image, **sizes})
    for name, rows in forms.items():
        write(folder / f"{name}.csv", rows)
    return folder


def write(path, rows):
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def table_of(columns, features=None):
    """A table of `datasets` with a small image in each row."""
    count = len(next(iter(columns.values())))
    pixels = np.zeros((count, 4, 4, 3), np.uint8)
    types = {name: datasets.Dataset.from_dict({name: values}).features[name] for name, values in columns.items()}
    images = [Image.fromarray(own) for own in pixels]
    known = datasets.Features({"photo": datasets.Image(), **types, **(features or {})})
    return datasets.Dataset.from_dict({"photo": images, **columns}, features=known)


def config_of(photos, name, labels, out, **sections):
    """A small run."""
    model = {"image_size": 16, "patch_size": 4, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    trainer = {
        **{"output_dir": str(out), "num_train_epochs": 40, "per_device_train_batch_size": 16, "learning_rate": 3e-3},
        **{"seed": 0, "use_cpu": True, "disable_tqdm": True, "warmup_steps": 5},
    }
    return {section: {} for section in CLASSIFICATION.sections} | {
        "data": {"source": "csv", "path": str(photos / f"{name}.csv"), "labels": labels},
        "model": {**model, "intermediate_size": 48, "prior": "fibottention+violin"},
        "trainer": trainer,
        **sections,
    }


# ---- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["names", "flags"])
def test_several_labels_are_read(name, photos):
    data = READERS["csv"](DataConfig(source="csv", path=str(photos / f"{name}.csv"), labels="several"))
    order = [data.classes.index(colour) for colour in COLOURS]
    assert sorted(data.classes) == sorted(COLOURS) and (name == "names" or data.classes == list(COLOURS))
    np.testing.assert_array_equal(data.splits["train"].labels[:, order], PLACES)


def test_numbers_are_read_and_columns_may_be_chosen(photos):
    path = str(photos / "numbers.csv")
    both = READERS["csv"](DataConfig(source="csv", path=path, labels="numbers"))
    assert both.classes == ["red size", "green size"] and both.splits["train"].labels.dtype == np.float32
    one = READERS["csv"](DataConfig(source="csv", path=path, labels="numbers", label_columns=["green size"]))
    np.testing.assert_array_equal(one.splits["train"].labels, both.splits["train"].labels[:, 1:])
    assert one.classes == ["green size"]


NAMES = datasets.ClassLabel(names=list(COLOURS))
LISTED = [[COLOURS[i] for i in np.flatnonzero(own)] for own in PLACES]
NUMBERED = [np.flatnonzero(own).tolist() for own in PLACES]
FORMS = {  # columns, types, settings
    "lists of names": ({"labels": LISTED, "id": list(range(150))}, None, {}),
    "texts": ({"labels": ["; ".join(own) for own in LISTED]}, None, {}),
    "lists of typed names": ({"seen": NUMBERED, "labels": ["?"] * 150}, {"seen": datasets.List(NAMES)}, {}),
    "lists of numbers": ({"labels": NUMBERED}, None, {"classes": "colours.txt"}),
    "truths": ({name: PLACES[:, i].tolist() for i, name in enumerate(COLOURS)}, None, {}),
    "0 and 1": (
        {**{name: PLACES[:, i].astype(int).tolist() for i, name in enumerate(COLOURS)}, "id": ["?"] * 150},
        None,
        {"label_columns": list(COLOURS)},
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("source", ["parquet", "parquet file", "arrow", "arrow file", "hub"])
def test_several_labels_of_tables_are_read(source, form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "colours.txt").write_text("\n".join(COLOURS))
    columns, features, settings = FORMS[form]
    table = table_of(columns, features)
    path = "table"
    if source == "hub":
        monkeypatch.setattr(tables, "load_hub", lambda config, streaming: ({"train": table}, "hub table"))
    elif source.startswith("arrow"):
        table.save_to_disk("table")
        path = "table/data-00000-of-00001.arrow" if source == "arrow file" else path
    else:
        Path("table").mkdir()
        table.to_parquet("table/train.parquet")
        path = "table/train.parquet" if source == "parquet file" else path
    data = READERS[source.split()[0]](DataConfig(source.split()[0], path, labels="several", **settings))
    order = [data.classes.index(colour) for colour in COLOURS]
    np.testing.assert_array_equal(data.splits["train"].labels[:, order], PLACES)
    assert data.splits["train"].labels.dtype == np.uint8 and data.splits["train"].read(149).size == (4, 4)


def test_splits_of_tables_have_the_classes_of_the_training_images(tmp_path):
    table = table_of({"labels": LISTED})
    table.select(range(100)).to_parquet(tmp_path / "train.parquet")
    table.select(range(100, 150)).to_parquet(tmp_path / "test.parquet")
    data = load_data(DataConfig("parquet", str(tmp_path), labels="several", limit_test=7))
    kept = data.splits["train"].labels.sum(0) + data.splits["validation"].labels.sum(0)
    assert data.classes == sorted(COLOURS) and len(data.splits["test"]) == 7
    np.testing.assert_array_equal(kept, PLACES[:100, [2, 1, 0]].sum(0))


def test_numbers_of_tables_are_read(tmp_path):
    sizes = np.random.default_rng(0).normal(size=(20, 2))
    table = table_of({"red size": sizes[:, 0].tolist(), "age": [7] * 20, "green size": sizes[:, 1].tolist()})
    table.to_parquet(tmp_path / "sizes.parquet")
    path = str(tmp_path / "sizes.parquet")
    data = READERS["parquet"](DataConfig("parquet", path, labels="numbers"))
    assert data.classes == ["red size", "age", "green size"]
    expected = np.stack([sizes[:, 0], np.full(20, 7.0), sizes[:, 1]], 1).astype(np.float32)
    np.testing.assert_array_equal(data.splits["train"].labels, expected)
    one = READERS["parquet"](DataConfig("parquet", path, labels="numbers", label_column="age"))
    assert one.classes == ["age"] and one.splits["train"].labels.tolist() == [[7.0]] * 20


@pytest.mark.parametrize(
    ("labels", "columns", "message"),
    [
        ("several", {"labels": [["a"], ["b"], None]}, "train row 2: the labels are missing; an image without any has"),
        ("several", {"labels": [["a"], ["b", ""]]}, "train row 1: '' in .* must be the name or the number of a label"),
        ("several", {"labels": [[0, 1, 1], [1, 0, 0]]}, "train row 0: labels .* have one twice; a list has those of"),
        ("several", {"labels": [[True, False]]}, "train row 0: True in .* must be the name or the number of a label"),
        ("several", {"labels": [[0.5], [1.5]]}, "train row 0: 0.5 in .* must be the name or the number of a label"),
        ("several", {"labels": [0, 1]}, "train row 0: labels 0 must be a list, or a text with ; between names"),
        ("several", {"red": [0, 1], "blue": [1, None]}, "train row 1: blue=None must be 0 or 1"),
        ("several", {"red": [0, 1], "id": [1, 7]}, "train row 1: id=7 must be 0 or 1"),
        ("numbers", {"age": [1.0, None]}, "train row 1: age=None must be a finite number"),
        ("numbers", {"age": [1.0, float("inf")]}, "train row 1: age=inf must be a finite number"),
        ("numbers", {"labels": [[1.0, 2.0]]}, "train row 0: labels=.* must be a finite number"),
    ],
)
def test_bad_rows_of_tables_are_named(labels, columns, message, tmp_path):
    table_of(columns).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(ValueError, match=message):
        READERS["parquet"](DataConfig("parquet", str(tmp_path), labels=labels))


def test_splits_of_other_names_or_columns_are_refused(tmp_path):
    seen, other = ({"seen": datasets.List(datasets.ClassLabel(names=names))} for names in (["a", "b"], ["b", "a"]))
    table_of({"seen": [[0], [1]]}, seen).to_parquet(tmp_path / "train.parquet")
    table_of({"seen": [[0], [1]]}, other).to_parquet(tmp_path / "test.parquet")
    with pytest.raises(ValueError, match=r"the classes of 'seen' are \['b', 'a'\] in test, but \['a', 'b'\] in train"):
        READERS["parquet"](DataConfig("parquet", str(tmp_path), labels="several"))
    (tmp_path / "test.parquet").unlink()
    with pytest.raises(ValueError, match=r"data.label_columns='size' is not among the columns \['photo', 'seen'\]"):
        READERS["parquet"](DataConfig("parquet", str(tmp_path), labels="numbers", label_columns=["size"]))


def test_one_file_is_no_folder_of_splits(tmp_path):
    table_of({"label": ["a", "b"]}).to_parquet(tmp_path / "photos.parquet")
    path = str(tmp_path / "photos.parquet")
    with pytest.raises(ValueError, match=r"must be a folder, or one .parquet file, so data.splits=.* says nothing"):
        READERS["parquet"](DataConfig("parquet", path, splits={"train": "photos"}))
    with pytest.raises(ValueError, match=r"must be a folder, or one .arrow file"):
        READERS["arrow"](DataConfig("arrow", path))


def test_cuts_and_limits_take_a_share_of_each(photos):
    several = DataConfig(source="csv", path=str(photos / "names.csv"), labels="several", limit_test=12)
    splits = load_data(several).splits
    assert [len(splits[name]) for name in ("train", "validation", "test")][2] == 12
    shares = [splits[name].labels.mean(0) for name in ("train", "validation")]
    np.testing.assert_allclose(*shares, atol=0.12)
    numbers = load_data(DataConfig(source="csv", path=str(photos / "numbers.csv"), labels="numbers")).splits
    assert abs(numbers["train"].labels[:, 0].mean() - numbers["test"].labels[:, 0].mean()) < 0.25


def test_strata():
    labels = np.array([[1, 0, 1], [1, 1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 1]], np.uint8)
    assert strata(labels).tolist() == [2, 1, -1, 0, 2]
    assert strata(np.arange(20, dtype=np.float32)[::-1, None]).tolist() == [number // 2 for number in range(20)][::-1]
    assert strata(np.array([3, 1])).tolist() == [3, 1]


@pytest.mark.parametrize(
    ("labels", "rows", "message"),
    [
        ("several", [{"image": "0.png", "red": 2, "green": 0}], "line 2: red='2' must be 0 or 1"),
        ("several", [{"image": "0.png", "labels": "red"}], "two or more different labels, not \\['red'\\]"),
        ("numbers", [{"image": "0.png", "age": "old"}], "line 2: age='old' must be a finite number"),
        ("numbers", [{"image": "0.png", "age": ""}], "line 2: age='' must be a finite number"),
        ("numbers", [{"image": "0.png", "age": "inf"}], "line 2: age='inf' must be a finite number"),
        ("numbers", [{"image": "0.png"}], "no column of labels, only \\['image'\\]"),
    ],
)
def test_bad_tables_are_named(labels, rows, message, photos):
    write(photos / "bad.csv", rows)
    with pytest.raises(ValueError, match=message):
        READERS["csv"](DataConfig(source="csv", path=str(photos / "bad.csv"), labels=labels))


def test_a_label_of_no_class_is_named(photos):
    (photos / "classes.txt").write_text("red\ngreen\n")
    config = DataConfig(
        source="csv", path=str(photos / "names.csv"), labels="several", classes=str(photos / "classes.txt")
    )
    with pytest.raises(ValueError, match="label 'blue' is not among the classes"):
        READERS["csv"](config)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"labels": "many"}}, "data.labels='many' must be one of classes, several, numbers"),
        (
            {"data": {"labels": "several", "source": "imagefolder"}},
            "several' is for data.source csv, parquet, arrow, hub",
        ),
        (
            {"data": {"labels": "several", "source": "parquet", "streaming": True}},
            "data.labels='several' cannot be used with a stream",
        ),
        ({"data": {"labels": "numbers", "classes": "c.txt"}}, "data.classes='c.txt' is not for data.labels=numbers"),
        ({"data": {"label_columns": "a"}}, "data.label_columns='a' must be a list of names"),
        ({"data": {"label_columns": ["a"], "labels": "classes"}}, "is for data.labels several or numbers, in place of"),
        ({"data": {"label_columns": ["a"], "label_column": "b"}}, "is for data.labels several or numbers, in place of"),
        ({"augmentation": {"balance": "sampling"}}, "augmentation.balance=sampling asks for one class an image"),
        ({"augmentation": {"label_smoothing": 0.1}}, "augmentation.label_smoothing=0.1 asks for one class"),
        ({"data": {"labels": "numbers"}, "augmentation": {"mixup": 0.8}}, "augmentation.mixup=0.8 asks for one class"),
        ({"distillation": {"teacher": "folder"}}, "distillation.teacher=folder asks for one class"),
        ({"trainer": {"metric_for_best_model": "accuracy"}}, "must be one of mean_average_precision, loss"),
    ],
)
def test_bad_settings_are_named(sections, message):
    config = {name: {} for name in CLASSIFICATION.sections}
    config["data"] = {"source": "csv", "path": "table.csv", "labels": "several"}
    for name, values in sections.items():
        config[name] = {**config[name], **values}
    with pytest.raises(ValueError, match=message):
        check_config(config)


# ---- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "labels"), [("names", "several"), ("numbers", "numbers")])
def test_a_run_learns_and_is_evaluated_and_predicts(name, labels, photos, tmp_path, capsys):
    out = tmp_path / "run"
    augmentation = {"mixup": 0.2} if labels == "several" else {}
    results = hf_run.run(CLASSIFICATION, config_of(photos, name, labels, out, augmentation=augmentation))
    kinds = {"several": "with several of 3 labels", "numbers": "with 2 numbers"}
    assert f"trains on 90 images {kinds[labels]}" in capsys.readouterr().out
    pictures = {"several": "confusion.png", "numbers": "numbers.png"}[labels]
    assert {"report.md", "curves.png", "errors.png", pictures} <= {path.name for path in out.iterdir()}
    assert results["warnings"] == [] and results["best_epoch"]["metric"] in results["metrics"]
    saved = json.loads((out / "model" / "config.json").read_text())
    problem = {"several": "multi_label_classification", "numbers": "regression"}[labels]
    assert saved["problem_type"] == problem

    assert evaluate_main([str(out / "model"), "--split", "test"]) == 0
    again = json.loads((out / "evaluation" / "results_test.json").read_text())
    judged = {"several": ["mean_average_precision", "f1"], "numbers": ["mean_absolute_error", "r2"]}[labels]
    for metric in judged:
        assert again["metrics"][f"test_{metric}"] == pytest.approx(results["metrics"][f"test_{metric}"], abs=1e-6)

    # The saved model on the test's files, by `predict`, which knows nothing of the run.
    data = load_data(DataConfig(**results["config"]["data"]))
    test = data.splits["test"]
    files = [test.name(index) for index in range(len(test))]
    sp.predict(out, files, tmp_path / "seen.jsonl", top=3 if labels == "several" else None)
    rows = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    if labels == "several":
        shares = [[row["probabilities"][row["labels"].index(own)] for own in data.classes] for row in rows]
        expected = average_precision_score(test.labels, np.array(shares), average="macro")
        assert results["metrics"]["test_mean_average_precision"] == pytest.approx(expected, abs=1e-6)
        assert expected > 0.65 and 0 < results["threshold"] < 1
    else:
        found = np.array([row["values"] for row in rows])
        error = results["metrics"]["test_mean_absolute_error"]
        assert error == pytest.approx(mean_absolute_error(test.labels, found), abs=1e-5)
        assert (
            results["metrics"]["test_r2"] > 0.5
            and f"test_mean_absolute_error: {error:.4g} of " in capsys.readouterr().out
        )
    assert evaluate_main([str(out / "model"), "--split", "test", "data.labels=classes"]) == 2


def test_rows_of_comparisons_have_one_class_an_image(tmp_path):
    from tasks.common.compare import variant_configs

    shared = {name: {} for name in CLASSIFICATION.sections}
    shared["data"] = {"source": "csv", "path": "table.csv", "labels": "numbers"}
    with pytest.raises(ValueError, match=r"data\.labels='numbers' cannot be compared"):
        variant_configs(CLASSIFICATION, {"dense": {}}, shared, [], {}, "file.yaml")


def test_a_column_of_a_list_is_given_on_the_command_line(tmp_path):
    (tmp_path / "run.yaml").write_text("data: {source: csv, path: t.csv, labels: numbers}\n")
    config = load_config(tmp_path / "run.yaml", ["data.label_columns=[age, size]"])
    assert config["data"]["label_columns"] == ["age", "size"]
