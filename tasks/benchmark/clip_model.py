"""One measurement of a video model, in the process that it is done in: its time and its memory."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TimesformerConfig, TimesformerForVideoClassification

from hf_sparseprior import SparsePriorTimesformerConfig, SparsePriorTimesformerForVideoClassification
from tasks.benchmark.commands import LONG, STOCK
from tasks.benchmark.lone_process import limit_memory
from tasks.benchmark.model import noted_choices
from tasks.benchmark.timing import Call, seconds_per_call, traced_bytes

SHORT = {name.partition("_")[0]: name for name in SparsePriorTimesformerConfig.modes["attention_type"]}
CPU = torch.device("cpu")
CALLS, CALLS_SECONDS = 5, 2.0  # timed calls of one measurement, at most, and after how long no other begins


@dataclass(frozen=True)
class Clips:
    """What is measured: a model, and the clip that it is given.

    attention: "divided", "joint" or "space", as `attention_type` begins. prior: a name or the full form; `STOCK`:
    transformers' own class. preset: width and depth, those of an image model. dtype: of weights and clip.
    """

    attention: str
    prior: Any
    frames: int
    pixels: int
    preset: str = "vit_tiny"
    dtype: str = "float32"

    def config(self) -> SparsePriorTimesformerConfig:
        """The model's config.

        Raises:
            ValueError: for a bad preset, prior or size.
        """
        if self.attention not in SHORT:
            raise ValueError(f"attention {self.attention!r} must be one of {', '.join(SHORT)}")
        return SparsePriorTimesformerConfig.from_preset(
            self.preset,
            image_size=self.pixels,
            num_frames=self.frames,
            attention_type=SHORT[self.attention],
            prior="dense" if self.prior == STOCK else self.prior,
        )

    def model(self) -> nn.Module:
        """The model, with random weights, for evaluation."""
        config = self.config()
        torch.manual_seed(0)
        if self.prior == STOCK:
            same = ("image_size", "patch_size", "num_frames", "hidden_size", "num_hidden_layers")
            shared = {name: getattr(config, name) for name in (*same, "num_attention_heads", "intermediate_size")}
            stock = TimesformerConfig(**shared, attention_type=config.attention_type)
            return TimesformerForVideoClassification(stock).eval()
        return SparsePriorTimesformerForVideoClassification(config).eval()


def peak_bytes() -> int | None:
    """The most that this process had in memory so far, everything included; None where the system does not say it."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


def measure_clips(clips: Clips, threads: int, memory_gib: float, first: bool, long: bool) -> dict[str, Any]:
    """Seconds and bytes of a forward pass without gradients of one clip.

    Args:
        clips: what is measured.
        threads: of the computation.
        memory_gib: what this process may have.
        first: whether memory is measured too.
        long: whether a call is expected to take more than `LONG` seconds; then it is timed once.

    Returns:
        {"seconds": [...]}, and with `first` {"memory": {"weights", "input", "set_up", "kept", "call", "resident"},
        "ran": what the chooser of backends took}.

    Raises:
        RuntimeError, MemoryError: where the memory does not suffice.
    """
    limit_memory(round(memory_gib * 2**30))
    torch.set_num_threads(threads)
    dtype = getattr(torch, clips.dtype)
    model = clips.model().to(dtype)
    pixels = torch.randn(1, clips.frames, 3, clips.pixels, clips.pixels).to(dtype)
    found: dict[str, Any] = {}
    timed: list[float] = []

    def call() -> None:
        start = time.perf_counter()
        with torch.no_grad():
            model(pixel_values=pixels)
        timed.append(time.perf_counter() - start)

    if first:
        choices: list[str] = []
        with noted_choices(choices):
            set_up, kept = traced_bytes(call, CPU)
        peak, _ = traced_bytes(call, CPU)
        found["ran"] = choices[0].partition(": ")[2] if choices else STOCK
        weights = sum(own.numel() * own.element_size() for own in (*model.parameters(), *model.buffers()))
        memory = {"weights": weights, "input": pixels.numel() * pixels.element_size(), "set_up": set_up}
        found["memory"] = {**memory, "kept": kept, "call": peak, "resident": peak_bytes()}
    else:
        call()
    found["seconds"] = timed[1:] if first and (long or timed[1] > LONG) else calls_of(call, timed)
    return found


def calls_of(call: Call, timed: list[float]) -> list[float]:
    """Seconds of some calls, after those that warmed up."""
    del timed[:]
    while not timed or (len(timed) < CALLS and sum(timed) < CALLS_SECONDS):
        seconds_per_call(call, 1, CPU)
    return timed


def work(link: Any, clips: dict[str, Any], arguments: dict[str, Any]) -> None:
    """What a process does: the answer goes through `link`, as {"error": ...} where memory did not suffice."""
    threading.Thread(target=_end_with_parent, args=(link,), daemon=True).start()
    try:
        answer = measure_clips(Clips(**clips), **arguments)
    except (RuntimeError, MemoryError) as error:
        text = str(error).strip()
        answer = {"error": text.splitlines()[0] if text else type(error).__name__}
    link.send(answer)


def _end_with_parent(link: Any) -> None:
    """The end of this process when the one that started it is gone, and would not hear the answer."""
    with suppress(EOFError, OSError):
        link.recv()
    os._exit(1)
