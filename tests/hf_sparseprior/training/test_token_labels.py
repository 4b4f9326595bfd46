"""Token labels: resampling against brute force, losses against values by hand, folders of maps and their damage."""

import json
import math
import pickle
from itertools import cycle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import Dataset

import hf_sparseprior as sp
from hf_sparseprior.training import (
    Draw,
    DrawSampler,
    LabelMaps,
    MapHeader,
    Mixing,
    SoftTargetCollator,
    SparsePriorTrainer,
    SparsePriorTrainingArguments,
    token_label_loss,
    token_labels,
    token_targets,
    write_label_maps,
)
from hf_sparseprior.training.mixing import Mix, own_shares
from hf_sparseprior.training.token_labels import (
    FLIPPED,
    HEADER,
    WHOLE,
    affine_view,
    box_view,
    cell_shares,
    fingerprint,
    map_probabilities,
    patch_probabilities,
    top_classes,
)
from tests.each import each

CLASSES = 6


def as_tensor(view):
    return torch.tensor(view[:2])[None]


# ---- resampling -----------------------------------------------------------------------------------------------------


def bilinear(values, x, y):
    """A map (h, w, C) at a place in shares of the image: between the middles of cells, constant outside of them."""
    height, width = values.shape[:2]
    column, row = (min(max(place * side - 0.5, 0.0), side - 1.0) for place, side in ((x, width), (y, height)))
    left, top = math.floor(column), math.floor(row)
    right, bottom = min(left + 1, width - 1), min(top + 1, height - 1)
    over, under = column - left, row - top
    upper = (1 - over) * values[top, left] + over * values[top, right]
    return (1 - under) * upper + under * ((1 - over) * values[bottom, left] + over * values[bottom, right])


def brute_force(values, view, grid, samples):
    """Each patch's mean over samples, one at a time; what lies outside of the image counts as uniform."""
    targets = np.zeros((*grid, values.shape[-1]))
    for row, column in np.ndindex(*grid):
        for i, j in np.ndindex(*samples):
            seen = (column + (j + 0.5) / samples[1]) / grid[1], (row + (i + 0.5) / samples[0]) / grid[0], 1.0
            x, y, _ = view @ seen
            inside = 0 <= x <= 1 and 0 <= y <= 1
            targets[row, column] += bilinear(values, x, y) if inside else 1 / values.shape[-1]
    return targets / (samples[0] * samples[1])


def rotation(degrees, size=(16, 12)):
    angle, (x, y) = math.radians(degrees), (side / 2 for side in size)
    cosine, sine = math.cos(angle), math.sin(angle)
    return affine_view((cosine, -sine, x - cosine * x + sine * y, sine, cosine, y - sine * x - cosine * y), size)


VIEWS = {
    "whole": WHOLE,
    "flip": FLIPPED,
    "crop": box_view(0.13, 0.31, 0.72, 0.88),
    "crop and flip": box_view(0.13, 0.31, 0.72, 0.88) @ FLIPPED,
    "padding": box_view(-0.2, -0.1, 0.7, 1.3),
    "turned": box_view(0.05, 0.1, 0.9, 1.0) @ FLIPPED @ rotation(25),
}


GRIDS = [((5, 4), (5, 4), (1, 1)), ((7, 9), (3, 4), (3, 3)), ((3, 2), (6, 4), (1, 1))]


@each(
    "name, map_grid, grid, samples",
    [*((name, *grids) for name, grids in zip(VIEWS, cycle(GRIDS))), *(("turned", *grids) for grids in GRIDS[:2])],
)
def test_maps_are_resampled_as_by_brute_force(name, map_grid, grid, samples):
    generator = np.random.default_rng(0)
    values = generator.dirichlet(np.ones(CLASSES), size=map_grid)
    scores, classes = torch.tensor(values).sort(-1, descending=True)
    batch = {
        "classes": classes[None], "scores": scores[None], "views": as_tensor(VIEWS[name]).float(),
        "partners": torch.tensor([0]), "shares": torch.ones(1, grid[0] * grid[1]),
    }  # fmt: skip
    targets = token_targets(batch, CLASSES, grid)[0].reshape(*grid, CLASSES)
    expected = brute_force(values, VIEWS[name], grid, samples)
    np.testing.assert_allclose(targets.numpy(), expected, atol=2e-6)
    torch.testing.assert_close(targets.sum(-1), torch.ones(grid))


def test_without_augmentation_a_map_of_the_patch_grid_stays_as_it_is():
    shares = cell_shares(as_tensor(WHOLE), (4, 3), (4, 3))[0]
    torch.testing.assert_close(shares, torch.eye(12, dtype=torch.float64), atol=1e-12, rtol=0)
    flipped = cell_shares(as_tensor(FLIPPED), (4, 3), (4, 3))[0].reshape(4, 3, 4, 3)
    for row, column in np.ndindex(4, 3):
        assert flipped[row, column, row, 2 - column] == pytest.approx(1)
    # One that is twice as fine is averaged.
    shares = cell_shares(as_tensor(WHOLE), (4, 6), (2, 3))[0].reshape(2, 3, 2, 2, 3, 2)
    for row, column in np.ndindex(2, 3):
        assert shares[row, column, row, :, column].flatten().tolist() == pytest.approx([0.25] * 4)


def test_what_a_map_does_not_say_goes_to_the_other_classes():
    classes, scores = torch.tensor([[4, 1]]), torch.tensor([[0.5, 0.3]])
    expected = torch.tensor([[0.05, 0.3, 0.05, 0.05, 0.5, 0.05]])
    torch.testing.assert_close(map_probabilities(classes, scores, CLASSES), expected)
    every = torch.arange(CLASSES)[None], torch.full((1, CLASSES), 1 / CLASSES)
    torch.testing.assert_close(map_probabilities(*every, CLASSES), every[1])


# ---- loss -----------------------------------------------------------------------------------------------------------


def test_the_loss_by_hand():
    logits = torch.tensor([[[0.0, 0.0], [math.log(3), 0.0]]])
    targets = torch.tensor([[[0.2, 0.8], [0.75, 0.25]]])
    first = math.log(2)
    second = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert token_label_loss(logits, targets).item() == pytest.approx((first + second) / 2)
    kept = token_label_loss(logits[:, :1], targets, torch.tensor([[1]]))
    assert kept.item() == pytest.approx(math.log(2))
    assert token_label_loss(logits[:, 1:], targets, torch.tensor([[1]])).item() == pytest.approx(second)


class Labelled(Dataset):
    """Random images and maps, indexed by Draw."""

    def __len__(self):
        return 8

    def __getitem__(self, draw):
        generator = torch.Generator().manual_seed(draw.index)
        classes, scores = top_classes(torch.rand(4, 4, CLASSES, generator=generator).softmax(-1), 2)
        view = torch.tensor(box_view(0.1, 0.2, 0.8, 1.0)[:2]).float()
        return {
            "pixel_values": torch.randn(3, 16, 16, generator=generator), "labels": draw.index % CLASSES, "draw": draw,
            "label_map": (classes, scores, view),
        }  # fmt: skip


def make_model(**settings):
    torch.manual_seed(0)
    config = sp.SparsePriorViTConfig.from_preset("lvvit_small", **{
        "image_size": 16, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "stem_channels": 4, "num_labels": CLASSES, "initializer_range": 0.3, **settings,
    })  # fmt: skip
    return sp.SparsePriorViTForImageClassification(config)


def make_trainer(folder, model, collator, **options):
    arguments = SparsePriorTrainingArguments(
        output_dir=str(folder), report_to="none", disable_tqdm=True, use_cpu=True, remove_unused_columns=False,
        per_device_train_batch_size=8, max_steps=2, save_strategy="no", learning_rate=1e-2, label_names=["labels"],
    )  # fmt: skip
    return SparsePriorTrainer(
        model=model, args=arguments, train_dataset=Labelled(), train_sampler=DrawSampler(8), train_collator=collator,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("mixing", [Mixing(), Mixing(cutmix=1.0), Mixing(mixtoken=1.0)], ids=str)
def test_the_trainers_loss_is_class_plus_weighted_dense_cross_entropy(mixing, tmp_path):
    model = make_model()
    collator = SoftTargetCollator(CLASSES, mixing, batch_size=8, grid=(4, 4))
    trainer = make_trainer(tmp_path, model, collator, token_label_weight=0.7)
    batch = collator([Labelled()[Draw(index, 0, index)] for index in range(8)])
    model.train()
    with torch.no_grad():
        loss = trainer.compute_loss(model, dict(batch))
        output = model(batch["pixel_values"], token_sources=batch.get("token_sources"))
    labels = batch["labels"]
    if not mixing.enabled:
        labels = torch.nn.functional.one_hot(labels, CLASSES).float()
    dense = token_targets(batch["token_targets"], CLASSES, (4, 4)).double()
    classes = -(labels.double() * output.logits.double().log_softmax(-1)).sum(-1).mean()
    tokens = -(dense * output.token_logits.double().log_softmax(-1)).sum() / (8 * 16)
    assert loss.item() == pytest.approx((classes + 0.7 * tokens).item(), rel=1e-6)


def test_training_moves_both_classifiers(tmp_path):
    model = make_model()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    make_trainer(tmp_path, model, SoftTargetCollator(CLASSES, Mixing(mixtoken=1.0), 0.1, 0, 8, (4, 4))).train()
    for name, weight in model.named_parameters():
        assert not torch.equal(weight, before[name]), name


def test_token_targets_without_a_token_classifier_are_refused(tmp_path):
    model = make_model(token_classifier=False)
    collator = SoftTargetCollator(CLASSES, Mixing(), grid=(4, 4))
    with pytest.raises(ValueError, match="the model no token_classifier"):
        make_trainer(tmp_path, model, collator).train()


# ---- mixing ---------------------------------------------------------------------------------------------------------


def painted(draws, grid, side):
    """Images whose pixels hold their index, with maps that are sure of class `index`."""
    whole = torch.tensor(WHOLE[:2]).float()
    return [
        {
            "pixel_values": torch.full((1, side, side), float(draw.index)), "labels": draw.index, "draw": draw,
            "label_map": (torch.full((*grid, 1), draw.index), torch.ones(*grid, 1), whole),
        }
        for draw in draws
    ]  # fmt: skip


@pytest.mark.parametrize("mixing", [Mixing(mixup=0.8), Mixing(cutmix=1.0), Mixing(mixtoken=1.0)], ids=str)
def test_token_targets_are_mixed_as_the_pixels_are(mixing):
    grid, side, seen = (4, 4), 20, set()
    for epoch in range(12):
        draws = [Draw(index, epoch, index) for index in range(CLASSES)]
        batch = SoftTargetCollator(CLASSES, mixing, batch_size=CLASSES, grid=grid)(painted(draws, grid, side))
        targets = token_targets(batch["token_targets"], CLASSES, grid)
        if mixing.mixtoken:  # the model does to tokens what this does to patches of pixels
            patches = batch["token_sources"].double()
        else:
            # A pixel of an image 2i or 2i + 1 says which share it has of either.
            patches = batch["pixel_values"].double().reshape(CLASSES, 4, 5, 4, 5).mean((2, 4)).flatten(1)
        own = torch.arange(CLASSES).view(-1, 1)
        from_partner = (patches - own).abs()
        expected = torch.zeros(CLASSES, 16, CLASSES, dtype=torch.float64)
        for image in range(CLASSES):
            expected[image, :, image] = 1 - from_partner[image]
            expected[image, :, image ^ 1] = from_partner[image]
        torch.testing.assert_close(targets.double(), expected, atol=1e-5, rtol=0)
        # The class token's target has the same shares.
        torch.testing.assert_close(batch["labels"].double(), expected.mean(1), atol=1e-5, rtol=0)
        seen.add(round(from_partner[0].mean().item(), 3))
    assert len(seen) > 2


def test_shares_of_a_patch_by_counting_pixels():
    mix, inside = Mix(0.5, (3, 11, 2, 9)), torch.zeros(12, 10)
    inside[3:11, 2:9] = 1
    expected = 1 - torch.stack([inside[r : r + 4, c : c + 5].mean() for r in (0, 4, 8) for c in (0, 5)])
    torch.testing.assert_close(own_shares(mix, (12, 10), (3, 2)), expected)


def test_mixtoken_goes_alone_and_needs_a_grid():
    with pytest.raises(ValueError, match=r"mixtoken=1\.0 goes with neither mixup nor cutmix"):
        Mixing(cutmix=1.0, mixtoken=1.0)
    with pytest.raises(ValueError, match="needs the grid"):
        SoftTargetCollator(CLASSES, Mixing(mixtoken=1.0))


# ---- what a teacher sees --------------------------------------------------------------------------------------------


@each("own", [True, False])
def test_a_teacher_says_of_a_patch_what_its_classifier_says_of_the_token(own):
    model = make_model(token_classifier=own).eval()
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        probabilities = patch_probabilities(model, pixels)
        tokens = model.vit(pixels).last_hidden_state
        head = model.token_classifier if own else model.classifier
        for image, patch in np.ndindex(2, 16):
            expected = torch.softmax(head.weight @ tokens[image, 1 + patch] + head.bias, 0)
            torch.testing.assert_close(probabilities[image, patch], expected)


# ---- folders of maps ------------------------------------------------------------------------------------------------


def header(**settings):
    names = [f"class {index}" for index in range(CLASSES)]
    given = {"images": 10, "classes": names, "grid": [2, 3], "top_k": 2, "teacher": "t", "data": "d"}
    return MapHeader(**{**given, "images_per_file": 4, **settings})


def some_maps(indices):
    parts = [torch.rand(2, 3, CLASSES, generator=torch.Generator().manual_seed(index)).softmax(-1) for index in indices]
    return top_classes(torch.stack(parts), 2)


@pytest.fixture
def folder(tmp_path):
    assert write_label_maps(tmp_path / "maps", header(), some_maps) == 3
    return tmp_path / "maps"


def test_maps_come_back_as_they_were_written_in_another_process_too(folder):
    opened = LabelMaps(folder)
    opened.read(5)  # holds an open file now
    for maps in (LabelMaps(folder), pickle.loads(pickle.dumps(LabelMaps(folder))), pickle.loads(pickle.dumps(opened))):
        assert len(maps) == 10
        maps.check(10, header().classes, "d")
        maps.verify()
        for index in (9, 0, 4, 3, 5):
            classes, scores = maps.read(index)
            expected = torch.rand(2, 3, CLASSES, generator=torch.Generator().manual_seed(index)).softmax(-1)
            sums = torch.gather(expected, -1, classes.long())
            torch.testing.assert_close(scores.float(), sums, atol=1e-3, rtol=0)
            assert (scores[..., 0].float() >= expected.max(-1).values - 1e-3).all()


def test_every_file_is_opened_once_and_its_maps_are_views(folder, monkeypatch):
    opened, real = [], token_labels.safe_open
    monkeypatch.setattr(token_labels, "safe_open", lambda path, *rest: (opened.append(path.name), real(path, *rest))[1])
    maps = LabelMaps(folder)
    opened.clear()
    read = [maps.read(index) for index in (0, 9, 1, 3, 8, 0)]
    assert opened == [maps.header.files[0], maps.header.files[2]]
    assert read[0][0].data_ptr() == read[5][0].data_ptr()  # of the file, not a copy
    assert read[2][0].data_ptr() - read[0][0].data_ptr() == read[0][0].numel() * 2


class Killed(BaseException):
    pass


def test_work_that_was_killed_goes_on(folder, tmp_path):
    asked = []

    def killed(indices):
        asked.append(indices)
        if indices.start:
            raise Killed
        return some_maps(indices)

    with pytest.raises(Killed):
        write_label_maps(tmp_path / "again", header(), killed)
    with pytest.raises(OSError, match=r"lacks 2 of 3 files of label maps, maps-00001-of-00003.safetensors the first"):
        LabelMaps(tmp_path / "again")
    (tmp_path / "again" / "maps-00001-of-00003.safetensors.partial").write_bytes(b"half")
    assert write_label_maps(tmp_path / "again", header(), lambda i: (asked.append(i), some_maps(i))[1]) == 2
    assert asked == [range(4), range(4, 8), range(4, 8), range(8, 10)]
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == files
    assert write_label_maps(folder, header(), lambda i: pytest.fail("made again")) == 0


def test_a_damaged_file_is_made_again(folder, capsys):
    path = folder / "maps-00001-of-00003.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert write_label_maps(folder, header(), some_maps) == 1 and path.read_bytes() == whole
    assert "is made again: its content does not fit its checksum" in capsys.readouterr().err


def test_folders_of_others_are_left_alone(folder, tmp_path):
    with pytest.raises(ValueError, match="holds other label maps, they differ in grid, teacher"):
        write_label_maps(folder, header(teacher="u", grid=[3, 3]), some_maps)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("words")
    with pytest.raises(ValueError, match="is not empty and holds no label maps"):
        write_label_maps(tmp_path / "full", header(), some_maps)


@each(
    "arguments, message",
    [
        ((11, header().classes, "d"), "has label maps of 10 images, the training set 11"),
        ((10, [*header().classes[:3], "cat", *header().classes[4:]], "d"), "class 3 is 'class 3' there, 'cat' here"),
        ((10, header().classes[:5], "d"), "of 6 classes, the data 5; class 5 is 'class 5' there, 'none' here"),
        ((10, header().classes, "e"), "label maps of other images, or of these in another order"),
    ],
)
def test_maps_of_other_data_are_refused(folder, arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        LabelMaps(folder).check(*arguments)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


def part(number):
    return f"maps-0000{number}-of-00003.safetensors"


def rewritten(number, change):
    """What saves a file again, with changed maps."""

    def damage(folder):
        maps = {name: change(tensor).contiguous() for name, tensor in load_file(folder / part(number)).items()}
        save_file(maps, folder / part(number))

    return damage


def with_bytes(name, change):
    """What changes the bytes of a file."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def with_header(change):
    return with_bytes(HEADER, lambda content: json.dumps(change(json.loads(content))).encode())


def pickled(folder):
    (folder / part(1)).unlink()
    torch.save({"classes": some_maps(range(4, 8))[0]}, folder / part(1))


DAMAGE = [
    (with_bytes(part(2), lambda content: content[:-10]), f"{part(2)} is damaged"),
    (with_bytes(part(0), lambda content: b""), f"{part(0)} is damaged"),
    (
        rewritten(0, lambda maps: maps[:, :, :2]),
        r"classes has the shape \(4, 2, 2, 2\) instead of \(images, height, width, k\) = \(4, 2, 3, 2\)",
    ),
    (rewritten(0, lambda maps: maps[:3]), r"the shape \(3, 2, 3, 2\) instead of"),
    (
        with_bytes(part(1), lambda content: content[:-20] + bytes([content[-20] ^ 4]) + content[-19:]),
        f"{part(1)} is damaged: its content does not fit its checksum",
    ),
    (rewritten(1, lambda maps: maps), "does not fit its checksum"),
    (pickled, f"{part(1)} is damaged"),
    (lambda folder: (folder / part(1)).unlink(), f"lacks 1 of 3 files of label maps, {part(1)} the first"),
    (lambda folder: (folder / HEADER).unlink(), "is no folder of label maps: it has no label_maps.json"),
    (with_bytes(HEADER, lambda content: content[:40]), "label_maps.json is damaged"),
    (
        with_header(lambda header: {**header, "grid": [0, 3]}),
        "label_maps.json is damaged: .* must be integers of 1 or more",
    ),
    (with_header(lambda header: {"tiles": 3}), "label_maps.json is damaged"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_damage_is_named_in_one_line(folder, damage, message):
    damage(folder)
    with pytest.raises(OSError, match=message) as error:
        LabelMaps(folder).verify()
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        (lambda i: (some_maps(i)[0] + 5, some_maps(i)[1]), "is not below the 6 of the header"),
        (lambda i: (some_maps(i)[0], some_maps(i)[1] + 1), "its scores are no probabilities"),
        (lambda i: (some_maps(i)[0], some_maps(i)[1] * float("nan")), "its scores are no probabilities"),
        (lambda i: (some_maps(i)[0].int(), some_maps(i)[1]), "its classes must be int16, its scores float16"),
    ],
)
def test_nonsense_with_a_good_checksum_is_refused(maps, message, tmp_path):
    write_label_maps(tmp_path / "maps", header(), maps)
    with pytest.raises(OSError, match=message):
        LabelMaps(tmp_path / "maps").verify()


def test_the_fingerprint_is_of_classes_names_and_order():
    own = fingerprint([0, 1, 1], ["/here/a.png", "/here/b.png", "c.png"])
    assert own == fingerprint(np.array([0, 1, 1], dtype=np.int8), ["/there/a.png", "x\\b.png", "/c.png"])
    others = [
        fingerprint([0, 1, 0], ["a.png", "b.png", "c.png"]),
        fingerprint([0, 1, 1], ["b.png", "a.png", "c.png"]),
        fingerprint([0, 1, 1], ["a.pngb.png", "", "c.png"]),
        fingerprint([0, 1], ["a.png", "b.png"]),
    ]
    assert len({own, *others}) == 5
