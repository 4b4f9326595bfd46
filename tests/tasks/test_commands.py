"""Commands where the packages of an extra are missing: `--help` is help, work is one line that says what to install."""

import contextlib
import functools
import importlib
import io
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import asdict
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import tasks
from hf_sparseprior.cli.command import INSTALLS, one_line
from tests.each import each
from tests.processes import ROOT, Started

# What the extras of tasks bring on top of `classification`, by the names under which it is imported.
EXTRAS = {name for name, command in INSTALLS.items() if not re.search("classification|peft", command)}
COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in (ROOT / "tasks").rglob("*.py")
    if re.search(r"^if __name__ == .__main__.:", path.read_text(), re.MULTILINE)
)
BEFORE = ROOT / "tests/fixtures/saved_79213a46"
VIDEO = ["tasks.video.train", "--config", "configs/video/smoke.yaml"]
QUIET = "trainer.disable_tqdm=true"
# Work that needs an extra, and what the line says. In capitals: a folder of the test.
WORK = [
    (["tasks.segmentation.train", "--config", "configs/segmentation/smoke.py"], "make dense"),
    (["tasks.segmentation.evaluate", str(BEFORE / "classification/finished")], "make dense"),
    (["tasks.detection.train", "--config", "configs/detection/smoke.py"], "make dense"),
    (["tasks.detection.evaluate", str(BEFORE / "classification/finished")], "make dense"),
    ([*VIDEO, "data.path=OUT/clips"], r"\[video\]"),
    ([*VIDEO, "data.source=folder", "data.motion={}", "data.path=OUT/videos", QUIET], r"\[video\]"),
    (["tasks.video.motion", "OUT/motion"], r"\[video\]"),
    (["tasks.robotics.demonstrate", "lift", "OUT/lift.hdf5"], "make robotics"),
    (["tasks.robotics.demonstrate", "pusht", "OUT/pusht.zarr"], "make robotics"),
    (["tasks.robotics.convert", "tests/fixtures/lerobot_v3", "OUT/again.lerobot"], r"make robotics|\[robotics\]"),
    (["tasks.robotics.evaluate", str(BEFORE / "policy")], r"make robotics|\[robotics\]"),
    (
        ["tasks.robotics.train", "--config", "configs/robotics/smoke.yaml#pusht_image", "data.path=OUT/there.zarr"],
        r"\[robotics\]",
    ),
]


HEAVY = {"torch", "transformers", "datasets", "numpy", "matplotlib", "hf_sparseprior"}


def asked(command: str, *arguments: str) -> tuple[int, str, set[str]]:
    """Exit status, output and the packages that a command imports in a process of its own."""
    python = [sys.executable, "-X", "importtime", "-m", command, *arguments]
    done = subprocess.run(python, cwd=ROOT, capture_output=True, text=True, timeout=60)
    lines = done.stderr.splitlines()
    times = [line for line in lines if line.startswith("import time:")]
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in times}
    return done.returncode, done.stdout + "\n".join(line for line in lines if line not in times), imported


class Hiding:
    """A finder of modules that does not find these packages."""

    def __init__(self, finder, hidden):
        self.finder, self.hidden = finder, hidden

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self.hidden else self.finder.find_spec(name, path, target)


def answers_without(hidden: set[str], calls: list[list[str]], file: str) -> None:
    """What commands say in a process in which these packages cannot be imported: exit status, output and errors."""
    assert not hidden & sys.modules.keys()
    sys.meta_path[:] = [Hiding(finder, hidden) for finder in sys.meta_path]
    answers = []
    for name, *arguments in calls:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                own = f"{name}.__main__" if (ROOT / name.replace(".", "/")).is_dir() else name
                status = importlib.import_module(own).main(arguments)
            except SystemExit as end:
                status = end.code
        answers.append((status, out.getvalue(), err.getvalue()))
    Path(file).write_text(json.dumps(answers))


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    (folder / "there.zarr").mkdir()
    for split in ("train", "validation", "test"):
        (folder / "videos" / split / "a").mkdir(parents=True)
        (folder / "videos" / split / "a" / "clip.mp4").write_bytes(b"0")
    work = [[part.replace("OUT", str(folder)) for part in call] for call, _ in WORK]
    calls = [*([name, "--help"] for name in COMMANDS), *work]
    process = Started(
        answers_without, EXTRAS, calls, str(folder / "answers.json"), folder=ROOT, log=folder / "log",
        environment={"SPARSEPRIOR_TRACEBACK": ""},
    )  # fmt: skip
    assert process.wait(600) == 0, (folder / "log").read_text()
    found = json.loads((folder / "answers.json").read_text())
    return found[: len(COMMANDS)], found[len(COMMANDS) :]


def test_the_commands_are_found():
    assert {"tasks.detection.train", "tasks.robotics.demonstrate", "tasks.video.motion"} <= set(COMMANDS)
    assert {"mmseg", "av", "robosuite", "cv2"} <= EXTRAS


@pytest.mark.slow
@each("number", range(len(COMMANDS)))
def test_help_needs_no_extra(number, answers):
    status, out, _ = answers[0][number]
    assert status == 0 and out.startswith(f"usage: python -m {COMMANDS[number]}")


# What `python -m` does before it imports the module of a command, for one command after the other.
HELP = """
import contextlib, io, json, sys
import tasks

answers, commands = [], sys.argv[1:]
for command in commands:
    sys.orig_argv, sys.argv = [sys.executable, "-m", command, "--help"], ["-m", "--help"]
    status = None  # if nobody answers
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            tasks._answer_at_once()
        except SystemExit as end:
            status = end.code
    answers.append((status, out.getvalue(), sorted({name.partition(".")[0] for name in sys.modules})))
print(json.dumps(answers))
"""


def test_help_is_answered_without_torch():
    python = [sys.executable, "-c", HELP, *COMMANDS]
    done = subprocess.run(python, cwd=ROOT, capture_output=True, text=True, timeout=60)
    bad = []
    for command, answer in zip(COMMANDS, json.loads(done.stdout), strict=True):
        # Where it is the module that answers, in a process of its own; the first one as a user does it.
        status, out, imported = asked(command, "--help") if answer[0] is None or command == COMMANDS[0] else answer
        if status != 0 or not out.startswith(f"usage: python -m {command}") or not imported or HEAVY & {*imported}:
            bad.append((command, status, out[:80], HEAVY & {*imported}))
    assert not bad, bad


@each(
    "command, arguments, message",
    [
        ("tasks.video.train", [], "the following arguments are required: --config"),
        ("tasks.robotics.demonstrate", ["dance", "out"], "invalid choice: 'dance'"),
        ("tasks.analysis.frames", ["run", "--clip", "a.mkv", "--size", "9"], "'9' must be HEIGHTxWIDTH in pixels"),
    ],
)
def test_wrong_arguments_are_answered_without_torch(command, arguments, message):
    status, out, imported = asked(command, *arguments)
    assert status == 2 and message in out and not imported & HEAVY


@pytest.mark.slow
@each("number", range(len(WORK)))
def test_work_without_the_extra_is_one_line_that_says_what_to_install(number, answers):
    (name, *_), said = WORK[number]
    status, _, err = answers[1][number]
    assert status == 2 and len(err.splitlines()) == 1
    assert re.match(f"python -m {name}: .*({said})", err)


def test_a_command_whose_own_modules_are_missing_says_what_installs_them(monkeypatch, capsys):
    """As `python -m` sets its arguments while it looks for the module."""
    monkeypatch.setenv("SPARSEPRIOR_TRACEBACK", "0")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "-m", "tasks.video.train", "--config", "a.yaml"])
    monkeypatch.setattr(sys, "argv", ["-m", "--config", "a.yaml"])
    monkeypatch.setattr(tasks, "__path__", tasks.__path__)  # to which others may have added
    importlib.reload(tasks)
    with pytest.raises(SystemExit) as end:
        sys.excepthook(ModuleNotFoundError, ModuleNotFoundError("No module named 'PIL'", name="PIL.Image"), None)
    line = "python -m tasks.video.train: No module named 'PIL'; install it with: pip install '.[classification]'\n"
    assert end.value.code == 2 and capsys.readouterr().err == line
    sys.excepthook(TypeError, TypeError("a slip"), None)
    assert capsys.readouterr().err == "TypeError: a slip\n"


def test_a_program_that_imports_tasks_keeps_its_own_hook(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", own := lambda *error: None)
    monkeypatch.setattr(sys, "argv", ["program.py"])
    monkeypatch.setattr(tasks, "__path__", tasks.__path__)  # to which others may have added
    importlib.reload(tasks)
    assert sys.excepthook is own


installed = functools.cache(packages_distributions)


@each("name", INSTALLS)
def test_what_is_said_to_install_a_package_does(name):
    """By the package's distribution, which the extra in pyproject.toml or the target in the Makefile names."""
    distributions = installed().get(name)
    if not distributions:
        pytest.skip(f"{name} is not installed")
    how = INSTALLS[name]
    extra = re.search(r"\w+", how.removeprefix("pip install").removeprefix("make"))[0]
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    recipe = (ROOT / "Makefile").read_text().partition(f"$(VENV)/{extra}: ")[2].partition("\n\n")[0]
    found = {re.sub("[-_.]+", "-", distribution).lower() for distribution in distributions}
    direct = {re.split("[<>=,; ]", each)[0].lower() for each in asked}
    assert found & (direct | set(recipe.split())) or (found & {"scipy"} and "scikit-learn" in direct)


def test_an_error_that_no_package_of_ours_causes_stays_as_it_is():
    assert one_line(ModuleNotFoundError("No module named 'x'", name="x")) == "No module named 'x'"
    assert one_line(ImportError("cannot be")) == "cannot be"
    broken = ImportError("undefined symbol: _ZN2at", name="mmcv._ext")
    assert one_line(broken) == "undefined symbol: _ZN2at; install it with: make dense"


def test_what_parsers_repeat_is_what_the_work_knows():
    """Parsers import nothing, so they have names and defaults of their own where what knows them imports torch."""
    from hf_sparseprior.images.config import SPLITS
    from hf_sparseprior.images.vtab_tasks import TASKS
    from tasks.benchmark import commands as benchmark
    from tasks.benchmark import gpu_count
    from tasks.benchmark.contenders_of_rivals import RIVALS
    from tasks.classification import commands as classification
    from tasks.classification.fetch_cifar10 import SOURCES
    from tasks.classification.vtab import commands as vtab
    from tasks.common.mm import commands as mm
    from tasks.common.mm.photographs import Settings
    from tasks.common.mm.scenes import SceneSettings
    from tasks.common.mm.task import MM_SPLITS
    from tasks.common.parsers import IMAGE_SPLITS, mm_evaluate_parser
    from tasks.robotics import commands as robotics
    from tasks.robotics.environments import ENVIRONMENTS
    from tasks.video import commands as video
    from tasks.video.motion import MotionConfig

    assert {name: rival.about for name, rival in RIVALS.items()} == benchmark.RIVALS
    assert tuple(gpu_count.CASES) == benchmark.COUNTED
    assert tuple(f"{capability / 10}" for capability in gpu_count.MULTIPROCESSORS) == benchmark.CARDS
    assert tuple(SOURCES) == classification.SOURCES and tuple(TASKS) == vtab.TASKS and SPLITS == IMAGE_SPLITS
    assert tuple(ENVIRONMENTS) == robotics.ENVIRONMENTS
    assert asdict(MotionConfig()) == {**video.CLIPS, "within_shots": False}
    scenes = vars(mm.scenes().parse_args(["out"]))
    assert scenes.pop("out") == Path("out") and scenes == asdict(SceneSettings())
    assert mm.photographs().parse_args(["out"]).size == Settings().size
    split = next(action for action in mm_evaluate_parser("detection")._actions if action.dest == "split")
    assert set(split.choices) == set(MM_SPLITS)
