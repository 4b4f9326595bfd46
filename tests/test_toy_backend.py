"""A backend that a test registers in one place is found wherever backends are looked up, and so is a support in the
benchmarks.
"""

import json
import logging

import pytest
import torch

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTModel
from hf_sparseprior.attention.choice import BACKENDS, Crossover, register_backend, unregister_backend
from hf_sparseprior.attention.dense import reference
from tasks.benchmark.__main__ import main as benchmark
from tasks.benchmark.contenders import Setting, Size, chosen_backend, contenders, make_problem, timed_call
from tasks.benchmark.model_contenders import COPY, ModelRun, parse_contenders
from tests.hf_sparseprior.attention.attention_cases import (
    DECAY_VARIANTS,
    FILLED,
    assert_equals_reference,
    backend_cases,
    call,
    make_leaves,
    runnable,
)
from tests.hf_sparseprior.toys import registered_support

VIOLIN = DECAY_VARIANTS[1]


@pytest.fixture
def toy(monkeypatch):
    # The requests that it ran. Changing `factor[0]` makes it wrong.
    ran, factor = [], [1.0]

    def can_run(request):
        return None if request.decay is None else "the toy knows no decay"

    def run(request):
        """The reference under another name."""
        ran.append(request)
        out, weights = reference(request)
        return out * factor[0], weights

    limits = {("cpu", trains, "sdpa"): Crossover(tokens=30, density=0.5) for trains in (False, True)}
    register_backend("toy", can_run=can_run, run=run, priority=1000, crossovers=limits)
    monkeypatch.setattr(logging.getLogger("hf_sparseprior"), "propagate", True)
    yield ran, factor
    unregister_backend("toy")


def test_it_is_chosen_where_it_is_the_fastest(toy, caplog):
    ran, _ = toy
    caplog.set_level(logging.DEBUG, logger="hf_sparseprior.ops")

    def message(support, variant, side):
        caplog.clear()
        call(make_leaves((side, side), 1, variant), support, variant, (side, side), 1)
        return caplog.messages[0]

    assert message("fibottention", None, 6).startswith("layer 2: toy (36 patches") and len(ran) == 1
    assert "not toy: dense is faster below 30 patches" in message("fibottention", None, 5)
    assert "not toy: dense is faster with more than 50.0 % of the pairs" in message(
        {"name": "window", "w": 30}, None, 6
    )
    assert "not toy: the toy knows no decay" in message("fibottention", VIOLIN, 6)
    assert len(ran) == 1


def test_it_is_forced_by_argument_and_environment_and_named_in_errors(toy, monkeypatch):
    ran, _ = toy
    leaves = make_leaves((2, 2), 1, VIOLIN)
    call(leaves, "fibottention", None, (2, 2), 1, backend="toy")
    with pytest.raises(ValueError, match="backend='toy' cannot run this attention: the toy knows no decay"):
        call(leaves, "fibottention", VIOLIN, (2, 2), 1, backend="toy")
    with pytest.raises(ValueError, match=r"backend='toi' must be one of auto, .*, toy; did you mean 'toy'\?$"):
        call(leaves, "fibottention", None, (2, 2), 1, backend="toi")
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", "toy")
    config = SparsePriorViTConfig(
        image_size=8, patch_size=4, hidden_size=8, num_attention_heads=2, num_hidden_layers=3, prior="fibottention"
    )
    SparsePriorViTModel(config)(torch.zeros(1, 3, 8, 8))
    assert [request.plan.layer for request in ran] == [2, 0, 1, 2]


def test_it_is_compared_with_the_reference_like_every_backend(toy):
    _, factor = toy
    cases = [case.values for case in backend_cases(FILLED) if case.values[0] == "toy"]
    assert [support for _, support in cases] == FILLED
    for backend, support in cases:
        assert runnable(backend, support) == [None]
        assert_equals_reference(backend, support, None, (3, 4), 1)
    factor[0] = 1.001
    with pytest.raises(AssertionError):
        assert_equals_reference("toy", "fibottention", None, (3, 4), 1)


def test_the_benchmarks_list_and_check_it(toy):
    _, factor = toy
    contender = contenders()["toy"]
    assert contender.about == "The reference under another name."
    assert "fibottention@toy" in parse_contenders(["fibottention@toy"])
    problem = make_problem(Setting(heads=2, width=4), Size(64, 1), trains=True)
    assert chosen_backend(problem, trains=True) == "toy"
    timed_call(problem, contender, trains=True)()
    assert contender.can_run(make_problem(Setting(decay="violin"), Size(64, 1), True), True) == "the toy knows no decay"
    factor[0] = 1.001
    with pytest.raises(RuntimeError, match="WRONG"):
        timed_call(problem, contender, trains=False)


def test_the_benchmarks_measure_a_support_registered_here(tmp_path):
    with registered_support() as name:
        # 12 patches are a grid of 3x4, which a support in two dimensions has to be told.
        problem = make_problem(Setting(heads=2, width=4, support=name), Size(12, 1), trains=True)
        assert chosen_backend(problem, trains=True) == "sdpa" and problem.plan.support["name"] == name
        found = {key: contender.can_run(problem, True) for key, contender in contenders().items()}
        assert found["reference"] is None and "has pairs off its diagonals" in found["diagonal"]
        assert "the support has other pairs" in found["flex_offsets"]
        for key, reason in found.items():
            if reason is None:
                timed_call(problem, contenders()[key], trains=True)()  # compares with the reference
        arguments = ["attention", "--support", name, "--sizes", "12x1", "--heads", "2", "--rounds", "1"]
        arguments += ["--device", "cpu", "--contenders", "dense_sdpa,reference,gather"]
        assert benchmark([*arguments, "--out", str(tmp_path)]) == 0
        content = json.loads((tmp_path / "records.json").read_text())
        assert {own["tokens"] for own in content["measured"]} == {12} and content["settings"]["support"] == name
        assert all("seconds" in own for own in content["measured"])
        assert set(parse_contenders([name])) == {name, COPY}
        run = ModelRun("vit_tiny", parse_contenders([name])[name], 48, 1, torch.float32, torch.device("cpu"))
        assert run.model.config.prior_name == name and run.forward().shape == (1, run.model.config.num_labels)


def test_it_is_gone_afterwards_and_no_name_is_taken_twice():
    assert "toy" not in BACKENDS and "toy" not in contenders()
    for name in (*BACKENDS, "auto"):
        with pytest.raises(ValueError, match=f"backend '{name}' is registered already"):
            register_backend(name, can_run=lambda request: None, run=reference, priority=0)
