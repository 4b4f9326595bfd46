"""LoRA (Hu et al. 2022) and DoRA (Liu et al. 2024) by peft, with the names of each vision model.

```python
model = peft.get_peft_model(model, lora_config(model))
```
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from hf_sparseprior.adapters.stock_families import stock_projections
from hf_sparseprior.base.checks import is_number
from hf_sparseprior.base.families import FAMILIES, ProjectionNames

# Names of the modules that hold a learned decay's scalars, an extra or a mixer, and names of classifiers in our and in
# transformers' models.
DECAY = "decay_bias"
EXTRA = re.compile(r"(?:.*\.)?(?:(?:relative_position|locality|token_pruning)\.\w+|(?:attention|sparse_prior)\.mixer)")
CLASSIFIERS = ("classifier", "cls_classifier", "distillation_classifier", "token_classifier")
# Encoder layers. `decoder_layers` (ViTMAE, VideoMAE) and attention pooling (`head` of SigLIP) do not match, and text
# encoders (CLIP, SigLIP) are left out by name.
LAYER = r"(?!(?:.*\.)?text_model\.)(?:.*\.)?(?:layers?|blocks)\.\d+\."


# HF's image classification guide adapts query and value; with rank 8 that is 294,912 parameters on DeiT-B, the ~0.3 M
# of VIOLIN Table 4 (DoRA's ~0.6 M there: rank 16). The paper does not say its targets; ranks are chosen from 2, 4, 8
# and 16 (its G.2).
TARGETS = ("query+value", "attention", "attention+mlp")
DEFAULT_TARGETS, DEFAULT_RANK = "query+value", 8


def lora_config(
    model: nn.Module,
    rank: int | None = None,
    alpha: float | None = None,
    dropout: float = 0.0,
    use_dora: bool = False,
    targets: str | Sequence[str] | None = None,
    modules_to_save: Sequence[str] = (),
    **options: Any,
) -> Any:
    """A peft `LoraConfig` for a model of our families or one of transformers' vision models.

    Classifiers, the scalars of learned decays, the extras and the mixers of a prior are trained whole and saved with
    the adapter.

    Args:
        model: what will be adapted; one that has adapters already may get another.
        rank: r of the update B A, of 1 or more; None: 8. `r=`, peft's name of it, is taken too.
        alpha: the update is scaled by alpha / rank; None: alpha = rank, as in HF's image classification guide.
        dropout: dropout probability of the update's input, in [0, 1).
        use_dora: learn the magnitude of each output separately.
        targets: "query+value", "attention" (query, key, value, output), "attention+mlp", or a list of module names or
            their ends; None: "query+value".
        modules_to_save: names of further modules that are trained whole.
        options: other fields of `LoraConfig`.

    Raises:
        ImportError: without peft; the message says what to install.
        ValueError: for a bad value, a target that is not in the model, a family whose names are not known, and for a
            parameter in `modules_to_save`, which peft would silently ignore.
    """
    if "r" in options:
        if rank is not None:
            raise ValueError(f"rank={rank!r} and r={options['r']!r} are two names of one setting; give one")
        rank = options.pop("r")
    check_settings(rank, alpha, dropout, targets)
    peft = import_peft()
    if isinstance(model, peft.PeftModel):
        model = model.get_base_model()
    rank = DEFAULT_RANK if rank is None else rank
    names = [name for name, _ in model.named_modules()]
    _check_modules(model, names, modules_to_save)
    saved = {name.rpartition(".")[2] for name in [*classifier_names(model), *decay_names(model), *extra_names(model)]}
    return peft.LoraConfig(
        r=rank,
        lora_alpha=rank if alpha is None else alpha,
        lora_dropout=dropout,
        use_dora=use_dora,
        target_modules=_target_names(model, names, targets),
        modules_to_save=sorted({*saved, *modules_to_save}) or None,
        **options,
    )


def import_peft() -> Any:
    """The peft package."""
    try:
        import peft
    except ImportError as error:
        raise ImportError("LoRA and DoRA need peft: pip install 'hf_sparseprior[peft]'") from error
    return peft


def classifier_names(model: nn.Module) -> list[str]:
    """Names of the modules that classify; [] for a model without one (a backbone, or a model with no labels)."""
    return _named(model, CLASSIFIERS)


def decay_names(model: nn.Module) -> list[str]:
    """Names of the modules that hold the scalars of learned decays, one for each layer that has a decay."""
    return _named(model, (DECAY,))


def extra_names(model: nn.Module) -> list[str]:
    """Names of the extras and mixers of a prior that have weights, one for each layer that has one."""
    return [name for name, module in model.named_modules() if EXTRA.fullmatch(name) and module.state_dict()]


def _named(model: nn.Module, ends: Sequence[str]) -> list[str]:
    return [name for name, module in model.named_modules() if name.rpartition(".")[2] in ends and module.state_dict()]


def check_settings(
    rank: int | None, alpha: float | None, dropout: float, targets: str | Sequence[str] | None, where: str = ""
) -> None:
    """Raise ValueError for a value that `lora_config` cannot take. `where` is put before the field's name."""
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
        raise ValueError(f"{where}rank={rank!r} must be an integer of 1 or more")
    if alpha is not None and not (is_number(alpha) and 0 < alpha < math.inf):
        raise ValueError(f"{where}alpha={alpha!r} must be a number above 0")
    if not is_number(dropout) or not 0 <= dropout < 1:
        raise ValueError(f"{where}dropout={dropout!r} must be in [0, 1)")
    listed = isinstance(targets, (list, tuple)) and targets and all(isinstance(t, str) and t for t in targets)
    if targets is not None and targets not in TARGETS and not listed:
        raise ValueError(f"{where}targets={targets!r} must be one of {', '.join(TARGETS)}, or a list of module names")


def _model_type(model: nn.Module) -> str:
    return getattr(getattr(model, "config", None), "model_type", type(model).__name__)


def known_projections() -> dict[str, ProjectionNames]:
    """What is adapted in our models and in stock ones, by `config.model_type`."""
    return {**{name: family.projections for name, family in FAMILIES.items()}, **stock_projections()}


def _target_names(model: nn.Module, names: Sequence[str], targets: str | Sequence[str] | None) -> list[str]:
    """Full names, because an end such as `out_proj` would also match modules that LoRA cannot or should not adapt."""
    if targets is None or isinstance(targets, str):
        known = known_projections()
        # The outermost: heads, captioners and dual encoders of transformers have a type of their own around it.
        encoders = ((name, _model_type(module)) for name, module in model.named_modules())
        encoder, model_type = next(((name, kind) for name, kind in encoders if kind in known), ("", None))
        if model_type is None:
            raise ValueError(
                f"the projections of {_model_type(model)!r} are not known, only those of {', '.join(known)}; "
                "give targets as a list of module names"
            )
        projections = known[model_type]
        choices = {
            "query+value": projections.query_value,
            "attention": projections.attention,
            "attention+mlp": (*projections.attention, *projections.mlp),
        }
        ends = choices[targets or DEFAULT_TARGETS]
        pattern = re.compile(LAYER + f"(?:{'|'.join(re.escape(end) for end in ends)})")
        within = f"{encoder}." if encoder else ""
        chosen = [name for name in names if name.startswith(within) and pattern.fullmatch(name)]
        if not chosen:
            raise ValueError(f"{type(model).__name__} has no modules named {', '.join(ends)} in transformer layers")
        return chosen
    chosen = []
    for target in targets:
        matches = [name for name in names if name == target or name.endswith(f".{target}")]
        if not matches:
            raise ValueError(f"targets: {type(model).__name__} has no module {target!r}")
        chosen += [name for name in matches if name not in chosen]
    return chosen


def _check_modules(model: nn.Module, names: Sequence[str], wanted: Sequence[str]) -> None:
    for target in wanted:
        if any(name == target or name.endswith(f".{target}") for name in names):
            continue
        if any(name == target or name.endswith(f".{target}") for name, _ in model.named_parameters()):
            raise ValueError(f"modules_to_save: {target!r} is a parameter; peft saves and trains whole modules only")
        raise ValueError(f"modules_to_save: {type(model).__name__} has no module {target!r}")
