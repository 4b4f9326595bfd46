"""mm config files: reading them with overrides, checking them, storing them as JSON."""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmengine.config import Config, DictAction
from mmengine.config.utils import MODULE2PACKAGE
from mmengine.runner import Runner

from hf_sparseprior.base.checks import first_line
from hf_sparseprior.runs.config import check_known, missing_file, nested_names, split_cell
from hf_sparseprior.runs.run_folder import default_output_dir
from hf_sparseprior.training.finite import SETTING
from tasks.common.annotated_folders import read_classes

# mmengine looks for the base `mmseg::FILE` in a distribution of another name than the maintained fork has.
MODULE2PACKAGE["mmseg"] = "mmseg"
OUTPUT_DIR, WORK_DIR = "output_dir", "work_dir"  # the name that every task uses, and mmengine's own
SEEDS = "seeds"  # those of a comparison, whose rows are the cells
# What a run reads of a config. Whatever else stands at the top was used when the file was run.
READ = {*inspect.signature(Runner.__init__).parameters} - {"self", "cfg", "launcher", "experiment_name"}
READ |= {"find_unused_parameters", "model_wrapper_cfg", "compile", "sync_bn", "tta_model", "tta_pipeline", SETTING}
READ |= {"activation_checkpointing", "efficient_conv_bn_eval"}


def load_config(task: str, path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """An mm config file with overrides.

    A file may have `cells`, a dict of changes by name. FILE#CELL is the file with the changes of one cell, merged as
    mmengine merges a file over its `_base_`, before the overrides.

    The folder of the run is `output_dir`, as in every task, in files and overrides; mmengine's own name, `work_dir`,
    does the same. The Config has it as `work_dir`. Default: outputs/TASK/FILE, or outputs/TASK/FILE_CELL.
    `nonfinite_loss`, "stop" or "continue", may be given to every file.

    Args:
        task: name of the task's folder.
        path: the config, which is Python and is run.
        overrides: "key.key=value", values as mm's `--cfg-options` writes them.

    Raises:
        OSError: for a missing file.
        ValueError: for a file that does not run, or an override of something that does not exist.
    """
    file, cell = split_cell(path)
    config = read_file(file)
    take_cell(config, file, cell)
    if OUTPUT_DIR in config:
        config[WORK_DIR] = config.pop(OUTPUT_DIR)
    config.setdefault(WORK_DIR, default_output_dir(task, path))
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise ValueError(f"{override!r} must be key=value")
        key = WORK_DIR if key == OUTPUT_DIR else key
        if key != SETTING:  # a setting of ours, which no file has to name
            check_key(config, key)
        if (name := key.partition(".")[0]) not in READ:
            raise ValueError(
                f"{override!r} would do nothing: {name} was used when the file was read; change it in the file, or "
                "give the settings that are made of it"
            )
        try:
            config.merge_from_dict({key: DictAction._parse_iterable(value)})
        except (AssertionError, KeyError, TypeError) as error:
            raise ValueError(f"{override!r}: {first_line(error)}") from None
        except RecursionError:  # mmengine's parser on commas within round brackets alone, as in dict(a=1,b=2)
            raise ValueError(f"{override!r}: the value is no number, text or list; write it into the file") from None
    config[WORK_DIR] = str(config[WORK_DIR])  # mmengine reads 2026 as a number
    fill_classes(config)
    return config


def read_file(file: Path) -> Config:
    """An mm config file as it is, its cells and seeds included.

    Raises:
        OSError: for a missing file.
        ValueError: for a file that does not run.
    """
    if not file.is_file():
        raise OSError(f"--config: {missing_file(file)}")
    try:
        return Config.fromfile(str(file))
    except ImportError:
        raise
    except Exception as error:  # a config is a program and can fail like one
        raise ValueError(f"--config {file}: {type(error).__name__}: {first_line(error)}") from None


def fill_classes(config: Config) -> None:
    """Give every part of the model whose num_classes is None as many classes as the training data has.

    Raises:
        OSError: for a missing list of classes.
        ValueError: if the data does not name its classes.
    """
    parts = [config.get("model")]
    empty = []
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            empty += [part] if "num_classes" in part and part["num_classes"] is None else []
            parts += part.values()
        elif isinstance(part, (list, tuple)):
            parts += part
    if not empty:
        return
    dataset = wrapped_data(config.train_dataloader.dataset)[0]
    classes = (dataset.get("metainfo") or {}).get("classes")
    if classes is None and dataset.type == "FolderSegmentation":
        classes = read_classes(dataset.data_root)
    if classes is None:
        raise ValueError("num_classes=None needs train_dataloader.dataset.metainfo.classes, the names of the classes")
    for part in empty:
        part["num_classes"] = len(classes)


def take_cell(config: Config, file: Path, cell: str | None) -> None:
    """Merge what a cell changes into a config, which then has neither `cells` nor `seeds`.

    Raises:
        ValueError: for an unknown cell, or if a file has cells and none is named.
    """
    cells = config.pop("cells", {})
    config.pop(SEEDS, None)
    if cell is not None:
        check_known([cell], list(cells), str(file), "cell")
        try:
            config.merge_from_dict(cells[cell])
        except (AssertionError, KeyError, TypeError) as error:
            raise ValueError(f"{file}#{cell}: {first_line(error)}") from None
    elif cells:
        raise ValueError(f"{file} is a matrix; name one of its cells, {file}#CELL: {', '.join(cells)}")


def check_key(config: Any, key: str) -> None:
    """Raise ValueError unless every part of a dotted key but the last exists; a new key at the top is refused too."""
    parts = key.split(".")
    node: Any = config
    for depth, part in enumerate(parts):
        known = [str(index) for index in range(len(node))] if isinstance(node, (list, tuple)) else list(node)
        if part not in known:
            if 0 < depth == len(parts) - 1 and not isinstance(node, (list, tuple)):
                return
            near = difflib.get_close_matches(part, known, n=1)
            hint = f"; did you mean {'.'.join([*parts[:depth], near[0]])!r}?" if near else ""
            raise ValueError(f"{key!r}: there is no {'.'.join(parts[: depth + 1])!r} in the configuration{hint}")
        if depth < len(parts) - 1:
            node = node[int(part) if isinstance(node, (list, tuple)) else part]
            if not isinstance(node, (dict, list, tuple)):
                raise ValueError(f"{key!r}: {'.'.join(parts[: depth + 1])!r} is {node!r} and has no parts")


# Our steps that read, by the names that mm's own tools look for. A run checks what either reads (mm/reading.py).
MM_NAMES: dict[str, dict[str, Any]] = {
    "ReadImage": {"type": "LoadImageFromFile", "imdecode_backend": "pillow"},
    "ReadListedImage": {"type": "LoadImageFromFile", "imdecode_backend": "pillow"},
    "ReadAnnotation": {"type": "LoadAnnotations"},
}
VISUALIZERS = {"mmseg": "SegLocalVisualizer", "mmdet": "DetLocalVisualizer"}  # by default_scope


def for_frameworks(config: Config) -> Config:
    """A copy of a config as the inference of mmsegmentation and mmdetection takes it.

    Steps that read have mm's names, the test data's pipeline stands at the top too, and there is a visualizer.
    """
    config = Config(with_mm_names(config._cfg_dict.to_dict()), filename=config.filename)
    dataset = wrapped_data(config.get("test_dataloader", {}).get("dataset", {}))[0]
    if "pipeline" in dataset:
        config.test_pipeline = copy.deepcopy(dataset.pipeline)
    if config.get("visualizer") is None and config.get("default_scope") in VISUALIZERS:
        config.visualizer = {"type": VISUALIZERS[config.default_scope], "vis_backends": [{"type": "LocalVisBackend"}]}
    return config


def with_mm_names(value: Any) -> Any:
    """A nested configuration in which mm reads."""
    if isinstance(value, dict):
        value = {key: with_mm_names(part) for key, part in value.items()}
        if value.get("type") in MM_NAMES:
            own = {key: part for key, part in value.items() if key not in ("type", "num_classes")}
            return {**own, **MM_NAMES[value["type"]]}
        return value
    return type(value)(map(with_mm_names, value)) if isinstance(value, (list, tuple)) else value


def check_data(config: Config) -> None:
    """Raise OSError if a dataset's folder is missing, before anything is written."""
    for part in ("train", "val", "test"):
        for dataset in wrapped_data((config.get(f"{part}_dataloader") or {}).get("dataset", {})):
            root = dataset.get("data_root")
            if root and not Path(root).is_dir():
                hint = f"; python -m tasks.common.mm.scenes {root} makes it" if "scenes" in Path(root).name else ""
                raise OSError(f"{part}_dataloader.dataset.data_root={root} is not a folder{hint}")


def wrapped_data(dataset: Any) -> list[Any]:
    """The configs of the data sets that a data set of mm repeats, joins or mixes; its own if it is no wrapper."""
    inner = [*dataset.get("datasets", []), *([dataset["dataset"]] if "dataset" in dataset else [])]
    return [own for part in inner for own in wrapped_data(part)] or [dataset]


def check_tested(config: Config) -> None:
    """Raise ValueError for a config without a test, which every run ends with."""
    if missing := [key for key in ("test_dataloader", "test_cfg", "test_evaluator") if not config.get(key)]:
        raise ValueError(f"{', '.join(missing)} must be given: every run is tested at its end")


def compared_metric(config: Config, metrics: Any, name: str) -> Any:
    """The first metric of `test_evaluator`, which may be one or a list, that measures `name`.

    Args:
        config: of a run.
        metrics: the framework's registry that builds them.
        name: what runs are compared by, as the metric's own `metrics` have it.

    Raises:
        ValueError: if none does, or if it writes its results in place of measuring.
    """
    given = config.test_evaluator
    for part in given if isinstance(given, (list, tuple)) else [given]:
        metric = metrics.build(part)
        if name in getattr(metric, "metrics", ()) and not metric.format_only:
            return metric
    raise ValueError(f"test_evaluator must measure {name}, by which runs are compared, and not have format_only")


def as_json(value: Any) -> Any:
    """A nested configuration in plain values, as JSON keeps it: tuples become lists, other objects their repr."""
    if isinstance(value, dict):
        return {str(key): as_json(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(part) for part in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def run_identity(config: Config) -> dict[str, Any]:
    """What makes a run this one, as run_config.json keeps it."""
    return {"config": nested_names(as_json(config.to_dict()))}
