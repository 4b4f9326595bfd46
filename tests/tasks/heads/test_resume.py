"""Runs of heads that draw at random, killed, go on to the same bits. UPerNet: tests/tasks/test_contract.py."""

import os
import signal

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

pytest.importorskip("pycocotools", reason="the extra `heads` is not installed")

from hf_sparseprior.runs.results import read_results
from tasks.heads import train
from tests.processes import ROOT, Started
from tests.tasks.common.mm.shapes import write_shapes
from tests.tasks.heads.tiny import tiny_config
from tests.tasks.test_contract import empty_pictures, fingerprint, write_config  # noqa: F401

pytestmark = pytest.mark.slow


def die_in_the_third_step(arguments):
    steps = []

    def count(*given):
        steps.append(1)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count)
    train.main(arguments)


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    """Images are mirrored, paths dropped, and points drawn at random: the order of all draws matters."""
    shapes = write_shapes(tmp_path / "shapes")
    content = tiny_config(shapes, "mask2former", max_steps=4, save_strategy="steps", save_steps=2)
    arguments = write_config(tmp_path, content)
    whole, again = (tmp_path / part for part in ("whole", "again"))
    assert train.main([*arguments, f"trainer.output_dir={whole}"]) == 0
    arguments = [*arguments, f"trainer.output_dir={again}"]
    killed = Started(die_in_the_third_step, arguments, folder=ROOT, log=tmp_path / "log", here=True)
    assert killed.wait(300) == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert not (again / "results.json").exists()
    assert train.main(arguments) == 0
    assert read_results(again / "results.json")["resumed_from"] == "checkpoint-2"
    found = fingerprint(again)
    assert found == fingerprint(whole) and found["weights"] and found["history"]
