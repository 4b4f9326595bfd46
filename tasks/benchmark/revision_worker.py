"""What a process of --base runs: one call of the library in a folder, timed when it is asked (revision.py).

It uses nothing but public names, so that the library of another commit can be behind them: `ops.attention` with
`backend="auto"`, and models by preset and prior. Requests and answers are lines of JSON.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

import hf_sparseprior as sp

Call = Callable[[], torch.Tensor]
FAMILIES = {"vit": "ViT", "deit": "ViT", "swin": "Swin", "convit": "Convit", "iformer": "Iformer"}


def attention_call(request: dict[str, Any]) -> Call:
    """A call of attention as `attention` sets it up, on the inputs of a seed."""
    case, device, dtype = request["case"], torch.device(request["device"]), getattr(torch, request["dtype"])
    heads, width, prefix = request["heads"], request["width"], request["prefix_tokens"]
    tokens, trains = case["tokens"], case["pass"] != "forward"
    side = next(side for side in range(int(tokens**0.5), 0, -1) if tokens % side == 0)
    config: dict[str, Any] = {
        "grid": (side, tokens // side),
        "num_prefix_tokens": prefix,
        "support": yaml.safe_load(request["support"]),
    }
    if yaml.safe_load(request["decay"]) not in (None, "none"):
        raise SystemExit("--base compares attention without a decay; models have one")
    shape = (case["batch"], tokens + prefix, heads, width)
    generator = torch.Generator().manual_seed(0)
    q, k, v, gradient = (torch.randn(shape, generator=generator).to(device, dtype).transpose(1, 2) for _ in range(4))
    leaves = q, k, v = tuple(x.detach().requires_grad_(trains) for x in (q, k, v))

    def call() -> torch.Tensor:
        with torch.set_grad_enabled(trains):
            out: Any = sp.ops.attention(q, k, v, **config)
        return torch.autograd.grad(out, leaves, gradient)[0] if trains else out

    return call


def model_call(request: dict[str, Any]) -> Call:
    """A forward pass or a training step of a preset, with the weights of a seed."""
    case, device, dtype = request["case"], torch.device(request["device"]), getattr(torch, request["dtype"])
    family = FAMILIES[case["model"].partition("_")[0]]
    config = getattr(sp, f"SparsePrior{family}Config")
    config = config.from_preset(case["model"], image_size=case["pixels"], prior=yaml.safe_load(case["what"]))
    torch.manual_seed(0)
    model = getattr(sp, f"SparsePrior{family}ForImageClassification")(config).to(device, dtype)
    trains = case["pass"] == "training"
    model.train(trains)
    shape = (case["images"], config.num_channels, case["pixels"], case["pixels"])
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    labels = torch.zeros(case["images"], dtype=torch.long, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)  # the weights stay those that were drawn

    def call() -> torch.Tensor:
        if not trains:
            with torch.no_grad():
                return model(pixel_values=images).logits
        out = model(pixel_values=images, labels=labels)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return out.logits.detach()

    return call


def peak_of(call: Call, device: torch.device) -> int:
    """Bytes that torch allocates in a call at most."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces each of its steps
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def timed(call: Call, calls: int, device: torch.device) -> float:
    """Mean seconds of calls in a row."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / calls


def main() -> None:
    """Set up what the first line asks for; every other line asks for some calls."""
    if Path(sp.__file__).resolve().parents[1] != Path(sys.argv[1]).resolve():
        raise SystemExit(f"the library came from {sp.__file__}, not from {sys.argv[1]}")
    request: dict[str, Any] = json.loads(sys.stdin.readline())
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hf_sparseprior.ops")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    torch.set_num_threads(request["threads"])
    if request["keep_memory"]:
        from hf_sparseprior.training.allocator import keep_freed_memory

        keep_freed_memory()
    device = torch.device(request["device"])
    call = {"attention": attention_call, "model": model_call}[request["entry"]](request)
    out = call().double().flatten()
    logger.removeHandler(handler)
    logger.setLevel(logging.WARNING)
    some = out[torch.linspace(0, out.numel() - 1, 997).long()].tolist()
    ran = messages[0].partition(": ")[2].split(" (")[0] if messages else ""
    about = {"output": some, "memory": peak_of(call, device), "ran": ran, "seconds": timed(call, 1, device)}
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": timed(call, json.loads(line)["calls"], device)}), flush=True)
