"""Token merging against the paper's words in loops over single numbers, and a merged model against its plain form."""

import itertools
import math

import pytest
import torch

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTModel
from tasks.benchmark.token_merging import (
    MergedViT,
    bipartite_soft_matching,
    fused,
    merge,
    merge_by_pairs,
    merges_of_layers,
    written_out,
)
from tests.each import each


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


@each("prefix, patches, count", itertools.product((0, 1, 3), (9, 12), (0, 1, 4)))
def test_merging_is_the_papers(prefix, patches, count):
    generator = torch.Generator().manual_seed(patches + count)
    tokens, metric = (torch.randn(2, prefix + patches, width, generator=generator) for width in (5, 4))
    sizes = torch.randint(1, 5, (2, prefix + patches), generator=generator).float()
    found = merge(tokens, sizes, bipartite_soft_matching(metric, count, prefix))
    plain = merge_by_pairs(tokens, sizes, metric, count, prefix)
    for image in range(2):
        lists = (value[image].double().tolist() for value in (tokens, sizes, metric))
        new, new_sizes = brute_force(*lists, count, prefix)
        for own, own_sizes in (found, plain):
            torch.testing.assert_close(own[image].double(), torch.tensor(new, dtype=torch.double), rtol=0, atol=1e-5)
            assert own_sizes[image].tolist() == new_sizes
        assert len(new) == prefix + patches - count and sum(new_sizes) == sizes[image].sum()


def test_several_tokens_may_go_into_one():
    metric = torch.tensor([[[1.0, 0.1], [1.0, 0.0], [1.0, -0.1], [0.0, 1.0]]])  # A: 0 and 2, B: 1 and 3
    tokens, sizes = merge(torch.arange(4.0).view(1, 4, 1), torch.ones(1, 4), bipartite_soft_matching(metric, 2, 0))
    assert tokens.flatten().tolist() == [1.0, 3.0] and sizes.tolist() == [[3.0, 1.0]]


def test_proportional_attention_counts_a_token_as_often_as_the_patches_it_stands_for():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 300, 8, generator=generator) for _ in range(3))
    sizes = torch.randint(1, 4, (1, 300), generator=generator).float()
    repeated = [x.repeat_interleave(sizes[0].long(), 2) for x in (k, v)]
    expected = torch.softmax(q @ repeated[0].transpose(-1, -2) / 8**0.5, -1) @ repeated[1]
    for attend in (fused, written_out):
        torch.testing.assert_close(attend(q, k, v, sizes), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(attend(q, k, v, None), attend(q, k, v, torch.ones_like(sizes)))


@each("keep", [1.0, 0.9, 0.5])
def test_so_many_patches_are_left(keep):
    for patches, layers in ((196, 12), (1024, 12), (16, 3)):
        counts = merges_of_layers(keep, patches, layers)
        assert patches - sum(counts) == round(keep * patches) and max(counts) - min(counts) <= 1


def test_more_than_a_matching_can_merge_is_refused():
    with pytest.raises(ValueError, match=r"keep=0.2: layer 1 would merge 13 of 16 tokens, at most half can be"):
        merges_of_layers(0.2, 16, 1)


@torch.no_grad()
def test_a_merged_model_is_its_plain_form_and_with_all_tokens_the_model_itself():
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
    model = SparsePriorViTModel(SparsePriorViTConfig(prior="dense", image_size=32, patch_size=4, **sizes)).eval()
    for name, parameter in model.named_parameters():
        if "proj" in name:
            parameter.mul_(20.0)
    images = torch.randn(2, 3, 32, 32)
    merged, plain = (MergedViT(model, 0.5, plain=plain)(images) for plain in (False, True))
    assert merged.shape == (2, 33, 24)
    torch.testing.assert_close(merged, plain, rtol=0, atol=1e-4)
    whole = model(images).last_hidden_state
    torch.testing.assert_close(MergedViT(model, 1.0)(images), whole, rtol=0, atol=1e-5)
    assert (merged[:, 0] - whole[:, 0]).abs().max() > 0.01
