"""The `compression` section: a search for a smaller model, and its retraining.

A run with this section is two runs. The first trains and searches in OUT_search, a folder beside that of the run, and
leaves the smaller model there; the second trains that model in OUT. Each is resumed as every run is.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import parse_flag_from_env
from transformers import TrainerCallback

from hf_sparseprior.analysis.flops import model_flops
from hf_sparseprior.base.checks import check_finite, check_integer
from hf_sparseprior.base.layer_sizes import CONV_WIDTH, HEAD_WIDTH, HEADS, MLP_WIDTH, STEM_WIDTH, WIDTH
from hf_sparseprior.classification.distillation import DistillationConfig
from hf_sparseprior.compression import MaskSearch, SearchCallback, compressed_config, compressed_model
from hf_sparseprior.compression.search import PUBLISHED, check_choice, check_search
from hf_sparseprior.runs.config import Config
from hf_sparseprior.runs.plots import draw_kept
from hf_sparseprior.runs.results import read_results
from hf_sparseprior.runs.run_folder import MODEL, RESULTS

METHODS = ("upop",)
PHASES = ("both", "search")
PICTURE = "kept.png"
# What is counted along the picture's axis, where it is not layers.
PLACES = {WIDTH: "stage", CONV_WIDTH: "convolutional block", STEM_WIDTH: "convolution of the stem"}


@dataclass
class CompressionConfig:
    """A search for a smaller model (`hf_sparseprior.compression`), and its retraining by the rest of the configuration.

    method: "upop" (Shi et al. 2023); null: the model stays as large as it is.
    ratio: share of the parameters that go, met to 1 %.
    ratio_of: of which parameters, those of the "model", or those of attention and MLP ("layers", as in UPop's code).
    choice: "fill" the share with what still fits, or cut at a "threshold" of the scores, as UPop's code does.
    structures: what may go, some of heads, head_width, mlp and width (of the tokens); UPop's own are head_width and
        mlp.
    search_epochs: epochs of the search; trainer.num_train_epochs are those of the retraining.
    search_learning_rate: that of the search; null: trainer.learning_rate.
    interval: steps between two updates of the masks.
    phase: "both"; "search" for the search alone, whose epochs are trainer.num_train_epochs.
    """

    method: str | None = None
    ratio: float = 0.5
    structures: list[str] = field(default_factory=lambda: list(PUBLISHED))
    search_epochs: float | None = None
    search_learning_rate: float | None = None
    interval: int = 100
    ratio_of: str = "model"
    choice: str = "fill"
    phase: str = "both"

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.method not in (None, *METHODS):
            raise ValueError(f"compression.method={self.method!r} must be one of {', '.join(METHODS)}, or null")
        if self.phase not in PHASES:
            raise ValueError(f"compression.phase={self.phase!r} must be one of {', '.join(PHASES)}")
        check_search(self.ratio, self.structures, "compression.")
        check_choice(self.ratio_of, self.choice, self.structures, "compression.")
        check_integer("compression.interval", self.interval, 1)
        for name in ("search_epochs", "search_learning_rate"):
            value = getattr(self, name)
            if value is None:
                continue
            check_finite(f"compression.{name}", value)
            if value <= 0:
                raise ValueError(f"compression.{name}={value} must be above 0")
            if self.phase == "search":
                raise ValueError(f"compression.{name}={value} is for phase=both; set the trainer's own for a search")
        if self.method is not None and self.phase == "both" and self.search_epochs is None:
            raise ValueError("compression.search_epochs must say how long the search is")


def check_compression(config: dict[str, dict[str, Any]]) -> None:
    """Raise ValueError if the other sections do not go with the `compression` section."""
    settings = CompressionConfig(**config["compression"])
    if settings.method is None:
        if config["compression"]:
            raise ValueError(f"compression: {', '.join(config['compression'])} need compression.method=upop")
        return
    if (tuning := config["tuning"].get("method", "full")) != "full":
        raise ValueError(
            f"compression.method={settings.method} trains the whole model; tuning.method={tuning} does not"
        )
    distillation = DistillationConfig(**config["distillation"])
    if distillation.phase != "model":
        raise ValueError(
            "compression cannot be used with distillation.phase=predictor, which leaves the model as it is"
        )
    for structure, loss in (("width", "token"), ("heads", "attention")):
        weight = 0.0 if distillation.teacher is None else distillation.weights()[loss]
        if structure in settings.structures and weight:
            raise ValueError(
                f"compression.structures={settings.structures} prunes the {structure}, which "
                f"distillation.lambda_{loss}={weight:g} needs to be the teacher's; "
                f"leave it out or set distillation.lambda_{loss}=0"
            )
    trainer = config["trainer"]
    # The variable is how `accelerate launch` asks for it.
    if trainer.get("fsdp") or parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise ValueError("compression cannot be used with FSDP, use DDP")
    if trainer.get("fp16"):
        raise ValueError("compression sums gradients over steps, which trainer.fp16 scales differently; use bf16")
    if settings.phase == "search":
        for name, value in (("load_best_model_at_end", True), ("ema_decay", None), ("torch_compile", False)):
            if given := trainer.get(name, value):
                raise ValueError(f"trainer.{name}={given} is not for a search, whose masks change with its steps")


def search_run(config: Config) -> Config | None:
    """The configuration of the search that a run starts from; None: there is none."""
    settings = CompressionConfig(**config["compression"])
    if settings.method is None or settings.phase == "search":
        return None
    first = copy.deepcopy(config)
    first["compression"] |= {"phase": "search", "search_epochs": None, "search_learning_rate": None}
    trainer = first["trainer"]
    trainer |= {
        "output_dir": str(search_folder(config)),
        "num_train_epochs": settings.search_epochs,
        "load_best_model_at_end": False,
    }
    if settings.search_learning_rate is not None:
        trainer["learning_rate"] = settings.search_learning_rate
    for name in ("max_steps", "ema_decay", "torch_compile"):
        trainer.pop(name, None)
    if str(trainer.get("metric_for_best_model")).removeprefix("eval_").startswith("ema_"):
        del trainer["metric_for_best_model"]
    return first


def search_folder(config: Config) -> Path:
    """Where the search of a run lies: beside the run's folder."""
    out = Path(config["trainer"]["output_dir"])
    return out.with_name(f"{out.name}_search")


def retrained(config: Config) -> Config:
    """The configuration of what a run trains: from its search on, the smaller model."""
    if search_run(config) is None:
        return config
    return {**config, "model": {"pretrained": str(search_folder(config) / MODEL)}}


def start_search(model: Any, config: Config) -> MaskSearch | None:
    """The search of a run on its model; None: the run does not search."""
    settings = CompressionConfig(**config["compression"])
    if settings.method is None or settings.phase != "search":
        return None
    try:
        return MaskSearch(model, settings.ratio, settings.structures, settings.ratio_of, settings.choice)
    except ValueError as error:
        raise ValueError(f"compression: {error}") from None


def search_callbacks(search: MaskSearch | None, config: Config) -> list[TrainerCallback]:
    """What updates the masks in a training."""
    return [] if search is None else [SearchCallback(search, CompressionConfig(**config["compression"]).interval)]


def cut_out(search: MaskSearch | None, model: Any) -> Any:
    """The smaller model at the end of a search; a model that was not searched as it is."""
    return model if search is None else compressed_model(model, search.kept(), search.units)


def about_compression(config: Config, model: Any, search: MaskSearch | None) -> dict[str, Any]:
    """What results.json says about a search, or about a retraining and its search."""
    settings = CompressionConfig(**config["compression"])
    if settings.method is None:
        return {}
    if search is None:
        first = read_results(search_folder(config) / RESULTS)
        accuracy = first["metrics"]["test_accuracy"]
        return {
            "compression": {**first["compression"], "search_test_accuracy": accuracy, "search_steps": first["steps"]}
        }
    smaller = compressed_config(model.config, search.kept())
    counts = [search.parameters, search.parameters - round(search.achieved() * search.total)]
    flops = [_total_flops(each) for each in (model.config, smaller)]
    about = {
        "method": settings.method,
        "ratio": settings.ratio,
        "achieved": search.achieved(),
        "parameters": dict(zip(("before", "after"), counts, strict=True)),
        "flops": dict(zip(("before", "after"), flops, strict=True)),
        "left": left_of_layers(model.config, smaller),
        "heads": smaller.compressed["heads"],
    }
    return {"compression": about}


def _total_flops(config: Any) -> int | None:
    try:
        return model_flops(config).total
    except ValueError:
        return None


def left_of_layers(whole: Any, smaller: Any) -> dict[str, list[tuple[int, int]]]:
    """(left, before) of each kind of units, for each layer; of the tokens' width for each stage."""
    inner, before = smaller.inner_widths, whole.inner_widths
    pairs = list(zip(smaller.layers, whole.layers, strict=True))
    return {
        HEADS: [(len(after.heads), len(before.heads)) for after, before in pairs],
        HEAD_WIDTH: [(after.head_width, before.head_width) for after, before in pairs],
        MLP_WIDTH: [(after.mlp_width, before.mlp_width) for after, before in pairs],
        WIDTH: list(zip(smaller.stage_widths, whole.stage_widths, strict=True)),
        **{kind: list(zip(inner[kind], before[kind], strict=True)) for kind in before},
    }


def draw_compression(out: Path, prepared: Any, predicted: np.ndarray, heading: str) -> list[str]:
    """A picture of what is left of each layer, if there was a search. Returns its name."""
    if not (about := prepared.details().get("compression")):
        return []
    counts = about["parameters"]
    words = f"{heading}: {counts['after']:,} of {counts['before']:,} parameters (grey: before)"
    draw_kept(about["left"], out / PICTURE, words, PLACES)
    return [PICTURE]
