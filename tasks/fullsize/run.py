"""Let configurations of the papers make a step at full size: python -m tasks.fullsize.run [FILE#CELL ...]

Without a name it is done for ten that differ in kind, one of each task and each way to learn. A configuration is
trained by its own `train` command, with a fixture in place of its data: full-size model and images, two steps of two
images. The process is killed when the checkpoint of the first step is there, started again, and has to go on from it;
then `evaluate` judges what was saved. What a step of its own number of images needs: `python -m hf_sparseprior explain
--time`.

`--list` prints all configurations of full size with the parameters of their models, `--count` writes these anew into
parameters.json.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hf_sparseprior.base.files import write_text
from hf_sparseprior.base.json_files import read_json
from hf_sparseprior.cli.command import USER_ERRORS, one_line
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.config import check_known
from hf_sparseprior.runs.results import read_results
from hf_sparseprior.runs.run_folder import check_place
from tasks.fullsize import commands, process, steps
from tasks.fullsize.commands import ROOT
from tasks.fullsize.configs import PaperRun, find_runs
from tasks.fullsize.fixtures import fixture
from tasks.fullsize.parameters import FILE, parameter_counts
from tasks.fullsize.starts import make_start, named_models

TEN = (
    "classification/imagenet.yaml#vit_small_violin",
    "classification/imagenet.yaml#lvvit_small",  # token labels
    "classification/sparsifiner.yaml#deit_tiny_384-predictor",  # a predictor that learns from dense attention
    "classification/vtab.yaml#deit_tiny-dora-violin",
    "experiments/fib_table4.yaml#cifar10_upop-fibottention",
    "experiments/vio_table5.yaml#dino_small_300-violin",
    "experiments/fib_table5.yaml#smarthome_cs-fibottention",
    "segmentation/ade20k_heads.py#fcn",
    "detection/coco_swin_tiny_detectors.py#retinanet",
    "experiments/fib_table6.yaml#pusht-fibottention",
)
MOST_SECONDS = 1800.0  # of one command
CLASSES = tuple(f"n{label:08d}" for label in range(1000))  # those of the fixture


class Failed(Exception):
    """A command of a configuration ended with an error."""


def do_run(run: PaperRun, runs: Sequence[PaperRun], out: Path, threads: int = 1) -> dict[str, Any]:
    """Train, kill, go on, evaluate. Returns what was found: parameters, losses, metrics, seconds and GiB.

    Args:
        run: what is done. runs: all, some of which others start from. out: folder of fixtures, runs and logs.
        threads: of the computation.

    Raises:
        Failed: if a command fails, does not go on from its checkpoint, or its loss is no number.
    """
    name = run.name.replace("/", "_").replace("#", "_")
    started, folder, log, ended = time.monotonic(), out / "runs" / name, out / "logs" / f"{name}.log", []
    shutil.rmtree(folder, ignore_errors=True)
    data, place = fixture(steps.fixture_of(run), out / "fixtures"), folder / "run"
    starts = {key: make_start(name, runs, out / "models", CLASSES) for key, name in named_models(run.config).items()}
    arguments = ["--config", str(config_file(run, folder)), *steps.train_overrides(run, place, data, starts)]
    server = process.context(threads)

    def command(kind: str, given: Sequence[str], **options: Any) -> process.Ended:
        module = f"tasks.{run.task}.{kind}"
        ended.append(process.run_command(server, module, given, log, threads, seconds=MOST_SECONDS, **options))
        if ended[-1].status not in (0, None):
            raise Failed(f"{kind} ended with status {ended[-1].status}: {ended[-1].said} ({log})")
        return ended[-1]

    if run.trains:
        command("train", arguments, until=lambda: steps.first_checkpoint(place))
        for path in steps.after_first(place):  # of a process that was done before it could be killed
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    command("train", arguments)
    results = read_results(place / "results.json")
    losses = steps.losses(results)
    if run.trains:
        checkpoint = steps.first_checkpoint(place)
        if results["resumed_from"] is None or (checkpoint and results["resumed_from"] != checkpoint.name):
            raise Failed(f"it went on from {results['resumed_from']}, not from its first checkpoint")
        if not losses or any(loss is None for loss in losses):
            raise Failed(f"losses {losses} are not all numbers")
    evaluated = evaluation(run, place, results, command)
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "parameters": results["parameters"],
        "losses": losses,
        "resumed_from": results["resumed_from"],
        "evaluated": evaluated,
        "seconds": time.monotonic() - started,
        "peak_gib": max(each.peak_gib for each in ended),
    }


def evaluation(run: PaperRun, place: Path, results: Mapping[str, Any], command: Any) -> dict[str, Any]:
    """Metrics of `evaluate`. Robots whose simulator is not that of the demonstrations have their validation loss."""
    try:
        command("evaluate", steps.evaluate_arguments(run, place))
    except Failed as error:
        if run.task == "robotics" and "the environment they were made in" in str(error):
            return dict(results["metrics"])
        raise
    found = sorted((place / "evaluation").glob("results_*.json"))
    if not found:
        raise Failed(f"evaluate wrote no results into {place / 'evaluation'}")
    return dict(read_results(found[0])["metrics"])


def config_file(run: PaperRun, folder: Path, root: Path = ROOT) -> Path:
    """What `--config` names: the configuration itself, or a file of a sweep's row, which no name stands for."""
    if not run.sweep:
        return root / run.name
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / "row.yaml"
    place.write_text(yaml.safe_dump(run.config))
    return place


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2, a configuration that fails 1."""
    parser = commands.run()
    arguments = parser.parse_args(argv)
    failed: list[str] = []

    def work() -> None:
        runs = {run.name: run for run in find_runs()}
        check_known(arguments.names, list(runs), "configs")
        if arguments.count:
            counts = parameter_counts(list(runs.values()))
            write_text(FILE, json.dumps(counts, indent=0) + "\n")
        if arguments.list or arguments.count:
            known = read_json(FILE)
            if missing := runs.keys() - known.keys():
                raise ValueError(f"{FILE} lacks {min(missing)}; --count writes it anew")
            print(
                "\n".join(f"{known[name] / 1e6:7.1f} M  {runs[name].task} {name}" for name in arguments.names or runs)
            )
            return
        check_place(arguments.out, "--out")
        names = arguments.names or TEN
        for number, name in enumerate(names, start=1):
            try:
                found = do_run(runs[name], list(runs.values()), arguments.out, arguments.threads)
            except (Failed, *USER_ERRORS) as error:
                said = one_line(error) if not isinstance(error, Failed) else str(error)
                failed.append(name)
            else:
                said = f"goes on and is evaluated, {found['seconds']:.0f} s, {found['peak_gib']:.1f} GiB"
            print(f"[{number}/{len(names)}] {name}: {said}", file=sys.stderr, flush=True)

    status = run_command(parser.prog, work)
    if failed:
        print(f"{parser.prog}: {len(failed)} failed: {', '.join(failed)}", file=sys.stderr)
    return status or int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
