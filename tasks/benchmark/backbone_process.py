"""One measurement of a backbone, in a process of its own (tasks/benchmark/backbones.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hf_sparseprior.base.families import preset_family
from hf_sparseprior.training import StopRequest
from hf_sparseprior.training.allocator import keep_freed_memory
from tasks.benchmark import lone_process
from tasks.benchmark.model import preset_config
from tasks.benchmark.timing import Call


def measure(model: str, prior: str, pixels: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds a call and bytes of its peak, of one image and one backbone.

    Args:
        model: name of a preset. prior: its name. pixels: side of the image.
        settings: dtype, device, threads and keep_memory.

    Returns:
        What `lone_process.measured_call` returns, and bytes of the weights.
    """
    device, dtype = torch.device(settings["device"]), getattr(torch, settings["dtype"])
    torch.set_num_threads(settings["threads"])
    if settings["keep_memory"]:
        keep_freed_memory()
    torch.manual_seed(0)
    backbone = preset_family(model).backbone(preset_config(model, pixels, prior)).to(device, dtype).eval()
    image = torch.randn(1, 3, pixels, pixels, device=device, dtype=dtype)

    def set_up() -> Call:
        return lambda: backbone(pixel_values=image)

    with torch.no_grad():
        found = lone_process.measured_call(set_up, device)
    return {**found, "weights": sum(parameter.nbytes for parameter in backbone.parameters())}


def measured_alone(server: Any, arguments: tuple[Any, ...], limit: int, seconds: float, stop: StopRequest) -> Any:
    """`measure` as `lone_process.measured_alone` does it."""
    return lone_process.measured_alone(server, measure, arguments, limit, seconds, stop)
