"""What exporting needs to know of a model: of ours, of transformers or of timm, with or without a prior in place."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_sparseprior.adapters.stock import remove_prior
from hf_sparseprior.adapters.stock_attention import APPLIED
from hf_sparseprior.adapters.timm_encoder import GRIDS, has_timm
from hf_sparseprior.adapters.token_layout import patch_projection
from hf_sparseprior.base.families import family_of
from hf_sparseprior.models.base_config import as_pair
from hf_sparseprior.models.pretrained import copy_weights
from hf_sparseprior.priors.layer import PriorAttention
from hf_sparseprior.priors.prior import prior_name, pruning_of
from hf_sparseprior.saving.processor import image_processor_settings

STATES = ("last_hidden_state", "pooler_output", "token_ids")  # what a model without a head is for
TOWERS = ("backbone_config", "vision_config")  # configs within a config that know the size of images
FILTERS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}  # of PIL, by timm's names


# The name of an attention that is torch's, for models that are exported. transformers leaves out a mask that hides
# nothing, but not while a program is traced: it would be a table of all pairs in the file, and no kernel takes one.
UNMASKED = "hf_sparseprior_unmasked"


def mask_if_any(*args: Any, allow_is_bidirectional_skip: bool = False, **options: Any) -> Tensor | None:
    """transformers' mask for its attention "sdpa"; None if nothing is to be hidden."""
    if allow_is_bidirectional_skip and options.get("attention_mask") is None and options.get("local_size") is None:
        return None
    return sdpa_mask(*args, allow_is_bidirectional_skip=allow_is_bidirectional_skip, **options)


AttentionInterface.register(UNMASKED, sdpa_attention_forward)
AttentionMaskInterface.register(UNMASKED, mask_if_any)


class Exportable(nn.Module):
    """A model whose inputs are images alone, and whose outputs are the tensors that a model of its kind is for.

    Args:
        model: in float32 or bfloat16, in evaluation mode; its configs are changed. Of ours, of timm, or of
            transformers: with a head or without, a backbone, or a head of transformers on a backbone of ours.
        sides: (height, width) of its images in pixels; None: those of its config.

    Raises:
        ValueError: for a model of another kind, whose images have no known size.
    """

    def __init__(self, model: Any, sides: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.family = family_of(getattr(model, "config", None))
        if self.family is not None and sides not in (None, as_pair(model.config.image_size)):
            assert sides is not None
            model = resized(model, sides)
        for module in model.modules():
            config: Any = getattr(module, "config", None)
            if family_of(config) is None and getattr(config, "_attn_implementation", None) in ("sdpa", "eager"):
                config._attn_implementation_internal = UNMASKED
        self.model = model
        self.in_timm = not isinstance(model, PreTrainedModel)
        if self.in_timm and not has_timm(model):
            raise ValueError(f"{type(model).__name__} must be a model of hf_sparseprior, transformers or timm")
        config = vision_config(model)
        self.num_frames = getattr(config, "num_frames", None)
        if config is None:
            embeddings = _timm_embeddings(model)
            configured: Any = _timm_sides(embeddings, _timm_encoder(model))
            channels = getattr(embeddings, "in_chans", None)  # of one without a convolution (NaFlexVit)
        else:
            configured, channels = as_pair(config.image_size), getattr(config, "num_channels", None)
        self.num_channels = int(channels or patch_projection(model).in_channels)
        self.sides: tuple[int, int] = configured if sides is None else sides
        self.options: dict[str, Any] = {}
        can_interpolate = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
        if self.family is None and self.sides != configured and can_interpolate:
            self.options["interpolate_pos_encoding"] = True

    def images(self, batch: int, seed: int = 0) -> Tensor:
        """Random images (batch, channels, height, width), or clips with frames before the channels."""
        clip = () if self.num_frames is None else (self.num_frames,)
        shape = (batch, *clip, self.num_channels, *self.sides)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    def named(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """The tensors by name: logits, boxes and the like of a head, a backbone's maps, or the states of the tokens."""
        pixel_values = pixel_values.to(next(self.model.parameters()).dtype)
        if self.in_timm:
            return {"logits" if getattr(self.model, "num_classes", 0) else "features": self.model(pixel_values)}
        output = self.model(pixel_values=pixel_values, **self.options)
        if (maps := output.get("feature_maps")) is not None:
            return dict(zip(self.model.out_features, maps, strict=True))
        tensors = {name: value for name, value in output.items() if isinstance(value, Tensor) and name != "loss"}
        heads = [name for name in tensors if name not in STATES and "hidden_state" not in name]
        if "Classification" in type(self.model).__name__:  # some give the logits of each of their tokens, too
            heads = ["logits"]
        return {name: tensors[name] for name in heads or STATES if name in tensors}

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, ...]:
        """The tensors of `named`."""
        outputs = self.named(pixel_values).values()
        return tuple(output.float() if output.is_floating_point() else output for output in outputs)

    @property
    def prior(self) -> str:
        """Name of the prior."""
        if (applied := getattr(self.model, APPLIED, None)) is not None:
            return prior_name(applied.prior)
        config = vision_config(self.model)
        return "dense" if family_of(config) is None else config.prior_name

    @property
    def title(self) -> str:
        """What error messages call it."""
        name = type(self.model).__name__ if self.family is None else self.family.title
        return f"{name} with prior {self.prior!r}"

    @property
    def labels(self) -> list[str] | None:
        """Names of the classes in the order of the logits; None: not known."""
        names = getattr(getattr(self.model, "config", None), "id2label", None) or {}
        return [names[number] for number in sorted(names)] or None

    @property
    def classifies_images(self) -> bool:
        """Whether it is a classifier of images with named classes."""
        return type(self.model).__name__.endswith("ForImageClassification") and self.num_frames is None

    @property
    def chooses(self) -> bool:
        """Whether it chooses keys or tokens for each image, which rounding alone can decide between close scores."""
        priors = [module.prior for module in self.model.modules() if isinstance(module, PriorAttention)]
        return any(prior["predictor"] is not None or pruning_of(prior) is not None for prior in priors)

    def dense_twin(self) -> Exportable | None:
        """A model of the same size without a prior; None: it has none. Weights of our families are drawn anew."""
        if getattr(self.model, APPLIED, None) is not None:
            twin = remove_prior(copy.deepcopy(self.model))
        elif family_of(vision_config(self.model)) is None:
            return None
        else:
            config = copy.deepcopy(self.model.config)
            (config if self.family is not None else config.backbone_config).prior = "dense"
            twin = type(self.model)(config)
        if _priors(twin) == _priors(self.model):
            return None
        return Exportable(twin.eval().requires_grad_(False), self.sides)

    def processor_settings(self) -> dict[str, Any] | None:
        """preprocessor_config.json of a processor that gives its images; None: how they were prepared is not known."""
        config = vision_config(self.model)
        if family_of(config) is not None:
            return {**image_processor_settings(config), "size": self.size}
        return _timm_processor(self.model, self.sides) if config is None else None

    @property
    def size(self) -> dict[str, int]:
        """Of images, as image processors have it."""
        return dict(zip(("height", "width"), self.sides, strict=True))


def _priors(model: Any) -> list[Any]:
    return [module.prior for module in model.modules() if isinstance(module, PriorAttention)]


def vision_config(model: Any) -> Any:
    """The config that knows the size of a model's images: of a backbone or tower in it, or its own; None for timm's.

    Raises:
        ValueError: if there is none.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig) or has_timm(model):
        return None
    configs = [*(getattr(config, name, None) for name in TOWERS), config]
    found = next((one for one in configs if getattr(one, "image_size", None) is not None), None)
    if found is None:
        raise ValueError(f"{type(model).__name__} cannot be exported: its config does not say the size of images")
    return found


def resized(model: Any, sides: tuple[int, int]) -> Any:
    """A model of ours for images of another size, with what depends on it interpolated.

    Raises:
        ValueError: if the size does not fit the model.
    """
    config = copy.deepcopy(model.config)
    config.image_size = sides[0] if sides[0] == sides[1] else list(sides)
    changed = type(model)(config)
    copy_weights(model, changed, may_start_anew=lambda name: False)
    return changed.to(model.dtype).train(model.training).requires_grad_(False)


# ---- timm -----------------------------------------------------------------------------------------------------------


def _timm_encoder(model: nn.Module) -> Any:
    """The first model of timm within a model."""
    return next(module for module in model.modules() if type(module).__module__.startswith("timm.models."))


def _timm_embeddings(model: nn.Module) -> Any:
    encoder = _timm_encoder(model)
    return getattr(encoder, "patch_embed", None) or getattr(encoder, "embeds", None)


def _timm_sides(embeddings: Any, encoder: Any) -> tuple[int, int]:
    """Sides of the images that a model of timm is configured for."""
    if (sides := getattr(embeddings, "img_size", None)) is not None:
        return as_pair(sides)
    grid = next((size for name in GRIDS if (size := getattr(embeddings, name, None)) is not None), None)
    if grid is not None:
        patch = as_pair(embeddings.patch_size)
        return grid[0] * patch[0], grid[1] * patch[1]
    _, height, width = encoder.pretrained_cfg["input_size"]
    return height, width


def _timm_processor(model: nn.Module, sides: tuple[int, int]) -> dict[str, Any]:
    """The evaluation transform of a model of timm, as transformers' CLIPImageProcessor does it, with another size."""
    given: Mapping[str, Any] = _timm_encoder(model).pretrained_cfg
    crop = given.get("crop_pct") or 0.875  # timm's default
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": int(min(sides) / crop)},
        "resample": FILTERS.get(str(given.get("interpolation")), 3),
        "do_center_crop": True,
        "crop_size": dict(zip(("height", "width"), sides, strict=True)),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(given["mean"]),
        "image_std": list(given["std"]),
    }
