import itertools
from collections import Counter

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from hf_sparseprior.training import Draw, DrawSampler
from hf_sparseprior.training.sampling import round_robin
from tests.each import each


def epoch_of(sampler, epoch=0):
    sampler.set_epoch(epoch)
    return list(sampler)


@each("num_samples", [1, 2, 7, 64])
def test_an_epoch_is_a_permutation_with_running_positions(num_samples):
    draws = epoch_of(DrawSampler(num_samples, seed=3), 5)
    assert sorted(draw.index for draw in draws) == list(range(num_samples))
    assert [draw.position for draw in draws] == list(range(num_samples))
    assert {(draw.epoch, draw.repeat) for draw in draws} == {(5, 0)}


def test_the_order_follows_from_seed_and_epoch_alone():
    sampler = DrawSampler(50, seed=1)
    first = epoch_of(sampler, 0)
    assert epoch_of(sampler, 1) != first
    assert epoch_of(sampler, 0) == first == list(DrawSampler(50, seed=1))
    assert [d.index for d in epoch_of(DrawSampler(50, seed=2))] != [d.index for d in first]


def test_orders_are_uniform():
    """Every index stands at every place alike often: chi-square with 36 degrees of freedom and 600 epochs."""
    sampler, counts = DrawSampler(7), np.zeros((7, 7))
    for epoch in range(600):
        for draw in epoch_of(sampler, epoch):
            counts[draw.position, draw.index] += 1
    assert ((counts - 600 / 7) ** 2 / (600 / 7)).sum() < 80


@each("num_samples, repeats", itertools.product([1, 2, 3, 11, 24, 25], [2, 3, 4]))
def test_repeated_augmentation(num_samples, repeats):
    sampler = DrawSampler(num_samples, repeats=repeats)
    draws = epoch_of(sampler)
    assert len(draws) == len(sampler) == num_samples
    assert [draw.position for draw in draws] == list(range(num_samples))
    assert len({(draw.index, draw.repeat) for draw in draws}) == num_samples  # each time augmented differently
    assert all(a.index != b.index for a, b in itertools.pairwise(draws))
    counts = Counter(draw.index for draw in draws)
    assert max(counts.values()) <= repeats
    # Only the last images, as many as are paired in turns, are cut off by the end of the epoch.
    together = {2: 4, 3: 4, 4: 6}[repeats]
    assert sum(count < repeats for count in counts.values()) <= together
    for index, count in counts.items():
        positions = [draw.position for draw in draws if draw.index == index]
        assert [draw.repeat for draw in draws if draw.index == index] == list(range(count))
        assert positions[-1] - positions[0] < together * repeats


@each("rounds", range(1, 8))
def test_everybody_meets_another_one_in_each_round(rounds):
    orders = round_robin(rounds)
    assert len(orders) == rounds and all(sorted(order) == list(range(len(orders[0]))) for order in orders)
    pairs = [frozenset(order[i : i + 2]) for order in orders for i in range(0, len(order), 2)]
    assert len(set(pairs)) == len(pairs) and rounds < len(orders[0]) <= rounds + 2


def partners_of_deit(number, repeats, processes, images):
    """DeiT's rule, from Touvron et al. and timm's mixup in batch mode: image -> [(partner, whose lambda)].

    Each image stands `repeats` times in a row in the epoch's order; process p takes places p, p + processes, ...; in a
    batch of a process the first image is mixed with the last one, and so on, by one lambda.
    """
    order = [image for image in np.random.default_rng(0).permutation(number).tolist() for _ in range(repeats)]
    found = {}
    for process in range(processes):
        own = order[process::processes][: number // (processes * images) * images]
        for start in range(0, len(own), images):
            batch = own[start : start + images]
            for image, partner in zip(batch, batch[::-1], strict=True):
                found.setdefault(image, []).append((partner, (process, start)))
    return found


def test_repetitions_are_mixed_with_others_at_least_as_often_as_in_deit():
    number, repeats, processes, images = 4096, 3, 8, 32
    ours = {}
    draws = epoch_of(DrawSampler(number, repeats=repeats))
    for draw in draws:
        place = draw.position // images, draw.repeat
        ours.setdefault(draw.index, []).append((draws[draw.position ^ 1].index, place))

    def alike(found, part):
        whole = [seen for seen in found.values() if len(seen) == repeats]
        assert len(whole) > 1000
        return sum(len({place[part] for place in seen}) == 1 for seen in whole) / len(whole)

    deit = partners_of_deit(number, repeats, processes, images)
    assert 0 < alike(deit, 0) < 1 and alike(deit, 1) == 0
    assert alike(ours, 0) == alike(ours, 1) == 0  # never the same partner, never the same lambda and box


def test_processes_share_an_epoch_without_overlap():
    whole = epoch_of(DrawSampler(32))
    shards = [
        BatchSamplerShard(BatchSampler(DrawSampler(32), 4, False), num_processes=2, process_index=p) for p in (0, 1)
    ]
    steps = list(zip(*shards, strict=True))
    assert [draw for step in steps for part in step for draw in part] == whole


def test_generators_of_samples_order_and_mixing_differ():
    """numpy pads seeds with zeros: [seed, epoch] and [seed, epoch, 0, 0] are one generator."""
    sampler = DrawSampler(1000, seed=3)
    sample = Draw(index=0, epoch=4, position=0).random(3)
    assert [draw.index for draw in epoch_of(sampler, 4)] != sample.permutation(1000).tolist()


def test_a_sample_draws_by_seed_epoch_index_and_repeat_but_not_by_its_place():
    def numbers(seed=0, **place):
        return Draw(**{"index": 1, "epoch": 2, "position": 3, "repeat": 0, **place}).random(seed).random(4).tolist()

    assert numbers(position=9) == numbers()
    others = [numbers(seed=1), numbers(index=2), numbers(epoch=1), numbers(repeat=1)]
    assert all(other != numbers() for other in others)


@each("repeats", [0, -1, 1.0, True, "2", None])
def test_bad_repeats_are_named(repeats):
    with pytest.raises(ValueError, match=r"repeats=.* must be an integer of 1 or more"):
        DrawSampler(4, repeats=repeats)
