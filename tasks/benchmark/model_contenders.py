"""Whole models that take turns: a prior, a forced backend, transformers' own class, a copy in place of attention."""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_sparseprior.attention.choice import BACKENDS, register_backend, unregister_backend
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.base.families import preset_family
from hf_sparseprior.base.variables import variables_set
from hf_sparseprior.convert.checkpoint import convert_checkpoint, target_formats
from tasks.benchmark import report
from tasks.benchmark.commands import DENSE, STOCK
from tasks.benchmark.timing import Call, SetUp

COPY = "copy_attention"


class CopyAttention(torch.autograd.Function):
    """Attention's unavoidable traffic and nothing else: q, k, v are read and out is written, so are three gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, T, D), in the layout of q."""
        return torch.addcmul(q, k, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of as many bytes as those of attention."""
        return grad.clone(), grad.clone(), grad.clone()


def _run_copy(request: AttentionRequest) -> tuple[Tensor, None]:
    return CopyAttention.apply(request.q, request.k, request.v), None


@contextmanager
def forced_backend(name: str | None) -> Iterator[None]:
    """Inside, every attention runs on this backend. None leaves the choice. `COPY` is a backend only inside."""
    if name is None:
        yield
        return
    if name == COPY:
        register_backend(COPY, can_run=lambda request: None, run=_run_copy, priority=-1)
    try:
        with variables_set({"SPARSEPRIOR_BACKEND": name}):
            yield
    finally:
        if name == COPY:
            unregister_backend(COPY)


@dataclass(frozen=True)
class Contender:
    """A prior, and the backend that it is forced to, if any. `STOCK` is no backend but the class of transformers."""

    prior: str | dict[str, Any]
    backend: str | None = None


def parse_contenders(texts: Sequence[str]) -> dict[str, Contender]:
    """Contenders by name, from PRIOR or PRIOR@BACKEND; the ceiling comes last.

    Raises:
        ValueError: for an unknown backend or a prior that is no YAML.
    """
    found = {}
    for text in texts:
        if text == STOCK:
            found[text] = Contender(DENSE, STOCK)
            continue
        prior, at, backend = text.rpartition("@") if "@" in text else (text, "", "")
        if at and backend not in BACKENDS:
            raise ValueError(f"--priors {text!r}: backend {backend!r} must be one of {', '.join(BACKENDS)}")
        found[text] = Contender(report.from_yaml("--priors", prior), backend or None)
    return {**found, COPY: Contender("dense", COPY)}


def preset_config(preset: str, resolution: int, prior: Any = "dense") -> Any:
    """The config of a preset of any family, for square images of so many pixels.

    Raises:
        ValueError: for an unknown preset, a bad resolution or prior.
    """
    return preset_family(preset).make_config(preset, image_size=resolution, prior=prior)


def check_preset(preset: str, arguments: argparse.Namespace) -> None:
    """Raise ValueError for a size or a prior of `arguments` that a preset does not take, and an unknown preset."""
    for pixels in arguments.sizes:
        report.check_positive(sizes=pixels)
        for prior in arguments.priors:
            preset_config(preset, pixels, prior)


class ModelRun:
    """A model at one resolution, its images and its optimizer."""

    def __init__(
        self, preset: str, contender: Contender, resolution: int, batch: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        config = preset_config(preset, resolution, contender.prior)
        torch.manual_seed(0)
        model = preset_family(preset).classifier(config)
        stock = contender.backend == STOCK
        self.model = (as_stock(model) if stock else model).to(device, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.images = torch.randn(batch, config.num_channels, resolution, resolution, device=device, dtype=dtype)
        self.labels = torch.randint(config.num_labels, (batch,), device=device)
        self.backend = None if stock else contender.backend
        self.choices: list[str] = []

    def set_up(self, key: str) -> SetUp:
        """What `timing.measure` takes for one pass. The first call notes which backend ran, in `choices`."""

        def ready() -> Call:
            self.model.train(key == "training")
            call = self.training_step if key == "training" else self.forward
            with noted_choices(self.choices):
                call()
            return call

        return ready

    @property
    def ran(self) -> str:
        """The backend of the first layer."""
        return first_choice(self.choices) or STOCK

    def forward(self) -> Tensor:
        """Logits, no gradients."""
        with torch.no_grad(), forced_backend(self.backend):
            return self.model(pixel_values=self.images).logits

    def training_step(self) -> None:
        """Forward, backward, AdamW."""
        with forced_backend(self.backend):
            self.model(pixel_values=self.images, labels=self.labels).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def stock_format(family: str) -> str | None:
    """The model type of transformers that a family is written as; None: there is none."""
    formats = target_formats()
    return next((name for name in formats if family in formats[name] and name in CONFIG_MAPPING_NAMES), None)


def as_stock(model: Any) -> Any:
    """A dense model as transformers' own class, which runs PyTorch's fused attention."""
    with tempfile.TemporaryDirectory() as scratch:
        ours, theirs = Path(scratch, "ours"), Path(scratch, "theirs")
        model.save_pretrained(ours)
        convert_checkpoint(ours, theirs, to=stock_format(model.config.model_type))
        return AutoModelForImageClassification.from_pretrained(theirs, attn_implementation="sdpa")


@contextmanager
def noted_choices(messages: list[str]) -> Iterator[None]:
    """Collect what the chooser of backends logs: one message a layer."""
    logger = logging.getLogger("hf_sparseprior.ops")
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    messages.clear()
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def first_choice(messages: list[str]) -> str:
    """The backend that the first of the chooser's messages names; "" if it said nothing."""
    return messages[0].partition(": ")[2].split(" (")[0] if messages else ""
