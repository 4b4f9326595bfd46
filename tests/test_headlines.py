"""The numbers of README's first table, worked out again from the records.

Each is a pattern of the table with the numbers as groups, and what they should be.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import hf_sparseprior as sp
from tasks.common.paired import Difference, differences

ROOT = Path(__file__).parents[1]
TABLE = "\n".join(
    line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")
)
BENCHMARK = ROOT / "tasks" / "benchmark" / "results"
CLASSIFICATION = ROOT / "tasks" / "classification" / "results"


def benchmark(name: str) -> dict:
    return json.loads((BENCHMARK / name).read_text())


def apart(folder: str, row: str, reference: str = "dense") -> Difference:
    """A row's difference to another one of its comparison."""
    runs = {
        name: [json.loads(file.read_text()) for file in sorted((CLASSIFICATION / folder / name).glob("seed*.json"))]
        for name in (row, reference)
    }
    return differences(runs, reference)[row]


def points(folder: str, row: str, reference: str = "dense", told: bool = True) -> str:
    """How far it is from it, without a sign; whether that is told is part of what README says."""
    found = apart(folder, row, reference)
    assert found.told is told
    return f"{abs(100 * found.mean):.1f}"


def attention_times(tokens: int) -> float:
    """How many times as fast as dense attention forward, with the default windows."""
    (size,) = (size for size in benchmark("cpu/float32_default_windows.json")["sizes"] if size["tokens"] == tokens)
    return 1 / size["passes"]["forward"]["contenders"]["cpp"]["times_dense_sdpa"]["median"]


def median_seconds(name: str, key: str, **wanted: object) -> dict[str, float]:
    """Median over rounds, by the entry's `key`."""
    found = defaultdict(list)
    for entry in benchmark(name)["measured"]:
        if all(entry.get(own) == value for own, value in wanted.items()) and "seconds" in entry:
            found[entry[key]].append(entry["seconds"])
    return {own: float(np.median(seconds)) for own, seconds in found.items()}


def paired_rounds(prior: str) -> dict[tuple[str, int], float]:
    """Median over rounds of a prior's time in dense's, by plain model and pixels: one image in one thread."""
    rounds = defaultdict(dict)
    for entry in benchmark("backbones/records.json")["measured"]:
        if entry["model"].startswith("vit") and "seconds" in entry:
            rounds[entry["model"], entry["pixels"], entry["round"]][entry["prior"]] = entry["seconds"]
    ratios = defaultdict(list)
    for (model, pixels, _), own in rounds.items():
        ratios[model, pixels].append(own[prior] / own["dense"])
    return {size: float(np.median(own)) for size, own in ratios.items()}


def against_openvino(pixels: int) -> float:
    seconds = median_seconds("rivals/records.json", "rival", model="vit_small", pixels=pixels, dtype="float32")
    return seconds["openvino"] / seconds["fibottention"]


def violin_over_dense(processor: str, passed: str, files: tuple[str, ...], pixels: int | None = None) -> float:
    """The most that VIOLIN's median time is above dense's, in percent, over the sizes of some records."""
    ratios = []
    for file in files:
        record = benchmark(f"cpu/{file}.json")
        assert processor in record["hardware"]["cpu"]
        for size in record["sizes"]:
            if pixels in (None, size["resolution"]):
                ratios.append(size["passes"][passed]["contenders"]["violin"]["times_dense"]["median"])
    return 100 * (max(ratios) - 1)


def violin_memory() -> float:
    found = defaultdict(dict)
    for entry in benchmark("backbones/records.json")["measured"]:
        if entry.get("memory"):
            found[entry["model"], entry["pixels"]].setdefault(entry["prior"], []).append(entry["memory"])
    ratios = [
        np.median(own["violin"]) / np.median(own["dense"]) for own in found.values() if {"violin", "dense"} <= {*own}
    ]
    return 100 * (max(ratios) - 1)


def sparsifiner_attention() -> tuple[float, float]:
    """Time and memory of prediction and attention over 196 patches at a keep rate of 0.25, in dense's."""
    entries = benchmark("cpu/predictor.json")["entries"]
    (entry,) = (e for e in entries if (e["tokens"], e["keep_rate"], e["pass"]) == (196, 0.25, "forward"))
    ours, dense = entry["contenders"]["prediction and attention"], entry["contenders"]["dense"]
    return ours["times_dense"]["median"], ours["memory"]["call"] / dense["memory"]["call"]


def exported_sparsifiner() -> tuple[float, float]:
    """The least and the most of dense's time, over programs and weights."""
    rows = [line.split("|") for line in (BENCHMARK / "deployment" / "table.md").read_text().splitlines()]
    rows = [[cell.strip() for cell in row] for row in rows if len(row) > 8 and row[1].strip() == "sparsifiner"]
    ratios = [float(row[7].split()[0]) / float(row[8].split()[0]) for row in rows]
    assert len(ratios) > 5
    return min(ratios), max(ratios)


def sparsifiner_parameters() -> list[str]:
    """Percent more than the dense model, of the two small models."""
    found = []
    for folder, dense, sparse in (
        ("sparsifiner_table2_small", "1.0", "0.2"),
        ("sparsifiner_table3_small", "1.0", "0.25"),
    ):
        counts = [
            json.loads((CLASSIFICATION / folder / row / "seed0.json").read_text())["parameters"]
            for row in (dense, sparse)
        ]
        found.append(f"{100 * (counts[1] / counts[0] - 1):.0f}")
    return found


def decay_of_published_start() -> float:
    """How far M gets from 1 at most, in fine-tuning from VIOLIN's published start."""
    files = [
        file
        for task in ("count", "fashion", "orientation", "position")
        for file in CLASSIFICATION.glob(f"evidence_{task}/*-violin/seed*.json")
    ]
    assert len(files) > 30
    return max(json.loads(file.read_text())["max_decay_change"] for file in files)


FAMILIES = ("families_swin", "upop_half", "upop_third", "families_convit")
HEADLINES: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "attention": (r"attention over 1024 patches \(512 pixels\) (\d+) times", lambda: [f"{attention_times(1024):.0f}"]),
    "whole model": (
        r"a ViT-S ([\d.]+) times at 1024 pixels",
        lambda: [f"{1 / paired_rounds('fibottention')['vit_small', 1024]:.1f}"],
    ),
    "OpenVINO": (r"\(([\d.]+) times OpenVINO, one round\)", lambda: [f"{against_openvino(1024):.1f}"]),
    "from scratch": (
        r"From scratch ([\d.]+) points below dense \(not told\), with larger batches ([\d.]+)",
        lambda: [points("fib_table2_paired", "fibottention", told=False), points("fib_batch", "fibottention")],
    ),
    "families": (
        r"Swin ([\d.]+), after pruning ([\d.]+) to ([\d.]+) \(told\); "
        r"ConViT with 4 heads ([\d.]+) above \(told\), with 12 ([\d.]+) \(not told\)",
        lambda: [
            *(points(folder, "fibottention") for folder in FAMILIES),
            points("families_convit_heads", "fibottention", told=False),
        ],
    ),
    "sparsifiner": (
        r"below dense: ([\d.]+) points at a keep rate of 0\.4 \(not told\), "
        r"([\d.]+) at 0\.9, ([\d.]+) at 0\.2 and ([\d.]+) at 0\.1",
        lambda: [
            points("sparsifiner_table2_small", rate, "1.0", told=rate != "0.4") for rate in ("0.4", "0.9", "0.2", "0.1")
        ],
    ),
    "parameters": (r"(\d+) to (\d+) % more parameters", sparsifiner_parameters),
    "prediction": (
        r"a rate of 0\.25 dense's speed, ([\d.]+) times its memory",
        lambda: [f"{sparsifiner_attention()[1]:.1f}"],
    ),
    "exported": (r"exported (\d+) to (\d+) times dense's time", lambda: [f"{n:.0f}" for n in exported_sparsifiner()]),
    "violin's time": (
        r"up to (\d+) % more time forward, (\d+) % in training",
        lambda: [
            f"{max(violin_over_dense('EPYC', 'forward', EPYC), 100 * max(paired_rounds('violin').values()) - 100):.0f}",
            f"{violin_over_dense('EPYC', 'training', EPYC):.0f}",
        ],
    ),
    "violin on a Xeon": (
        r"\(Intel Xeon, 512 pixels: (\d+), (\d+) %\)",
        lambda: [f"{violin_over_dense('Xeon', of, ('vit_small_violin',), 512):.0f}" for of in ("forward", "training")],
    ),
    "violin's memory": (r"; (\d+) % more memory", lambda: [f"{violin_memory():.0f}"]),
}
# Sizes, rates and what has a test of its own.
SETTINGS = (
    "at 224 hardly",
    "with 1,000 images of 32 pixels",
    "within 0.00001 of 1",
    "below 9 KB",
    "at 196 patches",
)
EPYC = ("batch1", "vit_base_violin", "vit_tiny_violin")


@pytest.mark.parametrize("name", HEADLINES)
def test_numbers_of_the_first_table_are_those_of_the_records(name):
    pattern, expected = HEADLINES[name]
    (found,) = re.findall(pattern, TABLE)
    assert list((found,) if isinstance(found, str) else found) == expected()


def test_what_the_first_table_says_in_words():
    assert "the decay stays within 0.00001 of 1" in TABLE and decay_of_published_start() < 1e-5
    assert "dense's speed" in TABLE and sparsifiner_attention()[0] == pytest.approx(1, abs=0.05)


def test_every_number_of_the_first_table_is_one_of_these():
    """But for sizes, rates and settings, which are no measurements."""
    rest = TABLE
    for pattern, _ in HEADLINES.values():
        rest = re.sub(pattern, lambda match: re.sub(r"[\d.]*\d", "", match.group()), rest)
    rest = re.sub(r"\]\([^)]*\)", "", rest)
    for setting in SETTINGS:
        assert setting in rest
        rest = rest.replace(setting, "")
    assert re.findall(r"\d[\d.,]*\d|\d", rest) == []


def test_the_adapter_of_a_vit_b_is_as_small_as_the_first_table_says(tmp_path):
    peft = pytest.importorskip("peft")
    base = sp.SparsePriorViTModel(sp.SparsePriorViTConfig.from_preset("vit_base", prior="dense"))
    model = peft.get_peft_model(base, sp.ViolinAdapterConfig())
    model.save_pretrained(tmp_path)
    size = (tmp_path / "adapter_model.safetensors").stat().st_size
    scalars = 12 * 12 * 9  # layers, heads, and eight curves and a temperature
    assert "an adapter below 9 KB (ViT-B)" in TABLE and 4 * scalars < size < 9000
