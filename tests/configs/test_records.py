"""Records of comparisons are those of the configurations that are there now."""

from pathlib import Path

import pytest

from hf_sparseprior.classification.config import load_config
from hf_sparseprior.runs.run_folder import claim, folder_differences
from tasks.classification.compare import load_comparison
from tasks.common.compare import all_records
from tasks.common.records import read_records

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tasks" / "classification" / "results"
TASKS = ("count", "fashion", "orientation", "position")
RECORDED = {
    "cifar10_small": "classification/cifar10_small_priors.yaml",
    "fib_table2_small": "experiments/fib_table2.yaml#small",
    **{f"evidence_{task}": f"classification/evidence.yaml#{task}" for task in TASKS},
}


@pytest.mark.parametrize("folder", RECORDED)
def test_runs_of_before_are_recognised(folder, tmp_path):
    """The comparison accepts their records, and a row as a run of its own accepts the folder that such a run left."""
    path = ROOT / "configs" / RECORDED[folder]
    records = all_records(load_comparison(path), RESULTS / folder)
    assert sum(map(len, records.values())) == sum(map(len, read_records(RESULTS / folder).values())) > 0
    mark = "-" if "#" in path.name else "#"
    for row, (record, *_) in records.items():
        claim(tmp_path / row, record["config"])
        now = load_config(f"{path}{mark}{row}", [f"trainer.seed={record['seed']}"])
        assert folder_differences(tmp_path / row, now) == []
        assert folder_differences(tmp_path / row, {**now, "model": {}}) != []
