"""What holds for every C++ kernel (along diagonals, over all pairs, over lists of keys), against `reference`."""

import itertools

import pytest
import torch

LISTED = {"name": "bigbird", "random_keys": 3}
ZERO = {"name": "fibottention", "mask_fill": "zero"}
# Support and decay of a call that each kernel runs, with and without a decay where it knows both.
CALLS = {
    "diagonal": ("fibottention", None),
    "diagonal, zero": (ZERO, None),
    "diagonal with a decay": ("fibottention", "violin"),
    "decayed": ("dense", "violin"),
    "listed": (LISTED, None),
    "listed with a decay": (LISTED, "manhattan"),
}
HALVES = ("decayed", "listed", "diagonal")  # in bfloat16, too
every_call = pytest.mark.parametrize("call", CALLS)
ODD_NAN = torch.tensor([-1], dtype=torch.int32).view(torch.float32)[0]  # with all bits set


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", HALVES)
def test_any_head_width(cpp, call, dtype):
    support, decay = CALLS[call]
    for width in (*range(1, 20), 31, 32, 33, 48, 63, 64, 65, 80, 96, 127, 128, 129, 130, 256, 320):
        cpp.check(cpp.make((3, 6), 1, width=width, decay=decay, dtype=dtype), support, decay, (3, 6), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_call
def test_inputs_of_any_layout(cpp, call, dtype):
    (support, decay), grid, width = CALLS[call], (4, 5), 32
    leaves = cpp.make(grid, 1, width=width, batch=2, decay=decay, dtype=dtype)
    tokens = leaves["q"].transpose(1, 2)
    packed = torch.cat([leaves[name].transpose(1, 2) for name in "qkv"], -1).transpose(1, 2)  # one projection for all
    apart = {name: leaves[name].transpose(2, 3).contiguous().transpose(2, 3) for name in "qkv"}
    surrounded = torch.full((4, 25, 4, width + 2), torch.nan, dtype=dtype)[1:3, 2:23, 1:3, 1:-1].copy_(tokens)
    layouts = {
        "packed": dict(zip("qkv", packed.split(width, -1), strict=True)),
        "contiguous": {name: leaves[name].contiguous() for name in "qkv"},
        "row elements apart": apart,
        "row elements of q apart": {"q": apart["q"]},
        "one image and head": {name: leaves["q"][:1, :1].expand_as(leaves["q"]) for name in "qv"},
        "surrounded by NaN": {"q": surrounded.transpose(1, 2)},
    }
    if decay is not None:
        curves = len(leaves["beta"])
        layouts |= {  # with equal keys and no decay, gradients of queries would be 0
            "one token, image and head": {"k": leaves["k"][:1, :1, :1].expand_as(leaves["k"]), "v": leaves["q"]},
            "transposed beta": {"beta": leaves["beta"].t().contiguous().t()},
            "scalars of all heads": {name: torch.tensor(1.3).expand(2) for name in ("alpha", "prefix_beta")},
            "every second scalar": {"alpha": torch.arange(1.0, 5.0)[::2], "beta": torch.randn(curves, 4)[:, ::2]},
        }
    for name, views in layouts.items():
        assert all(view.shape == leaves[key].shape for key, view in views.items()), name
        cpp.check({**leaves, **views}, support, decay, grid, 1)


@every_call
def test_gradients_of_any_layout(cpp, call):
    support, decay = CALLS[call]
    leaves = cpp.make((3, 4), 1, width=16, decay=decay)
    q = leaves["q"].requires_grad_()
    for direction in (torch.randn(1, 2, 16, 13).transpose(2, 3), torch.ones(()).expand(1, 2, 13, 16)):
        grads = [
            torch.autograd.grad(cpp.attend(leaves, support, decay, (3, 4), 1, backend=name), q, direction)[0]
            for name in ("cpp", "reference")
        ]
        torch.testing.assert_close(*grads, rtol=0, atol=1e-5)


@pytest.mark.parametrize("support", ["fibottention", "dense", LISTED], ids=str)
def test_gradients_of_any_subset(cpp, support):
    cpp.check_any_subset(cpp.make((4, 5), 1, decay="manhattan"), support, "manhattan", (4, 5), 1)


@every_call
def test_every_element_is_written(cpp, poison, call):
    support, decay = CALLS[call]
    for grid, prefix, batch in (((5, 7), 0, 1), ((5, 7), 2, 3), ((4, 4), 0, 9), ((1, 1), 0, 1)):
        leaves = cpp.make(grid, prefix, heads=4, batch=batch, width=20, decay=decay)
        cpp.run({**leaves, "q": leaves["q"] * torch.nan}, support, decay, grid, prefix)  # NaN in what threads keep
        cpp.check(leaves, support, decay, grid, prefix)


@every_call
def test_same_bits_on_two_runs_and_with_other_numbers_of_threads(cpp, call):
    support, decay = CALLS[call]
    sizes = [((33, 32), 2, 24), ((14, 14), 9, 64)] if decay is None else [((17, 23), 3, 16)] * 2
    for prefix, (grid, batch, width) in enumerate(sizes):
        leaves = cpp.make(grid, prefix, heads=3, batch=batch, width=width, decay=decay)
        cpp.check_bits(leaves, support, decay, grid, prefix)


@every_call
def test_nan_stays_visible(cpp, call):
    support, decay = CALLS[call]
    plain = cpp.make((4, 5), 1, width=16, decay=decay)
    attended = "fibottention" if support == ZERO else support  # pruned pairs have a weight and no key
    _, weights = cpp.attend(plain, attended, decay, (4, 5), 1, backend="reference", need_weights=True)
    for name, value, token in itertools.product("qkv", (torch.nan, ODD_NAN), (0, 5, 20)):
        leaves = {**plain, name: plain[name].clone()}
        leaves[name][0, 1, token, 3] = value
        seen = cpp.attend(leaves, support, decay, (4, 5), 1).isnan().any(-1)[0]
        rows = torch.arange(21) == token if name == "q" else weights[0, 1, :, token] > 0
        if name == "v" and support == ZERO:
            rows = torch.ones(21, dtype=torch.bool)
        assert seen[1][rows].all() and not seen[0].any(), (name, value, token)
        assert call != "decayed" or torch.equal(seen[1], rows), (name, value, token)


@every_call
def test_extreme_logits(cpp, call):
    support, decay = CALLS[call]
    for factor, tolerance in ((1e3, 2e-3), (1e-30, 1e-5)):
        leaves = cpp.make((4, 4), 1, heads=4, batch=2, width=24, decay=decay)
        leaves["q"] = leaves["q"] * factor
        wide = {name: leaf.double() for name, leaf in leaves.items()}
        out = cpp.attend(leaves, support, decay, (4, 4), 1)
        expected = cpp.attend(wide, support, decay, (4, 4), 1, backend="reference")
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)


# In a model a learned order is not the kernel's, which refuses it.
@pytest.mark.parametrize(
    ("support", "decay"),
    [("fibottention", None), ("fibottention", "violin"), ("bigbird", "violin"), ("dense", "violin")],
)
def test_compiled_and_exported(cpp, support, decay):
    cpp.check_compiled({"support": support, "decay": decay})


@every_call
def test_no_tensor_of_all_pairs(cpp, call):
    support, decay = CALLS[call]
    leaves = cpp.make((64, 64), 1, heads=1, width=16, decay=decay)
    assert cpp.largest_tensor(leaves, support, decay, (64, 64), 1) < 4096 * 4096 / 16


@pytest.mark.parametrize("support", ["fibottention", "dense", LISTED], ids=str)
def test_dtypes_that_no_kernel_has_are_named(cpp, support):
    leaves = cpp.make((3, 3), 1, decay="manhattan")
    half = {**leaves, **{name: leaves[name].half() for name in "qkv"}}
    with pytest.raises(ValueError, match="float32 and bfloat16, not for float16"):
        cpp.attend(half, support, "manhattan", (3, 3), 1)
