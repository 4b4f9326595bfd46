"""Models whose layers and heads have several priors, where they are used: compiled, adapted, compressed, distilled."""

import copy
import json
from functools import partial

import numpy as np
import peft
import pytest
import torch

import hf_sparseprior as sp
from hf_sparseprior.__main__ import main
from hf_sparseprior.adapters import lora_config
from hf_sparseprior.adapters.stock_attention import applied_prior, stock_priors
from hf_sparseprior.adapters.stock_encoder import find_encoder
from hf_sparseprior.classification.command import prior_for_saved, train_config
from hf_sparseprior.classification.tuning import tuned
from hf_sparseprior.compression import MaskSearch, compressed_model
from hf_sparseprior.convert.checkpoint import convert_checkpoint
from hf_sparseprior.patterns.supports import build_mask
from hf_sparseprior.training.distillation import Distillation, Teacher
from tests.each import each
from tests.hf_sparseprior.adapters.stock_models import STOCK, move_decays, output
from tests.hf_sparseprior.small import noise, scatter
from tests.processes import run_script

SIZES = {
    "image_size": 16, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 16, "num_labels": 3,
}  # fmt: skip
WINDOW = {"support": {"name": "window", "w": 1}}
GROUPS = {"heads": {"0-1": WINDOW, "2": "dense", "3": "neighborhood"}}
LAYERS = {"layers": ["fibottention+violin", "dense", GROUPS]}


def make(prior=LAYERS, seed=0, **options):
    torch.manual_seed(seed)
    config = sp.SparsePriorViTConfig(**{**SIZES, **options}, prior=prior)
    return scatter(sp.SparsePriorViTForImageClassification(config))


def pixels(dtype=torch.float32):
    return noise(2, 3, 16, 16, dtype=dtype)


def test_one_compiled_graph_has_the_pairs_of_each_layer():
    """Layers share their code: what tells them apart has to be guarded."""
    prior = {"layers": [WINDOW, "dense", {"heads": {"0-1": WINDOW, "2-3": "dense"}}]}
    model = make(prior)
    with torch.no_grad():
        expected = model(pixels()).logits
        torch._dynamo.reset()
        found = torch.compile(model, backend="eager", fullgraph=True)(pixels()).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_gradient_checkpointing_gives_the_same_gradients():
    found = []
    for checkpointing in (False, True):
        model = make().train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model(pixels(), labels=torch.tensor([0, 2])).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


LOAD = """
import sys, torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageClassification
model = AutoModelForImageClassification.from_pretrained("saved", trust_remote_code=True)
with torch.no_grad():
    logits = model(load_file("pixels.safetensors")["pixels"]).logits
save_file({"logits": logits}, "found.safetensors")
assert "hf_sparseprior" not in sys.modules and model.config.prior_name == sys.argv[1], model.config.prior_name
model.save_pretrained("again")
"""


@pytest.mark.slow
def test_loaded_by_the_code_in_the_folder(tmp_path):
    from safetensors.torch import load_file, save_file

    model = make()
    model.save_pretrained(tmp_path / "saved")
    save_file({"pixels": pixels()}, tmp_path / "pixels.safetensors")
    run_script(LOAD, model.config.prior_name, folder=tmp_path, package=False)
    with torch.no_grad():
        torch.testing.assert_close(load_file(tmp_path / "found.safetensors")["logits"], model(pixels()).logits)
    again, saved = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("again", "saved"))
    assert again["prior"] == saved["prior"] and set(saved["prior"]["layers"]) == {"0", "1", "2"}


# ---- adapters -------------------------------------------------------------------------------------------------------

BARE = {"layers": ["fibottention", "dense", GROUPS]}


def moved(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "decay_biases" in name or "lora_" in name:
                parameter.copy_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    return model.eval()


@each("layers", [None, [0, 2]])
def test_a_decay_goes_on_top_and_stays_as_the_prior(layers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    base = make(BARE)
    model = peft.get_peft_model(copy.deepcopy(base), sp.ViolinAdapterConfig(decay_layers=layers))
    moved(model).save_pretrained(folder / "adapter")
    expected = model(pixels()).logits
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder / "adapter").eval()
    torch.testing.assert_close(again(pixels()).logits, expected)
    with pytest.raises(ValueError, match="base_prior: the adapter is for a model with the prior"):
        peft.PeftModel.from_pretrained(make("dense"), folder / "adapter")
    merged = model.merge_and_unload()
    priors = merged.config.layer_priors
    assert [prior["decay"] is not None for prior in priors] == [layers is None or n in layers for n in range(3)]
    assert [prior["support"] for prior in priors] == [prior["support"] for prior in base.config.layer_priors]
    merged.save_pretrained(folder / "merged")
    loaded = type(merged).from_pretrained(folder / "merged").eval()
    torch.testing.assert_close(loaded(pixels()).logits, expected)
    assert loaded.config.prior == merged.config.prior


@each("prior, layers", [(None, [1]), (BARE, [0, 2]), (BARE, None)])
def test_a_decay_on_a_stock_model(prior, layers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stock")
    base = STOCK["vit"].build()
    if prior is not None:
        sp.apply_prior(base, prior)
    model = moved(peft.get_peft_model(base, sp.ViolinAdapterConfig(decay_layers=layers)))
    expected = output(model, "vit")
    merged = model.merge_and_unload()
    merged.save_pretrained(folder)
    loaded = sp.from_pretrained(type(merged), folder)
    torch.testing.assert_close(output(loaded, "vit"), expected)
    found = [part.prior["decay"] is not None for part in stock_priors(loaded)]
    assert found == [layers is None or number in layers for number in range(3)]
    assert applied_prior(loaded).prior == applied_prior(merged).prior


def test_lora_on_top():
    model = make()
    expected = model(pixels()).logits
    adapted = peft.get_peft_model(model, lora_config(model, rank=2)).eval()
    torch.testing.assert_close(adapted(pixels()).logits, expected)
    scalars = [name for name, value in adapted.named_parameters() if "decay_bias" in name and value.requires_grad]
    assert scalars and all(".layers.0." in name for name in scalars)  # of the one layer that has a decay


# ---- compression, conversion, distillation --------------------------------------------------------------------------


def test_a_compressed_model_keeps_the_supports_of_its_heads():
    model = make({"layers": ["fibottention", GROUPS, "dense"]}, image_size=32)
    search = MaskSearch(model, 0.3, ("heads", "mlp"))
    images = noise(2, 3, 32, 32)
    for step in (1, 2):
        model(images, labels=torch.tensor([0, 2])).loss.backward()
        search.update(step, 2)
    smaller = compressed_model(model, search.kept())
    left = []
    for number, (layer, sizes, prior) in enumerate(
        zip(smaller.vit.layers, smaller.config.layers, smaller.config.layer_priors, strict=True)
    ):
        mask = build_mask(prior["support"], num_heads=4, num_tokens=64, num_prefix_tokens=1, layer=number)
        mask = mask[list(sizes.heads)]
        plan = layer.attention.plan((8, 8), 1)
        assert mask.all() if plan.offsets is None else np.array_equal(plan.build_table("mask"), mask)
        left.append(mask)
    assert sum(map(len, left)) < 12
    assert smaller.config.pruning_ratio == pytest.approx(100 * (1 - np.concatenate(left).mean()))


def test_converted_from_a_stock_model_and_back(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {name: value for name, value in SIZES.items() if name != "num_labels"}
    stock = scatter(ViTForImageClassification(ViTConfig(**sizes, num_labels=3)))
    stock.save_pretrained(tmp_path / "stock")
    convert_checkpoint(tmp_path / "stock", tmp_path / "ours", LAYERS)
    ours = sp.SparsePriorViTForImageClassification.from_pretrained(tmp_path / "ours").eval()
    assert ours.config.prior == make().config.prior
    again = convert_checkpoint(tmp_path / "ours", tmp_path / "dense", "dense", to="vit")
    assert any("replaced by 'dense'" in line for line in again)
    back = ViTForImageClassification.from_pretrained(tmp_path / "dense").eval()
    with torch.no_grad():
        torch.testing.assert_close(back(pixels()).logits, stock(pixels()).logits)
    with pytest.raises(ValueError, match="has no place in vit"):
        convert_checkpoint(tmp_path / "ours", tmp_path / "other", to="vit")


@each("name", ["vit", "swin"])
def test_a_stock_model_becomes_ours_with_its_priors(name, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stock")
    model, family = STOCK[name].build(), {"vit": "SparsePriorViTModel", "swin": "SparsePriorSwinModel"}[name]
    count = len(find_encoder(model).attention)
    bare = {"layers": {"0": "violin", "1": {"heads": {"0": WINDOW, "1-1": "dense"}}, f"2-{count - 1}": WINDOW}}
    if name == "vit":  # which has four heads
        bare["layers"]["1"] = {"heads": {"0-1": WINDOW, "2-3": "dense"}}
    sp.apply_prior(model, bare)
    move_decays(model)
    model.save_pretrained(folder / "saved")
    convert_checkpoint(folder / "saved", folder / "ours")
    ours = getattr(sp, family).from_pretrained(folder / "ours").eval()
    assert [one["support"]["name"] for one in ours.config.layer_priors] == ["dense", "heads"] + ["window"] * (count - 2)
    torch.testing.assert_close(output(ours, name), output(model, name), atol=1e-4, rtol=1e-4)


def test_scores_of_the_layers_that_predict_are_compared():
    student = make({"layers": ["sparsifiner", "dense", "topk"]})
    teacher = Teacher(make("dense", seed=1))
    distillation = Distillation({"attention": 1.0}, teacher)
    distillation.check(student.train())
    with distillation.observed(student) as scores:
        outputs = student(pixels())
    given = teacher(pixels(), distillation.needs)
    assert len(scores) == 1 and len(given.attentions) == 3
    losses = distillation.losses(student, outputs, outputs.logits.sum(), scores, pixels())
    expected = torch.nn.functional.mse_loss(scores[0], given.attentions[0][..., 1:, 1:])
    torch.testing.assert_close(losses["attention"], expected)


# ---- commands -------------------------------------------------------------------------------------------------------


def test_explain_shows_each_run_of_layers_and_one(capsys, tmp_path):
    prior = {"layers": {"0-1": WINDOW, "2-11": {"heads": {"0-5": "fibottention", "6-11": "dense"}}}}
    command = ["explain", json.dumps(prior), "--grid", "4x5"]
    assert main([*command, "--no-picture"]) == 0
    text = capsys.readouterr().out
    assert text.index("layers 1 to 2, '0-1' of the prior:") < text.index("window on a 4x5 grid, 12 heads")
    assert text.index("layers 3 to 12, '2-11' of the prior:") < text.index("fibottention&dense on a 4x5 grid")
    assert main([*command, "--layer", "2", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "fibottention" not in text and "layer 2: heads 1..12" in text
    assert (tmp_path / "layers_1_to_2" / "support_window_4x5.png").is_file()
    for wrong, message in (
        ([*command, "--layer", "13"], "--layer=13 must be at most 12"),
        ([*command, "--set", "w=2"], "--set w=2 must be in one of the priors of 'layers'"),
        ([*command, "--layers", "3"], "layers: '2-11' is too large, the numbers are 0 to 2"),
    ):
        assert main([*wrong, "--no-picture"]) == 2 and message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["explain", '{"layers": ', "--no-picture"])
    assert "must be a name, or a prior as JSON" in capsys.readouterr().err


def test_explain_of_a_model_with_stages_goes_through_all(capsys):
    prior = {"layers": {"0": "window", "1-11": "dense"}}
    command = ["explain", json.dumps(prior), "--model", "swin_tiny", "--grid", "14x14", "--time", "--no-picture"]
    import hf_sparseprior.analysis.explain_time as explain_time

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explain_time, "predicted_costs", partial(no_costs, []))
        assert main(command) == 0
    assert "layer 1, '0' of the prior:" in capsys.readouterr().out


def no_costs(seen, config, *others, **options):
    assert [len(run.prior["extras"]) for run in config.prior_runs] == [0] * 5
    return {name: explain_cost() for name in ("forward", "training")}


def explain_cost():
    from hf_sparseprior.analysis.predicted_cost import Cost

    return Cost(1.0, 1.0, 1.0, 0)


def test_train_takes_priors_of_layers(tmp_path):
    given = {"layers": {"0-5": "fibottention", "6-11": "violin"}}
    (tmp_path / "data" / "a").mkdir(parents=True)
    config = train_config(str(tmp_path / "data"), "vit_tiny", str(tmp_path / "out"), prior=given)
    assert config["model"]["prior"] == given
    make("dense").save_pretrained(tmp_path / "saved")
    grown = prior_for_saved({"layers": ["violin", "dense", "fibottention"]}, str(tmp_path / "saved"))
    assert grown["layers"][0] == {"decay": {"name": "violin", "init": "growing"}}
    assert grown["layers"][1:] == ["dense", "fibottention"]
    make().save_pretrained(tmp_path / "decayed")
    assert prior_for_saved(given, str(tmp_path / "decayed")) == given  # it has a decay, whose weights are read


def test_the_decay_of_some_layers_is_tuned():
    from hf_sparseprior.classification.tuning import TuningConfig

    model = tuned(make(), TuningConfig(method="violin"))
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert {name for name in trained if "classifier" not in name} == {
        f"vit.layers.0.attention.decay_bias.{name}" for name in ("alpha", "beta")
    }
