"""The verdict over runs of several seeds."""

import numpy as np
import pytest

from hf_sparseprior.runs.results import write_results
from tasks.pretraining import evidence


def results(seed, accuracy, start, pixels, error=0.005):
    """What results.json of a run holds of k-NN."""
    accuracies = {"": accuracy, "_at_start": start, "_of_pixels": pixels}
    metrics = {f"test_knn_accuracy{name}": value for name, value in accuracies.items()}
    return {
        "task": "pretraining",
        "seed": seed,
        "seconds": 600.0,
        "metrics": metrics,
        "standard_errors": dict.fromkeys(metrics, 0.004),
        "k_nn_above": {
            "at_start": {"difference": accuracy - start, "standard_error": error},
            "of_pixels": {"difference": accuracy - pixels, "standard_error": error},
        },
    }


def write(folder, runs):
    for run in runs:
        write_results(folder / f"seed{run['seed']}" / "results.json", run)
    return [str(folder / f"seed{run['seed']}") for run in runs]


def test_runs_above_both_by_two_standard_errors(tmp_path, capsys):
    runs = [results(seed, 0.42 + seed / 1000, 0.30, 0.38) for seed in (2, 0, 1)]
    assert evidence.main(write(tmp_path, runs)) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in printed[:6]] == ["seed", "---", "0", "1", "2", "all"]
    error = np.std([0.04, 0.041, 0.042], ddof=1) / 3**0.5
    assert f"4.10 ± {100 * error:.2f}" in printed[5]
    assert printed[-2:] == [
        "before training: above by 2 standard errors",
        "pixels: above by 2 standard errors",
    ]


@pytest.mark.parametrize("accuracies", [(0.385, 0.42, 0.42), (0.41, 0.39, 0.60)])
def test_one_run_or_the_spread_of_the_seeds_can_miss_it(accuracies, tmp_path, capsys):
    """The first within its error over the images; all above, but with a spread that is too large."""
    runs = [results(seed, accuracy, 0.30, 0.38, 0.003) for seed, accuracy in enumerate(accuracies)]
    assert evidence.main(write(tmp_path, runs)) == 1
    assert "pixels: not above by 2 standard errors" in capsys.readouterr().out


def test_other_runs_are_refused(tmp_path, capsys):
    (run,) = write(tmp_path, [results(0, 0.4, 0.3, 0.3)])
    assert evidence.main([run, run]) == 2
    assert "must differ in their seed, not 0, 0" in capsys.readouterr().err
    assert evidence.main([str(tmp_path)]) == 2
    assert "is no finished run" in capsys.readouterr().err
    write_results(tmp_path / "other" / "results.json", {"task": "video", "seed": 1})
    assert evidence.main([str(tmp_path / "other")]) == 2
    assert "is no run of pretraining" in capsys.readouterr().err
