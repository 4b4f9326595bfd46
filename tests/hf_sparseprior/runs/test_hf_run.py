"""What a run of the Trainer refuses before it reads anything."""

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
