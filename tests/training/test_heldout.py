"""The acceptance length measured during training is that of real decoding; the uncovered mass is counted by hand."""

import jax
import numpy as np
import pytest

from taps_jax.data.batches import Example
from taps_jax.data.tokenize import supervised_positions
from taps_jax.models.llama import Llama, causal_mask, head_table
from taps_jax.speculative.engine import Request
from taps_jax.speculative.tree import TreeShape
from taps_jax.training.heldout import HeldOut
from tests.speculative.test_step import CONFIG, DRAFTER, SMALL, make_engine, make_weights

NEW_TOKENS = 20
QUESTIONS = ((3, 7, 1), (5, 2), (9, 9, 4, 11, 8))


def conversation(seed: int, turns) -> tuple[Example, list[tuple[int, ...]]]:
    """Questions with the verifier's greedy answers, and the prompts of those."""
    tokens, answer, prompts = [], [], []
    plain = make_engine(None, seed)
    for question in turns:
        tokens += question
        answer += [False] * len(question)
        prompts.append(tuple(tokens))
        (done,) = plain.decode([Request(tuple(tokens), NEW_TOKENS)])
        tokens += done.tokens
        answer += [True] * len(done.tokens)
    supervised = supervised_positions(np.array(answer))
    return Example(np.array(tokens, np.int32), supervised), prompts


@pytest.mark.parametrize("seed", [1, 2])
def test_the_acceptance_length_is_that_of_decoding(seed):
    """Two rows, of one and of three answers; a good drafter (odd seed) and a bad one."""
    rows = [conversation(seed, QUESTIONS[:1]), conversation(seed, QUESTIONS)]
    weights = make_weights(seed)
    drafted = make_engine(SMALL, seed, cache_size=192)
    tokens = steps = 0
    for _, prompts in rows:
        for prompt in prompts:
            (done,) = drafted.decode([Request(prompt, NEW_TOKENS)])
            tokens += len(done.tokens) - 1
            steps += done.steps
    params = jax.tree.map(lambda leaf: leaf[0], weights.drafter.params)
    heldout = HeldOut(Llama(CONFIG), weights.verifier, DRAFTER, None, [example for example, _ in rows], SMALL)
    assert heldout.acceptance_length(params) == pytest.approx(tokens / steps)
    assert (tokens / steps > 1.5) == (seed == 1)


def test_uncovered_mass():
    """Of the verifier's probabilities after every trained token, those outside the list."""
    example, _ = conversation(1, QUESTIONS)
    params = make_weights(1).verifier
    vocabulary = np.array([0, 3, 5, 11], np.int32)
    size = len(example.tokens)
    features, _ = Llama(CONFIG).apply(
        {"params": params}, example.tokens[None], np.arange(size)[None], causal_mask(size)
    )
    logits = np.asarray(features[0], np.float64) @ np.asarray(head_table(params), np.float64).T
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    outside = [1 - p[position + 1][vocabulary].sum() for position in np.flatnonzero(example.supervised)]
    shape = TreeShape(3, 1, 2)
    heldout = HeldOut(Llama(CONFIG), params, DRAFTER, vocabulary, [example], shape)
    assert heldout.uncovered_mass() == pytest.approx(np.mean(outside), rel=1e-4)
    assert 0.05 < np.mean(outside) < 1
    assert HeldOut(Llama(CONFIG), params, DRAFTER, None, [example], shape).uncovered_mass() == 0
