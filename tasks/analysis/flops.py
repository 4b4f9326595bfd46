"""FLOPs of whole models over the image size, with a prior and dense: python -m tasks.analysis.flops [MODEL ...]

Without a MODEL it counts Fibottention Figure 3 (ViT-B, ViT-T and ConViT-B) and the papers' printed numbers.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from hf_sparseprior.analysis import pictures
from hf_sparseprior.analysis.flops import CONVENTIONS, ModelFlops, model_flops
from hf_sparseprior.base.families import preset_family, presets
from hf_sparseprior.images.model import MODEL_EXTRAS
from hf_sparseprior.images.sections import load_image_config
from hf_sparseprior.models.base_config import as_pair
from hf_sparseprior.models.pretrained import saved_family
from hf_sparseprior.priors.prior import prior_name
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.config import parse_value, split_cell
from hf_sparseprior.runs.environment import command_line, environment
from hf_sparseprior.runs.models import section_family
from hf_sparseprior.runs.results import write_results
from hf_sparseprior.runs.run_folder import MODEL
from tasks.analysis import commands
from tasks.analysis.commands import IMAGE_SIZES, PRESET_PRIOR
from tasks.analysis.paper_numbers import (
    FIGURE_3,
    IMAGENET_CLASSES,
    paper_numbers,
    saving,
    unexplained_numbers,
)

Counter = Callable[..., ModelFlops]


def read_config(model: str) -> Any:
    """The config of a preset, a saved model's folder, a run's folder or a classification run's FILE or FILE#CELL.

    A preset has ImageNet's 1000 classes. A YAML has no classifier here: its data decides.

    Raises:
        ValueError, OSError: for anything else; the message names what exists.
    """
    path = Path(model)
    if model in presets():
        return preset_family(model).make_config(model, num_labels=IMAGENET_CLASSES, prior=PRESET_PRIOR)
    if split_cell(path)[0].suffix in (".yaml", ".yml"):
        return _yaml_config(path)
    for folder in (path, path / MODEL):
        if (folder / "config.json").is_file():
            return _saved_config(folder)
    names = list(presets())
    near = difflib.get_close_matches(model, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"{model!r} is no preset, YAML or folder of a saved model; {hint}Presets: {', '.join(names)}")


def _yaml_config(path: Path) -> Any:
    model = load_image_config(path)["model"]
    options = {key: value for key, value in model.items() if key not in MODEL_EXTRAS} | {"num_labels": 0}
    if pretrained := model.get("pretrained"):
        return _saved_config(Path(pretrained), **options)
    return section_family(model).make_config(model.get("preset"), **options)


def _saved_config(folder: Path, **options: Any) -> Any:
    return saved_family(folder).config_class.from_pretrained(folder, **options)


def counter_of(model: str, prior: Any) -> tuple[Counter, Any, Any]:
    """The function (image_size, prior, convention) that counts a model, the model's config, and its prior, checked."""
    config = read_config(model)
    resolved = config.resolve_priors(config.prior if prior is None else prior)
    return partial(model_flops, config), config, resolved if len(resolved) > 1 else resolved[0]


def count(model: str, prior: Any, sizes: Sequence[int] | None, convention: str) -> dict[str, Any]:
    """FLOPs of a model with its prior and dense over the image sizes."""
    counter, config, resolved = counter_of(model, prior)
    patch = math.lcm(*as_pair(config.patch_size))
    if sizes is None:
        scaled = (size * as_pair(config.image_size)[0] // IMAGE_SIZES[0] for size in IMAGE_SIZES)
        sizes = [size - size % patch for size in scaled if size >= patch]
    return {
        "model": model,
        "prior": resolved,
        "sparse": [counter(size, prior=resolved, convention=convention) for size in sizes],
        "dense": [counter(size, prior="dense", convention=convention) for size in sizes],
    }


def table(counted: dict[str, Any]) -> str:
    """A model's table: a line for each image size, then the layers at the first one."""
    sparse, dense = counted["sparse"], counted["dense"]
    first = sparse[0]
    lines = [
        f"{counted['model']} {prior_name(counted['prior'])}, {len(first.layers)} layers"
        f"{'' if first.classifier else ', no classifier'}; counted in the layers: {first.tokens}",
        f"{'pixels':>7} {'N':>6} {'embedding':>10} {'projections':>11} {'MLP':>10} {'attention':>10} {'total':>10}"
        f"   {'dense attention':>15} {'dense total':>11} {'saved':>7}   GFLOPs an image",
    ]
    for own, full in zip(sparse, dense, strict=True):
        lines.append(
            f"{own.image_size[0]:>7} {own.num_tokens:>6} {_giga(own.patch_embedding):>10} "
            f"{_giga(own.part('projections')):>11} {_giga(own.part('mlp')):>10} {_giga(own.attention):>10} "
            f"{_giga(own.total):>10}   {_giga(full.attention):>15} {_giga(full.total):>11} {saving(own, full):>6.2f}%"
        )
    lines += [f"layers at {first.image_size[0]} pixels, GFLOPs each", *_layer_lines(first)]
    if first.convolutions:
        lines.append(f"  convolutions besides the layers: {_giga(first.convolutions)}")
    if first.decay is not None:
        lines.append("decay, 10^9 operations besides the total: M for a step, its use for each image")
        lines += [
            f"{own.image_size[0]:>7} {_giga(own.decay['build']):>10} {_giga(own.decay['apply']):>10}" for own in sparse
        ]
    return "\n".join(lines)


def _giga(value: int) -> str:
    return f"{value / 1e9:.5g}"


def _layer_lines(flops: ModelFlops) -> list[str]:
    """One line for each run of equal layers."""
    lines, start = [], 1
    for layer, group in itertools.groupby(flops.layers):
        end = start + len(list(group)) - 1
        parts = ", ".join(f"{name} {_giga(value)}" for name, value in layer.items() if value)
        lines.append(f"  {start}-{end}: {parts}; together {_giga(sum(layer.values()))}")
        start = end + 1
    return lines


def paper_lines() -> list[str]:
    """The papers' numbers next to ours, and what each includes."""
    lines = ["numbers of the papers (a multiply-add is 1 FLOP, softmax is not counted)"]
    for number in paper_numbers():
        lines.append(f"  {number.source}: printed {number.printed:g} {number.unit}, counted {number.count:.5g}")
        lines.append(f"    {number.includes}")
    lines.append("numbers that no formula was found for")
    for number in unexplained_numbers():
        lines.append(f"  {number.source}: printed {number.printed:g} {number.unit}, nearest {number.count:.5g}")
        lines.append(f"    {number.includes}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.flops()
    arguments = parser.parse_args(argv)
    transformers_logging.set_verbosity_error()
    return run_command(parser.prog, lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    """Count, print the tables, write flops.json and flops.png."""
    priors = [None] if arguments.prior is None else [parse_value(prior) for prior in arguments.prior]
    models = list(dict.fromkeys(arguments.models or FIGURE_3))
    counts = [count(model, prior, arguments.image_sizes, arguments.convention) for model in models for prior in priors]
    rule = CONVENTIONS[arguments.convention].text
    print(f"{rule}; biases, norms and activations never\n")
    for counted in counts:
        print(f"{table(counted)}\n")
    if not arguments.models:
        print("\n".join(paper_lines()) + "\n")
    curves: dict[str, dict[str, list[ModelFlops]]] = {}
    for counted in counts:
        lines = curves.setdefault(counted["model"], {"dense": counted["dense"]})
        name = prior_name(counted["prior"])
        lines[f"{name}, {len(lines)}" if name in lines and name != "dense" else name] = counted["sparse"]
    picture = pictures.draw_flops(curves, arguments.out / "flops.png", f"FLOPs over the image size: {rule}")
    results = {
        "task": "flops",
        "convention": {"name": arguments.convention, **vars(CONVENTIONS[arguments.convention])},
        "models": [
            {
                **counted,
                **{key: [flops.to_dict() for flops in counted[key]] for key in ("sparse", "dense")},
                "saved_percent": [saving(*pair) for pair in zip(counted["sparse"], counted["dense"], strict=True)],
            }
            for counted in counts
        ],
        "paper_numbers": [] if arguments.models else [vars(number) for number in paper_numbers()],
        "unexplained_numbers": [] if arguments.models else [vars(number) for number in unexplained_numbers()],
        "command": command_line(),
        **environment(),
    }
    write_results(arguments.out / "flops.json", results)
    print(f"{arguments.out / 'flops.json'}, picture: {picture}")


if __name__ == "__main__":
    sys.exit(main())
