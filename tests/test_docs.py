"""The examples of docs/how-to/extend.md and docs/timm.md run, and what the first names exists."""

import re
from pathlib import Path

import pytest
import torch

import hf_sparseprior as sp
from hf_sparseprior.attention.choice import BACKENDS
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.pattern import SUPPORTS
from hf_sparseprior.runs.config import read_cell
from tests.timm_oracle import import_timm

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / name for name in ("architecture.md", "how-to/extend.md")]
TEXT = PAGES[1].read_text()


def test_the_examples_make_a_support_a_decay_and_a_backend(registries, tmp_path):
    examples = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    for registry, name in ((SUPPORTS, "every_other"), (DECAYS, "columns"), (BACKENDS, "few_tokens")):
        registry.pop(name, None)  # by tests.pasted
    for number, example in enumerate(examples):
        # A support's settings are read from its source, so an example has a file.
        file = tmp_path / f"example{number}.py"
        file.write_text(example)
        exec(compile(example, str(file), "exec"), {"__name__": f"example{number}"})
    prior = {"support": {"name": "every_other", "first": 2}, "decay": "columns"}
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = sp.SparsePriorViTConfig(prior=prior, image_size=(6, 8), patch_size=2, **sizes)
    model = sp.SparsePriorViTModel(config).eval()
    assert model(torch.zeros(1, 3, 6, 8)).last_hidden_state.shape == (1, 13, 8)
    q, k, v = (torch.randn(1, 2, 13, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    support = config.prior["support"]
    outs = [
        sp.ops.attention(q, k, v, support, num_prefix_tokens=1, grid=(3, 4), backend=backend)
        for backend in ("few_tokens", "diagonal")
    ]
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-6)
    assert len(examples) == 3


def test_the_example_of_a_support_and_its_test_run(registries, tmp_path):
    """docs/how-to/own-support.md has the support, CONTRIBUTING.md its test."""
    SUPPORTS.pop("cross", None)  # by tests.pasted
    pages = (ROOT / "docs" / "how-to" / "own-support.md", ROOT / ".github" / "CONTRIBUTING.md")
    support, test = (re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[0] for page in pages)
    (tmp_path / "support.py").write_text(support)
    exec(compile(support, str(tmp_path / "support.py"), "exec"), {"__name__": "support"})
    names = {"supports": sp.supports}
    exec(test, names)
    names["test_cross_sees_its_row_and_column"]()


def test_the_examples_on_models_of_timm_run(tmp_path, monkeypatch):
    import_timm()
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "timm.md").read_text(), re.DOTALL)
    for example in examples:
        names: dict = {}
        exec(example, names)
        assert any("sparse_prior.decay_bias" in key for key in names["model"].state_dict())
    assert len(examples) == 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_named_files_exist(page):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    assert links and all((page.parent / link).exists() for link in links)
    named = re.findall(r"`(?:hf_sparseprior/)?((?:tests|tasks|[a-z]+)/[\w/]+\.py)`", page.read_text())
    roots = (ROOT, ROOT / "hf_sparseprior")
    assert named and all(any((root / name).exists() for root in roots) for name in named), named


def test_the_table_of_rooms_is_whole():
    rows = [line.split(" | ")[0] for line in PAGES[0].read_text().splitlines() if line.startswith("| `")]
    rooms = [path.parent.name for path in (ROOT / "hf_sparseprior").glob("*/__init__.py")]
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(rooms)


def test_every_promise_names_tests_that_exist():
    text = (ROOT / "docs" / "reliability.md").read_text()
    rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ") and "promised" not in line]
    sources: dict[str, str] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        sources[path.name] = sources.get(path.name, "") + path.read_text()
    assert rows
    for row in rows:
        named = re.findall(r"`(test_\w+\.py)`(?:: ((?:`test_\w+(?:\.\.\.)?`(?:, )?)+))?", row)
        assert named, f"no test in {row!r}"
        for file, tests in named:
            assert file in sources, file
            for test in re.findall(r"`(\w+)(?:\.\.\.)?`", tests):
                assert f"def {test}" in sources[file], (file, test)


def test_commands_of_pages_name_one_run_or_comparison():
    """A how-to once gave a matrix without a cell, which no command takes. Cells in capitals stand for any."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("tasks/**/*.md")]
    named = [(page, name) for page in pages for name in re.findall(r"--config[= ](configs/[^\s`]+)", page.read_text())]
    named = [(page, name) for page, name in named if ".yaml" in name and not re.search(r"[${]|#.*[A-Z]{2}", name)]
    assert len(named) > 100
    for page, name in named:
        try:
            read_cell(ROOT / name)
        except (ValueError, OSError) as error:
            pytest.fail(f"{page.relative_to(ROOT)}: {error}")


def test_examples_need_names_of_the_package_alone():
    """Modules may move; names of `hf_sparseprior` itself, and of rooms that it does not import, stay. Who adds a task
    works in a checkout."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/**/*.ipynb"), *ROOT.glob("tasks/**/*.md")]
    pages.remove(ROOT / "docs" / "how-to" / "add-task.md")
    lines = [line for page in pages for line in re.findall(r"(?:from|import) hf_sparseprior\S*", page.read_text())]
    allowed = r"import hf_sparseprior|from hf_sparseprior|from hf_sparseprior\.(analysis\.decays|training)"
    assert len(lines) > 20 and [line for line in lines if not re.fullmatch(allowed, line.rstrip("`.,;\\n\"'"))] == []
