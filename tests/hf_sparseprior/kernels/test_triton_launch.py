"""Launches that look up what was compiled: as often anew as Triton would compile, and with the arguments in order."""

import pytest
import torch

from hf_sparseprior.kernels import triton_launch


class CompiledKernel:
    """As Triton's: launched with a grid of three and all arguments, constants too, in the order of the parameters."""

    def __init__(self, launched):
        self.launched = launched

    def __getitem__(self, grid):
        return lambda *arguments: self.launched.append((grid, arguments))


class Kernel:
    """As a function of `triton.jit`; `made` counts the public launches."""

    arg_names = ("x", "y", "strides", "number", "scale", "PREFIX", "ROWS")

    def __init__(self, result=CompiledKernel):
        self.result, self.launched, self.made = result, [], 0

    def __getitem__(self, grid):
        def public(*arguments, **constants):
            self.made += 1
            return self.result(self.launched)

        return public


@pytest.fixture
def launch(monkeypatch):
    monkeypatch.setattr(triton_launch, "_compiled", {})
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return triton_launch.launch


MEMORY = torch.zeros(400)
USUAL = (MEMORY[:100], None, (64, 2), 48, 0.5)


def given(place, value):
    return (*USUAL[:place], value, *USUAL[place + 1 :])


SAME_KIND = {
    "another tensor": given(0, MEMORY[100:200]),
    "another multiple of 16": given(3, 64),
    "another number": given(4, 0.25),
    "other strides": given(2, (128, 6)),
}
OTHER_KINDS = {
    "another type": given(0, MEMORY[:100].half()),
    "an address that is no multiple of 16": given(0, MEMORY[1:101]),
    "a tensor instead of None": given(1, MEMORY[:100]),
    "no multiple of 16": given(3, 47),
    "1": given(3, 1),
    "64 bits": given(3, 2**32),
    "a stride of 1": given(2, (64, 1)),
    "a whole number for a fraction": given(4, 1),
}


def test_the_second_launch_hands_its_arguments_to_the_compiled_kernel(launch):
    kernel = Kernel()
    assert MEMORY.data_ptr() % 16 == 0
    launch(kernel, 7, USUAL, ROWS=64, PREFIX=1, num_warps=8)
    assert (kernel.made, kernel.launched) == (1, [])
    for number, arguments in enumerate([USUAL, *SAME_KIND.values()], start=1):
        launch(kernel, 7 + number, arguments, ROWS=64, PREFIX=1, num_warps=8)
        grid, passed = kernel.launched[-1]
        assert (kernel.made, len(kernel.launched), grid) == (1, number, (7 + number, 1, 1))
        assert all(a is b for a, b in zip(passed, (*arguments, 1, 64), strict=True))


def test_what_triton_compiles_anew_takes_its_own_launch_first(launch):
    for kind, arguments in OTHER_KINDS.items():
        kernel = Kernel()
        for _ in range(2):
            launch(kernel, 7, USUAL, ROWS=64, PREFIX=1, num_warps=8)
        launch(kernel, 7, arguments, ROWS=64, PREFIX=1, num_warps=8)
        assert kernel.made == 2, kind
        launch(kernel, 7, arguments, ROWS=64, PREFIX=1, num_warps=8)
        assert kernel.made == 2 and len(kernel.launched) == 2, kind
    launch(kernel, 7, USUAL, ROWS=64, PREFIX=0, num_warps=8)
    launch(kernel, 7, USUAL, ROWS=64, PREFIX=1, num_warps=4)
    launch(Kernel(), 7, USUAL, ROWS=64, PREFIX=1, num_warps=8)
    assert kernel.made == 4


# In a process without Triton's interpreter, which other tests have set.
AS_TRITON = """
import os
os.environ.pop("TRITON_INTERPRET", None)
import torch
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend
from hf_sparseprior.kernels.triton_launch import _kind

memory = torch.zeros(400)
numbers = [-(2**40), -16, -1, 0, 1, 2, 15, 16, 17, 48, 2**31 - 1, 2**31, 2**32, 2**40 + 1]
tensors = [memory, memory[1:], memory[4:], memory.half(), memory.double(), memory.int()]
arguments = [*numbers, *tensors, None, 0.5, 1.0, True, False, (1, 16), (16, 1), (2, 2), (2, 2**33)]
of_triton = [native_specialize_impl(BaseBackend, each, False, True, True) for each in arguments]
assert len(set(map(str, of_triton))) > 12
for a, first in enumerate(arguments):
    for b, second in enumerate(arguments):
        assert _kind(first) != _kind(second) or of_triton[a] == of_triton[b], (first, second)
print("as fine")
"""


def test_kinds_are_at_least_as_fine_as_tritons(in_a_process):
    """Triton's own function says for which arguments it compiles anew."""
    if not hasattr(pytest.importorskip("triton._C.libtriton"), "native_specialize_impl"):
        pytest.skip("this release of Triton has it elsewhere")
    assert in_a_process(AS_TRITON) == "as fine"


def test_another_launcher_of_triton_keeps_the_public_way(launch, caplog):
    kernel = Kernel(result=lambda launched: None)
    triton_launch._say_public.cache_clear()
    with caplog.at_level("DEBUG", "hf_sparseprior"):
        for _ in range(3):
            launch(kernel, 7, USUAL, ROWS=64, PREFIX=1, num_warps=8)
    assert kernel.made == 3 and not triton_launch._compiled
    assert caplog.text.count("each launch takes its public way") == 1


def test_whole_blocks_and_powers_of_2():
    for number in range(1, 300):
        assert triton_launch.next_power_of_2(number) == next(2**n for n in range(10) if 2**n >= number)
        assert all(triton_launch.cdiv(number, by) == len(range(0, number, by)) for by in (1, 2, 7, 64))
