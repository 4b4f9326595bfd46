"""What works with what: `python -m tests.matrix [WAY ...]` runs every cell and writes docs/what-works.md.

A cell is a family, a kind of prior and a way of using it. What came out lies in docs/what-works.json with the versions;
it is written after each cell, so a run that was stopped goes on, and WAY does single columns anew. tests/test_matrix.py
draws some cells, which must come out as they are recorded.
"""

from __future__ import annotations

import copy
import json
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments
from transformers.utils import logging as transformers_logging

import hf_sparseprior as sp
from hf_sparseprior.adapters.lora import lora_config
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.base.files import write_text
from hf_sparseprior.cli.deployment import BACKENDS, trace
from hf_sparseprior.cli.exportable import Exportable
from hf_sparseprior.cli.runtimes import FORMATS
from hf_sparseprior.runs.tables import markdown_table
from tests.hf_sparseprior.small import noise, scatter, shipped_families, small
from tests.remote import check_remote_code

ROOT = Path(__file__).parents[1]
RECORD, PAGE = ROOT / "docs" / "what-works.json", ROOT / "docs" / "what-works.md"
GPU_RECORD = ROOT / "tasks" / "benchmark" / "results" / "gpu" / "graphs.json"
MARK = "<!-- made by python -m tests.matrix; what stands above is written by hand -->"
KINDS: dict[str, Any] = {
    "dense": "dense",
    "along diagonals": "fibottention",
    "over lists of keys": {"support": {"name": "window", "w": 1, "order": "hilbert"}},
    "decay": "violin",
    "both": "fibottention+violin",
    "keys chosen for each image": "sparsifiner",
    "mixer": "linformer",
    "positions within attention": "swin_rpb",
    "convolution within the MLP": "localvit",
    "token pruning": "evit",
}
CLIP = {"num_frames": 2}
SIDES = {"sparseprior_swin": 32, "sparseprior_iformer": 64}  # so that each layer has pairs to leave out; else 32


def model_of(family: str, kind: str, which: str = "classifier") -> Any:
    """A small model in evaluation mode whose every part matters."""
    torch.manual_seed(0)
    labels = {"num_labels": 2} if which == "classifier" else {}
    return scatter(getattr(FAMILIES[family], which)(config_of(family, kind, **labels)))


def config_of(family: str, kind: str, **options: Any) -> Any:
    """A small config."""
    clips = CLIP if FAMILIES[family].takes == "clips" else {}
    return small(family, prior=KINDS[kind], image_size=SIDES.get(family, 32), **clips, **options)


def images_of(model: Any, count: int = 2) -> Tensor:
    """Images or clips of its size."""
    config = model.config
    frames = [config.num_frames] if FAMILIES[config.model_type].takes == "clips" else []
    return noise(count, *frames, 3, config.image_size, config.image_size)


# ---- ways: each raises where it does not work -----------------------------------------------------------------------


def in_trainer(family: str, kind: str, folder: Path) -> None:
    """Two steps in transformers' Trainer change the weights."""
    model = model_of(family, kind)
    before = copy.deepcopy(model.state_dict())
    samples = [{"pixel_values": image, "labels": number % 2} for number, image in enumerate(images_of(model, 4))]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=2, use_cpu=True, save_strategy="no",
        report_to="none", disable_tqdm=True, learning_rate=0.1, logging_steps=1, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=samples)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses and all(map(np.isfinite, losses)), losses
    assert any(not value.equal(before[name]) for name, value in model.state_dict().items())


def with_lora(family: str, kind: str, folder: Path) -> None:
    """LoRA gets gradients, and merged the model gives the same."""
    model = model_of(family, kind)
    adapted = peft.get_peft_model(model, lora_config(model, r=2, init_lora_weights=False)).eval()
    pixels = images_of(model)
    check_gradients(adapted, pixels, "lora_")
    with torch.no_grad():
        before = adapted(pixel_values=pixels).logits
        after = adapted.merge_and_unload()(pixel_values=pixels).logits
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)


def with_violin(family: str, kind: str, folder: Path) -> None:
    """A decay as an adapter gets gradients, and leaves the model as it was at first."""
    model = model_of(family, kind)
    pixels = images_of(model)
    with torch.no_grad():
        before = model(pixel_values=pixels).logits
    adapted = peft.get_peft_model(model, sp.ViolinAdapterConfig()).eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(pixel_values=pixels).logits, before, rtol=1e-4, atol=1e-4)
    check_gradients(adapted, pixels, "")


def check_gradients(model: Any, pixels: Tensor, names: str) -> None:
    """What is trained has gradients, some of them other than 0."""
    model(pixel_values=pixels, labels=torch.tensor([0, 1])).loss.backward()
    trained = {name: own for name, own in model.named_parameters() if own.requires_grad and names in name}
    assert trained, "nothing is trained"
    assert any(own.grad is not None and own.grad.abs().max() > 0 for own in trained.values()), "no gradient"


def compiled(family: str, kind: str, folder: Path) -> None:
    """One graph gives what the model gives."""
    model = model_of(family, kind)
    pixels = images_of(model)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = model(pixel_values=pixels).logits
        found = torch.compile(model, fullgraph=True)(pixel_values=pixels).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def exported(name: str) -> Callable[[str, str, Path], None]:
    """A file of one format gives what the model gives, for one image and for three."""

    def way(family: str, kind: str, folder: Path) -> None:
        model = model_of(family, kind)
        traced = trace(Exportable(model), BACKENDS[0])
        FORMATS[name].write(traced.program, traced.outputs, folder)
        call = FORMATS[name].load(folder / FORMATS[name].file, 1)
        for count in (1, 3):
            pixels = images_of(model, count)
            with torch.no_grad():
                expected = model(pixel_values=pixels).logits
            np.testing.assert_allclose(call(pixels)[0], expected, rtol=1e-3, atol=1e-3)

    return way


def of_several_sizes(family: str, kind: str, folder: Path) -> None:
    """Images of two sizes in one call are what they are alone."""
    model = model_of(family, kind)
    if FAMILIES[family].takes == "clips":
        raise ValueError("clips have one size")
    side = model.config.image_size
    images = [noise(3, side, side), noise(3, side, 2 * side)]
    with torch.no_grad():
        found = model(pixel_values=images).logits
        alone = [model(pixel_values=image[None], interpolate_pos_encoding=True).logits[0] for image in images]
    torch.testing.assert_close(found, torch.stack(alone), rtol=1e-3, atol=1e-3)


def in_mm(family: str, kind: str, folder: Path) -> None:
    """The backbone that mm builds gives the feature maps of ours."""
    from mmseg.registry import MODELS

    import hf_sparseprior.mm  # noqa: F401

    if FAMILIES[family].backbone is None:
        raise ValueError("the family has no backbone")
    model = model_of(family, kind, "backbone")
    name = FAMILIES[family].backbone.__name__.removesuffix("Backbone")
    settings = config_of(family, kind).to_diff_dict()
    fields = {key: value for key, value in settings.items() if key in FAMILIES[family].config_fields}
    built = MODELS.build({"type": name, **fields}).eval()
    built.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        maps, expected = built(images_of(model)), model(images_of(model)).feature_maps
    torch.testing.assert_close(maps[-1], expected[-1], rtol=1e-3, atol=1e-3)


def as_remote_code(family: str, kind: str, folder: Path) -> None:
    """A process without this package loads it from the code that is saved with it."""
    model = model_of(family, kind)
    check_remote_code({"model": (model, images_of(model))}, folder)


@dataclass(frozen=True)
class Way:
    """A column. title: of the page. run: (family, kind, an empty folder), raises where it does not work. compiles:
    takes too long for `make test`.
    """

    title: str
    run: Callable[[str, str, Path], None]
    compiles: bool = False


WAYS = {
    "trainer": Way("Trainer", in_trainer),
    "lora": Way("LoRA", with_lora),
    "violin": Way("VIOLIN adapter", with_violin),
    "compile": Way("torch.compile", compiled, True),
    "onnx": Way("ONNX Runtime", exported("onnx")),
    "openvino": Way("OpenVINO", exported("openvino")),
    "aoti": Way("AOTInductor", exported("aoti"), True),
    "sizes": Way("mixed sizes", of_several_sizes),
    "mm": Way("mm backbone", in_mm),
    "remote": Way("remote code", as_remote_code, True),
}
# Beginnings of reasons, in at most six words.
SHORT = {
    "has a decay of its own": "it has a decay already",
    "drops tokens": "it drops tokens",
    "has the mixer": "a mixer has no pairs",
    "for values as wide as queries": "its values are wider than queries",
    "is for a whole image": "attention runs within windows",
    "is part of a": "it is part of the model",
    "clips have one size": "clips have one size",
    "the family has no backbone": "the family has no backbone",
    "pixel_values of list": "one size a batch",
}


def outcome(family: str, kind: str, way: str) -> str:
    """ "yes", or the first line of the error."""
    with tempfile.TemporaryDirectory() as folder, quiet():
        try:
            WAYS[way].run(family, kind, Path(folder))
        except Exception as error:
            return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:400]
    return "yes"


@contextmanager
def quiet() -> Any:
    """Without progress and warnings of others."""
    transformers_logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def reason(found: str) -> str:
    """An error in at most six words."""
    for text, words in SHORT.items():
        if text in found:
            return words
    return " ".join(found.partition(": ")[2].split()[:6])


def cells() -> list[tuple[str, str, str]]:
    """All (family, kind, way)."""
    return [(family, kind, way) for way in WAYS for family in shipped_families() for kind in KINDS]


def key(family: str, kind: str, way: str) -> str:
    """A cell's name in the record."""
    return f"{family}, {kind}, {way}"


def page(record: dict[str, Any]) -> str:
    """docs/what-works.md: what stands there by hand, and the tables of the record."""
    found, versions = record["cells"], record["versions"]
    parts = [
        PAGE.read_text(encoding="utf-8").partition(MARK)[0] + MARK,
        "## What goes together",
        "Each cell was run, with models of a few thousand weights, by `python -m tests.matrix`: training in "
        "transformers' Trainer changes the weights, adapters get gradients and merge, what is compiled, exported or "
        "loaded gives what the model gives. A cell that is not *yes* has the reason. What was not run is *untried*.",
        f"Versions: {', '.join(f'{name} {number}' for name, number in versions.items())}.",
    ]
    for family in shipped_families():
        rows = []
        for kind in KINDS:
            answers = [found.get(key(family, kind, way), "untried") for way in WAYS]
            gpu = "yes" if (family, KINDS[kind]) in on_gpu() else "untried"
            rows.append([kind, *(own if own in ("yes", "untried") else f"no: {reason(own)}" for own in answers), gpu])
        parts += [
            f"### {FAMILIES[family].title}",
            markdown_table(["prior", *(way.title for way in WAYS.values()), "GPU, as recorded"], rows),
        ]
    names = ", ".join(
        f"{kind}: `{prior if isinstance(prior, str) else json.dumps(prior)}`" for kind, prior in KINDS.items()
    )
    parts.append(f"The priors that were run are {names}.")
    parts.append(
        "*GPU, as recorded*: models of [the record of an H100](../tasks/benchmark/RESULTS.md#on-an-h100), which ran "
        "and did training steps there in bfloat16. Nothing else was run on a GPU."
    )
    return "\n\n".join(parts) + "\n"


def on_gpu() -> list[tuple[str, str]]:
    """Families and priors of the models that the record of a GPU has."""
    return [("sparseprior_vit", own["prior"]) for own in json.loads(GPU_RECORD.read_text())["models"]]


def recorded() -> dict[str, Any]:
    """The record."""
    return json.loads(RECORD.read_text()) if RECORD.is_file() else {"cells": {}}


def write(record: dict[str, Any]) -> None:
    """Record and page."""
    write_text(RECORD, json.dumps(record, indent=1) + "\n")
    write_text(PAGE, page(record))


def main(argv: Sequence[str]) -> int:
    """Run what has no record yet, and what is named."""
    if unknown := [name for name in argv if name not in WAYS]:
        print(f"{unknown[0]} must be one of {', '.join(WAYS)}", file=sys.stderr)
        return 2
    record = recorded()
    installed = {name: version(name) for name in VERSIONS if find_spec(name.removeprefix("onedl_"))}
    record["versions"] = {"python": platform.python_version(), **installed}
    wanted = [cell for cell in cells() if cell[2] in argv or (not argv and key(*cell) not in record["cells"])]
    for number, cell in enumerate(wanted, 1):
        record["cells"][key(*cell)] = found = outcome(*cell)
        print(f"[{number}/{len(wanted)}] {key(*cell)}: {found}", flush=True)
        write(record)
    write(record)
    return 0


VERSIONS = ("torch", "transformers", "peft", "onnxruntime", "openvino", "onedl_mmcv", "onedl_mmengine")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
