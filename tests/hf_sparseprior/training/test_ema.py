import itertools

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import Dataset
from transformers import TrainerCallback

import hf_sparseprior as sp
from hf_sparseprior.training import SparsePriorTrainer, SparsePriorTrainingArguments, WeightAverage
from tests.each import each


class Squares(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        pixels = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))
        pixels[:, :, 4 * (index % 2) : 4 * (index % 2) + 4] += 0.5
        return {"pixel_values": pixels, "labels": index % 2}


def make_model():
    torch.manual_seed(0)
    config = sp.SparsePriorViTConfig(
        image_size=8, patch_size=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        prior="violin", drop_path_rate=0.2, hidden_dropout_prob=0.1, initializer_range=0.2, pooling="mean",
    )  # fmt: skip
    return sp.SparsePriorViTForImageClassification(config)


class Record(TrainerCallback):
    """Weights before the first and after every step, in float64."""

    def __init__(self):
        self.weights = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.weights.append({name: p.detach().double().numpy().copy() for name, p in model.named_parameters()})

    on_step_end = on_train_begin


def accuracy(p):
    return {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}


def make_trainer(folder, model=None, metrics=None, **options):
    arguments = SparsePriorTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, learning_rate=1e-2, report_to="none", disable_tqdm=True,
        use_cpu=True, remove_unused_columns=False,
        **{"num_train_epochs": 2, "ema_decay": 0.8, "save_strategy": "no", **options},
    )  # fmt: skip
    trainer = SparsePriorTrainer(
        model=model or make_model(), args=arguments, train_dataset=Squares(), eval_dataset=Squares(),
        compute_metrics=metrics or accuracy,
    )  # fmt: skip
    trainer.record = Record()
    trainer.add_callback(trainer.record)
    return trainer


def closed_form(weights, decay):
    """decay^k w_0 + (1 - decay) sum_j decay^(k - j) w_j."""
    steps = len(weights) - 1
    return {
        name: decay**steps * weights[0][name]
        + (1 - decay) * sum(decay ** (steps - j) * weights[j][name] for j in range(1, steps + 1))
        for name in weights[0]
    }


@each(
    "decay, steps, dtype",
    itertools.product([0.0, 0.5, 0.99992], [1, 7], [torch.float32, torch.float64, torch.bfloat16]),
)
def test_after_k_steps_the_average_is_the_closed_form(decay, steps, dtype):
    model, generator = nn.Linear(3, 2).to(dtype), torch.Generator().manual_seed(0)
    weights = [{name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}]
    average = WeightAverage(model, decay)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        average.update()
        weights.append({name: p.detach().double().numpy().copy() for name, p in model.named_parameters()})
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    for name, expected in closed_form(weights, decay).items():
        np.testing.assert_allclose(average.averages[name].double().numpy(), expected, atol=tolerance, rtol=0)
        assert average.averages[name].dtype == torch.promote_types(dtype, torch.float32)


def test_small_steps_of_bfloat16_weights_are_not_lost():
    """1 + 1e-4 is 1 in bfloat16: an average kept in it would never move."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    average = WeightAverage(model, 0.9999)
    nn.init.constant_(model.weight, 2.0)
    for _ in range(100):
        average.update()
    assert average.averages["weight"].item() == pytest.approx(2 - 0.9999**100, abs=1e-5)


@pytest.mark.parametrize(("accumulation", "steps"), [(1, 10), (2, 6)])
def test_the_trainer_averages_once_per_optimizer_step(tmp_path, accumulation, steps):
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=accumulation)
    trainer.train()
    weights = trainer.record.weights
    assert len(weights) == 1 + steps
    for name, expected in closed_form(weights, 0.8).items():
        np.testing.assert_allclose(trainer.weight_average.averages[name].numpy(), expected, atol=1e-6, rtol=1e-5)
        assert (weights[0][name] != weights[-1][name]).any(), name


def test_averaging_and_its_evaluation_leave_training_alone_bit_for_bit(tmp_path):
    with_average = make_trainer(tmp_path, eval_strategy="steps", eval_steps=3)
    with_average.train()
    without = make_trainer(tmp_path, eval_strategy="steps", eval_steps=3, ema_decay=None)
    without.train()
    torch.testing.assert_close(with_average.model.state_dict(), without.model.state_dict(), rtol=0, atol=0)


def test_the_average_is_evaluated_beside_the_weights(tmp_path):
    """Its numbers are those of a model that holds the averaged weights; predictions are the raw weights'."""

    def sums(p):
        correct = p.predictions.argmax(-1) == p.label_ids
        return {"accuracy": float(correct.mean()), "sum": float(p.predictions.sum())}

    trainer = make_trainer(tmp_path, metrics=sums)
    trainer.train()
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    found = trainer.evaluate()
    predictions = trainer.predict(Squares(), metric_key_prefix="test")
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())

    averaged = make_model()
    averaged.load_state_dict(trainer.weight_average.averages)
    expected = make_trainer(tmp_path, averaged, sums, ema_decay=None).evaluate()
    raw = make_trainer(tmp_path, trainer.model, sums, ema_decay=None)
    for key in ("loss", "accuracy", "sum"):
        assert found[f"eval_ema_{key}"] == pytest.approx(expected[f"eval_{key}"], rel=1e-6)
        assert found[f"eval_{key}"] == raw.evaluate()[f"eval_{key}"]
        assert predictions.metrics[f"test_ema_{key}"] == found[f"eval_ema_{key}"]
    assert found["eval_ema_sum"] != found["eval_sum"]
    np.testing.assert_array_equal(predictions.predictions, raw.predict(Squares()).predictions)


def test_the_weights_come_back_when_evaluation_fails():
    model = nn.Linear(2, 2)
    average = WeightAverage(model, 0.5)
    nn.init.ones_(model.weight)
    with pytest.raises(KeyboardInterrupt), average.swapped_in():
        assert not (model.weight == 1).all()
        raise KeyboardInterrupt
    assert (model.weight == 1).all()


def test_saved_and_loaded_averages_are_bit_equal_and_go_on_alike(tmp_path):
    model = make_model()
    average = WeightAverage(model, 0.9)
    nn.init.normal_(model.classifier.weight)
    average.update()
    average.save(tmp_path)
    other = WeightAverage(make_model(), 0.9)
    other.load(tmp_path)
    assert all(torch.equal(value, other.averages[name]) for name, value in average.averages.items())
    nn.init.ones_(model.classifier.weight)
    nn.init.ones_(other.parameters["classifier.weight"])
    average.update()
    other.update()
    assert torch.equal(average.averages["classifier.weight"], other.averages["classifier.weight"])


def test_averages_of_another_model_or_none_are_refused(tmp_path):
    average = WeightAverage(nn.Linear(2, 2), 0.9)
    with pytest.raises(ValueError, match=r"has no ema.safetensors; its run kept no moving average"):
        average.load(tmp_path)
    WeightAverage(nn.Linear(2, 3), 0.9).save(tmp_path)
    with pytest.raises(ValueError, match="is of another model"):
        average.load(tmp_path)


def test_below_peft_only_what_is_trained_is_averaged(tmp_path):
    model = get_peft_model(make_model(), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["classifier"]))
    trainer = make_trainer(tmp_path, model)
    trainer.train()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainer.weight_average.averages.keys() == trained
    expected = closed_form(trainer.record.weights, 0.8)
    for name in trained:
        np.testing.assert_allclose(trainer.weight_average.averages[name].numpy(), expected[name], atol=1e-6)


@each("value", [-0.1, 1, 1.5, True, "0.9", float("nan")])
def test_bad_decay_is_named(tmp_path, value):
    with pytest.raises(ValueError, match=rf"ema_decay={value!r} must be in \[0, 1\), or null for none"):
        SparsePriorTrainingArguments(output_dir=str(tmp_path), ema_decay=value)
