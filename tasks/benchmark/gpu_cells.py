"""What `gpu --quick` and `gpu --models` share: cells in a fixed order, and a folder for what they are measured with."""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import hf_sparseprior
from hf_sparseprior.kernels import triton_sizes
from hf_sparseprior.runs.environment import environment
from tasks.benchmark import report
from tasks.benchmark.commands import COUNTED, GPU_CONTENDERS, MINUTES, SDPA_KERNELS
from tasks.benchmark.entry import Benchmark, Case, Session
from tasks.benchmark.gpu import Gpu, limit_time

# What a call on a GPU runs.
SOURCES = ("kernels", "attention")
# Options of `gpu` that do not act here, and their defaults.
OTHERS = {"tokens": None, "batch": None, "contenders": [*GPU_CONTENDERS, *SDPA_KERNELS], "cases": list(COUNTED)}


def sources_hash() -> str:
    """A hash of the source of attention and its kernels."""
    root = Path(hf_sparseprior.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for room in SOURCES for path in (root / room).glob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def made_with(device: torch.device) -> dict[str, Any]:
    """What measurements depend on: the device, versions, the source of the kernels, tuned sizes of blocks."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    sizes = triton_sizes.tuned(triton_sizes.device_key(device))
    versions = {**environment()["versions"], "triton": version("triton")}
    return {"device_name": name, "versions": versions, "kernels": sources_hash(), "block_sizes": sizes}


class Cells(Gpu):
    """An entry whose cells do not depend on options."""

    def cells(self) -> Iterable[list[Case]]:
        """The cells, in the order in which they are measured."""
        raise NotImplementedError

    def variant(self, arguments: argparse.Namespace) -> Benchmark:
        """This one."""
        return self

    def check(self, arguments: argparse.Namespace) -> None:
        """Options that do not act are refused; the folder is that of what is measured."""
        mode = self.name.replace("gpu_", "--")
        for name, default in self.others().items():
            if (value := getattr(arguments, name)) != default:
                text = " ".join(map(str, value)) if isinstance(value, list) else value
                raise ValueError(f"--{name.replace('_', '-')} {text}: {mode} has cells of its own")
        report.check_positive(rounds=arguments.rounds)
        limit_time(arguments, MINUTES)
        made = made_with(torch.device(arguments.device))
        arguments.kernels, arguments.triton = made["kernels"], made["versions"]["triton"]
        arguments.block_sizes = made["block_sizes"]
        key = hashlib.sha256(json.dumps([made, arguments.dtype], sort_keys=True).encode()).hexdigest()[:8]
        device = re.sub(r"[^a-z0-9]+", "-", made["device_name"].lower()).strip("-")
        arguments.out = arguments.out / f"{self.name.removeprefix('gpu_')}-{device}-{arguments.dtype}-{key}"

    def others(self) -> dict[str, Any]:
        """Options that do not act here, and their defaults."""
        return OTHERS

    def plan(self, arguments: argparse.Namespace) -> Iterable[list[Case]]:
        """The cells, each once."""
        return self.cells()

    def shown(self, records: Sequence[Case], settings: Mapping[str, Any]) -> Sequence[Case]:
        """The records, and the cells that were not reached."""
        there = {self.cell_of(own) for own in records}
        missing = {self.cell_of(own): own for cases in self.cells() for own in cases if self.cell_of(own) not in there}
        return [*records, *({**own, "failed": report.NOT_MEASURED} for own in missing.values())]

    def cell_of(self, case: Mapping[str, Any]) -> str:
        """What makes it this one, whatever the round."""
        return json.dumps([case[key] for key in self.keys])

    def measure(self, cases: list[Case], session: Session) -> list[Case]:
        """As `Gpu`; what is wrong is a reason, because other cells may be right. Each record has its CPU."""
        gc.collect()  # so that no table of an earlier cell takes room
        start = time.monotonic()
        found = super().measure(cases, session)
        also = {"cpu": environment()["hardware"]["cpu"], "took": time.monotonic() - start}
        return [{**own, **also} for own in found]

    def expected_seconds(self, cases: Sequence[Case], records: Sequence[Case]) -> float:
        """As long as the longest of the same mode took: compiling takes most of it."""
        mode = self.keys[-2]
        return max((own.get("took", 0.0) for own in records if own[mode] == cases[0][mode]), default=0.0)
