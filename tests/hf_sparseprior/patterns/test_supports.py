import json
import math
import random
import time
from decimal import ROUND_FLOOR, Decimal, localcontext
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hf_sparseprior.patterns.baselines import _integers
from hf_sparseprior.patterns.fibottention import window_sizes
from hf_sparseprior.patterns.masks import count_nonzeros, key_lists, mask_from_offsets, pruning_ratio, self_rows
from hf_sparseprior.patterns.sequences import SEQUENCES, sequence_settings, wythoff_start
from hf_sparseprior.patterns.supports import (
    COMMON_SETTINGS,
    MASK_FILLS,
    SUPPORTS,
    LayerKey,
    build_mask,
    head_offsets,
    layer_order,
    layer_pattern,
    register_support,
    resolve_support,
    support_notes,
    support_settings,
)
from hf_sparseprior.runs.config import read_cell
from tests.configs import shipped
from tests.each import each

PHI = (1 + math.sqrt(5)) / 2
PSI = (1 - math.sqrt(5)) / 2
checked = settings(max_examples=60, deadline=None, derandomize=True)

# Settings besides the defaults, so that every branch of a support is met; a new support is covered by its defaults.
MORE = {
    "fibottention": [
        {"modified": True},
        {"w_min": 1, "w_max": 10**6},
        {"w_min": None, "w_max": 7, "modified": True},
        {"w_min": 1, "w_max": 1},  # all heads but the first are empty
        *({"sequence": name} for name in SEQUENCES if name != "wythoff"),
    ],
    "window": [{"w": 0}, {"w": 1, "diagonal": False}, {"w": 3}, {"w": 10**6}, {"pruning_ratio": 9}],
    "longformer": [{"w": 0}, {"w": 4}, {"pruning_ratio": 80}],
    "strided": [{"stride": 1}, {"stride": 3, "local": 2}, {"pruning_ratio": 80}],
    "random": [
        *({"pruning_ratio": ratio} for ratio in (0, 100)),
        *({"pruning_ratio": 60.0, "per_head": True}, {"redraw": True}),
    ],
    "bigbird": [
        {"w": 4, "random_keys": 0.5},
        {"random_keys": 10**6},
        {"pruning_ratio": 70, "per_head": True, "redraw": True},
    ],
    "neighborhood": [{"window": [3, 1], "dilation": [2, 1], "edges": "cut"}],
}
CASES = [{"name": name, **more} for name in SUPPORTS for more in [{}, *MORE.get(name, [])]]


def shown(support):
    return "-".join([support["name"], *(f"{key}={value}" for key, value in support.items() if key != "name")])


def floor_phi(n):
    with localcontext() as context:
        context.prec = 60
        return int((n * (1 + Decimal(5).sqrt()) / 2).to_integral_value(ROUND_FLOOR))


def brute_windows(num_heads, num_tokens, w_min, w_max):
    # Fibottention section 3.2 with exact fractions; h = 1 uses w_max (C.1).
    if num_heads == 1:
        return [min(w_max, num_tokens)]
    low, high = min(w_min, num_tokens), min(w_max, num_tokens)
    return [low + math.floor(Fraction(high - low, num_heads - 1) * (i - 1)) for i in range(1, num_heads + 1)]


def brute_fibottention(num_heads, num_tokens, w_min, w_max, modified):
    # Fibottention Eq. 3, integer by integer.
    heads = []
    for i, w in enumerate(brute_windows(num_heads, num_tokens, w_min, w_max), start=1):
        m = floor_phi(i)
        a = floor_phi(m)
        terms = [i - 1, m] if modified else [a, a + m]
        while len(terms) < 60:
            terms.append(terms[-1] + terms[-2])
        heads.append([o for o in range(1, num_tokens) if o <= w and o in terms])
    return heads


def brute_mask(offsets, num_tokens, num_prefix_tokens, pairs=None):
    total = num_prefix_tokens + num_tokens
    mask = [[False] * total for _ in range(total)]
    for row in range(total):
        for column in range(total):
            prefix = row < num_prefix_tokens or column < num_prefix_tokens
            mask[row][column] = prefix or abs(row - column) in offsets
        for query, key in [] if pairs is None else pairs:
            if num_prefix_tokens + query == row:
                mask[row][num_prefix_tokens + key] = True
        if not any(mask[row]):
            mask[row][row] = True
    return np.array(mask)


def fibottention(**changes):
    return {"num_heads": 12, "num_tokens": 196, "w_min": 5, "w_max": 65, **changes}


# ---- golden numbers -------------------------------------------------------------------------------------------------

GOLDEN = [  # head, w, default offsets, what `modified` adds; 12 heads, 196 patches, w 5..65
    (1, 5, [1, 2, 3, 5], []),
    (2, 10, [4, 7], [1, 3]),
    (3, 15, [6, 10], [2, 4]),
    (4, 21, [9, 15], [3, 6]),
    (5, 26, [12, 20], [4, 8]),
    (6, 32, [14, 23], [5, 9]),
    (7, 37, [17, 28], [6, 11]),
    (8, 43, [19, 31], [7, 12]),
    (9, 48, [22, 36], [8, 14]),
    (10, 54, [25, 41], [9, 16]),
    (11, 59, [27, 44], [10, 17]),
    (12, 65, [30, 49], [11, 19]),
]


def test_golden_offsets():
    for w_max in (65, None):  # w_max=None is N // 3, the papers' 65 at N = 196
        default = head_offsets("fibottention", **fibottention(w_max=w_max))
        modified = head_offsets("fibottention", **fibottention(w_max=w_max), modified=True)
        assert default == [offsets for _, _, offsets, _ in GOLDEN]
        assert modified == [sorted(offsets + added) for _, _, offsets, added in GOLDEN]
        assert window_sizes(12, 196, 5, w_max) == [w for _, w, _, _ in GOLDEN]


# w_min, w_max, modified, nonzeros of the patches, and pruning ratios without and with a prefix token.
GOLDEN_RATIOS = [
    (5, 65, False, 9192, "98.006", "97.014"),
    (5, 65, True, 17446, "96.216", "95.241"),
    (1, 196, False, None, "96.942", "95.961"),
    (1, 196, True, None, "95.152", "94.188"),
]


@each("w_min, w_max, modified, nonzeros, patches_only, with_prefix", GOLDEN_RATIOS)
def test_golden_nonzeros_and_pruning_ratios(w_min, w_max, modified, nonzeros, patches_only, with_prefix):
    settings = fibottention(w_min=w_min, w_max=w_max, modified=modified)
    offsets = head_offsets("fibottention", **settings)
    for num_prefix_tokens, expected in ((0, patches_only), (1, with_prefix)):
        assert f"{pruning_ratio(offsets, 196, num_prefix_tokens):.3f}" == expected
        mask = build_mask("fibottention", **settings, num_prefix_tokens=num_prefix_tokens)
        assert f"{100 * (1 - mask.mean()):.3f}" == expected
    if nonzeros:
        mask = build_mask("fibottention", **settings)
        assert sum(count_nonzeros(own, 196) for own in offsets) == mask.sum() == nonzeros
        assert not mask.diagonal(axis1=1, axis2=2).any()


@pytest.mark.parametrize(
    ("layer", "rows"),
    [(0, [2, 10, 9, 6, 11, 3, 4, 8, 5, 1, 12, 7]), (1, [8, 12, 1, 9, 6, 7, 4, 11, 5, 2, 10, 3])],
)
def test_golden_shuffles(layer, rows):
    assert [number + 1 for number in layer_order(12, layer, 0)] == rows
    support = {"name": "fibottention", "w_min": 5, "w_max": 65, "shuffle_seed": 0}
    expected = [GOLDEN[row - 1][2] for row in rows]
    assert layer_pattern(resolve_support(support, 12, 196), LayerKey(12, (14, 14), layer)).offsets == expected
    # Seed 0 is also the default.
    del support["shuffle_seed"]
    assert layer_pattern(resolve_support(support, 12, 196), LayerKey(12, (14, 14), layer)).offsets == expected


@pytest.mark.parametrize(
    ("w_min", "w_max", "windows", "ratio"),
    [(None, 65, [65] * 12, "72.8"), (5, 60, [5 * i for i in range(1, 13)], "85.5")],
)
def test_multiples_ratios(w_min, w_max, windows, ratio):
    # Fibottention section 6.6: c = 2 with one window for all heads, and with w_i = 5 i.
    assert window_sizes(12, 196, w_min, w_max) == windows
    sequence = {"name": "multiples", "c": 2}
    offsets = head_offsets("fibottention", num_heads=12, num_tokens=196, w_min=w_min, w_max=w_max, sequence=sequence)
    assert offsets == [list(range(2, w + 1, 2)) for w in windows]
    assert f"{pruning_ratio(offsets, 196):.1f}" == ratio


def test_shifted_multiples_give_the_ratio_of_figure_5a():
    """c n + (i mod c) with n >= 1 and w_i = 5i is printed as 85.5; (i - 1) mod c with n >= 0 gives 85.4."""
    sizes = {"num_heads": 12, "num_tokens": 196, "w_min": 5, "w_max": 60}
    offsets = head_offsets("fibottention", **sizes, sequence={"name": "shifted_multiples", "c": 2})
    assert offsets[:3] == [[3, 5], [2, 4, 6, 8, 10], [3, 5, 7, 9, 11, 13, 15]]
    assert f"{pruning_ratio(offsets, 196):.2f}" == "85.52"
    earlier = head_offsets("fibottention", **sizes, sequence={"name": "multiples", "c": 2, "shifted": True})
    assert f"{pruning_ratio(earlier, 196):.2f}" == "85.44"


# Fibottention Tables 12 and 13: ratios of windows without the diagonal, and with it where Table 12 has it.
WINDOWS = {
    2: ("97.97", "97.46"), 3: ("96.97",), 4: ("95.97",), 5: ("94.98",), 6: ("93.99",), 7: ("93.00",), 8: ("92.02",),
    9: ("91.05",), 10: ("90.08", "89.57"), 15: ("85.32", "84.81"), 20: ("80.69", "80.17"), 40: ("63.45", "62.94"),
    80: ("35.24",), 120: ("15.35",), 160: ("3.79",), 196: ("0.51", "0.00"),
}  # fmt: skip


def test_tables_12_and_13():
    """The last row of Table 13 has the diagonal."""
    for w, ratios in WINDOWS.items():
        for diagonal, ratio in zip((False, True), ratios, strict=False):
            offsets = head_offsets("window", num_heads=12, num_tokens=196, w=w, diagonal=diagonal)
            assert f"{pruning_ratio(offsets, 196):.2f}" == ratio, (w, diagonal)
            mask = build_mask("window", num_heads=1, num_tokens=196, w=w, diagonal=diagonal)
            assert f"{100 * (1 - mask.mean()):.2f}" == ratio, (w, diagonal)


# ---- windows --------------------------------------------------------------------------------------------------------


@checked
@given(st.integers(1, 24), st.integers(1, 5000), st.integers(1, 6000), st.integers(0, 6000))
def test_windows_are_floored_fractions(num_heads, num_tokens, w_min, more):
    sizes = window_sizes(num_heads, num_tokens, w_min, w_min + more)
    assert sizes == brute_windows(num_heads, num_tokens, w_min, w_min + more)
    assert all(type(size) is int for size in sizes)


def test_the_last_window_is_w_max():
    # A quotient in floats can end just below a whole number and lose one here (64 for 65).
    assert all(window_sizes(h, 10**6, low, w)[-1] == w for h in range(1, 33) for low in (1, 5) for w in range(5, 200))


def test_windows_at_the_ends_of_their_range():
    assert window_sizes(1, 196, 5, 65) == [65]  # one head has the largest
    assert head_offsets("fibottention", **fibottention(num_heads=1)) == [[1, 2, 3, 5, 8, 13, 21, 34, 55]]
    for num_tokens in (196, 49, 576, 1024, 4096):  # w_max=None follows the grid
        assert window_sizes(12, num_tokens, 5, None)[-1] == num_tokens // 3
    assert window_sizes(4, 9, 5, None) == [5, 5, 5, 5]  # and is never below w_min
    assert window_sizes(4, 2, None, None) == [1, 1, 1, 1]
    assert window_sizes(3, 49, 1, 196) == [1, 25, 49]  # clipped to the grid
    assert window_sizes(3, 49, 100, 196) == [49, 49, 49]


# ---- properties of Fibottention -------------------------------------------------------------------------------------


@checked
@given(st.integers(1, 20), st.integers(1, 120), st.integers(1, 40), st.integers(0, 130), st.booleans())
def test_fibottention_offsets_match_the_definition(num_heads, num_tokens, w_min, more, modified):
    settings = {"w_min": w_min, "w_max": w_min + more, "modified": modified}
    offsets = head_offsets("fibottention", num_heads=num_heads, num_tokens=num_tokens, **settings)
    assert offsets == brute_fibottention(num_heads, num_tokens, modified=modified, w_min=w_min, w_max=w_min + more)


@checked
@given(st.integers(1, 64), st.integers(1, 5000), st.integers(1, 6000), st.integers(0, 6000))
def test_default_supports_are_disjoint_and_modified_ones_nearly(num_heads, num_tokens, w_min, more):
    settings = {"num_heads": num_heads, "num_tokens": num_tokens, "w_min": w_min, "w_max": w_min + more}
    default = [o for own in head_offsets("fibottention", **settings) for o in own]
    assert len(default) == len(set(default))
    modified = [o for own in head_offsets("fibottention", **settings, modified=True) for o in own]
    assert max((modified.count(o) for o in set(modified)), default=0) <= 3


@checked
@given(st.integers(2, 16), st.integers(1, 24), st.integers(1, 30), st.integers(0, 30), st.booleans())
def test_the_diagonal_is_excluded_except_for_rows_that_see_nothing_else(num_heads, num_tokens, w_min, more, modified):
    settings = {"w_min": w_min, "w_max": w_min + more, "modified": modified}
    alone = build_mask("fibottention", num_heads=num_heads, num_tokens=num_tokens, **settings)
    for mask in alone:
        assert all(mask[row].sum() == 1 for row in range(num_tokens) if mask[row, row])
    # With a prefix token to attend to there is no such row.
    mask = build_mask("fibottention", num_heads=num_heads, num_tokens=num_tokens, num_prefix_tokens=1, **settings)
    assert not mask[:, 1:, 1:].diagonal(axis1=1, axis2=2).any()


@checked
@given(st.integers(1, 60), st.integers(1, 60), st.integers(2, 400), st.integers(0, 300))
def test_lemma_2(a, more, window, tokens_beyond):
    b, num_tokens = a + more, window + tokens_beyond
    assume(b <= window)
    sequence = {"name": "fibonacci", "a": a, "b": b}
    settings = {"num_heads": 1, "num_tokens": num_tokens, "w_min": None, "w_max": window, "sequence": sequence}
    pairs = sum(2 * (num_tokens - o) for o in head_offsets("fibottention", **settings)[0])
    bound = (math.log(math.sqrt(5) * window + abs(a * PHI - b)) - math.log(b - a * PSI)) / math.log(PHI) + 1
    assert pairs <= 2 * num_tokens * bound


@checked
@given(st.integers(1, 24), st.integers(2, 4096), st.integers(1, 4096), st.integers(0, 4096))
def test_theorem_3(num_heads, num_tokens, w_min, more):
    # Dot products of width d / h; the common factor d is left out. The theorem wants w_max <= N and b_i <= w_i.
    w_max = min(num_tokens, w_min + more)
    w_min = min(w_min, w_max)
    heads = range(1, num_heads + 1)
    windows = brute_windows(num_heads, num_tokens, w_min, w_max)
    offsets = head_offsets("fibottention", num_heads=num_heads, num_tokens=num_tokens, w_min=w_min, w_max=w_max)
    bound = 2 * num_tokens * (2.08 * math.log((math.sqrt(5) + 1) * w_max) - 1)
    assert bound <= 4.16 * num_tokens * math.log(3.3 * num_tokens)
    if all(wythoff_start(i)[1] <= w for i, w in zip(heads, windows, strict=True)):
        assert sum(2 * (num_tokens - o) for own in offsets for o in own) / num_heads <= bound


def test_only_pairs_up_to_the_window_are_kept():
    # Algorithm 1 as printed keeps a and b whatever the window is; Eq. 3 does not.
    assert head_offsets("fibottention", num_heads=3, num_tokens=196, w_min=3, w_max=3) == [[1, 2, 3], [], []]


# ---- baselines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("support", "prefix", "ratio"),
    [
        ({"name": "longformer"}, 0, "98.47"),  # Fibottention Table 2
        ({"name": "bigbird"}, 0, "97.96"),  # Table 2
        ({"name": "strided"}, 0, "98.46"),  # the stride alone
        ({"name": "bigbird", "random_keys": 1}, 1, "96.97"),  # Table 11; its third row follows from no reading
        ({"name": "bigbird", "random_keys": 2}, 1, "96.47"),
    ],
)
def test_published_pruning_ratios_of_baselines(support, prefix, ratio):
    mask = build_mask(support, num_heads=12, num_tokens=196, num_prefix_tokens=prefix)
    assert f"{100 * (1 - mask.mean()):.2f}" == ratio


@pytest.mark.parametrize(("heads", "settings"), [(6, {"stride": 195}), (12, {"stride": 65, "separate_heads": True})])
def test_sparse_transformer_has_window_and_stride_at_the_ratio_of_table_2(heads, settings):
    """Both parts of Child et al. 2019, counted pair by pair: |i - j| <= l, and i - j a multiple of the stride."""
    mask = build_mask({"name": "strided", "local": 1, **settings}, num_heads=heads, num_tokens=196, shuffle_seed=None)
    apart = np.abs(np.arange(196)[:, None] - np.arange(196))
    window, stride = apart <= 1, apart % settings["stride"] == 0
    kinds = (window, stride) if settings.get("separate_heads") else (window | stride,) * 2
    for head, own in enumerate(mask):
        assert (own == kinds[head % 2]).all()
    assert f"{100 * (1 - mask.mean()):.2f}" == "98.47"
    assert stride.sum() > 196 and window.sum() > 196  # each part has more than the diagonal


def test_no_smaller_stride_merged_with_a_window_meets_the_ratio_of_table_2():
    ratios = {
        stride: pruning_ratio(head_offsets("strided", num_heads=1, num_tokens=196, local=1, stride=stride), 196)
        for stride in range(2, 196)
    }
    assert [stride for stride, ratio in ratios.items() if abs(ratio - 98.47) <= 0.1] == list(range(176, 196))
    assert [stride for stride, ratio in ratios.items() if f"{ratio:.2f}" == "98.47"] == [195]


@pytest.mark.parametrize(
    ("cells", "slot", "num_tokens", "printed"),
    [
        (("fib_table6.yaml#lift-bigbird", "fib_table6.yaml#can-bigbird"), "encoder", 81, "11.9"),
        (("fib_table6.yaml#pusht-bigbird",), "encoder", 100, "9.7"),
        (("fib_table5.yaml#nucla_cs-bigbird", "fib_arxiv_table5.yaml#bigbird"), "model", 196, "5.0"),
    ],
)
def test_bigbird_of_videos_and_robots_has_the_share_of_the_authors_code(cells, slot, num_tokens, printed):
    """A band of |j - k| <= 4 and N of all N^2 pairs, some of them in the band, for each head and pass."""
    generator, shares = np.random.default_rng(0), []
    band = np.abs(np.arange(num_tokens)[:, None] - np.arange(num_tokens)) <= 4
    for _ in range(200):
        mask = band.copy()
        mask.flat[generator.permutation(num_tokens**2)[:num_tokens]] = True
        shares.append(100 * mask.mean())
    for name in cells:
        support = read_cell(shipped.path(f"experiments/{name}"))[slot]["prior"]["support"]
        heads = build_mask(support, num_heads=12, num_tokens=num_tokens)
        assert f"{np.mean(shares):.1f}" == f"{100 * heads.mean():.1f}" == printed
        assert abs(100 * heads.mean() - np.mean(shares)) < 0.03
        assert all((head & band == band).all() for head in heads)
        assert not (heads[0] == heads[1]).all() and support["redraw"] is True


def test_merged_with_a_window_stride_98_is_the_sparsest_in_which_every_patch_sees_another_by_its_stride():
    apart = np.abs(np.arange(196)[:, None] - np.arange(196))
    by_stride = {stride: (apart > 0) & (apart % stride == 0) for stride in range(2, 196)}
    kept = {stride: int(((apart <= 1) | seen).sum()) for stride, seen in by_stride.items() if seen.any(axis=1).all()}
    assert max(kept) == min(kept, key=kept.__getitem__) == 98
    row = read_cell(shipped.path("experiments/fib_table2.yaml#cifar10-sparse-transformer-97.96"))
    mask = build_mask(row["model"]["prior"]["support"], num_heads=12, num_tokens=196)
    assert set(mask.sum(axis=(1, 2))) == {kept[98]} == {782}
    assert f"{100 * (1 - mask.mean()):.2f}" == "97.96"
    # The row of the printed ratio has one pair in each direction that Longformer's window has not.
    longformer = build_mask("longformer", num_heads=12, num_tokens=196)
    merged = build_mask({"name": "strided", "local": 1, "stride": 195}, num_heads=12, num_tokens=196)
    assert [tuple(pair) for pair in np.argwhere(merged[0] ^ longformer[0])] == [(0, 195), (195, 0)]


@pytest.mark.parametrize(
    ("settings", "heads", "message"),
    [
        ({"local": 1, "pruning_ratio": 98}, 4, "pruning_ratio=98 with separate_heads=True must be None"),
        ({"local": 0}, 4, r"local=0 and 4 head\(s\): local must be 1 or more"),
        ({"local": 1}, 1, r"local=1 and 1 head\(s\): local must be"),
        ({"local": 1, "stride": 0}, 4, "stride=0 must be an integer of 1"),
    ],
)
def test_separate_heads_refuse_what_they_cannot_have(settings, heads, message):
    with pytest.raises(ValueError, match=message):
        head_offsets("strided", num_heads=heads, num_tokens=16, separate_heads=True, **settings)


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        *(("window", 98.0), ("window", 3.0), ("longformer", 90.0), ("longformer", 50.0), ("strided", 98.0)),
        *(("strided", 50.0), ("strided", 3.0), ("random", 90.0), ("bigbird", 98.0), ("bigbird", 50.0)),
    ],
)
def test_every_baseline_is_brought_to_a_pruning_ratio(name, ratio):
    num_tokens = 100
    mask = build_mask({"name": name, "pruning_ratio": ratio}, num_heads=2, num_tokens=num_tokens, num_prefix_tokens=1)
    kept = mask[:, 1:, 1:].sum() / 2
    wanted = round((1 - ratio / 100) * num_tokens**2)
    if name in ("random", "bigbird"):
        # BigBird's window alone keeps 298 pairs.
        assert kept == max(wanted, 298 if name == "bigbird" else 0)
    else:
        number = {"window": "w", "longformer": "w", "strided": "stride"}[name]
        even = 2 if name == "longformer" else 1
        least = 1 if name == "strided" else 0
        counts = [
            build_mask({"name": name, number: even * choice}, num_heads=1, num_tokens=num_tokens).sum()
            for choice in range(least, num_tokens)
        ]
        assert abs(kept - wanted) == min(abs(count - wanted) for count in counts)


def test_a_stride_beside_a_window_comes_as_near_as_any():
    # Stride 5 adds nothing to a window of 5 where stride 6 does: more pairs at the larger stride.
    sizes = {"num_heads": 1, "num_tokens": 25}
    for local in (1, 5, 11):
        counts = [build_mask({"name": "strided", "local": local, "stride": s}, **sizes).sum() for s in range(1, 25)]
        for ratio in (98.0, 75.0, 60.0, 40.0, 10.0):
            kept = build_mask({"name": "strided", "local": local, "pruning_ratio": ratio}, **sizes).sum()
            wanted = round((1 - ratio / 100) * 25**2)
            assert abs(kept - wanted) == min(abs(count - wanted) for count in counts), (local, ratio)


def test_random_pairs_stay_what_they_are():
    # Saved models have them by their seed alone. Neither a change here nor another numpy may draw others.
    few = layer_pattern(resolve_support({"name": "bigbird", "seed": 7}, 1, 14), LayerKey(1, (1, 14))).pairs[0]
    assert few.tolist() == [
        [0, 10], [1, 11], [3, 13], [4, 2], [6, 13], [8, 1], [8, 10],
        [10, 12], [11, 6], [11, 9], [12, 3], [12, 7], [12, 10], [13, 3],
    ]  # fmt: skip
    support = resolve_support({"name": "random", "seed": 7, "pruning_ratio": 40}, 1, 4)
    assert layer_pattern(support, LayerKey(1, (1, 4), 2)).pairs[0].tolist() == [
        [0, 0], [0, 1], [1, 0], [1, 1], [1, 2], [1, 3], [2, 0], [2, 2], [2, 3], [3, 2],
    ]  # fmt: skip


@pytest.mark.parametrize("below", [2, 196**2, 2**31 + 11, 2**32 - 1])
def test_integers_are_those_of_numpy(below):
    bits = np.random.PCG64(3)
    own = np.concatenate([_integers(bits, below, 1000) for _ in range(3)])
    expected = np.random.Generator(np.random.PCG64(3)).integers(below, size=len(own))
    assert len(own) > 1400 and np.array_equal(own, expected)


def brute_draw(seed, layer, head, num_tokens, count, offsets):
    """Random pairs from the words of the generator, one by one in Python integers."""
    bits, found = np.random.PCG64([seed, layer, head]), []
    free = [(j, k) for j in range(num_tokens) for k in range(num_tokens) if abs(j - k) not in offsets]
    if 2 * count > num_tokens**2:  # the pairs with the smallest words
        words = [int(bits.random_raw()) for _ in free]
        return sorted(free[place] for place in sorted(range(len(free)), key=words.__getitem__)[:count])
    while len(found) < count:
        word = int(bits.random_raw())
        for half in (word % 2**32, word >> 32):
            number, rest = divmod(half * num_tokens**2, 2**32)
            pair = divmod(number, num_tokens)
            if rest >= 2**32 % num_tokens**2 and pair in free and pair not in found and len(found) < count:
                found.append(pair)
    return sorted(found)


@checked
@given(
    num_tokens=st.integers(1, 24),
    w=st.integers(0, 8),
    part=st.floats(0, 1),
    layer=st.integers(0, 30),
    seed=st.integers(0, 2**40),
    per_head=st.booleans(),
)
def test_random_pairs_are_the_first_that_the_generator_gives(num_tokens, w, part, layer, seed, per_head):
    free = num_tokens**2 - count_nonzeros(range(min(w, num_tokens - 1) + 1), num_tokens)
    own = {"name": "bigbird", "w": 2 * w, "random_keys": part * free / num_tokens, "seed": seed, "per_head": per_head}
    support = resolve_support(own, 2, num_tokens)
    drawn = layer_pattern(support, LayerKey(2, (1, num_tokens), layer)).pairs
    count = min(free, round(part * free / num_tokens * num_tokens))
    for head, pairs in enumerate(drawn):
        expected = brute_draw(seed, layer, head if per_head else 0, num_tokens, count, range(w + 1))
        assert pairs.dtype == np.int64 and pairs.shape == (count, 2)
        assert pairs.tolist() == [list(pair) for pair in expected]


def test_random_pairs_of_a_large_grid_are_the_first_that_the_generator_gives():
    # So many pairs that some are drawn twice.
    num_tokens, layer, count = 300, 3, 1332
    pairs = layer_pattern(resolve_support("random", 1, num_tokens), LayerKey(1, (1, num_tokens), layer)).pairs[0]
    words, found = np.random.PCG64([0, layer, 0]), {}
    while len(found) < count:
        word = int(words.random_raw())
        for half in (word % 2**32, word >> 32):
            number, rest = divmod(half * num_tokens**2, 2**32)
            if rest >= 2**32 % num_tokens**2 and len(found) < count:
                found[divmod(number, num_tokens)] = True
    assert pairs.tolist() == [list(pair) for pair in sorted(found)]


@pytest.mark.parametrize("num_tokens", [46340, 50000])
def test_lists_of_keys_of_grids_whose_pairs_outnumber_int32(num_tokens):
    drawn = np.array([[0, 7], [9, 2], [9, num_tokens - 1], [num_tokens - 1, 5]])
    lists = key_lists([[0, 3]] * 2 + [[2]], num_tokens, 1, [drawn, drawn, drawn[:1]])
    more = {0: [7], 9: [2, num_tokens - 1], num_tokens - 1: [5]}
    for head, (signed, own) in enumerate([((-3, 0, 3), more)] * 2 + [((-2, 2), {0: [7]})]):
        for row in (0, 1, 2, 9, 20000, num_tokens - 2, num_tokens - 1):
            keys = sorted([row + o for o in signed if 0 <= row + o < num_tokens] + own.get(row, []))
            expected = [0, *(1 + key for key in keys)]
            assert lists[head, row].tolist() == expected + [-1] * (lists.shape[2] - len(expected))
    assert lists.dtype == np.int32 and lists.shape == (3, num_tokens, 1 + 5)


def test_a_pruning_ratio_that_a_window_exceeds_is_noted():
    def notes(ratio):
        return support_notes(
            resolve_support({"name": "bigbird", "pruning_ratio": ratio}, 2, 36), LayerKey(2, (6, 6)), 1
        )

    assert notes(99) == ["bigbird: pruning_ratio=99 is out of reach on the 6x6 grid; the window alone leaves 91.82 %"]
    assert notes(91) == []
    assert support_notes(resolve_support("random", 2, 36), LayerKey(2, (6, 6)), 1) == []


@pytest.mark.parametrize("name", ["random", "bigbird"])
def test_random_pairs(name):
    support = {"name": name, "pruning_ratio": 90.0}

    def masks(layer=0, **settings):
        return build_mask({**support, **settings}, num_heads=3, num_tokens=60, num_prefix_tokens=1, layer=layer)

    first = masks()
    assert np.array_equal(first, masks()), "the same for every image, process and reload"
    assert (first == first[:1]).all(), "the same in every head"
    assert not np.array_equal(first, masks(layer=1)) and not np.array_equal(first, masks(seed=1))
    own = masks(per_head=True)
    assert not np.array_equal(own[0], own[1]) and np.array_equal(own[0], first[0])
    assert np.array_equal(first, masks(shuffle_seed=3))


@pytest.mark.parametrize(("name", "free", "ratio"), [("random", 12 * 12, 60.0), ("bigbird", 12 * 12 - 34, 30.0)])
def test_random_pairs_are_uniform(name, free, ratio):
    # Over many layers every pair that may be drawn is drawn equally often: a chi-square statistic, 5 standard
    # deviations at most. Drawing without repetition makes it smaller than that of independent draws.
    layers = 400
    support = resolve_support({"name": name, "pruning_ratio": ratio}, 1, 12)
    counts = np.zeros((12, 12))
    for layer in range(layers):
        pairs = layer_pattern(support, LayerKey(1, (1, 12), layer)).pairs[0]
        assert len({tuple(pair) for pair in pairs.tolist()}) == len(pairs)
        counts[pairs[:, 0], pairs[:, 1]] += 1
    drawn = counts[counts > 0]
    assert len(drawn) == free
    expected = counts.sum() / free
    statistic = ((drawn - expected) ** 2 / (expected * (1 - expected / layers))).sum()
    assert abs(statistic - free) < 5 * math.sqrt(2 * free)


# ---- properties of every support ------------------------------------------------------------------------------------


@pytest.mark.parametrize("support", CASES, ids=shown)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    num_heads=st.integers(1, 6),
    grid=st.tuples(st.integers(1, 4), st.integers(1, 6)),
    prefix=st.integers(0, 3),
    layer=st.integers(0, 30),
)
def test_masks_and_counts_match_brute_force(support, num_heads, grid, prefix, layer):
    num_tokens = grid[0] * grid[1]
    offsets = head_offsets(support, num_heads=num_heads, num_tokens=num_tokens, grid=grid)
    assert len(offsets) == num_heads
    for own in offsets:
        assert all(type(o) is int and 0 <= o < num_tokens for o in own)
        assert all(low < high for low, high in pairwise(own))
    resolved = resolve_support(support, num_heads, num_tokens, grid)
    pairs = layer_pattern(resolved, LayerKey(num_heads, grid, layer)).pairs
    others = [None] * num_heads if pairs is None else pairs
    masks = [brute_mask(own, num_tokens, prefix, more) for own, more in zip(offsets, others, strict=True)]
    for own, more, mask in zip(offsets, others, masks, strict=True):
        assert count_nonzeros(own, num_tokens, prefix, more) == mask.sum()
    kept = sum(mask.sum() for mask in masks) / (num_heads * (num_tokens + prefix) ** 2)
    assert pruning_ratio(offsets, num_tokens, prefix, pairs) == pytest.approx(100 * (1 - kept), abs=1e-9)
    lists = key_lists(offsets, num_tokens, prefix, pairs)
    for mask, rows in zip(masks, lists, strict=True):
        for attended, keys in zip(mask[prefix:], rows, strict=True):
            assert np.array_equal(keys[keys >= 0], np.flatnonzero(attended))
            assert (keys[attended.sum() :] == -1).all()
    assert lists.shape[2] == max(mask[prefix:].sum(1).max() for mask in masks)

    sizes = {"num_heads": num_heads, "num_tokens": num_tokens, "num_prefix_tokens": prefix, "grid": grid}
    plain = build_mask(support, **sizes, layer=layer, shuffle_seed=None)
    assert plain.dtype == bool
    assert np.array_equal(plain, masks)
    assert np.array_equal(mask_from_offsets(offsets, num_tokens, prefix, pairs), plain)
    assert pairs is not None or np.array_equal(plain, plain.transpose(0, 2, 1))
    assert plain[:, :prefix].all() and plain[:, :, :prefix].all()
    assert plain.any(-1).all()

    # Shuffling moves whole heads: head j of the layer has support number perm[j]. Random pairs stay with their head.
    order = list(range(num_heads))
    if pairs is None:
        random.Random(7 + layer).shuffle(order)
    assert np.array_equal(build_mask(support, **sizes, layer=layer, shuffle_seed=7), plain[order])


@pytest.mark.parametrize("support", CASES, ids=shown)
def test_supports_resolve_to_a_full_form_that_json_keeps(support):
    given_before = json.dumps(support)
    full = resolve_support(support, 6, 30, (5, 6))
    assert json.dumps(support) == given_before
    left_out = {"order", "redraw"} - support.keys()
    assert list(full) == ["name", *(key for key in support_settings(support["name"]) if key not in left_out)]
    assert all(full[key] == value for key, value in support.items() if key != "sequence")
    assert resolve_support(full, 6, 30, (5, 6)) == full
    assert resolve_support(json.loads(json.dumps(full)), 6, 30, (5, 6)) == full
    sizes = {"num_heads": 6, "num_tokens": 30, "grid": (5, 6)}
    assert head_offsets(full, **sizes) == head_offsets(support, **sizes)


def test_numpy_integers_and_booleans_resolve_to_what_json_knows():
    fibottention = {"w_min": np.int64(2), "w_max": np.int32(9), "modified": np.bool_(True), "shuffle_seed": np.int64(3)}
    window = {"w": np.int64(3), "diagonal": np.bool_(False)}
    for name, own in (("fibottention", fibottention), ("window", window)):
        full = resolve_support({"name": name, **own}, 4, 30)
        assert json.loads(json.dumps(full)) == full


@pytest.mark.parametrize("name", SUPPORTS)
def test_common_settings_belong_to_every_support(name):
    assert COMMON_SETTINGS.items() <= support_settings(name).items()
    assert resolve_support(name, 2, 9) == resolve_support({"name": name}, 2, 9)
    for mask_fill in MASK_FILLS:
        full = resolve_support({"name": name, "mask_fill": mask_fill, "shuffle_seed": None}, 2, 9)
        assert full["mask_fill"] == mask_fill


def test_no_support_is_dense():
    assert resolve_support(None, 2, 9) == resolve_support("dense", 2, 9)
    assert build_mask("dense", num_heads=2, num_tokens=5, num_prefix_tokens=1).all()


def test_every_sequence_is_a_setting_of_fibottention():
    shared = {"num_heads": 4, "num_tokens": 60, "w_min": 5, "w_max": 20}
    for name in SEQUENCES.keys() - {"wythoff"}:
        expected = head_offsets("fibottention", **shared, sequence=name)
        spec = {"name": name, **sequence_settings(name)}
        assert head_offsets("fibottention", **shared, sequence=spec) == expected
        for own, window in zip(expected, (5, 10, 15, 20), strict=True):
            assert all(1 <= o <= window for o in own), name


@checked
@given(st.integers(1, 12), st.integers(0, 40), st.integers(0, 40))
def test_layer_orders_are_permutations_of_a_seed_per_layer(num_heads, layer, seed):
    order = layer_order(num_heads, layer, seed)
    assert sorted(order) == list(range(num_heads))
    # A private generator with seed + layer: nothing else enters.
    assert order == layer_order(num_heads, 0, seed + layer) == layer_order(num_heads, layer, seed)
    assert layer_order(num_heads, layer, None) == list(range(num_heads))


def test_rows_with_an_empty_support_are_the_middle_ones():
    assert list(self_rows([4, 7], 6, 0)) == [2, 3]
    assert list(self_rows([], 3, 0)) == [0, 1, 2]
    assert list(self_rows([1], 1, 0)) == [0]
    assert not self_rows([4, 7], 6, 1)
    assert not self_rows([0], 6, 0)
    assert not self_rows([3], 6, 0)


def test_global_generators_are_left_alone(global_generators_left_alone):
    with global_generators_left_alone():
        for name in SUPPORTS:
            resolve_support({"name": name, "shuffle_seed": 5}, 12, 49)
            for layer in range(3):
                build_mask(name, num_heads=12, num_tokens=49, layer=layer, shuffle_seed=5)


def test_offsets_of_a_large_model_take_milliseconds():
    # ViT-L at 1024 px: 24 layers, 16 heads, 64x64 patches. Computing alone, best of several: the machine may be busy.
    support = resolve_support("fibottention", 16, 4096)
    times = []
    for _ in range(7):
        start = time.thread_time()
        for layer in range(24):
            layer_pattern(support, LayerKey(16, (64, 64), layer))
        times.append(time.thread_time() - start)
    assert min(times) < 0.05


# ---- notes ----------------------------------------------------------------------------------------------------------


def test_notes_name_clipped_windows_and_heads_without_offsets_once():
    support = resolve_support({"name": "fibottention", "w_min": 60, "w_max": 196}, 2, 49)
    notes = support_notes(support, LayerKey(2, (7, 7)), 1)
    assert any("w_min=60" in note and "49 patch tokens of the 7x7 grid" in note for note in notes)
    assert any("w_max=196" in note and "49 patch tokens" in note for note in notes)
    support = resolve_support({"name": "fibottention", "w_min": 3, "w_max": 3}, 4, 49)
    for prefix, partner in ((0, "themselves"), (1, "prefix tokens")):
        (note,) = support_notes(support, LayerKey(4, (7, 7)), prefix)
        assert "2, 3, 4 of 4" in note and partner in note
    for name in ("fibottention", "dense"):  # where all is well there are none
        assert support_notes(resolve_support(name, 12, 196), LayerKey(12, (14, 14)), 1) == []


# ---- errors ---------------------------------------------------------------------------------------------------------

OF_FIBOTTENTION = [
    ({"w_mx": 3}, "'fibottention' has no setting 'w_mx'.*mean 'w_max'.*w_min, w_max, modified"),
    ({"zzzz": 3}, "'fibottention' has no setting 'zzzz'.*w_min, w_max, modified"),
    ({"w_min": 0}, "w_min=0 must be an integer of 1 or more.*30 patch tokens"),
    ({"w_max": 2.5}, "w_max=2.5 must be an integer of 1 or more"),
    ({"w_max": "65"}, "w_max='65' must be an integer of 1 or more"),
    ({"w_max": True}, "w_max=True must be an integer of 1 or more"),
    ({"w_min": 9, "w_max": 8}, "w_min=9 must not be above w_max=8"),
    ({"w_min": 90, "w_max": 80}, "w_min=90 must not be above w_max=80"),
    ({"modified": 1}, "modified=1 must be True or False"),
    ({"modified": True, "sequence": "powers"}, "modified=True goes with sequence 'wythoff' only, not 'powers'"),
    ({"sequence": "lucas"}, "sequence='lucas' must be one of wythoff, fibonacci"),
    ({"sequence": None}, "sequence=None .*wythoff, fibonacci"),
    ({"shuffle_seed": -1}, "shuffle_seed=-1 must be an integer of 0 or more, or None"),
    ({"mask_fill": "inf"}, "mask_fill='inf' must be one of neg_inf, zero"),
]
REFUSED = [
    *(({"name": "fibottention", **settings}, message) for settings, message in OF_FIBOTTENTION),
    ("fibotention", "support='fibotention' must be one of dense, fibottention"),
    ({"w_min": 5}, "support.* one of dense, fibottention"),
    ({"name": None}, "support=None must be one of dense, fibottention"),
    ({"name": "dense", "w_max": 3}, "'dense' has no setting 'w_max'.*shuffle_seed, mask_fill"),
    ({"name": "window", "w": -1}, "w=-1 must be an integer of 0 or more"),
    ({"name": "window", "w": 0, "diagonal": False}, "w=0 must be an integer of 1 or more"),
    ({"name": "window", "diagonal": None}, "diagonal=None must be True or False"),
    (5, "support.*5"),
    (["fibottention"], "support.*fibottention"),
]


@each("support, message", REFUSED)
def test_wrong_settings_are_refused(support, message):
    with pytest.raises(ValueError, match=message):
        resolve_support(support, 4, 30)


def test_build_mask_and_head_offsets_check_their_arguments():
    for key, value in (("num_heads", 0), ("num_tokens", 0), ("num_prefix_tokens", -1), ("layer", -1)):
        with pytest.raises(ValueError, match=rf"{key}={value} must be an integer of"):
            build_mask("fibottention", **{"num_heads": 2, "num_tokens": 9, key: value})
    with pytest.raises(ValueError, match=r"no setting 'w_mx'.*mean 'w_max'"):
        build_mask("fibottention", num_heads=2, num_tokens=9, w_mx=9)
    for function in (build_mask, head_offsets):
        with pytest.raises(ValueError, match=r"support.* one of dense, fibottention"):
            function({"w_min": 5}, num_heads=2, num_tokens=9)


# ---- registration ---------------------------------------------------------------------------------------------------


def test_names_are_registered_once():
    before = dict(SUPPORTS)
    with pytest.raises(ValueError, match="support 'dense' is registered already"):
        register_support("dense")(lambda num_heads, num_tokens: [])
    assert before == SUPPORTS


def test_a_new_support_needs_one_function():
    try:

        @register_support("every_fourth")
        def every_fourth(num_heads, num_tokens, *, step=4):
            return [list(range(step, num_tokens + 10, step))] * num_heads

        full = resolve_support("every_fourth", 2, 10)
        assert full == {"name": "every_fourth", "step": 4, **COMMON_SETTINGS}
        # Offsets of N and more are dropped for it.
        assert head_offsets(full, num_heads=2, num_tokens=10) == [[4, 8], [4, 8]]
        assert np.array_equal(build_mask(full, num_heads=1, num_tokens=10)[0], brute_mask([4, 8], 10, 0))
    finally:
        SUPPORTS.pop("every_fourth", None)
