"""The numbers of README and of docs/choose.md, worked out again from the records."""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import hf_sparseprior as sp
from tasks.common.paired import differences
from tasks.common.records import read_records

ROOT = Path(__file__).parents[1]
CHOOSE = (ROOT / "docs" / "choose.md").read_text(encoding="utf-8")
README = re.sub(
    r"```.*?```|!\[[^\]]*\]|<img [^>]*>", "SNIPPET", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL
)
TEXT = README + CHOOSE
BENCHMARK = ROOT / "tasks" / "benchmark" / "results"
CLASSIFICATION = ROOT / "tasks" / "classification" / "results"


def benchmark(name: str) -> dict:
    return json.loads((BENCHMARK / name).read_text())


def points(folder: str, row: str, reference: str = "dense", significant: bool = True) -> str:
    """How far a row is from another one of its comparison, without a sign; it must be `significant` or not."""
    kept = read_records(CLASSIFICATION / folder)
    runs = {name: list(kept[name].values()) for name in (row, reference)}
    found = differences(runs, reference)[row]
    assert found.significant is significant
    return f"{abs(100 * found.mean):.1f}"


def half_widths(*comparisons: tuple[str, str]) -> list[float]:
    """Half of the interval of each row of comparisons (folder below tasks, metric), none of which is significant."""
    halves = []
    for folder, metric in comparisons:
        runs = {name: list(seeds.values()) for name, seeds in read_records(ROOT / "tasks" / folder).items()}
        rows = differences(runs, "dense", metric)
        assert not any(row.significant for row in rows.values())
        halves += [100 * row.half_width for row in rows.values()]
    return halves


def of_clips(attention: str) -> list[str]:
    """The least and the most of dense's time that a ViT-Ti takes with Fibottention, over clips of 8 frames and more."""
    rows = [line.split("|") for line in (BENCHMARK / "video" / "table.md").read_text().splitlines()]
    rows = [[cell.strip() for cell in row] for row in rows if f" {attention}/fibottention" in "|".join(row)]
    ratios = [float(row[6]) for row in rows if len(row) > 8 and row[6] != "-" and int(row[2]) >= 8]
    assert len(ratios) > 4
    return [f"{of(ratios):.2f}" for of in (min, max)]


def clips_learned() -> str:
    """Accuracy of dense divided attention on clips, in percent; no prior differs from it significantly."""
    folder = "video/results/motion_rendered"
    runs = {name: list(seeds.values()) for name, seeds in read_records(ROOT / "tasks" / folder).items()}
    found = differences(runs, "dense")
    assert not any(found[row].significant for row in ("bigbird", "wythoff", "wythoff-modified", "violin"))
    return f"{100 * np.mean([record['metrics']['test_accuracy'] for record in runs['dense']]):.0f}"


def paired_rounds(prior: str) -> dict[tuple[str, int], float]:
    """Median over rounds of a prior's time in dense's, by model and pixels: one image in one thread."""
    rounds = defaultdict(dict)
    for entry in benchmark("backbones/records.json")["measured"]:
        if "seconds" in entry:
            rounds[entry["model"], entry["pixels"], entry["round"]][entry["prior"]] = entry["seconds"]
    ratios = defaultdict(list)
    for (model, pixels, _), own in rounds.items():
        ratios[model, pixels].append(own[prior] / own["dense"])
    return {size: float(np.median(own)) for size, own in ratios.items()}


def against_openvino(pixels: int) -> float:
    wanted = {"model": "vit_small", "pixels": pixels, "dtype": "float32"}
    rows = [row for row in benchmark("rivals/records.json")["measured"] if wanted.items() <= row.items()]
    seconds = [[row["seconds"] for row in rows if row["rival"] == name] for name in ("openvino", "fibottention")]
    return float(np.median(seconds[0]) / np.median(seconds[1]))


def times(name: str, passed: str, contender: str, unit: str) -> list[float]:
    """Median times of a contender in those of dense attention, size by size."""
    return [
        size["passes"][passed]["contenders"][contender][unit]["median"] for size in benchmark(f"{name}.json")["sizes"]
    ]


def violin_over_dense(processor: str, passed: str, *files: str) -> float:
    """The most that VIOLIN's median time is above dense's, in percent, over the sizes of some records."""
    assert all(processor in benchmark(f"cpu/{file}.json")["hardware"]["cpu"] for file in files)
    return 100 * (max(max(times(f"cpu/{file}", passed, "violin", "times_dense")) for file in files) - 1)


def violin_on_epyc() -> tuple[float, float]:
    """The same on an EPYC, forward and in training; forward also of the backbones' images."""
    files = ("EPYC", "batch1", "vit_base_violin", "vit_tiny_violin")
    forward, training = (violin_over_dense(files[0], passed, *files[1:]) for passed in ("forward", "training"))
    plain = [ratio for (model, _), ratio in paired_rounds("violin").items() if model.startswith("vit")]
    return max(forward, 100 * max(plain) - 100), training


def violin_memory() -> float:
    found = defaultdict(dict)
    for entry in benchmark("backbones/records.json")["measured"]:
        if entry.get("memory"):
            found[entry["model"], entry["pixels"]].setdefault(entry["prior"], []).append(entry["memory"])
    return 100 * (max(np.median(own["violin"]) / np.median(own["dense"]) for own in found.values()) - 1)


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
    counts = []
    for number, rate in ((2, "0.2"), (3, "0.25")):
        kept = read_records(CLASSIFICATION / f"sparsifiner_table{number}_small")
        counts.append([kept[row][0]["parameters"] for row in ("1.0", rate)])
    return [f"{100 * (sparse / dense - 1):.0f}" for dense, sparse in counts]


def on_a_gpu(of: str, key: str, **wanted: object) -> list[float]:
    """Numbers of an H100 in CUDA graphs."""
    return [row[key] for row in benchmark("gpu/graphs.json")[of] if wanted.items() <= row.items()]


def on_canvases() -> list[str]:
    """How far Fibottention is above dense attention with patches of 8 and of 16 pixels, on canvases of 256."""
    folder = str(ROOT / "tasks" / "canvases" / "results" / "cpu" / "256_class")
    return [points(folder, f"{patch}-fibottention", patch) for patch in ("patch-x2", "patch-x4")]


FAMILIES = ("families_swin", "upop_half", "upop_third", "families_convit", "families_convit_heads")


def speed_on_a_gpu(passed: str, mode: str) -> float:
    """How many times as fast as dense attention a ViT-S with Fibottention is at 1024 pixels on an H100."""
    dense, ours = on_a_gpu("models", "ms", pixels=1024, **{"pass": passed, "mode": mode})
    return dense / ours


def swin_t() -> dict[int, float]:
    """Time of a Swin-T with Fibottention in dense's, by pixels."""
    times_dense = {
        pixels: ratio for (model, pixels), ratio in paired_rounds("fibottention").items() if model == "swin_tiny"
    }
    return {pixels: ratio for pixels, ratio in times_dense.items() if pixels >= 512}


def demo_runs() -> dict[str, list[dict]]:
    """What `make demo` trained, by prior; one run of each."""
    runs = {name: list(seeds.values()) for name, seeds in read_records(CLASSIFICATION / "demo").items()}
    assert all(len(of_one) == 1 for of_one in runs.values())
    return runs


def demo_cells() -> list[str]:
    """Accuracy and pairs of the README's rows of the demo, in percent."""
    rows = [(100 * run["metrics"]["test_accuracy"], 100 - run["pruning_ratio"]) for (run,) in demo_runs().values()]
    return [cell for accuracy, pairs in rows for cell in (f"{accuracy:.2f}", f"{pairs:.1f}")]


GRAPHS = ("inference", "training step")
FOUND = (
    *(("segmentation/results/" + folder, "test_mIoU") for folder in ("photographs_priors", "scenes_priors")),
    *(
        ("detection/results/" + folder, f"test_coco/{kind}_mAP")
        for folder in ("photographs_priors", "scenes_priors")
        for kind in ("bbox", "segm")
    ),
    ("heads/results/upernet_priors", "test_mIoU"),
)
# Patterns of the text with the numbers as groups, and what they should be.
HEADLINES: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "attention": (
        r"attention over 1024 patches \(512 pixels\) (\d+) times",  # the second size, with the default windows
        lambda: [f"{1 / times('cpu/float32_default_windows', 'forward', 'cpp', 'times_dense_sdpa')[1]:.0f}"],
    ),
    "whole model": (
        r"a ViT-S ([\d.]+) times at 1024 pixels",
        lambda: [f"{1 / paired_rounds('fibottention')['vit_small', 1024]:.1f}"],
    ),
    "OpenVINO": (r"\(([\d.]+) times OpenVINO, one round\)", lambda: [f"{against_openvino(1024):.1f}"]),
    "from scratch": (
        r"from scratch ([\d.]+) points below dense \(not significant\); ([\d.]+) with larger batches",
        lambda: [points("fib_table2_paired", "fibottention", significant=False), points("fib_batch", "fibottention")],
    ),
    "families": (
        r"([\d.]+) in Swin, ([\d.]+) to ([\d.]+) after pruning \(significant\); "
        r"in ConViT with 4 heads ([\d.]+) above \(significant\), with 12 heads ([\d.]+) \(not significant\)",
        lambda: [points(f, "fibottention", significant=f != "families_convit_heads") for f in FAMILIES],
    ),
    "sparsifiner": (
        r"below dense: ([\d.]+) points at a keep rate of 0\.4 \(not significant\), "
        r"([\d.]+) at 0\.9, ([\d.]+) at 0\.2 and ([\d.]+) at 0\.1",
        lambda: [
            points("sparsifiner_table2_small", rate, "1.0", significant=rate != "0.4")
            for rate in ("0.4", "0.9", "0.2", "0.1")
        ],
    ),
    "sparsifiner, keys as now": (
        r"with keys chosen as now, ([\d.]+) at 0\.1 \(not significant\)",
        lambda: [points("sparsifiner_published", "0.1", significant=False)],
    ),
    "parameters": (r"(\d+) to (\d+) % more parameters", sparsifiner_parameters),
    "prediction": (
        r"a rate of 0\.25 the speed of dense, ([\d.]+) times its memory",
        lambda: [f"{sparsifiner_attention()[1]:.1f}"],
    ),
    "exported": (
        r"exported models take (\d+) to (\d+) times as long",
        lambda: [f"{n:.0f}" for n in exported_sparsifiner()],
    ),
    "violin's time": (
        r"up to (\d+) % more time forward, (\d+) % in training",
        lambda: [f"{most:.0f}" for most in violin_on_epyc()],
    ),
    "violin on a Xeon": (
        r"\(Intel Xeon, 512 pixels: (\d+), (\d+) %\)",
        lambda: [f"{violin_over_dense('Xeon', of, 'vit_small_violin'):.0f}" for of in ("forward", "training")],
    ),
    "violin's memory": (r"; (\d+) % more memory", lambda: [f"{violin_memory():.0f}"]),
    "canvases, README": (
        r"is ([\d.]+) points more accurate with Fibottention\s+than with dense attention over patches of 8 "
        r"pixels, and ([\d.]+) over patches of 16, both significantly",
        on_canvases,
    ),
    "canvases": (
        r"([\d.]+) points above dense with patches of 8 pixels, ([\d.]+) with patches of 16 \(significant\)",
        on_canvases,
    ),
    "violin on a GPU": (
        r"VIOLIN's attention takes (\d) to (\d) times as long as\s+flash",
        lambda: [f"{of(on_a_gpu('kernels', 'times_flash', part='violin')):.0f}" for of in (min, max)],
    ),
    "a GPU's whole model": (
        r"on an H100: ([\d.]+) times as fast as flash attention forward, ([\d.]+) times in training",
        lambda: [f"{speed_on_a_gpu(passed, 'CUDA graphs'):.2f}" for passed in GRAPHS],
    ),
    "a GPU without graphs": (
        r"without CUDA graphs ([\d.]+) to ([\d.]+) times as fast",
        lambda: [
            f"{of(speed_on_a_gpu(passed, mode) for passed in GRAPHS for mode in ('eager', 'torch.compile')):.2f}"
            for of in (min, max)
        ],
    ),
    "the demo": (
        "".join(
            rf"\| {re.escape(prior)} \| ([\d.]+) \| ([\d.]+) \|\n"
            for prior in ("dense", "fibottention", "violin", "fibottention+violin")
        ),
        demo_cells,
    ),
    "the demo's photos": (
        r"trained on ([\d,]+) photos of ten classes",
        lambda: [f"{demo_runs()['dense'][0]['config']['data']['limit_train']:,}"],
    ),
    "more than dense": (
        r"`topk` ([\d.]+) points above dense, `linformer` ([\d.]+) \(significant\)",
        lambda: [points("fib_table2_paired", row) for row in ("topk", "linformer")],
    ),
    "violin from scratch": (
        r"`violin`: ([\d.]+) below \(not significant\), in a wider model ([\d.]+) \(significant\)",
        lambda: [
            points("vio_paired", "violin", significant=False),
            points("vio_paired", "violin-wide", "dense-wide"),
        ],
    ),
    "pixels": (
        r"([\d.]+) points above dense \(not significant\), ([\d.]+) where neither has a position embedding "
        r"\(significant\); digits of 8x8 pixels: ([\d.]+) \(significant\)",
        lambda: [
            points("pixels_paired", "fibottention", significant=False),
            points("pixels_paired", "fibottention-no-positions", "dense-no-positions"),
            points("digits", "fibottention"),
        ],
    ),
    "Swin": (
        r"a Swin-T takes ([\d.]+) to ([\d.]+) times as long as dense from (\d+) to (\d+) pixels",
        lambda: [
            *(f"{of(swin_t().values()):.2f}" for of in (min, max)),
            *(f"{of(swin_t())}" for of in (min, max)),
        ],
    ),
    "clips": (
        r"takes ([\d.]+) to ([\d.]+) of dense's time with divided attention, ([\d.]+) to ([\d.]+) with joint attention",
        lambda: [*of_clips("divided"), *of_clips("joint")],
    ),
    "clips, learned": (r"small models reach (\d+) %, no difference is significant", lambda: [clips_learned()]),
    "segmentation and detection": (
        r"none of (\d+) differences is significant; 95 % intervals reach (\d+) to (\d+) points",
        lambda: [
            f"{number:.0f}" for halves in [half_widths(*FOUND)] for number in (len(halves), min(halves), max(halves))
        ],
    ),
    "robots": (
        r"Lift: no difference is significant; 95 % intervals reach (\d+) to (\d+) points",
        lambda: [f"{of(half_widths(('robotics/results/table6_small/lift', 'test_success'))):.0f}" for of in (min, max)],
    ),
    "both priors": (
        r"a ViT is ([\d.]+) points less accurate with Fibottention and ([\d.]+) with\s+VIOLIN, neither significantly",
        lambda: [
            points(f"{of}_paired", row, significant=False)
            for of, row in (("fib_table2", "fibottention"), ("vio", "violin"))
        ],
    ),
}
# Sizes, rates and what has a test of its own.
SETTINGS = (
    *("at 224 hardly", "with 1,000 images of 32 pixels", "within 0.00001 of 1", "below 11 KB", "at 196 patches"),
    "Python 3.11, torch 2.10, transformers 5.21",  # tests/test_readme.py compares these
    *("95 % confidence interval over seeds excludes 0", "of 20 comparisons", "photos of 224 pixels", "16x16 pixels"),
    *("a ViT-S at 1024 pixels, in batches of 8", "CIFAR-10", "(clips of 8 frames and more)", "Fibottention's Table 2"),
    *("made images of 256 pixels", "with `w_max=65`"),
    *("less than 11 KB", "at 224 pixels priors save", "H100 GPU", "([H100", "float64", "Apache-2.0"),
)


@pytest.mark.parametrize("name", HEADLINES)
def test_numbers_are_those_of_the_records(name):
    pattern, expected = HEADLINES[name]
    (found,) = re.findall(pattern, TEXT)
    assert list((found,) if isinstance(found, str) else found) == expected()


def test_the_memory_of_large_images():
    """The table of docs/how-to/high-resolution.md, in MiB with the weights."""
    page = (ROOT / "docs" / "how-to" / "high-resolution.md").read_text(encoding="utf-8")
    lines = [re.split(r" *\| *", line)[1:5] for line in re.findall(r"^\| \d+ \|.*$", page, re.MULTILINE)]
    records = {(own["pixels"], own["pass"], own["prior"]): own for own in benchmark("memory/records.json")["measured"]}
    passes = ("forward", "training", "training, checkpointed")
    for pixels, *cells in lines:
        for passed, cell in zip(passes, cells, strict=True):
            own = records[int(pixels), passed, "fibottention"]
            if "failed" in own:
                assert cell == own["failed"].replace("more than", "does not fit into")
                continue
            assert cell == f"{(own['memory'] + own['weights']) / 2**20:.0f}"
            dense = records[int(pixels), passed, "dense"]
            assert "failed" in dense or abs(own["memory"] / dense["memory"] - 1) < 0.02
    assert len(lines) == 4 and "takes the same, to 2 %" in page


def test_what_the_first_table_says_in_words():
    tasks = ("count", "fashion", "orientation", "position")
    kept = [read_records(CLASSIFICATION / f"evidence_{task}") for task in tasks]
    rows = [runs for records in kept for row, runs in records.items() if row.endswith("-violin")]
    changes = [run["max_decay_change"] for runs in rows for run in runs.values()]
    assert "the decay stays within 0.00001 of 1" in CHOOSE and len(changes) > 30 and max(changes) < 1e-5
    assert "the speed of dense" in CHOOSE and sparsifiner_attention()[0] == pytest.approx(1, abs=0.05)


def test_every_number_is_one_of_these():
    """But for sizes, rates and settings, which are no measurements."""
    rest = TEXT
    for pattern, _ in HEADLINES.values():
        rest = re.sub(pattern, lambda match: re.sub(r"[\d.]*\d", "", match.group()), rest)
    rest = " ".join(re.sub(r"\]\([^)]*\)", "", rest).split())
    for setting in SETTINGS:
        assert setting in rest
        rest = rest.replace(setting, "")
    assert re.findall(r"\d[\d.,]*\d|\d", rest) == []


def test_the_time_of_large_images():
    """The second table of docs/how-to/high-resolution.md, in seconds."""
    page = (ROOT / "docs" / "how-to" / "high-resolution.md").read_text(encoding="utf-8")
    found = dict(re.findall(r"^\| (ViT-\w+, \d+) \| (.*) \|$", page, re.MULTILINE))
    seconds: dict[tuple[str, int, str], list[float]] = {}
    for own in benchmark("large_images/records.json")["measured"]:
        seconds.setdefault((own["model"], own["pixels"], own["prior"]), []).append(own["seconds"])
    titles = {"vit_tiny": "ViT-Ti", "vit_small": "ViT-S"}
    expected = {
        f"{titles[model]}, {pixels}": " | ".join(
            f"{np.median(seconds[model, pixels, prior]):.2f}" for prior in ("dense", "fibottention")
        )
        for model, pixels, _ in seconds
    }
    assert found == expected and len(found) == 4


def test_the_adapter_of_a_vit_b_is_as_small_as_the_first_table_says(tmp_path):
    peft = pytest.importorskip("peft")
    base = sp.SparsePriorViTModel(sp.SparsePriorViTConfig.from_preset("vit_base", prior="dense"))
    model = peft.get_peft_model(base, sp.ViolinAdapterConfig())
    model.save_pretrained(tmp_path)
    size = (tmp_path / "adapter_model.safetensors").stat().st_size
    scalars = 12 * 12 * 10  # layers, heads, and eight curves, a temperature and a gate
    assert "an adapter below 11 KB (ViT-B)" in CHOOSE and "less than 11 KB for a ViT-B" in README
    assert 4 * scalars < size < 11_000


def test_which_prior_has_ten_rows_each_with_a_record_and_a_paragraph_in_words():
    """Numbers stand in the table, where each has its record; titles of tables of a paper are no such numbers."""
    first, *paragraphs = re.split(r"^## ", CHOOSE, flags=re.MULTILINE)
    rows = [line.split(" | ") for line in first.splitlines() if line.startswith("| [")]
    assert 5 <= len(rows) <= 10 == len(paragraphs)
    anchors = [re.sub(r"[^\w\- ]", "", text.partition("\n")[0].lower()).replace(" ", "-") for text in paragraphs]
    assert [re.search(r"\(#([\w-]+)\)", row[0]).group(1) for row in rows] == anchors
    for row in rows:
        links = re.findall(r"\]\(([^)#]+)", row[-1])
        assert links and all(re.search(r"(RESULTS|results|table)\.md$", link) for link in links), row[0]
    prose = re.sub(r"\]\([^)]*\)|Fibottention's Table 2", "", "".join(paragraphs))
    assert re.findall(r".{20}\d.*", prose) == []


def test_at_most_twelve_numbers_stand_before_the_first_snippet():
    before = re.sub(r"\]\([^)]*\)|H100", "", README.partition("## Three ways")[0])
    assert 3 <= len(re.findall(r"\d[\d.,]*", before)) <= 12
