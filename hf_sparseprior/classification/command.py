"""`sparseprior train`: a folder of images or a table, a model by name, and a time. See docs/how-to/own-images.md.

It is a run of the task of classifiers, with a recipe in place of a configuration file: `tasks.classification` of a
checkout evaluates its folder and goes on from it.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers.utils import CONFIG_NAME

from hf_sparseprior.base.families import presets
from hf_sparseprior.base.files import missing_path
from hf_sparseprior.base.json_files import read_json_object
from hf_sparseprior.classification.config import check_config
from hf_sparseprior.classification.task import CLASSIFICATION
from hf_sparseprior.images.model import model_keys
from hf_sparseprior.images.sections import SECTIONS
from hf_sparseprior.patterns.decay import GROWING
from hf_sparseprior.prediction.predictors import local_folder
from hf_sparseprior.priors.layer_priors import changed_given, given_priors
from hf_sparseprior.priors.prior import parse_prior
from hf_sparseprior.runs.config import Config, apply_overrides
from hf_sparseprior.runs.hf_run import run
from hf_sparseprior.runs.printed import print_results
from hf_sparseprior.runs.run_folder import model_folder
from hf_sparseprior.training.allocator import keep_freed_memory

# The recipe of configs/recipes/finetune.yaml (a test compares them), and what else is trained with it.
RECIPE: Config = {
    "augmentation": {
        "crop": "resized",
        "scale": [0.2, 1.0],
        "flip": 0.5,
        "randaugment": "rand-m9-mstd0.5-inc1",
        "label_smoothing": 0.1,
        "eval_crop_ratio": 0.9,
    },
    "model": {"drop_path_rate": 0.1},
    "trainer": {
        "num_train_epochs": 20,
        "per_device_train_batch_size": 32,
        "per_device_eval_batch_size": 64,
        "learning_rate": 5e-4,
        "weight_decay": 0.05,
        "layer_decay": 0.65,
        "warmup_steps": 0.1,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 1.0,
        "dataloader_num_workers": 2,
    },
}
# Over the recipe: a model from scratch; a part of a model, as in configs/classification/tuning.yaml.
SCRATCH: Config = {"trainer": {"layer_decay": 1.0}}
PART: Config = {"model": {"drop_path_rate": 0.0}, "trainer": {"learning_rate": 1e-3, "layer_decay": 1.0}}
TABLES = {".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}


def train(arguments: argparse.Namespace) -> None:
    """What `sparseprior train` does with the arguments of its parser.

    Raises:
        ValueError, OSError: for bad values and missing files, before anything is written.
        RunStopped: on SIGTERM, after a checkpoint was saved.
    """
    keep_freed_memory()
    config = train_config(
        arguments.data,
        arguments.model,
        arguments.out,
        prior=arguments.prior,
        tuning=arguments.tuning,
        labels=arguments.labels,
        length={"num_train_epochs": arguments.epochs, "minutes": arguments.minutes},
        overrides=arguments.set,
    )
    results = run(CLASSIFICATION, config, overwrite=arguments.overwrite)
    if PartialState().is_main_process:
        print_results(results, arguments.out)
        print(
            f"next: sparseprior predict {arguments.out} IMAGES --out found.csv, sparseprior export {arguments.out} OUT"
        )


def train_config(
    data: str,
    model: str,
    out: str,
    *,
    prior: Any = None,
    tuning: str = "full",
    labels: str = "classes",
    length: Mapping[str, float | None] | None = None,
    overrides: Sequence[str] = (),
) -> Config:
    """The configuration of a run.

    Args:
        data: folder of class folders, of train, validation and test with class folders, or of tables; or one table.
        model: a preset (from scratch), the folder of a run or of a saved model (ours, of transformers or timm), or
            a name on the hub.
        out: folder of the run.
        prior: a name, names joined by + or the full form; default: the model's own. A decay that a saved model does not
            have yet starts where it changes nothing (`prior_for_saved`).
        tuning, labels: `tuning.method` and `data.labels`.
        length: {"num_train_epochs": ...} or {"minutes": ...}; without a number 20 epochs.
        overrides: `section.key=value`, over all of these.

    Raises:
        ValueError, OSError: for bad values and names that are none.
    """
    section = model_section(model)
    layers = [RECIPE, SCRATCH if "preset" in section else {}, PART if tuning != "full" else {}]
    config: Config = {name: {} for name in SECTIONS}
    for layer in layers:
        for name, values in layer.items():
            config[name] |= copy.deepcopy(values)
    config["data"] |= {**data_section(data), "labels": labels}
    if prior is not None:
        config["model"]["prior"] = prior if "preset" in section else prior_for_saved(prior, section["pretrained"])
    config["model"] |= section
    if labels != "classes":
        del config["augmentation"]["label_smoothing"]  # of one class an image
    if "drop_path_rate" not in model_keys(section):  # of some models of transformers
        del config["model"]["drop_path_rate"]
    config["tuning"]["method"] = tuning
    if given := {name: number for name, number in (length or {}).items() if number is not None}:
        del config["trainer"]["num_train_epochs"]
        config["trainer"] |= given
    config["trainer"]["output_dir"] = out
    apply_overrides(config, overrides, SECTIONS)
    return check_config(config)


def model_section(model: str) -> dict[str, Any]:
    """`preset` or `pretrained` of what a user named.

    Raises:
        OSError: for a name that is neither a preset nor a folder, and not to be had from the hub.
    """
    if model in presets() and not os.path.isdir(model):
        return {"preset": model}
    if not os.path.lexists(model) and "/" not in model:
        near = difflib.get_close_matches(model, list(presets()))
        advice = f"did you mean {' or '.join(near)}?" if near else f"presets: {', '.join(presets())}"
        raise OSError(f"{model} must be a preset, a folder of a model, or OWNER/NAME on the hub; {advice}")
    return {"pretrained": str(model_folder(local_folder(model), CONFIG_NAME))}


def prior_for_saved(prior: Any, folder: str) -> Any:
    """A prior for a saved model. A decay that the model does not have yet gets `init: growing`: the model
    starts as the saved one, and the decay moves.

    Raises:
        ValueError, OSError: for a prior that does not exist, and a config.json that cannot be read.
    """
    config = read_json_object(Path(folder, CONFIG_NAME))
    saved = config.get("prior", (config.get("sparse_prior") or {}).get("prior"))  # ours, and a stock model's
    had = any(map(_has_decay, given_priors(saved)))
    return changed_given(prior, lambda one: one if had or not _has_decay(one) else _growing(one))


def _has_decay(prior: Any) -> bool:
    return parse_prior(prior)["decay"] not in (None, "none")


def _growing(prior: Any) -> Any:
    """A prior with a decay, of which the start is where it changes nothing."""
    slots = parse_prior(prior)
    decay = {"name": slots["decay"]} if isinstance(slots["decay"], str) else slots["decay"]
    return {**{name: value for name, value in slots.items() if value}, "decay": {"init": GROWING, **decay}}


def data_section(data: str) -> dict[str, Any]:
    """`source` and `path` of what a user named: a table, or a folder by what lies in it.

    Raises:
        OSError: for what is not there. ValueError: for another file, and for tables of several kinds.
    """
    known = ", ".join(TABLES)
    path = Path(data)
    if path.is_dir():
        found = {TABLES[suffix] for entry in os.scandir(path) if (suffix := Path(entry.name).suffix) in TABLES}
        if len(found) > 1:
            raise ValueError(f"{data} holds tables of several kinds, {', '.join(sorted(found))}; name one file")
        return {"source": found.pop() if found else "imagefolder", "path": data}
    if not path.is_file():
        raise FileNotFoundError(missing_path(data, f"give a folder of images or of tables, or one table ({known})"))
    if path.suffix not in TABLES:
        raise ValueError(f"{data} must be a folder of images or of tables, or one table ({known})")
    return {"source": TABLES[path.suffix], "path": data}
