"""EViT and DynamicViT against models written out by hand, in float64."""

import copy
import math
from itertools import cycle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerCallback, ViTConfig, ViTForImageClassification

import hf_sparseprior as sp
from hf_sparseprior import SparsePriorViTBackbone, SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.analysis.flops import model_flops
from hf_sparseprior.attention.functional import run_plan
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.patterns.curves import curve_rank
from hf_sparseprior.patterns.supports import LayerKey, build_mask
from hf_sparseprior.priors.layer import PriorAttention
from hf_sparseprior.priors.prior import pruning_of, resolve_prior
from hf_sparseprior.priors.token_pruning import DynamicViT, EViT, TokenPruning, split_by_score
from hf_sparseprior.training import (
    Distillation,
    SparsePriorTrainer,
    SparsePriorTrainingArguments,
    Teacher,
    token_label_loss,
    token_loss,
)
from hf_sparseprior.training.keep_rate import scheduled_keep_rate
from tasks.analysis.paper_numbers import masked_pruning_flops, preset_flops, unexplained_numbers
from tests.hf_sparseprior.attention.attention_calls import attend

GRID = (5, 6)
SIZES = {"hidden_size": 24, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 32}
PRUNINGS = [name for name, extra in EXTRAS.items() if issubclass(extra, TokenPruning)]
# What pruned tokens can meet within attention.
OTHERS = {
    "dense": {},
    "fibottention": {"support": {"name": "fibottention", "w_min": 2, "w_max": 12}},
    "zero fill": {"support": {"name": "fibottention", "mask_fill": "zero"}},
    "bigbird": {"support": "bigbird"},
    "violin": {"decay": {"name": "violin", "learn_prefix": True}},
    "fibottention+manhattan": {"support": "fibottention", "decay": "manhattan"},
    **{
        placement: {"support": "fibottention", "decay": {"name": "violin", "placement": placement}}
        for placement in ("residual", "add", "multiply_after", "add_after")
    },
    "topk": {"predictor": {"name": "topk", "keys": 5}},
    "sparsifiner": {"predictor": {"name": "sparsifiner", "keep_rate": 0.3}},
    "sparsifiner as printed": {"predictor": {"name": "sparsifiner", "keep_rate": 0.3, "renormalise": False}},
}


def extra(name, **settings):
    return {"name": name, **settings}


def config(prior, **settings):
    sides = {"image_size": (4 * GRID[0], 4 * GRID[1]), "patch_size": 4, "num_labels": 3}
    return SparsePriorViTConfig(prior=prior, **{**SIZES, **sides, **settings})


def model(prior, seed=0, dtype=torch.float64, **settings):
    """A model in evaluation whose weights are large enough for every choice to matter."""
    torch.manual_seed(seed)
    made = SparsePriorViTForImageClassification(config(prior, initializer_range=0.2, **settings)).to(dtype).eval()
    for module in made.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, mean=1.0, std=0.2)
            nn.init.normal_(module.bias, std=0.2)
    return made


def images(batch=3, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, 4 * GRID[0], 4 * GRID[1], generator=generator, dtype=dtype)


def with_fuse_where_it_can(prior, name):
    """The prior with a pruning; EViT's does not fuse if the predictor depends on places."""
    settings = {"fuse": False} if name == "evit" and "sparsifiner" in str(prior) else {}
    return {**prior, "extras": [extra(name, **settings)]}


# ---- by hand --------------------------------------------------------------------------------------------------------


def heads_of(layer, x):
    """Normed input and q, k, v (T, H, D) of one image's tokens (T, C)."""
    y = layer.layernorm_before(x)
    attention = layer.attention
    shape = (-1, attention.num_heads, attention.head_dim)
    return (projection(y).view(shape) for projection in (attention.q_proj, attention.k_proj, attention.v_proj))


def attended(layer, x, mask):
    """Tokens after the attention's residual, and the weights (H, T, T), computed head by head; mask (H, T, T)."""
    q, k, v = heads_of(layer, x)
    outs, maps = [], []
    for head in range(q.shape[1]):
        logits = q[:, head] @ k[:, head].T / math.sqrt(q.shape[2])
        probs = torch.softmax(logits.masked_fill(~mask[head], -math.inf), -1)
        maps.append(probs)
        outs.append(probs @ v[:, head])
    return x + layer.attention.o_proj(torch.cat(outs, -1)), torch.stack(maps)


def with_mlp(layer, x):
    return x + layer.mlp.fc2(F.gelu(layer.mlp.fc1(layer.layernorm_after(x))))


def whole_masks(made):
    own = made.config
    sizes = {"num_heads": own.num_attention_heads, "num_tokens": GRID[0] * GRID[1]}
    return [
        torch.tensor(build_mask(own.prior["support"], **sizes, num_prefix_tokens=own.num_prefix_tokens, layer=layer))
        for layer in range(own.num_hidden_layers)
    ]


def mask_of(whole, ids, prefix):
    """The mask of prefix tokens and of the patches with these numbers; None is a token without a place."""
    places = [*range(prefix), *(None if number is None else prefix + number for number in ids)]
    rows = [[a is None or b is None or whole[:, a, b] for b in places] for a in places]
    heads = whole.shape[0]
    return torch.stack([torch.stack([torch.as_tensor(cell).expand(heads) for cell in row], -1) for row in rows], -2)


def evit_by_hand(made, pixels, keep_rate, blocks, fuse):
    """Logits and token numbers of the published algorithm, image by image."""
    vit, prefix, masks = made.vit, made.config.num_prefix_tokens, whole_masks(made)
    all_logits, all_ids = [], []
    for image in vit.embeddings(pixels)[0]:
        x, ids = image, list(range(GRID[0] * GRID[1]))
        for number, layer in enumerate(vit.layers, 1):
            x, weights = attended(layer, x, mask_of(masks[number - 1], ids, prefix))
            left = math.ceil(keep_rate * len(ids))
            if number in blocks and left < len(ids):
                attention = [sum(weights[:, 0, prefix + j]) / weights.shape[0] for j in range(len(ids))]
                ranked = sorted(range(len(ids)), key=lambda j: -attention[j].item())
                others = x[prefix:]
                parts = [x[:prefix], *(others[j : j + 1] for j in ranked[:left])]
                kept = [ids[j] for j in ranked[:left]]
                if fuse:
                    parts.append(sum(attention[j] * others[j] for j in ranked[left:])[None])
                    kept.append(None)
                x, ids = torch.cat(parts), kept
            x = with_mlp(layer, x)
        all_logits.append(made.classifier(vit.layernorm(x)[0]))
        all_ids.append(sorted(-1 if number is None else number for number in ids))
    return torch.stack(all_logits), torch.tensor(all_ids)


@pytest.mark.parametrize(
    ("support", "keep_rate", "layers", "fuse"),
    [
        ("dense", 0.7, None, True),
        ("fibottention", 0.5, [1, 2, 5], True),
        ("dense", 0.2, [2, 3, 4], True),
        ("fibottention", 0.6, None, False),
    ],
)
def test_evit_is_the_published_algorithm(support, keep_rate, layers, fuse):
    prior = {"support": support, "extras": [extra("evit", keep_rate=keep_rate, layers=layers, fuse=fuse)]}
    made = model(prior, num_register_tokens=1)
    expected, ids = evit_by_hand(made, images(), keep_rate, layers or [2, 3, 4], fuse)
    output = made(images())
    torch.testing.assert_close(output.logits, expected, rtol=0, atol=1e-10)
    assert output.token_ids.sort(1).values.equal(ids)
    # The choice matters: another rate gives other logits.
    made.vit.token_pruning["evit"].set_keep_rate(keep_rate + 0.15)
    assert (made(images()).logits - expected).abs().max() > 1e-4


def predictions_by_hand(module, patches, kept):
    """Probabilities (n, 2) of one image's patches (n, C); the mean is over those that are kept."""
    features = F.gelu(module.features(module.norm(patches)))
    half = features.shape[1] // 2
    total, count = torch.zeros(half, dtype=patches.dtype), 0.0
    for row, weight in zip(features, kept, strict=True):
        total, count = total + weight * row[half:], count + weight
    rows = []
    for row in features:
        hidden = F.gelu(module.fc1(torch.cat([row[:half], total / count])))
        rows.append(torch.softmax(module.fc3(F.gelu(module.fc2(hidden))), -1))
    return torch.stack(rows)


@pytest.mark.parametrize(("support", "keep_rate"), [("dense", 0.7), ("fibottention", 0.5)])
def test_dynamicvit_drops_in_evaluation_as_published(support, keep_rate):
    made = model({"support": support, "extras": [extra("dynamicvit", keep_rate=keep_rate)]})
    masks, number_of_patches = whole_masks(made), GRID[0] * GRID[1]
    logits, numbers = [], []
    for image in made.vit.embeddings(images())[0]:
        x, ids = image, list(range(number_of_patches))
        for block, layer in enumerate(made.vit.layers, 1):
            if block in (2, 3, 4):
                module = made.vit.token_pruning["dynamicvit"].predictors[block - 2]
                scores = predictions_by_hand(module, x[1:], torch.ones(len(ids)))[:, 0]
                left = int(number_of_patches * keep_rate ** (block - 1))
                ranked = sorted(range(len(ids)), key=lambda j: -scores[j].item())[:left]
                x, ids = torch.cat([x[:1], x[1:][ranked]]), [ids[j] for j in ranked]
            x, _ = attended(layer, x, mask_of(masks[block - 1], ids, 1))
            x = with_mlp(layer, x)
        logits.append(made.classifier(made.vit.layernorm(x)[0]))
        numbers.append(sorted(ids))
    output = made(images())
    torch.testing.assert_close(output.logits, torch.stack(logits), rtol=0, atol=1e-10)
    assert output.token_ids.equal(torch.tensor(numbers))
    assert output.auxiliary_losses is None and output.kept is None


def test_dynamicvit_trains_by_attention_masking():
    """Every patch stays; exp(logit) of a dropped key is multiplied by 0, but a query always sees itself."""
    made = model({"extras": [extra("dynamicvit", keep_rate=0.6, ratio_weight=3.0)]}).train()
    torch.manual_seed(5)
    tokens = made.vit.embeddings(images())[0]
    decisions = []
    for block, layer in enumerate(made.vit.layers, 1):
        if block in (2, 3, 4):
            module = made.vit.token_pruning["dynamicvit"].predictors[block - 2]
            kept = decisions[-1] if decisions else torch.ones(3, 30, dtype=torch.float64)
            scores = torch.stack(
                [predictions_by_hand(module, image[1:], own) for image, own in zip(tokens, kept, strict=True)]
            )
            decisions.append(F.gumbel_softmax(scores.log(), hard=True)[..., 0] * kept)
        outputs = []
        for index, image in enumerate(tokens):
            q, k, v = heads_of(layer, image)
            policy = torch.ones(31, 31, dtype=torch.float64)
            if decisions:
                policy[:, 1:] = decisions[-1][index]
                policy = policy * (1 - torch.eye(31)) + torch.eye(31)
            heads = []
            for head in range(4):
                exponentials = torch.exp(q[:, head] @ k[:, head].T / math.sqrt(6)) * policy
                heads.append(exponentials / exponentials.sum(-1, keepdim=True) @ v[:, head])
            outputs.append(with_mlp(layer, image + layer.attention.o_proj(torch.cat(heads, -1))))
        tokens = torch.stack(outputs)
    logits = made.classifier(made.vit.layernorm(tokens)[:, 0])
    ratios = [((decision.mean(1) - 0.6**stage) ** 2).mean() for stage, decision in enumerate(decisions, 1)]
    labels = torch.tensor([0, 1, 2])
    loss = F.cross_entropy(logits, labels) + 3.0 * sum(ratios) / 3

    torch.manual_seed(5)
    output = made(images(), labels=labels, output_hidden_states=True)
    assert 0 < output.kept.mean() < 1 and output.kept.equal(decisions[-1])
    torch.testing.assert_close(output.logits, logits, rtol=0, atol=1e-10)
    torch.testing.assert_close(output.loss, loss, rtol=0, atol=1e-10)
    torch.testing.assert_close(output.auxiliary_losses["keep_ratio"], 3.0 * sum(ratios) / 3, rtol=0, atol=1e-12)
    assert [state.shape[1] for state in output.hidden_states] == [31] * 6
    parameters = list(made.parameters())
    for own, expected in zip(
        torch.autograd.grad(output.loss, parameters), torch.autograd.grad(loss, parameters), strict=True
    ):
        torch.testing.assert_close(own, expected, rtol=1e-7, atol=1e-10)


# ---- attention over what is left ------------------------------------------------------------------------------------


def attention_layer(prior, layer_idx=1, heads=4):
    torch.manual_seed(3)
    made = PriorAttention(heads, resolve_prior(prior, heads, GRID), layer_idx, head_dim=6).double()
    for parameter in made.parameters():
        nn.init.uniform_(parameter, -1.0, 1.0)
    return made


def qkv(tokens, prefix=2, batch=3):
    generator = torch.Generator().manual_seed(4)
    return torch.randn(3, batch, 4, prefix + tokens, 6, generator=generator, dtype=torch.float64)


def chosen_patches(count=11, batch=3):
    generator = torch.Generator().manual_seed(6)
    return torch.stack([torch.randperm(30, generator=generator)[:count].sort().values for _ in range(batch)])


@pytest.mark.parametrize("prior", OTHERS.values(), ids=OTHERS)
def test_a_masked_token_is_as_good_as_gone(prior):
    layer, (q, k, v), ids = attention_layer(prior), qkv(30), chosen_patches()
    kept = torch.zeros(3, 30, dtype=torch.float64).scatter_(1, ids, 1.0)
    places = torch.cat([torch.arange(2).expand(3, -1), ids + 2], 1)
    masked, weights = attend(layer, q, k, v, GRID, 2, keep_mask=F.pad(kept, (2, 0), value=1.0), need_weights=True)

    def taken(x):
        return x.gather(2, places[:, None, :, None].expand(-1, 4, -1, x.shape[-1]))

    gone, own_weights = attend(layer, taken(q), taken(k), taken(v), GRID, 2, token_ids=ids, need_weights=True)
    torch.testing.assert_close(taken(masked), gone, rtol=0, atol=1e-12)
    columns = taken(weights).gather(3, places[:, None, None].expand(-1, 4, 13, -1))
    torch.testing.assert_close(columns, own_weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("prior", OTHERS.values(), ids=OTHERS)
def test_leading_weights_are_the_first_rows_of_all_weights(prior):
    layer = attention_layer(prior)
    for ids, (q, k, v) in ((None, qkv(30)), (chosen_patches(), qkv(11))):
        out, weights = attend(layer, q, k, v, GRID, 2, need_weights=True, token_ids=ids)
        own_out, rows = attend(layer, q, k, v, GRID, 2, need_weights=True, token_ids=ids, weight_rows=2)
        assert rows.shape == (3, 4, 2, q.shape[2])
        torch.testing.assert_close(rows, weights[:, :, :2], rtol=0, atol=1e-12)
        torch.testing.assert_close(own_out, out, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("support", "learn_prefix"),
    [("bigbird", None), *((OTHERS["fibottention"]["support"], own) for own in (None, False, True)), ("bigbird", True)],
    ids=str,
)
def test_kept_patches_attend_where_they_lie_in_the_grid(support, learn_prefix):
    """Against the mask and M of all patches, restricted pair by pair. The last token has no place and sees all."""
    decay = None if learn_prefix is None else {"name": "violin", "curves": ["hilbert"], "learn_prefix": learn_prefix}
    layer = attention_layer({"support": support, "decay": decay})
    ids = F.pad(chosen_patches(), (0, 1), value=-1)
    q, k, v = qkv(12)
    out, _ = attend(layer, q, k, v, GRID, 2, token_ids=ids)
    whole = torch.tensor(
        build_mask(layer.prior["support"], num_heads=4, num_tokens=30, num_prefix_tokens=2, layer=layer.layer_idx)
    )
    rank = curve_rank("hilbert", GRID).reshape(-1)
    tensors = {} if decay is None else dict(layer.decay_bias.named_parameters())
    for image in range(3):
        places = [None, None, *ids[image].tolist()]
        for head in range(4):
            for row, own in enumerate(places):
                logits, values = [], []
                for column, other in enumerate(places):
                    on_grid = own is not None and other is not None and min(own, other) >= 0
                    if on_grid and not whole[head, 2 + own, 2 + other]:
                        continue
                    logit = q[image, head, row] @ k[image, head, column] / math.sqrt(6)
                    if decay is not None:
                        gamma = torch.sigmoid(tensors["beta"][0, head]).item()
                        factor = gamma ** abs(int(rank[own]) - int(rank[other])) if on_grid else 1.0
                        if not on_grid and learn_prefix:
                            factor = torch.sigmoid(tensors["prefix_beta"][head]).item()
                        logit = logit * tensors["alpha"][head] * factor
                    logits.append(logit)
                    values.append(v[image, head, column])
                expected = torch.softmax(torch.stack(logits), 0) @ torch.stack(values)
                torch.testing.assert_close(out[image, head, row], expected, rtol=0, atol=1e-10)


def test_dropped_keys_have_a_gradient():
    q, k, v = qkv(30)
    kept = torch.ones(3, 32, dtype=torch.float64)
    kept[:, 5:9] = 0.0
    kept.requires_grad_()
    plan = AttentionPlan(LayerKey(4, GRID), 2, resolve_prior("dense", 4, GRID)["support"])
    out, _ = run_plan(AttentionRequest(q, k, v, plan, keep_mask=kept))
    (gradient,) = torch.autograd.grad(out.square().sum(), kept)
    assert (gradient[:, 5:9].abs() > 1e-6).all()
    assert torch.autograd.gradcheck(
        lambda own: run_plan(AttentionRequest(q, k, v, plan, keep_mask=own))[0], (kept,), fast_mode=True
    )


def test_what_run_plan_cannot_do_with_rows_and_dropped_keys():
    q, k, v = qkv(30)
    plan = AttentionPlan(LayerKey(4, GRID), 2, resolve_prior("dense", 4, GRID)["support"])
    with pytest.raises(ValueError, match="weight_rows=3 must be between 1 and the 2 prefix tokens"):
        run_plan(AttentionRequest(q, k, v, plan, need_weights=True, weight_rows=3))
    with pytest.raises(ValueError, match="weight_rows=1 cannot be used with a bias or with dropped keys"):
        run_plan(AttentionRequest(q, k, v, plan, need_weights=True, weight_rows=1, bias=torch.zeros(32, 32)))
    with pytest.raises(ValueError, match="dropped keys have a gradient"):
        run_plan(AttentionRequest(q, k, v, plan, keep_mask=torch.ones(3, 32, dtype=torch.float64)), backend="sdpa")


# ---- the choice -----------------------------------------------------------------------------------------------------


def test_of_equal_scores_the_first_are_kept():
    scores = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]).repeat(1, 40)
    kept, dropped = split_by_score(scores, 100)
    first = [*(j for j in range(240) if j % 6 in (1, 3)), *(j for j in range(240) if j % 6 not in (1, 3))][:100]
    assert kept.tolist() == [sorted(first), list(range(100))]
    assert dropped.tolist() == [sorted(set(range(240)) - set(first)), list(range(100, 240))]


def test_how_many_are_kept():
    """Of EViT the ceiling of the rate as it is written, of DynamicViT the floor of its power."""
    for there, keep_rate, left in ((100, 0.55, 55), (10, 0.7, 7), (139, 0.7, 98), (3, 0.1, 1)):
        assert EViT.count(keep_rate, there) == left
    for keep_rate, stage, left in ((0.7, 1, 137), (0.7, 2, 96), (0.7, 3, 67), (0.5, 2, 49), (0.01, 3, 1)):
        assert DynamicViT.count(keep_rate, stage, 196) == left


def test_pruning_blocks_are_those_of_12_at_the_same_share_of_other_depths():
    expected = {12: [4, 7, 10], 16: [5, 9, 13], 24: [7, 13, 19], 4: [2, 3, 4], 2: [1, 2], 1: [1]}
    assert {depth: TokenPruning.pruning_blocks({"layers": None}, depth) for depth in expected} == expected


# ---- whole models ---------------------------------------------------------------------------------------------------


# Every other part with one kind of pruning; dense attention, and keys that depend on places, with each kind.
CASES = [*zip(OTHERS, cycle(PRUNINGS)), *((other, name) for name in PRUNINGS for other in ("dense", "sparsifiner"))]
with_others = pytest.mark.parametrize(("other", "name"), list(dict.fromkeys(CASES)))


@with_others
def test_keep_rate_1_is_the_model_without_pruning(name, other):
    prior = with_fuse_where_it_can(OTHERS[other], name)
    prior["extras"][0]["keep_rate"] = 1.0
    plain, pruned = model(OTHERS[other], dtype=torch.float32), SparsePriorViTForImageClassification(config(prior))
    missing, unexpected = pruned.load_state_dict(plain.state_dict(), strict=False)
    assert all("token_pruning" in key for key in missing) and not unexpected
    x = images(dtype=torch.float32)
    for trains in (False, True):
        own, expected = (made.train(trains)(x, labels=torch.zeros(3).long()) for made in (pruned, plain))
        assert own.logits.equal(expected.logits) and own.loss.equal(expected.loss)
        assert own.token_ids is None and own.auxiliary_losses is None


@with_others
def test_pruned_models_run_train_and_show_what_they_did(name, other):
    made = model(with_fuse_where_it_can(OTHERS[other], name), dtype=torch.float32)
    settings, kind = pruning_of(made.config.prior)
    sizes = kind.layer_tokens(settings, 5, 30)
    x = images(dtype=torch.float32)
    output = made(x, output_hidden_states=True, output_attentions=True)
    assert [weights.shape[2:] for weights in output.attentions] == [(1 + own, 1 + own) for own, _ in sizes]
    states = [state.shape[1] - 1 for state in output.hidden_states]
    assert states == [30, *(left for _, left in sizes)] and states[-1] < 30
    assert output.token_ids.shape == (3, states[-1])
    torch.testing.assert_close(made(x).logits, output.logits, rtol=1e-5, atol=1e-5)
    made.train()
    optimizer = torch.optim.Adam(made.parameters(), lr=3e-3)
    losses = []
    for _ in range(6):
        loss = made(x, labels=torch.tensor([0, 1, 2])).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses[-3:]) < losses[0]
    idle = {"w_down", "w_up"}  # of Sparsifiner's predictor, which learns from a loss of its own
    for key, parameter in made.named_parameters():
        if key.rpartition(".")[2] not in idle:
            assert parameter.grad is not None and parameter.grad.isfinite().all(), key


def test_training_brings_the_kept_share_to_the_keep_rate():
    made = model("dynamicvit", dtype=torch.float32, num_hidden_layers=3).train()
    optimizer = torch.optim.Adam(made.vit.token_pruning.parameters(), lr=1e-2)
    ratios = []
    torch.manual_seed(0)
    for step in range(60):
        loss = made(images(16, torch.float32, seed=step)).auxiliary_losses["keep_ratio"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ratios.append(loss.item())
    assert sum(ratios[-10:]) < 0.5 * sum(ratios[:10])  # what is left is the spread of 30 draws
    assert made(images(64, torch.float32)).kept.mean().item() == pytest.approx(0.7**3, abs=0.1)


@pytest.mark.parametrize("pooling", ["mean", "class_token_and_mean"])
def test_the_mean_is_over_kept_patches(pooling):
    made = model("dynamicvit", pooling=pooling).train()
    output = made.vit(images())
    for tokens, kept, pooled in zip(output.last_hidden_state, output.kept, output.pooler_output, strict=True):
        mean = torch.stack([token for token, own in zip(tokens[1:], kept, strict=True) if own == 1]).mean(0)
        torch.testing.assert_close(pooled[-24:], mean, rtol=0, atol=1e-12)
    output = made.eval().vit(images())
    torch.testing.assert_close(output.pooler_output[:, -24:], output.last_hidden_state[:, 1:].mean(1))


@pytest.mark.parametrize("name", PRUNINGS)
def test_gradient_checkpointing_changes_nothing(name):
    gradients = []
    for checkpoints in (False, True):
        made = model(f"fibottention+{name}").train()
        if checkpoints:
            made.gradient_checkpointing_enable()
        torch.manual_seed(2)
        made(images(), labels=torch.tensor([0, 1, 2])).loss.backward()
        gradients.append([parameter.grad for parameter in made.parameters()])
    for own, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRUNINGS)
def test_it_compiles_into_one_graph(name):
    torch._dynamo.reset()
    made = model(f"fibottention+{name}", num_hidden_layers=3)
    compiled = torch.compile(made, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(images()).logits, made(images()).logits, rtol=0, atol=1e-12)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", PRUNINGS)
def test_half_precision_and_other_image_sizes(name):
    made = model(f"violin+{name}", dtype=torch.float32)
    larger = torch.randn(2, 3, 28, 32)
    with torch.no_grad():
        ids = made(larger).token_ids
        settings, kind = pruning_of(made.config.prior)
        assert ids.shape[1] == kind.layer_tokens(settings, 5, 56)[-1][1] and 30 <= ids.max() < 56
        half = copy.deepcopy(made).bfloat16()(images(dtype=torch.bfloat16))
    assert half.logits.dtype == torch.bfloat16 and half.logits.isfinite().all()


def test_a_checkpoint_runs_at_another_keep_rate(tmp_path):
    model("dynamicvit").save_pretrained(tmp_path)
    prior = {"extras": [extra("dynamicvit", keep_rate=0.4)]}
    again, info = SparsePriorViTForImageClassification.from_pretrained(tmp_path, prior=prior, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert again(images(dtype=torch.float32)).token_ids.shape[1] == int(30 * 0.4**3)


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRUNINGS)
def test_bad_keep_rates(name):
    pruning = model(name).vit.token_pruning[name]
    for rate in (0, -0.5, 1.2, True, "half", None, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"{name}: keep_rate={rate!r} must be a number above 0 and at most 1"):
            config({"extras": [extra(name, keep_rate=rate)]})
        with pytest.raises(ValueError, match="keep_rate"):
            pruning.set_keep_rate(rate)


@pytest.mark.parametrize(
    ("prior", "options", "message"),
    [
        ({"extras": [extra("evit", layers=[])]}, {}, r"evit: layers=\[\] must be a list of blocks"),
        ({"extras": [extra("evit", layers="4")]}, {}, "evit: layers='4' must be a list of blocks"),
        ({"extras": [extra("evit", layers=[0, 2])]}, {}, "evit: layers=0 must be an integer of 1 or more"),
        ({"extras": [extra("evit", layers=[3, 2])]}, {}, r"evit: layers=\[3, 2\] must ascend"),
        ({"extras": [extra("dynamicvit", layers=[2, 6])]}, {}, r"layers=\[2, 6\] must be at most 5"),
        ({"extras": [extra("evit", fuse="yes")]}, {}, "evit: fuse='yes'"),
        ({"extras": [extra("evit", rate=0.7)]}, {}, "rate"),
        ({"extras": [extra("dynamicvit", ratio_weight=-1)]}, {}, "ratio_weight=-1 must be a number of 0 or more"),
        ("evit+dynamicvit", {}, "'evit' drops tokens, which dynamicvit cannot follow"),
        ("swin_rpb+evit", {}, "'evit' drops tokens, which swin_rpb cannot follow"),
        ("localvit+dynamicvit", {}, "'dynamicvit' drops tokens, which localvit cannot follow"),
        ("linformer+evit", {}, "'evit' drops tokens, which mixer 'linformer' cannot follow"),
        ("sparsifiner+evit", {}, "the fused token of 'evit' has none; set fuse to false"),
        ("evit", {"use_class_token": False, "pooling": "mean"}, "'evit' needs use_class_token=True"),
        ("dynamicvit", {"hidden_size": 22, "num_attention_heads": 2}, "a multiple of 4 as hidden_size, not 22"),
    ],
    ids=str,
)
def test_bad_priors_give_one_clear_line(prior, options, message):
    with pytest.raises(ValueError, match=message) as error:
        config(prior, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", PRUNINGS)
def test_places_without_pruning(name):
    with pytest.raises(ValueError, match=f"prior '{name}' drops tokens, and the feature maps of a backbone need all"):
        SparsePriorViTBackbone(config(name))
    stock = ViTForImageClassification(ViTConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ValueError, match=f"'{name}' changes the model; apply_prior reaches attention alone"):
        sp.apply_prior(stock, name)


# ---- losses ---------------------------------------------------------------------------------------------------------


def test_token_loss_counts_kept_patches_only():
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(2, 8, 4, generator=generator)
    tokens = torch.randn(2, 6, 4, generator=generator)
    ids = torch.tensor([[0, 2, 5, -1], [1, 2, 4, -1]])
    errors = [((tokens[b, p] - teacher[b, p]) ** 2).mean() for b in range(2) for p in range(2)]
    errors += [((tokens[b, 2 + j] - teacher[b, 2 + ids[b, j]]) ** 2).mean() for b in range(2) for j in range(3)]
    torch.testing.assert_close(token_loss(tokens, teacher, ids, 2), torch.stack(errors).mean())
    kept = torch.tensor([[1.0, 0.0, 0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]], requires_grad=True)
    tokens = torch.randn(2, 8, 4, generator=generator)
    places = [(0, 0), (0, 1), (0, 2), (0, 5), (1, 0), (1, 1), (1, 7)]
    errors = [((tokens[place] - teacher[place]) ** 2).mean() for place in places]
    loss = token_loss(tokens, teacher, None, 2, kept)
    torch.testing.assert_close(loss, torch.stack(errors).mean())
    assert not loss.requires_grad
    torch.testing.assert_close(token_loss(tokens, teacher, None, 2), F.mse_loss(tokens, teacher))


def trainer(made, tmp_path, **options):
    arguments = SparsePriorTrainingArguments(str(tmp_path), report_to="none", use_cpu=True, remove_unused_columns=False)
    return SparsePriorTrainer(model=made, args=arguments, **options)


def test_class_probabilities_and_indices_train_with_the_keep_ratio(tmp_path):
    made = model("dynamicvit", dtype=torch.float32).train()
    own, x, losses = trainer(made, tmp_path), images(dtype=torch.float32), []
    for labels in (torch.tensor([0, 1, 2]), torch.eye(3)):
        torch.manual_seed(0)
        losses.append(own.compute_loss(made, {"pixel_values": x, "labels": labels}))
    torch.manual_seed(0)
    output = made(x)
    expected = F.cross_entropy(output.logits, torch.tensor([0, 1, 2])) + output.auxiliary_losses["keep_ratio"]
    torch.testing.assert_close(torch.stack(losses), expected.expand(2))
    logs = {"loss": 0.0}
    own.log(logs)
    assert logs["loss_keep_ratio"] == pytest.approx(output.auxiliary_losses["keep_ratio"].item(), rel=1e-5)


def test_a_teacher_of_pruned_students(tmp_path):
    teacher = Teacher(model("dense", seed=9, dtype=torch.float32))
    weights = {"labels": 1.0, "token": 0.5, "class": 0.5}
    for name in PRUNINGS:
        made = model(name, dtype=torch.float32).train()
        own = trainer(made, tmp_path, distillation=Distillation(weights, teacher))
        loss = own.compute_loss(made, {"pixel_values": images(dtype=torch.float32), "labels": torch.tensor([0, 1, 2])})
        loss.backward()
        assert loss.isfinite()
        logs = {"loss": 0.0}
        own.log(logs)
        parts = [logs[f"loss_{part}"] * weight for part, weight in weights.items()]
        assert loss.item() == pytest.approx(sum(parts), rel=1e-5)
    with pytest.raises(ValueError, match="keep-ratio loss of prior 'dynamicvit' comes with the labels loss"):
        Distillation({"token": 1.0}, teacher).check(model("dynamicvit"))
    both = {"predictor": "sparsifiner", "extras": [extra("evit", fuse=False)]}
    with pytest.raises(ValueError, match="the attention loss compares all tokens"):
        Distillation({"attention": 1.0}, teacher).check(model(both))


def test_token_labels_count_kept_patches_only():
    generator = torch.Generator().manual_seed(0)
    targets = torch.softmax(torch.randn(2, 5, 3, generator=generator), -1)
    logits = torch.randn(2, 3, 3, generator=generator)
    ids = torch.tensor([[0, 4, -1], [2, 3, -1]])

    def error(own, target):
        return -(target * torch.log_softmax(own, -1)).sum()

    errors = [error(logits[b, j], targets[b, ids[b, j]]) for b in range(2) for j in range(2)]
    torch.testing.assert_close(token_label_loss(logits, targets, ids), torch.stack(errors).mean())
    kept = torch.tensor([[1.0, 0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]], requires_grad=True)
    logits = torch.randn(2, 5, 3, generator=generator)
    errors = [error(logits[place], targets[place]) for place in ((0, 0), (0, 3), (1, 4))]
    loss = token_label_loss(logits, targets, None, kept)
    torch.testing.assert_close(loss, torch.stack(errors).mean())
    assert not loss.requires_grad


@pytest.mark.parametrize("name", PRUNINGS)
def test_pruned_lv_vit(name):
    made = model(name, stem="convolution", stem_channels=8, residual_scale=0.5, token_classifier=True)
    output = made(images())
    assert output.token_logits.shape == (3, output.token_ids.shape[1], 3)
    tokens = made.vit(images()).last_hidden_state
    best = torch.stack([made.token_classifier(own[1:]).max(0).values for own in tokens])
    torch.testing.assert_close(output.logits, made.classifier(tokens[:, 0]) + 0.5 * best, rtol=0, atol=1e-12)


# ---- FLOPs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pruning",
    [
        *(extra(name, keep_rate=rate) for name in PRUNINGS for rate in (0.7, 0.05, 1.0)),
        extra("evit", fuse=False),
        extra("evit", keep_rate=0.97),  # 30 of 30: nothing to fuse at first
        *(extra(name, layers=[1, 3]) for name in PRUNINGS),
    ],
    ids=str,
)
def test_tokens_and_flops_are_what_runs(pruning):
    own = config({"extras": [pruning]}, num_register_tokens=1)
    own._attn_implementation = "eager"
    with torch.device("meta"):
        made = SparsePriorViTForImageClassification(own).eval()
    seen = []
    for layer in made.vit.layers:
        layer.attention.register_forward_pre_hook(lambda module, inputs: seen.append([inputs[0].shape[1] - 2]))
        layer.mlp.register_forward_pre_hook(lambda module, inputs: seen[-1].append(inputs[0].shape[1] - 2))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        made(torch.empty(1, 3, 20, 24, device="meta"))
    settings, kind = pruning_of(own.prior)
    assert [tuple(sizes) for sizes in seen] == kind.layer_tokens(settings, 5, 30)
    counted = model_flops(own, convention="torch")
    assert counted.total == counter.get_total_flops()
    assert counted.attended_pairs == [4 * (attention + 2) ** 2 for attention, _ in seen]


@pytest.mark.parametrize("name", PRUNINGS)
def test_flops_of_pruned_lv_vit_are_what_runs(name):
    own = SparsePriorViTConfig.from_preset("lvvit_small", prior=name, num_labels=10)
    own._attn_implementation = "eager"
    with torch.device("meta"):
        made = SparsePriorViTForImageClassification(own).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        made(torch.empty(1, 3, 224, 224, device="meta"))
    assert model_flops(own, convention="torch").total == counter.get_total_flops()


def test_predictors_are_counted_over_the_tokens_that_are_left():
    both = {"predictor": {"name": "sparsifiner", "keep_rate": 0.25}, "extras": [extra("evit", fuse=False)]}
    counted = preset_flops("deit_small", prior=both)
    patches = [196] * 4 + [138] * 3 + [97] * 3 + [68] * 2
    # The class token sees all and is seen by all. Each patch sees 50 others, counted from all 197, however many are
    # left.
    assert counted.attended_pairs == [6 * (n + 1 + n * (1 + 50)) for n in patches]


@pytest.mark.parametrize(
    ("name", "words"),
    [("evit", "22 from layer 2 on, 17 from layer 4 on"), ("dynamicvit", "21 from layer 1 on, 14 from")],
)
def test_the_counter_says_from_which_layer_on_tokens_are_gone(name, words):
    own = config({"extras": [extra(name, layers=[1, 3])]})
    assert f"1 prefix token and the patches; of these {words}" in model_flops(own).tokens


@pytest.mark.parametrize("prior", ["fibottention+evit", "violin+dynamicvit"])
def test_flops_that_differ_between_images_are_not_counted(prior):
    with pytest.raises(ValueError, match="which pairs are left among the kept patches differs between images"):
        preset_flops("deit_small", prior=prior)


def test_sparsifiners_table_1_counts_masks():
    """Nonzeros of masks as the published code makes them: the class token's whole row, kept patches in other rows."""
    for keep_rate in (0.7, 0.5):
        pairs, patches = 0, 196
        for block in range(1, 13):
            if block in (5, 8, 11):
                patches = math.ceil(keep_rate ** ((block - 2) // 3) * 196)
            mask = torch.zeros(197, 197, dtype=torch.bool)
            mask[1 : 1 + patches, 1 : 1 + patches] = True
            if patches == 196:
                mask[:, 0] = True
            mask[0] = True
            pairs += int(mask.sum())
        assert masked_pruning_flops(keep_rate) == 2 * pairs * 384


def test_numbers_without_a_formula_are_not_reproduced():
    of_sparsifiner = [number for number in unexplained_numbers() if "Sparsifiner" in number.source]
    of_table_2 = [number for number in of_sparsifiner if "Table 2" in number.source]
    assert len(of_sparsifiner) == 9 and len(of_table_2) == 5
    for number in of_sparsifiner:
        assert (abs(number.count - number.printed) < 0.1) == (number in of_table_2)  # those miss the last digit alone
    for number in unexplained_numbers():
        decimals = len(f"{number.printed:g}".partition(".")[2])
        assert round(number.count, decimals) != number.printed and number.includes


# ---- schedules ------------------------------------------------------------------------------------------------------


def test_the_keep_rate_falls_as_half_a_cosine():
    rates = {0: 1.0, 9.99: 1.0, 10: 1.0, 35: 0.7 + 0.3 * (0.5 + 2**-1.5), 60: 0.85, 110: 0.7}
    assert {epoch: scheduled_keep_rate(epoch, 10, 100, 0.7) for epoch in rates} == pytest.approx(rates)


class Steps(TrainerCallback):
    """What the model's keep rate is in the steps and in the evaluations."""

    def __init__(self, made):
        self.pruning, self.training, self.evaluation = made.vit.token_pruning["evit"], [], []

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.training.append(self.pruning.keep_rate)

    def on_evaluate(self, args, state, control, **kwargs):
        self.evaluation.append(self.pruning.keep_rate)


def test_training_steps_have_the_scheduled_keep_rate_and_evaluations_the_priors(tmp_path):
    made = model("evit", dtype=torch.float32)
    data = [{"pixel_values": image, "labels": 0} for image in images(8, torch.float32)]
    arguments = SparsePriorTrainingArguments(
        str(tmp_path), report_to="none", use_cpu=True, remove_unused_columns=False, save_strategy="no",
        disable_tqdm=True, num_train_epochs=4, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        eval_strategy="epoch", keep_rate_start_epoch=1.0, keep_rate_epochs=2.0,
    )  # fmt: skip
    own = SparsePriorTrainer(model=made, args=arguments, train_dataset=data, eval_dataset=data[:2])
    steps = Steps(made)
    own.add_callback(steps)
    own.train()
    expected = [scheduled_keep_rate(step / 2, 1.0, 2.0, 0.7) for step in range(8)]
    assert steps.training == pytest.approx(expected) and steps.evaluation == [0.7] * 4
    assert expected[:3] == [1.0] * 3 and expected[-2:] == [0.7] * 2
    with pytest.raises(ValueError, match="are for priors with evit"):
        SparsePriorTrainer(model=model("dynamicvit"), args=arguments, eval_dataset=data)
    arguments.torch_compile = True
    with pytest.raises(ValueError, match=r"torch_compile cannot be used with keep_rate_start_epoch=1\.0"):
        SparsePriorTrainer(model=made, args=arguments, eval_dataset=data)


def test_the_backbone_has_its_own_learning_rate(tmp_path):
    made = model("violin+dynamicvit", dtype=torch.float32)
    arguments = SparsePriorTrainingArguments(
        str(tmp_path), report_to="none", use_cpu=True, learning_rate=1e-3, backbone_learning_rate=0.01
    )
    groups = SparsePriorTrainer(model=made, args=arguments).create_optimizer().param_groups
    rates = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    for name, parameter in made.named_parameters():
        own = "token_pruning" in name or "decay_bias" in name
        assert rates[id(parameter)] == pytest.approx(1e-3 if own else 1e-5), name


def test_bad_training_arguments(tmp_path):
    for field, value, message in (
        ("backbone_learning_rate", 1.5, "must be between 0 and 1"),
        ("keep_rate_start_epoch", -1, "must be a number of 0 or more"),
        ("keep_rate_epochs", float("inf"), "must be a number of 0 or more"),
    ):
        with pytest.raises(ValueError, match=f"{field}={value} {message}"):
            SparsePriorTrainingArguments(str(tmp_path), **{field: value})
