"""`python -m hf_sparseprior list` knows what is registered."""

import subprocess
import sys

import pytest

from hf_sparseprior.__main__ import main
from hf_sparseprior.attention.choice import BACKENDS
from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.cli.arguments import KINDS
from hf_sparseprior.cli.names import HEADINGS, listed
from hf_sparseprior.patterns.curves import CURVES
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.sequences import SEQUENCES
from hf_sparseprior.patterns.supports import SUPPORTS
from hf_sparseprior.priors.low_rank import MIXERS
from hf_sparseprior.priors.predictor import PREDICTORS
from tests.each import each
from tests.processes import ROOT

REGISTERED = {
    "supports": SUPPORTS, "sequences": SEQUENCES, "decays": DECAYS, "curves": CURVES, "predictors": PREDICTORS,
    "mixers": MIXERS, "extras": EXTRAS, "backends": BACKENDS,
}  # fmt: skip


@each("kind", REGISTERED)
def test_every_name_has_a_line_that_says_what_it_is(kind):
    heading, *lines = listed([kind])
    rows = [line.split(maxsplit=1) for line in lines if line.startswith("  ") and line[2] != " "]
    assert heading.startswith(f"{kind}: ") and [name for name, *_ in rows] == list(REGISTERED[kind])
    assert all(len(row) == 2 and len(row[1]) > 8 for row in rows)


def test_families_have_their_presets(capsys):
    assert main(["list", "families"]) == 0
    text = capsys.readouterr().out
    for family in FAMILIES.values():
        assert family.name in text and all(preset in text for preset in family.presets)
        with pytest.raises(ValueError, match=", ".join(family.presets)):
            family.make_config("nonsense")


def test_settings_are_told_of_what_is_asked_for(capsys):
    main(["list", "supports", "decays"])
    text = capsys.readouterr().out
    assert "w_min=" in text and 'init="' in text and "curves: " not in text
    main(["list"])
    text = capsys.readouterr().out
    assert all(heading in text for heading in HEADINGS.values()) and list(HEADINGS) == list(KINDS)
    assert "w_min=" not in text


def test_a_kind_that_does_not_exist_is_one_line(capsys):
    assert main(["list", "suports"]) == 2
    assert capsys.readouterr().err.strip() == (
        f"python -m hf_sparseprior list: 'suports' must be one of {', '.join(KINDS)}; did you mean 'supports'?"
    )


def test_a_reader_may_stop_early():
    """As `| head` does."""
    command = [sys.executable, "-m", "hf_sparseprior", "list", *KINDS]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) == 0
