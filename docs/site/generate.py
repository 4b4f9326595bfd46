"""Pages of the site that registries, records and the tasks' own pages already know: a hook of mkdocs.

Nothing is written into the repository. Every picture and number is drawn or counted when the site is built.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import logging
import os
import posixpath
import re
import tempfile
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from gallery import gallery_text
from mkdocs.structure.files import File, Files

import hf_sparseprior as sp
from hf_sparseprior.analysis import explain
from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.cli.arguments import add_explain
from hf_sparseprior.patterns.curves import CURVES
from hf_sparseprior.patterns.decay import DECAYS, INIT_PRESETS, PLACEMENTS
from hf_sparseprior.patterns.pattern import SUPPORTS, support_settings
from hf_sparseprior.priors.low_rank import MIXERS
from hf_sparseprior.priors.predictor import PREDICTORS

ROOT = Path(__file__).parents[2]
README = "README.md"
GRID = ("--grid", "14x14", "--heads", "6")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)]*)?\)")
RECORDED = ("tasks/", "claims/", "results")
log = logging.getLogger("mkdocs.hooks.generate")


# ---- priors ---------------------------------------------------------------------------------------------------------


def about(entry: Any) -> str:
    """The docstring of what is registered, without the parts that only programmers need."""
    text = inspect.getdoc(getattr(entry, "function", entry)) or ""
    return re.split(r"\n\n(?:Args|Returns|Raises|Attributes|SETTINGS)\b", text)[0]


def settings_table(settings: dict[str, Any]) -> list[str]:
    """Settings and their defaults as a Markdown table."""
    if not settings:
        return ["No settings.", ""]
    lines = ["| setting | default |", "|---|---|"]
    return [*lines, *(f"| `{key}` | `{json.dumps(value)}` |" for key, value in settings.items()), ""]


def explained(name: str, folder: Path) -> tuple[str, list[Path]]:
    """What `explain NAME` prints, and its pictures."""
    parser = ArgumentParser()
    add_explain(parser)
    out = folder / name
    out.mkdir()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        pictures = explain.run(parser.parse_args([name, *GRID, "--out", str(out)]))
    lines = [line for line in said.getvalue().splitlines() if not line.startswith("picture:")]
    return "\n".join(lines), pictures


KINDS = {
    "Supports": (SUPPORTS, "support", "which pairs of patches a head sees, known before the image"),
    "Decays": (DECAYS, "decay", "a learned factor of the logits that falls with the distance of two patches"),
    "Predictors": (PREDICTORS, "predictor", "keys that are chosen for each query and image"),
    "Mixers": (MIXERS, "mixer", "what takes the place of softmax over pairs"),
    "Extras": (
        EXTRAS,
        "extras",
        "modules beside support and decay; all start where they change nothing, but for token pruning",
    ),
}


def priors_page(folder: Path, pictures: dict[str, Path]) -> str:
    """Every registered prior with its docstring, settings, numbers and pictures; `pictures` gets their places."""
    lines = [
        "# Every prior",
        "",
        'A prior is a name, names joined by `+` ("fibottention+violin"), or a dict of slots with all settings. '
        "What `python -m hf_sparseprior explain NAME` says is below each one, for 6 heads over 14x14 patches and one "
        "class token. [On a photo](../gallery.md).",
        "",
    ]
    for title, (registry, slot, meaning) in KINDS.items():
        lines += [f"## {title}", "", f"`{slot}` of a prior: {meaning}.", ""]
        for name, entry in registry.items():
            settings = support_settings(name) if slot == "support" else dict(entry.SETTINGS)
            lines += [f"### {name}", "", about(entry), "", *settings_table(settings)]
            if slot == "extras" or name == "softmax":
                continue
            said, drawn = explained(name, folder)
            lines += ["```text", said, "```", ""]
            for path in drawn:
                place = f"reference/{name}_{path.name}"
                pictures[place] = path
                lines += [f"![{name}: {path.stem}]({posixpath.basename(place)})", ""]
    lines += [
        "## Curves",
        "",
        f"Of decays (`curves`) and of supports (`order`): {_listed(CURVES)}, and their transposes, `_t`.",
        "",
    ]
    lines += ["## Initial values of a decay", "", f"`init`: {_listed(INIT_PRESETS)}.", ""]
    lines += ["## Where a decay acts", "", "| `placement` | |", "|---|---|"]
    lines += [f"| `{name}` | {formula} |" for name, formula in PLACEMENTS.items()]
    return "\n".join([*lines, ""])


def _listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


# ---- models ---------------------------------------------------------------------------------------------------------


def models_page() -> str:
    """Families, their classes and presets."""
    from hf_sparseprior.adapters.stock_families import family_names

    lines = ["# Models", "", "Every class works with the Auto classes, the Trainer, accelerate and peft.", ""]
    for model_type, family in FAMILIES.items():
        names = ", ".join(f"`{cls.__name__}`" for cls in family.models.values())
        lines += [f"## {family.title}", "", f"`{model_type}`: {names}.", ""]
        presets = family.config_class.presets if family.takes == "images" else {}
        if presets:
            lines += ["| preset | width | layers | heads | image |", "|---|---|---|---|---|"]
            for name in presets:
                config = family.config_class.from_preset(name)
                cells = (
                    getattr(config, key, "")
                    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "image_size")
                )
                lines.append(f"| `{name}` | " + " | ".join(map(_cell, cells)) + " |")
            lines.append("")
    lines += ["## Models of others", "", f"`sp.apply_prior` takes, in place: {family_names()}.", ""]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


PYTHON = """\
# Python

What `import hf_sparseprior as sp` gives.

## Functions

{functions}

## Modules

::: hf_sparseprior.models.modules.Attention

::: hf_sparseprior.models.modules.Block

## Attention

::: hf_sparseprior.attention.functional.attention

## Adapters

::: hf_sparseprior.adapters.lora.lora_config

::: hf_sparseprior.adapters.violin.ViolinAdapterConfig

::: hf_sparseprior.adapters.violin.LoraViolinConfig

## Configs

{configs}
"""


def python_page() -> str:
    """The public interface, from docstrings."""
    functions = [name for name in sp.__all__ if inspect.isfunction(getattr(sp, name))]
    configs = [name for name in sp.__all__ if name.startswith("SparsePrior") and name.endswith("Config")]

    def places(names: list[str]) -> str:
        return "\n\n".join(f"::: {getattr(sp, name).__module__}.{name}" for name in names)

    return PYTHON.format(functions=places(functions), configs=places(configs))


# ---- the tasks' pages ------------------------------------------------------------------------------------------------


def repository_pages() -> dict[str, Path]:
    """Pages of the site that are files of the tasks: place -> file."""
    pages = {}
    for folder in sorted((ROOT / "tasks").iterdir()):
        for name, place in ((README, f"tasks/{folder.name}.md"), ("RESULTS.md", f"tasks/{folder.name}-results.md")):
            if (folder / name).is_file():
                pages[place] = folder / name
        for path in sorted(folder.glob("results/*/table.md")):
            pages[f"tasks/{folder.name}-{path.parent.name}.md"] = path
        for path in sorted(folder.glob("*/README.md")):
            pages[f"tasks/{folder.name}-{path.parent.name}.md"] = path
        for path in sorted(folder.glob("*.md")):
            if path.name not in (README, "RESULTS.md"):
                pages[f"tasks/{folder.name}-{path.stem}.md"] = path
    pages["tasks/configs.md"] = ROOT / "configs" / README
    return pages


def rewritten(file: Path, place: str, pages: dict[str, Path], pictures: dict[str, Path]) -> str:
    """A page of the repository for its place in the site: links to pages of the site stay links, pictures come along,
    and other files are named.
    """
    places = {path: where for where, path in pages.items()}
    places |= {path: path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    places |= {path: f"notebooks/{path.stem}.md" for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")}

    def link(match: re.Match[str]) -> str:
        picture, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        if not target or "://" in target:
            return match[0]
        path = Path(os.path.normpath(file.parent / target))
        if path.is_dir() and (path / README) in places:
            path = path / README
        if picture and path.is_file():
            where = f"pictures/{path.relative_to(ROOT).as_posix()}"
            pictures[where] = path
            return f"![{text}]({posixpath.relpath(where, posixpath.dirname(place))})"
        if path in places:
            return f"[{text}]({posixpath.relpath(places[path], posixpath.dirname(place))}{anchor})"
        if path == ROOT / README:
            return f"[{text}]({posixpath.relpath('index.md', posixpath.dirname(place))})"
        return f"{text} (`{path.relative_to(ROOT).as_posix()}`)"

    return LINK.sub(link, file.read_text(encoding="utf-8"))


# ---- the hook -------------------------------------------------------------------------------------------------------


def on_files(files: Files, config: Any) -> Files:
    """mkdocs asks for the site's files."""
    logging.getLogger("hf_sparseprior").setLevel(logging.ERROR)
    scratch = tempfile.TemporaryDirectory(prefix="hf_sparseprior-site-")
    config.extra["scratch"] = scratch  # lives until the site is written
    pictures: dict[str, Path] = {}
    texts = {
        "reference/priors.md": priors_page(Path(scratch.name), pictures),
        "reference/models.md": models_page(),
        "reference/python.md": python_page(),
    }
    pages = repository_pages()
    texts |= {place: rewritten(path, place, pages, pictures) for place, path in pages.items()}
    # Pages of docs/ link to files of the repository as readers of the repository need it.
    for path in sorted((ROOT / "docs").rglob("*.md")):
        place = path.relative_to(ROOT / "docs").as_posix()
        if (file := files.get_file_from_path(place)) is not None and "](../" in path.read_text(encoding="utf-8"):
            files.remove(file)
            texts[place] = rewritten(path, place, pages, pictures)
    texts["gallery.md"] += "\n" + gallery_text(Path(scratch.name), pictures)
    for place, text in texts.items():
        files.append(File.generated(config, place, content=text))
    for place, path in pictures.items():
        files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> None:
    """In the search, tables of results come after pages of the documentation."""
    if page.file.src_uri.startswith(RECORDED):
        page.meta.setdefault("search", {})["boost"] = 0.1
