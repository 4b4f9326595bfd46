"""The contract of every task that trains, whatever its framework: train, SIGKILL, SIGTERM, going on to the same bits,
results in one form, evaluation in one place.

A new task is one more row.
"""

import gc
import hashlib
import io
import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field, fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from matplotlib.figure import Figure
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_sparseprior.runs.locks import locked
from hf_sparseprior.runs.results import Results, read_results
from tests.processes import ROOT, Started

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def empty_pictures():
    """Pictures are drawn and left empty, as to lay one out takes longer than a run. Tests of each task write them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, path, **settings: Path(path).touch())
        yield


@dataclass(frozen=True)
class Row:
    """One task.

    task: name of its folder.
    needs: packages without which it is skipped.
    prepare: (folder) -> arguments of its `train`, after data was written into the folder. The run takes at least six
        steps, and has a checkpoint after the fourth at the latest.
    folder: key of the override that says where a run lies.
    same_run: overrides that do not change what is trained; a run that goes on is started with them.
    metric: one that results.json has.
    data: the line about its data.
    evaluate: further arguments of its `evaluate`, after the model.
    repeats_test: whether `evaluate` measures what the run measured at its end.
    """

    task: str
    needs: tuple[str, ...]
    prepare: Callable[[Path], list[str]]
    folder: str
    same_run: tuple[str, ...]
    metric: str
    data: str
    evaluate: tuple[str, ...] = ()
    repeats_test: bool = True

    def command(self, name: str, arguments: list[str]) -> int:
        """The exit status of `python -m tasks.TASK.NAME`, in this process."""
        return import_module(f"tasks.{self.task}.{name}").main(arguments)


def segmentation(folder: Path) -> list[str]:
    from tests.tasks.common.mm.shapes import data_roots, write_shapes
    from tests.tasks.segmentation.tiny import OVERRIDES

    return ["--config", "configs/segmentation/smoke.py", *OVERRIDES, *data_roots(write_shapes(folder / "shapes"))]


def detection(folder: Path) -> list[str]:
    from tests.tasks.common.mm.shapes import data_roots, write_shapes
    from tests.tasks.detection.tiny import OVERRIDES

    return ["--config", "configs/detection/smoke.py", *OVERRIDES, *data_roots(write_shapes(folder / "shapes"))]


SMALL_POLICY = (
    "policy.widths=[16, 32]", "policy.step_embedding_size=8", "policy.groups=4", "policy.sampling_steps=2",
    "policy.decoder_width=8", "encoder.hidden_size=16", "encoder.num_hidden_layers=2", "encoder.num_attention_heads=2",
    "encoder.intermediate_size=32", "trainer.warmup_steps=2", "trainer.log_steps=2", "trainer.disable_tqdm=true",
)  # fmt: skip


def robotics(folder: Path) -> list[str]:
    """PushT from its picture, with an encoder that drops paths, so that the order of all draws matters."""
    from tests.tasks.robotics.tiny import write_pusht

    data = f"data.path={write_pusht(folder, cameras=('image',))}"
    steps = ["trainer.steps=8", "trainer.batch_size=8", "trainer.save_steps=3", "trainer.validate_steps=4"]
    small = [*SMALL_POLICY, "encoder.drop_path_rate=0.2"]
    return ["--config", "configs/robotics/smoke.yaml#pusht_image", data, *small, *steps]


# Eight steps. Those that are logged and those that are saved differ, so an entry of the history spans an interruption.
TRAINER = {
    "max_steps": 8, "per_device_train_batch_size": 8, "learning_rate": 3e-3, "seed": 3, "use_cpu": True,
    "logging_strategy": "steps", "logging_steps": 3, "save_strategy": "steps", "save_steps": 4,
    "eval_strategy": "steps", "eval_steps": 4, "ema_decay": 0.9, "disable_tqdm": True,
}  # fmt: skip


MODEL = {
    "prior": "fibottention+violin", "image_size": 8, "patch_size": 2, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 32, "drop_path_rate": 0.2,
}  # fmt: skip


def on_digits(folder: Path, *sizes: int, **sections: dict) -> list[str]:
    """A run on so many digits to train, to validate and to test, with a small model that drops paths."""
    limits = dict(zip(("limit_train", "limit_validation", "limit_test"), sizes, strict=True))
    content = {"data": {"source": "digits", **limits}, "model": MODEL, "trainer": TRAINER}
    return write_config(folder, {**content, **sections})


def classification(folder: Path) -> list[str]:
    """Digits, cut at random and mixed, with a model that drops paths, so that the order of all draws matters."""
    model = {**MODEL, "hidden_size": 24, "intermediate_size": 48, "drop_path_rate": 0.1}
    augmentation = {"crop": "random", "padding": 1, "mixup": 0.8}
    return on_digits(folder, 100, 50, 50, model=model, augmentation=augmentation)


def turned(folder: Path) -> list[str]:
    """The task of docs/how-to/add-task.md, with a model that drops paths."""
    return on_digits(folder, 40, 20, 20)


def pretraining(folder: Path) -> list[str]:
    """DINO on digits, with a student that drops paths, so that the order of all draws matters."""
    dino = {
        "output_size": 64, "head_hidden_size": 16, "bottleneck_size": 8, "warmup_epochs": 0.2,
        "freeze_last_layer_epochs": 0, "warmup_teacher_temperature_epochs": 2, "teacher_momentum": 0.9,
    }  # fmt: skip
    sections = {"crops": {"local_crops": 2, "local_size": 4}, "dino": dino, "evaluation": {"neighbours": 5}}
    trainer = {key: value for key, value in TRAINER.items() if key != "ema_decay"}
    return on_digits(folder, 100, 50, 50, **sections, trainer=trainer)


def video(folder: Path) -> list[str]:
    """Clips of a moving bar, drawn, cut, mirrored, changed and mixed at random, each tested by three views."""
    from tests.tasks.video.clips import write_videos

    videos = str(write_videos(folder / "videos"))
    content = {
        "data": {"source": "folder", "path": videos, "cache": True, "sampling": "segments", "test_crops": 3},
        "augmentation": {
            "random_place": True, "random_crop": True, "vertical_flip": 0.5, "brightness": 0.1,
            "randaugment": "rand-m5-n2-mstd0.5", "mixup": 0.8, "cutmix": 1.0,
        },
        "model": {
            "prior": "fibottention", "image_size": 16, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 2,
            "num_frames": 5, "num_attention_heads": 4, "intermediate_size": 64, "drop_path_rate": 0.1,
        },
        "trainer": TRAINER,
    }  # fmt: skip
    return write_config(folder, content)


def heads(folder: Path) -> list[str]:
    """UPerNet on pictures that are mirrored at random."""
    from tests.tasks.common.mm.shapes import write_shapes
    from tests.tasks.heads.tiny import tiny_config

    content = tiny_config(write_shapes(folder / "shapes"), "upernet")
    return write_config(folder, {**content, "trainer": TRAINER})


def write_config(folder: Path, content: dict) -> list[str]:
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return ["--config", str(folder / "config.yaml")]


ROWS = (
    Row(
        "classification", (), classification, "trainer.output_dir", ("trainer.report_to=none",), "test_accuracy",
        f"trains on 100 images of 10 classes {list('0123456789')} (train), "
        "validates on 50 images (20 % cut from train), tests on 50 images (20 % cut from train)",
    ),
    Row(
        "pretraining", (), pretraining, "trainer.output_dir", ("trainer.report_to=none",), "test_knn_accuracy",
        f"trains on 100 images of 10 classes {list('0123456789')} (train), "
        "validates on 50 images (20 % cut from train), tests on 50 images (20 % cut from train)",
    ),
    Row(
        "video", ("av",), video, "trainer.output_dir", ("trainer.dataloader_num_workers=1",), "test_accuracy",
        "trains on 24 clips of 2 classes ['left', 'right'] (folder train), validates on 8 clips (folder validation), "
        "tests on 8 clips (folder test)",
    ),
    Row(
        "heads", ("pycocotools",), heads, "trainer.output_dir", ("trainer.report_to=none",), "test_mIoU",
        "trains on 7 images of 3 classes ['background', 'bright', 'dark'] (training), "
        "validates on 3 images (validation), tests on 4 images (test)",
    ),
    Row(
        "segmentation", ("mmengine", "mmcv", "mmseg"), segmentation, "output_dir",
        ("train_dataloader.num_workers=1",), "test_mIoU",
        "trains on 7 images of 3 classes ['background', 'bright', 'dark'] (training), "
        "validates on 3 images (validation), tests on 4 images (test)",
    ),
    Row(
        "detection", ("mmengine", "mmcv.ops", "mmdet"), detection, "output_dir",
        ("train_dataloader.num_workers=1",), "test_coco/bbox_mAP",
        "trains on 7 images of 2 classes ['bright', 'dark'] (instances_training.json), "
        "validates on 3 images (instances_validation.json), tests on 4 images (instances_test.json)",
    ),
    Row(
        "robotics", ("diffusers", "gym_pusht", "zarr"), robotics, "trainer.output_dir",
        ("trainer.disable_tqdm=false",), "validation_loss",
        "trains on 9 demonstrations (train, 117 windows), validates on 1 demonstration (validation)",
        ("--episodes", "1", "--max-steps", "8"), False,
    ),
)  # fmt: skip
if find_spec("tasks.turned"):  # of docs/how-to/add-task.md, see tests/pasted.py
    ROWS += (
        Row(
            "turned", (), turned, "trainer.output_dir", ("trainer.report_to=none",), "test_accuracy",
            "trains on 160 images of 4 classes ['upright', 'left', 'over', 'right'] (train), "
            "validates on 80 images (validation), tests on 80 images (test)",
        ),
    )  # fmt: skip


# What transformers' Trainer, mmengine's Runner and our own loop do is the same for each task that has them. What a page
# adds is tried as a whole.
one_of_each_framework = pytest.mark.parametrize(
    "whole", [row for row in ROWS if row.task in ("classification", "segmentation", "robotics", "turned")],
    indirect=True, ids=lambda row: row.task,
)  # fmt: skip


@dataclass(frozen=True)
class Whole:
    """A run that was never interrupted, the command that made it, and what this printed."""

    row: Row
    arguments: list[str]
    out: Path
    printed: list[str] = field(default_factory=list)

    def train(self, out: Path, *overrides: str) -> int:
        """The same run in another folder."""
        return self.row.command("train", [*self.arguments, f"{self.row.folder}={out}", *overrides])


@pytest.fixture(scope="module", params=ROWS, ids=lambda row: row.task)
def whole(request, tmp_path_factory) -> Whole:
    row = request.param
    for package in row.needs:
        pytest.importorskip(package, reason=f"the packages of {row.task} are not installed", exc_type=ImportError)
    import_module(f"tasks.{row.task}.train")
    gc.freeze()  # mm's data sets and the Trainer call the collector in every run
    folder = tmp_path_factory.mktemp(row.task)
    run = Whole(row, row.prepare(folder), folder / "whole")
    with redirect_stdout(printed := io.StringIO()):
        assert run.train(run.out) == 0
    run.printed.extend(printed.getvalue().splitlines())
    return run


def fingerprint(out: Path) -> dict:
    """What two equal runs share: every weight that is kept, the history without its clock, the metrics."""
    results = read_results(out / "results.json")
    timed = re.compile("seconds|runtime|per_second|data_wait")
    return {
        "weights": {
            str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted((out / "model").rglob("*.safetensors"))
        },
        "history": [{key: entry[key] for key in entry if not timed.search(key)} for entry in results["history"]],
        "metrics": {key: value for key, value in results["metrics"].items() if not timed.search(key)},
    }


def newest_checkpoint(out: Path) -> tuple[int, Path]:
    found = [path for path in out.iterdir() if re.fullmatch(r"(checkpoint-|iter_|epoch_)\d+", path.stem)]
    assert found, f"{out} has no checkpoint"
    return max((int(re.findall(r"\d+", path.stem)[-1]), path) for path in found)


def write_half_a_checkpoint(out: Path) -> None:
    """A newer checkpoint, as a kill leaves it while it is being written."""
    step, path = newest_checkpoint(out)
    half = path.with_name(path.name.replace(str(step), str(step + 1)))
    if path.is_dir():
        shutil.copytree(path, half)
        for file in (each for each in half.rglob("*") if each.is_file()):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        half.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_results_have_one_form(whole):
    content = json.loads((whole.out / "results.json").read_text())
    names = {item.name for item in fields(Results)} - {"details"}
    assert names <= set(content) and content["task"] == whole.row.task
    required = names - {"resumed_from"}
    assert [name for name in sorted(required) if content[name] in (None, {}, [], "")] == []
    assert content["processes"] == 1 and content["resumed_from"] is None
    assert isinstance(content["metrics"][whole.row.metric], float)
    accuracies = [value for key, value in content["metrics"].items() if re.search("accuracy|IoU|mAP|success", key)]
    assert all(value <= 1 for value in accuracies)  # fractions; COCO's AP of sizes that do not occur is -1
    assert any(isinstance(section, dict) for section in content["config"].values())
    assert not any("." in key for key in content["config"])
    assert all({"step", "epoch"} & set(entry) for entry in content["history"])
    assert not any(re.match("(eval|val)_", key) for entry in content["history"] for key in entry)
    assert read_results(whole.out / "results.json") == content


def test_the_data_is_told_once(whole):
    assert [line for line in whole.printed if line.startswith("trains on")] == [whole.row.data]


def test_a_finished_run_is_not_done_again_and_another_configuration_does_not_take_its_folder(whole, capfd):
    before = (whole.out / "results.json").stat().st_mtime_ns
    assert whole.train(whole.out, *whole.row.same_run) == 0
    seed = "trainer.seed=77" if whole.row.folder.startswith("trainer") else "randomness.seed=77"
    assert whole.train(whole.out, seed) == 2
    error = capfd.readouterr().err
    assert f"{whole.row.folder}={whole.out} belongs to another run" in error and "77 here" in error
    assert (whole.out / "results.json").stat().st_mtime_ns == before


def die_in_the_fifth_step(train, arguments):
    """The command in a process of its own, which kills itself."""
    steps = []

    def count(*given) -> None:
        steps.append(1)
        if len(steps) == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count)
    import_module(train).main(arguments)


def test_after_sigkill_the_same_command_ends_with_the_same_bits(whole, tmp_path, capfd):
    """Killed after the fifth step, with a newer checkpoint half written."""
    out = tmp_path / "run"
    arguments = [*whole.arguments, f"{whole.row.folder}={out}"]
    train = f"tasks.{whole.row.task}.train"
    killed = Started(die_in_the_fifth_step, train, arguments, folder=ROOT, log=tmp_path / "log", here=True)
    assert killed.wait(600) == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert not (out / "results.json").exists()
    write_half_a_checkpoint(out)
    assert whole.train(out) == 0
    assert "is skipped: " in capfd.readouterr().err
    assert read_results(out / "results.json")["resumed_from"]
    assert fingerprint(out) == fingerprint(whole.out)


@one_of_each_framework
def test_after_sigterm_the_same_command_ends_with_the_same_bits(whole, tmp_path, capfd):
    """Stopped in the fifth step, which is finished and saved. Overrides that make no other run may change then."""
    out, steps = tmp_path / "run", []

    def stop(*given) -> None:
        steps.append(1)
        if len(steps) == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    hook = register_optimizer_step_post_hook(stop)
    try:
        assert whole.train(out) == 128 + signal.SIGTERM
    finally:
        hook.remove()
    assert "the same command goes on" in capfd.readouterr().err
    assert len(steps) == 5 and newest_checkpoint(out)[0] == 5
    assert not (out / "results.json").exists()
    assert whole.train(out, *whole.row.same_run) == 0
    assert read_results(out / "results.json")["resumed_from"]
    assert fingerprint(out) == fingerprint(whole.out)


def test_evaluation_lies_in_the_run(whole):
    assert whole.row.command("evaluate", [str(whole.out / "model"), *whole.row.evaluate]) == 0
    found, trained = (read_results(whole.out / name) for name in ("evaluation/results_test.json", "results.json"))
    assert found["task"] == whole.row.task and found["metrics"]
    assert found["model_sha256"] == trained["model_sha256"]
    if whole.row.repeats_test:
        shared = {key: value for key, value in trained["metrics"].items() if key in found["metrics"]}
        assert shared == pytest.approx(found["metrics"], abs=1e-6) and whole.row.metric in shared


def test_evaluation_in_one_of_several_processes_is_refused(whole, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "2")
    arguments = [str(whole.out / "model"), *whole.row.evaluate, "--out", str(tmp_path / "evaluation")]
    assert whole.row.command("evaluate", arguments) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.endswith("WORLD_SIZE=2 in the environment, but evaluate runs in one process; start it alone")
    assert not (tmp_path / "evaluation").exists()


def test_a_second_start_in_the_folder_of_a_running_one_names_its_process(whole, tmp_path, capfd):
    with locked(tmp_path / "run" / "run.lock"):
        assert whole.train(tmp_path / "run") == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert f"{whole.row.folder}={tmp_path}/run is in use by process {os.getpid()} on " in error
    assert list((tmp_path / "run").iterdir()) == []


@one_of_each_framework
def test_a_run_that_diverges_stops_and_leaves_nothing_that_counts(whole, tmp_path, capfd):
    """A weight becomes NaN in the first step, and with it the loss of the second."""

    def spoil(optimizer, *given) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.fill_(float("nan"))

    hook = register_optimizer_step_post_hook(spoil)
    try:
        assert whole.train(tmp_path / "run") == 2
    finally:
        hook.remove()
    captured = capfd.readouterr()
    assert whole.row.data in captured.out.splitlines()  # which is told before training
    error = captured.err.splitlines()[-1]
    assert re.search(r"the loss of step 2 is nan; the last finite one is [0-9.]+, of step 1; .*nonfinite_loss=c", error)
    left = {path.name for path in (tmp_path / "run").iterdir()} if (tmp_path / "run").exists() else set()
    assert left <= {"run_config.json"}


LARGEST_LOG = {"segmentation": 64 << 10}  # mmengine writes every parameter group


@one_of_each_framework
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(whole, tmp_path, capfd):
    """No file may grow beyond what a log takes, which a checkpoint does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    out = tmp_path / "run"
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_LOG.get(whole.row.task, 16 << 10), hard))
    try:
        assert whole.train(out) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capfd.readouterr().err.splitlines()[-1]
    assert f"{out} cannot be written (" in error and "make room and give the same command again" in error
    assert not (out / "results.json").exists()
    if whole.row.task == "classification":
        assert whole.train(out) == 0 and fingerprint(out) == fingerprint(whole.out)
