"""What classification adds to a run of the Trainer: images, a SparsePriorViT, and which part of it is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from transformers import AutoModelForImageClassification, set_seed

from hf_sparseprior.analysis.flops import model_flops
from hf_sparseprior.base.families import family_of
from hf_sparseprior.classification.compression import (
    about_compression,
    cut_out,
    draw_compression,
    retrained,
    search_callbacks,
    search_run,
    start_search,
)
from hf_sparseprior.classification.config import SECTIONS, check_config
from hf_sparseprior.classification.data import Inputs, make_inputs, read_data
from hf_sparseprior.classification.distillation import (
    DistillationConfig,
    end_phase,
    make_distillation,
    start_phase,
    teacher_folder,
)
from hf_sparseprior.classification.label_maps import check_token_classifier, open_label_maps
from hf_sparseprior.classification.token_label_config import TokenLabelConfig
from hf_sparseprior.classification.tuning import TuningConfig, tuned
from hf_sparseprior.compression.search import SEARCH_FILE
from hf_sparseprior.images.augmentation import AugmentationConfig
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.model import build_model, check_pretrained, pretrained_sha256
from hf_sparseprior.images.split import read_split
from hf_sparseprior.models.pretrained import weights_sha256
from hf_sparseprior.runs.config import Config
from hf_sparseprior.runs.hf_run import HFTask, Prepared
from hf_sparseprior.runs.labels import PROBLEMS
from hf_sparseprior.runs.models import about_model, decay_change
from hf_sparseprior.training.mixing import check_mixtoken


def prepare(config: Config, arguments: Any) -> Prepared:
    """Images and model of a run. The parameters that are trained require gradients."""
    data_config, augmentation = DataConfig(**config["data"]), AugmentationConfig(**config["augmentation"])
    data, corrupt = read_data(data_config, arguments)
    phase = DistillationConfig(**config["distillation"])
    problem = PROBLEMS[data_config.labels]
    model, about_start = start_model(config, data.classes, phase, arguments.seed, problem)
    search = start_search(model, config)
    if augmentation.mixtoken:
        check_mixtoken(model)
    token_labels = TokenLabelConfig(**config["token_labels"])
    check_token_classifier(model.config, token_labels)
    with arguments.main_process_first(desc="reading label maps"):
        maps = open_label_maps(token_labels, data, arguments)
    inputs = make_inputs(data, corrupt, data_config, augmentation, model.config, arguments, maps)
    return Prepared(
        model=model,
        classes=data.classes,
        labels=data_config.labels,
        datasets=inputs.datasets,
        description=inputs.description,
        split_names={**data_config.split_names, **data.origins},
        save_processor=inputs.processor.save_pretrained,
        train_sampler=inputs.train_sampler,
        train_collator=inputs.train_collator,
        eval_collator=inputs.eval_collator,
        trainer_options={
            "processing_class": inputs.processor,
            "token_label_weight": token_labels.weight,
            "distillation": make_distillation(config),
            "also_saved": {SEARCH_FILE: search} if search is not None else {},
        },
        finish=lambda trained: end_phase(trained, phase),
        kept=lambda trained: cut_out(search, trained),
        callbacks=search_callbacks(search, config),
        details=_details(config, about_start, inputs, maps, lambda: about_compression(config, model, search)),
    )


def start_model(
    config: Config, classes: list[str], phase: DistillationConfig, seed: int, problem: str | None = None
) -> tuple[Any, dict[str, Any]]:
    """The model before its first step, and what results.json says about it then; `problem` as in `build_model`."""
    set_seed(seed)
    checksum = pretrained_sha256(config["model"])
    model = build_model(retrained(config)["model"], classes, problem)
    decay = decay_change(model)
    about = {
        "pretrained_sha256": checksum,
        "decay_change_at_start": decay["max_decay_change"],
        "mean_decay_change_at_start": decay["mean_decay_change"],
        "alpha_change_at_start": decay["max_alpha_change"],
    }
    set_seed(seed)  # a decay draws random numbers too, so adapters of one seed would start differently with it
    model = tuned(model, TuningConfig(**config["tuning"]))
    start_phase(model, phase)
    return model, about


def _details(
    config: Config,
    about_start: dict[str, Any],
    inputs: Inputs,
    maps: Any,
    about_end: Callable[[], dict[str, Any]],
) -> Callable[[], dict[str, Any]]:
    teacher = teacher_folder(config)
    known = {
        **about_start,
        **asdict(DataConfig(**config["data"]).decoding),
        "method": TuningConfig(**config["tuning"]).method,
        "label_maps_teacher_sha256": maps and maps.header.teacher,
        "teacher_sha256": weights_sha256(teacher) if teacher else None,
    }
    # A stream may meet damaged images until the end of the test.
    return lambda: {**known, "corrupt_images": inputs.corrupt_images(), **about_end()}


def attention_flops(config: Any) -> int | None:
    """Multiply-adds of attention for one image, as `ModelFlops.attention` counts them; None if it cannot."""
    if family_of(config) is None:
        return None
    try:
        return model_flops(config).attention
    except ValueError:
        return None


def models_read(config: Config) -> list[str]:
    """Folders of the saved models that a run reads: what it starts from, and its teachers."""
    models = [config["model"].get("pretrained")]
    models += [config.get(section, {}).get("teacher") for section in ("distillation", "token_labels")]
    return [model for model in models if model]


CLASSIFICATION = HFTask(
    name="classification",
    module=__name__,
    trains="a SparsePriorViT classifier",
    examples="images",
    sections=SECTIONS,
    check_config=check_config,
    model_class=AutoModelForImageClassification,
    prepare=prepare,
    read_split=read_split,
    about_model=lambda model: {**about_model(model), "attention_flops": attention_flops(model.config)},
    before=search_run,
    draw=draw_compression,
    models_read=models_read,
    check_start=check_pretrained,
    start_sha256=pretrained_sha256,
)
