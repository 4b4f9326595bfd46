import itertools
import math
import random

import numpy as np
import pytest
from scipy.stats import ttest_rel

from hf_sparseprior.sparsification.choice import FEW, UNITS, frontier, least_loss, promising
from tests.each import each


def tables(seed):
    """Random savings and losses of four layers with up to four candidates, some of which save nothing."""
    draw = random.Random(seed)
    savings, losses = [], []
    for _ in range(4):
        count = draw.randint(1, 4)
        savings.append([0.0, *(draw.choice([draw.uniform(-0.05, 0.2), 0.05, -math.inf]) for _ in range(count))])
        losses.append([0.0, *(draw.choice([draw.random(), 0.25]) for _ in range(count))])
    return savings, losses


def every_choice(savings, losses):
    """(share, loss, choice) of all choices, by brute force over what layers can have."""
    for choice in itertools.product(*(range(len(layer)) for layer in savings)):
        saved = [savings[layer][own] for layer, own in enumerate(choice)]
        if all(own == 0 or saving >= 1 / UNITS for own, saving in zip(choice, saved, strict=True)):
            yield 1 - sum(saved), sum(losses[layer][own] for layer, own in enumerate(choice)), choice


@each("seed", range(40))
def test_the_frontier_is_that_of_all_choices(seed):
    savings, losses = tables(seed)
    points, every = frontier(savings, losses), list(every_choice(savings, losses))
    rounding = len(savings) / UNITS
    for budget in [point.share for point in points] + [0.3 + 0.05 * step for step in range(15)]:
        found = least_loss(points, budget)
        # What rounding down may cost is a layer's unit, no more.
        within = [loss for share, loss, _ in every if share <= budget - rounding]
        if within:
            assert found is not None and found.loss <= min(within) + 1e-12
        if found is not None:
            least = min(loss for share, loss, _ in every if share <= budget + 1e-12)
            assert found.loss >= least - 1e-12


@each("seed", range(40))
def test_a_point_is_never_slower_than_it_says(seed):
    savings, losses = tables(seed)
    for point in frontier(savings, losses):
        saved = sum(savings[layer][own] for layer, own in enumerate(point.choice) if own)
        assert 0 <= point.share - (1 - saved) <= len(savings) / UNITS
        assert point.loss == pytest.approx(sum(losses[layer][own] for layer, own in enumerate(point.choice)))


@each("seed", range(10))
def test_points_fall_in_share_and_rise_in_loss_from_dense_on(seed):
    points = frontier(*tables(seed))
    assert points[0].share <= 1.0 and points[0].loss == 0.0
    pairs = list(itertools.pairwise(points))
    assert all(one.share > two.share and one.loss < two.loss for one, two in pairs)
    assert points == frontier(*tables(seed))


def test_what_saves_nothing_is_never_chosen():
    points = frontier([[0.0, -0.1, 0.0, -math.inf, 0.4 / UNITS]], [[0.0, 0.0, 0.0, 0.0, 0.0]])
    assert [point.choice for point in points] == [(0,)]


def test_what_costs_no_loss_is_taken():
    points = frontier([[0.0, 0.1], [0.0, 0.2]], [[0.0, 0.0], [0.0, 1.0]])
    assert [point.choice for point in points] == [(1, 0), (1, 1)]
    assert least_loss(points, 0.95).choice == (1, 0)
    assert least_loss(points, 0.6) is None


def test_a_candidate_that_is_clearly_worse_gets_no_more_images():
    noise = [0.1, -0.1, 0.2, -0.2, 0.0, 0.1, -0.1, 0.0]
    good = [1 + part for part in noise]
    near = [1.05 + part for part in reversed(noise)]  # 0.05 more, give or take 0.07
    bad = [1.5 + part for part in noise]
    assert promising([0.1, 0.1, 0.1], [good, near, bad]) == [True, True, False]
    assert promising([0.1, 0.1, 0.2], [good, near, bad]) == [True, True, True]  # it saves more
    assert promising([0.2, 0.1, 0.2], [good, good, bad]) == [True, True, False]
    few = FEW - 1
    assert promising([0.1, 0.1], [good[:few], bad[:few]]) == [True, True]
    assert promising([], []) == []


@each("seed", range(20))
def test_what_is_promising_is_judged_image_by_image(seed):
    """By a paired test of scipy with the same threshold."""
    draw = np.random.default_rng(seed)
    images, savings = draw.normal(size=8), draw.integers(1, 4, 6) / 10
    losses = images + draw.normal(scale=0.3, size=(6, 8)) + draw.uniform(0, 1, (6, 1))
    for one, keep in enumerate(promising(list(savings), losses.tolist())):
        rivals = [other for other in range(6) if other != one and savings[other] >= savings[one]]
        assert keep == all(ttest_rel(losses[one], losses[other]).statistic <= 2 for other in rivals)
