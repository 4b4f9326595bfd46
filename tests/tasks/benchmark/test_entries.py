"""What entries compute besides what all of them do: checks of outputs, forecasts, draws, laws."""

import dataclasses
import json
import math
import time
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from hf_sparseprior.attention.choice import BACKENDS, register_backend, unregister_backend
from hf_sparseprior.attention.dense import reference
from hf_sparseprior.attention.packing import Packing
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.patterns.supports import LayerKey
from tasks.benchmark import (
    attention,
    backbones,
    chooser,
    commands,
    memory,
    mixed_sizes,
    overhead,
    predicted,
    predictor,
    report,
    video,
)
from tasks.benchmark.__main__ import main
from tasks.benchmark.contenders import COPY, DENSE

TINY = ["--device", "cpu", "--threads", "1", "--rounds", "2", "--seconds", "0.2"]
SMALL = ["--heads", "2", "--width", "8", *TINY]


@pytest.fixture(autouse=True)
def no_forced_backend(monkeypatch):
    monkeypatch.delenv("SPARSEPRIOR_BACKEND", raising=False)


def measured(out):
    return json.loads((out / "records.json").read_text())["measured"]


# ---- attention ------------------------------------------------------------------------------------------------------


def test_a_wrong_backend_is_not_timed_and_fails(tmp_path, monkeypatch):
    right = BACKENDS["diagonal"]
    wrong = dataclasses.replace(right, run=lambda call: (2 * right.run(call)[0], None))
    monkeypatch.setitem(BACKENDS, "diagonal", wrong)
    command = ["attention", "--sizes", "9x2", *SMALL, "--contenders", "diagonal,reference", "--out", str(tmp_path)]
    assert main(command) == 1
    assert "WRONG: the output differs" in (tmp_path / "table.md").read_text()
    assert {own["contender"] for own in measured(tmp_path) if "seconds" in own} == {"reference"}


def test_what_would_be_too_much_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(attention, "PROBES", (8, 12, 16))
    monkeypatch.setattr(attention, "free_memory", lambda device: 300_000)
    command = ["attention", "--sizes", "256x1", *SMALL, "--seconds", "60", "--rounds", "1", "--out", str(tmp_path)]
    command += ["--contenders", "reference,diagonal"]
    assert main(command) == 0
    found = {own["contender"]: own for own in measured(tmp_path) if own["pass"] == attention.FORWARD}
    assert found["reference"]["failed"].startswith("would need about")
    assert "would need about" in (tmp_path / "table.md").read_text()


def test_memory_alone_and_what_is_kept_of_it(tmp_path):
    command = ["attention", "--sizes", "25x1", *SMALL, "--rounds", "0", "--contenders", f"{DENSE},diagonal,{COPY}"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    for own in measured(tmp_path):
        assert "seconds" not in own and own["memory"] >= own["kept"] >= 0 and own["inputs"] == 4 * 2 * 25 * 8 * 4
    targets = (tmp_path / "table.md").read_text().partition("| target |")[2]
    assert "| 25 1 forward and backward diagonal |" in targets and "times as fast" not in targets


def rows_of(sizes, laws, key=attention.FORWARD):
    made = [{"tokens": size, "batch": 1, "pass": key, "contender": name, "seconds": [law(size)], "inputs": 1}
            for size in sizes for name, law in laws.items()]  # fmt: skip
    return report.summary(attention.BENCHMARK, made)


def test_targets_of_speed_are_for_the_default_attention_and_its_fastest_backend():
    rows = rows_of(
        [4096], {DENSE: lambda n: 2.5, COPY: lambda n: 0.002, "reference": lambda n: 9.0, "cpp": lambda n: 0.01}
    )
    settings = {**attention.DEFAULT, "device": "cpu", "dtype": "float32"}
    text = report.targets_text(attention.BENCHMARK, rows, settings)
    assert "| at least 200 times as fast as dense_sdpa | 4096 1 forward cpp | 250 | met |" in text
    assert "| time at most 4 times copy_bound | 4096 1 forward cpp | 5 | MISSED |" in text and "not measured" in text
    for other in ({"decay": "violin"}, {"width": 32}, {"prefix_tokens": 1}, {"dtype": "bfloat16"}):
        assert "times as fast" not in report.targets_text(attention.BENCHMARK, rows, {**settings, **other})
    parser = commands.benchmark()
    assert attention.DEFAULT.items() <= vars(parser.parse_args(["attention"])).items()


def test_growth_exponents_are_those_of_the_times():
    sizes = [size.tokens for size in attention.GROWTH_SIZES]
    rows = rows_of(sizes, {DENSE: lambda n: 1.0, "diagonal": lambda n: 1e-6 * n**1.3})
    fits = {fit["contender"]: fit for fit in attention.growth_fits(rows)}
    assert fits["diagonal"]["exponent"] == pytest.approx(1.3) and fits[DENSE]["exponent"] == pytest.approx(0, abs=1e-9)
    # d log(N log N) / d log N = 1 + 1 / log N, between its values at both ends.
    assert 1 + 1 / 11.1 < fits["diagonal"]["n_log_n"] < 1 + 1 / 8.3
    assert "time grows as N^1.30 from 4096 to 65536 tokens" in attention.BENCHMARK.notes(rows, [], {})


# ---- chooser, predicted, predictor ----------------------------------------------------------------------------------


def test_settings_are_always_the_same_and_of_every_kind():
    drawn = chooser.draw_settings(60, 0)
    assert drawn == chooser.draw_settings(60, 0) and drawn[:30] == chooser.draw_settings(30, 0)
    assert drawn[:30] != chooser.draw_settings(30, 1)
    for key, values in (("dtype", 2), ("trains", 2), ("decay", 2), ("heads", 3), ("prefix", 2)):
        assert len({setting[key] for setting in drawn}) == values
    assert {json.dumps(setting["support"]) for setting in drawn} == {json.dumps(own) for own in chooser.SUPPORTS}
    assert all(setting["support"] != "dense" or setting["decay"] for setting in drawn)


def test_a_bad_choice_shows(monkeypatch, tmp_path):
    def slow(request):
        for _ in range(20):
            found = reference(request)
        return found

    monkeypatch.setattr(chooser, "TOKENS", (9, 16))
    register_backend("toy_slow", can_run=lambda request: None, run=slow, priority=1000)
    try:
        assert main(["chooser", "--settings", "2", *TINY, "--out", str(tmp_path)]) == 0
    finally:
        unregister_backend("toy_slow")
    for record in measured(tmp_path):
        assert record["chosen"] == "toy_slow" and record["slower"] > chooser.ALLOWED
        assert record["best"] in record["milliseconds"] and record["best"] != "toy_slow"
    assert "0 of 2 choices" in (tmp_path / "table.md").read_text()


def test_predicted_and_measured_stand_side_by_side(tmp_path):
    assert main(["predicted", "--models", "vit_tiny dense 32x1", *TINY, "--out", str(tmp_path)]) == 0
    for own in measured(tmp_path):
        assert own["error"] == pytest.approx(100 * (own["predicted"] / own["measured"] - 1))
        assert abs(own["error_bytes"]) < 2
    models = [predicted.parse_model(text) for text in commands.PREDICTED_MODELS]
    assert len(models) == 5 and len({own["prior"] for own in models}) == 5
    assert {own["preset"].partition("_")[0] for own in models} == {"vit", "swin", "convit"}


def test_a_way_that_cannot_run_is_left_out_with_the_reason(tmp_path):
    command = ["predictor", "--sizes", "3x1", "--keep-rates", "0.5", "--dtype", "float64", *SMALL]
    assert main([*command, "--out", str(tmp_path)]) == 0
    for own in measured(tmp_path):
        assert ("failed" in own) == (own["contender"] == predictor.COMPILED)


# ---- video ----------------------------------------------------------------------------------------------------------


def test_predictions_follow_the_shorter_clips():
    """Of a call that takes 0.3 + 0.05 F^2 seconds and 0.1 + 0.03 F^2 GiB."""
    kept = [
        {"row": "joint/dense", "pixels": 32, "frames": n, "round": 0, "seconds": 0.3 + 0.05 * n**2,
         "memory": int((0.1 + 0.03 * n**2) * 2**30)}
        for n in video.PROBES
    ]  # fmt: skip
    case = {"row": "joint/dense", "pixels": 32, "frames": 10, "round": 0}
    limits = Namespace(memory_gib=3.0, seconds=7.0)
    assert video.predicted_cost(kept, {**case, "frames": 4}) is None  # two shorter ones are too few
    ten, thirty = (video.predicted_cost(kept, {**case, "frames": n}) for n in (10, 30))
    assert ten == pytest.approx({"seconds": 5.3, "gib": 3.1}, rel=1e-3)
    session = Namespace(records=kept, arguments=limits, alone=lambda *_: pytest.fail("begun"))
    (refused,) = video.BENCHMARK.measure([case], session)
    assert refused["failed"] == "does not run: needs 3.1 GiB, 3 are allowed" and refused["limit_bytes"] == 3 * 2**30
    late = video.too_much({"seconds": thirty["seconds"], "gib": 1.0}, limits)
    assert late["failed"].startswith("not run: would take 45 s") and late["limit_seconds"] == 7.0
    assert video.too_much(None, limits) is None and video.too_much({"seconds": 6.9, "gib": 2.9}, limits) is None
    # Of a long call there is one, and no second process for it.
    long = {**case, "seconds": video.LONG + 1, "memory": 1}
    assert video.BENCHMARK.measure([{**case, "round": 1}], Namespace(**{**vars(session), "records": [long]})) == []


@pytest.mark.slow
def test_memory_of_dense_attention_written_out_is_its_matrix():
    """transformers' own class makes (heads, T, T) twice at a time: the logits and their softmax."""
    settings = {"preset": "vit_tiny", "dtype": "float32", "threads": 1, "keep_memory": False}
    case, tokens = {"frames": 24, "pixels": 112}, 1 + 24 * 49
    stock, fused = (video.measure_clip({**case, "row": f"joint/{row}"}, settings) for row in ("transformers", "dense"))
    matrix = 4 * 3 * tokens**2
    assert 2 * matrix < stock["call"] < 2.6 * matrix and fused["call"] < matrix
    assert stock["ran"] == "transformers" and stock["memory"] > stock["call"] + stock["weights"]


# ---- backbones ------------------------------------------------------------------------------------------------------

SETTINGS = {"dtype": "float32", "device": "cpu", "threads": 1, "keep_memory": False}
CASE = {"model": "vit_tiny", "prior": "dense", "pixels": 32, "round": 0}


def test_a_measurement_names_its_backend_and_leaves_this_process_alone():
    threads = torch.get_num_threads()
    found = backbones.measure_backbone(
        {**CASE, "prior": "fibottention", "pixels": 64}, {**SETTINGS, "threads": threads}
    )
    assert found["ran"] in ("cpp", "diagonal", "gather", "sdpa") and found["seconds"] > 0 and found["calls"] >= 1
    from hf_sparseprior import SparsePriorViTBackbone, SparsePriorViTConfig

    model = SparsePriorViTBackbone(SparsePriorViTConfig.from_preset("vit_tiny", image_size=64))
    assert found["weights"] == sum(value.numel() * 4 for value in model.parameters())
    assert torch.get_num_threads() == threads


class Allocates(torch.nn.Module):
    """Takes 10 MiB and keeps 3 of them in its first call, takes 5 MiB in each later one, and gives 1 MiB back."""

    def __init__(self, config):
        super().__init__()
        self.table = None

    def forward(self, pixel_values):
        if self.table is None:
            spare, self.table = torch.ones(7 << 20, dtype=torch.uint8), torch.ones(3 << 20, dtype=torch.uint8)
        else:
            spare = torch.ones(4 << 20, dtype=torch.uint8)
        return SimpleNamespace(feature_maps=torch.ones(1 << 20, dtype=torch.uint8) * spare[0])


def test_memory_is_that_of_tables_and_a_call(monkeypatch):
    monkeypatch.setattr(backbones, "preset_family", lambda name: SimpleNamespace(backbone=Allocates))
    found = backbones.measure_backbone(CASE, {**SETTINGS, "threads": torch.get_num_threads()})
    # The product has its factor of 1 MiB beside it.
    assert (found["memory"], found["set_up"]) == ((3 + 4 + 2) << 20, (7 + 3 + 2) << 20)
    assert found["weights"] == 0 and found["calls"] > 1 and found["ran"] == ""


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_memory_of_a_step_holds_the_moments_and_gradients_and_less_of_the_layers_with_checkpointing():
    settings = {**SETTINGS, "threads": torch.get_num_threads()}
    case = {"model": "vit_tiny", "prior": "fibottention", "pixels": 320}
    forward, training, checkpointed = (memory.measure_pass({**case, "pass": key}, settings) for key in memory.PASSES)
    assert all("seconds" not in own and own["weights"] == forward["weights"] for own in (training, checkpointed))
    assert forward["memory"] < checkpointed["memory"] < training["memory"]
    assert checkpointed["memory"] > 3 * forward["weights"]  # AdamW's two moments, and gradients


# ---- mixed_sizes, overhead ------------------------------------------------------------------------------------------


def test_grids_are_those_asked_for():
    draw = mixed_sizes.draw_grids
    shapes, scales = (draw(kind, 500, 400, 0) for kind in commands.KINDS)
    assert all(height * width <= 400 for height, width in shapes)
    ratios = [height / width for height, width in shapes]
    assert 0.45 < min(ratios) < 0.6 and 1.7 < max(ratios) < 2.2
    assert 0.9 < math.exp(sum(map(math.log, ratios)) / 500) < 1.1
    assert all(height == width for height, width in scales)
    assert min(scales)[0] == 7 and max(scales)[0] == 20  # 49 and 400 patches
    assert draw("shapes", 5, 400, 1) == draw("shapes", 5, 400, 1) != draw("shapes", 5, 400, 2)


def test_other_logits_are_not_timed(monkeypatch):
    config = mixed_sizes.preset_config("vit_tiny", 32, "fibottention")
    model = mixed_sizes.preset_family("vit_tiny").classifier(config).eval()
    images = [torch.randn(3, 32, 16), torch.randn(3, 16, 48)]
    assert mixed_sizes.check_equal(model, images) < 1e-4
    mixed = Packing.in_batch_order
    monkeypatch.setattr(Packing, "in_batch_order", lambda self, parts: mixed(self, parts).flip(0))
    with pytest.raises(ValueError, match="packed images differ by"):
        mixed_sizes.check_equal(model, images)


def test_only_plans_and_tables_count(monkeypatch):
    own_init, own_build = AttentionPlan.__init__, AttentionPlan.build_table

    def slow(plan, name):
        time.sleep(0.02)
        return own_build(plan, name)

    monkeypatch.setattr(AttentionPlan, "build_table", slow)
    with overhead.timed_plans() as spent:
        time.sleep(0.05)
        support = {"name": "fibottention", "w_min": 2, "w_max": 4, "modified": False, "sequence": {"name": "wythoff"}}
        plan = AttentionPlan(LayerKey(2, (4, 4)), 0, {**support, "shuffle_seed": None, "mask_fill": "neg_inf"})
        assert spent[0] < 0.02
        plan.build_table("signed_offsets")
    assert 0.02 <= spent[0] < 0.05
    assert AttentionPlan.__init__ is own_init and AttentionPlan.build_table is slow
