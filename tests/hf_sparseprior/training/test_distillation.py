import copy
import math
import os

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

import hf_sparseprior as sp
from hf_sparseprior.training import (
    LOSSES,
    Distillation,
    SparsePriorTrainer,
    SparsePriorTrainingArguments,
    Teacher,
    attention_loss,
    class_loss,
    token_loss,
)
from hf_sparseprior.training.distillation import (
    freeze_predictors,
    predictors,
    prune_predictors,
    train_predictors_alone,
)
from hf_sparseprior.training.mixing import check_mixtoken
from tests.each import each
from tests.hf_sparseprior.small import VIT
from tests.hf_sparseprior.training.test_trainer import StopAt

SIZES = {
    "image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "initializer_range": 0.3,
}  # fmt: skip


def make_model(seed=0, **options):
    torch.manual_seed(seed)
    return sp.SparsePriorViTForImageClassification(sp.SparsePriorViTConfig(**{**SIZES, **options}))


class Noise(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": index % 2}


def make_trainer(model, distillation, folder, **options):
    arguments = SparsePriorTrainingArguments(
        output_dir=str(folder), num_train_epochs=2, learning_rate=1e-2, report_to="none", disable_tqdm=True,
        remove_unused_columns=False, use_cpu=True, save_strategy="steps", save_steps=2, logging_steps=1,
        **{"per_device_train_batch_size": 4, "optim": "sgd", **options},
    )  # fmt: skip
    return SparsePriorTrainer(
        model=model, args=arguments, train_dataset=Noise(), eval_dataset=Noise(), distillation=distillation
    )


def batch():
    items = [Noise()[index] for index in range(4)]
    return {
        "pixel_values": torch.stack([item["pixel_values"] for item in items]),
        "labels": torch.tensor([item["labels"] for item in items]),
    }


# ---- the losses, by hand ---------------------------------------------------------------------------------------------


def test_token_loss_by_hand():
    tokens = torch.tensor([[[1.0, 2.0], [0.0, -1.0]]])
    teacher = torch.tensor([[[1.0, 0.0], [3.0, -1.0]]])
    assert token_loss(tokens, teacher).item() == (0 + 4 + 9 + 0) / 4
    # Of the patches that are kept alone.
    teacher = torch.arange(10.0).reshape(1, 5, 2)  # a class token and four patches
    tokens = torch.tensor([[[0.0, 1.0], [8.0, 9.0], [4.0, 7.0]]])  # the class token, patches 3 and 1, the last off by 2
    assert token_loss(tokens, teacher, torch.tensor([[3, 1]]), num_prefix_tokens=1).item() == pytest.approx(4 / 6)


def test_class_loss_by_hand_and_in_the_order_of_the_paper():
    own, teacher = torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    expected = (0.5 * math.log(2) + 0.5 * math.log(2 / 3) + math.log(2)) / 2
    assert class_loss(own.log().clamp_min(-50), teacher.log()).item() == pytest.approx(expected, abs=1e-6)
    assert class_loss(torch.tensor([[3.0, 1.0]]), torch.tensor([[13.0, 11.0]])).item() == pytest.approx(0, abs=1e-6)


def test_attention_loss_by_hand():
    scores = [torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.5)]
    weights = torch.tensor([[[[9.0, 9.0, 9.0], [9.0, 0.2, 0.4], [9.0, 0.0, 1.0]]]])  # those of the class token are 9
    first, second = 0.04 + 0.16 + 1.0, 0.09 + 0.01 + 0.25 + 0.25
    assert attention_loss(scores, [weights] * 2, num_prefix_tokens=1).item() == pytest.approx((first + second) / 8)


# ---- the Trainer -----------------------------------------------------------------------------------------------------


def test_a_step_has_the_weighted_sum_of_the_losses(tmp_path):
    student, teacher, inputs = make_model(0), make_model(1), batch()
    expected = make_model(0).train()
    out = expected(**inputs, output_hidden_states=True)
    with torch.no_grad():
        told = teacher(inputs["pixel_values"], output_hidden_states=True)
    loss = (
        2 * F.cross_entropy(out.logits, inputs["labels"])
        + 0.5 * (out.hidden_states[-1] - told.hidden_states[-1]).square().mean()
        + 3 * (out.logits.softmax(-1) * (out.logits.log_softmax(-1) - told.logits.log_softmax(-1))).sum() / 4
    )
    loss.backward()
    trainer = make_trainer(student, Distillation({"labels": 2, "token": 0.5, "class": 3}, Teacher(teacher)), tmp_path)
    own = trainer.compute_loss(student.train(), inputs)
    own.backward()
    assert own.item() == pytest.approx(loss.item(), rel=1e-6)
    for parameter, other in zip(student.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=1e-6)
    assert all(parameter.grad is None for parameter in trainer.distillation.teacher.model.parameters())
    # Evaluation judges by the labels alone.
    plain = F.cross_entropy(student.eval()(inputs["pixel_values"]).logits, inputs["labels"])
    assert trainer.compute_loss(student, inputs).item() == pytest.approx(plain.item(), rel=1e-6)


def test_a_teacher_with_a_token_classifier_tells_what_its_classifier_says(tmp_path):
    """Its own copy has nothing to learn from it, though in evaluation the teacher's model adds its tokens' logits."""
    teacher = make_model(1, token_classifier=True)
    student, inputs = copy.deepcopy(teacher).train(), batch()
    trainer = make_trainer(student, Distillation({"class": 1.0}, Teacher(teacher)), tmp_path)
    assert trainer.compute_loss(student, inputs).item() == pytest.approx(0, abs=1e-6)
    assert teacher.config.token_logits_weight == 0.5
    outputs = teacher(inputs["pixel_values"])
    classifier = student(inputs["pixel_values"]).logits
    assert (outputs.logits - classifier).abs().max() > 0.01
    torch.testing.assert_close(outputs.logits, classifier + 0.5 * outputs.token_logits.amax(1))


def test_the_teacher_sees_the_patches_that_mixtoken_gives_the_student(tmp_path):
    student, teacher, inputs = make_model(0), make_model(1), batch()
    sources = torch.tensor([[0, 1, 0, 1], [1, 1, 1, 0], [2, 2, 3, 2], [3, 3, 3, 3]])
    # The stem cuts patches of 4x4 pixels apart, so tokens may be taken from other images or their pixels.
    patches = inputs["pixel_values"].unfold(2, 4, 4).unfold(3, 4, 4).flatten(2, 3)  # (B, 3, N, 4, 4)
    taken = torch.stack([patches[row, :, place] for place, row in enumerate(sources.T)], 2)
    pixels = taken.unflatten(2, (2, 2)).permute(0, 1, 2, 4, 3, 5).reshape(4, 3, 8, 8)
    weights = {"token": 1.0, "class": 1.0}
    trainer = make_trainer(student, Distillation(weights, Teacher(teacher)), tmp_path)
    own = trainer.compute_loss(student.train(), {**inputs, "token_sources": sources})
    expected = trainer.compute_loss(student, {**inputs, "pixel_values": pixels})
    assert own.item() == pytest.approx(expected.item(), rel=1e-5)
    trainer = make_trainer(student, Distillation({"class": 1.0}, Teacher(make_model(1, patch_size=8))), tmp_path)
    with pytest.raises(ValueError, match="the teacher has 1 patches, the model 4; with mixtoken these must be equal"):
        trainer.compute_loss(student, {**inputs, "token_sources": sources})


@pytest.mark.slow
def test_accumulation_and_soft_labels_leave_the_gradient(tmp_path):
    def trained(**options):
        student = make_model(0)
        weights = {"labels": 1, "token": 1, "class": 1}
        trainer = make_trainer(
            student, Distillation(weights, Teacher(make_model(1))), tmp_path / str(len(options)), **options
        )
        trainer.data_collator = lambda items: {
            "pixel_values": torch.stack([item["pixel_values"] for item in items]),
            "labels": torch.tensor([[0.8, 0.2], [0.1, 0.9]])[[item["labels"] for item in items]],
        }
        trainer.train_collator = trainer.data_collator
        trainer.train()
        return student

    whole, parts = trained(), trained(per_device_train_batch_size=1, gradient_accumulation_steps=4)
    for own, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


# What must go on: dropout, a keep rate that falls, decisions that are drawn, a predictor that learns.
RESUMED = {
    "evit": {"keep_rate_start_epoch": 0.5, "keep_rate_epochs": 1.0},
    "dynamicvit": {},
    "sparsifiner": {"attention": 1.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("prior", RESUMED)
def test_resumed_run_equals_the_uninterrupted_one_and_the_teacher_stays(tmp_path, prior):
    extra = {"attention": RESUMED[prior].get("attention", 0.0)}
    options = {name: value for name, value in RESUMED[prior].items() if name not in extra}

    def trainer(folder):
        distillation = Distillation({"labels": 1, "token": 0.5, "class": 0.5, **extra}, Teacher(make_model(1)))
        student = make_model(0, hidden_dropout_prob=0.1, prior=SPARSIFINER if prior == "sparsifiner" else prior)
        return make_trainer(student, distillation, folder, optim="adamw_torch", **options)

    whole = trainer(tmp_path / "whole")
    whole.train()
    broken = trainer(tmp_path / "broken")
    broken.add_callback(StopAt(3))
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    torch.manual_seed(99)
    resumed = trainer(tmp_path / "broken")
    resumed.train(resume_from_checkpoint=True)
    for own, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(own, other)
    for own, other in zip(resumed.distillation.teacher.model.parameters(), make_model(1).parameters(), strict=True):
        assert torch.equal(own, other) and not own.requires_grad
    assert not resumed.distillation.teacher.model.training
    there, again = ([entry["loss"] for entry in own.state.log_history if "loss" in entry] for own in (whole, resumed))
    assert there == again and len(there) == 6
    entry = next(entry for entry in whole.state.log_history if "loss_token" in entry)
    parts = {"labels": 1, "token": 0.5, "class": 0.5, **{name: weight for name, weight in extra.items() if weight}}
    assert entry["loss"] == pytest.approx(
        sum(weight * entry[f"loss_{name}"] for name, weight in parts.items()), abs=2e-4
    )


# ---- Sparsifiner's phases ------------------------------------------------------------------------------------------

SPARSIFINER = {"predictor": {"name": "sparsifiner", "num_down": 3, "keep_rate": 0.5, "threshold": 0.2}}


def projected(model, pixels):
    # Queries and keys of every layer of a model without a prior, and its attention, by hand.
    out = model(pixels, output_hidden_states=True, output_attentions=True)
    heads = []
    for layer, hidden in zip(model.vit.layers, out.hidden_states[:-1], strict=True):
        normed = layer.layernorm_before(hidden)
        q, k = (
            own(normed).view(*normed.shape[:2], 2, 8).transpose(1, 2)
            for own in (layer.attention.q_proj, layer.attention.k_proj)
        )
        heads.append((q, k))
    return heads, out.attentions


def eq_10(model, dense, pixels):
    heads, attentions = projected(dense, pixels)
    losses = []
    for layer, (q, k), weights in zip(model.vit.layers, heads, attentions, strict=True):
        predictor = layer.attention.predictor
        down = torch.softmax(q[:, :, 1:] @ (predictor.w_down @ k[:, :, 1:]).mT / math.sqrt(8), -1)
        scores = (down * (down > 0.2)) @ predictor.w_up
        losses.append((scores - weights[:, :, 1:, 1:]).square().mean())
    return sum(losses) / len(losses)


@each("checkpointing", [False, True])
def test_phase_1_trains_the_predictor_alone_with_eq_10(tmp_path, checkpointing):
    model, teacher = make_model(0, prior=SPARSIFINER), make_model(0)
    train_predictors_alone(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trainer = make_trainer(model, Distillation({"attention": 1.0}, Teacher(teacher)), tmp_path)
    loss = trainer.compute_loss(model.train(), batch())
    loss.backward()
    weights = {name: p for name, p in model.named_parameters() if ".predictor." in name}
    assert len(weights) == 4 and all(p.grad is None for name, p in model.named_parameters() if name not in weights)
    own = {name: p.grad.clone() for name, p in weights.items()}
    expected = eq_10(model, teacher, batch()["pixel_values"])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for (name, gradient), other in zip(own.items(), torch.autograd.grad(expected, list(weights.values())), strict=True):
        assert gradient.abs().sum() > 0
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-8, msg=name)


@pytest.mark.parametrize(
    ("name", "value", "slope"),
    [("up_l2", lambda w: w**2, lambda w: 2 * w), ("up_l1", abs, lambda w: (w > 0) - (w < 0))],
)
def test_a_penalty_of_w_up_is_a_sum_over_all_layers_in_place_of_weight_decay(name, value, slope, tmp_path):
    """Sparsifiner Eqs. 11 and 12, number by number, and the L1 norm of the published code."""
    model, teacher = make_model(0, prior=SPARSIFINER), make_model(0)
    train_predictors_alone(model)
    with torch.no_grad():
        for predictor in predictors(model):
            predictor.w_up -= 0.1  # of both signs
    trainer = make_trainer(model, Distillation({"attention": 1.0, name: 0.3}, Teacher(teacher)), tmp_path)
    loss = trainer.compute_loss(model.train(), batch())
    own = torch.autograd.grad(loss, [predictor.w_up for predictor in predictors(model)])
    data = eq_10(model, teacher, batch()["pixel_values"])
    gradients = torch.autograd.grad(data, [predictor.w_up for predictor in predictors(model)])
    numbers = [predictor.w_up.flatten().tolist() for predictor in predictors(model)]
    expected = data.item() + 0.3 * sum(value(number) for layer in numbers for number in layer)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    for gradient, of_data, layer in zip(own, gradients, numbers, strict=True):
        slopes = torch.tensor([0.3 * float(slope(number)) for number in layer]).view_as(of_data)
        torch.testing.assert_close(gradient, of_data + slopes, rtol=1e-4, atol=1e-7)
    decayed = set(trainer.get_decay_parameter_names(model))
    names = {name for name, _ in model.named_parameters() if ".predictor." in name}
    assert names & decayed == {name for name in names if name.endswith("w_down")}
    plain = make_trainer(model, Distillation({"attention": 1.0}, Teacher(teacher)), tmp_path / "plain")
    assert names <= set(plain.get_decay_parameter_names(model))


@each("prior", ["violin", SPARSIFINER, "sparsifiner_published"])
def test_a_penalty_without_a_trained_w_up_is_refused(prior, tmp_path):
    model = make_model(0, prior=prior)
    freeze_predictors(model)
    with pytest.raises(ValueError, match=r"the up_l1 loss is of a trained W_up .sparsifiner., and prior '.*' has none"):
        make_trainer(model, Distillation({"labels": 1, "up_l1": 0.1}), tmp_path)


def test_scores_without_gradients_are_refused(tmp_path):
    model = make_model(0, prior=SPARSIFINER)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    trainer = make_trainer(model, Distillation({"attention": 1.0}, Teacher(make_model(0))), tmp_path)
    with pytest.raises(ValueError, match="needs gradient checkpointing to be without reentrance"):
        trainer.compute_loss(model.train(), batch())


def test_an_attention_loss_that_can_train_nothing_is_refused(tmp_path):
    model = make_model(0, prior=SPARSIFINER)
    model.requires_grad_(False)
    model.classifier.requires_grad_(True)
    trainer = make_trainer(model, Distillation({"labels": 1, "attention": 1}, Teacher(make_model(0))), tmp_path)
    with pytest.raises(ValueError, match="the attention loss has nothing to train"):
        trainer.compute_loss(model.train(), batch())
    # The values of a layer are followed by the scores of the next.
    model.vit.layers[0].attention.v_proj.requires_grad_(True)
    assert trainer.compute_loss(model, batch()).requires_grad


def test_phase_1_moves_nothing_else_and_ends_pruned(tmp_path):
    model = make_model(0, prior=SPARSIFINER)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train_predictors_alone(model)
    teacher = Teacher(make_model(0))
    make_trainer(model, Distillation({"attention": 1.0}, teacher), tmp_path, optim="adamw_torch").train()
    for name, value in model.state_dict().items():
        assert value.equal(before[name]) == (".predictor." not in name), name
    with torch.no_grad():
        predictors(model)[0].w_up[0, 0] = 0.005
    prune_predictors(model)
    for predictor in predictors(model):
        assert ((predictor.w_up == 0) | (predictor.w_up.abs() > 0.01)).all()
    assert predictors(model)[0].w_up[0, 0] == 0
    # In evaluation it is sparse, as it will be.
    kept = model.eval()(batch()["pixel_values"], output_attentions=True).attentions
    assert all(((layer > 0).sum(-1)[:, :, 1:] <= 1 + math.ceil(0.5 * 5)).all() for layer in kept)


@each("attention", [0.0, 1.0])
def test_phase_2_has_a_gradient_for_the_predictor_with_the_attention_loss_alone(tmp_path, attention):
    model = make_model(0, prior=SPARSIFINER)
    weights = {"labels": 1.0, "token": 0.5, "class": 0.5, "attention": attention}
    trainer = make_trainer(model, Distillation(weights, Teacher(make_model(0))), tmp_path)
    trainer.compute_loss(model.train(), batch()).backward()
    for name, parameter in model.named_parameters():
        if ".predictor." in name:
            assert (parameter.grad is not None and parameter.grad.abs().sum() > 0) == bool(attention), name
        else:
            assert parameter.grad is not None, name


def test_phase_2_as_published_leaves_the_predictor(tmp_path):
    model = make_model(0, prior=SPARSIFINER)
    freeze_predictors(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = {"labels": 1.0, "token": 0.5, "class": 0.5}
    make_trainer(model, Distillation(weights, Teacher(make_model(0))), tmp_path, weight_decay=0.5).train()
    for name, value in model.state_dict().items():
        assert value.equal(before[name]) == (".predictor." in name), name


# ---- errors ----------------------------------------------------------------------------------------------------------


@each(
    "options, losses, message",
    [
        ({"num_hidden_layers": 3}, ["attention"], "the teacher has num_hidden_layers=3, the model 2; they must be the"),
        ({"num_attention_heads": 4}, ["attention"], "num_attention_heads=4, the model 2"),
        ({"patch_size": 2}, ["token"], r"grid=\(4, 4\), the model \(2, 2\)"),
        ({"image_size": 16, "patch_size": 8}, ["class"], r"image_size=\(16, 16\), the model \(8, 8\)"),
        ({"num_register_tokens": 1}, ["token"], "num_prefix_tokens=2, the model 1"),
        ({"hidden_size": 32}, ["token"], "hidden_size=32, the model 16"),
        ({"num_labels": 3}, ["class"], "num_labels=3, the model 2"),
        ({"image_mean": 0.1}, ["class"], r"image_mean=\[0.1, 0.1, 0.1\], the model \[0.5, 0.5, 0.5\]"),
        ({"id2label": {0: "LABEL_1", 1: "LABEL_0"}}, ["class"], "classes in another order, from 'LABEL_0' on"),
    ],
)
def test_a_teacher_of_another_shape_is_refused(options, losses, message):
    distillation = Distillation(dict.fromkeys(losses, 1.0), Teacher(make_model(**options)))
    with pytest.raises(ValueError, match=message):
        distillation.check(make_model())


def test_only_what_the_losses_need_has_to_agree():
    teacher = Teacher(make_model(num_hidden_layers=1, num_attention_heads=4, hidden_size=32))
    Distillation({"class": 1.0}, teacher).check(make_model())


SWIN = {
    "image_size": 16, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 4], "window_size": 2, "initializer_range": 0.3,
    "image_mean": 0.5, "image_std": 0.5,
}  # fmt: skip


def make_swin(seed=0, **options):
    torch.manual_seed(seed)
    return sp.SparsePriorSwinForImageClassification(sp.SparsePriorSwinConfig(**{**SWIN, **options})).eval()


def test_a_model_with_stages_learns_logits_and_last_tokens():
    student, teacher = make_swin(prior="violin"), make_swin(1)
    distillation = Distillation({"token": 1.0, "class": 1.0, "class_forward": 1.0}, Teacher(teacher))
    distillation.check(student)
    images = torch.randn(3, 3, 16, 16)
    out = student(images, **distillation.student_options())
    losses = distillation.losses(student, out, torch.zeros(()), [], images)
    told = teacher(images, output_hidden_states=True)
    assert told.hidden_states[-1].shape == (3, 4, 16)
    expected = (out.hidden_states[-1] - told.hidden_states[-1]).square().mean()
    torch.testing.assert_close(losses["token"], expected)
    torch.testing.assert_close(losses["class"], class_loss(out.logits, told.logits))
    forward = F.kl_div(out.logits.log_softmax(-1), told.logits.log_softmax(-1), reduction="batchmean", log_target=True)
    torch.testing.assert_close(losses["class_forward"], forward)  # torch's own, the target is the teacher
    assert expected > 0


def test_teachers_of_another_family_or_with_other_stages():
    vit = {"image_size": 16, "patch_size": 8, "use_class_token": False, "pooling": "mean"}
    Distillation({"token": 1.0}, Teacher(make_model(**vit))).check(make_swin())  # both have 2x2 patches of width 16
    attention = Distillation({"attention": 1.0}, Teacher(make_swin()))
    for student, message in (
        (make_swin(), "the attention loss is for priors whose predictor has connectivity scores"),
        (make_swin(num_heads=[2, 8]), r"stages=\[.*num_heads=4.* the model \[.*num_heads=8"),
        (make_swin(depths=[2, 2]), "num_hidden_layers=3, the model 4"),
        (make_model(**vit, num_hidden_layers=3), "num_attention_heads=None, the model 2"),
    ):
        with pytest.raises(ValueError, match=message):
            attention.check(student)
    other = make_swin(patch_size=8)
    with pytest.raises(ValueError, match=r"output_grid=\(2, 2\), the model \(1, 1\)"):
        Distillation({"token": 1.0}, Teacher(make_swin())).check(other)


def test_patches_are_mixed_only_where_a_model_can_mix_them():
    check_mixtoken(make_model())
    with pytest.raises(ValueError, match="the model, a SparsePriorSwinForImageClassification, cannot do"):
        check_mixtoken(make_swin())
    sources = torch.zeros(2, 16, dtype=torch.long)
    with pytest.raises(ValueError, match="which the teacher, a SparsePriorSwinForImageClassification, cannot do"):
        Teacher(make_swin())(torch.randn(2, 3, 16, 16), frozenset({"logits"}), sources)


def test_a_pickled_teacher_is_refused_unread(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    make_model().save_pretrained(tmp_path / "teacher")
    (tmp_path / "teacher" / "model.safetensors").unlink()
    torch.save(Trap(), tmp_path / "teacher" / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"model\.safetensors") as caught:
        Teacher.from_pretrained(tmp_path / "teacher")
    assert "\n" not in str(caught.value) and not (tmp_path / "ran").exists()


def test_bad_weights_and_a_missing_teacher_are_refused():
    for weights, message in (
        ({"tokens": 1.0}, "distillation has no setting 'tokens'; did you mean 'token'"),
        ({"class": -1}, "weight -1 of the class loss must be a number of 0 or more"),
        ({"labels": 0}, "leave no loss to train with"),
        ({"token": 1}, "the losses token need a teacher"),
    ):
        with pytest.raises(ValueError, match=message):
            Distillation(weights)
    assert Distillation({"labels": 1}).teacher is None
    assert set(LOSSES) >= {"labels", "token", "class", "class_forward", "attention"}


def test_attention_loss_without_scores_is_refused():
    for prior in ("dense", "topk"):
        with pytest.raises(ValueError, match=f"predictor has connectivity scores .sparsifiner., not for '{prior}'"):
            Distillation({"attention": 1}, Teacher(make_model())).check(make_model(prior=prior))


def test_a_compressed_student_needs_the_teachers_heads_and_not_its_mlp():
    """Attention is compared head by head."""

    def config(**compressed):
        return sp.SparsePriorViTConfig(**{**VIT, "num_hidden_layers": 2}, compressed=compressed or None)

    teacher = Teacher(sp.SparsePriorViTForImageClassification(config()))
    needs = frozenset({"attentions"})
    teacher.check(config(mlp_width=[3, 5]), needs)
    with pytest.raises(ValueError, match=r"heads=\[\[0, 1\], \[0, 1\]\], the model \[\[0\], \[0, 1\]\]"):
        teacher.check(config(heads=[[0], [0, 1]]), needs)
    teacher.check(config(heads=[[0], [0, 1]]), frozenset({"logits"}))
