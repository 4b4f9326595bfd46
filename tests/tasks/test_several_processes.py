"""Two processes of torchrun without a GPU end like one process; killed, they go on.

One task of each framework is killed. Classification, as transformers' Trainer, has tests of its own
(tests/hf_sparseprior/classification/test_distributed.py).
"""

import os
import signal
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_sparseprior.runs.results import read_results
from tests.processes import launched, module
from tests.tasks import test_contract as contract
from tests.tasks.test_contract import empty_pictures  # noqa: F401  forked processes leave them empty as well

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.accelerator.is_available(), reason="the processes would join on an accelerator"),
]


def undropped(prepare: Callable[[Path], list[str]], folder: Path) -> list[str]:
    """Without paths that are dropped, which each process draws for itself, on a machine that has no GPU."""
    arguments = prepare(folder)
    content = yaml.safe_load((folder / "config.yaml").read_text())
    del content["trainer"]["use_cpu"]  # nobody has to say so
    content["model"]["drop_path_rate"] = 0.0
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return arguments


video, pretraining = (partial(undropped, prepare) for prepare in (contract.video, contract.pretraining))


def segmentation(folder: Path) -> list[str]:
    plain = ["model.backbone.drop_path_rate=0", "model.decode_head.dropout_ratio=0", "train_dataloader.batch_size=4"]
    plain += [f"model.{part}.norm_cfg.type=BN" for part in ("neck", "decode_head")]
    return [*contract.segmentation(folder), *plain]


def heads(folder: Path) -> list[str]:
    """DETR: UPerNet has batch norms, of which each process has its own on CPUs."""
    from tests.tasks.common.mm.shapes import write_shapes
    from tests.tasks.heads.tiny import tiny_config

    content = tiny_config(write_shapes(folder / "shapes"), "detr", **contract.TRAINER)
    content["trainer"] |= {"per_device_train_batch_size": 6, "dataloader_drop_last": True}  # six of seven images
    # Some gradients of DETR are hardly more than what rounding leaves. Adam divides them by their own size, and then
    # the order of sums decides about whole steps.
    content["trainer"] |= {"adam_epsilon": 1e-3}
    del content["trainer"]["use_cpu"]
    content["model"]["drop_path_rate"] = 0.0
    content["head"] |= {"dropout": 0.0}
    return contract.write_config(folder, content)


def robotics(folder: Path) -> list[str]:
    """From two cameras, cut at random, in batches that two processes do not share evenly."""
    from tests.tasks.robotics.walk import write_walk

    steps = ["trainer.steps=14", "trainer.save_steps=8", "trainer.batch_size=9", "trainer.validate_steps=null"]
    seen = "{position: [3], agentview_image: [40, 40, 3], robot0_eye_in_hand_image: [40, 40, 3]}"
    small = [f"policy.observations={seen}", "policy.image_size=32", "policy.crop=24", "policy.action_size=4"]
    small += ["trainer.validation_episodes=0", "data.floors={}", "policy.decoder_positions=4"]
    small += ["policy.reconstruction_size=8", "encoder.prior=fibottention"]
    config = str(contract.ROOT / "configs/robotics/smoke.yaml#lift_state")
    return ["--config", config, f"data.path={write_walk(folder)}", *contract.SMALL_POLICY, *small, *steps]


def train_and_kill_one(train, arguments, killed):
    """The command in one of two processes; the second one kills itself after so many steps."""
    steps = []

    def count(*given):
        steps.append(1)
        if len(steps) == killed and os.environ["RANK"] == "1":
            Path("killed").touch()  # whose end the launcher reports is a matter of time
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count)
    raise SystemExit(import_module(train).main(arguments))


TRAINER, RUNNER = "trainer.output_dir", "output_dir"
# What a run imports late: here it is imported once for all processes. Of the others the run of one process does that.
LATE = {
    "segmentation": ("mmseg.models", "mmseg.engine", "mmdet.models"),
    "detection": ("mmdet.models", "mmdet.engine", "mmdet.visualization"),
}


@pytest.mark.parametrize(
    ("task", "needs", "prepare", "place", "half", "killed", "checkpoint", "like_one"),
    [
        ("video", "av", video, TRAINER, "trainer.per_device_train_batch_size=4", None, None, True),
        ("pretraining", "torch", pretraining, TRAINER, "trainer.per_device_train_batch_size=4", None, None, True),
        ("heads", "pycocotools", heads, TRAINER, "trainer.per_device_train_batch_size=3", None, None, True),
        ("segmentation", "mmseg", segmentation, RUNNER, "train_dataloader.batch_size=2", 5, "iter_3.pth", False),
        ("detection", "mmdet", contract.detection, RUNNER, "train_dataloader.batch_size=1", None, None, False),
        ("robotics", "diffusers", robotics, TRAINER, None, 10, "checkpoint-8", True),
    ],
    ids=["video", "pretraining", "heads", "segmentation", "detection", "robotics"],
)  # fmt: skip
def test_two_processes_end_like_one_and_go_on_after_a_kill(
    task, needs, prepare, place, half, killed, checkpoint, like_one, tmp_path
):
    """One is killed after so many steps, of which it takes the last with the other one, who has saved by then."""
    pytest.importorskip(needs, exc_type=ImportError)
    train = import_module(f"tasks.{task}.train")
    for name in LATE.get(task, ()):
        import_module(name)
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier test was alone
    arguments = [str(contract.ROOT / a) if a.startswith("configs/") else a for a in prepare(tmp_path)]
    two = [*arguments, f"{place}={tmp_path}/two", *([half] if half else [])]

    if like_one:
        assert train.main([*arguments, f"{place}={tmp_path}/one"]) == 0

    how = {"folder": tmp_path, "log": tmp_path / "log.txt", "here": True}
    if killed is not None:
        assert launched(2, train_and_kill_one, f"tasks.{task}.train", two, killed, **how).wait(300) != 0
        log = (tmp_path / "log.txt").read_text()
        assert (tmp_path / "killed").exists() and not (tmp_path / "two" / "results.json").exists(), log[-3000:]
    again = module(f"tasks.{task}.train", *two, processes=2, **how)
    assert again.wait(300) == 0, (tmp_path / "log.txt").read_text()[-3000:]
    found = read_results(tmp_path / "two" / "results.json")
    assert found["processes"] == 2 and found.get("resumed_from") == checkpoint
    assert (tmp_path / "two" / "model").is_dir()
    if task in ("heads", "segmentation", "detection"):  # the model that is saved is the one that was measured
        assert (
            import_module(f"tasks.{task}.evaluate").main([str(tmp_path / "two"), "--out", str(tmp_path / "out")]) == 0
        )
        metrics = read_results(tmp_path / "out" / "results_test.json")["metrics"]
        assert metrics == {key: value for key, value in found["metrics"].items() if "_ema_" not in key}
    if not like_one:
        return
    expected = read_results(tmp_path / "one" / "results.json")
    own, one = ([entry["loss"] for entry in each["history"] if "loss" in entry] for each in (found, expected))
    torch.testing.assert_close(own, one, rtol=0, atol=1e-4)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one" / "model").glob("*.safetensors"))
    assert files
    close = 1e-6 if task == "heads" else 2e-4
    for file in files:
        weights = load_file(tmp_path / "one" / file)
        for name, value in load_file(tmp_path / "two" / file).items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=close, msg=name)
