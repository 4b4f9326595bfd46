"""What holds for every family, in the smallest config of each (small.py)."""

import copy
import json
import math
import re
from itertools import cycle

import peft
import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers import AutoBackbone, Trainer

from hf_sparseprior.adapters import lora_config
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.models.blocks import CheckpointedLayer
from tests.hf_sparseprior.small import shipped_families, small
from tests.remote import check_remote_code

IMAGES = [name for name, family in FAMILIES.items() if family.takes == "images"]
CLASSIFIERS = [name for name, family in FAMILIES.items() if family.classifier is not None]
every_image_family = pytest.mark.parametrize("name", IMAGES)
every_family = pytest.mark.parametrize("name", CLASSIFIERS)
PRIOR = "fibottention+violin"
LABELS = torch.tensor([0, 2])


def make(name, auto_class=None, **options):
    """A model, by default the classifier, whose weights are far from their small initial values."""
    torch.manual_seed(0)
    family = FAMILIES[name]
    model_class = family.models[auto_class] if auto_class else family.classifier
    model = model_class(small(name, **{"prior": PRIOR, "num_labels": 3, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def make_along(name, order):
    """With logits that depend on the order: a class token sees all patches, whatever it is."""
    pooling = {"pooling": "mean"} if hasattr(small(name), "pooling") else {}
    support = {"name": "window", "w": 1, "order": order}
    return make(name, prior={"support": support, "decay": "violin"}, **pooling)


def frames(name):
    """(number of frames,) of clips, () of images."""
    return (small(name).num_frames,) if FAMILIES[name].takes == "clips" else ()


def images(name, factor=(1, 1), batch=2):
    """What the family takes: images, or clips of its number of frames."""
    side = small(name).image_size
    shape = (batch, *frames(name), 3, side * factor[0], side * factor[1])
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


@every_family
def test_hidden_states_and_attentions_and_the_same_by_eager_attention(name):
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
        sequences = math.prod(frames(name), start=2 * stage.num_windows)
        assert weights.shape == (sequences, stage.num_heads, tokens, tokens)
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    assert len(output.hidden_states) == len(model.config.map_names)
    model.config.output_attentions = model.config.output_hidden_states = True
    with torch.no_grad():
        asked, refused = model(images(name)), model(images(name), output_attentions=False)
    assert len(asked.attentions) == len(layers) and len(asked.hidden_states) == len(output.hidden_states)
    assert refused.attentions is None
    model.config.output_attentions = model.config.output_hidden_states = False
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    with torch.no_grad():
        torch.testing.assert_close(model(images(name)).logits, plain.logits, atol=1e-5, rtol=1e-5)


@every_family
def test_the_loss_is_cross_entropy_and_tuples_have_the_same_values(name):
    model = make(name)
    with torch.no_grad():
        named = model(images(name), labels=LABELS, output_hidden_states=True)
        plain = model(images(name), labels=LABELS, output_hidden_states=True, return_dict=False)
        base = model.base_model(images(name))
        base_plain = model.base_model(images(name), return_dict=False)
    torch.testing.assert_close(named.loss, F.cross_entropy(named.logits, LABELS))
    assert isinstance(plain, tuple) and plain[0].equal(named.loss) and plain[1].equal(named.logits)
    assert len(plain[2]) == len(named.hidden_states)
    assert base_plain[0].equal(base.last_hidden_state) and base_plain[1].equal(base.pooler_output)


@every_family
def test_an_empty_batch_gives_an_empty_result_and_what_does_not_fit_is_refused_by_name(name):
    model, side = make(name), small(name).image_size
    with torch.no_grad():
        assert model(images(name, batch=0)).logits.shape == (0, 3)
    shape = ("frames, " if frames(name) else "") + "3, height, width"
    for wrong in ((3, side, side), (1, *frames(name), 4, side, side), (1, 1, *frames(name), 3, side, side)):
        with pytest.raises(ValueError, match=rf"{re.escape(str(wrong))} must be \(batch, {shape}\)"):
            model(torch.zeros(wrong))
    lists = [[images(name)[0]]] if name in ("sparseprior_swin", "sparseprior_convit", "sparseprior_iformer") else []
    for wrong in (None, *lists):
        with pytest.raises(ValueError, match=rf"pixel_values of {type(wrong).__name__} must be \(batch, {shape}\)"):
            model(wrong)


@every_family
def test_other_sizes(name):
    """Images of a batch do not see each other, whatever their size."""
    model = make(name)
    for factor in ((2, 2), (1, 2), (3, 1)):
        pixels = images(name, factor)
        with torch.no_grad():
            together = model(pixels).logits
            alone = torch.cat([model(pixel[None]).logits for pixel in pixels])
        assert together.shape == (2, 3) and together.isfinite().all()
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
        assert (together[0] - together[1]).abs().max() > 1e-4


def gradients(model, pixels):
    model.zero_grad()
    model(pixels, labels=LABELS).loss.backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
@every_family
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


@every_family
def test_layers_learn_behind_frozen_embeddings_under_reentrant_checkpointing(name):
    """torch gives what reentrant checkpoints run no gradient where no input needs one."""
    gradients_of_layers = []
    for checkpointing in (False, True):
        model = make(name).train().requires_grad_(False)
        for layer in [module for module in model.modules() if isinstance(module, CheckpointedLayer)]:
            layer.requires_grad_(True)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": True})
        gradients_of_layers.append(gradients(model, images(name)))
    expected, again = gradients_of_layers
    assert expected.keys() == again.keys() and len(expected) > 10
    for key, value in expected.items():
        torch.testing.assert_close(again[key], value, rtol=1e-4, atol=2e-6, msg=key)


@every_family
def test_training_lowers_the_loss(name):
    model, pixels = make(name).train(), images(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = model(pixels, labels=LABELS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@every_family
def test_saved_and_loaded_by_the_auto_classes(name, tmp_path):
    for auto_class in FAMILIES[name].models:
        # AutoBackbone itself loads no folder
        loader = FAMILIES[name].backbone if auto_class == "AutoBackbone" else getattr(transformers, auto_class)
        model = make(name, auto_class)
        assert auto_class != "AutoBackbone" or type(AutoBackbone.from_config(model.config)) is type(model)
        model.save_pretrained(tmp_path / auto_class)
        again = loader.from_pretrained(tmp_path / auto_class)
        assert type(again) is type(model) and again.config.prior == model.config.prior and not again.training
        state = again.state_dict()
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        with torch.no_grad():
            output, expected = again(images(name)), model(images(name))
        for own, other in zip(output.to_tuple(), expected.to_tuple(), strict=True):
            for a, b in zip(own, other, strict=True):
                assert torch.equal(a, b)


def check_dtypes(model, dtype):
    """Weights have the dtype; scalars of a decay are never in half precision."""
    for key, value in model.named_parameters():
        half = torch.finfo(dtype).bits < 32 and "decay_bias" in key
        assert value.dtype == (torch.float32 if half else dtype), key


PRECISIONS = [
    *zip(CLASSIFIERS, cycle([torch.float64, torch.float16])),
    *((name, torch.bfloat16) for name in CLASSIFIERS),
]


@pytest.mark.parametrize(("name", "dtype"), PRECISIONS)
def test_other_precisions(name, dtype, tmp_path):
    """Cast, loaded and made in another precision; saved and loaded in it, the same bits."""
    model, classifier = make(name), FAMILIES[name].classifier
    model.save_pretrained(tmp_path / "single")
    loaded = classifier.from_pretrained(tmp_path / "single", dtype=dtype)
    with torch.no_grad():
        expected = model(images(name)).logits
        scalars = {key: value.clone() for key, value in model.named_parameters() if "decay_bias" in key}
        cast = model.to(dtype)
        logits = cast(images(name).to(dtype)).logits
        assert loaded(images(name).to(dtype)).logits.equal(logits)
    assert scalars and all(
        value.to(torch.float64).equal(cast.get_parameter(key).double()) for key, value in scalars.items()
    )
    limit = 1e-5 if dtype == torch.float64 else 0.1
    torch.testing.assert_close(logits.float(), expected, atol=limit, rtol=limit)
    cast.save_pretrained(tmp_path / "cast")
    again = classifier.from_pretrained(tmp_path / "cast", dtype=dtype)
    with torch.no_grad():
        assert again(images(name).to(dtype)).logits.equal(logits)
    auto_class = next(auto_class for auto_class, own in FAMILIES[name].models.items() if own is classifier)
    made = getattr(transformers, auto_class).from_config(small(name, prior=PRIOR), dtype=dtype)
    for own in (cast, loaded, again, made):
        check_dtypes(own, dtype)


@every_family
def test_neither_prior_nor_positions_have_weight_decay(name):
    model = make(name)
    kept = model.no_weight_decay()
    assert {key for key, _ in model.named_parameters() if "decay_bias" in key} <= kept
    assert {key for key, _ in model.named_parameters() if "position" in key} <= kept
    assert not any("proj.weight" in key or "fc" in key for key in kept)
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    assert decayed and not {key for key in decayed if "decay_bias" in key}


@every_family
def test_models_on_the_meta_device_and_deep_copies(name):
    model, twin = make(name), make(name)
    with torch.device("meta"):
        meta = FAMILIES[name].classifier(model.config)
    assert all(value.is_meta for value in meta.parameters())
    assert meta(images(name).to("meta")).logits.shape == (2, 3)
    copied, filled = copy.deepcopy(twin), meta.to_empty(device="cpu").eval()
    filled.load_state_dict(model.state_dict())  # tables made for the meta device are not kept
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
        expected = model(images(name)).logits
        assert filled(images(name)).logits.equal(expected) and twin(images(name)).logits.equal(expected)
        assert expected.abs().max() > 0 == copied(images(name)).logits.abs().max()


@pytest.mark.parametrize(("name", "use_dora"), zip(CLASSIFIERS, cycle([True, False])))
def test_lora_and_dora_train_and_come_back(name, use_dora, tmp_path):
    model, pixels = make(name), images(name)
    base = copy.deepcopy(model)
    adapted = peft.get_peft_model(model, lora_config(model, rank=2, use_dora=use_dora)).train()
    optimizer = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = adapted(pixel_values=pixels, labels=LABELS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(pixel_values=pixels).logits, adapted.eval()(pixel_values=pixels).logits)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "many"), [*((name, False) for name in IMAGES), ("sparseprior_vit", True)])
def test_it_trains_in_one_graph_with_labels(name, many):
    """transformers' loss writes into the config what kind of labels there are, in a graph as well.

    Without training: the next test, and test_layout.py.
    """
    labels = torch.tensor([[1.0, 0.0], [1.0, 1.0]] if many else [0, 1])
    eager, compiled = (make(name, num_labels=2).train() for _ in range(2))
    torch._dynamo.reset()
    step = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    losses = [model(images(name), labels=labels).loss for model in (eager, step)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for one, other in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    kind = "multi_label_classification" if many else "single_label_classification"
    assert eager.config.problem_type == compiled.config.problem_type == kind


@pytest.mark.slow
@every_image_family
def test_it_is_exported_with_any_batch_size(name):
    model = make(name)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (images(name),), dynamic_shapes={"pixel_values": {0: batch}})
    pixels = images(name, batch=3)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(pixels)["logits"], model(pixels).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_every_family_comes_back_by_remote_code(tmp_path):
    # Whoever adds a family has its code in a package of their own, which this process lacks too.
    shipped = [name for name in shipped_families() if name in CLASSIFIERS]
    models = {name: (make(name), images(name)) for name in shipped}
    along = {name: make_along(name, "hilbert") for name in shipped}
    check_remote_code(models | {f"{name}_along": (model, images(name)) for name, model in along.items()}, tmp_path)
    for name, model in along.items():
        assert json.loads((tmp_path / "models" / name / "config.json").read_text())["model_type"] == name
        with torch.no_grad():
            raster = make_along(name, "raster")(images(name)).logits
            assert (model(images(name)).logits - raster).abs().max() > 1e-5
