"""Run transformers' common tests for every family: python -m tests.conformance [WORDS OF PYTEST]

Writes outputs/conformance.md, a row for each family and prior and the reasons for which tests were skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import transformers

from hf_sparseprior.base.files import write_text
from hf_sparseprior.runs.tables import markdown_table
from tests.conformance.sources import ROOT, lay_out

REPORT = ROOT / "outputs" / "conformance.md"
NOT_RUN = (
    "Tests of export and generation were not run, nor those of single models: the source distribution of transformers "
    "lacks them."
)


def report(junit: Path) -> str:
    """The report of a run, from pytest's XML."""
    counts: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    failed: dict[str, None] = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        name = str(case.get("classname")).rpartition(".")[2]
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if kinds else "passed"
        counts.setdefault(name, Counter())[kind] += 1
        if kind == "failed":
            failed[f"{name}::{case.get('name')}"] = None
        if kind == "skipped":
            reasons[re.sub(r"<class '[\w.]+'>|SparsePrior\w+", "a class", str(case[0].get("message")))] += 1
    names = ("passed", "skipped", "failed")
    rows = [[name.replace("_", " "), *(str(found[kind]) for kind in names)] for name, found in sorted(counts.items())]
    parts = [
        f"# transformers {transformers.__version__}: its common tests with our models",
        NOT_RUN,
        markdown_table(("tests", *names), rows),
        "## Skipped, by transformers' own reasons",
        markdown_table(("tests", "reason"), [[str(count), reason] for reason, count in reasons.most_common()]),
    ]
    if failed:
        parts += ["## Failed", "\n".join(f"- {name}" for name in failed)]
    return "\n\n".join(parts) + "\n"


def main(words: list[str]) -> int:
    """Exit status: that of pytest."""
    lay_out()
    with tempfile.TemporaryDirectory() as place:
        junit = Path(place) / "junit.xml"
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}"]
        environment = {**os.environ, "CONFORMANCE": "all"}
        status = subprocess.run([*pytest, "tests/conformance", *words], cwd=ROOT, env=environment).returncode
        if junit.is_file():
            write_text(REPORT, report(junit))
            print(REPORT)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
