"""docs/stability.md: public names, their signatures, commands, configuration keys and operators are those of a list."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import hf_sparseprior as sp
from hf_sparseprior.kernels import diagonal_cpu
from tests import public

ROOT = Path(__file__).parents[1]
LINES = public.LIST.read_text(encoding="utf-8").splitlines()


def test_the_public_interface_is_that_of_the_list():
    """In a process of its own, where no test has registered anything."""
    if reason := diagonal_cpu.ready():
        pytest.skip(f"the operators are not there: {reason}")
    done = subprocess.run([sys.executable, "-m", "tests.public", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"\n{done.stdout}{done.stderr[-2000:]}"


def test_the_list_has_every_public_name():
    named = {line.partition("hf_sparseprior.")[2] for line in LINES if line.startswith("hf_sparseprior.")}
    for name in sp.__all__:
        assert any(one == name or one.startswith((f"{name}(", f"{name}:", f"{name}.")) for one in named), name
    assert sorted(LINES) == LINES and len(set(LINES)) == len(LINES) > 300


def test_the_list_has_every_kind():
    for line in (
        "hf_sparseprior.apply_prior(model, prior)",
        "hf_sparseprior.SparsePriorViTConfig: hidden_size=768",
        "hf_sparseprior.training.SparsePriorTrainingArguments: layer_decay=1.0",
        "hf_sparseprior.ViolinAdapterConfig: sparse_prior_format=1",
        "python -m hf_sparseprior export --format: torch, onnx, openvino, aoti",
    ):
        assert line in LINES, line
    starts = (
        "supports fibottention, w_min=5, ",
        "decays violin, curves=",
        "hf_sparseprior::decayed_forward(Tensor q, ",
    )
    assert all(any(line.startswith(start) for line in LINES) for start in starts)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda a, b=1, *, c="x", **d: None, "(a, b=1, *, c='x', **d)"),
        (lambda a, /, b, *c, d=None: None, "(a, /, b, *c, d=None)"),
        (lambda a, b, /: None, "(a, b, /)"),
        (lambda a=(1, 2.5), b=ROOT: None, "(a=[1, 2.5], b=<PosixPath>)"),
    ],
)
def test_signatures_are_written_in_one_way(function, expected):
    assert public.signature(function) == expected


def test_fields_are_those_that_the_base_lacks():
    @dataclass
    class Theirs:
        a: int = 1

    @dataclass
    class Ours(Theirs):
        b: list = field(default_factory=lambda: [1])
        c: dict | None = None

    assert list(public.own_fields(Ours, Theirs)) == ["b=[1]", "c=None"]


def test_a_difference_is_named_and_the_way_to_renew_the_list_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(public, "LIST", tmp_path / "public.txt")
    monkeypatch.setattr(public, "public", lambda: ["f(a, b=1)", "h(x)"])
    public.LIST.write_text("f(a)\ng()\nh(x)\n")
    assert public.main(["--check"]) == 1
    *changed, advice = capsys.readouterr().out.splitlines()
    assert changed == ["-f(a)", "-g()", "+f(a, b=1)"] and "python -m tests.public," in advice
    assert public.main([]) == 0 and public.main(["--check"]) == 0
