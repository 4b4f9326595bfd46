"""VIOLIN's Tables 7 and 18 as sweeps: Table 29's recipe, and a baseline that is dense whatever it starts from."""

import pytest

from tasks.classification.vtab.plan import load_sweep
from tests.configs import shipped

TABLE_29 = {
    "num_train_epochs": 50,
    "per_device_train_batch_size": 64,
    "optim": "adamw_torch",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "weight_decay": 0.05,
    "layer_decay": 0.65,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.1,  # 5 of 50 epochs
    "bf16": True,
}


@pytest.mark.parametrize("name", [name for file in shipped.SWEEPS[1:] for name in shipped.cells(file)])
def test_every_row_has_the_recipe_of_table_29(name):
    sweep = load_sweep(shipped.path(name))
    assert [point["trainer.learning_rate"] for point in sweep.points] == [1e-3, 7.5e-4, 5e-4, 2.5e-4, 1e-4]
    assert sweep.seeds == sweep.selection_seeds == [0, 1, 2, 3, 4]
    assert sweep.configs["baseline"]["model"]["prior"] == "dense"
    for config in sweep.configs.values():
        assert {key: config["trainer"][key] for key in TABLE_29} == TABLE_29
        assert config["model"]["image_size"] == 224 and not config["augmentation"]


def test_table_7_has_the_papers_rows_and_table_18_keeps_the_pretrained_mask():
    rows = load_sweep(shipped.path(shipped.SWEEPS[1])).configs
    printed = ["baseline", "violin", "additive", "swin_rpb", "irpe_qkv", "localvit", "manhattan", "peano", "random"]
    assert list(rows) == printed
    assert {config["model"]["pretrained"] for config in rows.values()} == {"checkpoints/deit_base"}
    pretrained = load_sweep(shipped.path("experiments/vio_table18.yaml#dino_small")).configs["violin"]["model"]
    assert pretrained["pretrained"] == "checkpoints/violin_dino_small" and "prior" not in pretrained
