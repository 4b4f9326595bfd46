"""What has changed in configurations since moved.tsv was made, each change with its reason and with how to undo it.

The test undoes a change and compares what is left with the old checksum, so everything else is still what it was.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# The configuration of each row of a comparison, and of each run before them as "first N"; of a run, its cell's.
Rows = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Change:
    """names: a pattern of the whole names that changed, FILE#CELL. undo: gives rows their old content, in place."""

    names: str
    reason: str
    undo: Callable[[Rows], None]


def _unshifted(rows: Rows) -> None:
    for name, config in rows.items():
        if name.startswith("shifted"):
            support = config["model"]["prior"]["support"]
            support["sequence"] = {"name": "multiples", "c": support["sequence"]["c"], "shifted": True}


def _without_diagonal(rows: Rows) -> None:
    rows["w196"]["model"]["prior"]["support"]["diagonal"] = False


def _without_sparse_transformer(rows: Rows) -> None:
    del rows["sparse-transformer"], rows["sparse-transformer-heads"]


def _average_pooling_in_the_baseline(rows: Rows) -> None:
    rows["dense"]["model"].update(use_class_token=False, pooling="mean")


def _with_transposed_z(rows: Rows) -> None:
    rows["z"]["model"]["prior"]["decay"]["curves"] = ["z", "z_t"]


def _class_token_with_violin(rows: Rows) -> None:
    for key in ("use_class_token", "pooling"):
        del rows["violin+irpe_k"]["model"][key]


def _images_on_each_gpu(rows: Rows) -> None:
    for config in rows.values():
        del config["trainer"]["effective_batch_size"]


def _best_epoch_on_validation(rows: Rows) -> None:
    for config in rows.values():
        del config["data"]["stage"], config["trainer"]["eval_strategy"]
        if config.get("distillation", {}).get("phase") != "predictor":  # whose last epoch counted before
            del config["trainer"]["load_best_model_at_end"]


def _split_by_lists(rows: Rows) -> None:
    for config in rows.values():
        data = config["data"]
        data["lists"] = f"data/{data['source']}/{data.pop('protocol')}"
        data["source"] = "csv"


def _without_the_rows_of_figure_4(rows: Rows) -> None:
    del rows["sparsif_0.2"], rows["sparsif_0.3"]


def _evit_in_its_papers_blocks(rows: Rows) -> None:
    for name, config in rows.items():
        if "evit" in name:
            (pruning,) = config["model"]["prior"]["extras"]
            assert pruning.pop("layers") == [1, 2, 3]


def _evit_without_a_teacher(rows: Rows) -> None:
    for name in rows:
        if name.startswith("evit"):
            rows[name]["distillation"]["teacher"] = None


def _without_the_row_that_is_not_renormalised(rows: Rows) -> None:
    del rows["0.2-not-renormalised"]


def _prediction_modules_as_slow_as_the_backbone(rows: Rows) -> None:
    for name in ("sparsifiner_0.7", "sparsifiner_0.5"):
        trainer = rows[name]["trainer"]
        trainer["learning_rate"] *= trainer.pop("backbone_learning_rate")


def _linformer_as_the_others(rows: Rows) -> None:
    trainer = rows["linformer"]["trainer"]
    trainer["learning_rate"] *= trainer.pop("backbone_learning_rate")
    trainer["num_train_epochs"] = rows["dense"]["trainer"]["num_train_epochs"]


def _two_epochs(rows: Rows) -> None:
    for name, config in rows.items():
        if name not in ("first 0", "first 1"):  # the dense models, which are what they were
            config["trainer"]["num_train_epochs"] = 2


CHANGES = (
    Change(
        r"data/(cifar100?|(tiny_)?imagenet)\.yaml|recipes/timesformer\.yaml|experiments/fib_table5\.yaml#.*"
        r"|experiments/fib_(table[248]|tables_2_3|table1[0-3]|figure5[abc])\.yaml#(cifar|tiny|imagenet).*"
        r"|experiments/vio_table(1[2-6]|2[67])\.yaml|experiments/sparsifiner_table[1-4]\.yaml#full.*"
        r"|classification/(imagenet|sparsifiner)\.yaml#.*|classification/deit_tiny_384\.yaml",
        "The papers train on all of the training set, test on the usual test set and choose nothing on it.",
        _best_epoch_on_validation,
    ),
    Change(
        r"experiments/fib_table5\.yaml#.*",
        "Toyota Smarthome and Northwestern-UCLA are split by their published rules, which the program knows.",
        _split_by_lists,
    ),
    Change(
        r"experiments/fib_(table2|table4|table8|table1[0-3]|figure5[abc])\.yaml#(cifar100?|tiny_imagenet)",
        "Fibottention trains with an effective batch of 64 on four GPUs (section 4.1), not with 64 on each.",
        _images_on_each_gpu,
    ),
    Change(
        "experiments/vio_table1[2-5].yaml",
        "The baseline of VIOLIN Tables 12 to 15 is DeiT-S as published (79.8 and 79.9 %), which has a class token.",
        _average_pooling_in_the_baseline,
    ),
    Change(
        "experiments/vio_table13.yaml",
        "VIOLIN Table 13 has 'only the default Z-curve', without its transpose.",
        _with_transposed_z,
    ),
    Change(
        "experiments/vio_table27.yaml",
        "VIOLIN averages the patch tokens when it is pretrained (Appendix D.2), in Table 27 as in Table 26.",
        _class_token_with_violin,
    ),
    Change(
        "experiments/fib_table2.yaml#.*",
        "Sparse Transformer has a local window besides its stride (Child et al. 2019); its rows are new.",
        _without_sparse_transformer,
    ),
    Change(
        "experiments/fib_figure5a.yaml#.*",
        "Figure 5a prints 85.5 %, which c n + (i mod c) with n >= 1 gives; (i - 1) mod c with n >= 0 gives 85.44.",
        _unshifted,
    ),
    Change(
        "experiments/fib_table13.yaml#.*",
        "The last row of Table 13 prints 0 %, which needs the diagonal.",
        _without_diagonal,
    ),
    Change(
        "experiments/sparsifiner_table1.yaml#(full|small)",
        "Sparsifiner's Figure 4 has the model with keep rates of 0.2 and 0.3 besides Table 1's.",
        _without_the_rows_of_figure_4,
    ),
    Change(
        "experiments/sparsifiner_table1.yaml#small",
        "EViT prunes after a block's attention, DynamicViT before it; of four blocks that is a quarter of the model.",
        _evit_in_its_papers_blocks,
    ),
    Change(
        "experiments/sparsifiner_table1.yaml#small",
        "All rows of a table are trained alike, so EViT's have the teacher of the others.",
        _evit_without_a_teacher,
    ),
    Change(
        "experiments/sparsifiner_table2.yaml#small",
        "Sparsifiner's softmax runs over the kept keys or over all; the second is a row of its own.",
        _without_the_row_that_is_not_renormalised,
    ),
    Change(
        "experiments/sparsifiner_table1.yaml#small",
        "Prediction modules start at random in every row that has them, so they learn at one rate.",
        _prediction_modules_as_slow_as_the_backbone,
    ),
    Change(
        "experiments/sparsifiner_table4.yaml#small",
        "Linformer's projections start at random, and Sparsifiner's predictor has had a phase of its own.",
        _linformer_as_the_others,
    ),
    Change(
        "(experiments/sparsifiner_table3.yaml#small|classification/sparsifiner_small.yaml#cifar10_small_40-.*)",
        "Two epochs of 1,000 images are a fifth of the steps that the other small models get.",
        _two_epochs,
    ),
)

# Seeds before a comparison got more of them.
FEWER_SEEDS = {
    "experiments/sparsifiner_table2.yaml#small": [0, 1, 2],
    "experiments/sparsifiner_table4.yaml#small": [0, 1, 2],
}


def changes_of(name: str) -> list[Change]:
    """The changes of a configuration, the last one first."""
    return [change for change in reversed(CHANGES) if re.fullmatch(change.names, name)]
