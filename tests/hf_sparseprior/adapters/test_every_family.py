"""LoRA, DoRA and VIOLIN adapters of every family of image models, trained by transformers' Trainer."""

import copy
from itertools import cycle

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import hf_sparseprior as sp
from hf_sparseprior.adapters import lora_config
from hf_sparseprior.base.families import FAMILIES
from tests.hf_sparseprior.small import small

IMAGES = [name for name, family in FAMILIES.items() if family.takes == "images"]
METHODS = {
    "lora": lambda model: lora_config(model, rank=2),
    "dora": lambda model: lora_config(model, rank=2, use_dora=True),
    "violin": lambda model: sp.ViolinAdapterConfig(modules_to_save=["classifier"]),
}


class Brightness(Dataset):
    """Noise on light (label 0) and on dark ground (label 1)."""

    def __init__(self, side, number=16):
        self.labels = [0, 1] * (number // 2)
        self.images = 0.1 * torch.randn(number, 3, side, side, generator=torch.Generator().manual_seed(3))
        self.images[::2] += 1.0
        self.images[1::2] -= 1.0

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


CASES = [*zip(IMAGES, cycle(METHODS)), ("sparseprior_swin", "violin"), ("sparseprior_iformer", "violin")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), CASES)
def test_adapters_of_every_family_train_in_the_trainer_and_come_back(name, method, tmp_path):
    torch.manual_seed(0)
    config = small(name, prior="fibottention", num_labels=2)
    base = FAMILIES[name].image_classifier(config)
    with torch.no_grad():
        for parameter in base.parameters():  # far from their small initial values
            parameter.add_(torch.randn_like(parameter) * 0.1)
        data = Brightness(config.image_size)
        if any(
            "running" in key for key, _ in base.named_buffers()
        ):  # statistics that fit the images, as a base has them
            for _ in range(50):
                base.train()(data.images)
    start = copy.deepcopy(base)
    model = peft.get_peft_model(base, METHODS[method](base))
    frozen = {key: value.clone() for key, value in model.named_parameters() if not value.requires_grad}
    arguments = TrainingArguments(
        str(tmp_path / "run"), num_train_epochs=10, per_device_train_batch_size=8, learning_rate=0.05, report_to="none",
        save_strategy="no", logging_steps=1, disable_tqdm=True, use_cpu=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < 0.7 * before
    parameters = dict(model.named_parameters())
    assert frozen and all(torch.equal(value, parameters[key]) for key, value in frozen.items())

    trainer.save_model(str(tmp_path / "adapter"))
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    mark = "decay_bias" if method == "violin" else "lora_A"
    assert len([key for key in saved if mark in key]) >= len(config.stages)
    again = peft.PeftModel.from_pretrained(start, str(tmp_path / "adapter")).eval()
    pixels = data.images[:4]
    with torch.no_grad():
        assert torch.equal(again(pixel_values=pixels).logits, model.eval()(pixel_values=pixels).logits)
        assert not torch.equal(again(pixel_values=pixels).logits, start_logits(again, pixels))


def start_logits(model, pixels):
    with model.disable_adapter():
        return model(pixel_values=pixels).logits
