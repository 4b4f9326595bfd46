"""Token reduction: some blocks drop or merge patches, and those after them work on the rest. Here is what all of them
share, and token pruning (Sparsifiner Table 1); `token_merging` has the other.

Blocks are counted from 1, as in the papers. Prefix tokens are never dropped.

Shape letters: B batch, C hidden size, H heads, N patches of the grid, n tokens that are left without the prefix, P
prefix tokens, T = P + n.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_sparseprior.attention.key_selection import descending_places
from hf_sparseprior.attention.request import CallOptions
from hf_sparseprior.base.checks import check_boolean, check_finite, check_integer, python_value
from hf_sparseprior.base.extras import Extra, register_extra
from hf_sparseprior.base.resolved import ResolvedPrior, Settings


class Tokens(NamedTuple):
    """Which patches are left.

    token_ids: int64 (B, n), each image's patches by their number in the grid, and -1 for each token without a place in
        it; None: all patches, in raster order.
    decisions: for each pruning so far (B, N), 1 for patches that are kept and 0 for patches that are masked, with a
        gradient. Empty if tokens are really removed.
    sizes: (B, T), float32 at least, for how many patches each token stands, 1 for those of the prefix; None: for one
        each.
    """

    token_ids: Tensor | None = None
    decisions: tuple[Tensor, ...] = ()
    sizes: Tensor | None = None

    def kept(self) -> Tensor | None:
        """The last decision; None: every token that is left counts."""
        return self.decisions[-1] if self.decisions else None

    def pooling_weights(self, num_prefix_tokens: int) -> Tensor | None:
        """How much each token after the prefix counts in a mean, (B, n); None: all alike."""
        return self.kept() if self.sizes is None else self.sizes[:, num_prefix_tokens:]

    def options(self, options: CallOptions, kept: Tensor | None) -> CallOptions:
        """What is asked of attention over these tokens; `kept` (B, T) is its `keep_mask`.

        Tokens of several patches count as many times as these: proportional attention (Bolya et al. 2023, Eq. 1). Its
        bias is one row for all queries, which torch's fused kernels take without a table of all pairs.
        """
        bias = None if self.sizes is None else self.sizes.log()[:, None, None, :]
        return options._replace(token_ids=self.token_ids, keep_mask=kept, bias=bias)


ALL_TOKENS = Tokens()


def split_by_score(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Places of the `count` largest of (B, n) scores, and of the others, both ascending; the first of equal scores."""
    order = descending_places(scores.detach())
    return order[:, :count].sort(-1).values, order[:, count:].sort(-1).values


def gather_tokens(tokens: Tensor, places: Tensor) -> Tensor:
    """(B, n, C) at places (B, m): (B, m, C)."""
    return tokens.gather(1, places.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))


def counted_patches(errors: Tensor, token_ids: Tensor | None, kept: Tensor | None) -> Tensor:
    """Which of the errors (B, n) of tokens after the prefix count in a loss, 1 or 0: those of kept patches count.

    `token_ids` (B, n) and `kept` (B, N) are those of the model's output.
    """
    counted = torch.ones_like(errors) if token_ids is None else (token_ids >= 0).to(errors.dtype)
    return counted if kept is None else counted * kept.detach().to(errors.dtype)


def all_ids(patches: Tensor) -> Tensor:
    """(B, N) numbers of all patches (B, N, C)."""
    return torch.arange(patches.shape[1], device=patches.device).expand(patches.shape[0], -1)


class TokenReduction(Extra):
    """Base of all that leaves fewer tokens to later blocks.

    verb: what it does with tokens, for error messages.

    Args:
        num_layers: number of layers of the model.
        hidden_size: C.
    """

    place = "model"
    verb = "drops"

    @classmethod
    def check_prior(cls, settings: Mapping[str, Any], prior: ResolvedPrior) -> None:
        """Raise ValueError for a component in another slot of the resolved prior that does not go with it."""

    @classmethod
    def layer_tokens(cls, settings: Mapping[str, Any], num_layers: int, num_tokens: int) -> list[tuple[int, int]]:
        """Tokens without the prefix in the attention and in the MLP of each block, for N patches."""
        raise NotImplementedError

    @classmethod
    def choice_multiply_adds(
        cls, settings: Mapping[str, Any], num_layers: int, width: int, num_heads: int, num_tokens: int, prefix: int
    ) -> dict[int, int]:
        """Multiply-adds of the choice of tokens, by layer (from 0), in evaluation; only matrix products count."""
        raise NotImplementedError

    def before(
        self, layer_idx: int, hidden_states: Tensor, tokens: Tokens, grid: tuple[int, int], num_prefix_tokens: int
    ) -> tuple[Tensor, Tokens]:
        """The input of block `layer_idx` (from 0), made from the output of the block before it."""
        return hidden_states, tokens

    def within(self, layer_idx: int, grid: tuple[int, int]) -> bool:
        """Whether block `layer_idx` (from 0) calls this module between its attention and its MLP."""
        return False

    def seen_by(self, options: CallOptions) -> CallOptions:
        """The options of the attention before such a call, which give what the call sees of it.

        With `mean_keys` it sees these, otherwise the weights of the class token.
        """
        return options

    def forward(
        self,
        layer_idx: int,
        hidden_states: Tensor,
        tokens: Tokens,
        seen: Tensor,
        grid: tuple[int, int],
        num_prefix_tokens: int,
    ) -> tuple[Tensor, Tokens]:
        """The tokens that are left, and which patches they are.

        Args:
            layer_idx: number of the block, from 0.
            hidden_states: (B, T, C).
            tokens: as it was.
            seen: the weights of the class token (B, H, T), or the mean of the keys over the heads (B, T, D).
            grid: (height, width) of the patches of the image.
            num_prefix_tokens: P.
        """
        raise NotImplementedError

    def auxiliary_losses(self, tokens: Tokens) -> dict[str, Tensor]:
        """Losses of a training step by name, weighted, from the tokens after the last block."""
        return {}


class TokenPruning(TokenReduction):
    """Base of all token prunings. With keep rate 1 nothing is dropped.

    keep_rate: above 0 and at most 1. layers: the pruning blocks, ascending; None: those at a quarter, half and three
    quarters of the depth, 4, 7 and 10 of 12 as published.
    """

    SETTINGS: dict[str, Any] = {"keep_rate": 0.7, "layers": None}

    def __init__(self, num_layers: int, hidden_size: int, **settings: Any) -> None:
        super().__init__()
        self.blocks = self.pruning_blocks(settings, num_layers)
        self.set_keep_rate(settings["keep_rate"])

    def set_keep_rate(self, keep_rate: float) -> None:
        """Use another keep rate from now on (schedules of training)."""
        self.keep_rate = _check_rate(self.name, keep_rate)

    @classmethod
    def check_settings(cls, settings: Settings, grid: Sequence[int]) -> Settings:
        """As `Extra`."""
        layers = settings["layers"]
        if layers is not None:
            if isinstance(layers, str) or not isinstance(layers, Sequence) or not layers:
                raise ValueError(f"{cls.name}: layers={layers!r} must be a list of blocks, counted from 1, or null")
            layers = [check_integer(f"{cls.name}: layers", layer, 1) for layer in layers]
            if sorted(set(layers)) != layers:
                raise ValueError(f"{cls.name}: layers={layers!r} must ascend")
        return {**settings, "keep_rate": _check_rate(cls.name, settings["keep_rate"]), "layers": layers}

    @classmethod
    def check_model(cls, settings: Mapping[str, Any], config: Any) -> None:
        """As `Extra`."""
        last = cls.pruning_blocks(settings, config.num_hidden_layers)[-1]
        if last > config.num_hidden_layers:
            raise ValueError(
                f"prior: {cls.name}: layers={settings['layers']!r} must be at most {config.num_hidden_layers}, the "
                "number of blocks"
            )
        if not config.use_class_token:
            raise ValueError(f"prior: {cls.name!r} needs use_class_token=True")

    @staticmethod
    def pruning_blocks(settings: Mapping[str, Any], num_layers: int) -> list[int]:
        """The blocks that prune, counted from 1."""
        if settings["layers"] is not None:
            return list(settings["layers"])
        return sorted({1 + num_layers * quarter // 4 for quarter in (1, 2, 3)})


def _check_rate(name: str, keep_rate: Any) -> float:
    rate = python_value(keep_rate)
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate <= 1:
        raise ValueError(f"{name}: keep_rate={keep_rate!r} must be a number above 0 and at most 1")
    return float(rate)


def exact_share(keep_rate: float) -> tuple[int, int]:
    """A rate as the exact fraction that is written: 0.55 of 100 tokens are 55; in floats they are 55.00000000000001."""
    return Fraction(repr(keep_rate)).as_integer_ratio()


@register_extra("evit")
class EViT(TokenPruning):
    """Keeps the patches that the class token attends to most, and fuses the others into one token (Liang et al. 2022).

    This happens within the pruning blocks, between attention and MLP. Of n tokens ceil(keep_rate n) are kept: those
    with the largest attention of the class token, as the mean over heads. The fused token is the sum of the others,
    each times that attention, without normalisation. It comes last and has no place in the grid. It sees everything and
    is seen by everything, and is one of the n tokens of the next pruning block. All of this is as in the published
    code. Nothing is learned.
    """

    # fuse: False drops the others.
    SETTINGS = {**TokenPruning.SETTINGS, "fuse": True}

    def __init__(self, num_layers: int, hidden_size: int, **settings: Any) -> None:
        super().__init__(num_layers, hidden_size, **settings)
        self.fuse = settings["fuse"]

    @classmethod
    def check_settings(cls, settings: Settings, grid: Sequence[int]) -> Settings:
        """As `Extra`."""
        return {**super().check_settings(settings, grid), "fuse": check_boolean("evit: fuse", settings["fuse"])}

    @staticmethod
    def count(keep_rate: float, num_tokens: int) -> int:
        """How many of `num_tokens` tokens are kept."""
        numerator, denominator = exact_share(keep_rate)
        return -(-num_tokens * numerator // denominator)

    @classmethod
    def layer_tokens(cls, settings: Mapping[str, Any], num_layers: int, num_tokens: int) -> list[tuple[int, int]]:
        """As `TokenReduction`."""
        blocks, present, sizes = cls.pruning_blocks(settings, num_layers), num_tokens, []
        for block in range(1, num_layers + 1):
            attended = present
            if block in blocks and (left := cls.count(settings["keep_rate"], present)) < present:
                present = left + settings["fuse"]
            sizes.append((attended, present))
        return sizes

    @classmethod
    def choice_multiply_adds(
        cls, settings: Mapping[str, Any], num_layers: int, width: int, num_heads: int, num_tokens: int, prefix: int
    ) -> dict[int, int]:
        """As `TokenReduction`: the class token's logits, which are computed once more."""
        if settings["keep_rate"] == 1.0:
            return {}
        sizes = cls.layer_tokens(settings, num_layers, num_tokens)
        layers = [block - 1 for block in cls.pruning_blocks(settings, num_layers)]
        return {layer: (sizes[layer][0] + prefix) * width for layer in layers}

    def within(self, layer_idx: int, grid: tuple[int, int]) -> bool:
        """As `TokenReduction`."""
        return layer_idx + 1 in self.blocks and self.keep_rate < 1.0

    def seen_by(self, options: CallOptions) -> CallOptions:
        """As `TokenReduction`: the weights of the class token, or all of them if they are wanted anyway."""
        return options._replace(output_attentions=True, weight_rows=None if options.output_attentions else 1)

    def forward(
        self,
        layer_idx: int,
        hidden_states: Tensor,
        tokens: Tokens,
        seen: Tensor,
        grid: tuple[int, int],
        num_prefix_tokens: int,
    ) -> tuple[Tensor, Tokens]:
        """As `TokenReduction`."""
        prefix, others = hidden_states[:, :num_prefix_tokens], hidden_states[:, num_prefix_tokens:]
        present = operator.index(others.shape[1])
        count = self.count(self.keep_rate, present)
        if count == present:
            return hidden_states, tokens
        scores = seen[..., num_prefix_tokens:].mean(1)
        kept, dropped = split_by_score(scores, count)
        ids = (all_ids(others) if tokens.token_ids is None else tokens.token_ids).gather(1, kept)
        parts = [prefix, gather_tokens(others, kept)]
        if self.fuse:
            factors = scores.gather(1, dropped).unsqueeze(-1).to(others.dtype)
            parts.append((gather_tokens(others, dropped) * factors).sum(1, keepdim=True))
            ids = F.pad(ids, (0, 1), value=-1)
        return torch.cat(parts, 1), tokens._replace(token_ids=ids)


class PredictionModule(nn.Module):
    """Scores of patches from their own features and the mean features of all kept patches (Rao et al. 2021)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.features = nn.Linear(hidden_size, hidden_size)
        self.fc1 = nn.Linear(hidden_size, hidden_size // 2)
        self.fc2 = nn.Linear(hidden_size // 2, hidden_size // 4)
        self.fc3 = nn.Linear(hidden_size // 4, 2)

    def forward(self, patches: Tensor, kept: Tensor | None) -> Tensor:
        """Log probabilities (B, n, 2) of keeping and of dropping, float32 at least.

        Args:
            patches: (B, n, C).
            kept: (B, n), 1 for patches whose features count in the mean; None: all.
        """
        local, to_average = F.gelu(self.features(self.norm(patches))).chunk(2, -1)
        if kept is None:
            shared = to_average.mean(1, keepdim=True)
        else:
            weights = kept.to(to_average.dtype).unsqueeze(-1)
            shared = (to_average * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp_min(1.0)
        hidden = F.gelu(self.fc1(torch.cat([local, shared.expand_as(local)], -1)))
        scores = self.fc3(F.gelu(self.fc2(hidden)))
        return F.log_softmax(scores.to(torch.promote_types(scores.dtype, torch.float32)), -1)


@register_extra("dynamicvit")
class DynamicViT(TokenPruning):
    """Small networks decide which patches are kept (Rao et al. 2021), before the pruning blocks.

    In training the decisions are drawn (Gumbel softmax). Every patch stays, and attention leaves dropped patches out. A
    dropped patch stays dropped. The keep-ratio loss holds the share of kept patches after the s-th pruning at
    keep_rate^s. In evaluation the floor(keep_rate^s N) patches that are most likely to be kept remain, and the others
    are removed. With keep rate 1 nothing is decided.
    """

    # ratio_weight: weight of the keep-ratio loss.
    SETTINGS = {**TokenPruning.SETTINGS, "ratio_weight": 2.0}

    def __init__(self, num_layers: int, hidden_size: int, **settings: Any) -> None:
        super().__init__(num_layers, hidden_size, **settings)
        self.ratio_weight = settings["ratio_weight"]
        self.predictors = nn.ModuleList(PredictionModule(hidden_size) for _ in self.blocks)

    @classmethod
    def check_settings(cls, settings: Settings, grid: Sequence[int]) -> Settings:
        """As `Extra`."""
        weight = check_finite("dynamicvit: ratio_weight", python_value(settings["ratio_weight"]))
        return {**super().check_settings(settings, grid), "ratio_weight": float(weight)}

    @classmethod
    def check_model(cls, settings: Mapping[str, Any], config: Any) -> None:
        """As `Extra`."""
        super().check_model(settings, config)
        if config.hidden_size % 4:
            raise ValueError(f"prior: 'dynamicvit' needs a multiple of 4 as hidden_size, not {config.hidden_size}")

    @classmethod
    def num_weights(cls, settings: Mapping[str, Any], num_heads: int, width: int, hidden: int) -> int:
        """As `PriorModule`: the linear layers of the prediction modules."""
        modules = 3 if settings["layers"] is None else len(settings["layers"])
        return modules * cls.weights_of_prediction(width)

    @staticmethod
    def weights_of_prediction(width: int) -> int:
        """Weights of the linear layers of one prediction module, each of which multiplies once for a patch."""
        return width**2 + width * (width // 2) + (width // 2) * (width // 4) + (width // 4) * 2

    @staticmethod
    def count(keep_rate: float, stage: int, num_tokens: int) -> int:
        """How many of N patches are kept after pruning `stage` (from 1)."""
        numerator, denominator = exact_share(keep_rate)
        return max(1, num_tokens * numerator**stage // denominator**stage)

    @classmethod
    def layer_tokens(cls, settings: Mapping[str, Any], num_layers: int, num_tokens: int) -> list[tuple[int, int]]:
        """As `TokenReduction`."""
        blocks = cls.pruning_blocks(settings, num_layers)
        stages = [sum(block <= layer for block in blocks) for layer in range(1, num_layers + 1)]
        counts = [cls.count(settings["keep_rate"], stage, num_tokens) for stage in stages]
        return [(count, count) for count in counts]

    @classmethod
    def choice_multiply_adds(
        cls, settings: Mapping[str, Any], num_layers: int, width: int, num_heads: int, num_tokens: int, prefix: int
    ) -> dict[int, int]:
        """As `TokenReduction`: the linear layers of the prediction modules, over the patches before each pruning."""
        if settings["keep_rate"] == 1.0:
            return {}
        a_patch = cls.weights_of_prediction(width)
        sizes = [(num_tokens, num_tokens), *cls.layer_tokens(settings, num_layers, num_tokens)]
        return {block - 1: sizes[block - 1][0] * a_patch for block in cls.pruning_blocks(settings, num_layers)}

    def before(
        self, layer_idx: int, hidden_states: Tensor, tokens: Tokens, grid: tuple[int, int], num_prefix_tokens: int
    ) -> tuple[Tensor, Tokens]:
        """As `TokenReduction`."""
        if layer_idx + 1 not in self.blocks or self.keep_rate == 1.0:
            return hidden_states, tokens
        stage = self.blocks.index(layer_idx + 1)
        patches = hidden_states[:, num_prefix_tokens:]
        scores = self.predictors[stage](patches, tokens.kept())
        if self.training:
            decision = F.gumbel_softmax(scores, hard=True)[..., 0]
            if (before := tokens.kept()) is not None:
                decision = decision * before
            return hidden_states, Tokens(None, (*tokens.decisions, decision))
        num_tokens = operator.index(grid[0]) * operator.index(grid[1])
        kept, _ = split_by_score(scores[..., 0], self.count(self.keep_rate, stage + 1, num_tokens))
        ids = (all_ids(patches) if tokens.token_ids is None else tokens.token_ids).gather(1, kept)
        return torch.cat([hidden_states[:, :num_prefix_tokens], gather_tokens(patches, kept)], 1), Tokens(ids)

    def auxiliary_losses(self, tokens: Tokens) -> dict[str, Tensor]:
        """As `TokenReduction`: {"keep_ratio": ...} in training."""
        if not tokens.decisions:
            return {}
        errors = [
            (decision.mean(1) - self.keep_rate**stage).square().mean()
            for stage, decision in enumerate(tokens.decisions, 1)
        ]
        return {"keep_ratio": self.ratio_weight * torch.stack(errors).mean()}
