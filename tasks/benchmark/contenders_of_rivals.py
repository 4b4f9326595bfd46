"""What a user would pick: dense attention in several programs, token merging, windows, Fibottention (rivals.py).

All have the same random weights, and encode the same image into tokens after the last norm.
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_sparseprior.base.families import preset_family
from hf_sparseprior.cli.runtimes import openvino_core
from hf_sparseprior.patterns.supports import head_offsets, pruning_ratio
from tasks.benchmark.commands import DENSE
from tasks.benchmark.model_contenders import preset_config
from tasks.benchmark.plain_attention import plain_attention
from tasks.benchmark.timing import Call, SetUp
from tasks.benchmark.token_merging import PlainMerging

FIBOTTENTION = "fibottention"
INSTALL = "make benchmark"
# Standard deviation of q, k and v. With weights as they are drawn for training, logits and what attention adds to the
# tokens are nearly 0, and a wrong pattern would not show.
SPREAD = 1.5
BFLOAT16 = "bfloat16"
# Largest difference of tokens, which have variance 1, from the plain form in float32. Dense attention and a sparse
# pattern differ by 4.6 to 5.9 in ViT-S; bfloat16 differs by up to 0.4 where it is right.
TOLERANCES = {"float32": 1e-3, BFLOAT16: 1.0}
# Merging is judged by the class token: where two edges are equally good another one may be taken, and later tokens have
# other places; from 1024 px on that happens, and moves it by 0.001. What is merged moves it little, too: by 0.1 to 0.3
# with 90 % of the tokens, 0.4 to 0.5 with 50 %.
MERGING_TOLERANCES = {"float32": 0.02, BFLOAT16: 0.25}


@dataclass(frozen=True)
class Problem:
    """What is computed: a model of ViT's family and the side of its image, in a dtype, with so many CPU threads."""

    model: str
    pixels: int
    dtype: str
    threads: int

    @cached_property
    def image(self) -> Tensor:
        """(1, 3, pixels, pixels), float32."""
        return torch.randn(1, 3, self.pixels, self.pixels, generator=torch.Generator().manual_seed(0))

    def encoder(self, prior: Any) -> Any:
        """The bare transformer in float32, the same weights for every prior."""
        config = preset_config(self.model, self.pixels, prior)
        torch.manual_seed(0)
        model = preset_family(self.model).base(config).eval().requires_grad_(False)
        gain = SPREAD / (config.initializer_range * config.hidden_size**0.5)
        for layer in model.layers:
            own = layer.attention
            for projection in (own.q_proj, own.k_proj, own.v_proj, own.o_proj):
                projection.weight.mul_(gain)
        return model

    def window(self) -> dict[str, Any]:
        """A window with the pruning ratio of Fibottention, over all heads."""
        config = preset_config(self.model, self.pixels, FIBOTTENTION)
        tokens = config.grid[0] * config.grid[1]
        settings = {key: value for key, value in config.prior["support"].items() if key != "shuffle_seed"}
        offsets = head_offsets(settings, num_heads=config.num_attention_heads, num_tokens=tokens, grid=config.grid)
        return {"support": {"name": "window", "pruning_ratio": pruning_ratio(offsets, tokens)}}


@dataclass(frozen=True)
class Prepared:
    """A contender that is ready to be set up.

    set_up: makes the call, which returns tokens (1, T, C). seconds: of what was done before, by its name. weights:
    bytes, None if they count as memory. runs_on: a program that is not ours.
    """

    set_up: SetUp
    seconds: dict[str, float]
    weights: int | None = None
    runs_on: str = ""


@dataclass(frozen=True)
class Rival:
    """A contender.

    about: what it is. prepare: makes it, for a problem. plain: its tokens in float32, plainly computed. dtypes: in
    which it runs. refusal: why it does not in the others. packages: to import. in_torch: whether torch allocates all of
    its memory. compared: how many tokens are, from the first; None: all. tolerances: largest difference, by dtype.
    """

    about: str
    prepare: Callable[[Problem], Prepared]
    plain: Callable[[Problem], Tensor]
    dtypes: tuple[str, ...] = ("float32", BFLOAT16)
    refusal: str = ""
    packages: tuple[str, ...] = ()
    in_torch: bool = True
    compared: int | None = None
    tolerances: Mapping[str, float] = field(default_factory=lambda: TOLERANCES)

    def why_not(self, dtype: str) -> dict[str, Any] | None:
        """A record that says why it is not measured; None if it is."""
        if dtype not in self.dtypes:
            return {"failed": self.refusal}
        if missing := [name for name in self.packages if find_spec(name) is None]:
            return {"failed": f"{', '.join(missing)} is missing: {INSTALL}", "missing": True}
        return None


# ---- in torch -------------------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """A model whose output is its tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(1, 3, height, width) to (1, T, C)."""
        return self.model(pixel_values=pixel_values).last_hidden_state


def in_torch(
    problem: Problem, make: Callable[[Problem], nn.Module], compiled: bool = False, runs_on: str = ""
) -> Prepared:
    """A module, eager or compiled for this size without a break."""
    module = make(problem).to(getattr(torch, problem.dtype))
    image = problem.image.to(getattr(torch, problem.dtype))
    run: Any = torch.compile(module, fullgraph=True, dynamic=False) if compiled else module
    weights = sum(parameter.nbytes for parameter in module.parameters())
    return Prepared(lambda: lambda: run(image), {}, weights, "torch.compile" if compiled else runs_on)


def encodes(problem: Problem, prior: Any) -> nn.Module:
    """Our model."""
    return Tokens(problem.encoder(prior))


def encodes_windows(problem: Problem) -> nn.Module:
    """Our model with windows."""
    return encodes(problem, problem.window())


def merging_prior(keep: float) -> dict[str, Any]:
    """Token merging that leaves this share of the patches."""
    return {"extras": [{"name": "tome", "keep": keep}]}


def merges(problem: Problem, keep: float, plain: bool = False) -> nn.Module:
    """Our model with merging, or the same written out."""
    model = problem.encoder(merging_prior(keep))
    return Tokens(PlainMerging(model) if plain else model)


def plainly(problem: Problem, make: Callable[[Problem], nn.Module]) -> Tensor:
    """The tokens of a module in float32, with attention written out."""
    with plain_attention(), torch.no_grad():
        return make(problem)(problem.image)


def torch_rivals(name: str, about: str, make: Callable[[Problem], nn.Module]) -> dict[str, Rival]:
    """A prior, eager and compiled."""
    plain = partial(plainly, make=make)
    return {
        name: Rival(about, partial(in_torch, make=make), plain),
        f"{name}_compiled": Rival(f"{about}, by torch.compile", partial(in_torch, make=make, compiled=True), plain),
    }


def merging_rival(keep: float) -> Rival:
    """Token merging that leaves this share of the patches."""
    return Rival(
        f"token merging that leaves {100 * keep:.0f} % of the patches after the last layer, eager",
        partial(in_torch, make=partial(merges, keep=keep), runs_on="sdpa"),
        partial(plainly, make=partial(merges, keep=keep, plain=True)),
        compared=1,
        tolerances=MERGING_TOLERANCES,
    )


# ---- exported -------------------------------------------------------------------------------------------------------

Load = Callable[[Problem, Path], Call]  # a file of ONNX into another program, which returns tokens as an array


def export(problem: Problem, folder: Path) -> Path:
    """The dense model as an ONNX file for this size, float32."""
    file = folder / "model.onnx"
    module = encodes(problem, DENSE).eval()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it names operators of torchvision, which nothing needs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        program = torch.onnx.export(module, (problem.image,), dynamo=True, verbose=False)
    assert program is not None
    program.save(file, external_data=True)
    return file


def exported(problem: Problem, load: Load, runs_on: str) -> Prepared:
    """The exported model in another program."""
    folder = tempfile.TemporaryDirectory()
    start = time.perf_counter()
    with torch.no_grad():
        file = export(problem, Path(folder.name))
    seconds = time.perf_counter() - start

    def set_up() -> Call:
        with folder:  # the program has read the file when it returns
            return load(problem, file)

    return Prepared(set_up, {"export": seconds}, runs_on=runs_on)


def onnxruntime_call(problem: Problem, file: Path) -> Call:
    """ONNX Runtime on CPU with all of its own optimisations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = problem.threads, 1
    options.log_severity_level = 3  # it warns of weights that it folds
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    given = {session.get_inputs()[0].name: problem.image.numpy()}
    return lambda: session.run(None, given)[0]


def openvino_call(problem: Problem, file: Path) -> Call:
    """OpenVINO on CPU for one image at a time. The dtype is a hint: image and output stay float32.

    Raises:
        RuntimeError: where OpenVINO does not follow the hint.
    """
    hint = "bf16" if problem.dtype == BFLOAT16 else "f32"
    options = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": problem.threads, "NUM_STREAMS": 1}
    core = openvino_core()
    compiled = core.compile_model(core.read_model(file), "CPU", {**options, "PERFORMANCE_HINT": "LATENCY"})
    taken = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
    if taken != hint:
        raise RuntimeError(f"OpenVINO computes in {taken} on this processor, not in {hint}")
    request, image = compiled.create_infer_request(), problem.image.numpy()

    def call() -> Any:
        request.infer([image], share_inputs=True)
        return request.get_output_tensor(0).data

    return call


def exported_rival(about: str, load: Load, package: str, **options: Any) -> Rival:
    """The dense model in another program."""
    return Rival(
        about,
        partial(exported, load=load, runs_on=package),
        partial(plainly, make=partial(encodes, prior=DENSE)),
        packages=("onnx", "onnxscript", package),
        in_torch=False,
        **options,
    )


RIVALS: dict[str, Rival] = {
    **torch_rivals(DENSE, "dense attention", partial(encodes, prior=DENSE)),
    "onnxruntime": exported_rival(
        "dense attention in ONNX Runtime",
        onnxruntime_call,
        "onnxruntime",
        dtypes=("float32",),
        refusal="ONNX Runtime has no bfloat16 kernels on CPU: Conv is not implemented",
    ),
    "openvino": exported_rival("dense attention in OpenVINO", openvino_call, "openvino"),
    "tome_90": merging_rival(0.9),
    "tome_50": merging_rival(0.5),
    **torch_rivals("window", "a window in one dimension with Fibottention's pruning ratio", encodes_windows),
    **torch_rivals(FIBOTTENTION, "Fibottention", partial(encodes, prior=FIBOTTENTION)),
}


def check_problem(model: str, pixels: int, rivals: list[str]) -> None:
    """Raise ValueError for a model or a size that a contender does not take."""
    family = preset_family(model)
    if family.name != "sparseprior_vit":
        raise ValueError(f"--models {model}: token merging is written for ViT, not for {family.title}")
    preset_config(model, pixels, FIBOTTENTION)
    for name in rivals:
        if name.startswith("tome"):
            preset_config(model, pixels, merging_prior(int(name.rpartition("_")[2]) / 100))


def as_tokens(output: Any) -> Tensor:
    """What a call returned as float32 tokens."""
    return torch.from_numpy(np.array(output)) if isinstance(output, np.ndarray) else output.float()
