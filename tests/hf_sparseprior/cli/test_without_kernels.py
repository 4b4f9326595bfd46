"""All commands with the kernels hidden, as on a machine without a compiler: what they find is what kernels find."""

import json
import shlex

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import hf_sparseprior as sp
from hf_sparseprior.__main__ import COMMANDS, main
from hf_sparseprior.kernels import build
from hf_sparseprior.sparsification import timing
from tests.hf_sparseprior.sparsification.fakes import Timer
from tests.processes import Started

SIZES = "model.image_size=16 model.patch_size=4 model.hidden_size=24 model.num_hidden_layers=2"
SIZES += " model.num_attention_heads=2 model.intermediate_size=48"
QUICK = f"trainer.use_cpu=true trainer.dataloader_num_workers=0 trainer.disable_tqdm=true {SIZES}"
TRAIN = f"train photos --model vit_tiny --epochs 1 --set {QUICK}"
LINES = [
    "list supports",
    "explain fibottention+violin --grid 4x4 --heads 2 --layers 2",
    f"{TRAIN} --prior fibottention+violin --out run",
    f"{TRAIN} --prior dense --out dense",
    "predict run photos --out found.jsonl",
    "export run folder",
    "export run file --format torch",
    "predict file photos --out of_file.jsonl",
    "convert run/model converted --prior violin",
    """sparsify dense sparse --data photos --budget 0.85 --calibration 8 --candidates '{"name": "window", "w": 2}'""",
    "doctor",
]
NOT_HERE = {"app": "it serves until it is ended", "run-package": "it takes a program that a compiler made"}


class OnceTimer(Timer):
    """Each call runs, and its seconds are known."""

    def __call__(self, calls, device, budget):
        for call in calls.values():
            call()
        return super().__call__(calls, device, budget)


def run_all(lines):
    timing.seconds_of_rounds = OnceTimer()
    for line in lines:
        print(f"$ {line}", flush=True)
        assert main(shlex.split(line)) == 0, line
    assert main(["export", "run", "refused", "--format", "torch", "--kernels"]) == 2
    assert build.loaded_library() is None


@pytest.mark.slow
def test_every_command(tmp_path):
    assert {line.split()[0] for line in LINES} | set(NOT_HERE) == set(COMMANDS)
    digits = load_digits()
    for number in range(60):
        file = tmp_path / "photos" / ("even", "odd")[digits.target[number] % 2] / f"{number:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = (16 * digits.images[number]).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).resize((16, 16)).convert("RGB").save(file)
    hidden = {"SPARSEPRIOR_KERNELS": "0", "HF_HUB_OFFLINE": "1"}
    process = Started(run_all, LINES, folder=tmp_path, log=tmp_path / "log", environment=hidden)
    code, log = process.wait(300), (tmp_path / "log").read_text()
    assert code == 0, log[-3000:]
    (line,) = (line for line in log.splitlines() if "compiled CPU kernels" in line)
    assert line == "missing  compiled CPU kernels: SPARSEPRIOR_KERNELS=0. Attention runs without them, slower."
    assert "--kernels: no CPU kernels: SPARSEPRIOR_KERNELS=0; a file without" in log

    sp.predict(tmp_path / "run", tmp_path / "photos", tmp_path / "here.jsonl")  # with the kernels, where there are any
    here = rows_of(tmp_path / "here.jsonl")
    assert len(here) == 60
    for name in ("found", "of_file"):
        found = rows_of(tmp_path / f"{name}.jsonl")
        assert {name.rpartition("/")[2] for name in found} == {name.rpartition("/")[2] for name in here}
        for path, row in found.items():
            expected = here[str(tmp_path / path)]
            shares = [dict(zip(own["labels"], own["probabilities"], strict=True)) for own in (row, expected)]
            assert shares[0] == pytest.approx(shares[1], abs=1e-5), path


def rows_of(file):
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["path"]: row for row in rows}
