"""Sampling with several specialists draws from the verifier's own distribution, as with one."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from taps_jax.speculative.composition import Composition
from taps_jax.speculative.decode import Models, Weights
from tests.speculative.test_distribution import (
    BATCHES,
    ROWS,
    SMALL,
    draw,
    exact_distribution,
    make_pair,
    make_sampler,
    make_verifier,
    p_value,
)

RULES = [rule for rule in Composition if rule is not Composition.SINGLE]
SETTINGS = [(0.5, 1.0, 0), (1.0, 0.9, 0), (2.0, 1.0, 3)]
# Twice the same drafter: every node has an equal sibling.
FULL = list(itertools.product(RULES, [("good", "good"), ("good", "bad")], SETTINGS))
DEFAULT = [(Composition.MERGE_CONCAT, ("good", "good"), (1.0, 0.9, 0))]
THRESHOLD = 1e-3 / len(FULL)


def make_composed(rule: Composition, qualities: tuple[str, ...]) -> tuple[Models, Weights]:
    pairs = [make_pair(SMALL, quality) for quality in qualities]
    params = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *(w.drafter.params for _, w in pairs))
    models, weights = pairs[0]
    return models._replace(composition=rule), weights._replace(drafter=weights.drafter._replace(params=params))


@pytest.fixture(scope="module")
def sampler_for():
    """Samplers by rule and drafters; each compiles once for all settings."""
    cache = {}

    def get(rule, qualities):
        if (rule, qualities) not in cache:
            cache[rule, qualities] = make_sampler(*make_composed(rule, qualities))
        return cache[rule, qualities]

    return get


def check(sampler, setting):
    counts, accepted = draw(sampler, setting)
    assert counts.sum() == ROWS * BATCHES >= 200_000
    assert p_value(counts, exact_distribution(make_verifier(), setting)) > THRESHOLD
    assert accepted > 0.3


@pytest.mark.parametrize(("rule", "qualities", "setting"), DEFAULT, ids=str)
def test_composed_samples_follow_the_verifier(sampler_for, rule, qualities, setting):
    check(sampler_for(rule, qualities), setting)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "qualities", "setting"), FULL, ids=str)
def test_composed_samples_follow_the_verifier_everywhere(sampler_for, rule, qualities, setting):
    check(sampler_for(rule, qualities), setting)
