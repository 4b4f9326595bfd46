"""The effective batch size, divided by devices and accumulation."""

import pytest

from hf_sparseprior.training import SparsePriorTrainingArguments
from tests.each import each


def arguments(folder, world_size=1, **options):
    """As in one of so many processes, which are not started."""
    kind = type("Arguments", (SparsePriorTrainingArguments,), {"world_size": world_size})
    return kind(output_dir=str(folder), use_cpu=True, **options)


@each("processes, accumulation, expected", [(1, 1, 64), (4, 1, 16), (1, 4, 16), (4, 2, 8), (64, 1, 1)])
def test_a_step_has_the_effective_batch_size(processes, accumulation, expected, tmp_path):
    own = arguments(
        tmp_path, processes, effective_batch_size=64, gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=100,  # of a base; it is replaced
    )  # fmt: skip
    assert own.train_batch_size == expected == 64 // (processes * accumulation)
    assert arguments(tmp_path, processes, per_device_train_batch_size=7).train_batch_size == 7


@each(
    "size, message",
    [
        (10, "effective_batch_size=10 must be a multiple of 4: 2 devices times gradient_accumulation_steps=2"),
        (2, "effective_batch_size=2 must be a multiple of 4"),
        (0, "effective_batch_size=0 must be an integer of 1 or more, or null"),
        (True, "effective_batch_size=True must be an integer"),
        (6.0, r"effective_batch_size=6\.0 must be an integer"),
        ("8", "effective_batch_size='8' must be an integer"),
    ],
)
def test_a_size_that_cannot_be_divided_is_refused(size, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, 2, effective_batch_size=size, gradient_accumulation_steps=2)
