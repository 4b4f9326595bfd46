"""Sliding windows as rivals: what they see, that they are right, and why they do not run."""

import dataclasses
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from tasks.benchmark import contenders, window_contenders
from tasks.benchmark.contenders import Setting, Size, make_problem
from tests.each import each

RIVALS = window_contenders.windows()
SMALL = Setting(heads=3, width=16, support={"name": "fibottention", "w_min": 2, "w_max": 9})


def within(tokens, first, last):
    """Attention over keys first..last of each row, (B, T, H, D), as the packages take and give it."""

    def attend(q, k, v):
        rows, keys = torch.arange(tokens)[:, None], torch.arange(tokens)
        mask = (keys >= first(rows)) & (keys <= last(rows))
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask)
        return out.transpose(1, 2)

    return attend


def flash_attn(q, k, v, window_size):
    left, right = window_size
    return within(q.shape[1], lambda row: row - left, lambda row: row + right)(q, k, v)


def na1d(q, k, v, kernel_size):
    """By NATTEN's documentation: a window that would go over an end is moved back."""
    (size,), tokens = kernel_size, q.shape[1]
    first = lambda row: torch.clamp(row - size // 2, min=0).minimum(torch.tensor(tokens - size))  # noqa: E731
    return within(tokens, first, lambda row: first(row) + size - 1)(q, k, v)


@pytest.fixture
def packages(monkeypatch):
    """Stand-ins for flash-attn and NATTEN, which need a GPU to install."""
    for name, functions in (
        ("flash_attn", {"flash_attn_func": flash_attn}),
        ("natten", {}),
        ("natten.functional", {"na1d": na1d}),
    ):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("name", ["flash_window", "natten"])
@pytest.mark.parametrize("trains", [False, True])
def test_packages_are_called_as_they_are_documented(packages, name, trains):
    problem = make_problem(SMALL, Size(40, 2), trains)
    contenders.timed_call(problem, RIVALS[name], trains)()  # raises where output or gradients are wrong


def test_a_window_off_by_one_is_caught(packages, monkeypatch):
    wrong = lambda q, k, v, window_size: flash_attn(q, k, v, tuple(width - 1 for width in window_size))  # noqa: E731
    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_func", wrong)
    with pytest.raises(RuntimeError, match="WRONG"):
        contenders.timed_call(make_problem(SMALL, Size(40, 2), False), RIVALS["flash_window"], False)


@pytest.mark.slow
def test_flex_with_a_band_is_right():
    problem = make_problem(dataclasses.replace(SMALL, prefix=2), Size(300, 1), False)
    contenders.timed_call(problem, RIVALS["flex_window"], False)()


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("tokens", [40, 300])
def test_a_window_holds_the_support(name, tokens):
    prefix = 2 if name == "flex_window" else 0
    plan = make_problem(dataclasses.replace(SMALL, prefix=prefix), Size(tokens, 1), False).plan
    seen = RIVALS[name].seen(plan, torch.arange(plan.total))
    support = torch.from_numpy(plan.build_table("mask"))
    assert not (support & ~seen).any() and (seen & ~support).any() and not seen.all()


@each("prefix, tokens", [(0, 300), (2, 256), (1, 127), (0, 1000)])
def test_no_pair_of_the_window_is_in_a_block_that_is_left_out(prefix, tokens):
    plan = make_problem(dataclasses.replace(SMALL, prefix=prefix), Size(tokens, 1), False).plan
    mask = window_contenders.window_mask(plan, torch.device("cpu"))
    seen = RIVALS["flex_window"].seen(plan, torch.arange(plan.total))
    total = torch.arange(plan.total)
    heads = torch.arange(plan.num_heads).view(-1, 1, 1)
    assert mask.mask_mod(torch.tensor(0), heads, total[:, None], total[None]).equal(seen)
    visited = mask.to_dense()[0].bool().repeat_interleave(128, 1).repeat_interleave(128, 2)
    assert not (seen & ~visited[:, : plan.total, : plan.total]).any()


@pytest.mark.parametrize("name", RIVALS)
def test_each_says_why_it_does_not_run(name, packages, monkeypatch):
    def reason(setting, tokens=40):
        return RIVALS[name].can_run(make_problem(setting, Size(tokens, 1), False), False)

    for settings, expected in (
        ({"support": "dense"}, "the support is dense"),
        ({"decay": "violin"}, "written without a decay"),
        ({"support": "random"}, "a window is made from offsets, and the support has other pairs"),
        ({"support": {"name": "window", "order": "hilbert"}}, "a window is written for offsets in raster order"),
    ):
        assert reason(dataclasses.replace(SMALL, **{"support": SMALL.support, **settings})) == expected
    if name == "flex_window":
        assert reason(SMALL) is None
        problem = make_problem(SMALL, Size(40, 1), True)
        assert RIVALS[name].can_run(problem, True) == "FlexAttention has no backward on CPU"
        return
    package = {"flash_window": "flash_attn", "natten": "natten"}[name]
    assert reason(SMALL) == f"{package} is for CUDA, not for cpu"
    monkeypatch.setattr(window_contenders, "find_spec", lambda package: None)
    assert reason(SMALL).startswith(f"{package} is not installed (pip install ")
