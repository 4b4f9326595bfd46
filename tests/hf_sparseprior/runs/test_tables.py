"""Intervals of shares."""

import math

from hf_sparseprior.runs.tables import paired_interval
from tests.each import each


@each("first,second", [(0.1, 0.1), (0.15, 0.05), (0.02, 0.08), (0.01, 0.01), (0.3, 0.1)])
def test_a_paired_interval_holds_the_difference_in_about_95_of_100_tests(first, second, count=60):
    """Every table of `count` trials, with its multinomial probability; small tables give a little more."""
    held = 0.0
    for won in range(count + 1):
        for lost in range(count + 1 - won):
            both = count - won - lost
            ways = math.comb(count, won) * math.comb(count - won, lost)
            low, high = paired_interval(won, lost, count)
            if low <= first - second <= high:
                held += ways * first**won * second**lost * (1 - first - second) ** both
    assert 0.935 < held <= 1 and (held < 0.975 or max(first, second) < 0.1)


def test_a_paired_interval_of_equal_models_has_a_width_that_falls_with_the_count():
    low, high = paired_interval(0, 0, 100)
    assert low == -high and 0.01 < high < 0.03
    assert paired_interval(0, 0, 400)[1] < high / 3
    assert paired_interval(30, 10, 100)[0] > 0.05 and paired_interval(60, 0, 60)[1] == 1.0
