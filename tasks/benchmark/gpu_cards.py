"""Whether every Triton kernel fits on every card: python -m tasks.benchmark gpu --cards

Nothing runs on a GPU. Each kernel is compiled for a compute capability with the block sizes that it takes there
(`hf_sparseprior.kernels.triton_sizes`), as forward and backward passes launch it. A block must not need more shared
memory than it may have there, nor spill more than `SPILLED` bytes of a thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from hf_sparseprior.base.files import write_text
from hf_sparseprior.runs.environment import command_line, environment
from hf_sparseprior.runs.results import write_results
from hf_sparseprior.runs.tables import markdown_table
from tasks.benchmark import gpu_count
from tasks.benchmark.commands import CARDS

Launch = dict[str, Any]

DTYPES, WIDTHS = ("float32", "bfloat16", "float16"), (32, 64, 128)
SPILLED = 128  # of a thread's 1020 bytes of registers
TENSOR_MEMORY = 512  # columns, from compute capability 10.0 on
HEADS, IMAGES, PATCHES = 2, 2, 195


def passes(dtype: torch.dtype, width: int) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Names of passes that between them launch every kernel in every form, and what runs them and gives the output.

    Long sequences, and rows that see many others, have launches of their own, which are asked for at a small size.
    """
    from hf_sparseprior.kernels import decayed_triton, diagonal_triton

    offsets, begin = torch.tensor([1, -1, 2, -2], dtype=torch.int32), torch.tensor([0, 2, 4], dtype=torch.int32)
    starts = torch.tensor([0, 0, PATCHES - 1, PATCHES - 1])
    decay: list[Any] = [torch.ones(2 * PATCHES - 3), starts, torch.ones(HEADS), torch.ones(HEADS)]
    limits = {name: vars(diagonal_triton)[name] for name in ("ONE_LAUNCH_TOKENS", "NEIGHBOURS", "JOINED_PARTS")}

    def along_diagonals(prefix: int, long: bool, zero_fill: bool, weighs: bool) -> torch.Tensor:
        vars(diagonal_triton).update(dict.fromkeys(limits, 1) if long else limits)
        weights = decay if weighs else [None] * 4
        q, k, v = zeros(dtype, width, prefix)
        return diagonal_triton.diagonal_attention(q, k, v, offsets, begin, prefix, 0.1, zero_fill, *weights)

    def over_all_pairs(learns: bool) -> torch.Tensor:
        positions = torch.zeros(8, 1, PATCHES, dtype=torch.int32)
        log_gamma, ones = torch.zeros(8, HEADS, requires_grad=learns), torch.ones(HEADS)
        q, k, v = zeros(dtype, width, 1)
        return decayed_triton.decayed_attention(q, k, v, positions, log_gamma, ones, ones, 1, 0.1, 0.0, {})

    for prefix, long, zero_fill, weighs in itertools.product((0, 1), (False, True), (False, True), (False, True)):
        if prefix or not long:
            words = ["zero fill" if zero_fill else "neg_inf", "decay" * weighs, "long" * long, "prefix" * prefix]
            yield ", ".join(filter(None, words)), partial(along_diagonals, prefix, long, zero_fill, weighs)
    for learns in (False, True):
        yield f"all pairs, decay{' learns' * learns}", partial(over_all_pairs, learns)


def zeros(dtype: torch.dtype, width: int, prefix: int) -> list[torch.Tensor]:
    """q, k, v as projections give them, (B, T, H, D) transposed."""
    shape = (IMAGES, prefix + PATCHES, HEADS, width)
    return [torch.zeros(shape, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)]


def worker(capability: int, dtypes: Sequence[str], widths: Sequence[int], names: Sequence[str] = ()) -> None:
    """What a process of its own prints: a JSON line for each launch. `names`: of passes; none means all."""
    launches: list[Launch] = []
    with gpu_count.compiling(launches, capability):
        for dtype, width in itertools.product(dtypes, widths):
            for name, run in passes(getattr(torch, dtype), width):
                if names and name not in names:
                    continue
                launches.clear()
                out = run()
                out.backward(torch.ones_like(out))
                for launch in launches:
                    about = {"capability": capability, "dtype": dtype, "width": width, "case": name}
                    print(json.dumps({**about, **launch}), flush=True)


def compiled(capability: int, *which: Sequence[Any]) -> list[Launch]:
    """The launches of `worker`."""
    code = "import sys, json; from tasks.benchmark import gpu_cards; gpu_cards.worker(*json.loads(sys.argv[1]))"
    return gpu_count.lines_of(code, [capability, *which])


def too_much(launch: Launch) -> str | None:
    """What a launch needs more of than there is, or None."""
    largest = gpu_count.MULTIPROCESSORS[launch["capability"]].largest_block
    if launch["shared"] > largest:
        return f"{launch['shared']} bytes of shared memory, and a block may have {largest}"
    if launch["tensor_memory"] > TENSOR_MEMORY:
        return f"{launch['tensor_memory']} columns of tensor memory, and there are {TENSOR_MEMORY}"
    if launch["spilled"] > SPILLED:
        return f"{launch['spilled']} bytes of a thread spill, and at most {SPILLED} are accepted"
    return None


def cards_table(launches: Sequence[Launch]) -> str:
    """For each capability, dtype and head width the launches that need most."""
    groups: dict[tuple[Any, ...], list[Launch]] = {}
    for launch in launches:
        groups.setdefault((launch["capability"], launch["dtype"], launch["width"]), []).append(launch)
    rows = []
    for (capability, dtype, width), own in groups.items():
        shared, spilled = (max(own, key=lambda launch: launch[key]) for key in ("shared", "spilled"))
        fewest = min(own, key=lambda launch: launch["occupancy"])
        limit = gpu_count.MULTIPROCESSORS[capability].largest_block
        rows.append([
            f"{capability / 10:.1f}", dtype, str(width), str(len({launch["name"] for launch in own})),
            f"{shared['shared']} of {limit}, `{shared['name']}`",
            f"{spilled['spilled']}" + f", `{spilled['name']}`" * bool(spilled["spilled"]),
            f"{100 * fewest['occupancy']:.0f} %, `{fewest['name']}`",
        ])  # fmt: skip
    head = ["capability", "dtype", "width", "kernels", "most shared memory", "most spilled", "fewest warps held"]
    return markdown_table(head, rows)


def check_cards(arguments: argparse.Namespace) -> None:
    """Compile for --cards, write what is needed and what does not fit.

    Raises:
        ValueError: if something does not fit, or Triton or ptxas cannot be asked.
    """
    launches: list[Launch] = []
    for card in arguments.cards or CARDS:
        try:
            launches += compiled(int(card.replace(".", "")), DTYPES, WIDTHS)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        write_results(arguments.out / "cards.json", {"command": command_line(), "launches": launches, **environment()})
        write_text(arguments.out / "cards.md", cards_table(launches) + "\n")
    print(f"{cards_table(launches)}\n\n{arguments.out / 'cards.md'}")
    for launch in launches:
        if reason := too_much(launch):
            where = f"capability {launch['capability'] / 10:.1f}, {launch['dtype']}, width {launch['width']}"
            raise ValueError(f"{launch['name']} ({launch['case']}; {where}): {reason}")
