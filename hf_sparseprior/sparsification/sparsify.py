"""`sp.sparsify(model, images, budget)`: a faster model out of a dense one, with what it costs in accuracy, measured."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME

from hf_sparseprior.adapters.lora import lora_config
from hf_sparseprior.analysis.pictures import pyplot
from hf_sparseprior.base.checks import first_line
from hf_sparseprior.base.files import replace_durably, whole_folder, write_text
from hf_sparseprior.base.version import __version__
from hf_sparseprior.cli.deployment import fitted_processor, saved_processor, stock_sides
from hf_sparseprior.cli.export import exported_source
from hf_sparseprior.cli.labelled_images import pixel_values
from hf_sparseprior.prediction.predictors import local_folder
from hf_sparseprior.runs.environment import cpu_name
from hf_sparseprior.runs.locks import NoLocks, locked
from hf_sparseprior.saving.card import CARD, model_card
from hf_sparseprior.saving.processor import PROCESSOR
from hf_sparseprior.saving.saved_processor import load_image_processor
from hf_sparseprior.sparsification import baselines
from hf_sparseprior.sparsification.accuracy import measure_name, measured
from hf_sparseprior.sparsification.baselines import Compared
from hf_sparseprior.sparsification.candidates import default_candidates, parse_candidates
from hf_sparseprior.sparsification.choice import Point
from hf_sparseprior.sparsification.data import Images, Parts, digest, read_images, resized_processor, split
from hf_sparseprior.sparsification.plan import PLAN, Plan
from hf_sparseprior.sparsification.recovery import STATE, Recovery
from hf_sparseprior.sparsification.report import JSON, Report, Row
from hf_sparseprior.sparsification.search import Search
from hf_sparseprior.sparsification.settings import Settings, check_budget
from hf_sparseprior.sparsification.subject import Subject

CALIBRATION_BATCH = 8
LOCK = "plan.lock"  # held by the process that searches
SCRATCH = ".partial"
SHOWN = 5  # images that cannot be read which a message names


@dataclass
class Sparsified:
    """What `sparsify` returns: the model, and what was measured.

    processor: settings of the image processor; None: not known.
    """

    model: Any
    report: Report
    processor: dict[str, Any] | None = None

    def save(self, folder: str | os.PathLike) -> None:
        """Write the model into a new folder that `from_pretrained` loads, with report and picture.

        Raises:
            OSError: for a folder that exists. ValueError: for a model of timm alone, for which there is no such folder.
        """
        _check_saved(self.model)
        with whole_folder(folder) as scratch:
            self.write(scratch)

    def write(self, folder: Path) -> None:
        """Write everything into a folder that there is, the report last."""
        self.model.save_pretrained(folder)
        if self.processor is not None:
            write_text(folder / PROCESSOR, json.dumps(self.processor, indent=2) + "\n")
        card = folder / CARD
        if "sparse_prior" not in json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8")):
            write_text(card, model_card(self.model.config))
        write_text(card, card.read_text(encoding="utf-8") + "\n".join(self.report.card_lines()))
        self.report.write(folder)


def sparsify(
    model: Any,
    images: Any,
    budget: float = 0.5,
    *,
    labels: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    processor: Any = None,
    out: str | os.PathLike | None = None,
    settings: Mapping[str, Any] | None = None,
    say: Callable[[str], None] | None = None,
) -> Sparsified:
    """Give each attention layer of a dense model the pairs that cost least accuracy, within a time budget.

    The attention of each layer is timed on this machine with every candidate, and each change of a layer is judged by
    what it does to the outputs on calibration images. A knapsack over layers makes the choice, whose time is then
    measured.

    Example:

    ```python
    faster = sp.sparsify("facebook/deit-small-patch16-224", "photos", budget=0.7, settings={"image_size": 448})
    print(faster.report.to_markdown())
    faster.save("deit-faster")
    ```

    Args:
        model: a dense model of ours, of transformers or of timm, or the folder or name on the hub of one of the first
            two. It is copied.
        images: a folder of images, which has a folder for each class if accuracy is to be measured; a tensor (N,
            channels, height, width) as the model takes it; or a list of Pillow's images. A part is for calibration, one
            for recovery, and one for the test alone: half, or what is named `test` in a folder or a mapping of `train`
            and `test`.
        budget: share of the dense model's time, above 0 and below 1.
        labels: class numbers of the images of a tensor or a list; of a mapping a mapping.
        processor: an image processor or a folder that has one; default the model's.
        out: folder of the result, which is also where a search that was killed goes on; None: nothing is written.
        settings: see `Settings`.
        say: gets a line of progress now and then.

    Raises:
        OSError: for what is not there, and an `out` that is finished.
        ValueError: for a bad value, a model that cannot take a prior, and a budget that cannot be met, with the least
            one that can.
    """
    budget, chosen = check_budget(budget), Settings.of(settings)
    folder = None if out is None else Path(out)
    if folder is not None:
        _check_out(folder)
    with _alone(folder):
        job = _begin(model, images, labels, processor, folder, chosen, say or (lambda line: None))
        try:
            points = job.search.points(budget)
            point = job.search.meet(points, budget)
            result = job.finish(points, point, budget)
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f"{first_line(error)} Fewer calibration images, a smaller image_size or batch, and in recovery a "
                "smaller micro_batch need less"
            ) from None
        if folder is not None:
            _write_into(result, folder)
    return result


@dataclass
class _Job:
    """A search with its images."""

    search: Search
    images: Images
    parts: Parts
    processor: dict[str, Any] | None

    def finish(self, points: Sequence[Point], point: Point, budget: float) -> Sparsified:
        """Measure the choice and what it is compared with."""
        search, settings = self.search, self.search.settings
        chosen = baselines.of_choice(search, "the choice", point.choice, search.share_again(point.choice))
        search.say("comparing with one candidate in all layers and with smaller images")
        absent, rivals = {}, list[Compared]()
        for name, found in (
            ("one candidate in all layers", baselines.best_uniform(search, budget)),
            ("dense, smaller images", baselines.smaller_images(search, chosen.share)),
            ("token merging", baselines.token_merging(search, chosen.share)),
        ):
            if isinstance(found, str):
                absent[name] = found
            else:
                rivals.append(found)
        tested, result = [baselines.of_dense(search), chosen], chosen
        if settings.minutes:
            result = self._recovered(chosen, "after recovery")
            tested.append(result)
        for rival in rivals:
            tested.append(rival)
            if settings.recover_all:
                tested.append(self._recovered(rival, f"{rival.name}, after recovery"))
        search.say(f"testing {len(tested)} models on {len(self.parts.test)} images")
        models = {each.name: each for each in tested}
        values = measured(search.subject, self.images, self.parts.test, models, search.say)
        if left_out := list(self.images.unreadable.values()):
            search.say(f"left out, as they cannot be read: {len(left_out)} images; {'; '.join(left_out[:SHOWN])}")
        rows = [
            Row(
                *(each.name, each.share),
                **vars(values[each.name]),
                changes=each.changes,
                recovers=each.recovers,
                steps=each.steps,
            )
            for each in tested
        ]
        rows += [Row(name, note=f"left out: {why}") for name, why in absent.items()]
        return Sparsified(result.model, self._report(points, point, budget, rows), self.processor)

    def _recovered(self, before: Compared, name: str) -> Compared:
        """A copy that learned from the dense model."""
        search = self.search
        learner = replace(before, name=name, model=copy.deepcopy(before.model), recovers=before.name)
        changes = sha256(json.dumps(before.changes, sort_keys=True, default=str).encode()).hexdigest()
        path = None if search.plan.path is None else search.plan.path.with_name(f"{changes[:16]}_{STATE}")
        search.say(f"recovery of {before.name}")
        recovery = Recovery(search.subject, learner, self.images, self.parts.recovery, search.settings, path)
        return replace(learner, model=recovery.run(search.say), steps=recovery.steps)

    def _report(self, points: Sequence[Point], point: Point, budget: float, rows: list[Row]) -> Report:
        search, subject, gain = self.search, self.search.subject, self.search.gain
        names = ["dense", *(candidate.name for candidate in search.candidates)]
        return Report(
            model=subject.exported.title,
            image_size=subject.sides,
            machine=_machine(subject.device),
            batch=search.settings.batch,
            budget=budget,
            least=search.share(points[-1].choice),
            dense_seconds=search.dense_seconds,
            predicted=point.share,
            measured=search.share_again(point.choice),
            rounds=search.rounds,
            loss_name=subject.loss_name,
            layers=[names[index] for index in point.choice],
            loss=search.loss(point.choice),
            loss_sum=point.loss,
            frontier=[(1 - gain * (1 - each.share), each.loss) for each in points],
            measure=measure_name(subject, self.images),
            rows=rows,
            images={
                name: sum(number not in self.images.unreadable for number in getattr(self.parts, name))
                for name in ("calibration", "recovery", "test")
            },
            left_out=search.unused(),
            seed=search.settings.seed,
            minutes=search.settings.minutes,
        )


def _begin(
    model: Any,
    given: Any,
    labels: Any,
    processor: Any,
    folder: Path | None,
    settings: Settings,
    say: Callable[[str], None],
) -> _Job:
    if isinstance(model, (str, os.PathLike)):
        home, model = exported_source(local_folder(model))
        if processor is None and os.path.lexists(home / PROCESSOR):
            processor = home
    saved = saved_processor(processor)
    subject = Subject(model, settings.sides or stock_sides(model, saved), settings.place)
    if folder is not None:
        _check_saved(subject.original)
        pyplot()  # it is missed now, and not after the search
    if settings.tuning == "lora":
        lora_config(subject.original)  # refused now, and not after the search
    prepared = fitted_processor(resized_processor(saved, settings.sides), subject.exported)
    images = _images(given, labels, subject, prepared)
    parts = split(images, settings.calibration, settings.test, settings.seed)
    if settings.minutes and not parts.recovery:
        raise ValueError(f"minutes={settings.minutes}: {images.count} images leave none for recovery; give more")
    advice = "" if images.test or not images.labels else ", on which the dense model must not have been trained"
    say(
        f"{images.count} images: {len(parts.calibration)} for calibration, {len(parts.recovery)} for recovery, "
        f"{len(parts.test)} for the test of {measure_name(subject, images)}{advice}"
    )
    read = [images.readable(numbers) for numbers in images.batches(parts.calibration, CALIBRATION_BATCH)]
    batches = [torch.stack(list(pixels.values())) for pixels in read if pixels]
    if not batches:
        why = next(iter(images.unreadable.values()))
        raise OSError(f"none of {len(parts.calibration)} images for calibration can be read; {why}")
    tokens = max(layer.grid[0] * layer.grid[1] for layer in subject.layers)
    listed = settings.candidates
    candidates = default_candidates(tokens) if listed is None else parse_candidates(listed)
    key = {
        "model": subject.digest,
        "image size": subject.sides,
        "images at once": settings.batch,
        "machine": f"{_machine(settings.place)}, torch {torch.__version__}",
        "version": __version__,
        "kernels": [os.environ.get("SPARSEPRIOR_BACKEND"), torch.get_float32_matmul_precision()],
        "candidates": [candidate.name for candidate in candidates],
        "calibration images": digest(batches),
        "seconds": settings.seconds,
    }
    search = Search(subject, candidates, settings, Plan(folder, key), batches, say)
    if not any(prior for priors in search.priors for prior in priors):
        raise ValueError(f"candidates: no layer can have any; {next(iter(search.refused.values()), 'none is given')}")
    return _Job(search, images, parts, prepared)


def _images(given: Any, labels: Any, subject: Subject, prepared: dict[str, Any] | None) -> Images:
    loaded: Any = None
    if prepared is not None:
        with tempfile.TemporaryDirectory() as scratch:
            write_text(Path(scratch) / PROCESSOR, json.dumps(prepared))
            loaded = load_image_processor(scratch)
    channels, sides = subject.exported.num_channels, "x".join(map(str, subject.sides))

    def prepare(image: Any) -> Tensor:
        pixels = pixel_values([image], loaded, channels)[0]
        if pixels.shape[-2:] != subject.sides:
            size = "x".join(map(str, pixels.shape[-2:]))
            raise ValueError(
                f"the image processor gives {size} pixels; the model is for {sides}, so it must resize or crop"
            )
        return pixels

    classes = subject.exported.labels if subject.classifies else None
    if classes is None and subject.classifies:  # of timm
        classes = [str(number) for number in range(subject.outputs(subject.images(1)).shape[-1])]
    return read_images(given, labels, classes, None if loaded is None else prepare, loaded, (channels, *subject.sides))


def _check_out(folder: Path) -> None:
    """Raise OSError unless a folder is new, empty, or has a search that was stopped."""
    if folder.exists() and not folder.is_dir():
        raise OSError(f"{folder} is a file; choose a new name")
    if (folder / JSON).exists():
        raise OSError(f"{folder} holds a finished result; choose a new name")
    if folder.is_dir() and os.listdir(folder) and not any((folder / name).exists() for name in (PLAN, LOCK)):
        raise OSError(f"{folder} holds other files; choose a new name")


def _check_saved(model: Any) -> None:
    """Raise ValueError for a model that cannot be saved."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"{type(model).__name__} of timm has no folder for from_pretrained; make it a "
            "TimmWrapperForImageClassification of transformers first"
        )


@contextmanager
def _alone(folder: Path | None) -> Iterator[None]:
    """Inside the block no other process writes to a folder.

    Raises:
        OSError: if one does.
    """
    is_new = folder is not None and not folder.exists()
    try:
        with ExitStack() as held:
            if folder is not None:
                with suppress(NoLocks):
                    if not held.enter_context(locked(folder / LOCK)):
                        raise OSError(f"{folder} is being written by another process")
            yield
    finally:
        if folder is not None and is_new:
            with suppress(OSError):  # it holds something
                folder.rmdir()


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def _write_into(result: Sparsified, folder: Path) -> None:
    """Put everything into the folder of the plan, the report last: it says that the result is finished."""
    scratch = folder / SCRATCH  # on the same file system
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    scratch.mkdir()
    try:
        result.write(scratch)
        for name in sorted(os.listdir(scratch), key=lambda name: name == JSON):
            place = folder / name
            if place.is_dir():
                shutil.rmtree(place)
            replace_durably(scratch / name, place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for state in folder.glob(f"*{STATE}"):
        state.unlink(missing_ok=True)
