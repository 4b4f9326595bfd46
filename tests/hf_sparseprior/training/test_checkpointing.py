"""`trainer.gradient_checkpointing`: the same training to the bit with every prior, in less memory."""

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

import hf_sparseprior as sp
from hf_sparseprior.analysis.costs_measured import traced_bytes
from hf_sparseprior.priors.prior import prior_names
from hf_sparseprior.training import SparsePriorTrainer, SparsePriorTrainingArguments
from tests.each import each

pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated")
PRIORS = [name for name in prior_names() if name != "none"]
# Pairs that are drawn in each pass, tokens that are dropped by scores, and orders in which patches come.
SETTINGS = [
    {"support": {"name": "random", "redraw": True}},
    {"support": {"name": "fibottention", "order": "hilbert"}, "decay": "violin"},
    {"extras": [{"name": "evit", "keep_rate": 0.5}], "support": "fibottention"},
]


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {
            "pixel_values": torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(index)),
            "labels": index % 2,
        }


def make(prior):
    torch.manual_seed(0)
    config = sp.SparsePriorViTConfig(
        image_size=16, patch_size=4, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
        prior=prior, num_labels=2, drop_path_rate=0.2, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return sp.SparsePriorViTForImageClassification(config)


def make_stock(prior):
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=16, patch_size=4, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
        num_labels=2, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return sp.apply_prior(ViTForImageClassification(config), prior)


def enable(model):
    """The older name is deprecated since transformers 5.23."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def trained(model, folder, **options):
    arguments = SparsePriorTrainingArguments(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=4, learning_rate=1e-2, report_to="none",
        disable_tqdm=True, remove_unused_columns=False, use_cpu=True, save_strategy="no", **options,
    )  # fmt: skip
    SparsePriorTrainer(model=model, args=arguments, train_dataset=Noise()).train()
    return model


def gradients(model):
    batch = torch.stack([Noise()[index]["pixel_values"] for index in range(4)])
    torch.manual_seed(1)  # dropout and stochastic depth
    model.train()(batch, labels=torch.tensor([0, 1, 0, 1])).loss.backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@each("prior", [*PRIORS, *SETTINGS])
def test_gradients_with_every_prior_are_the_same_to_the_bit(prior):
    checkpointed = make(prior)
    enable(checkpointed)
    plain, again = gradients(make(prior)), gradients(checkpointed)
    assert len(plain) > 40
    torch.testing.assert_close(again, plain, rtol=0, atol=0)


@each("prior", SETTINGS)
def test_so_is_training_with_the_option_of_the_trainer(prior, tmp_path):
    plain = trained(make(prior), tmp_path)
    again = trained(make(prior), tmp_path, gradient_checkpointing=True)
    assert again.is_gradient_checkpointing and not plain.is_gradient_checkpointing
    torch.testing.assert_close(again.state_dict(), plain.state_dict(), rtol=0, atol=0)


@each("options", [{}, {"progressive_sizes": [8, 16]}])
def test_so_is_that_of_a_class_of_transformers(options, tmp_path):
    plain = trained(make_stock("fibottention+violin"), tmp_path, **options)
    again = trained(make_stock("fibottention+violin"), tmp_path, gradient_checkpointing=True, **options)
    torch.testing.assert_close(again.state_dict(), plain.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("prior", ["dense", "fibottention", "fibottention+violin"])
def test_a_step_takes_less_memory(prior):
    """Of twelve layers one is held at a time, and the input of each."""
    config = sp.SparsePriorViTConfig.from_preset("vit_tiny", image_size=128, prior=prior, num_labels=2)
    model = sp.SparsePriorViTForImageClassification(config).train()
    pixels, labels = torch.randn(1, 3, 128, 128), torch.tensor([1])
    model(pixels, labels=labels).loss.backward()  # tables and gradients, which stay
    peaks = []
    for switch in (lambda model: None, enable):
        switch(model)
        peaks.append(traced_bytes(lambda: model(pixels, labels=labels).loss.backward(), torch.device("cpu"))[0])
    plain, checkpointed = peaks
    assert checkpointed < plain / 2


def test_a_class_of_transformers_without_it_is_refused_by_name(tmp_path):
    model = make_stock("fibottention")
    model.supports_gradient_checkpointing = False
    with pytest.raises(
        ValueError, match="gradient_checkpointing=true: a ViTForImageClassification of transformers does"
    ):
        trained(model, tmp_path, gradient_checkpointing=True)
