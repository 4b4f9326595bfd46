"""Formats of exported models, and the programs that run them: torch.export, ONNX Runtime, OpenVINO, AOTInductor."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_sparseprior.base.variables import variables_set
from hf_sparseprior.cli import onnx_operators, packages
from hf_sparseprior.kernels import diagonal_cpu
from hf_sparseprior.kernels.program_libraries import (
    onnx_library,
    onnx_session_options,
    openvino_extension,
    torch_library,
)

INPUT = "pixel_values"
TENSORS_ALONE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # of torch.load, whatever it is asked for
# A loaded file: images (B, ...) to the outputs in the order in which they were named.
Call = Callable[[Tensor], list[np.ndarray]]


@dataclass(frozen=True)
class Format:
    """A format.

    title: of the program that runs it. file: the model's. packages: that must be installed, all of the extra `export`.
    write: writes a traced model, whose outputs have these names, into a folder. load: reads the file, for so many
    threads. library: what a file with our operators needs, compiled if need be.
    """

    title: str
    file: str
    packages: tuple[str, ...]
    write: Callable[[torch.export.ExportedProgram, Sequence[str], Path], None]
    load: Callable[[Path, int], Call]
    library: Callable[[], Path]

    def check_packages(self) -> None:
        """Raise ImportError, which names it, if a package is missing."""
        if missing := [name for name in self.packages if find_spec(name) is None]:
            raise ImportError(f"{self.title} needs {', '.join(missing)}", name=missing[0])

    @property
    def versions(self) -> dict[str, str]:
        """Versions of torch and of the packages."""
        return {name: version(name) for name in ("torch", *self.packages)}


def _write_torch(program: torch.export.ExportedProgram, outputs: Sequence[str], folder: Path) -> None:
    for part in _graph_modules(program.graph_module):
        part.graph.eliminate_dead_code()  # torch cannot read unused parts of nothing, as of one curve's rest
        for node in part.graph.nodes:
            node.meta.pop("stack_trace", None)  # with the paths of this machine
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about weights that lie on other devices
        torch.export.save(program, folder / FORMATS["torch"].file)


@contextlib.contextmanager
def _without_pickles() -> Iterator[None]:
    """`torch.export.load` reads tensors alone in the block, and fails where a file has a pickle that could run code.

    It reads example inputs, and weights and constants that say so, with `weights_only=False`, and objects by pickle.
    """
    thread, loads, log = threading.get_ident(), pickle.loads, logging.getLogger("torch.export")

    def refused(*data: Any, **options: Any) -> Any:
        if threading.get_ident() == thread:
            raise pickle.UnpicklingError("it has a pickle, which can run code")
        return loads(*data, **options)

    level = log.level
    log.setLevel(logging.ERROR)  # it warns of a damaged file before it fails
    try:
        with mock.patch.object(pickle, "loads", refused), variables_set({TENSORS_ALONE: "1"}):
            yield
    finally:
        log.setLevel(level)


def _load_torch(file: Path, threads: int) -> Call:
    with _without_pickles():
        program = torch.export.load(file)
    module = program.module()

    def call(images: Tensor) -> list[np.ndarray]:
        with torch.no_grad():
            return [output.numpy() for output in module(images)]

    return call


def _sorted(values: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """A stable sort as the one that ONNX has, which is stable, too."""
    return torch.ops.aten.sort.default(values, dim, descending)


def _graph_modules(module: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    """A graph's module, and the parts of it that record no gradients."""
    return [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]


def _write_onnx(
    program: torch.export.ExportedProgram, outputs: Sequence[str], folder: Path, runtime: bool = True
) -> None:
    """Write an ONNX file, as ONNX Runtime is fastest with it unless `runtime` is False."""
    import onnx

    # Their warnings are of missing torchvision, which nothing needs, and of nodes that are not constant.
    logs = {log: log.level for log in map(logging.getLogger, ("torch.onnx", "onnxscript"))}
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about itself
            nodes = [node for part in _graph_modules(program.graph_module) for node in part.graph.nodes]
            if any(node.target is torch.ops.aten.sort.stable for node in nodes):
                program = program.run_decompositions({torch.ops.aten.sort.stable: _sorted})
            table = onnx_operators.translations() if diagonal_cpu.ready() is None else {}
            if runtime:
                table[torch.ops.aten.linear.default] = onnx_operators.linear
            made = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                input_names=[INPUT],
                output_names=outputs,
                custom_translation_table=table,
            )
    finally:
        for log, level in logs.items():
            log.setLevel(level)
    assert made is not None
    file = folder / FORMATS["onnx"].file
    made.save(file)
    model = onnx.load(file, load_external_data=False)
    onnx_operators.forget_sources(model)
    if runtime and not any(tensor.external_data for tensor in model.graph.initializer):
        onnx_operators.fold(model)
    onnx.save(model, file)


def _load_onnx(file: Path, threads: int) -> Call:
    import onnxruntime

    options = onnx_session_options(threads) if onnx_operators.has_operators(file) else onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3  # it warns of weights that it folds
    # Its threads would busy-wait after a call, on the cores of what is timed next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {INPUT: images.numpy()})


@cache
def _core_with_operators() -> Any:
    """The same core, which knows our operators."""
    core = openvino_core()
    core.add_extension(str(openvino_extension()))
    return core


def _core_for(file: Path) -> Any:
    return _core_with_operators() if onnx_operators.has_operators(file) else openvino_core()


@cache
def openvino_core() -> Any:
    """The process's one `openvino.Core`.

    On Linux a core that compiles sets a stack for signal handlers. Of two, the one that is freed last puts back the
    stack of the one that is gone, and the next signal, such as Ctrl-C, ends the process.
    """
    import openvino

    return openvino.Core()


def onnx_to_openvino(source: Path, folder: Path) -> None:
    """Write the ONNX file of a folder into another as OpenVINO's two, model.xml and the weights next to it."""
    import openvino

    file = source / FORMATS["onnx"].file
    model = _core_for(file).read_model(file)
    openvino.save_model(model, folder / FORMATS["openvino"].file, compress_to_fp16=False)


def _write_openvino(program: torch.export.ExportedProgram, outputs: Sequence[str], folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        _write_onnx(program, outputs, Path(scratch), runtime=False)
        onnx_to_openvino(Path(scratch), folder)


def _load_openvino(file: Path, threads: int) -> Call:
    # Where a processor has products of bfloat16 OpenVINO would take them unasked.
    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    core = _core_for(file)
    request = core.compile_model(core.read_model(file), "CPU", options).create_infer_request()

    def call(images: Tensor) -> list[np.ndarray]:
        request.infer([images.numpy()])
        return [np.array(output.data) for output in request.output_tensors]

    return call


ONNX = ("onnx", "onnxscript")
FORMATS = {
    "torch": Format("torch.export", "model.pt2", (), _write_torch, _load_torch, torch_library),
    "onnx": Format("ONNX Runtime", "model.onnx", (*ONNX, "onnxruntime"), _write_onnx, _load_onnx, onnx_library),
    "openvino": Format(
        "OpenVINO", "model.xml", (*ONNX, "openvino"), _write_openvino, _load_openvino, openvino_extension
    ),
    "aoti": Format("AOTInductor", packages.FILE, (), packages.write_package, packages.load_package, torch_library),
}

# Weights of fewer bits, and the formats that have them. ONNX Runtime has no bfloat16 on CPUs, and OpenVINO computes in
# bfloat16 by an option at run time. AOTInductor works weights out while it compiles, so int8 would save nothing.
WEIGHTS = {"bfloat16": ("torch", "aoti"), "int8": ("torch", "onnx", "openvino")}


def check_weights(weights: str | None, format_name: str) -> None:
    """Raise ValueError unless weights of this kind can be written in a format; None is float32."""
    if weights is not None and format_name not in WEIGHTS[weights]:
        raise ValueError(f"--weights {weights} needs --format {' or '.join(WEIGHTS[weights])}, not {format_name}")


# ---- weights in int8 ------------------------------------------------------------------------------------------------


def rounded(weight: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """A matrix in int8, and float32 factors that bring it back, one for each place of the other axis than `axis`.

    Returns:
        int8 from -127 to 127 of the same shape, and factors with 1 in place of `axis`.
    """
    scale = np.abs(weight).max(axis, keepdims=True) / 127
    scale = np.where(scale > 0, scale, 1).astype(np.float32)
    return np.rint(weight / scale).astype(np.int8), scale


class Int8Linear(nn.Module):
    """A linear layer whose weight is in int8, with a float32 factor for each output. It computes as its input does."""

    weight: Tensor
    scale: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight, scale = rounded(layer.weight.detach().float().numpy(), 1)
        self.register_buffer("weight", torch.from_numpy(weight))
        self.register_buffer("scale", torch.from_numpy(scale))
        self.bias = layer.bias

    def forward(self, tokens: Tensor) -> Tensor:
        """Turn (..., in) into (..., out)."""
        return F.linear(tokens, self.weight.to(tokens.dtype) * self.scale, self.bias)


def with_int8_layers(model: Any) -> Any:
    """A copy of a model whose linear layers are `Int8Linear`."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            model.set_submodule(name, Int8Linear(module))
    return model


def quantize_openvino(source: Path, folder: Path) -> None:
    """Write OpenVINO's model of a folder into another with the weights of matrix products in int8, as `rounded`.

    Raises:
        ValueError: if no product has weights.
    """
    import openvino
    import openvino.opset13 as ops

    file, count = FORMATS["openvino"].file, 0
    model = _core_for(source / file).read_model(source / file)
    for node in model.get_ordered_ops():
        if node.get_type_name() != "MatMul":
            continue
        constant = node.input_value(1).get_node()
        if constant.get_type_name() != "Constant" or len(constant.data.shape) != 2:
            continue
        # Inputs lie along the last axis of a weight that is transposed, along the first of one that is not.
        weight, scale = rounded(constant.data, 1 if node.get_attributes()["transpose_b"] else 0)
        back = ops.multiply(ops.convert(ops.constant(weight), "f32"), ops.constant(scale))
        node.input(1).replace_source_output(back.output(0))
        count += 1
    if not count:
        raise ValueError("--weights int8: the model has no matrix product with weights")
    openvino.save_model(model, folder / file, compress_to_fp16=False)


def quantize_onnx(source: Path, folder: Path) -> None:
    """Write the ONNX file of a folder into another with the weights of matrix products in int8.

    Each column has a scale of its own. What they multiply is rounded to uint8 in every call, with one scale for all.
    Sums are in int32, and the rest stays in float32.

    Raises:
        ValueError: if no product has weights.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.quant_utils import add_pre_process_metadata

    file = FORMATS["onnx"].file
    model = onnx.load(source / file)
    add_pre_process_metadata(model)  # otherwise it advises to simplify the graph, as torch has done
    quantize_dynamic(
        model, folder / file, op_types_to_quantize=["MatMul"], per_channel=True, weight_type=QuantType.QInt8
    )
    if not any(node.op_type == "MatMulInteger" for node in onnx.load(folder / file).graph.node):
        raise ValueError("--weights int8: the model has no matrix product with weights")
