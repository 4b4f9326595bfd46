"""Packages of AOTInductor, which are compiled models. One is made here; release-check runs one from C++."""

import json
import shutil
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from hf_sparseprior.__main__ import main
from hf_sparseprior.cli import deployment, packages
from hf_sparseprior.cli.deployment import DEPLOYMENT
from hf_sparseprior.kernels import build, program_libraries
from tests.hf_sparseprior.cli.test_deployment import export, images, make, written_out
from tests.processes import ROOT, run_script

ALONE = """
import sys
sys.modules["transformers"] = None
import numpy as np, torch
torch.ops.load_library({library!r})
model = torch._inductor.aoti_load_package("out/model.aoti.pt2")
with torch.no_grad():
    found = [model(torch.from_numpy(pixels))[0].numpy() for pixels in np.load("pixels.npz").values()]
np.savez("found.npz", *found)
assert not any(name.partition(".")[0] == "hf_sparseprior" for name in sys.modules)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """One layer for images of 32 pixels, with the kernels in it."""
    folder = tmp_path_factory.mktemp("package")
    library = program_libraries.torch_library()
    model = make("sparseprior_vit", prior="fibottention+violin", image_size=32)
    model.save_pretrained(folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deployment, "latencies", lambda *arguments: ({}, {}, []))
        patch.setenv("SPARSEPRIOR_BACKEND", "cpp")
        assert export(folder / "model", folder / "out", "--format", "aoti", "--kernels") == 0
    return folder, model, library


def test_a_package_gives_what_the_model_gives_where_this_package_is_not(package):
    folder, model, library = package
    about = json.loads((folder / "out" / DEPLOYMENT).read_text())
    assert about["attention"] == {"pair_weights": 1, "diagonal_output": 1} and about["file"] == packages.FILE
    pixels = [images(model.config, batch) for batch in (1, 3)]
    np.savez(folder / "pixels.npz", *(one.numpy() for one in pixels))
    run_script(ALONE.format(library=str(library)), folder=folder)
    for found, one in zip(np.load(folder / "found.npz").values(), pixels, strict=True):
        np.testing.assert_allclose(found, written_out(model, one)[0], rtol=1e-4, atol=1e-4)


def test_a_package_names_no_path_of_this_machine(package):
    folder, *_ = package
    with zipfile.ZipFile(folder / "out" / packages.FILE) as opened:
        assert any(name.endswith(".so") for name in opened.namelist())
        for name in opened.namelist():
            content = opened.read(name)
            for place in (str(ROOT), torch.__path__[0], "/tmp/", str(folder)):
                assert place.encode() not in content, (name, place)


def test_run_package(package, capsys):
    folder, model, _ = package
    assert main(["run-package", str(folder / "out")]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "logits: (1, 3)" and second.startswith("one random image, ")
    photo = folder / "photo.png"
    Image.new("RGB", (40, 40), (200, 30, 90)).save(photo)
    assert main(["run-package", str(folder / "out" / packages.FILE), str(photo)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    processor = packages.load_image_processor(folder / "out")
    with torch.no_grad():
        pixels = processor([Image.open(photo)], return_tensors="pt")["pixel_values"]
        shares = model(pixels).logits.softmax(-1)[0]
    best = shares.argsort(descending=True).tolist()
    assert line == f"{photo}: " + ", ".join(f"LABEL_{number} {100 * shares[number]:.1f} %" for number in best)


def test_what_is_no_package_is_refused_in_a_line(package, tmp_path, capsys):
    folder, *_ = package
    whole = (folder / "out" / packages.FILE).read_bytes()

    def refused(content=whole, **about):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        (tmp_path / "out").mkdir()
        written = {**json.loads((folder / "out" / DEPLOYMENT).read_text()), **about}
        (tmp_path / "out" / DEPLOYMENT).write_text(json.dumps(written))
        (tmp_path / "out" / packages.FILE).write_bytes(content)
        assert main(["run-package", str(tmp_path / "out")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert f"{packages.FILE} is no package of AOTInductor, or damaged" in refused(whole[: len(whole) // 2])
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as other:
        other.writestr("data.pkl", b"cos\nsystem\n(S'touch /tmp/x'\ntR.")
    assert "is no package of AOTInductor: it has no compiled model" in refused((tmp_path / "other.zip").read_bytes())
    assert "holds a file for 'onnx', and run-package runs those of 'aoti'" in refused(format="onnx")
    assert "kernels.operators=2: the set of operators has format 2" in refused(kernels={"operators": 2})
    assert main(["run-package", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err


def test_without_a_compiler_it_is_refused_in_a_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(packages, "find_compiler", lambda: None)
    make("sparseprior_vit", image_size=16).save_pretrained(tmp_path / "model")
    assert export(tmp_path / "model", tmp_path / "out", "--format", "aoti") == 2
    assert "cannot be exported to AOTInductor: AOTInductor needs a C++ compiler" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert build.find_compiler() is not None
