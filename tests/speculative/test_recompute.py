"""Every step against recomputing all of it from scratch: features, both caches, and the greedy text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taps_jax.models.drafter import Drafter
from taps_jax.models.llama import Llama, causal_mask, embedding_table
from taps_jax.speculative.decode import Prompt, empty_state, insert, step
from taps_jax.speculative.sampling import Sampling
from taps_jax.speculative.tree import TreeShape
from tests.tiny import make_config, make_decoder

CONFIG = make_config(vocab_size=10)
SHAPE = TreeShape(total_token=14, depth=2, top_k=3)
STOP = jnp.zeros(0, jnp.int32)


SIZE = 96  # everything from scratch is computed at one padded length, so it compiles once


@functools.partial(jax.jit, static_argnums=(0,))
def forward(verifier, params, tokens):
    """Features, keys and values, and greedy choices of one padded row, without a cache."""
    features, new = verifier.apply({"params": params}, tokens, jnp.arange(SIZE)[None], causal_mask(SIZE))
    return features, new, jnp.argmax(verifier.apply({"params": params}, features, method=Llama.logits), axis=-1)


def from_scratch(models, weights, tokens):
    padded = jnp.zeros((1, SIZE), jnp.int32).at[0, : len(tokens)].set(jnp.asarray(tokens))
    return forward(models.verifier, weights.verifier, padded)


def greedy_text(models, weights, prompt, count):
    """Plain decoding without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(from_scratch(models, weights, tokens)[2][0, len(tokens) - 1]))
    return tokens[len(prompt) :]


@functools.partial(jax.jit, static_argnums=(0,))
def drafter_forward(drafter, params, following, features):
    """The drafter's keys and values of one padded row of verifier features and next-token embeddings."""
    apply = functools.partial(drafter.apply, {"params": params})
    x = apply(following, features, method=Drafter.fuse)
    return apply(x, jnp.arange(SIZE)[None], method=Drafter.keys_values)


def best_children(tree, row):
    """For each parent, its child with the greatest log-probability."""
    children = {}
    for node in range(1, tree.token.shape[1]):
        children.setdefault(int(tree.parent[row, node]), []).append(node)
    return {max(nodes, key=lambda node: float(tree.log_prob[row, node])) for nodes in children.values()}


@pytest.mark.parametrize(("seed", "lengths"), [(3, (4, 9)), (5, (5,))])
def test_steps_equal_recomputing_from_scratch(seed, lengths):
    models, weights = make_decoder(SHAPE, CONFIG, seed=seed)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 10, length).tolist() for length in lengths]
    state = empty_state(models, weights, len(prompts), 128, 64)
    for row, prompt in enumerate(prompts):
        padded = jnp.zeros(16, jnp.int32).at[: len(prompt)].set(jnp.asarray(prompt))
        sampling = Sampling(jnp.float32(0), jnp.float32(1), jnp.int32(0), jax.random.key(0))
        state = insert(
            models,
            weights,
            state,
            jnp.int32(row),
            Prompt(padded, jnp.int32(len(prompt)), jnp.int32(64), sampling),
            STOP,
        )
    not_first = 0
    for _ in range(12):
        state, record = step(models, weights, state, STOP)
        for row, prompt in enumerate(prompts):
            accepted = record.path.nodes[row, 1 : int(record.path.count[row]) + 1].tolist()
            not_first += any(node not in best_children(record.tree, row) for node in accepted)
            check_row(models, weights, state, row, prompt)
    assert not_first >= 3, "the test must see accepted branches that are not the first"
    for row, prompt in enumerate(prompts):
        text = state.output[row, : int(state.count[row])].tolist()
        assert text == greedy_text(models, weights, prompt, len(text))
        assert int(state.steps[row]) == 12


def check_row(models, weights, state, row, prompt):
    """The row's caches and waiting pairs against a fresh forward pass over its committed tokens."""
    length, count = int(state.length[row]), int(state.count[row])
    committed = prompt + state.output[row, :count].tolist()
    assert length == len(committed) - 1 and int(state.root[row]) == committed[-1]
    features, new, _ = from_scratch(models, weights, committed[:-1])
    close = functools.partial(np.testing.assert_allclose, atol=2e-5)
    for cached, fresh in zip(jax.tree.leaves(state.cache), jax.tree.leaves(new), strict=True):
        close(cached[row, :, :length], fresh[0, :, :length])
    waiting = int(state.pairs.count[row])
    close(state.pairs.features[row, :waiting], features[0, length - waiting : length])
    assert state.pairs.tokens[row, :waiting].tolist() == committed[length - waiting + 1 :]
    # The drafter has read the verifier's feature and the next token of every committed position but the waiting ones.
    params = jax.tree.map(lambda leaf: leaf[0], weights.drafter.params)
    following = jnp.zeros((1, SIZE), jnp.int32).at[0, :length].set(jnp.asarray(committed[1:]))
    fresh = drafter_forward(models.drafter, params, embedding_table(weights.verifier)[following], features)
    read = length - waiting
    for cached, part in zip(jax.tree.leaves(state.drafter_cache), fresh, strict=True):
        close(cached[0, row, :, :read], part[0, :, :read])


def test_one_compilation_serves_every_prompt_of_a_bucket():
    models, weights = make_decoder(SHAPE, make_config(vocab_size=11), seed=5)
    state = empty_state(models, weights, 1, 128, 64)
    before = insert._cache_size(), step._cache_size()
    for length in (1, 3, 16, 7):
        sampling = Sampling(jnp.float32(length % 2), jnp.float32(1), jnp.int32(0), jax.random.key(length))
        prompt = Prompt(jnp.arange(16, dtype=jnp.int32) % 11, jnp.int32(length), jnp.int32(20), sampling)
        state = insert(models, weights, state, jnp.int32(0), prompt, STOP)
        for _ in range(3):
            state, _ = step(models, weights, state, STOP)
    assert (insert._cache_size() - before[0], step._cache_size() - before[1]) == (1, 1)
