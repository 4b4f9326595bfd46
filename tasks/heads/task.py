"""What heads of transformers add to a run of the Trainer: their models, their own losses, and how they are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import set_seed

from hf_sparseprior.base.json_files import read_json_object
from hf_sparseprior.mm.init_cfg import load_weights
from hf_sparseprior.models import heads
from hf_sparseprior.models.pretrained import weights_sha256
from hf_sparseprior.runs.command import tell_passed_over
from hf_sparseprior.runs.config import Config
from hf_sparseprior.runs.hf_run import HFTask, Split, Tested, draw_sampler
from hf_sparseprior.runs.hf_run import Prepared as PreparedRun
from hf_sparseprior.runs.models import about_model, alike_across_priors
from hf_sparseprior.saving.card import model_index
from hf_sparseprior.training import SparsePriorTrainer
from tasks.heads.baseline import constant_objects
from tasks.heads.commands import EVAL_BATCH_SIZE, TRAINS
from tasks.heads.config import SECTIONS, DataConfig, check_config, head_config
from tasks.heads.data import Prepared, prepare_folder, read_source, same_classes
from tasks.heads.kinds import (
    IGNORED,
    KINDS,
    Kind,
    ObjectScore,
    PixelScore,
    collate,
    findings,
    make_processor,
    save_processor,
)
from tasks.heads.pictures import SHOWN, draw_findings
from tasks.heads.processes import counted_once


class AnyHead:
    """Loads a saved model of any head by its own class."""

    @staticmethod
    def from_pretrained(folder: Any, **options: Any) -> Any:
        """As `from_pretrained` of the head's class.

        Raises:
            ValueError: for a folder of another model.
        """
        return heads.HEADS[name_of(folder)].model_class.from_pretrained(folder, **options)


def name_of(folder: Any) -> str:
    """The name in `heads.HEADS` of the head in a saved folder."""
    model_type = read_json_object(Path(folder) / "config.json").get("model_type")
    for name in KINDS:
        if heads.HEADS[name].config_class.model_type == model_type:
            return name
    raise ValueError(f"{folder} holds a {model_type!r} model, not one of the heads {', '.join(KINDS)}")


class HeadTrainer(SparsePriorTrainer):
    """Trains a head by its own loss. Evaluation measures what the head finds.

    Args:
        measure: (model, data) -> metrics.
    """

    model: Any
    control: Any
    counted_input = "pixel_values"

    def __init__(self, *args: Any, measure: Callable[[Any, Any], dict[str, float]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.measure = measure

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The head's loss of a micro-batch, by its share of the step's images."""
        with counted_once():
            outputs = model(**inputs)
        loss = self.share_of_step(loss_of(outputs, inputs), inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def measured(self, data: Any, prefix: str) -> dict[str, float]:
        """Metrics of the model and, if there is one, of its moving average."""
        model = self.accelerator.unwrap_model(self.model)
        metrics = {f"{prefix}_{name}": value for name, value in self.measure(model, data).items()}
        if self.weight_average is not None:
            with self.weight_average.swapped_in():
                averaged = self.measure(model, data)
            metrics |= {f"{prefix}_ema_{name}": value for name, value in averaged.items()}
        return metrics

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Measure the model on the validation images; every process does, and takes the first one's result."""
        own = self.measured(self.eval_dataset if eval_dataset is None else eval_dataset, metric_key_prefix)
        (metrics,) = broadcast_object_list([own])  # batch norms have statistics of their own in each
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def loss_of(outputs: Any, batch: dict[str, Any]) -> Tensor:
    """A head's loss of a batch; 0 where no pixel has a class, whose mean would be 0 / 0."""
    labels = batch.get("labels")
    return outputs.logits.sum() * 0 if torch.is_tensor(labels) and (labels == IGNORED).all() else outputs.loss


class Measure:
    """Measures what a head finds.

    `found` are the findings in the first images of the last data, `details` what is known besides the metrics.

    Args:
        kind: of the head. processor: its image processor. batch_size: of the images.
    """

    def __init__(self, kind: Kind, processor: Any, batch_size: int) -> None:
        self.kind, self.processor, self.batch_size = kind, processor, batch_size
        self.found: list[Any] = []
        self.details: dict[str, Any] = {}

    @torch.no_grad()
    def __call__(self, model: Any, data: Prepared) -> dict[str, float]:
        """Mean loss over the images, and the metrics; random points of a loss are the same every time."""
        source, number, total = data.source, 0, 0.0
        score: Any = (
            PixelScore(len(source.classes)) if self.kind.finds == "classes" else ObjectScore(self.kind, source.coco)
        )
        training, device, self.found = model.training, next(model.parameters()).device, []
        model.eval()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            for batch in DataLoader(data, self.batch_size, collate_fn=collate):
                batch = moved(batch, device)
                with counted_once():
                    outputs, count = model(**batch), len(batch["pixel_values"])
                total += loss_of(outputs, batch).item() * count
                sizes = [source.image(index).shape[:2] for index in range(number, number + count)]
                for found in findings(self.kind, self.processor, outputs, sizes):
                    self._score(score, source, number, found)
                    number += 1
        model.train(training)
        if self.kind.finds == "classes":
            self.details = {
                "IoU": score.by_class(source.classes),
                "baseline": {f"{source.split}_mIoU": constant_score(score.counts)},
            }
        return {"loss": total / number, **score.metrics()}

    def _score(self, score: Any, source: Any, number: int, found: Any) -> None:
        if self.kind.finds == "classes":
            score.add(source.annotation(number), found)
        else:
            score.add(source.images[number], *found)
        if len(self.found) < SHOWN:
            self.found.append(found)


def constant_score(counts: np.ndarray) -> float:
    """mIoU of the best predictor that says one class everywhere, over the classes that occur in the labels."""
    pixels = counts.sum(1)
    return float(pixels.max() / pixels.sum() / max(1, (pixels > 0).sum()))


def moved(value: Any, device: torch.device) -> Any:
    """Tensors in lists and dictionaries, on a device."""
    if isinstance(value, dict):
        return {key: moved(part, device) for key, part in value.items()}
    if isinstance(value, list):
        return [moved(part, device) for part in value]
    return value.to(device) if torch.is_tensor(value) else value


def build_model(config: Config, classes: Sequence[str]) -> Any:
    """The model of a configuration; a saved backbone keeps its weights and, without `prior`, its prior."""
    model_class = heads.HEADS[config["head"]["name"]].model_class
    model = alike_across_priors(
        lambda changes: model_class(head_config({**config, "model": {**config["model"], **changes}}, classes)),
        lambda model: heads.backbone_of(model).config.prior_name == "dense",
    )
    if pretrained := config["model"].get("pretrained"):
        load_weights(heads.backbone_of(model), pretrained)
    return model


def prepare(config: Config, arguments: Any) -> PreparedRun:
    """Images and model of a run, and how it is judged."""
    data_config, kind = DataConfig(**config["data"]), KINDS[config["head"]["name"]]
    with arguments.main_process_first(desc="reading the data"):
        folder = prepare_folder(data_config)
    sources = {split: read_source(kind, folder, split) for split in ("train", "validation", "test")}
    classes = same_classes(list(sources.values()))
    lines = [line for source in sources.values() for line in source.look()]
    if arguments.process_index == 0:
        tell_passed_over(*(source.passed_over for source in sources.values()))
        print(*lines, sep="\n", end="\n" * bool(lines), flush=True)
    set_seed(arguments.seed)
    model = build_model(config, classes)
    backbone = heads.backbone_of(model).config
    processor = make_processor(kind, backbone)
    mirrored = data_config.horizontal_flip
    datasets = {
        split: Prepared(source, kind, processor, mirrored if split == "train" else 0.0, arguments.seed)
        for split, source in sources.items()
    }
    check_batches(model, len(datasets["train"]), arguments)
    measure = Measure(kind, processor, arguments.eval_batch_size)

    def test(trainer: HeadTrainer) -> Tested:
        metrics = trainer.measured(datasets["test"], "test")
        if kind.finds != "classes":
            measure.details = {"baseline": constant_objects(kind, sources["train"], sources["test"])}
        if trainer.weight_average is not None:
            measure(trainer.accelerator.unwrap_model(trainer.model), datasets["test"])  # whose findings are drawn
        kept = {name: value for name, value in metrics.items() if not name.endswith("_loss")}
        return Tested(kept, None, measure.found)

    return PreparedRun(
        model=model,
        classes=classes,
        datasets=datasets,
        description=f"{folder.name} ({', '.join(f'{len(source)} {split}' for split, source in sources.items())})",
        split_names={"train": "training"},
        save_processor=lambda place: complete_folder(kind, backbone, place),
        train_sampler=draw_sampler(len(datasets["train"]), arguments),
        train_collator=collate,
        eval_collator=collate,
        trainer_class=HeadTrainer,
        trainer_options={"measure": measure},
        test=test,
        details=lambda: {
            **measure.details,
            "head": config["head"]["name"],
            "pretrained_sha256": pretrained_sha256(config["model"]),
        },
    )


def check_batches(model: Any, images: int, arguments: Any) -> None:
    """Raise ValueError for a batch of one image and a head with batch norms of maps that are pooled to one pixel."""
    size, rest = arguments.train_batch_size, images % arguments.train_batch_size
    left_over = rest == 1 and arguments.world_size == 1 and not arguments.dataloader_drop_last
    if 1 in (getattr(model.config, "pool_scales", None) or ()) and (min(size, images) == 1 or left_over):
        raise ValueError(
            f"trainer.per_device_train_batch_size={size} makes a batch of one of the {images} training images, and the "
            f"head's batch norms (head.pool_scales={list(model.config.pool_scales)}) need two; take another size, or "
            "trainer.dataloader_drop_last=true to leave the last one out"
        )


def complete_folder(kind: Kind, backbone: Any, folder: Path) -> None:
    """Write what a saved head has besides its weights and config: the image processor, and code that imports us."""
    save_processor(kind, backbone, folder)
    heads.offer_code(folder)


def pretrained_sha256(model: dict[str, Any]) -> str | None:
    """SHA-256 of the weights that a backbone starts from; None for a start from scratch."""
    folder = model.get("pretrained")
    return weights_sha256(folder) if folder else None


def read_split(config: Config, split: str, model: Any, folder: Path) -> Split:
    """A split as the saved model takes it."""
    kind = KINDS[name_of(folder)]
    data_folder = prepare_folder(DataConfig(**config["data"]))
    source = read_source(kind, data_folder, split)
    if PartialState().is_main_process:
        tell_passed_over(source.passed_over)
        for line in source.look():
            print(line, flush=True)
    processor = make_processor(kind, heads.backbone_of(model).config)
    return Split(Prepared(source, kind, processor), source.classes, f"{data_folder.name} ({len(source)} {split})")


def measure_split(
    model: Any, data: Split, size: int, picture: Path, heading: str
) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics of a saved model on a split, and a picture."""
    prepared = data.dataset
    measure = Measure(prepared.kind, prepared.processor, size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    metrics = measure(model.to(device), prepared)
    metrics.pop("loss")
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw_findings(prepared.source, prepared.kind, measure.found, data.classes, picture, heading)
    return metrics, measure.details


def draw(out: Path, prepared: PreparedRun, found: Any, heading: str) -> list[str]:
    """predictions.png: the first test images."""
    test = prepared.datasets["test"]
    draw_findings(test.source, test.kind, found, prepared.classes, out / "predictions.png", heading)
    return ["predictions.png"]


def about(model: Any) -> dict[str, Any]:
    """What results.json says about a saved model: the backbone's prior, and all parameters."""
    return {**about_model(heads.backbone_of(model)), "parameters": model.num_parameters()}


def card(model: Any, results: dict[str, Any]) -> str:
    """The model card of a saved model."""
    finds = KINDS[next(name for name, head in heads.HEADS.items() if isinstance(model, head.model_class))].finds
    pipeline = "object-detection" if finds == "boxes" else "image-segmentation"
    backbone = heads.backbone_of(model).config
    metrics = [f"| {name} | {value} |" for name, value in results.get("metrics", {}).items()]
    lines = [
        *("---", "library_name: transformers", f"pipeline_tag: {pipeline}", "license: apache-2.0"),
        *model_index(f"{type(model).__name__} {backbone.prior_name}", pipeline, results),
        *("---", ""),
        f"# {type(model).__name__} on {type(heads.backbone_of(model)).__name__}, prior: {backbone.prior_name}",
        *("", "| | |", "|---|---|", f"| backbone | {backbone.summary} |"),
        *(f"| classes | {len(model.config.id2label)} |", f"| data | {results.get('data', 'not recorded')} |", *metrics),
        *("", "```python", "import hf_sparseprior  # or pipeline(..., trust_remote_code=True)"),
        "from transformers import pipeline",
        *(f'find = pipeline("{pipeline}", model="PATH_OR_NAME_OF_THIS_MODEL")', 'find("image.png")', "```", ""),
    ]
    return "\n".join(lines)


HEADS = HFTask(
    name="heads",
    module=__name__,
    trains=TRAINS,
    examples="images",
    sections=SECTIONS,
    check_config=check_config,
    model_class=AnyHead,
    prepare=prepare,
    read_split=read_split,
    about_model=about,
    trainer_defaults={"load_best_model_at_end": False, "metric_for_best_model": None},
    draw=draw,
    measure=measure_split,
    card=card,
    eval_batch_size=EVAL_BATCH_SIZE,
    models_read=lambda config: [folder for folder in [config["model"].get("pretrained")] if folder],
    start_sha256=pretrained_sha256,
)
