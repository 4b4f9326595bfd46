"""The runs of every scale, before any of them is done."""

import dataclasses
import math
import re
from pathlib import Path

import pytest

from hf_sparseprior import SparsePriorViTConfig
from tasks.canvases import commands, contenders
from tasks.canvases.contenders import CONTENDERS, DENSE, SCALES, VARIANTS, runs_of
from tests.each import each


def test_the_command_knows_the_scales():
    assert tuple(SCALES) == commands.SCALES


def test_the_cpu_scale_is_as_it_was_fixed():
    runs = runs_of(SCALES["cpu"])
    later = [run for run in runs if run.seed in contenders.LATER_SEEDS]
    assert len(runs) == 115 - 8 + 4 + 4 + len(later)  # eight lost their start; drawings and `longer` were added
    again = [(256, 5)] * 9 + [(128, 5), (128, 6), (128, 7)] * 3
    assert sorted((run.side, run.seed) for run in later) == sorted(again)
    assert {run.minutes for run in runs if not run.is_start} == {8, 10, 30}
    assert {run.variant for run in runs if run.minutes == 30} == {"longer"}
    for side in (128, 256):
        rows = [run for run in runs if run.group == f"{side}_class"]
        seeds = {name: sorted(run.seed for run in rows if run.row == name) for name in CONTENDERS}
        lacking = [name for name, seeds_of in seeds.items() if 0 not in seeds_of]
        assert lacking == (["sparsify-0.25"] if side == 128 else [])
        assert [name for name, seeds_of in seeds.items() if len(seeds_of) >= 5] == list(contenders.SIX)
        best = [0, 1, 2] if side == 128 else [0, 1, 2, 5]
        assert [name for name, seeds_of in seeds.items() if seeds_of == best] == list(contenders.BEST)


def test_the_gpu_scale_begins_with_three_then_six_minutes_in_the_fixed_order():
    runs = runs_of(SCALES["gpu"])
    starts = [run for run in runs if run.is_start]
    assert runs[: len(starts)] == starts and sum(run.minutes for run in starts) == 3
    first = runs[len(starts) :][:6]
    assert tuple(run.row for run in first) == contenders.FIRST_ON_GPU
    assert {(run.minutes, run.side, run.seed) for run in first} == {(1, 1024, 0)}


def test_patterns_reach_further_on_a_gpu():
    """There a row of patches is longer than `w_max` of the CPU's scale, so no patch would see the one above it."""
    gpu = SCALES["gpu"]

    def keys(name, side):
        config = SparsePriorViTConfig(image_size=side, patch_size=8, num_attention_heads=6, prior=own(name, side))
        return (1 - config.pruning_ratio / 100) * math.prod(config.grid)

    def own(name, side):
        return gpu.contender(name, side).prior

    for side in (512, 1024, 2048):
        assert keys("longformer", side) == pytest.approx(keys("fibottention", side), abs=1)
        assert own("windows", side)["support"]["w"] == side // 8 + 1
    for name in ("fibottention", "fibottention-hilbert", "fibottention-violin", "patch-x4-fibottention"):
        assert CONTENDERS[name].prior["support"]["w_max"] == 65
        prior = own(name, 1024)
        assert prior == {**CONTENDERS[name].prior, "support": prior["support"]}
        assert {**prior["support"], "w_max": 65} == CONTENDERS[name].prior["support"]
    for name in CONTENDERS:
        assert SCALES["cpu"].contender(name, 256) == CONTENDERS[name]
    assert all(gpu.contender(name, 1024) == CONTENDERS[name] for name in ("dense", "tome", "neighborhood"))
    by_default = SparsePriorViTConfig(image_size=1024, patch_size=8, prior=own("fibottention", 1024))
    assert by_default.prior == SparsePriorViTConfig(image_size=1024, patch_size=8, prior="fibottention").prior
    assert "fibottention-wide" not in {run.row for run in runs_of(gpu)}  # which would be the same


@each("scale", SCALES.values())
def test_every_run_has_a_name_and_a_configuration_of_its_own(scale):
    runs = runs_of(scale)
    assert len({run.name for run in runs}) == len(runs)
    places = {(run.group, run.row): run for run in runs}
    for number, run in enumerate(runs):
        assert run.start is None or runs.index(places[run.start]) < number
        assert (run.start is None) == (run.is_start and run.side == scale.start[0].side)
        assert 0 < run.every <= run.minutes and run.group.endswith(run.variant)
    assert scale.reference in {run.row for run in runs}


@each("scale", SCALES.values())
def test_every_contender_fits_every_size_that_it_is_run_at(scale):
    for run in runs_of(scale):
        if run.contender.missing() is not None or run.contender.budget is not None:
            continue
        sizes = {"image_size": run.side // run.contender.shrink, "patch_size": scale.patch * run.contender.patch}
        labels = VARIANTS[run.variant].classes
        config = SparsePriorViTConfig(**scale.model, **sizes, num_labels=labels, prior=run.contender.prior)
        assert run.contender.is_sparse == (config.prior_name != DENSE)


def test_equal_budgets_are_what_they_are_called():
    """Longformer's window has as many keys as Fibottention, and the window reaches as far."""

    def share_of_pairs(name, side):
        sizes = {"image_size": side, "patch_size": 4}
        config = SparsePriorViTConfig(**SCALES["cpu"].model, **sizes, prior=CONTENDERS[name].prior)
        return 100 - config.pruning_ratio

    for side in (128, 256):
        assert share_of_pairs("longformer", side) == pytest.approx(share_of_pairs("fibottention", side), rel=0.02)
    assert CONTENDERS["windows"].prior["support"]["w"] == contenders.FIBOTTENTION["support"]["w_max"]


def test_only_some_contenders_bring_their_starts():
    runs = runs_of(SCALES["cpu"], only=["windows"], seeds=[0])
    assert [run.name for run in runs] == [
        "start_class/64 seed 0",
        "128_class/windows seed 0",
        "256_class/windows seed 0",
    ]


def test_variants_of_the_same_images_share_a_start():
    runs = [run for run in runs_of(SCALES["cpu"], only=["patch-x4"], seeds=[0]) if run.side != 128]
    assert [run.name for run in runs if run.variant in ("class", "longer")] == [
        "start_class/64 seed 0",
        "256_class/patch-x4 seed 0",
        "256_longer/patch-x4 seed 0",
    ]
    assert {run.start for run in runs if run.variant in ("class", "longer")} == {None, ("start_class", "64")}
    assert runs_of(SCALES["cpu"], only=["dense"])[0].name == "start_class/64 seed 0"


def test_only_some_sizes_and_seeds():
    runs = runs_of(SCALES["cpu"], ["windows"], [2, 3], [256])
    assert [run.name for run in runs[1:]] == ["256_class/windows seed 2", "256_class/windows seed 3"]


@each("given", [{"only": ["fib"]}, {"seeds": [9]}, {"sides": [64]}])
def test_unknown_names_are_refused(given):
    ((name,),) = given.values()
    with pytest.raises(ValueError, match=f"^{re.escape(repr(name))} is in no run of scale cpu, which has "):
        runs_of(SCALES["cpu"], **given)


def test_what_the_library_lacks_is_said():
    unknown = dataclasses.replace(CONTENDERS["tome"], prior="merging_by_chance")
    assert unknown.missing().startswith("prior='merging_by_chance'") and "\n" not in unknown.missing()
    assert CONTENDERS["fibottention"].missing() is None


def test_sparsify_is_missing_without_its_function(monkeypatch):
    monkeypatch.setattr(contenders, "SPARSIFY", "no_such_function")
    assert CONTENDERS["sparsify-0.5"].missing() == "this version has no hf_sparseprior.no_such_function"


README = (Path(contenders.__file__).parent / "README.md").read_text(encoding="utf-8")


def test_the_page_names_every_contender_and_variant():
    for heading, names in (("## Contenders", CONTENDERS), ("## Images", VARIANTS)):
        table = README.partition(heading)[2].partition("\n## ")[0]
        first = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
        assert re.findall(r"`([^`]+)`", " ".join(first)) == list(names)


def test_the_page_says_what_it_costs():
    cpu, gpu = runs_of(SCALES["cpu"]), runs_of(SCALES["gpu"])
    assert f"{len(cpu)} runs, {sum(run.minutes for run in cpu)} minutes of one core" in README
    rest = [run.minutes for run in gpu if not run.is_start]
    assert f"3 minutes for the start, 6 for the first figure, {sum(rest) - 6} for the rest" in README
