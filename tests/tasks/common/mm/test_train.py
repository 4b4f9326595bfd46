"""Runs of mmengine in several processes."""

import json
import os
import time

import pytest

pytest.importorskip("mmengine", reason="the extra `dense` is not installed")

from mmengine.config import Config
from torch import distributed

from tasks.common import run_folder
from tasks.common.mm import train
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
