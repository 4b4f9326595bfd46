"""Train a SparsePriorViT classifier: python -m tasks.classification.train --config FILE [section.key=value ...]

A run that was interrupted goes on from its last checkpoint; a finished run is not done again.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from transformers import ProgressCallback, set_seed
from transformers.utils import logging as transformers_logging

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.analysis.decays import learned_decay_masks
from hf_sparseprior.analysis.flops import model_flops
from hf_sparseprior.files import file_sha256, write_text
from hf_sparseprior.model_card import CARD, model_card
from hf_sparseprior.pretrained import load_whole_model, weights_sha256
from hf_sparseprior.training import (
    OneLineProgress,
    SparsePriorTrainer,
    SparsePriorTrainingArguments,
    StopOnSignal,
)
from hf_sparseprior.training.allocator import keep_freed_memory
from tasks.classification.config import check_config, load_config
from tasks.classification.distillation import (
    DistillationConfig,
    end_phase,
    make_distillation,
    start_phase,
    teacher_folder,
)
from tasks.classification.inputs import make_inputs, read_data
from tasks.classification.label_maps import check_token_classifier, open_label_maps
from tasks.classification.token_label_config import TokenLabelConfig
from tasks.classification.tuning import TuningConfig, merged, save_adapter, trainable_parameters, tuned
from tasks.common.command import RunStopped, run_command, train_parser
from tasks.common.environment import command_line, environment
from tasks.common.images.augmentation import AugmentationConfig
from tasks.common.images.config import DataConfig
from tasks.common.images.model import build_model, pretrained_sha256
from tasks.common.images.vtab_tasks import FINAL
from tasks.common.metrics import compute_metrics, confusion_matrix
from tasks.common.plots import draw_confusion, draw_history
from tasks.common.results import read_results, write_results
from tasks.common.run_folder import ADAPTER, AVERAGE, MODEL, RESULTS, claim_with, finished_results

# What a run does unless its configuration says otherwise.
TRAINER_DEFAULTS: dict[str, Any] = {
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "logging_strategy": "epoch",
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "accuracy",
    "report_to": "none",
    "remove_unused_columns": False,
    "ddp_find_unused_parameters": False,
}


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """`load_config` of one run, which lies in outputs/NAME_OF_THE_FILE unless it says otherwise."""
    config = load_config(path, overrides)
    config["trainer"].setdefault("output_dir", f"outputs/{Path(path).stem}")
    return config


def run(config: dict[str, dict[str, Any]], command: str | None = None, overwrite: bool = False) -> dict[str, Any]:
    """Train, choose the best epoch on validation, test once, write results, model and pictures.

    Args:
        config: as `load_config` returns it; `trainer.output_dir` is where everything goes.
        command: for results.json.
        overwrite: throw away what an earlier run with another configuration left in the folder.

    Returns:
        The content of results.json.

    Raises:
        ValueError, OSError: for bad values and missing files, before anything is written.
        RunStopped: on SIGTERM, after a checkpoint was saved.
    """
    check_config(config)
    out = Path(config["trainer"].get("output_dir") or "")
    if out == Path(""):
        raise ValueError("trainer.output_dir is missing; give a folder for this run")
    if finished := finished_results(out, config, overwrite):
        return finished
    # Pinned memory only means something beside an accelerator.
    defaults = {**TRAINER_DEFAULTS, "dataloader_pin_memory": torch.cuda.is_available()}
    # A copy: transformers writes its own defaults into the dictionaries it is given.
    trainer_section = copy.deepcopy(config["trainer"])
    arguments = trainer_errors(SparsePriorTrainingArguments, **{**defaults, **trainer_section})
    data_config, augmentation = DataConfig(**config["data"]), AugmentationConfig(**config["augmentation"])
    if data_config.stage == FINAL and arguments.load_best_model_at_end:
        raise ValueError(
            "data.stage=final has its validation images among its training images and cannot choose the best epoch; "
            "set trainer.load_best_model_at_end=false"
        )
    data, corrupt = read_data(data_config, arguments)
    set_seed(arguments.seed)
    tuning = TuningConfig(**config["tuning"])
    phase = DistillationConfig(**config["distillation"])
    checksum = pretrained_sha256(config["model"])
    model = build_model(config["model"], data.classes)
    decay_at_start = decay_change(model)
    set_seed(arguments.seed)  # a decay draws too, and adapters of one seed would start differently beside it
    model = tuned(model, tuning)
    start_phase(model, phase)
    trained = trainable_parameters(model)  # counted here, because peft freezes what it reads back
    token_labels = TokenLabelConfig(**config["token_labels"])
    check_token_classifier(model.config, token_labels)
    with arguments.main_process_first(desc="reading label maps"):
        maps = open_label_maps(token_labels, data, arguments)
    inputs = make_inputs(data, corrupt, data_config, augmentation, model.config, arguments, maps)
    trainer = trainer_errors(
        SparsePriorTrainer,
        model=model,
        args=arguments,
        train_dataset=inputs.datasets["train"],
        eval_dataset=inputs.datasets["validation"],
        processing_class=inputs.processor,
        compute_metrics=compute_metrics,
        train_sampler=inputs.train_sampler,
        train_collator=inputs.train_collator,
        data_collator=inputs.eval_collator,
        token_label_weight=token_labels.weight,
        distillation=make_distillation(config),
    )
    if inputs.train_sampler is not None:
        for dataset in inputs.datasets.values():
            dataset.fill_cache(show_progress=not arguments.disable_tqdm)
        inputs.datasets["train"][next(iter(inputs.train_sampler))]
    # Until here nothing was written or thrown away: a bad value leaves the folder as it was.
    checkpoint = claim_with(trainer.accelerator, out, config, trainer.checkpoint_files())
    if not arguments.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(OneLineProgress())
    stop = StopOnSignal()
    trainer.add_callback(stop)
    trainer.train(resume_from_checkpoint=checkpoint)
    if stop.stopped:
        raise RunStopped(f"stopped behind step {trainer.state.global_step}; the same command goes on from there")
    end_phase(trainer.accelerator.unwrap_model(trainer.model), phase)
    prediction = trainer.predict(inputs.datasets["test"], metric_key_prefix="test")
    seconds = trainer.clock.seconds()
    predicted = np.argmax(prediction.predictions, -1)
    counts = confusion_matrix(prediction.label_ids, predicted, len(data.classes))
    results = {
        "task": "classification",
        "metrics": {
            "test_accuracy": prediction.metrics["test_accuracy"],
            **validation_metrics(trainer.state, arguments.load_best_model_at_end),
            # The weights' moving average at the end of training.
            **{key: value for key, value in prediction.metrics.items() if key == "test_ema_accuracy"},
        },
        "data": inputs.description,
        "corrupt_images": inputs.corrupt_images(),
        "seed": arguments.seed,
        "method": tuning.method,
        "trainable_parameters": trained,
        "pretrained_sha256": checksum,
        "label_maps_teacher_sha256": maps and maps.header.teacher,
        "teacher_sha256": (teacher := teacher_folder(config)) and weights_sha256(teacher),
        "decay_change_at_start": decay_at_start["max_decay_change"],
        "mean_decay_change_at_start": decay_at_start["mean_decay_change"],
        "alpha_change_at_start": decay_at_start["max_alpha_change"],
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 2),
        "seconds_per_step": seconds / max(1, trainer.state.global_step),
        "data_wait": trainer.clock.data_seconds / max(seconds, 1e-9),
        "processes": arguments.world_size,
        "resumed_from": checkpoint and Path(checkpoint).name,
        "command": command or command_line(),
        "config": config,
        **environment(),
        "classes": data.classes,
        "confusion": counts.tolist(),
        "history": trainer.state.log_history,
    }
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # by all processes: each may hold a part
    # A compiled model puts this in front of its names.
    weights = {name.replace("_orig_mod.", ""): value for name, value in weights.items()}
    if trainer.is_world_process_zero():
        model = trainer.accelerator.unwrap_model(trainer.model)
        if trainer.weight_average is not None:
            with trainer.weight_average.swapped_in():
                accuracy = {"test_accuracy": results["metrics"]["test_ema_accuracy"]}
                _save_model(out / AVERAGE, model, None, inputs.processor, {**results, "metrics": accuracy})
        _write_outputs(out, results, model, weights, inputs.processor)
    trainer.accelerator.wait_for_everyone()
    return results if trainer.is_world_process_zero() else read_results(out / RESULTS)


def validation_metrics(state: Any, best: bool) -> dict[str, float]:
    """{"validation_accuracy": of the best epoch's weights or else the last step's}, {} where they were not judged."""
    step = state.best_global_step if best else state.global_step
    judged = [entry for entry in state.log_history if "eval_accuracy" in entry and entry["step"] == step]
    return {"validation_accuracy": judged[-1]["eval_accuracy"]} if judged else {}


def trainer_errors(make: Any, **options: Any) -> Any:
    """Call transformers with the `trainer` section; its complaints name the section."""
    try:
        return make(**options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"trainer: {error}") from None


@torch.no_grad()
def decay_change(model: SparsePriorViTForImageClassification) -> dict[str, float | None]:
    """How far the learned decay is from none, over layers, heads and pairs; None without a decay.

    Returns:
        max_decay_change: max |M - 1|; mean_decay_change: mean 1 - M; max_alpha_change: max |alpha - 1|, 0 where alpha
        is not learned.
    """
    masks = learned_decay_masks(model.vit.layers, model.config)
    if not masks:
        return dict.fromkeys(("max_decay_change", "mean_decay_change", "max_alpha_change"))
    alphas = [alpha for layer in model.vit.layers if (alpha := layer.attention.decay_bias.alpha) is not None]
    return {
        "max_decay_change": max((mask - 1).abs().max().item() for mask in masks),
        "mean_decay_change": sum((1 - mask).mean().item() for mask in masks) / len(masks),
        "max_alpha_change": max(((alpha - 1).abs().max().item() for alpha in alphas), default=0.0),
    }


def _about_model(model: SparsePriorViTForImageClassification) -> dict[str, Any]:
    return {
        "prior": model.config.prior_name,
        "prior_settings": model.config.prior,
        **decay_change(model),
        "pruning_ratio": model.config.pruning_ratio,
        "attention_flops": attention_flops(model.config),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def attention_flops(config: SparsePriorViTConfig) -> int | None:
    """Multiply-adds of attention for one image, as `ModelFlops.attention`; None where it has no such count."""
    try:
        return model_flops(config).attention
    except ValueError:
        return None


def _save_model(
    folder: Path, model: Any, weights: dict[str, Any] | None, processor: Any, results: dict[str, Any]
) -> None:
    """Write model, image processor and card, and what is known of the model into `results`."""
    whole = merged(model)
    whole.save_pretrained(folder, state_dict=weights if whole is model else None)
    # Says which weights the metrics are of.
    results["model_sha256"] = file_sha256(folder / "model.safetensors")
    results.update(_about_model(load_whole_model(folder)))
    processor.save_pretrained(folder)
    write_text(folder / CARD, model_card(whole.config, results))


def _write_outputs(out: Path, results: dict[str, Any], model: Any, weights: dict[str, Any], processor: Any) -> None:
    _save_model(out / MODEL, model, weights, processor, results)
    results["adapter_bytes"] = save_adapter(out / ADAPTER, model)
    heading = f"{results['prior']}, seed {results['seed']}"
    draw_history(results["history"], out / "curves.png", heading)
    accuracy = 100 * results["metrics"]["test_accuracy"]
    draw_confusion(
        np.array(results["confusion"]),
        results["classes"],
        out / "confusion.png",
        f"{heading}: {accuracy:.2f} % on test",
    )
    # Last of all: a run counts as finished only when everything else is there.
    write_results(out / RESULTS, results)


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = train_parser("classification", "Train a SparsePriorViT classifier.", "model.prior=violin")
    arguments = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()  # bars for reading and writing weights; the training bar stays

    def work() -> None:
        keep_freed_memory()
        config = load_run(arguments.config, arguments.overrides)
        results = run(config, overwrite=arguments.overwrite)
        if PartialState().is_main_process:
            _print_results(results, config["trainer"]["output_dir"])

    return run_command(parser.prog, work, "from the last checkpoint")


def _print_results(results: dict[str, Any], out: str) -> None:
    for name, value in results["metrics"].items():
        print(f"{name}: {100 * value:.2f} %")
    if results.get("method", "full") != "full":  # runs before the `tuning` section have none
        print(f"{results['method']}: {results['trainable_parameters']} parameters trained of {results['parameters']}")
    print(f"waiting for data: {100 * results['data_wait']:.1f} % of the training time")
    if results["max_decay_change"] is not None:
        print(f"max |M - 1| of the learned decay: {results['max_decay_change']:.4f}")
    print(f"results: {out}/{RESULTS}, pictures: {out}/curves.png {out}/confusion.png, model: {out}/{MODEL}")


if __name__ == "__main__":
    sys.exit(main())
