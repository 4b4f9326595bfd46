"""The layer-decay constructors of mmsegmentation and mmdetection for our backbones.

`LearningRateDecayOptimizerConstructor` (both) and `LayerDecayOptimizerConstructor` (mmsegmentation) tell layers apart
by the names that ConvNeXt, BEiT and MAE have, and raise NotImplementedError for any other backbone. Under the same
names stand here subclasses of them: with our backbones layers are counted by `training.layer_decay.layer_depths`, as in
every other task; with any other they do what they did.
"""

from __future__ import annotations

import math
import re
from typing import Any

from torch import nn

from hf_sparseprior.base.checks import check_within
from hf_sparseprior.mm.backbone import MMBackbone
from hf_sparseprior.training.layer_decay import layer_depths

CONSTRUCTORS = ("LearningRateDecayOptimizerConstructor", "LayerDecayOptimizerConstructor")
SETTINGS = ("num_layers", "decay_rate", "decay_type")
LAYER_WISE, STAGE_WISE = "layer_wise", "stage_wise"
STAGE = re.compile(r"stages\.(\d+)\.")


def register_layer_decay(registry: Any) -> None:
    """Let the layer-decay constructors in a framework's registry know our backbones."""
    registry.import_from_location()
    for name in CONSTRUCTORS:
        theirs = registry.module_dict.get(name)
        if theirs is not None and not issubclass(theirs, LayerDecay):
            ours = type(name, (LayerDecay, theirs), {"__doc__": theirs.__doc__, "__module__": theirs.__module__})
            registry.register_module(name=name, module=ours, force=True)


class LayerDecay:
    """`add_params` of a layer-decay constructor of mm; see above.

    `paramwise_cfg` has `decay_rate`, and `num_layers` and `decay_type` where they are given: "layer_wise", or
    "stage_wise" for a backbone with stages, each of which then counts as one layer.
    """

    paramwise_cfg: dict[str, Any]
    base_lr: float | None
    base_wd: float | None

    def add_params(self, params: list[dict[str, Any]], module: nn.Module, **kwargs: Any) -> None:
        """Append the groups of a model: by layer, and by whether weight decay applies.

        Norms, biases, tokens, positions and a decay's scalars have no weight decay. Layer l of the L of the backbone
        has the rate lr * decay_rate ** (L + 1 - l), the embedding that of l = 0, its last norm, neck and heads that of
        l = L + 1. A stage has what its module holds, the merging of patches too.

        Raises:
            ValueError: for another number of layers or stages than the backbone has, stages of a backbone without, or
                a setting that does nothing here.
        """
        backbone = getattr(module, "backbone", None)
        if not isinstance(backbone, MMBackbone):
            super().add_params(params, module, **kwargs)  # type: ignore[misc]
            return
        model: Any = backbone
        names = [name for name, _ in model.named_parameters()]
        depths, layers = self._depths(names)
        rate = self._checked_rate(layers)
        if self.base_lr is None:
            raise ValueError("optim_wrapper.optimizer.lr is missing, of which layers have their shares")
        undecayed = model.no_weight_decay()
        groups: dict[tuple[int, bool], dict[str, Any]] = {}
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            own = name.removeprefix("backbone.") if name.startswith("backbone.") else None
            layer = layers + 1 if own is None else depths[own]
            decayed = parameter.ndim > 1 and not name.endswith(".bias") and own not in undecayed
            scale = rate ** (layers + 1 - layer)
            empty = {
                "weight_decay": (self.base_wd or 0.0) if decayed else 0.0,
                "params": [],
                "param_names": [],
                "lr_scale": scale,
                "group_name": f"layer_{layer}_{'decay' if decayed else 'no_decay'}",
                "lr": scale * self.base_lr,
            }
            group = groups.setdefault((layer, decayed), empty)
            group["params"].append(parameter)
            group["param_names"].append(name)
        params.extend(groups[key] for key in sorted(groups))

    def _depths(self, names: list[str]) -> tuple[dict[str, int], int]:
        """As `layer_depths`, of layers or of stages, as `decay_type` says."""
        depths, layers = layer_depths(names)
        kind = self.paramwise_cfg.get("decay_type", LAYER_WISE)
        if kind == STAGE_WISE:
            stages = {name: int(match[1]) + 1 for name in names if (match := STAGE.match(name))}
            if not stages:
                raise ValueError(f"paramwise_cfg.decay_type={kind!r} needs a backbone with stages; use {LAYER_WISE!r}")
            last = max(stages.values())
            return {name: stages.get(name, 0 if depth == 0 else last + 1) for name, depth in depths.items()}, last
        # mmsegmentation's older constructor says "layer_wise_vit".
        if LAYER_WISE not in str(kind):
            raise ValueError(f"paramwise_cfg.decay_type={kind!r} must be {LAYER_WISE!r} or {STAGE_WISE!r}")
        return depths, layers

    def _checked_rate(self, layers: int) -> float:
        given = self.paramwise_cfg
        if unknown := sorted(set(given) - set(SETTINGS)):
            raise ValueError(f"paramwise_cfg.{unknown[0]} does nothing here, which takes {', '.join(SETTINGS)}")
        if given.get("num_layers", layers) != layers:
            what = "stages" if given.get("decay_type") == STAGE_WISE else "layers"
            raise ValueError(f"paramwise_cfg.num_layers={given['num_layers']}, the backbone has {layers} {what}")
        allowed = "a number above 0 and at most 1"
        return check_within("paramwise_cfg.decay_rate", given.get("decay_rate"), math.ulp(0.0), 1, allowed)
