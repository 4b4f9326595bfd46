"""Judge the features of a saved model: python -m tasks.pretraining.evaluate MODEL [--linear] [data.key=value ...]

k-NN with the training images of the run's data as neighbours and, with --linear, a linear classifier trained on them.
The model may be of any of our families and any task: a run of pretraining, a classifier, or what `convert` made. It
writes results_SPLIT.json, with --linear results_SPLIT_linear.json, into RUN/evaluation for RUN/model, into
RUN/evaluation/NAME for another model of the run. Those of other data and settings have a name of their own
(hf_sparseprior/runs/measured.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModel
from transformers.utils import CONFIG_NAME
from transformers.utils import logging as transformers_logging

import hf_sparseprior  # noqa: F401  registers the Auto classes
from hf_sparseprior.base.own_files import import_files
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.data import ImageDataset, Preparation, as_trained, load_data
from hf_sparseprior.images.processor import make_processor
from hf_sparseprior.images.sections import field_names
from hf_sparseprior.images.sources import drop_corrupt
from hf_sparseprior.images.split import part
from hf_sparseprior.models.pretrained import check_saved_folder, load_whole_model, weights_sha256
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.config import FINAL, Config, apply_overrides, check_known, read_layers
from hf_sparseprior.runs.measured import drop_limits, own_config, settings, suffix
from hf_sparseprior.runs.processes import check_alone
from hf_sparseprior.runs.results import Results
from hf_sparseprior.runs.run_folder import check_place, evaluation_folder, model_folder, stored_config
from hf_sparseprior.saving.saved_processor import load_image_processor
from tasks.pretraining import commands
from tasks.pretraining.config import SECTIONS, EvaluationConfig
from tasks.pretraining.evaluation import (
    LINEAR_FILE,
    Knn,
    LinearState,
    last_layers,
    linear_images,
    linear_predict,
    pooled,
    standard_error,
    train_linear,
)

READ = ("data", "evaluation")


def run_config(model: Path, file: str | None = None, overrides: Sequence[str] = ()) -> tuple[Config, dict[str, Any]]:
    """The sections `data` and `evaluation` of a YAML file, or of the run that saved the model, with overrides; and what
    of `evaluation` was given here, not by the run.
    """
    config = read_layers(Path(file), SECTIONS) if file else stored_config(model)
    config = {section: dict(config.get(section, {})) for section in READ}
    given: Config = {"data": {}, "evaluation": dict(config["evaluation"]) if file else {}}
    for sections in (config, given):
        apply_overrides(sections, overrides, READ)
    if not file:
        drop_limits(config, model, overrides)
    for section, kind in zip(READ, (DataConfig, EvaluationConfig), strict=True):
        check_known(config[section], field_names(kind), f"section {section!r}")
        kind(**config[section])
    return config, given["evaluation"]


def evaluate_model(
    folder: Path,
    config: Config,
    split: str,
    out: Path,
    batch_size: int,
    linear: bool,
    device: str,
    workers: int = 0,
    new_crop: bool = False,
) -> dict[str, Any]:
    """k-NN and, if asked, linear accuracy of a saved model's features on a split; writes them into `out`.

    `new_crop`: images are cut as `evaluation.eval_crop_ratio` says, not as the saved image processor does.

    Returns:
        The content of the results.

    Raises:
        ValueError: for bad values, or in one of several processes. OSError: for missing or damaged files.
    """
    check_alone("evaluate")
    check_place(out, "--out")
    if split == "validation" and config["data"].get("stage") == FINAL:
        raise ValueError(
            "--split validation with data.stage=final: these are training images, and each would be its own nearest "
            "neighbour"
        )
    label = label_of(folder, config, split, out)
    backbone = load_whole_model(folder, AutoModel).eval().to(device)
    processor, evaluation = load_image_processor(folder), EvaluationConfig(**config["evaluation"])
    data_config = as_trained(DataConfig(**config["data"]), processor)
    data = load_data(data_config)
    data.splits = {name: data.splits[name] for name in ("train", split)}
    drop_corrupt(data, data_config, workers, show_progress=True)
    print(f"measures {part(data, data_config, split)}", flush=True)
    if new_crop:
        processor = make_processor(backbone.config, evaluation.eval_crop_ratio, data_config.decoding, "evaluation")
    plain = Preparation(processor, backbone.config.num_channels)
    images = {name: ImageDataset(own, plain, data_config.cache) for name, own in data.splits.items()}
    knn = Knn(images["train"], evaluation, len(data.classes), batch_size, device, progress=True)
    predicted = {f"{split}_knn_accuracy": knn.predict(pooled(backbone), images[split])}
    if linear:
        encode = last_layers(backbone, evaluation)
        train = linear_images(data.splits["train"], backbone.config, evaluation, 0)
        kept = LinearState(out / f"{split}_{LINEAR_FILE}", backbone, evaluation, (data_config, len(train)))
        classifier = train_linear(
            encode, train, len(data.classes), evaluation, device, 0, workers, progress=True, kept=kept
        )
        predicted[f"{split}_linear_accuracy"] = linear_predict(encode, classifier, images[split], batch_size)
    labels = images[split].images.labels
    right = {name: (found == labels).astype(float) for name, found in predicted.items()}
    results = Results(
        task="pretraining",
        metrics={name: float(values.mean()) for name, values in right.items()},
        config=config,
        parameters=backbone.num_parameters(),
        details={
            "model": str(folder),
            "model_sha256": weights_sha256(folder),
            "prior": backbone.config.prior_name,
            "split": split,
            "images": len(labels),
            "neighbours_from": len(images["train"]),
            "data": data.description,
            "standard_errors": {name: standard_error(values) for name, values in right.items()},
        },
    )
    return results.write(out / f"results_{label}.json")


def label_of(folder: Path, config: Config, split: str, out: Path) -> str:
    """What the name of the results has: the split, and more where it is not the run's own data and settings."""

    def measured(of: Any) -> dict[str, Any]:
        found = settings(of, *READ)
        found.pop("evaluation.linear", None)  # which has a name of its own
        return found

    label = f"{split}_linear" if config["evaluation"].get("linear") else split
    own = own_config(folder, out)
    return label + suffix(out, f"results_{label}", config, weights_sha256(folder), measured, own)


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.evaluate()
    arguments = parser.parse_intermixed_args(argv)
    for name, least in (("batch_size", 1), ("workers", 0)):
        if (value := getattr(arguments, name)) < least:
            parser.error(f"--{name.replace('_', '-')} {value} must be {least} or more")
    transformers_logging.disable_progress_bar()

    def work() -> None:
        import_files(arguments.imports)
        folder = model_folder(arguments.model, CONFIG_NAME)
        check_saved_folder(folder)
        config, given = run_config(folder, arguments.config, arguments.overrides)
        out, split = arguments.out or evaluation_folder(folder), arguments.split
        config["evaluation"]["linear"] = linear = arguments.linear or bool(given.get("linear"))
        results = evaluate_model(
            *(folder, config, split, out, arguments.batch_size, linear, arguments.device, arguments.workers),
            new_crop="eval_crop_ratio" in given,
        )
        for name, value in results["metrics"].items():
            error = 100 * results["standard_errors"][name]
            print(f"{name}: {100 * value:.2f} % of {results['images']} images, standard error {error:.2f}")
        print(f"results: {out}/results_{label_of(folder, config, split, out)}.json")

    return run_command(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
