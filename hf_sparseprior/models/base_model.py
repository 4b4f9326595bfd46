"""What the models of every family share: initialisation, loading, saving, and the options of a call."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init

from hf_sparseprior.attention.request import CallOptions
from hf_sparseprior.base.extras import PriorModule
from hf_sparseprior.base.layer_sizes import UnitAxes
from hf_sparseprior.base.loading import check_source, load_pretrained, newly_initialised, without_code
from hf_sparseprior.models.base_config import BaseConfig, as_pair
from hf_sparseprior.models.blocks import LayerScale
from hf_sparseprior.patterns.decay import Decay
from hf_sparseprior.patterns.supports import redraws
from hf_sparseprior.patterns.token_order import RASTER
from hf_sparseprior.saving.folder import complete_folder


class BasePreTrainedModel(PreTrainedModel):
    """Initialisation, loading and saving of every model.

    A family sets `config_class`, `base_model_prefix` and `_no_split_modules`.
    """

    config: BaseConfig
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _can_compile_fullgraph = True
    # The loss is a mean over the batch it is given, and the Trainer takes the mean over accumulated ones.
    accepts_loss_kwargs = False
    # The classes that a saved folder offers to the Auto classes; `register_family` sets it.
    auto_map: ClassVar[dict[str, str]] = {}

    def __init__(self, config: BaseConfig, *args: Any, **kwargs: Any) -> None:
        # from_pretrained(..., prior=...) sets fields after the config's own check.
        given = config.prior
        config.validate()
        if config.prior != given:
            config.log_notes()
        super().__init__(config, *args, **kwargs)
        if any(prior["decay"] is not None for prior in config.layer_priors):
            # In half precision the gradients of alpha and beta lose their scale, and beta even loses its value.
            self._keep_in_fp32_modules_strict = ["decay_bias"]
        self.config.own()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)):
            init.trunc_normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            super()._init_weights(module)
        elif isinstance(module, LayerScale):
            init.constant_(module.scale, module.value)
        elif isinstance(module, (Decay, PriorModule)):
            for name, value in module.initial_values().items():
                init.copy_(getattr(module, name), value)

    def stage_of(self, name: str) -> int:
        """Number of the stage whose width the parameters of this name, in the base model, go with."""
        return 0

    @property
    def map_sources(self) -> list[nn.Module]:
        """The modules after which a backbone has a feature map: the embedding, then layers or stages."""
        return [self.embeddings, *self.layers]

    def no_weight_decay(self) -> set[str]:
        """Names of parameters without weight decay, in addition to all with one dimension (timm's convention)."""
        embeddings = ("class_token", "distillation_token", "register_tokens", "position_embeddings")
        # Swin leaves its table of relative positions out, and u and v of Transformer-XL are biases.
        biases = ("bias_table", "prefix_bias", "content_bias", "position_bias")
        return {
            name
            for name, _ in self.named_parameters()
            if "decay_bias" in name.split(".") or name.split(".")[-1] in (*embeddings, *biases)
        }

    def resized_weights(self, config: BaseConfig) -> dict[str, Tensor]:
        """Weights that depend on the image size, as a model with this config has them, by names in the base model."""
        return {}

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, with safetensors only: a pickled checkpoint is refused, never opened.

        `prior=` and other config fields may be given and are checked like those of a config. With another `image_size`,
        weights that depend on it are interpolated (`resized_weights`), and settings of the prior that are not numbers,
        such as Fibottention's default `w_max`, follow the grid.

        Raises:
            OSError: for a missing, truncated or pickled checkpoint; the message names the file.
            ValueError: for a bad config field.
        """
        if kwargs.get("use_safetensors") is False:
            raise ValueError("use_safetensors=False is refused: pickled checkpoints can run code, use safetensors")
        kwargs["use_safetensors"] = True
        check_source(pretrained_model_name_or_path, kwargs)
        load = super().from_pretrained
        if (asked := resized_config(cls.config_class, pretrained_model_name_or_path, kwargs)) is None:
            return load_pretrained(load, pretrained_model_name_or_path, *args, **kwargs)
        config, options = asked
        place = {key: kwargs[key] for key in PLACE if key in kwargs}
        source, found = load_pretrained(load, pretrained_model_name_or_path, **place, output_loading_info=True)
        weights = {key: value for key, value in source.state_dict().items() if key not in newly_initialised(found)}
        prefix = "" if source.base_model is source else f"{cls.base_model_prefix}."
        resized = {prefix + key: value.detach() for key, value in source.resized_weights(config).items()}
        weights |= {key: value for key, value in resized.items() if key in weights}
        loaded = load_pretrained(load, None, *args, config=config, state_dict=weights, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.config.name_or_path = model.name_or_path = str(pretrained_model_name_or_path)
        return loaded

    @classmethod
    def _load_pretrained_model(
        cls, model: Any, state_dict: Any, checkpoint_files: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # use_safetensors chooses the index, but an index may lead to pickled shards.
        for file in checkpoint_files or ():
            if not str(file).endswith(".safetensors"):
                raise OSError(f"{file} is not a safetensors file; pickled checkpoints are not read, they can run code")
        return super()._load_pretrained_model(model, state_dict, checkpoint_files, *args, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As in transformers, plus the full auto map, an image processor and a model card (see `complete_folder`)."""
        if getattr(self, "_hf_peft_config_loaded", False):  # then adapters are saved, and nothing else
            with without_code(self):
                return super().save_pretrained(save_directory, *args, **kwargs)
        self.config.auto_map = dict(self.auto_map)
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            complete_folder(save_directory, self.config)

    def _upload_modified_files(self, working_dir: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        # transformers has put the repository's card, or an empty one, over the card that belongs to the model.
        if not getattr(self, "_hf_peft_config_loaded", False):
            complete_folder(working_dir, self.config)
        return super()._upload_modified_files(working_dir, *args, **kwargs)


# Options of `from_pretrained` that say where a model lies, and options of its loading that configs take for fields.
PLACE = (
    *("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token", "variant"),
    *("use_safetensors", "trust_remote_code"),
)
LOADS = ("dtype", "torch_dtype", "attn_implementation", "quantization_config")


def resized_config(
    config_class: Any, source: Any, options: Mapping[str, Any]
) -> tuple[BaseConfig, dict[str, Any]] | None:
    """The config that is asked of `from_pretrained` and the options that are left, or None if the images have the size
    of the saved model's.

    Args:
        config_class: of the family. source: folder or name on the hub. options: keywords of `from_pretrained`.
    """
    given = options.get("config")
    if source is None or getattr(given, "image_size", options.get("image_size")) is None:
        return None
    place = {key: value for key, value in options.items() if key in PLACE}
    left = {key: value for key, value in options.items() if key not in (*PLACE, "config")}
    if given is None:
        loads = {key: left.pop(key) for key in LOADS if key in left}
        given, left = config_class.from_pretrained(source, **place, **left, return_unused_kwargs=True)
        left = {**{key: value for key, value in left.items() if key not in PLACE}, **loads}
    saved, _ = config_class.get_config_dict(source, **place)
    if not saved:  # the config that is given stands in for a file that is missing
        return None
    size = config_class.from_dict(saved).image_size
    return None if as_pair(size) == as_pair(given.image_size) else (given, left)


class DrawCount(PriorModule):
    """How many training passes a model has made, for supports that draw their pairs anew in each (`redraw`).

    A pass is a forward of the model in training; layers that gradient checkpointing runs again have the number of their
    first run. The count is a buffer, so checkpoints have it and copies go on from it. What saves adapters alone leaves
    it out; `SparsePriorTrainer` writes it into its checkpoints in any case.
    """

    name = "draws"
    UNIT_AXES: UnitAxes = {"count": ()}
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @classmethod
    def of(cls, config: BaseConfig) -> DrawCount | None:
        """The count of a model with this config; None if its pairs are the same in every pass."""
        return cls() if any(redraws(prior["support"]) for prior in config.layer_priors) else None

    def initial_values(self) -> dict[str, Tensor]:
        """As `PriorModule`."""
        return {"count": torch.zeros((), dtype=torch.int64)}

    # Dynamo would go on without a graph after an exception in what it traces. What it calls as a constant ends it.
    @torch._dynamo.assume_constant_result
    def next(self, compiling: bool) -> int:
        """Count a pass, and return its number, from 1.

        Raises:
            ValueError: within a graph that is recorded, which would draw the same pairs for ever.
        """
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if compiling or torch.jit.is_tracing() or capturing:
            raise ValueError(
                "redraw=True draws pairs anew in each training pass, which torch.compile, torch.export, "
                "torch.jit.trace and CUDA graphs would record once; it must be False there, or the model in evaluation"
            )
        self.count.add_(1)
        return int(self.count)


def asked_backend(config: Any) -> str:
    """The backend that a config of transformers asks for; "eager" is its word for the written-out form."""
    return "reference" if config._attn_implementation == "eager" else "auto"


def call_options(
    config: BaseConfig, draws: DrawCount | None, output_attentions: bool, layout: str = RASTER
) -> CallOptions:
    """What a forward asks of the attention layers. In training it is counted in `draws`, if there is one."""
    draw = draws.next(torch.compiler.is_compiling()) if draws is not None and draws.training else None
    return CallOptions(output_attentions, backend=asked_backend(config), layout=layout, draw=draw)


def check_keywords(model: Any, pixel_values: Any, keywords: dict[str, Any]) -> None:
    """Refuse what transformers' forwards take by keyword and what has no effect here. None has no effect anywhere.

    Raises:
        TypeError: for a keyword that is none, as Python.
        ValueError: for an attention mask, and `interpolate_pos_encoding=False` with images of another size.
    """
    for key, value in keywords.items():
        if key == "interpolate_pos_encoding":
            positions = getattr(model.base_model.embeddings, "position_embeddings", None)
            sides = tuple(pixel_values.shape[-2:]) if isinstance(pixel_values, Tensor) else None
            if value is False and positions is not None and sides != as_pair(model.config.image_size):
                raise ValueError(
                    f"interpolate_pos_encoding=False needs images of image_size={model.config.image_size}, got {sides}"
                )
        elif key == "attention_mask" and value is not None:
            raise ValueError(
                "attention_mask must be None, all patches are seen; images of several sizes are given as a list"
            )
        elif value is not None:
            raise TypeError(f"{type(model).__name__}.forward() got an unexpected keyword argument {key!r}")


def mean_loss(model: Any, labels: Tensor, logits: Tensor, keywords: dict[str, Any]) -> Tensor:
    """The loss of `config.problem_type`: its mean, or its sum over `num_items_in_batch` where that is given.

    As in transformers.
    """
    items = keywords.get("num_items_in_batch")
    return model.loss_function(labels, logits, model.config, **({} if items is None else {"num_items_in_batch": items}))


def encoder_keywords(keywords: dict[str, Any]) -> dict[str, Any]:
    """Those of a classifier's keywords that are not the loss's."""
    return {key: value for key, value in keywords.items() if key != "num_items_in_batch"}


def refuse_symbols(config: BaseConfig, argument: Any) -> None:
    """Raise TypeError for an argument of `torch.fx.symbolic_trace`, which gives symbols for all arguments."""
    if isinstance(argument, torch.fx.Proxy):
        raise TypeError(
            f"torch.fx.symbolic_trace cannot trace a model of {config.model_type!r}: it calls without sizes, and the "
            "grid decides what a support leaves out; torch.export.export makes a graph of torch.fx from example images"
        )


def output_options(
    config: BaseConfig,
    output_attentions: bool | None,
    output_hidden_states: bool | None,
    return_dict: bool | None,
) -> tuple[bool, bool, bool]:
    """Arguments of a call; those that are not given are the config's."""
    refuse_symbols(config, output_attentions)
    return (
        bool(config.output_attentions if output_attentions is None else output_attentions),
        bool(config.output_hidden_states if output_hidden_states is None else output_hidden_states),
        bool(config.return_dict if return_dict is None else return_dict),
    )
