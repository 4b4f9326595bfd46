"""Comparisons of policies: rows are trained, play the held-out episodes, and go on where they stopped."""

import copy
import json
import re

import numpy as np
import pytest

for package in ("diffusers", "gym_pusht", "zarr"):
    pytest.importorskip(package, reason="the robotics extra is not installed")

from hf_sparseprior.patterns.supports import head_offsets  # noqa: E402
from hf_sparseprior.runs.metrics import pack_correct, unpack_correct  # noqa: E402
from tasks.common.compare import all_records  # noqa: E402
from tasks.common.comparison_table import table  # noqa: E402
from tasks.common.records import add_records, read_records  # noqa: E402
from tasks.robotics import compare, evaluate, training  # noqa: E402
from tasks.robotics.config import TrainerConfig, check_config  # noqa: E402
from tasks.robotics.environments import make_environment  # noqa: E402
from tasks.robotics.policy import CrosswayPolicy  # noqa: E402
from tasks.robotics.rollout import rollout, wilson_interval  # noqa: E402
from tests.configs import shipped  # noqa: E402
from tests.each import each  # noqa: E402
from tests.tasks.robotics.tiny import write_pusht  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_accelerator")]
ROOT = shipped.CONFIGS.parent
CONFIG = shipped.path("robotics/table6_small.yaml#pusht")
ROWS = ["dense", "fibottention"]
STEPS = 40  # of an episode, of which PushT's own has 300
TINY = [
    *("policy.widths=[16, 32]", "policy.step_embedding_size=8", "policy.groups=4", "policy.sampling_steps=2"),
    *("policy.image_size=null", "policy.crop=72", "policy.decoder_width=8", "encoder.hidden_size=16"),
    *("encoder.num_hidden_layers=2", "encoder.num_attention_heads=2", "encoder.intermediate_size=32"),
    *("trainer.steps=4", "trainer.batch_size=8", "trainer.log_steps=2", "trainer.validate_steps=2"),
    *("trainer.warmup_steps=2", "trainer.test_episodes=2", "trainer.test_seed=123456", "trainer.disable_tqdm=true"),
    f"trainer.test_steps={STEPS}",
]


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory):
    return write_pusht(tmp_path_factory.mktemp("demonstrations"), cameras=("image",))


def command(folder, demonstrations, *more, override=()):
    out = ["--out", str(folder / "runs"), "--records", str(folder / "records")]
    return [f"data.path={demonstrations}", *TINY, *override, "--config", str(CONFIG), *out, "--variants", *ROWS, *more]


@pytest.fixture(scope="module")
def whole(demonstrations, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert compare.main(command(folder, demonstrations, "--seeds", "0")) == 0
    return folder


def records(folder, demonstrations):
    comparison = compare.load_comparison(CONFIG, [f"data.path={demonstrations}", *TINY])
    return all_records(comparison, folder / "records")


@each("task", ["lift", "can", "pusht"])
def test_rows_of_table_6_in_small_differ_in_their_priors_alone(task):
    """Windows are those that the full table takes first: 5 up to a third of the patches."""
    configs = compare.load_comparison(shipped.path(f"robotics/table6_small.yaml#{task}")).configs
    windows = {}
    for name, config in configs.items():
        policy = check_config(config)[1]
        shared = {key: value for key, value in config["encoder"].items() if key != "prior"}
        assert {**config, "encoder": shared} == {**configs["dense"], "encoder": shared}
        trainer = check_config(config)[2]
        assert trainer.test_episodes == 50 and trainer.test_steps == {"lift": 150, "can": 300, "pusht": None}[task]
        encoder = policy.encoder_config(policy.cameras[0])
        patches = (encoder.image_size[0] // 8) * (encoder.image_size[1] // 8)
        settings = encoder.prior["support"] | {"num_heads": encoder.num_attention_heads, "num_tokens": patches}
        windows[name] = settings["name"]
        if name.startswith("fibottention"):
            shown = {key: settings[key] for key in ("num_heads", "num_tokens", "w_min", "w_max")}
            modified = name.endswith("modified")
            expected = head_offsets("fibottention", num_heads=4, num_tokens=49, w_min=5, w_max=16, modified=modified)
            assert head_offsets("fibottention", **shown, modified=settings["modified"]) == expected
    assert list(windows.values()) == ["dense", "bigbird", "fibottention", "fibottention"]


def test_kept_records_are_of_the_configurations_as_they_are_now():
    folders = [path for path in (ROOT / "tasks/robotics/results/table6_small").iterdir() if path.is_dir()]
    assert folders
    for folder in folders:
        comparison = compare.load_comparison(shipped.path(f"robotics/table6_small.yaml#{folder.name}"))
        kept = all_records(comparison, folder)
        assert sum(map(len, kept.values())) == sum(map(len, read_records(folder).values())) > 0
        assert table(kept, "test_success") in (folder / "table.md").read_text()


def test_a_record_says_what_the_saved_policy_does_in_the_held_out_episodes(whole, demonstrations):
    found = records(whole, demonstrations)
    assert list(found) == ROWS
    with make_environment("pusht", ("image",)) as environment:
        for name, (record,) in found.items():
            policy = CrosswayPolicy.from_pretrained(whole / "runs" / name / "seed0" / "model")
            with evaluate.one_thread():
                played = [rollout(policy, environment, seed, STEPS) for seed in (123_456, 123_457)]
            assert unpack_correct(record["test_correct"]).tolist() == [each.success for each in played]
            assert record["test_rewards"] == [each.max_reward for each in played]
            metrics = record["metrics"]
            assert metrics["test_success"] == np.mean([each.success for each in played])
            assert metrics["test_max_reward"] == np.mean([each.max_reward for each in played])
            assert metrics["test_final_coverage"] == np.mean([each.coverage for each in played])
            assert record["prior"] == name and record["demonstrations_sha256"]
    kept = {name: 1 - record["pruning_ratio"] / 100 for name, (record,) in found.items()}
    assert kept["dense"] == 1 > kept["fibottention"] > 0


def test_evaluate_begins_with_the_seed_of_the_run(whole, tmp_path, capsys):
    """The run's own episodes are there; with another seed, others are played."""
    run = whole / "runs" / "dense" / "seed0"
    assert evaluate.main([str(run), "--episodes", "2", "--max-steps", str(STEPS)]) == 0
    found = json.loads((run / "evaluation" / "results_test.json").read_text())
    assert [each["seed"] for each in found["episodes"]] == [123_456, 123_457] and found["played_now"] == 0
    assert found["config"]["rollouts"]["seed"] == 123_456
    out = ["--max-steps", "2", "--out", str(tmp_path)]
    assert evaluate.main([str(run), "--episodes", "1", "--seed", "7", *out]) == 0
    other = json.loads((tmp_path / "results_test.json").read_text())
    assert [each["seed"] for each in other["episodes"]] == [7]


def test_rows_of_a_seed_begin_alike(whole):
    first = [json.loads((whole / "runs" / name / "seed0/results.json").read_text()) for name in ROWS]
    assert first[0]["parameters"] == first[1]["parameters"] and first[0]["windows"] == first[1]["windows"]
    assert first[0]["history"][0]["loss"] == pytest.approx(first[1]["history"][0]["loss"], rel=0.2)


def test_a_killed_comparison_plays_the_rest(whole, demonstrations, tmp_path, monkeypatch):
    """It ends after the first episode of a run that is trained: neither training nor that episode is done again."""
    played, updates, update = [], [], training.Training._update

    def told(policy, simulator, seed, *arguments):
        played.append(seed)
        if len(played) == 2:
            raise KeyboardInterrupt
        return rollout(policy, simulator, seed, *arguments)

    monkeypatch.setattr(evaluate, "rollout", told)
    monkeypatch.setattr(training.Training, "_update", lambda loop: updates.append(loop.step) or update(loop))
    only = command(tmp_path, demonstrations, "--seeds", "0")
    only.remove("fibottention")
    assert compare.main(only) != 0
    assert played == [123_456, 123_457] and updates == [0, 1, 2, 3]
    assert not (tmp_path / "records").exists()
    assert compare.main(only) == 0
    assert played == [123_456, 123_457, 123_457] and updates == [0, 1, 2, 3]
    mine, other = records(tmp_path, demonstrations)["dense"], records(whole, demonstrations)["dense"]
    assert [each["metrics"] for each in mine] == [each["metrics"] for each in other]
    assert compare.main(only) == 0 and len(played) == 3  # nothing is left


def test_the_table_has_intervals_of_the_solved_episodes(whole, demonstrations, tmp_path):
    made = []
    for seed, solved in ((0, [True, False]), (1, [True, True])):
        for name in ROWS:
            record = copy.deepcopy(read_records(whole / "records")[name][0])
            record["seed"] = record["config"]["trainer"]["seed"] = seed
            outcome = np.array(solved if name == "dense" else [False, False])
            record["test_correct"] = pack_correct(np.ones(2, bool), outcome)
            record["metrics"]["test_success"] = float(outcome.mean())
            made.append((name, record))
    add_records(tmp_path / "records", made)
    assert compare.main(command(tmp_path, demonstrations, "--seeds", "0", "1")) == 0
    table = (tmp_path / "records/table.md").read_text()
    header, dense, sparse = (table.splitlines()[line].split(" | ") for line in (0, 2, 3))
    column = header.index("solved, 95 % interval (Wilson)")
    assert dense[1] == "75.00 ± 35.36"
    for row, right in ((dense, 3), (sparse, 0)):
        low, high = wilson_interval(right, 4)
        assert row[column] == f"{right} of 4, {100 * low:.0f} to {100 * high:.0f} %"
    assert {"highest reward of an episode, %", "covered at the end, %"} <= set(header)
    assert "| fibottention | -50.00, -100.00 |" in table


@each(
    "override, says",
    [
        ("trainer.test_episodes=0", r"trainer\.test_episodes=0 must be 1 or more"),
        ("trainer.test_episodes=-1", r"trainer\.test_episodes=-1 must"),
        ("trainer.test_steps=0", r"trainer\.test_steps=0 must"),
        ("encoder.pretrained=folder", r"encoder\.pretrained='folder' is not for comparisons"),
        ("policy.observations={agent_pos: [2]}", r"policy\.observations has no camera"),
        ("trainer.seed=3", r"trainer\.seed is the comparison's to choose"),
    ],
)
def test_what_is_no_comparison_is_refused_in_one_line(override, says, demonstrations, tmp_path, capsys):
    none = ["trainer.test_seed=null", "trainer.test_steps=null"]
    assert compare.main(command(tmp_path, demonstrations, override=[*none, override])) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and re.search(says, said[0])


def test_rows_of_other_demonstrations_are_refused_before_they_run(whole, tmp_path, capsys):
    other = write_pusht(tmp_path, cameras=("image",), episodes=11)
    kept = copy.deepcopy(read_records(whole / "records"))
    for name in ROWS:
        kept[name][0]["config"]["data"]["path"] = str(other)
        add_records(tmp_path / "records", [(name, kept[name][0])])
    assert compare.main(command(tmp_path, other, "--seeds", "0", "1")) == 2
    assert re.search(r"learned from 2 files \(\w+, \w+\), not from one", capsys.readouterr().err)
    assert not (tmp_path / "runs").exists()


def test_a_job_of_its_own_process_gives_the_same_record(whole, demonstrations, tmp_path):
    only = command(tmp_path, demonstrations, "--seeds", "0", "--jobs", "2")
    only.remove("dense")
    assert compare.main(only) == 0
    (mine,), (other,) = (records(folder, demonstrations)["fibottention"] for folder in (tmp_path, whole))
    assert mine["metrics"] == other["metrics"] and mine["test_correct"] == other["test_correct"]


def test_settings_of_no_episodes_are_refused():
    for name in ("test_steps", "test_seed"):
        with pytest.raises(ValueError, match=rf"trainer\.{name}=200000 is of trainer\.test_episodes, which are 0"):
            TrainerConfig(**{name: 200_000})


@each("seed", [99_999, 50_000, -1, 2e5, True])
def test_seeds_of_demonstrations_and_of_choices_are_not_for_evaluation(seed):
    with pytest.raises(ValueError, match=rf"trainer\.test_seed={seed} must be an integer of 100000 or more"):
        TrainerConfig(test_episodes=5, test_seed=seed)
