import json
import os

import pytest
import torch

from hf_sparseprior.attention.choice import BACKENDS
from tasks.benchmark import model_contenders as model
from tasks.benchmark.__main__ import main
from tasks.benchmark.model_contenders import COPY, Contender, ModelRun

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


def test_what_ran_and_what_stays_after_a_training_step(tmp_path):
    priors = ["dense", "fibottention@diagonal", "{support: {name: window, w: 1}}", "transformers"]
    assert main(["model", *TINY, "--seconds", "0.1", "--priors", *priors, "--out", str(tmp_path)]) == 0
    found = {
        (record["pass"], record["contender"]): record
        for record in json.loads((tmp_path / "records.json").read_text())["measured"]
    }
    assert set(found) == {(key, name) for key in ("forward", "training") for name in (*priors, COPY)}
    ran = [found["forward", name]["ran"] for name in ("dense", "fibottention@diagonal", "transformers", COPY)]
    assert ran == ["sdpa", "diagonal", "transformers", COPY]
    # Two moments of AdamW for every parameter.
    parameters = sum(value.numel() for value in make_run().model.parameters())
    assert found["training", "dense"]["kept"] == pytest.approx(8 * parameters, rel=0.01)
