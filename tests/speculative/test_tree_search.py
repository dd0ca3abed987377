"""Acceptance read off a wide trace against real decoding with every size, and the choice among sizes by hand."""

import functools

import numpy as np
import pytest

from taps_jax.speculative.engine import Request
from taps_jax.speculative.replay import count_steps
from taps_jax.speculative.tree import TreeShape
from taps_jax.speculative.tree_search import (
    Text,
    Trace,
    acceptance_length,
    accepted_by_shape,
    rank_shapes,
    trace_texts,
    wide_shape,
)
from tests.speculative.test_step import MOST_TOKENS, make_engine, make_models, make_prompt, make_weights

SEED = 3  # a drafter that is often right


@functools.cache
def texts() -> list[Text]:
    prompts = [make_prompt(SEED, length) for length in (1, 9, 31, 33)]
    done = make_engine(None, SEED).decode(Request(prompt, MOST_TOKENS) for prompt in prompts)
    return [Text(prompts[completion.index], completion.tokens) for completion in done]


@functools.cache
def trace(depth: int, top_k: int) -> Trace:
    return trace_texts(make_models(wide_shape(1, 2)), make_weights(SEED), texts(), depth, top_k)


def decoded_steps(shape: TreeShape) -> int:
    requests = [Request(text.prompt, MOST_TOKENS) for text in texts()]
    return sum(completion.steps for completion in make_engine(shape, SEED).decode(requests))


@pytest.mark.parametrize("sizes", [(2, 0, 3), (8, 3, 3), (5, 1, 3), (30, 3, 3)])
def test_same_top_k_gives_the_steps_of_real_decoding(sizes):
    shape = TreeShape(*sizes)
    ((_, accepted),) = accepted_by_shape(trace(3, 3), [shape])
    steps = decoded_steps(shape)
    assert acceptance_length(trace(3, 3), accepted) == 4 * (MOST_TOKENS - 1) / steps
    assert steps < 4 * (MOST_TOKENS - 1)


def test_a_smaller_top_k_is_nearly_exact():
    shapes = [TreeShape(size, depth, top_k) for size in (4, 8, 12) for depth in (1, 3) for top_k in (1, 2, 3)]
    for shape, accepted in accepted_by_shape(trace(3, 4), shapes):
        own = trace(3, shape.top_k)
        ((_, exact),) = accepted_by_shape(own, [shape])
        assert accepted.shape == exact.shape
        assert np.mean(accepted == exact) > 0.9
        if shape.top_k == 1:
            np.testing.assert_array_equal(accepted, exact)  # the best node is always in the wide beam


def test_steps_by_hand():
    assert count_steps(np.array([0, 0, 0])) == 3
    assert count_steps(np.array([2, 9, 9, 0])) == 2
    assert count_steps(np.array([1, 5, 0, 0])) == 3
    assert count_steps(np.array([], int)) == 0


def test_the_choice_weighs_acceptance_against_time():
    """One text of four positions, top_k 1, two levels: the first is always right, the second never."""
    true = np.array([[0, -1]] * 4)
    made = Trace(wide_shape(1, 1), np.tile(np.float32([-0.1, -0.2]), (4, 1)), np.tile([-1, 0], (4, 1)), true, (4,))
    chain, pair = TreeShape(3, 1, 1), TreeShape(2, 0, 1)
    ranked = rank_shapes(made, [chain, pair], lambda shape: 10.0 * shape.num_nodes)
    assert [(choice.shape, choice.acceptance_length) for choice in ranked] == [(pair, 2.0), (chain, 2.0)]
    assert ranked[0].tokens_per_second == pytest.approx(100)
    slow_pair = rank_shapes(made, [chain, pair], lambda shape: 10.0 if shape == chain else 11.0)
    assert slow_pair[0].shape == chain
