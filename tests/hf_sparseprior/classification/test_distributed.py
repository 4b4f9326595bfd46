"""Several processes, killed and stopped ones: each run here is a process of its own.

Of the processes that accelerate's command starts, through torchrun's, the first imports for itself; the others are
forked from this one, and two of them by torchrun's launcher, which is quicker.
"""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.runs import minutes
from tasks.classification import train
from tests.processes import Started, launched, module, run_module

pytestmark = pytest.mark.slow

CONFIG = """
data: {source: digits, limit_train: 437, limit_validation: 50, limit_test: 50}
augmentation: {crop: random, padding: 1, mixup: 0.8, cutmix: 1.0, label_smoothing: 0.1}
model: {prior: fibottention+violin, image_size: 8, patch_size: 2, hidden_size: 32, num_hidden_layers: 2,
        num_attention_heads: 4, intermediate_size: 64, attention_probs_dropout_prob: 0.0}
trainer: {num_train_epochs: 2, per_device_train_batch_size: 64, per_device_eval_batch_size: 32, learning_rate: 2e-3,
          weight_decay: 0.05, warmup_steps: 5, max_grad_norm: 1.0, logging_strategy: steps, logging_steps: 1,
          eval_strategy: steps, eval_steps: 4, save_strategy: steps, save_steps: 4, save_total_limit: null,
          dataloader_drop_last: true, disable_tqdm: true, use_cpu: true, progressive_sizes: [4, 6, 8]}
"""
STEPS = 12  # 437 // 64 = 6 in each of 2 epochs
FSDP2 = [
    "trainer.fsdp=full_shard",
    "trainer.fsdp_config={version: 2, transformer_layer_cls_to_wrap: [SparsePriorViTLayer]}",
]
ACCELERATE = [
    *("accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no"),
    *("--dynamo_backend=no", "--main_process_port=0", "-m"),
]
TRAIN = ["tasks.classification.train", "--config", "run.yaml", "trainer.output_dir=run"]


def start(tmp_path, processes, *overrides):
    (tmp_path / "run.yaml").write_text(CONFIG)
    return module(*TRAIN, *overrides, processes=processes, folder=tmp_path, log=tmp_path / "log.txt", here=True)


def start_and_stop(stop, tmp_path, processes, *overrides):
    """Each process calls `stop` after its fifth step, the next after a checkpoint and amid an epoch."""
    (tmp_path / "run.yaml").write_text(CONFIG)
    place = {"folder": tmp_path, "log": tmp_path / "log.txt", "here": True}
    if processes == 1:
        return Started(train_and_stop, stop, overrides, **place)
    return launched(processes, train_and_stop, stop, overrides, **place)


def train_and_stop(stop, overrides):
    steps = []

    def count(*given):
        steps.append(1)
        if len(steps) == 5:
            stop()

    register_optimizer_step_post_hook(count)
    raise SystemExit(train.main([*TRAIN[1:], *overrides]))


def stop_group():
    os.killpg(os.getpgid(0), signal.SIGTERM)  # data loader workers as well


def stop_launcher():
    """Which hands it on: each process waits until it has it."""
    number, handler = signal.SIGTERM, signal.getsignal(signal.SIGTERM)
    received = []

    def note(*given):
        received.append(1)
        handler(*given)

    signal.signal(number, note)
    torch.distributed.barrier()  # all listen
    if os.environ["RANK"] == "0":
        os.kill(os.getppid(), number)
    deadline = time.monotonic() + 100
    while not received and time.monotonic() < deadline:
        time.sleep(0.01)
    assert received


def kill_one():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def finish(process, tmp_path):
    return process.wait(300), (tmp_path / "log.txt").read_text()


def complete(tmp_path, processes, *overrides):
    code, log = finish(start(tmp_path, processes, *overrides), tmp_path)
    assert code == 0, log[-3000:]
    return read(tmp_path)


def complete_command(tmp_path, *overrides):
    (tmp_path / "run.yaml").write_text(CONFIG)
    arguments = [*ACCELERATE, *TRAIN, *overrides]
    process = Started(launch_and_fork_one, arguments, folder=tmp_path, log=tmp_path / "log.txt", here=True)
    code, log = finish(process, tmp_path)
    assert code == 0, log[-3000:]
    return read(tmp_path)


def launch_and_fork_one(arguments):
    """`python -m ARGUMENTS`, a launcher, whose second `python -u -m NAME ARGUMENTS` is forked."""
    popen = SubprocessHandler._popen

    def popen_or_fork(self, command, environment):
        if self.local_rank_id == 0:
            return popen(self, command, environment)
        assert command[1:3] == ("-u", "-m")
        place = {"folder": Path.cwd(), "log": Path("log.txt"), "environment": environment}
        return module(*command[3:], **place, here=True)

    SubprocessHandler._popen = popen_or_fork
    run_module(arguments[0], tuple(arguments[1:]))


def read(tmp_path):
    return json.loads((tmp_path / "run" / "results.json").read_text())


def losses(results):
    return torch.tensor([entry["loss"] for entry in results["history"] if "loss" in entry], dtype=torch.float64)


def weights(tmp_path):
    return load_file(tmp_path / "run" / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process, never disturbed: this one, so that what it imports late is there in those that are forked."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "run.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train.main([*TRAIN[1:], "trainer.ema_decay=0.9"]) == 0
    results = read(folder)
    assert len(losses(results)) == STEPS
    return results, weights(folder), load_file(folder / "run" / f"checkpoint-{STEPS}" / "ema.safetensors")


def check_like_one(run, folder, alone):
    """Two processes trained as one did."""
    expected, expected_weights, _ = alone
    assert run["processes"] == 2 and run["steps"] == STEPS
    torch.testing.assert_close(losses(run), losses(expected), rtol=0, atol=1e-4)
    for name, value in weights(folder).items():
        torch.testing.assert_close(value, expected_weights[name], rtol=0, atol=2e-4)
    assert run["metrics"]["test_accuracy"] == pytest.approx(expected["metrics"]["test_accuracy"], abs=0.01)
    assert sum(map(sum, run["confusion"])) == sum(map(sum, expected["confusion"]))


def test_two_processes_train_like_one(alone, tmp_path):
    """By DDP. By FSDP2: see the killed worker."""
    overrides = ["trainer.per_device_train_batch_size=16", "trainer.gradient_accumulation_steps=2"]
    check_like_one(complete(tmp_path, 2, *overrides), tmp_path, alone)


def test_two_processes_of_accelerate_train_like_one_with_workers(alone, tmp_path):
    overrides = ["trainer.per_device_train_batch_size=32", "trainer.dataloader_num_workers=1", "trainer.ema_decay=0.9"]
    check_like_one(complete_command(tmp_path, *overrides), tmp_path, alone)


def test_two_processes_distill_like_one(tmp_path):
    """The model and its predictor, by all losses."""
    small = {"image_size": 8, "patch_size": 2, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = SparsePriorViTConfig(**small, intermediate_size=64, initializer_range=0.2, num_labels=10)
    SparsePriorViTForImageClassification(config).save_pretrained(tmp_path / "dense")
    steps = ["trainer.max_steps=4", "trainer.eval_steps=4", "trainer.save_steps=4"]
    overrides = [
        *("model.pretrained=../dense", "model.prior=sparsifiner", "distillation.teacher=self", *steps),
        *("distillation.lambda_attention=1", "augmentation.mixup=0", "augmentation.cutmix=0"),
    ]
    found = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        results = complete(folder, processes, *overrides, f"trainer.per_device_train_batch_size={64 // processes}")
        found.append((losses(results), weights(folder)))
    (expected, expected_weights), (own, own_weights) = found
    assert len(own) == 4
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-4)
    for name, value in own_weights.items():
        torch.testing.assert_close(value, expected_weights[name], rtol=0, atol=2e-4)


@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_saves_and_the_run_goes_on_to_the_same_weights(alone, tmp_path, processes):
    size = ["trainer.ema_decay=0.9", f"trainer.per_device_train_batch_size={64 // processes}"]
    stop = stop_group if processes == 1 else stop_launcher
    process = start_and_stop(stop, tmp_path, processes, "trainer.dataloader_num_workers=1", *size)
    code, log = finish(process, tmp_path)
    assert code == 143 if processes == 1 else code != 0, (code, log[-3000:])
    saved = max(int(path.name.split("-")[1]) for path in (tmp_path / "run").glob("checkpoint-*"))
    assert f"stopped after step {saved}" in log and 5 <= saved < STEPS
    assert not (tmp_path / "run" / "results.json").exists()
    results = complete(tmp_path, processes, *size)
    assert results["resumed_from"] == f"checkpoint-{saved}"
    average = load_file(tmp_path / "run" / f"checkpoint-{STEPS}" / "ema.safetensors")
    for name, value in weights(tmp_path).items():
        if processes == 1:
            assert value.equal(alone[1][name]), name
            assert average[name].equal(alone[2][name]), name
        torch.testing.assert_close(value, alone[1][name], rtol=0, atol=2e-4)


def test_a_killed_worker_ends_the_run_which_goes_on_from_the_last_checkpoint(alone, tmp_path):
    """By FSDP2, whose weights lie in parts, one of each process; those of DDP are read again after SIGTERM."""
    overrides = ["trainer.per_device_train_batch_size=32", *FSDP2]
    code, log = finish(start_and_stop(kill_one, tmp_path, 2, *overrides), tmp_path)
    assert code != 0 and "ChildFailedError" in log
    assert not (tmp_path / "run" / "results.json").exists()
    results = complete(tmp_path, 2, *overrides)
    assert results["resumed_from"] == "checkpoint-4"
    check_like_one(results, tmp_path, alone)


def test_two_processes_learn_several_labels_after_a_kill_like_one(tmp_path):
    """Digits with the labels "even", "large" and "closed", in a CSV file."""
    digits, rows = load_digits(), ["image,labels"]
    for number in range(537):
        digit = digits.target[number]
        known = {"even": digit % 2 == 0, "large": digit > 4, "closed": digit in (0, 6, 8, 9)}
        pixels = (16 * digits.images[number]).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).convert("RGB").save(tmp_path / f"{number}.png")
        rows.append(f"{number}.png,{'; '.join(name for name, true in known.items() if true)}")
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n")
    overrides = [
        *("data.source=csv", "data.path=../table.csv", "data.labels=several", "augmentation.label_smoothing=0"),
        *("augmentation.mixup=0", "augmentation.cutmix=0", "data.limit_train=320"),
    ]
    own = check_two_after_a_kill_like_one(tmp_path, overrides)
    assert set(own["metrics"]) >= {"test_mean_average_precision", "test_f1"}


@pytest.mark.parametrize("balance", ["loss", "sampling"])
def test_two_processes_balance_classes_after_a_kill_like_one(balance, tmp_path):
    """Of a tenth of the images, "eight"."""
    digits, rows = load_digits(), ["image,label"]
    for number in range(537):
        pixels = (16 * digits.images[number]).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).convert("RGB").save(tmp_path / f"{number}.png")
        rows.append(f"{number}.png,{'eight' if digits.target[number] == 8 else 'other'}")
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n")
    overrides = ["data.source=csv", "data.path=../table.csv", f"augmentation.balance={balance}"]
    overrides += ["data.limit_train=null", "data.limit_validation=null", "data.limit_test=null", "trainer.max_steps=6"]
    check_two_after_a_kill_like_one(tmp_path, overrides)


def check_two_after_a_kill_like_one(tmp_path, overrides):
    """Two processes, one is killed and both go on, train as one process did; their results."""
    found = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        size = f"trainer.per_device_train_batch_size={64 // processes}"
        if processes == 2:
            code, log = finish(start_and_stop(kill_one, folder, 2, *overrides, size), folder)
            assert code != 0 and "ChildFailedError" in log
        results = complete(folder, processes, *overrides, size)
        assert results["resumed_from"] == (None if processes == 1 else "checkpoint-4")
        found.append((results, weights(folder)))
    (expected, expected_weights), (own, own_weights) = found
    torch.testing.assert_close(losses(own), losses(expected), rtol=0, atol=1e-4)
    for name, value in own_weights.items():
        torch.testing.assert_close(value, expected_weights[name], rtol=0, atol=2e-4)
    assert own["metrics"] == pytest.approx(expected["metrics"], abs=0.02)
    return own


def train_with_a_plan(overrides):
    """Each process would plan other steps."""
    minutes._measured = lambda trainer, given, trial: minutes.Plan(given, 7 + int(os.environ["RANK"]), None, 1, 1, 1)
    raise SystemExit(train.main([*TRAIN[1:], *overrides]))


def test_two_processes_balance_classes_and_do_the_steps_that_the_first_planned(tmp_path):
    (tmp_path / "run.yaml").write_text(CONFIG)
    size = ["trainer.per_device_train_batch_size=32", "augmentation.balance=sampling"]
    length = ["trainer.minutes=3", "trainer.num_train_epochs=null"]
    place = {"folder": tmp_path, "log": tmp_path / "log.txt", "here": True}
    code, log = finish(launched(2, train_with_a_plan, [*size, *length], **place), tmp_path)
    assert code == 0, log[-3000:]
    results = read(tmp_path)
    assert results["processes"] == 2 and results["steps"] == len(losses(results)) == 7
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["steps"] == 7
