from pathlib import Path

import pytest
import yaml

from tests.tasks.classification.vtab.make_fixture import write_vtab

FULL = Path(__file__).parents[4] / "configs" / "classification" / "vtab.yaml#deit_base-full"
# The shipped recipe on a model of one layer for images of 8x8 pixels.
TINY = {
    "base": str(FULL),
    "title": "tiny",
    "seeds": [0, 1],
    "selection_seeds": [0],
    "grid": {"trainer.learning_rate": [1e-2, 1e-3]},
    "variants": {"baseline": {}, "violin": {"model": {"prior": "violin"}}},
    "model": {
        "pretrained": None, "image_size": 8, "patch_size": 4, "hidden_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 16,
    },
    "trainer": {
        "num_train_epochs": 2, "per_device_train_batch_size": 16, "dataloader_num_workers": 0, "save_steps": 2,
        "bf16": False, "use_cpu": True,
    },
}  # fmt: skip


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """The small data set: two tasks."""
    return write_vtab(tmp_path_factory.mktemp("vtab"), ["eurosat", "kitti"])


@pytest.fixture
def write(tmp_path, data):
    """Write a sweep with keys changed; its file."""

    def write_sweep(**changes):
        path = tmp_path / "tiny.yaml"
        content = {**TINY, "data": {"path": str(data), "corrupt": "unchecked"}, **changes}
        path.write_text(yaml.safe_dump(content, sort_keys=False))  # the order of the grid's axes counts
        return path

    return write_sweep
