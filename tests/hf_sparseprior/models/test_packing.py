"""Images of several sizes in one batch, against each image alone."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import pipeline

import hf_sparseprior as sp
from hf_sparseprior.attention.packing import Packing, as_patches, read_images
from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.models.blocks import DropPath
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.supports import SUPPORTS
from hf_sparseprior.priors import layer as attention
from hf_sparseprior.priors.low_rank import MIXERS
from hf_sparseprior.priors.predictor import PREDICTORS
from hf_sparseprior.priors.prior import parse_prior, pruning_of, resolve_prior
from hf_sparseprior.training import SparsePriorTrainer, SparsePriorTrainingArguments
from tests.each import each

SIZES = [(32, 48), (64, 64), (32, 48), (80, 16), (48, 32), (64, 64)]
ALL = [*SUPPORTS, *DECAYS, *PREDICTORS, *MIXERS, *EXTRAS]


def prunes(name):
    return pruning_of(resolve_prior(parse_prior(name), 3, (8, 8))) is not None


PRUNING = [name for name in ALL if prunes(name)]


def make(prior="fibottention+violin", kind=sp.SparsePriorViTForImageClassification, **settings):
    torch.manual_seed(0)
    sizes = {"image_size": 64, "patch_size": 8, "hidden_size": 48, "intermediate_size": 96, "num_labels": 5}
    config = sp.SparsePriorViTConfig(
        **{**sizes, "num_hidden_layers": 3, "num_attention_heads": 3, "initializer_range": 0.15, **settings},
        prior=prior,
    )
    model = kind(config)
    for name, parameter in model.named_parameters():
        if "decay" in name or "gate" in name or "bias" in name:  # extras start where they change nothing
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def images(sizes=SIZES):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, *size, generator=generator) for size in sizes]


def check_alone(model, batch, tolerance=1e-5):
    """Every output of a batch of several sizes is that of the image alone, and 0 where the image has no token."""
    options = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        packed = model(batch, **options)
        for number, image in enumerate(batch):
            alone = model(image[None], **options)
            torch.testing.assert_close(packed.logits[number], alone.logits[0], atol=tolerance, rtol=1e-4)
            tokens = alone.hidden_states[-1].shape[1]
            assert packed.token_mask[number].tolist() == [True] * tokens + [False] * (
                len(packed.token_mask[0]) - tokens
            )
            for own, expected in zip(packed.hidden_states, alone.hidden_states, strict=True):
                torch.testing.assert_close(own[number, :tokens], expected[0], atol=tolerance, rtol=1e-4)
                assert not own[number, tokens:].any()
            for own, expected in zip(packed.attentions, alone.attentions, strict=True):
                torch.testing.assert_close(own[number, :, :tokens, :tokens], expected[0], atol=tolerance, rtol=1e-4)
                assert not own[number, :, tokens:].any() and not own[number, :, :, tokens:].any()
    spread = packed.logits.std(0)
    assert spread.min() > 100 * tolerance  # the images differ
    return packed


@pytest.mark.parametrize("prior", [name for name in [*ALL, "fibottention+violin"] if name not in PRUNING])
def test_every_prior_gives_what_each_image_alone_gives(prior):
    check_alone(make(prior), images())


@pytest.mark.parametrize(
    "settings",
    [
        {"prior": {"support": {"name": "fibottention", "order": "hilbert"}, "decay": "violin"}},
        {"prior": {"support": {"name": "fibottention", "order": "hilbert", "w_min": 2}}, "use_class_token": False,
         "pooling": "mean"},
        {"pooling": "class_token_and_mean", "num_register_tokens": 2, "stem": "convolution", "stem_channels": 8},
        {"use_distillation_token": True, "use_distillation_classifier": True, "layerscale_value": 0.5},
        {"token_classifier": True, "token_logits_weight": 0.7, "position_embedding": "none"},
        {"patch_size": [8, 4], "position_embedding_for_class_token": False},
    ],
)  # fmt: skip
def test_every_form_of_the_model(settings):
    check_alone(make(**settings), images())


def test_written_out_attention_too():
    model = make()
    model.set_attn_implementation("eager")
    check_alone(model, images())


def test_priors_that_do_not_take_several_sizes_are_refused_by_name():
    assert PRUNING
    for name in PRUNING:
        with pytest.raises(
            ValueError, match=f"prior '{name}' (drops|merges) tokens, as images of several sizes cannot"
        ):
            make(name)(images())
    with pytest.raises(ValueError, match="token_sources and bool_masked_pos are of images of one size"):
        make()(images(), token_sources=torch.zeros(6, 64, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"pixel_values of list must be \(batch, 3, height, width\)"):
        sp.SparsePriorConvitModel(sp.SparsePriorConvitConfig.from_preset("convit_tiny"))(images())


# ---- inputs ---------------------------------------------------------------------------------------------------------


def test_patches_and_padded_images_are_the_same_images():
    model, batch = make(), images()
    with torch.no_grad():
        expected = model(batch).logits
        collated = sp.MixedSizesCollator(8)([{"pixel_values": image, "label": 1} for image in batch])
        assert collated["pixel_values"].shape == (6, 64, 192) and collated["labels"].tolist() == [1] * 6
        assert collated["pixel_attention_mask"].sum(1).tolist() == [24, 64, 24, 20, 24, 64]
        labels = collated.pop("labels")
        # What is behind the last patch has no effect.
        collated["pixel_values"] += 9.0 * (1 - collated["pixel_attention_mask"])[:, :, None]
        torch.testing.assert_close(model(**collated).logits, expected)
        del collated["pixel_attention_mask"]
        loss = model(**collated, labels=labels).loss
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(expected, labels))
        padded, mask = torch.full((6, 3, 80, 64), 7.0), torch.zeros(6, 80, 64)
        for number, image in enumerate(batch):
            padded[number, :, : image.shape[1], : image.shape[2]] = image
            mask[number, : image.shape[1], : image.shape[2]] = 1
        torch.testing.assert_close(model(padded, pixel_mask=mask).logits, expected)
        # An image that ends within a patch is padded with 0.
        mask[0, 30:] = 0
        cut = batch[0].clone()
        cut[:, 30:] = 0
        torch.testing.assert_close(model(padded, pixel_mask=mask).logits[0], model(cut[None]).logits[0])


def test_the_processor_of_transformers_gives_what_the_model_takes(tmp_path):
    """Against Siglip2's own layout: patches of a resized image are the image."""
    model = make()
    processor = sp.mixed_size_processor(model.config, max_num_patches=50)
    random = np.random.default_rng(0)
    pictures = [Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in [(70, 30), (40, 90)]]
    inputs = processor(pictures, return_tensors="pt")
    shapes = inputs["spatial_shapes"].tolist()
    assert shapes[0][0] > shapes[0][1] and shapes[1][0] < shapes[1][1]
    assert all(height * width <= 50 for height, width in shapes)
    sized = [
        picture.resize((8 * width, 8 * height), 3) for picture, (height, width) in zip(pictures, shapes, strict=True)
    ]
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (model.config.image_mean, model.config.image_std))
    tensors = []
    for picture, patches, (height, width) in zip(sized, inputs["pixel_values"], shapes, strict=True):
        parts = patches[: height * width].view(height, width, 8, 8, 3)
        tensors.append(parts.permute(4, 0, 2, 1, 3).reshape(3, 8 * height, 8 * width))
        levels = (tensors[-1] * std + mean) * 255
        # Versions of the resizing that transformers calls differ in the rounding of levels of 0 to 255.
        assert (levels - torch.from_numpy(np.array(picture)).permute(2, 0, 1)).abs().max() < 1.01
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, model(tensors).logits, atol=1e-4, rtol=1e-4)
    # One of them alone is not padded to the largest.
    collated = sp.MixedSizesCollator(8)([{key: value[0] for key, value in inputs.items()}])
    assert collated["pixel_values"].shape[1] == shapes[0][0] * shapes[0][1]
    with torch.no_grad():
        torch.testing.assert_close(model(**collated).logits[0], model(tensors[:1]).logits[0], atol=1e-4, rtol=1e-4)
    # Other modes become RGB, as in the processor of images of one size.
    for mode in ("RGBA", "L", "P"):
        converted = processor([picture.convert(mode) for picture in pictures], return_tensors="pt")
        rgb = processor([picture.convert(mode).convert("RGB") for picture in pictures], return_tensors="pt")
        assert torch.equal(converted["pixel_values"], rgb["pixel_values"])
    processor.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    classify = pipeline("image-classification", model=str(tmp_path))
    found = classify([picture for picture in pictures], top_k=5)
    probabilities = torch.softmax(model(**inputs).logits, -1)
    for own, expected in zip(found, probabilities, strict=True):
        scores = {entry["label"]: entry["score"] for entry in own}
        assert [scores[f"LABEL_{label}"] for label in range(5)] == pytest.approx(expected.tolist(), abs=1e-4)


def test_patches_are_laid_out_as_in_siglip2():
    from transformers.models.siglip2.image_processing_pil_siglip2 import convert_image_to_patches

    image = torch.randn(3, 24, 40)
    assert torch.equal(as_patches(image, (8, 8)), torch.from_numpy(convert_image_to_patches(image.numpy(), 8)))
    (group,), packing = read_images(as_patches(image, (8, 8))[None], 3, (8, 8), spatial_shapes=torch.tensor([[3, 5]]))
    assert torch.equal(group[0], image) and packing == Packing(((3, 5),), (1,), (0,))


IMAGE, PATCHES, SHAPE = torch.zeros(3, 8, 8), torch.zeros(1, 9, 192), torch.tensor([[2, 4]])


@each(
    "images, options, message",
    [
        ([], {}, "pixel_values holds no image"),
        ([torch.zeros(3, 32, 30)], {}, r"pixel_values\[0\] of 32x30 pixels must be a multiple of the 8x8 patch"),
        ([IMAGE, torch.zeros(1, 8, 8)], {}, r"pixel_values\[1\] of shape \(1, 8, 8\) must be"),
        ([IMAGE, "a.png"], {}, r"pixel_values\[1\] of shape str must be"),
        ([IMAGE], {"spatial_shapes": torch.ones(1, 2)}, "spatial_shapes is for a tensor of pixel_values"),
        (PATCHES, {"pixel_attention_mask": torch.ones(1, 9)}, "pixel_attention_mask needs spatial_shapes"),
        (PATCHES[..., 1:], {"spatial_shapes": SHAPE}, r"must be \(batch, patches, 192\)"),
        (PATCHES, {"spatial_shapes": torch.ones(3, 2).int()}, r"of shape \(3, 2\) \(batch, 2\)"),
        (PATCHES, {"spatial_shapes": torch.tensor([[2, 5]])}, r"spatial_shapes\[0\]=\[2, 5\] must be 1 or more"),
        (PATCHES, {"spatial_shapes": torch.tensor([[0, 5]])}, r"spatial_shapes\[0\]=\[0, 5\] must be 1 or more"),
        (PATCHES, {"pixel_attention_mask": torch.ones(1, 9), "spatial_shapes": SHAPE}, r"mask\[0\] must be 1 for"),
        (PATCHES, {"pixel_attention_mask": torch.ones(1, 8), "spatial_shapes": SHAPE}, r"\(1, 8\) must be \(1, 9\)"),
        (IMAGE[None], {"pixel_mask": torch.zeros(1, 8, 8)}, r"pixel_mask\[0\] must be a whole rectangle"),
        (IMAGE[None], {"pixel_mask": torch.eye(8)[None]}, r"pixel_mask\[0\] must be a whole rectangle"),
        (IMAGE[None], {"pixel_mask": torch.ones(1, 8, 9)}, r"pixel_mask of shape \(1, 8, 9\) must be"),
        (
            IMAGE[None],
            {"pixel_attention_mask": torch.ones(1, 1), "pixel_mask": torch.ones(1, 8, 8)},
            "pixel_mask .* excludes",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_named(images, options, message):
    with pytest.raises(ValueError, match=message):
        make()(images, **options)
    with pytest.raises(ValueError, match=message):
        read_images(images, 3, (8, 8), **options)


# ---- training -------------------------------------------------------------------------------------------------------


def test_gradients_are_the_sum_of_those_of_each_image():
    model, batch, labels = make(), images(), torch.arange(6) % 5
    loss = torch.nn.functional.cross_entropy
    loss(model(batch).logits, labels, reduction="sum").backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for image, label in zip(batch, labels, strict=True):
        loss(model(image[None]).logits, label[None]).backward()
    assert found.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-4, rtol=1e-3, msg=lambda text, n=name: n + text)
    checkpointed = make().train()
    checkpointed.gradient_checkpointing_enable()
    loss(checkpointed(batch).logits, labels, reduction="sum").backward()
    for name, parameter in checkpointed.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-4, rtol=1e-3, msg=lambda text, n=name: n + text)


def test_a_path_is_dropped_for_a_whole_image():
    packing = Packing.of([(2, 3), (1, 1), (2, 3), (4, 1)])
    torch.manual_seed(0)
    drop = DropPath(0.5).train()
    seen = set()
    for _ in range(60):
        factors = drop(torch.ones(1, 21, 2), packing, 1)  # 2 x 7, 2 and 5 tokens
        own = [part.flatten(1) for part in packing.parts(factors, 1)]
        assert all(torch.equal(image, image[:1].expand_as(image)) for part in own for image in part)
        seen.add(tuple(float(image[0]) for part in own for image in part))
    assert len(seen) == 16 and {value for found in seen for value in found} == {0.0, 2.0}


class Pictures(torch.utils.data.Dataset):
    """Bright and dark images of three sizes."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        size = [(32, 48), (64, 24), (40, 40)][index % 3]
        return {"pixel_values": torch.full((3, *size), float(index % 2) - 0.5), "labels": index % 2}


def test_the_trainer_learns_and_measures_images_of_several_sizes(tmp_path):
    model = make("fibottention", num_labels=2, initializer_range=0.02)
    arguments = SparsePriorTrainingArguments(
        str(tmp_path), max_steps=30, per_device_train_batch_size=7, learning_rate=3e-3, report_to="none", use_cpu=True,
        disable_tqdm=True, save_strategy="no", logging_steps=1, seed=0,
    )  # fmt: skip
    trainer = SparsePriorTrainer(
        model=model, args=arguments, train_dataset=Pictures(), data_collator=sp.MixedSizesCollator(8)
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.2 * losses[0]
    predicted = trainer.predict(Pictures())
    logits = predicted.predictions  # an array, as `compute_metrics` of others expects
    assert (logits.argmax(1) == np.arange(24) % 2).all()


def test_lora_adapts_them_too():
    model = get_peft_model(make(), LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False))
    check_alone(model.eval(), images())


# ---- speed ----------------------------------------------------------------------------------------------------------


def test_a_batch_of_many_sizes_makes_its_plans_once(monkeypatch):
    made = []

    class Counted(attention.AttentionPlan):
        def __init__(self, *arguments):
            made.append(arguments[1])
            super().__init__(*arguments)

    monkeypatch.setattr(attention, "AttentionPlan", Counted)
    model = make()
    batch = images([(8 * height, 8 * width) for height in range(2, 7) for width in range(2, 7)])
    with torch.no_grad():
        first = model(batch).logits
        assert len(made) == 3 * 25
        torch.testing.assert_close(model(batch).logits, first)
    assert len(made) == 3 * 25


@pytest.mark.slow
def test_a_batch_compiles_into_one_graph():
    model, batch = make(), images()
    with torch.no_grad():
        expected = model(batch).logits
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(batch).logits, expected)
