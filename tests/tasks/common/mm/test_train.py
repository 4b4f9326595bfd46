"""Runs of mmengine in several processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mmengine", reason="the extra `dense` is not installed")

# Rank 0 takes its time to claim the folder; rank 1 prints what it would go on from.
TWO = """
import os, sys, time
from mmengine.config import Config
from torch import distributed
from tasks.common import run_folder
from tasks.common.mm import train

def built(config):
    print(f'{os.environ["RANK"]} {config.get("load_from")}\\n', end="", flush=True)  # in one write
    if os.environ["RANK"] == "0":
        os.wait()
    os._exit(0)

def slow(*args):
    time.sleep(1)
    return claim(*args)

claim, run_folder.claim, train.build_runner = run_folder.claim, slow, built
os.environ["RANK"] = "0" if os.fork() else "1"
rank, out, store = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
train.run(None, Config({"work_dir": out, "seed": 1}), overwrite=True)
"""


@pytest.mark.parametrize(("seed", "found"), [(0, "None"), (1, "iter_8.pth")], ids=["another run", "this run"])
def test_no_process_goes_on_from_what_the_first_one_throws_away(seed, found, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "run_config.json").write_text(json.dumps({"config": {"seed": seed}}))
    (out / "iter_8.pth").write_bytes(b"PK\x05\x06" + bytes(18))  # an empty zip file, which is whole
    command = [sys.executable, "-c", TWO, str(out), str(tmp_path / "store")]
    done = subprocess.run(command, cwd=Path(__file__).parents[4], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    expected = str(out / found) if found != "None" else found
    assert sorted(done.stdout.splitlines()) == [f"0 {expected}", f"1 {expected}"]
