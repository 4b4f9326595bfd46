"""Training from streams: damaged images, several processes."""

import json
import re

import pytest
import yaml

from tasks.classification import train as training
from tests.processes import module

pytestmark = pytest.mark.slow

SIZES = {"train": 40, "validation": 17, "test": 19}  # neither batch nor process divides them
DAMAGED = {"train": (3,), "validation": (5,), "test": (7, 18)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Parquet files of small images, some of them cut off."""
    import io

    import numpy as np
    from datasets import ClassLabel, Dataset, Features, Image
    from PIL import Image as Pillow

    root = tmp_path_factory.mktemp("stream")
    features = Features({"image": Image(), "label": ClassLabel(names=["dark", "light"])})
    random = np.random.default_rng(0)
    for split, size in SIZES.items():
        images = []
        for index in range(size):
            buffer = io.BytesIO()
            pixels = random.integers(128, size=(8, 8, 3), dtype=np.uint8) + np.uint8(127 * (index % 2))
            Pillow.fromarray(pixels).save(buffer, "PNG")
            content = buffer.getvalue()
            images.append({"bytes": content[:60] if index in DAMAGED[split] else content, "path": None})
        table = Dataset.from_dict({"image": images, "label": [i % 2 for i in range(size)]}, features=features)
        table.to_parquet(str(root / f"{split}.parquet"))
    return root


def config_in(folder, out, **data):
    return {
        "data": {"source": "parquet", "path": str(folder), "streaming": True, "corrupt": "skip", **data},
        "augmentation": {"mixup": 0.8, "label_smoothing": 0.1},
        "model": {
            "prior": "fibottention", "image_size": 8, "patch_size": 2, "hidden_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 2, "intermediate_size": 16,
        },
        "trainer": {
            "output_dir": str(out), "max_steps": 6, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 4,
            "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3, "disable_tqdm": True,
            "use_cpu": True,
        },
    }  # fmt: skip


def check(results, folder):
    assert sum(map(sum, results["confusion"])) == SIZES["test"] - len(DAMAGED["test"])
    named = {f"{folder}, {split} shard 0 row {row}" for split, rows in DAMAGED.items() for row in rows}
    assert {line.split(" is not")[0] for line in results["corrupt_images"]["stream"]} == named


def test_damaged_images_of_a_stream_are_left_out_and_named_with_their_split(folder, tmp_path):
    check(training.run(config_in(folder, tmp_path / "run")), folder)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_of_a_stream_ends_the_run_in_one_line(folder, tmp_path, capsys, workers):
    config = config_in(folder, tmp_path / "run", corrupt="fatal")
    config["trainer"]["dataloader_num_workers"] = workers
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert training.main(["--config", str(tmp_path / "run.yaml")]) == 2
    error = capsys.readouterr().err
    assert re.match(
        rf"python -m tasks.classification.train: {folder}, \w+ shard 0 row \d is not a readable",
        error.strip().splitlines()[-1],
    )
    assert "Traceback" not in error


def test_two_processes_leave_the_same_images_out(folder, tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config_in(folder, tmp_path / "run")))
    train = ["tasks.classification.train", "--config", "run.yaml", "trainer.per_device_train_batch_size=4"]
    log = tmp_path / "log.txt"
    assert module(*train, processes=2, folder=tmp_path, log=log).wait(300) == 0, log.read_text()[-3000:]
    check(json.loads((tmp_path / "run" / "results.json").read_text()), folder)
