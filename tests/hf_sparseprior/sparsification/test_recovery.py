import copy
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers import ViTConfig, ViTModel

import hf_sparseprior as sp
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.priors.layer import PriorAttention
from hf_sparseprior.sparsification import recovery, timing
from hf_sparseprior.sparsification.baselines import Compared
from hf_sparseprior.sparsification.candidates import parse_candidates
from hf_sparseprior.sparsification.data import Images, split
from hf_sparseprior.sparsification.recovery import STATE, Recovery
from hf_sparseprior.sparsification.settings import Settings
from hf_sparseprior.sparsification.subject import Subject
from tests.each import each
from tests.hf_sparseprior.small import SMALL
from tests.hf_sparseprior.sparsification.fakes import BUILDERS, SETTINGS, SIZES, Timer, images_of, model_of

SECONDS = 10.0  # of a step, by the clock of these tests


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Each step takes `SECONDS`, whatever it takes here."""
    now = [0.0]

    def tick():
        now[0] += SECONDS
        return now[0]

    monkeypatch.setattr(recovery, "clock", tick)


def learner(kind, minutes=5.0, path=None, **settings):
    """Recovery of a model whose first two layers have windows, and the images."""
    images = images_of(20)
    subject = Subject(model_of(kind), None, torch.device("cpu"))
    window = parse_candidates([{"name": "window", "w": 2}])[0]
    priors = [*(subject.prior_of(layer, window) for layer in subject.layers[:2]), None]
    chosen = Settings.of({"minutes": minutes, "learning_rate": 1e-3, **settings})
    changed = Compared("windows", 1.0, subject.built(priors), lambda model, pixels: subject.outputs(pixels, model))
    made = Recovery(subject, changed, Images(20, images.__getitem__), range(20), chosen, path)
    return subject, made, images


def loss(subject, model, images):
    with torch.no_grad():
        dense, own = subject.outputs(images, subject.dense), subject.outputs(images, model)
    return float(subject.loss(own, dense).mean())


@pytest.mark.parametrize("tuning", ["full", "lora"])
@each("kind", ["ours", "transformers"])
def test_the_model_comes_nearer_to_the_dense_one(kind, tuning):
    if tuning == "lora":
        pytest.importorskip("peft")
    subject, made, images = learner(kind, tuning=tuning, learning_rate=1e-2 if tuning == "lora" else 1e-3)
    before = loss(subject, made.model, images)
    teacher = {name: value.clone() for name, value in subject.dense.state_dict().items()}
    after = made.run(lambda line: None)
    assert made.steps == 30 and loss(subject, after, images) < 0.7 * before
    assert type(after) is type(subject.original) and not after.training
    assert not any(weight.requires_grad for weight in after.parameters())
    assert all(torch.equal(value, subject.dense.state_dict()[name]) for name, value in teacher.items())


def test_timm_recovers():
    subject, made, images = learner("timm", minutes=3)
    before = loss(subject, made.model, images)
    assert loss(subject, made.run(lambda line: None), images) < before


class Killed(BaseException):
    """Ends training as a signal does."""


def killed_after(training, step):
    """Training that a signal ends when so many steps are done."""
    steps = training._step

    def die(pixels, progress):
        if training.steps == step:
            raise Killed
        return steps(pixels, progress)

    training._step = die
    with pytest.raises(Killed):
        training.run(lambda line: None)


@each("kind", BUILDERS)
def test_training_that_was_killed_goes_on_as_if_it_had_not_been(kind, tmp_path):
    path = tmp_path / kind
    _, plain, _ = learner(kind, minutes=4)
    expected = plain.run(lambda line: None).state_dict()
    killed_after(learner(kind, minutes=4, path=path)[1], 14)
    _, second, _ = learner(kind, minutes=4, path=path)
    assert second.steps == 12  # of the last whole minute
    found = second.run(lambda line: None).state_dict()
    assert second.steps == 24 and all(torch.equal(found[name], value) for name, value in expected.items())


@each("family", ["sparseprior_vit", "sparseprior_iformer"])
def test_dropout_and_statistics_are_those_of_one_run(family, tmp_path):
    """A killed run draws what it would have drawn, and has the running statistics of batch norms."""
    cls = FAMILIES[family].classifier
    torch.manual_seed(0)
    model = cls(cls.config_class(**SMALL[family], num_labels=3, hidden_dropout_prob=0.2))
    subject = Subject(model, None, torch.device("cpu"))
    images = torch.randn(20, 3, *subject.sides, generator=torch.Generator().manual_seed(0))

    def made(path=None, minutes=3.0):
        changed = Compared("same", 1.0, copy.deepcopy(subject.original), lambda own, pixels: own(pixels).logits)
        settings = Settings.of({"minutes": minutes, "learning_rate": 1e-2})
        return Recovery(subject, changed, Images(20, images.__getitem__), range(20), settings, path)

    state = torch.random.get_rng_state()
    expected = made().run(lambda line: None).state_dict()
    assert torch.equal(torch.random.get_rng_state(), state)  # the caller draws what they would have drawn
    killed_after(made(tmp_path / family), 8)
    second = made(tmp_path / family)
    torch.manual_seed(5)
    found = second.run(lambda line: None).state_dict()
    assert second.steps == 18 and all(torch.equal(found[name], value) for name, value in expected.items())
    assert family == "sparseprior_vit" or any("running_mean" in name for name in found)


@each("micro_batch", [1, 3, 5])
def test_a_step_in_parts_is_the_same_step(micro_batch):
    """With the loss of outputs alone, which is a mean over images."""
    subject, plain, _ = learner("ours")
    after = []
    for size in (16, micro_batch):
        settings = Settings.of({"minutes": 1, "learning_rate": 1e-3, "micro_batch": size})
        seen = []

        def half(own, pixels, seen=seen):
            seen.append(len(pixels))
            return subject.outputs(pixels[..., ::2, ::2], own)

        made = Recovery(
            subject, Compared("half", 1.0, model_of("ours"), half), plain.images, plain.numbers, settings, None
        )
        made.optimizer = SimpleNamespace(param_groups=[], step=lambda: None, zero_grad=lambda: None)  # gradients stay
        made._step(made._batch(), 0.0)
        assert sum(seen) == 16 and max(seen) == min(size, 16)
        after.append([weight.grad for weight in made.weights if weight.grad is not None])
    assert len(after[0]) > 20 and sum(float(grad.square().sum()) for grad in after[0]) > 1e-6
    for whole, parts in zip(*after, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-5)


def test_a_state_of_other_settings_or_that_is_damaged_is_refused(tmp_path):
    learner("ours", minutes=1, path=tmp_path / STATE)[1].run(lambda line: None)
    with pytest.raises(ValueError, match="is of other settings of recovery"):
        learner("ours", learning_rate=1e-4, path=tmp_path / STATE)
    (tmp_path / STATE).write_bytes(b"nothing")
    with pytest.raises(OSError, match="is damaged"):
        learner("ours", path=tmp_path / STATE)


@each("kind", ["ours", "transformers"])
def test_the_loss_of_a_step_is_the_sum_of_its_three_parts(kind):
    """Class probabilities, the tokens of the last block, and what the class token attends to; written out here."""
    subject, made, images = learner(kind)
    pixels, found, models = images[:4], [], (subject.model, made.model)
    for model in models:
        tokens, name = [], next(name for name, module in subject.model.named_modules() if module is made.blocks[0])
        handle = model.get_submodule(name).register_forward_hook(lambda *given, tokens=tokens: tokens.append(given[2]))
        with torch.no_grad():
            output = model(pixels, output_attentions=True)
        handle.remove()
        last = tokens[0] if isinstance(tokens[0], torch.Tensor) else tokens[0][0]
        found.append((output.logits.double().softmax(-1), last.double(), torch.stack(output.attentions)[..., 0, :]))
    (dense, before, rows), (own, after, own_rows) = found
    parts = [
        (dense * (dense / own).log()).sum(-1).mean(),
        (after - before).square().sum() / before.square().sum(),
        (rows * (rows / own_rows).log()).sum(-1).mean(),
    ]
    assert min(float(part) for part in parts) > 1e-4
    assert made._backward(pixels, 1.0) == pytest.approx(float(sum(parts)), rel=1e-3)


def test_recovery_never_sees_the_test(monkeypatch):
    monkeypatch.setattr(timing, "seconds_of_rounds", Timer())
    images = images_of(40)
    others = images.clone()
    others[split(Images(40, images.__getitem__), 6, 1000, 0).test] = torch.nan
    given = {**SETTINGS, "minutes": 2, "learning_rate": 1e-3}
    plain, changed = (sp.sparsify(model_of("ours"), each, 0.6, settings=given).model for each in (images, others))
    assert all(torch.equal(value, changed.state_dict()[name]) for name, value in plain.state_dict().items())


def test_a_loss_that_is_not_finite_ends_it():
    _, made, _ = learner("ours", learning_rate=1e30)
    with pytest.raises(ValueError, match=r"recovery: the loss of step \d+ is (nan|inf); lower learning_rate=1e\+30"):
        made.run(lambda line: None)


def test_sparsify_recovers(monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "seconds_of_rounds", Timer())
    given = {**SETTINGS, "minutes": 5, "learning_rate": 1e-3}
    found = sp.sparsify(model_of("ours"), images_of(), 0.6, settings=given, out=tmp_path / "out")
    rows = {row.name: row for row in found.report.rows}
    assert rows["after recovery"].share == rows["the choice"].share and found.report.minutes == 5
    assert not list((tmp_path / "out").glob(f"*{STATE}"))
    loaded = type(found.model).from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(loaded(images_of(2)).logits, found.model(images_of(2)).logits)
    plain = sp.sparsify(model_of("ours"), images_of(), 0.6, settings=SETTINGS)
    assert found.report.layers == plain.report.layers
    assert any(
        not torch.equal(value, plain.model.state_dict()[name]) for name, value in found.model.state_dict().items()
    )


@each("kind", BUILDERS)
def test_what_it_is_compared_with_recovers_too(kind, monkeypatch, tmp_path):
    """Each for the minutes, nearer to the dense model than before, which itself stays as it was."""
    monkeypatch.setattr(timing, "seconds_of_rounds", Timer())
    given = {**SETTINGS, "minutes": 5, "learning_rate": 1e-3, "recover_all": True}
    out = None if kind == "timm" else tmp_path / kind
    found = sp.sparsify(model_of(kind), images_of(), 0.6, settings=given, out=out)
    rows, plain = [row for row in found.report.rows if row.share is not None], model_of(kind)
    names = [row.name for row in rows]
    assert names[:3] == ["dense", "the choice", "after recovery"] and rows[0].value == 1.0
    assert names[4::2] == [f"{name}, after recovery" for name in names[3::2]]
    assert [row.recovers for row in rows[1:]] == [
        None,
        "the choice",
        *(x for name in names[3::2] for x in (None, name)),
    ]
    sizes = [name for name in names if name.startswith("dense at")]
    assert len(sizes) == (0 if kind == "timm" else 2) and len(names) == (9 if kind == "ours" else 5 + len(sizes))
    assert [row.changes for row in rows[4::2]] == [row.changes for row in rows[3::2]]
    assert out is None or not list(out.glob(f"*{STATE}"))
    assert all(torch.equal(value, model_of(kind).state_dict()[name]) for name, value in plain.state_dict().items())


def test_a_model_on_smaller_images_learns(monkeypatch):
    subject, made, images = learner("ours", learning_rate=1e-3)
    halved = lambda model, pixels: subject.outputs(pixels[:, :, ::2, ::2], model)  # noqa: E731
    other = Recovery(
        subject,
        Compared("half", 1.0, model_of("ours"), halved),
        *(made.images, made.numbers, made.settings, None),
    )

    def loss_of(model):
        with torch.no_grad():
            return float(subject.loss(halved(model, images), subject.outputs(images, subject.dense)).mean())

    before = loss_of(other.model)
    assert loss_of(other.run(lambda line: None)) < 0.7 * before


def test_another_choice_in_the_same_folder_learns_from_its_beginning(monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "seconds_of_rounds", Timer())
    given, lines = {**SETTINGS, "minutes": 5, "learning_rate": 1e-3}, []

    def die(line):
        if "step 13" in line:
            raise Killed

    with pytest.raises(Killed):
        sp.sparsify(model_of("ours"), images_of(), 0.6, settings=given, out=tmp_path / "out", say=die)
    assert len(list((tmp_path / "out").glob(f"*{STATE}"))) == 1
    found = sp.sparsify(model_of("ours"), images_of(), 0.8, settings=given, out=tmp_path / "out", say=lines.append)
    assert {row.name: row.steps for row in found.report.rows}["after recovery"] == 30
    assert any("step 1," in line for line in lines) and not list((tmp_path / "out").glob(f"*{STATE}"))


def test_recovery_needs_images(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "seconds_of_rounds", Timer())
    for number, part in enumerate(["train", "test", "test", "test"]):
        (tmp_path / part).mkdir(exist_ok=True)
        Image.new("RGB", (32, 32)).save(tmp_path / part / f"{number}.png")
    with pytest.raises(ValueError, match="minutes=5: 4 images leave none for recovery; give more"):
        sp.sparsify(model_of("ours"), tmp_path, 0.6, settings={**SETTINGS, "minutes": 5})


def test_lora_on_a_model_whose_layers_are_not_known_is_refused_before_the_search(monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.setattr(timing, "seconds_of_rounds", None)
    with pytest.raises(ValueError, match="targets"):
        sp.sparsify(model_of("timm"), images_of(), 0.6, settings={**SETTINGS, "minutes": 1, "tuning": "lora"})


@each("prior", ["dense", "violin", {"support": {"name": "window", "w": 2, "order": "hilbert"}}])
def test_what_the_class_token_attends_to(prior):
    """That of the returned weights, of our models in any order of patches, and of transformers' written-out form."""
    config = sp.SparsePriorViTConfig(**SIZES, prior=prior)
    torch.manual_seed(0)
    ours, images = sp.SparsePriorViTModel(config).eval(), images_of(2)
    stock = sp.apply_prior(ViTModel(ViTConfig(**SIZES), add_pooling_layer=False).eval(), prior)
    with torch.no_grad():
        for model in (ours, stock):
            layers = [part for part in model.modules() if isinstance(part, PriorAttention)]
            with recovery._prefix_rows(layers) as rows:
                model(images)
            weights = model(images, output_attentions=True).attentions
            assert len(rows) == len(weights) == 3
            for row, expected in zip(rows, weights, strict=True):
                torch.testing.assert_close(row.exp(), expected[:, :, 0])
            assert not any("attend" in vars(layer) for layer in layers)
            other = [row.flip(-1) for row in rows]
            divergence = float(recovery._divergence(rows, other))
            plain = torch.nn.functional.kl_div(torch.stack(other), torch.stack(rows), log_target=True, reduction="none")
            assert divergence == pytest.approx(float(plain.sum(-1).mean()), rel=1e-5) and divergence > 0
    assert recovery._divergence([], []) == 0
