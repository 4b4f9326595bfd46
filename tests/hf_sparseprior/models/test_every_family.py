"""What holds for every family of image models, in the smallest config of each (small.py)."""

import copy
import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForImageClassification

from hf_sparseprior.adapters import lora_config
from hf_sparseprior.attention import compiled_kernels
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.models.pretrained import load_whole_model
from tests.hf_sparseprior.small import shipped_families, small
from tests.processes import run_script

IMAGES = [name for name, family in FAMILIES.items() if family.takes == "images"]
PRIOR = "fibottention+violin"


def make(name, auto_class="AutoModelForImageClassification", **options):
    """A model whose weights are far from their small initial values."""
    torch.manual_seed(0)
    model = FAMILIES[name].models[auto_class](small(name, **{"prior": PRIOR, "num_labels": 3, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def make_along(name, order):
    """With logits that depend on the order: a class token sees all patches, whatever it is."""
    pooling = {"pooling": "mean"} if hasattr(small(name), "pooling") else {}
    support = {"name": "window", "w": 1, "order": order}
    return make(name, prior={"support": support, "decay": "violin"}, **pooling)


def images(name, factor=(1, 1), batch=2):
    side = small(name).image_size
    shape = (batch, 3, side * factor[0], side * factor[1])
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("name", IMAGES)
def test_hidden_states_and_attentions(name):
    model = make(name)
    with torch.no_grad():
        output = model(images(name), output_attentions=True, output_hidden_states=True)
        plain = model(images(name))
    assert plain.hidden_states is None and plain.attentions is None
    torch.testing.assert_close(output.logits, plain.logits, atol=1e-5, rtol=1e-5)
    assert len(output.attentions) == sum(stage.num_layers for stage in model.config.stages)
    layers = [stage for stage in model.config.stages for _ in range(stage.num_layers)]
    for weights, stage in zip(output.attentions, layers, strict=True):
        tokens = model.config.prefix_tokens(stage) + stage.grid[0] * stage.grid[1]
        assert weights.shape == (2 * stage.num_windows, stage.num_heads, tokens, tokens)
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    assert len(output.hidden_states) == len(model.config.map_names)
    assert isinstance(model(images(name), return_dict=False), tuple)


@pytest.mark.parametrize("factor", [(2, 2), (1, 2), (3, 1)])
@pytest.mark.parametrize("name", IMAGES)
def test_other_sizes(name, factor):
    """Images of a batch do not see each other, whatever their size."""
    model, pixels = make(name), images(name, factor)
    with torch.no_grad():
        together = model(pixels).logits
        alone = torch.cat([model(pixel[None]).logits for pixel in pixels])
    assert together.shape == (2, 3) and together.isfinite().all()
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert (together[0] - together[1]).abs().max() > 1e-4


@pytest.mark.parametrize("name", IMAGES)
def test_eager_and_automatic_attention_agree(name):
    model, pixels = make(name), images(name)
    with torch.no_grad():
        automatic = model(pixels).logits
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(pixels).logits, automatic, atol=1e-5, rtol=1e-5)


def gradients(model, pixels):
    model.zero_grad()
    model(pixels, labels=torch.tensor([0, 2])).loss.backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", IMAGES)
def test_gradient_checkpointing_changes_no_gradient(name, reentrant):
    model, pixels = make(name).train(), images(name)
    expected = gradients(model, pixels)
    assert expected.keys() == dict(model.named_parameters()).keys()  # every weight has one
    twin = make(name).train()
    twin.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again = gradients(twin, pixels.requires_grad_(reentrant))
    # Reentrant checkpoints change the memory layout of gradients, and so the order in which sums over maps run.
    limit = 2e-6 * max(value.abs().max().item() for value in expected.values()) if reentrant else 0.0
    for key, value in expected.items():
        torch.testing.assert_close(again[key], value, rtol=0, atol=limit, msg=key)
    # Statistics of batch norms have seen the batch once, whatever was computed twice.
    state = dict(twin.named_buffers())
    assert all(torch.equal(state[key], value) for key, value in model.named_buffers())


@pytest.mark.parametrize("name", IMAGES)
def test_training_lowers_the_loss(name):
    model, pixels = make(name).train(), images(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = model(pixels, labels=torch.tensor([0, 2])).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("name", IMAGES)
def test_saved_and_loaded_by_the_auto_classes(name, tmp_path):
    for auto_class, loader in (
        ("AutoModel", AutoModel),
        ("AutoModelForImageClassification", AutoModelForImageClassification),
        ("AutoBackbone", FAMILIES[name].backbone),  # AutoBackbone itself loads no folder
    ):
        if auto_class not in FAMILIES[name].models:
            continue
        model = make(name, auto_class)
        model.save_pretrained(tmp_path / auto_class)
        again = loader.from_pretrained(tmp_path / auto_class).eval()
        assert type(again) is type(model) and again.config.prior == model.config.prior
        state = again.state_dict()
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        with torch.no_grad():
            output, expected = again(images(name)), model(images(name))
        for own, other in zip(output.to_tuple(), expected.to_tuple(), strict=True):
            for a, b in zip(own, other, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("name", IMAGES)
def test_a_missing_weight_is_named(name, tmp_path, caplog):
    make(name).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    gone = next(key for key in state if key.endswith("attention.k_proj.weight"))
    del state[gone]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(OSError, match=f"lacks weights that fit its config: {gone}"):
        load_whole_model(tmp_path)
    _, info = AutoModelForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {gone} and gone in caplog.text


@pytest.mark.parametrize("name", IMAGES)
def test_the_backbone_has_a_map_for_each_name(name):
    if FAMILIES[name].backbone is None:
        pytest.skip(f"{name} has no maps")
    model = make(name, "AutoBackbone", out_features=small(name).map_names)
    with torch.no_grad():
        maps = model(images(name, (1, 2))).feature_maps
    assert [map_.shape[1] for map_ in maps] == model.channels and len(maps) == len(model.map_sources)
    height, width = small(name).grid
    assert maps[0].shape == (2, model.channels[0], height, 2 * width)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", IMAGES)
def test_other_precisions(name, dtype, tmp_path):
    """Scalars of a decay are never in half precision."""
    model = make(name)
    with torch.no_grad():
        expected = model(images(name)).logits
    model.save_pretrained(tmp_path)
    cast = AutoModelForImageClassification.from_pretrained(tmp_path, dtype=dtype).eval()
    dtypes = {key: value.dtype for key, value in cast.named_parameters()}
    half = dtype == torch.bfloat16
    assert {own for key, own in dtypes.items() if "decay_bias" in key} == {torch.float32 if half else dtype}
    assert {own for key, own in dtypes.items() if "decay_bias" not in key} == {dtype}
    with torch.no_grad():
        logits = cast(images(name).to(dtype)).logits
    torch.testing.assert_close(logits.float(), expected, atol=0.1 if half else 1e-5, rtol=0.1 if half else 1e-5)


@pytest.mark.parametrize("name", IMAGES)
def test_neither_prior_nor_positions_have_weight_decay(name):
    model = make(name)
    kept = model.no_weight_decay()
    assert {key for key, _ in model.named_parameters() if "decay_bias" in key} <= kept
    assert {key for key, _ in model.named_parameters() if "position" in key} <= kept
    assert not any("proj.weight" in key or "fc" in key for key in kept)


@pytest.mark.parametrize("name", IMAGES)
def test_models_on_the_meta_device_and_deep_copies(name):
    with torch.device("meta"):
        meta = FAMILIES[name].image_classifier(small(name, prior=PRIOR))
    assert all(value.is_meta for value in meta.parameters())
    model = make(name)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        assert model(images(name)).logits.abs().max() > 0 == twin(images(name)).logits.abs().max()


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("name", IMAGES)
def test_lora_and_dora_train_and_come_back(name, use_dora, tmp_path):
    model, pixels = make(name), images(name)
    base = copy.deepcopy(model)
    adapted = peft.get_peft_model(model, lora_config(model, rank=2, use_dora=use_dora)).train()
    optimizer = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = adapted(pixel_values=pixels, labels=torch.tensor([0, 2])).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(pixel_values=pixels).logits, adapted.eval()(pixel_values=pixels).logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGES)
def test_it_compiles_into_one_graph(name):
    model, pixels = make(name), images(name)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(pixels).logits, model(pixels).logits, atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("labels", [torch.tensor([0, 1]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])], ids=["one", "many"])
@pytest.mark.parametrize("name", IMAGES)
def test_it_trains_in_one_graph_with_labels(name, labels):
    """transformers' loss writes into the config what kind of labels there are, in a graph as well."""
    eager, compiled = (make(name, num_labels=2).train() for _ in range(2))
    torch._dynamo.reset()
    step = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    losses = [model(images(name), labels=labels).loss for model in (eager, step)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for one, other in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    kind = "single_label_classification" if labels.ndim == 1 else "multi_label_classification"
    assert eager.config.problem_type == compiled.config.problem_type == kind


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGES)
def test_it_is_exported_with_any_batch_size(name):
    model = make(name)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (images(name),), dynamic_shapes={"pixel_values": {0: batch}})
    pixels = images(name, batch=3)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(pixels)["logits"], model(pixels).logits, atol=1e-5, rtol=1e-5)


REMOTE = """
from pathlib import Path
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageClassification

logits = {}
for folder in sorted(path for path in Path("models").iterdir()):
    model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules.")
    logits[folder.name] = model(load_file("pixels.safetensors")[folder.name]).logits.detach()
save_file(logits, "logits.safetensors")
"""


@pytest.mark.slow
def test_every_family_comes_back_by_remote_code(tmp_path, monkeypatch):
    # Whoever adds a family has its code in a package of their own, which this process lacks too.
    shipped = [name for name in shipped_families() if name in IMAGES]
    models = {name: make(name) for name in shipped}
    models |= {f"{name}_along": make_along(name, "hilbert") for name in shipped}
    for name, model in models.items():
        model.save_pretrained(tmp_path / "models" / name)
        saved = json.loads((tmp_path / "models" / name / "config.json").read_text())
        assert saved["model_type"] == name.removesuffix("_along")
    save_file({name: images(name.removesuffix("_along")) for name in models}, tmp_path / "pixels.safetensors")
    run_script(REMOTE, folder=tmp_path)
    monkeypatch.setattr(compiled_kernels, "INSTALLED_VERSION", None)  # without the package there is no compiled kernel
    logits = load_file(tmp_path / "logits.safetensors")
    assert logits.keys() == models.keys()
    for name, model in models.items():
        with torch.no_grad():
            # To the bit, but for a backend that was registered in this process alone.
            torch.testing.assert_close(logits[name], model(images(name.removesuffix("_along"))).logits)
        if name.endswith("_along"):
            raster = make_along(name.removesuffix("_along"), "raster")
            with torch.no_grad():
                assert (logits[name] - raster(images(name.removesuffix("_along"))).logits).abs().max() > 1e-5
