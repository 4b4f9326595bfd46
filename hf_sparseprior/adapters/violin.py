"""Learned decays as adapters of peft: VIOLIN alone, with a few kilobytes a task, or in one adapter with LoRA or DoRA.

```python
model = peft.get_peft_model(model, sp.ViolinAdapterConfig(modules_to_save=["classifier"]))
```

The model is ours, or a stock transformers one that `apply_prior` knows; its support, if it has one, stays. peft does
the rest: saving, loading, several adapters, switching, disabling, deleting. M multiplies the logits of pairs of
patches, which no weight of the model does, so `merge_and_unload` merges LoRA and leaves the decay as the model's prior.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import json
import os
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import LoraConfig, LoraModel, PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, _maybe_include_all_linear_layers
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.utils import ADAPTER_CONFIG_NAME

from hf_sparseprior.adapters.saved_adapter import check_fields
from hf_sparseprior.adapters.stock import attach, detach, own_prior
from hf_sparseprior.adapters.stock_attention import APPLIED, Applied, stock_priors
from hf_sparseprior.adapters.stock_encoder import find_encoder
from hf_sparseprior.base.checks import did_you_mean
from hf_sparseprior.base.formats import ADAPTER_FORMAT, check_format
from hf_sparseprior.base.json_files import read_json_object
from hf_sparseprior.base.numbered import keyed
from hf_sparseprior.base.resolved import PER_LAYER, ResolvedDecay, ResolvedPrior, Time, with_decay
from hf_sparseprior.models.base_config import BaseConfig
from hf_sparseprior.patterns.decay import DECAYS, GROWING, Decay, make_decay, resolve_decay
from hf_sparseprior.patterns.supports import check_time
from hf_sparseprior.priors.layer import PriorAttention, SparsePriorAttention
from hf_sparseprior.priors.layer_priors import changed_given, changed_layers, has_layers
from hf_sparseprior.priors.prior import is_prior_weight, resolve_prior
from hf_sparseprior.saving.card import add_adapter_requirement

ATTACHED = "_sparse_prior_adapters"  # the attribute of a stock model whose priors serve adapters alone
PEFT_ROOT = "base_model.model."  # what a PeftModel puts before the names of its model


class AdapterType(str, enum.Enum):  # noqa: UP042, peft's own types are of this kind
    """Values of `peft_type` that peft does not have. Where this package is missing, peft's KeyError quotes them."""

    VIOLIN = "HF_SPARSEPRIOR_VIOLIN"
    LORA_VIOLIN = "HF_SPARSEPRIOR_LORA_VIOLIN"


# ---- configs --------------------------------------------------------------------------------------------------------

DECAY_HELP = (
    "The decay: 'violin', another name of hf_sparseprior.patterns.decay.DECAYS, or a dict of a name and settings, as "
    "in a prior, e.g. {'name': 'violin', 'curves': ['hilbert', 'hilbert_t'], 'init': 'moving'}. Unless it says "
    "otherwise, `init` is 'growing', which does not change the model's output (to 1e-5) and lets M move; with a gamma "
    "or learn_beta=False it is 'identity'. Saved with every setting."
)
TIME_HELP = (
    "How the decay sees the frames of a clip that attention sees together, as `time` of a prior: 'frame', 'clip' or "
    "'axes'. None: as the model's prior does, per frame without one."
)
LAYERS_HELP = "Numbers of the attention layers that get the decay, from 0, of those that take one. None: all."
HEADS_HELP = (
    "Written when the adapter is made: the heads of each attention layer of its model. Another model is refused."
)
BASE_HELP = (
    "Written when the adapter is made: the support of its model and the names of its extras. A model with others is "
    "refused; None takes every model."
)
FORMAT_HELP = "Number of the format of the saved adapter, not to be given. A newer one is refused."


@dataclass
class _DecayFields:
    """Fields and checks of both configs below, each of which also derives from one of peft's."""

    adapter_type: ClassVar[AdapterType]

    decay: str | dict[str, Any] = field(default="violin", metadata={"help": DECAY_HELP})
    time: str | None = field(default=None, metadata={"help": TIME_HELP})
    decay_layers: list[int] | None = field(default=None, metadata={"help": LAYERS_HELP})
    decay_heads: list[int] | None = field(default=None, metadata={"help": HEADS_HELP})
    base_prior: dict[str, Any] | None = field(default=None, metadata={"help": BASE_HELP})
    sparse_prior_format: int = field(default=ADAPTER_FORMAT, metadata={"help": FORMAT_HELP})

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        self.peft_type = self.adapter_type
        check_format("the adapter", self.sparse_prior_format, ADAPTER_FORMAT)
        self.decay = _resolve_adapter_decay(self.decay)
        if self.time is not None:
            check_time(self.time)
        _check_layers(self.decay_layers)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs: Any) -> Any:
        """As in peft, which drops keys that it does not know.

        Raises:
            ValueError: for a bad or unknown field of adapter_config.json; the message has the file and the field.
        """
        file = Path(pretrained_model_name_or_path, subfolder or "", ADAPTER_CONFIG_NAME)
        try:
            check_fields(read_json_object(file) if os.path.lexists(file) else {"peft_type": cls.adapter_type.value})
            return super().from_pretrained(pretrained_model_name_or_path, subfolder, **kwargs)  # type: ignore[misc]
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """As in peft, and README.md says which package the adapter needs."""
        super().save_pretrained(save_directory, **kwargs)  # type: ignore[misc]
        add_adapter_requirement(Path(save_directory))


@dataclass
class ViolinAdapterConfig(_DecayFields, PeftConfig):
    """Config of an adapter that is a learned decay: L * H * (C + 2) scalars for VIOLIN, 1440 on DeiT-B.

    Args:
        decay: name, or dict of a name and settings; "violin" with init "growing" is the default.
        time: how the decay sees the frames of a clip, "frame", "clip" or "axes"; None for as the model's prior does.
        decay_layers: numbers of the layers that get it; None for all.
        decay_heads: the heads of each layer of the model, written when the adapter is made; not to be given.
        base_prior: the support and the extras of the model, written when the adapter is made; not to be given.
        sparse_prior_format: the number of the format of the saved adapter; not to be given.
        modules_to_save: further modules that are trained and saved whole.

    Raises:
        ValueError: the message has the value and what is allowed.
    """

    adapter_type = AdapterType.VIOLIN
    target_modules = None  # peft asks every config for it; the layers are found from the model

    modules_to_save: list[str] | None = field(
        default=None,
        metadata={"help": "Modules that are trained and saved whole, such as a new head: ['classifier']."},
    )


@dataclass
class LoraViolinConfig(_DecayFields, LoraConfig):
    """Config of LoRA, or DoRA, with a learned decay in the same adapter, for one file and one name.

    Args:
        decay, time, decay_layers, decay_heads, base_prior, sparse_prior_format: as in `ViolinAdapterConfig`.
        The other fields are those of peft's `LoraConfig`.
    """

    adapter_type = AdapterType.LORA_VIOLIN

    @classmethod
    def from_lora(cls, config: LoraConfig, **settings: Any) -> LoraViolinConfig:
        """A config of LoRA or DoRA with a decay added; `settings` are `decay`, `time` and `decay_layers`."""
        given = {item.name: getattr(config, item.name) for item in dataclasses.fields(config) if item.init}
        return cls(**{**given, **settings})


def _resolve_adapter_decay(decay: Any) -> dict[str, Any]:
    given = {"name": decay} if isinstance(decay, str) else decay
    if not isinstance(given, dict) or not isinstance(given.get("name"), str) or given["name"] not in DECAYS:
        hint = did_you_mean(given.get("name") if isinstance(given, dict) else None, DECAYS)
        raise ValueError(
            f"decay={decay!r} must be one of {', '.join(DECAYS)}, or a dict of its name and settings{hint}"
        )
    moves = given.get("gamma") is None and given.get("learn_beta", True) is not False
    return resolve_decay({"init": GROWING if moves else "identity", **given})  # type: ignore[return-value]


def _check_layers(layers: Any) -> None:
    numbers = layers if isinstance(layers, (list, tuple)) and layers else [None]
    if layers is not None and not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"decay_layers={layers!r} must be None or a list of layer numbers from 0")


# ---- layer ----------------------------------------------------------------------------------------------------------


class DecayLayer(nn.Module, BaseTunerLayer):
    """The decays that adapters give to one attention layer. At most one of them is active.

    Args:
        attention: the attention module, whose weights say the device.
        num_heads: H.
    """

    # "bias" in the name keeps alpha and beta out of weight decay in transformers' own Trainer, which decides by names.
    adapter_layer_names = ("decay_biases",)
    # Of the layer that it wraps, as peft's other layers have them: it wraps none.
    weight = bias = None

    def __init__(self, attention: nn.Module, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.decay_biases = nn.ModuleDict()
        self.times: dict[str, Time] = {}
        self._disable_adapters = False
        self._active_adapter: list[str] = []
        self.merged_adapters: list[str] = []
        self._attention = (attention,)  # in a tuple, because it is no child of this module

    def add(self, adapter_name: str, decay: ResolvedDecay, time: Time) -> None:
        """Give an adapter a new decay; `decay` is resolved, `time` as in a prior."""
        self.times[adapter_name] = time
        self.decay_biases[adapter_name] = make_decay(decay, self.num_heads)
        self._move_adapter_to_device_of_base_layer(adapter_name)

    def active_decay(self) -> Decay | None:
        """The decay of the active adapter; None if it has none in this layer, or if adapters are disabled."""
        name = self._active_name()
        return None if name is None else self.decay_biases[name]  # type: ignore[return-value]

    def active_time(self) -> Time | None:
        """How the decay of the active adapter sees the frames of a clip; None without one."""
        name = self._active_name()
        return None if name is None else self.times[name]

    def _active_name(self) -> str | None:
        """The active adapter that has a decay in this layer."""
        if not self._disable_adapters:
            for name in self._active_adapter:
                if name in self.decay_biases:
                    return name
        return None

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Activate adapters by name.

        Raises:
            ValueError: if more than one of them has a decay in this layer.
        """
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        held = [name for name in names if name in self.decay_biases]
        if len(held) > 1:
            raise ValueError(f"adapters {held} have a decay each, and a layer takes one: activate one of them")
        super().set_adapter(names, inference_mode)

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Refused.

        Raises:
            ValueError: always.
        """
        raise ValueError(_NO_MERGE)

    def unmerge(self) -> None:
        """Nothing is ever merged."""

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        if adapter_name not in self.decay_biases:
            return
        decay, weight = self.decay_biases[adapter_name], next(self._attention[0].parameters())
        if not any(tensor.is_meta for tensor in decay.parameters()):
            decay.to(device or weight.device, torch.float64 if weight.dtype == torch.float64 else None)


_NO_MERGE = (
    "a learned decay cannot be merged: M multiplies the logits of pairs of patches, and no weight of the model does; "
    "keep the adapter, remove it with unload(), or take merge_and_unload(), which leaves it as the model's prior"
)
_NO_WEIGHTING = (
    "adapters with a learned decay have no weighted sum: M is not linear in its scalars; "
    "activate one of them with set_adapter"
)


# ---- models ---------------------------------------------------------------------------------------------------------


class _DecayTuner:
    """What both tuners below share, each of which also derives from one of peft's."""

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        super()._prepare_model(peft_config, model)  # type: ignore[misc]
        _check_saved_modules(peft_config, model)
        targets = _attention_layers(model)
        if not targets:
            setattr(model, ATTACHED, attach(model, None, for_adapters=True))
            targets = _attention_layers(model)
        if decayed := [name for name, module in targets.items() if module.decay_bias is not None]:
            raise ValueError(
                f"{type(model).__name__} has a decay of its own in {decayed[0]!r}, which an adapter cannot replace; "
                "give it a prior without a decay, or remove it with hf_sparseprior.remove_prior(model)"
            )
        for name, module in targets.items():
            if (mixer := module.prior["mixer"]) != "softmax":
                raise ValueError(
                    f"{type(model).__name__} has the mixer {mixer['name']!r} in {name!r}, which has no logits of pairs "
                    "for a decay to multiply"
                )
        layers = list(range(len(targets))) if peft_config.decay_layers is None else peft_config.decay_layers
        if max(layers) >= len(targets):
            raise ValueError(f"decay_layers={layers} must be below the {len(targets)} layers of {type(model).__name__}")
        heads = [module.num_heads for module in targets.values()]
        if peft_config.decay_heads not in (None, heads):
            made_for = _describe(peft_config.decay_heads)
            raise ValueError(
                f"decay_heads: the adapter is for {made_for}; {type(model).__name__} has {_describe(heads)}"
            )
        prior = _base_prior(model)
        if peft_config.base_prior not in (None, prior):
            made_for, has = (json.dumps(one, sort_keys=True) for one in (peft_config.base_prior, prior))
            raise ValueError(
                f"base_prior: the adapter is for a model with the prior {made_for}; {type(model).__name__} has {has}: "
                "apply the same prior first, or set base_prior to None in the adapter's config"
            )
        self._targets = {name for index, name in enumerate(targets) if index in layers}

    def _check_target_module_exists(self, peft_config: Any, key: str) -> Any:
        return key in self._targets

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        **options: Any,
    ) -> None:
        if isinstance(target, PriorAttention):
            if target.decay_adapter is None:
                target.decay_adapter = DecayLayer(parent, target.num_heads)
            target.decay_adapter.add(adapter_name, peft_config.decay, peft_config.time or target.time)
        else:
            super()._create_and_replace(  # type: ignore[misc]
                peft_config, adapter_name, target, target_name, parent, current_key=current_key, **options
            )

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """As in peft. No decay remains of an adapter that is refused."""
        configs: dict[str, Any] = self.peft_config  # type: ignore[attr-defined]
        # In a copy, because the user may give the same config to another model.
        configs[adapter_name] = copy.copy(configs[adapter_name])
        configs[adapter_name].decay = _resolve_over_time(configs[adapter_name], model)
        try:
            super().inject_adapter(model, adapter_name, *args, **kwargs)  # type: ignore[misc]
            configs[adapter_name].decay_heads = [module.num_heads for module in _attention_layers(model).values()]
            configs[adapter_name].base_prior = _base_prior(model)
        except Exception:
            layers = [module for module in model.modules() if isinstance(module, DecayLayer)]
            for layer in layers:
                if adapter_name in layer.decay_biases:
                    del layer.decay_biases[adapter_name]
            if not any(layer.decay_biases for layer in layers):
                remove_decays(model)
            raise

    def delete_adapter(self, adapter_name: str) -> None:
        """As in peft. If the deleted adapter was active, the first remaining one becomes active in every layer."""
        was_active = adapter_name in self.active_adapters  # type: ignore[attr-defined]
        super().delete_adapter(adapter_name)  # type: ignore[misc]
        if was_active:
            # peft asks only the first layer which adapters remain, and other layers may hold others.
            self.set_adapter(list(self.peft_config)[:1])  # type: ignore[attr-defined]

    def merge_adapter(self, *args: Any, **options: Any) -> None:
        """Refused.

        Raises:
            ValueError: always.
        """
        raise ValueError(_NO_MERGE)

    def _unload_and_optionally_merge(self, merge: bool = True, **options: Any) -> nn.Module:
        """As in peft. Where adapters are merged, the decay of one becomes the prior of the model.

        Raises:
            ValueError: for a decay that a prior cannot be. Nothing is changed then.
        """
        name = self._decay_to_keep(options.get("adapter_names")) if merge else None
        decay: Any = None if name is None else self.peft_config[name].decay  # type: ignore[attr-defined]
        model = super()._unload_and_optionally_merge(merge=merge, **options)  # type: ignore[misc]
        if name is not None:
            keep_decay(model, name, decay)
        else:
            remove_decays(model)
        return model

    def _decay_to_keep(self, adapter_names: list[str] | None) -> str | None:
        """The adapter, of those that are merged, that has a decay."""
        names = self.active_adapters if adapter_names is None else adapter_names  # type: ignore[attr-defined]
        layers = _attention_layers(self.model)  # type: ignore[attr-defined]
        held = {
            name: [
                layer.decay_adapter is not None and name in layer.decay_adapter.decay_biases
                for layer in layers.values()
            ]
            for name in dict.fromkeys(names)
        }
        held = {name: has for name, has in held.items() if any(has)}
        if len(held) > 1:
            raise ValueError(f"adapters {list(held)} have a decay each, and a model takes one: merge one of them")
        return next(iter(held), None)

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        mapped = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)  # type: ignore[misc]
        _check_names(model, adapter_name, mapped)
        return mapped


class ViolinModel(_DecayTuner, BaseTuner):
    """Gives each attention layer of a model the decay of a `ViolinAdapterConfig`, in place."""

    prefix = "decay_biases"
    tuner_layer_cls = DecayLayer
    target_module_mapping: dict[str, list[str]] = {}

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict) -> Any:
        return peft_config

    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> AbstractContextManager:
        _check_one_adapter(kwargs)
        return nullcontext()


class LoraViolinModel(_DecayTuner, LoraModel):
    """LoRA or DoRA on a model's projections, and a decay in each of its attention layers, in place."""

    tuner_layer_cls = (LoraLayer, DecayLayer)

    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> AbstractContextManager:
        _check_one_adapter(kwargs)
        return super()._enable_peft_forward_hooks(*args, **kwargs)

    def add_weighted_adapter(self, *args: Any, **options: Any) -> None:
        """Refused, as merging is.

        Raises:
            ValueError: always.
        """
        raise ValueError(_NO_WEIGHTING)

    def _check_target_module_exists(self, peft_config: Any, key: str) -> Any:
        return key in self._targets or BaseTuner._check_target_module_exists(peft_config, key)

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        super()._prepare_model(peft_config, model)
        if peft_config.target_parameters:
            return
        # peft refuses names that match nothing, but here the layers of the decay always match.
        config = _maybe_include_all_linear_layers(copy.copy(peft_config), model)
        if not any(BaseTuner._check_target_module_exists(config, name) for name, _ in model.named_modules()):
            names = peft_config.target_modules
            raise ValueError(f"target_modules={names!r} match no module of {type(model).__name__}")


def remove_decays(model: nn.Module) -> None:
    """Remove every adapter's decay from a model's attention layers, and what `attach` put there for them."""
    for module in _attention_layers(model).values():
        if module.decay_adapter is not None:
            del module.decay_adapter
            module.decay_adapter = None
    attached: Applied | None = model.__dict__.pop(ATTACHED, None)
    if attached is not None:
        detach(model, attached)


def keep_decay(model: Any, adapter_name: str, decay: ResolvedDecay) -> None:
    """Make the decay of an adapter a model's own prior, in the layers that have it; those of others go.

    The model gets a config of its own, because other models may have been made from the one that it has.
    """
    layers = list(_attention_layers(model).values())
    decayed: set[int] = set()
    time: Time = "frame"
    for number, layer in enumerate(layers):
        adapter, layer.decay_adapter = layer.decay_adapter, None
        if adapter is not None and adapter_name in adapter.decay_biases:
            decayed.add(number)
            time = adapter.times[adapter_name]
            layer.take_decay(adapter.decay_biases[adapter_name], decay, time)

    def change(number: int, prior: ResolvedPrior) -> ResolvedPrior:
        return with_decay(prior, decay, time) if number in decayed else prior

    attached: Applied | None = model.__dict__.pop(ATTACHED, None)
    applied: Applied | None = attached or getattr(model, APPLIED, None)
    if applied is not None:
        if len(decayed) == len(layers):
            applied.prior = changed_given(applied.prior, lambda prior: change(0, prior))
        else:
            applied.prior = {"layers": keyed([layer.prior for layer in layers])}
        if attached is not None:
            for prior in stock_priors(model):
                prior.serve_all()
            own_prior(model, attached)
        return
    renewed: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config = _with_decay(module.config, change, renewed)


def _with_decay(config: Any, change: Callable[[int, ResolvedPrior], ResolvedPrior], renewed: dict[int, Any]) -> Any:
    """A config of ours with changed priors, or one with such a config within it; `renewed` are those made."""
    within = getattr(config, "backbone_config", None)
    if not isinstance(config, BaseConfig) and not isinstance(within, BaseConfig):
        return config
    if id(config) not in renewed:
        renewed[id(config)] = copied = copy.deepcopy(config)
        if isinstance(within, BaseConfig):
            copied.backbone_config = _with_decay(within, change, renewed)
        else:
            stages = [stage for stage in config.stages if stage.takes_prior]
            copied.prior = changed_layers(config.prior, stages, change)
            copied.own()
    return renewed[id(config)]


def _resolve_over_time(config: Any, model: Any) -> ResolvedDecay:
    """The decay of an adapter, for the grid of a model and the time that it sees.

    Raises:
        ValueError: for a `time` that the model or the decay does not have.
    """
    layers = list(_attention_layers(model).values())
    time = check_time(config.time or next((layer.time for layer in layers), "frame"))
    for layer in layers:
        if layer.prior["support"]["name"] != "dense" and time != layer.time:
            raise ValueError(
                f"time={time!r} must be {layer.time!r}, as the support of {type(model).__name__} sees time"
            )
    try:
        resolved = resolve_prior({"decay": config.decay, "time": time}, 1, _patch_grid(model))
    except ValueError as error:
        raise ValueError(str(error).removeprefix("prior: ")) from None
    assert resolved["decay"] is not None
    return resolved["decay"]


def _patch_grid(model: Any) -> tuple[int, ...]:
    """The patch grid that a model is configured for."""
    if not any(isinstance(module, SparsePriorAttention) for module in model.modules()):
        return find_encoder(model).attention_grid
    # Of ours within the model: heads of transformers and modules around it have another config, or none.
    configs = (getattr(module, "config", None) for module in model.modules())
    config = next(config for config in configs if isinstance(config, BaseConfig))
    return next((stage.grid for stage in config.stages if len(stage.grid) == 3), config.grid)


def _check_saved_modules(config: Any, model: nn.Module) -> None:
    """Refuse names in `modules_to_save` that match nothing, which peft would ignore: the module would stay frozen."""
    if config.inference_mode:  # one that was saved may be loaded into a model without its head
        return
    names = [name for name, _ in model.named_modules()]
    for wanted in config.modules_to_save or ():
        # peft itself adds "classifier" and "score" for some task types.
        if wanted not in ("classifier", "score") and not any(name.endswith(wanted) for name in names):
            raise ValueError(f"modules_to_save: {type(model).__name__} has no module {wanted!r}")


def _attention_layers(model: nn.Module) -> dict[str, PriorAttention]:
    layers = {name: module for name, module in model.named_modules() if isinstance(module, PriorAttention)}
    return {name: module for name, module in layers.items() if module.takes_prior}


def _base_prior(model: nn.Module) -> dict[str, Any]:
    """What a decay is trained on top of: the support and the names of the extras, of the first layer or, where a prior
    says so, of each.
    """
    bases = []
    for layer in _attention_layers(model).values():
        base = {"support": layer.prior["support"], "extras": [extra["name"] for extra in layer.prior["extras"]]}
        bases.append({**base, "time": layer.prior["time"]} if "time" in layer.prior else base)
    return {PER_LAYER: keyed(bases)} if _has_layers(model) and len(keyed(bases)) > 1 else bases[0]


def _has_layers(model: nn.Module) -> bool:
    """Whether the prior of a model differs between the layers of a stage."""
    applied: Applied | None = getattr(model, APPLIED, None)
    if applied is not None:
        return has_layers(applied.prior)
    configs = (getattr(module, "config", None) for module in model.modules())
    priors = (config.prior for config in configs if isinstance(config, BaseConfig))
    return any(has_layers(part) for prior in priors for part in (prior if isinstance(prior, list) else [prior]))


def _check_names(model: nn.Module, adapter_name: str, state_dict: dict[str, Tensor]) -> None:
    """Refuse scalars that peft would silently leave out, because the model has them under other names."""
    expected = {name for name in model.state_dict() if f".decay_biases.{adapter_name}." in name}
    # Names that the model does not have still lack the adapter's name.
    names = {name for name in state_dict if ".decay_biases." in name}
    if expected != names:
        base = getattr(model, "get_base_model", lambda: model)()
        raise ValueError(
            f"the adapter was made on another class of model than {type(base).__name__}: "
            f"it has {sorted(names - expected)[:1]} where the model has {sorted(expected - names)[:1]}"
        )


def _check_prior(model: nn.Module, state_dict: dict[str, Tensor]) -> None:
    """Refuse an adapter with a prior's scalars that the model lacks: peft would silently leave them out.

    Args:
        model: what the adapter is loaded into: a PeftModel, or a model that holds the adapter's layers itself.
        state_dict: the adapter's, under the names of the model.
    """
    names = {name.removeprefix(PEFT_ROOT) for name in model.state_dict()}
    lost = sorted(name for name in state_dict if is_prior_weight(name) and name.removeprefix(PEFT_ROOT) not in names)
    if lost:
        base = getattr(model, "get_base_model", lambda: model)()
        raise ValueError(
            f"the adapter was made on a model with a prior: it has {lost[0]!r}, which {type(base).__name__} has not; "
            "give the model that prior first"
        )


def _check_one_adapter(arguments: dict[str, Any]) -> None:
    """Refuse peft's batches of several adapters."""
    if (names := arguments.get("adapter_names")) is not None:
        raise ValueError(
            f"adapter_names={names!r} gives each image its own adapter, but a learned decay is one for the whole "
            "batch: split the batch, and activate one adapter with set_adapter"
        )


def _describe(heads: list[int]) -> str:
    """[12, 12] -> "2 layers of 12 heads"."""
    return " and ".join(f"{count} layers of {number} heads" for number, count in Counter(heads).items()) or "no layer"


_remap = BaseTuner._remap_adapter_state_dict_for_load.__func__


@functools.wraps(_remap)
def _remap_and_check(
    cls: type[BaseTuner], model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, Tensor]
) -> dict[str, Tensor]:
    mapped = _remap(cls, model, config, adapter_name, state_dict)
    _check_prior(model, mapped)
    return mapped


# The one class of peft that is changed. Plain LoRA may also hold a prior's scalars, in `modules_to_save`. A model that
# lacks the prior would take the adapter and silently leave them out, and nothing of ours is in it that could check.
BaseTuner._remap_adapter_state_dict_for_load = classmethod(_remap_and_check)

# `register_peft_method` takes no name outside peft's own list.
PEFT_TYPE_TO_CONFIG_MAPPING[AdapterType.VIOLIN] = ViolinAdapterConfig
PEFT_TYPE_TO_TUNER_MAPPING[AdapterType.VIOLIN] = ViolinModel
PEFT_TYPE_TO_PREFIX_MAPPING[AdapterType.VIOLIN] = ViolinModel.prefix
# No prefix: `load_adapter` of transformers then looks for the names of every method, and here there are two.
PEFT_TYPE_TO_CONFIG_MAPPING[AdapterType.LORA_VIOLIN] = LoraViolinConfig
PEFT_TYPE_TO_TUNER_MAPPING[AdapterType.LORA_VIOLIN] = LoraViolinModel
