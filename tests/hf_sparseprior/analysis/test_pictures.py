import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.colors import LogNorm

from hf_sparseprior import SparsePriorViTConfig
from hf_sparseprior.analysis.flops import model_flops
from hf_sparseprior.analysis.image_maps import (
    HEAT,
    SEEN,
    UNSEEN,
    Panel,
    darkened,
    draw_panels,
    over_pixels,
    with_heat,
)
from hf_sparseprior.analysis.pictures import (
    DPI,
    draw_attention,
    draw_decay,
    draw_flops,
    draw_gammas,
    draw_mask_rows,
    draw_matrices,
    draw_quartiles,
    draw_seen,
    draw_support,
)


@pytest.fixture
def image():
    return np.random.default_rng(0).random((10, 14, 3))


# ---- maps over images -----------------------------------------------------------------------------------------------


def test_every_pixel_has_the_value_of_its_patch():
    values = np.arange(6).reshape(2, 3)
    pixels = over_pixels(values, 8, 9)
    for row, column in np.ndindex(8, 9):
        assert pixels[row, column] == values[row // 4, column // 3]
    # Sides that are no multiple: every patch is there, in order.
    assert over_pixels(values, 5, 7)[:, 0].tolist() == [0, 0, 0, 3, 3]


def test_a_heat_map_is_scaled_to_its_largest_value_and_laid_over_grey(image):
    heat = np.array([[0.0, 0.2], [0.05, -1.0]])
    drawn = with_heat(image, heat)
    for row, column in np.ndindex(10, 14):
        value = max(heat[row // 5, column // 7], 0) / 0.2
        expected = HEAT * np.array(colormaps["inferno"](value)[:3]) + (1 - HEAT) * image[row, column].mean()
        np.testing.assert_allclose(drawn[row, column], expected)
    dark = np.array(colormaps["inferno"](0.0)[:3])
    np.testing.assert_allclose(
        with_heat(np.zeros((4, 4, 3)), np.zeros((2, 2))), np.broadcast_to(HEAT * dark, (4, 4, 3))
    )


def test_patches_that_are_seen_are_lighter_than_all_others(image):
    seen = np.array([[True, False], [False, False]])
    drawn = darkened(image, seen)
    np.testing.assert_allclose(drawn[:5, :7], SEEN[0] + (SEEN[1] - SEEN[0]) * image[:5, :7])
    np.testing.assert_allclose(drawn[5:], UNSEEN[1] * image[5:])
    for plain in (np.zeros_like(image), np.ones_like(image)):
        assert darkened(plain, seen)[0, 0, 0] > UNSEEN[1] >= darkened(plain, seen)[9, 9, 0]


def test_panels_show_the_maps_and_frame_queries_and_boxes(image, figures, tmp_path):
    heat, seen = np.array([[0.1, 0.2]]), np.array([[True, False]])
    panels = [
        [Panel(image, title="image"), Panel(image, heat=heat, query=(1, 2), grid=(2, 7), title="heat")],
        [Panel(image, seen=seen, box=(3, 1, 4.5, 6))],
    ]
    draw_panels(panels, ["first", "second"], tmp_path / "panels.png", "heading")
    axes = np.array(figures[0].axes[:4]).reshape(2, 2)
    arrays = [axis.images[0].get_array() for axis in axes.flat[:3]]
    for drawn, expected in zip(arrays, (image, with_heat(image, heat), darkened(image, seen)), strict=True):
        np.testing.assert_allclose(drawn, expected)
    assert not axes[1, 1].images and [axis.get_ylabel() for axis in axes[:, 0]] == ["first", "second"]
    assert [axis.get_title() for axis in axes[0]] == ["image", "heat"]
    (query,), (box,) = axes[0, 1].patches, axes[1, 0].patches
    assert (*query.get_xy(), query.get_width(), query.get_height()) == (4, 5, 2, 5)  # patches of 5x2 pixels
    assert (*box.get_xy(), box.get_width(), box.get_height()) == (3, 1, 4.5, 6)
    # Pixel edges lie at whole numbers, the first row on top.
    assert axes[0, 0].images[0].get_extent() == [0, 14, 10, 0]


@pytest.mark.parametrize("tokens", [17, 401])
def test_a_pair_is_a_whole_number_of_pixels(tokens, figures, tmp_path):
    masks = np.random.default_rng(0).random((5, tokens, tokens)) < 0.1
    draw_support(masks, ["title"] * 5, tmp_path / "support.png", "heading", 1)
    width, height = figures[0].get_size_inches() * DPI
    for axis, mask in zip(figures[0].axes, masks, strict=True):
        x, y, wide, high = axis.get_position().bounds * np.array([width, height, width, height])
        for number in (x, y, wide / tokens, high / tokens):
            assert number == pytest.approx(round(number), abs=1e-6)
        assert round(wide) >= 2 * tokens and wide == pytest.approx(high)
        drawn = axis.images[0].get_array()
        assert np.array_equal(drawn > 0, mask) and set(np.unique(drawn[1:, 1:])) <= {0, 1}


def test_what_a_patch_sees_is_drawn_on_the_grid(figures, tmp_path):
    rows = np.random.default_rng(0).random((2, 3, 4)) < 0.5
    rows[:, 1, 2] = [True, False]
    draw_seen(rows, ["1", "2"], (1, 2), tmp_path / "patch.png", "heading")
    for axis, seen in zip(figures[0].axes, rows, strict=True):
        drawn = axis.images[0].get_array()
        assert np.array_equal(drawn > 0, seen) and drawn[1, 2] == 2 * seen[1, 2] and np.sum(drawn == 2) == seen[1, 2]
        assert axis.patches[0].get_xy() == (1.5, 0.5)


def test_maps_in_scales_of_their_own_have_a_bar_of_colours(image, figures, tmp_path):
    heat = np.array([[0.1, 0.2]])
    draw_panels([[Panel(image)]], ["plain"], tmp_path / "plain.png", "heading")
    assert len(figures[0].axes) == 1
    draw_panels([[Panel(image, heat=heat)]], ["heat"], tmp_path / "heat.png", "heading")
    draw_matrices([[heat, 2 * heat]], ["basis"], tmp_path / "matrices.png", "heading")
    weights = {"dense": np.random.default_rng(0).random((2, 5, 5))}
    draw_attention(image, weights, (2, 2), 1, (0, 1), tmp_path / "attention.png", "heading")
    for figure, colours, panels in zip(figures[1:], ("inferno", "viridis", "viridis"), (1, 2, 4), strict=True):
        *axes, bar = figure.axes
        assert len(axes) == panels and bar.get_ylabel().endswith(" / largest")
        assert bar.get_ylim() == (0, 1) and bar._colorbar.cmap.name == colours
    drawn = figures[3].axes[1].images[0]  # what the class token sees, on average over the heads
    assert drawn.get_clim() == (0, pytest.approx(weights["dense"][:, 0, 1:].mean(0).max()))


# ---- decays and spreads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_alpha", [True, False])
def test_gammas_are_drawn_curve_by_curve(figures, tmp_path, with_alpha):
    generator = np.random.default_rng(0)
    gammas = 1 - 10 ** generator.uniform(-6, -1, (3, 2, 5))  # layers, curves, heads
    alphas = generator.normal(1, 0.1, (3, 5)) if with_alpha else None
    draw_gammas(gammas, alphas, ["snake", "hilbert_t"], [1, 2, 4], tmp_path / "gamma.png", "heading")
    panels = {axis.get_title(): axis for axis in figures[0].axes if axis.get_title()}
    assert list(panels) == ["snake", "hilbert_t"] + ["alpha"] * with_alpha
    for number, curve in enumerate(("snake", "hilbert_t")):
        drawn = panels[curve].images[0]
        np.testing.assert_allclose(drawn.get_array(), 1 - gammas[:, number])
        assert isinstance(drawn.norm, LogNorm)
        assert [label.get_text() for label in panels[curve].get_yticklabels()] == ["1", "2", "4"]
    if with_alpha:
        drawn = panels["alpha"].images[0]
        np.testing.assert_array_equal(drawn.get_array(), alphas)
        assert drawn.norm.vmax - 1 == pytest.approx(1 - drawn.norm.vmin)


def test_gammas_that_round_to_one_can_be_drawn(figures, tmp_path):
    draw_gammas(np.ones((2, 1, 3)), None, ["snake"], [1, 2], tmp_path / "gamma.png", "heading")
    assert (figures[0].axes[0].images[0].get_array() > 0).all()


def test_mask_rows_share_one_scale(figures, tmp_path):
    masks = np.random.default_rng(0).uniform(0.5, 1, (2, 3, 4, 6))
    draw_mask_rows(masks, ["a", "b"], ["x", "y", "z"], [(1, 5), (0, 2)], tmp_path / "masks.png", "heading")
    axes = np.array(figures[0].axes[:6]).reshape(2, 3)
    for place in np.ndindex(2, 3):
        drawn = axes[place].images[0]
        np.testing.assert_array_equal(drawn.get_array(), masks[place])
        assert drawn.get_clim() == (masks.min(), 1.0)
        assert axes[place].lines[0].get_xydata().tolist() == [[[5, 1]], [[2, 0]]][place[0]]


def test_masks_that_are_all_but_one_have_one_colour(figures, tmp_path):
    masks = 1 - np.random.default_rng(0).uniform(0, 1e-8, (1, 2, 4, 4))
    draw_mask_rows(masks, ["a"], ["x", "y"], [(1, 1)], tmp_path / "masks.png", "heading")
    for axis in figures[0].axes[:2]:
        assert axis.images[0].norm(masks).min() > 0.9999
    draw_gammas(masks[0], None, ["x", "y", "z", "u"], [1, 2], tmp_path / "gamma.png", "heading")
    low, high = figures[1].axes[0].images[0].get_clim()
    assert high >= 10 * low


def test_the_centre_and_two_corners_of_whole_masks_are_drawn(figures, tmp_path):
    masks = {name: np.random.default_rng(seed).uniform(0.5, 1, (6, 6)) for seed, name in enumerate("xyz")}
    draw_decay(masks, (2, 3), tmp_path / "decay.png", "heading")
    axes = np.array(figures[0].axes[:9]).reshape(3, 3)
    for line, patch, marked in zip(axes, (0, 4, 5), ([0, 0], [1, 1], [2, 1]), strict=True):
        for axis, mask in zip(line, masks.values(), strict=True):
            np.testing.assert_array_equal(axis.images[0].get_array(), mask[patch].reshape(2, 3))
            assert axis.lines[0].get_xydata().tolist() == [marked]


HEADING = "outputs/a_model_with_a_long_name, test123: what the framed patch sees of it, and more"
TITLES = ["1: 20 offsets and 30 other pairs"]
SPREAD = {"min": 1.0, "q1": 2.0, "median": 4.0, "q3": 5.0, "max": 9.0}
LONG = {
    "panels": lambda path: draw_panels(
        [[Panel(np.full((10, 14, 3), 0.5), title="head 1, sparse\nmax 0.12")] * 2] * 2, ["layer 1"] * 2, path, HEADING
    ),
    "masks": lambda path: draw_mask_rows(
        np.full((3, 1, 4, 4), 0.9), ["top left", "centre", "end"], ["x"], [(0, 0)] * 3, path, HEADING
    ),
    "gammas": lambda path: draw_gammas(np.full((2, 1, 3), 0.9), np.ones((2, 3)), ["manhattan"], [1, 2], path, HEADING),
    "matrices": lambda path: draw_matrices([[np.ones((16, 4))]], ["layer 1"], path, HEADING, ["layer 1"]),
    "support": lambda path: draw_support(np.ones((1, 20, 20), dtype=bool), TITLES, path, HEADING),
    "seen": lambda path: draw_seen(np.ones((1, 4, 4), dtype=bool), TITLES, (0, 0), path, HEADING),
    "quartiles": lambda path: draw_quartiles(
        {"x": SPREAD}, {"x": [3.0]}, path, "100 x diversity between heads", HEADING
    ),
}


@pytest.mark.parametrize("draw", LONG)
def test_no_text_is_cut_off(draw, figures, tmp_path):
    LONG[draw](tmp_path / "x.png")
    figure = figures[0]
    whole = figure.get_tightbbox(figure.canvas.get_renderer())
    assert whole.x0 >= -0.02 and whole.y0 >= -0.02
    assert whole.x1 <= figure.get_figwidth() + 0.02 and whole.y1 <= figure.get_figheight() + 0.02


def test_sizes_whose_labels_would_touch_have_one_tick(figures, tmp_path):
    counts = {
        model: {"dense": [model_flops(SparsePriorViTConfig(patch_size=4), side) for side in sides]}
        for model, sides in {"a": (8, 16, 32), "b": (12, 16, 36)}.items()
    }
    draw_flops(counts, tmp_path / "flops.png", "heading")
    for axis in figures[0].axes:
        assert [label.get_text() for label in axis.get_xticklabels()] == ["8", "12", "16", "32"]
    draw_flops({"a": {"dense": counts["a"]["dense"][:1]}}, tmp_path / "flops.png", "heading")
    for axis in figures[1].axes:  # one size spans no decade, and has labels all the same
        low, high = axis.get_ylim()
        labels = [*axis.yaxis.get_majorticklabels(), *axis.yaxis.get_minorticklabels()]
        assert any(label.get_text() and low <= label.get_position()[1] <= high for label in labels)


def test_quartiles_are_those_that_are_given(figures, tmp_path):
    spreads = {
        "dense": SPREAD,
        "sparse": {"min": 2.0, "q1": 3.0, "median": 3.5, "q3": 6.0, "max": 7.0},
    }
    lines = {"dense": [3.0, 4.0], "sparse": [1.0, 2.0, 3.5]}
    draw_quartiles(spreads, lines, tmp_path / "spread.png", "diversity", "heading", log=True)
    left, right = figures[0].axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["dense", "sparse"]
    for box, whiskers, median, spread in zip(left.patches, left.lines, left.collections, spreads.values(), strict=True):
        assert (box.get_x(), box.get_x() + box.get_width()) == (spread["q1"], spread["q3"])
        assert list(whiskers.get_xdata()) == [spread["min"], spread["max"]]
        assert median.get_segments()[0][:, 0].tolist() == [spread["median"]] * 2
    assert [line.get_xydata().tolist() for line in right.lines] == [
        [[1, 3.0], [2, 4.0]],
        [[1, 1.0], [2, 2.0], [3, 3.5]],
    ]
    assert (left.get_xscale(), right.get_yscale()) == ("log", "log")


def test_a_logarithmic_axis_only_where_nothing_is_zero(figures, tmp_path):
    for lowest, scale in ((0.0, "linear"), (0.5, "log")):
        own = {"x": {**SPREAD, "min": lowest, "q1": lowest}}
        draw_quartiles(own, {"x": [3.0]}, tmp_path / "spread.png", "variance", "heading", log=True)
        assert {axis.get_xscale() for axis in figures[-1].axes[:1]} == {scale}
        assert figures[-1].axes[1].get_yscale() == scale
