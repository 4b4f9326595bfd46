"""What `doctor` says, with and without what it looks for."""

import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from hf_sparseprior.__main__ import main
from hf_sparseprior.cli import doctor
from hf_sparseprior.kernels import build, diagonal_cpu, program_libraries


def test_with_a_compiler():
    if reason := diagonal_cpu.ready():
        pytest.skip(reason)
    lines = list(doctor.report())
    assert any(line.startswith("ok       compiled CPU kernels") for line in lines)
    assert sum("kernel against the reference" in line for line in lines) == 3
    assert not any(line.startswith("WRONG") for line in lines)
    assert f"ok       compiled CPU kernels: {program_libraries.torch_library()}" in lines


def test_it_names_the_libraries_of_programs_that_are_installed(monkeypatch):
    if reason := diagonal_cpu.ready():
        pytest.skip(reason)
    monkeypatch.setattr(doctor, "OPTIONAL", {})
    installed = {"onnxruntime": ("ONNX Runtime", "onnx_library"), "openvino": ("OpenVINO", "openvino_extension")}
    for package in installed:
        pytest.importorskip(package, reason="pip install '.[export]'")
    for package, (title, give) in installed.items():
        monkeypatch.setattr(doctor, "_version", lambda name, package=package: "1" if name == package else None)
        lines = [line for line in doctor.report() if "operators for" in line]
        library = getattr(program_libraries, give)()
        assert lines == [f"ok       operators for {title} (files of export --kernels): {library}"]
        assert library.is_file()


def test_without_a_compiler_it_says_how_to_get_one(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "_state", {})
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (line,) = (line for line in doctor.report() if "compiled CPU kernels" in line)
    assert line.startswith("missing") and "apt-get install g++" in line
    if find_spec("onnxruntime") is not None:
        (line,) = (line for line in doctor.report() if "operators for ONNX Runtime" in line)
        assert line.startswith("missing  no operators for ONNX Runtime: no C++ compiler")
        assert line.endswith(". Files of export without --kernels need none.")


def test_a_wrong_kernel_is_named(monkeypatch):
    monkeypatch.setattr(diagonal_cpu, "ready", lambda: None)
    monkeypatch.setattr(doctor, "kernel_errors", lambda: {"diagonals": 0.5, "decay": 1e-7})
    lines = list(doctor.report())
    assert lines[-2].startswith("WRONG    kernel against the reference, diagonals") and lines[-1].startswith("ok ")


def test_a_missing_package_is_named_with_its_installation(monkeypatch):
    monkeypatch.setattr(doctor, "OPTIONAL", {"no-such-package": ("nothing", "make dense")})
    line = "missing  no-such-package (nothing): make dense"
    assert line in list(doctor.report())
    assert line in doctor.missing_of("dense") and line not in doctor.missing_of("video")


def test_every_extra_has_packages_that_it_looks_for():
    assert set(doctor.REQUIRABLE.values()) <= {command for _, command in doctor.OPTIONAL.values()}


def test_require_ends_with_status_1_and_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert main(["doctor", "--require", "robotics"]) == 1
    assert "missing  robosuite (the robots Lift and Can): make robotics" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "OPTIONAL", {})
    assert main(["doctor", "--require", "robotics"]) == 0
    assert capsys.readouterr().out == "ok       everything for robotics\n"


def test_operators_of_mmcv_give_what_they_must(monkeypatch):
    ops = pytest.importorskip("mmcv.ops", reason="mmcv is not installed: make dense")
    assert doctor.mmcv_problem() is None
    monkeypatch.setattr(ops, "nms", lambda boxes, scores, threshold: (boxes, torch.tensor([1, 0, 2])))
    assert "keeps boxes [1, 0, 2]" in doctor.mmcv_problem()


def test_operators_of_mmcv_that_were_not_compiled_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mmcv.ops", None)
    assert "mmcv came without compiled operators" in doctor.mmcv_problem()


def test_the_library_that_is_there_is_chosen(monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    for found, chosen in (({"OSMesa", "EGL"}, "osmesa"), ({"EGL"}, "egl"), (set(), None)):
        monkeypatch.setattr(doctor, "find_library", lambda name, found=found: name if name in found else None)
        assert doctor.gl_library() == chosen
    for value, chosen in (("glfw", "glfw"), ("disable", None), ("Off", None)):
        monkeypatch.setenv("MUJOCO_GL", value)
        assert doctor.gl_library() == chosen


@pytest.mark.parametrize(("found", "used"), [({"OSMesa", "EGL"}, "osmesa"), ({"EGL"}, "egl"), (set(), "osmesa")])
def test_rendering_is_tried_with_the_library_that_tasks_take(monkeypatch, found, used):
    seen = []

    def run(command, env, **options):
        seen.append(env["MUJOCO_GL"])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(doctor, "find_library", lambda name: name if name in found else None)
    monkeypatch.setattr(subprocess, "run", run)
    assert doctor.rendering_problem() is None and seen == [used]


def test_rendering_without_its_library_is_named_with_the_package(monkeypatch):
    pytest.importorskip("mujoco", reason="mujoco is not installed: make robotics")
    monkeypatch.setenv("MUJOCO_GL", "no-such-library")
    assert "apt-get install libosmesa6" in doctor.rendering_problem()
