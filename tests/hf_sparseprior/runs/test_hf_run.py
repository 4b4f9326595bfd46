"""What a run of the Trainer refuses before it reads anything."""

import re
from itertools import product

import pytest

from hf_sparseprior.classification.task import CLASSIFICATION
from hf_sparseprior.runs.hf_run import run
from hf_sparseprior.runs.printed import print_results
from tasks.video.task import VIDEO
from tests.each import each


@each("task, source", product((CLASSIFICATION, VIDEO), ("imagefolder", "folder")))
def test_the_final_stage_cannot_choose_the_best_epoch(task, source, tmp_path):
    config = {section: {} for section in task.sections}
    config["data"] = {"source": source, "path": str(tmp_path / "nowhere"), "stage": "final"}
    config["trainer"] = {"output_dir": str(tmp_path / "run"), "use_cpu": True}
    message = rf"data\.stage=final has its validation {task.examples} .* set trainer\.load_best_model_at_end=false"
    with pytest.raises(ValueError, match=message):
        run(task, config)
    assert not (tmp_path / "run").exists()


@each(
    "trained, line",
    [
        (28, "28 parameters trained, of which the saved model keeps 24\n"),  # with a head that is not saved
        (4, "4 parameters trained of 24\n"),
        (24, ""),
    ],
)
def test_the_end_of_a_run_counts_what_was_trained_and_repeats_its_warnings(trained, line, capsys):
    print_results(
        {"metrics": {}, "parameters": 24, "trainable_parameters": trained, "data_wait": 0.0, "warnings": ["dead"]},
        "out",
    )
    printed = capsys.readouterr().out
    assert printed.startswith(line + "waiting for data") and "\nwarning: dead\n" in printed


UNMOVED = "the decay did not move: M is 1 for every pair of patches"


@each(
    "change, settings, said",
    [
        (4e-7, {"name": "violin", "init": "identity"}, "With init: identity .* 'decay: {name: violin, init: growing}'"),
        (7e-6, {"name": "manhattan", "init": "finetune"}, "init: finetune .* {name: manhattan, init: growing}"),
        (0.0, {"name": "violin", "init": "growing"}, "train for more steps, or at a higher learning rate"),
        (0.0, {"name": "violin", "init": "identity", "learn_beta": False}, "learn_beta=false leaves M where it starts"),
        (0.1, {"name": "violin", "init": "identity"}, None),
        (0.0, None, None),
    ],
)
def test_the_end_of_a_run_says_that_the_decay_did_not_move(change, settings, said, capsys):
    for priors in ({"support": None, "decay": settings}, [{"decay": None}, {"decay": settings}]):
        results = {"metrics": {}, "parameters": 24, "data_wait": 0.0, "max_decay_change": change}
        print_results({**results, "prior_settings": priors}, "out")
        printed = capsys.readouterr().out
        assert f"max |M - 1| of the learned decay: {change:.4f}\n" in printed
        assert (UNMOVED in printed) == (said is not None)
        if said is not None:
            assert re.search(said, printed)
