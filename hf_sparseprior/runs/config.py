"""Configurations in YAML: `base:` inheritance, cells of a `matrix:`, section.key=value overrides, and checks.

base: ../recipes/deit.yaml           files that this one changes, relative to it: a name or a list, later ones win
SECTION: {KEY: VALUE}                each task says which sections its files have
matrix:                              products of runs; a cell is called VALUE-VALUE-..., in the order of the axes
  data: {cifar10: {base: ../data/cifar10.yaml}, digits: {data: {source: digits}}}    a value and what it changes
  model: [../models/vit_tiny.yaml, ../models/vit_base.yaml]                          or files, called by their names
exclude: [digits-vit_base]           cells of the product that do not exist
cells: {digits-vit_tiny: {trainer: {seed: 1}}}                                       what single cells also change
variants: {dense: {}, violin: {model: {prior: violin}}}                              rows of a comparison
reference: dense                     the row that the others are compared with, or {ROW: ITS REFERENCE}

A file or one of its cells is named FILE or FILE#CELL, on the command line and in `base` alike; FILE#CELL-ROW (FILE#ROW
without a matrix) is a row of a comparison as a run of its own. A cell is the file with what its values say, axis by
axis, and then `cells`: files of `base` are added to those of the file, what has keys is changed key by key, any other
value is replaced. `reference` of a base is replaced whole, and null leaves it out. `${AXIS}` in a text is the cell's
value on that axis, and `${KEY}` a text that the file or an earlier axis gives at the top, such as `title`.
`trainer.output_dir` of a base is not inherited.
`python -m tasks.common.config FILE` lists the cells.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import yaml

from hf_sparseprior.base.checks import check_finite, check_integer, first_line
from hf_sparseprior.base.config_keys import OTHER_NAMES
from hf_sparseprior.base.other_names import OTHER_KEYS

Config = dict[str, dict[str, Any]]  # sections of keys and plain values
# Keys of a comparison in addition to those of the run that its rows change.
COMPARISON = ("first", "seeds", "variants", "reference")
# Keys of a `trainer` section that say how long a run is, and so exclude `minutes`.
LENGTHS = ("num_train_epochs", "max_steps", "learning_rate_steps", "keep_rate_epochs")
FINAL = "final"  # data.stage of runs that train on the validation examples, too
SWEEP = ("title", "seeds", "selection_seeds", "grid", "variants")  # the same of a VTAB sweep


YAML_DEPTH = 100


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # C is 10 times as fast
    """Safe YAML that also reads 1e-3 as a number (YAML 1.1 wants 1.0e-3), and takes no key twice."""

    def get_single_node(self) -> Any:
        """The tree of nodes, in which the keys of a map are checked: YAML itself would take the last."""
        node = super().get_single_node()
        _check_keys_once(node)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _check_keys_once(root: Any) -> None:
    """Raise for a map in a tree of nodes that has a key twice. A key that `<<` brings, too, is there once."""
    left, seen = [root], set()  # an alias may lead back to a node above it
    while left:
        node = left.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            left += node.value
        elif isinstance(node, yaml.MappingNode):
            first: dict[str, int] = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                if (name := str(key.value)) in first and key.tag != "tag:yaml.org,2002:merge":
                    raise yaml.YAMLError(f"key {name!r} stands twice, in lines {first[name]} and {line}")
                first[name] = line
                left.append(value)


def _yaml_problem(error: yaml.YAMLError) -> str:
    """What is wrong, and in which line."""
    problem = getattr(error, "problem", None) or first_line(error)
    mark = getattr(error, "problem_mark", None)
    return problem if mark is None else f"{problem}, line {mark.line + 1}"


def _load(text: str) -> Any:
    """Read YAML that is not nested too deeply: libyaml would recurse without looking at the stack."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > YAML_DEPTH:
            raise yaml.YAMLError(f"nested deeper than {YAML_DEPTH} levels")
    return yaml.load(text, Loader=_Loader)


def parse_value(text: str) -> Any:
    """A value of a key=value override, read as YAML."""
    try:
        return _load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r} is not a YAML value: {_yaml_problem(error)}") from None


def apply_overrides(config: dict[str, dict[str, Any]], overrides: Sequence[str], sections: Sequence[str]) -> None:
    """Write `section.key=value` overrides into a configuration; only these sections may be changed."""
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, name = key.partition(".")
        if not equals or not dot:
            example = "for example model.prior=violin"
            if equals and (full := _with_section(key, sections)):
                example = f"did you mean {full}={text}?"
            raise ValueError(f"override {override!r} must be SECTION.KEY=VALUE; {example}")
        check_known([section], sections, "the configuration")
        config[section][name] = parse_value(text)
    if any(override.startswith("trainer.per_device_train_batch_size=") for override in overrides):
        _check_batch_size(config.get("trainer", {}))


def _with_section(key: str, sections: Sequence[str]) -> str | None:
    """trainer.KEY for a key of that section without one, also under another name; None for other keys."""
    known = trainer_keys() if "trainer" in sections else []
    return next((f"trainer.{name}" for name in (key, *OTHER_KEYS.get(key, ())) if name in known), None)


def _check_batch_size(trainer: Mapping[str, Any]) -> None:
    """Refuse `per_device_train_batch_size`, which was just given, where the batch of all devices decides."""
    if images := trainer.get("effective_batch_size"):
        raise ValueError(
            f"trainer.per_device_train_batch_size does nothing with trainer.effective_batch_size={images}; "
            "give another or null for it"
        )


_ORDER = "trainer.seed alone orders the data"
_METRICS = "metrics need all logits and labels"
_TEXT = "it is for models of text"
_WHOLE = "a run trains, validates and tests; `evaluate` tests alone"
# Keys of transformers' arguments that act in other programs.
WITHOUT_EFFECT = {
    **dict.fromkeys(("data_seed", "train_sampling_strategy", "length_column_name"), _ORDER),
    **dict.fromkeys(("prediction_loss_only", "label_names", "include_for_metrics"), _METRICS),
    **dict.fromkeys(("batch_eval_metrics", "eval_do_concat_batches"), _METRICS),
    **dict.fromkeys(("use_cache", "include_num_input_tokens_seen"), _TEXT),
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), _WHOLE),
    "resume_from_checkpoint": "the same command goes on from the last checkpoint",
}


def check_trainer(trainer: dict[str, Any], metric: str = "accuracy") -> None:
    """Refuse values of a `trainer` section at which transformers would fail much later, and correct its strategies.

    `metric`: what chooses the best epoch by default.
    """
    for key, value in trainer.items():
        if key.endswith("_strategy") and value is False:
            trainer[key] = "no"  # YAML reads a bare no as False
    from hf_sparseprior.runs.tracking import trackers

    _check_numbers(trainer)
    trackers(trainer.get("report_to"))
    check_text("trainer.output_dir", trainer.get("output_dir"))
    averaged = trainer.get("ema_decay") is not None
    judged = [metric, "loss", *([f"ema_{metric}", "ema_loss"] if averaged else [])]
    chosen = trainer.get("metric_for_best_model")
    if chosen is not None and str(chosen).removeprefix("eval_") not in judged:
        raise ValueError(f"trainer.metric_for_best_model={chosen!r} must be one of {', '.join(judged)}")


def check_text(name: str, value: Any) -> None:
    """Raise ValueError unless a value is text, a path or None; YAML reads 2026 as a number."""
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise ValueError(f"{name}={value!r} must be text; in YAML put it in quotes")


def _check_numbers(trainer: dict[str, Any]) -> None:
    """Refuse text in place of a number: transformers accepts it and fails much later."""
    from hf_sparseprior.training import SparsePriorTrainingArguments

    for field in fields(SparsePriorTrainingArguments):
        value = trainer.get(field.name)
        number = isinstance(field.default, (int, float)) and not isinstance(field.default, bool)
        if number and value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ValueError(f"trainer.{field.name}={value!r} must be a number")
        counted = field.name.startswith("per_device_") or field.name.endswith("_accumulation_steps")
        if counted and value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"trainer.{field.name}={value} must be an integer of 1 or more")
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name in WITHOUT_EFFECT and value is not None and value != default:
            raise ValueError(f"trainer.{field.name}={value!r} would do nothing: {WITHOUT_EFFECT[field.name]}")
    if (seed := trainer.get("seed")) is not None:
        check_integer("trainer.seed", seed, 0)
    if (epochs := trainer.get("num_train_epochs")) is not None and not epochs >= 0:
        raise ValueError(f"trainer.num_train_epochs={epochs} must be 0 or more")
    if (minutes := trainer.get("minutes")) is not None:
        check_finite("trainer.minutes", minutes, zero=False)
        for name in LENGTHS:
            if trainer.get(name) is not None:
                raise ValueError(f"trainer.{name}={trainer[name]!r} excludes trainer.minutes={minutes}; set it to null")


def trainer_keys() -> list[str]:
    """Every key of a `trainer` section."""
    from hf_sparseprior.training import SparsePriorTrainingArguments

    return [*(field.name for field in fields(SparsePriorTrainingArguments) if field.init), "minutes"]


def check_known(given: Iterable[str], known: Sequence[str], where: str, kind: str = "key") -> None:
    """Raise for the first unknown key, naming the known one that others call so, or the nearest one. `kind`: what
    errors call a key.
    """
    for key in given:
        if key not in known:
            near = [name for name in (*OTHER_KEYS.get(str(key), ()), OTHER_NAMES.get(str(key), "")) if name in known]
            near = near or difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"{where} has no {kind} {key!r}; {hint}")


def check_name(name: str, where: str) -> None:
    """Raise ValueError unless this can be the name of a folder."""
    if not re.fullmatch(r"[\w+,=][\w+.,=-]*", name):
        raise ValueError(
            f"{where} {name!r} must be a name of letters, digits and + - _ . , = only, not starting with - or ."
        )


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file of keys and values.

    Raises:
        OSError: for a missing file. ValueError: for what is not YAML, or no map.
    """
    if not path.is_file():
        raise FileNotFoundError(missing_file(path))
    with open(path, encoding="utf-8") as file:
        try:
            content = _load(file.read()) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not YAML: {_yaml_problem(error)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold keys and values, got {content!r}")
    return content


def missing_file(path: Path) -> str:
    """What to say of a configuration that does not exist: its whole path, and names that are near or what to do."""
    folder = path.parent
    named = sorted(file.name for file in folder.glob(f"*{path.suffix or '.yaml'}")) if folder.is_dir() else []
    if near := difflib.get_close_matches(path.name, named):
        advice = f"did you mean {' or '.join(str(folder / name) for name in near)}?"
    elif folder.is_dir():
        advice = "its folder has " + (", ".join(named[:10]) if named else "no configuration")
    else:
        advice = "its folder does not exist either; relative paths begin where the command runs"
    return f"the configuration {path.absolute()} does not exist; {advice}"


# ---- cells ----------------------------------------------------------------------------------------------------------


def split_cell(path: str | Path) -> tuple[Path, str | None]:
    """FILE and CELL of FILE#CELL; CELL is None if no cell is named."""
    path = Path(path)
    name, mark, cell = path.name.partition("#")
    return (path.with_name(name), cell) if name and mark else (path, None)


def config_name(path: str | Path) -> str:
    """The name of a configuration in folders: FILE, or FILE_CELL, without the file's suffix."""
    file, cell = split_cell(path)
    return file.stem if cell is None else f"{file.stem}_{cell}"


def read_cell(path: str | Path) -> dict[str, Any]:
    """The content of FILE, FILE#CELL or FILE#CELL-ROW as the module's docstring says, its bases not read.

    Raises:
        ValueError: for a matrix if no cell is named, an unknown cell, and bad axes, with file and axis or cell.
        OSError: for a missing file.
    """
    file, name = split_cell(path)
    cells = read_cells(file)
    if name is None:
        if "" in cells:
            return cells[""]
        raise ValueError(f"{file} is a matrix; name one of its cells, {file}#CELL: {', '.join(cells)}")
    rows = read_rows(cells, file)
    check_known([name], [*filter(None, cells), *rows], str(file), "cell")
    return cells[name] if name in cells else rows[name]


def read_cells(file: Path) -> dict[str, dict[str, Any]]:
    """The content of every cell of a file by name. For a file without a matrix: {"": its content}."""
    content = _with_located_bases(read_yaml(file), file.parent, str(file))
    matrix, exclude, changes = (content.pop(key, None) for key in ("matrix", "exclude", "cells"))
    if matrix is None and exclude is None and changes is None:
        return {"": content}
    if not isinstance(matrix, dict) or not matrix:
        raise ValueError(f"{file}: matrix={matrix!r} must hold a name and values for each axis")
    axes = {str(axis): _read_axis(values, file.parent, f"{file}, axis {axis!r}") for axis, values in matrix.items()}
    names = ["-".join(values) for values in itertools.product(*axes.values())]
    if len(set(names)) < len(names):
        raise ValueError(f"{file}: two cells are called {next(name for name in names if names.count(name) > 1)!r}")
    exclude, changes = exclude or [], changes or {}
    if not isinstance(exclude, list) or not isinstance(changes, dict):
        raise ValueError(f"{file}: `exclude` must be a list of cells, and `cells` hold changes by cell")
    check_known([*exclude, *changes], names, str(file), "cell")
    cells = {}
    for name, values in zip(names, itertools.product(*axes.values()), strict=True):
        if name not in exclude:
            where = f"{file}#{name}"
            own = _with_located_bases(changes.get(name) or {}, file.parent, where)
            layers = [content, *(axes[axis][value] for axis, value in zip(axes, values, strict=True)), own]
            cells[name] = _merge(layers, dict(zip(axes, values, strict=True)), where)
    return cells


def read_rows(cells: Mapping[str, dict[str, Any]], file: Path) -> dict[str, dict[str, Any]]:
    """The rows of `read_cells`' comparisons as runs by name: CELL-ROW, or ROW without a matrix.

    Raises:
        ValueError: for a row that has the name of another row or of a cell, or holds no sections.
    """
    found: dict[str, dict[str, Any]] = {}
    for cell, content in cells.items():
        rows = content.get("variants")
        for row, changes in rows.items() if isinstance(rows, dict) else ():
            name = f"{cell}-{row}" if cell else str(row)
            if name in found or name in cells:
                raise ValueError(f"{file}: two cells or rows are called {name!r}")
            if not isinstance(changes or {}, dict):
                raise ValueError(f"{file}, variant {row!r} must hold sections, got {changes!r}")
            own = {key: value for key, value in content.items() if key not in (*COMPARISON, *SWEEP)}
            # A row with a base of its own changes this base instead of what the comparison shares.
            shared = {} if changes and changes.get("base") else own
            found[name] = _merge([shared, changes or {}], {}, name)
    return found


def _read_axis(values: Any, folder: Path, where: str) -> dict[str, dict[str, Any]]:
    """What each value of an axis changes, with its bases located."""
    if isinstance(values, list) and all(isinstance(value, str) for value in values):
        values = {config_name(value): {"base": value} for value in values}
    if not isinstance(values, dict) or not values:
        raise ValueError(f"{where}: {values!r} must hold values and what they change, or be a list of files")
    for value in values:
        check_name(str(value), f"{where}: value")
    return {
        str(value): _with_located_bases(changes or {}, folder, f"{where}, value {value!r}")
        for value, changes in values.items()
    }


def _with_located_bases(content: Any, folder: Path, where: str) -> dict[str, Any]:
    """A copy whose names of files, in `base`, `first` and the rows of `variants`, no longer depend on its folder."""
    if not isinstance(content, dict):
        raise ValueError(f"{where} must hold keys and values, got {content!r}")
    content = dict(content)
    if "base" in content:
        content["base"] = locate(content["base"], folder, where)
    if isinstance(content.get("first"), list) and all(isinstance(name, str) for name in content["first"]):
        content["first"] = [str(folder / name) for name in content["first"]]
    if isinstance(content.get("variants"), str):
        file = folder / content["variants"]
        content["variants"], folder = read_yaml(file), file.parent
    rows = content.get("variants")
    if isinstance(rows, dict):
        whole = {row: changes for row, changes in rows.items() if isinstance(changes, dict)}
        located = {row: _with_located_bases(own, folder, f"{where}, variant {row!r}") for row, own in whole.items()}
        content["variants"] = {**rows, **located}
    return content


def locate(base: Any, folder: Path, where: str) -> list[str]:
    """The files that a `base` names, with their folder.

    Raises:
        ValueError: if it is neither the name of a file nor a list of names.
    """
    names = [base] if isinstance(base, str) else [] if base is None else base
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where}: base={base!r} must be the name of a file, or a list of names")
    return [str(folder / name) for name in names]


def _merge(layers: Sequence[dict[str, Any]], names: dict[str, str], where: str) -> dict[str, Any]:
    """Contents merged over each other. `names` and texts at the top of earlier layers are what `${...}` stands for."""
    merged: dict[str, Any] = {}
    for layer in layers:
        texts = {**{key: value for key, value in merged.items() if isinstance(value, str)}, **names}
        for key, value in _fill(layer, texts, where).items() if names else layer.items():
            if key == "base":
                merged[key] = [*merged.get(key, []), *value]
            elif isinstance(value, dict) and isinstance(merged.get(key), dict):
                merged[key] = {**merged[key], **value}
            else:
                merged[key] = value
    return merged


def _fill(value: Any, texts: Mapping[str, str], where: str) -> Any:
    """A copy of a value with `${NAME}` replaced in all its texts."""
    if isinstance(value, dict):
        return {key: _fill(part, texts, where) for key, part in value.items()}
    if isinstance(value, list):
        return [_fill(part, texts, where) for part in value]
    if not isinstance(value, str):
        return value

    def text(match: re.Match[str]) -> str:
        check_known([match[1]], list(texts), where, "name")
        return texts[match[1]]

    return re.sub(r"\$\{([^{}]*)\}", text, value)


# ---- files over their bases -----------------------------------------------------------------------------------------


def read_layers(
    path: str | Path, sections: Sequence[str], others: Sequence[str] = (), seen: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """The content of FILE or FILE#CELL over that of the files that its `base` names.

    Args:
        path: the file, or one of its cells.
        sections: names of what holds keys and values.
        others: names of top-level keys that are no sections; a file's value replaces that of its bases as a whole.
        seen: the files whose `base` led here.

    Returns:
        A dict for each section, and the other keys that some file has.
    """
    path = Path(path)
    if path.resolve() in seen:
        raise ValueError(f"{path}: `base` leads back to this file")
    content = read_cell(path)
    if "variants" in content and "variants" not in others:
        file, cell = split_cell(path)
        rows = read_rows({cell or "": content}, file)
        raise ValueError(f"{path} is a comparison; name one of its rows, {file}#ROW: {', '.join(rows)}")
    return merge_bases(content, str(path), sections, others, (*seen, path.resolve()))


def merge_bases(
    content: dict[str, Any],
    where: str,
    sections: Sequence[str],
    others: Sequence[str] = (),
    seen: tuple[Path, ...] = (),
) -> dict[str, Any]:
    """A content as `read_cell` returns it over that of its bases; the other arguments as in `read_layers`."""
    own = {key: value for key, value in content.items() if key != "base"}
    check_known(own, (*sections, *others), where)
    layers = [read_layers(base, sections, others, seen) for base in content.get("base", [])]
    for layer in layers:  # a run does not share its folder with what builds on its file
        layer.get("trainer", {}).pop("output_dir", None)
    config: dict[str, Any] = {section: {} for section in sections}
    below: dict[str, Any] = {}
    for layer in layers:
        below.update(layer.get("trainer", {}))
    above = own.get("trainer") or {}
    if isinstance(above, dict) and above.get("per_device_train_batch_size") and "effective_batch_size" not in above:
        _check_batch_size(below)
    for key, values in (pair for layer in (*layers, own) for pair in layer.items()):
        if key in others:
            config[key] = values
        elif isinstance(values, dict):
            config[key].update(values)
        else:
            raise ValueError(f"{where}: section {key!r} must hold keys and values, got {values!r}")
    return config


def load_sections(
    path: str | Path, overrides: Sequence[str], sections: Sequence[str], check: Callable[[Config], Config]
) -> Config:
    """Read a configuration file, apply `section.key=value` overrides, check every key and value.

    Raises:
        ValueError: for unknown keys (the message has the nearest known one), bad values, or text that is not YAML.
        OSError: for a missing file.
    """
    config = read_layers(Path(path), sections)
    apply_overrides(config, overrides, sections)
    return check(config)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested dicts and, where all keys of a level are numbers, lists: {"a.0.b": 1} -> {"a": [{"b": 1}]}.

    Args:
        flat: values by dotted key; a dict under one key is merged with what other keys put there.
    """
    root: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split(".")
        node = root
        for part in parents:
            node = node.setdefault(part, {})
        both = isinstance(value, dict) and isinstance(node.get(last), dict)
        node[last] = {**node[last], **value} if both else value
    return {key: _lists(value) for key, value in root.items()}


def nested_names(value: Any) -> Any:
    """mm's keys with dots (names of modules, in `custom_keys`) as nested keys.

    The first records had the whole configuration as dotted keys, in which the two look the same.
    """
    if isinstance(value, dict):
        return nested({key: nested_names(part) for key, part in value.items()})
    return [nested_names(part) for part in value] if isinstance(value, list) else value


def _lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and all(key.isdigit() for key in value):
        return [_lists(value[key]) for key in sorted(value, key=int)]
    return {key: _lists(part) for key, part in value.items()}
