"""DINO's loss, centre, teacher and schedules against loops in float64 and closed forms; crops alone and together."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torch import nn

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTModel
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.images.sources.images import array_images
from hf_sparseprior.training import Draw
from tasks.pretraining.config import DinoConfig, EvaluationConfig, check_config
from tasks.pretraining.crops import CropConfig, CropDataset, MultiCrop, random_box, turned_hue
from tasks.pretraining.dino import Dino, DinoHead, dino_loss
from tasks.pretraining.evaluation import knn_predict, last_layers
from tasks.pretraining.schedules import cosine, linear, warmed_up_cosine
from tasks.pretraining.task import PRETRAINING, build_backbone, check_crops
from tasks.pretraining.trainer import clip_each
from tests.configs import shipped
from tests.each import each
from tests.hf_sparseprior.small import small

HEAD = {"output_size": 12, "head_hidden_size": 8, "bottleneck_size": 4}
SIZES = {
    "image_size": 16, "patch_size": 4, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 8,
}  # fmt: skip


def model(prior="fibottention+violin", **options):
    torch.manual_seed(0)
    return Dino(SparsePriorViTModel(SparsePriorViTConfig(prior=prior, **SIZES)), DinoConfig(**HEAD, **options))


@pytest.mark.parametrize("views", [2, 5])
def test_the_loss_is_that_of_a_loop_over_pairs_of_views(views):
    generator = np.random.default_rng(0)
    outputs, targets, centre = generator.normal(size=(3, views, 7)), generator.normal(size=(3, 2, 7)), np.ones(7) / 3
    losses, entropies = [], []
    for image in range(3):
        for teacher in range(2):
            wanted = np.exp((targets[image, teacher] - centre) / 0.04)
            wanted /= wanted.sum()
            entropies.append(-(wanted * np.log(np.maximum(wanted, 1e-300))).sum())
            for student in range(views):
                if student != teacher:
                    scaled = outputs[image, student] / 0.1
                    losses.append(-(wanted * (scaled - np.log(np.exp(scaled).sum()))).sum())
    found = dino_loss(*map(torch.from_numpy, (outputs, targets, centre)), 0.1, 0.04)
    assert found["loss"].item() == pytest.approx(np.mean(losses), rel=1e-12)
    assert found["entropy"].item() == pytest.approx(np.mean(entropies), rel=1e-12)
    assert found["kl"].item() == pytest.approx(np.mean(losses) - np.mean(entropies), rel=1e-9)


def test_crops_of_two_sizes_together_are_each_alone():
    dino = model().double().eval()
    generator = torch.Generator().manual_seed(1)
    large = torch.randn(3, 2, 3, 16, 16, generator=generator, dtype=torch.float64)
    local = torch.randn(3, 2, 3, 8, 8, generator=generator, dtype=torch.float64)
    together = dino.student(large, local)
    assert together.shape == (3, 4, 12)
    for view in range(4):
        crops = large[:, view] if view < 2 else local[:, view - 2]
        for image in range(3):
            alone = dino.student.head(dino.student.backbone(pixel_values=crops[image : image + 1]).pooler_output)
            torch.testing.assert_close(together[image, view], alone[0], rtol=1e-10, atol=1e-12)


def test_a_small_crop_has_the_decay_and_support_of_its_own_grid():
    """A model of the small size, with positions interpolated to it, gives what the large one gives for small crops."""
    large = model().student.backbone.double().eval()
    config = SparsePriorViTConfig(prior=large.config.prior, **{**SIZES, "image_size": 8})
    own = SparsePriorViTModel(config).double().eval()
    state = {**large.state_dict(), **large.resized_weights(config)}
    own.load_state_dict(state)
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found, expected = (one(pixel_values=pixels).pooler_output for one in (large, own))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_the_head_is_an_mlp_on_the_unit_sphere_with_rows_of_one_length():
    head = DinoHead(6, DinoConfig(**HEAD)).double()
    features = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hidden = features
    layers = [layer for layer in head.mlp if isinstance(layer, nn.Linear)]
    assert len(layers) == 3
    for number, layer in enumerate(layers):
        hidden = hidden @ layer.weight.T + layer.bias
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2 if number < 2 else hidden
    hidden = hidden / hidden.norm(dim=-1, keepdim=True)
    rows = head.last_layer.parametrizations.weight.original1
    expected = hidden @ (rows / rows.norm(dim=-1, keepdim=True)).T
    torch.testing.assert_close(head(features), expected, rtol=1e-10, atol=1e-12)
    norms = "last_layer.parametrizations.weight.original0"
    assert not dict(head.named_parameters())[norms].requires_grad
    assert DinoHead(6, DinoConfig(**HEAD, norm_last_layer=False)).get_parameter(norms).requires_grad


def test_centre_and_teacher_move_by_their_momenta():
    dino = model(centre_momentum=0.75)
    crops = torch.randn(4, 2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in dino.student.parameters():
            parameter.add_(0.5)
    targets = [dino.teacher(part) for part in crops.split([3, 1])]
    before = [value.clone() for value in dino.teacher.parameters()]
    for part in crops.split([3, 1]):  # two micro-batches of one step
        dino(part)
    dino.update_centre()
    dino.update_teacher(0.9)
    torch.testing.assert_close(dino.centre, 0.25 * torch.cat(targets).mean((0, 1)))
    for now, old, student in zip(dino.teacher.parameters(), before, dino.student.parameters(), strict=True):
        torch.testing.assert_close(now, 0.9 * old + 0.1 * student)
    assert not any(module.training for module in dino.teacher.modules()) and dino.student.training
    assert not any(parameter.requires_grad for parameter in dino.teacher.parameters())


def test_the_teacher_gets_no_gradient_and_the_student_does():
    dino = model("violin")
    crops = torch.randn(2, 2, 3, 16, 16), torch.randn(2, 2, 3, 8, 8)
    dino(*crops)["loss"].backward()
    assert all(parameter.grad is None for parameter in dino.teacher.parameters())
    assert all(p.grad is not None for p in dino.student.parameters() if p.requires_grad)


def test_schedules_are_the_published_ones():
    steps, warmup = 40, 8
    expected = np.linspace(0, 0.3, warmup).tolist()
    expected += [0.1 + 0.5 * 0.2 * (1 + np.cos(np.pi * i / (steps - warmup))) for i in range(steps - warmup)]
    assert [warmed_up_cosine(0.3, 0.1, step, steps, warmup) for step in range(steps)] == pytest.approx(expected)
    assert warmed_up_cosine(0.3, 0.1, steps, steps, warmup) == pytest.approx(0.1)
    decay = [0.4 + 0.5 * (0.04 - 0.4) * (1 + np.cos(np.pi * i / steps)) for i in range(steps)]
    assert [cosine(0.04, 0.4, step, steps) for step in range(steps)] == pytest.approx(decay)
    assert cosine(0.996, 1.0, 0, steps) == 0.996 and cosine(0.996, 1.0, steps, steps) == 1.0
    assert cosine(0.996, 1.0, steps // 2, steps) == pytest.approx(0.998)
    warmed = np.linspace(0.04, 0.07, 30).tolist() + [0.07] * 5
    assert [linear(0.04, 0.07, epoch, 30) for epoch in range(35)] == pytest.approx(warmed)
    assert linear(0.04, 0.07, 0, 0) == 0.07


def test_each_gradient_is_clipped_alone():
    layer = nn.Linear(3, 2)
    layer.weight.grad, layer.bias.grad = torch.full((2, 3), 10.0), torch.full((2,), 0.1)
    clip_each(layer, 3.0)
    assert layer.weight.grad.norm().item() == pytest.approx(3.0, rel=1e-5)
    assert torch.equal(layer.bias.grad, torch.full((2,), 0.1))


@pytest.mark.parametrize("neighbours", [1, 4])
def test_knn_counts_the_votes_of_the_nearest(neighbours):
    generator = np.random.default_rng(0)
    bank, queries = (generator.normal(size=(count, 3)) for count in (15, 9))
    bank, queries = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (bank, queries))
    labels = generator.integers(0, 3, 15)
    expected = []
    for query in queries:
        similarity = bank @ query
        votes = np.zeros(3)
        for index in sorted(range(15), key=lambda i: -similarity[i])[:neighbours]:
            votes[labels[index]] += math.exp(similarity[index] / 0.07)
        expected.append(votes.argmax())
    found = knn_predict(*map(torch.from_numpy, (bank, labels, queries)), neighbours, 0.07, 3)
    assert found.tolist() == expected and len(set(expected)) > 1


def test_features_of_the_linear_classifier_are_the_last_layers_class_tokens():
    backbone = model().student.backbone.eval()
    pixels = torch.randn(2, 3, 16, 16)
    output = backbone(pixel_values=pixels, output_hidden_states=True)
    found = last_layers(backbone, EvaluationConfig(linear_layers=2, linear_average=True))(pixels)
    last = output.last_hidden_state
    expected = torch.cat([backbone.layernorm(output.hidden_states[1])[:, 0], last[:, 0], last[:, 1:].mean(1)], -1)
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match=r"evaluation\.linear_layers=3 must be at most 2"):
        last_layers(backbone, EvaluationConfig(linear_layers=3))


@each(
    "family, options",
    [
        ("sparseprior_vit", {"pooling": "class_token"}),
        ("sparseprior_vit", {"pooling": "mean"}),
        ("sparseprior_vit", {"pooling": "mean", "use_class_token": False}),
        ("sparseprior_vit", {"pooling": "class_token_and_mean", "num_register_tokens": 2}),
        ("sparseprior_convit", {"pooling": "class_token"}),
        ("sparseprior_convit", {"pooling": "mean"}),
        ("sparseprior_swin", {}),
        ("sparseprior_iformer", {}),
    ],
)
def test_the_linear_classifier_reads_what_dino_trains(family, options):
    """The last layer's part is `pooler_output`; layers of a ConViT that have no class token give the mean."""
    backbone = FAMILIES[family].base(small(family, num_channels=3, **options)).eval()
    pixels = torch.randn(2, 3, backbone.config.image_size, backbone.config.image_size)
    output = backbone(pixel_values=pixels, output_hidden_states=True)
    found = last_layers(backbone, EvaluationConfig(linear_layers=1))(pixels)
    torch.testing.assert_close(found, output.pooler_output)
    if options.get("pooling") != "class_token":
        with pytest.raises(ValueError, match=r"linear_average=true would give the mean twice"):
            last_layers(backbone, EvaluationConfig(linear_layers=1, linear_average=True))
    if family == "sparseprior_convit":
        first = backbone.layernorm(output.hidden_states[1]).mean(1)
        found = last_layers(backbone, EvaluationConfig(linear_layers=2))(pixels)
        torch.testing.assert_close(found, torch.cat([first, output.pooler_output], -1))


# ---- crops ----------------------------------------------------------------------------------------------------------


def test_crops_follow_from_the_draw_alone():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 20, 24, 3), dtype=np.uint8)
    crops = MultiCrop(CropConfig(local_crops=3, local_size=8), (16, 16), [0.5] * 3, [0.25] * 3)
    dataset = CropDataset(array_images(pixels, np.arange(4), "train"), crops, seed=5)
    before = torch.get_rng_state()
    first = dataset[Draw(2, 1, 0)]
    assert torch.equal(torch.get_rng_state(), before)
    assert first["global_crops"].shape == (2, 3, 16, 16) and first["local_crops"].shape == (3, 3, 8, 8)
    torch.rand(3)
    assert all(torch.equal(first[name], value) for name, value in dataset[Draw(2, 1, 7)].items())
    assert not torch.equal(first["global_crops"], dataset[Draw(2, 2, 0)]["global_crops"])
    with pytest.raises(TypeError, match="indexed by Draw"):
        dataset[0]


def test_without_any_change_a_crop_is_the_normalised_image():
    off = dict.fromkeys(("flip", "jitter", "grey", "solarize"), 0.0)
    config = CropConfig(local_crops=0, global_scale=(1.0, 1.0), blur=(0.0, 0.0, 0.0), **off)
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    views = MultiCrop(config, (16, 16), [0.5, 0.4, 0.3], [0.2, 0.25, 0.3])(
        Image.fromarray(pixels), np.random.default_rng(0)
    )
    assert set(views) == {"global_crops"}
    expected = (pixels / 255 - np.array([0.5, 0.4, 0.3])) / np.array([0.2, 0.25, 0.3])
    for view in views["global_crops"].numpy():  # a box of the whole area of a square image is the image
        np.testing.assert_allclose(view, expected.transpose(2, 0, 1), rtol=0, atol=1e-5)


def test_areas_ratios_and_places_of_boxes_are_uniform():
    random = np.random.default_rng(0)
    boxes = np.array([random_box((600, 500), (0.1, 0.5), (0.67, 1.5), random) for _ in range(500)])
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert boxes.min() >= 0 and boxes[:, 2].max() <= 600 and boxes[:, 3].max() <= 500
    area = width * height / (600 * 500)
    assert stats.kstest(area, stats.uniform(0.1, 0.4).cdf).pvalue > 0.01
    log_ratio = stats.uniform(np.log(0.67), np.log(1.5 / 0.67))
    assert stats.kstest(np.log(width / height), log_ratio.cdf).pvalue > 0.01
    assert stats.kstest(boxes[:, 0] / (600 - width), stats.uniform.cdf).pvalue > 0.01
    assert stats.kstest(boxes[:, 1] / (500 - height), stats.uniform.cdf).pvalue > 0.01


@pytest.mark.parametrize(("size", "box"), [((500, 20), (236, 0, 263, 20)), ((9, 300), (0, 144, 9, 156))])
def test_where_no_box_fits_it_is_the_largest_of_an_allowed_ratio_in_the_middle(size, box):
    assert random_box(size, (1.0, 1.0), (3 / 4, 4 / 3), np.random.default_rng(0)) == box


def test_a_turn_of_the_whole_circle_keeps_the_hue():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))
    same = image.convert("HSV").convert("RGB")
    assert np.array_equal(turned_hue(image, 256), same) and np.array_equal(turned_hue(image, 0), same)
    red = Image.new("RGB", (1, 1), (255, 0, 0))
    green = turned_hue(red, 85).getpixel((0, 0))  # a third of the circle
    assert green[1] > 250 and green[0] < 10 and green[2] < 10


# ---- configurations -------------------------------------------------------------------------------------------------


@each(
    "changes, message",
    [
        ({"trainer": {"lr_scheduler_type": "cosine"}}, r"lr_scheduler_type='cosine' is not for DINO; use dino"),
        ({"trainer": {"max_grad_norm": 1.0}}, r"use dino\.clip_gradient"),
        ({"trainer": {"load_best_model_at_end": True}}, "keeps the last teacher"),
        ({"trainer": {"learning_rate": 0.0}}, r"trainer\.learning_rate=0\.0 must be a number above 0"),
        ({"dino": {"teacher_momentum": 2}}, r"dino\.teacher_momentum=2 must be a number in \[0, 1\]"),
        ({"dino": {"teacher_momentum": 1}}, r"dino\.teacher_momentum=1 must be below 1"),
        ({"evaluation": {"eval_crop_ratio": 0}}, r"evaluation\.eval_crop_ratio=0 must be a number in 0\.1\.\.1"),
        ({"trainer": {"gradient_checkpointing": True}}, r"trainer\.gradient_checkpointing=true is not for DINO"),
        ({"trainer": {"progressive_sizes": [4, 8]}}, r"trainer\.progressive_sizes=\[4, 8\] is not for DINO; use crops"),
        ({"data": {"stage": "final"}, "trainer": {"eval_strategy": "epoch"}}, "must be no with data.stage=final"),
        ({"dino": {"temperature": 1}}, "section 'dino' has no key 'temperature'"),
        ({"crops": {"global_scale": [0.5, 0.2]}}, r"crops\.global_scale=.* the smaller one first, at most 1"),
        ({"crops": {"blur": [1.0]}}, "must be three numbers"),
        ({"evaluation": {"neighbours": 0}}, r"evaluation\.neighbours=0 must be an integer of 1 or more"),
        ({"data": {"source": "parquet", "path": "x", "streaming": True}}, r"data\.streaming=true: k-NN needs"),
        ({"model": {"classifier_init_std": 1.0}}, "section 'model' has no key 'classifier_init_std'"),
    ],
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        check_config(changes)


def test_what_is_off_is_no_bad_value():
    check_config({"trainer": {"gradient_checkpointing": False, "load_best_model_at_end": False}})


def test_a_prior_with_losses_of_its_own_and_crops_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"model\.prior='evit' has losses of its own|has losses of its own"):
        model("dynamicvit")
    with pytest.raises(ValueError, match=r"crops\.local_size=10: image of 10x10 pixels must be a multiple"):
        check_crops(model(), CropConfig(local_size=10))


FILES = [f"pretraining/{file.name}" for file in shipped.files("pretraining")]
RUNS = [run for name in (*FILES, *shipped.PRETRAINING) for run in shipped.runs(name)]


@each("name", RUNS)
def test_shipped_configurations_load(name):
    config = PRETRAINING.load_config(shipped.path(name))
    published = {"decay": {"name": "violin", "init": "pretrain_published"}}
    assert config["model"].get("prior") in ("dense", "violin", published) and config["trainer"]["output_dir"]


def test_the_papers_configurations_have_the_papers_models():
    for name, epochs, width in (("dino_small_100", 100, 384), ("dino_small_300", 300, 384), ("dino_base", 300, 768)):
        config = PRETRAINING.load_config(shipped.path(f"pretraining/{name}.yaml"))
        trainer, dino = config["trainer"], DinoConfig(**config["dino"])
        assert trainer["num_train_epochs"] == epochs and dino.output_size == 65536
        with torch.device("meta"):
            backbone = build_backbone(config["model"])
        assert backbone.config.hidden_size == width and backbone.config.grid == (14, 14)
        reference = {"dino_small_100": 5e-4, "dino_small_300": 5e-4, "dino_base": 7.5e-4}[name]
        assert trainer["learning_rate"] == pytest.approx(reference * trainer["effective_batch_size"] / 256)


@each("name", [family.name for family in FAMILIES.values() if family.takes == "images"])
def test_every_family_of_images_learns(name):
    torch.manual_seed(0)
    dino = Dino(FAMILIES[name].base(small(name, prior="violin")), DinoConfig(**HEAD))
    side = dino.student.backbone.config.image_size
    losses = dino(torch.randn(2, 2, 3, side, side))
    losses["loss"].backward()
    assert losses["loss"].isfinite() and losses["kl"] > 0
    assert dino.student.backbone.get_input_embeddings().weight.grad.abs().max() > 0
