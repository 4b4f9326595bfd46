import os
import pickle

import numpy as np
import pytest
import torch

pytest.importorskip("mmengine", reason="the extra `dense` is not installed")

from mmengine.logging import HistoryBuffer
from mmengine.runner.checkpoint import CheckpointLoader, _load_checkpoint
from safetensors.torch import save_file

from hf_sparseprior.mm.loading import read_checkpoint, refuse_pickles


class Attack:
    """A pickle that writes a file when it is read."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


class Reach:
    """A pickle that reaches for an attribute by the builtin getattr, which mmengine allows."""

    def __reduce__(self):
        return getattr, (HistoryBuffer, "__init__")


def test_histories_come_back(tmp_path):
    history = HistoryBuffer([3.0, 1.0, 2.0], [1, 1, 1])
    content = {"state_dict": {"a": torch.arange(3.0)}, "message_hub": {"loss": history}, "best": np.float64(0.25)}
    torch.save(content, tmp_path / "iter_3.pth")
    read = read_checkpoint(tmp_path / "iter_3.pth")
    assert torch.equal(read["state_dict"]["a"], torch.arange(3.0)) and read["best"] == 0.25
    assert read["message_hub"]["loss"].data[0].tolist() == [3.0, 1.0, 2.0]
    assert read["message_hub"]["loss"].statistics("min") == 1.0


@pytest.mark.parametrize(
    ("loader", "wrap"),
    [
        *((read_checkpoint, "zip"), (read_checkpoint, "legacy"), (_load_checkpoint, "legacy")),
        *((_load_checkpoint, "bare pickle"), (CheckpointLoader.load_checkpoint, "bare pickle")),
        (CheckpointLoader.load_checkpoint, "zip"),
    ],
)
def test_a_malicious_pickle_is_refused_and_does_nothing(tmp_path, loader, wrap):
    refuse_pickles()
    target, file = tmp_path / "written", tmp_path / "bad.pth"
    content = {"state_dict": {"a": torch.zeros(1)}, "meta": Attack(target)}
    if wrap == "bare pickle":
        file.write_bytes(pickle.dumps(content["meta"]))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=wrap == "zip")
    with pytest.raises(OSError, match=r"bad\.pth (is refused: it holds .*mkdir|cannot be read)") as caught:
        loader(str(file))
    assert "\n" not in str(caught.value) and not target.exists()
    torch.load(file, weights_only=False) if wrap != "bare pickle" else pickle.loads(file.read_bytes())
    assert target.exists()  # so the file was malicious


def test_getattr_reaches_nothing_but_the_statistics(tmp_path):
    torch.save({"x": Reach()}, tmp_path / "bad.pth")
    with pytest.raises(OSError, match=r"is refused: it holds builtins\.getattr"):
        read_checkpoint(tmp_path / "bad.pth")


def test_safetensors_are_read_as_a_checkpoint_of_mmengine(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(3.0)}, file, metadata={"dataset_meta": '{"classes": ["one", "two"]}'})
    for loader in (read_checkpoint, CheckpointLoader.load_checkpoint):
        refuse_pickles()
        read = loader(str(file), map_location="cpu")
        assert torch.equal(read["state_dict"]["a"], torch.arange(3.0))
        assert read["meta"] == {"dataset_meta": {"classes": ["one", "two"]}}
    save_file({"a": torch.arange(3.0)}, file)  # of another tool, which knows no classes
    assert read_checkpoint(file)["meta"] == {}
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(OSError, match=r"model\.safetensors cannot be read as a checkpoint"):
        read_checkpoint(file)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 cut off"])
def test_a_damaged_file_gets_one_line(tmp_path, content):
    (tmp_path / "bad.pth").write_bytes(content)
    with pytest.raises(OSError, match=r"bad\.pth cannot be read as a checkpoint") as caught:
        read_checkpoint(tmp_path / "bad.pth")
    assert "\n" not in str(caught.value)


def test_unsafe_reading_is_refused(tmp_path):
    with pytest.raises(OSError, match="weights_only=False"):
        read_checkpoint(tmp_path / "any.pth", weights_only=False)
    with pytest.raises(FileNotFoundError):
        read_checkpoint(tmp_path / "missing.pth")
