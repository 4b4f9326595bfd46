import contextlib
import copy
import gc
import logging
import pickle
import sys
import weakref
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import hf_sparseprior as sp
from hf_sparseprior.attention.functional import attention
from hf_sparseprior.attention.plan import plan_table
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.supports import SUPPORTS, build_mask, has_pairs
from hf_sparseprior.priors.layer import Biases, SparsePriorAttention
from hf_sparseprior.priors.prior import prior_names, resolve_prior

HIDDEN, HEADS = 12, 3
# Every support without a decay and with one, and so every decay with several supports.
PRIORS = [*SUPPORTS, *(f"{support}+{decay}" for support, decay in zip(SUPPORTS, cycle(DECAYS)))]


def make_layer(prior="fibottention+violin", *, grid=(4, 4), heads=HEADS, seed=0, **options):
    torch.manual_seed(seed)
    return SparsePriorAttention(HIDDEN, heads, resolve_prior(prior, heads, grid), **options)


def tokens(grid=(4, 4), prefix=1, *, batch=2, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, prefix + grid[0] * grid[1], HIDDEN, generator=generator).to(dtype)


def violin(**settings):
    # Modified rows: on 4x4 patches each of the three heads has offsets, so every scalar has something to act on.
    return {"support": {"name": "fibottention", "modified": True}, "decay": {"name": "violin", **settings}}


def constant(alpha, beta):
    return {"alpha_mean": alpha, "alpha_std": 0, "beta_low": beta, "beta_high": beta}


@contextmanager
def calls():
    """The code of each function that runs inside, those of other libraries too."""
    called = []
    sys.setprofile(lambda frame, event, _: event == "call" and called.append(frame.f_code))
    try:
        yield called
    finally:
        sys.setprofile(None)


def test_settings_are_parsed_where_a_prior_is_resolved_and_nowhere_after():
    parsers = {"split_spec", "check_keys", "check_order", "resolve_support", "resolve_decay", "resolve_module"}
    for prior in [*prior_names(), "fibottention+violin", {"support": {"name": "window", "order": "hilbert"}}]:
        with calls() as called:
            resolved = resolve_prior(prior, HEADS, (4, 4))
        assert parsers & {code.co_name for code in called}, "the functions have other names now"
        with calls() as called:
            layer = SparsePriorAttention(HIDDEN, HEADS, resolved, 1)
            for grid in ((4, 4), (4, 5)) if resolved["predictor"] is None else ((4, 4),):
                with contextlib.suppress(ValueError):  # a mixer of another grid
                    layer(tokens(grid), grid, 1)
        names = {code.co_name for code in called}
        assert "_attend_heads" in names and not parsers & names, prior


@pytest.mark.parametrize("prior", ["dense", "fibottention", "violin", "fibottention+violin"])
def test_a_layer_takes_few_calls(prior):
    """Python takes a good part of the time of small images."""
    config = sp.SparsePriorViTConfig(
        hidden_size=24, num_attention_heads=3, num_hidden_layers=2, intermediate_size=48, image_size=32, patch_size=8,
        prior=prior,
    )  # fmt: skip
    layer, x = sp.SparsePriorViTModel(config).eval().layers[1], torch.randn(1, 17, 24)
    with torch.no_grad():
        layer(x, (4, 4), 1)
        with calls() as called:
            layer(x, (4, 4), 1)
    package = Path(sp.__file__).parent
    files = [code.co_filename for code in called if package in Path(code.co_filename).parents]
    assert 15 <= len(files) <= 45 and len(set(files)) <= 12


# ---- what the layer computes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prior", "prefix"), zip(PRIORS, cycle(range(3))))
def test_the_layer_projects_attends_and_projects(prior, prefix):
    grid = (4, 5)
    layer = make_layer(prior, grid=grid, layer_idx=3).double()
    x = tokens(grid, prefix, dtype=torch.float64)
    out, weights = layer(x, grid, prefix, output_attentions=True, backend="reference")
    q, k, v = (
        F.linear(x, p.weight, p.bias).unflatten(-1, (HEADS, HIDDEN // HEADS)).transpose(1, 2)
        for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    resolved, decay = layer.prior, None
    if resolved["decay"] is not None:
        scalars = {"alpha": layer.decay_bias.alpha, "beta": layer.decay_bias.beta}
        decay = {"name": resolved["decay"]["name"], **scalars}
    options = {"num_prefix_tokens": prefix, "layer": 3, "grid": grid, "backend": "reference", "need_weights": True}
    heads, expected_weights = attention(q, k, v, resolved["support"], decay, **options)
    expected = layer.o_proj(torch.cat(heads.unbind(1), -1))
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-12, atol=1e-12)
    sizes = {"num_heads": HEADS, "num_tokens": 20, "num_prefix_tokens": prefix, "grid": grid}
    mask = build_mask(resolved["support"], **sizes, layer=3)
    assert torch.equal(weights[0] > 0, torch.tensor(mask))


def test_dense_attention_is_torchs_own():
    layer = make_layer("dense")
    torch_layer = torch.nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)
    with torch.no_grad():
        torch_layer.in_proj_weight.copy_(torch.cat([p.weight for p in (layer.q_proj, layer.k_proj, layer.v_proj)]))
        torch_layer.in_proj_bias.copy_(torch.cat([p.bias for p in (layer.q_proj, layer.k_proj, layer.v_proj)]))
        torch_layer.out_proj.load_state_dict(layer.o_proj.state_dict())
    x = tokens()
    out, weights = layer(x, (4, 4), 1, output_attentions=True)
    expected, expected_weights = torch_layer(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
    assert layer(x, (4, 4), 1)[1] is None


@pytest.mark.parametrize(("support", "name"), zip(SUPPORTS, cycle(DECAYS)))
def test_a_decay_without_effect_reproduces_the_base_model(support, name):
    # The same seed gives both the same projections. alpha = 1 and beta -> infinity is exact, beta = 20 nearly.
    base = make_layer(support)(tokens(), (4, 4), 1, backend="reference")[0]
    for init, exact in ((constant(1, 200), True), ("identity", False)):
        layer = make_layer({"support": support, "decay": {"name": name, "init": init}})
        out = layer(tokens(), (4, 4), 1, backend="reference")[0]
        assert torch.equal(out, base) if exact else (out - base).abs().max() < 1e-5


def test_dropout_is_for_training_only():
    layer = make_layer(attention_dropout=0.5)
    first, second = (layer.train()(tokens(), (4, 4), 1)[0] for _ in range(2))
    assert not torch.equal(first, second)
    first, second = (layer.eval()(tokens(), (4, 4), 1)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, make_layer().train()(tokens(), (4, 4), 1)[0])


# ---- parameters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", PRIORS)
def test_parameters_and_state(prior):
    layer = make_layer(prior)
    expected = {f"{p}_proj.{kind}" for p in "qkvo" for kind in ("weight", "bias")}
    if layer.prior["decay"] is not None:
        # transformers' Trainer keeps names with "bias" out of weight decay.
        expected |= {"decay_bias.alpha", "decay_bias.beta"}
    if layer.prior["decay"] is not None and layer.prior["decay"]["name"] == "learned_order":
        expected.add("decay_bias.order")
    layer(tokens(), (4, 4), 1)
    assert set(layer.state_dict()) == set(dict(layer.named_parameters())) == expected


def test_biases_are_optional():
    layer = make_layer("dense", biases=Biases(False, False, False, False))
    assert all(name.endswith("weight") for name in layer.state_dict())


@pytest.mark.parametrize("backend", ["reference", "diagonal"])
def test_every_scalar_learns_at_the_papers_fine_tuning_start(backend):
    # beta ~ U(15, 20) in float32, where sigmoid(beta) ** d has no gradient for most of the range.
    layer = make_layer(violin(init="finetune", learn_prefix=True))
    layer(tokens(), (4, 4), 1, backend=backend)[0].square().sum().backward()
    for name, parameter in layer.decay_bias.named_parameters():
        assert (parameter.grad != 0).all(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "diagonal"])
def test_a_half_precision_layer_keeps_its_scalars_in_float32(backend, dtype):
    exact = make_layer(violin(init="finetune"))
    layer = copy.deepcopy(exact).to(dtype)
    out, _ = layer(tokens(dtype=dtype), (4, 4), 1, backend=backend)
    assert out.dtype == dtype
    assert layer.q_proj.weight.dtype == dtype
    assert {p.dtype for p in layer.decay_bias.parameters()} == {torch.float32}
    assert torch.equal(layer.decay_bias.beta, exact.decay_bias.beta)
    expected, _ = exact(tokens(), (4, 4), 1, backend="reference")
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    out.float().square().sum().backward()
    assert (layer.decay_bias.beta.grad != 0).all()


# ---- grids and plans ------------------------------------------------------------------------------------------------


def test_one_layer_takes_any_grid():
    layer = make_layer()
    for grid, prefix in (((1, 1), 0), ((1, 1), 1), ((2, 7), 0), ((7, 2), 3), ((16, 16), 1)):
        out, _ = layer(tokens(grid, prefix), grid, prefix)
        assert out.shape == (2, prefix + grid[0] * grid[1], HIDDEN) and out.isfinite().all()
    # Same number of tokens, other distances.
    x = tokens((2, 7), 0)
    assert not torch.equal(layer(x, (2, 7))[0], layer(x, (7, 2))[0])


def test_plans_are_kept_and_bounded():
    layer = make_layer()
    assert layer.plan((4, 4), 1) is layer.plan((4, 4), 1)
    assert layer.plan((4, 4), 1) is not layer.plan((4, 4), 0)
    before = layer(tokens(), (4, 4), 1)[0]
    for width in range(1, 3 * layer.MAX_PLANS):
        layer(tokens((1, width), 0), (1, width), 0)
    assert len(layer._plans) == 3 * layer.MAX_PLANS + 1  # small ones
    layer.MOST_PLANS = 20
    layer(tokens((2, 2), 0), (2, 2), 0)
    assert len(layer._plans) == 20
    layer.PLANS_BYTES = 100
    for width in range(30, 40):
        layer(tokens((1, width), 0), (1, width), 0)
        assert len(layer._plans) <= layer.MAX_PLANS
    assert torch.equal(layer(tokens(), (4, 4), 1)[0], before)


def test_the_plan_that_was_not_used_for_longest_goes_first():
    layer = make_layer({"support": {"name": "fibottention", "shuffle_seed": None}})
    layer.PLANS_BYTES = 0
    grids = [(2, width) for width in range(2, 2 + layer.MAX_PLANS)]
    for grid in grids:
        layer(tokens(grid, 0), grid, 0)
    first = layer.plan(grids[0])  # used again
    layer.plan((5, 5))
    assert layer.plan(grids[0]) is first and {key[1] for key in layer._plans} == {grids[0], *grids[2:], (5, 5)}


def test_few_plans_stay_where_their_tables_are_large():
    layer = make_layer({"support": {"name": "fibottention", "shuffle_seed": None}})
    layer.MOST_BYTES = 2 * HEADS * 10**2
    for width, kept in ((5, [5]), (4, [5, 4]), (3, [5, 4, 3]), (2, [5, 4, 3, 2]), (9, [4, 3, 2, 9]), (1, [1])):
        layer(tokens((2, width), 0), (2, width), 0, backend="reference")  # which reads a mask of all pairs
        assert [grid[1] for _, grid, *_ in layer._plans] == kept


def test_what_a_cuda_graph_reads_is_kept(monkeypatch):
    """Its memory would be another's, and a replay would read that."""
    layer = make_layer()
    layer.PLANS_BYTES = -1  # MAX_PLANS, also without tables
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = weakref.ref(layer.plan((4, 4)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    others = [weakref.ref(layer.plan((1, width))) for width in range(1, 2 * layer.MAX_PLANS)]
    gc.collect()
    assert captured() is not None and captured() not in layer._plans.values()
    assert sum(plan() is None for plan in others) == layer.MAX_PLANS - 1


def test_each_layout_has_a_plan():
    """Patches in raster order and those in the order of the support: their pairs are in other places of the mask."""
    layer = make_layer({"support": {"name": "fibottention", "order": "hilbert", "shuffle_seed": None}})
    in_raster, in_order = layer.plan((4, 4)), layer.plan((4, 4), layout="hilbert")
    assert (in_raster.layout, in_order.layout) == ("raster", "hilbert")
    masks = [plan_table(plan, "mask", torch.device("cpu")) for plan in (in_raster, in_order)]
    visits = torch.tensor(sp.curves.curve_rank("hilbert", (4, 4)).ravel()).argsort()
    assert torch.equal(masks[1], masks[0][:, visits][:, :, visits]) and not torch.equal(*masks)
    assert layer.plan((4, 4)) is in_raster and layer.plan((4, 4), layout="hilbert") is in_order


def test_layers_shuffle_the_supports():
    first, second = (make_layer("fibottention", layer_idx=index) for index in (0, 1))
    offsets = [layer.plan((4, 4), 1).offsets for layer in (first, second)]
    assert sorted(offsets[0]) == sorted(offsets[1]) and offsets[0] != offsets[1]
    assert not torch.equal(first(tokens(), (4, 4), 1)[0], second(tokens(), (4, 4), 1)[0])


def test_layers_share_no_plans():
    first, second = make_layer(), make_layer()
    first(tokens(), (4, 4), 1)
    assert not second._plans
    assert SparsePriorAttention(HIDDEN, HEADS, first.prior)._plans is not second._plans


@pytest.mark.parametrize("prior", [p for p in PRIORS if not p.startswith("dense")])
def test_training_after_inference_mode(prior):
    for backend in ("reference", "gather" if has_pairs(prior.partition("+")[0]) else "diagonal", "auto"):
        layer = make_layer(prior)
        with torch.inference_mode():
            before = layer(tokens(), (4, 4), 1, backend=backend)[0]
        out, _ = layer(tokens(), (4, 4), 1, backend=backend)
        torch.testing.assert_close(out, before.clone(), rtol=1e-5, atol=1e-6)
        out.square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters()), backend


@pytest.mark.parametrize("prior", [*SUPPORTS, *DECAYS])
def test_a_used_layer_can_be_copied_and_pickled(prior):
    layer = make_layer(prior).eval()
    before = layer(tokens(), (4, 4), 1, backend="reference")[0]
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(tokens(), (4, 4), 1, backend="reference")[0], before)


def test_notes_are_logged_once_for_a_model_and_grid(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hf_sparseprior"), "propagate", True)
    prior = {"support": {"name": "fibottention", "w_min": 3, "w_max": 20}}
    with caplog.at_level(logging.INFO, logger="hf_sparseprior.attention"):
        for index in range(3):
            layer = make_layer(prior, layer_idx=index)
            layer(tokens(), (4, 4), 1)
            layer(tokens(), (4, 4), 1)
    messages = [record.getMessage() for record in caplog.records]
    assert len([m for m in messages if "w_max=20" in m and "16 patch tokens of the 4x4 grid" in m]) == 1
