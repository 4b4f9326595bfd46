"""Saving stock models with a prior, by hand and by the Trainer."""

import copy
import io
import json
import re
from contextlib import nullcontext

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPConfig,
    CLIPForImageClassification,
    Dinov2Config,
    Dinov2ForImageClassification,
    PreTrainedModel,
    SiglipConfig,
    SiglipForImageClassification,
    TimesformerConfig,
    TimesformerForVideoClassification,
    Trainer,
    TrainingArguments,
    VideoMAEConfig,
    VideoMAEForVideoClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

import hf_sparseprior as sp
from hf_sparseprior.adapters.stock_attention import MARKER, PRIOR_MODULE
from hf_sparseprior.training import SparsePriorTrainer, SparsePriorTrainingArguments
from tests.hf_sparseprior.adapters.stock_models import STOCK, TINY, move_decays, output


class Images(torch.utils.data.Dataset):
    """Random images, or videos of so many frames, and labels."""

    def __init__(self, frames=None):
        self.shape = (3, 32, 32) if frames is None else (frames, 3, 32, 32)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"pixel_values": torch.randn(self.shape, generator=generator), "labels": index % 2}


def trainer_of(model, folder, **arguments):
    settings = {"report_to": [], "use_cpu": True, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    settings |= {"save_strategy": "epoch", "logging_strategy": "no", "disable_tqdm": True}
    arguments = SparsePriorTrainingArguments(output_dir=str(folder), **settings, **arguments)
    return SparsePriorTrainer(model, arguments, train_dataset=Images(), eval_dataset=Images())


def stock_classifier(config):
    torch.manual_seed(0)
    return sp.apply_prior(ViTForImageClassification(config), "fibottention+violin")


VIDEO = {"num_frames": 4, "tubelet_size": 2, "num_labels": 2}
STOCK_CLASSIFIERS = {  # whether transformers' own Trainer finds all that the files hold
    "vit": (ViTConfig(**TINY), ViTForImageClassification, False),
    "dinov2": (Dinov2Config(**TINY), Dinov2ForImageClassification, False),
    "videomae": (VideoMAEConfig(**TINY, **VIDEO), VideoMAEForVideoClassification, False),  # 4 of 36 it does not
    "clip": (CLIPConfig(vision_config=TINY, num_labels=2), CLIPForImageClassification, True),
    "siglip": (SiglipConfig(vision_config=TINY, num_labels=2), SiglipForImageClassification, True),
    "timesformer": (TimesformerConfig(**TINY, num_frames=4), TimesformerForVideoClassification, True),
}


def plain_trainer(name, folder, trainer=Trainer, **options):
    config, model_class, _ = STOCK_CLASSIFIERS[name]
    torch.manual_seed(0)
    model = sp.apply_prior(model_class(config), "violin")
    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "max_steps": 2, "save_steps": 1, **options}
    images = Images(4 if "Video" in model_class.__name__ else None)
    return trainer(model, TrainingArguments(str(folder), **options), train_dataset=images, eval_dataset=images)


@pytest.mark.parametrize(("name", "best"), [*zip(STOCK_CLASSIFIERS, [True, False] * 3, strict=True)])
def test_transformers_own_trainer_goes_on_with_everything_or_not_at_all(name, best, tmp_path):
    options = {}
    if best:
        options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
    trainer = plain_trainer(name, tmp_path, **options)
    finds_all = STOCK_CLASSIFIERS[name][2]
    refused = pytest.raises(
        RuntimeError, match=r"^\w+\.load_state_dict: .* lack [\w.]+ \(\d+ in all.*SparsePriorTrainer"
    )
    with refused if best and not finds_all else nullcontext():
        trainer.train()
    state = {key: tensor.clone() for key, tensor in trainer.model.state_dict().items()}
    again = plain_trainer(name, tmp_path, **options)
    with nullcontext() if finds_all else refused:
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    if finds_all:
        assert all(torch.equal(tensor, state[key]) for key, tensor in again.model.state_dict().items())
    model = again.model
    assert model.load_state_dict(state) == ([], [])  # what a model itself gives is whole
    copy.deepcopy(model).load_state_dict(state)
    part = {key: tensor for key, tensor in state.items() if not key.startswith("classifier")}
    assert {key.split(".")[0] for key in model.load_state_dict(part, strict=False).missing_keys} == {"classifier"}
    sp.remove_prior(model).load_state_dict({key: value for key, value in state.items() if PRIOR_MODULE not in key})


@pytest.mark.parametrize("name", ["vit", "videomae", "siglip"])
def test_our_trainer_restores_every_tensor_of_a_checkpoint(name, tmp_path):
    """ViT is saved under older names, VideoMAE's biases of queries and values as `q_bias` and `v_bias`."""
    whole = plain_trainer(name, tmp_path, SparsePriorTrainer, learning_rate=0.01)
    whole.train()
    resumed = plain_trainer(name, tmp_path, SparsePriorTrainer, learning_rate=0.01)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    start, expected = plain_trainer(name, tmp_path).model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in resumed.model.state_dict().items())
    moved = {key for key, tensor in expected.items() if not torch.equal(tensor, start[key])}
    assert {key.rpartition(".")[0].rpartition(".")[2] for key in moved} >= {"decay_bias", "classifier"}
    if name == "videomae":
        assert sum(key.endswith(("query.bias", "value.bias")) for key in moved) == 2 * TINY["num_hidden_layers"]


def test_earlier_folders_have_the_scalars_in_their_own_file_alone(tmp_path):
    config, model_class, _ = STOCK_CLASSIFIERS["clip"]
    model = sp.apply_prior(model_class(config), "violin")
    move_decays(model)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    earlier = {key: tensor for key, tensor in weights.items() if "decay_bias" not in key}
    assert len(earlier) < len(weights)
    save_file(earlier, tmp_path / "model.safetensors", {"format": "pt"})
    again, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]
    assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in again.state_dict().items())
    with pytest.raises(RuntimeError, match=r"lack .*sparse_prior.*SparsePriorTrainer"):
        model.load_state_dict(earlier, strict=False)


def test_the_best_model_is_loaded_with_every_tensor(tmp_path):
    model = stock_classifier(ViTConfig(**TINY))
    # The largest loss, so that the best model is not the last.
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    trainer = trainer_of(model, tmp_path, num_train_epochs=3, eval_strategy="epoch", **best)
    trainer.train()
    assert not trainer.state.best_model_checkpoint.endswith("checkpoint-6")
    saved = ViTForImageClassification.from_pretrained(trainer.state.best_model_checkpoint).state_dict()
    equal = [name for name, tensor in model.state_dict().items() if torch.equal(tensor, saved[name])]
    assert equal == list(saved)


def test_saving_a_part_of_what_has_a_prior_is_refused(tmp_path):
    whole = sp.apply_prior(ViTForImageClassification(ViTConfig(**TINY)), "fibottention")
    with pytest.raises(ValueError, match="applied to a part of it or to what it is a part of"):
        whole.vit.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="Sequential must be a model of transformers"):
        sp.apply_prior(torch.nn.Sequential(ViTModel(ViTConfig(**TINY))), "fibottention")


def unexpected_keys(folder):
    _, info = ViTForImageClassification.from_pretrained(folder, output_loading_info=True)
    return info["unexpected_keys"]


class OwnModel(PreTrainedModel):
    """A user's own, with a stock model in it."""

    config_class = ViTConfig
    base_model_prefix = "encoder"

    def __init__(self, config):
        super().__init__(config)
        self.encoder = ViTModel(config)
        self.post_init()


@pytest.mark.parametrize("prior", ["violin", "fibottention"])
def test_a_whole_is_not_saved_without_the_prior_of_its_part(prior, tmp_path):
    whole = OwnModel(ViTConfig(**TINY))
    sp.apply_prior(whole.encoder, prior)
    for save in (whole.save_pretrained, trainer_of(whole, tmp_path).save_model):
        with pytest.raises(
            ValueError, match=r"^OwnModel\.save_pretrained would lose a prior .* the model that is saved$"
        ):
            save(tmp_path / "own")
    assert not list(tmp_path.rglob("*.safetensors"))
    # The method of the class, around ours, does not record it either.
    stock = sp.apply_prior(ViTModel(ViTConfig(**TINY)), prior)
    with pytest.raises(ValueError, match=r"ViTModel\.save_pretrained would lose a prior"):
        ViTModel.save_pretrained(stock, tmp_path / "stock")
    # Training goes on from its tensors, and applied to the whole it comes back.
    assert any(PRIOR_MODULE in name for name in whole.state_dict())
    sp.remove_prior(whole.encoder)
    sp.apply_prior(whole, prior)
    move_decays(whole)
    whole.save_pretrained(tmp_path / "own")
    again = OwnModel.from_pretrained(tmp_path / "own")
    assert torch.equal(output(again.encoder.eval(), "vit"), output(whole.encoder.eval(), "vit"))


def test_saved_around_us_the_weights_say_that_something_is_missing(tmp_path):
    """Given its tensors, transformers asks no part for them; but the load is reported."""
    part = ViTForImageClassification(ViTConfig(**TINY))
    sp.apply_prior(part.vit, "fibottention")
    part.save_pretrained(tmp_path / "part", state_dict=part.state_dict())
    whole = sp.apply_prior(ViTForImageClassification(ViTConfig(**TINY)), "fibottention")
    ViTForImageClassification.save_pretrained(whole, tmp_path / "whole", state_dict=whole.state_dict())
    for folder in ("part", "whole"):
        assert len(unexpected_keys(tmp_path / folder)) == 3
        assert all(key.endswith(MARKER) for key in unexpected_keys(tmp_path / folder))


def copied(model):
    return copy.deepcopy(model)


def pickled(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("make_copy", [copied, pickled])
def test_a_copy_saves_itself(make_copy, tmp_path):
    model = sp.apply_prior(STOCK["vit"].build(), "fibottention+violin")
    copy_of_it = make_copy(model)
    move_decays(copy_of_it)
    expected = output(copy_of_it, "vit")
    assert not torch.equal(output(model, "vit"), expected)
    for _ in range(2):  # and it does so twice
        copy_of_it.save_pretrained(tmp_path)
        assert torch.equal(output(ViTModel.from_pretrained(tmp_path), "vit"), expected)
    sp.remove_prior(copy_of_it).save_pretrained(tmp_path / "removed")
    assert torch.equal(output(ViTModel.from_pretrained(tmp_path / "removed"), "vit"), output(copy_of_it, "vit"))
    assert not any(MARKER in key for key in unexpected_keys(tmp_path / "removed"))
    assert "save_pretrained" in model.__dict__  # the other one still has its prior


def test_saving_leaves_the_config_as_it_was_and_the_folder_says_what_is_in_it(tmp_path):
    model = sp.apply_prior(STOCK["vit"].build(), "bigbird")
    before = dict(model.config.__dict__)
    model.save_pretrained(tmp_path)
    written = {**model.config.__dict__, "dtype": before["dtype"], "architectures": before["architectures"]}
    assert written == before
    config = json.loads((tmp_path / "config.json").read_text())
    # transformers quotes both where the package is missing.
    assert config["attn_implementation"] == "hf_sparseprior"
    assert config["quantization_config"] == {"quant_method": "hf_sparseprior"}
    assert config["sparse_prior"]["prior"]["support"]["name"] == "bigbird"


def test_the_readme_says_once_that_the_folder_needs_the_package(tmp_path):
    model = sp.apply_prior(STOCK["vit"].build(), "violin")
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n---\n\n<!-- hf_sparseprior")
    assert "needs the Python package hf_sparseprior" in card and "the prior `violin`" in card
    scripts = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert [("trust_remote_code" in script, "import hf_sparseprior" in script) for script in scripts] == [
        (True, False),
        (False, True),
    ]
    for script in scripts:
        exec(script.replace("PATH_OR_NAME_OF_THIS_MODEL", str(tmp_path)), loaded := {})
        assert torch.equal(output(loaded["model"], "vit"), output(model, "vit"))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == card
    own = b"# My model, \xff in no encoding"
    (tmp_path / "README.md").write_bytes(own)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_bytes().startswith(own + b"\n\n<!-- hf_sparseprior")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_bytes().count(b"# hf_sparseprior\n") == 1


def test_the_readme_names_the_base_model_and_the_prior_that_is_there(tmp_path):
    model = sp.apply_prior(STOCK["vit"].build(), "violin")
    model.config._name_or_path = "facebook/deit-tiny-patch16-224"
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nmine\n")
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\nbase_model: facebook/deit-tiny-patch16-224\n---\n\n<!-- hf_sparseprior")
    assert card.endswith("-->\n\nmine\n") and "the prior `violin`" in card
    sp.apply_prior(sp.remove_prior(model), "bigbird").save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == card.replace("`violin`", "`bigbird`")
    (tmp_path / "README.md").write_text("I import hf_sparseprior before I load this.\n")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "I import hf_sparseprior before I load this.\n"


def test_a_quantized_model_keeps_its_own_quantization_config(tmp_path):
    model = sp.apply_prior(STOCK["vit"].build(), "violin")
    move_decays(model)
    model.config.quantization_config = {"quant_method": "quanto", "weights": "int8"}
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "quanto"
    assert model.config.quantization_config["quant_method"] == "quanto"
    # Such a folder names our attention, as older ones do, so the model does not run without its prior.
    model.config.quantization_config = None
    config = ViTConfig.from_pretrained(tmp_path)
    config.quantization_config = None
    with pytest.raises(RuntimeError, match="load_prior"):
        output(ViTModel.from_pretrained(tmp_path, config=config), "vit")
    loaded = sp.load_prior(ViTModel.from_pretrained(tmp_path, config=config), tmp_path)
    assert torch.equal(output(loaded, "vit"), output(model, "vit"))


def test_mixers_come_back_with_the_adapter(tmp_path):
    # Its weights start at random: an adapter without them would fit no other start.
    def fresh(seed):
        torch.manual_seed(0)
        model = STOCK["vit"].build()
        torch.manual_seed(seed)
        return sp.apply_prior(model, "linformer")

    model = fresh(1)
    adapted = peft.get_peft_model(model, sp.adapters.lora_config(model))
    with pytest.raises(ValueError, match=r"unload\(\) of the peft model"):
        sp.remove_prior(adapted.get_base_model())
    with pytest.raises(ValueError, match="save the peft model, or unload"):
        adapted.get_base_model().save_pretrained(tmp_path / "base")
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(fresh(2), tmp_path)
    expected = output(adapted.eval(), "vit")
    assert output(again.eval(), "vit").equal(expected) and not output(fresh(2), "vit").equal(expected)


def test_scalars_that_peft_holds_are_not_thrown_away(tmp_path):
    model = sp.apply_prior(ViTForImageClassification(ViTConfig(**TINY)), "violin")
    settings = {"target_modules": ["q_proj"], "modules_to_save": ["decay_bias"]}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
    with pytest.raises(ValueError, match=r"unload\(\) of the peft model"):
        sp.remove_prior(model)
    with pytest.raises(ValueError, match="save the peft model, or unload"):
        model.save_pretrained(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
