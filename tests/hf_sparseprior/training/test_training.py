"""The Trainer: schedule, soft targets, accumulation, order of the samples, and resuming."""

import itertools
import math
import signal

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import TrainerCallback

import hf_sparseprior as sp
from hf_sparseprior.training import (
    Draw,
    DrawSampler,
    Mixing,
    SoftTargetCollator,
    SparsePriorTrainer,
    SparsePriorTrainingArguments,
    StopOnSignal,
    soft_target_loss,
)
from tests.each import each
from tests.hf_sparseprior.training.test_trainer import StopAt
from tests.processes import launched

CLASSES = 3


class Images(Dataset):
    """Indexed by number or Draw; `augment` adds noise that only the draw decides."""

    def __init__(self, number=16, augment=False):
        self.number, self.augment = number, augment

    def __len__(self):
        return self.number

    def __getitem__(self, item):
        index = item.index if isinstance(item, Draw) else item
        pixels = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index)) + index % CLASSES
        if self.augment and isinstance(item, Draw):
            pixels = pixels + torch.from_numpy(item.random(0).normal(size=(3, 8, 8))).float()
        sample = {"pixel_values": pixels, "labels": index % CLASSES}
        return {**sample, "draw": item} if isinstance(item, Draw) else sample


class Each(TrainerCallback):
    """Calls a function after (or before) every optimizer step."""

    def __init__(self, function, event="on_step_end"):
        setattr(self, event, lambda args, state, control, **kwargs: function(state, **kwargs))


def make_model(**settings):
    torch.manual_seed(0)
    config = sp.SparsePriorViTConfig(**{
        "image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 16, "prior": "fibottention+violin", "initializer_range": 0.2, "num_labels": CLASSES,
        **settings,
    })  # fmt: skip
    return sp.SparsePriorViTForImageClassification(config)


def make_trainer(folder, model=None, data=None, **options):
    given = {key: options.pop(key) for key in ("train_sampler", "train_collator", "eval_dataset") if key in options}
    arguments = SparsePriorTrainingArguments(
        output_dir=str(folder), report_to="none", disable_tqdm=True, use_cpu=True, remove_unused_columns=False,
        **{"per_device_train_batch_size": 8, "num_train_epochs": 1, "learning_rate": 1e-2, "save_strategy": "no",
           "logging_strategy": "no", **options},
    )  # fmt: skip
    return SparsePriorTrainer(model=model or make_model(), args=arguments, train_dataset=data or Images(), **given)


def recipe(number=16, seed=0, batch_size=8, repeats=1, mixing=None, smoothing=0.1):
    """Sampler and collator of a run with soft targets."""
    collator = SoftTargetCollator(CLASSES, mixing or Mixing(0.8, 1.0), smoothing, seed, batch_size)
    return {"train_sampler": DrawSampler(number, seed, repeats), "train_collator": collator}


# ---- schedule -------------------------------------------------------------------------------------------------------


def test_the_schedule_of_fibottention_table_9(tmp_path):
    """Warm-up from 1e-6 to 1e-3 in 5 of 100 epochs, then a cosine to 1e-5 at the last step."""
    trainer = make_trainer(
        tmp_path, learning_rate=1e-3, warmup_steps=0.05,
        lr_scheduler_type="cosine_warmup_with_min_lr", lr_scheduler_kwargs={"warmup_lr_rate": 1e-3, "min_lr": 1e-5},
    )  # fmt: skip
    warm, total = 5, 100  # one step an epoch
    trainer.create_optimizer_and_scheduler(total)
    rates = []
    for _ in range(total):
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    expected = [1e-6 + (1e-3 - 1e-6) * step / (warm - 1) for step in range(warm)]
    for step in range(1, total - warm + 1):
        expected.append(1e-5 + (1e-3 - 1e-5) * (1 + math.cos(math.pi * step / (total - warm))) / 2)
    assert rates == pytest.approx(expected, rel=1e-9)
    assert (rates[0], max(rates), rates[-1]) == pytest.approx((1e-6, 1e-3, 1e-5))


# ---- loss -----------------------------------------------------------------------------------------------------------


def soft(labels):
    return F.one_hot(labels, CLASSES).float()


@each("distillation", [False, True])
def test_soft_targets_of_hard_labels_give_the_models_own_loss(distillation):
    model = make_model(use_distillation_token=distillation).eval()
    pixels, labels = torch.randn(5, 3, 8, 8), torch.tensor([0, 1, 2, 2, 0])
    outputs = model(pixels, labels=labels)
    loss = soft_target_loss(outputs, soft(labels))
    torch.testing.assert_close(loss, outputs.loss)
    if distillation:
        heads = [outputs.class_logits, outputs.distillation_logits]
        torch.testing.assert_close(loss, sum(F.cross_entropy(head, labels) for head in heads) / 2)
    else:
        torch.testing.assert_close(loss, F.cross_entropy(outputs.logits, labels))


def test_soft_target_loss_is_cross_entropy_in_float64():
    logits, targets = torch.randn(7, CLASSES), torch.rand(7, CLASSES)
    targets = targets / targets.sum(1, keepdim=True)
    probabilities = logits.double().exp() / logits.double().exp().sum(1, keepdim=True)
    expected = -(targets.double() * probabilities.log()).sum(1).mean()
    torch.testing.assert_close(soft_target_loss({"logits": logits}, targets).double(), expected, atol=1e-6, rtol=1e-6)
    half = soft_target_loss({"logits": logits.bfloat16()}, targets)
    assert half.dtype == torch.float32 and half.item() == pytest.approx(expected.item(), rel=1e-2)


def gradients_of_one_step(folder, batch, accumulation, collator, number=8, **options):
    """Gradients that the optimizer sees in the only step of an epoch, by name, and the logged loss."""
    found = {}
    trainer = make_trainer(
        folder, make_model(**options), Images(number), train_sampler=DrawSampler(number), train_collator=collator,
        per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_grad_norm=0.0,
    )  # fmt: skip
    keep = lambda state, model, **_: found.update({n: p.grad.double().clone() for n, p in model.named_parameters()})  # noqa: E731
    trainer.add_callback(Each(keep, "on_pre_optimizer_step"))
    loss = trainer.train().training_loss
    assert trainer.state.global_step == 1
    return found, loss


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "distillation"), [("hard", True), ("smoothed", False), ("mixed", True)])
def test_a_step_is_that_of_the_mean_over_its_samples_however_they_are_split(tmp_path, kind, distillation):
    mixing = Mixing(0.8, 1.0) if kind == "mixed" else Mixing()
    collator = SoftTargetCollator(CLASSES, mixing, 0.0 if kind == "hard" else 0.1, batch_size=8)
    options = {"use_distillation_token": distillation}
    expected, loss = gradients_of_one_step(tmp_path, 8, 1, collator, **options)

    # By hand, in float64: no Trainer.
    model = make_model(**options).double().train()
    batch = collator([Images()[draw] for draw in DrawSampler(8)])
    targets = batch["labels"] if batch["labels"].dim() == 2 else soft(batch["labels"])
    outputs = model(batch["pixel_values"].double())
    heads = [outputs.class_logits, outputs.distillation_logits] if distillation else [outputs.logits]
    by_hand = sum(-(targets.double() * head.log_softmax(1)).sum(1).mean() for head in heads) / len(heads)
    by_hand.backward()
    assert loss == pytest.approx(by_hand.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(expected[name], parameter.grad, atol=1e-6, rtol=1e-3, msg=name)

    # 3 + 3 + 2; mixing pairs samples of one micro-batch.
    splits = {"hard": [(3, 3)], "smoothed": [(1, 8), (3, 3)], "mixed": [(4, 2), (2, 4)]}
    for size, accumulation in splits[kind]:
        found, split_loss = gradients_of_one_step(tmp_path, size, accumulation, collator, **options)
        assert split_loss == pytest.approx(loss, rel=1e-5)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=2e-7, rtol=1e-4, msg=f"{name}, {size}")


def test_a_shorter_last_step_weighs_its_samples_alike(tmp_path):
    """10 samples in micro-batches of 4, two to a step: the second step has 2 samples, the mean is over 2."""
    steps, collator = [], SoftTargetCollator(CLASSES, Mixing(), 0.1)
    trainer = make_trainer(
        tmp_path, data=Images(10), train_sampler=DrawSampler(10), train_collator=collator, learning_rate=0.0,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, max_grad_norm=0.0, weight_decay=0.0,
    )  # fmt: skip
    keep = lambda state, model, **_: steps.append(model.classifier.weight.grad.clone())  # noqa: E731
    trainer.add_callback(Each(keep, "on_pre_optimizer_step"))
    trainer.train()
    draws = list(DrawSampler(10))
    for found, part in zip(steps, (draws[:8], draws[8:]), strict=True):
        model, batch = make_model().train(), collator([Images()[draw] for draw in part])
        F.cross_entropy(model(batch["pixel_values"]).logits, batch["labels"]).backward()
        torch.testing.assert_close(found, model.classifier.weight.grad, atol=1e-6, rtol=1e-4)


@each(
    "problem, labels, loss",
    [
        ("multi_label_classification", torch.tensor([[1.0, 0, 1]] * 4), F.binary_cross_entropy_with_logits),
        ("regression", torch.tensor([[0.5, 0.1, -1]] * 4), F.mse_loss),
        (None, torch.tensor([[0.5, 0.3, 0.2]] * 4), F.cross_entropy),
        (None, torch.tensor([0, 1, 2, 0]), F.cross_entropy),
        ("one number", torch.tensor([0.5, 1.5, 0.0, -1.0]), F.mse_loss),
    ],
)
def test_floating_labels_are_probabilities_unless_the_model_says_otherwise(tmp_path, problem, labels, loss):
    model = make_model(**{"num_labels": 1} if problem == "one number" else {"problem_type": problem}).eval()
    pixels = torch.randn(4, 3, 8, 8)
    found = make_trainer(tmp_path, model).compute_loss(model, {"pixel_values": pixels, "labels": labels})
    torch.testing.assert_close(found, loss(model(pixels).logits.squeeze(), labels))
    assert model.config.problem_type == problem or labels.dim() == 1  # soft targets leave the config alone


def loss_of_soft_targets(folder, **options):
    """That of an epoch, after which the weights are finite."""
    model = make_model(num_hidden_layers=1)
    trainer = make_trainer(folder, model, per_device_train_batch_size=4, **recipe(batch_size=4), **options)
    loss = trainer.train().training_loss
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    return loss


@pytest.mark.slow
def test_soft_targets_train_in_bfloat16_and_compiled(tmp_path):
    plain = loss_of_soft_targets(tmp_path / "plain")
    assert loss_of_soft_targets(tmp_path / "half", bf16=True) == pytest.approx(plain, rel=3e-2)
    compiled = loss_of_soft_targets(tmp_path / "compiled", torch_compile=True, torch_compile_backend="aot_eager")
    assert compiled == pytest.approx(plain, rel=1e-5)


def write_gradients(folder):
    """Those of one step of 8 samples, taken by the processes of this group, into a file."""
    collator = SoftTargetCollator(CLASSES, Mixing(0.8, 1.0), 0.1, batch_size=8)
    found, _ = gradients_of_one_step(folder, 2, 2, collator)
    if torch.distributed.get_rank() == 0:
        torch.save(found, folder / "gradients.pt")


@pytest.mark.slow
def test_two_processes_take_the_step_of_one(tmp_path):
    """2 processes with 2 micro-batches of 2: the gradient of one batch of 8, mixed alike."""
    collator = SoftTargetCollator(CLASSES, Mixing(0.8, 1.0), 0.1, batch_size=8)
    expected, _ = gradients_of_one_step(tmp_path, 8, 1, collator)
    log = tmp_path / "log.txt"
    process = launched(2, write_gradients, tmp_path, folder=tmp_path, log=log, here=True)
    assert process.wait(300) == 0, log.read_text()[-3000:]
    for name, value in torch.load(tmp_path / "gradients.pt").items():
        torch.testing.assert_close(value, expected[name], atol=2e-7, rtol=1e-4, msg=name)


# ---- order and resumption -------------------------------------------------------------------------------------------


def record_indices(trainer):
    """Draws of every micro-batch that reaches the collator."""
    seen, collate = [], trainer.train_collator

    def collator(samples):
        seen.append([sample["draw"] for sample in samples])
        return collate(samples)

    trainer.train_collator = collator
    return seen


def test_each_epoch_has_its_own_order(tmp_path):
    trainer = make_trainer(tmp_path, num_train_epochs=3, per_device_train_batch_size=4, **recipe(14))
    seen = record_indices(trainer)
    trainer.train()
    draws = list(itertools.chain(*seen))
    sampler = DrawSampler(14)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert draws[14 * epoch : 14 * epoch + 14] == list(sampler)
    assert len({tuple(draw.index for draw in draws[start : start + 14]) for start in (0, 14, 28)}) == 3


def recipe_trainer(folder):
    """16 steps, 4 of them an epoch, each of two micro-batches."""
    settings = {"drop_path_rate": 0.2, "hidden_dropout_prob": 0.1, "pooling": "mean"}
    return make_trainer(
        folder, make_model(**settings), Images(30, augment=True), num_train_epochs=4,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, save_strategy="steps",
        save_steps=3, layer_decay=0.7, ema_decay=0.9, weight_decay=0.05, eval_strategy="no",
        lr_scheduler_type="cosine_warmup_with_min_lr", lr_scheduler_kwargs={"min_lr": 1e-4}, warmup_steps=4,
        **recipe(30, batch_size=8, repeats=3),
    )  # fmt: skip


@pytest.mark.slow
def test_a_whole_recipe_resumed_in_the_middle_of_an_epoch_is_bit_equal(tmp_path):
    """Weights, moving average, optimizer and schedule; mixing, repeats, dropout and layer decay.

    In the first epoch and without accumulation: test_trainer.py.
    """
    whole = recipe_trainer(tmp_path / "whole")
    whole.train()
    broken = recipe_trainer(tmp_path / "broken")
    broken.add_callback(StopAt(11))  # in the third epoch; the last checkpoint is of step 9
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    torch.manual_seed(99)  # whatever the new process starts with must not matter
    resumed = recipe_trainer(tmp_path / "broken")
    torch.nn.init.normal_(resumed.model.classifier.weight)
    seen = record_indices(resumed)
    resumed.train(resume_from_checkpoint=True)
    assert seen[0][0].position in (0, 8)  # accelerate may collate what it skips
    assert resumed.state.global_step == whole.state.global_step == 16
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(resumed.weight_average.averages, whole.weight_average.averages, rtol=0, atol=0)
    for one, other in zip(whole.optimizer.param_groups, resumed.optimizer.param_groups, strict=True):
        assert one["lr"] == other["lr"] and one["weight_decay"] == other["weight_decay"]
        for p, q in zip(one["params"], other["params"], strict=True):
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(whole.optimizer.state[p][key], resumed.optimizer.state[q][key])


@pytest.mark.slow
def test_resumed_with_persistent_workers_a_run_is_bit_equal(tmp_path):
    """The passes of one loader over the data draw fewer random numbers than those of several loaders."""

    def trainer_in(folder):
        return make_trainer(
            tmp_path / folder, make_model(drop_path_rate=0.5), Images(16, augment=True), eval_dataset=Images(),
            num_train_epochs=4, save_strategy="epoch", eval_strategy="epoch", dataloader_num_workers=1,
            dataloader_persistent_workers=True, ema_decay=0.9, **recipe(),
        )  # fmt: skip

    whole = trainer_in("whole")
    whole.train()
    broken = trainer_in("broken")
    broken.add_callback(StopAt(5))  # of 2 steps an epoch
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    resumed = trainer_in("broken")
    resumed.train(resume_from_checkpoint=True)
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def three_epochs(folder):
    """Two steps an epoch."""
    return make_trainer(
        folder, eval_dataset=Images(), num_train_epochs=3, save_strategy="epoch", eval_strategy="epoch", **recipe()
    )


def evaluations(trainer):
    return [(entry["epoch"], entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]


@pytest.fixture(scope="module")
def whole_evaluations(tmp_path_factory):
    """Those of a run that was never stopped."""
    whole = three_epochs(tmp_path_factory.mktemp("whole"))
    whole.train()
    assert len(evaluations(whole)) == 3
    return evaluations(whole)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "event"), [(2, "on_step_end"), (3, "on_step_end"), (6, "on_step_end"), (6, "on_log")])
def test_sigterm_at_any_step_loses_no_evaluation(tmp_path, whole_evaluations, step, event):
    """After the last step training is over, but the run has to end."""

    def send(state, **_):
        if state.global_step == step:
            signal.raise_signal(signal.SIGTERM)

    trainer, stop = three_epochs(tmp_path), StopOnSignal()
    trainer.add_callback(Each(send, event))
    trainer.add_callback(stop)
    trainer.train()
    assert stop.stopped and trainer.state.global_step == step
    resumed = three_epochs(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert evaluations(resumed) == whole_evaluations


@each("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_training_gives_the_signal_back(tmp_path, error):
    def fail(state, **_):
        assert signal.getsignal(signal.SIGTERM) is not before
        raise error

    before = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.add_callback(StopOnSignal())
    trainer.add_callback(Each(fail))
    with pytest.raises(error):
        trainer.train()
    assert signal.getsignal(signal.SIGTERM) is before


def test_resumed_behind_its_last_step_a_run_is_over(tmp_path):
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3, "per_device_train_batch_size": 2}
    whole = make_trainer(tmp_path, ema_decay=0.9, **options)
    whole.train()
    resumed = make_trainer(tmp_path, ema_decay=0.9, **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(resumed.weight_average.averages, whole.weight_average.averages, rtol=0, atol=0)
    stored = load_file(tmp_path / "checkpoint-3" / "ema.safetensors")
    assert all(torch.equal(stored[name], value) for name, value in whole.weight_average.averages.items())


def test_a_run_does_not_go_on_with_another_number_of_processes_or_an_average_that_it_lacks(tmp_path):
    make_trainer(tmp_path, save_strategy="epoch").train()
    with pytest.raises(ValueError, match="kept no moving average"):
        make_trainer(tmp_path, ema_decay=0.9, num_train_epochs=2).train(resume_from_checkpoint=True)
    stored = tmp_path / "checkpoint-2" / "processes.txt"
    assert stored.read_text() == "1"
    stored.write_text("4")
    with pytest.raises(ValueError, match="checkpoint-2 is of a run by 4 processes and cannot go on with 1"):
        make_trainer(tmp_path, num_train_epochs=2).train(resume_from_checkpoint=True)


def test_workers_change_nothing(tmp_path):
    def batches(number):
        trainer = make_trainer(
            tmp_path, data=Images(20, augment=True), per_device_train_batch_size=4,
            dataloader_num_workers=number, **recipe(20, batch_size=4, repeats=2),
        )  # fmt: skip
        return list(trainer.get_train_dataloader())

    for one, other in zip(batches(0), batches(2), strict=True):
        assert torch.equal(one["pixel_values"], other["pixel_values"]) and torch.equal(one["labels"], other["labels"])


def test_evaluation_keeps_hard_labels(tmp_path):
    trainer = make_trainer(tmp_path, **recipe())
    trainer.get_train_dataloader()
    assert next(iter(trainer.get_eval_dataloader(Images())))["labels"].dtype == torch.int64
