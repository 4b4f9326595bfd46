"""How supports and decays see the frames of a clip: per frame, as one grid in three dimensions, and along axes."""

import itertools
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
import torch

import hf_sparseprior as sp
from hf_sparseprior.attention.choice import BACKENDS, choose_backend
from hf_sparseprior.attention.functional import run_plan
from hf_sparseprior.attention.plan import AttentionPlan, plan_table
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.base.resolved import TIMES
from hf_sparseprior.patterns.curves import CLIP_CURVES, CURVES, curve_rank, register_curve
from hf_sparseprior.patterns.decay import DECAYS, Decay, make_decay, register_decay, resolve_decay
from hf_sparseprior.patterns.radial import radial_count, radial_pairs
from hf_sparseprior.patterns.supports import (
    LayerKey,
    build_mask,
    head_offsets,
    own_grid,
    resolve_support,
    support_notes,
)
from hf_sparseprior.priors.prior import parse_prior, prior_name, resolve_prior
from tests.each import each

HEADS, GRID = 3, (4, 3, 5)
TOKENS = 60
PLACES = [(t, r * 5 + c) for t, r, c in np.ndindex(*GRID)]  # frame, and number of the patch in it
FIBOTTENTION = {"name": "fibottention", "w_min": 2, "w_max": 9}
SUPPORTS = {
    "fibottention": FIBOTTENTION,
    "zero": {**FIBOTTENTION, "mask_fill": "zero"},
    "hilbert": {**FIBOTTENTION, "order": "hilbert"},
    "each": {**FIBOTTENTION, "order": ["snake", "raster", "peano_t"]},
    "window": {"name": "window", "w": 2, "shuffle_seed": None},
    "bigbird": {"name": "bigbird", "per_head": True},
}


def frame_mask(spec, layer):
    """What heads see in one frame; the prefix token keeps rows without a pair from seeing themselves."""
    return build_mask(spec, num_heads=HEADS, num_tokens=15, num_prefix_tokens=1, layer=layer, grid=GRID[1:])[:, 1:, 1:]


def expected_mask(spec, time, layer=1):
    mask = np.zeros((HEADS, TOKENS, TOKENS), dtype=bool)
    if time == "clip":
        orders = spec.get("order", "raster")
        for head, order in enumerate([orders] * HEADS if isinstance(orders, str) else orders):
            # The support of one order in raster order, with its patches put where the curve has them.
            plain = {key: value for key, value in spec.items() if key != "order"}
            own = build_mask(plain, num_heads=HEADS, num_tokens=TOKENS, num_prefix_tokens=1, layer=layer)[:, 1:, 1:]
            rank = np.arange(TOKENS) if order == "raster" else curve_rank(order, GRID).ravel()
            if isinstance(orders, str):
                return own[:, rank[:, None], rank[None]]
            for number, support in enumerate(layer_numbers(layer)):
                if support == head:
                    mask[number] = own[number][np.ix_(rank, rank)]
        return mask
    of_frame = frame_mask(spec, layer)
    plain = {key: value for key, value in spec.items() if key != "order"}
    offsets = head_offsets(plain, num_heads=HEADS, num_tokens=15)
    offsets = [offsets[number] for number in layer_numbers(layer, spec.get("shuffle_seed", 0))]
    for head, (j, (t, p)), (k, (s, q)) in itertools.product(range(HEADS), *[list(enumerate(PLACES))] * 2):
        if time == "frame":
            mask[head, j, k] = of_frame[head, p, q]
        else:
            along_time = p == q and t != s and abs(t - s) in offsets[head]
            mask[head, j, k] = (t == s and of_frame[head, p, q]) or along_time
    return mask


def layer_numbers(layer, seed=0):
    return sp.supports.layer_order(HEADS, layer, seed)


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("name", SUPPORTS)
def test_the_pairs_of_a_clip(name, time):
    expected, sizes = expected_mask(SUPPORTS[name], time), {"num_heads": HEADS, "num_tokens": TOKENS, "layer": 1}
    found = build_mask(SUPPORTS[name], **sizes, num_prefix_tokens=2, grid=GRID, time=time)
    assert found[:, :2].all() and found[:, :, :2].all()
    assert np.array_equal(found[:, 2:, 2:], expected)
    assert 0 < expected.mean() < 0.9
    other = build_mask(SUPPORTS[name], **sizes, num_prefix_tokens=1, grid=(1, 12, 5), time=time)
    image = build_mask(SUPPORTS[name], **sizes, num_prefix_tokens=1, grid=(12, 5))
    assert np.array_equal(other, image)  # a clip of one frame is an image


def test_modes_differ_and_patches_without_a_pair_see_themselves():
    for name in ("fibottention", "each", "bigbird"):
        masks = [expected_mask(SUPPORTS[name], time) for time in TIMES]
        assert not any(np.array_equal(*two) for two in itertools.combinations(masks, 2)), name
    sparse = {"name": "fibottention", "w_min": 1, "w_max": 4}
    for time in TIMES:
        rows = build_mask(sparse, num_heads=HEADS, num_tokens=TOKENS, grid=GRID, time=time).any(-1)
        assert rows.all()
    for time in ("frame", "axes"):
        spec = {"name": "window", "w": 1, "diagonal": False}
        lonely = build_mask(spec, num_heads=1, num_tokens=3, grid=(3, 1, 1), time=time)
        assert np.array_equal(lonely[0], np.eye(3, dtype=bool))


# ---- decays ---------------------------------------------------------------------------------------------------------

DECAY_SPECS = {
    "violin": {"name": "violin", "curves": ["hilbert", "peano_t", "zigzag"]},
    "manhattan": {"name": "manhattan", "with_transpose": True},
    "random_order": {"name": "random_order", "seed": 3},
    "learned_order": {"name": "learned_order", "start": "snake"},
}


def made_decay(name, time):
    """A decay away from where it changes nothing; a learned order is not its start any more."""
    torch.manual_seed(0)
    decay = make_decay(resolve_decay(DECAY_SPECS[name], own_grid(GRID, time)), HEADS).double()
    with torch.no_grad():
        decay.beta.uniform_(0.5, 3)
        decay.alpha.uniform_(0.5, 1.5)
        if name == "learned_order":
            decay.order.add_(torch.randn_like(decay.order))
    return decay


def expected_decay(name, time, decay):
    own = own_grid(GRID, time)
    count = int(np.prod(own))
    if name == "learned_order":
        positions = decay.order.detach().reshape(1, 1, count).numpy()
    elif name == "violin":
        positions = np.stack([curve_rank(curve, own).reshape(1, -1) for curve in DECAY_SPECS[name]["curves"]])
    elif name == "manhattan":
        positions = np.repeat(np.indices(own).reshape(1, len(own), -1), 2, 0)
    else:
        positions = DECAYS[name].positions(decay.settings, own)
        assert sorted(positions[0, 0]) == list(range(count)) and not np.array_equal(positions[0], positions[1])
    gamma = torch.sigmoid(decay.beta.detach()).numpy()
    mask = np.zeros((HEADS, TOKENS, TOKENS))
    for j, (t, p) in enumerate(PLACES):
        for k, (s, q) in enumerate(PLACES):
            first, second = (j, k) if time == "clip" else (p, q)
            distance = np.abs(positions[..., first] - positions[..., second]).sum(1)
            distance = distance + (abs(t - s) if time == "axes" else 0)
            mask[:, j, k] = (gamma ** distance[:, None]).mean(0)
    return torch.tensor(mask)


def inputs(total, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, HEADS, total, 4, dtype=torch.float64, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("name", DECAY_SPECS)
def test_the_decay_of_a_clip(name, time):
    decay = made_decay(name, time)
    q, k, v = inputs(TOKENS)
    expected = expected_decay(name, time, decay) * decay.alpha.detach().view(-1, 1, 1)
    for support in ({"name": "dense"}, SUPPORTS["fibottention"]):
        logits = (q @ k.mT) * 0.5 * expected
        if support["name"] != "dense":
            mask = build_mask(support, num_heads=HEADS, num_tokens=TOKENS, grid=GRID, time=time)
            logits = logits.masked_fill(~torch.tensor(mask), -torch.inf)
        found = sp.ops.attention(q, k, v, support, decay(), grid=GRID, time=time, backend="reference")
        torch.testing.assert_close(found, logits.softmax(-1) @ v, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("support", "decay", "time"),
    [
        (support, [None, "violin", "learned_order"][(i + j + shift) % 3], time)
        for i, support in enumerate(SUPPORTS)
        for j, time in enumerate(TIMES)
        for shift in ((0, 1) if support in ("fibottention", "each") else (0,))
    ],
)
def test_every_backend_agrees_over_a_clip(support, decay, time):
    made = None if decay is None else made_decay(decay, time).float()
    tried, results = [], {}
    for backend in BACKENDS:
        leaves = [tensor.float().requires_grad_() for tensor in inputs(TOKENS + 1)]
        settings = {"num_prefix_tokens": 1, "layer": 1, "grid": GRID, "time": time, "backend": backend}
        try:
            out = sp.ops.attention(*leaves, SUPPORTS[support], None if made is None else made(), **settings)
        except ValueError as error:
            assert f"backend={backend!r} cannot run this attention" in str(error)
            continue
        parameters = [] if made is None else [made.beta, made.alpha]
        results[backend] = [out.detach(), *torch.autograd.grad(out.square().sum(), [*leaves, *parameters])]
        tried.append(backend)
    others = {"sdpa"} if decay is None else set()  # whatever the pairs
    others |= {"diagonal"} if time == "clip" and support != "bigbird" else {"gather"}
    others |= {"frames"} if time == "frame" else set()
    assert {"reference"} | (others if support != "zero" else set()) <= set(tried), tried
    for backend in tried[1:]:
        for own, expected in zip(results[backend], results["reference"], strict=True):
            scale = expected.abs().max().clamp_min(1.0).item()
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5 * scale)


def test_offsets_over_several_frames_are_no_diagonals():
    """Over all patches they are, and the kernels along diagonals run: test_every_backend_agrees_over_a_clip."""
    qkv = [tensor.float() for tensor in inputs(TOKENS)]
    for time in ("frame", "axes"):
        with pytest.raises(ValueError, match="has pairs off its diagonals"):
            sp.ops.attention(*qkv, SUPPORTS["hilbert"], grid=GRID, time=time, backend="diagonal")


def test_a_plan_is_made_again_from_its_key():
    for time in TIMES:
        decay = resolve_decay("violin", own_grid(GRID, time))
        support = resolve_support(SUPPORTS["fibottention"], HEADS, int(np.prod(own_grid(GRID, time))))
        plan = AttentionPlan(LayerKey(HEADS, GRID, 1, time=time), 1, support, decay)
        again = AttentionPlan.from_key(plan.key)
        for table in ("mask", "positions", "keys"):
            assert plan_table(plan, table, torch.device("cpu")).equal(plan_table(again, table, torch.device("cpu")))


def test_pairs_along_axes_take_no_table_of_all_pairs():
    support = resolve_support({"name": "fibottention", "w_min": 5, "w_max": 65}, 4, 196, (14, 14))
    tracemalloc.start()
    plan = AttentionPlan(LayerKey(4, (48, 14, 14), time="axes"), 1, support)
    assert plan.build_table("keys").shape[:2] == (4, 9408)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 9408**2 / 2  # a mask of booleans of one head has twice as many bytes


@pytest.mark.parametrize(
    ("name", "prefix"), [*((name, (0, 1, 7)[i % 3]) for i, name in enumerate(SUPPORTS)), ("bigbird", 0), ("each", 7)]
)
def test_what_is_made_of_one_frame_is_that_of_all(name, prefix):
    """Lists of keys, the share of pairs, and attention with them, where some places see no other."""
    lonely = {"name": "fibottention", "w_min": 8, "w_max": 9}
    for spec in (SUPPORTS[name], lonely):
        support = resolve_support(spec, HEADS, 15, GRID[1:])
        plan = AttentionPlan(LayerKey(HEADS, GRID, 1), prefix, support)
        mask = plan.build_table("mask")
        assert plan.repeats_frame and plan.density == pytest.approx(mask.mean(), rel=1e-12)
        lists = plan.build_table("keys")
        expected = [[np.flatnonzero(row).tolist() for row in own[prefix:]] for own in mask]
        assert [[row[row >= 0].tolist() for row in own] for own in lists] == expected
        assert ((lists[..., 1:] < 0) | (lists[..., :-1] >= 0)).all()  # -1 stands after the last
        if spec.get("mask_fill") == "zero":
            continue
        leaves = [tensor.requires_grad_() for tensor in inputs(TOKENS + prefix)]
        request = AttentionRequest(*leaves, plan)
        found, expected = (run_plan(request, backend)[0] for backend in ("frames", "reference"))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        gradients = [torch.autograd.grad(out.square().sum(), leaves) for out in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-9)


def test_second_derivatives_of_what_is_made_of_one_frame():
    found = []
    for backend in ("reference", "frames"):
        made = made_decay("violin", "frame")
        leaves = [tensor.requires_grad_() for tensor in inputs(TOKENS + 1)] + [made.beta, made.alpha]
        settings = {"num_prefix_tokens": 1, "layer": 1, "grid": GRID, "backend": backend}
        out = sp.ops.attention(*leaves[:3], SUPPORTS["each"], made(), **settings)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(one.square().sum() for one in first), leaves))
    torch.testing.assert_close(found[1], found[0], rtol=1e-7, atol=1e-9)


def test_one_frame_of_a_clip_is_listed_in_a_compiled_graph(monkeypatch):
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", "frames")
    torch.manual_seed(0)
    config = sp.SparsePriorTimesformerConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=16, image_size=24, patch_size=8,
        num_frames=3, attention_type="joint_space_time", prior={"support": "bigbird", "decay": "violin"},
    )  # fmt: skip
    model, pixels = sp.SparsePriorTimesformerModel(config), torch.randn(1, 3, 3, 24, 24)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    outputs = [one(pixels).last_hidden_state for one in (model, compiled)]
    torch.testing.assert_close(*outputs)
    gradients = [
        torch.autograd.grad(out.square().sum(), list(model.parameters()), allow_unused=True) for out in outputs
    ]
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)


def test_one_frame_of_a_long_clip_is_listed():
    """96 frames of 14x14 patches: lists of their keys would take 0.65 GiB a layer, of pairs 2, a mask 4."""
    config = {"name": "fibottention", "w_min": 5, "w_max": 65}
    support = resolve_support(config, 12, 196, (14, 14))
    tracemalloc.start()
    plan = AttentionPlan(LayerKey(12, (96, 14, 14)), 1, support)
    q = torch.zeros(1, 12, 18817, 1)
    assert choose_backend(AttentionRequest(q, q, q, plan)) == "frames"
    rows = plan.build_table("frame_keys")
    assert tracemalloc.get_traced_memory()[1] < 20e6 and rows.shape[:2] == (12, 196)
    tracemalloc.stop()
    assert plan.list_bytes > 2**29 and 0.01 < plan.density < 0.03
    assert "would take 0.65 GiB" in BACKENDS["gather"].can_run(AttentionRequest(q, q, q, plan))


def test_what_would_not_fit_is_refused_with_its_size(monkeypatch):
    support = resolve_support({"name": "fibottention", "w_min": 5, "w_max": 65}, 12, 196, (14, 14))
    plan = AttentionPlan(LayerKey(12, (96, 14, 14)), 1, support)
    refused = "GiB in each layer .offsets with time='clip' need none.: [0-9]+ bytes must be at most 1073741824; the env"
    with pytest.raises(ValueError, match=f"^a mask of all pairs over 96x14x14 patches would take 3.96 {refused}"):
        plan.build_table("mask")
    with pytest.raises(ValueError, match=f"lists of up to [0-9]+ pairs a head take 1.[0-9]+ {refused}"):
        plan.pairs  # noqa: B018
    longer = AttentionPlan(LayerKey(12, (160, 14, 14)), 1, support)
    with pytest.raises(ValueError, match=f"lists of the keys of 31360 patches would take 1.[0-9]+ {refused}"):
        longer.build_table("keys")
    with pytest.raises(ValueError, match=f"^prior: support 'radial' over 96x14x14 patches: lists of .* {refused}"):
        resolve_prior("radial", 12, (96, 14, 14))
    monkeypatch.setenv("SPARSEPRIOR_MAX_TABLE_BYTES", "100000")
    with pytest.raises(ValueError, match="at most 100000; the environment variable SPARSEPRIOR_MAX_TABLE_BYTES"):
        resolve_prior("radial", HEADS, (8, 14, 14))


def test_a_decay_counts_in_what_would_not_fit(monkeypatch):
    """M at the listed pairs, and in training what it is made of: two numbers for each curve."""
    support = resolve_support(SUPPORTS["fibottention"], HEADS, 15, GRID[1:])
    q, k, v = (tensor.float() for tensor in inputs(TOKENS))
    made = make_decay(resolve_decay(DECAY_SPECS["violin"], GRID[1:]), HEADS)
    plan = AttentionPlan(LayerKey(HEADS, GRID, 1), 0, support, made.settings)
    request = AttentionRequest(q, k, v, plan, made())
    monkeypatch.setattr("hf_sparseprior.attention.gather.LONGEST", 7 * plan.list_bytes)
    assert "would take 0.00 GiB" in BACKENDS["gather"].can_run(request)  # 8 times the lists, of 3 curves
    with torch.no_grad():
        assert BACKENDS["gather"].can_run(request) is None
    assert BACKENDS["frames"].can_run(request) is None
    monkeypatch.setenv("SPARSEPRIOR_MAX_TABLE_BYTES", str(7 * plan.list_bytes))
    monkeypatch.setattr("hf_sparseprior.attention.gather.LONGEST", 2**40)
    with pytest.raises(ValueError, match=r"^a decay at the listed pairs of 60 patches would take .* must be at most"):
        run_plan(request, "gather")
    with torch.no_grad():
        run_plan(request, "gather")
    run_plan(request, "frames")


def test_radial_pairs_are_counted_before_they_are_listed():
    sizes = ((1, 6), (2, 5), (9, 4), (17, 3))
    for (frames, patches), factor, first_frame in itertools.product(sizes, (1.0, 0.3, 0.05), (True, False)):
        listed = radial_pairs(frames, patches, factor, first_frame)
        assert radial_count(frames, patches, factor, first_frame) == len(listed) == len(np.unique(listed, axis=0))


# ---- radial attention -----------------------------------------------------------------------------------------------


def radial_sees(query, key, patches, factor, first_frame):
    """The mask of Radial Attention for patch k of frame i and patch m of frame j, from the paper's formula."""
    (i, k), (j, m) = query, key
    band = 2 ** int(np.floor(np.log2(max(abs(i - j), 1))))
    width = Fraction(patches, band) * (factor if i != j else 1)
    if first_frame and j == 0:
        return True
    if width >= 1:
        return abs(k - m) + 1 <= width
    return k == m and abs(i - j) % int(np.ceil(1 / width)) == 0


@each(
    "grid, factor, first_frame",
    [
        *itertools.product([(9, 1, 2), (17, 1, 3)], [1, Fraction(1, 2), Fraction(1, 8)], [True, False]),
        *(((6, 2, 3), 1, True), ((6, 2, 3), Fraction(1, 2), False), ((1, 3, 5), Fraction(1, 8), False)),
    ],
)
def test_radial_attention_thins_out_with_the_distance_in_time(grid, factor, first_frame):
    spec = {"name": "radial", "decay_factor": float(factor), "first_frame": first_frame}
    frames, patches = grid[0], grid[1] * grid[2]
    places = list(itertools.product(range(frames), range(patches)))
    expected = [[radial_sees(query, key, patches, factor, first_frame) for key in places] for query in places]
    found = build_mask(spec, num_heads=2, num_tokens=len(places), grid=grid, time="clip")
    assert np.array_equal(found, [expected, expected])
    if frames > 6 and not first_frame:
        shares = found[0, 0].reshape(frames, patches).mean(1)  # of the first patch, by the distance of the frame
        assert shares[0] == 1 and shares[-1] < 1 and found.mean() < 0.8


def test_radial_attention_needs_no_word_about_time():
    prior = resolve_prior("radial+violin", HEADS, GRID)
    assert prior["time"] == "clip" and prior_name(prior) == "radial+violin"
    assert resolve_prior(prior, HEADS, GRID) == prior
    for time in ("frame", "axes"):
        with pytest.raises(ValueError, match=f"support 'radial' goes by distances in time; with it time='{time}' must"):
            resolve_prior(f"radial+{time}", HEADS, GRID)
    for value in (0, -1, 1.5, "1", True, float("nan")):
        with pytest.raises(ValueError, match="decay_factor="):
            resolve_prior({"support": {"name": "radial", "decay_factor": value}}, HEADS, GRID)
    image = resolve_support("radial", HEADS, 15, (3, 5))
    [note] = support_notes(image, LayerKey(3, (3, 5)), 1)
    assert "is a single frame, in which all pairs are kept" in note
    assert not support_notes(image, LayerKey(3, GRID, time="clip"), 1)


# ---- priors ---------------------------------------------------------------------------------------------------------


def test_how_a_prior_says_it():
    clip = resolve_prior("violin+clip", HEADS, GRID)
    assert clip["time"] == "clip" and clip == resolve_prior({"decay": "violin", "time": "clip"}, HEADS, GRID)
    assert prior_name(clip) == "violin+clip" and resolve_prior(clip, HEADS, GRID) == clip
    for prior in ("violin", "violin+frame", {"decay": "violin", "time": None}):
        assert resolve_prior(prior, HEADS, GRID) == resolve_prior("violin", HEADS, GRID[1:])
        assert "time" not in resolve_prior(prior, HEADS, GRID)
    assert prior_name(resolve_prior("fibottention+violin+axes", HEADS, GRID)) == "fibottention+violin+axes"
    assert parse_prior("topk+violin+clip")["time"] == "clip"
    learned = resolve_prior("learned_order+clip", HEADS, GRID)["decay"]
    assert learned["grid"] == list(GRID) and resolve_prior("learned_order", HEADS, GRID)["decay"]["grid"] == [3, 5]


REFUSED = {
    "time='cilp' must be one of frame, clip, axes": {"decay": "violin", "time": "cilp"},
    "time=3 must be one of": {"decay": "violin", "time": 3},
    "says twice how it sees time, 'clip' and 'axes'": "violin+clip+axes",
    "'clips' is no prior; did you mean 'clip'?": "violin+clips",
    "time='clip' is how support and decay see time, and 'dense' has neither": "clip",
    "time='axes' is how support and decay see time, and 'linformer' has neither": "linformer+axes",
    "support 'random' has no offsets, so time='axes' would leave frames apart": "random+axes",
    "'swin_rpb' is of places in one image": "violin+swin_rpb",
    r"learned_order: grid=\[3, 5\] must be \(frames, height, width\)": {
        "decay": {"name": "learned_order", "grid": [3, 5]},
        "time": "clip",
    },
    r"learned_order: grid=\[4, 3, 5\] must be \(height, width\)": {
        "decay": {"name": "learned_order", "grid": [4, 3, 5]},
    },
    r"linformer: grid=\[3, 5\] must be \[12, 5\], the frames one below the other": {
        "mixer": {"name": "linformer", "grid": [3, 5]}
    },
}


@each("message", REFUSED)
def test_what_has_no_meaning_is_refused_by_name(message):
    with pytest.raises(ValueError, match=message):
        resolve_prior(REFUSED[message], HEADS, GRID)


def test_an_image_has_no_time():
    for prior in ("violin+clip", {"support": "fibottention", "time": "axes"}):
        with pytest.raises(ValueError, match="is for attention over the frames of a clip; here it sees one image or"):
            sp.SparsePriorViTConfig(prior=prior)
    with pytest.raises(ValueError, match="time='clips' must be one of frame, clip, axes"):
        sp.ops.attention(*inputs(TOKENS), "fibottention", grid=GRID, time="clips")
    forms = r"\(height, width\) or \(frames, height, width\)"
    with pytest.raises(ValueError, match=rf"grid=\(4, 3, 6\) must be {forms} with 60 patch tokens"):
        sp.ops.attention(*inputs(TOKENS), "fibottention", grid=(4, 3, 6))


def test_what_knows_two_dimensions_alone_says_so():
    try:
        register_curve("toy_curve")(lambda height, width: np.arange(height * width).reshape(height, width))

        @register_decay("toy_columns")
        class ToyColumns(Decay):
            """Columns apart."""

            @classmethod
            def positions(cls, settings, grid):
                """Columns."""
                return np.indices(grid)[1].reshape(1, 1, -1)

        with pytest.raises(ValueError, match="decay 'toy_columns' measures in two dimensions; with it time must be"):
            resolve_prior("toy_columns+clip", HEADS, GRID)
        for prior in (
            {"decay": {"name": "violin", "curves": ["toy_curve"]}, "time": "clip"},
            {"support": {"name": "fibottention", "order": "toy_curve"}, "time": "clip"},
        ):
            with pytest.raises(ValueError, match=f"curve='toy_curve' .* must be one of {', '.join(CLIP_CURVES)}"):
                resolve_prior(prior, HEADS, GRID)
            assert resolve_prior({**prior, "time": "axes"}, HEADS, GRID)["time"] == "axes"
        for time in ("frame", "axes"):
            plan = AttentionPlan(
                LayerKey(HEADS, GRID, time=time), 0, resolve_support(None, HEADS, 15), resolve_decay("toy_columns")
            )
            assert plan.build_table("positions").shape == (1, 1 + (time == "axes"), TOKENS)
    finally:
        CURVES.pop("toy_curve", None)
        DECAYS.pop("toy_columns", None)


def test_notes_name_heads_that_see_no_other_frame():
    support = resolve_support({"name": "fibottention", "w_min": 2, "w_max": 9}, HEADS, 15, (3, 5))
    notes = support_notes(support, LayerKey(HEADS, GRID, time="axes"), 1)
    assert any("supports 2, 3 of 3 have no offset below the 4 frames" in note for note in notes)
    assert not any("frames" in note for note in support_notes(support, LayerKey(HEADS, GRID), 1))
