"""Exported files give what the model gives, in the programs that run them: of every family, with every kind of prior.

The oracle is the model itself in float64 with attention written out.
"""

import contextlib
import copy
import dataclasses
import io
import json
import os
import pickle
import re
import textwrap
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets
import torch
from PIL import Image
from torch import nn
from transformers import AutoImageProcessor

from hf_sparseprior.__main__ import main
from hf_sparseprior.attention.plain_operations import plain, plain_operations
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.cli import deployment, runtimes
from hf_sparseprior.cli.deployment import BACKENDS, DEPLOYMENT, trace
from hf_sparseprior.cli.exportable import Exportable
from hf_sparseprior.cli.runtimes import FORMATS, openvino_core
from hf_sparseprior.models.base_config import as_pair
from hf_sparseprior.patterns.decay import PLACEMENTS
from hf_sparseprior.priors.predictor import PREDICTORS, Predictor
from hf_sparseprior.priors.prior import prior_names
from hf_sparseprior.saving.processor import takes_clips
from tests.each import each
from tests.hf_sparseprior.small import SMALL, small
from tests.hf_sparseprior.toys import registered_family, registered_support
from tests.processes import ROOT, run_script, script

onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[export]'")
for package in FORMATS["onnx"].packages + FORMATS["openvino"].packages:
    pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[export]'")
pytest.importorskip("openvino")

DOCS = Path(__file__).parents[3] / "docs" / "export.md"
PRIOR = "fibottention+violin"
# A grid of 4x4, so that supports have something to leave out, and a second layer for what is left of the tokens.
LARGER = {"image_size": 16, "num_hidden_layers": 2}
SHALLOW = {"image_size": 16}
PRUNES = ("evit", "dynamicvit", "tome", "pruned fibottention", "predicted for fewer")
CLIPS = {"image_size": 12, "num_frames": 3, "time_initializer_range": 0.5}

# Priors of a ViT besides every registered name alone.
PRIORS = {
    **{name: name for name in prior_names()},
    "along hilbert": {"support": {"name": "window", "w": 1, "order": "hilbert"}, "decay": "violin"},
    "mask_fill zero": {"support": {"name": "window", "w": 1, "mask_fill": "zero"}},
    "orders of heads": {"support": {"name": "fibottention", "order": ["snake", "peano"]}},
    "all of softmax": {"predictor": {"name": "sparsifiner", "renormalise": False}},
    "predicted decay": "sparsifiner+manhattan",
    "pruned fibottention": "fibottention+evit",
    "predicted for fewer": {"predictor": "sparsifiner", "extras": ["dynamicvit"]},
    "several extras": "bigbird+violin+swin_rpb+localvit",
    **{f"placement {name}": {"decay": {"name": "violin", "placement": name}} for name in PLACEMENTS},
    "prefix": {"decay": {"name": "violin", "learn_prefix": True}},
    "groups of heads": {"heads": {"0": {"support": {"name": "window", "w": 1}}, "1": "bigbird"}},
}
# Models besides the classifier of each family: (family, class, options).
MODELS = {
    **{f"{name} bare": (name, "base", {"prior": {"support": {"name": "window", "w": 1, "order": "hilbert"}}})
       for name in SMALL},
    **{f"{name} maps": (name, "backbone", {"prior": PRIOR}) for name in SMALL if FAMILIES[name].backbone},
    "pruned tokens": ("sparseprior_vit", "base", {"prior": "fibottention+evit", **LARGER}),
    "joint": ("sparseprior_timesformer", "classifier", {"prior": PRIOR, "attention_type": "joint_space_time"}),
    "joint clip": ("sparseprior_timesformer", "classifier",
                   {"prior": f"{PRIOR}+clip", "attention_type": "joint_space_time"}),
    "joint axes": ("sparseprior_timesformer", "classifier",
                   {"prior": f"{PRIOR}+axes", "attention_type": "joint_space_time"}),
    "joint radial": ("sparseprior_timesformer", "classifier",
                     {"prior": "radial", "attention_type": "joint_space_time"}),
    "space only": ("sparseprior_timesformer", "classifier",
                   {"prior": PRIOR, "attention_type": "space_only", "time_initializer_range": 0.0}),
    "layers and heads": ("sparseprior_vit", "classifier",
                         {"prior": {"layers": ["fibottention+violin", {"heads": {"0": "window", "1": "neighborhood"}}]},
                          **LARGER}),
    "two classifiers": ("sparseprior_vit", "classifier", {"prior": PRIOR, "use_distillation_token": True}),
    "token classifier": ("sparseprior_vit", "classifier", {"prior": "evit", "token_classifier": True, **LARGER}),
    "convolutions first": ("sparseprior_vit", "classifier",
                           {"prior": PRIOR, "stem": "convolution", "stem_channels": 4}),
    "no class token": ("sparseprior_vit", "classifier",
                       {"prior": "window", "use_class_token": False, "pooling": "mean", **LARGER}),
    "sizes of maps": ("sparseprior_vit", "backbone",
                      {"prior": PRIOR, "out_features": ["stem", "stage1"], "map_scales": [2, 0.5]}),
    "Swin, window beyond the map": ("sparseprior_swin", "classifier", {"prior": "window", "window_size": 8}),
    "Swin, shifted": ("sparseprior_swin", "classifier", {"prior": PRIOR, "depths": [2, 2]}),
    "Swin, shifted along": ("sparseprior_swin", "classifier",
                            {"prior": {"support": {"name": "window", "w": 1, "order": "hilbert"}}, "depths": [2, 2]}),
    "merged tokens": ("sparseprior_vit", "base", {"prior": "tome", "pooling": "mean", **LARGER}),
}  # fmt: skip
FILES = ("torch", "onnx", "openvino")  # test_packages.py has AOTInductor's, which take half a minute each
QUICK = {
    **{"sparsifiner": FILES, "evit": FILES, "manhattan": ["torch"], "mask_fill zero": ["torch"]},
    "groups of heads": ["onnx"],
}
# Priors with operations of their own. Every program must have all of these. Other priors take one of the programs.
OWN = (
    *("topk", "sparsifiner_published", "linformer", "learned_order", "irpe_qkv", "transformer_xl", "dynamicvit"),
    *("tome", "predicted for fewer", "several extras", "dense"),
)
# Graphs of these are those of others: with another mask of pairs, a part of one of OWN, or exported below.
ALIKE = (
    *("radial", "longformer", "strided", "random", "neighborhood", "localvit", "swin_rpb", "irpe_k", "irpe_qk"),
    *("fibottention", "bigbird"),
)


def make(name, kind="classifier", **options):
    """A model whose weights are far from their small initial values."""
    torch.manual_seed(0)
    more = {**(CLIPS if FAMILIES[name].takes == "clips" else {}), **({} if kind != "classifier" else {"num_labels": 3})}
    model = getattr(FAMILIES[name], kind)(small(name, **{**more, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def make_with(case):
    """A ViT with one of `PRIORS`."""
    return make("sparseprior_vit", prior=PRIORS[case], **(LARGER if case in PRUNES else SHALLOW))


def images(config, batch):
    """Images or clips of the config's size, none like another."""
    clip = (config.num_frames,) if takes_clips(config) else ()
    shape = (batch, *clip, config.num_channels, *as_pair(config.image_size))
    return 4 * torch.randn(shape, generator=torch.Generator().manual_seed(10 + batch))


def written_out(model, pixels):
    """What a model is for, in float64 and by the specification."""
    twin = copy.deepcopy(model).double()
    twin.set_attn_implementation("eager")
    with torch.no_grad():
        output = twin(pixel_values=pixels.double())
    if "feature_maps" in output:
        return [found.numpy() for found in output.feature_maps]
    if "logits" in output:
        return [output.logits.numpy()]
    ids = [] if output.get("token_ids") is None else [output.token_ids.numpy()]
    return [output.last_hidden_state.numpy(), output.pooler_output.numpy(), *ids]


def same(found, expected):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == (np.int64 if other.dtype == np.int64 else np.float32)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def check_formats(model, folder, formats, backend=BACKENDS[0]):
    """Each format gives what the model gives, for one image and for three."""
    traced = trace(Exportable(model), backend)
    assert plain() is None
    for name in formats:
        (folder / name).mkdir()
        if name == "openvino" and "onnx" in formats:  # the same file again, which takes a second
            runtimes.onnx_to_openvino(folder / "onnx", folder / name)
        else:
            FORMATS[name].write(traced.program, traced.outputs, folder / name)
        call = FORMATS[name].load(folder / name / FORMATS[name].file, 1)
        for batch in (1, 3):
            pixels = images(model.config, batch)
            expected = written_out(model, pixels)
            same(call(pixels), expected)
        assert max(np.abs(one[0] - one[1]).max() for one in expected) > 1e-3
    return traced


# ---- what is exported --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_every_family(name, tmp_path):
    traced = check_formats(make(name, prior=PRIOR), tmp_path, FILES)
    assert traced.outputs == ["logits"] and set(traced.attention) == {"reference"}  # a decay is written out


def prior_cases():
    slow, others = pytest.mark.slow, [case for case in PRIORS if case not in (*QUICK, *OWN, *ALIKE)]
    yield from QUICK.items()
    yield from (pytest.param(case, FILES, marks=slow) for case in OWN)
    yield from (pytest.param(case, [FILES[i % 3]], marks=slow) for i, case in enumerate(others))


@pytest.mark.parametrize(("case", "formats"), [*prior_cases()])
def test_every_prior(case, formats, tmp_path):
    check_formats(make_with(case), tmp_path, formats)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "formats"), [(case, [("torch",), FILES[1:]][i % 2]) for i, case in enumerate(MODELS)])
def test_every_kind_of_model(case, formats, tmp_path):
    name, kind, options = MODELS[case]
    check_formats(make(name, kind, **options), tmp_path, formats)


# Without the one that a prior has by default, which the tests above export.
FORMS = [
    *(("gather", "bigbird"), ("gather", "sparsifiner+violin"), ("diagonal", "fibottention"), ("diagonal", PRIOR)),
    *(("reference", "bigbird"), ("reference", "sparsifiner"), ("sdpa", "fibottention")),
]


@pytest.mark.parametrize(
    ("backend", "prior"), [("gather", PRIOR), *(pytest.param(*form, marks=pytest.mark.slow) for form in FORMS)]
)
def test_every_form_of_attention(backend, prior, tmp_path):
    traced = check_formats(make("sparseprior_vit", prior=prior, **SHALLOW), tmp_path, FILES, backend)
    assert set(traced.attention) == {backend}


@pytest.mark.slow
def test_a_pruned_model_and_one_of_another_family(tmp_path):
    left = {"heads": [[1], [0, 1]], "head_width": [3, 4], "mlp_width": [5, 8]}
    model = make("sparseprior_vit", prior=PRIOR, compressed=left, **LARGER)
    (tmp_path / "pruned").mkdir()
    check_formats(model, tmp_path / "pruned", FILES)
    with registered_family() as family, registered_support() as support:
        SMALL[family.name] = {**family.config_class.presets["toy_tiny"]}
        try:
            (tmp_path / "toy").mkdir()
            check_formats(make(family.name, prior=support), tmp_path / "toy", ["onnx"])
        finally:
            del SMALL[family.name]


def test_outside_a_trace_nothing_is_plain(monkeypatch):
    model = make("sparseprior_vit", prior="window", **LARGER)
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", "reference")
    with plain_operations("sdpa", "reference") as found:  # a variable of the environment does not change a file
        model(images(model.config, 1))
    assert dict(found.ran) == {"sdpa": 2} and plain() is None


# ---- the command -------------------------------------------------------------------------------------------------


WINDOW = {"support": {"name": "window", "w": 1}, "decay": "manhattan"}  # whose graph is small
NAME = "window+manhattan"


@pytest.fixture
def timed(monkeypatch):
    """Few calls are timed."""
    monkeypatch.setattr(deployment, "MOST_CALLS", 3)


@pytest.fixture
def alone(timed, monkeypatch):
    """No dense model is exported next to one with a prior."""
    monkeypatch.setattr(Exportable, "dense_twin", lambda exported: None)


@pytest.fixture
def saved(tmp_path, timed):
    """Folder of a classifier."""
    model = make("sparseprior_vit", prior=WINDOW, image_mean=0.3, **SHALLOW)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def export(*arguments):
    return main(["export", *map(str, arguments)])


ALONE = """
import sys

import numpy as np

{prepared}
given, found = np.load("pixels.npz"), {{}}
assert np.array_equal(pixels, given["one"])
for batch in given:
    pixels = given[batch]
{snippets}
np.savez("found.npz", **found)
assert not any(name.partition(".")[0] == "hf_sparseprior" for name in sys.modules)
"""


def test_files_run_without_this_package_as_the_page_says(saved, tmp_path, capsys):
    """The page's own lines, in a process that cannot import it."""
    files = {"torch": ["model.pt2"], "onnx": ["model.onnx"], "openvino": ["model.bin", "model.xml"]}
    assert tuple(files) == FILES
    for name, own in files.items():
        out = tmp_path / f"for_{name}"
        assert export(saved, out, "--format", name, "--size", "24x16") == 0
        assert sorted(path.name for path in out.iterdir()) == [DEPLOYMENT, *own, "preprocessor_config.json"]
        printed = capsys.readouterr().out
        # PyTorch's file may be the same to the last bit, by processor.
        assert re.search(r"largest difference from the model: (\d\.\de-0\d|0\.0e\+00) \(batches of 1 and 3\)", printed)
        timed = re.findall(r"^  (.*?) +([\d.]+) ms$", printed, re.M)
        title = FORMATS[name].title
        assert [line for line, _ in timed] == [f"{title}, {NAME}", f"{title}, dense", f"PyTorch, {NAME}"]
        about = json.loads((out / DEPLOYMENT).read_text())
        assert about["input"] == {"name": "pixel_values", "shape": ["batch", 3, 24, 16], "dtype": "float32"}
        assert about["format"] == name and about["labels"] == ["LABEL_0", "LABEL_1", "LABEL_2"]
        assert about["compared"]["largest_difference"] <= 1e-4 and set(about["milliseconds"]) >= {"file", "dense"}
    Image.new("RGB", (50, 40), (10, 200, 30)).save(tmp_path / "cat.jpg")
    snippets = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    prepared, *snippets = [snippet for snippet in snippets if "hf_sparseprior" not in snippet]
    assert len(snippets) == 3
    script = "".join(
        f"{snippet}\nfound[f'{name} {{batch}}'] = logits\n" for name, snippet in zip(files, snippets, strict=True)
    )
    processor = AutoImageProcessor.from_pretrained(tmp_path / "for_onnx")
    assert processor.image_mean[0] == 0.3
    pixels = processor(Image.open(tmp_path / "cat.jpg"), return_tensors="np")["pixel_values"]
    batches = {"one": pixels.astype(np.float32)}
    batches["three"] = np.concatenate([batches["one"], -batches["one"], 2 * batches["one"]])
    np.savez(tmp_path / "pixels.npz", **batches)
    run_script(ALONE.format(prepared=prepared, snippets=textwrap.indent(script, "    ")), folder=tmp_path)
    found = np.load(tmp_path / "found.npz")
    model = FAMILIES["sparseprior_vit"].classifier.from_pretrained(saved).eval()
    for batch in batches:
        expected = written_out(model, torch.from_numpy(batches[batch]))  # of images of another size than the config's
        for name in files:
            same([found[f"{name} {batch}"]], expected)
    assert expected[0].shape == (3, 3) and np.abs(expected[0][0] - expected[0][1]).max() > 1e-3


@each("name", SMALL)
def test_every_family_at_another_size(name):
    model = make(name, prior="window+violin")
    side = model.config.image_size
    exported = Exportable(model, (2 * side, 3 * side))
    model.config.image_size = [2 * side, 3 * side]
    pixels = images(model.config, 2)
    with torch.no_grad():
        same([output.numpy() for output in exported(pixels)], written_out(model, pixels))
    assert exported.processor_settings()["size"] == {"height": 2 * side, "width": 3 * side}


@each("case", PRIORS)
def test_every_prior_at_another_size(case):
    """What is interpolated once is what the model interpolates in every call."""
    model = make_with(case)
    changed = Exportable(model, (24, 16)).model
    assert changed.config.image_size == [24, 16] and model.config.image_size == 16
    pixels = images(changed.config, 2)
    with torch.no_grad():
        torch.testing.assert_close(changed(pixels).logits, model(pixels).logits, atol=1e-5, rtol=1e-5)


def test_what_is_slower_is_said():
    def lines(**times):
        return deployment.advice(times, "OpenVINO", "gather")

    assert lines(file=1.0, default=1.0, dense=1.0, pytorch=1.0) == [] == lines(file=9.0, pytorch=1.0)
    assert lines(file=2.0, default=1.0, dense=3.0, pytorch=1.0) == [
        "--backend gather is slower in OpenVINO than the default, which gives the same outputs"
    ]
    assert lines(file=2.0, float32=1.0, dense=1.0, pytorch=1.0) == [
        "these weights are slower in OpenVINO than those of float32: leave --weights out"
    ]
    (line,) = lines(file=2.0, dense=1.5, pytorch=1.0)
    assert line.startswith("the prior is slower than dense attention in OpenVINO") and line.endswith("in PyTorch")
    (line,) = lines(file=2.0, dense=1.0, pytorch=1.5)
    assert line.endswith("faster: a model trained with prior dense")


def test_sparse_forms_are_timed_next_to_the_default(alone, saved, tmp_path, capsys):
    assert export(saved, tmp_path / "out", "--format", "torch", "--backend", "gather") == 0
    assert f"torch.export, {NAME}, without --backend" in capsys.readouterr().out
    about = json.loads((tmp_path / "out" / DEPLOYMENT).read_text())
    assert about["attention"] == {"gather": 1} and list(about["milliseconds"]) == ["file", "default", "pytorch"]


def test_a_dense_model_has_no_dense_twin(tmp_path, timed):
    make("sparseprior_vit", "base").save_pretrained(tmp_path / "model")
    assert export(tmp_path / "model", tmp_path / "out", "--format", "torch") == 0
    about = json.loads((tmp_path / "out" / DEPLOYMENT).read_text())
    assert list(about["milliseconds"]) == ["file", "pytorch"] and about["labels"] is None
    assert about["outputs"] == ["last_hidden_state", "pooler_output"] and about["attention"] == {"sdpa": 1}


# ---- weights of fewer bits, and accuracy --------------------------------------------------------------------------


NARROW = [(weights, name) for weights, names in runtimes.WEIGHTS.items() for name in names if name in FILES]


@pytest.mark.parametrize(("weights", "name"), NARROW)
def test_weights_of_fewer_bits(alone, tmp_path, capsys, weights, name):
    sizes = {"hidden_size": 384, "num_attention_heads": 3, "intermediate_size": 1536, **SHALLOW}
    torch.manual_seed(0)
    model = FAMILIES["sparseprior_vit"].classifier(small("sparseprior_vit", prior=WINDOW, **sizes)).eval()
    model.save_pretrained(tmp_path / "model")
    assert export(tmp_path / "model", tmp_path / "out", "--format", name, "--weights", weights) == 0
    printed, about = capsys.readouterr().out, json.loads((tmp_path / "out" / DEPLOYMENT).read_text())
    assert about["weights"] == weights and list(about["milliseconds"])[:2] == ["file", "float32"]
    assert f"{NAME}, weights of float32 " in printed and f"; with weights of {weights}: " in printed
    file = FORMATS[name].file
    pixels = torch.randn(3, 3, 16, 16)
    (narrow,) = FORMATS[name].load(tmp_path / "out" / file, 1)(pixels)
    (whole,) = written_out(model, pixels)
    assert narrow.dtype == np.float32 and 1e-5 < np.abs(whole - narrow).max() < 0.1 * np.abs(whole).max()
    written = sum(path.stat().st_size for path in (tmp_path / "out").glob("model.*"))
    share = {"int8": 0.35, "bfloat16": 0.6}[weights]  # of float32; the graph has its own
    assert written < share * 4 * model.num_parameters()
    if weights == "bfloat16":
        state = torch.export.load(tmp_path / "out" / file).state_dict
        kept = {key for key, value in state.items() if value.dtype == torch.float32}
        assert kept and all("decay_bias" in key for key in kept)  # beta would round to 1
    elif name == "torch":
        state = torch.export.load(tmp_path / "out" / file).state_dict
        assert sum(value.dtype == torch.int8 for value in state.values()) >= 6
    elif name == "openvino":
        model = openvino_core().read_model(tmp_path / "out" / file)
        kinds = [node.get_element_type().to_string() for node in model.get_ops() if node.get_type_name() == "Constant"]
        assert kinds.count("i8") >= 6
    else:
        products = [node.op_type for node in onnx.load(tmp_path / "out" / file).graph.node]
        assert products.count("MatMulInteger") >= 6  # linear layers of the block


OVERLAPPING = """
import faulthandler, gc, os, signal, sys
from pathlib import Path
import torch
from hf_sparseprior.cli.runtimes import FORMATS

faulthandler.enable()  # a stack of its own for handlers of signals, as pytest has
received = []
signal.signal(signal.SIGINT, lambda *given: received.append(1))
file = Path(sys.argv[1], FORMATS["openvino"].file)
first = FORMATS["openvino"].load(file, 1)
second = FORMATS["openvino"].load(file, 1)
del first
gc.collect()
second(torch.zeros(1, 3, 16, 16))
del second
gc.collect()
os.kill(os.getpid(), signal.SIGINT)
assert received == [1]
"""


def test_after_files_in_openvino_signals_still_arrive(saved, tmp_path):
    """Two cores of OpenVINO, of which the first goes first, leave the process a stack that is no more."""
    assert export(saved, tmp_path / "out", "--format", "openvino") == 0
    log = tmp_path / "log.txt"
    process = script(OVERLAPPING, str(tmp_path / "out"), folder=ROOT, log=log)
    assert process.wait(200) == 0, log.read_text()


@pytest.mark.parametrize(
    ("name", "prior"),
    [("torch", PRIOR), ("torch", "linformer"), ("openvino", "sparsifiner"), ("openvino", "linformer")],
)
def test_int8_weights_are_those_that_numpy_rounds(alone, tmp_path, name, prior):
    """The file gives what a model gives whose linear layers were rounded by hand, a scale for each output."""
    torch.manual_seed(0)
    model = FAMILIES["sparseprior_vit"].classifier(small("sparseprior_vit", prior=prior)).eval()
    model.save_pretrained(tmp_path / "model")
    assert export(tmp_path / "model", tmp_path / "out", "--format", name, "--weights", "int8") == 0
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            weight = module.weight.detach().double().numpy()
            step = np.abs(weight).max(1, keepdims=True) / 127
            module.weight.data = torch.from_numpy(np.round(weight / step) * step).float()
    pixels = torch.randn(3, 3, 8, 8)
    (found,) = FORMATS[name].load(tmp_path / "out" / FORMATS[name].file, 1)(pixels)
    (expected,) = written_out(model, pixels)
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=1e-4)


def test_weights_that_give_no_numbers_are_refused(saved, tmp_path, capsys, monkeypatch):
    measured = deployment.differences

    def differences(model, call, *batches):
        return measured(model, call, *batches) if batches else np.array([np.inf])

    monkeypatch.setattr(deployment, "differences", differences)
    assert export(saved, tmp_path / "out", "--format", "torch", "--weights", "bfloat16") == 2
    expected = f"--weights bfloat16: outputs of SparsePriorViT with prior {NAME!r} are no numbers then"
    assert expected in capsys.readouterr().err
    monkeypatch.setattr(deployment, "quantize_onnx", lambda source, folder: {}["no kind"])
    assert export(saved, tmp_path / "out", "--format", "onnx", "--weights", "int8") == 2
    assert "cannot be exported to ONNX Runtime: 'no kind'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def classified(model, folder, sizes):
    """An image of each size in the folder of the class that the model gives it, prepared by transformers."""
    processor = AutoImageProcessor.from_pretrained(folder)
    for number, size in enumerate(sizes):
        noise = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
        image = Image.fromarray(noise)
        with torch.no_grad():
            label = model(**processor(image, return_tensors="pt")).logits.argmax().item()
        yield image, label


def test_accuracy_on_labelled_images(alone, saved, tmp_path, capsys):
    model = FAMILIES["sparseprior_vit"].classifier.from_pretrained(saved).eval()
    labels = [model.config.id2label[index] for index in range(3)]
    for number, (image, label) in enumerate(classified(model, saved, [(16, 20), (40, 30), (16, 16), (9, 8)])):
        folder = tmp_path / "images" / labels[label if number else (label + 1) % 3]  # the first one is wrong
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{number}.png")
    (folder / ".hidden").write_text("no image")
    arguments = ["--format", "torch", "--images", tmp_path / "images"]
    assert export(saved, tmp_path / "out", *arguments) == 0
    about = json.loads((tmp_path / "out" / DEPLOYMENT).read_text())
    assert about["accuracy"] == {"file": 0.75, "pytorch": 0.75}
    expected = f"accuracy on 4 images: torch.export, {NAME} 75.00 %; PyTorch, {NAME} 75.00 %\n"
    assert expected in capsys.readouterr().out
    bad = tmp_path / "images" / "bad"
    for folder, file, message in (
        (bad, "1.png", "images/bad must be named as a class of the model: LABEL_0, LABEL_1, LABEL_2"),
        (tmp_path / "images" / "LABEL_0", "text.png", "text.png is not a readable image"),
    ):
        folder.mkdir(exist_ok=True)
        (folder / file).write_text("no image")
        assert export(saved, tmp_path / "again", *arguments) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "again").exists()
        (folder / file).unlink()
        bad.rmdir() if bad.exists() else None
    (tmp_path / "empty").mkdir()
    assert export(saved, tmp_path / "again", "--format", "torch", "--images", tmp_path / "empty") == 2
    assert "must have a folder of images for each class" in capsys.readouterr().err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of a classifier of digits that was trained, and of images that it did not see."""
    folder, digits = tmp_path_factory.mktemp("digits"), sklearn.datasets.load_digits()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    sizes |= {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    model = FAMILIES["sparseprior_vit"].classifier(small("sparseprior_vit", prior=PRIOR, **sizes))
    pixels = torch.from_numpy(digits.images).float().div(8).sub(1).unsqueeze(1)  # as the processor prepares them
    labels, optimizer = torch.from_numpy(digits.target), torch.optim.AdamW(model.train().parameters(), lr=2e-3)
    for step in range(450):
        batch = torch.randperm(1500, generator=torch.Generator().manual_seed(step))[:64]
        optimizer.zero_grad()
        model(pixels[batch], labels=labels[batch]).loss.backward()
        optimizer.step()
    model.save_pretrained(folder / "model")
    for number in range(1500, 1797):
        own = folder / "images" / f"LABEL_{labels[number]}"
        own.mkdir(parents=True, exist_ok=True)
        gray = (digits.images[number] * 255 / 16).round().astype(np.uint8)
        Image.fromarray(gray).save(own / f"{number}.png")
    return folder / "model", folder / "images"


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "name"), [("bfloat16", "torch"), ("int8", "onnx")])  # that round activations, too
def test_a_trained_model_stays_as_accurate(trained, tmp_path, alone, weights, name):
    model, labelled = trained
    arguments = ["--format", name, "--weights", weights, "--images", labelled]
    assert export(model, tmp_path / "out", *arguments) == 0
    found = json.loads((tmp_path / "out" / DEPLOYMENT).read_text())["accuracy"]
    assert found["pytorch"] > 0.8 and found["float32"] == found["pytorch"]
    assert abs(found["file"] - found["float32"]) <= 0.02


def test_images_are_for_classifiers_of_images(tmp_path, capsys):
    model = make("sparseprior_timesformer")  # of clips
    model.save_pretrained(tmp_path / "model")
    assert export(tmp_path / "model", tmp_path / "out", "--format", "torch", "--images", tmp_path) == 2
    assert f"not for a {type(model).__name__}" in capsys.readouterr().err and not (tmp_path / "out").exists()


# ---- what is refused ----------------------------------------------------------------------------------------------


@each(
    "arguments, message",
    [
        (["--size", "24x16"], "--size needs --format"),
        (["--backend", "gather"], "--backend needs --format"),
        (["--weights", "int8"], "--weights needs --format"),
        (["--images", "folder"], "--images needs --format"),
        (["--format", "onnx", "--weights", "bfloat16"], "--weights bfloat16 needs --format torch or aoti, not onnx"),
        (["--format", "torch", "--images", "nowhere"], "--images nowhere is no folder"),
        (["--format", "onnx", "--license", "mit"], "--license is for the model card"),
        (["--format", "torch", "--size", "0"], "--size 0 must be HEIGHTxWIDTH or one number, each from 1 to"),
        (["--format", "torch", "--size", "16x"], "--size 16x must be HEIGHTxWIDTH"),
        (["--format", "torch", "--size", "-16"], "--size -16 must be HEIGHTxWIDTH"),
        (["--format", "torch", "--size", "99999"], "--size 99999 must be HEIGHTxWIDTH"),
        (["--format", "torch", "--size", "18"], "image_size=18 must be a multiple of patch_size=4"),
    ],
)
def test_bad_options(saved, tmp_path, capsys, arguments, message):
    arguments = [f"--size={value}" if before == "--size" else value
                 for before, value in zip(["", *arguments], arguments, strict=False) if value != "--size"]  # fmt: skip
    assert export(saved, tmp_path / "out", *arguments) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_existing_folder_and_what_is_no_model(saved, tmp_path, capsys):
    assert export(tmp_path / "none", tmp_path / "out", "--format", "torch") == 2
    assert "none does not exist; give the folder of a saved model" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    assert export(saved, tmp_path / "out", "--format", "torch") == 2
    assert "out exists already" in capsys.readouterr().err and not list((tmp_path / "out").iterdir())


@each("name", ["onnx", "openvino"])
def test_a_missing_package_is_named(saved, tmp_path, capsys, monkeypatch, name):
    missing = FORMATS[name].packages[-1]
    monkeypatch.setattr(runtimes, "find_spec", lambda package: None if package == missing else "there")
    assert export(saved, tmp_path / "out", "--format", name) == 2
    err = capsys.readouterr().err
    assert f"{FORMATS[name].title} needs {missing}; install it with: pip install '.[export]'" in err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


class Undecided(Predictor):
    """How many keys are kept depends on the image, which a graph cannot say."""

    name = "undecided"

    @classmethod
    def cost_in_pairs(cls, settings, head_dim, num_tokens, num_prefix_tokens):
        return 1

    def forward(self, request):
        keys = 1 + int(request.q.abs().sum().item()) % 3
        return torch.arange(keys).expand(*request.q.shape[:2], request.plan.num_tokens, -1)


def test_models_that_cannot_be_traced_are_refused_by_name(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(PREDICTORS, "undecided", Undecided)
    make("sparseprior_vit", prior="undecided", **LARGER).save_pretrained(tmp_path / "model")
    assert export(tmp_path / "model", tmp_path / "out", "--format", "onnx") == 2
    err = capsys.readouterr().err
    assert "SparsePriorViT with prior 'undecided' cannot be traced: " in err and len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_a_program_cannot_express_is_refused_by_name(saved, tmp_path, capsys, monkeypatch):
    def refuse(program, outputs, folder):
        (folder / "half").write_text("written")
        raise RuntimeError("no operator\nof this kind")

    monkeypatch.setitem(FORMATS, "onnx", dataclasses.replace(FORMATS["onnx"], write=refuse))
    assert export(saved, tmp_path / "out", "--format", "onnx") == 2
    expected = f"SparsePriorViT with prior {NAME!r} cannot be exported to ONNX Runtime: no operator"
    assert expected in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


WRONG = {
    "far": lambda one: one + 2e-4 * max(1, np.abs(one).max()),
    "no number": lambda one: one * np.nan,
    "of one image": lambda one: one[:1],
}


def test_other_outputs_than_the_models_are_refused(saved, tmp_path, capsys, monkeypatch):
    exported = Exportable(FAMILIES["sparseprior_vit"].classifier.from_pretrained(saved).eval())
    for wrong in WRONG.values():
        with pytest.raises(ValueError, match="gives other outputs"), torch.no_grad():
            call = lambda pixels, wrong=wrong: [wrong(one.numpy()) for one in exported(pixels)]  # noqa: E731
            deployment.compare(exported, FORMATS["torch"], call)

    def loaded(file, threads):
        call = runtimes._load_torch(file, threads)
        return lambda pixels: [WRONG["far"](output) for output in call(pixels)]

    monkeypatch.setitem(FORMATS, "torch", dataclasses.replace(FORMATS["torch"], load=loaded))
    assert export(saved, tmp_path / "out", "--format", "torch") == 2
    assert f"SparsePriorViT with prior {NAME!r} as torch.export gives other outputs" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(("prior", "wrong", "allowed"), [("topk", 4, True), ("topk", 5, False), ("window", 1, False)])
def test_some_images_may_choose_other_keys(prior, wrong, allowed):
    """Rounding decides between close scores, as it does between kernels of PyTorch."""
    model, seen = make("sparseprior_vit", prior=prior, **SHALLOW), []

    def call(pixels):
        with torch.no_grad():
            logits = model(pixels).logits.numpy()
        off = np.array([len(seen) + place < wrong for place in range(len(logits))])
        seen.extend(off)
        return [logits + 0.01 * off[:, None]]

    if not allowed:
        with pytest.raises(ValueError, match=r"gives other outputs than the model, by 1\.0e-02"):
            deployment.compare(Exportable(model), FORMATS["onnx"], call)
        return
    about, line = deployment.compare(Exportable(model), FORMATS["onnx"], call)
    assert about["images_that_choose_otherwise"] == 4 and about["largest_difference"] < 1e-6
    assert "(batches of 1 and 8); 4 of 9 images choose other keys or tokens" in line and line.endswith(": 1.0e-02")


@each(
    "prior, reason",
    [
        ("dense", "the support is dense"),
        ("linformer", "none of them computes attention over pairs"),
        ("bigbird", "support 'bigbird' has pairs off its diagonals"),
        ("sparsifiner", "the support is dense"),
    ],
)
def test_a_form_that_runs_no_layer_is_refused(prior, reason):
    expected = f"--backend diagonal runs no layer of SparsePriorViT with prior {prior!r}: {reason}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        trace(Exportable(make("sparseprior_vit", prior=prior, **LARGER)), "diagonal")


# ---- the image processor --------------------------------------------------------------------------------------------


def test_the_processors_settings_are_the_saved_ones_with_the_files_size(alone, saved, tmp_path, capsys):
    file = saved / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    changed = {**settings, "resample": 2, "image_std": [0.1, 0.2, 0.4]}
    file.write_text(json.dumps(changed))
    assert export(saved, tmp_path / "out", "--format", "torch", "--size", "20") == 0
    written = json.loads((tmp_path / "out" / file.name).read_text())
    assert written == {**changed, "size": {"height": 20, "width": 20}}
    exported = Exportable(FAMILIES["sparseprior_vit"].classifier.from_pretrained(saved))
    assert json.loads(json.dumps(deployment.fitted_processor(None, exported))) == settings
    cropped = {**settings, "do_center_crop": True, "crop_size": {"height": 16, "width": 16}}
    assert deployment.fitted_processor(cropped, exported)["crop_size"] == {"height": 16, "width": 16}
    file.write_text(json.dumps(cropped))
    assert export(saved, tmp_path / "larger", "--format", "torch", "--size", "20") == 2
    assert "must be {'height': 20, 'width': 20}, the size of the exported images" in capsys.readouterr().err
    assert not (tmp_path / "larger").exists()


def test_a_block_of_plain_operations_holds_in_its_thread_alone():
    with ThreadPoolExecutor(1) as other, plain_operations("reference") as outer:
        with plain_operations("sdpa", "reference") as inner:
            assert plain() is inner and other.submit(plain).result() is None
        assert plain() is outer and other.submit(plain).result() is None
    assert plain() is None


class Code:
    """Unpickled, it makes a folder."""

    def __init__(self, place):
        self.place = str(place)

    def __reduce__(self):
        return os.mkdir, (self.place,)


@pytest.mark.parametrize("part", ["sample_inputs/model.pt", "weights/weight_0", "constants/opaque_obj_0"])
def test_no_code_of_a_file_for_torch_is_run(part, tmp_path):
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    torch.export.save(program, tmp_path / "whole.pt2")
    tensor = io.BytesIO()
    torch.save(Code(tmp_path / "ran"), tensor)
    code = pickle.dumps(Code(tmp_path / "ran")) if "opaque" in part else tensor.getvalue()
    with zipfile.ZipFile(tmp_path / "whole.pt2") as whole, zipfile.ZipFile(tmp_path / "model.pt2", "w") as changed:
        names = whole.namelist()
        for name in names:
            content = whole.read(name)
            if name.endswith(f"{part.partition('/')[0]}_config.json"):
                about = json.loads(content)
                entry = {
                    "path_name": part.rpartition("/")[2],
                    "is_param": True,
                    "use_pickle": True,
                    "tensor_meta": None,
                }
                about["config"][next(iter(about["config"]), "object")] = entry
                content = json.dumps(about).encode()
            if not name.endswith(f"/{part}"):
                changed.writestr(name, content)
        root = names[0].partition("/")[0]
        changed.writestr(f"{root}/data/{part}", code)
    with pytest.raises(Exception, match=r"Weights only load failed|it has a pickle, which can run code"):
        runtimes._load_torch(tmp_path / "model.pt2", 1)
    assert not (tmp_path / "ran").exists()
    with contextlib.suppress(Exception):
        torch.export.load(tmp_path / "model.pt2")
    assert (tmp_path / "ran").exists()  # the file would have run it
    assert len(runtimes._load_torch(tmp_path / "whole.pt2", 1)(torch.ones(1, 2))[0]) == 2
