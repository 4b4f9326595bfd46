"""The compiled operators of torch as those of ONNX files, which kernels/program_operators.h lists.

Both have their inputs and numbers by the same names in the same order. Queries, keys, values and outputs of attention
are (batch, tokens, heads, head width) in a file, as projections write them: a transposition before and after, which the
exporter's optimizer takes out together with the model's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hf_sparseprior.kernels.program_libraries import onnx_session_options, torch_library

DOMAIN, VERSION = "hf_sparseprior", 1
# Operators of torch, and whether they give attention's output.
OPERATORS = {
    "diagonal_output": ("DiagonalAttention", True),
    "decayed_forward": ("DecayedAttention", True),
    "listed_forward": ("ListedAttention", True),
    "pair_weights": ("PairWeights", False),
    "listed_weights": ("ListedWeights", False),
    "predicted_coefficients": ("PredictedCoefficients", False),
    "predicted_keys": ("PredictedKeys", False),
}
HEADS = ("q", "k", "v")  # inputs by head
TRAINING = ("drop",)  # inputs that no file has
WHOLE = ("offsets", "counts", "keys", "pair_begin")  # inputs of int32; the others are of float


def operator(name: str) -> Any:
    """An operator of torch.

    Raises:
        RuntimeError: as `torch_library`.
    """
    torch_library()
    return getattr(torch.ops.hf_sparseprior, name).default


def counted(program: torch.export.ExportedProgram) -> Counter[str]:
    """How many calls of the compiled operators a program has, by their names in torch."""
    known = {operator(name): name for name in OPERATORS}
    modules = [part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    targets = (node.target for part in modules for node in part.graph.nodes if node.op == "call_function")
    return Counter(known[target] for target in targets if target in known)


def translations() -> dict[Callable, Callable]:
    """What `torch.onnx.export` takes as `custom_translation_table`."""
    return {operator(name): _translation(name) for name in OPERATORS}


def linear(tokens: Any, weight: Any, bias: Any = None) -> Any:
    """A linear layer as one `Gemm` of flattened tokens, for `torch.onnx.export`.

    ONNX Runtime adds the bias within it. Its MatMul of three axes leaves that to a pass of its own over the output,
    and the activation after it runs slower.
    """
    from onnxscript import opset18 as op

    *places, width = tokens.shape
    if not all(isinstance(size, int) for size in (*places[1:], width)):
        made = op.MatMul(tokens, op.Transpose(weight, perm=[1, 0]))
        return made if bias is None else op.Add(made, bias)
    if len(places) == 1:
        return op.Gemm(tokens, weight, bias, transB=1)
    made = op.Gemm(op.Reshape(tokens, op.Constant(value_ints=[-1, width])), weight, bias, transB=1)
    return op.Reshape(made, op.Constant(value_ints=[-1, *places[1:], int(weight.shape[0])]))


@cache
def _translation(name: str) -> Callable:
    from onnxscript import opset18 as op

    title, gives_heads = OPERATORS[name]
    arguments, made = operator(name)._schema.arguments, _operator(name)
    places = {argument.name: place for place, argument in enumerate(arguments)}

    def translate(*given: Any, **named: Any) -> Any:
        values: dict[str, Any] = dict(zip(places, given, strict=False)) | named
        tensors, numbers = [], {}
        for argument in arguments:
            value: Any = values.get(argument.name)
            if argument.name in TRAINING:
                if value is not None:
                    raise ValueError(f"{title} is for evaluation, and has no {argument.name}")
            elif _is_tensor(argument):
                if argument.name in HEADS:
                    value = op.Transpose(value, perm=[0, 2, 1, 3])
                elif argument.name == "pair_begin" and value is not None:  # int64, which OpenVINO's CPU does not have
                    value = op.Cast(value, to=6)
                tensors.append(value)
            else:
                numbers[argument.name] = float(value) if str(argument.type) == "float" else int(value)
        while tensors[-1] is None:  # what is left out is last
            tensors.pop()
        result = made(*tensors, **numbers)
        return op.Transpose(result, perm=[0, 2, 1, 3]) if gives_heads else result

    return translate


def _is_tensor(argument: Any) -> bool:
    return "Tensor" in str(argument.type)


def _operator(name: str) -> Any:
    """The operator with its schema, for onnxscript."""
    from onnx.defs import OpSchema
    from onnxscript import values

    title, _ = OPERATORS[name]
    inputs, attributes = [], []
    for argument in operator(name)._schema.arguments:
        if argument.name in TRAINING:
            continue
        if _is_tensor(argument):
            option = OpSchema.FormalParameterOption
            kind = option.Optional if "Optional" in str(argument.type) else option.Single
            tensor = "tensor(int32)" if argument.name in WHOLE else "tensor(float)"
            inputs.append(OpSchema.FormalParameter(argument.name, tensor, param_option=kind))
        else:
            kind = OpSchema.AttrType.FLOAT if str(argument.type) == "float" else OpSchema.AttrType.INT
            attributes.append(OpSchema.Attribute(argument.name, kind))
    given = "tensor(int32)" if name == "predicted_keys" else "tensor(float)"
    outputs = [OpSchema.FormalParameter("out", given)]
    schema = OpSchema(title, DOMAIN, VERSION, inputs=inputs, outputs=outputs, attributes=attributes)
    return values.Op(values.Opset(DOMAIN, VERSION), title, schema)


# ---- files ----------------------------------------------------------------------------------------------------------


def has_operators(file: Path) -> bool:
    """Whether an .onnx file, or the .xml file of OpenVINO, has our operators."""
    text = file.read_bytes()  # of names; the weights of OpenVINO's models lie in another file
    return any(title.encode() in text for title, _ in OPERATORS.values())


def forget_sources(model: Any) -> None:
    """Leave out of an ONNX model where in which file of this machine its nodes were made."""
    graphs = [model.graph, *model.functions]
    for graph in graphs:
        del graph.metadata_props[:]
        for part in (*graph.node, *graph.value_info):
            del part.metadata_props[:]
            part.doc_string = ""


def fold(model: Any) -> None:
    """Replace our operators whose inputs follow from weights alone, as with pairs at fixed offsets, by their outputs.

    ONNX Runtime does so with operators of its own when a file is loaded, and with no others.
    """
    import onnx
    import onnxruntime

    graph, titles = model.graph, [title for title, _ in OPERATORS.values()]
    makers = {name: node for node in graph.node for name in node.output}
    constants = {tensor.name for tensor in graph.initializer}
    for node in graph.node:  # in the order in which they run
        if all(name in constants or not name for name in node.input):
            constants.update(node.output)
    wanted = [node for node in graph.node if node.domain == DOMAIN and node.op_type in titles]
    wanted = [node for node in wanted if node.output[0] in constants]
    if not wanted:
        return
    needed: dict[int, Any] = {}

    def need(name: str) -> None:
        if (node := makers.get(name)) is not None and id(node) not in needed:
            for own in node.input:
                need(own)
            needed[id(node)] = node

    names = [node.output[0] for node in wanted]
    for name in names:
        need(name)
    used = {name for node in needed.values() for name in node.input}
    part = onnx.ModelProto()
    part.CopyFrom(model)
    for name in ("node", "input", "output", "value_info", "initializer"):
        part.graph.ClearField(name)
    part.graph.node.extend(needed.values())
    part.graph.initializer.extend(tensor for tensor in graph.initializer if tensor.name in used)
    part.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    session = onnxruntime.InferenceSession(
        part.SerializeToString(), onnx_session_options(1), providers=["CPUExecutionProvider"]
    )
    for name, value in zip(names, session.run(names, {}), strict=True):
        graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    for node in wanted:
        graph.node.remove(node)
    _drop_unused(graph)


def _drop_unused(graph: Any) -> None:
    """Remove nodes and weights that no output needs."""
    used = {output.name for output in graph.output}
    for node in reversed(list(graph.node)):
        if used.isdisjoint(node.output):
            graph.node.remove(node)
        else:
            used.update(node.input)
            used.update(name for attribute in node.attribute for inner in attribute.g.node for name in inner.input)
    for parts in (graph.initializer, graph.value_info):
        kept = [part for part in parts if part.name in used]
        del parts[:]
        parts.extend(kept)
