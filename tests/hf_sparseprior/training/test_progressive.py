"""Progressive resizing: which sizes the batches have, and that nothing else changes."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from transformers import TrainerCallback, ViTConfig, ViTForImageClassification

import hf_sparseprior as sp
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.classification.config import check_config
from hf_sparseprior.training import Distillation, SparsePriorTrainer, SparsePriorTrainingArguments, Teacher
from hf_sparseprior.training.progressive import ProgressiveSizes, check_sizes
from tests.each import each
from tests.hf_sparseprior.small import small

CLASSIFIERS = [name for name, family in FAMILIES.items() if family.classifier is not None]


class Noise(Dataset):
    """Images (frames,) of three channels, fixed by the index."""

    def __init__(self, size, frames=()):
        self.shape = (*frames, 3, *size)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"pixel_values": torch.randn(self.shape, generator=generator), "labels": index % 2}


class StopAt(TrainerCallback):
    """Stands for a kill."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def make_vit(image_size=8, **options):
    torch.manual_seed(0)
    fields = {"prior": "fibottention+violin", "hidden_dropout_prob": 0.1, "drop_path_rate": 0.2, "num_labels": 2}
    config = small("sparseprior_vit", **{**fields, "image_size": image_size, "patch_size": 2, **options})
    return sp.SparsePriorViTForImageClassification(config)


def make_trainer(model, folder, sizes, images=(8, 8), frames=(), distillation=None, **options):
    arguments = SparsePriorTrainingArguments(
        output_dir=str(folder), progressive_sizes=sizes, learning_rate=1e-2, use_cpu=True, report_to="none",
        disable_tqdm=True, remove_unused_columns=False,
        **{"max_steps": 8, "per_device_train_batch_size": 4, **options},
    )  # fmt: skip
    data = Noise(images, frames)
    trainer = SparsePriorTrainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data, distillation=distillation
    )
    trainer.seen = {True: [], False: []}

    def note(module, args, given):
        trainer.seen[module.training].append(tuple(given["pixel_values"].shape[-2:]))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return trainer


@each("sizes, expected", [
    ([4, 8], [4] * 4 + [8] * 4),
    ([4, 6, 6, 8], [4] * 2 + [6] * 4 + [8] * 2),
    ([2, 4, 8], [2] * 3 + [4] * 3 + [8] * 2),
    ([8], [8] * 8),
])  # fmt: skip
def test_batches_have_the_sizes_by_step_and_evaluation_that_of_the_model(sizes, expected, tmp_path):
    trainer = make_trainer(make_vit(), tmp_path, sizes, eval_strategy="steps", eval_steps=4)
    trainer.train()
    assert trainer.seen[True] == [(size, size) for size in expected]
    assert set(trainer.seen[False]) == {(8, 8)}


def test_sizes_that_are_not_square_and_the_micro_batches_of_a_step(tmp_path):
    model = make_vit([8, 4])
    trainer = make_trainer(
        model, tmp_path, [[4, 2], [8, 4]], (8, 4), per_device_train_batch_size=2, gradient_accumulation_steps=2
    )
    trainer.train()
    assert trainer.seen[True] == [(4, 2)] * 8 + [(8, 4)] * 8


def test_each_size_has_its_share_of_any_number_of_steps():
    progressive = ProgressiveSizes([2, 4, 4, 8], make_vit())
    for steps in (1, 3, 4, 7, 100, 1001):
        sizes = [progressive.size_at(step, steps)[0] for step in range(steps)]
        assert sizes == sorted(sizes)
        for size, share in ((2, 0.25), (4, 0.5), (8, 0.25)):
            assert abs(sizes.count(size) - share * steps) < 1


def test_pixels_are_means_with_the_weights_of_a_triangle():
    """Half as wide, a pixel is between two others and sees two on either side, with weights 1, 3, 3, 1."""
    progressive = ProgressiveSizes([4, 8], make_vit())
    pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    found = progressive.resized({"pixel_values": pixels, "labels": None}, 0, 2)["pixel_values"].numpy()
    weights = np.zeros((4, 8))
    for place in range(4):
        for offset, weight in zip((-1, 0, 1, 2), (1, 3, 3, 1), strict=True):
            if 0 <= 2 * place + offset < 8:
                weights[place, 2 * place + offset] = weight
    weights /= weights.sum(1, keepdims=True)
    np.testing.assert_allclose(found, weights @ pixels.numpy() @ weights.T, rtol=0, atol=1e-12)


def test_a_batch_of_the_last_size_is_left_alone():
    progressive = ProgressiveSizes([4, 8], make_vit())
    batch = {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])}
    last = progressive.resized(batch, 1, 2)
    assert last.keys() == batch.keys() and all(last[key] is batch[key] for key in batch)


@each("step", [2, 4, 5, 7])
def test_a_run_that_is_killed_at_any_size_goes_on_to_the_same_bits(step, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    whole = make_trainer(make_vit(), tmp_path / f"whole{step}", [4, 6, 8], **options)
    whole.train()
    broken = make_trainer(make_vit(), tmp_path / f"broken{step}", [4, 6, 8], **options)
    broken.add_callback(StopAt(step))
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    resumed = make_trainer(make_vit(), tmp_path / f"broken{step}", [4, 6, 8], **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.seen[True] == whole.seen[True][step - 1 :]
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


@each("name", CLASSIFIERS)
def test_every_family_learns_at_growing_sizes(name, tmp_path):
    torch.manual_seed(0)
    family, side = FAMILIES[name], 2 * small(name).image_size
    model = family.classifier(small(name, prior="fibottention", image_size=side, num_labels=2))
    frames = (small(name).num_frames,) if family.takes == "clips" else ()
    trainer = make_trainer(model, tmp_path / name, [side // 2, side], (side, side), frames, max_steps=2)
    before = {key: value.clone() for key, value in model.named_parameters()}
    trainer.train()
    assert trainer.seen[True] == [(side // 2,) * 2, (side,) * 2]
    assert not any(value.equal(before[key]) for key, value in model.named_parameters() if "projection.weight" in key)


def make_stock():
    torch.manual_seed(0)
    return ViTForImageClassification(
        ViTConfig(
            image_size=16, patch_size=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=8, num_labels=2,
        )
    )  # fmt: skip


@each("prior", [None, "fibottention"])
def test_classes_of_transformers_interpolate_their_positions(prior, tmp_path):
    model = make_stock()
    if prior is not None:
        sp.apply_prior(model, prior)
    trainer = make_trainer(model, tmp_path / str(prior), [8, 16], (16, 16), max_steps=2)
    trainer.train()
    assert trainer.seen[True] == [(8, 8), (16, 16)]


def test_a_teacher_sees_the_same_images(tmp_path):
    teacher, seen = make_vit().eval(), []
    teacher.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[-1]))
    losses = Distillation({"token": 1.0, "class": 1.0}, Teacher(teacher))
    trainer = make_trainer(make_vit(), tmp_path, [4, 8], max_steps=4, distillation=losses)
    trainer.train()
    assert seen == [size for size, _ in trainer.seen[True]] == [4, 4, 8, 8]


@each("given", [[], 8, "8", [8, 4], [0, 8], [4.5, 8], [True, 8], [[4, 8], [8, 4]], [[4], 8], None, {4: 8}])
def test_lists_that_are_none_of_rising_sizes_are_refused(given, tmp_path):
    with pytest.raises(ValueError, match=r"progressive_sizes=.* must be a list of rising image sizes, each a number"):
        check_sizes(given)
    if given is not None:
        with pytest.raises(ValueError, match="must be a list of rising image sizes"):
            SparsePriorTrainingArguments(output_dir=str(tmp_path), progressive_sizes=given, use_cpu=True)


@each("sizes, message", [
    ([4, 6], r"progressive_sizes=\[4, 6\] must end with the model's image_size=8"),
    ([8, 16], r"progressive_sizes=\[8, 16\] must end with the model's image_size=8"),
    ([5, 8], r"progressive_sizes=\[5, 8\]: the model does not take images of 5x5 pixels: .* must be a multiple of the"),
])  # fmt: skip
def test_sizes_that_the_model_does_not_take_are_refused_before_the_first_step(sizes, message, tmp_path):
    model = make_vit().train()
    with pytest.raises(ValueError, match=message):
        make_trainer(model, tmp_path, sizes)
    assert model.training


def test_a_model_of_a_fixed_size_is_refused():
    class Flat(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = small("sparseprior_vit")
            self.layer = torch.nn.Linear(3 * 8 * 8, 2)

        def forward(self, pixel_values):
            return self.layer(pixel_values.flatten(1))

    with pytest.raises(ValueError, match=r"\[4, 8\]: the model does not take images of 4x4 pixels: mat1 and mat2"):
        ProgressiveSizes([4, 8], Flat())
    with pytest.raises(ValueError, match="must end with the model's image_size=None"):
        ProgressiveSizes([4, 8], torch.nn.Linear(2, 2))


@each("batch, message", [
    ({"pixel_values": [torch.zeros(3, 8, 8)]}, r"needs batches with pixel_values of one size, got \['pixel_values'\]"),
    ({"input_ids": torch.zeros(2, 3)}, r"needs batches with pixel_values of one size, got \['input_ids'\]"),
    ({"pixel_values": torch.zeros(2, 3, 8, 8), "token_sources": torch.zeros(2, 16)}, "token_sources are of the"),
])  # fmt: skip
def test_batches_that_cannot_be_resized_are_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        ProgressiveSizes([4, 8], make_vit()).resized(batch, 0, 2)


@each("section, values, message", [
    ("augmentation", {"mixtoken": 1.0}, r"progressive_sizes=\[4, 8\] does not go with augmentation.mixtoken=1.0"),
    ("token_labels", {"path": "maps"}, r"progressive_sizes=\[4, 8\] does not go with token_labels.path=maps"),
])  # fmt: skip
def test_a_configuration_with_targets_of_patches_is_refused(section, values, message):
    config = {"model": {"image_size": 8, "patch_size": 2}, "trainer": {"progressive_sizes": [4, 8]}, section: values}
    with pytest.raises(ValueError, match=message):
        check_config(config)
