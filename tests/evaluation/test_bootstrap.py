"""Bootstrap intervals against resampling in plain Python and a normal approximation."""

import math
import random

import numpy as np
import pytest

from taps_jax.evaluation.bootstrap import difference_interval, ratio_interval

SEEDED = random.Random(5)
STEPS = [SEEDED.randint(5, 40) for _ in range(60)]
TOKENS = [round(steps * SEEDED.uniform(1.2, 3.0)) for steps in STEPS]
MORE = [tokens + steps // 3 for tokens, steps in zip(TOKENS, STEPS, strict=True)]


def resampled(statistic) -> tuple[float, float]:
    chance, count = random.Random(1), len(STEPS)
    values = sorted(statistic([chance.randrange(count) for _ in range(count)]) for _ in range(4000))
    return values[100], values[3899]


def tau(tokens, chosen) -> float:
    return sum(tokens[i] for i in chosen) / sum(STEPS[i] for i in chosen)


def test_ratio_interval_matches_plain_resampling():
    found, expected = ratio_interval(TOKENS, STEPS), resampled(lambda chosen: tau(TOKENS, chosen))
    assert found == pytest.approx(expected, abs=0.03)
    ratio = sum(TOKENS) / sum(STEPS)
    residuals = np.array(TOKENS) - ratio * np.array(STEPS)
    error = math.sqrt(np.sum(residuals**2)) / sum(STEPS)  # delta method
    assert found == pytest.approx((ratio - 1.96 * error, ratio + 1.96 * error), abs=0.03)


def test_paired_differences_are_narrower_than_their_parts():
    found = difference_interval((MORE, STEPS), (TOKENS, STEPS))
    expected = resampled(lambda chosen: tau(MORE, chosen) - tau(TOKENS, chosen))
    assert found == pytest.approx(expected, abs=0.005)
    whole = ratio_interval(TOKENS, STEPS)
    assert found[1] - found[0] < 0.2 * (whole[1] - whole[0])


def test_degenerate_cases():
    assert ratio_interval([6], [3]) == (2.0, 2.0)
    assert all(math.isnan(end) for end in ratio_interval([0, 0], [0, 0]))
    low, high = ratio_interval([4, 0], [2, 0])  # resamples without steps are left out
    assert (low, high) == (2.0, 2.0)
    assert ratio_interval(TOKENS, STEPS, seed=3) == ratio_interval(TOKENS, STEPS, seed=3)
