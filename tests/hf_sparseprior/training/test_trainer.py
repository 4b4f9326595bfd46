import pytest
import torch
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments

import hf_sparseprior as sp
from hf_sparseprior.training import SparsePriorTrainer, SparsePriorTrainingArguments
from tests.each import each


class Squares(Dataset):
    """Bright left or right halves, with noise fixed by the index."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        pixels = 0.3 * torch.randn(3, 8, 8, generator=generator)
        label = index % 2
        pixels[:, :, 4 * label : 4 * label + 4] += 1
        return {"pixel_values": pixels, "labels": label}


class StopAt(TrainerCallback):
    """Stands for a kill: stops the process's work at a step, without any saving of its own."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def make_model(prior="fibottention+violin"):
    torch.manual_seed(0)
    config = sp.SparsePriorViTConfig(
        image_size=8, patch_size=2, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        prior=prior, drop_path_rate=0.2, hidden_dropout_prob=0.1, layerscale_value=0.1, num_register_tokens=1,
        pooling="mean",  # the class token's row has M = 1: pooled from it, the last layer's beta would not train
    )  # fmt: skip
    return sp.SparsePriorViTForImageClassification(config)


def make_trainer(model, folder, **options):
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, num_train_epochs=3, learning_rate=1e-2,
        weight_decay=0.05, report_to="none", disable_tqdm=True, remove_unused_columns=False, use_cpu=True,
        **{"save_strategy": "steps", "save_steps": 4, "logging_steps": 4, **options},
    )  # fmt: skip
    data = Squares()
    accuracy = {"compute_metrics": lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}}
    return SparsePriorTrainer(model=model, args=arguments, train_dataset=data, eval_dataset=data, **accuracy)


def test_no_decay_for_scalars_biases_norms_and_embeddings(tmp_path):
    model = make_model()
    trainer = make_trainer(model, tmp_path)
    trainer.create_optimizer()
    decayed = {id(p) for group in trainer.optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in decayed}
    linear = ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2", "classifier", "projection")
    expected = {
        name for name, _ in model.named_parameters() if name.endswith(".weight") and name.split(".")[-2] in linear
    }
    assert names == expected
    every = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert every == {id(p) for p in model.parameters()}


@pytest.mark.slow
def test_resume_equals_the_uninterrupted_run_bit_for_bit(tmp_path):
    whole = make_trainer(make_model(), tmp_path / "whole")
    whole.train()
    broken = make_trainer(make_model(), tmp_path / "broken")
    broken.add_callback(StopAt(6))  # the last checkpoint, of step 4, lies in the middle of an epoch of 6 steps
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    torch.manual_seed(99)  # whatever the new process starts with must not matter
    resumed = make_trainer(make_model(), tmp_path / "broken")
    torch.nn.init.normal_(resumed.model.classifier.weight)
    resumed.train(resume_from_checkpoint=True)
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


@pytest.mark.slow
def test_the_best_model_comes_back_whole(tmp_path):
    seen = {}

    class Remember(TrainerCallback):
        def on_evaluate(self, args, state, control, model=None, **kwargs):
            seen[state.global_step] = {name: value.clone() for name, value in model.state_dict().items()}

    trainer = make_trainer(
        make_model(), tmp_path, eval_strategy="steps", eval_steps=4, load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip
    trainer.add_callback(Remember())
    trainer.train()
    best = int(trainer.state.best_model_checkpoint.rsplit("-", 1)[1])
    assert best < trainer.state.global_step  # the worst loss is not the last, so something had to be loaded
    restored = trainer.model.state_dict()
    assert restored.keys() == seen[best].keys()
    changed = 0
    for name, value in restored.items():
        assert torch.equal(value, seen[best][name]), name
        changed += not torch.equal(value, seen[trainer.state.global_step][name])
    assert changed == len(restored)


def test_rates_fall_to_a_tenth_after_epochs_also_after_a_restart(tmp_path):
    """TimeSformer's schedule: 15 epochs, steps after 11 and 14."""
    arguments = {
        "output_dir": str(tmp_path), "num_train_epochs": 15, "learning_rate": 0.1, "use_cpu": True,
        "lr_scheduler_type": "constant", "learning_rate_steps": [11, 14],
    }  # fmt: skip

    def schedule():
        trainer = SparsePriorTrainer(make_model(), SparsePriorTrainingArguments(**arguments))
        trainer.create_optimizer()
        return trainer.optimizer, trainer.create_scheduler(150)

    def rates(optimizer, scheduler, steps):
        for _ in range(steps):
            yield optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()

    optimizer, scheduler = schedule()
    found = list(rates(optimizer, scheduler, 120))
    torch.save(scheduler.state_dict(), tmp_path / "scheduler.pt")
    optimizer, again = schedule()
    again.load_state_dict(torch.load(tmp_path / "scheduler.pt", weights_only=True))
    for group, rate in zip(optimizer.param_groups, again.get_last_lr(), strict=True):
        group["lr"] = rate  # the optimizer's own state has it
    found += rates(optimizer, again, 30)
    assert found == pytest.approx([0.1] * 110 + [0.01] * 30 + [0.001] * 10)


@each(
    "change, message",
    [
        ({"learning_rate_steps": [14, 11]}, r"learning_rate_steps=\[14, 11\] must be rising epochs above 0 and below"),
        ({"learning_rate_steps": [11, 15]}, r"below num_train_epochs=15"),
        ({"learning_rate_steps": 11}, r"learning_rate_steps=11 must be rising epochs"),
        ({"learning_rate_steps": []}, r"learning_rate_steps=\[\] must be rising epochs"),
        ({"lr_scheduler_type": "cosine"}, r"a schedule of its own; lr_scheduler_type=cosine must be constant"),
    ],
)
def test_steps_that_cannot_be_taken_are_refused(change, message, tmp_path):
    options = {"lr_scheduler_type": "constant", "learning_rate_steps": [11, 14], "num_train_epochs": 15, **change}
    with pytest.raises(ValueError, match=message):
        SparsePriorTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options)
