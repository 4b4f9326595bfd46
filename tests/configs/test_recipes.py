"""Epochs and images a step of the papers' recipes, on as many GPUs as the papers have, and what they train on."""

import re

import pytest

from tasks.classification.config import SECTIONS, load_config
from tasks.common.config import read_layers
from tests.configs import shipped

FIBOTTENTION = [
    name for number in (2, 4, 8, 10, 11, 12, 13) for name in shipped.runs(f"experiments/fib_table{number}.yaml")
]
FIBOTTENTION += [name for part in "abc" for name in shipped.runs(f"experiments/fib_figure5{part}.yaml")]
FIBOTTENTION += shipped.runs("experiments/fib_tables_2_3.yaml")
FIBOTTENTION = [name for name in FIBOTTENTION if "#small" not in name and "#paired" not in name]
DEIT = [name for table in (12, 13, 14, 15, 16, 26, 27) for name in shipped.runs(f"experiments/vio_table{table}.yaml")]
DEIT += ["classification/imagenet.yaml#vit_small", "classification/imagenet.yaml#vit_small_violin"]
DEIT += [f"experiments/sparsifiner_table1.yaml#full-evit_{rate}" for rate in (0.5, 0.7)]


def epochs_and_images(name: str, gpus: int) -> tuple[int, int]:
    trainer = load_config(shipped.path(name))["trainer"]
    assert trainer.get("gradient_accumulation_steps", 1) == 1
    images = trainer.get("effective_batch_size") or trainer["per_device_train_batch_size"] * gpus
    return trainer["num_train_epochs"], images


@pytest.mark.parametrize("name", FIBOTTENTION)
def test_fibottention_has_100_epochs_and_64_images_a_step(name):
    """Section 4.1, C.2 and Table 9 on 4 GPUs, ImageNet included; other readings have other names."""
    reading = re.search(r"#\w+?_(256|deit)(-|$)", name)
    if reading and reading[1] == "deit":
        assert epochs_and_images(name, 8) == (300, 1024)
    else:
        assert epochs_and_images(name, 4) == (100, 256 if reading else 64)


@pytest.mark.parametrize("name", DEIT)
def test_violin_and_what_sparsifiner_starts_from_have_deits_recipe(name):
    """300 epochs and 1024 images on 8 GPUs (Touvron et al. 2021, Table 9)."""
    assert epochs_and_images(name, 8) == (300, 1024)


# Cells of the papers' tables and what they start from. Small ones compare settings; the sweeps of VTAB-1K have a final
# stage of their own, and robots are judged in the simulator.
TABLES = [
    cell
    for file in shipped.files("experiments")
    if (name := f"experiments/{file.name}") not in (*shipped.ROBOTICS, *shipped.SWEEPS)
    for cell in shipped.cells(name)
]
STARTS = [*shipped.cells("classification/imagenet.yaml"), *shipped.cells("classification/sparsifiner.yaml")]
STARTS += ["classification/deit_tiny_384.yaml"]


@pytest.mark.parametrize("name", [*TABLES, *STARTS])
def test_papers_rows_train_on_all_training_images_and_their_last_epoch_counts(name):
    cell = read_layers(shipped.path(name), SECTIONS, ("first", "seeds", "variants"))
    changed = cell.get("variants") or {}
    mark = "-" if "#" in name else "#"
    own = [read_layers(shipped.path(f"{name}{mark}{row}"), SECTIONS) for row in changed if "base" in changed[row]]
    for layers in (cell, *own):
        stage, trainer = layers["data"].get("stage"), layers["trainer"]
        chooses = trainer.get("load_best_model_at_end", True), trainer.get("eval_strategy", "epoch") != "no"
        if name.endswith("#paired"):  # whose last step counts, without a choice
            assert stage is None and chooses[0] is False
        elif "small" in name and not name.startswith("classification"):
            assert stage is None
        else:
            assert stage == "final" and chooses == (False, False)
    assert not any(
        {"stage", "eval_strategy"} & {*row.get("data", {}), *row.get("trainer", {})} for row in changed.values()
    )


def test_there_are_rows_of_both_kinds():
    assert len(TABLES) > 40 and 10 < sum("small" in name for name in TABLES) < len(TABLES) / 2
