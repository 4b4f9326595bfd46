"""The README stays true: names, files and commands that it mentions exist."""

import re
from pathlib import Path

import pytest

from hf_sparseprior import ops
from hf_sparseprior.configuration_sparseprior_vit import PRESETS
from hf_sparseprior.curves import CURVES
from hf_sparseprior.decay import DECAYS, INIT_PRESETS, PLACEMENTS
from hf_sparseprior.extras import EXTRAS
from hf_sparseprior.sequences import SEQUENCES
from hf_sparseprior.supports import MASK_FILLS, SUPPORTS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = (
    ROOT / "README.md",
    ROOT / ".github" / "CONTRIBUTING.md",
    ROOT / "configs" / "README.md",
    *ROOT.glob("tasks/*/*.md"),
)

NAMES = [*SUPPORTS, *SEQUENCES, *DECAYS, *CURVES, *INIT_PRESETS, *PLACEMENTS, *EXTRAS, *MASK_FILLS, *ops.BACKENDS]


@pytest.mark.parametrize("name", NAMES)
def test_every_registered_name_is_in_the_table_of_what_exists(name):
    assert f"`{name}`" in README


@pytest.mark.parametrize("page", [path.relative_to(ROOT) for path in PAGES])
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text())
    assert all((ROOT / page).parent.joinpath(link).exists() for link in links if "://" not in link), links


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z]+)", README)) <= targets
    assert "make test" in (ROOT / ".ci" / "run").read_text() and "make test" in README


def test_the_preset_of_the_example_exists():
    assert re.search(r'from_preset\(\s*"(\w+)"', README).group(1) in PRESETS
