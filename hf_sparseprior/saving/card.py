"""The model card of a saved model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_sparseprior.base.checks import is_number
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.base.files import write_bytes
from hf_sparseprior.saving.processor import takes_clips

CARD = "README.md"
BEGIN, END = "<!-- hf_sparseprior writes this on saving -->", "<!-- hf_sparseprior: end -->"
_BLOCK = re.compile(rf"\n?{re.escape(BEGIN)}.*?{re.escape(END)}\n?", re.DOTALL)
TAGS = ("vision-transformer", "sparse-attention", "spatial-prior")
SPLITS = ("test", "validation")  # the first part of a metric's name in results.json


def model_card(
    config: Any,
    results: dict[str, Any] | None = None,
    license_name: str = "apache-2.0",
    tags: Sequence[str] = (),
) -> str:
    """Text of the model card.

    Args:
        config: the model's config.
        results: results.json of the run that trained it; data, metrics and command go into the card, the metrics also
            into its header, where the hub looks for them.
        license_name: for the card's header.
        tags: more of them for the header.
    """
    results = results or {}
    classifies = any("Classification" in name for name in config.architectures or [])
    clips = takes_clips(config)
    pretrained = ((results.get("config") or {}).get("model") or {}).get("pretrained")
    base = hub_name(pretrained, is_folder=True) if pretrained else hub_name(config.name_or_path)
    tag = ("video" if clips else "image") + "-classification"
    if not classifies:
        tag = "feature-extraction" if clips else "image-feature-extraction"
    lines = [
        "---",
        "library_name: transformers",
        f"pipeline_tag: {tag}",
        f"license: {license_name}",
        *([] if base is None else [f"base_model: {base}"]),
        f"tags: [{', '.join(dict.fromkeys((*TAGS, *map(_quoted, tags))))}]",
        *model_index(f"{FAMILIES[config.model_type].title} {config.prior_name}", tag, results),
        "---",
        "",
        f"# {FAMILIES[config.model_type].title}, prior: {config.prior_name}",
        "",
        "| | |",
        "|---|---|",
        f"| architecture | {_architecture(config)} |",
        f"| image, patch, grid | {config.image_size}, {config.patch_size}, {config.grid[0]}x{config.grid[1]} patches |",
        *([f"| frames | {config.num_frames} |"] if clips else []),
        *([f"| base model | {base or Path(str(pretrained)).name} |"] if base or pretrained else []),
        f"| prior | `{json.dumps(config.prior)}` |",
        f"| pruning ratio | {config.pruning_ratio:.2f} % of {_pruned(config)}, prefix tokens included |",
        *([f"| classes | {config.num_labels} |"] if classifies else []),
        f"| data | {_without_folders(results.get('data', 'not recorded'))} |",
    ]
    metrics = results.get("metrics", {})
    lines += [f"| {name} | {value} |" for name, value in metrics.items()] or ["| metrics | not recorded |"]
    if decoding := _decoding(results):
        lines.append(f"| images decoded with | {', '.join(decoding)} |")
    if "command" in results:
        lines.append(f"| trained with | `{_without_folders(results['command'])}` |")
    lines += [
        "",
        "```python",
        *(_FEATURES if not classifies else _CLASSIFY_CLIPS if clips else _CLASSIFY),
        "```",
        "",
        *_other_decoding(results),
        "Where hf_sparseprior is installed and imported, `trust_remote_code` is not needed.",
        "",
    ]
    return "\n".join(lines)


def hub_name(source: Any, is_folder: bool = False) -> str | None:
    """OWNER/NAME of a model of the hub, given as that or as its folder in the hub's cache; None for other folders.

    is_folder: whether `source` is a folder, which need not be there any more.
    """
    if cached := re.search(r"(?:^|[/\\])models--([\w.-]+?)--([\w.-]+)[/\\]snapshots[/\\]", str(source)):
        return f"{cached[1]}/{cached[2]}"
    named = not is_folder and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(source))
    return str(source) if named and not Path(str(source)).exists() else None


def model_index(name: str, task: str, results: dict[str, Any]) -> list[str]:
    """Metrics as the hub reads them, lines of a card's header; none without metrics of test or validation.

    Args:
        name: the model's. task: the pipeline that it is for. results: results.json of its run.
    """
    measured: dict[str, list[str]] = {}
    for full, value in results.get("metrics", {}).items():
        split, _, kind = full.partition("_")
        number = is_number(value) and math.isfinite(value)
        if split in SPLITS and kind and number:
            metric = {"type": kind, "value": value, "name": full}
            measured.setdefault(split, []).append(f"    - {json.dumps(metric, ensure_ascii=False)}")
    if not measured:
        return []
    data = (results.get("config") or {}).get("data") or {}
    source, path = data.get("source"), data.get("path")
    # A data set of the hub by its name there, files by the name of their folder.
    kind = path if source == "hub" else Path(str(path)).name if path else source
    text = _without_folders(results.get("data", "not recorded"))
    lines = ["model-index:", f"- name: {json.dumps(name)}", "  results:"]
    for split, metrics in measured.items():
        dataset = {"type": str(kind or "unknown"), "name": text, "split": split}
        lines += [
            f"  - task: {json.dumps({'type': task})}",
            f"    dataset: {json.dumps(dataset, ensure_ascii=False)}",
            "    metrics:",
            *metrics,
        ]
    return lines


def _quoted(tag: str) -> str:
    return tag if re.fullmatch(r"[A-Za-z][\w-]*", tag) else json.dumps(tag)


def add_requirement(folder: Path, lines: Sequence[str], base: str | None = None) -> None:
    """Say in a folder's README.md what it needs to be loaded, right after the header, unless its author says it.

    A card without a header has it at the end. What was written here before is replaced.

    Args:
        lines: what it says, Markdown with `import hf_sparseprior` in it.
        base: name on the hub of the model that it was made from, for the header.
    """
    card = folder / CARD
    text = card.read_text(encoding="utf-8", errors="surrogateescape") if card.is_file() else ""
    block = "\n".join([BEGIN, "# hf_sparseprior", "", *lines, END, ""])
    if "import hf_sparseprior" in (others := _BLOCK.sub("", text)):
        return
    text = others or "---\nlibrary_name: transformers\n---\n"
    if header := re.match(r"---\n((?:.*\n)*?)---\n", text):
        keys, body = header[1], text[header.end() :].lstrip("\n")
        if base is not None and not re.search(r"^base_model:", keys, re.MULTILINE):
            keys += f"base_model: {base}\n"
        text = f"---\n{keys}---\n\n{block}" + (f"\n{body}" if body else "")
    else:
        text = f"{text.rstrip(chr(10))}\n\n{block}"
    write_bytes(card, text.encode(errors="surrogateescape"))


def add_adapter_requirement(folder: Path) -> None:
    """`add_requirement` for an adapter of peft whose method is ours or whose base model is."""
    add_requirement(folder, _ADAPTER)


def add_prior_requirement(
    folder: Path, config: Any, prior: str, class_name: str, source: str, auto_class: str | None
) -> None:
    """`add_requirement` for a model of others with a prior.

    Args:
        config: the model's. prior: its name. class_name, source: its class, and the module from which one imports it.
        auto_class: the Auto class that loads the folder by the code in it; None if there is no code in it.
    """
    base = hub_name(config.name_or_path)
    origin = "" if base is None else f" It was made from [{base}](https://huggingface.co/{base})."
    lines = [
        f"This {class_name} has the prior `{prior}`, with the settings of `sparse_prior` in config.json.{origin}",
        "",
    ]
    needs = "It needs the Python package hf_sparseprior, which is imported before it is loaded:"
    if auto_class is not None:
        lines += ["The code for it is in this folder:", "", *_python(_WITH_CODE.format(auto_class)), ""]
        needs = "Without `trust_remote_code` it needs the Python package hf_sparseprior, which is imported first:"
    lines += [needs, "", *_python(_WITH_PACKAGE.format(class_name, source))]
    add_requirement(folder, lines, base)


def _python(code: str) -> list[str]:
    return ["```python", code, "```"]


_ADAPTER = [
    "This adapter needs the Python package hf_sparseprior, which is imported before it is loaded:",
    "",
    "```python",
    "import hf_sparseprior  # first: without it peft raises KeyError",
    "import peft",
    "",
    'model = peft.PeftModel.from_pretrained(base_model, "PATH_OR_NAME_OF_THIS_ADAPTER")',
    "```",
]
_WITH_CODE = """\
from transformers import {0}

model = {0}.from_pretrained("PATH_OR_NAME_OF_THIS_MODEL", trust_remote_code=True)"""
_WITH_PACKAGE = """\
import hf_sparseprior
from {1} import {0}

model = {0}.from_pretrained("PATH_OR_NAME_OF_THIS_MODEL")"""


def _without_folders(text: Any) -> str:
    """A text in which absolute paths keep their last part alone. A card is read on other machines, by other people."""
    return re.sub(r"""(?<![^\s='"\[,:(])/(?:[^\s'"/,\])]+/)+(?=[^\s'"/,\])])""", "", str(text))


def _decoding(results: dict[str, Any]) -> list[str]:
    """How training decoded images, as far as the results say it."""
    exif = {"apply": "EXIF orientation applied", "ignore": "EXIF orientation ignored"}
    depth = {"scale": "16-bit images divided by 256"}
    texts = (exif.get(results.get("exif") or ""), depth.get(results.get("depth16") or ""))
    return [text for text in texts if text]


def _other_decoding(results: dict[str, Any]) -> list[str]:
    """How to hand images to a pipeline that decodes them in another way than training did."""
    lines: list[str] = []
    if results.get("exif") == "ignore":
        lines += [
            "Training ignored EXIF orientation, which pipelines apply. For images that have one:",
            "",
            "```python",
            'classify(Image.fromarray(np.asarray(Image.open("image.jpg").convert("RGB"))))',
            "```",
            "",
        ]
    if results.get("depth16") == "scale":
        lines += [
            "Training divided images of 16 bits by 256, where pipelines cut them off at 255. For such images:",
            "",
            "```python",
            'classify(Image.fromarray((np.asarray(Image.open("image.png")).clip(0, 65535) // 256).astype("uint8")))',
            "```",
            "",
        ]
    return lines


_CLASSIFY = (
    "from transformers import pipeline",
    'classify = pipeline("image-classification", model="PATH_OR_NAME_OF_THIS_MODEL", trust_remote_code=True)',
    'classify("image.png")',
)
# Decoding needs PyAV (pip install av).
_CLASSIFY_CLIPS = (
    "from transformers import pipeline",
    'classify = pipeline("video-classification", model="PATH_OR_NAME_OF_THIS_MODEL", trust_remote_code=True)',
    'classify("clip.mp4")',
)
_FEATURES = (
    "from transformers import AutoModel",
    'model = AutoModel.from_pretrained("PATH_OR_NAME_OF_THIS_MODEL", trust_remote_code=True)',
    "features = model(pixel_values).last_hidden_state",
)


def _pruned(config: Any) -> str:
    """What the pruning ratio is a percentage of (`prior.prior_pruning_ratio`)."""
    if all(prior["mixer"] == "softmax" for prior in config.layer_priors):
        return "query-key pairs left out"
    return "dense attention's multiply-adds over query-key pairs saved"


def _architecture(config: Any) -> str:
    return f"{FAMILIES[config.model_type].architecture}, {config.summary}"
