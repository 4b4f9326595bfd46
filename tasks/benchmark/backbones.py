"""Time and memory of backbones at the sizes of dense prediction.

A forward pass of one image without gradients, as `backbone` of mmsegmentation and mmdetection runs it. Every
measurement is a process of its own: it makes the model and the image, calls once to make tables, and then times calls.
Memory is what torch allocates beyond model and image: tables that stay, and the peak of a call. Rounds go through all
sizes, models and priors and then start again, so that an early end leaves a fair comparison, and ratios to dense are
taken round by round.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hf_sparseprior.base.families import preset_family
from tasks.benchmark import lone_process, report
from tasks.benchmark.commands import DENSE
from tasks.benchmark.entry import Benchmark, Case, Session, turned, unique
from tasks.benchmark.model_contenders import check_preset, preset_config
from tasks.benchmark.timing import Call


def measure_backbone(case: Case, settings: Mapping[str, Any]) -> Case:
    """What `lone_process.measured_call` returns of one image and one backbone, and bytes of the weights."""
    device, dtype = torch.device(settings["device"]), getattr(torch, settings["dtype"])
    report.set_cpu(settings["threads"], settings["keep_memory"])
    torch.manual_seed(0)
    config = preset_config(case["model"], case["pixels"], case["prior"])
    backbone: Any = preset_family(case["model"]).backbone
    backbone = backbone(config).to(device, dtype).eval()
    image = torch.randn(1, 3, case["pixels"], case["pixels"], device=device, dtype=dtype)

    def set_up() -> Call:
        return lambda: backbone(pixel_values=image)

    with torch.no_grad():
        found = lone_process.measured_call(set_up, device)
    return {**found, "weights": sum(parameter.nbytes for parameter in backbone.parameters())}


class Backbones(Benchmark):
    """The entry."""

    def check(self, arguments: argparse.Namespace) -> None:
        """A bad name or size ends the command before the first measurement."""
        for model in arguments.models:
            if preset_family(model).backbone is None:
                raise ValueError(f"--models {model}: {preset_family(model).title} has no backbone")
            check_preset(model, arguments)

    def plan(self, arguments: argparse.Namespace) -> Iterable[list[Case]]:
        """Rounds, in each of them sizes, models and priors, the priors in turns."""
        models, priors, sizes = map(unique, (arguments.models, arguments.priors, sorted(arguments.sizes)))
        for number in range(arguments.rounds):
            for pixels in sizes:
                for model in models:
                    for prior in turned(priors, number):
                        yield [{"model": model, "pixels": pixels, "prior": prior, "round": number}]

    def measure(self, cases: list[Case], session: Session) -> list[Case] | None:
        """In a process of its own."""
        return session.alone(measure_backbone, cases[0])


BENCHMARK = Backbones(name="backbones", keys=("model", "pixels", "prior"), bases=(DENSE,), size="pixels")
