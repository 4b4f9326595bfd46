"""Commands in pages: each resolves to a configuration, and every configuration has one."""

import itertools
import re
import shlex

import hf_sparseprior.classification.config
import tasks.classification.compare
import tasks.classification.vtab.plan
import tasks.heads.compare
import tasks.heads.task
import tasks.pretraining.compare
import tasks.pretraining.task
import tasks.robotics.compare
import tasks.robotics.config
import tasks.video.compare
import tasks.video.config
from tests.configs import shipped
from tests.each import each

ROOT = shipped.CONFIGS.parent
PAGES = [path for path in (ROOT / "README.md", shipped.CONFIGS / "README.md", *ROOT.glob("tasks/**/*.md"))]
LOADERS = {
    "tasks.classification.train": hf_sparseprior.classification.config.load_config,
    "tasks.classification.compare": tasks.classification.compare.load_comparison,
    "tasks.classification.vtab.sweep": tasks.classification.vtab.plan.load_sweep,
    "tasks.heads.compare": tasks.heads.compare.load_comparison,
    "tasks.heads.train": tasks.heads.task.HEADS.load_config,
    "tasks.pretraining.compare": tasks.pretraining.compare.load_comparison,
    "tasks.pretraining.train": tasks.pretraining.task.PRETRAINING.load_config,
    "tasks.video.train": tasks.video.config.load_config,
    "tasks.video.compare": tasks.video.compare.load_comparison,
    "tasks.robotics.train": tasks.robotics.config.load_config,
    "tasks.robotics.compare": tasks.robotics.compare.load_comparison,
}
MM = ("tasks.segmentation.train", "tasks.detection.train")  # Python files, which their own tests build
WORD = "[A-Z]{3,}"  # to be filled in
KNOWN = [str(path.relative_to(ROOT)) for path in (shipped.CONFIGS, *shipped.CONFIGS.rglob("*"))]
KNOWN += [
    f"configs/{name}"
    for file in KNOWN
    if file.endswith((".yaml", ".py"))
    for list_names in (shipped.cells, shipped.runs)
    for name in list_names(file.removeprefix("configs/"))
]


def rows_of_tables():
    """(module, name of the configuration, overrides) for every value of the words in capitals of every table's row."""
    text = (shipped.CONFIGS / "README.md").read_text()
    for cells in (line.split(" | ") for line in text.splitlines() if re.match(r"\| (Fib|VIO|Spars|Beyond)", line)):
        command = shlex.split(cells[2].strip("` |"), comments=False)
        module, name = command[command.index("-m") + 1], command[command.index("--config") + 1]
        words = re.findall(WORD, name)
        values = [re.findall(r"`([\w.]+)`", re.search(rf"{word}: ([^;]*)", cells[1])[1]) for word in words]
        assert all(values), cells
        for choice in itertools.product(*values):
            filled = name
            for word, value in zip(words, choice, strict=True):
                filled = filled.replace(word, value)
            yield module, filled.removeprefix("configs/"), tuple(command[command.index("--config") + 2 :])


ROWS = list(rows_of_tables())


@each("module, name, overrides", ROWS)
def test_commands_of_the_tables_resolve(module, name, overrides):
    if module in MM:
        assert name in shipped.cells(name.partition("#")[0])
    else:
        assert LOADERS[module](shipped.path(name), overrides)


def test_every_experiment_has_its_commands():
    named = {name for _, name, _ in ROWS}
    experiments = [f"experiments/{file.name}" for file in shipped.files("experiments")]
    trained = {"experiments/fib_table6.yaml"}
    assert {
        cell for name in experiments for cell in (shipped.runs if name in trained else shipped.cells)(name)
    } <= named
    assert set(shipped.cells(shipped.VTAB)) <= named


@each("page", PAGES)
def test_pages_name_configurations_that_exist(page):
    for name in re.findall(r"configs(?:/[\w$.+#{},/-]*[\w}])?", page.read_text()):
        before, _, choices, after = re.fullmatch(r"([^{]*)(\{([^}]*)\})?(.*)", name).groups()
        for choice in (choices or "").split(","):
            pattern = re.sub(rf"\\\$\w+|{WORD}", ".+", re.escape(f"{before}{choice}{after}"))
            assert any(re.fullmatch(pattern, known) for known in KNOWN), name
