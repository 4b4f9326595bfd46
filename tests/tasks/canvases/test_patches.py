"""A start with other patches: the patch embedding is resized as FlexiViT defines it."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from tasks.canvases.patches import changed_model, resize_kernel
from tests.each import each

SIZES = [(4, 8), (4, 16), (2, 6), (3, 4)]


def kernel_of(size, seed=0):
    return torch.randn(5, 2, size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@each("old, new", SIZES)
def test_answers_to_enlarged_patches_are_those_to_the_patches(old, new):
    kernel = kernel_of(old)
    patches = torch.randn(7, 2, old, old, dtype=torch.float64)
    enlarged = F.interpolate(patches, size=(new, new), mode="bilinear")
    resized = resize_kernel(kernel, new)
    assert torch.allclose(F.conv2d(enlarged, resized), F.conv2d(patches, kernel), atol=1e-10)


@each("old, new", SIZES)
def test_the_answer_to_a_constant_image_stays(old, new):
    kernel = kernel_of(old)
    assert torch.allclose(resize_kernel(kernel, new).sum((2, 3)), kernel.sum((2, 3)), atol=1e-10)


@each("old, new", [(4, 8), (8, 4), (6, 5)])
def test_it_is_the_solution_of_least_squares(old, new):
    """Of E (<x, w> - <B x, v>)^2 over patches x of white noise, which is |w - B^T v|^2."""
    kernel = kernel_of(old)
    pixels = np.eye(old * old).reshape(-1, 1, old, old)
    columns = F.interpolate(torch.from_numpy(pixels), size=(new, new), mode="bilinear", antialias=new < old)
    transposed = columns.reshape(old * old, new * new).numpy()  # B^T
    expected = np.linalg.lstsq(transposed, kernel.reshape(10, -1).numpy().T, rcond=None)[0].T
    assert np.allclose(resize_kernel(kernel, new).reshape(10, -1).numpy(), expected, atol=1e-8)


def test_the_same_size_stays_to_the_bit():
    assert torch.equal(resize_kernel(kernel_of(4), 4), kernel_of(4))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    torch.manual_seed(0)
    config = SparsePriorViTConfig(
        image_size=32, patch_size=4, num_channels=1, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, num_labels=10,
    )  # fmt: skip
    model = SparsePriorViTForImageClassification(config)
    folder = tmp_path_factory.mktemp("start")
    model.save_pretrained(folder)
    return model.eval(), folder


def test_larger_patches_see_an_enlarged_image_as_the_start_sees_it(start):
    model, folder = start
    changed = changed_model(folder, 64, 8, "dense").eval()
    image = torch.randn(2, 1, 32, 32)
    blocks = F.unfold(image, 4, stride=4).transpose(1, 2).reshape(-1, 1, 4, 4)  # each patch is enlarged alone
    larger = F.interpolate(blocks, size=(8, 8), mode="bilinear").reshape(2, 64, 64).transpose(1, 2)
    with torch.no_grad():
        logits = changed(pixel_values=F.fold(larger, 64, 8, stride=8)).logits
        assert torch.allclose(logits, model(pixel_values=image).logits, atol=1e-5)


@each("prior", ["dense", "fibottention", "fibottention+violin"])
def test_positions_are_interpolated_and_all_else_is_the_start(start, prior):
    model, folder = start
    changed = changed_model(folder, 64, 4, prior)
    ours, theirs = changed.state_dict(), model.state_dict()
    moved = {name for name in theirs if ours[name].shape != theirs[name].shape}
    assert moved == {"vit.embeddings.position_embeddings"}
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs.keys() - moved)
    positions = theirs["vit.embeddings.position_embeddings"]
    grid = positions[:, 1:].reshape(1, 8, 8, -1).permute(0, 3, 1, 2)
    larger = F.interpolate(grid, size=(16, 16), mode="bicubic").flatten(2).transpose(1, 2)
    assert torch.allclose(
        ours["vit.embeddings.position_embeddings"], torch.cat([positions[:, :1], larger], 1), atol=1e-6
    )
