"""The `tuning` section: how much of a saved model a run trains."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from accelerate.utils import parse_flag_from_env

from hf_sparseprior.adapters.lora import check_settings, classifier_names, decay_names, import_peft, lora_config
from hf_sparseprior.priors.layer_priors import given_priors
from hf_sparseprior.priors.prior import parse_prior

LOW_RANK = ("lora", "dora")
METHODS = ("full", "linear", *LOW_RANK, "violin")
BIASES = ("none", "all", "lora_only")


@dataclass
class TuningConfig:
    """What is trained; everything else stays as `model.pretrained` has it.

    method: "full": everything; "linear": the classifier; "violin": the classifier and the scalars of the prior's decay,
        whatever that decay is; "lora", "dora": low-rank updates, the classifier and, if the prior has a decay, its
        scalars (VIOLIN Table 4).
    rank, alpha, dropout, targets: for lora and dora, as in `hf_sparseprior.adapters.lora_config`; null: its defaults.
    bias: for lora and dora, which biases are trained, as in peft's `LoraConfig`: "none", "all", or those of the adapted
        layers ("lora_only"); null: none.
    """

    method: str = "full"
    rank: int | None = None
    alpha: float | None = None
    dropout: float | None = None
    targets: str | list[str] | None = None
    bias: str | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.method not in METHODS:
            raise ValueError(f"tuning.method={self.method!r} must be one of {', '.join(METHODS)}")
        if self.bias not in (None, *BIASES):
            raise ValueError(f"tuning.bias={self.bias!r} must be one of {', '.join(BIASES)}")
        for name in ("rank", "alpha", "dropout", "targets", "bias"):
            value = getattr(self, name)
            if value is not None and self.method not in LOW_RANK:
                raise ValueError(
                    f"tuning.{name}={value!r} is for tuning.method {', '.join(LOW_RANK)}, not {self.method}"
                )
        check_settings(self.rank, self.alpha, self.dropout or 0.0, self.targets, where="tuning.")


def check_tuning(config: dict[str, dict[str, Any]]) -> None:
    """Raise ValueError if the other sections do not go with the `tuning` section."""
    method = TuningConfig(**config["tuning"]).method
    if method == "full":
        return
    if not config["model"].get("pretrained"):
        raise ValueError(f"tuning.method={method} changes a part of a saved model; set model.pretrained=FOLDER")
    # The variable is how `accelerate launch` asks for it.
    if config["trainer"].get("fsdp") or parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise ValueError(f"tuning.method={method} cannot be used with FSDP, which is for tuning.method=full")
    prior = config["model"].get("prior")
    if method == "violin" and prior is not None and not any(map(_has_decay, given_priors(prior))):
        raise ValueError(_no_decay(prior))


def _has_decay(prior: Any) -> bool:
    return parse_prior(prior)["decay"] not in (None, "none")


def _no_decay(prior: Any) -> str:
    return (
        f"tuning.method=violin trains a decay, and model.prior={prior!r} has none; set "
        "'model.prior={decay: {name: violin, init: growing}}'"
    )


def tuned(model: Any, config: TuningConfig) -> Any:
    """The model, in which only what is trained requires gradients. For lora and dora it is inside a `PeftModel`.

    Raises:
        ImportError: without peft, for lora and dora.
        ValueError: for violin without learned scalars, and targets that the model does not have.
    """
    if config.method == "full":
        return model
    if config.method in LOW_RANK:
        settings = lora_config(
            model,
            rank=config.rank,
            alpha=config.alpha,
            dropout=config.dropout or 0.0,
            use_dora=config.method == "dora",
            targets=config.targets,
            bias=config.bias or "none",
        )
        with warnings.catch_warnings():
            # peft asks transformers 5 for a name that it no longer has.
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
            return import_peft().get_peft_model(model, settings)
    trained = classifier_names(model)
    if config.method == "violin":
        decays = decay_names(model)
        if not any(True for name in decays for _ in model.get_submodule(name).parameters()):
            raise ValueError(_no_decay(getattr(model.config, "prior_name", "dense")))
        trained += decays
    model.requires_grad_(False)
    for name in trained:
        model.get_submodule(name).requires_grad_(True)
    return model
