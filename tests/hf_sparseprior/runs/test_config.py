"""Cells of a matrix, rows of a comparison as runs, and bases that name either."""

import pytest

from hf_sparseprior.runs import config
from hf_sparseprior.runs.config import (
    apply_overrides,
    config_name,
    nested,
    nested_names,
    parse_value,
    read_cell,
    read_layers,
    read_yaml,
)
from hf_sparseprior.runs.run_folder import default_output_dir
from tasks.common import config as command
from tests.each import each

SECTIONS = ("data", "model", "trainer")
MATRIX = """
base: shared.yaml
title: Tiny
trainer: {seed: 1}
matrix:
  data:
    digits: {data: {source: digits}}
    photos: {base: [photos.yaml], title: "${title} on ${data}", trainer: {epochs: 3}}
  model: [models/small.yaml, models/large.yaml]
exclude: [digits-large]
cells:
  photos-large: {model: {width: 9}, trainer: {output_dir: "out/${data}_${model}"}}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "shared.yaml").write_text("trainer: {rate: 1e-3, seed: 0}\nmodel: {width: 1}")
    (tmp_path / "photos.yaml").write_text("data: {source: photos, flip: 0.5}")
    (tmp_path / "models" / "small.yaml").write_text("model: {width: 2, prior: dense}")
    (tmp_path / "models" / "large.yaml").write_text("base: small.yaml\nmodel: {width: 4}")
    (tmp_path / "matrix.yaml").write_text(MATRIX)
    return tmp_path


def write(folder, text, name="run.yaml"):
    (folder / name).write_text(text)
    return folder / name


def read(path, others=("title",)):
    return read_layers(path, SECTIONS, others)


def test_a_cell_is_the_file_with_what_its_values_say(folder):
    assert read(f"{folder}/matrix.yaml#digits-small") == {
        "title": "Tiny",
        "data": {"source": "digits"},
        "model": {"width": 2, "prior": "dense"},
        "trainer": {"rate": 1e-3, "seed": 1},
    }
    # The bases of all axes come before what the file itself says, `cells` comes last.
    assert read(f"{folder}/matrix.yaml#photos-large") == {
        "title": "Tiny on photos",
        "data": {"source": "photos", "flip": 0.5},
        "model": {"width": 9, "prior": "dense"},
        "trainer": {"rate": 1e-3, "seed": 1, "epochs": 3, "output_dir": "out/photos_large"},
    }


def test_a_file_changes_a_cell_and_may_be_an_axis_of_another(folder):
    path = write(folder, "base: matrix.yaml#photos-small\nmodel: {prior: violin}\n")
    expected = read(f"{folder}/matrix.yaml#photos-small")
    assert read(path) == {**expected, "model": {"width": 2, "prior": "violin"}}
    other = write(folder, "matrix: {start: [run.yaml, 'matrix.yaml#photos-large']}\n", "other.yaml")
    assert list(config.read_cells(other)) == ["run", "matrix_photos-large"]
    assert read(f"{other}#run") == read(path)


def test_a_folder_is_not_inherited(folder):
    path = write(folder, "base: matrix.yaml#photos-large")
    assert read(path)["trainer"] == {"rate": 1e-3, "seed": 1, "epochs": 3}


def test_lists_and_numbers_pass_through_and_bases_may_be_filled_in(folder):
    text = (
        "matrix: {size: {small: {}, large: {}}}\nbase: models/${size}.yaml\nmodel: {deep: [1, ['${size}']], heads: 3}\n"
    )
    assert read(f"{write(folder, text)}#large")["model"] == {
        "width": 4, "prior": "dense", "deep": [1, ["large"]], "heads": 3,
    }  # fmt: skip


def test_a_file_without_a_matrix_keeps_its_texts(folder):
    assert read(write(folder, "model: {prior: '${data}'}\n"))["model"] == {"prior": "${data}"}


@each(
    "name, message",
    [
        (
            "matrix.yaml",
            r"matrix.yaml is a matrix; name one of its cells, .*#CELL: digits-small, photos-small",
        ),
        ("matrix.yaml#", r"matrix.yaml has no cell ''"),
        ("matrix.yaml#photo-small", r"matrix.yaml has no cell 'photo-small'; did you mean 'photos-small'\?"),
        ("matrix.yaml#digits-large", r"matrix.yaml has no cell 'digits-large'"),
        ("shared.yaml#a", r"shared.yaml has no cell 'a'"),
    ],
)
def test_cells_that_there_are_not(folder, name, message):
    with pytest.raises(ValueError, match=message):
        read(folder / name)


@each(
    "text, message",
    [
        ("matrix: {}", "matrix={} must hold a name and values for each axis"),
        ("matrix: 5", "matrix=5 must hold"),
        ("exclude: [a]", "matrix=None must hold"),
        ("cells: {a: {}}", "matrix=None must hold"),
        ("matrix: {data: {}}", "bad.yaml, axis 'data': {} must hold values and what they change, or be a"),
        ("matrix: {data: shared.yaml}", "axis 'data': 'shared.yaml' must hold values"),
        ("matrix: {data: [1]}", "axis 'data': [1] must hold values"),
        ("matrix: {data: {a/b: {}}}", "axis 'data': value 'a/b' must be a name of letters"),
        ("matrix: {data: {a: 5}}", "axis 'data', value 'a' must hold keys and values, got 5"),
        ("matrix: {data: {a: {base: 5}}}", "axis 'data', value 'a': base=5 must be the name of a file, or a list of"),
        ("matrix: {data: {a: {}}}\nexclude: [b]", "bad.yaml has no cell 'b'"),
        ("matrix: {data: {a: {}}}\nexclude: a", "`exclude` must be a list of cells"),
        ("matrix: {data: {a: {}}}\ncells: {aa: {}}", "bad.yaml has no cell 'aa'; did you mean 'a'?"),
        ("matrix: {data: {a: {}}}\ncells: {a: 5}", "bad.yaml#a must hold keys and values, got 5"),
        ("matrix: {data: {a: {model: 5}}}", "bad.yaml#a: section 'model' must hold keys and values, got 5"),
        ("matrix: {data: {a: {modle: {}}}}", "bad.yaml#a has no key 'modle'; did you mean 'model'?"),
        ("matrix: {data: {a: {model: {x: '${dat}'}}}}", "bad.yaml#a has no name 'dat'; did you mean 'data'?"),
        ("matrix: {data: {a-b: {}, a: {}}, model: {c: {}, b-c: {}}}", "two cells are called 'a-b-c'"),
        ("matrix: {data: {a: {base: 'bad.yaml#a'}}}", "`base` leads back to this file"),
    ],
)  # fmt: skip
def test_bad_matrices_name_file_and_axis_or_cell(folder, text, message):
    path = write(folder, text, "bad.yaml")
    with pytest.raises(ValueError) as error:
        read(f"{path}#a")
    assert message in str(error.value) and "bad.yaml" in str(error.value)


def test_a_missing_base_of_a_value_is_named(folder):
    with pytest.raises(FileNotFoundError, match="no_such"):
        read(f"{write(folder, 'matrix: {data: [no_such.yaml]}')}#no_such")


# ---- rows -----------------------------------------------------------------------------------------------------------

COMPARISON = """
seeds: [0]
model: {width: 3}
matrix:
  data:
    digits: {data: {source: digits}}
    photos: {base: photos.yaml, seeds: [0, 1], variants: {dense: {trainer: {epochs: 0}}, more: {}}}
variants:
  dense: {model: {prior: dense}}
  0.5: {model: {prior: half}}
  other: {base: models/large.yaml, trainer: {seed: 5}}
"""


def test_rows_of_a_comparison_are_runs(folder):
    path = write(folder, COMPARISON)
    run = read(f"{path}#photos-0.5")
    assert run == {"data": {"source": "photos", "flip": 0.5}, "model": {"width": 3, "prior": "half"}, "trainer": {}}
    # A row with a base of its own shares nothing.
    assert read(f"{path}#digits-other") == read(folder / "models" / "large.yaml") | {"trainer": {"seed": 5}}
    # A value may change rows, which keep their place, and add some.
    assert next(iter(read_cell(f"{path}#photos")["variants"].items())) == ("dense", {"trainer": {"epochs": 0}})
    assert read_cell(f"{path}#photos")["seeds"] == [0, 1]
    assert read(f"{path}#photos-more")["model"] == {"width": 3}


def test_rows_in_a_file_of_their_own(folder):
    write(folder / "models", "a: {base: small.yaml}\nb: {}", "rows.yaml")
    path = write(folder, "variants: models/rows.yaml\nmodel: {width: 7}")
    assert read(f"{path}#a")["model"] == {"width": 2, "prior": "dense"} and read(f"{path}#b")["model"] == {"width": 7}


def test_a_comparison_is_no_run(folder):
    path = write(folder, COMPARISON)
    with pytest.raises(ValueError, match=r"#digits is a comparison; name one of its rows, .*#ROW: digits-dense"):
        read(f"{path}#digits")
    with pytest.raises(ValueError, match=r"has no cell 'digits-dens'; did you mean 'digits-dense'"):
        read(f"{path}#digits-dens")


def test_a_row_called_as_a_cell_is_refused(folder):
    path = write(folder, "matrix: {x: {a: {}, a-b: {}}}\nvariants: {b: {}}")
    with pytest.raises(ValueError, match=r"run.yaml: two cells or rows are called 'a-b'"):
        read(f"{path}#a")


@each("changes", ["5", "dense", "[dense]"])
def test_a_row_holds_sections(folder, changes):
    path = write(folder, f"variants: {{a: {changes}}}")
    with pytest.raises(ValueError, match=r"run.yaml, variant 'a' must hold sections, got "):
        read(f"{path}#a")


# ---- names ----------------------------------------------------------------------------------------------------------


@each(
    "path, name",
    [("a/smoke.yaml", "smoke"), ("a/t.yaml#lora-0.5", "t_lora-0.5"), ("t.v2.yaml", "t.v2"), ("a#b/t.yaml#c", "t_c")],
)
def test_folders_follow_from_task_file_and_cell(path, name):
    assert config_name(path) == name and default_output_dir("video", path) == f"outputs/video/{name}"


def test_the_command_lists_cells_and_rows(folder, capsys):
    assert command.main([str(write(folder, COMPARISON))]) == 0
    names = capsys.readouterr().out.split()
    assert names == [
        "digits", "photos", "digits-dense", "digits-0.5", "digits-other", "photos-dense", "photos-0.5", "photos-other",
        "photos-more",
    ]  # fmt: skip
    assert command.main([str(folder / "shared.yaml")]) == 0
    assert "is a single configuration" in capsys.readouterr().out
    assert command.main([str(folder / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("depth", [101, 100_000])
def test_yaml_that_is_nested_too_deeply_is_refused(depth, tmp_path):
    nested = "[" * depth + "]" * depth
    with pytest.raises(ValueError, match="nested deeper than 100 levels"):
        parse_value(nested)
    (tmp_path / "deep.yaml").write_text(f"data: {nested}\n")
    with pytest.raises(ValueError, match=r"deep\.yaml is not YAML: nested deeper than 100 levels"):
        read_yaml(tmp_path / "deep.yaml")
    assert parse_value("[[1]]") == [[1]]


def test_a_batch_size_that_would_do_nothing_is_refused():
    sizes = ["trainer.effective_batch_size=64", "trainer.per_device_train_batch_size=8"]
    with pytest.raises(ValueError, match="per_device_train_batch_size does nothing with trainer"):
        apply_overrides({"trainer": {}}, sizes, ["trainer"])
    config = {"trainer": {"effective_batch_size": 64}}
    apply_overrides(config, ["trainer.effective_batch_size=null", sizes[1]], ["trainer"])
    assert config["trainer"] == {"effective_batch_size": None, "per_device_train_batch_size": 8}


def test_dotted_keys_become_sections_and_lists():
    flat = {"a.0.b": 1, "a.1.b": 2, "a.10.b": 3, "c.d.e": [4], "f": None}
    assert nested(flat) == {"a": [{"b": 1}, {"b": 2}, {"b": 3}], "c": {"d": {"e": [4]}}, "f": None}
    assert nested_names({"a": [{"b.c": 1, "b.d": 2}]}) == {"a": [{"b": {"c": 1, "d": 2}}]}


@each(
    "name, advice",
    [
        ("matrx.yaml#digits-small", "did you mean {folder}/matrix.yaml"),
        ("zzz.yaml", "its folder has "),
        ("nowhere/zzz.yaml", "its folder does not exist either; relative paths begin where the command runs"),
    ],
)
def test_a_missing_file_is_named_with_its_whole_path_and_what_to_do(folder, name, advice, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(FileNotFoundError) as error:
        read(name)
    path = folder / name.partition("#")[0]
    assert str(error.value).startswith(f"the configuration {path} does not exist; ")
    assert advice.replace("{folder}/", "") in str(error.value)
