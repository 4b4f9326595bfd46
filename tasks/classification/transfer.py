"""What is lost when a small dense ViT is made sparse on larger images: python -m tasks.classification.transfer cifar10

A dense ViT trains on images of 56 pixels (196 patches), goes on with 112 (784) and with 224 (3,136), and `sparsify`
makes the models of the last two sizes faster. The report has their accuracy before and after recovery by distillation,
and beside it that of one prior in all layers, of the dense model on smaller images and of token merging at equal time,
recovered for as long, and that of the dense models that were trained on smaller images. Images are of 28 or 32 pixels,
so larger ones have no more detail. Dense models: configs/classification/transfer.yaml; budgets and minutes: `CASES`.

The same command goes on where it was stopped. It leaves a record for each data set in RECORDS; table.md and
transfer.png there are made of all of them. `--again` times the saved models once more.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import hf_sparseprior as sp
from hf_sparseprior.analysis import pictures
from hf_sparseprior.base.files import write_text
from hf_sparseprior.classification.config import load_config
from hf_sparseprior.classification.task import CLASSIFICATION
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.data import load_data
from hf_sparseprior.models.pretrained import weights_sha256
from hf_sparseprior.prediction.predictor import Predictor
from hf_sparseprior.prediction.predictors import load_predictor
from hf_sparseprior.runs import hf_run
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.config import Config
from hf_sparseprior.runs.environment import environment
from hf_sparseprior.runs.locks import REPORT_LOCK, turn
from hf_sparseprior.runs.metrics import unpack_correct
from hf_sparseprior.runs.results import read_results, write_results
from hf_sparseprior.runs.run_folder import MODEL
from hf_sparseprior.runs.tables import markdown_table, wilson_interval
from hf_sparseprior.sparsification import timing
from hf_sparseprior.sparsification.report import JSON, points
from hf_sparseprior.training.allocator import keep_freed_memory
from tasks.classification import commands
from tasks.classification.commands import TRANSFER_DATA

CONFIG = "configs/classification/transfer.yaml"
TRAINING_IMAGES = 3000  # for calibration and recovery
SECONDS, SECONDS_AGAIN = 3.0, 20.0  # of the rounds of a comparison of times, and of one on a quiet machine
BATCH = 16
TABLE, FIGURE, TIMES = "table.md", "transfer.png", "times.json"
ABOVE = {"textcoords": "offset points", "fontsize": 7}


@dataclass(frozen=True)
class Case:
    """A model to make faster.

    size: of its images, in pixels. budget: share of the dense model's time. minutes: of recovery, of each model. test:
    images of the test.
    """

    size: int
    budget: float
    minutes: float
    test: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return case_name(self.size, self.budget)

    @property
    def settings(self) -> dict[str, Any]:
        """Of `sparsify`."""
        recovery = {"minutes": self.minutes, "learning_rate": 1e-4, "recover_all": True}
        return {"calibration": 32, "test": self.test, "seconds": SECONDS, "device": "cpu", **recovery}


def case_name(size: int, budget: float) -> str:
    """Name of the case of a size and a budget."""
    return f"{size}_{budget:g}"


SIZES = (56, 112, 224)
CASES = (Case(112, 0.5, 3.0, 2000), Case(224, 0.25, 6.0, 1000))


# ---- the runs -------------------------------------------------------------------------------------------------------


def dense_configs(data: str, out: Path, sizes: Sequence[int] = SIZES, changes: Sequence[str] = ()) -> dict[int, Config]:
    """The configuration of the dense model of each size; a larger model starts from the next smaller one."""
    configs: dict[int, Config] = {}
    for number, size in enumerate(sizes):
        config = load_config(f"{CONFIG}#{data}-{size}", changes)
        config["trainer"]["output_dir"] = str(out / f"dense_{size}")
        if number:
            config["model"]["pretrained"] = str(out / f"dense_{sizes[number - 1]}" / MODEL)
        configs[size] = config
    return configs


def photos(config: Config, count: int = TRAINING_IMAGES) -> tuple[dict[str, list[Any]], dict[str, list[int]]]:
    """Some training images of a run and its test images, and their classes, as `sparsify` takes them."""
    data = load_data(DataConfig(**config["data"]))
    images, labels = {}, {}
    for name in ("train", "test"):
        split, every = data.splits[name], np.arange(len(data.splits[name]))
        chosen = np.random.default_rng(0).permutation(every)[:count] if name == "train" else every
        images[name] = [Image.fromarray(np.asarray(split.read(int(index)))) for index in chosen]
        labels[name] = split.labels[chosen].tolist()
    return images, labels


def do(data: str, out: Path, records: Path, cases: Sequence[Case] = CASES, changes: Sequence[str] = ()) -> None:
    """All that is left of a data set, and its record.

    Args:
        data: name of a value in the configuration.
        out: folder of the models. records: folder of the records.
        cases: models to make faster; each has a dense model of its size. changes: of the configurations.

    Raises:
        ValueError, OSError: for bad values and missing files.
        RunStopped: on SIGTERM while a dense model trains.
    """
    file = records / f"{data}.json"
    if file.is_file():
        print(f"{file}: done")
        return
    sizes = [SIZES[0], *(case.size for case in cases)]
    configs = dense_configs(data, out / data, sizes, changes)
    dense = {size: hf_run.run(CLASSIFICATION, config) for size, config in configs.items()}
    images, labels = photos(configs[SIZES[0]])
    reports = [faster(out / data, case, images, labels) for case in cases]
    models = {size: load_predictor(out / data / f"dense_{size}", device="cpu") for size in sizes}
    right = {size: count_right(models[size], images["test"], labels["test"]) for size in sizes[:-1]}
    content = {
        "data": configs[SIZES[0]]["data"],
        "dense": [
            {
                "size": size,
                "steps": results["steps"],
                "minutes": results["seconds"] / 60,
                "test_accuracy": results["metrics"]["test_accuracy"],
                "test_images": len(unpack_correct(results["test_correct"])),
            }
            for size, results in dense.items()
        ],
        "reports": reports,
        "smaller": [
            [
                {"size": size, "share": share, "right": right[size], "test_images": len(labels["test"])}
                for size, share in shares(models, case.size, images["test"][:1]).items()
            ]
            for case in cases
        ],
        "command": f"python -m tasks.classification.transfer {data}",
        **environment(),
    }
    records.mkdir(parents=True, exist_ok=True)
    write_results(file, content)


def faster(out: Path, case: Case, images: Mapping[str, list[Any]], labels: Mapping[str, list[int]]) -> dict[str, Any]:
    """The report of a case, which is made unless there is one.

    Raises:
        ValueError: for one of another dense model or other settings.
    """
    model, folder = out / f"dense_{case.size}", out / case.name
    of = {"budget": case.budget, "settings": case.settings, "weights": weights_sha256(model / MODEL)}
    about = out / f"{case.name}.json"
    if about.is_file() and read_results(about) != of:
        raise ValueError(f"{folder} is of another dense model or other settings; remove it and {about}")
    if not (folder / JSON).is_file():
        write_results(about, of)
        sp.sparsify(
            *(model, images, case.budget),
            labels=labels,
            out=folder,
            settings=case.settings,
            say=lambda line: print(f"{folder}: {line}", file=sys.stderr, flush=True),
        )
    return read_results(folder / JSON)


def count_right(model: Predictor, images: Sequence[Any], labels: Sequence[int]) -> int:
    """How many images a model classifies rightly."""
    found = [model.found(images[at : at + BATCH])["logits"] for at in range(0, len(images), BATCH)]
    return int((torch.cat(found).argmax(-1) == torch.tensor(labels)).sum())


def shares(models: Mapping[int, Predictor], size: int, image: Sequence[Any]) -> dict[int, float]:
    """Times of the dense models of smaller images, as shares of that of one size, measured by turns."""
    calls = {str(each): partial(model.call, model.prepare(image)) for each, model in models.items() if each <= size}
    found = timing.shares_of(timing.seconds_of_rounds(calls, torch.device("cpu"), SECONDS), str(size))
    return {int(each): share for each, share in found.items()}


def time_again(data: Sequence[str], out: Path, records: Path, cases: Sequence[Case] = CASES) -> None:
    """Time the saved models by turns with the dense ones they were made from, and write `TIMES`.

    Args:
        data: names of data sets. out: folder of the models. records: folder of the records.
        cases: models that were made faster.

    Raises:
        OSError: where a model is missing.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in data}
    for name in data:
        for case in cases:
            models = {
                each: load_predictor(out / name / each, device="cpu") for each in (f"dense_{case.size}", case.name)
            }
            image = [Image.new("RGB", (case.size, case.size))]
            calls = {each: partial(model.call, model.prepare(image)) for each, model in models.items()}
            dense, choice = timing.seconds_of_rounds(calls, torch.device("cpu"), SECONDS_AGAIN).values()
            low, share, high = np.quantile(
                [one / other for one, other in zip(choice, dense, strict=True)], (0.25, 0.5, 0.75)
            )
            found[name][case.name] = {"share": share, "quartiles": [low, high], "rounds": len(dense)}
            print(f"{name}, {case.size} pixels: {share:.3f} of the dense model's time ({low:.3f} to {high:.3f})")
    command = f"python -m tasks.classification.transfer {' '.join(data)} --again"
    write_results(records / TIMES, {"times": found, "command": command, **environment()})


# ---- the report -----------------------------------------------------------------------------------------------------


def read_records(records: Path) -> dict[str, dict[str, Any]]:
    """What is recorded, by the name of the data.

    Raises:
        ValueError: without a record.
    """
    files = [records / f"{name}.json" for name in TRANSFER_DATA]
    found = {file.stem: read_results(file) for file in files if file.is_file()}
    if not found:
        raise ValueError(f"--records {records} has no record; run the command for {' or '.join(TRANSFER_DATA)}")
    return found


def report_text(found: Mapping[str, Mapping[str, Any]], again: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """A table for each data set and size, in Markdown. `again`: of `TIMES`, by data set and case."""
    parts = []
    for name, record in found.items():
        parts.append(f"## {name}")
        for dense in record["dense"]:
            right, count = round(dense["test_accuracy"] * dense["test_images"]), dense["test_images"]
            low, high = wilson_interval(right, count)
            parts.append(
                f"Dense at {dense['size']} pixels: {dense['minutes']:.1f} minutes, {dense['steps']} steps, test "
                f"accuracy {100 * dense['test_accuracy']:.1f} % ({100 * low:.1f} to {100 * high:.1f})."
            )
        for report, smaller in zip(record["reports"], record["smaller"], strict=True):
            size = report["image_size"][0]
            parts.append(f"### {size} pixels, {report['budget']:g} of the time")
            parts.append(
                f"The choice takes {report['measured']:.3f} of the dense model's time, which is "
                f"{1000 * report['dense_seconds']:.0f} ms an image. Recovery: {report['minutes']:g} minutes each. "
                f"Layers: {'; '.join(report['layers'])}."
            )
            if (timed := (again or {}).get(name, {}).get(case_name(size, report["budget"]))) is not None:
                low, high = timed["quartiles"]
                parts.append(
                    f"The saved model, timed once more: {timed['share']:.3f} (quartiles {low:.3f} to {high:.3f}, "
                    f"{timed['rounds']} rounds)."
                )
            rows = [
                (
                    row["name"],
                    "" if row["share"] is None else f"{row['share']:.3f}",
                    row["note"] if row["value"] is None else percent(row),
                    points(row["difference"]) if row["changes"] else "",
                    "" if row["steps"] is None else str(row["steps"]),
                )
                for row in report["rows"]
            ]
            rows += [
                (f"the dense model of {each['size']} pixels", f"{each['share']:.3f}", percent(interval(each)), "", "")
                for each in smaller
            ]
            measured = ("share of the time", "test accuracy, % (95 % interval)", "points against dense")
            names = ("model", *measured, "steps of recovery")
            parts.append(markdown_table(names, rows))
        hardware = record["hardware"]
        parts.append(f"`{record['command']}`, {hardware['cpu']}, {hardware['cpu_threads']} threads, one seed.")
    return "\n\n".join(parts) + "\n"


def interval(counts: Mapping[str, Any]) -> dict[str, float]:
    """Accuracy of a model with its 95 % interval, of how many test images it has right."""
    low, high = wilson_interval(counts["right"], counts["test_images"])
    return {"value": counts["right"] / counts["test_images"], "low": low, "high": high}


def percent(row: Mapping[str, Any]) -> str:
    """Accuracy of a row with its interval."""
    return f"{100 * row['value']:.1f} ({100 * row['low']:.1f} to {100 * row['high']:.1f})"


def draw(found: Mapping[str, Mapping[str, Any]], path: Path) -> Path:
    """A panel for each data set and size: accuracy over time, before (open) and after recovery (filled)."""
    plt = pictures.pyplot()
    rows, columns = len(found), max(len(record["reports"]) for record in found.values())
    figure, axes = plt.subplots(rows, columns, figsize=(6.5 * columns, 4.8 * rows), squeeze=False, layout="constrained")
    for line, (name, record) in zip(axes, found.items(), strict=True):
        for axis, report, smaller in zip(line, record["reports"], record["smaller"], strict=False):
            _draw_panel(axis, report, smaller)
            axis.set_title(f"{name}, {report['image_size'][0]} pixels", loc="left", fontsize=11)
    return pictures.save(figure, path)


def _draw_panel(axis: Any, report: Mapping[str, Any], smaller: Sequence[Mapping[str, Any]]) -> None:
    tested = [row for row in report["rows"] if row["value"] is not None]
    colours = pictures.pyplot().get_cmap("tab10")
    for number, row in enumerate(row for row in tested if row["recovers"] is None):
        later = next((other for other in tested if other["recovers"] == row["name"]), None)
        colour, x = colours(number), row["share"]
        for each, face, shift in ((row, "white", 0.99), (later, colour, 1.01)):
            if each is not None:
                errors = [[100 * (each["value"] - each["low"])], [100 * (each["high"] - each["value"])]]
                place, style = [x * shift], {"color": colour, "markerfacecolor": face, "linewidth": 0.8}
                axis.errorbar(place, [100 * each["value"]], errors, fmt="o", **style)
        axis.plot([], [], "o", color=colour, label=row["name"])
    for each in smaller:
        axis.plot([each["share"]], [100 * interval(each)["value"]], "x", color=pictures.INK)
        axis.annotate(f"{each['size']} px", (each["share"], 100 * interval(each)["value"]), (4, 4), **ABOVE)
    axis.plot([], [], "x", color=pictures.INK, label="dense, trained on smaller images")
    axis.set_xscale("log")
    pictures.plain_numbers(axis.xaxis)
    axis.margins(0.12)
    axis.set_xlabel("share of the dense model's time")
    axis.set_ylabel("test accuracy, %")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "ncols": 2}
    axis.legend(frameon=False, fontsize=7, title="open: before recovery, filled: after", title_fontsize=7, **below)


def write_report(records: Path) -> None:
    """Write table.md and transfer.png, and print the table."""
    found = read_records(records)
    text = report_text(found, read_results(records / TIMES)["times"] if (records / TIMES).is_file() else None)
    with turn(records / REPORT_LOCK):
        write_text(records / TABLE, text)
        picture = draw(found, records / FIGURE)
    print(f"{text}\ntable: {records / TABLE}, picture: {picture}")


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.transfer()
    arguments = parser.parse_args(argv)

    def work() -> None:
        if unknown := sorted({*arguments.data} - {*TRANSFER_DATA}):
            raise ValueError(f"DATA={unknown[0]!r} must be one of {', '.join(TRANSFER_DATA)}")
        torch.set_num_threads(1)  # minutes are of one thread
        keep_freed_memory()
        if arguments.again:
            time_again(arguments.data or TRANSFER_DATA, arguments.out, arguments.records)
        for name in arguments.data if not arguments.again else ():
            do(name, arguments.out, arguments.records)
        write_report(arguments.records)

    return run_command(parser.prog, work, f"from {arguments.out}")


if __name__ == "__main__":
    sys.exit(main())
