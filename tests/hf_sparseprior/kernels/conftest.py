"""Calls of compiled kernels and of `reference` in float64 with the same inputs: fixtures `kernels` (Triton), `cpp`."""

import ctypes
import functools
import itertools
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_sparseprior.attention.dense import dense_decay
from hf_sparseprior.attention.functional import attention
from hf_sparseprior.attention.plan import AttentionPlan, plan_table
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.kernels import build, diagonal_cpu
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.supports import LayerKey, resolve_support
from hf_sparseprior.priors.layer import SparsePriorAttention
from hf_sparseprior.priors.prior import resolve_prior

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


def direction(leaves):
    """Gradient of the output, the same for every call of one shape."""
    q = leaves["q"]
    return torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).to(q)


class Kernels:
    """Leaves of calls on one device, their outputs and gradients, and the comparison with the reference."""

    def __init__(self, device, backend):
        self.device = device
        self.backend = backend
        self.native = device == "cuda"

    def make(
        self, grid, prefix, *, heads=2, width=5, batch=1, decay=None, dtype=torch.float32, prefix_beta=True, seed=0
    ):
        """q, k, v as projections give them, (B, T, H, D) transposed, and the scalars of a decay."""
        generator = torch.Generator().manual_seed(seed)
        tokens = prefix + grid[0] * grid[1]
        leaves = {
            name: torch.randn(batch, tokens, heads, width, generator=generator).to(dtype).transpose(1, 2)
            for name in "qkv"
        }
        if decay is not None:
            curves = DECAYS[decay].positions(DECAYS[decay].SETTINGS, (1, 1)).shape[0]
            leaves["alpha"] = torch.rand(heads, generator=generator) + 0.5
            leaves["beta"] = torch.randn(curves, heads, generator=generator) + 3
            if prefix_beta:
                leaves["prefix_beta"] = torch.randn(heads, generator=generator)
        return {name: leaf.to(self.device) for name, leaf in leaves.items()}

    def attend(self, leaves, support, decay, grid, prefix, **options):
        """Output of the kernel."""
        scalars = {name: leaf for name, leaf in leaves.items() if name not in "qkv"}
        spec = None if decay is None else {"name": decay, **scalars}
        inputs = (leaves["q"], leaves["k"], leaves["v"])
        options = {"backend": self.backend, "layer": 1, **options}
        return attention(*inputs, support, spec, num_prefix_tokens=prefix, grid=grid, **options)

    def run(self, leaves, support, decay, grid, prefix, dtype=None, **options):
        """Output, and gradients of every leaf for a fixed direction."""
        given = direction(leaves)
        dtype = dtype or given.dtype
        wide = torch.promote_types(dtype, torch.float32)
        leaves = {
            name: leaf.detach().to(dtype if name in "qkv" else wide).requires_grad_() for name, leaf in leaves.items()
        }
        out = self.attend(leaves, support, decay, grid, prefix, **options)
        grads = torch.autograd.grad(out, list(leaves.values()), given.to(dtype), allow_unused=True)
        found = {
            name: torch.zeros_like(leaf) if grad is None else grad
            for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
        }
        return {"out": out, **found}

    def check(self, leaves, support, decay, grid, prefix):
        """Outputs and gradients against `reference` in float64."""
        actual = self.run(leaves, support, decay, grid, prefix)
        expected = self.run(leaves, support, decay, grid, prefix, torch.float64, backend="reference")

        @functools.cache
        def sums():
            return self.sums_of_terms(leaves, support, decay, grid, prefix)

        for name, value in expected.items():
            # The terms of a scalar's gradient cancel, and float32 rounds each by its own size, not by that of the sum.
            scalar = name not in ("out", *"qkv")
            rounding = (lambda name=name: 1e-5 * sums()[name]) if scalar else 0.0
            self.check_close(name, actual[name], value, leaves["q"].dtype, rounding)

    @staticmethod
    def check_close(name, actual, expected, dtype, rounding=0.0):
        """Differences are relative to the tensor's largest value, or to 0.01 if that is larger.

        `rounding` is added. A function that tells it is asked where a difference is larger without.
        """
        assert actual.shape == expected.shape and not actual.isnan().any(), name
        if not expected.numel():
            return
        limit = TOLERANCE[dtype] * max(0.01, expected.abs().max().item())
        difference = (actual.double() - expected).abs()
        if not callable(rounding):
            limit = limit + rounding
        elif not (difference <= limit).all():
            limit = limit + rounding()
        assert (difference <= limit).all(), (name, difference.max().item(), limit)

    def sums_of_terms(self, leaves, support, decay, grid, prefix):
        """The sum of the absolute values of the terms of each decay scalar's gradient, in float64.

        A pair (j, k) adds p_jk dp_jk s_jk dW_jk and -p_jk delta_j s_jk dW_jk, with the probability p and its gradient,
        delta_j = sum_k p_jk dp_jk, the scaled product s and the derivative dW of the pair's weight by the scalar, which
        has one sign in a head: the sum of absolute values is the gradient of W in the direction of the absolute values
        of the rest.
        """
        wide = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
        _, probs = self.attend(wide, support, decay, grid, prefix, backend="reference", need_weights=True)
        scores = wide["q"] @ wide["k"].transpose(-1, -2) * wide["q"].shape[-1] ** -0.5
        d_probs = direction(leaves).double() @ wide["v"].transpose(-1, -2)
        delta = (probs * d_probs).sum(-1, keepdim=True)
        sizes = (probs * (d_probs.abs() + delta.abs()) * scores.abs()).sum(0).detach()

        heads, device = leaves["q"].shape[1], leaves["q"].device
        scalars = {name: leaf for name, leaf in wide.items() if name not in "qkv"}
        resolved, settings = resolve_support(support, heads, grid[0] * grid[1]), dict(DECAYS[decay].SETTINGS)
        plan = AttentionPlan(LayerKey(heads, grid, 1), prefix, resolved, {"name": decay, **settings})
        if plan.offsets is not None:
            sizes = sizes * plan_table(plan, "mask", device)
        spec = {"name": decay, **settings, **scalars}
        weights = dense_decay(AttentionRequest(wide["q"], wide["k"], wide["v"], plan, spec), torch.float64)
        if (alpha := scalars.get("alpha")) is not None:
            weights = weights * alpha.view(-1, 1, 1)
        sums = torch.autograd.grad(weights, list(scalars.values()), sizes, allow_unused=True)
        return {name: 0.0 if one is None else one.abs() for name, one in zip(scalars, sums, strict=True)}

    def check_dropout(self, leaves, support, decay, grid, prefix, of="qkv", dropout_p=0.3):
        """Output and the gradients of some leaves with the mask that was drawn, the rest in float64.

        With unit vectors as v the output is the weights, which show what was dropped.
        """
        batch, heads, tokens, width = leaves["q"].shape
        leaves = {name: leaf.detach().requires_grad_(name in of) for name, leaf in leaves.items()}

        def run(values):
            torch.manual_seed(5)
            return self.attend({**leaves, "v": values}, support, decay, grid, prefix, dropout_p=dropout_p)

        unit = torch.nn.functional.pad(torch.eye(tokens, device=self.device), (0, -tokens % width)).split(width, 1)
        drawn = torch.cat([run(part.expand(batch, heads, tokens, width).clone()).detach() for part in unit], -1)
        drawn = drawn[..., :tokens]
        wide = {name: leaf.detach().double().requires_grad_(name in of) for name, leaf in leaves.items()}
        options = {"backend": "reference", "need_weights": True}
        _, weights = self.attend(wide, support, decay, grid, prefix, **options)
        seen, kept = weights > 1e-12, drawn > 0
        share = kept[seen].double().mean().item()
        assert abs(share - (1 - dropout_p)) < 4 * (dropout_p * (1 - dropout_p) / seen.sum().item()) ** 0.5
        factor = torch.where(kept, 1 / (1 - dropout_p), 0.0)
        torch.testing.assert_close(drawn.double(), (weights * factor).detach(), rtol=0, atol=1e-5)

        out, expected = run(leaves["v"]), (weights * factor) @ wide["v"]
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
        given = direction(leaves)
        grads, others = (
            torch.autograd.grad((found * given).sum(), [own[name] for name in of], allow_unused=True)
            for found, own in ((out, leaves), (expected, wide))
        )
        for name, grad, other in zip(of, grads, others, strict=True):
            if other is not None:
                self.check_close(name, grad, other, torch.float32, 0.0 if name in "qkv" else 3e-5)

    def check_any_subset(self, leaves, support, decay, grid, prefix):
        """Gradients of some leaves are the same as with all leaves together; the others get none."""
        expected = self.run(leaves, support, decay, grid, prefix)
        for wanted in itertools.product((True, False), repeat=len(leaves)):
            chosen = {name for name, flag in zip(leaves, wanted, strict=True) if flag}
            own = {name: leaf.detach().clone().requires_grad_(name in chosen) for name, leaf in leaves.items()}
            out = self.attend(own, support, decay, grid, prefix)
            assert out.requires_grad == bool(chosen)
            if chosen:
                out.backward(direction(leaves))
            for name, leaf in own.items():
                assert (leaf.grad is not None) == (name in chosen)
                assert leaf.grad is None or torch.equal(leaf.grad, expected[name])

    def check_bits(self, *arguments):
        """Two runs give the same bits, and so do other numbers of threads."""
        threads = torch.get_num_threads()
        found = []
        try:
            for number in (1, 2, 2, 3):
                torch.set_num_threads(number)
                found.append(self.run(*arguments))
        finally:
            torch.set_num_threads(threads)
        for other in found[1:]:
            assert [name for name, value in found[0].items() if not torch.equal(value, other[name])] == []

    def check_compiled(self, prior):
        """A whole layer, traced without a break, gives what it gives untraced; so does the exported layer."""
        torch.manual_seed(0)
        layer = SparsePriorAttention(32, 2, resolve_prior(prior, 2, (4, 4))).to(self.device)
        hidden = torch.randn(2, 17, 32).to(self.device)
        results = []
        for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
            layer.zero_grad()
            out = run(hidden, (4, 4), 1, backend=self.backend)[0]
            out.square().sum().backward()
            results.append([out, *(parameter.grad for parameter in layer.parameters())])
        torch.testing.assert_close(*results)
        exported = torch.export.export(layer, (hidden, (4, 4), 1), {"backend": self.backend}).module()
        torch.testing.assert_close(exported(hidden, (4, 4), 1, backend=self.backend)[0], results[0][0])

    def operator_arguments(self, name, *arguments):
        """Arguments that a run gives an operator."""
        seen = []

        class Record(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if name in str(func):
                    seen.append(args)
                return func(*args, **(kwargs or {}))

        with Record():
            self.run(*arguments)
        return tuple(x.detach().clone() if isinstance(x, torch.Tensor) else x for x in seen[0])

    def largest_tensor(self, *arguments):
        """Elements of the largest tensor that a run makes."""
        sizes = []

        class Record(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                tensors = out if isinstance(out, (tuple, list)) else [out]
                sizes.extend(value.numel() for value in tensors if isinstance(value, torch.Tensor))
                return out

        with Record():
            self.run(*arguments)
        return max(sizes)


def replace_the_language_once(monkeypatch):
    """Half the interpreter's time goes into replacing triton.language again in each function that a kernel calls."""
    from triton import language
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # another version, which is slower
        return
    replace = interpreter._patch_lang

    def unless_replaced(function):
        seen = [value for value in function.__globals__.values() if value is language or value is language.core]
        fresh = any(language.core.is_builtin(module.load) for module in seen)
        return replace(function) if fresh else interpreter._LangPatchScope()

    monkeypatch.setattr(interpreter, "_patch_lang", unless_replaced)


@pytest.fixture
def kernels(monkeypatch):
    if find_spec("triton") is None:
        assert not os.environ.get("CI_NEEDS_KERNELS"), "triton is not installed"
        pytest.skip("triton is not installed")
    if torch.cuda.is_available():
        return Kernels("cuda", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # tests/conftest.py says why here and not for all tests
    replace_the_language_once(monkeypatch)
    return Kernels("cpu", "triton")


@pytest.fixture
def cpp():
    # A machine without a compiler has nothing to test. CI has one, and requires the kernels by this variable.
    if (reason := diagonal_cpu.ready()) is not None:
        assert not os.environ.get("CI_NEEDS_KERNELS"), reason
        pytest.skip(reason)
    return Kernels("cpu", "cpp")


@pytest.fixture
def poison(monkeypatch):
    """New memory is full of NaN, so that what a kernel does not write shows: torch's, and that of the C++ operators."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    library = build.loaded_library()
    own = None if library is None else ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "sparseprior_poison")
    if own is not None:
        own.value = True
    yield
    if own is not None:
        own.value = False
    torch.use_deterministic_algorithms(False)


# Its modules, without all that the package itself imports.
ONLY_MODULES = """
import sys
from importlib.util import find_spec
from types import ModuleType

package = ModuleType("hf_sparseprior")
package.__path__ = find_spec("hf_sparseprior").submodule_search_locations
sys.modules["hf_sparseprior"] = package
"""


@pytest.fixture
def in_a_process():
    """Output of Python code in a process of its own, which does not import transformers."""

    def run(code, **environment):
        root = str(Path(__file__).parents[3])
        done = subprocess.run(
            [sys.executable, "-c", ONLY_MODULES + code],
            env={**os.environ, "PYTHONPATH": root, **environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run
