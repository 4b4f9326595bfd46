"""Writes the links to the project, which come from one place: python -m tests.address

`ADDRESS` of hf_sparseprior/base/version.py is the repository's. From it come the badges and the documentation link of
README.md, `repository-code` of CITATION.cff and `repo_url` of mkdocs.yml, which this command writes, and
`[project.urls]` of a wheel, which setup.py reads. Without an address there are none of them. Version and date of
CITATION.cff, which it writes too, are those of the package and of CHANGELOG.md.
"""

from __future__ import annotations

import re
from pathlib import Path

from hf_sparseprior.base.version import ADDRESS, __version__

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- links of python -m tests.address -->\n", "<!-- end of links -->\n"


def badges(address: str) -> str:
    """Badges of the repository's own tests and the documentation link, as lines of Markdown."""
    tests = f"{address}/actions/workflows/tests.yml"
    return f"[![tests]({tests}/badge.svg)]({tests}) [Documentation]({address}/tree/main/docs) [Code]({address})\n"


def readme(text: str, address: str | None) -> str:
    """README.md with the links below its title, or without."""
    text = re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}\n?", "", text, flags=re.DOTALL)
    if address is None:
        return text
    title, _, rest = text.partition("\n\n")
    return f"{title}\n\n{BEGIN}{badges(address)}{END}\n{rest}"


def field(text: str, name: str, value: str | None, after: str) -> str:
    """A YAML file with one field at its top level after another, or without it."""
    text = re.sub(rf"^{name}: .*\n", "", text, flags=re.MULTILINE)
    if value is None:
        return text
    found = re.search(rf"^{after}: .*\n", text, flags=re.MULTILINE)
    assert found is not None, f"there is no {after}"
    return f"{text[: found.end()]}{name}: {value}\n{text[found.end() :]}"


def released(changelog: str, version: str = __version__) -> str | None:
    """The date of a version in CHANGELOG.md; None before it has one."""
    found = re.search(rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)$", changelog, flags=re.MULTILINE)
    return None if found is None else found[1]


def documents(address: str | None, root: Path = ROOT) -> dict[str, str]:
    """Every file with links, as it has to be; also version and date of CITATION.cff."""
    text = {name: (root / name).read_text(encoding="utf-8") for name in ("README.md", "CITATION.cff", "mkdocs.yml")}
    citation = field(text["CITATION.cff"], "version", __version__, "type")
    citation = field(
        citation, "date-released", released((root / "CHANGELOG.md").read_text(encoding="utf-8")), "version"
    )
    return {
        "README.md": readme(text["README.md"], address),
        "CITATION.cff": field(citation, "repository-code", None if address is None else f'"{address}"', "version"),
        "mkdocs.yml": field(text["mkdocs.yml"], "repo_url", address, "site_description"),
    }


def main() -> None:
    """Write them."""
    for name, text in documents(ADDRESS).items():
        (ROOT / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
