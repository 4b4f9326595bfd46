"""Runs of mmengine in several processes, and what their first steps are asked."""

import json
import os
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("mmengine", reason="the extra `dense` is not installed")

from mmengine.config import Config
from mmengine.structures import BaseDataElement, InstanceData, PixelData
from torch import distributed

from hf_sparseprior.runs import run_folder
from tasks.common.mm import train
from tasks.common.mm.hooks import TellLearning, has_truth, ignored_pixels
from tasks.common.mm.runner import check_batch
from tests.each import each
from tests.processes import Started

TESTED = {part: {"any": 1} for part in ("test_dataloader", "test_cfg", "test_evaluator")}  # which a run has to have


def two(out, store, seen):
    """Rank 0 takes its time to claim the folder; both note what they would go on from."""
    claim = run_folder.claim

    def built(config):
        with open(seen, "a") as file:
            file.write(f"{rank} {config.get('load_from')}\n")  # in one write
        if rank == 0:
            os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
        os._exit(0)

    def slow(*args):
        time.sleep(1)
        return claim(*args)

    run_folder.claim, train.build_runner = slow, built
    rank = 0 if os.fork() else 1
    os.environ["RANK"] = str(rank)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    train.run(None, Config({"work_dir": out, "seed": 1, **TESTED}), overwrite=True)


@pytest.mark.parametrize(("seed", "found"), [(0, "None"), (1, "iter_8.pth")], ids=["another run", "this run"])
def test_no_process_goes_on_from_what_the_first_one_throws_away(seed, found, tmp_path):
    out, log, seen = tmp_path / "run", tmp_path / "log.txt", tmp_path / "seen.txt"
    out.mkdir()
    (out / "run_config.json").write_text(json.dumps({"config": {"seed": seed, **TESTED}}))
    (out / "iter_8.pth").write_bytes(b"PK\x05\x06" + bytes(18))  # an empty zip file, which is whole
    process = Started(two, str(out), str(tmp_path / "store"), str(seen), folder=tmp_path, log=log, here=True)
    assert process.wait(300) == 0, log.read_text()
    expected = str(out / found) if found != "None" else found
    assert sorted(seen.read_text().splitlines()) == [f"0 {expected}", f"1 {expected}"]


def seg_batch(*classes):
    """A batch of mmsegmentation: images of one class each."""
    pixels = [PixelData(data=torch.full((1, 4, 4), index)) for index in classes]
    return {"inputs": [], "data_samples": [BaseDataElement(gt_sem_seg=each) for each in pixels]}


def objects(*counts):
    """A batch of mmdetection: images with so many objects."""
    found = [InstanceData(labels=torch.zeros(count, dtype=torch.long)) for count in counts]
    return {"inputs": [], "data_samples": [BaseDataElement(gt_instances=each) for each in found]}


@pytest.mark.parametrize(
    ("batch", "labelled"),
    [(seg_batch(255, 255), False), (seg_batch(255, 1), True), (seg_batch(7), False), (objects(0, 0), False),
     (objects(0, 2), True), ({"inputs": []}, None)],
)  # fmt: skip
def test_batches_without_a_label_are_warned_of(batch, labelled, caplog):
    model = torch.nn.Linear(2, 1)
    model.head = torch.nn.Linear(1, 1)
    model.head.ignore_index = 7
    optimizer = torch.optim.SGD([*model.parameters()], lr=0.1)
    runner = SimpleNamespace(model=model, optim_wrapper=SimpleNamespace(optimizer=optimizer))
    hook = TellLearning()
    hook.before_train(runner)
    for step in range(4):
        hook.before_train_iter(runner, step, batch)
        model.head(model(torch.ones(1, 2))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    hook.after_train(runner)
    assert len(hook.watch.messages) == (labelled is False) and (labelled is not False or "no batch" in caplog.text)
    assert has_truth(batch.get("data_samples"), ignored_pixels(model)) is labelled


@each(
    "size, scales, norm, refused",
    [(1, (1, 2), "BN", True), (1, (1, 2), "GN", False), (1, (2, 3), "BN", False), (2, (1, 2), "BN", False)],
)
def test_one_image_and_a_head_with_batch_norms_of_one_pixel(size, scales, norm, refused):
    model = torch.nn.Module()
    model.decode_head = torch.nn.Module()
    model.decode_head.pool_scales, model.decode_head.norm_cfg = scales, {"type": norm}
    with pytest.raises(ValueError, match=r"batch_size=1 .* model\.decode_head") if refused else nullcontext():
        check_batch(model, {"batch_size": size})
