import json
import os

import pytest
import torch

from hf_sparseprior.attention.choice import BACKENDS
from hf_sparseprior.models.configuration_sparseprior_vit import PRESETS
from tasks.benchmark import model
from tasks.benchmark.model import COPY, DENSE, PASSES, Contender, ModelRun

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TINY = ["--models", "vit_tiny", "--sizes", "48x2", "--rounds", "2", "--device", "cpu"]


@pytest.fixture(autouse=True)
def no_forced_backend(monkeypatch):
    monkeypatch.delenv("SPARSEPRIOR_BACKEND", raising=False)


def make_run(prior="dense", backend=None):
    return ModelRun("vit_tiny", Contender(prior, backend), 32, 2, torch.float32, CPU)


def test_the_ceiling_replaces_attention_in_every_layer(monkeypatch):
    seen = []
    original = model._run_copy
    monkeypatch.setattr(model, "_run_copy", lambda call: (seen.append(call.plan.layer), original(call))[1])
    ceiling, dense = make_run(backend=COPY), make_run()
    out = ceiling.forward()
    assert seen == list(range(12)) and COPY not in BACKENDS and "SPARSEPRIOR_BACKEND" not in os.environ
    assert not torch.allclose(out, dense.forward())
    # Its linear layers do all their work: gradients reach the same parameters as with attention.
    for run in (ceiling, dense):
        with model.forced_backend(run.backend):
            run.model(pixel_values=run.images, labels=run.labels).loss.backward()
    for (name, own), other in zip(ceiling.model.named_parameters(), dense.model.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None), name


def test_copy_attention_reads_and_writes_like_attention():
    q, k, v = (torch.randn(2, 5, 3, 4).transpose(1, 2).requires_grad_() for _ in range(3))
    out = model.CopyAttention.apply(q, k, v)
    torch.testing.assert_close(out, q + k * v)
    assert out.stride() == q.stride()
    grad = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), grad)
    assert all(own.equal(grad) for own in gradients) and len({own.data_ptr() for own in gradients}) == 3


def test_a_forced_backend_is_given_back(monkeypatch):
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", "sdpa")
    with pytest.raises(ZeroDivisionError), model.forced_backend("diagonal"):
        assert os.environ["SPARSEPRIOR_BACKEND"] == "diagonal"
        raise ZeroDivisionError
    assert os.environ["SPARSEPRIOR_BACKEND"] == "sdpa"


def test_training_steps_train():
    run = make_run("violin")
    before = {name: value.clone() for name, value in run.model.named_parameters()}
    call = run.set_up("training")()
    call()
    assert run.model.training and all(value.grad is None for value in run.model.parameters())
    changed = {name for name, value in run.model.named_parameters() if not value.equal(before[name])}
    assert any("alpha" in name for name in changed) and any("q_proj" in name for name in changed)
    run.set_up("forward")()
    assert not run.model.training


@pytest.mark.parametrize(("preset", "resolution"), [("vit_tiny", 32), ("swin_tiny", 224)])
def test_the_class_of_transformers_has_the_same_weights(preset, resolution):
    contenders = model.parse_contenders(["dense", "transformers"])
    own, stock = (
        ModelRun(preset, contenders[name], resolution, 2, torch.float32, CPU) for name in ("dense", "transformers")
    )
    assert type(stock.model).__module__.startswith("transformers.") and stock.backend is None
    assert stock.model.config._attn_implementation == "sdpa"
    for run in (own, stock):
        run.set_up("forward")()
    assert own.choices and not stock.choices
    stock.images, stock.labels = own.images, own.labels
    torch.testing.assert_close(stock.forward(), own.forward(), rtol=0, atol=1e-4)
    loss = stock.model(pixel_values=stock.images, labels=stock.labels).loss
    assert loss.item() == pytest.approx(own.model(pixel_values=own.images, labels=own.labels).loss.item(), abs=1e-4)


def test_a_model_that_transformers_does_not_have(capsys):
    assert model.main(["--models", "convit_tiny", "--sizes", "48x2", "--priors", "transformers"]) == 2
    assert "transformers has no model like convit_tiny" in capsys.readouterr().err


def test_results_picture_and_tables(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(PRESETS, "vit_tiny", {**PRESETS["vit_tiny"], "num_hidden_layers": 2})
    out = tmp_path / "model.json"
    priors = ["dense", "fibottention@diagonal", "{support: {name: window, w: 1}}", "transformers"]
    assert model.main([*TINY, "--priors", *priors, "--targets", "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    for key in ("command", "settings", "versions", "hardware", "load_average", "targets"):
        assert key in results
    assert [(own["resolution"], own["batch"], own["patch_tokens"]) for own in results["sizes"]] == [(48, 2, 9)]
    for entry in results["sizes"]:
        for key in PASSES:
            measured = entry["passes"][key]["contenders"]
            assert set(measured) == {*priors, COPY}
            for own in measured.values():
                assert own["seconds"]["median"] > 0 and own["seconds"]["rounds"] == 2
                assert {"memory", f"times_{DENSE}", f"times_{COPY}", "ran"} <= set(own)
            assert measured["fibottention@diagonal"]["ran"] == "diagonal (forced)"
            assert measured[DENSE]["ran"].startswith("sdpa (") and measured["transformers"]["ran"] == "transformers"
    # Two moments of AdamW for every parameter stay after a training step.
    kept = results["sizes"][0]["passes"]["training"]["contenders"][DENSE]["memory"]["kept"]
    parameters = sum(value.numel() for value in make_run().model.parameters())
    assert kept == pytest.approx(8 * parameters, rel=0.01)
    assert "vit_tiny, 48 px (9 patch tokens) x 2, training step" in capsys.readouterr().out


def test_targets_are_ratios():
    def contender(median, memory):
        return {
            "memory": {"call": memory, "kept": 0},
            f"times_{DENSE}": {"median": median},
            f"times_{COPY}": {"median": 2 * median},
        }

    measured = {DENSE: contender(1.0, 100), "violin": contender(1.03, 101), "violin@reference": contender(1.5, 300)}
    sizes = [
        {"model": "vit_base", "resolution": resolution, "passes": {key: {"contenders": measured} for key in PASSES}}
        for resolution in (224, 512)
    ]
    rows = {
        (row["contender"], row["resolution"], row["key"], row["value"]): row["met"]
        for row in model.compare_with_targets(sizes)
        if row["prior"] == "violin"
    }
    assert rows["violin", 224, "forward", "seconds"] is False and rows["violin", 512, "forward", "seconds"] is True
    assert rows["violin", 224, "training", "seconds"] is True and rows["violin", 512, "training", "memory"] is True
    assert rows["violin@reference", 224, "training", "memory"] is False
    text = model.targets_table(model.compare_with_targets(sizes))
    assert "not measured" in text and "+3.0 %" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "vit_tinny"], "preset='vit_tinny' must be one of"),
        (["--sizes", "32x1x1"], "must be two positive numbers"),
        (["--sizes", "40x1"], "40"),
        (["--priors", "violet"], "violin"),
        (["--priors", "violin@fast"], "backend 'fast' must be one of"),
        (["--rounds", "0"], "--rounds 0 must be above 0"),
        (["--dtype", "half"], "--dtype 'half' must be one of"),
    ],
)
def test_bad_input_gives_one_line(arguments, message, capsys, tmp_path):
    out = tmp_path / "m.json"
    assert model.main([*TINY, *arguments, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not out.exists()
