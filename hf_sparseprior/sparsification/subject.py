"""The model that is made faster: its attention layers, whose pairs can be changed one by one, and what it gives."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_sparseprior.adapters.stock import apply_prior
from hf_sparseprior.adapters.stock_attention import PRIOR_MODULE, stock_priors
from hf_sparseprior.adapters.stock_encoder import find_encoder
from hf_sparseprior.adapters.timm_encoder import has_timm
from hf_sparseprior.analysis.layers import attention_layers
from hf_sparseprior.base.checks import first_line
from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.base.resolved import ResolvedPrior
from hf_sparseprior.cli.deployment import own_copy
from hf_sparseprior.cli.exportable import Exportable, vision_config
from hf_sparseprior.models.base_config import as_pair
from hf_sparseprior.models.pretrained import copy_weights
from hf_sparseprior.patterns.supports import redraws
from hf_sparseprior.priors.layer import PriorAttention
from hf_sparseprior.priors.layer_priors import has_layers
from hf_sparseprior.priors.prior import parse_prior, prior_name, pruning_of, resolve_prior
from hf_sparseprior.sparsification.candidates import Candidate

TINY = 1e-30  # in place of nothing that is divided by
ELSEWHERE = ("_name_or_path", "transformers_version")  # what a config says that is not of the model
MERGING = "tome"  # the extra that merges patches
KL, CHANGE = "KL divergence of class probabilities from the dense model's", "relative change of the output's square"


@dataclass(eq=False)
class Layer:
    """An attention layer.

    holder, name: the module that holds the layer's prior, and under which name. attention: the module whose call is
    timed. block: the transformer block around it. grid: (height, width) of the patches that see each other. dense: the
    prior that the layer came with. takes_support: False for one that stays dense.
    """

    holder: nn.Module
    name: str
    attention: nn.Module
    block: nn.Module
    grid: tuple[int, ...]
    dense: PriorAttention
    takes_support: bool = True

    @property
    def width(self) -> int:
        """C, of its tokens."""
        return max(weight.shape[-1] for weight in self.attention.parameters() if weight.ndim > 1)

    @contextmanager
    def changed(self, after: PriorAttention | None) -> Iterator[None]:
        """Inside the block the layer has other pairs, those of `dense.with_pairs(prior)`; None: its own."""
        before, timed = self.dense, self.attention
        if after is not None:
            setattr(self.holder, self.name, after)
            self.attention = after if timed is before else timed
        try:
            yield
        finally:
            setattr(self.holder, self.name, before)
            self.attention = timed


class Subject:
    """A dense model of ours, of transformers or of timm, for images.

    Args:
        model: it is copied. Decays, extras and whatever else it has stay.
        sides: (height, width) of the images; None: those that it is configured for.
        device: where it runs.

    Raises:
        ValueError: for a model that is not dense, drops tokens, takes clips, draws numbers in evaluation, or has no
            attention layer that takes a prior.
    """

    def __init__(self, model: Any, sides: tuple[int, int] | None, device: torch.device) -> None:
        self.device = device
        self.in_sequence: bool | None = None  # kept by `sensitivity.read_in_sequence`
        self.original = own_copy(model)  # what is built starts from it
        _with_sdpa(self.original)
        self.exported = Exportable(copy.deepcopy(self.original), sides)
        self.dense: Any = self.exported.model.to(device)  # resized
        self.sides, self.ours = self.exported.sides, self.exported.family is not None
        # Whether it is a model of transformers that interpolates positions when it is asked to.
        self.interpolates = not self.ours and "interpolate_pos_encoding" in signature(self.dense.forward).parameters
        if self.exported.num_frames is not None:
            raise ValueError(f"{self.exported.title} takes clips; sparsify is for models of images")
        if not self.ours and stock_priors(self.original):
            raise ValueError(
                f"{self.exported.title} must have no prior; hf_sparseprior.remove_prior(model) takes it away"
            )
        self.model: Any = self.dense if self.ours else apply_prior(copy.deepcopy(self.original), "dense").to(device)
        self.layers = self._our_layers() if self.ours else self._stock_layers()
        patches = max(math.prod(layer.grid) for layer in self.layers)
        # Layers that see the whole image, whose pairs grow faster than the image.
        self.see_all = [] if self.windows else [layer for layer in self.layers if math.prod(layer.grid) == patches]
        for layer in self.layers:
            _check_dense(layer.dense.prior, self.exported.title)
        if not any(layer.takes_support for layer in self.layers):
            raise ValueError(f"{self.exported.title} has no attention layer that takes a prior")
        with torch.no_grad():
            once, again = (self.outputs(self.images(1)) for _ in range(2))
        if once.shape != again.shape or not torch.allclose(once, again, rtol=1e-2, atol=1e-2, equal_nan=True):
            raise ValueError(f"{self.exported.title} gives other outputs in each call for one image")

    def _our_layers(self) -> list[Layer]:
        stages = [stage for stage in self.model.config.stages for _ in range(stage.num_layers)]
        self.windows = any(stage.num_windows > 1 for stage in stages)
        names = {module: name for name, module in self.model.named_modules()}
        layers = []
        for attention, stage in zip(attention_layers(self.model), stages, strict=True):
            holder, _, name = names[attention].rpartition(".")
            parent = self.model.get_submodule(holder)
            layer = Layer(parent, name, attention, _block(self.model, holder), stage.grid, attention)
            layer.takes_support = stage.takes_prior
            layers.append(layer)
        return layers

    def _stock_layers(self) -> list[Layer]:
        encoder: Any = find_encoder(self.original)
        priors, layers = stock_priors(self.model), []
        self.windows = encoder.family.windows
        try:
            with torch.no_grad():
                self.outputs(self.images(1))
        except (AssertionError, RuntimeError) as error:
            size, reason = "x".join(map(str, self.sides)), first_line(error)
            hint = "; make it with dynamic_img_size=True" if has_timm(self.original) else ""
            raise ValueError(f"{self.exported.title} takes no images of {size} pixels ({reason}){hint}") from None
        for (name, module), prior in zip(encoder.attention.items(), priors, strict=True):
            grid = prior.layout.grid or encoder.grid_of(module)  # windows know theirs alone
            attention = self.model.get_submodule(name)
            layers.append(Layer(attention, PRIOR_MODULE, attention, _block(self.model, name), grid, prior))
        return layers

    @cached_property
    def digest(self) -> str:
        """SHA-256 of class, config and weights."""
        digest = hashlib.sha256(type(self.dense).__name__.encode())
        if (config := getattr(self.original, "config", None)) is not None:
            fields = {name: value for name, value in config.to_dict().items() if name not in ELSEWHERE}
            digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
        for name, value in sorted(self.original.state_dict().items()):
            digest.update(f"{name}{tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    # ---- what it gives ----------------------------------------------------------------------------------------------

    def outputs(self, pixels: Tensor, model: Any = None) -> Tensor:
        """Logits (B, classes) of a model, default `model`; of one without a classifier its features."""
        model = self.model if model is None else model
        pixels = pixels.to(self.device)
        if self.exported.in_timm:
            return model(pixels)
        options = {}
        if self.interpolates and tuple(pixels.shape[-2:]) != as_pair(vision_config(model).image_size):
            options["interpolate_pos_encoding"] = True
        output = model(pixel_values=pixels, **options)
        if (logits := output.get("logits")) is not None:
            return logits
        if (maps := output.get("feature_maps")) is not None:
            return torch.cat([each.flatten(1) for each in maps], 1)
        pooled = output.get("pooler_output")
        if (states := output.get("last_hidden_state") if pooled is None else pooled) is None:
            raise ValueError(f"{self.exported.title} gives neither logits nor features")
        return states

    @cached_property
    def classifies(self) -> bool:
        """Whether its outputs are logits of classes of which an image has one."""
        model = self.exported.model
        problem = getattr(getattr(model, "config", None), "problem_type", None)
        named = "logits" in self.exported.named(self.images(1))
        with torch.no_grad():
            outputs = self.outputs(self.images(1))
        alone = problem in (None, "single_label_classification")
        return named and alone and outputs.ndim == 2 and outputs.shape[1] > 1

    def loss(self, changed: Tensor, dense: Tensor) -> Tensor:
        """What a change does to outputs, (B,): `KL` of a classifier, `CHANGE` of others; see `loss_name`."""
        changed, dense = changed.double(), dense.double()
        if self.classifies:
            teacher, student = dense.log_softmax(-1), changed.log_softmax(-1)
            return (teacher.exp() * (teacher - student)).sum(-1).clamp_min(0.0)
        return (changed - dense).flatten(1).square().sum(1) / dense.flatten(1).square().sum(1).clamp_min(TINY)

    @property
    def loss_name(self) -> str:
        """What `loss` is."""
        return KL if self.classifies else CHANGE

    def images(self, batch: int) -> Tensor:
        """Random images, for timing."""
        return self.exported.images(batch).to(self.device)

    # ---- its layers with other pairs --------------------------------------------------------------------------------

    def prior_of(self, layer: Layer, candidate: Candidate) -> ResolvedPrior:
        """The prior of a layer with a candidate.

        Raises:
            ValueError: if the layer cannot have it.
        """
        if not layer.takes_support:
            raise ValueError("this layer takes no prior")
        slots = {**layer.dense.prior, "support": candidate.support, "predictor": candidate.predictor}
        prior = resolve_prior(slots, layer.dense.num_supports, layer.grid)
        if self.ours:
            self.model.config.check_prior(prior)
        elif redraws(prior["support"]):
            raise ValueError("pairs that are drawn anew are for models of ours")
        return prior

    def merging(self, keep: float) -> Any:
        """The dense model that merges similar patches until this share of them is left.

        Raises:
            ValueError: for a model that cannot.
        """
        if MERGING not in EXTRAS:
            raise ValueError(f"this version has no extra {MERGING!r}")
        if not self.ours or isinstance(self.dense.config.prior, list) or has_layers(self.dense.config.prior):
            raise ValueError(f"{self.exported.title} has no token merging here")
        prior = self.dense.config.prior
        return self._with_prior({**prior, "extras": [*prior["extras"], {"name": MERGING, "keep": keep}]})

    def _with_prior(self, prior: Any) -> Any:
        """The dense model of ours with a prior of a config."""
        config = copy.deepcopy(self.dense.config)
        config.prior = prior
        model = type(self.dense)(config)
        copy_weights(self.dense, model)
        return model.eval().requires_grad_(False).to(self.device)

    @contextmanager
    def changed(self, priors: Sequence[ResolvedPrior | None]) -> Iterator[None]:
        """Inside the block each layer has the prior that is given; None: its own."""
        with ExitStack() as stack:
            for layer, prior in zip(self.layers, priors, strict=True):
                stack.enter_context(layer.changed(None if prior is None else layer.dense.with_pairs(prior)))
            yield

    def spec(self, priors: Sequence[ResolvedPrior | None]) -> dict[str, Any]:
        """The prior of a model with these; None: the layer's own."""
        every = [
            layer.dense.prior if prior is None else prior for layer, prior in zip(self.layers, priors, strict=True)
        ]
        # In a family of ours, layers that take no prior are not counted.
        counted = [layer.takes_support or not self.ours for layer in self.layers]
        return {"layers": [prior for prior, counts in zip(every, counted, strict=True) if counts]}

    def built(self, priors: Sequence[ResolvedPrior | None]) -> Any:
        """A model with these priors, ready to be saved; None: the layer's own.

        Raises:
            ValueError: if it cannot have them.
        """
        spec = self.spec(priors)
        if not self.ours:
            return apply_prior(copy.deepcopy(self.original), spec).to(self.device)
        return self._with_prior(spec)


def _with_sdpa(model: Any) -> None:
    """The dense model is timed with the attention that dense layers of the result have. One that is written out would
    hide what a prior saves; others take no float32, or are compiled.
    """
    if isinstance(model, PreTrainedModel) and model._supports_sdpa and model.config._attn_implementation != "sdpa":
        model.set_attn_implementation("sdpa")


def _check_dense(prior: ResolvedPrior, title: str) -> None:
    """Raise ValueError for a layer that leaves pairs out already."""
    slots = parse_prior(prior)
    others = slots["predictor"] is not None or slots["mixer"] != "softmax" or pruning_of(prior) is not None
    if prior["support"]["name"] != "dense" or others:
        raise ValueError(f"{title} must be dense; prior {prior_name(prior)!r} leaves pairs out already")


def _block(model: nn.Module, name: str) -> nn.Module:
    """The module in a list of modules that holds the module of this name."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if isinstance(model.get_submodule(".".join(parts[: end - 1])), (nn.ModuleList, nn.Sequential)):
            return model.get_submodule(".".join(parts[:end]))
    return model.get_submodule(name)


@dataclass
class Call:
    """A call of a layer's attention with what it got in a forward."""

    layer: Layer
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> object:
        """Run it."""
        return self.layer.attention(*self.args, **self.kwargs)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the tensors that it gets, by which layers of one kind are known."""
        given = [*self.args, *self.kwargs.values()]
        return [tuple(value.shape) for value in given if isinstance(value, Tensor)]


def captured(subject: Subject, pixels: Tensor) -> list[Call]:
    """For each layer a call of its attention with what it gets in a forward of the images."""
    calls: dict[int, Call] = {}

    def hook(number: int, layer: Layer) -> Callable[..., None]:
        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[number] = Call(layer, args, kwargs)

        return see

    handles = [
        layer.attention.register_forward_pre_hook(hook(number, layer), with_kwargs=True)
        for number, layer in enumerate(subject.layers)
    ]
    try:
        with torch.no_grad():
            subject.outputs(pixels)
    finally:
        for handle in handles:
            handle.remove()
    return [calls[number] for number in range(len(subject.layers))]
