"""Learned decays as adapters of peft, alone and with LoRA or DoRA, on stock models and on ours."""

import copy
import json
import os
from itertools import cycle, product

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    ResNetConfig,
    ResNetModel,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

import hf_sparseprior as sp
from hf_sparseprior.adapters import lora_config, violin
from hf_sparseprior.adapters.stock_attention import StockPrior
from hf_sparseprior.analysis.decays import learned_decays
from hf_sparseprior.models.heads import make_head
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.priors.layer import PriorAttention
from hf_sparseprior.training import SparsePriorTrainer
from tests.each import each
from tests.hf_sparseprior.adapters.fitting_peft import import_fitting_peft
from tests.hf_sparseprior.adapters.stock_models import STOCK, TINY
from tests.hf_sparseprior.training.test_trainer import StopAt
from tests.processes import run_script

families = pytest.mark.parametrize("name", [*STOCK, "ours"])
# Those whose attention, tokens or masks are of another kind each.
kinds = pytest.mark.parametrize("name", ["vit", "dinov3", "beit", "mae", "vivit", "timesformer", "swin", "ours"])
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
CONFIGS = {
    "violin": lambda **extra: sp.ViolinAdapterConfig(**extra),
    "lora": lambda **extra: sp.LoraViolinConfig(**LORA, **extra),
    "dora": lambda **extra: sp.LoraViolinConfig(**LORA, use_dora=True, **extra),
}
methods = pytest.mark.parametrize("make_config", [CONFIGS["violin"], CONFIGS["dora"]], ids=["violin", "dora"])


def build(name, **settings):
    """A model of `STOCK`, or one of ours."""
    if name != "ours":
        return STOCK[name].build()
    torch.manual_seed(0)
    model = sp.SparsePriorViTModel(sp.SparsePriorViTConfig(**{**TINY, "prior": "dense", **settings})).eval()
    for key, parameter in model.named_parameters():
        if key.endswith(("q_proj.weight", "k_proj.weight")):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def output(model, name="vit"):
    with torch.no_grad():
        return model(**STOCK["vit" if name == "ours" else name].example()).last_hidden_state


def move(model, adapter="default", seed=5):
    """Set scalars of an adapter far from the identity, different in each layer."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f".decay_biases.{adapter}." in name:
                low = 0.0 if "beta" in name else 1.0
                parameter.copy_(low + 2 * torch.rand(parameter.shape, generator=generator))
            elif f".lora_B.{adapter}." in name or f".lora_magnitude_vector.{adapter}." in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def adapted(name="vit", **settings):
    model = peft.get_peft_model(build(name), sp.ViolinAdapterConfig(**settings))
    move(model)
    return model


def trainable(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


# ---- what it computes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "decay"), sorted({*zip([*STOCK, "ours"], cycle(DECAYS)), *product(["vit", "ours"], DECAYS)})
)
def test_starts_as_the_model_it_was(name, decay):
    model = build(name)
    before = output(model, name)
    model = peft.get_peft_model(model, sp.ViolinAdapterConfig(decay=decay))
    assert 0 < (output(model, name) - before).abs().max() < 1e-5


@kinds
def test_computes_what_a_prior_with_the_same_scalars_does(name):
    model = adapted(name)
    prior = {"decay": {"name": "violin", "init": "growing"}}
    other = build(name, prior=prior) if name == "ours" else sp.apply_prior(build(name), prior)
    other.load_state_dict(build(name).state_dict(), strict=False)
    layers = [[m for m in found.modules() if isinstance(m, PriorAttention)] for found in (model, other)]
    for mine, theirs in zip(*layers, strict=True):
        theirs.decay_bias.load_state_dict(mine.decay_adapter.decay_biases["default"].state_dict())
    assert (output(model, name) - output(other, name)).abs().max() < 1e-6
    assert (output(model, name) - output(build(name), name)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("settings", "init"),
    [
        ({}, "growing"),
        ({"gamma": 0.9}, "identity"),
        ({"learn_beta": False}, "identity"),
        ({"init": "moving"}, "moving"),
    ],
)
def test_the_default_moves_unless_the_settings_fix_gamma(settings, init):
    assert sp.ViolinAdapterConfig(decay={"name": "violin", **settings}).decay["init"] == init


def test_the_default_leaves_one_where_identity_stays():
    """Twenty steps of Adam at the rate that LoRA usually has."""
    changes = {}
    for init in ("growing", "identity"):
        torch.manual_seed(0)
        model = ViTForImageClassification(ViTConfig(**TINY, num_labels=3))
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                torch.nn.init.normal_(parameter, std=0.3)
        config = CONFIGS["lora"](decay={"name": "violin", "init": init}, modules_to_save=["classifier"])
        model = peft.get_peft_model(model, config)
        pixels = STOCK["vit"].example()["pixel_values"]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(20):
            optimizer.zero_grad()
            model(pixels, labels=torch.arange(len(pixels)) % 3).loss.backward()
            optimizer.step()
        changes[init] = max(1 - decay.mask_mean_and_min()[1] for decay in learned_decays(model))
    assert changes["growing"] > 1e-4 > 1e-6 > changes["identity"]


def test_a_support_of_the_model_stays():
    model = sp.apply_prior(build("vit"), "fibottention")
    before = output(model)
    model = peft.get_peft_model(model, sp.ViolinAdapterConfig())
    assert (output(model) - before).abs().max() < 1e-5 < (before - output(build("vit"))).abs().max()
    move(model)
    prior = {"support": "fibottention", "decay": {"name": "violin", "init": "growing"}}
    expected = sp.apply_prior(build("vit"), prior)
    for mine, theirs in zip(model.base_model.model.layers, expected.layers, strict=True):
        adapter = mine.attention.sparse_prior.decay_adapter.decay_biases["default"]
        theirs.attention.sparse_prior.decay_bias.load_state_dict(adapter.state_dict())
    assert torch.equal(output(model), output(expected))
    assert torch.equal(output(model.unload()), before)


# ---- exact: save, load, disable, unload, switch, delete -------------------------------------------------------------


@kinds
def test_saved_loaded_disabled_and_unloaded_to_the_bit(name, tmp_path):
    before, states = output(build(name), name), set(build(name).state_dict())
    model = adapted(name)
    moved = output(model, name)
    model.save_pretrained(tmp_path)
    assert torch.equal(output(peft.PeftModel.from_pretrained(build(name), tmp_path), name), moved)
    with model.disable_adapter():
        assert torch.equal(output(model, name), before)
    assert torch.equal(output(model, name), moved)
    base = model.unload()
    assert torch.equal(output(base, name), before)
    assert set(base.state_dict()) == states and not any(isinstance(module, StockPrior) for module in base.modules())
    # Nothing is left that would prevent a prior or another adapter.
    again = peft.PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(output(again, name), moved)


def test_unload_keeps_modules_that_were_trained_whole():
    """peft's own rule: the copy of the active adapter takes the original's place. All else is as it was."""
    before = build("vit").state_dict()
    model = peft.get_peft_model(build("vit"), sp.ViolinAdapterConfig(modules_to_save=["layernorm"]))
    move(model)
    with torch.no_grad():
        model.base_model.model.layernorm.modules_to_save["default"].weight.add_(1)
    after = model.unload().state_dict()
    assert set(after) == set(before)
    assert {name for name in after if not torch.equal(after[name], before[name])} == {"layernorm.weight"}


@methods
def test_several_adapters(make_config, tmp_path):
    model = peft.get_peft_model(build("vit"), make_config())
    move(model)
    first = output(model)
    model.add_adapter("other", make_config(decay={"name": "violin", "curves": ["hilbert"]}, decay_layers=[1, 2]))
    assert torch.equal(output(model), first)
    model.set_adapter("other")
    move(model, "other")
    second = output(model)
    assert {".other." in name for name in trainable(model)} == {True} and not torch.equal(first, second)
    model.set_adapter("default")
    assert torch.equal(output(model), first)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(build("vit"), tmp_path)
    loaded.load_adapter(tmp_path / "other", "other")
    assert torch.equal(output(loaded), first)
    loaded.set_adapter("other")
    assert torch.equal(output(loaded), second)
    loaded.delete_adapter("default")
    assert torch.equal(output(loaded), second)
    model.delete_adapter("default")
    assert torch.equal(output(model), second)
    with model.disable_adapter():
        assert torch.equal(output(model), output(build("vit")))
    assert torch.equal(output(model.unload()), output(build("vit")))


def test_deleting_goes_by_all_layers():
    model = adapted(decay_layers=[0])
    model.add_adapter("other", sp.ViolinAdapterConfig(decay_layers=[1]))
    move(model, "other")
    model.delete_adapter("default")
    assert model.active_adapters == ["other"]
    held = output(model)
    model.delete_adapter("other")
    assert not torch.equal(held, output(build("vit")))
    # peft's own wrapper does not run without any adapter; the model inside does.
    assert torch.equal(output(model.base_model), output(build("vit")))


def test_two_decays_at_once_are_refused():
    model = adapted()
    model.add_adapter("other", sp.ViolinAdapterConfig())
    with pytest.raises(ValueError, match=r"adapters \['default', 'other'\] have a decay each, and a layer takes one"):
        model.base_model.set_adapter(["default", "other"])


def check_merged(peft_model, name, folder):
    """`merge_and_unload` leaves the decay as the prior: the same outputs, also of what is saved and loaded."""
    move(peft_model)
    generator = torch.Generator().manual_seed(0)
    for key, parameter in peft_model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.05, generator=generator)
    expected = output(peft_model, name)
    merged = peft_model.merge_and_unload()
    assert not any("lora" in key or "decay_biases" in key for key in merged.state_dict())
    torch.testing.assert_close(output(merged, name), expected, rtol=1e-4, atol=1e-4)  # LoRA is rounded
    merged.save_pretrained(folder)
    again = type(merged).from_pretrained(folder).eval()
    assert torch.equal(output(again, name), output(merged, name))
    return merged


@families
def test_merging_leaves_the_decay_as_the_prior(name, tmp_path):
    for kind in CONFIGS if name in ("vit", "swin", "ours") else ["violin"]:
        merged = check_merged(peft.get_peft_model(build(name), CONFIGS[kind]()), name, tmp_path / kind)
    if name != "ours":  # the prior is one of apply_prior
        assert sp.remove_prior(merged).state_dict().keys() == build(name).state_dict().keys()


def test_the_marker_lies_where_the_prior_does():
    model = sp.apply_prior(build("vit").to("meta"), "violin")
    assert {value.device.type for value in model.state_dict().values()} == {"meta"}
    merged = peft.get_peft_model(build("vit"), sp.ViolinAdapterConfig()).to("meta").merge_and_unload()
    assert {value.device.type for value in merged.state_dict().values()} == {"meta"}


@pytest.mark.parametrize("name", ["vit", "ours"])
def test_merging_keeps_the_support_and_other_models_of_the_config(name, tmp_path):
    support = {"support": "fibottention"}
    model = build("ours", prior=support) if name == "ours" else sp.apply_prior(build(name), support)
    other = sp.SparsePriorViTModel(model.config) if name == "ours" else None
    adapted_model = peft.get_peft_model(model, CONFIGS["lora"](decay={"name": "violin", "curves": ["hilbert"]}))
    adapted_model.add_adapter("other", CONFIGS["lora"]())
    merged = check_merged(adapted_model, name, tmp_path)
    layers = [module for module in merged.modules() if isinstance(module, PriorAttention)]
    assert {layer.prior["support"]["name"] for layer in layers} == {"fibottention"}
    assert all(layer.decay_bias.settings["curves"] == ["hilbert"] for layer in layers)
    if other is not None:
        assert other.config.prior_name == "fibottention" and merged.config.prior_name == "fibottention+violin"


def test_merging_reaches_the_config_of_a_backbone_within_a_head(tmp_path):
    sizes = {"image_size": 64, "patch_size": 4, "embed_dim": 8, "depths": [1] * 4, "num_heads": [2] * 4}
    config = sp.SparsePriorSwinConfig(**sizes, window_size=2)
    model = make_head("upernet", config, num_labels=3, hidden_size=8, use_auxiliary_head=False).eval()
    adapted_model = peft.get_peft_model(model, sp.ViolinAdapterConfig(decay={"name": "violin", "init": "moving"}))
    pixels = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = adapted_model(pixels).logits
        merged = adapted_model.merge_and_unload()
        merged.save_pretrained(tmp_path)
        found = type(merged).from_pretrained(tmp_path).eval()(pixels).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)  # the last bits of convolutions may differ
    assert merged.config.backbone_config.prior_name == "violin" and config.prior_name == "dense"


@methods
def test_merging_that_is_refused_changes_nothing(make_config):
    model = peft.get_peft_model(build("vit"), make_config())
    move(model)
    moved = output(model)
    with pytest.raises(ValueError, match="a learned decay cannot be merged: M multiplies the logits"):
        model.merge_adapter()
    model.add_adapter("other", make_config())
    with pytest.raises(ValueError, match=r"adapters \['default', 'other'\] have a decay each, and a model takes one"):
        model.merge_and_unload(adapter_names=["default", "other"])
    assert torch.equal(output(model), moved)


def test_weighted_sums_are_refused():
    model = peft.get_peft_model(build("vit"), CONFIGS["lora"]())
    model.add_adapter("other", CONFIGS["lora"]())
    states = set(model.state_dict())
    with pytest.raises(ValueError, match="adapters with a learned decay have no weighted sum"):
        model.add_weighted_adapter(["default", "other"], [0.5, 0.5], "sum", combination_type="linear")
    assert set(model.state_dict()) == states and list(model.peft_config) == ["default", "other"]


@methods
def test_an_adapter_for_each_image_is_refused(make_config):
    model = peft.get_peft_model(build("vit"), make_config()).eval()
    model.add_adapter("other", make_config())
    with pytest.raises(ValueError, match=r"adapter_names=\['default', 'other'\] gives each image its own adapter"):
        model(**STOCK["vit"].example(), adapter_names=["default", "other"])


LOADING = """
import importlib.util, sys, torch
import hf_sparseprior
assert importlib.util.find_spec("peft") and "peft" not in sys.modules  # asking does not use up the hook
import peft
from transformers import ViTModel
inputs, expected = torch.load("expected.pt")
loaded = [peft.PeftModel.from_pretrained(ViTModel.from_pretrained("base"), name) for name in expected]
loaded.append(peft.AutoPeftModel.from_pretrained("violin"))
with torch.no_grad():
    found = [model.eval()(**inputs).last_hidden_state for model in loaded]
assert all(torch.equal(one, two) for one, two in zip(found, [*expected.values(), expected["violin"]], strict=True))
"""


PEFT_FIRST = "import peft, hf_sparseprior; peft.get_peft_config({'peft_type': 'HF_SPARSEPRIOR_VIOLIN'})"


@pytest.mark.slow
def test_a_new_process_needs_the_import_alone(tmp_path):
    build("vit").save_pretrained(tmp_path / "base")
    expected = {}
    for name, make_config in CONFIGS.items():
        model = peft.get_peft_model(ViTModel.from_pretrained(tmp_path / "base"), make_config())
        move(model)
        model.save_pretrained(tmp_path / name)
        expected[name] = output(model)
    torch.save((STOCK["vit"].example(), expected), tmp_path / "expected.pt")
    run_script(LOADING, folder=tmp_path, package=True)
    run_script(PEFT_FIRST, folder=tmp_path, package=True)


@pytest.mark.parametrize("make_config", [CONFIGS["violin"], CONFIGS["lora"]], ids=["violin", "lora"])
def test_where_the_package_is_missing_the_error_and_the_folder_name_it(make_config, tmp_path, monkeypatch):
    model = peft.get_peft_model(build("vit"), make_config())
    move(model)
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert card.count("needs the Python package hf_sparseprior") == 1 and card.count("library_name: peft") == 1
    opens, _, rest = card.split("---\n", 2)[2].partition("```python\n")
    assert opens.strip().splitlines()[1] == "# hf_sparseprior" and "KeyError" in rest.partition("```")[0]
    script = rest.partition("```")[0].replace("PATH_OR_NAME_OF_THIS_ADAPTER", str(tmp_path))
    exec(script, loaded := {"base_model": build("vit")})
    assert torch.equal(output(loaded["model"]), output(model))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text().count("hf_sparseprior, which") == 1
    # Without the package, none of these entries is there.
    for kind in violin.AdapterType:
        monkeypatch.delitem(violin.PEFT_TYPE_TO_CONFIG_MAPPING, kind)
    for load in (lambda: peft.PeftModel.from_pretrained(build("vit"), tmp_path), lambda: build("vit").load_adapter(
        str(tmp_path))):  # fmt: skip
        with pytest.raises(KeyError, match="HF_SPARSEPRIOR_"):
            load()


@pytest.mark.parametrize("make_config", [CONFIGS["violin"], CONFIGS["lora"]], ids=["violin", "lora"])
def test_adapters_of_transformers_itself(make_config, tmp_path):
    import_fitting_peft()
    model = peft.get_peft_model(build("vit"), make_config())
    move(model)
    model.save_pretrained(tmp_path / "adapter")
    loaded = build("vit")
    loaded.load_adapter(str(tmp_path / "adapter"))
    assert torch.equal(output(loaded), output(model))
    loaded.disable_adapters()
    assert torch.equal(output(loaded), output(build("vit")))
    loaded.enable_adapters()
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(output(peft.PeftModel.from_pretrained(build("vit"), tmp_path / "again")), output(model))


def test_loads_without_a_copy_in_memory(tmp_path):
    model = adapted()
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(build("vit"), tmp_path, low_cpu_mem_usage=True)
    assert torch.equal(output(loaded), output(model)) and trainable(loaded) == []


# ---- what trains ----------------------------------------------------------------------------------------------------

NAMES = [
    f"base_model.model.deit.layers.{layer}.attention.sparse_prior.decay_adapter.decay_biases.default.{scalar}"
    for layer in range(12)
    for scalar in ("alpha", "beta", "gate")
]


@pytest.mark.parametrize(("init", "scalars"), [("growing", 1440), ("finetune", 1296)])
def test_deit_b_has_the_scalars_of_the_paper_and_a_gate_for_each_head(tmp_path, init, scalars):
    """VIOLIN Table 4 has ~1.3K."""
    decay = {"name": "violin", "init": init}
    with torch.device("meta"):
        model = DeiTForImageClassification(DeiTConfig())
    model = peft.get_peft_model(model, sp.ViolinAdapterConfig(decay=decay))
    assert trainable(model) == [name for name in NAMES if init == "growing" or not name.endswith("gate")]
    assert sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) == scalars
    # As many heads and layers in a narrow model, because it has weights to save.
    narrow = DeiTForImageClassification(DeiTConfig(hidden_size=24, intermediate_size=8, image_size=32))
    narrow = peft.get_peft_model(narrow, sp.ViolinAdapterConfig(decay=decay))
    narrow.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in tensors.values()) == scalars
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert scalars * 4 < (tmp_path / "adapter_model.safetensors").stat().st_size < 11 * 1024


@methods
def test_a_step_changes_what_should_train_and_nothing_else(make_config):
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**TINY, num_labels=3))
    model = peft.get_peft_model(model, make_config(modules_to_save=["classifier"]))
    move(model)
    expected = {name for name in model.state_dict() if ".default." in name}
    assert set(trainable(model)) == expected
    lora = sum(".lora_A." in name or ".lora_B." in name or ".lora_magnitude_vector." in name for name in expected)
    scalars = sum(".decay_biases.default." in name for name in expected)
    head = sum("classifier.modules_to_save.default" in name for name in expected)
    assert (scalars, head, lora) == (9, 2, 18 if make_config is CONFIGS["dora"] else 0)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    # Not the logits alone: in the last layer they depend on the class token only, whose row has M = 1.
    out = model(**STOCK["vit"].example(), output_hidden_states=True)
    (out.logits.square().sum() + out.hidden_states[-1].square().sum()).backward()
    optimizer.step()
    after = model.state_dict()
    assert {name for name in after if not torch.equal(after[name], before[name])} == expected


def test_only_some_layers():
    model = adapted(decay_layers=[1])
    assert {name.split(".layers.")[1][0] for name in trainable(model)} == {"1"}
    with model.disable_adapter():
        assert torch.equal(output(model), output(build("vit")))


def test_half_precision_keeps_the_scalars_precise():
    model = peft.get_peft_model(build("vit").bfloat16(), sp.ViolinAdapterConfig(), autocast_adapter_dtype=False)
    scalars = [parameter for parameter in model.parameters() if parameter.requires_grad]
    dtypes = {parameter.dtype for parameter in [*scalars, *model.bfloat16().parameters()]}
    assert dtypes == {torch.float32, torch.bfloat16}
    assert all(parameter.dtype == torch.float32 for parameter in scalars)
    assert torch.isfinite(model(STOCK["vit"].example()["pixel_values"].bfloat16()).last_hidden_state).all()


def test_weight_decay_leaves_the_scalars_alone():
    model = peft.get_peft_model(build("vit"), CONFIGS["lora"]())
    for trainer in (Trainer, SparsePriorTrainer):
        decayed = trainer(model, TrainingArguments(report_to=[], use_cpu=True)).get_decay_parameter_names(model)
        assert any("lora_A" in name for name in decayed) and not any("decay_biases" in name for name in decayed)


class Halves(Dataset):
    """Bright left or right halves, with noise fixed by the index."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        pixels = 0.3 * torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index))
        label = index % 2
        pixels[:, :, 16 * label : 16 * label + 16] += 1
        return {"pixel_values": pixels, "labels": label}


def make_trainer(make_config, folder, **options):
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**TINY, num_labels=2, pooler_output_size=48))
    model = peft.get_peft_model(model, make_config(modules_to_save=["classifier"]))
    move(model)
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=8, num_train_epochs=3, learning_rate=0.05, report_to="none",
        disable_tqdm=True, use_cpu=True, save_strategy="epoch", eval_strategy="epoch", remove_unused_columns=False,
        label_names=["labels"], **options,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=Halves(), eval_dataset=Halves())


@pytest.mark.slow
@methods
def test_trainer_resumes_and_restores_every_tensor(make_config, tmp_path):
    whole = make_trainer(make_config, tmp_path / "whole")
    whole.train()
    cut = make_trainer(make_config, tmp_path / "cut")
    cut.add_callback(StopAt(3))
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    resumed = make_trainer(make_config, tmp_path / "cut")
    resumed.train(resume_from_checkpoint=True)
    expected, got = whole.model.state_dict(), resumed.model.state_dict()
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
    # The first epoch counts as the best one, because the metric gets worse with longer training.
    best = make_trainer(make_config, tmp_path / "best", load_best_model_at_end=True, metric_for_best_model="epoch")
    best.compute_metrics = lambda prediction: {"epoch": -best.state.epoch}
    best.args.greater_is_better = True
    best.train()
    assert best.state.best_model_checkpoint.endswith("checkpoint-2")
    saved = load_file(os.path.join(best.state.best_model_checkpoint, "adapter_model.safetensors"))
    restored = peft.get_peft_model_state_dict(best.model)
    assert saved.keys() == restored.keys() and len(saved) >= 8
    assert [name for name in saved if not torch.equal(saved[name], restored[name])] == []


# ---- what models go through -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vit", "beit", "ours"])
def test_another_attn_implementation(name):
    model, plain = adapted(name), build(name)
    expected = output(model, name)
    for changed in (model.base_model.model, plain):
        changed.set_attn_implementation("eager")
    assert (output(model, name) - expected).abs().max() < 1e-5
    with model.disable_adapter():
        assert torch.equal(output(model, name), output(plain, name))


def test_a_copy_is_its_own_model():
    model = adapted()
    expected = output(model)
    twin = copy.deepcopy(model)
    assert torch.equal(output(twin), expected)
    move(twin, seed=6)
    assert torch.equal(output(model), expected) and not torch.equal(output(twin), expected)
    assert torch.equal(output(twin.unload()), output(build("vit")))
    assert torch.equal(output(model), expected)


def test_gradient_checkpointing_gives_the_same_gradients():
    gradients = []
    for checkpointing in (False, True):
        model = adapted().train()
        if checkpointing:
            model.base_model.model.gradient_checkpointing_enable()
        model(**STOCK["vit"].example()).last_hidden_state.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.requires_grad])
    assert all(torch.allclose(one, two) and one.any() for one, two in zip(*gradients, strict=True))


@pytest.mark.slow
def test_compiled_models_follow_switching():
    model = adapted()
    model.add_adapter("other", sp.ViolinAdapterConfig(decay="manhattan"))
    move(model, "other")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for adapter in ("default", "other"):
        model.set_adapter(adapter)
        assert (output(compiled) - output(model)).abs().max() < 1e-5
    with model.disable_adapter():
        assert (output(compiled) - output(build("vit"))).abs().max() < 1e-5


# ---- configs --------------------------------------------------------------------------------------------------------


def test_a_saved_config_has_every_setting(tmp_path):
    config = sp.ViolinAdapterConfig(decay={"name": "violin", "curves": ["hilbert"], "learn_alpha": False})
    peft.get_peft_model(build("vit"), config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["decay"] == {
        "name": "violin", "curves": ["hilbert"], "placement": "multiply", "alpha_scales": "logits", "gamma": None,
        "init": "growing", "learn_alpha": False, "learn_beta": True, "learn_prefix": False,
    }  # fmt: skip
    assert saved["base_prior"]["support"]["name"] == "dense" and saved["base_prior"]["extras"] == []
    assert saved["peft_type"] == "HF_SPARSEPRIOR_VIOLIN"
    assert saved["decay_heads"] == [4, 4, 4] and config.decay_heads is None


def test_lora_configs_take_a_decay():
    lora = peft.LoraConfig(r=3, target_modules=["q_proj"], use_dora=True, modules_to_save=["classifier"])
    config = sp.LoraViolinConfig.from_lora(lora, decay="manhattan")
    assert (config.r, config.use_dora, config.target_modules) == (3, True, {"q_proj"})
    assert config.modules_to_save == ["classifier"] and config.decay["name"] == "manhattan"
    assert config.peft_type == violin.AdapterType.LORA_VIOLIN


@each(
    "settings, message",
    [
        ({"decay": "violn"}, "decay='violn' must be one of violin, manhattan"),
        ({"decay": "none"}, "decay='none' must be one of violin, manhattan"),
        ({"decay": None}, "decay=None must be one of violin, manhattan"),
        ({"decay": {"name": "violin", "init": "far"}}, "init='far' must be one of pretrain"),
        ({"decay": {"name": "manhattan", "curves": ["z"]}}, "decay 'manhattan' has no setting 'curves'"),
        ({"decay_layers": []}, r"decay_layers=\[\] must be None or a list of layer numbers from 0"),
        ({"decay_layers": [-1]}, r"decay_layers=\[-1\] must be None or a list of layer numbers from 0"),
    ],
)
def test_bad_settings_are_named(settings, message):
    for config in (sp.ViolinAdapterConfig, sp.LoraViolinConfig):
        with pytest.raises(ValueError, match=message):
            config(**settings)


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_a_base_model_of_another_shape_is_refused(tmp_path):
    adapted().save_pretrained(tmp_path)
    for change, has in (({"num_attention_heads": 6}, "3 layers of 6"), ({"num_hidden_layers": 5}, "5 layers of 4")):
        for load in (peft.PeftModel.from_pretrained, lambda model, folder: model.load_adapter(str(folder))):
            model = ViTModel(ViTConfig(**{**TINY, **change})).eval()
            before = output(model)
            with pytest.raises(ValueError, match=f"the adapter is for 3 layers of 4 heads; ViTModel has {has} heads"):
                load(model, tmp_path)
            assert torch.equal(output(model), before) and not any("sparse_prior" in name for name in model.state_dict())
    with pytest.raises(ValueError, match="made on another class of model than ViTForImageClassification: it has"):
        peft.PeftModel.from_pretrained(ViTForImageClassification(ViTConfig(**TINY)), tmp_path)


@methods
def test_a_base_model_with_another_prior_is_refused(make_config, tmp_path):
    sparse = sp.apply_prior(build("vit"), "fibottention+swin_rpb")
    model = peft.get_peft_model(copy.deepcopy(sparse), make_config())
    move(model)
    model.save_pretrained(tmp_path)
    window = {"support": {"name": "fibottention", "w_min": 2}, "extras": ["swin_rpb"]}
    others = (build("vit"), sp.apply_prior(build("vit"), "fibottention"), sp.apply_prior(build("vit"), window))
    for other in others:
        before = output(other)
        with pytest.raises(ValueError, match=r'model with the prior {"extras": \["swin_rpb"\].*"w_min": 5}}; ViT'):
            peft.PeftModel.from_pretrained(other, tmp_path)
        assert torch.equal(output(other), before)
    assert torch.equal(output(peft.PeftModel.from_pretrained(sparse, tmp_path)), output(model))
    config = peft.PeftConfig.from_pretrained(tmp_path)
    config.base_prior = None
    peft.PeftModel.from_pretrained(build("vit"), tmp_path, config=config)


@pytest.mark.parametrize("prior", ["violin", "swin_rpb"])
def test_plain_lora_of_a_model_with_a_prior_is_refused_elsewhere(prior, tmp_path):
    base = sp.apply_prior(build("vit"), prior)
    model = peft.get_peft_model(copy.deepcopy(base), lora_config(base, rank=2)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    model.save_pretrained(tmp_path)
    assert torch.equal(output(peft.PeftModel.from_pretrained(base, tmp_path).eval()), output(model))
    with pytest.raises(ValueError, match=r"made on a model with a prior: it has .*, which ViTModel has not"):
        peft.PeftModel.from_pretrained(build("vit"), tmp_path)


def test_layers_that_the_model_does_not_have_are_refused():
    model = build("vit")
    with pytest.raises(ValueError, match=r"decay_layers=\[0, 3\] must be below the 3 layers of ViTModel"):
        peft.get_peft_model(model, sp.ViolinAdapterConfig(decay_layers=[0, 3]))
    sp.apply_prior(model, "violin")


@pytest.mark.parametrize("mixer", ["linformer", "efficient"])
def test_a_model_with_a_mixer_is_refused(mixer):
    with pytest.raises(ValueError, match=f"has the mixer '{mixer}' in .* no logits of pairs"):
        peft.get_peft_model(build("ours", prior=mixer), sp.ViolinAdapterConfig())


def test_a_model_with_a_decay_of_its_own_is_refused():
    for model in (sp.apply_prior(build("vit"), "violin"), build("ours", prior="violin")):
        with pytest.raises(ValueError, match=r"has a decay of its own in .*, which an adapter cannot replace"):
            peft.get_peft_model(model, sp.ViolinAdapterConfig())


def test_a_prior_does_not_go_under_an_adapter():
    model = adapted()
    with pytest.raises(ValueError, match=r"ViTModel has an adapter with a decay.*unload\(\)"):
        sp.apply_prior(model.base_model.model, "fibottention")
    model = sp.apply_prior(build("vit"), "fibottention")
    adapter = peft.get_peft_model(model, sp.ViolinAdapterConfig())
    with pytest.raises(ValueError, match=r"ViTModel has an adapter with a decay; unload\(\)"):
        sp.remove_prior(model)
    assert torch.equal(output(sp.remove_prior(adapter.unload())), output(build("vit")))


def test_a_model_that_cannot_take_it_says_why():
    model = ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1]))
    with pytest.raises(ValueError, match="ResNetModel cannot take a prior: it has no attention module"):
        peft.get_peft_model(model, sp.ViolinAdapterConfig())


def test_lora_names_that_match_nothing_are_refused():
    model = ViTForImageClassification(ViTConfig(**TINY, num_labels=3))
    states, parameters = set(model.state_dict()), trainable(model)
    config = sp.LoraViolinConfig(r=2, target_modules=["query"], modules_to_save=["classifier"])
    with pytest.raises(ValueError, match=r"target_modules=\{'query'\} match no module of ViTForImageClassification"):
        peft.get_peft_model(model, config)
    assert set(model.state_dict()) == states and trainable(model) == parameters
    peft.get_peft_model(model, sp.LoraViolinConfig(r=2, target_modules="all-linear"))


@pytest.mark.parametrize(("make_config", "around"), [(CONFIGS["violin"], "head"), (CONFIGS["dora"], "module")])
def test_a_model_of_ours_within_another_takes_it(make_config, around):
    config = sp.SparsePriorViTConfig(**{**TINY, "num_hidden_layers": 4, "prior": "fibottention"})
    if around == "head":
        model = make_head("upernet", config, num_labels=3, hidden_size=16).eval()
    else:
        model = torch.nn.Sequential(sp.SparsePriorViTModel(config)).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.normal_(std=0.3)
        before = model(images)[0]
        adapted = peft.get_peft_model(model, make_config()).eval()
        assert (adapted(images)[0] - before).abs().max() < 1e-5 * before.abs().max()
        for name, parameter in adapted.named_parameters():
            if ".decay_biases." in name:
                parameter.fill_(0.1 if name.endswith("beta") else 1.0)
        assert (adapted(images)[0] - before).abs().max() > 1e-3 * before.abs().max()


def test_biases_of_lora_train_beside_a_decay():
    """peft asks each of its layers for a bias."""
    model = peft.get_peft_model(STOCK["vit"].build(), CONFIGS["lora"](bias="lora_only"))
    biases = [name for name, p in model.named_parameters() if p.requires_grad and name.endswith("base_layer.bias")]
    assert len(biases) == 2 * TINY["num_hidden_layers"]


@methods
def test_modules_to_save_that_match_nothing_are_refused(make_config):
    model = ViTForImageClassification(ViTConfig(**TINY))
    with pytest.raises(ValueError, match="modules_to_save: ViTForImageClassification has no module 'clasifier'"):
        peft.get_peft_model(model, make_config(modules_to_save=["clasifier"]))
    assert not [name for name, _ in model.named_modules() if "decay" in name]
