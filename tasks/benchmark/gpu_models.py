"""`gpu --models`: whole models, dense with flash attention next to each prior, eager, compiled and in CUDA graphs.

Cells that a target names come first, the eager ones before those that are compiled. In each a prior and the dense model
take turns in the same mode; a step is forward, backward, fused AdamW and zero_grad, everything under autocast. `CUDA
graphs` is torch.compile with mode="reduce-overhead". Compiling takes most of the time of a cell.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_sparseprior.base.families import preset_family
from tasks.benchmark import gpu_cells, report
from tasks.benchmark.commands import DENSE
from tasks.benchmark.entry import Case, Row, Session, Target
from tasks.benchmark.gpu import FIBOTTENTION, VIOLIN, any_error
from tasks.benchmark.model_contenders import forced_backend, preset_config
from tasks.benchmark.timing import Call, SetUp

INFERENCE, STEP = "inference", "training step"
EAGER, COMPILED, GRAPHS = "eager", "torch.compile", "CUDA graphs"
MODES: dict[str, str | None] = {EAGER: None, GRAPHS: "reduce-overhead", COMPILED: "default"}
PRIORS: dict[str, Any] = {
    "fibottention": {"support": FIBOTTENTION},
    "violin": {"decay": VIOLIN},
    "fibottention+violin": {"support": FIBOTTENTION, "decay": VIOLIN},
}
# Model, pixels, images.
SIZES = (
    *(("vit_small", 1024, 8), ("vit_small", 2048, 2), ("vit_small", 4096, 1), ("vit_small", 224, 128)),
    *(("vit_base", 224, 128), ("vit_base", 1024, 4)),
)
LARGE, SMALL = SIZES[:3], SIZES[3:5]
# With CUDA graphs. Of Fibottention in training: at least so many times as fast as dense, by pixels, and this share of
# it in eager mode. Of VIOLIN at 224 px: at most so many times dense's time.
FASTER, EAGER_SHARE, SLOWER = {1024: 1.8, 2048: 4.0, 4096: 12.0}, 0.8, {INFERENCE: 1.05, STEP: 1.1}
OTHERS = {**gpu_cells.OTHERS, "copy_bytes": 1 << 30}
APART = 100  # more rounds than a cell has

Cell = tuple[tuple[str, int, int], str, str, str]  # size, pass, mode, prior


def in_order() -> list[Cell]:
    """All cells, those that a target names first."""
    named: list[Cell] = [(size, STEP, EAGER, "fibottention") for size in LARGE]  # which take seconds
    named += [(LARGE[0], STEP, GRAPHS, "fibottention"), (SMALL[0], STEP, GRAPHS, "violin")]
    named += [(size, STEP, GRAPHS, "fibottention") for size in LARGE[1:]]
    named += [(size, key, GRAPHS, "violin") for size in SMALL for key in (INFERENCE, STEP)]
    every = ((size, key, mode, prior) for mode, size, key, prior in product(MODES, SIZES, (INFERENCE, STEP), PRIORS))
    return list(dict.fromkeys([*named, *every]))


def model_call(preset: str, prior: Any, pixels: int, images: int, trains: bool, mode: str,
               arguments: argparse.Namespace) -> SetUp:  # fmt: skip
    """Set-up of a whole model under autocast: inference, or a step with AdamW; dense on flash attention, a prior on the
    Triton kernels.
    """
    dtype, device = getattr(torch, arguments.dtype), torch.device(arguments.device)

    def set_up() -> Call:
        model = preset_family(preset).classifier(preset_config(preset, pixels, prior)).to(device).train(trains)
        drawn = torch.randn(images, 3, pixels, pixels, device=device)
        labels = torch.randint(model.config.num_labels, (images,), device=device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        compiled = MODES[mode]
        run = model if compiled is None else torch.compile(model, mode=compiled, dynamic=False)

        def call() -> None:
            if mode == GRAPHS:
                torch.compiler.cudagraph_mark_step_begin()
            with contextlib.ExitStack() as stack:
                stack.enter_context(forced_backend("sdpa" if prior == DENSE else "triton"))
                stack.enter_context(
                    sdpa_kernel(SDPBackend.FLASH_ATTENTION) if prior == DENSE else contextlib.nullcontext()
                )
                stack.enter_context(torch.autocast(device.type, dtype, enabled=dtype != torch.float32))
                if not trains:
                    with torch.inference_mode():
                        run(drawn)
                    return
                loss = run(drawn, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return call

    return any_error(set_up)


def noting_peak(set_up: SetUp, name: str, peaks: dict[str, int]) -> SetUp:
    """A set-up that notes the peak of its first two calls: a CUDA graph allocates when it is recorded, in the second,
    and a replay no more. It raises a RuntimeError where torch left CUDA graphs out.
    """

    def ready() -> Call:
        before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        left_out = graphs_left_out()
        call = set_up()
        call()
        if torch.cuda.is_available():
            peaks[name] = torch.cuda.max_memory_allocated() - before
        if left_out := graphs_left_out() - left_out:
            raise RuntimeError(
                f"torch ran {left_out} of its graphs without CUDA graphs (TORCH_LOGS=perf_hints says why)"
            )
        return call

    return ready


def graphs_left_out() -> int:
    """How many graphs of torch.compile were to be CUDA graphs, and are not."""
    return int(torch._dynamo.utils.counters["inductor"]["cudagraph_skips"])


class Models(gpu_cells.Cells):
    """The entry."""

    def others(self) -> dict[str, Any]:
        """Options of `gpu` that do not act here, and their defaults."""
        return OTHERS

    def cells(self) -> Iterable[list[Case]]:
        """A prior and the dense model; the dense model's rounds with each prior have numbers of their own."""
        for (model, pixels, images), key, mode, prior in in_order():
            size = {"model": model, "pixels": pixels, "images": images, "pass": key, "mode": mode}
            first = APART * list(PRIORS).index(prior)
            yield [{**size, "contender": name, "round": first} for name in (DENSE, prior)]

    def step(self, cases: list[Case], session: Session) -> list[Case]:
        """A cell, with its errors; its rounds begin with the number of the cases."""
        case, arguments = cases[0], session.arguments
        torch._dynamo.reset()
        size = (case["pixels"], case["images"], case["pass"] == STEP, case["mode"])
        peaks: dict[str, int] = {}
        set_ups = {
            name: noting_peak(model_call(case["model"], PRIORS.get(name, DENSE), *size, arguments), name, peaks)
            for name in (own["contender"] for own in cases)
        }
        found = session.in_turns([{key: own[key] for key in self.keys} for own in cases], set_ups)
        for own in found:
            if "memory" in own:
                own["memory"] = max(own["memory"], peaks.get(own["contender"], 0))
        return [{**case, **own} for case, own in zip(cases, found, strict=True)]

    def complete_all(self, rows: Sequence[dict[str, Any]]) -> None:
        """Nothing depends on several rows."""

    def targets(self, settings: Mapping[str, Any]) -> Iterable[Target]:
        """Of Fibottention in training on large images, and of VIOLIN at 224 px."""
        for mode, share in ((GRAPHS, 1.0), (EAGER, EAGER_SHARE)):
            for model, pixels, _ in LARGE:
                where = {"model": model, "pixels": pixels, "pass": STEP, "mode": mode}
                yield Target(where, DENSE, share * FASTER[pixels], faster=True, among=("fibottention",))
        for model, pixels, _ in SMALL:
            for key, limit in SLOWER.items():
                where = {"model": model, "pixels": pixels, "pass": key, "mode": GRAPHS}
                yield Target(where, DENSE, limit, among=("violin",))

    def notes(self, rows: Sequence[Row], records: Sequence[Case], settings: Mapping[str, Any]) -> str:
        """How it was measured."""
        return (
            "- dense: SDPBackend.FLASH_ATTENTION; priors: the Triton kernels. MiB: peak of a call with weights, "
            "gradients and AdamW's state. Launches of whole models are not counted; those of a layer are in --quick."
        )


def images_text(row: Row) -> str:
    """Images a second."""
    return report.digits(row["images"] / row["seconds"]["median"]) if "seconds" in row else "-"


BENCHMARK = Models(
    name="gpu_models",
    keys=("model", "pixels", "images", "pass", "mode", "contender"),
    machine=("dtype", "device"),
    same=("kernels", "triton", "block_sizes"),
    bases=(DENSE,),
    size="pixels",
    one_cpu=False,
    attempts=2,
    columns={"images a second": images_text},
)
