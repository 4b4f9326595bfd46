"""VIOLIN's own checkpoints: made files in the published layout, against the formula in float64."""

import argparse
import math
import re

import pytest
import torch

import hf_sparseprior as sp
from hf_sparseprior.__main__ import main
from hf_sparseprior.convert import convert_checkpoint
from tests.hf_sparseprior.convert.original_vit import HEADS, LAYERS, forward, images, linear, random_weights

GRID = 4
HILBERT = [[0, 1, 14, 15], [3, 2, 13, 12], [4, 7, 8, 11], [5, 6, 9, 10]]
THEIR_CURVES = ["snake", "snake_T", "hilbert", "hilbert_T", "peano", "peano_T", "zigzag", "zigzag_T"]


def their_rank(curve, row, column):
    """Rank of a patch along a curve of the published code, by formula."""
    if curve.endswith("_T"):
        return their_rank(curve[:-2], column, row)
    if curve == "snake":
        return row * GRID + (column if row % 2 == 0 else GRID - 1 - column)
    if curve == "hilbert":
        return HILBERT[row][column]
    if curve == "peano":  # columns have the lowest bit
        return sum((column >> bit & 1) << 2 * bit | (row >> bit & 1) << 2 * bit + 1 for bit in range(4))
    diagonal = row + column  # zigzag: the first step goes down, even diagonals from top to bottom
    cells = [(r, diagonal - r) for r in range(GRID) if 0 <= diagonal - r < GRID]
    before = sum(1 for r in range(GRID) for c in range(GRID) if r + c < diagonal)
    return before + (cells if diagonal % 2 == 0 else cells[::-1]).index((row, column))


def with_scalars(state, curves, fixed=False, alpha=True):
    """The decay's tensors of the published code beside a ViT's weights."""
    generator = torch.Generator().manual_seed(2)
    for block in range(LAYERS):
        name = f"blocks.{block}.attn"
        if fixed:
            state[f"{name}.ai_list"] = torch.full((len(curves), HEADS), 0.996)
        else:
            for number in range(len(curves)):
                state[f"{name}.ai_list.{number}"] = 1 + 2 * torch.rand(HEADS, generator=generator)
        if alpha:
            state[f"{name}.normalize"] = torch.randn(HEADS, generator=generator)
    return state


def published_weights(state, curves, method, prefix):
    """Attention weights of the published code, from its tensors."""
    patches = [(row, column) for row in range(GRID) for column in range(GRID)]
    ranks = torch.tensor([[their_rank(curve, *patch) for patch in patches] for curve in curves])
    distances = (ranks[:, :, None] - ranks[:, None, :]).abs().double()

    def weights_of(block, query, key):
        name = f"blocks.{block}.attn"
        if f"{name}.ai_list" in state:
            gammas = state[f"{name}.ai_list"].double()
        else:
            betas = torch.stack([state[f"{name}.ai_list.{number}"] for number in range(len(curves))])
            gammas = torch.sigmoid(betas.double())
        mask = torch.ones(HEADS, prefix + len(patches), prefix + len(patches), dtype=torch.float64)
        mask[:, prefix:, prefix:] = (gammas[:, :, None, None] ** distances[:, None]).mean(0)
        mask = mask * state.get(f"{name}.normalize", torch.ones(HEADS)).double()[:, None, None]
        logits = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        if method == "mul_after_sm":
            return logits.softmax(-1) * mask
        if method == "add_after_sm":
            return logits.softmax(-1) + mask
        return {"mul_v1": logits * mask, "mul_v2": logits * (1 + mask), "add_v1": logits + mask}[method].softmax(-1)

    return weights_of


@pytest.mark.parametrize(
    ("class_token", "positions", "curves", "method", "fixed", "alpha"),
    [
        (True, True, THEIR_CURVES, "mul_v1", False, True),
        *((True, True, ["peano", "zigzag_T", "hilbert"], m, False, True) for m in ("mul_v2", "add_v1", "mul_after_sm")),
        (False, True, ["zigzag", "peano_T"], "add_after_sm", False, True),
        (True, False, ["snake_T"], "mul_v1", False, False),
        (False, False, ["hilbert_T", "snake"], "mul_v1", True, True),
    ],
    ids=str,
)
def test_a_deit_checkpoint_computes_what_the_published_formula_does(
    class_token, positions, curves, method, fixed, alpha, tmp_path
):
    state = with_scalars(random_weights(GRID, class_token, positions), curves, fixed, alpha)
    arguments = argparse.Namespace(curves=curves, method=method, input_size=16, mask="fixed" if fixed else "learned")
    optimizer = {"state": {}, "param_groups": [{"lr": 1e-3}]}
    content = {"model": state, "optimizer": optimizer, "epoch": 3, "args": arguments}
    torch.save(content, tmp_path / "checkpoint.pth")
    convert_checkpoint(tmp_path / "checkpoint.pth", tmp_path / "ours")
    model = sp.SparsePriorViTForImageClassification.from_pretrained(tmp_path / "ours", dtype=torch.float64).eval()
    assert model.config.prior_name == "violin" and model.config.pooling == ("class_token" if class_token else "mean")
    tokens = forward(state, images(GRID), published_weights(state, curves, method, int(class_token)))
    expected = linear(tokens[:, 0] if class_token else tokens.mean(1), state, "head")
    with torch.no_grad():
        logits = model(images(GRID)).logits
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    learned = {key for key, value in model.named_parameters() if "decay_bias" in key}
    assert len(learned) == LAYERS * (alpha + (not fixed))


def test_a_dino_checkpoint_gives_the_teacher(tmp_path):
    state = with_scalars(random_weights(GRID, classes=0), THEIR_CURVES)
    teacher = {f"backbone.{key}": value for key, value in state.items()} | {"head.mlp.0.weight": torch.zeros(2, 2)}
    student = {f"module.backbone.{key}": torch.zeros_like(value) for key, value in state.items()}
    arguments = argparse.Namespace(curves=THEIR_CURVES, local_crops_scale=(0.05, 0.4), arch="violin_small")
    content = {"student": student, "teacher": teacher, "epoch": 7, "args": arguments, "dino_loss": {}}
    torch.save(content, tmp_path / "checkpoint.pth")
    convert_checkpoint(tmp_path / "checkpoint.pth", tmp_path / "ours")
    model = sp.SparsePriorViTModel.from_pretrained(tmp_path / "ours", dtype=torch.float64).eval()
    expected = forward(state, images(GRID), published_weights(state, THEIR_CURVES, "mul_v1", 1))
    with torch.no_grad():
        torch.testing.assert_close(model(images(GRID)).last_hidden_state, expected, rtol=1e-6, atol=1e-6)


def test_without_a_command_line_eight_vectors_are_the_default_curves(tmp_path):
    torch.save({"model": with_scalars(random_weights(GRID), THEIR_CURVES)}, tmp_path / "eight.pth")
    convert_checkpoint(tmp_path / "eight.pth", tmp_path / "ours")
    config = sp.SparsePriorViTConfig.from_pretrained(tmp_path / "ours")
    curves = ["snake", "snake_t", "hilbert", "hilbert_t", "peano_t", "peano", "zigzag_t", "zigzag"]
    assert config.prior["decay"]["curves"] == curves and config.prior["decay"]["alpha_scales"] == "mask"


@pytest.mark.parametrize(
    ("curves", "arguments", "message"),
    [
        (["snake"], {}, "scalars of 1 curves, and a file without args.curves means 8"),
        (["snake"], {"curves": ["snake", "peano"]}, "scalars of 1 curves, and args.curves means 2: snake, peano"),
        (["snake"], {"curves": ["moore"]}, r"args.curves=\['moore'\] must be a list of snake, snake_T"),
        (["snake"], {"curves": ["snake"], "method": "div"}, "args.method='div' must be one of mul_v1, mul_v2"),
    ],
)
def test_what_a_file_does_not_say_is_refused(curves, arguments, message, tmp_path, capsys):
    content = {"model": with_scalars(random_weights(GRID), curves), "args": argparse.Namespace(**arguments)}
    torch.save(content, tmp_path / "checkpoint.pth")
    assert main(["convert", str(tmp_path / "checkpoint.pth"), str(tmp_path / "ours")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line) and not (tmp_path / "ours").exists()


def test_fixed_gammas_of_several_values_are_refused(tmp_path):
    state = with_scalars(random_weights(GRID), ["snake"], fixed=True)
    state["blocks.1.attn.ai_list"][0, 1] = 0.9
    torch.save({"model": state, "args": argparse.Namespace(curves=["snake"])}, tmp_path / "checkpoint.pth")
    with pytest.raises(ValueError, match=r"fixed gammas \[0.89.*\] must be one number"):
        convert_checkpoint(tmp_path / "checkpoint.pth", tmp_path / "ours")
