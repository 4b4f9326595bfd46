"""Several processes, killed and stopped ones: each run here is a command of its own, as a user types it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification

pytestmark = pytest.mark.slow

CONFIG = """
data: {source: digits}
augmentation: {crop: random, padding: 1, mixup: 0.8, cutmix: 1.0, label_smoothing: 0.1}
model: {prior: fibottention+violin, image_size: 8, patch_size: 2, hidden_size: 32, num_hidden_layers: 2,
        num_attention_heads: 4, intermediate_size: 64, attention_probs_dropout_prob: 0.0}
trainer: {num_train_epochs: 3, per_device_train_batch_size: 64, per_device_eval_batch_size: 256, learning_rate: 2e-3,
          weight_decay: 0.05, warmup_steps: 5, max_grad_norm: 1.0, logging_strategy: steps, logging_steps: 1,
          eval_strategy: steps, eval_steps: 8, save_strategy: steps, save_steps: 8, save_total_limit: null,
          dataloader_drop_last: true, disable_tqdm: true, use_cpu: true}
"""
STEPS = 48  # 1077 // 64 = 16 in each of 3 epochs
FSDP2 = [
    "trainer.fsdp=full_shard",
    "trainer.fsdp_config={version: 2, transformer_layer_cls_to_wrap: [SparsePriorViTLayer]}",
]
LAUNCHERS = {
    "one": ["-m"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m"],
    "accelerate": ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
                   "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0", "-m"],
}  # fmt: skip


def start(tmp_path, launcher, *overrides):
    (tmp_path / "run.yaml").write_text(CONFIG)
    command = [sys.executable, *LAUNCHERS[launcher], "tasks.classification.train", "--config", "run.yaml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    with open(tmp_path / "log.txt", "a") as log:
        return subprocess.Popen(
            [*command, "trainer.output_dir=run", *overrides],
            cwd=tmp_path,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(process, tmp_path, timeout=300):
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError((tmp_path / "log.txt").read_text()[-3000:]) from None
    return code, (tmp_path / "log.txt").read_text()


def complete(tmp_path, launcher, *overrides):
    code, log = finish(start(tmp_path, launcher, *overrides), tmp_path)
    assert code == 0, log[-3000:]
    return json.loads((tmp_path / "run" / "results.json").read_text())


def losses(results):
    return torch.tensor([entry["loss"] for entry in results["history"] if "loss" in entry], dtype=torch.float64)


def weights(tmp_path):
    return load_file(tmp_path / "run" / "model" / "model.safetensors")


def wait_for(path, process, seconds=200):
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end, f"{path} did not come"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process, never disturbed."""
    folder = tmp_path_factory.mktemp("alone")
    results = complete(folder, "one", "trainer.ema_decay=0.9")
    assert len(losses(results)) == STEPS
    return results, weights(folder), load_file(folder / "run" / f"checkpoint-{STEPS}" / "ema.safetensors")


@pytest.mark.parametrize(
    ("launcher", "overrides"),
    [
        ("torchrun", ["trainer.per_device_train_batch_size=32", "trainer.ema_decay=0.9"]),
        ("torchrun", ["trainer.per_device_train_batch_size=16", "trainer.gradient_accumulation_steps=2"]),
        ("torchrun", ["trainer.per_device_train_batch_size=32", *FSDP2]),
        ("accelerate", ["trainer.per_device_train_batch_size=32", "trainer.dataloader_num_workers=1"]),
    ],
    ids=["ddp", "ddp accumulating", "fsdp2", "accelerate with workers"],
)
def test_two_processes_train_like_one(alone, tmp_path, launcher, overrides):
    results = complete(tmp_path, launcher, *overrides)
    expected, expected_weights, _ = alone
    assert results["processes"] == 2 and results["steps"] == STEPS
    torch.testing.assert_close(losses(results), losses(expected), rtol=0, atol=1e-4)
    for name, value in weights(tmp_path).items():
        torch.testing.assert_close(value, expected_weights[name], rtol=0, atol=2e-4)
    assert results["metrics"]["test_accuracy"] == pytest.approx(expected["metrics"]["test_accuracy"], abs=0.01)
    assert sum(map(sum, results["confusion"])) == sum(map(sum, expected["confusion"]))


@pytest.mark.parametrize(
    "phase", [["distillation.phase=predictor"], ["distillation.phase=model", "distillation.lambda_attention=1"]]
)
def test_two_processes_distill_like_one(tmp_path, phase):
    small = {"image_size": 8, "patch_size": 2, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = SparsePriorViTConfig(**small, intermediate_size=64, initializer_range=0.2, num_labels=10)
    SparsePriorViTForImageClassification(config).save_pretrained(tmp_path / "dense")
    steps = ["trainer.max_steps=4", "trainer.eval_steps=4", "trainer.save_steps=4"]
    overrides = [
        *("model.pretrained=../dense", "model.prior=sparsifiner", "distillation.teacher=self", *phase, *steps),
        *("augmentation.mixup=0", "augmentation.cutmix=0"),
    ]
    found = []
    for launcher, size in (("one", 64), ("torchrun", 32)):
        folder = tmp_path / launcher
        folder.mkdir()
        results = complete(folder, launcher, *overrides, f"trainer.per_device_train_batch_size={size}")
        found.append((losses(results), weights(folder)))
    (expected, expected_weights), (own, own_weights) = found
    assert len(own) == 4
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-4)
    for name, value in own_weights.items():
        torch.testing.assert_close(value, expected_weights[name], rtol=0, atol=2e-4)


@pytest.mark.parametrize(("launcher", "code", "workers"), [("one", 143, 0), ("one", 143, 1), ("torchrun", None, 1)])
def test_sigterm_saves_and_the_run_goes_on_to_the_same_weights(alone, tmp_path, launcher, code, workers):
    size = ["trainer.per_device_train_batch_size=32"] if launcher == "torchrun" else []
    process = start(tmp_path, launcher, "trainer.ema_decay=0.9", f"trainer.dataloader_num_workers={workers}", *size)
    wait_for(tmp_path / "run" / "checkpoint-8" / "trainer_state.json", process)
    if launcher == "one":
        os.killpg(process.pid, signal.SIGTERM)  # data loader workers as well
    else:
        process.send_signal(signal.SIGTERM)  # torchrun hands it on
    left, log = finish(process, tmp_path)
    assert left == code if code is not None else left != 0
    saved = max(int(path.name.split("-")[1]) for path in (tmp_path / "run").glob("checkpoint-*"))
    assert f"stopped after step {saved}" in log and 8 <= saved < STEPS
    assert not (tmp_path / "run" / "results.json").exists()
    results = complete(tmp_path, launcher, "trainer.ema_decay=0.9", *size)
    assert results["resumed_from"] == f"checkpoint-{saved}"
    average = load_file(tmp_path / "run" / f"checkpoint-{STEPS}" / "ema.safetensors")
    for name, value in weights(tmp_path).items():
        if launcher == "one":
            assert value.equal(alone[1][name]), name
            assert average[name].equal(alone[2][name]), name
        torch.testing.assert_close(value, alone[1][name], rtol=0, atol=2e-4)


@pytest.mark.parametrize("overrides", [[], FSDP2], ids=["ddp", "fsdp2"])
def test_a_killed_worker_ends_the_run_which_goes_on_from_the_last_checkpoint(alone, tmp_path, overrides):
    overrides = ["trainer.per_device_train_batch_size=32", *overrides]
    process = start(tmp_path, "torchrun", *overrides)
    for name in ("trainer_state.json", "rng_state_0.pth", "rng_state_1.pth"):  # a whole checkpoint, of both processes
        wait_for(tmp_path / "run" / "checkpoint-8" / name, process)
    worker = psutil.Process(process.pid).children()[-1]
    worker.kill()
    code, log = finish(process, tmp_path)
    assert code != 0 and "exitcode  : -9" in log
    assert not (tmp_path / "run" / "results.json").exists()
    results = complete(tmp_path, "torchrun", *overrides)
    assert results["resumed_from"].startswith("checkpoint-") and results["steps"] == STEPS
    for name, value in weights(tmp_path).items():
        torch.testing.assert_close(value, alone[1][name], rtol=0, atol=2e-4)
