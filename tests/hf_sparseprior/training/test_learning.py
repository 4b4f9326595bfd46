"""Trainings that cannot learn say so, and no other does."""

import re

import peft
import pytest
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

import hf_sparseprior as sp
from hf_sparseprior.adapters import lora_config
from hf_sparseprior.training import SparsePriorTrainer, SparsePriorTrainingArguments
from hf_sparseprior.training.finite import Diverged
from hf_sparseprior.training.learning import FEWEST, STEPS, LearningWatch, has_label, parameter_parts
from tests.each import each

SIZES = {"image_size": 8, "patch_size": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
VIOLIN = "fibottention+violin"


def make(prior="fibottention", layers=2, **options):
    torch.manual_seed(0)
    config = sp.SparsePriorViTConfig(**SIZES, num_hidden_layers=layers, num_labels=2, prior=prior, **options)
    return sp.SparsePriorViTForImageClassification(config)


def stock():
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(**SIZES, num_hidden_layers=2, num_labels=2))


def with_lora(model, **options):
    return peft.get_peft_model(model, lora_config(model, rank=2, **options))


def with_zero_head(model):
    nn.init.zeros_(model.classifier.weight)
    return model


def with_decay_of_last_layer(model):
    return peft.get_peft_model(model, sp.ViolinAdapterConfig(decay_layers=[1], modules_to_save=["classifier"]))


def without_alpha(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and "alpha" not in name)
    return model


def alone(model, *parts):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in parts))
    return model


def train(model, folder, label=None, **options):
    arguments = SparsePriorTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=6, learning_rate=1e-2, report_to="none",
        disable_tqdm=True, remove_unused_columns=False, use_cpu=True, save_strategy="no", **options,
    )  # fmt: skip
    noise = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    data = [{"pixel_values": noise[n], "labels": n % 2 if label is None else label} for n in range(4)]
    trainer = SparsePriorTrainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    return trainer


REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
LEARNING = {
    "everything": lambda: make(VIOLIN),
    "a head of zeros": lambda: with_zero_head(make(VIOLIN, drop_path_rate=0.9)),
    "lora": lambda: with_lora(make(VIOLIN)),
    "dora of a stock model": lambda: with_lora(stock(), use_dora=True),
    "an identity decay": lambda: with_lora(sp.apply_prior(stock(), "violin")),
    "a decay alone": lambda: alone(make({"decay": {"name": "violin", "init": "finetune"}}), "classifier", "decay_bias"),
    "adapter with a decay": lambda: peft.get_peft_model(stock(), sp.ViolinAdapterConfig()),
    "relative positions": lambda: make("fibottention+swin_rpb+localvit"),
    "a predictor without its loss": lambda: make("sparsifiner"),
    "dropped tokens": lambda: make("dynamicvit"),
    "a classifier": lambda: alone(make(VIOLIN), "classifier"),
}


# Frozen embeddings would end gradients under reentrant checkpoints.
FROZEN = ("dora of a stock model", "a decay alone", "adapter with a decay")


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in LEARNING if name not in FROZEN), *((name, REENTRANT) for name in FROZEN)],
)
def test_what_learns_is_not_warned_of(name, options, tmp_path, caplog):
    """At the start zeros hide gradients."""
    trainer = train(LEARNING[name](), tmp_path, warmup_steps=3, **options)
    assert trainer.learning.messages == [] and not trainer.learning.is_watching
    assert not warned(caplog)


def warned(caplog, moves=False):
    """What the training warned of: that a decay does not move (after six steps on an untrained model), or the rest."""
    messages = [record.getMessage() for record in caplog.records if record.name == "hf_sparseprior.training"]
    return [message for message in messages if ("did not move" in message) == moves]


IDENTITY, GROWING = ({"decay": {"name": "violin", "init": init}} for init in ("identity", "growing"))


@pytest.mark.parametrize(
    ("make_model", "said"),
    [
        (
            lambda: with_lora(sp.apply_prior(stock(), {"decay": {"name": "violin", "init": "identity"}})),
            "init: identity",
        ),
        (lambda: with_lora(sp.apply_prior(stock(), {"decay": {"name": "violin", "init": "growing"}})), None),
        (lambda: peft.get_peft_model(stock(), sp.ViolinAdapterConfig()), None),
        (lambda: make("dense"), None),
        (lambda: alone(make(IDENTITY), "classifier"), None),  # not trained
    ],
)
def test_a_decay_that_stays_at_1_is_said_at_the_end(make_model, said, tmp_path, caplog):
    train(make_model(), tmp_path)
    messages = warned(caplog, moves=True)
    assert len(messages) == (0 if said is None else 1) and all(said in message for message in messages)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        # The class token's row of M is 1, and nothing follows the last layer's other rows.
        (lambda: without_alpha(make("violin", layers=1)), "the prior's decay got no gradient in the first 6 steps"),
        (
            lambda: without_alpha(with_decay_of_last_layer(stock())),
            "the adapter's decay got no gradient .* such as .*decay_biases",
        ),
    ],
)
def test_a_part_without_a_gradient_is_named(model, message, tmp_path, caplog):
    trainer = train(model(), tmp_path)
    (found,) = trainer.learning.messages
    assert warned(caplog) == [found]
    assert re.search(message, found) and "the head" not in found


def test_a_detached_backbone_is_named(tmp_path):
    model = make()
    model.vit.register_forward_hook(
        lambda module, args, output: type(output)({k: v.detach() for k, v in output.items()})
    )
    (message,) = train(model, tmp_path).learning.messages
    assert message.startswith("the backbone got no gradient in the first 6 steps and does not learn")
    assert message.endswith(
        "the loss does not depend on it, because the model does not use it or something detaches it"
    )


@pytest.mark.parametrize("logging_steps", [1, 100])
def test_batches_without_a_label_are_said_before_their_loss_ends_the_run(logging_steps, tmp_path, caplog):
    with pytest.raises(Diverged):
        train(make(), tmp_path, label=-100, logging_steps=logging_steps)
    messages = [record.getMessage() for record in caplog.records if record.name == "hf_sparseprior.training"]
    assert len(messages) == 1 and messages[0].startswith("no batch of the first ")


def test_the_watch_ends_after_the_first_steps_and_says_nothing_of_fewer():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.0}], lr=0.0)
    for steps in (FEWEST - 1, FEWEST, STEPS + 3):
        watch = LearningWatch(model)
        watch.attach(optimizer)
        for _ in range(steps):
            (0 * model.weight).sum().backward()  # zeros, and none for the bias
            optimizer.step()
            optimizer.zero_grad()
        assert watch.is_watching == (steps < STEPS)
        watch.finish()
        assert watch.steps == min(steps, STEPS) and len(watch.messages) == (steps >= FEWEST)
        assert not optimizer._optimizer_step_pre_hooks


def test_one_gradient_that_is_not_zero_in_one_step_is_enough():
    model = nn.Linear(2, 1)
    watch = LearningWatch(model)
    watch.attach(optimizer := torch.optim.SGD(model.parameters(), lr=0.0))
    for step in range(STEPS):
        (float(step == 3) * model.bias).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert watch.messages == [] and not watch.is_watching


def test_parts_of_a_model():
    model = peft.get_peft_model(
        make("fibottention+violin+swin_rpb"), lora_config(make("fibottention+violin+swin_rpb"), rank=2)
    )
    parts = parameter_parts(model)
    assert set(parts.values()) == {
        *("the backbone", "the head", "the low-rank adapter", "the prior's decay", "the prior's relative positions"),
    }
    for name, part in parts.items():
        assert (part == "the head") == ("classifier" in name), name
        assert (part == "the low-rank adapter") == ("lora_" in name), name
    assert set(parameter_parts(make().vit).values()) == {"the model"}


@each(
    "batch, expected",
    [
        ({"labels": torch.tensor([1, -100])}, True),
        ({"labels": torch.full((2, 3, 3), 255)}, False),
        ({"labels": torch.tensor([[0.5, 0.5]])}, None),
        ({"labels": [{"class_labels": torch.zeros(0)}, {"class_labels": torch.zeros(2)}]}, True),
        ({"labels": [{"class_labels": torch.zeros(0)}]}, False),
        ({"class_labels": [torch.zeros(0)], "mask_labels": []}, False),
        ({"pixel_values": torch.zeros(1)}, None),
    ],
)
def test_labels_of_a_batch(batch, expected):
    found = has_label(batch, (-100, 255))
    assert found is None if expected is None else bool(found) == expected
