"""Token merging against the paper's words in loops over single numbers, and models that merge against a plain form."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import ViTConfig, ViTForImageClassification

import hf_sparseprior as sp
from hf_sparseprior import SparsePriorViTBackbone, SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.analysis.flops import model_flops
from hf_sparseprior.attention.functional import run_plan
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import DEFAULT_OPTIONS, AttentionRequest
from hf_sparseprior.patterns.supports import LayerKey
from hf_sparseprior.priors import token_merging
from hf_sparseprior.priors.prior import pruning_of, resolve_prior
from hf_sparseprior.priors.token_merging import bipartite_soft_matching, merge, merges_of_layers
from hf_sparseprior.priors.token_pruning import Tokens
from hf_sparseprior.training import Distillation, SparsePriorTrainer, SparsePriorTrainingArguments, Teacher
from tasks.benchmark.token_merging import PlainMerging, merge_by_pairs, written_out
from tests.each import each

GRID = (5, 6)
SIZES = {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 32}
LABELS = torch.tensor([0, 1, 2])


def tome(**settings):
    return {"extras": [{"name": "tome", **settings}]}


def config(prior, **settings):
    sides = {"image_size": (4 * GRID[0], 4 * GRID[1]), "patch_size": 4, "num_labels": 3}
    return SparsePriorViTConfig(prior=prior, **{**SIZES, **sides, **settings})


def model(prior="tome", dtype=torch.float64, **settings):
    """A model in evaluation whose weights are large enough for every merge to matter."""
    torch.manual_seed(0)
    made = SparsePriorViTForImageClassification(config(prior, initializer_range=0.2, **settings)).to(dtype).eval()
    for module in made.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, mean=1.0, std=0.2)
            nn.init.normal_(module.bias, std=0.2)
    return made


def images(batch=3, dtype=torch.float64, height=4 * GRID[0], width=4 * GRID[1]):
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1), dtype=dtype)


def plain_logits(made, pixels):
    return made.classifier(PlainMerging(made.vit)(pixels).pooler_output)


# ---- merging --------------------------------------------------------------------------------------------------------


def brute_force(tokens, sizes, metric, count, prefix):
    """Bolya et al., section 3, for one image of Python lists: an edge from each token of A to its most similar one of
    B, the `count` most similar edges, and weighted means of what they connect.
    """

    def cosine(x, y):
        dot = sum(a * b for a, b in zip(x, y, strict=True))
        return dot / math.sqrt(sum(a * a for a in x) * sum(b * b for b in y))

    places = range(prefix, len(tokens))
    first, second = places[::2], places[1::2]
    edges = []
    for a in first:
        similar = {b: cosine(metric[a], metric[b]) for b in second}
        b = max(similar, key=similar.get)
        edges.append((similar[b], a, b))
    into = {a: b for _, a, b in sorted(edges, reverse=True)[:count]}
    new, new_sizes = [], []
    for place in range(len(tokens)):
        if place in into:
            continue
        group = [place, *(a for a, b in into.items() if b == place)]
        size = sum(sizes[member] for member in group)
        new.append([sum(sizes[m] * tokens[m][c] for m in group) / size for c in range(len(tokens[0]))])
        new_sizes.append(size)
    return new, new_sizes


@each("prefix, patches, count, rows", itertools.product((0, 1, 3), (9, 12), (0, 1, 4), (2, 1024)))
def test_merging_is_the_papers(prefix, patches, count, rows, monkeypatch):
    monkeypatch.setattr(token_merging, "ROWS", rows)
    generator = torch.Generator().manual_seed(patches + count)
    tokens, metric = (torch.randn(2, prefix + patches, width, generator=generator) for width in (5, 4))
    sizes = torch.randint(1, 5, (2, prefix + patches), generator=generator).float()
    merged = merge(tokens, sizes, bipartite_soft_matching(metric, count, prefix))
    plain = merge_by_pairs(tokens, sizes, metric, count, prefix)
    for image in range(2):
        lists = (value[image].double().tolist() for value in (tokens, sizes, metric))
        new, new_sizes = brute_force(*lists, count, prefix)
        for own, own_sizes in (merged, plain):
            torch.testing.assert_close(own[image].double(), torch.tensor(new, dtype=torch.double), rtol=0, atol=1e-5)
            assert own_sizes[image].tolist() == new_sizes
        assert len(new) == prefix + patches - count and sum(new_sizes) == sizes[image].sum()


def test_several_tokens_may_go_into_one():
    metric = torch.tensor([[[1.0, 0.1], [1.0, 0.0], [1.0, -0.1], [0.0, 1.0]]])  # A: 0 and 2, B: 1 and 3
    tokens, sizes = merge(torch.arange(4.0).view(1, 4, 1), torch.ones(1, 4), bipartite_soft_matching(metric, 2, 0))
    assert tokens.flatten().tolist() == [1.0, 3.0] and sizes.tolist() == [[3.0, 1.0]]


def test_of_equal_edges_the_first_are_merged():
    merges = bipartite_soft_matching(torch.ones(1, 9, 2), 2, 1)
    assert merges.merged.tolist() == [[1, 3]] and merges.remaining.tolist() == [[0, 2, 4, 5, 6, 7, 8]]


def test_mixed_precision_does_not_round_similarities():
    metric = torch.randn(2, 65, 8, generator=torch.Generator().manual_seed(0))
    exact = bipartite_soft_matching(metric, 16, 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal((metric @ metric.mT).float(), metric.double() @ metric.double().mT)
        mixed = bipartite_soft_matching(metric, 16, 1)
    assert all(torch.equal(one, other) for one, other in zip(exact, mixed, strict=True))


@each("backend", ["sdpa", "reference"])
def test_a_token_counts_in_attention_as_often_as_the_patches_it_stands_for(backend):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 12, 6, generator=generator, dtype=torch.float64).requires_grad_()
    sizes = torch.randint(1, 4, (2, 12), generator=generator).double()
    options = Tokens(torch.full((2, 10), -1), sizes=sizes).options(DEFAULT_OPTIONS, None)
    plan = AttentionPlan(LayerKey(4, GRID), 2, resolve_prior("dense", 4, GRID)["support"])
    out, _ = run_plan(AttentionRequest(q, k, v, plan, bias=options.bias, token_ids=options.token_ids), backend)
    images_of_repeated = []
    for own_q, own_k, own_v, own in zip(q, k, v, sizes, strict=True):
        keys, values = (x.repeat_interleave(own.long(), 1) for x in (own_k, own_v))
        images_of_repeated.append(torch.softmax(own_q @ keys.mT / 6**0.5, -1) @ values)
    expected = torch.stack(images_of_repeated)
    for other in (expected, written_out(q, k, v, sizes)):
        torch.testing.assert_close(out, other, rtol=0, atol=1e-12)
    grads = (torch.autograd.grad(result.square().sum(), (q, k, v)) for result in (out, expected))
    for own, other in zip(*grads, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-11)


# ---- how many -------------------------------------------------------------------------------------------------------


@each("keep", [1.0, 0.9, 0.5])
def test_so_many_patches_are_left(keep):
    for patches, layers in ((196, 12), (1024, 12), (16, 3)):
        counts = merges_of_layers({"keep": keep, "r": None}, patches, layers)
        assert patches - sum(counts) == round(keep * patches) and max(counts) - min(counts) <= 1


def test_r_is_the_papers_and_at_most_half():
    assert merges_of_layers({"keep": None, "r": 16}, 196, 12) == [16] * 11 + [10]  # 20 are left for the last
    assert merges_of_layers({"keep": None, "r": [3, 0, 9]}, 12, 3) == [3, 0, 4]
    for patches in range(1, 60):  # whatever the image, a token is left
        assert sum(merges_of_layers({"keep": 0.01, "r": None}, patches, 3)) < patches


# ---- whole models ---------------------------------------------------------------------------------------------------


CASES = [
    ({"keep": 0.5}, {}),
    ({"keep": 0.3}, {"num_register_tokens": 2, "pooling": "class_token_and_mean", "layerscale_value": 0.7}),
    ({"keep": 0.6}, {"use_class_token": False, "pooling": "mean"}),
]


@pytest.mark.parametrize(("settings", "options"), CASES, ids=str)
def test_outputs_and_gradients_are_those_of_the_plain_form(settings, options):
    made = model(tome(**settings), **options)
    own, expected = made(images()).logits, plain_logits(made, images())
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-11)
    parameters = [parameter for name, parameter in made.named_parameters() if "mask_token" not in name]
    grads = (torch.autograd.grad(logits.square().sum(), parameters) for logits in (own, expected))
    for gradient, other in zip(*grads, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-9)
    # What is merged matters.
    dense = SparsePriorViTForImageClassification(config("dense", **options)).double().eval()
    dense.load_state_dict(made.state_dict())
    assert (dense(images()).logits - own).abs().max() > 1e-3


def test_gradients_are_finite_differences():
    """Small steps change no merge, and there the model is smooth."""
    made = model(tome(keep=0.4), num_hidden_layers=2)
    weights = [made.vit.layers[0].attention.k_proj.weight, made.vit.layers[1].attention.q_proj.weight]

    def logits(pixels, *_):
        return made(pixels).logits

    assert torch.autograd.gradcheck(logits, (images(2).requires_grad_(), *weights), fast_mode=True)


def test_keep_1_is_the_model_without_merging():
    dense, merged = model("dense", torch.float32), model(tome(keep=1.0), torch.float32)
    merged.load_state_dict(dense.state_dict())
    for trains in (False, True):
        own, expected = (made.train(trains)(images(dtype=torch.float32), labels=LABELS) for made in (merged, dense))
        assert own.logits.equal(expected.logits) and own.loss.equal(expected.loss) and own.token_ids is None


@each("settings", [{"keep": 0.5}, {"r": 3}, {"r": [0, 5, 0, 2]}])
def test_what_models_say_of_their_tokens(settings):
    made = model(tome(**settings), torch.float32)
    kind, sizes = pruning_of(made.config.prior)[1], None
    for height, width in ((20, 24), (28, 32), (4, 12)):
        x = images(2, torch.float32, height, width)
        grid = (height // 4) * (width // 4)
        sizes = kind.layer_tokens(made.config.prior["extras"][0], 4, grid)
        output = made(x, output_hidden_states=True, output_attentions=True)
        assert [weights.shape[2:] for weights in output.attentions] == [(1 + own, 1 + own) for own, _ in sizes]
        states = [state.shape[1] - 1 for state in output.hidden_states]
        assert states == [grid, *(left for _, left in sizes)]
        torch.testing.assert_close(made(x).logits, output.logits, rtol=1e-5, atol=1e-5)
        assert output.token_ids.shape == (2, states[-1]) and output.token_ids.max() < grid
        for ids in output.token_ids.tolist():  # tokens that stand for one patch, in raster order
            single = [number for number in ids if number >= 0]
            assert single == sorted(set(single)) and len(single) < grid


def test_it_trains():
    made = model("tome", torch.float32).train()
    optimizer, losses = torch.optim.Adam(made.parameters(), lr=3e-3), []
    for _ in range(6):
        loss = made(images(dtype=torch.float32), labels=LABELS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses[-3:]) < losses[0]
    assert all(parameter.grad.isfinite().all() for parameter in made.parameters())


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operation makes."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        made = [tensor for tensor in (out if isinstance(out, tuple) else [out]) if isinstance(tensor, torch.Tensor)]
        self.bytes = max(self.bytes, *(tensor.untyped_storage().nbytes() for tensor in made), 0)
        return out


def test_a_training_step_forms_no_table_of_all_pairs():
    made = model("tome", torch.float32, num_hidden_layers=2, image_size=192).train()
    with Largest() as largest:
        made(images(1, torch.float32, 192, 192), labels=LABELS[:1]).loss.backward()
    assert largest.bytes < 4 * 2305**2 / 4


@each("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant):
    gradients = []
    for checkpoints in (False, True):
        made = model(hidden_dropout_prob=0.1).train()
        if checkpoints:
            made.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(2)
        made(images(), labels=LABELS).loss.backward()
        gradients.append([parameter.grad for parameter in made.parameters()])
    for own, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)


def test_half_precision():
    made = model(dtype=torch.float32)
    half = copy.deepcopy(made).bfloat16()(images(dtype=torch.bfloat16))
    assert half.logits.dtype == torch.bfloat16 and half.logits.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        assert made(images(dtype=torch.float32)).logits.isfinite().all()


@pytest.mark.slow
@each("trains", [False, True])
def test_it_compiles_into_one_graph(trains):
    torch._dynamo.reset()
    made = model(num_hidden_layers=3)
    if trains:
        made.train().gradient_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(made, backend="eager", fullgraph=True)
    for size in ((20, 24), (28, 24)):
        x = images(2, torch.float64, *size)
        torch.testing.assert_close(compiled(x).logits, made(x).logits, rtol=0, atol=1e-12)
    torch._dynamo.reset()


def test_a_dense_checkpoint_merges_and_is_saved(tmp_path):
    dense = model("dense", torch.float32)
    dense.save_pretrained(tmp_path / "dense")
    merged, info = SparsePriorViTForImageClassification.from_pretrained(
        tmp_path / "dense", prior=tome(keep=0.4), output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert merged.eval()(images(dtype=torch.float32)).token_ids.shape[1] == 12
    merged.save_pretrained(tmp_path / "merged")
    again = SparsePriorViTForImageClassification.from_pretrained(tmp_path / "merged").eval()
    assert again.config.prior == merged.config.prior and again.config.prior_name == "tome"
    assert again(images(dtype=torch.float32)).logits.equal(merged(images(dtype=torch.float32)).logits)


# ---- FLOPs ----------------------------------------------------------------------------------------------------------


@each("settings", [{"keep": 0.5}, {"keep": 1.0}, {"r": 3}, {"r": [0, 5, 0, 2]}])
def test_tokens_and_flops_are_what_runs(settings):
    own = config(tome(**settings), num_register_tokens=1)
    own._attn_implementation = "eager"
    with torch.device("meta"):
        made = SparsePriorViTForImageClassification(own).eval()
    seen = []
    for layer in made.vit.layers:
        layer.attention.register_forward_pre_hook(lambda module, inputs: seen.append([inputs[0].shape[1] - 2]))
        layer.mlp.register_forward_pre_hook(lambda module, inputs: seen[-1].append(inputs[0].shape[1] - 2))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        made(torch.empty(1, 3, 20, 24, device="meta"))
    kind = pruning_of(own.prior)[1]
    assert [tuple(sizes) for sizes in seen] == kind.layer_tokens(own.prior["extras"][0], 4, 30)
    counted = model_flops(own, convention="torch")
    assert counted.total == counter.get_total_flops()
    assert counted.attended_pairs == [4 * (attention + 2) ** 2 for attention, _ in seen]
    assert own.pruning_ratio == 0.0  # of a layer's tokens all pairs are attended


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prior", "options", "message"),
    [
        (tome(keep=0), {}, "tome: keep=0 must be a number above 0 and at most 1"),
        (tome(keep="half"), {}, "tome: keep='half' must be a number above 0"),
        (tome(keep=True), {}, "tome: keep=True must be a number above 0"),
        (tome(keep=float("nan")), {}, "tome: keep=nan must be a number above 0"),
        (tome(keep=0.5, r=2), {}, r"tome: keep=0\.5 and r=2 cannot both be given"),
        (tome(r=-1), {}, "tome: r=-1 must be an integer of 0 or more, or a list with one for each block"),
        (tome(r="3"), {}, "tome: r='3' must be an integer of 0 or more"),
        (tome(r=[1, 2.5]), {}, r"tome: r=2\.5 must be an integer of 0 or more"),
        (tome(r=[1, 2]), {}, r"tome: r=\[1, 2\] must have one number for each of 4 blocks"),
        (tome(r=9), {}, "tome: r=9: block 3 would merge 9 of 12 tokens, at most half can be"),
        (tome(keep=0.2), {"num_hidden_layers": 1}, r"tome: keep=0\.2: block 1 would merge 24 of 30 tokens"),
        (tome(keep_rate=0.7), {}, "keep_rate"),
        ("fibottention+tome", {}, "'tome' merges tokens, .* support='fibottention' must be 'dense'"),
        ("violin+tome", {}, "'tome' merges tokens, .* decay='violin' must be None"),
        ("topk+tome", {}, "'tome' merges tokens, .* predictor='topk' must be None"),
        ("linformer+tome", {}, "'tome' merges tokens, which mixer 'linformer' cannot follow"),
        ("tome+evit", {}, "'tome' merges tokens, which evit cannot follow"),
        ("swin_rpb+tome", {}, "'tome' merges tokens, which swin_rpb cannot follow"),
        ("localvit+tome", {}, "'tome' merges tokens, which localvit cannot follow"),
        ("tome", {"position_embedding": "rotary", "hidden_size": 32}, "merges tokens, and position_embedding='rotary'"),
    ],
    ids=str,
)
def test_bad_priors_give_one_clear_line(prior, options, message):
    with pytest.raises(ValueError, match=message) as error:
        config(prior, **options)
    assert "\n" not in str(error.value)


def test_places_without_merging():
    with pytest.raises(ValueError, match="prior 'tome' merges tokens, and the feature maps of a backbone need all"):
        SparsePriorViTBackbone(config("tome"))
    stock = ViTForImageClassification(ViTConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ValueError, match="'tome' changes the model; apply_prior reaches attention alone"):
        sp.apply_prior(stock, "tome")
    with pytest.raises(ValueError, match="'tome' merges tokens, as images of several sizes cannot"):
        model(dtype=torch.float32)([torch.randn(3, 20, 24), torch.randn(3, 24, 20)])


# ---- losses ---------------------------------------------------------------------------------------------------------


def test_a_teacher_of_students_that_merge(tmp_path):
    teacher = Teacher(model("dense", torch.float32))
    weights = {"labels": 1.0, "token": 0.5, "class": 0.5}
    made = model(dtype=torch.float32, token_classifier=True).train()
    arguments = SparsePriorTrainingArguments(str(tmp_path), report_to="none", use_cpu=True, remove_unused_columns=False)
    trainer = SparsePriorTrainer(model=made, args=arguments, distillation=Distillation(weights, teacher))
    loss = trainer.compute_loss(made, {"pixel_values": images(dtype=torch.float32), "labels": LABELS})
    loss.backward()
    assert loss.isfinite() and made.vit.layers[0].attention.v_proj.weight.grad.abs().max() > 0
