"""`python -m hf_sparseprior explain NAME`: what a prior does on a grid, in numbers and as pictures."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_sparseprior.analysis import explain_time, pictures
from hf_sparseprior.analysis.decays import position_names
from hf_sparseprior.analysis.explain_saved import of_folder, saved_folder, sizes_of
from hf_sparseprior.analysis.flops import attention_flops, dense_attention_flops
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.base.checks import check_integer, check_keys
from hf_sparseprior.base.costs import AttentionCosts
from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.base.json_files import parse_json
from hf_sparseprior.base.limits import check_sides, check_size
from hf_sparseprior.base.numbered import key_of, numbered
from hf_sparseprior.base.resolved import Resolved, ResolvedSupport, Time, own_settings
from hf_sparseprior.patterns.curves import curve_names, curve_rank
from hf_sparseprior.patterns.decay import DECAYS, PLACEMENTS, decay_weights, initial_beta, make_decay, pair_distances
from hf_sparseprior.patterns.masks import lonely_rows, self_rows
from hf_sparseprior.patterns.mixed_heads import is_mixed, support_name, support_orders, unshuffled
from hf_sparseprior.patterns.supports import (
    DENSE,
    LayerKey,
    LayerPattern,
    head_order,
    layer_pattern,
    own_grid,
    support_notes,
    support_settings,
)
from hf_sparseprior.patterns.token_order import RASTER
from hf_sparseprior.priors.layer_priors import has_layers, layer_specs
from hf_sparseprior.priors.low_rank import MIXERS
from hf_sparseprior.priors.predictor import PREDICTORS
from hf_sparseprior.priors.prior import parse_prior, predictor_or_mixer, resolve_prior

# Patches of a 64x64 grid; beyond that the N x N pictures take minutes and gigabytes.
LARGEST_PICTURE = 4096
QUERIES = 1024  # of which larger decays are shown, spread evenly


def size_of(grid: Sequence[int]) -> str:
    """ "8x14x14" of (8, 14, 14)."""
    return "x".join(map(str, grid))


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """{"key": value} of ["key=value"]; values are JSON, anything else is text."""
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set {pair!r} must be KEY=VALUE")
        try:
            settings[key] = parse_json(value, finite=False)
        except ValueError:
            settings[key] = value
    return settings


def run(arguments: argparse.Namespace) -> list[Path]:
    """Print the numbers, write the pictures, return their paths."""
    explain_time.check_arguments(arguments)
    _fill_sizes(arguments)
    sizes = {"heads": (1, "heads"), "prefix": (0, "tokens"), "head_dim": (1, "width"), "layers": (1, "layers")}
    for name, (minimum, kind) in sizes.items():
        check_size(f"--{name.replace('_', '-')}", getattr(arguments, name), minimum, kind)
    check_sides("--grid", arguments.grid, arguments.grid)
    if arguments.layer is not None:
        check_integer("--layer", arguments.layer, 1)
    if not arguments.no_picture and math.prod(arguments.grid) > LARGEST_PICTURE:
        raise ValueError(f"a picture needs {LARGEST_PICTURE} patches or fewer; give --no-picture for numbers alone")
    written: list[Path] = []
    parts = _parts(arguments)
    for first, count, slots in parts:
        numbers = f"layer {first + 1}" if count == 1 else f"layers {first + 1} to {first + count}"
        part = argparse.Namespace(**vars(arguments))
        if has_layers(arguments.prior):
            above = "" if first == parts[0][0] else "\n"
            print(f"{above}{numbers}, {key_of(range(first, first + count))!r} of the prior:")
            part.layers, part.out = count, arguments.out / numbers.replace(" ", "_")
        written += _explain_part(slots, part, first)
    for path in written:
        print(f"picture: {path}")
    if arguments.time:
        explain_time.explain_time(arguments.prior if has_layers(arguments.prior) else parts[0][2], arguments)
    return written


def _parts(arguments: argparse.Namespace) -> list[tuple[int, int, dict[str, Any]]]:
    """The runs of layers with one prior: the first number from 0, how many there are, and the slots of the prior.

    With --layer it is the run that this layer is in.
    """
    if not has_layers(arguments.prior):
        slots = parse_prior(arguments.prior)
        for key, value in parse_settings(arguments.set).items():
            _place_setting(slots, key, value)
        return [(0, arguments.layers, slots)]
    if arguments.set:
        raise ValueError(f"--set {arguments.set[0]} must be in one of the priors of 'layers'")
    specs = layer_specs(arguments.prior, arguments.all_layers)[: arguments.layers]
    if arguments.layer is not None and arguments.layer > len(specs):
        raise ValueError(f"--layer={arguments.layer} must be at most {len(specs)}, the number of layers")
    runs = [(layers.start, len(layers), parse_prior(spec)) for layers, spec in numbered(specs, len(specs), "layers")]
    if arguments.layer is None:
        return runs
    return [run for run in runs if run[0] < arguments.layer <= run[0] + run[1]]


def _explain_part(slots: dict[str, Any], arguments: argparse.Namespace, first: int) -> list[Path]:
    """Numbers and pictures of one prior, of layers from the number `first` on."""
    prior = resolve_prior(slots, arguments.heads, arguments.grid)
    written: list[Path] = []
    time = prior.get("time", "frame")
    if len(arguments.grid) == 3:
        print(f"time: {time}")
    if (chooser := predictor_or_mixer(prior)) is not None:
        explain_chooser(*chooser, arguments)
    elif slots["support"] is not None or prior["decay"] is None:
        written += explain_support(prior["support"], arguments, time, first)
    if prior["decay"] is not None:
        written += explain_decay(prior["decay"], arguments, time)
    for extra in prior["extras"]:
        print(f"note: {extra['name']} ({_shown(extra)}) is not in these numbers")
    return written


def _fill_sizes(arguments: argparse.Namespace) -> None:
    """Give the prior of a saved model, and the sizes that were not given: those of that model, of --model, or of a
    ViT-B.

    A model of several stages is its first one that takes a prior. `all_layers` are those of all stages; `config` is
    that of a saved model of ours.

    Raises:
        ValueError: for sizes next to a model, which has its own.
    """
    sizes: dict[str, Any] = {"heads": 12, "prefix": 1, "head_dim": 64, "layers": 12, "grid": (14, 14)}
    folder, own, arguments.config = saved_folder(arguments.prior), dict[str, Any](), None
    owner = arguments.model if folder is None else str(folder)
    if folder is not None:
        if arguments.model is not None:
            raise ValueError(f"--model={arguments.model} does not go with {folder}, which is a model")
        arguments.prior, own, arguments.config = of_folder(folder)
        if arguments.time and arguments.config is None:
            raise ValueError(f"--time predicts models of this package, and {folder} is one of transformers")
    elif owner is not None:
        arguments.grid = arguments.grid or sizes["grid"]
        own = sizes_of(explain_time.config_of({"support": None, "decay": None}, arguments))
    for name, default in sizes.items():
        given = getattr(arguments, name)
        if given is not None and name in own:
            flag, value = name.replace("_", "-"), size_of(given) if name == "grid" else given
            option = f"--model={owner}" if folder is None else owner
            raise ValueError(f"--{flag}={value} is the model's own with {option}; leave it out")
        if given is None:
            setattr(arguments, name, own.get(name, default))
    arguments.all_layers = own.get("all_layers", arguments.layers)
    if own.get("stages", 1) > 1:
        if isinstance(arguments.prior, list):  # one for each stage
            arguments.prior = arguments.prior[0]
        before = "before the time " if folder is None else ""
        print(f"the numbers {before}are of the first of {own['stages']} stages of {owner}")


def _place_setting(slots: dict[str, Any], key: str, value: Any) -> None:
    """Put a setting into the slot that has it."""
    known: list[str] = []
    registries: dict[str, Any] = {"decay": DECAYS, "predictor": PREDICTORS, "mixer": MIXERS}
    for slot in ("support", *registries):
        if (name := slots[slot]) is None or is_mixed(name):
            continue
        spec = {"name": name} if isinstance(name, str) else name
        settings = support_settings(spec["name"]) if slot == "support" else registries[slot][spec["name"]].SETTINGS
        if key in settings:
            slots[slot] = {**spec, key: value}
            return
        known += settings
    for index, extra in enumerate(slots["extras"]):
        spec = {"name": extra} if isinstance(extra, str) else extra
        if key in EXTRAS[spec["name"]].SETTINGS:
            slots["extras"][index] = {**spec, key: value}
            return
        known += EXTRAS[spec["name"]].SETTINGS
    check_keys([key], known, "this prior")


def _shown(settings: Resolved) -> str:
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in own_settings(settings).items())


def _print_heading(settings: Resolved, arguments: argparse.Namespace) -> None:
    heads, prefix = arguments.heads, arguments.prefix
    name = support_name(settings) if is_mixed(settings) else settings["name"]  # type: ignore[arg-type]
    print(f"{name} on a {size_of(arguments.grid)} grid, {heads} heads, {prefix} prefix tokens")
    print(f"{_shown(settings)}\n")


def explain_chooser(settings: Any, kind: type[AttentionCosts], arguments: argparse.Namespace) -> None:
    """Settings, pruning ratio and FLOPs of a predictor, whose pairs differ between images, or of a mixer."""
    heads, grid, prefix, head_dim = arguments.heads, arguments.grid, arguments.prefix, arguments.head_dim
    tokens = math.prod(grid)
    kept = kind.cost_in_pairs(settings, head_dim, tokens, prefix)
    pairs = arguments.layers * heads * 2 * kept * head_dim
    others = arguments.layers * kind.other_multiply_adds(settings, heads, head_dim, tokens, prefix)
    dense = dense_attention_flops(heads, tokens + prefix, head_dim, arguments.layers)
    _print_heading(settings, arguments)
    print(
        f"pairs          {kept} of {(tokens + prefix) ** 2} a head, or what costs as much, with prefix tokens\n"
        f"pruning ratio  {100 * (1 - kept / (tokens + prefix) ** 2):.3f} %\n"
        f"multiply-adds  {pairs / 1e9:.4f} G of these pairs and {others / 1e9:.4f} G besides them, dense "
        f"{dense / 1e9:.4f} G: {100 * (pairs + others) / dense:.2f} %\n"
        f"               ({arguments.layers} layers, head width {head_dim}, Q K^T and softmax V)"
    )


def explain_support(
    support: ResolvedSupport, arguments: argparse.Namespace, time: Time = "frame", first: int = 0
) -> list[Path]:
    """Offsets, nonzeros, pruning ratio, empty rows and FLOPs of a support, and its pictures.

    `first`: number of the first layer with this support, from 0.
    """
    heads, grid, prefix = arguments.heads, arguments.grid, arguments.prefix
    layer = first if arguments.layer is None else arguments.layer - 1
    key = LayerKey(heads, grid, layer, time)
    in_order = unshuffled(support)
    # Counted in one frame where that is enough: the pairs of a long clip fill the memory.
    pattern = layer_pattern(in_order, key)
    frames, places, where = pattern.frames, pattern.num_tokens, ", in one frame" if pattern.repeats else ""
    _print_heading(support, arguments)
    print(f"{'support':>7}  {'nonzeros':>8}  {'empty rows':>10}  offsets{where}")
    for head, offsets in enumerate(pattern.offsets):
        shown = " ".join(map(str, offsets)) if len(offsets) <= 16 else f"{offsets[0]} .. {offsets[-1]} ({len(offsets)})"
        others = pattern.pairs_of(head)
        alone = self_rows(offsets, places, 0) if others is None else lonely_rows(offsets, others, places, 0)
        empty = frames * len(alone)
        if others is not None and len(others):
            shown = f"{shown} and {len(others)} other pairs".removeprefix(" and ")
        print(f"{head + 1:>7}  {pattern.nonzeros(head):>8}  {empty:>10}  {shown or '-'}")
    flops, patch_flops = (
        attention_flops(pattern, extra, arguments.head_dim, arguments.layers) for extra in (prefix, 0)
    )
    dense = dense_attention_flops(heads, key.num_tokens + prefix, arguments.head_dim, arguments.layers)
    print(
        f"\nnonzeros       {pattern.attended_pairs()} patch tokens only, {pattern.attended_pairs(prefix)} with prefix "
        f"tokens\npruning ratio  {pattern.pruning_ratio():.3f} % patch tokens only, "
        f"{pattern.pruning_ratio(prefix):.3f} % with prefix tokens\n"
        f"multiply-adds  {flops / 1e9:.4f} G with prefix tokens ({patch_flops / 1e9:.4f} G patch tokens only), "
        f"dense {dense / 1e9:.4f} G: {100 * flops / dense:.2f} %\n"
        f"               ({arguments.layers} layers, head width {arguments.head_dim}, Q K^T and softmax V)"
    )
    if pattern.ranks is not None and not pattern.repeats:
        _print_order(support, pattern, pattern.ranks, arguments)
    if support != in_order:
        for number in range(first + 1, first + 1 + min(2, arguments.layers)):
            order = [str(index + 1) for index in head_order(support, heads, number - 1)]
            print(f"layer {number}: heads 1..{heads} have the supports {' '.join(order)}")
    for note in support_notes(support, key, prefix):
        print(f"note: {note}")
    if arguments.no_picture:
        return []
    return _draw_support(support, pattern, arguments)


def _draw_support(support: ResolvedSupport, pattern: LayerPattern, arguments: argparse.Namespace) -> list[Path]:
    """The pictures of a support: its masks, the curves of its order, and over a clip what one patch sees.

    `pattern`: its supports in order, not shuffled.
    """
    heads, grid, prefix, number = arguments.heads, arguments.grid, arguments.prefix, arguments.layer
    drawn, where, masks = list(range(heads)), "supports in order", pattern.mask(prefix)
    if number is not None:
        drawn, where = head_order(support, heads, pattern.key.layer), f"layer {number}"
        masks = layer_pattern(support, pattern.key).mask(prefix)
    pruned = pattern.pruning_ratio(prefix)
    titles = [f"{index + 1}: {_shorten(pattern.offsets[index])}" for index in drawn]
    if number is not None:
        titles = [f"head {head}, support {title}" for head, title in enumerate(titles, start=1)]
    name = support_name(support)
    heading = f"{name}, {size_of(grid)}, {where}: {pruned:.1f} % pruned"
    size = f"{name}_{size_of(grid)}".replace("&", "_and_")
    if len(grid) == 3:
        size, heading = f"{size}_{pattern.key.time}", f"{heading}, time {pattern.key.time}"
        titles = [f"head {head}" for head in range(1, heads + 1)] if number is not None else titles
    written = []
    if pattern.ranks is not None and not pattern.repeats:
        names = _orders(support, heads)
        used = list(dict.fromkeys(name for name in names if name != RASTER))
        if len(used) == 1 and RASTER not in names:
            heading = f"{heading}, along {used[0]}"
        else:
            titles = [f"{title} {names[index]}" for title, index in zip(titles, drawn, strict=True)]
        written.append(pictures.draw_curves(used, grid, arguments.out / f"order_{size}.png"))
    if len(grid) == 3:
        rows = masks[:, prefix + clip_centre(grid), prefix:].reshape(heads, *grid)
        heading_over = f"what the patch in the middle of the clip sees, frame by frame: {heading}"
        path = arguments.out / f"clip_{size}.png"
        written.append(pictures.draw_clip_rows(rows, titles, clip_centre(grid), path, heading_over))
    else:
        row, column = grid[0] // 2, grid[1] // 2
        rows = masks[:, prefix + row * grid[1] + column, prefix:].reshape(heads, *grid)
        heading_over = f"{name}, {where}: what the patch in row {row + 1}, column {column + 1} sees"
        path = arguments.out / f"patch_{size}.png"
        written.append(pictures.draw_seen(rows, titles, (row, column), path, heading_over))
    return [pictures.draw_support(masks, titles, arguments.out / f"support_{size}.png", heading, prefix), *written]


def clip_centre(grid: Sequence[int]) -> int:
    """Number of the patch in the middle of a clip."""
    return int(np.ravel_multi_index([side // 2 for side in grid], tuple(grid)))


def _orders(support: ResolvedSupport, num_heads: int) -> list[str]:
    """The order of each support, before heads are shuffled."""
    order = support_orders(support, num_heads)
    return [order] * num_heads if isinstance(order, str) else order


def _print_order(
    support: ResolvedSupport, pattern: LayerPattern, ranks: np.ndarray, arguments: argparse.Namespace
) -> None:
    """How far apart on the grid the patches are that the offsets pair, in the support's order and in raster order."""
    patches = np.argsort(np.broadcast_to(ranks, (arguments.heads, ranks.shape[1])), axis=1)
    along = _mean_distance(pattern.offsets, patches, arguments.grid)
    in_raster = _mean_distance(pattern.offsets, np.sort(patches, axis=1), arguments.grid)
    names, axes = (
        dict.fromkeys(_orders(support, arguments.heads)),
        "frames, rows" * (len(arguments.grid) == 3) or "rows",
    )
    print(
        f"order          {', '.join(names)}: pairs of an offset are {along:.2f} patches apart on the grid ({axes} and "
        f"columns, mean),\n               {in_raster:.2f} in raster order"
    )


def _mean_distance(offsets: list[list[int]], patches: np.ndarray, grid: Sequence[int]) -> float:
    """Mean distance, over all axes, of the pairs of all heads; patches (H, N) in the order of each head."""
    places = np.stack(np.unravel_index(patches, tuple(grid)), 1)
    steps = [
        np.abs(coordinates[:, o:] - coordinates[:, : coordinates.shape[1] - o]).sum(0)
        for coordinates, head in zip(places, offsets, strict=True)
        for o in head
        if o
    ]
    return float(np.concatenate([*steps, np.zeros(0)]).mean()) if steps else 0.0


def initial_mask(beta: float, positions: Tensor) -> np.ndarray:
    """M (N, N) of one head whose beta is the same for all curves; positions (C, A, N)."""
    betas = torch.full((positions.shape[0], 1), beta, dtype=torch.float64)
    return decay_weights(betas, pair_distances(positions, torch.float64), torch.float64)[0].numpy()


def _summary(beta: float, positions: Tensor) -> tuple[np.ndarray, float, float]:
    """`initial_mask`, the smallest M in it, and the mean; of many patches those of some queries, and no mask."""
    tokens = positions.shape[-1]
    if tokens <= LARGEST_PICTURE:
        mask = initial_mask(beta, positions)
        return mask, float(mask.min()), float(mask.mean())
    betas = torch.full((positions.shape[0], 1), beta, dtype=torch.float64)
    smallest, total = math.inf, 0.0
    for query in np.linspace(0, tokens - 1, QUERIES).round().astype(int):
        distances = (positions - positions[..., query : query + 1]).abs().sum(1)
        row = decay_weights(betas, distances, torch.float64)
        smallest, total = min(smallest, float(row.min())), total + float(row.mean())
    return np.empty((0, 0)), smallest, total / QUERIES


def _shorten(offsets: list[int]) -> str:
    return " ".join(map(str, offsets)) if len(offsets) <= 8 else f"{len(offsets)} offsets"


def explain_decay(decay: Any, arguments: argparse.Namespace, time: Time = "frame") -> list[Path]:
    """Curves and decay masks of a decay at the middle of its initial interval, and their pictures."""
    grid, seen_grid = arguments.grid, own_grid(arguments.grid, time)
    tokens, size = math.prod(grid), size_of(grid)
    low, high, std = initial_beta(decay)
    also = f" + N(0, {std:g})" if std else ""
    beta = (low + high) / 2
    gamma = torch.sigmoid(torch.tensor(beta, dtype=torch.float64)).item()
    plan = AttentionPlan(LayerKey(arguments.heads, grid, time=time), arguments.prefix, DENSE, decay)
    positions = torch.tensor(plan.build_table("positions"))
    curves = position_names(decay, positions.shape[0])
    print(f"{decay['name']} on a {size} grid, init {decay['init']}: beta ~ U({low:g}, {high:g}){also}")
    print(f"placement {decay['placement']}: {PLACEMENTS[decay['placement']]}, alpha scales the {decay['alpha_scales']}")
    print(f"shown for beta = {beta:g}, gamma = {gamma:.6f}\n")
    print(f"{'curve':<10}  {'first ranks':<24}  {'mean step':>9}  {'smallest M':>10}  {'mean M':>7}")
    masks = {}
    for index, curve in enumerate(curves):
        masks[curve], smallest, mean = _summary(beta, positions[index : index + 1])
        first, step = "-", "-"
        if curve in curve_names():
            rank = curve_rank(curve, seen_grid)
            first = " ".join(map(str, rank.reshape(-1, seen_grid[-1])[0, :6]))
            order = np.stack(np.unravel_index(np.argsort(rank.ravel()), seen_grid))
            steps = np.abs(np.diff(order, axis=1)).sum(0)
            step = f"{steps.mean():.3f}" if len(steps) else "-"
        print(f"{curve:<10}  {first:<24}  {step:>9}  {smallest:>10.4f}  {mean:>7.4f}")
    masks["mean"], smallest, mean = _summary(beta, positions)
    print(f"{'mean':<10}  {'':<24}  {'':>9}  {smallest:>10.4f}  {mean:>7.4f}")
    if tokens > LARGEST_PICTURE:
        print(f"(M of {QUERIES} of {tokens} queries, spread evenly)")
    scalars = sum(parameter.numel() for parameter in make_decay(decay, arguments.heads).parameters())
    print(f"\n{scalars} learned scalars a layer, {scalars * arguments.layers} in {arguments.layers} layers")
    if arguments.no_picture or tokens == 1:
        return []
    written, heading = [], f"decay masks of three patches, gamma = {gamma:.5f}"
    if len(grid) == 3:
        size, heading = f"{size}_{time}", f"M around the middle of the clip, gamma = {gamma:.5f}, time {time}"
    if "curves" in decay:
        written.append(pictures.draw_curves(curves, seen_grid, arguments.out / f"curves_{decay['name']}_{size}.png"))
    written.append(pictures.draw_decay(masks, grid, arguments.out / f"decay_{decay['name']}_{size}.png", heading))
    return written
