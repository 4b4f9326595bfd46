import copy
import re
import statistics

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.base.files import file_sha256
from hf_sparseprior.classification.config import load_config
from hf_sparseprior.classification.task import CLASSIFICATION
from hf_sparseprior.patterns.decay import init_values
from hf_sparseprior.priors.prior import resolve_prior
from tasks.classification import evidence, train
from tasks.classification.compare import load_comparison
from tasks.common.compare import RECORDED, Comparison, record_of
from tasks.common.records import add_records
from tests.configs import shipped
from tests.each import each

EVIDENCE = str(shipped.path("classification/evidence.yaml"))
TASKS = ("count", "position", "orientation", "fashion")
NAMES = ("full-plain", "full-violin", "lora-plain", "lora-violin")
ACCURACY = {
    "full-plain": {0: 0.50, 1: 0.60, 2: 0.70},
    "full-violin": {0: 0.52, 1: 0.59, 2: 0.75},  # +2, -1 and +5 points: 2 on average, 3 their sample deviation
    "lora-plain": {0: 0.40, 1: 0.44},
    "lora-violin": {1: 0.46, 2: 0.90},  # only seed 1 is in both
}


def record(name, seed, accuracy, **changes):
    decay = {
        "max_decay_change": 0.31, "decay_change_at_start": 0.145, "mean_decay_change": 0.04 + 0.01 * seed,
        "mean_decay_change_at_start": 0.022, "max_alpha_change": 0.1 * (1 + seed), "alpha_change_at_start": 0.0,
    }  # fmt: skip
    made = {
        "metrics": {"test_accuracy": accuracy}, "prior": "violin", "prior_settings": {}, "pruning_ratio": 0.0,
        "max_decay_change": None, "parameters": 461536, "seed": seed, "steps": 400, "seconds": 1.0,
        "seconds_per_step": 0.1, "data_wait": 0.0, "data": "parquet in count (1000 train)", "versions": {},
        "hardware": {}, "config": {}, "trainable_parameters": 1234, "pretrained_sha256": "abc",
        "adapter_bytes": 56_789 if "lora" in name else None, **(decay if "violin" in name else {}), **changes,
    }  # fmt: skip
    assert set(RECORDED) <= set(made)
    return made


def records():
    return {name: [record(name, *pair) for pair in values.items()] for name, values in ACCURACY.items()}


def rows(names=NAMES, made=None):
    comparison = Comparison(CLASSIFICATION, "evidence_count", {name: {} for name in names}, [0, 1, 2])
    return evidence.make_rows(comparison, records() if made is None else made)


def cells(text, method, prior):
    line = next(line for line in text.splitlines() if line.startswith(f"| {method} | {prior} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][2:]


def test_differences_are_taken_seed_by_seed():
    found = {(row.method, row.prior): row for row in rows()}
    assert found["full", "violin"].difference == pytest.approx({0: 0.02, 1: -0.01, 2: 0.05})
    assert found["lora", "violin"].difference == pytest.approx({1: 0.02})
    assert not found["full", "plain"].difference and not found["lora", "plain"].difference
    made = {name: [record(name, seed, 0.5) for seed in range(3)] for name in NAMES}
    assert evidence.agreement(rows(made=made)[1]) == "0 of 3"  # equal is not better


def test_the_table_of_a_task():
    text = evidence.task_table(rows())
    mean, std = 62.0, statistics.stdev([52, 59, 75])
    assert cells(text, "full", "violin") == [
        f"{mean:.2f} ± {std:.2f}", "+2.00, -1.00, +5.00", "2.00 ± 3.00", "2 of 3", "0.14 → 0.31",
        "0.022 → 0.05", "0 → 0.3", "1234", "",
    ]  # fmt: skip
    assert cells(text, "full", "plain") == ["60.00 ± 10.00", *[""] * 6, "1234", ""]
    assert cells(text, "lora", "plain")[0] == "42.00 ± 2.83 (seed 2 missing)"
    assert cells(text, "lora", "violin")[1:4] == ["+2.00", "2.00", "1 of 1"]
    assert cells(text, "lora", "violin")[-1] == "56.8"


def test_rows_without_runs_are_shown_as_missing():
    made = records()
    del made["lora-violin"], made["full-plain"]
    tasks = {"evidence_count": rows(made=made), "evidence_position": rows(made={})}
    text = evidence.report(tasks)
    assert text.startswith("5 of 24 runs, from the checkpoint with SHA-256 `abc`.")
    assert cells(text, "lora", "violin") == ["missing", "missing"]  # of the overview, the first table
    assert cells(text.partition("## evidence_count")[2], "lora", "violin")[0] == "missing"
    assert cells(text.partition("## evidence_count")[2], "full", "violin")[1:4] == ["", "", ""]
    assert "no run yet" in text


def test_the_overview_has_a_column_for_each_task():
    better = records()
    better["full-violin"] = [record("full-violin", seed, 0.9) for seed in range(3)]
    text = evidence.overview({"count": rows(), "position": rows(made=better)})
    assert text.splitlines()[0] == "| method | prior | count | position |"
    assert cells(text, "full", "violin") == ["2.00 ± 3.00 (2 of 3)", "30.00 ± 10.00 (3 of 3)"]
    assert "plain" not in text


def test_the_report_says_what_the_spread_is_and_what_chance_would_give():
    made = records()
    made["full-violin"] = [record("full-violin", seed, 0.9) for seed in range(3)]
    text = evidence.report({"count": rows(made=made), "position": rows()})
    assert evidence.SPREAD in text
    # Above in every seed: full violin of count with three, lora violin of both with the one seed that plain has too.
    assert "3 of 4 differences are above plain in every seed" in text
    assert f"up to {1 / 8 + 1 / 8 + 1 / 2 + 1 / 2:.1f} would be on average" in text
    assert "by chance" not in evidence.report({"count": rows(made={})})


def test_a_checkpoint_that_no_record_names_is_said_so():
    made = {"full-plain": [record("full-plain", 0, 0.5, pretrained_sha256=None)]}
    for runs in (made, {}):
        start = f"{len(runs)} of 12 runs, from a checkpoint that no record names."
        assert evidence.report({"count": rows(made=runs)}).startswith(start)
    made["full-plain"].append(record("full-plain", 1, 0.5))
    with pytest.raises(ValueError, match=r"from 2 checkpoints \(abc, one not recorded\), not from one"):
        evidence.report({"count": rows(made=made)})


@each("names", [("dense", "full-plain"), ("full-plain", "lora-violin")])
def test_rows_need_a_plain_row_of_their_method(names):
    with pytest.raises(ValueError, match="must be called METHOD-PRIOR and needs a row"):
        rows(names)


def test_the_command_reads_what_compare_leaves(tmp_path, capsys):
    paths = [f"{EVIDENCE}#{task}" for task in TASKS]
    typo = tmp_path / "typo"
    assert evidence.main([paths[0], "--records", str(typo), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.splitlines()[-1].count(f"--records {typo} is not a folder") == 1
    assert not list(tmp_path.iterdir())  # which is not made
    config = copy.deepcopy(load_comparison(paths[0]).configs["full-plain"])
    config["trainer"]["seed"] = 1
    kept = record("full-plain", 1, 0.5, config=config)
    add_records(tmp_path / "evidence_count", [("full-plain", kept)])
    assert evidence.main([*paths, "--records", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "evidence.md").read_text()
    assert text in capsys.readouterr().out
    assert re.match(r"1 of (\d+) runs", text) and cells(text, "full", "plain")[0] == "50.00 (seed 0, 2 missing)"
    assert (tmp_path / "out" / "evidence.png").stat().st_size > 10_000


# ---- configurations -------------------------------------------------------------------------------------------------


def test_the_four_comparisons_differ_in_their_data_alone():
    comparisons = {task: load_comparison(f"{EVIDENCE}#{task}") for task in TASKS}
    for task, comparison in comparisons.items():
        assert len(comparison.seeds) >= 3
        for name, config in comparison.configs.items():
            assert config["data"].pop("path") == f"data/spatial/{task}"
            assert config == {**comparisons["count"].configs[name], "data": {"source": "parquet"}}
    methods = {name.partition("-")[0] for name in comparisons["count"].configs}
    assert methods == {"full", "lora", "dora"}
    for name, config in comparisons["count"].configs.items():
        assert config["tuning"].get("method", "full") == name.partition("-")[0]
        plain = comparisons["count"].configs[name.partition("-")[0] + "-plain"]
        assert {**config, "model": None} == {**plain, "model": None}


MEAN_AT_START = 0.0223  # of 1 - M for gamma = sigmoid(beta), beta from 6 to 8, over all pairs of 64 patches in a line


def expected_change(beta_low, beta_high, distances):
    gammas = 1 / (1 + np.exp(-np.linspace(beta_low, beta_high, 4001)))
    values, counts = np.unique(distances, return_counts=True)
    return float((1 - gammas[:, None] ** values).mean(0) @ counts / counts.sum())


def test_every_method_has_the_same_priors_and_the_controls_start_as_far_from_no_mask_as_the_moving_one():
    pretrained = load_config(shipped.path("classification/cifar10_pretrain_tiny.yaml"))["model"]
    assert pretrained["image_size"] // pretrained["patch_size"] == 8
    configs = load_comparison(f"{EVIDENCE}#count").configs
    decays = {}
    for name, config in configs.items():
        method, _, prior = name.partition("-")
        decays.setdefault(method, {})[prior] = resolve_prior(config["model"]["prior"], 4, (8, 8))["decay"]
    assert decays["full"] == decays["lora"] == decays["dora"]
    decays = decays["full"]
    assert {prior: decay and decay["name"] for prior, decay in decays.items()} == {
        "plain": None, "alpha": "violin", "violin": "violin", "violin_moving": "violin", "manhattan": "manhattan",
        "random": "random_order",
    }  # fmt: skip
    assert {prior for prior, decay in decays.items() if decay and not decay["learn_beta"]} == {"alpha"}
    assert all(decay["learn_alpha"] for decay in decays.values() if decay)
    starts = {prior: init_values(decay["init"]) for prior, decay in decays.items() if decay}
    assert starts["violin"] == (1.0, 0.02, 15.0, 20.0, 0.0)
    assert all(start[:2] == (1.0, 0.0) for prior, start in starts.items() if prior != "violin")
    # Ranks along a curve and in a random order are a line of 64 in another order.
    line = np.abs(np.subtract.outer(range(64), range(64)))
    rows, columns = np.divmod(np.arange(64), 8)
    square = np.abs(np.subtract.outer(rows, rows)) + np.abs(np.subtract.outer(columns, columns))
    found = {
        prior: expected_change(*starts[prior][2:4], square if prior == "manhattan" else line)
        for prior in ("violin_moving", "manhattan", "random")
    }
    assert found == {prior: pytest.approx(MEAN_AT_START, rel=0.01) for prior in found}
    assert expected_change(*starts["alpha"][2:4], line) < 1e-6


# ---- equal starts ---------------------------------------------------------------------------------------------------

MODEL = {
    "image_size": 8, "patch_size": 4, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 16,
}  # fmt: skip
PRIORS = (
    "dense",
    {"decay": {"name": "violin", "init": "finetune"}},
    {"decay": {"name": "manhattan", "init": "moving"}},
    {"decay": {"name": "random_order", "init": "moving"}},
    {"decay": {"name": "violin", "init": "identity", "learn_beta": False}},
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    torch.manual_seed(0)
    SparsePriorViTForImageClassification(SparsePriorViTConfig(**MODEL, num_labels=3)).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_every_prior_starts_from_the_same_adapter_and_the_checkpoint_is_recorded(saved, tmp_path):
    adapters, results = [], []
    for number, prior in enumerate(PRIORS):
        config = {
            "data": {"source": "digits", "limit_train": 20, "limit_validation": 10, "limit_test": 10},
            "model": {"pretrained": str(saved), "prior": prior},
            "tuning": {"method": "lora", "rank": 2},
            "trainer": {
                "max_steps": 1, "learning_rate": 0.0, "seed": 5, "output_dir": str(tmp_path / str(number)),
                "use_cpu": True, "disable_tqdm": True, "eval_strategy": "no", "save_strategy": "no",
                "load_best_model_at_end": False,
            },
        }  # fmt: skip
        results.append(train.run(config))
        kept = load_file(tmp_path / str(number) / "adapter" / "adapter_model.safetensors")
        adapters.append({name: value for name, value in kept.items() if "lora_A" in name or "classifier" in name})
    assert len(adapters[0]) == 2 * 2 + 2
    for other in adapters[1:]:
        assert all(torch.equal(adapters[0][name], value) for name, value in other.items())
    assert {run["pretrained_sha256"] for run in results} == {file_sha256(saved / "model.safetensors")}
    assert results[0]["decay_change_at_start"] is results[0]["max_alpha_change"] is None
    for trained in results[1:]:  # with a learning rate of 0
        for end in ("max_decay_change", "mean_decay_change", "max_alpha_change"):
            start = end.removeprefix("max_") + "_at_start"
            assert trained[end] == pytest.approx(trained[start]) and {start, end} <= set(record_of(trained, tmp_path))
    distances = np.array([[0, 1, 1, 2], [1, 0, 2, 1], [1, 2, 0, 1], [2, 1, 1, 0]])
    weights = load_file(tmp_path / "2" / "model" / "model.safetensors")
    betas = np.concatenate([weights[name].double().flatten() for name in weights if name.endswith("beta")])
    change = 1 - (1 / (1 + np.exp(-betas)))[:, None, None] ** distances
    assert results[2]["mean_decay_change"] == pytest.approx(change.mean(), rel=1e-3)
    assert results[2]["max_decay_change"] == pytest.approx(change.max(), rel=1e-3)
    weights = load_file(tmp_path / "1" / "model" / "model.safetensors")
    alphas = np.concatenate([weights[name] for name in weights if name.endswith("alpha")])
    assert results[1]["max_alpha_change"] == pytest.approx(np.abs(alphas - 1).max()) and np.ptp(alphas) > 0.005
    assert results[4]["max_decay_change"] < 1e-6 and results[4]["max_alpha_change"] == 0
    # The scalars of a control are trained with the adapter; without beta those are alpha alone, 2 layers of 2 heads.
    assert results[4]["trainable_parameters"] - results[0]["trainable_parameters"] == 2 * 2
