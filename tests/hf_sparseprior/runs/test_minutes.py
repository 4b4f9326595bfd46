"""`trainer.minutes`: as many steps as fit, once a run."""

import json
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from torch.utils.data import IterableDataset

from hf_sparseprior.classification.config import check_config
from hf_sparseprior.classification.task import CLASSIFICATION
from hf_sparseprior.runs import hf_run
from hf_sparseprior.runs import minutes as module
from hf_sparseprior.runs.hf_run import run
from tests.each import each

MODEL = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}


def config_in(out, **trainer):
    own = {"output_dir": str(out), "seed": 1, "use_cpu": True, "disable_tqdm": True, "dataloader_num_workers": 0}
    own |= {"per_device_train_batch_size": 40, "per_device_eval_batch_size": 200}
    data = {"source": "digits", "limit_train": 200, "limit_validation": 100, "limit_test": 100}
    model = {**MODEL, "intermediate_size": 32, "prior": "violin"}
    return {section: {} for section in CLASSIFICATION.sections} | {
        "data": data,
        "model": model,
        "trainer": {**own, **trainer},
    }


def seconds_of_run(plan, images, batch, step, evaluation, test):
    """How long a run of the plan takes, step by step."""
    an_epoch, total = -(-images // batch), test
    for number in range(1, plan.steps + 1):
        total += step
        every = an_epoch if plan.eval_steps is None else plan.eval_steps
        total += evaluation if number % every == 0 or number == plan.steps else 0
    return total


@each("minutes, images, step, evaluation, test", [
    (10, 1000, 0.5, 4.0, 3.0), (10, 100, 0.05, 2.0, 1.0), (1, 100_000, 0.7, 5.0, 9.0), (60, 5000, 1.0, 30.0, 60.0),
    (3, 64, 0.4, 0.3, 0.3), (0.5, 2000, 1.1, 6.0, 6.0),
])  # fmt: skip
def test_the_steps_fit_and_hardly_more_would(minutes, images, step, evaluation, test, monkeypatch):
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    monkeypatch.setattr(module._Stopwatch, "seconds", lambda self: step)
    monkeypatch.setattr(module, "_seconds_of", lambda trial, data: {"validation": evaluation, "test": test}[data])
    args = SimpleNamespace(
        eval_strategy="epoch", save_strategy="epoch", train_batch_size=32, world_size=1, gradient_accumulation_steps=1
    )
    trainer = SimpleNamespace(args=args, train_dataset=range(images), eval_dataset="validation", progressive=None)
    trial = Mock(eval_dataset="test")
    plan = module._measured(trainer, minutes, lambda folder: trial)
    long = seconds_of_run(plan, images, 32, step, evaluation, test)
    assert 60 * minutes - 2 * evaluation - 2 * step <= long <= 60 * minutes + evaluation
    evaluations = plan.steps / (plan.eval_steps or -(-images // 32))
    assert evaluations <= module.MOST_EVALUATIONS + 1


def test_a_step_takes_the_mean_over_the_sizes_of_its_images(monkeypatch):
    """As many steps of each entry, so an entry that is repeated counts twice."""
    trials, sizes = [], [(4, 4), (4, 4), (8, 8), (16, 16)]

    def make_trial():
        trials.append(Mock(progressive=SimpleNamespace(sizes=list(sizes))))
        return trials[-1]

    monkeypatch.setattr(module._Stopwatch, "seconds", lambda watch: trials[-1].progressive.sizes[0][0] / 10)
    trainer = SimpleNamespace(progressive=SimpleNamespace(sizes=sizes))
    last, step = module._trial_steps(trainer, 6.0, make_trial)
    assert step == pytest.approx((0.4 + 0.4 + 0.8 + 1.6) / 4)
    assert [trial.progressive.sizes for trial in trials] == [[(4, 4)], [(8, 8)], [(16, 16)]] and last is trials[-1]
    assert all(trial.add_callback.call_args.args[0].limit == 2.0 and trial.train.called for trial in trials)


@pytest.mark.slow
def test_a_run_of_some_minutes_goes_on_with_its_plan(tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"

    def planned(trainer, minutes, make_trial):
        trial = make_trial(str(tmp_path / "trial"))
        assert trial.model is not trainer.model and trial.args.save_strategy == "no"
        return module.Plan(minutes, 12, None, 1.0, 2.0, 3.0)

    monkeypatch.setattr(module, "_measured", planned)

    class Killed(module.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 7:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(CLASSIFICATION, config_in(out, minutes=2), callbacks=[Killed()])
    assert json.loads((out / "plan.json").read_text())["steps"] == 12
    monkeypatch.setattr(module, "_measured", None)  # it is not measured again
    results = run(CLASSIFICATION, config_in(out, minutes=2))
    assert results["steps"] == 12 and results["resumed_from"] == "checkpoint-5"
    assert capsys.readouterr().out.count("12 steps in 2 minutes: 1 s a step, evaluation each epoch in 2 s") == 2
    monkeypatch.setattr(module, "_measured", planned)
    whole = run(CLASSIFICATION, config_in(tmp_path / "whole", minutes=2))
    assert whole["metrics"] == results["metrics"]
    with pytest.raises(ValueError, match=r"trainer.minutes: 2 there, 3 here"):
        run(CLASSIFICATION, config_in(out, minutes=3))


@pytest.mark.slow
def test_a_trial_measures_a_copy(tmp_path):
    config = config_in(tmp_path, minutes=60, progressive_sizes=[4, 8])
    arguments = hf_run.trainer_arguments(config["trainer"])
    prepared = CLASSIFICATION.prepare(config, arguments)
    trainer = hf_run.make_trainer(prepared, arguments)
    before = {name: value.clone() for name, value in prepared.model.state_dict().items()}
    plan = module._measured(trainer, 60, partial(hf_run.make_trial, CLASSIFICATION, config, prepared))
    assert (
        trainer.progressive.sizes == [(4, 4), (8, 8)]
        and plan.steps > 100
        and 0 < plan.seconds_per_step < 20
        and plan.seconds_of_test > 0
    )
    assert all(value.equal(before[name]) for name, value in prepared.model.state_dict().items())
    assert trainer.state.global_step == 0 and prepared.train_sampler is trainer.train_sampler


def test_a_stream_is_refused(tmp_path):
    stream = SimpleNamespace(train_dataset=type("Stream", (IterableDataset,), {"__iter__": None})())
    with pytest.raises(ValueError, match=r"trainer\.minutes=2 needs examples in any order, not a stream; set"):
        module.follow_plan(stream, 2, tmp_path, None)
    assert not any(tmp_path.iterdir())


def test_too_short_a_time_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"minutes=1e-05 is too short for a step and the test; give \S+ or more"):
        run(CLASSIFICATION, config_in(tmp_path / "run", minutes=1e-5))
    assert not any((tmp_path / "run").iterdir())


@each("changes, message", [
    ({"minutes": 0}, "trainer.minutes=0 must be a number above 0"),
    ({"minutes": True}, "trainer.minutes=True must be"),
    ({"minutes": 1, "num_train_epochs": 3}, "trainer.num_train_epochs=3 excludes trainer.minutes=1; set it to null"),
    ({"minutes": 1, "max_steps": 3}, "trainer.max_steps=3 excludes trainer.minutes=1"),
])  # fmt: skip
def test_what_does_not_go_with_it(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        check_config(config_in(tmp_path, **changes))
