"""`gpu --quick` and `--models` without a GPU: their plan, going on, stopping by time and what the report says, with
calls that take no time. One check runs in Triton's interpreter."""

import itertools
import json
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_sparseprior.attention.functional import run_plan
from tasks.benchmark import commands, gpu, gpu_cells, gpu_models, gpu_quick, report, runner, timing
from tasks.benchmark.__main__ import main

ENTRIES = {"--quick": gpu_quick.BENCHMARK, "--models": gpu_models.BENCHMARK}
SECONDS = {"flex": 1e-3, "sdpa": 2e-3, "triton": 1.2e-3, "flash": 1e-3, "cudnn": 9e-4, "dense_sdpa": 1e-3, "dense": 1.0}
SECONDS |= {"fibottention": 0.5, "violin": 1.04, "fibottention+violin": 0.6}
SAVED = 5e-5  # seconds that a kernel takes less than its call
# What the report says of these times.
LINES = {
    "--quick": (
        "| time at most 1.25 times flash | violin 196 128 forward kernel triton | 1.21 | met |",  # 1.15 over 0.95
        "| time at most 1.3 times flash | violin, frozen 4096 8 forward and backward kernel triton | 1.21 | met |",
        "| at least 1 times as fast as flash | fibottention 196 128 forward kernel triton | 0.826 | MISSED |",
        "| a call takes at most 40 us more than its kernel | violin 1024 32 forward call triton | 50 | MISSED |",
        "at most 100 us more than its kernel | violin 1024 32 forward and backward call triton | 50 | met |",
        "| time at most 1.5 times dense_sdpa | fibottention 196 2 forward host triton | 1.2 | met |",
        "- same bits float32, 196 patches, violin, backward, two calls: 0 elements differ",
        "- check bfloat16, 1600 patches, dense, violin: 1.0e-06",
        # Times flash, times dense_sdpa (which is in the host's rows), MiB, of flash's, launches.
        "| violin | 4096 | 8 | forward | kernel | triton | 1.15 (1.15-1.15) | 2 | 1.21 (1.21-1.21) | - | 1.0 | 1.000 "
        "| 3 |",
    ),
    "--models": (
        "| at least 1.8 times as fast as dense | vit_small 1024 8 training step CUDA graphs fibottention | 2 | met |",
        "| at least 12 times as fast as dense | vit_small 4096 1 training step CUDA graphs fibottention | 2 | MISSED |",
        "| at least 1.44 times as fast as dense | vit_small 1024 8 training step eager fibottention | 2 | met |",
        "| time at most 1.05 times dense | vit_base 224 128 inference CUDA graphs violin | 1.04 | met |",
        # Two rounds with each of three priors, MiB, of dense's, images a second.
        "| vit_small | 1024 | 8 | training step | eager | dense | 1000 (1000-1000) | 6 | 1.00 (1.00-1.00) "
        "| 1.0 | 1.000 | 8 |",
    ),
}


class TimedCall:
    """A call of so many seconds."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self):
        pass


def cells_of(flag):
    return [[ENTRIES[flag].cell_of(case) for case in cases] for cases in ENTRIES[flag].cells()]


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Run a command and return its folder's records and table; a cell takes a minute of the runner's clock."""
    now = [0.0]

    def no_operator(contender, setting, size, trains):
        name = next(name for name, own in gpu.gpu_contenders().items() if own.about == contender.about)
        return lambda: TimedCall(SECONDS[name])

    def no_model(preset, prior, *rest):
        name = next((name for name, own in gpu_models.PRIORS.items() if own == prior), "dense")
        return lambda: TimedCall(SECONDS[name])

    def step_of(own):
        def step(self, cases, session):
            now[0] += 60
            return own(self, cases, session)

        return step

    timer = lambda call, calls, device: getattr(call, "seconds", 1.0)  # noqa: E731
    monkeypatch.setattr(report, "draw", lambda benchmark, rows, path, heading: path)  # which takes seconds
    for module in (runner, gpu_cells):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(timing, "seconds_per_call", timer)
    monkeypatch.setattr(timing, "traced_bytes", lambda function, device: (function(), (1 << 20, 0))[1])
    monkeypatch.setattr(gpu_quick, "host_seconds", timer)
    monkeypatch.setattr(gpu_quick, "graph_of", lambda call, device: (TimedCall(call.seconds - SAVED), 3))
    monkeypatch.setattr(gpu, "operator", no_operator)
    monkeypatch.setattr(gpu, "check", lambda tokens, dtype, device, **options: {"dense, violin": 1e-6})
    monkeypatch.setattr(gpu, "same_bits", lambda tokens, dtype, device: {"violin, backward, two calls": 0.0})
    monkeypatch.setattr(gpu_models, "model_call", no_model)
    for entry in (gpu_quick.Quick, gpu_models.Models):
        monkeypatch.setattr(entry, "step", step_of(entry.step))

    def run(flag, *options, status=0):
        few = ["--copy-bytes", "4096"] if flag == "--quick" else []
        command = ["gpu", flag, "--device", "cpu", "--rounds", "2", "--out", str(tmp_path), *few, *options]
        assert main(command) == status
        folders = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        return json.loads((folders[-1] / "records.json").read_text())["measured"], (
            folders[-1] / "table.md"
        ).read_text()

    return run


@pytest.mark.parametrize("flag", ENTRIES)
def test_a_command_stops_goes_on_in_order_and_reports(flag, measured, capsys):
    cells, entry = cells_of(flag), ENTRIES[flag]
    for begun in (4, 8):  # at 0, 1, 2 and 3 minutes
        records, table = measured(flag)
        reached = list(dict.fromkeys(entry.cell_of(own) for own in records))
        assert reached == list(dict.fromkeys(itertools.chain(*cells[:begun])))
        assert f"stopped at {begun + 1} of {len(cells)}; the same command goes on" in capsys.readouterr().out
        rest = dict.fromkeys(itertools.chain(*cells)).keys() - set(reached)
        assert rest and table.count("| not measured |") >= len(rest)
    records, table = measured(flag, "--minutes", "1000")
    assert {entry.cell_of(own) for own in records} == set(itertools.chain(*cells)) and "not measured" not in table
    assert all("failed" not in own for own in records)
    assert [line for line in LINES[flag] if line not in table] == []
    before = json.dumps(records)
    assert json.dumps(measured(flag)[0]) == before  # nothing is left


def test_other_sources_have_a_folder_of_their_own(measured, monkeypatch, tmp_path):
    measured("--models")
    monkeypatch.setattr(gpu_cells, "sources_hash", lambda: "changed")
    records, _ = measured("--models")
    assert len(list(tmp_path.iterdir())) == 2 and len(records) == len(list(itertools.chain(*cells_of("--models")[:4])))


def test_the_first_cells_are_those_of_targets():
    """Every target has its cells, and no cell without one comes before them."""
    for flag, entry in ENTRIES.items():
        named = [
            any(target.where.items() <= case.items() and case["contender"] in target.among
                for target in entry.targets({}) for case in cases)
            for cases in entry.cells() if not cases[0].get("part", "").startswith((gpu.CHECK, gpu.BITS, gpu.COPY))
        ]  # fmt: skip
        assert named == sorted(named, reverse=True), flag
        cases = list(itertools.chain(*entry.cells()))
        for target in entry.targets({}):
            matches = [case for case in cases if target.where.items() <= case.items()]
            assert {case["contender"] for case in matches} >= set(target.among), target
    assert cells_of("--models")[0] == [
        json.dumps(["vit_small", 1024, 8, "training step", "eager", name]) for name in ("dense", "fibottention")
    ]
    # What takes seconds comes before what is compiled.
    modes = [cases[0]["mode"] for cases in ENTRIES["--models"].cells()]
    assert modes[:4] == ["eager"] * 3 + ["CUDA graphs"]


def test_what_is_wrong_is_said_and_the_rest_is_timed(measured, monkeypatch):
    monkeypatch.setattr(gpu, "same_bits", lambda tokens, dtype, device: {"violin, backward, two calls": 7.0})
    records, table = measured("--quick", status=1)
    measured("--quick", status=1)  # what was wrong stays wrong
    wrong = [own for own in records if "failed" in own]
    assert wrong and all(own["part"].startswith(gpu.BITS) for own in wrong)
    assert "wrong: violin, backward, two calls: 7.0e+00, allowed 0e+00" in table and "7 elements differ" in table


def test_a_graph_that_cannot_be_captured_is_a_reason(measured, monkeypatch):
    def fails(call, device):
        raise RuntimeError("no graphs here")

    monkeypatch.setattr(gpu_quick, "graph_of", fails)
    records, _ = measured("--quick", "--minutes", "9")
    timed = [own for own in records if own["part"] == "violin"]
    assert {own["way"] for own in timed if "seconds" in own} == {"call"}
    assert {own["failed"] for own in timed if own["way"] == "kernel"} == {"RuntimeError: no graphs here"}


def test_a_cell_does_not_begin_if_one_like_it_took_longer_than_what_is_left(measured, monkeypatch, capsys):
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    for module in (runner, gpu_cells):
        monkeypatch.setattr(module, "time", clock)
    step = gpu_models.Models.step

    def longer(self, cases, session):
        now[0] += 10 if cases[0]["mode"] == gpu_models.EAGER else 90
        return step(self, cases, session)

    monkeypatch.setattr(gpu_models.Models, "step", longer)
    for begun in (5, 7):  # 30 s for three, 90 s for each of the rest; of 240
        records, _ = measured("--models")
        assert len({ENTRIES["--models"].cell_of(own) for own in records}) == 2 * begun
        assert f"stopped at {begun + 1} of" in capsys.readouterr().out
        now[0] = 0.0
    measured("--models", "--minutes", "0.1")  # too short for any: one is measured all the same
    assert "stopped at 9 of" in capsys.readouterr().out


def test_after_a_failure_that_spoils_the_device_a_new_process_goes_on(measured, monkeypatch, capsys):
    measure, lost = (
        gpu_quick.Quick.measure,
        gpu_quick.BENCHMARK.case("check bfloat16", 196, 2, gpu.BOTH, "call", "triton"),
    )

    def spoiled(self, cases, session):
        if cases == [lost]:
            return [{**lost, "failed": "wrong: AcceleratorError: illegal memory access", "device_lost": True}]
        return measure(self, cases, session)

    monkeypatch.setattr(gpu_quick.Quick, "measure", spoiled)
    records, _ = measured("--quick", status=1)
    assert [own["part"] for own in records] == ["check float32", "check bfloat16"]
    assert "the device cannot be used after 2 of" in capsys.readouterr().out
    records, table = measured("--quick", "--minutes", "1000", status=1)
    assert [own for own in records if "failed" in own] == [own for own in records if own.get("device_lost")] != []
    assert "illegal memory access" in table and "not measured" not in table


def test_a_cell_that_takes_the_process_with_it_is_given_up(measured, monkeypatch):
    step, begun = gpu_models.Models.step, []

    def killed(self, cases, session):
        begun.append(cases[0]["mode"])
        if len(begun) == 2 or begun[-1] != gpu_models.EAGER:
            raise SystemExit(137)
        return step(self, cases, session)

    monkeypatch.setattr(gpu_models.Models, "step", killed)
    for _ in range(2):  # the second eager cell once, and then the first compiled one
        with pytest.raises(SystemExit):
            measured("--models")
    assert begun == ["eager"] * 4 + ["CUDA graphs"]
    monkeypatch.setattr(gpu_models.Models, "step", step)
    records, _ = measured("--models", "--minutes", "1000")
    assert not [own for own in records if "failed" in own], "once is no reason"


def test_a_cell_that_never_ends_is_named(measured, monkeypatch):
    def killed(self, cases, session):
        raise SystemExit(137)

    step = gpu_models.Models.step
    monkeypatch.setattr(gpu_models.Models, "step", killed)
    for _ in range(2):
        with pytest.raises(SystemExit):
            measured("--models")
    monkeypatch.setattr(gpu_models.Models, "step", step)
    records, table = measured("--models", "--minutes", "1000")
    failed = [own for own in records if "failed" in own]
    assert [own["contender"] for own in failed] == [
        "dense",
        "fibottention",
    ] and "began 2 times and never ended" in table


def test_what_raises_leaves_its_reason_and_a_check_is_wrong_then(monkeypatch):
    session = SimpleNamespace(device=torch.device("cpu"))

    def raises(self, cases, session):
        raise ValueError("no memory left")

    monkeypatch.setattr(gpu_quick.Quick, "step", raises)
    cases = [
        next(iter(gpu_quick.BENCHMARK.cells()))[0],
        gpu_quick.BENCHMARK.case("violin", 196, 2, "forward", "call", "triton"),
    ]
    reasons = [gpu_quick.BENCHMARK.measure([case], session)[0]["failed"] for case in cases]
    assert reasons == ["wrong: ValueError: no memory left", "ValueError: no memory left"]
    assert [runner.is_wrong({"failed": reason}) for reason in reasons] == [True, False]


def test_cuda_graphs_that_torch_left_out_are_a_reason():
    counters = torch._dynamo.utils.counters["inductor"]

    def set_up():
        counters["cudagraph_skips"] += 2
        return lambda: None

    before = counters["cudagraph_skips"]
    try:
        with pytest.raises(RuntimeError, match="torch ran 2 of its graphs without CUDA graphs"):
            gpu_models.noting_peak(set_up, "dense", {})()
        gpu_models.noting_peak(lambda: lambda: None, "dense", {})()
    finally:
        counters["cudagraph_skips"] = before


def test_nan_is_said_where_a_folder_is_read_again():
    records = [{"part": "check float32", "tokens": 196, "checked": {"dense, violin": None, "zero": 1e-6}}]
    text = gpu_quick.BENCHMARK.notes([], records, {})
    assert "dense, violin: nan" in text and "zero: 1.0e-06" in text
    assert "check float32, dense, violin: nan" in gpu.BENCHMARK.notes([], records, {})


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_large_logits_are_within_the_bound_of_float32_in_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(gpu, "HEADS", 1)
    monkeypatch.setattr(gpu, "WIDTH", 16)
    torch.manual_seed(0)
    found = gpu.check(36, torch.float32, torch.device("cpu"), logits=gpu_quick.LARGE_LOGITS)
    assert len(found) == 4 and max(found.values()) < gpu_quick.LARGE_TOLERANCE


def test_flex_is_checked_against_the_reference(monkeypatch):
    """On a CPU its outputs alone, which have no gradients there."""
    monkeypatch.setattr(gpu, "HEADS", 2)
    asked = []

    def run(request, backend):
        asked.append(backend)
        return run_plan(request, backend="reference" if backend == "flex" else backend)

    monkeypatch.setattr(gpu, "run_plan", run)
    assert max(gpu.check(49, torch.float32, torch.device("cpu"), backend="flex").values()) < 1e-5
    assert asked == ["flex", "reference"] * len(gpu.FLEX_CASES)


@pytest.mark.parametrize("option", [["--tokens", "16"], ["--batch", "2"], ["--contenders", "triton"]])
def test_options_that_do_not_act_are_refused(option, capsys, tmp_path):
    for flag in ENTRIES:
        assert main(["gpu", flag, "--device", "cpu", "--out", str(tmp_path), *option]) == 2
        assert f"{' '.join(option)}: {flag} has cells of its own" in capsys.readouterr().err
    assert main(["gpu", "--quick", "--device", "cpu", "--minutes", "0", "--out", str(tmp_path)]) == 2
    assert "--minutes 0.0 must be above 0" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_bits_are_compared_not_values():
    a = torch.tensor([0.0, 1.0, float("nan"), 2.0])
    b = torch.tensor([-0.0, 1.0, float("nan"), 2.0000002])
    assert gpu.differing_elements(a, a) == 0 and gpu.differing_elements(a, b) == 2
    assert gpu.differing_elements(a.bfloat16().view(2, 2).t(), b.bfloat16().view(2, 2).t()) == 1


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_calls_have_the_same_bits_in_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(gpu, "HEADS", 1)
    monkeypatch.setattr(gpu, "WIDTH", 4)
    cases = {"neg_inf, violin": gpu.KERNEL_CASES["neg_inf, violin"]}
    monkeypatch.setattr(gpu, "KERNEL_CASES", cases)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = gpu.same_bits(4, torch.float32, device)
    assert {f"{name}, {key}, two calls" for name in cases for key in ("forward", "backward")} <= set(found)
    assert set(found.values()) == {0}


def test_a_contender_is_one_name(monkeypatch):
    """What another one needs: its name among those of the benchmark."""
    monkeypatch.setattr(gpu_quick, "QUICK_CONTENDERS", (*commands.QUICK_CONTENDERS, "flex"))
    assert all("flex" in {case["contender"] for case in cases}
               for cases in gpu_quick.BENCHMARK.cells() if cases[0]["way"] == "kernel")  # fmt: skip
    assert set(gpu_quick.FLEX_CONTENDERS) <= set(gpu.gpu_contenders())
    assert set(commands.QUICK_CONTENDERS) <= set(gpu.gpu_contenders())


def test_the_page_says_what_the_records_say():
    folder = Path(gpu.__file__).parent / "results" / "gpu"
    page = (Path(gpu.__file__).parents[2] / "docs" / "gpu.md").read_text()
    calls = json.loads((folder / "records.json").read_text())["rows"]
    kernels = json.loads((folder / "graphs.json").read_text())["kernels"]
    passes = ("forward", "forward+backward")
    ratios = {(number, own["tokens"], own["pass"]): own[f"times_faster_than_{base}"]
              for number, (rows, base) in enumerate(((kernels, "flash"), (calls, "dense"))) for own in rows
              if own["part"] == "fibottention" and own.get("contender", "triton") == "triton"}  # fmt: skip
    rows = re.findall(r"^\| ([\d,]+) x \d+ \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for tokens, cells in rows:
        for column, cell in enumerate(cells.split(" | ")):
            value = ratios.get((column // 2, int(tokens.replace(",", "")), passes[column % 2]))
            assert (cell == "-") if value is None else cell == f"{value:.3g}" or cell == f"{value:.2f}", (tokens, cell)
    # Between two sizes the ratio is a straight line in log-log; it is 1 at the crossover.
    for number, key, text in (
        (0, passes[0], "from 293 p"),
        (1, passes[0], "from 703 p"),
        (1, passes[1], "from 1,103 p"),
    ):
        place = float(re.sub(r"\D", "", text))
        known = sorted((size, value) for (table, size, of), value in ratios.items() if (table, of) == (number, key))
        sizes, values = np.log(np.array(known, dtype=float)).T
        assert text in page and abs(np.interp(np.log(place), sizes, values)) < 2e-3
