"""Supports whose random pairs are drawn anew in each training pass, against draws and softmax written out here."""

import gc
import math
import weakref

import numpy as np
import pytest
import torch
from transformers import TrainingArguments

import hf_sparseprior as sp
from hf_sparseprior.attention.functional import attention
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import CallOptions
from hf_sparseprior.base.layer_sizes import HEADS
from hf_sparseprior.compression.units import Units
from hf_sparseprior.models.base_model import DrawCount
from hf_sparseprior.patterns.supports import LayerKey, layer_pattern, resolve_support
from hf_sparseprior.priors.layer import SparsePriorAttention
from hf_sparseprior.priors.prior import resolve_prior
from hf_sparseprior.training import SparsePriorTrainer
from tests.hf_sparseprior.training.test_trainer import Squares, StopAt

SUPPORTS = {
    "random": {"name": "random", "pruning_ratio": 80},
    "bigbird": {"name": "bigbird", "w": 2, "random_keys": 1.5},
    "per_head": {"name": "bigbird", "w": 4, "random_keys": 1, "per_head": True, "mask_fill": "zero", "seed": 3},
}
each_support = pytest.mark.parametrize("support", SUPPORTS.values(), ids=list(SUPPORTS))
GRID, HEADS_OF_LAYER = (4, 4), 2
SIZES = dict(
    image_size=8, patch_size=2, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
)


def redrawn(support):
    return {"support": {**support, "redraw": True}}


def make_model(support=SUPPORTS["bigbird"], redraw=True, cls=sp.SparsePriorViTForImageClassification, **options):
    torch.manual_seed(0)
    prior = redrawn(support) if redraw else {"support": support}
    return cls(sp.SparsePriorViTConfig(**SIZES, prior=prior, **options))


def images(seed=1, batch=3):
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def pairs_of_draw(support, layer, draw):
    """(query, key) of each head: the first new ones, off the window, of numbers below N^2 that PCG64 gives (Lemire)."""
    window, heads = range(support["w"] // 2 + 1), []
    for head in range(HEADS_OF_LAYER if support.get("per_head") else 1):
        bits, found = np.random.PCG64([support.get("seed", 0), layer, head, draw]), []
        while len(found) < round(16 * support["random_keys"]):
            word = int(bits.random_raw())
            for half in (word % 2**32, word >> 32):
                pair = divmod((half * 256) >> 32, 16)
                if abs(pair[0] - pair[1]) not in window and pair not in found:
                    found.append(pair)
        heads.append(sorted(found[: round(16 * support["random_keys"])]))
    return heads if support.get("per_head") else heads * HEADS_OF_LAYER


@pytest.mark.parametrize("name", ["bigbird", "per_head"])
@pytest.mark.parametrize(("layer", "draw"), [(0, 1), (0, 2), (3, 1), (1, 10**6)])
def test_a_draw_is_that_of_seed_layer_head_and_its_number(name, layer, draw):
    support = resolve_support({**SUPPORTS[name], "redraw": True}, HEADS_OF_LAYER, 16)
    pairs = layer_pattern(support, LayerKey(HEADS_OF_LAYER, GRID, layer, draw=draw)).pairs
    assert [[tuple(pair) for pair in head.tolist()] for head in pairs] == pairs_of_draw(SUPPORTS[name], layer, draw)


def test_over_many_draws_every_pair_comes_as_often():
    support = resolve_support({"name": "random", "pruning_ratio": 75, "redraw": True}, 1, 16)
    draws, seen = 2000, np.zeros((16, 16))
    for draw in range(1, draws + 1):
        pairs = layer_pattern(support, LayerKey(1, GRID, draw=draw)).pairs[0]
        assert len(pairs) == 64
        np.add.at(seen, tuple(pairs.T), 1)
    assert abs(seen - draws / 4).max() < 5 * math.sqrt(draws * 3 / 16)


def attention_by_hand(layer, tokens, mask, fill):
    """Softmax over the pairs of a mask (H, T, T), or with logits of 0 elsewhere."""
    heads = [projection(tokens).unflatten(-1, (2, -1)).transpose(1, 2) for projection in
             (layer.q_proj, layer.k_proj, layer.v_proj)]  # fmt: skip
    q, k, v = heads
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    weights = logits.masked_fill(~mask, -math.inf if fill == "neg_inf" else 0.0).softmax(-1)
    return layer.o_proj((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("name", ["bigbird", "per_head"])
def test_a_training_pass_attends_over_its_own_draw(name):
    support = SUPPORTS[name]
    torch.manual_seed(0)
    layer = SparsePriorAttention(16, 2, resolve_prior(redrawn(support), 2, GRID), layer_idx=1).double().train()
    tokens = torch.randn(2, 17, 16, dtype=torch.float64)
    apart = (torch.arange(16)[:, None] - torch.arange(16)).abs()
    outputs = []
    for draw in (1, 2, 1):
        mask = torch.ones(2, 17, 17, dtype=torch.bool)
        mask[:, 1:, 1:] = apart <= support["w"] // 2
        for head, pairs in enumerate(pairs_of_draw(support, 1, draw)):
            for j, k in pairs:
                mask[head, 1 + j, 1 + k] = True
        out, _ = layer(tokens, GRID, 1, CallOptions(draw=draw))
        expected = attention_by_hand(layer, tokens, mask, support.get("mask_fill", "neg_inf"))
        torch.testing.assert_close(out, expected)
        outputs.append(out)
    assert torch.equal(outputs[0], outputs[2]) and not torch.allclose(outputs[0], outputs[1])


@each_support
def test_in_evaluation_the_pairs_are_those_without_redraw(support):
    model, fixed = make_model(support), make_model(support, redraw=False).eval()
    expected = fixed(images()).logits
    assert torch.equal(model.eval()(images()).logits, expected)
    passes = [model.train()(images()).logits for _ in range(3)]
    assert not any(torch.equal(passes[a], passes[b]) for a, b in ((0, 1), (1, 2), (0, 2)))
    assert torch.equal(model.eval()(images()).logits, expected)
    assert int(model.vit.draws.count) == 3  # evaluation is not counted


def test_plans_of_other_draws_are_dropped():
    model = make_model()
    layers = [layer.attention for layer in model.vit.layers]
    model.eval()(images())
    model.train()(images())
    old = weakref.ref(next(plan for key, plan in layers[0]._plans.items() if key[-1]))
    for _ in range(20):
        model(images())
    gc.collect()
    assert old() is None
    assert [sorted(key[-1] for key in layer._plans) for layer in layers] == [[0, 21]] * 2


def test_a_plan_made_again_from_its_key_has_its_draw():
    support = resolve_support({**SUPPORTS["bigbird"], "redraw": True}, 2, 16)
    plan = AttentionPlan(LayerKey(2, GRID, 1, draw=7), 1, support)
    again, other = AttentionPlan.from_key(plan.key), AttentionPlan(LayerKey(2, GRID, 1, draw=8), 1, support)
    assert (again.build_table("mask") == plan.build_table("mask")).all()
    assert (other.build_table("mask") != plan.build_table("mask")).any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_goes_on_with_the_draw_of_the_pass(reentrant):
    gradients = []
    for checkpointing in (False, True):
        model = make_model().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        # Two passes, and only then the backward pass of both.
        pixels = [images(seed).requires_grad_() for seed in (1, 2)]
        (model(pixels[0]).logits.square().sum() + model(pixels[1]).logits.square().sum()).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0])


# ---- a run that goes on ---------------------------------------------------------------------------------------------


def make_trainer(folder, lora):
    model = make_model()
    if lora:
        import peft

        torch.manual_seed(0)
        model = peft.get_peft_model(model, sp.adapters.lora_config(model))
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=2,
        learning_rate=1e-2, report_to="none", disable_tqdm=True, remove_unused_columns=False, use_cpu=True,
        save_strategy="steps", save_steps=2, label_names=["labels"],
    )  # fmt: skip
    return SparsePriorTrainer(model=model, args=arguments, train_dataset=Squares())


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_a_run_killed_and_resumed_has_the_bits_of_one_that_was_not(lora, tmp_path):
    whole = make_trainer(tmp_path / "whole", lora)
    whole.train()
    killed = make_trainer(tmp_path / "killed", lora)
    killed.add_callback(StopAt(3))
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    torch.manual_seed(99)
    resumed = make_trainer(tmp_path / "killed", lora)
    resumed.train(resume_from_checkpoint=True)
    counts = [int(m.count) for t in (whole, resumed) for m in t.model.modules() if isinstance(m, DrawCount)]
    assert counts == [12, 12]  # 24 images, 2 epochs, 4 images a pass
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_a_saved_model_goes_on_with_the_next_draw(tmp_path):
    model = make_model().train()
    for _ in range(3):
        model(images())
    model.save_pretrained(tmp_path)
    loaded = sp.SparsePriorViTForImageClassification.from_pretrained(tmp_path).train()
    assert int(loaded.vit.draws.count) == 3
    assert torch.equal(loaded(images()).logits, model(images()).logits)
    half = sp.SparsePriorViTForImageClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.vit.draws.count.dtype == torch.int64 and int(half.vit.draws.count) == 3


def test_a_model_without_the_count_starts_at_0(tmp_path):
    make_model(redraw=False).save_pretrained(tmp_path)
    loaded = sp.SparsePriorViTForImageClassification.from_pretrained(tmp_path, prior=redrawn(SUPPORTS["bigbird"]))
    assert int(loaded.vit.draws.count) == 0
    assert "redraw" not in (tmp_path / "config.json").read_text()


# ---- other models, and what refuses ---------------------------------------------------------------------------------

FAMILIES = {
    "swin": lambda prior: sp.SparsePriorSwinModel(
        sp.SparsePriorSwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2],
                                 window_size=4, prior=prior)
    ),
    "convit": lambda prior: sp.SparsePriorConvitModel(
        sp.SparsePriorConvitConfig(image_size=16, patch_size=4, hidden_size=16, num_hidden_layers=3,
                                   num_local_layers=1, num_attention_heads=2, intermediate_size=32, prior=prior)
    ),
    "iformer": lambda prior: sp.SparsePriorIformerModel(
        sp.SparsePriorIformerConfig(image_size=64, hidden_sizes=[12, 16, 20], conv_depths=[1, 1, 0],
                                    attention_depths=[0, 1, 1], final_conv_depths=[0, 1, 1], key_reduction=[1, 1, 2],
                                    conv_ratio=3, mlp_ratio=2, prior=prior)
    ),
    "timesformer": lambda prior: sp.SparsePriorTimesformerModel(
        sp.SparsePriorTimesformerConfig(**SIZES, num_frames=2, prior=prior)
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_draws_in_training_and_not_in_evaluation(family):
    torch.manual_seed(0)
    model = FAMILIES[family](redrawn({"name": "random", "pruning_ratio": 70}))
    pixels = (
        torch.randn(2, 2, 3, 8, 8)
        if family == "timesformer"
        else torch.randn(2, 3, *(64, 64) if family == "iformer" else (16, 16))
    )
    first, second = (model.train()(pixels).last_hidden_state for _ in range(2))
    assert int(model.draws.count) == 2 and not torch.allclose(first, second)
    first, second = (model.eval()(pixels).last_hidden_state for _ in range(2))
    assert torch.equal(first, second)


def test_a_compressed_model_keeps_the_count():
    model = make_model()
    units = Units(model)
    assert units.axes["vit.draws.count"] == () and any(group.kind == HEADS for group in units.sizes)


RECORDERS = {
    "torch.compile": lambda model: torch.compile(model, backend="eager")(images()),
    "torch.compile, whole graph": lambda model: torch.compile(model, backend="eager", fullgraph=True)(images()),
    "torch.export": lambda model: torch.export.export(model, (images(),), strict=False),
    "torch.export, strict": lambda model: torch.export.export(model, (images(),), strict=True),
    "torch.jit.trace": lambda model: torch.jit.trace(model, (images(),), strict=False),
}


@pytest.mark.parametrize("recorder", RECORDERS)
def test_a_graph_of_a_training_pass_is_refused_by_name(recorder):
    model = make_model().train()
    with pytest.raises(Exception, match=r"redraw=True draws pairs anew in each training pass, which .*must be False"):
        RECORDERS[recorder](model)
    torch._dynamo.reset()
    assert int(model.vit.draws.count) == 0


def test_a_cuda_graph_of_a_training_pass_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    model = make_model()
    with pytest.raises(ValueError, match=r"CUDA graphs would record once; it must be False there"):
        model.train()(images())
    assert torch.isfinite(model.eval()(images()).logits).all()


def test_an_export_in_evaluation_has_the_fixed_draw():
    model = make_model().eval()
    program = torch.export.export(model, (images(),), strict=False).module()
    torch.testing.assert_close(program(images()).logits, model(images()).logits)


def test_what_counts_no_passes_refuses():
    support = {**SUPPORTS["bigbird"], "redraw": True}
    layer = SparsePriorAttention(16, 2, resolve_prior({"support": support}, 2, GRID))
    tokens = torch.randn(1, 17, 16)
    with pytest.raises(ValueError, match=r"'bigbird' with redraw=True in training: CallOptions.draw=None must"):
        layer.train()(tokens, GRID, 1)
    assert layer.eval()(tokens, GRID, 1)[0].shape == tokens.shape
    q = torch.randn(1, 2, 16, 8)
    with pytest.raises(ValueError, match="'bigbird' with redraw=True must have redraw=False: one call"):
        attention(q, q, q, support)
    from transformers import ViTConfig, ViTModel

    sizes = dict(image_size=8, patch_size=2, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    stock = ViTModel(ViTConfig(**sizes, intermediate_size=16))
    with pytest.raises(ValueError, match="with redraw=True must have redraw=False in a stock model"):
        sp.apply_prior(stock, {"support": support})


def test_redraw_is_true_or_false():
    with pytest.raises(ValueError, match="redraw=1 must be"):
        resolve_support({"name": "random", "redraw": 1}, 2, 16)
    with pytest.raises(ValueError, match="redraw"):
        resolve_support({"name": "window", "redraw": True}, 2, 16)
