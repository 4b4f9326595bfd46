"""What happens to training clips: frames of segments, RandAugment alike in all frames, mixing of whole clips."""

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch.utils.data import DataLoader

pytest.importorskip("av", reason="needs PyAV: pip install '.[video]'")
pytest.importorskip("matplotlib", reason="needs the extra classification")

from hf_sparseprior import SparsePriorTimesformerConfig
from hf_sparseprior.cli.video_files import segment_indices, write_video
from hf_sparseprior.images.randaugment import parse_policy, randaugment
from hf_sparseprior.training import Draw, DrawSampler, Mixing, SoftTargetCollator
from tasks.video import data, train
from tasks.video.config import AugmentationConfig, DataConfig, load_config
from tasks.video.data import Preparation, Videos, load_data, make_dataset, make_test_dataset
from tests.each import each
from tests.tasks.video.clips import write_videos

SMALL = SparsePriorTimesformerConfig(image_size=16, patch_size=4, num_frames=4, image_mean=0.3)


def numbered(folder, frames):
    """A video whose frame number k is grey 8 k."""
    pixels = np.broadcast_to(8 * np.arange(frames, dtype=np.uint8)[:, None, None, None], (frames, 20, 20, 3))
    write_video(folder / "clip.mkv", pixels)
    return Videos([folder / "clip.mkv"], np.array([0]))


def frame_numbers(pixels):
    mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (SMALL.image_mean, SMALL.image_std))
    return ((pixels * std + mean) * 255 / 8).round().int()[:, 0, 0, 0].tolist()


def config_of(path, **fields):
    return DataConfig(source="folder", path=str(path), **fields)


@each(
    "total, frames, places, expected",
    [
        (12, 4, 0.5, [1, 4, 7, 10]),
        (12, 4, 0.0, [0, 3, 6, 9]),
        (12, 4, 1.0, [3, 6, 9, 11]),
        (12, 4, [0.0, 0.4, 0.9, 1.0], [0, 4, 8, 11]),
        (10, 4, 0.5, [1, 3, 6, 8]),  # segments of 2.5 frames, whose middles are 1.25, 3.75, 6.25, 8.75
        (3, 6, 0.5, [0, 0, 1, 1, 2, 2]),
        (1, 3, 0.9, [0, 0, 0]),
        (9, 1, 0.5, [4]),
    ],
)
def test_a_frame_of_every_segment(total, frames, places, expected):
    assert segment_indices(total, frames, places) == expected


def test_frames_of_a_segment_are_equally_likely_as_in_tsn():
    """TSN draws the k-th frame from k * (total / frames) on, evenly, where that is a whole number."""
    random = np.random.default_rng(0)
    drawn = np.array([segment_indices(20, 4, random.random(4)) for _ in range(4000)])
    for segment in range(4):
        numbers, counts = np.unique(drawn[:, segment], return_counts=True)
        assert numbers.tolist() == list(range(5 * segment, 5 * segment + 5))
        assert np.abs(counts / 4000 - 0.2).max() < 5 * (0.2 * 0.8 / 4000) ** 0.5


def test_clips_of_segments_are_drawn_by_seed_epoch_and_index(tmp_path):
    videos = numbered(tmp_path, 24)
    config = config_of(tmp_path, sampling="segments", test_clips=3)
    dataset = make_dataset(videos, config, SMALL, AugmentationConfig(random_place=True), seed=3)
    draws = [Draw(0, epoch, 0) for epoch in range(8)]
    clips = [frame_numbers(dataset[draw]["pixel_values"]) for draw in draws]
    assert clips == [frame_numbers(dataset[draw]["pixel_values"]) for draw in reversed(draws)][::-1]
    assert len({tuple(clip) for clip in clips}) > 4
    assert all(6 * place <= number < 6 * place + 6 for clip in clips for place, number in enumerate(clip))
    # Without random places, and in a test, frames lie in the middle of a segment, or of its parts.
    still = make_dataset(videos, config, SMALL, AugmentationConfig(), seed=3)
    assert [frame_numbers(still[draw]["pixel_values"]) for draw in draws] == 8 * [[3, 9, 15, 21]]
    tested = make_test_dataset(videos, config, SMALL)
    assert [frame_numbers(tested[view]["pixel_values"]) for view in range(3)] == [
        [1, 7, 13, 19], [3, 9, 15, 21], [5, 11, 17, 23],
    ]  # fmt: skip


def test_randaugment_does_the_same_to_all_frames():
    """A clip that stands still stands still after it, and each frame is what `randaugment` makes of it."""
    random = np.random.default_rng(0)
    frame = random.integers(0, 256, (16, 16, 3), dtype=np.uint8)
    plain = Preparation(SMALL, AugmentationConfig())
    augmented = Preparation(SMALL, AugmentationConfig(randaugment="rand-m9-n3-mstd0.5-inc1"))
    seen = set()
    for number in range(12):
        generators = [Draw(0, number, 0).random(1) for _ in range(3)]
        clip = np.stack([frame] * 3)
        pixels = augmented(clip, generators[0])
        assert pixels[0].equal(pixels[1]) and pixels[0].equal(pixels[2])
        assert pixels.equal(augmented(clip, generators[1]))
        seen.add(pixels.numpy().tobytes())
        # What is drawn before it (window, flips, light), and then the seed of the operations.
        generators[2].integers(0, [1, 1]), generators[2].random(2), generators[2].uniform(-1, 1, 2)
        operations = np.random.default_rng(int(generators[2].integers(2**63)))
        policy, fill = parse_policy("rand-m9-n3-mstd0.5-inc1"), (76, 76, 76)
        expected = np.array(randaugment(Image.fromarray(frame), policy, operations, fill))
        assert pixels[0].equal(plain(expected[None], Draw(0, 0, 0).random(0))[0])
    assert len(seen) > 6


def test_randaugment_does_not_change_what_else_is_drawn():
    clip = np.random.default_rng(0).integers(0, 256, (2, 24, 24, 3), dtype=np.uint8)
    others = {"random_crop": True, "vertical_flip": 0.5, "brightness": 0.2, "contrast": 0.2}
    never = "rand-m9-n2-p0"  # no operation is ever done
    for epoch in range(5):
        one, two = (
            Preparation(SMALL, AugmentationConfig(**others, randaugment=policy))(clip, Draw(0, epoch, 0).random(7))
            for policy in (None, never)
        )
        assert one.equal(two)


@pytest.mark.parametrize("settings", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}])
def test_clips_are_mixed_like_each_of_their_frames(settings):
    """A batch of clips gives what batches of their frames give, frame by frame."""
    random = torch.Generator().manual_seed(0)
    clips = torch.rand(6, 5, 3, 16, 16, generator=random)
    collate = SoftTargetCollator(4, Mixing(**settings), seed=2, batch_size=2)

    def batch(pixels):
        samples = zip(pixels, (0, 1, 2, 3, 0, 2), range(6), strict=True)
        return collate(
            [{"pixel_values": each, "labels": label, "draw": Draw(row, 0, row)} for each, label, row in samples]
        )

    mixed = batch(clips)
    assert not mixed["pixel_values"].equal(clips)
    for frame in range(5):
        alone = batch(clips[:, frame])
        assert mixed["pixel_values"][:, frame].equal(alone["pixel_values"])
        assert mixed["labels"].equal(alone["labels"])


BAD = {
    "augmentation.randaugment=m9": "augmentation.randaugment='m9' must look like rand-m9-n2-mstd0.5-inc1",
    "augmentation.mixup=-1": "augmentation.mixup=-1",
    "augmentation.cutmix=yes": "augmentation.cutmix=",
    "augmentation.mix_probability=2": "augmentation.mix_probability=2",
    "augmentation.label_smoothing=1": "augmentation.label_smoothing=1",
    "augmentation.policy=1": "section 'augmentation' has no key 'policy'",
    "data.sampling=tsn": "data.sampling='tsn' must be one of stride, segments",
    "data.stride=2": "data.stride=2 is for data.sampling stride; with segments it must be 1",
    "trainer.per_device_train_batch_size=3": "trainer.per_device_train_batch_size=3 must be even with",
}


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("augmented")
    content = {
        "data": {"source": "folder", "path": str(write_videos(folder / "videos")), "sampling": "segments"},
        "augmentation": {
            **{"random_place": True, "randaugment": "rand-m7-n2-mstd0.5-inc1", "mixup": 0.8, "cutmix": 1.0},
            **{"label_smoothing": 0.1},
        },
        "model": {
            **{"image_size": 16, "patch_size": 4, "hidden_size": 24, "num_hidden_layers": 1, "num_frames": 3},
            **{"num_attention_heads": 4, "intermediate_size": 24},
        },
        "trainer": {
            **{"max_steps": 4, "per_device_train_batch_size": 8, "seed": 0, "disable_tqdm": True, "use_cpu": True},
            **{"logging_strategy": "steps", "logging_steps": 1, "eval_strategy": "no", "save_strategy": "no"},
            **{"load_best_model_at_end": False, "output_dir": str(folder / "run")},
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return folder / "config.yaml"


@each("override, message", BAD.items())
def test_bad_values_are_one_line(override, message, config_file, capsys):
    assert train.main(["--config", str(config_file), override]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (config_file.parent / "run").exists()


def test_batches_of_all_of_it_at_once_do_not_depend_on_workers(config_file):
    """To the bit, and an epoch that is begun in its middle is that of a whole one."""
    section = yaml.safe_load(config_file.read_text())
    config, changes = DataConfig(**section["data"]), AugmentationConfig(**section["augmentation"])
    data = load_data(config)
    dataset = make_dataset(data.splits["train"], config, SMALL, changes, seed=5)
    collate = SoftTargetCollator(2, changes.mixing, changes.label_smoothing, seed=5, batch_size=8)
    sampler = DrawSampler(len(dataset), seed=5)

    def epoch(number, workers=0, first=0):
        sampler.set_epoch(number)
        draws = list(sampler)[8 * first :]
        return list(DataLoader(dataset, 8, sampler=draws, num_workers=workers, collate_fn=collate))

    whole = epoch(1)
    assert len(whole) == 3 and whole[0]["labels"].shape == (8, 2)
    assert not whole[0]["pixel_values"].equal(epoch(2)[0]["pixel_values"])
    for workers, first in ((2, 0), (0, 0), (0, 1)):
        for one, two in zip(whole[first:], epoch(1, workers, first), strict=True):
            assert one["pixel_values"].equal(two["pixel_values"]) and one["labels"].equal(two["labels"])


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_the_shorter_side_of_a_training_clip_is_drawn(tmp_path, monkeypatch):
    """TimeSformer's jitter: evenly between two sizes; the test has its own."""
    videos, sides = numbered(tmp_path, 9), []
    read = data.read_frames
    monkeypatch.setattr(data, "read_frames", lambda path, at, side: (sides.append(side), read(path, at, side))[1])
    config, augmentation = config_of(tmp_path, short_side=18), AugmentationConfig(short_side=[20, 23])
    clips = make_dataset(videos, config, SMALL, augmentation)
    draws = [Draw(0, epoch, 0) for epoch in range(200)]
    shapes = {clips[draw]["pixel_values"].shape for draw in draws}
    assert shapes == {(4, 3, 16, 16)} and all(20 <= side <= 23 for side in sides)
    assert all(30 < sides.count(side) < 75 for side in (20, 21, 22, 23))
    drawn = sides.copy()
    sides.clear()
    assert [clips[draw]["pixel_values"].shape for draw in draws] and sides == drawn  # by the draw alone
    sides.clear()
    make_test_dataset(videos, config, SMALL)[0]
    assert sides == [18]


@each("sides", [20, [20], [23, 20], [0, 3], [20, "b"], [20.5, 23]])
def test_bad_sides_are_named(sides):
    with pytest.raises(ValueError, match=r"augmentation\.short_side="):
        AugmentationConfig(short_side=sides)


def test_clips_of_many_sizes_are_not_kept_in_memory(tmp_path):
    path = tmp_path / "run.yaml"
    sections = {"data": {"source": "folder", "path": "x", "cache": True}, "augmentation": {"short_side": [20, 23]}}
    path.write_text(yaml.safe_dump({**sections, "model": {}, "trainer": {"output_dir": str(tmp_path / "run")}}))
    with pytest.raises(ValueError, match=r"augmentation\.short_side=\[20, 23\] gives each clip its own size"):
        load_config(path)
