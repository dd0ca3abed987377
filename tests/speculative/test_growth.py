"""Growing trees against the slow plain-Python reference, ties included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taps_jax.models.cache import empty_cache
from taps_jax.models.drafter import Drafter
from taps_jax.models.layers import attend
from taps_jax.models.llama import causal_mask
from taps_jax.speculative.drafting import CommittedPairs, extend, grow
from taps_jax.speculative.tree import TreeShape
from tests.references.draft_tree import grow_reference
from tests.tiny import CONFIG, make_decoder

LENGTH = 5  # committed pairs the drafter has read
SIZE = 16


def committed(weights):
    rng = np.random.default_rng(2)
    features = jnp.asarray(rng.normal(size=(1, LENGTH, CONFIG.hidden_size)), jnp.float32)
    return CommittedPairs(features, jnp.asarray(rng.integers(0, 48, (1, LENGTH))), jnp.full(1, LENGTH))


@functools.partial(jax.jit, static_argnums=0)
def dense(drafter, params, embeddings, features):
    apply = functools.partial(drafter.apply, {"params": params})
    positions = jnp.arange(SIZE)[None]
    x = apply(embeddings, features, method=Drafter.fuse)
    new = apply(x, positions, method=Drafter.keys_values)
    attended = attend(apply(x, positions, method=Drafter.queries), new, causal_mask(SIZE), None, None)
    return apply(x, attended, method=Drafter.finish)


def log_probs_after(models, weights, specialist, path):
    """The drafter's distribution after a path, one pair after another: each reads its own last prediction."""
    params = jax.tree.map(lambda leaf: leaf[specialist], weights.params)
    pairs = committed(weights)
    tokens, features = pairs.tokens[0].tolist(), list(pairs.features[0])
    for token in (*path, None):
        pad = SIZE - len(tokens)
        rows = jnp.concatenate([jnp.stack(features), jnp.zeros((pad, CONFIG.hidden_size))])[None]
        embeddings = weights.embedding[jnp.asarray(tokens + [0] * pad)][None]
        out = dense(models.drafter, params, embeddings, rows)[0, len(tokens) - 1]
        if token is None:
            return np.asarray(jax.nn.log_softmax(out @ weights.head.T), np.float64)
        tokens.append(token)
        features.append(out)


def grown(models, weights, shape):
    specialists = weights.params["fc"]["weight"].shape[0]
    cache = empty_cache(models.drafter.config.layer, (specialists, 1), 32, jnp.float32)
    output, cache = extend(models.drafter, weights, cache, jnp.zeros(1, jnp.int32), committed(weights))
    return grow(models.drafter, weights, cache, jnp.full(1, LENGTH), output, jnp.array([7]), shape)


@pytest.mark.parametrize("sizes", [(8, 3, 3), (5, 3, 1), (16, 2, 4), (40, 1, 3), (60, 4, 6)])
def test_grown_trees_equal_the_reference(sizes):
    shape = TreeShape(*sizes)
    models, weights = make_decoder(shape, specialists=2)
    trees = grown(models, weights.drafter, shape)
    for specialist in range(2):
        look_up = functools.cache(functools.partial(log_probs_after, models, weights.drafter, specialist))
        want = grow_reference(look_up(()), look_up, shape.depth, shape.top_k, shape.total_token)
        tree = jax.tree.map(lambda leaf, n=specialist: np.asarray(leaf[n, 0]), trees)
        assert len(want) == shape.num_nodes == tree.token.shape[0]
        assert tree.token[1:].tolist() == [node["token"] for node in want[1:]] and tree.token[0] == 7
        assert tree.parent.tolist() == [node["parent"] for node in want]
        assert tree.depth.tolist() == [node["depth"] for node in want]
        np.testing.assert_allclose(tree.log_prob, [node["log_prob"] for node in want], atol=1e-4)
        np.testing.assert_allclose(tree.entropy, [node["entropy"] for node in want], atol=1e-4)
        assert set(tree.origin[1:]) == {1 << specialist} and tree.valid.all()


def test_ties_go_to_the_lower_index():
    """With a zero head every token is equally probable, exactly, in float32 and in float64."""
    shape = TreeShape(12, 2, 3)
    models, weights = make_decoder(shape)
    weights = weights.drafter._replace(head=jnp.zeros((32, CONFIG.hidden_size)))
    tree = jax.tree.map(lambda leaf: np.asarray(leaf[0, 0]), grown(models, weights, shape))
    even = np.full(32, -5 * np.log(2))
    want = grow_reference(even, lambda path: even, 2, 3, 12)
    assert tree.token[1:].tolist() == [node["token"] for node in want[1:]]
    assert tree.parent.tolist() == [node["parent"] for node in want]


def test_a_draft_vocabulary_bounds_and_names_the_tokens():
    shape = TreeShape(16, 2, 4)
    ids = (3, 8, 9, 20, 31, 47)
    models, weights = make_decoder(shape, vocabulary=ids)
    tree = grown(models, weights.drafter, shape)
    assert set(np.asarray(tree.token[0, 0, 1:]).tolist()) <= set(ids)
    look_up = functools.cache(functools.partial(log_probs_after, models, weights.drafter, 0))
    by_place = lambda path: look_up(tuple(ids[index] for index in path))
    want = grow_reference(look_up(()), by_place, 2, 4, 16)
    assert tree.token[0, 0, 1:].tolist() == [ids[node["token"]] for node in want[1:]]
