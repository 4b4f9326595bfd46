"""torch.compile and torch.export give the eager model's results and leave the eager model alone."""

import io
import shutil

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

import hf_sparseprior as sp
from hf_sparseprior import SparsePriorViTBackbone, SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.priors.prior import prior_names
from tests.each import each
from tests.hf_sparseprior.small import SMALL, small

pytestmark = pytest.mark.slow

# Pairs off the diagonals, keys chosen by their logits, and what takes the softmax's place.
BASELINES = {
    "random": {"support": {"name": "random", "pruning_ratio": 80}},
    "topk": {"predictor": {"name": "topk", "keys": 5}},
    "linformer": "linformer",
    "efficient": {"mixer": {"name": "efficient", "key_width": 3}},
}
# The configured grid and one that is neither square nor the configured one.
SIZES = [(32, 32), (16, 24)]


def tiny(prior, **settings):
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    return SparsePriorViTConfig(
        prior=prior, **{**sizes, "image_size": 32, "patch_size": 4, "num_labels": 3, **settings}
    )


@torch.no_grad()
def make(prior, cls=SparsePriorViTForImageClassification, **settings):
    """A model whose masks matter: weights far from their small initial values, beta in 0..4."""
    torch.manual_seed(0)
    model = cls(tiny(prior, **settings)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("beta"):
            nn.init.uniform_(parameter, 0.0, 4.0)
        else:
            parameter.add_(torch.rand_like(parameter) - 0.5)
    return model


def images(size=(32, 32), batch=2):
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(7))


def gradients(model, source, pixels):
    """Logits and the gradients of the parameters of `source`, which `model` is or wraps."""
    source.zero_grad()
    logits = model(pixels).logits
    F.cross_entropy(logits, torch.tensor([0, 2])).backward()
    return logits.detach(), {name: parameter.grad.clone() for name, parameter in source.named_parameters()}


def assert_same_step(compiled, model, pixels):
    logits, found = gradients(compiled, model, pixels)
    expected_logits, expected = gradients(model, model, pixels)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Compiled code of one test must not count against the recompilation limit of the next."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# ---- torch.compile --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", ["dense", "fibottention+violin"])
def test_one_model_is_compiled_for_inference_and_then_for_training_on_two_grids(prior):
    """A table that is made while compiling must be no fake one; one made under inference_mode, fit for training."""
    settings = {"pooling": "mean", "interpolation": "bilinear"}
    expected = make(prior, **settings)(images()).logits.detach()
    model = make(prior, **settings)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        torch.testing.assert_close(compiled(images()).logits, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(model(images()).logits, expected)
    model.train()
    for size in (*SIZES, SIZES[0]):  # the first grid again takes the code that is there
        assert_same_step(compiled, model, images(size))


@pytest.mark.parametrize("name", BASELINES)
def test_compiled_training_of_baselines(name):
    model = make(BASELINES[name], pooling="mean", interpolation="bilinear").train()
    assert_same_step(torch.compile(model, fullgraph=True, backend="aot_eager"), model, images((16, 24)))


# The diagonal path is unrolled over heads, offsets and curves; few of each keep the test fast.
ONE_CURVE = {"name": "violin", "curves": ["hilbert"]}


@pytest.mark.parametrize(
    ("backend", "mask_fill", "decay", "side"),
    [("reference", "zero", ONE_CURVE, 32), ("diagonal", "zero", "none", 32), ("auto", "neg_inf", ONE_CURVE, 64)],
)
def test_compiled_training_with_a_forced_backend_and_where_diagonal_is_chosen(
    backend, mask_fill, decay, side, monkeypatch
):
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", backend)
    prior = {"support": {"name": "fibottention", "mask_fill": mask_fill}, "decay": decay}
    model = make(prior, image_size=side, pooling="mean").train()
    pixels = images((side, 48) if side == 64 else (16, 24))
    assert_same_step(torch.compile(model, fullgraph=True, backend="aot_eager"), model, pixels)


def test_batch_sizes_share_one_graph():
    model = make("fibottention+violin", num_hidden_layers=2)
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=count, dynamic=True)
    with torch.no_grad():
        for batch in (2, 3, 5, 7):
            torch.testing.assert_close(compiled(images(batch=batch)).logits, model(images(batch=batch)).logits)
    assert len(graphs) == 1


@torch.no_grad()
def test_layers_compiled_one_by_one_keep_their_own_supports():
    """Regional compilation: all layers run the same code object, so the compiler must tell them apart."""
    model = make("fibottention", num_hidden_layers=3)
    expected = model(images()).logits
    for layer in model.vit.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(model(images()).logits, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("prior", ["dense", "violin"])
def test_layers_that_see_everything_share_one_graph(prior):
    """torch compiles a code object eight times at most."""
    model = make(prior, num_hidden_layers=10)
    expected, graphs = model(images()).logits, []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph

    for layer in model.vit.layers:
        layer.compile(fullgraph=True, backend=count)
    torch.testing.assert_close(model(images()).logits, expected, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1


@torch.no_grad()
def test_models_compiled_in_one_process_keep_their_own_supports_and_curves():
    def fibottention(**settings):
        return {"support": {"name": "fibottention", **settings}}

    def violin(*curves):
        return {"decay": {"name": "violin", "curves": curves}}

    priors = [fibottention(), fibottention(shuffle_seed=5), fibottention(w_max=8), "dense"]
    priors += [violin("z", "snake"), violin("hilbert", "peano")]
    # Mean pooling: the class token of a single layer sees everything. All models stay alive, so that the code compiled
    # for one is a candidate for the others.
    models = [make(prior, pooling="mean") for prior in priors]
    wrong = []
    for prior, model in zip(priors, models, strict=True):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        difference = (compiled(images()).logits - model(images()).logits).abs().max().item()
        if difference > 1e-4:
            wrong.append((prior, difference))
    assert not wrong


@torch.no_grad()
def test_compiled_backbone_with_all_outputs():
    model = make("fibottention+violin", cls=SparsePriorViTBackbone, num_hidden_layers=2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    options = {"output_attentions": True, "output_hidden_states": True}
    output, expected = (one(images(SIZES[1]), **options) for one in (compiled, model))
    torch.testing.assert_close(output.feature_maps[0], expected.feature_maps[0], rtol=1e-4, atol=1e-5)
    for found, wanted in zip(output.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert len(output.hidden_states) == 3


@torch.no_grad()
def test_scalars_are_inputs_of_the_graph_not_constants():
    model = make("violin", num_hidden_layers=2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    before = compiled(images()).logits
    for layer in model.vit.layers:
        layer.attention.decay_bias.alpha.mul_(2.0)
        layer.attention.decay_bias.beta.add_(1.0)
    after = compiled(images()).logits
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(after, model(images()).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
def test_inductor(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")  # no trial compilations
    # The compiler takes its time: one grid, one layer, two curves in place of eight, no interpolation.
    prior = {"support": "fibottention", "decay": {"name": "violin", "curves": ["snake", "hilbert_t"]}}
    model = make(prior).train()
    assert_same_step(torch.compile(model, fullgraph=True), model, images())


# ---- torch.export ---------------------------------------------------------------------------------------------------


class Logits(nn.Module):
    """An exported program returns tensors."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pixel_values):
        return self.model(pixel_values).logits


@pytest.mark.parametrize("strict", [False, True])
def test_export_before_any_eager_call_takes_any_batch_is_saved_and_loaded(strict, tmp_path, monkeypatch):
    """Tables that are first needed while tracing must not remain as fake tensors."""
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", "reference")
    expected = make("fibottention+violin")(images()).logits.detach()
    model = make("fibottention+violin")
    shapes = {"pixel_values": {0: torch.export.Dim("batch", min=1, max=64)}}
    program = torch.export.export(Logits(model), (images(),), dynamic_shapes=shapes, strict=strict)
    torch.testing.assert_close(program.module()(images()), expected)
    torch.testing.assert_close(program.module()(images(batch=5)), model(images(batch=5)).logits)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(loaded(images()), expected)
    torch.testing.assert_close(loaded(images().flip(0)), expected.flip(0))
    # The eager model goes on as before, its weights are still its own.
    assert torch.equal(model(images()).logits, expected)
    assert_same_step(model, model, images())


@pytest.mark.parametrize("name", ["random", "topk"])
def test_export_of_baselines(name, monkeypatch):
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", "reference")
    model = make(BASELINES[name])
    program = torch.export.export(Logits(model), (images(),), strict=False)
    torch.testing.assert_close(program.module()(images()), model(images()).logits)


@pytest.mark.parametrize("prior", ["dense", "fibottention+violin"])
def test_export_with_the_default_backend(prior):
    model = make(prior)
    expected = model(images()).logits
    program = torch.export.export(Logits(model), (images(),))
    torch.testing.assert_close(program.module()(images()), expected, rtol=1e-5, atol=1e-5)


# ---- tracers of other programs --------------------------------------------------------------------------------------


def stock(prior):
    """transformers' ViT with a prior."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=4, num_labels=3))
    return sp.apply_prior(model, prior).eval()


def shifted_windows(prior):
    """A Swin whose second layer has shifted windows."""
    torch.manual_seed(0)
    return FAMILIES["sparseprior_swin"].classifier(small("sparseprior_swin", prior=prior, depths=[2, 2])).eval()


def sides(model):
    return (model.config.image_size,) * 2


def run_jit(model, pixels):
    traced = torch.jit.trace(Logits(model).eval(), (pixels,))
    assert "hf_sparseprior::" not in str(traced.inlined_graph)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    return torch.jit.load(file)


def run_onnx(model, pixels, dynamo):
    onnxruntime, file = pytest.importorskip("onnxruntime"), io.BytesIO()
    if dynamo:
        shapes = {"dynamic_shapes": ({0: torch.export.Dim("batch", min=1)},)}
    else:
        shapes = {"dynamic_axes": {"pixel_values": {0: "batch"}}}
    names = {"input_names": ["pixel_values"]}
    torch.onnx.export(Logits(model).eval(), (pixels,), file, dynamo=dynamo, verbose=False, **names, **shapes)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    return lambda other: torch.from_numpy(session.run(None, {"pixel_values": other.numpy()})[0])


def run_openvino(model, pixels):
    openvino = pytest.importorskip("openvino")
    from hf_sparseprior.cli.runtimes import openvino_core

    converted = openvino.convert_model(Logits(model).eval(), example_input=pixels)
    compiled = openvino_core().compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda other: torch.from_numpy(compiled(other.numpy())[0].copy())


TRACERS = {
    "torch.jit.trace": run_jit,
    "torch.onnx.export": lambda model, pixels: run_onnx(model, pixels, dynamo=True),
    "torch.onnx.export, dynamo=False": lambda model, pixels: run_onnx(model, pixels, dynamo=False),
    "openvino.convert_model": run_openvino,
}


def assert_first_call_traces(build, tracer, batch=2):
    """The first call of a model is traced: the graph is right for more and other images, and the model after it."""
    model, untraced = build(), build()
    other = images(sides(model), batch=3).flip(-1)
    with torch.no_grad():
        expected = untraced(other).logits
        found = TRACERS[tracer](model, images(sides(model), batch=batch))(other)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(other).logits, expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@each("name", prior_names())
def test_the_first_call_may_be_traced(name):
    assert_first_call_traces(lambda: make(name), "torch.jit.trace")


HILBERT_WINDOW = {"support": {"name": "window", "w": 1, "order": "hilbert"}}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@each(
    "build, prior, batch",
    [
        (stock, "fibottention+violin", 2),
        (stock, "sparsifiner", 2),
        (shifted_windows, "fibottention+violin", 1),
        (shifted_windows, HILBERT_WINDOW, 1),
    ],
)
def test_stock_models_may_be_traced_first_and_windows_of_one_image_fit_several(build, prior, batch):
    assert_first_call_traces(lambda: build(prior), "torch.jit.trace", batch=batch)


@pytest.mark.filterwarnings("ignore")  # of the exporters about themselves
@each("tracer", TRACERS)
def test_every_tracer_records_plain_operations(tracer):
    assert_first_call_traces(lambda: make("sparsifiner+manhattan"), tracer)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_tracer_heeds_the_environment(monkeypatch):
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", "gather")
    assert_first_call_traces(lambda: make("fibottention+violin"), "torch.jit.trace")
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", "cpp")
    with pytest.raises(ValueError, match="SPARSEPRIOR_BACKEND='cpp' cannot run this attention: the graph is for"):
        run_jit(make("fibottention"), images())


@each("name", SMALL)
def test_symbols_of_fx_are_refused(name):
    with pytest.raises(TypeError, match=r"symbolic_trace cannot trace .*; torch\.export\.export makes a graph"):
        torch.fx.symbolic_trace(FAMILIES[name].classifier(small(name)))


# ---- fake tensors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "reference", "diagonal"])
def test_a_fake_forward_leaves_nothing_behind(backend, monkeypatch):
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", backend)
    expected = make("fibottention+violin")(images()).logits
    model = make("fibottention+violin")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = model(mode.from_tensor(images())).logits
    assert fake.shape == (2, 3)
    assert torch.equal(model(images()).logits, expected)
    assert_same_step(model, model, images())
