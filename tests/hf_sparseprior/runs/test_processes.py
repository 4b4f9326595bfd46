"""Which device several processes join on, and that a process alone among several is refused."""

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import hf_sparseprior as sp
from hf_sparseprior.runs.hf_run import trainer_arguments
from hf_sparseprior.runs.processes import check_alone, check_joined, join_on_cpu, started
from hf_sparseprior.training.trainer import has_unlearned_predictor
from tests.each import each


@each(
    "processes, accelerator, expected",
    [(None, False, False), (None, True, False), ("1", False, False), ("2", False, True), ("2", True, False)],
)
def test_several_processes_join_on_the_cpu_where_there_is_no_accelerator(processes, accelerator, expected, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if processes:
        monkeypatch.setenv("WORLD_SIZE", processes)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
    assert join_on_cpu() is expected and started() == int(processes or 1)


@each("value", ["0", "-1", "two", ""])
def test_a_world_size_that_is_no_number_of_processes_is_named(value, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.raises(ValueError, match=f"WORLD_SIZE='{value}' in the environment must be an integer of 1 or more"):
        started()


def test_a_process_that_did_not_join_the_others_is_refused(monkeypatch, tmp_path):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    check_joined()
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_joined()
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = (
        "WORLD_SIZE=2 in the environment, but 1 of these processes joined; start the run with torchrun, or without"
    )
    with pytest.raises(ValueError, match=message):
        check_joined()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(ValueError, match=message):  # what every task on the Trainer does first
        trainer_arguments({"output_dir": str(tmp_path), "use_cpu": False})


def test_what_runs_in_one_process_is_refused_in_several(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    check_alone("evaluate")
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_alone("evaluate")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="WORLD_SIZE=4 in the environment, but evaluate runs in one process; start it"):
        check_alone("evaluate")


@pytest.fixture
def joined(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_predictor_that_no_loss_trains_does_not_end_distributed_training(joined):
    torch.manual_seed(0)
    small = {"image_size": 8, "patch_size": 2, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model, other = (
        sp.SparsePriorViTForImageClassification(sp.SparsePriorViTConfig(**small, intermediate_size=32, prior=prior))
        for prior in ("sparsifiner", "violin")
    )
    assert has_unlearned_predictor(model) and not has_unlearned_predictor(other)
    wrapped = DistributedDataParallel(model, find_unused_parameters=has_unlearned_predictor(model))
    for _ in range(2):
        wrapped(pixel_values=torch.randn(2, 3, 8, 8), labels=torch.tensor([0, 1])).loss.backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without and all("predictor" in name for name in without)  # the optimizer leaves them, as in one process
