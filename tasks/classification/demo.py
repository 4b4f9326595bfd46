"""The demo: python -m tasks.classification.demo

Four vision transformers: dense, Fibottention, VIOLIN and both together. With CIFAR-10 in data/cifar10, which `make
demo` fetches, they train on its photographs of 32 x 32 pixels with patches of 2, one run each; without it on
scikit-learn's digits, every pixel a token, three runs each. The demo prints one table, draws pictures, saves the best
model and loads it again in a fresh process through transformers' AutoModel. Last it measures what an image costs a
ViT-S on this machine. Runs that are done already are not done again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from hf_sparseprior import SparsePriorViTForImageClassification
from hf_sparseprior.analysis import pictures
from hf_sparseprior.analysis.decays import learned_decay_masks
from hf_sparseprior.base.files import write_text
from hf_sparseprior.classification.config import load_config
from hf_sparseprior.classification.data import make_datasets
from hf_sparseprior.classification.task import CLASSIFICATION
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.data import ImageDataset, load_data
from hf_sparseprior.kernels import diagonal_cpu
from hf_sparseprior.patterns.supports import build_mask
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.run_folder import MODEL
from hf_sparseprior.training.allocator import keep_freed_memory
from tasks.classification import commands, demo_speed
from tasks.classification.fetch_cifar10 import FILES
from tasks.common.compare import Comparison, run_comparison
from tasks.common.comparison_table import draw_results, table

PHOTO = 4  # of the test images that are drawn
PRIORS = ("dense", "fibottention", "violin", "fibottention+violin")
CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "classification"
FETCH = "python -m tasks.classification.fetch_cifar10"


@dataclass(frozen=True)
class Material:
    """What the models train on, and which test image is drawn.

    name: also the folder of the runs. what: a line for the table. config: file of the configurations. changes: of the
    configurations. seeds: runs of each prior. image: number of the test image. query: (row, column) of the patch whose
    attention is drawn.
    """

    name: str
    what: str
    config: str
    changes: tuple[str, ...]
    seeds: int
    image: int
    query: tuple[int, int]


def material(data: str | None, photos: Path) -> Material:
    """Photographs or digits; None: photographs if they are there, else digits, and a line says so.

    Raises:
        OSError: for photographs that are asked for and are not there.
    """
    missing = [name for name in FILES if not (photos / name).is_file()]
    if data == "photos" and missing:
        raise OSError(f"--data photos: {photos / missing[0]} is missing; {FETCH} {photos} fetches it")
    if data is None and missing:
        print(f"{photos} has no photographs, so this is scikit-learn's digits; {FETCH} {photos} fetches CIFAR-10")
    if data == "digits" or missing:
        return Material("digits", "handwritten digits of 8 x 8 pixels", "digits.yaml", (), 3, 5, (3, 4))
    return Material(
        "photos", "CIFAR-10, photographs of 32 x 32 pixels", "demo.yaml", (f"data.path={photos}",), 1, PHOTO, (8, 8)
    )


# Runs in a process of its own, which cannot import this package: transformers takes the code from the folder.
RELOAD = """
import sys
sys.modules["hf_sparseprior"] = None
import numpy as np, torch
from transformers import AutoModelForImageClassification
model = AutoModelForImageClassification.from_pretrained(
    sys.argv[1], trust_remote_code=True, attn_implementation="eager"
).eval()
with np.load(sys.argv[2], allow_pickle=False) as stored, torch.no_grad():
    same = np.array_equal(model(torch.from_numpy(stored["pixel_values"])).logits.numpy(), stored["logits"])
assert sys.modules["hf_sparseprior"] is None
print(type(model).__name__, "from", type(model).__module__.split(".")[0] + ", logits bit-equal:", same)
sys.exit(0 if same else 1)
"""


def train_all(trained_on: Material, out: Path, seeds: int) -> dict[str, list[dict[str, Any]]]:
    """Results of every seed by prior. Where nobody looks at bars, there is one line a run instead."""
    file = CONFIGS / trained_on.config
    configs = {prior: load_config(f"{file}#{prior}", trained_on.changes) for prior in PRIORS}
    shown = sys.stderr.isatty()
    for config in configs.values():
        config["trainer"]["disable_tqdm"] = not shown
    comparison = Comparison(CLASSIFICATION, "demo", configs, list(range(seeds)))
    # Without bars the Trainer prints its logs instead. The line of a run goes to stderr.
    with nullcontext() if shown else redirect_stdout(StringIO()):
        return run_comparison(comparison, out, out, command="make demo")


def draw_pictures(trained_on: Material, out: Path, results: dict[str, list[dict[str, Any]]]) -> list[Path]:
    """Support grid, curves, learned decay masks, and attention over a test image."""
    models = {
        prior: SparsePriorViTForImageClassification.from_pretrained(out / prior / "seed0" / MODEL).eval()
        for prior in PRIORS
    }
    config = models["fibottention+violin"].config
    grid, heads, prefix = config.grid, config.num_attention_heads, config.num_prefix_tokens
    masks, titles = [], []
    for layer in range(config.num_hidden_layers):
        spec = config.prior["support"]
        mask = build_mask(spec, num_heads=heads, num_tokens=grid[0] * grid[1], num_prefix_tokens=prefix, layer=layer)
        masks.append(mask)
        titles += [f"layer {layer + 1}, head {head + 1}" for head in range(heads)]
    heading = f"fibottention: {config.pruning_ratio:.1f} % of the pairs are left out (orange: class token)"
    drawn = [pictures.draw_support(np.concatenate(masks), titles, out / "support.png", heading, prefix)]
    curves = config.prior["decay"]["curves"]
    drawn.append(pictures.draw_curves(curves, grid, out / "curves.png"))
    drawn.append(_draw_learned_decay(models["violin"], trained_on.name, out / "decay.png"))
    drawn.append(_draw_image(trained_on, models, results, out / "attention.png"))
    drawn.append(draw_results(results, out / "results.png"))
    return drawn


def _draw_learned_decay(model: SparsePriorViTForImageClassification, data: str, path: Path) -> Path:
    masks = {
        f"layer {layer}, head {head + 1}": mask[head].numpy()
        for layer, mask in enumerate(learned_decay_masks(model), start=1)
        for head in range(min(2, len(mask)))
    }
    return pictures.draw_decay(masks, model.config.grid, path, f"decay masks M that VIOLIN learned on {data}")


@torch.no_grad()
def _draw_image(
    trained_on: Material,
    models: dict[str, SparsePriorViTForImageClassification],
    results: dict[str, list[dict[str, Any]]],
    path: Path,
) -> Path:
    first = next(iter(results.values()))[0]
    config = models["dense"].config
    test = _test_set(first["config"]["data"], config)
    sample = test[trained_on.image]
    attentions = {}
    for prior, model in models.items():
        weights = model(sample["pixel_values"][None], output_attentions=True).attentions[1]
        attentions[prior] = weights[0].numpy()
    name = config.id2label[int(sample["labels"])]
    heading = f"layer 2 looking at this test image ({name}): from the class token and from the marked patch"
    image = np.asarray(test.images.read(trained_on.image))
    place = trained_on.query
    return pictures.draw_attention(image, attentions, config.grid, config.num_prefix_tokens, place, path, heading)


def _test_set(data_section: dict[str, Any], model_config: Any) -> ImageDataset:
    data_config = DataConfig(**data_section)
    return make_datasets(load_data(data_config), data_config, model_config)[0]["test"]


@torch.no_grad()
def save_best(out: Path, results: dict[str, list[dict[str, Any]]]) -> tuple[Path, str]:
    """Load the model that was best on validation in a fresh process, without this package. Returns what it printed."""
    prior, seed = max(
        ((prior, seed) for prior in results for seed in range(len(results[prior]))),
        key=lambda which: results[which[0]][which[1]]["metrics"]["validation_accuracy"],
    )
    folder = out / prior / f"seed{seed}" / MODEL
    # "eager" is the one path that both have: the compiled kernels are not part of a saved model.
    model = SparsePriorViTForImageClassification.from_pretrained(folder, attn_implementation="eager").eval()
    test = _test_set(results[prior][seed]["config"]["data"], model.config)
    pixels = torch.stack([test[index]["pixel_values"] for index in range(32)])
    probe = out / "reload_probe.npz"
    np.savez(probe, pixel_values=pixels.numpy(), logits=model(pixels).logits.numpy())
    process = subprocess.run(
        [sys.executable, "-c", RELOAD, str(folder), str(probe)], capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise RuntimeError(f"the saved model in {folder} did not come back equal:\n{process.stdout}{process.stderr}")
    return folder, process.stdout.strip()


def results_table(results: dict[str, list[dict[str, Any]]]) -> str:
    """The table of the runs. A single run has no spread, and the head of its column names none."""
    return table(results).replace(", mean ± std of 1 |", " |", 1)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = commands.demo()
    arguments = parser.parse_args(argv)
    if arguments.seeds is not None and arguments.seeds < 1:
        parser.error(f"--seeds {arguments.seeds} must be 1 or more")
    transformers_logging.disable_progress_bar()
    keep_freed_memory()

    def work() -> None:
        trained_on = material(arguments.data, arguments.photos)
        show(trained_on, arguments.out / trained_on.name, arguments.seeds or trained_on.seeds)

    return run_command(parser.prog, work, f"from the last checkpoint in {arguments.out}")


def show(trained_on: Material, out: Path, seeds: int) -> None:
    """Train, draw and print everything."""
    start = time.perf_counter()
    diagonal_cpu.ready()  # kernels are compiled now, not while a run is timed; without a compiler there are none
    results = train_all(trained_on, out, seeds)
    lines = results_table(results)
    drawn = draw_pictures(trained_on, out, results)
    folder, reloaded = save_best(out, results)
    write_text(out / "table.md", lines + "\n")
    summary = {prior: [run_["metrics"] for run_ in runs] for prior, runs in results.items()}
    write_text(out / "results.json", json.dumps(summary, indent=1) + "\n")
    print(f"\n{trained_on.what}: {results['dense'][0]['data']}\n\n{lines}\n")
    for path in drawn:
        print(f"picture: {path}")
    print(f"best model on validation: {folder}\nin a fresh process: {reloaded}")
    count = torch.get_num_threads()
    threads = f"{count} CPU thread{'s' if count > 1 else ''}"
    print(f"\nViT-S with random weights, one image, no gradients, float32, measured here, {threads}:\n", flush=True)
    print(demo_speed.table(list(demo_speed.measured(sizes=demo_speed.SIZES, say=tell))))
    print(f"\n{time.perf_counter() - start:.0f} s; results of runs are kept in {out}, delete it to train anew")


def tell(line: str) -> None:
    """What is measured now, for who waits."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
