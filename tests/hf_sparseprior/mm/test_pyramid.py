import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("mmdet", reason="the extra `dense` is not installed", exc_type=ImportError)
pytest.importorskip("mmcv.ops", reason="the extra `dense` is not installed", exc_type=ImportError)

from mmcv.ops import roi_align

from hf_sparseprior.mm.backbone import SparsePriorViT
from hf_sparseprior.mm.pyramid import SimpleFeaturePyramid

SMALL = {
    "image_size": 32, "patch_size": 8, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 48,
}  # fmt: skip


def pixel_norm(map_, weight, bias):
    """Layer norm written out over dimension 1."""
    mean = map_.mean(1, keepdim=True)
    variance = ((map_ - mean) ** 2).mean(1, keepdim=True)
    return (map_ - mean) / (variance + 1e-6).sqrt() * weight[:, None, None] + bias[:, None, None]


def doubled(map_, weight, bias):
    """A transposed convolution of kernel and stride 2: every pixel becomes 2x2 by a linear map of its channels."""
    batch, _, height, width = map_.shape
    blocks = torch.einsum("bchw,cdij->bdhiwj", map_, weight)
    return blocks.reshape(batch, -1, 2 * height, 2 * width) + bias[:, None, None]


def smoothed(map_, state, first):
    """1x1 convolution as a product of matrices, 3x3 as nine shifted ones, each with its norm."""
    names = [f"{first + index}" for index in range(4)]
    map_ = torch.einsum("bchw,dc->bdhw", map_, state[f"{names[0]}.weight"][:, :, 0, 0])
    map_ = pixel_norm(map_, state[f"{names[1]}.weight"], state[f"{names[1]}.bias"])
    padded, weight = F.pad(map_, (1, 1, 1, 1)), state[f"{names[2]}.weight"]
    height, width = map_.shape[-2:]
    map_ = sum(
        torch.einsum("bchw,dc->bdhw", padded[..., i : i + height, j : j + width], weight[:, :, i, j])
        for i in range(3)
        for j in range(3)
    )
    return pixel_norm(map_, state[f"{names[3]}.weight"], state[f"{names[3]}.bias"])


def perturbed(**settings):
    torch.manual_seed(0)
    pyramid = SimpleFeaturePyramid(**settings).double()
    with torch.no_grad():
        for parameter in pyramid.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return pyramid


def test_it_is_the_paper_pyramid():
    pyramid = perturbed(in_channels=16, out_channels=6)
    map_ = torch.randn(2, 16, 4, 6, dtype=torch.float64)
    outputs = pyramid((torch.randn(2, 16, 4, 6, dtype=torch.float64), map_))
    states = [stage.state_dict() for stage in pyramid.stages]

    fine = doubled(map_, states[0]["0.weight"], states[0]["0.bias"])
    fine = pixel_norm(fine, states[0]["1.weight"], states[0]["1.bias"])
    fine = fine * 0.5 * (1 + torch.erf(fine / 2**0.5))
    fine = doubled(fine, states[0]["3.weight"], states[0]["3.bias"])
    middle = doubled(map_, states[1]["0.weight"], states[1]["0.bias"])
    coarse = map_.reshape(2, 16, 2, 2, 3, 2).amax((3, 5))
    expected = [
        smoothed(fine, states[0], 4),
        smoothed(middle, states[1], 1),
        smoothed(map_, states[2], 0),
        smoothed(coarse, states[3], 1),
    ]
    expected.append(expected[-1][..., ::2, ::2])
    sizes = [(16, 24), (8, 12), (4, 6), (2, 3), (1, 2)]
    assert [tuple(output.shape) for output in outputs] == [(2, 6, *size) for size in sizes]
    for output, reference in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, reference, rtol=0, atol=1e-10)


def test_parameters_are_those_of_vitdet_base():
    """Counted by hand for ViT-B: 768 channels, 256 out."""
    pyramid = SimpleFeaturePyramid(in_channels=768, out_channels=256)
    tail = 9 * 256 * 256 + 2 * 2 * 256  # 3x3 convolution and two norms
    up = 768 * 384 * 4 + 384
    counts = [
        up + 2 * 384 + 384 * 192 * 4 + 192 + 192 * 256 + tail,
        up + 384 * 256 + tail,
        768 * 256 + tail,
        768 * 256 + tail,
    ]
    assert [sum(map(torch.numel, stage.parameters())) for stage in pyramid.stages] == counts


def test_patches_of_eight_pixels():
    pyramid = SimpleFeaturePyramid(in_channels=8, out_channels=4, scales=(2, 1, 0.5, 0.25), num_outs=4)
    sides = [output.shape[-1] for output in pyramid((torch.randn(1, 8, 16, 16),))]
    assert [128 // side for side in sides] == [4, 8, 16, 32]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scales": (3,)}, "scale 3 must be a power of two"),
        ({"scales": (-1,)}, "scale -1 must be a power of two"),
        ({"scales": (4, 2, 1), "num_outs": 2}, "num_outs=2"),
        ({"scales": (8,), "in_channels": 12}, "in_channels=12"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        SimpleFeaturePyramid(**{"in_channels": 16, "out_channels": 4, **settings})


def test_regions_are_pooled_from_where_they_are():
    """roi_align of mmcv on the pyramid's maps against PyTorch's bilinear sampling at the centres of the cells.

    A map whose channels lie side by side, as tokens do, is read wrongly by mmcv on a CPU.
    """
    backbone = SparsePriorViT(prior="dense", out_indices=[1], apply_layernorm=True, **SMALL).eval()
    pyramid = SimpleFeaturePyramid(24, 8, scales=[2, 1, 0.5], num_outs=4)
    with torch.no_grad():
        (tokens,) = backbone(torch.randn(2, 3, 64, 48))
        for map_ in (tokens, *pyramid((tokens,))):
            height, width = map_.shape[-2:]
            left, top, right, bottom = 0.2 * width, 0.1 * height, 0.7 * width, 0.9 * height
            found = roi_align(map_, torch.tensor([[1.0, left, top, right, bottom]]), (3, 3), 1.0, 1, "avg", True)
            steps = torch.tensor([1, 3, 5]) / 6
            across = (left + steps * (right - left)) / width * 2 - 1
            down = (top + steps * (bottom - top)) / height * 2 - 1
            places = torch.stack(torch.meshgrid(down, across, indexing="ij")[::-1], -1)
            expected = F.grid_sample(map_[1:], places[None], padding_mode="border", align_corners=False)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
