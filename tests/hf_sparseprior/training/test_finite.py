"""A training that diverges ends before anything of it is saved, or goes on if it is told to."""

import json
import math

import pytest
import torch

from hf_sparseprior.training import SparsePriorTrainingArguments
from hf_sparseprior.training.finite import Diverged, LossWatch, all_finite
from tests.hf_sparseprior.training.test_trainer import make_model, make_trainer


def spoiled(folder, step, **options):
    """A Trainer whose weights become NaN at the end of a step."""
    trainer = make_trainer(make_model(), folder, **options)
    update = trainer.create_optimizer().step

    def step_and_spoil(*args, **kwargs):
        done = update(*args, **kwargs)
        if trainer.state.global_step + 1 == step:
            for parameter in trainer.model.parameters():
                parameter.data.fill_(math.nan)
        return done

    trainer.optimizer.step = step_and_spoil
    return trainer


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (2, {}, r"the loss of step 3 is nan; the last finite one is [\d.]+, of step 2; .*trainer\.nonfinite_loss=con"),
        (2, {"gradient_accumulation_steps": 2}, r"the loss of step 3 is nan; the last finite one is .*, of step 2"),
        (4, {}, r"the weights are not finite after step 4; the last finite one is [\d.]+, of step 4"),
        (18, {"save_strategy": "no", "logging_strategy": "no"}, r"the weights are not finite after step 18"),
        (3, {"save_strategy": "no", "logging_strategy": "no"}, r"the loss of step 4 is nan"),
    ],
    ids=["loss", "accumulating", "weights at a checkpoint", "weights at the end", "nothing logged"],
)
def test_what_has_diverged_is_not_saved(step, options, message, tmp_path):
    trainer = spoiled(tmp_path, step, **options)
    with pytest.raises(Diverged, match=message):
        trainer.train()
    assert not list(tmp_path.glob("checkpoint-*"))


def test_the_last_finite_loss_is_that_of_the_step(tmp_path):
    whole = make_trainer(make_model(), tmp_path / "whole", logging_steps=1, max_steps=2, save_strategy="no")
    whole.train()
    (expected,) = (entry["loss"] for entry in whole.state.log_history if entry["step"] == 2 and "loss" in entry)
    with pytest.raises(Diverged, match=f"the last finite one is {expected:.4g}, of step 2"):
        spoiled(tmp_path / "run", 2).train()


def test_losses_are_read_when_a_thousand_are_noted():
    watch = LossWatch()
    for step in range(999):
        watch.note(step, torch.tensor(1.0))
    assert not watch.full()
    watch.note(999, torch.tensor(1.0))
    assert watch.full() and watch.take()[1].sum() == 1000 and not watch.full() and watch.take()[0] == []


def test_all_finite_reads_floating_numbers_of_every_kind():
    fine = [torch.zeros(0), torch.ones(2, dtype=torch.int64), torch.ones(3, dtype=torch.bfloat16)]
    assert all_finite(fine)
    for value in (math.nan, math.inf, -math.inf):
        assert not all_finite([*fine, torch.tensor([1.0, value])])


def test_other_values_are_refused(tmp_path):
    for value in ("ignore", None, True):
        with pytest.raises(ValueError, match=rf"nonfinite_loss={value!r} must be 'stop' or 'continue'"):
            SparsePriorTrainingArguments(output_dir=str(tmp_path), nonfinite_loss=value)


def test_it_goes_on_if_it_is_told_to(tmp_path):
    trainer = spoiled(tmp_path, 2)
    trainer.args.nonfinite_loss = "continue"
    trainer.train()
    assert trainer.state.global_step == 18 and json.loads(
        (tmp_path / "checkpoint-18" / "trainer_state.json").read_text()
    )
