"""What a run of the Trainer refuses before it reads anything."""

from itertools import product

import pytest

from tasks.classification.task import CLASSIFICATION
from tasks.common.hf_run import run
from tasks.video.task import VIDEO


@pytest.mark.parametrize(("task", "source"), list(product((CLASSIFICATION, VIDEO), ("imagefolder", "folder"))))
def test_the_final_stage_cannot_choose_the_best_epoch(task, source, tmp_path):
    config = {section: {} for section in task.sections}
    config["data"] = {"source": source, "path": str(tmp_path / "nowhere"), "stage": "final"}
    config["trainer"] = {"output_dir": str(tmp_path / "run"), "use_cpu": True}
    message = rf"data\.stage=final has its validation {task.examples} .* set trainer\.load_best_model_at_end=false"
    with pytest.raises(ValueError, match=message):
        run(task, config)
    assert not (tmp_path / "run").exists()
