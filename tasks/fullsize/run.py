"""Let every configuration of the papers make a step at full size: python -m tasks.fullsize.run [--only TEXT ...]

Each configuration is trained by its own `train` command, with a fixture in place of its data: full-size model and
images, two steps. The process is killed when the checkpoint of the first step is there, started again, and has to go on
from it; then `evaluate` judges what was saved. At first this is done with few images a step. What that measures says
what the configuration's own step needs. If memory and time allow it, that is done in the same way.

Configurations that differ only in seed, data set, rates and numbers in the settings of a prior are one step and are
done once, as the table says. Data sets of videos and demonstrations, whose layouts differ, are done each. A record is
written for each step. What is done is not done again unless the configuration has changed; what was refused or failed
is tried again. The command can be killed at any moment and started again, and several can work on one folder of
records.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hf_sparseprior.cli.command import USER_ERRORS, one_line
from hf_sparseprior.training import StopRequest
from tasks.common.command import RunStopped, run_command
from tasks.common.environment import command_line, environment
from tasks.common.locks import locked
from tasks.common.results import finite_or_null, read_results, write_results
from tasks.common.run_folder import check_place
from tasks.fullsize import commands, process, steps
from tasks.fullsize.commands import SMALL
from tasks.fullsize.configs import Group, PaperRun, chosen, find_groups
from tasks.fullsize.fixtures import fixture
from tasks.fullsize.predict import Need, first_need, memory_of_machine, parted, sibling_need, whole_need
from tasks.fullsize.report import write_report
from tasks.fullsize.starts import make_start, model_of, named_models
from tasks.fullsize.steps import Batch

DONE, REFUSED, FAILED = "done", "refused", "failed"
PATIENCE = 4  # how many times as long as allowed a process may take
IMAGE_TASKS = ("classification", "pretraining")
CLASSES = tuple(f"n{label:08d}" for label in range(1000))  # those of the fixture


@dataclass(frozen=True)
class Settings:
    """out: folder of runs and fixtures. records: folder of records. configs: folder of configurations. memory_gib,
    minutes: limits of one configuration. threads: of one process. small: whether to do small steps alone.
    """

    out: Path
    records: Path
    configs: Path
    memory_gib: float
    minutes: float
    threads: int
    small: bool

    def record(self, group: Group) -> Path:
        """The file of a group."""
        return self.records / f"{group.name}.json"


class Failed(Exception):
    """A command of a configuration ended with an error."""


def finished_record(settings: Settings, group: Group) -> dict[str, Any] | None:
    """The record of a group as it is now, with all that is asked for; None if some of it is to do.

    What was refused or failed is tried again: limits, machine and code may be others by now.
    """
    path = settings.record(group)
    record = read_json(path) if path.is_file() else {}
    if record.get("key") != group.key or record["status"] != DONE:
        return None
    own = settings.small or not group.run.trains or (record.get("whole") or {}).get("status") == DONE
    return record if own else None


def read_json(path: Path) -> dict[str, Any]:
    """A record; ValueError for a damaged one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); remove it") from None
    if not isinstance(content, dict) or not {"key", "status"} <= content.keys():
        raise ValueError(f"{path} is damaged (it has no key and status); remove it")
    return content


def do_group(group: Group, groups: Sequence[Group], settings: Settings, server: Any) -> dict[str, Any]:
    """Do what has no record yet of a group, and write the record."""
    run, path = group.run, settings.record(group)
    record: dict[str, Any] = {
        "key": group.key,
        "name": run.name,
        "task": run.task,
        "runs": len(group.runs),
        "images": run.images,
        "status": FAILED,
        "command": command_line(),
        **environment(),
    }
    record["hardware"]["cpu_threads"] = settings.threads
    old = read_json(path) if path.is_file() else {}
    folder = settings.out / "runs" / group.name
    runs = [each for other in groups for each in other.runs]
    try:
        need, record["parameters"] = first_need(run, scratch_model(run, runs), SMALL, settings.threads)
        if need.memory_gib is None:
            need = sibling_need(run, [read_json(each) for each in settings.records.glob("*.json")])
        record["first_need"] = need.rounded()
        known = old.get("small") if old.get("key") == group.key else None
        if not known and (problem := need.over(settings.memory_gib, settings.minutes)):
            record |= {"status": REFUSED, "reason": problem}
        else:
            if known:  # what is done stays done, whatever the limits are now
                record["small"] = known
            else:
                record["small"] = do_steps(run, runs, Batch(min(SMALL, run.images)), folder, settings, server)
            record |= {"status": DONE, "parameters": record["small"]["parameters"] or record["parameters"]}
            if not settings.small and run.trains:
                record["whole"] = do_whole(run, runs, record["small"], folder, settings, server)
    except (Failed, *USER_ERRORS) as error:
        record |= {"status": FAILED, "reason": one_line(error) if not isinstance(error, Failed) else str(error)}
    shutil.rmtree(folder, ignore_errors=True)
    return write_results(path, record)


def do_whole(
    run: PaperRun, runs: Sequence[PaperRun], small: Mapping[str, Any], folder: Path, settings: Settings, server: Any
) -> dict[str, Any]:
    """The configuration's own step, or why it is not done."""
    if small["images"] >= run.images:
        return {**small, "status": DONE}
    batch = parted(run, small, settings.memory_gib)
    need = whole_need(run, small, batch)
    about = {"images": batch.images, "parts": batch.parts, "need": need.rounded()}
    if problem := need.over(settings.memory_gib, settings.minutes):
        return {**about, "status": REFUSED, "reason": problem}
    return {**about, "status": DONE, **do_steps(run, runs, batch, folder, settings, server)}


def scratch_model(run: PaperRun, runs: Sequence[PaperRun]) -> dict[str, Any] | None:
    """The `model` section of a run as if it started from scratch; None where it is no classifier of images."""
    if run.task not in IMAGE_TASKS:
        return None
    model = dict(run.config["model"])
    start = model.pop("pretrained", None)
    return {**(model_of(start, runs) if start else {}), **model}


def do_steps(
    run: PaperRun, runs: Sequence[PaperRun], batch: Batch, folder: Path, settings: Settings, server: Any
) -> dict[str, Any]:
    """Train, kill, go on, evaluate. Returns what was found.

    Raises:
        Failed: if a command fails, does not go on from its checkpoint, or its loss is no number.
    """
    started, out = time.monotonic(), folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    data = fixture(steps.fixture_of(run), settings.out / "fixtures")
    models = {
        key: make_start(name, runs, settings.out / "models", CLASSES) for key, name in named_models(run.config).items()
    }
    arguments = ["--config", str(config_file(run, folder, settings.configs))]
    arguments += steps.train_overrides(run, batch, out, data, models)
    ended = []

    def command(name: str, given: Sequence[str], **options: Any) -> process.Ended:
        module, log = f"tasks.{run.task}.{name}", settings.out / "logs" / f"{folder.name}.log"
        limit = 60 * PATIENCE * settings.minutes
        found = process.run_command(server, module, given, log, settings.threads, seconds=limit, **options)
        ended.append(found)
        if found.status not in (0, None):
            raise Failed(f"{name} ended with status {found.status}: {found.said} ({log})")
        return found

    if run.trains:
        first = command("train", arguments, until=lambda: steps.first_checkpoint(out))
        killed = first.status is None
        for path in steps.after_first(out):  # of a process that was done before it could be killed
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    last = command("train", arguments)
    results = read_results(out / "results.json")
    losses = steps.losses(results)
    if run.trains:
        checkpoint = steps.first_checkpoint(out)
        if results["resumed_from"] is None or (checkpoint and results["resumed_from"] != checkpoint.name):
            raise Failed(f"it went on from {results['resumed_from']}, not from its first checkpoint")
        if not losses or any(loss is None for loss in losses):
            raise Failed(f"losses {losses} are not all numbers")
    evaluated = evaluation(run, out, results, command)
    return {
        "images": batch.images,
        "parts": batch.parts,
        "parameters": results["parameters"],
        "losses": losses,
        "resumed_from": results["resumed_from"],
        "killed": killed if run.trains else None,
        "evaluated": finite_or_null(evaluated),
        "seconds_per_step": results["seconds_per_step"],
        "train_seconds": round(last.seconds, 1),
        "seconds": round(time.monotonic() - started, 1),
        "peak_gib": round(max(each.peak_gib for each in ended), 2),
        "arguments": shlex.join(arguments),
    }


def evaluation(run: PaperRun, out: Path, results: Mapping[str, Any], command: Any) -> dict[str, Any]:
    """Metrics of `evaluate`. Robots whose simulator is not that of the demonstrations have their validation loss."""
    try:
        command("evaluate", steps.evaluate_arguments(run, out))
    except Failed as error:
        if run.task == "robotics" and "the environment they were made in" in str(error):
            return {"no_simulator": str(error), **results["metrics"]}
        raise
    found = sorted((out / "evaluation").glob("results_*.json"))
    if not found:
        raise Failed(f"evaluate wrote no results into {out / 'evaluation'}")
    return dict(read_results(found[0])["metrics"])


def config_file(run: PaperRun, folder: Path, configs: Path) -> Path:
    """What `--config` names: the configuration itself, or a file of a sweep's row, which no name stands for."""
    if not run.sweep:
        return configs / run.name
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / "row.yaml"
    place.write_text(yaml.safe_dump(run.config))
    return place


def do_all(groups: Sequence[Group], todo: Sequence[Group], settings: Settings, jobs: int) -> None:
    """Do groups, so many at a time; RunStopped on SIGTERM, after what is running has ended."""
    server = process.context(settings.threads)
    done = [group for group in todo if finished_record(settings, group)]
    left = [group for group in todo if group not in done]
    print(f"{len(done)} of {len(todo)} are done; {len(left)} to do", file=sys.stderr, flush=True)
    with StopRequest() as stop, ThreadPoolExecutor(jobs) as pool:

        def one(number: int, group: Group) -> None:
            if stop.requested:
                return
            with locked(settings.record(group).with_suffix(".lock")) as mine:
                if not mine or finished_record(settings, group):
                    return
                record = do_group(group, groups, settings, server)
            print(f"[{number}/{len(left)}] {said(record)}", file=sys.stderr, flush=True)

        for future in [pool.submit(one, number, group) for number, group in enumerate(left, start=1)]:
            future.result()
        if stop.requested:
            raise RunStopped("stopped; the same command goes on with what has no record")


def said(record: Mapping[str, Any]) -> str:
    """A record in one line."""
    name = f"{record['task']} {record['name']}"
    if record["status"] != DONE:
        return f"{name}: {record['status']}, {record['reason']}"
    small, whole = record["small"], record.get("whole")
    text = f"{name}: {small['images']} images in {small['seconds']:.0f} s, {small['peak_gib']:.1f} GiB"
    if whole is None:
        return text
    if whole["status"] != DONE:
        return f"{text}; {whole['images']} images are not done, {whole['reason']}"
    return f"{text}; {whole['images']} images in {whole['seconds']:.0f} s, {whole['peak_gib']:.1f} GiB"


def list_groups(groups: Sequence[Group], settings: Settings) -> None:
    """Print what would be done, with what is known of it before."""
    runs = [run for group in groups for run in group.runs]
    for group in groups:
        run = group.run
        try:
            need, parameters = first_need(run, scratch_model(run, runs), SMALL, settings.threads)
        except USER_ERRORS as error:
            need, parameters = Need(None, None), None
            print(f"{run.name}: {one_line(error)}", file=sys.stderr)
        known = [f"{parameters / 1e6:.1f} M parameters"] if parameters else []
        known += [f"at least {need.memory_gib:.1f} GiB"] if need.memory_gib else []
        known += [f"about {need.minutes:.1f} minutes for {SMALL} images"] if need.minutes else []
        problem = need.over(settings.memory_gib, settings.minutes)
        state = "done" if finished_record(settings, group) else f"refused, {problem}" if problem else "to do"
        print(
            f"{run.task} {run.name} ({len(group.runs)} runs, {run.images} images a step): {state}; {', '.join(known)}"
        )


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2, a configuration that fails 1."""
    parser = commands.run()
    arguments = parser.parse_args(argv)
    for name in ("jobs", "threads", "minutes", "memory_gib"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} {value} must be above 0")

    def work() -> None:
        if not arguments.configs.is_dir():
            raise OSError(f"--configs {arguments.configs} is not a folder")
        records = arguments.records or arguments.out / "records"
        memory = arguments.memory_gib or memory_of_machine() / arguments.jobs
        settings = Settings(
            arguments.out, records, arguments.configs, memory, arguments.minutes, arguments.threads, arguments.small
        )
        groups = find_groups(arguments.configs)
        todo = chosen(groups, arguments.only)
        if arguments.list:
            list_groups(todo, settings)
            return
        for place, name in ((arguments.out, "--out"), (records, "--records"), (arguments.report, "--report")):
            if place is not None:
                check_place(place, name)
        try:
            if not arguments.table:
                do_all(groups, todo, settings, arguments.jobs)
        finally:
            found = {
                group.key: read_json(settings.record(group)) for group in groups if settings.record(group).is_file()
            }
            report = write_report(arguments.report or arguments.out, groups, found)
        print(f"table: {report}")
        if bad := [group.run.name for group in todo if (found.get(group.key) or {}).get("status") == FAILED]:
            failures.append(f"{len(bad)} of {len(todo)} failed: {', '.join(bad)}")

    failures: list[str] = []
    status = run_command(parser.prog, work, "with what has no record")
    for line in failures:
        print(f"{parser.prog}: {line}", file=sys.stderr)
    return status or (1 if failures else 0)


if __name__ == "__main__":
    sys.exit(main())
