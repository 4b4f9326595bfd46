"""Configuration of SparsePriorSwin: Swin Transformers with a prior within their windows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.base.layer_sizes import counts
from hf_sparseprior.base.limits import check_size
from hf_sparseprior.base.resolved import ResolvedPrior
from hf_sparseprior.models.base_config import IMAGENET, BaseConfig, as_pair, check_number
from hf_sparseprior.models.feature_maps import FeatureMap, pyramid
from hf_sparseprior.priors.layer_priors import has_layers, prior_weights
from hf_sparseprior.priors.predictor import PREDICTORS
from hf_sparseprior.priors.prior import PriorSpec, Stage, parse_prior

# How many of the first stages a support goes to, if one prior is given for all (Fibottention appendix C.1).
SUPPORT_STAGES = 2

# Liu et al. 2021, Table 7 and appendix A2.1.
PRESETS: dict[str, dict[str, Any]] = {
    "swin_tiny": {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24), "drop_path_rate": 0.2},
    "swin_small": {"embed_dim": 96, "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24), "drop_path_rate": 0.3},
    "swin_base": {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32), "drop_path_rate": 0.5},
}


class SparsePriorSwinConfig(BaseConfig):
    r"""
    Configuration of a SparsePriorSwin.

    Args:
        prior: name, names joined by +, or the full form, for the patches of a window; or a list with one for each
            stage. One prior for all puts its support into the first two stages, as Fibottention's paper does, and
            everything else into every stage, as VIOLIN's does. Kept as a list of full forms. {"layers": ...} gives
            each layer of all stages its prior, or in the list each layer of a stage.
        image_size: pixels, one number or (height, width). Other sizes can be encoded, too.
        patch_size: pixels of a patch; images are padded to a multiple of it.
        num_channels: channels of the input image.
        embed_dim: width of the tokens in the first stage, which doubles from stage to stage; or a list with the width
            in each stage.
        depths, num_heads: layers and heads of each stage.
        window_size: patches in a window's side. In a stage that is not larger than that, at the configured image size,
            the window is the whole stage.
        mlp_ratio: width between the MLP's layers, as a multiple of the tokens'.
        qkv_bias: biases of the projections to queries, keys and values.
        hidden_act: activation of the MLP.
        drop_path_rate: stochastic depth of the last layer, rising linearly from 0 at the first.
        hidden_dropout_prob, attention_probs_dropout_prob: dropout.
        layer_norm_eps, initializer_range: as in Swin.
        image_mean, image_std: normalisation the model was trained with, one number per channel or for all.
        compressed: what pruning left of each layer, as in SparsePriorViTConfig; num_heads and mlp_ratio are then those
            from before.
        out_features, out_indices: for the backbone, some of stem, stage1, ...
    """

    model_type = "sparseprior_swin"
    can_be_compressed = True
    presets = PRESETS
    weight_fields = ("embed_dim", "depths", "mlp_ratio", "num_channels", "patch_size", "window_size", "num_labels")
    switches = ("qkv_bias",)
    read_alike = (*BaseConfig.read_alike, "num_heads", "window_size")
    keys_to_ignore_at_inference = ["hidden_states", "attentions", "reshaped_hidden_states"]

    prior: Any = "dense"
    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 4
    num_channels: int = 3
    embed_dim: int | list[int] = 96
    depths: list[int] | tuple[int, ...] = (2, 2, 6, 2)
    num_heads: list[int] | tuple[int, ...] = (3, 6, 12, 24)
    window_size: int = 7
    mlp_ratio: float | int = 4.0
    qkv_bias: bool = True
    hidden_act: str = "gelu"
    drop_path_rate: float | int = 0.1
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    layer_norm_eps: float | int = 1e-5
    initializer_range: float | int = 0.02
    image_mean: Any = IMAGENET["image_mean"]
    image_std: Any = IMAGENET["image_std"]

    # ---- derived ----------------------------------------------------------------------------------------------------

    @property
    def num_hidden_layers(self) -> int:
        """Layers of all stages."""
        return sum(self.depths)

    @property
    def hidden_size(self) -> int:
        """Width of the tokens in the last stage, which the classifier takes."""
        return self.widths[-1]

    @property
    def widths(self) -> list[int]:
        """Width of the tokens in each stage."""
        if isinstance(self.embed_dim, list):
            return self.embed_dim
        return [self.embed_dim * 2**stage for stage in range(len(self.depths))]

    def with_widths(self, widths: Sequence[int]) -> dict[str, Any]:
        """As `BaseConfig`."""
        doubled = [widths[0] * 2**stage for stage in range(len(widths))]
        return {"embed_dim": widths[0] if list(widths) == doubled else list(widths)}

    @property
    def grids(self) -> list[tuple[int, int]]:
        """(height, width) of the patches in each stage, at the configured image size."""
        image, patch = as_pair(self.image_size), as_pair(self.patch_size)
        return [
            (math.ceil(image[0] / patch[0] / 2**stage), math.ceil(image[1] / patch[1] / 2**stage))
            for stage in range(len(self.depths))
        ]

    @property
    def output_grid(self) -> tuple[int, int]:
        """(height, width) of the patches in the last stage, at the configured image size."""
        return self.grids[-1]

    @property
    def windows(self) -> list[int]:
        """Patches in the side of each stage's windows."""
        return [min(self.window_size, *grid) for grid in self.grids]

    @property
    def stages(self) -> list[Stage]:
        """Heads, window and layers of each stage."""
        return [
            Stage(heads, (window, window), depth, math.ceil(grid[0] / window) * math.ceil(grid[1] / window))
            for heads, window, depth, grid in zip(self.num_heads, self.windows, self.depths, self.grids, strict=True)
        ]

    @property
    def map_names(self) -> list[str]:
        """The embedding and the output of each stage."""
        return ["stem", *(f"stage{n}" for n in range(1, len(self.depths) + 1))]

    @property
    def maps(self) -> list[FeatureMap]:
        """What the maps of `map_names` are: each stage after the first has half the sides of the one before."""
        return pyramid(self.map_names, self.widths, as_pair(self.patch_size))

    @property
    def summary(self) -> str:
        """Layers, heads, widths and windows of the stages."""
        layers, head_counts = enumerate(self.layers), []
        for depth in self.depths:
            head_counts.append(counts(len(layer.heads) for _, layer in itertools.islice(layers, depth)))
        depths, heads, widths = (" + ".join(map(str, each)) for each in (self.depths, head_counts, self.widths))
        return f"{depths} layers, {heads} heads, widths {widths}, windows of {self.window_size}x{self.window_size}"

    @property
    def mlp_widths(self) -> list[int]:
        """Width between the MLP's layers in each stage."""
        return [int(self.mlp_ratio * width) for width in self.widths]

    @property
    def num_weights(self) -> int:
        """Weights of the matrices and tables, as `BaseConfig` says."""
        patch = as_pair(self.patch_size)
        total = self.num_channels * patch[0] * patch[1] * self.widths[0] + self.num_labels * self.hidden_size
        total += sum(4 * width * following for width, following in itertools.pairwise(self.widths))  # patch merging
        layers = iter(self.layers)
        for stage, width in zip(self.stages, self.widths, strict=True):
            table = stage.num_heads * (2 * stage.grid[0] - 1) * (2 * stage.grid[1] - 1)
            stage_layers = itertools.islice(layers, stage.num_layers)
            total += sum(width * (4 * layer.attention_width + 2 * layer.mlp_width) + table for layer in stage_layers)
        return total + prior_weights(self.prior_runs, self.widths, self.mlp_widths)

    # ---- checks -----------------------------------------------------------------------------------------------------

    def priors_of_stages(self, prior: Any) -> PriorSpec | Sequence[Any] | None:
        """One prior for all puts its support into the first stages alone."""
        if has_layers(prior) or (isinstance(prior, Sequence) and not isinstance(prior, str)):
            return prior
        slots = parse_prior(prior)
        later = {**slots, "support": None}
        return [slots if stage < SUPPORT_STAGES else later for stage in range(len(self.depths))]

    def check_prior(self, prior: ResolvedPrior) -> None:
        """As `BaseConfig`; also refused is what cannot act within windows: mixers, predictors that list keys, token
        pruning, and a second bias of relative positions.
        """
        names = [extra["name"] for extra in prior["extras"] if EXTRAS[extra["name"]].place == "model"]
        if prior["mixer"] != "softmax":
            names.append(prior["mixer"]["name"])
        if prior["predictor"] is not None and PREDICTORS[prior["predictor"]["name"]].by_place:
            names.append(prior["predictor"]["name"])
        if names:
            raise ValueError(f"prior: {names[0]!r} is for a whole image, and Swin's attention runs within windows")
        if any(extra["name"] == "swin_rpb" for extra in prior["extras"]):
            raise ValueError("prior: 'swin_rpb' is part of a SparsePriorSwin already")
        super().check_prior(prior)

    def _validate_sizes(self) -> None:
        for name, kind in (("num_channels", "width"), ("window_size", "tokens")):
            setattr(self, name, check_size(name, getattr(self, name), 1, kind))
        lists = [("depths", "layers"), ("num_heads", "heads")]
        if isinstance(self.embed_dim, (list, tuple)):
            lists.append(("embed_dim", "width"))
        else:
            self.embed_dim = check_size("embed_dim", self.embed_dim, 1, "width", ", or a list of the stages' widths")
        for name, kind in lists:
            values = getattr(self, name)
            if isinstance(values, str) or not isinstance(values, Sequence) or not values:
                raise ValueError(f"{name}={values!r} must be a list with a number for each stage")
            setattr(self, name, [check_size(name, value, 1, kind) for value in values])
        if len(self.depths) != len(self.num_heads):
            raise ValueError(f"depths={self.depths} and num_heads={self.num_heads} must have a number for each stage")
        if len(self.widths) != len(self.depths):
            raise ValueError(f"embed_dim={self.embed_dim} must have a width for each of the stages of {self.depths}")
        check_size("depths: all layers", sum(self.depths), 1, "layers")
        for heads, width in zip(self.num_heads, self.widths, strict=True):
            check_size("embed_dim: width of the last stage", width, 1, "width")
            if width % heads and self.compressed is None:
                raise ValueError(
                    f"num_heads={self.num_heads} must divide the widths of the stages, {self.widths} "
                    f"with embed_dim={self.embed_dim}"
                )
        check_number("mlp_ratio", self.mlp_ratio, 0.0, math.inf)
        for hidden in self.mlp_widths:
            check_size(f"mlp_ratio={self.mlp_ratio}: width of the MLP", hidden, 1, "width")
        super()._validate_sizes()


SparsePriorSwinConfig.register_for_auto_class()
