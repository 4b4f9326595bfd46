"""What the Triton kernels need, counted without a GPU: python -m tasks.benchmark gpu --count

Nothing here is a time. Each case is one layer's attention, forward and backward, of one image or more. It is looked at
twice, in processes of their own:

- `compile`: every launch is compiled by Triton for compute capability 9.0 (H100, H200) instead of run. ptxas, which
  comes with Triton, says how many registers a thread takes and how many bytes spill; Triton says how much shared memory
  a block takes. How many blocks fit on a multiprocessor follows.
- `trace`: every launch is run by Triton's interpreter, which notes the addresses that each program reads and
  writes. A sector has 32 bytes, as on the device.

Bytes are in copies: one copy reads q, k and v once and writes the output once.

- memory: distinct sectors of a launch, read and written, summed over the launches. It holds for the GPU's memory if
  what a launch touches twice is still in the L2 cache then, and nothing of the launch before.
- cache: distinct sectors of each program, summed. It is what goes between L2 and the multiprocessors if the L1 cache
  keeps what a program touches twice.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Launch = dict[str, Any]

CAPABILITY = 90
SECTOR = 32
# Of all multiprocessors; a block takes SHARED_OF_BLOCK bytes besides its own.
REGISTERS, REGISTERS_AT_ONCE, SHARED_OF_BLOCK = 65536, 256, 1024


class Multiprocessor(NamedTuple):
    """What a multiprocessor holds at once, and bytes of shared memory, of all blocks and of one at most."""

    warps: int
    blocks: int
    shared: int
    largest_block: int


# By compute capability (CUDA C++ Programming Guide, technical specifications).
MULTIPROCESSORS = {
    80: Multiprocessor(64, 32, 164 * 1024, 163 * 1024),
    86: Multiprocessor(48, 16, 100 * 1024, 99 * 1024),
    89: Multiprocessor(48, 24, 100 * 1024, 99 * 1024),
    90: Multiprocessor(64, 32, 228 * 1024, 227 * 1024),
    100: Multiprocessor(64, 32, 228 * 1024, 227 * 1024),
    120: Multiprocessor(48, 24, 100 * 1024, 99 * 1024),
}
FIBOTTENTION = {"name": "fibottention", "w_min": 5, "w_max": 65}
CASES: dict[str, dict[str, Any]] = {
    "fibottention": {"support": FIBOTTENTION},
    "fibottention, w_max N // 3": {"support": {"name": "fibottention", "w_min": 5}},
    "fibottention, zero fill": {"support": {**FIBOTTENTION, "mask_fill": "zero"}},
    "fibottention and violin": {"support": FIBOTTENTION, "decay": {"name": "violin"}},
    "violin": {"support": "dense", "decay": {"name": "violin"}},
    "violin, 8 images": {"support": "dense", "decay": {"name": "violin"}, "images": 8},
}
LARGEST_DENSE = 400  # patches: in the interpreter all pairs of more would take minutes
# Operations of torch that start nothing on the device.
NO_LAUNCH = (
    *("empty", "new_empty", "view", "transpose", "permute", "detach", "slice", "select", "as_strided", "unsqueeze"),
    *("expand", "alias", "t.", "squeeze", "lift", "split", "unbind"),
)


# ---- one case -------------------------------------------------------------------------------------------------------


def attention_of(case: dict[str, Any], tokens: int, dtype: torch.dtype, heads: int) -> Callable[[bool], None]:
    """A function that runs one layer's attention, forward or backward; backward comes after forward."""
    from hf_sparseprior.attention.functional import run_plan
    from hf_sparseprior.attention.request import AttentionRequest
    from tasks.benchmark import gpu

    plan = gpu.make_plan(case["support"], case.get("decay"), tokens, heads)
    images = case.get("images", 1)
    q, k, v = (x.requires_grad_() for x in gpu.make_inputs(images, tokens, dtype, torch.device("cpu"), heads))
    decay = gpu.decay_of(plan, torch.device("cpu"))
    scalars = [x for x in (decay or {}).values() if isinstance(x, torch.Tensor) and x.requires_grad]
    held: list[torch.Tensor] = []

    def run(backward: bool) -> None:
        if not backward:
            held[:] = [run_plan(AttentionRequest(q, k, v, plan, decay), backend="triton")[0]]
            return
        torch.autograd.grad(held[0], [q, k, v, *scalars], torch.ones_like(held[0]))

    return run


class TorchLaunches(TorchDispatchMode):
    """Notes what torch itself starts on the device, with the bytes that it reads and writes."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self.launches = launches
        self.inside = False  # of an operator of ours

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "hf_sparseprior" in str(func) and "triton" in str(func):
            self.inside = True
            with self:  # the function that the operator stands for, because the mode sees nothing within operators
                out = OPDEFS[func.name().split(".")[0]]._init_fn(*args, **(kwargs or {}))
            self.inside = False
            return out
        out = func(*args, **(kwargs or {}))
        fills = "zeros" in str(func)  # reads nothing, though it has an argument
        tensors = [x for x in ((out,) if fills else (*args, out)) if isinstance(x, torch.Tensor)]
        empty = not (isinstance(out, torch.Tensor) and out.numel())
        if self.inside and not empty and not any(str(func).startswith(f"aten.{name}") for name in NO_LAUNCH):
            size = sum(x.numel() * x.element_size() for x in tensors)
            name = f"torch {func.__name__.split('.')[0]}"
            self.launches.append({"name": name, "memory": size, "cache": size})
        return out


def passes(case: dict[str, Any], tokens: int, dtype: torch.dtype, heads: int, launches: list[Launch]) -> None:
    """Run a case; each launch is noted in `launches`, with the pass it belongs to."""
    run = attention_of(case, tokens, dtype, heads)
    for backward in (False, True):
        before = len(launches)
        with TorchLaunches(launches):
            run(backward)
        for launch in launches[before:]:
            launch["pass"] = "backward" if backward else "forward"


# ---- compile --------------------------------------------------------------------------------------------------------


def resources(ptx: str, capability: int = CAPABILITY) -> dict[str, int]:
    """Registers of a thread and bytes that spill, as ptxas says, with the options that Triton gives it."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        options = ["-v", "-lineinfo", "--regAllocOptLevel=2", f"--gpu-name={sm_arch_from_capability(capability)}"]
        command = [get_ptxas(capability).path, *options, str(source), "-o", str(source.with_suffix(".o"))]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    found = {}
    for name, pattern in (("registers", r"Used (\d+) registers"), ("spilled", r"(\d+) bytes spill stores")):
        if (number := re.search(pattern, said)) is None:
            raise RuntimeError(f"ptxas says nothing of what is {name}: {said.strip()[:200]!r}")
        found[name] = int(number.group(1))
    return found


def blocks_at_once(registers: int, shared: int, warps: int, capability: int = CAPABILITY) -> int:
    """Blocks that a multiprocessor holds, from registers of a thread, bytes of a block and warps of a block."""
    holds = MULTIPROCESSORS[capability]
    of_warp = -(-registers * 32 // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
    by_registers = REGISTERS // of_warp // warps
    by_shared = holds.shared // (shared + SHARED_OF_BLOCK)
    return max(0, min(holds.blocks, holds.warps // warps, by_registers, by_shared))


@contextlib.contextmanager
def compiling(launches: list[Launch], capability: int = CAPABILITY) -> Iterator[None]:
    """Launches are compiled for a compute capability and noted, not run."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    from hf_sparseprior.attention.compiled_kernels import triton_device
    from hf_sparseprior.kernels import triton_sizes

    class Compiler:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", capability, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device=None: 0)

    driver.set_active(Compiler())
    launch = jit.JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        with _disable_current_modes():
            kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
        found = resources(kernel.asm["ptx"], capability)
        at_once = blocks_at_once(found["registers"], shared, warps, capability)
        occupancy = at_once * warps / MULTIPROCESSORS[capability].warps
        sizes = {"programs": int(np.prod(grid)), "warps": warps, "shared": shared}
        sizes["tensor_memory"] = getattr(kernel.metadata, "tmem_size", None) or 0
        launches.append({"name": self.fn.__name__, **sizes, **found, "occupancy": occupancy})

    jit.JITFunction.run = compile_only
    triton_device.device_reason = lambda *device: None
    row = triton_sizes.nearest_row(divmod(capability, 10))
    triton_sizes.card_row = functools.cache(lambda device: row)
    yield


# ---- trace ----------------------------------------------------------------------------------------------------------


class Addresses:
    """The sectors that the programs of one launch touch."""

    def __init__(self) -> None:
        self.program: dict[str, list[np.ndarray]] = {"read": [], "written": []}
        self.launch: dict[str, np.ndarray] = {kind: np.empty(0, np.uint64) for kind in self.program}
        self.waiting: dict[str, list[np.ndarray]] = {"read": [], "written": []}
        self.cache = 0

    def note(self, kind: str, pointers: np.ndarray, mask: np.ndarray) -> None:
        """Addresses that are read or written, where `mask`."""
        chosen = pointers[np.broadcast_to(mask, pointers.shape)]
        self.program[kind].append(np.unique(chosen // SECTOR))

    def next_program(self) -> None:
        """What was noted belongs to one program."""
        for kind, found in self.program.items():
            if found:
                sectors = np.unique(np.concatenate(found))
                self.cache += SECTOR * len(sectors)
                self.waiting[kind].append(sectors)
                found.clear()
            if len(self.waiting[kind]) > 256:
                self.gather(kind)

    def gather(self, kind: str) -> None:
        """Join what programs have touched."""
        self.launch[kind] = np.unique(np.concatenate([self.launch[kind], *self.waiting[kind]]))
        self.waiting[kind].clear()

    def sizes(self) -> dict[str, int]:
        """Bytes of the launch."""
        self.next_program()
        for kind in self.waiting:
            self.gather(kind)
        return {"memory": sum(SECTOR * len(sectors) for sectors in self.launch.values()), "cache": self.cache}


@contextlib.contextmanager
def tracing(launches: list[Launch]) -> Iterator[None]:
    """Launches run in the interpreter, and what they touch is noted."""
    from triton import language
    from triton.runtime import interpreter

    builder, now = interpreter.interpreter_builder, Addresses()
    kind = type(builder)
    load, store, place, run = (
        kind.create_masked_load, kind.create_masked_store, kind.set_grid_idx, interpreter.InterpretedFunction.run,
    )  # fmt: skip

    def masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        now.note("read", ptrs.data, mask.data)
        return load(self, ptrs, mask, *rest)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        now.note("written", ptrs.data, mask.data)
        return store(self, ptrs, value, mask, *rest)

    def next_program(self: Any, *index: int) -> None:
        now.next_program()
        place(self, *index)

    def run_and_note(self: Any, *arguments: Any, grid: Any, **options: Any) -> None:
        nonlocal now
        now = Addresses()
        with _disable_current_modes():
            run(self, *arguments, grid=grid, **options)
        launches.append({"name": self.fn.__name__, **now.sizes()})

    replace: Any = getattr(interpreter, "_patch_lang", None)

    def unless_replaced(function: Any) -> Any:
        """Half the time goes into replacing triton.language anew in each function that a kernel calls."""
        seen = [value for value in function.__globals__.values() if value is language or value is language.core]
        fresh = any(language.core.is_builtin(module.load) for module in seen)
        return replace(function) if fresh else interpreter._LangPatchScope()

    if replace is not None and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = unless_replaced
    kind.create_masked_load, kind.create_masked_store, kind.set_grid_idx = masked_load, masked_store, next_program
    # The loads and stores without a mask end in those with one.
    interpreter.InterpretedFunction.run = run_and_note
    yield


# ---- the two together -----------------------------------------------------------------------------------------------


def worker(way: str, names: Sequence[str], sizes: Sequence[int], dtype: torch.dtype, heads: int) -> None:
    """What a process of its own prints: a JSON line for each case, the launches of both passes."""
    found: list[Launch] = []
    with {"compile": compiling, "trace": tracing}[way](found):
        for name in names:
            for tokens in sizes:
                dense = CASES[name]["support"] == "dense"
                if dense and tokens > LARGEST_DENSE:
                    continue
                found.clear()
                # All heads of a dense layer are alike. Two, because tables of one are contiguous whatever they are.
                own = min(2, heads) if dense and way == "trace" else heads
                passes(CASES[name], tokens, dtype, own, found)
                unit = 4 * CASES[name].get("images", 1) * own * (tokens + 1) * 64 * dtype.itemsize
                print(json.dumps({"case": name, "tokens": tokens, "copy": unit, "launches": found}), flush=True)


def run_worker(way: str, names: Sequence[str], sizes: Sequence[int], dtype: str, heads: int) -> list[dict[str, Any]]:
    """Start `worker` in a process of its own and read what it prints."""
    code = "import sys, json, torch; from tasks.benchmark import gpu_count; a = json.loads(sys.argv[1]); "
    code += "gpu_count.worker(a[0], a[1], a[2], getattr(torch, a[3]), a[4])"
    return lines_of(code, [way, list(names), list(sizes), dtype, heads], interpreted=way == "trace")


def lines_of(code: str, arguments: list[Any], interpreted: bool = False) -> list[dict[str, Any]]:
    """The JSON lines that Python code prints in a process of its own, whose first argument is JSON.

    Raises:
        RuntimeError: with the last line of its error.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-c", code, json.dumps(arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{arguments[0]}: {done.stderr.strip().splitlines()[-1]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def count(names: Sequence[str], sizes: Sequence[int], dtype: str = "bfloat16", heads: int = 12) -> list[dict[str, Any]]:
    """Cases with their launches, bytes in copies: [{"case", "tokens", "launches": [{"pass", "name", ...}]}]."""
    compiled = run_worker("compile", names, sizes, dtype, heads)
    traced = run_worker("trace", names, sizes, dtype, heads)
    rows: list[dict[str, Any]] = []
    for one, other in zip(compiled, traced, strict=True):
        launches = []
        built, ran = ([launch["name"] for launch in way["launches"]] for way in (one, other))
        if built != ran:
            raise RuntimeError(f"{one['case']}: {', '.join(built)} were compiled, {', '.join(ran)} ran")
        for by_compiler, by_trace in zip(one["launches"], other["launches"], strict=True):
            bytes_in_copies = {kind: by_trace[kind] / other["copy"] for kind in ("memory", "cache")}
            launches.append({**by_compiler, **bytes_in_copies})
        about = {"case": one["case"], "tokens": one["tokens"], "dtype": dtype, "heads": heads}
        rows.append({**about, "launches": launches})
    return rows
