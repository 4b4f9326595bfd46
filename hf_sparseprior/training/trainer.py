"""transformers' Trainer with what ViT recipes need."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from accelerate.utils.constants import FSDP_MODEL_NAME
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_sparseprior.adapters.stock_loading import from_pretrained
from hf_sparseprior.base.families import family_of
from hf_sparseprior.base.files import sync
from hf_sparseprior.base.json_files import RECORD_BYTES, read_json
from hf_sparseprior.base.loading import check_whole
from hf_sparseprior.models.base_model import DrawCount
from hf_sparseprior.training.decay_movement import unmoved_decay
from hf_sparseprior.training.distillation import Distillation, learns_from_scores, predictors, trained_up_weights
from hf_sparseprior.training.ema import EMA_FILE, WeightAverage
from hf_sparseprior.training.finite import CONTINUE, SETTING, Diverged, LossWatch, all_finite
from hf_sparseprior.training.keep_rate import KeepRateSchedule, evit_modules
from hf_sparseprior.training.layer_decay import decayed_names, parameter_groups
from hf_sparseprior.training.learning import LearningWatch, has_label, learn_behind_frozen, logger
from hf_sparseprior.training.progressive import SETTING as SIZES
from hf_sparseprior.training.progressive import ProgressiveSizes
from hf_sparseprior.training.sampling import DrawSampler
from hf_sparseprior.training.stopping import EarlyStopping, StopOnSignal, WorkerStart
from hf_sparseprior.training.token_labels import token_label_loss, token_targets

CLOCK_FILE = "clock.json"
PROCESSES_FILE = "processes.txt"
RUNNING_FILE = "running.json"  # losses since the last entry of the log


class SparsePriorTrainer(Trainer):
    """transformers' Trainer with the parts of ViT recipes that it lacks.

    Parameters with one dimension (biases, norms, LayerScale, alpha) get no weight decay, nor do those that the model
    names in `no_weight_decay()` (beta, position embedding, prefix tokens), also inside peft's wrappers.

    `SparsePriorTrainingArguments` add layer decay and a moving average of the weights. The average is saved and resumed
    with the checkpoints, and evaluated as well as the raw weights (`eval_ema_accuracy` next to `eval_accuracy`).

    Labels (B, classes) of floating type are class probabilities (mixup, smoothing). The loss is the cross entropy with
    them, not the binary cross entropy that transformers infers. A step's gradient is that of the mean over its samples,
    however these are spread over micro-batches and processes.

    Args:
        train_sampler: order of the training samples; the Trainer sets its epoch.
        train_collator: makes batches of training samples; None: `data_collator` does, as in evaluation.
        token_label_weight: weight of the patch tokens' loss, if a batch has token targets (`training.token_labels`).
        distillation: the losses of training, which replace the loss against the labels; evaluation uses only that.
        also_saved: more that a checkpoint holds: by the name of a file, an object that writes it into a folder with
            `save` and reads it with `load`, which every process calls.

    In the log, `data_wait` is the share of the time since the last entry in which training waited for data. With a
    distillation, `loss_NAME` is the mean of each loss since then, without its weight. Auxiliary losses of a prior
    (`keep_ratio` of DynamicViT), which are part of the loss, are logged in the same way, with their weight.

    What gets no gradient in the first steps, and batches without a label, are warned of (`training.learning`).

    A non-finite loss stops training at the next log, evaluation or save, before it is written, unless
    `args.nonfinite_loss` is "continue". No checkpoint has non-finite weights.

    Raises:
        ValueError: for a teacher or losses that do not go with the model, and for distillation with FSDP.
    """

    data_collator: Any
    optimizer: Any
    counted_input = "labels"  # whose length is a micro-batch's number of samples

    def __init__(
        self,
        *args: Any,
        train_sampler: DrawSampler | None = None,
        train_collator: Any = None,
        token_label_weight: float = 0.5,
        distillation: Distillation | None = None,
        also_saved: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.train_sampler = train_sampler
        self.train_collator = train_collator or self.data_collator
        self.token_label_weight = token_label_weight
        self.weight_average: WeightAverage | None = None
        self.clock = TrainingClock()
        self._logged_at = self._logged_data = 0.0
        if getattr(self.args, "ema_decay", None) is not None and self.is_fsdp_enabled:
            raise ValueError(f"ema_decay={self.args.ema_decay} cannot be used with FSDP; leave it out")
        self.distillation = distillation
        self.also_saved = also_saved or {}
        if self.also_saved and self.is_fsdp_enabled:
            raise ValueError(f"{', '.join(self.also_saved)} cannot be saved with FSDP, use DDP")
        self._losses: dict[str, list[Tensor]] = {}
        self._watch = LossWatch()
        self.learning: LearningWatch | None = None  # of the last training
        self._resumed: dict[str, Any] | None = None  # content of RUNNING_FILE until training starts
        if distillation is not None:
            self._check_distillation(distillation)
        if has_unlearned_predictor(self.model, distillation):
            self.args.ddp_find_unused_parameters = True
        self._check_checkpointing()
        sizes = getattr(self.args, SIZES, None)
        self.progressive = None if sizes is None else ProgressiveSizes(sizes, self.model)
        self._schedule_keep_rate()
        if (patience := getattr(self.args, "early_stopping", None)) is not None:
            self.add_callback(EarlyStopping(patience))
        self.add_callback(_StepCallback(self))

    def _check_checkpointing(self) -> None:
        """Refuse gradient checkpointing of a class without it, at which transformers would fail in the first step."""
        model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        unable = isinstance(model, PreTrainedModel) and not model.supports_gradient_checkpointing
        if self.args.gradient_checkpointing and unable:
            raise ValueError(f"gradient_checkpointing=true: a {type(model).__name__} of transformers does not have it")

    # ---- optimizer --------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers'. Restores the signal handlers, also where training ends in an error."""
        try:
            return super().train(*args, **kwargs)
        finally:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, StopOnSignal):
                    callback.request.release()

    def get_decay_parameter_names(self, model: nn.Module, *args: Any) -> list[str]:
        """Names of the parameters that weight decay applies to."""
        names = decayed_names(model)
        if self.distillation is None or not self.distillation.penalises_up:
            return names
        penalised = {id(weight) for weight in trained_up_weights(model).values()}
        return [name for name in names if id(model.get_parameter(name)) not in penalised]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer, with learning rates by layer or for the prior if `layer_decay` or `backbone_learning_rate`
        ask.
        """
        layer_decay = getattr(self.args, "layer_decay", 1.0)
        backbone = getattr(self.args, "backbone_learning_rate", 1.0)
        if self.optimizer is not None or (layer_decay == 1.0 and backbone == 1.0):
            return super().create_optimizer(model)
        model = self.model if model is None else model
        optimizer, options = self.get_optimizer_cls_and_kwargs(self.args, model)
        if {"params", "model", "optimizer_dict"} & set(options):
            raise ValueError(
                f"layer_decay={layer_decay} and backbone_learning_rate={backbone} cannot be used with "
                f"optim={self.args.optim}, which groups itself"
            )
        decayed = self.get_decay_parameter_names(model)
        groups = parameter_groups(
            model, decayed, self.args.learning_rate, self.args.weight_decay, layer_decay, backbone
        )
        self.optimizer = optimizer(groups, **options)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The schedule of learning rates; with `learning_rate_steps` a tenth is left after each of them."""
        epochs = getattr(self.args, "learning_rate_steps", None)
        if epochs and getattr(self, "lr_scheduler", None) is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            steps = [round(num_training_steps * epoch / self.args.num_train_epochs) for epoch in epochs]
            self.lr_scheduler = LambdaLR(optimizer, partial(_tenths, steps=steps))
            self._created_lr_scheduler = True
            return self.lr_scheduler
        return super().create_scheduler(num_training_steps, optimizer)

    # ---- data -------------------------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return self.train_sampler if self.train_sampler is not None else super()._get_train_sampler(train_dataset)

    def get_train_dataloader(self) -> Any:
        """The training data, in batches of `train_collator`."""
        kept, self.data_collator = self.data_collator, self.train_collator
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = kept

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super()._get_dataloader(*args, **kwargs)
        torch_loader = getattr(loader, "base_dataloader", loader)  # accelerate wraps it
        # Every pass draws a number, but with persistent workers only the first. With torch's own generator, dropout
        # would depend on how often a run was resumed or evaluated.
        torch_loader.generator = torch.Generator()
        torch_loader.worker_init_fn = WorkerStart(torch_loader.worker_init_fn)
        return loader

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """The micro-batches of a step. The model waits during the time that passes here."""
        start = time.perf_counter()
        batches = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.clock.data_seconds += time.perf_counter() - start
        return batches

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the share of time spent waiting for data next to the training loss."""
        now = time.perf_counter()
        if "loss" in logs and now > self._logged_at:
            logs["data_wait"] = round((self.clock.data_seconds - self._logged_data) / (now - self._logged_at), 4)
        if "loss" in logs:
            logs |= {f"loss_{name}": torch.stack(losses).mean().item() for name, losses in self._losses.items()}
            self._losses = {}
        self._logged_at, self._logged_data = now, self.clock.data_seconds
        super().log(logs, start_time)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """One epoch. With `max_steps`, transformers does one step too many when it resumes from the last checkpoint.
        None after a checkpoint at which early stopping had ended training.
        """
        if self.state.global_step >= self.state.max_steps or self.control.should_training_stop:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    # ---- loss -------------------------------------------------------------------------------------------------------

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor | int | None:
        """Number of samples of a step, over micro-batches and processes."""
        if not batch_samples or self.counted_input not in batch_samples[0]:
            return super()._get_num_items_in_batch(batch_samples, device)
        count: Any = torch.tensor(sum(len(batch[self.counted_input]) for batch in batch_samples))
        if self.args.world_size > 1:
            count = self.accelerator.gather(count.to(device)).sum()
        return count

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of a micro-batch, weighted so that a step's gradient is that of the mean over its samples."""
        if self.distillation is not None and model.training:
            loss, outputs = self._distilled_loss(self.distillation, model, inputs)
        else:
            loss, outputs = self._label_loss(model, inputs)
        if model.training:
            self._record(auxiliary_losses(outputs))
        loss = self.share_of_step(loss, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def share_of_step(self, loss: Tensor, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None) -> Tensor:
        """The mean loss of a micro-batch, weighted by its share of the step's samples if their number is known.

        transformers would divide by the number of micro-batches, which is right only if they are equally large.
        """
        self.loss_is_scaled_for_ga = num_items_in_batch is not None and self.counted_input in inputs
        if not self.loss_is_scaled_for_ga:
            return loss
        size = len(inputs[self.counted_input])
        return loss * (size * self.accelerator.num_processes / num_items_in_batch)

    def _label_loss(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
        """Mean over the micro-batch of the loss against labels and token targets, and the model's outputs."""
        labels: Any = inputs.get("labels")
        targets = inputs.get("token_targets")
        inputs = {name: value for name, value in inputs.items() if name != "token_targets"}
        if self._are_probabilities(labels):
            outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
            loss = soft_target_loss(outputs, labels) + sum(auxiliary_losses(outputs).values())
        else:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            if not model.training and labels is not None and labels.eq(-100).all():
                loss = torch.zeros_like(loss)  # nothing to judge in this batch; the mean of no losses is NaN
        if targets is not None:
            if (logits := outputs.get("token_logits")) is None:
                raise ValueError("the batch has token targets, the model no token_classifier that could learn them")
            grid = self.accelerator.unwrap_model(model).config.grid
            learned = token_targets(targets, logits.shape[-1], grid)
            loss = loss + self.token_label_weight * token_label_loss(
                logits, learned, outputs.get("token_ids"), outputs.get("kept")
            )
        return loss, outputs

    def _schedule_keep_rate(self) -> None:
        start, epochs = (getattr(self.args, f"keep_rate_{name}", 0.0) for name in ("start_epoch", "epochs"))
        if not start and not epochs:
            return
        if not evit_modules(self.model):
            raise ValueError(f"keep_rate_start_epoch={start} and keep_rate_epochs={epochs} are for priors with evit")
        if self.args.torch_compile:
            raise ValueError(
                f"torch_compile cannot be used with keep_rate_start_epoch={start} and keep_rate_epochs={epochs}: every "
                "keep rate would be compiled anew"
            )
        self.add_callback(KeepRateSchedule(start, epochs))

    def _record(self, losses: Mapping[str, Tensor]) -> None:
        """Keep losses for the next entry of the log."""
        for name, loss in losses.items():
            self._losses.setdefault(name, []).append(loss.detach().float())

    def _check_distillation(self, distillation: Distillation) -> None:
        if self.is_fsdp_enabled:
            raise ValueError("distillation cannot be used with FSDP, use DDP")
        if self.args.torch_compile and "scores" in distillation.needs:
            raise ValueError("torch_compile cannot be used with the attention loss, leave it out")
        distillation.check(self.model)
        if distillation.teacher is not None:
            distillation.teacher.model.to(self.args.device)

    def _distilled_loss(
        self, distillation: Distillation, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        """Mean over the micro-batch of the weighted losses, and the model's outputs."""
        student = self.accelerator.unwrap_model(model)
        with distillation.observed(student) as scores:
            label_loss, outputs = self._label_loss(model, {**inputs, **distillation.student_options()})
        losses = distillation.losses(
            student, outputs, label_loss, scores, inputs["pixel_values"], inputs.get("token_sources")
        )
        self._record(losses)
        return distillation.total(losses), outputs

    def _are_probabilities(self, labels: Any) -> bool:
        problem = getattr(getattr(self.model, "config", None), "problem_type", None)
        floating = torch.is_tensor(labels) and labels.is_floating_point() and labels.dim() == 2
        return floating and problem not in ("multi_label_classification", "regression")

    # ---- divergence -------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """As transformers'; images have the size of this step, and the loss is noted."""
        if self.progressive is not None:
            inputs = self.progressive.resized(
                self._prepare_inputs(inputs), self.state.global_step, self.state.max_steps
            )
        if self.learning is not None and self.learning.is_watching:
            ignored = getattr(getattr(self.model, "config", None), "semantic_loss_ignore_index", -100)
            self.learning.note_labels(has_label(inputs, (-100, ignored)))
        loss = super().training_step(model, inputs, *args, **kwargs)
        self._watch.note(self.state.global_step + 1, loss)
        return loss

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        due = self.control.should_log or self.control.should_evaluate or self.control.should_save
        if due or self._watch.full():
            self._check_finite(weights=self.control.should_save)
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._check_finite(weights=True)
        self._finish_learning()
        return super()._finalize_training(*args, **kwargs)

    def _watch_learning(self) -> None:
        """Watch the first steps from here on. Shards of parameters have zeros that say nothing of the whole."""
        learn_behind_frozen(self.model)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return
        scores = self.distillation is not None and "scores" in self.distillation.needs
        self.learning = LearningWatch(self.model, scores, self.is_world_process_zero())
        self.learning.attach(self.optimizer)

    def _finish_learning(self) -> None:
        if self.learning is not None:
            self.learning.finish()

    def _check_finite(self, weights: bool) -> None:
        """Raise Diverged on all processes if a noted loss or, if asked, a weight of any process is not finite."""
        steps, losses = self._watch.take()
        if getattr(self.args, SETTING, None) == CONTINUE:
            return
        trained = (parameter for parameter in self.model.parameters() if parameter.requires_grad)
        flag = torch.tensor([0.0 if not weights or all_finite(trained) else torch.nan], device=self.args.device)
        values = torch.cat([losses.to(flag), flag])
        if self.args.world_size > 1:
            values = self.accelerator.gather(values).view(self.args.world_size, -1).mean(0)
        *read, finite = values.tolist()
        if not all(map(math.isfinite, read)):
            self._finish_learning()  # the mean over no labels is not finite
        self._watch.check(steps, read, f"trainer.{SETTING}")
        if finite != 0:
            before = self._watch.before(f"trainer.{SETTING}")
            raise Diverged(f"the weights are not finite after step {self.state.global_step}; {before}")

    # ---- moving average ---------------------------------------------------------------------------------------------

    def evaluation_loop(
        self, dataloader: Any, description: str, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> Any:
        """Evaluate the model and, if there is one, its moving average, of which only the metrics are added."""
        output = super().evaluation_loop(dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        if self.weight_average is not None:
            with self.weight_average.swapped_in():
                averaged = super().evaluation_loop(
                    dataloader, f"{description}, average", *args, metric_key_prefix=f"{metric_key_prefix}_ema", **kwargs
                )
            output.metrics.update(averaged.metrics)
        return output

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As transformers', which would delete older checkpoints before the disk has this one."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial))
            sync(folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            rotate_checkpoints(str(folder), limit, self.state.best_model_checkpoint, use_mtime=True)

    def _save_running(self, folder: str) -> None:
        """What the next entry of the log is the mean of, so that an interruption does not change it."""
        loss = self._tr_loss
        if self.args.world_size > 1:
            loss = self.accelerator.gather(loss.reshape(1)).mean()
        if self.args.should_save:
            losses = {name: torch.stack(each).tolist() for name, each in self._losses.items()}
            content = {"logged_step": self._globalstep_last_logged, "loss": loss.item(), "losses": losses}
            content["draws"] = [int(draws.count) for draws in self._draw_counts()]
            (Path(folder) / RUNNING_FILE).write_text(json.dumps(content), encoding="utf-8")

    def _draw_counts(self) -> list[DrawCount]:
        """The counts of training passes, of supports that draw their pairs anew in each."""
        return [module for module in self.model.modules() if isinstance(module, DrawCount)]

    def _resume_running(self) -> None:
        if self._resumed is not None:
            self._globalstep_last_logged = self._resumed["logged_step"]
            self._tr_loss += self._resumed["loss"]
            losses = self._resumed["losses"].items()
            self._losses = {name: list(torch.tensor(each, device=self.args.device)) for name, each in losses}
            # The weights have the counts, too, except where adapters alone are saved.
            for draws, count in zip(self._draw_counts(), self._resumed.get("draws", ()), strict=False):
                draws.count.fill_(count)
        self._resumed = None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._save_running(output_dir)
        if self.weight_average is not None and self.args.should_save:
            self.weight_average.save(output_dir)
        for part in self.also_saved.values():
            part.save(output_dir)
        if self.args.should_save:
            self.clock.save(output_dir)
            (Path(output_dir) / PROCESSES_FILE).write_text(str(self.args.world_size), encoding="utf-8")
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._check_processes(Path(checkpoint) / PROCESSES_FILE)
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            for part in self.also_saved.values():
                part.load(checkpoint)
            self.clock.load(checkpoint)
            path = Path(checkpoint) / RUNNING_FILE  # older checkpoints lack it
            self._resumed = read_json(path, RECORD_BYTES, finite=False) if path.is_file() else None
        if checkpoint is not None and (average := self._start_average()) is not None:
            average.load(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._load_stock_model(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self._load_stock_model(self.state.best_model_checkpoint):
            super()._load_best_model()

    def _load_stock_model(self, folder: str | None) -> bool:
        """Load a checkpoint of a stock model through its class; False if that is not needed.

        transformers writes many of its models under older names and silently reads checkpoints by name, without
        translation. Most weights, and those of a prior, would stay as they are.
        """
        model = self.model
        stock = isinstance(model, PreTrainedModel) and family_of(model.config) is None
        if not stock or self.is_fsdp_enabled or self.is_deepspeed_enabled or not folder:
            return False
        if not any((Path(folder) / name).is_file() for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)):
            return False
        loaded, info = from_pretrained(type(model), folder, dtype=model.dtype, output_loading_info=True)
        check_whole(folder, info)
        model.load_state_dict(loaded.state_dict())
        return True

    def _check_processes(self, path: Path) -> None:
        """Refuse another number of processes: batches would differ, and steps would count for other epochs."""
        processes = int(path.read_text(encoding="utf-8")) if path.is_file() else self.args.world_size
        if processes != self.args.world_size:
            raise ValueError(
                f"{path.parent} is of a run by {processes} processes and cannot go on with {self.args.world_size}"
            )

    def checkpoint_files(self) -> list[str]:
        """Names of the files and folders without which a checkpoint of this Trainer is not whole."""
        files = [SCHEDULER_NAME, TRAINER_STATE_NAME]
        if self.is_fsdp_enabled:
            sharded = "SHARDED" in str(self.accelerator.state.fsdp_plugin.state_dict_type)
            files += [f"{FSDP_MODEL_NAME}_0", "optimizer_0"] if sharded else ["optimizer.bin"]
        else:
            files += [ADAPTER_SAFE_WEIGHTS_NAME if is_peft_model(self.model) else SAFE_WEIGHTS_NAME, OPTIMIZER_NAME]
        processes = self.args.world_size
        files += [f"rng_state_{rank}.pth" for rank in range(processes)] if processes > 1 else ["rng_state.pth"]
        files += self.also_saved
        return files + ([EMA_FILE] if getattr(self.args, "ema_decay", None) is not None else [])

    def _start_average(self) -> WeightAverage | None:
        """Start the moving average at the current weights, if one is wanted."""
        decay = getattr(self.args, "ema_decay", None)
        self.weight_average = None if decay is None else WeightAverage(self.model, decay)
        return self.weight_average


class TrainingClock:
    """Seconds of training, including evaluation between its steps, and seconds of waiting for data. The time before an
    interruption counts, the interruption does not.
    """

    def __init__(self) -> None:
        self.train_seconds = self.data_seconds = 0.0
        self._started: float | None = None

    def start(self) -> None:
        """Start or go on."""
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Stop until the next start."""
        self.train_seconds, self._started = self.seconds(), None

    def seconds(self) -> float:
        """Seconds of training until now."""
        return self.train_seconds + (0.0 if self._started is None else time.perf_counter() - self._started)

    def save(self, folder: str) -> None:
        """Write both numbers into a checkpoint."""
        numbers = {"train_seconds": self.seconds(), "data_seconds": self.data_seconds}
        (Path(folder) / CLOCK_FILE).write_text(json.dumps(numbers), encoding="utf-8")

    def load(self, folder: str) -> None:
        """Read what `save` wrote. With an older checkpoint, which lacks it, the clock stays at 0."""
        path = Path(folder) / CLOCK_FILE
        if path.is_file():
            numbers = read_json(path, RECORD_BYTES, finite=False)
            self.train_seconds, self.data_seconds = numbers["train_seconds"], numbers["data_seconds"]


class _StepCallback(TrainerCallback):
    """Tells sampler, average and clock what the Trainer is doing."""

    def __init__(self, trainer: SparsePriorTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.clock.start()
        self.trainer._logged_at, self.trainer._logged_data = time.perf_counter(), self.trainer.clock.data_seconds
        if self.trainer.weight_average is None:
            self.trainer._start_average()
        self.trainer._resume_running()
        self.trainer._watch_learning()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # After resuming, the sampler is wrapped so deeply that accelerate no longer finds it.
        if self.trainer.train_sampler is not None:
            self.trainer.train_sampler.set_epoch(int(state.epoch or 0))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.weight_average is not None:
            self.trainer.weight_average.update()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.clock.stop()
        # `learning` is None where parameters are in shards.
        whole = self.trainer.learning is not None and self.trainer.is_world_process_zero()
        if whole and (text := unmoved_decay(self.trainer.model)) is not None:
            logger.warning(text)


def has_unlearned_predictor(model: nn.Module, distillation: Distillation | None = None) -> bool:
    """Whether a predictor learns from its scores alone and no loss takes them: DistributedDataParallel, which expects a
    gradient for every parameter, has to look for those that get none.
    """
    learned = distillation is not None and "scores" in distillation.needs
    return not learned and any(map(learns_from_scores, predictors(model)))


def auxiliary_losses(outputs: Any) -> Mapping[str, Tensor]:
    """The losses in a model's outputs, by name and weighted; its own `loss` already includes them."""
    return getattr(outputs, "auxiliary_losses", None) or {}


def soft_target_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Mean over the batch of the cross entropy against class probabilities (B, classes).

    With a distillation head both heads learn from the targets, as with class indices.
    """
    if (class_logits := outputs.get("class_logits")) is not None:
        heads = [class_logits, outputs["distillation_logits"]]
    else:
        heads = [outputs["logits"]]
    losses = [F.cross_entropy(logits.float(), targets) for logits in heads]
    return torch.stack(losses).mean()


def _tenths(step: int, steps: Sequence[int]) -> float:
    """The share of the learning rate at a step, counted from 0: a tenth after each of `steps`."""
    return 0.1 ** sum(step >= last for last in steps)
