"""Exported files that keep the compiled operators, in the programs that run them.

The oracle is the model itself in float64 with attention written out.
"""

import itertools
import json
import re
import shutil
import signal
import subprocess
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

from hf_sparseprior.cli import onnx_operators, runtimes
from hf_sparseprior.cli.deployment import DEPLOYMENT, trace
from hf_sparseprior.cli.exportable import Exportable
from hf_sparseprior.cli.runtimes import FORMATS
from hf_sparseprior.kernels import build, program_libraries
from tests.each import each
from tests.hf_sparseprior.cli.test_deployment import FILES, PRIORS, export, images, make, same, written_out
from tests.hf_sparseprior.kernels.test_build import runs
from tests.hf_sparseprior.small import SMALL
from tests.processes import ROOT, module, run_script, wait_until

onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[export]'")
onnxruntime = pytest.importorskip("onnxruntime")
openvino = pytest.importorskip("openvino")
pytestmark = pytest.mark.usefixtures("kernels")

BOTH = "fibottention+violin"
FILE_FORMATS = {name: FORMATS[name] for name in FILES}
# Priors whose attention the kernels compute, and the operators that are in a program then: each with every input that
# it may lack, and without.
OPERATORS = {
    "mask_fill zero": {"diagonal_output"},
    "along hilbert": {"diagonal_output", "pair_weights"},
    "violin": {"decayed_forward"},
    "bigbird": {"listed_forward"},
    "groups of heads": {"listed_forward"},
    "bigbird+violin": {"listed_forward", "listed_weights"},
    "predicted decay": {"listed_forward", "listed_weights", "predicted_coefficients", "predicted_keys"},
}
QUICK = ("along hilbert", "predicted decay", "groups of heads")


@pytest.fixture
def kernels(monkeypatch):
    """They run however few the tokens are."""
    program_libraries.torch_library()
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", "cpp")


def check(model, folder, formats=FILES):
    """Each format gives what the model gives, for one image and for three."""
    traced = trace(Exportable(model), kernels=True)
    for name in formats:
        (folder / name).mkdir()
        FORMATS[name].write(traced.program, traced.outputs, folder / name)
        call = FORMATS[name].load(folder / name / FORMATS[name].file, 1)
        for batch in (1, 3):
            pixels = images(model.config, batch)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SPARSEPRIOR_BACKEND", "reference")
                expected = written_out(model, pixels)
            same(call(pixels), expected)
    return traced


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in OPERATORS]
)
def test_every_operator(case, tmp_path):
    model = make("sparseprior_vit", prior=PRIORS.get(case, case), image_size=16)
    assert set(check(model, tmp_path).attention) == OPERATORS[case]
    # Weights of fixed pairs are in the file; the kernels computed them when it was written.
    kinds = {node.op_type for node in onnx.load(tmp_path / "onnx" / "model.onnx").graph.node}
    chosen = "predicted" in case
    assert "PairWeights" not in kinds and ("ListedWeights" in kinds) == chosen


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SMALL if name != "sparseprior_vit"])  # whose command is below
def test_every_family(name, tmp_path):
    model = make(name, prior=BOTH)
    if name == "sparseprior_swin":
        with pytest.raises(ValueError, match="a bias is added to the logits of all pairs"):
            trace(Exportable(model), kernels=True)
    elif name == "sparseprior_iformer":  # OpenVINO 2026.4 computes what follows attention wrong, and export refuses it
        assert check(model, tmp_path, ("torch", "onnx")).attention
    else:
        assert check(model, tmp_path, ("openvino",)).attention


@pytest.mark.parametrize("kind", ["maps", "clip"])
def test_backbones_and_clips(kind, tmp_path):
    if kind == "maps":
        model = make("sparseprior_vit", "backbone", prior=BOTH, image_size=16)
    else:
        options = {"prior": f"{BOTH}+clip", "attention_type": "joint_space_time", "image_size": 12, "num_frames": 3}
        model = make("sparseprior_timesformer", **options)
    assert check(model, tmp_path, ("onnx",)).attention


@pytest.mark.parametrize(
    ("shape", "varying", "bias", "kinds"),
    [
        ((5, 8), (0,), True, {"Gemm"}),
        ((2, 5, 8), (0,), False, {"Gemm", "Reshape"}),
        ((2, 3, 5, 8), (0,), True, {"Gemm", "Reshape"}),
        ((2, 5, 8), (0, 1), True, {"MatMul", "Add"}),
        ((2, 5, 8), (0, 1), False, {"MatMul"}),
    ],
)
def test_linear_layers_in_onnx(shape, varying, bias, kinds, tmp_path):
    layer, tokens = nn.Linear(8, 4, bias=bias).eval(), torch.randn(shape)
    sizes = {axis: torch.export.Dim(f"size{axis}", min=1) for axis in varying}
    program = torch.export.export(layer, (tokens,), dynamic_shapes=(sizes,))
    table = {torch.ops.aten.linear.default: onnx_operators.linear}
    torch.onnx.export(program, dynamo=True, verbose=False, custom_translation_table=table).save(tmp_path / "file.onnx")
    found = {node.op_type for node in onnx.load(tmp_path / "file.onnx").graph.node}
    assert found == kinds
    session = onnxruntime.InferenceSession(tmp_path / "file.onnx", providers=["CPUExecutionProvider"])
    for given in (tokens, tokens.repeat([2 if axis in varying else 1 for axis in range(tokens.dim())])):
        (made,) = session.run(None, {session.get_inputs()[0].name: given.numpy()})
        np.testing.assert_allclose(made, layer(given).detach().numpy(), atol=1e-6)


def test_int8_weights_leave_the_operators(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hf_sparseprior.cli.deployment.latencies", lambda *arguments: ({}, {}, []))
    make("sparseprior_vit", prior=BOTH, image_size=16).save_pretrained(tmp_path / "model")
    assert export(tmp_path / "model", tmp_path / "out", "--format", "onnx", "--kernels", "--weights", "int8") == 0
    kinds = {node.op_type for node in onnx.load(tmp_path / "out" / "model.onnx").graph.node}
    assert {"DiagonalAttention", "MatMulInteger"} <= kinds
    about = json.loads((tmp_path / "out" / DEPLOYMENT).read_text())
    assert about["compared"]["largest_difference"] < 1e-5 < about["compared"]["int8"] < 0.2


def test_half_precision_in_torch(tmp_path):
    model = make("sparseprior_vit", prior=BOTH, image_size=16)
    traced = trace(Exportable(model.to(torch.bfloat16)), kernels=True)
    FORMATS["torch"].write(traced.program, traced.outputs, tmp_path)
    found = FORMATS["torch"].load(tmp_path / "model.pt2", 1)(images(model.config, 3))
    expected = written_out(model, images(model.config, 3))
    assert 0 < np.abs(found[0] - expected[0]).max() < 0.05 * np.abs(expected[0]).max()


# ---- the command ----------------------------------------------------------------------------------------------------

ALONE = """
import sys
sys.modules["transformers"] = None
import numpy as np, torch
pixels = np.load("pixels.npy")
torch.ops.load_library({torch})
with torch.no_grad():
    found = [torch.export.load("torch/model.pt2").module()(torch.from_numpy(pixels))[0].numpy()]
import onnxruntime
options = onnxruntime.SessionOptions()
options.register_custom_ops_library({onnx})
found += onnxruntime.InferenceSession("onnx/model.onnx", options, providers=["CPUExecutionProvider"]).run(
    None, {{"pixel_values": pixels}})
import openvino
core = openvino.Core()
core.add_extension({openvino})
hint = {{"INFERENCE_PRECISION_HINT": "f32"}}
found.append(core.compile_model("openvino/model.xml", "CPU", hint)(pixels)[0])
np.save("found.npy", np.stack(found))
assert not any(name.partition(".")[0] == "hf_sparseprior" for name in sys.modules)
"""


def test_the_command_and_a_process_without_this_package(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hf_sparseprior.cli.deployment.MOST_CALLS", 3)
    model = make("sparseprior_vit", prior=BOTH, image_size=16)
    model.save_pretrained(tmp_path / "model")
    libraries = {name: format_.library() for name, format_ in FILE_FORMATS.items()}
    for name, format_ in FILE_FORMATS.items():
        out = tmp_path / name
        assert export(tmp_path / "model", out, "--format", name, "--kernels") == 0
        printed = capsys.readouterr().out
        timed = [f"{format_.title}, {BOTH}{more}" for more in ("", ", without --kernels")]
        timed += [f"{format_.title}, dense", f"PyTorch, {BOTH}"]
        assert [line for line, _ in re.findall(r"^  (.*?) +([\d.]+) ms$", printed, re.M)] == timed
        assert f"it needs the operators of {libraries[name]}" in printed
        about = json.loads((out / DEPLOYMENT).read_text())
        assert about["kernels"]["library"] == libraries[name].name and about["kernels"]["operators"] == 1
        assert re.fullmatch("[0-9a-f]{64}", about["kernels"]["sha256"])
        assert about["attention"] == {"pair_weights": 1, "diagonal_output": 1}
        assert about["compared"]["largest_difference"] < 1e-5 and "portable" in about["milliseconds"]
        for path in out.iterdir():  # no path of the machine that made it
            assert str(ROOT).encode() not in path.read_bytes(), path
    pixels = images(model.config, 2)
    np.save(tmp_path / "pixels.npy", pixels.numpy())
    script = ALONE.format(**{name: repr(str(path)) for name, path in libraries.items()})
    run_script(script, folder=tmp_path)
    for found in np.load(tmp_path / "found.npy"):
        same([found], written_out(model, pixels))
    with pytest.raises(Exception, match="DiagonalAttention"):  # ONNX Runtime's own sentence
        onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx", providers=["CPUExecutionProvider"])


@each(
    "options, message",
    [
        (["--kernels"], "--kernels needs --format"),
        (["--format", "onnx", "--kernels", "--backend", "gather"], "--kernels and --backend gather exclude each other"),
    ],
)
def test_options_that_mean_nothing_together(options, message, tmp_path, capsys):
    assert export(tmp_path / "model", tmp_path / "out", *options) == 2
    assert message in capsys.readouterr().err


def test_a_model_without_compiled_operators_is_named(monkeypatch):
    monkeypatch.delenv("SPARSEPRIOR_BACKEND")
    with pytest.raises(ValueError, match="--kernels: SparsePriorViT with prior 'dense' takes no compiled operator"):
        trace(Exportable(make("sparseprior_vit", prior="dense")), kernels=True)


def test_without_a_library_there_is_one_line(tmp_path, capsys, monkeypatch):
    make("sparseprior_vit", prior="window").save_pretrained(tmp_path / "model")
    monkeypatch.setenv("SPARSEPRIOR_KERNELS", "0")
    assert export(tmp_path / "model", tmp_path / "out", "--format", "onnx", "--kernels") == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert (
        "--kernels: no operators for ONNX Runtime: SPARSEPRIOR_KERNELS=0; a file without --kernels needs none" in said
    )
    assert not (tmp_path / "out").exists()


COMPILER = """#!/bin/sh
case "$*" in *--version*) echo endless; exit 0;; esac
echo half > "$TMPDIR/$$.s"
sleep 1000 & echo "$$ $!" >> {pids}
wait
"""


@pytest.mark.parametrize(("number", "said"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")])
def test_a_command_that_is_ended_while_kernels_compile_leaves_nothing(number, said, tmp_path):
    make("sparseprior_vit", prior=BOTH, image_size=16).save_pretrained(tmp_path / "model")
    for name in ("compiler", "pids", "tmp"):
        (tmp_path / name).mkdir()
    compiler, pids, log = tmp_path / "compiler" / "g++", tmp_path / "pids" / "list", tmp_path / "pids" / "log"
    compiler.write_text(COMPILER.format(pids=pids))
    compiler.chmod(0o755)
    for file in (pids, log):
        file.touch()
    environment = {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp")}
    arguments = ("export", "model", "out", "--format", "torch", "--kernels")
    process = module("hf_sparseprior", *arguments, folder=tmp_path, log=log, environment=environment)
    try:
        wait_until(lambda: len(pids.read_text().splitlines()) == len(build.TORCH.sources), process)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    finally:
        process.kill()
    assert log.read_text().splitlines()[-1].endswith(f" export: {said}; nothing was written")
    started = [int(pid) for pid in pids.read_text().split()]
    wait_until(lambda: not any(runs(pid) for pid in started), seconds=60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "compiler", "model", "pids", "tmp"]
    (left,) = (path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert left.suffix == ".lock" and not list((tmp_path / "tmp").rglob("*.s"))


# ---- frozen operators -----------------------------------------------------------------------------------------------

# As files have them. A change of one is an operator of another name.
FROZEN = {
    "DiagonalAttention": (
        "q k v offsets:int32 counts:int32 pair_weights? pair_begin?:int32 prefix_weight? self_weight?",
        "prefix scale:float zero_fill",
    ),
    "DecayedAttention": ("q k v positions log_gamma alpha prefix_gamma", "prefix scale:float"),
    "ListedAttention": ("q k v keys:int32 factor? prefix_factor?", "prefix scale:float"),
    "PairWeights": ("positions offsets:int32 counts:int32 pair_begin:int32 log_gamma alpha", "pairs"),
    "ListedWeights": ("positions keys:int32 log_gamma alpha prefix_gamma", "prefix"),
    "PredictedCoefficients": ("q k down", "prefix scale:float"),
    "PredictedKeys": ("coefficients basis", "prefix budget threshold:float"),
}


def test_operators_of_files_stay_as_they_are():
    found = {}
    for name, (title, _) in onnx_operators.OPERATORS.items():
        schema = onnx_operators._operator(name).op_schema
        assert (schema.domain, schema.since_version) == ("hf_sparseprior", 1) and len(schema.outputs) == 1
        inputs = [
            part.name + "?" * (part.option == part.option.Optional) + ":int32" * ("int32" in part.type_str)
            for part in schema.inputs
        ]
        attributes = [
            key + ":float" * (value.type == value.type.FLOAT) for key, value in sorted(schema.attributes.items())
        ]
        found[title] = " ".join(inputs), attributes
    assert {title: (inputs, sorted(attributes.split())) for title, (inputs, attributes) in FROZEN.items()} == found


def test_files_of_the_first_version_still_run(tmp_path):
    with zipfile.ZipFile(ROOT / "tests" / "fixtures" / "exported.zip") as archive:
        archive.extractall(tmp_path)
    priors = sorted(tmp_path.iterdir())
    assert len(priors) == 3
    for folder in priors:
        about = json.loads((folder / "expected.json").read_text())
        pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        for name, format_ in FILE_FORMATS.items():
            made, own = about["versions"]["torch"], torch.__version__
            if name == "torch" and tuple(map(int, own.split(".")[:2])) < tuple(map(int, made.split(".")[:2])):
                continue  # torch reads files of older versions
            found = format_.load(folder / name / format_.file, 1)(pixels)
            np.testing.assert_allclose(found[0], about["logits"], atol=1e-5)


# ---- in ONNX Runtime ------------------------------------------------------------------------------------------------


def one_operator(tokens, threads=None, offsets=(-3, 3)):
    """A session of DiagonalAttention alone, of 2 heads of 16 with the same offsets, and q, k, v."""
    names = ("q", "k", "v")
    node = onnx.helper.make_node(
        "DiagonalAttention", [*names, "offsets", "counts"], ["out"], domain="hf_sparseprior", prefix=1, zero_fill=0,
        scale=0.25,
    )  # fmt: skip
    shape, kind = (1, tokens, 2, 16), onnx.TensorProto.FLOAT
    constants = {"offsets": 2 * list(offsets), "counts": [len(offsets)] * 2}
    graph = onnx.helper.make_graph(
        [node], "one", [onnx.helper.make_tensor_value_info(name, kind, shape) for name in names],
        [onnx.helper.make_tensor_value_info("out", kind, shape)],
        [onnx.numpy_helper.from_array(np.array(value, np.int32), name) for name, value in constants.items()],
    )  # fmt: skip
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("hf_sparseprior", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    if threads is not None:
        options.add_session_config_entry("hf_sparseprior.threads", threads)
    options.register_custom_ops_library(str(program_libraries.onnx_library()))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    return session, {name: random.standard_normal(shape, dtype=np.float32) for name in names}


def written(inputs, offsets=(-3, 3)):
    """The same in float64 over all pairs."""
    q, k, v = (inputs[name][0].astype(np.float64).transpose(1, 0, 2) for name in "qkv")
    tokens = np.arange(q.shape[1])
    seen = np.isin(tokens[None] - tokens[:, None], (0, *offsets)) | (tokens[:, None] == 0) | (tokens[None] == 0)
    seen &= (tokens[None] != tokens[:, None]) | (tokens[:, None] == 0)  # without offset 0 a patch does not see itself
    logits = np.where(seen, 0.25 * q @ k.transpose(0, 2, 1), -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ v).transpose(1, 0, 2)[None]


@each("threads", [None, "1", "3"])
def test_threads_change_nothing(threads):
    session, inputs = one_operator(300, threads)
    np.testing.assert_allclose(session.run(None, inputs)[0], written(inputs), atol=1e-5)


@each("threads", ["0", "many", "1e3", "99999999999999999999999999999999999"])
def test_a_number_of_threads_that_is_none(threads):
    with pytest.raises(Exception, match=r"hf_sparseprior\.threads|config entry"):
        one_operator(10, threads)


def test_outputs_may_lie_anywhere():
    """Large outputs are written past the caches, which takes aligned addresses."""
    session, inputs = one_operator(17000)
    expected = session.run(None, inputs)[0]
    assert expected.nbytes > 2 << 20
    for shift in (0, 1, 4):
        room = np.zeros(expected.size + 32, np.float32)
        begin = (-room.ctypes.data // 4) % 16 + shift  # from a multiple of 64 bytes
        own = room[begin : begin + expected.size].reshape(expected.shape)
        assert own.ctypes.data % 64 == 4 * shift
        binding = session.io_binding()
        for name, value in inputs.items():
            binding.bind_cpu_input(name, value)
        binding.bind_output("out", "cpu", 0, np.float32, own.shape, own.ctypes.data)
        session.run_with_iobinding(binding)
        assert np.array_equal(own, expected) and not room[begin + expected.size :].any()


def test_bad_shapes_are_named():
    session, inputs = one_operator(10)
    wrong = {**inputs, "k": inputs["k"][:, :9]}
    with pytest.raises(Exception, match=r"DiagonalAttention|Got invalid dimensions"):
        session.run(None, wrong)


HEADER = """
struct OrtApi {{
{members}
}};
struct OrtCustomOp {{ void* others[19]; void* InferOutputShapeFn; }};
"""


def test_places_are_compared_with_a_header(tmp_path):
    """Of the C interface, whose own header is in no wheel: one made of the same places passes, another does not."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    source = build.FOLDER / "onnxruntime_cpu.cpp"
    places = {int(place): name for name, place in re.findall(r"PLACE\((\w+), (\d+)\)", source.read_text())}
    assert len(places) == 19
    for shift in (0, 1):
        members = [
            f"  void* {places.get(i - shift, f'other{i}')};"
            for i in itertools.takewhile(lambda i: i < 280, itertools.count())
        ]
        (tmp_path / "header.h").write_text(HEADER.format(members="\n".join(members)))
        words = [
            compiler,
            "-std=c++20",
            "-fsyntax-only",
            f'-DSPARSEPRIOR_ONNXRUNTIME_HEADER="{tmp_path}/header.h"',
            str(source),
        ]
        done = subprocess.run(words, capture_output=True, text=True)
        assert (done.returncode == 0) == (shift == 0), done.stderr
        assert ("has another place in OrtApi" in done.stderr) == (shift == 1)


def test_openvinos_core_is_one(tmp_path):
    """Files with and without our operators load in the same core."""
    assert runtimes._core_with_operators() is runtimes.openvino_core()
