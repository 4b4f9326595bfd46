import copy
import itertools
import json
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hf_sparseprior.attention import functional as ops
from hf_sparseprior.patterns.curves import curve_names, curve_rank
from hf_sparseprior.patterns.decay import (
    DECAYS,
    INIT_KEYS,
    INIT_PRESETS,
    Decay,
    decay_mask,
    decay_weights,
    gated_beta,
    init_values,
    log_gamma,
    make_decay,
    offset_distances,
    pair_distances,
    prefix_weights,
    register_decay,
    resolve_decay,
)
from tests.each import each

GRIDS = [(1, 1), (1, 5), (3, 4), (4, 4), (7, 5)]


def make(name, num_heads=3, seed=0, **settings):
    torch.manual_seed(seed)
    if "grid" in DECAYS[name].SETTINGS:
        settings.setdefault("grid", [2, 3])
    return make_decay(resolve_decay({"name": name, **settings}), num_heads)


def positions(name, grid, **settings):
    return torch.tensor(DECAYS[name].positions(resolve_decay({"name": name, **settings}), grid))


def brute_distances(name, settings, grid):
    # Distance of every pair of patches along every curve, from the definitions: (C, N, N) as nested lists.
    patches = [(row, column) for row in range(grid[0]) for column in range(grid[1])]
    if name == "manhattan":
        return [[[abs(r - s) + abs(c - d) for s, d in patches] for r, c in patches]]
    if name == "violin":
        ranks = [curve_rank(curve, grid) for curve in settings["curves"]]
        return [[[abs(int(rank[j]) - int(rank[k])) for k in patches] for j in patches] for rank in ranks]
    # A decay without a definition here: distances of its own positions, summed over the axes.
    own = DECAYS[name].positions(settings, grid)
    return np.abs(own[..., :, None] - own[..., None, :]).sum(1).tolist()


def brute_mask(name, settings, grid, beta):
    # M = mean over curves of sigmoid(beta_c) ** distance (VIOLIN Eqs. 11 and 12), Python floats throughout.
    distances = brute_distances(name, settings, grid)
    num_tokens, num_heads = grid[0] * grid[1], len(beta[0])
    gammas = [[1 / (1 + math.exp(-value)) for value in row] for row in beta]
    return torch.tensor(
        [
            [
                [
                    sum(gamma[head] ** d[j][k] for gamma, d in zip(gammas, distances, strict=True)) / len(gammas)
                    for k in range(num_tokens)
                ]
                for j in range(num_tokens)
            ]
            for head in range(num_heads)
        ],
        dtype=torch.float64,
    )


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DECAYS)
def test_the_mask_matches_the_definition(name):
    """And offset distances are the diagonals of all distances."""
    decay = make(name, init={"alpha_mean": 1, "alpha_std": 0, "beta_low": -2, "beta_high": 6}).double()
    for grid in GRIDS:
        own = positions(name, grid)
        mask = decay_mask(decay(), own, torch.float64)
        expected = brute_mask(name, decay.settings, grid, decay.beta.tolist())
        torch.testing.assert_close(mask, expected, rtol=1e-12, atol=1e-15)
        assert torch.equal(mask, mask.transpose(1, 2))
        assert (mask.diagonal(dim1=1, dim2=2) == 1).all()
        everything = pair_distances(own, torch.float32)
        for offset in range(grid[0] * grid[1]):
            assert torch.equal(offset_distances(own, offset).float(), everything.diagonal(offset, 1, 2))


@each("curve", curve_names())
def test_consecutive_ranks_give_gamma(curve):
    grid, gamma = (4, 5), 0.75
    beta = torch.tensor([[math.log(gamma / (1 - gamma))]], dtype=torch.float64)
    mask = decay_mask({"beta": beta}, positions("violin", grid, curves=[curve]), torch.float64)[0]
    order = np.argsort(curve_rank(curve, grid), axis=None)  # patches in the order in which the curve visits them
    along = mask[order][:, order]
    expected = gamma ** (torch.arange(20)[:, None] - torch.arange(20)[None]).abs().double()  # VIOLIN Eq. 26
    torch.testing.assert_close(along, expected, rtol=1e-12, atol=0)
    assert along.diagonal(1).tolist() == pytest.approx([gamma] * 19)


def test_several_curves_are_averaged():
    curves = ["snake", "hilbert_t", "peano"]
    beta = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    together = decay_mask({"beta": beta}, positions("violin", (4, 4), curves=curves), torch.float64)
    alone = [
        decay_mask({"beta": beta[i : i + 1]}, positions("violin", (4, 4), curves=[curve]), torch.float64)
        for i, curve in enumerate(curves)
    ]
    torch.testing.assert_close(together, torch.stack(alone).mean(0), rtol=1e-13, atol=0)


def test_manhattan_is_one_gamma_a_head():
    decay = make("manhattan", num_heads=5)
    assert decay.beta.shape == (1, 5)
    assert positions("manhattan", (2, 3)).tolist() == [[[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]]


# ---- precision ------------------------------------------------------------------------------------------------------


@each("beta", [15.0, 17.0, 18.0, 20.0])
def test_gradient_of_beta_does_not_vanish_in_float32(beta):
    # sigmoid(beta) ** d is 1 with a zero gradient here; d/dbeta gamma^d = d gamma^d (1 - gamma).
    parameter = torch.full((1, 1), beta, requires_grad=True)
    distance = torch.arange(1, 196)[None]
    weights = decay_weights(parameter, distance, torch.float32)
    weights.sum().backward()
    one_minus_gamma = 1 / (1 + math.exp(beta))
    expected = sum(d * math.exp(d * math.log1p(-one_minus_gamma)) * one_minus_gamma for d in range(1, 196))
    assert parameter.grad.item() == pytest.approx(expected, rel=1e-5)
    assert expected > 0


@each("beta", [15.0, 18.0, 20.0])
def test_gradient_of_the_prefix_scalar_does_not_vanish_in_float32(beta):
    parameter = torch.full((3,), beta, requires_grad=True)
    prefix_weights({"prefix_beta": parameter}, torch.float32).sum().backward()
    # d/dbeta sigmoid(beta) = sigmoid(beta) sigmoid(-beta), and sigmoid(beta) is 1 to seven digits here.
    assert parameter.grad.tolist() == pytest.approx([1 / (1 + math.exp(beta))] * 3, rel=1e-4)


@each("beta", [2.0, 8.0, 16.0])
def test_the_mask_is_accurate_in_float32(beta):
    distance = torch.arange(200)[None]
    weights = decay_weights(torch.full((1, 1), beta), distance, torch.float32)[0]
    assert weights.dtype == torch.float32
    exact = [math.exp(-d * math.log1p(math.exp(-beta))) for d in range(200)]
    torch.testing.assert_close(weights.double(), torch.tensor(exact, dtype=torch.float64), rtol=3e-5, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_mask_is_computed_above_half_precision(dtype):
    # In bfloat16 sigmoid(7.3) is 1 and distances above 256 are rounded. Here only the result is, by half a unit in the
    # last place of numbers between 1/2 and 1.
    beta, distance = torch.full((1, 1), 7.3), torch.arange(1, 900)[None]
    weights = decay_weights(beta, distance, dtype)
    assert weights.dtype == dtype
    exact = torch.exp(distance.double() * F.logsigmoid(beta.double()))
    assert exact.min() > 0.5
    assert (weights.double() - exact).abs().max() <= 1.01 * torch.finfo(dtype).eps / 4


@pytest.mark.parametrize("name", DECAYS)
def test_float64_inputs_get_a_float64_mask_from_float32_scalars(name):
    decay = make(name, init="moving")
    mask = decay_mask(decay(), positions(name, (4, 5)), torch.float64)
    assert mask.dtype == torch.float64
    expected = brute_mask(name, decay.settings, (4, 5), decay.beta.double().tolist())
    torch.testing.assert_close(mask, expected, rtol=1e-12, atol=0)


def test_float64_inputs_get_float64_prefix_weights_from_float32_scalars():
    prefix = prefix_weights({"prefix_beta": torch.tensor([1.5, -2.0])}, torch.float64)
    expected = torch.tensor([1 / (1 + math.exp(-1.5)), 1 / (1 + math.exp(2))], dtype=torch.float64)
    torch.testing.assert_close(prefix, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", DECAYS)
def test_a_large_beta_gives_a_mask_of_ones(name):
    decay = make(name, init={"alpha_mean": 1, "alpha_std": 0, "beta_low": 200, "beta_high": 200})
    for dtype in (torch.float32, torch.float64):
        assert (decay_mask(decay(), positions(name, (14, 14)), dtype) == 1).all()


CASTS = [
    *(lambda m: m.to(torch.bfloat16), lambda m: m.to("cpu", torch.bfloat16), lambda m: m.half()),
    *(lambda m: m.bfloat16(), lambda m: m.double().half()),
]


@pytest.mark.parametrize("name", DECAYS)
@each("learn, cast", itertools.product([True, False], CASTS))
def test_scalars_stay_in_float32_when_a_model_is_cast_to_half_precision(name, learn, cast):
    # learn=False: beta is a buffer, which `to` treats in another way than parameters.
    decay = make(name, learn_alpha=learn, learn_beta=learn, learn_prefix=True, init="finetune")
    before = copy.deepcopy(decay.state_dict())
    model = cast(torch.nn.Sequential(torch.nn.Linear(2, 2), decay))
    assert model[0].weight.dtype in (torch.float16, torch.bfloat16)
    after = model[1].state_dict()
    assert list(after) == list(before)
    for key, value in after.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[key]), key
    assert (model[1].alpha is not None) == learn
    model[1]()["beta"].sum()


@pytest.mark.parametrize("name", DECAYS)
def test_scalars_follow_a_model_to_float64_and_back(name):
    decay = make(name, learn_prefix=True, init="finetune")
    before = copy.deepcopy(decay.state_dict())
    assert {value.dtype for value in decay.double().state_dict().values()} == {torch.float64}
    after = decay.float().state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_gradients_survive_a_cast():
    decay = make("violin")
    decay_mask(decay(), positions("violin", (3, 3)), torch.float32).sum().backward()
    before = decay.beta.grad.clone()
    decay.to(torch.bfloat16)
    assert decay.beta.grad.dtype == torch.float32
    assert torch.equal(decay.beta.grad, before)


@pytest.fixture
def default_dtype():
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_scalars_are_drawn_in_full_precision_whatever_the_default_dtype(default_dtype, default):
    # Loading a model in bfloat16 makes that the default dtype while modules are built: alpha would come in steps of
    # 1 / 128 and beta in steps of 1 / 8.
    default_dtype(default)
    decay = make("violin", num_heads=12, init="finetune")
    expected = torch.float64 if default == torch.float64 else torch.float32
    for value in (decay.alpha, decay.beta):
        assert value.dtype == expected
        assert not torch.equal(value, value.to(torch.bfloat16).to(expected))
        assert not torch.equal(value, value.to(torch.float16).to(expected))


# ---- initial values -------------------------------------------------------------------------------------------------

# alpha's mean and deviation, beta's interval and the deviation of what is added to it: VIOLIN D.1 for the first, second
# and fourth, the authors' models_violin.py for those called published.
PRESETS = {
    "pretrain": (1, 0, 5, 9, 0),
    "pretrain_gamma": (1, 0, 4, 8.5, 0),
    "pretrain_published": (0, 0.5, 5, 9, 0),
    "finetune": (1, 0.02, 15, 20, 0),
    "moving": (1, 0, 6, 8, 0),
    "identity": (1, 0, 20, 20, 0),
    "growing": (1, 0, 6, 8, 0),
    "zeros": (1, 0, 0, 0, 0),
    "zeros_published": (0, 0.5, 0, 0, 0.5),
}


@pytest.mark.parametrize(
    ("preset", "name"), [(preset, [*DECAYS][i % len(DECAYS)]) for i, preset in enumerate(INIT_PRESETS)]
)
def test_presets_draw_from_their_ranges(preset, name):
    mean, std, low, high, added = INIT_PRESETS[preset]
    assert (mean, std, low, high, added) == PRESETS.get(preset, INIT_PRESETS[preset])
    decay = make(name, num_heads=1000, init=preset)
    assert decay.beta.mean().item() == pytest.approx((low + high) / 2, abs=0.2)
    if added:
        assert decay.beta.std().item() == pytest.approx(math.hypot(added, (high - low) / math.sqrt(12)), rel=0.1)
    else:
        assert decay.beta.min() >= low and decay.beta.max() <= high
        assert decay.beta.min() - low <= 0.05 * (high - low) >= high - decay.beta.max()
    assert decay.alpha.mean().item() == pytest.approx(mean, abs=0.1 * std)
    assert decay.alpha.std().item() == pytest.approx(std, rel=0.1)
    # Each head and curve has its own draw.
    assert len(set(decay.beta.flatten().tolist())) > 900 or (low == high and not added)


def test_gamma_of_the_pretraining_presets():
    for preset, gammas in (("pretrain", ("0.9933", "0.9999")), ("pretrain_gamma", ("0.9820", "0.9998"))):
        _, _, low, high, _ = init_values(preset)
        assert tuple(f"{1 / (1 + math.exp(-beta)):.4f}" for beta in (low, high)) == gammas


@each(
    "preset, least, most",
    [("identity", 0, 1e-5), ("growing", 1e-8, 1e-6), ("finetune", 0, 1e-4), ("moving", 0.05, 1), ("pretrain", 0.05, 1)],
)
def test_how_far_presets_start_from_the_base_model(preset, least, most):
    decay = make("violin", num_heads=12, init=preset)
    change = (decay_mask(decay(), positions("violin", (14, 14)), torch.float32) - 1).abs().max()
    assert least <= change <= most


@each("gate", [1e-6, -1e-6, 1e-3, 0.3, 1.0, -5.0, 50.0])
@pytest.mark.parametrize("dtype, exact", [(torch.float32, 3e-6), (torch.float64, 3e-9)])
def test_a_gate_is_a_power_of_gamma(gate, dtype, exact):
    """gamma^|gate| in numbers of 60 digits."""
    betas = [-5.0, 0.0, 3.0, 7.0, 15.0]
    found = log_gamma(gated_beta(torch.tensor([betas], dtype=dtype), torch.full((5,), gate, dtype=dtype)))[0]
    with localcontext(prec=60):
        wanted = [-abs(Decimal(gate)) * (1 + (-Decimal(beta)).exp()).ln() for beta in betas]
    assert found.tolist() == pytest.approx([float(value) for value in wanted], rel=exact)


@each("name", DECAYS)
def test_the_gate_of_a_growing_decay_scales_log_gamma_and_learns(name):
    plain, growing = make(name, init="moving", seed=1), make(name, init="growing", seed=1)
    assert torch.equal(plain.beta, growing.beta)
    where, change = positions(name, (6, 6)), []
    for gate in (1e-6, 1.0):
        growing.gate.data.fill_(gate)
        mask = decay_mask(growing(), where, torch.float64)
        change.append((mask - 1).abs().max().item())
        gradient = torch.autograd.grad(mask.sum(), [growing.gate, growing.beta])
        assert all(one.isfinite().all() for one in gradient)
        # d gamma^(g d) / d g = d log(gamma) gamma^(g d), the mean over curves, which is finite and below 0 at g = 0.
        distance = pair_distances(where, torch.float64)
        rates = F.logsigmoid(growing.beta.double())  # (C, H)
        powers = distance[:, None] * rates[:, :, None, None]
        wanted = (powers * torch.exp(gate * powers)).mean(0).sum((1, 2))
        torch.testing.assert_close(gradient[0].double(), wanted, rtol=1e-4, atol=0)
    assert change[0] < 1e-6
    torch.testing.assert_close(decay_mask(plain(), where, torch.float64), mask, rtol=1e-5, atol=1e-6)


def test_a_growing_decay_is_on_cpu_kernels_and_reference_the_same():
    growing = make("violin", init="growing", learn_prefix=True)
    growing.gate.data.copy_(torch.tensor([0.5, -40.0, 1e-6])[: len(growing.gate)])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, len(growing.gate), 37, 8, generator=generator) for _ in range(3))
    found = {}
    for backend in ("reference", "auto"):
        growing.zero_grad()
        out = ops.attention(
            q, k, v, support="fibottention", decay=growing(), num_prefix_tokens=1, grid=(6, 6), backend=backend
        )
        out.square().sum().backward()
        found[backend] = [out.detach(), *(parameter.grad.clone() for parameter in growing.parameters())]
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@each(
    "settings, message",
    [({"gamma": 0.9}, "gamma=None, got True and 0.9"), ({"learn_beta": False}, "learn_beta=True and gamma=None, got")],
)
def test_growing_is_refused_where_gamma_is_fixed(settings, message):
    with pytest.raises(ValueError, match=message):
        resolve_decay({"name": "violin", "init": "growing", **settings})


@each("preset", INIT_PRESETS)
def test_the_prefix_scalar_starts_no_further_from_the_base_model_than_the_others(preset):
    low = INIT_PRESETS[preset].beta_low - 5 * INIT_PRESETS[preset].beta_std
    decay = make("violin", num_heads=100, learn_prefix=True, init=preset)
    assert decay.prefix_beta.shape == (100,)
    assert decay.prefix_beta.min() >= low
    assert (prefix_weights(decay(), torch.float32) - 1).abs().max() <= 1 / (1 + math.exp(low)) + 1e-7


def test_prefix_rows_and_columns_are_1_unless_learned():
    assert prefix_weights(make("violin")(), torch.float32) is None


def test_init_may_be_given_in_numbers():
    numbers = {"alpha_mean": 2, "alpha_std": 0, "beta_low": -1, "beta_high": -1}
    assert init_values(numbers) == (2.0, 0.0, -1.0, -1.0, 0.0)
    assert init_values({**numbers, "beta_std": 0.5}) == (2.0, 0.0, -1.0, -1.0, 0.5)
    decay = make("manhattan", init=numbers)
    assert (decay.alpha == 2).all() and (decay.beta == -1).all()
    # Fixed gamma of 0.9996 (VIOLIN Table 15).
    fixed = math.log(0.9996 / 0.0004)
    decay = make("manhattan", learn_beta=False, init={**numbers, "beta_low": fixed, "beta_high": fixed})
    assert decay_mask(decay(), positions("manhattan", (1, 2)), torch.float64)[0, 0, 1].item() == pytest.approx(0.9996)


def test_draws_follow_torchs_seed():
    first, same, other = (make("violin", init="finetune", seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first)
    decay = make("violin", init="finetune", seed=3)
    decay.reset_parameters()
    assert not torch.equal(decay.beta, first["beta"])


# ---- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DECAYS)
def test_what_is_learned_follows_the_settings(name):
    own = ["order"] if name == "learned_order" else []
    assert name in repr(make(name)) and "init=pretrain" in repr(make(name))
    assert sorted(dict(make(name).named_parameters())) == ["alpha", "beta", *own]
    assert sorted(dict(make(name, learn_prefix=True).named_parameters())) == ["alpha", "beta", *own, "prefix_beta"]
    fixed = make(name, learn_alpha=False, learn_beta=False)
    assert list(dict(fixed.named_parameters())) == own
    assert sorted(fixed.state_dict()) == ["beta", *own]  # gamma is saved all the same
    assert fixed()["alpha"] is None and fixed()["prefix_beta"] is None


@pytest.mark.parametrize("name", DECAYS)
def test_decays_resolve_to_a_full_form_that_json_keeps(name):
    full = resolve_decay(name)
    assert full == resolve_decay({"name": name}) == {"name": name, **DECAYS[name].SETTINGS}
    assert resolve_decay(json.loads(json.dumps(full))) == full
    given = {"name": name, "learn_alpha": np.bool_(False)}
    assert json.loads(json.dumps(resolve_decay(given))) == {**full, "learn_alpha": False}
    in_use = resolve_decay(name, (2, 3))
    assert make(name).settings == in_use
    assert resolve_decay(in_use, (4, 4)) == in_use  # a table keeps the grid that it was made for


def test_no_decay():
    assert resolve_decay(None) is None
    assert resolve_decay("none") is None


def test_defaults_are_not_shared_between_decays():
    resolve_decay("violin")["curves"].append("z")
    assert "z" not in resolve_decay("violin")["curves"]
    given = ["z", "hilbert"]
    resolve_decay({"name": "violin", "curves": given})["curves"].append("snake")
    assert given == ["z", "hilbert"]


@each(
    "decay, message",
    [
        ("violn", r"decay='violn' must be one of none, violin, manhattan"),
        ({"init": "moving"}, r"decay.* one of none, violin"),
        ({"name": "violin", "curve": ["z"]}, r"decay 'violin' has no setting 'curve'.*mean 'curves'.*curves, init"),
        ({"name": "manhattan", "zzzz": 1}, r"decay 'manhattan' has no setting 'zzzz'.*init, learn_alpha"),
        ({"name": "manhattan", "curves": ["z"]}, r"decay 'manhattan' has no setting 'curves'.*init, learn_alpha"),
        ({"name": "violin", "curves": []}, r"curves=\[\] must be a list of at least one of z, z_t, snake"),
        ({"name": "violin", "curves": "hilbert"}, r"curves='hilbert' must be a list of at least one of z, z_t"),
        ({"name": "violin", "curves": None}, r"curves=None must be a list of at least one of z, z_t"),
        ({"name": "violin", "curves": ["z", "hilbrt"]}, r"curves: 'hilbrt' must be one of z, z_t"),
        ({"name": "violin", "curves": ["z", "z"]}, r"curves=\['z', 'z'\] must not repeat a curve"),
        ({"name": "violin", "learn_alpha": 1}, r"decay 'violin': learn_alpha=1 must be True or False"),
        ({"name": "violin", "learn_beta": "no"}, r"decay 'violin': learn_beta='no' must be True or False"),
        ({"name": "violin", "learn_prefix": None}, r"decay 'violin': learn_prefix=None must be True or False"),
        ({"name": "violin", "init": "pretrian"}, r"init='pretrian' must be one of pretrain, .*alpha_mean.*beta_high"),
        ({"name": "violin", "init": None}, r"init=None .*pretrain"),
        ({"name": "violin", "init": 5}, r"init=5 .*pretrain"),
        ({"name": "violin", "init": {"beta_lo": 1}}, r"no setting 'beta_lo'.*mean 'beta_low'.*alpha_mean, alpha_std"),
        ({"name": "violin", "init": {"beta_low": 1}}, r"init=.* lacks alpha_mean, alpha_std, beta_high"),
        (5, r"decay.*5.*violin, manhattan"),
        ({"name": ["violin"]}, r"decay.*\['violin'\].* violin"),
    ],
)
def test_wrong_settings_are_refused(decay, message):
    with pytest.raises(ValueError, match=message):
        resolve_decay(decay)


@each(
    "change",
    [
        *({"alpha_std": -0.1}, {"beta_low": 9, "beta_high": 8}, {"alpha_mean": math.nan}),
        *({"beta_high": math.inf}, {"alpha_mean": "one"}, {"beta_low": None}),
    ],
)
def test_wrong_initial_values_are_refused(change):
    init = {**dict.fromkeys(INIT_KEYS, 1.0), **change}
    with pytest.raises(ValueError, match=r"init=\{.*finite"):
        init_values(init)


def test_names_are_registered_once():
    before = dict(DECAYS)
    with pytest.raises(ValueError, match="decay 'violin' is registered already"):
        register_decay("violin")(Decay)
    assert before == DECAYS


def test_a_new_decay_needs_one_class():
    try:

        @register_decay("chessboard")
        class ChessboardDecay(Decay):
            @classmethod
            def positions(cls, settings, grid):
                rows, columns = np.indices(grid)
                return ((rows + columns) % 2).reshape(1, 1, -1)

        decay = make("chessboard", init={"alpha_mean": 1, "alpha_std": 0, "beta_low": 0, "beta_high": 0})
        mask = decay_mask(decay(), positions("chessboard", (1, 3)), torch.float32)
        assert mask[0].tolist() == [[1, 0.5, 1], [0.5, 1, 0.5], [1, 0.5, 1]]
    finally:
        DECAYS.pop("chessboard", None)
