"""Loading stock models with a prior."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load, load_file, save, save_file
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    CLIPModel,
    CLIPVisionModel,
    ViTConfig,
    ViTForImageClassification,
    ViTMAEConfig,
    ViTMAEForPreTraining,
    ViTModel,
)
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

import hf_sparseprior as sp
from hf_sparseprior.adapters import stock_loading
from hf_sparseprior.adapters.stock_attention import MARKER, PRIOR_MODULE, RECORD
from hf_sparseprior.adapters.stock_saving import SCALARS_FILE
from hf_sparseprior.priors.low_rank import MIXERS
from tests.each import each
from tests.hf_sparseprior.adapters.fresh_process import CLASSES
from tests.hf_sparseprior.adapters.stock_models import STOCK, TINY, move_decays, output, tiny_clip
from tests.processes import run_script

DECODER = {
    **{"decoder_hidden_size": 24, "decoder_num_hidden_layers": 1},
    **{"decoder_num_attention_heads": 2, "decoder_intermediate_size": 32, "mask_ratio": 0.5},
}


@pytest.mark.parametrize(
    ("name", "prior"),
    [*((name, "fibottention+violin") for name in STOCK), ("vit", "fibottention"), ("swin", "fibottention")],
)
def test_saved_and_loaded_by_the_stock_class(name, prior, tmp_path):
    model = sp.apply_prior(STOCK[name].build(), prior)
    move_decays(model)
    expected = output(model, name)
    model.save_pretrained(tmp_path)
    assert not hasattr(model.config, RECORD) and torch.equal(output(model, name), expected)
    loaded, info = STOCK[name].model.from_pretrained(tmp_path, output_loading_info=True)
    assert torch.equal(output(loaded, name), expected)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    again = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(output(again, name), expected)
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(output(STOCK[name].model.from_pretrained(tmp_path / "again"), name), expected)


def test_a_prior_survives_a_change_of_head(tmp_path):
    model = sp.apply_prior(ViTForImageClassification(ViTConfig(**TINY)).eval(), "violin")
    move_decays(model)
    model.save_pretrained(tmp_path)
    images = STOCK["vit"].example()
    body = ViTModel.from_pretrained(tmp_path, add_pooling_layer=False)
    with torch.no_grad():
        expected = model.vit(**images).last_hidden_state
        assert torch.equal(body(**images).last_hidden_state, expected)
    assert isinstance(AutoModelForImageClassification.from_pretrained(tmp_path), ViTForImageClassification)


@pytest.mark.parametrize(
    ("name", "prior"),
    [
        *(("vit", "topk"), ("vit", "linformer"), ("dinov3", "efficient"), ("dinov3", "bigbird"), ("mae", "topk")),
        *(("mae", "linformer"), ("mae", "random"), ("swin", "topk"), ("swin", "bigbird"), ("swin", "linformer")),
    ],
)
def test_baselines_change_the_model_and_are_saved(name, prior, tmp_path):
    model = STOCK[name].build()
    if name == "swin" and prior in MIXERS:
        with pytest.raises(ValueError, match="has no logits of pairs, to which SwinAttention adds its relative"):
            sp.apply_prior(model, prior)
        return
    before = output(model, name)
    torch.manual_seed(2)
    sp.apply_prior(model, prior)
    expected = output(model, name)
    assert not torch.allclose(expected, before, atol=1e-3)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert output(again, name).equal(expected)
    assert output(sp.remove_prior(model), name).equal(before)


def test_a_decoder_stays_dense_when_the_model_comes_back(tmp_path):
    model = sp.apply_prior(ViTMAEForPreTraining(ViTMAEConfig(**TINY, **DECODER)).eval(), "fibottention+violin")
    move_decays(model)
    model.save_pretrained(tmp_path)
    inputs = STOCK["mae"].example()
    with torch.no_grad():
        expected = model(**inputs).logits
        assert torch.equal(ViTMAEForPreTraining.from_pretrained(tmp_path)(**inputs).logits, expected)


def test_the_tower_of_a_saved_pair_keeps_its_prior(tmp_path):
    pair = sp.apply_prior(tiny_clip(), "fibottention+violin")
    move_decays(pair)
    pair.save_pretrained(tmp_path)
    images = STOCK["clip"].example()
    tower = CLIPVisionModel.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = pair.vision_model(**images).last_hidden_state
        assert torch.equal(tower(**images).last_hidden_state, expected)
        again = CLIPModel.from_pretrained(tmp_path)
        assert torch.equal(again.vision_model(**images).last_hidden_state, expected)


def test_a_config_of_ones_own_does_not_drop_the_prior(tmp_path):
    sp.apply_prior(STOCK["vit"].build(), "violin").save_pretrained(tmp_path)
    own = ViTConfig(**TINY)
    with pytest.raises(ValueError, match="config=ViTConfig says nothing of the prior"):
        sp.from_pretrained(ViTModel, tmp_path, config=own)
    _, info = ViTModel.from_pretrained(tmp_path, config=own, output_loading_info=True)
    assert sum(key.endswith(MARKER) for key in info["unexpected_keys"]) == 3
    assert all(f".{PRIOR_MODULE}." in key for key in info["unexpected_keys"])
    STOCK["vit"].build().save_pretrained(tmp_path)  # without a prior, over it
    _, info = ViTModel.from_pretrained(tmp_path, config=own, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert isinstance(sp.from_pretrained(ViTModel, tmp_path, config=own), ViTModel)


def test_our_attention_on_a_model_without_a_prior_is_refused(tmp_path):
    plain = STOCK["vit"].build()
    plain.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="apply_prior"):
        output(ViTModel.from_pretrained(tmp_path, attn_implementation="hf_sparseprior"), "vit")
    plain.set_attn_implementation("hf_sparseprior")
    with pytest.raises(RuntimeError, match="apply_prior"):
        output(plain, "vit")


def test_a_loaded_model_is_an_ordinary_one(tmp_path):
    model = sp.apply_prior(STOCK["vit"].build(), "violin")
    model.save_pretrained(tmp_path)
    loaded = ViTModel.from_pretrained(tmp_path)
    assert loaded.config.to_diff_dict() == model.config.to_diff_dict()
    assert not hasattr(loaded, "hf_quantizer") and not hasattr(loaded, "is_quantized")
    assert not hasattr(loaded.config, "_is_quantized")
    assert list(loaded.state_dict()) == list(model.state_dict())
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(output(sp.remove_prior(loaded), "vit"), output(STOCK["vit"].build(), "vit"))
    half = ViTModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for n, p in half.named_parameters() if PRIOR_MODULE in n} == {torch.float32}
    assert {p.dtype for n, p in half.named_parameters() if PRIOR_MODULE not in n} == {torch.bfloat16}


def test_an_adapter_on_a_base_model_with_a_prior_finds_it(tmp_path):
    """transformers loads the base model that an adapter names, then the adapter."""
    base = sp.apply_prior(STOCK["vit"].build(), "fibottention")
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(ViTModel.from_pretrained(tmp_path / "base"), sp.ViolinAdapterConfig())
    move_adapter(model)
    model.save_pretrained(tmp_path / "adapter")
    expected = output(model.eval(), "vit")
    assert not torch.equal(expected, output(base, "vit"))
    assert torch.equal(output(ViTModel.from_pretrained(tmp_path / "adapter"), "vit"), expected)
    plain = peft.PeftModel.from_pretrained(ViTModel.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert torch.equal(output(plain.eval(), "vit"), expected)


def move_adapter(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "decay_biases" in name:
                parameter.mul_(0.1)


def test_scalars_of_a_model_of_the_hub_come_from_its_commit(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(stock_loading, "cached_file", lambda *args, **options: asked.append((args, options)))
    weights = tmp_path / "models--me--vit" / "snapshots" / "0123abcd" / "sub" / "model.safetensors"
    stock_loading._scalars_next_to(str(weights), "me/vit")
    location = {"cache_dir": str(tmp_path), "revision": "0123abcd", "subfolder": "sub"}
    assert asked == [(("me/vit", SCALARS_FILE), location)]


# ---- fresh processes ------------------------------------------------------------------------------------------------

SUPPORT = {"name": "fibottention", "w_min": 1, "w_max": 2}
PRIORS = {
    "vit_fibottention": {"support": SUPPORT},
    "vit_both": {"support": SUPPORT, "decay": "violin"},
    "clip_both": {"support": SUPPORT, "decay": "manhattan"},
}
CASES = [(folder, name) for folder in PRIORS for name in CLASSES[folder.partition("_")[0]]]
cases = each("folder, model_class", CASES)
WITHOUT = 2e-5  # the least difference of these small models' outputs without their prior


def run_fresh(how, folders):
    script = Path(__file__).with_name("fresh_process.py").read_text()
    done = run_script(script, how, *map(str, folders), folder=folders[0].parent, package=how == "with")
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture(scope="module")
@torch.no_grad()
def saved(tmp_path_factory):
    """Folders of models with a prior, with attention far from uniform and decays far from the identity."""
    root, generator = tmp_path_factory.mktemp("saved"), torch.Generator().manual_seed(5)
    for name, prior in PRIORS.items():
        torch.manual_seed(0)
        clip = name.startswith("clip")
        model = sp.apply_prior(tiny_clip() if clip else ViTForImageClassification(ViTConfig(**TINY)).eval(), prior)
        for key, parameter in model.named_parameters():
            if key.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.normal_(std=0.4, generator=generator)
            if key.endswith("beta"):
                parameter.copy_(torch.rand(parameter.shape, generator=generator) * 3)
        images = STOCK["clip" if clip else "vit"].example()["pixel_values"]
        model.save_pretrained(root / name)
        found = model.vision_model(images).last_hidden_state if clip else model(images).logits
        save_file({"images": images, "output": found}, root / name / "expected.safetensors")
    return root


@pytest.fixture(scope="module")
def outcomes(saved):
    """With or without the package -> the outcome of `fresh_process`, and what it logged."""
    return {how: run_fresh(how, [saved / name for name in PRIORS]) for how in ("with", "without")}


@pytest.mark.slow
def test_the_import_changes_no_class(outcomes):
    # peft has no other place to check what an adapter of any method holds.
    allowed = ["peft.tuners.tuners_utils.BaseTuner._remap_adapter_state_dict_for_load"]
    assert outcomes["with"][0]["changed"] == allowed


@cases
def test_after_the_import_a_folder_brings_its_prior(folder, model_class, outcomes):
    results = outcomes["with"][0]
    # Eager attention is the reference backend; the others made the expected output.
    for way, tolerance in {"as saved": 0, "sdpa": 0, "eager": 1e-5}.items():
        found = results[f"{folder} {model_class} {way}"]
        assert found["difference"] <= tolerance, way
        assert not any(MARKER in key for key in found["unexpected"]), way
    own = results[f"{folder} {model_class} own config"]
    assert own["difference"] > WITHOUT and any(MARKER in key for key in own["unexpected"])


@cases
def test_without_the_package_a_folder_does_not_load_unnoticed(folder, model_class, outcomes):
    results, logged = outcomes["without"]
    assert 'attn_implementation="hf_sparseprior"' in results[f"{folder} {model_class} as saved"]["refused"]
    for way in ("eager", "sdpa", "own config"):
        found = results[f"{folder} {model_class} {way}"]
        assert found["difference"] > WITHOUT and any(MARKER in key for key in found["unexpected"]), way
    assert "Unknown quantization type, got hf_sparseprior" in logged and MARKER in logged


def without_loader(folder):
    """The folder with a config.json that names no loader, so that `from_pretrained` leaves the prior out."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_prior_that_was_left_out_is_loaded_afterwards(saved, tmp_path):
    folder = without_loader(shutil.copytree(saved / "vit_both", tmp_path / "both"))
    expected = load_file(folder / "expected.safetensors")
    model = ViTForImageClassification.from_pretrained(folder, attn_implementation="sdpa")
    with torch.no_grad():
        assert (model(expected["images"])[0] - expected["output"]).abs().max() > WITHOUT
        output = sp.load_prior(model, folder)(expected["images"])[0]
        assert torch.equal(output, expected["output"])
    with pytest.raises(ValueError, match="has a prior already"):
        sp.load_prior(model, folder)
    with torch.no_grad():  # and it still has it
        assert torch.equal(model(expected["images"])[0], output)
        whole = sp.from_pretrained(ViTForImageClassification, folder)
        assert torch.equal(whole(expected["images"])[0], output)
    STOCK["vit"].build().save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="was saved without a prior"):
        sp.load_prior(STOCK["vit"].build(), tmp_path / "plain")


def test_a_model_whose_prior_could_not_be_loaded_does_not_run(saved, tmp_path):
    folder = without_loader(shutil.copytree(saved / "vit_both", tmp_path / "model"))
    model = ViTForImageClassification.from_pretrained(folder)
    (folder / SCALARS_FILE).write_bytes((saved / "clip_both" / SCALARS_FILE).read_bytes())
    with pytest.raises(OSError, match=r"layers.0.decay_bias.beta has shape \(1, \d\), the model's prior \(8, \d\)"):
        sp.load_prior(model, folder)
    with pytest.raises(RuntimeError, match="load_prior"):
        model(torch.zeros(1, 3, 32, 32))


def test_damaged_or_foreign_scalars_are_named(tmp_path):
    sp.apply_prior(STOCK["vit"].build(), "violin").save_pretrained(tmp_path)
    file = tmp_path / SCALARS_FILE
    whole = file.read_bytes()
    file.write_bytes(whole[:40])
    with pytest.raises(OSError, match=r"sparse_prior\.safetensors is damaged"):
        ViTModel.from_pretrained(tmp_path)
    other = sp.apply_prior(STOCK["vit"].build(), "manhattan")
    other.save_pretrained(tmp_path / "other")
    file.write_bytes((tmp_path / "other" / SCALARS_FILE).read_bytes())
    with pytest.raises(OSError, match=r"layers.0.decay_bias.beta has shape \(1, 4\), the model's prior \(8, 4\)"):
        ViTModel.from_pretrained(tmp_path)
    for change in (lambda value: value / 0, lambda value: value.long()):
        scalars = load(whole)
        file.write_bytes(save({**scalars, "layers.1.decay_bias.beta": change(scalars["layers.1.decay_bias.beta"])}))
        with pytest.raises(OSError, match=r"layers.1.decay_bias.beta .* must be finite"):
            ViTModel.from_pretrained(tmp_path)
    file.unlink()
    with pytest.raises(OSError, match=r"sparse_prior\.safetensors"):
        ViTModel.from_pretrained(tmp_path)


def captioner():
    """A ViT that GPT-2 describes."""
    decoder = transformers.GPT2Config(
        n_embd=32, n_layer=1, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=1, add_cross_attention=True
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**TINY), decoder)
    return transformers.VisionEncoderDecoderModel(config), {"decoder_input_ids": torch.tensor([[1, 2]])}


def dual_encoder():
    """A ViT and a BERT."""
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        ViTConfig(**TINY), transformers.BertConfig(**text, vocab_size=50)
    )
    return transformers.VisionTextDualEncoderModel(config), {"input_ids": torch.tensor([[1, 2]])}


def chat_model():
    """LLaVA: the patches of a CLIP go into a Llama."""
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**TINY),
        text_config=transformers.LlamaConfig(**text, vocab_size=80, pad_token_id=0),
        image_token_index=70,
    )
    return transformers.LlavaForConditionalGeneration(config), {"input_ids": torch.tensor([[1] + [70] * 64])}


@pytest.mark.parametrize("build", [captioner, dual_encoder, chat_model])
def test_a_model_of_images_and_text_keeps_its_prior(build, tmp_path):
    """Its config says by a `model_type` which encoder of images it has."""
    torch.manual_seed(0)
    model, text = build()
    inputs = {"pixel_values": torch.randn(1, 3, 32, 32), **text}
    sp.apply_prior(model.eval(), {"support": "fibottention", "decay": {"name": "violin", "init": "moving"}})
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(**inputs)[0]
        for load_model in (type(model).from_pretrained, lambda folder: sp.from_pretrained(type(model), folder)):
            found = load_model(tmp_path).eval()(**inputs)[0]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)  # BERT's own last bits differ
        assert (sp.remove_prior(model)(**inputs)[0] - expected).abs().max() > 2e-5


def test_a_bad_tower_of_a_model_of_any_towers_is_named(tmp_path):
    dual_encoder()[0].save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    for bad, message in (
        ({"model_type": "vti"}, "model_type='vti' must be a family"),
        ({"num_attention_heads": 5}, "vision_config.hidden_size=48 must be a multiple"),
    ):
        changed = {**content, "vision_config": {**content["vision_config"], **bad}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            sp.from_pretrained(transformers.VisionTextDualEncoderModel, tmp_path)


def test_layers_that_stay_on_disk_have_their_prior(tmp_path):
    model = STOCK["vit"].build()
    sp.apply_prior(model, {"support": "fibottention", "decay": {"name": "violin", "init": "moving"}})
    model.save_pretrained(tmp_path / "model")
    places = {"embeddings": "cpu", "layers.0": "cpu", "layers.1": "disk", "layers.2": "disk", "layernorm": "cpu"}
    loaded = ViTModel.from_pretrained(
        tmp_path / "model", device_map={**places, "pooler": "disk"}, offload_folder=tmp_path / "disk"
    )
    assert any(parameter.is_meta for parameter in loaded.parameters())
    assert torch.equal(output(loaded.eval(), "vit"), output(model, "vit"))


# ---- quantizers -----------------------------------------------------------------------------------------------------


@register_quantization_config("toy_rounding")
@dataclass
class RoundingConfig(QuantizationConfigMixin):
    quant_method: str = "toy_rounding"


@register_quantizer("toy_rounding")
class Rounding(HfQuantizer):
    """Rounds all weights of linear layers to sixteenths."""

    is_trainable = False

    def is_serializable(self):
        return True

    def _process_model_before_weight_loading(self, model, **kwargs):
        return model

    def _process_model_after_weight_loading(self, model, **kwargs):
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, torch.nn.Linear):
                    module.weight.copy_((module.weight * 16).round() / 16)
        return model


def test_a_quantizer_loads_the_weights_and_the_prior_comes_back(tmp_path):
    """By `sp.from_pretrained`; transformers knows one loader for a folder, and says so of its own method."""
    model = sp.apply_prior(STOCK["vit"].build(), "violin").eval()
    move_decays(model)
    model.save_pretrained(tmp_path)
    loaded = sp.from_pretrained(ViTModel, tmp_path, quantization_config=RoundingConfig()).eval()
    Rounding(RoundingConfig())._process_model_after_weight_loading(model)
    assert torch.equal(output(loaded, "vit"), output(model, "vit"))
    assert loaded.config.quantization_config.quant_method == "toy_rounding"
    assert not hasattr(loaded.config, "sparse_prior")
    with pytest.raises(ValueError, match="PriorLoaderConfig"):
        ViTModel.from_pretrained(tmp_path, quantization_config=RoundingConfig())


def without_a_layer(name):
    return ".layers.1." not in name and ".layer.1." not in name


@pytest.mark.parametrize(
    ("prior", "keep", "message"),
    [
        (None, lambda name: False, r"has none of the \d+ weights of the model, such as "),
        ("violin", lambda name: False, r"has none of the \d+ weights of the model, such as "),
        (None, without_a_layer, r"lacks layers .*\.1 \(1 in all\)"),
        ("violin", without_a_layer, r"lacks layers .*\.1 \(1 in all\)"),
        (None, lambda name: "classifier" not in name, None),
    ],
)
def test_a_checkpoint_without_weights_or_layers_is_refused(prior, keep, message, tmp_path):
    model = ViTForImageClassification(ViTConfig(**TINY))
    (model if prior is None else sp.apply_prior(model, prior)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if keep(name)}, file, {"format": "pt"})
    if message is None:  # a new head is what fine-tuning begins with
        _, info = sp.from_pretrained(ViTForImageClassification, tmp_path, output_loading_info=True)
        assert {*info["missing_keys"]} == {"classifier.weight", "classifier.bias"}
        return
    with pytest.raises(OSError, match=message):
        sp.from_pretrained(ViTForImageClassification, tmp_path)
