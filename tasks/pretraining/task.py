"""What DINO adds to a run of the Trainer: crops, student and teacher, k-NN and the linear classifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, set_seed

from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.data import ImageDataset, Preparation, load_data
from hf_sparseprior.images.model import MODEL_EXTRAS, check_pretrained, from_scratch, pretrained_sha256
from hf_sparseprior.images.processor import make_processor
from hf_sparseprior.images.sources import ImageData, drop_corrupt
from hf_sparseprior.images.split import read_split
from hf_sparseprior.models.pretrained import check_saved_folder, load_changed_model
from hf_sparseprior.runs.config import Config
from hf_sparseprior.runs.hf_run import HFTask, Prepared, Tested, draw_sampler
from hf_sparseprior.runs.models import section_family
from hf_sparseprior.saving.processor import image_processor_settings
from tasks.pretraining.commands import TRAINS
from tasks.pretraining.config import SECTIONS, DinoConfig, EvaluationConfig, check_config
from tasks.pretraining.crops import CropConfig, CropDataset, MultiCrop
from tasks.pretraining.dino import Dino
from tasks.pretraining.evaluation import (
    LINEAR_FILE,
    Knn,
    LinearState,
    last_layers,
    linear_images,
    linear_predict,
    pixels_as_features,
    pooled,
    standard_error,
    train_linear,
)
from tasks.pretraining.plots import draw_history
from tasks.pretraining.trainer import DinoTrainer


def build_backbone(model: dict[str, Any]) -> Any:
    """The bare model of a configuration's `model` section, from scratch or from a saved folder."""
    options = {key: value for key, value in model.items() if key not in MODEL_EXTRAS}
    preset, pretrained = model.get("preset"), model.get("pretrained")
    if preset and pretrained:
        raise ValueError(f"model.preset={preset!r} and model.pretrained={pretrained!r} exclude each other")
    family = section_family(model)
    if not pretrained:
        return from_scratch(family.base, partial(family.make_config, preset), options)
    check_saved_folder(pretrained, "model.pretrained")
    return load_changed_model(pretrained, family.base, **options)[0]


def prepare(config: Config, arguments: Any) -> Prepared:
    """Crops, student and teacher of a run, and how its teacher is judged."""
    data_config, dino_config = DataConfig(**config["data"]), DinoConfig(**config["dino"])
    crop_config, evaluation = CropConfig(**config["crops"]), EvaluationConfig(**config["evaluation"])
    with arguments.main_process_first(desc="reading the data"):
        data = load_data(data_config)
    set_seed(arguments.seed)
    dino = Dino(build_backbone(config["model"]), dino_config)
    own = dino.student.backbone.config
    check_crops(dino, crop_config)
    if evaluation.linear:
        last_layers(dino.teacher.backbone, evaluation)  # refuses layers that the model does not have
    size = image_processor_settings(own)["size"]
    crops = MultiCrop(crop_config, (size["height"], size["width"]), own.image_mean, own.image_std, own.num_channels)
    processor = make_processor(own, evaluation.eval_crop_ratio, data_config.decoding, "evaluation")
    # What takes long comes after what may be refused, and draws nothing from the generators of the model.
    with torch.random.fork_rng(devices=[]), arguments.main_process_first(desc="looking for damaged images"):
        corrupt = drop_corrupt(data, data_config, arguments.dataloader_num_workers, not arguments.disable_tqdm)
    plain = Preparation(processor, own.num_channels)
    datasets: dict[str, ImageDataset] = {"train": CropDataset(data.splits["train"], crops, arguments.seed)}
    datasets |= {split: ImageDataset(data.splits[split], plain, data_config.cache) for split in ("validation", "test")}
    bank = ImageDataset(data.splits["train"], plain, data_config.cache)
    progress = not arguments.disable_tqdm
    knn = Knn(bank, evaluation, len(data.classes), arguments.eval_batch_size, arguments.device, progress)
    judge = Judge(config, evaluation, data, knn, datasets["test"], progress)
    return Prepared(
        model=dino,
        classes=data.classes,
        datasets=datasets,
        description=_description(data, datasets),
        split_names=data.origins,
        save_processor=processor.save_pretrained,
        train_sampler=draw_sampler(len(datasets["train"]), arguments),
        trainer_class=DinoTrainer,
        trainer_options={
            "dino": dino_config,
            "knn_accuracy": lambda backbone: knn.accuracy(pooled(backbone), datasets["validation"]),
        },
        kept=lambda trained: trained.teacher.backbone,
        test=judge,
        details=lambda: {**judge.details, **asdict(data_config.decoding), "corrupt_images": corrupt},
    )


def _description(data: ImageData, datasets: Mapping[str, ImageDataset]) -> str:
    sizes = ", ".join(f"{len(dataset)} {split}" for split, dataset in datasets.items())
    return data.description if f"({sizes})" in data.description else f"{data.description} ({sizes})"


@torch.no_grad()
def check_crops(dino: Dino, config: CropConfig) -> None:
    """Raise ValueError if the model cannot take crops of this size."""
    if not config.local_crops:
        return
    backbone, side = dino.teacher.backbone, config.local_size
    try:
        backbone(pixel_values=torch.zeros(1, backbone.config.num_channels, side, side))
    except ValueError as error:
        raise ValueError(f"crops.local_size={side}: {error}") from None


@dataclass
class Judge:
    """Judges the teacher on the test images at the end of a run. `details` are what it found besides the metrics."""

    config: Config
    evaluation: EvaluationConfig
    data: ImageData
    knn: Knn
    test: ImageDataset
    progress: bool

    def __post_init__(self) -> None:
        self.details: dict[str, Any] = {"pretrained_sha256": pretrained_sha256(self.config["model"])}

    def __call__(self, trainer: DinoTrainer) -> Tested:
        """k-NN with the teacher's features, with those of the model before its first step, and with the pixels."""
        arguments, labels = trainer.args, self.test.images.labels
        backbone = trainer.model.teacher.backbone
        set_seed(arguments.seed)
        start = build_backbone(self.config["model"]).eval().to(arguments.device)
        ways = {
            "test_knn_accuracy": pooled(backbone),
            "test_knn_accuracy_at_start": pooled(start),
            "test_knn_accuracy_of_pixels": pixels_as_features,
        }
        predicted = {name: self.knn.predict(encode, self.test) for name, encode in ways.items()}
        if self.evaluation.linear:
            predicted["test_linear_accuracy"] = self._linear(backbone, arguments)
        right = {name: (found == labels).astype(float) for name, found in predicted.items()}
        trained = right["test_knn_accuracy"]
        above = {name: trained - right[name] for name in list(ways)[1:]}
        self.details |= {
            "standard_errors": {name: standard_error(values) for name, values in right.items()},
            "k_nn_above": {
                name.removeprefix("test_knn_accuracy_"): {
                    "difference": float(values.mean()),
                    "standard_error": standard_error(values),
                }
                for name, values in above.items()
            },
        }
        metrics = {name: float(values.mean()) for name, values in right.items()}
        return Tested(metrics, labels, predicted["test_knn_accuracy"])

    def _linear(self, backbone: Any, arguments: Any) -> np.ndarray:
        train = linear_images(self.data.splits["train"], backbone.config, self.evaluation, arguments.seed)
        encode = last_layers(backbone, self.evaluation)
        place = Path(arguments.output_dir) / LINEAR_FILE
        kept = LinearState(place, backbone, self.evaluation, (arguments.seed, len(train)))
        classifier = train_linear(
            encode,
            train,
            len(self.data.classes),
            self.evaluation,
            arguments.device,
            arguments.seed,
            arguments.dataloader_num_workers,
            self.progress,
            kept,
        )
        return linear_predict(encode, classifier, self.test, self.knn.batch_size)


PRETRAINING = HFTask(
    name="pretraining",
    module=__name__,
    trains=TRAINS,
    examples="images",
    sections=SECTIONS,
    check_config=check_config,
    model_class=AutoModel,
    prepare=prepare,
    read_split=read_split,
    trainer_defaults={
        "load_best_model_at_end": False,
        "metric_for_best_model": None,
        "eval_strategy": "no",
        "max_grad_norm": 0.0,
    },
    metric="test_knn_accuracy",
    also=("test_linear_accuracy",),
    draw_history=draw_history,
    models_read=lambda config: [folder for folder in [config["model"].get("pretrained")] if folder],
    check_start=check_pretrained,
    start_sha256=pretrained_sha256,
)
