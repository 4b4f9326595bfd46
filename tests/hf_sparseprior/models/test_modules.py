"""`sp.Attention` and `sp.Block` against formulas in float64, timm's modules, torch's and the layer of the families."""

import copy
import io
import math
import pickle
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hf_sparseprior as sp
from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.patterns.decay import DECAYS, make_decay
from hf_sparseprior.patterns.supports import MASK_FILLS
from hf_sparseprior.priors.layer import SparsePriorAttention
from hf_sparseprior.priors.low_rank import MIXERS
from hf_sparseprior.priors.predictor import PREDICTORS
from hf_sparseprior.priors.prior import prior_names
from tests.each import each
from tests.hf_sparseprior.attention.attention_cases import (
    SHIPPED_SUPPORTS,
    brute_mask,
    brute_weights,
    shipped,
)
from tests.timm_oracle import import_timm

DIM, HEADS, GRID = 12, 3, (4, 5)
FIXED_DECAYS = [name for name in shipped(DECAYS) if name != "learned_order"]  # it learns the places of patches
PLACES = {name: extra.place for name, extra in EXTRAS.items()}
IN_ATTENTION = [name for name in prior_names() if PLACES.get(name, "attention") == "attention"]
WITH_MASKS = [name for name in IN_ATTENTION if name not in ("linformer", "efficient") and "sparsifiner" not in name]
MADE = {"attention": sp.Attention, "block": sp.Block}


def make(prior="fibottention+violin", cls=sp.Attention, grid=GRID, prefix=1, **options):
    """A module with weights that matter: beta in 0..4, and every other weight of the prior off its start."""
    torch.manual_seed(0)
    module = cls(DIM, HEADS, grid, prior, num_prefix_tokens=prefix, **options)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith("beta"):
                nn.init.uniform_(weight, 0.0, 4.0)
            else:
                weight.add_(0.3 * torch.rand_like(weight))
    return module


def tokens(grid=GRID, prefix=1, batch=2, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, prefix + math.prod(grid), DIM, generator=generator, dtype=torch.float64).to(dtype)


def padding(batch=2, total=21):
    """The last keys of the second image, and one in the middle of the first."""
    mask = torch.zeros(batch, total, dtype=torch.bool)
    mask[0, total // 2] = mask[1, -total // 3 :] = True
    return mask


def written_out(module, support, decay, x, prefix, seen=True):
    """Attention of all pairs, from brute-force masks and decays. `seen`: broadcastable mask of what else is seen."""
    q, k, v = F.linear(x, module.qkv.weight, module.qkv.bias).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k, v))
    logits = q @ k.mT / math.sqrt(DIM // HEADS)
    if decay is not None:
        scalars = {name: getattr(module.decay_bias, name) for name in ("alpha", "beta")}
        logits = logits * torch.tensor(brute_weights((decay,), scalars, HEADS, GRID, prefix), dtype=x.dtype)
    mask = torch.tensor(brute_mask(support, HEADS, GRID, prefix, module.layer_idx))[None]
    if support.get("mask_fill") == "zero":
        logits, mask = logits.masked_fill(~mask, 0.0), torch.ones_like(mask)
    mask = mask & seen
    mask = mask | (~mask.any(-1, keepdim=True) & torch.eye(mask.shape[-1], dtype=torch.bool))
    weights = logits.masked_fill(~mask, -math.inf).softmax(-1)
    return module.proj((weights @ v).transpose(1, 2).flatten(2))


def assert_near(out, expected, tolerance=1e-10):
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


# ---- what it computes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fill", "prefix", "layer"), [("zero", 0, 0), ("neg_inf", 2, 3)])
@each("name", SHIPPED_SUPPORTS)
def test_attention_is_the_formula_with_every_support(name, fill, prefix, layer):
    support = {"name": name, "mask_fill": fill}
    x = tokens(prefix=prefix, dtype=torch.float64)
    for decay in (None, "violin"):
        module = make({"support": support, "decay": decay}, prefix=prefix, layer=layer, dtype=torch.float64)
        assert_near(module(x), written_out(module, support, decay, x, prefix))


@pytest.mark.parametrize("decay", FIXED_DECAYS)
def test_attention_is_the_formula_with_every_decay(decay):
    module, x = make(f"window+{decay}", dtype=torch.float64), tokens(dtype=torch.float64)
    assert_near(module(x), written_out(module, {"name": "window"}, decay, x, 1))


@each("prior", ["fibottention+violin", *IN_ATTENTION])
def test_it_computes_what_the_layer_of_the_families_does(prior):
    module = make(prior, layer=1).double()
    layer = SparsePriorAttention(DIM, HEADS, module.prior, layer_idx=1).double()
    state = {key: value for key, value in module.state_dict().items() if not key.startswith(("qkv", "proj"))}
    for kind, names in (("weight", "qkv"), ("bias", "qkv")):
        parts = getattr(module.qkv, kind).split(module.widths)
        state |= {f"{name}_proj.{kind}": part for name, part in zip(names, parts, strict=True)}
    state |= {f"o_proj.{kind}": getattr(module.proj, kind) for kind in ("weight", "bias")}
    layer.load_state_dict(state)
    for grid in (GRID, (3, 4)):
        x = tokens(grid, dtype=torch.float64).requires_grad_()
        try:
            expected, _ = layer(x, grid, 1)
        except ValueError as error:  # a mixer of another grid
            with pytest.raises(ValueError, match=re.escape(str(error))):
                module(x, grid)
            continue
        out = module(x, grid)
        assert_near(out, expected)
        assert_near(*(torch.autograd.grad(one.square().sum(), x)[0] for one in (out, expected)))


def test_block_runs_what_is_within_the_mlp():
    block, x = make("violin+localvit+irpe_k", sp.Block), tokens()
    assert {"mlp.locality.localvit.gate", "attn.decay_bias.beta"} <= block.state_dict().keys()
    assert any(key.startswith("attn.relative_position.irpe_k") for key in block.state_dict())
    before = block(x)
    with torch.no_grad():
        block.mlp.locality["localvit"].gate.zero_()
    assert not torch.allclose(before[:, 1:], block(x)[:, 1:])


# ---- timm and torch -------------------------------------------------------------------------------------------------


def timm_pair(kind, prior, **options):
    """timm's module with random weights, and ours with the same; the keys that were missing."""
    import_timm()
    from timm.layers.attention import Attention
    from timm.models.vision_transformer import Block

    torch.manual_seed(0)
    theirs = {"attention": Attention, "block": Block}[kind](DIM, HEADS, qkv_bias=True, **options)
    for weight in theirs.parameters():
        nn.init.normal_(weight, std=0.5)
    ours = MADE[kind](DIM, HEADS, GRID, prior, num_prefix_tokens=1, **options)
    keys = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert not keys.unexpected_keys
    return theirs, ours, set(keys.missing_keys)


@pytest.mark.parametrize("kind", MADE)
def test_dense_is_timms_module(kind):
    theirs, ours, missing = timm_pair(kind, "dense", **({"init_values": 0.1} if kind == "block" else {}))
    assert not missing and list(ours.state_dict()) == list(theirs.state_dict())
    x, total = tokens(), 21
    assert_near(ours(x), theirs(x), 1e-5)
    for mask in (torch.rand(2, 1, total, total) > 0.3, torch.randn(total, total)):
        assert_near(ours(x, attn_mask=mask), theirs(x, attn_mask=mask), 1e-5)
    assert_near(ours(x, is_causal=True), theirs(x, is_causal=True), 1e-5)


@each("decay, kind", [(decay, kind) for decay in shipped(DECAYS) for kind in MADE])
def test_timms_weights_load_and_only_the_decays_are_missing(decay, kind):
    _, ours, missing = timm_pair(kind, f"fibottention+{decay}")
    scalars = {name for name, _ in ours.named_parameters() if ".decay_bias." in f".{name}"}
    assert missing == scalars and {name.rpartition(".")[2] for name in missing} >= {"alpha", "beta"}


def test_weights_load_into_a_decay_that_starts_as_the_identity():
    theirs, ours, _ = timm_pair("block", {"decay": {"name": "violin", "init": "identity"}})
    assert_near(ours(tokens()), theirs(tokens()), 1e-4)


def test_a_timm_model_takes_it_in_its_blocks():
    timm = import_timm()
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=3)
    for number, block in enumerate(model.blocks):
        attn = sp.Attention(192, 3, grid=4, num_prefix_tokens=1, layer=number)
        attn.load_state_dict(block.attn.state_dict(), strict=False)
        block.attn = attn
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    assert model.blocks[0].attn.decay_bias.beta.grad.abs().sum() > 0


def test_key_padding_is_that_of_torch():
    module, x, mask = make("dense", dtype=torch.float64), tokens(dtype=torch.float64), padding()
    theirs = nn.MultiheadAttention(DIM, HEADS, batch_first=True, dtype=torch.float64)
    theirs.load_state_dict(
        {
            **{f"in_proj_{kind}": getattr(module.qkv, kind) for kind in ("weight", "bias")},
            **{f"out_proj.{kind}": getattr(module.proj, kind) for kind in ("weight", "bias")},
        }
    )
    expected, _ = theirs(x, x, x, key_padding_mask=mask)
    assert_near(module(x, key_padding_mask=mask), expected)


# ---- shapes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", MADE.values())
def test_maps_are_tokens_of_their_grid(cls):
    module = make(cls=cls, prefix=0)
    for grid in (GRID, (3, 7), (2, 2)):  # no grid has to be given, whatever the constructor's was
        x = tokens(grid, 0)
        out = module(x.unflatten(1, grid))
        assert out.shape == (2, *grid, DIM)
        assert_near(out.flatten(1, 2), module(x, grid), 0)
        assert_near(out.flatten(1, 2), make(cls=cls, prefix=0, grid=grid)(x), 1e-6)


@pytest.mark.parametrize("prior", ["violin+clip", "fibottention+axes", "radial"])
def test_clips_have_three_sides(prior):
    grid = (2, 3, 4)
    module, x = make(prior, grid=grid, prefix=0), tokens(grid, 0)
    assert_near(module(x.unflatten(1, grid)).flatten(1, 3), module(x), 0)
    expected, _ = _of_family(module)(x, grid)
    assert_near(module(x), expected, 1e-6)
    assert module(tokens((3, 2, 2), 0), (3, 2, 2)).shape == (2, 12, DIM)


def _of_family(module):
    """The layer of the families with a module's weights."""
    layer = SparsePriorAttention(DIM, HEADS, module.prior, layer_idx=module.layer_idx)
    layer.decay_bias = module.decay_bias
    with torch.no_grad():
        for kind in ("weight", "bias"):
            for name, part in zip("qkv", getattr(module.qkv, kind).chunk(3), strict=True):
                getattr(getattr(layer, f"{name}_proj"), kind).copy_(part)
            getattr(layer.o_proj, kind).copy_(getattr(module.proj, kind))
    return layer


def test_an_integer_is_a_square():
    assert sp.Attention(DIM, HEADS, 4).grid == (4, 4) and make(prefix=0)(tokens((6, 6), 0), 6).shape == (2, 36, DIM)


def test_an_empty_batch_stays_one():
    assert make()(tokens(batch=0)).shape == (0, 21, DIM)
    assert make()(tokens(batch=0), key_padding_mask=padding()[:0]).shape == (0, 21, DIM)


# ---- masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", MASK_FILLS)
@each("name", SHIPPED_SUPPORTS)
def test_key_padding_is_the_formula_without_those_keys(name, fill):
    support = {"name": name, "mask_fill": fill}
    mask, x = padding(total=20), tokens(prefix=0, dtype=torch.float64)
    module = make({"support": support, "decay": "violin"}, prefix=0, layer=2, dtype=torch.float64)
    expected = written_out(module, support, "violin", x, 0, seen=~mask[:, None, None])
    assert_near(module(x, key_padding_mask=mask), expected)


@each("prior", [*WITH_MASKS, "fibottention+violin+swin_rpb"])
def test_what_padding_holds_does_not_matter(prior):
    module, x, mask = make(prior), tokens(), padding()
    out = module(x, key_padding_mask=mask)
    other = module(x.masked_fill(mask[..., None], 50.0), key_padding_mask=mask)
    assert_near(other[~mask], out[~mask], 1e-5)
    assert not torch.allclose(module(x)[~mask], out[~mask])


def test_an_image_of_padding_alone_gives_numbers_and_gradients():
    module, x = make(), tokens().requires_grad_()
    mask = torch.stack([torch.ones(21, dtype=torch.bool), torch.zeros(21, dtype=torch.bool)])
    out = module(x, key_padding_mask=mask)
    out.sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    assert_near(out[1], module(x)[1], 1e-5)


def test_masks_act_together():
    module, x = make("window", prefix=0, dtype=torch.float64), tokens(prefix=0, dtype=torch.float64)
    pairs, added = torch.rand(HEADS, 20, 20) > 0.2, torch.randn(2, 1, 20, 20, dtype=torch.float64)
    seen = pairs & ~padding(total=20)[:, None, None] & torch.ones(20, 20, dtype=torch.bool).tril()
    out = module(x, key_padding_mask=padding(total=20), attn_mask=pairs, is_causal=True)
    assert_near(out, written_out(module, {"name": "window"}, None, x, 0, seen))
    assert not torch.allclose(module(x, attn_mask=added), module(x))


# ---- training, copies, dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", MADE.values())
def test_dropout_acts_in_training_alone(cls):
    x, plain = tokens(), make(cls=cls).eval()
    for options in ({"attn_drop": 0.5}, {"proj_drop": 0.5}, {"drop_path": 0.5})[: 3 if cls is sp.Block else 2]:
        module = make(cls=cls, **options)
        assert not torch.allclose(module(x), module(x)), options
        assert_near(module.eval()(x), plain(x), 1e-6)
    attention = make(attn_drop=1.0)
    assert_near(attention(x), attention.proj.bias.expand_as(x), 0)
    assert_near(make(cls=sp.Block, drop_path=1.0)(x), x, 0)
    assert_near(make(cls=sp.Block, proj_drop=1.0)(x), x, 0)


def test_it_learns():
    torch.manual_seed(0)
    model = nn.Sequential(*(sp.Block(DIM, HEADS, GRID, layer=layer) for layer in range(2)))
    x, target = tokens(prefix=0), tokens(prefix=0, seed=2)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    assert all(weight.grad.abs().sum() > 0 for weight in model.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_a_block_gives_the_same_gradients(reentrant):
    block, x = make(cls=sp.Block, attn_drop=0.3, drop_path=0.3, prefix=0), tokens(prefix=0).requires_grad_()
    found = []
    for run in (lambda x: block(x), lambda x: checkpoint(block, x, use_reentrant=reentrant)):
        torch.manual_seed(3)
        block.zero_grad()
        run(x).square().sum().backward()
        found.append({name: weight.grad.clone() for name, weight in block.named_parameters()})
    for name, gradient in found[0].items():
        assert_near(found[1][name], gradient, 1e-6)


@pytest.mark.parametrize("cls", MADE.values())
@each("prior", ["dense", "fibottention+violin", "sparsifiner", "linformer", "irpe_qkv", "learned_order"])
def test_copies_and_dtypes(cls, prior):
    module, x = make(prior, cls).eval(), tokens()
    out = module(x)
    assert_near(copy.deepcopy(module)(x), out, 0)
    assert_near(pickle.loads(pickle.dumps(module))(x), out, 0)
    other = cls(DIM, HEADS, GRID, module.prior if cls is sp.Attention else prior, num_prefix_tokens=1).eval()
    other.load_state_dict(module.state_dict())
    assert_near(other(x), out, 0)
    assert_near(copy.deepcopy(module).double()(x.double()).float(), out, 1e-4)
    half = copy.deepcopy(module).to(torch.bfloat16)
    assert half(x.bfloat16()).dtype == torch.bfloat16 and half.state_dict().keys() == module.state_dict().keys()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = module(x)
    if prior != "sparsifiner":  # other keys are chosen
        assert_near(half(x.bfloat16()).float(), out, 0.1)
        assert_near(mixed.float(), out, 0.1)


def test_device_and_dtype():
    module = sp.Block(DIM, HEADS, GRID, device="meta", dtype=torch.bfloat16, init_values=1)
    assert {weight.device.type for weight in module.parameters()} == {"meta"}
    dtypes = {name: weight.dtype for name, weight in module.named_parameters()}
    assert {dtypes.pop(f"attn.decay_bias.{name}") for name in ("alpha", "beta")} == {torch.float32}
    assert set(dtypes.values()) == {torch.bfloat16}


def test_start_values_are_those_of_linear_layers_and_of_the_decay():
    torch.manual_seed(0)
    module = sp.Attention(DIM, HEADS, GRID, "violin")
    torch.manual_seed(0)
    qkv, proj, decay = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), make_decay(module.prior["decay"], HEADS)
    for own, expected in ((module.qkv, qkv), (module.proj, proj), (module.decay_bias, decay)):
        for name, weight in expected.state_dict().items():
            assert torch.equal(own.state_dict()[name], weight), name


# ---- what is refused ------------------------------------------------------------------------------------------------

BAD = {
    "dim=10 must be a multiple of num_heads=3": {"dim": 10},
    "dim=0 must be an integer of 1 or more": {"dim": 0},
    "num_heads=1.5 must be an integer of 1 or more": {"num_heads": 1.5},
    "grid='4x4' must be (height, width)": {"grid": "4x4"},
    "grid=None must be (height, width)": {"grid": None},
    "grid=(4,) must be (height, width)": {"grid": (4,)},
    "grid=True must be (height, width)": {"grid": True},
    "grid=0 must be an integer of 1 or more": {"grid": (4, 0)},
    "did you mean 'fibottention'?": {"prior": "fibotention"},
    "prior=['violin'] must be a name": {"prior": ["violin"]},
    "w_min=0": {"prior": {"support": {"name": "fibottention", "w_min": 0}}},
    "num_prefix_tokens=-1 must be": {"num_prefix_tokens": -1},
    "layer=-1 must be an integer of 0 or more": {"layer": -1},
    "qkv_bias=None must be True or False": {"qkv_bias": None},
    "dropout probability has to be between 0 and 1": {"attn_drop": 1.5},
    "'evit' acts between the layers of a model": {"prior": "violin+evit"},
    "'dynamicvit' acts between the layers of a model": {"prior": "dynamicvit"},
    "redraw=True must have redraw=False": {"prior": {"support": {"name": "random", "redraw": True}}},
    "time='clip' is for attention over the frames of a clip": {"prior": "violin+clip"},
}
BAD_OF_BLOCK = {
    "mlp_ratio=0 must be a number above 0": {"mlp_ratio": 0},
    "mlp_ratio=0.01: width=0 must be": {"mlp_ratio": 0.01},
    "init_values='a' must be": {"init_values": "a"},
    "drop_path=2 must be a probability": {"drop_path": 2},
    "'localvit' is of places in one image": {"prior": "localvit", "grid": (2, 3, 4)},
}


@each(
    "cls, message, options",
    [
        *((cls, *case) for cls in MADE.values() for case in BAD.items()),
        *((sp.Block, *case) for case in BAD_OF_BLOCK.items()),
        (sp.Attention, "is within the MLP, which sp.Block has", {"prior": "localvit"}),
    ],
)
def test_bad_arguments_are_refused(cls, message, options):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        cls(**{"dim": DIM, "num_heads": HEADS, "grid": GRID, **options})
    assert "\n" not in str(error.value)


BAD_INPUTS = {
    "must have 21 tokens: 1 prefix tokens and 20 patches of a 4x5 grid": (tokens(prefix=0), {}),
    "must have 13 tokens: 1 prefix tokens and 12 patches of a 3x4 grid": (tokens(), {"grid": (3, 4)}),
    "x of shape (2, 21, 11) must be (B, T, 12) or (B, height, width, 12)": (tokens()[..., 1:], {}),
    "x of shape (21, 12) must be": (tokens()[0], {}),
    "x of shape (2, 4, 5, 12) has no place for num_prefix_tokens=1": (tokens(prefix=0).unflatten(1, GRID), {}),
    "grid=(1, 4, 5) must be (height, width), as that of the constructor": (tokens(), {"grid": (1, 4, 5)}),
    "grid='a' must be (height, width)": (tokens(), {"grid": "a"}),
    "and torch.float32 must be bool (B, T), (2, 21), True = ignored": (
        tokens(),
        {"key_padding_mask": padding().float()},
    ),
    "key_padding_mask of shape (2, 20)": (tokens(), {"key_padding_mask": padding()[:, 1:]}),
    "attn_mask of shape (3, 1, 21, 21) must be broadcastable": (tokens(), {"attn_mask": torch.zeros(3, 1, 21, 21)}),
}


@pytest.mark.parametrize("cls", MADE.values())
@each("message, given", BAD_INPUTS.items())
def test_bad_inputs_are_refused(message, given, cls):
    x, options = given
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        make(cls=cls)(x, **options)
    assert "\n" not in str(error.value)


def test_a_map_of_another_grid_than_the_given_one_is_refused():
    with pytest.raises(ValueError, match=re.escape("grid=(5, 4) must be the (4, 5) of x")):
        make(prefix=0)(tokens(prefix=0).unflatten(1, GRID), (5, 4))


@each("prior", [name for name in [*PREDICTORS, *MIXERS] if name not in WITH_MASKS])
def test_masks_of_keys_are_refused_where_a_prior_cannot_follow_them(prior):
    with pytest.raises(ValueError, match=f"prior '{prior}' takes no key_padding_mask, attn_mask or is_causal"):
        make(prior)(tokens(), key_padding_mask=padding())


def test_masks_of_keys_are_refused_where_a_decay_adds_to_weights():
    with pytest.raises(ValueError, match=r"placement='add_after' of the decay adds to weights"):
        make({"decay": {"name": "violin", "placement": "add_after"}})(tokens(), is_causal=True)


# ---- graphs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler():
    """Compiled code of one test must not count against the recompilation limit of the next."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def step(run, module, *inputs):
    """The output and the gradients of the parameters."""
    module.zero_grad()
    out = run(*inputs)
    out.square().sum().backward()
    return [out.detach(), *(weight.grad.clone() for weight in module.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "prior"),
    [(sp.Attention, "fibottention+violin"), (sp.Block, "irpe_k")],
)
def test_compiled_training(cls, prior, fresh_compiler):
    module = make(prior, cls, prefix=0)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    inputs = [(tokens(prefix=0),), (tokens(prefix=0), None, padding(total=20))]
    if cls is sp.Attention:
        inputs += [(tokens((3, 4), 0), (3, 4)), (tokens(prefix=0, batch=5),)]
    else:
        inputs.append((tokens((3, 4), 0).unflatten(1, (3, 4)),))
    for given in inputs:
        for out, expected in zip(step(compiled, module, *given), step(module, module, *given), strict=True):
            torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_layers_do_not_share_compiled_patterns(fresh_compiler):
    model = nn.Sequential(*(make("window+violin" if layer else "fibottention", layer=layer) for layer in range(3)))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_near(compiled(tokens()), model(tokens()), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("prior", "masked"), [("fibottention+violin", True), ("irpe_k", False)])
def test_exported_programs_take_any_batch(prior, masked):
    block, batch = make(prior, sp.Block, prefix=0).eval(), torch.export.Dim("batch", min=1, max=64)
    given = (tokens(prefix=0).unflatten(1, GRID), None, padding(total=20))
    other = (tokens(prefix=0, batch=5).unflatten(1, GRID), None, padding(5, 20))
    shapes = {"x": {0: batch}, "grid": None, "key_padding_mask": {0: batch}}
    if not masked:
        given, other, shapes = given[:1], other[:1], {"x": {0: batch}}
    with torch.set_grad_enabled(masked):
        program = torch.export.export(block, given, dynamic_shapes=shapes, strict=False).module()
    assert_near(program(*other), block(*other), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("prior", "masked"), [("fibottention+violin", True), ("topk", False)])
def test_onnx_runtime_gives_the_same(prior, masked):
    onnxruntime, file = pytest.importorskip("onnxruntime"), io.BytesIO()
    block, batch = make(prior, sp.Block).eval(), torch.export.Dim("batch", min=1)
    given, names = (tokens(), None, padding())[: 3 if masked else 1], ["x", "grid", "mask"][: 3 if masked else 1]
    shapes = ({0: batch}, None, {0: batch})[: len(given)]
    torch.onnx.export(block, given, file, dynamo=True, verbose=False, input_names=names, dynamic_shapes=shapes)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    other = (tokens(batch=3), None, padding(3))[: len(given)]
    feeds = [one.numpy() for one in other if one is not None]
    (out,) = session.run(None, dict(zip([one.name for one in session.get_inputs()], feeds, strict=True)))
    assert_near(torch.from_numpy(out), block(*other), 1e-4)
