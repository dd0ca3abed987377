"""Growing trees from caches, against the reference with every distribution computed densely from scratch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taps_jax.models.cache import empty_cache
from taps_jax.models.drafter import Drafter
from taps_jax.models.llama import causal_mask
from taps_jax.speculative.decode import Models
from taps_jax.speculative.drafting import CommittedPairs, DrafterWeights, drafter_weights, extend, grow, propose
from taps_jax.speculative.tree import DraftTree, TreeShape
from tests.references.draft_tree import grow_reference
from tests.tiny import CONFIG, make_decoder

LENGTHS = (5, 9)  # committed pairs of the two rows
FIRST = (3, 4)  # how many of them are read by a first call
SLOTS = 6
SIZE = 16  # everything dense is computed at one padded length
ROOTS = (7, 30)
WIDTH = CONFIG.hidden_size
UNSORTED = (41, 3, 20, 9, 33, 8, 12, 0, 47, 15)
SIZES = [(8, 3, 3), (16, 2, 4), (60, 5, 10), (4, 5, 1), (9, 4, 1), (60, 1, 3), (6, 0, 10), (2, 3, 5)]


def make(size: tuple[int, int, int], seed: int = 0, **options) -> tuple[Models, DrafterWeights]:
    """A decoder with embeddings and distributions that are far from flat."""
    models, weights = make_decoder(TreeShape(*size), seed=seed, sharpness=12.0, **options)
    return models, weights.drafter._replace(embedding=weights.drafter.embedding * 5)


def committed() -> list[tuple[np.ndarray, np.ndarray]]:
    """Features and following tokens of each row; the last token is the root."""
    rng = np.random.default_rng(2)
    rows = [(rng.normal(size=(n, WIDTH)).astype(np.float32), rng.integers(0, 48, n)) for n in LENGTHS]
    for (_, tokens), root in zip(rows, ROOTS, strict=True):
        tokens[-1] = root
    return rows


def slots(first: tuple[int, ...], after: tuple[int, ...]) -> CommittedPairs:
    """Pairs first..after-1 of each row; the unused slots hold noise."""
    rng = np.random.default_rng(3)
    features, tokens = rng.normal(size=(2, SLOTS, WIDTH)).astype(np.float32), rng.integers(0, 48, (2, SLOTS))
    for row, (all_features, all_tokens) in enumerate(committed()):
        used = after[row] - first[row]
        features[row, :used] = all_features[first[row] : after[row]]
        tokens[row, :used] = all_tokens[first[row] : after[row]]
    counts = jnp.array(after, jnp.int32) - jnp.array(first)
    return CommittedPairs(jnp.asarray(features), jnp.asarray(tokens, jnp.int32), counts)


@functools.partial(jax.jit, static_argnums=0)
def draft(models: Models, weights: DrafterWeights) -> DraftTree:
    """Trees after reading the committed pairs in two calls, a different number in each row."""
    specialists = weights.params["fc"]["weight"].shape[0]
    cache = empty_cache(models.drafter.config.layer, (specialists, 2), 32, jnp.float32)
    start = jnp.zeros(2, jnp.int32)
    for first, after in (((0, 0), FIRST), (FIRST, LENGTHS)):
        output, cache = extend(models.drafter, weights, cache, start, slots(first, after))
        start = jnp.array(after, jnp.int32)
    return grow(models.drafter, weights, cache, start, output, jnp.array(ROOTS, jnp.int32), models.shape)


@functools.partial(jax.jit, static_argnums=0)
def dense(drafter: Drafter, params: dict, embeddings, features):
    """The drafter's predictions over one padded row of pairs, without any cache."""
    return drafter.apply({"params": params}, embeddings, features, jnp.arange(SIZE)[None], causal_mask(SIZE))[0][0]


class FromScratch:
    """Log-probabilities after any path in one specialist's draft vocabulary; tokens are places in that vocabulary."""

    def __init__(self, models: Models, weights: DrafterWeights, specialist: int, row: int):
        self.drafter, self.weights = models.drafter, weights
        self.params = jax.tree.map(lambda leaf: leaf[specialist], weights.params)
        self.ids = np.arange(48) if weights.vocabulary is None else np.asarray(weights.vocabulary)
        self.features, self.tokens = committed()[row]
        self.outputs = functools.cache(self._outputs)

    def _outputs(self, path: tuple[int, ...]) -> np.ndarray:
        """Predicted features after each committed pair and each node of a path: a node reads its parent's."""
        tokens, features = [*self.tokens, *self.ids[list(path)]], self.features
        if path:
            features = np.concatenate([features, self.outputs(path[:-1])[len(self.features) - 1 :]])
        pad = ((0, SIZE - len(tokens)), (0, 0))
        embeddings = np.asarray(self.weights.embedding)[tokens]
        found = dense(self.drafter, self.params, np.pad(embeddings, pad)[None], np.pad(features, pad)[None])
        return np.asarray(found)[: len(tokens)]

    def __call__(self, path: tuple[int, ...]) -> np.ndarray:
        return log_softmax(self.outputs(path)[-1] @ np.asarray(self.weights.head).T)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - np.max(logits, axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def check(trees: DraftTree, shape: TreeShape, expand_for, ids: np.ndarray) -> None:
    """Every row of every specialist against the reference; node order included."""
    for specialist in range(trees.token.shape[0]):
        for row in range(2):
            tree = jax.tree.map(lambda leaf, at=(specialist, row): np.asarray(leaf[at]), trees)
            expand = expand_for(specialist, row)
            nodes = grow_reference(expand(()), expand, shape.depth, shape.top_k, shape.total_token)
            column = lambda name, nodes=nodes: [node[name] for node in nodes]
            assert len(nodes) == shape.num_nodes
            assert tree.token.tolist() == [ROOTS[row], *ids[column("token")[1:]]]
            assert tree.parent.tolist() == column("parent")
            assert tree.depth.tolist() == column("depth")
            np.testing.assert_allclose(tree.log_prob, column("log_prob"), atol=1e-4)
            np.testing.assert_allclose(tree.entropy, column("entropy"), atol=1e-4)
            assert tree.origin.tolist() == [0] + [1 << specialist] * (len(nodes) - 1)
            assert tree.valid.all()
            for node in range(len(nodes)):  # a parent's ancestors and the node itself
                above = tree.ancestor[tree.parent[node]] if node else np.zeros(len(nodes), bool)
                assert tree.ancestor[node].tolist() == (above | (np.arange(len(nodes)) == node)).tolist()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_trees_equal_the_reference(size):
    models, weights = make(size, specialists=2)
    trees = draft(models, weights)
    check(trees, models.shape, functools.partial(FromScratch, models, weights), np.arange(48))
    if size == (60, 5, 10):
        expanded = {int(node) for node in trees.parent[0, 0]}
        assert len(expanded) > 10 and int(trees.depth.max()) > 2  # a tree worth comparing


@pytest.mark.parametrize("size", [(8, 3, 3), (60, 2, 10)], ids=str)
def test_tokens_come_from_the_draft_vocabulary(size):
    models, weights = make(size, vocabulary=UNSORTED)
    trees = draft(models, weights)
    check(trees, models.shape, functools.partial(FromScratch, models, weights), np.array(UNSORTED))
    drafted = set(np.asarray(trees.token[..., 1:]).flat)
    assert drafted <= set(UNSORTED)
    if size[2] == len(UNSORTED):
        assert drafted == set(UNSORTED)


def test_stacked_specialists_draft_as_they_would_alone():
    models, weights = make((16, 2, 4), specialists=2)
    together = draft(models, weights)
    for specialist in range(2):
        params = jax.tree.map(lambda leaf, n=specialist: leaf[n : n + 1], weights.params)
        alone = draft(models, weights._replace(params=params))
        for name in ("token", "parent", "depth", "ancestor", "valid"):
            np.testing.assert_array_equal(getattr(together, name)[specialist], getattr(alone, name)[0])
        np.testing.assert_allclose(together.log_prob[specialist], alone.log_prob[0], atol=1e-5)
        np.testing.assert_allclose(together.entropy[specialist], alone.entropy[0], atol=1e-5)
        np.testing.assert_array_equal(together.origin[specialist], alone.origin[0] << specialist)
    assert np.any(together.token[0] != together.token[1])


@pytest.mark.parametrize("size", [(8, 3, 3), (12, 2, 3), (60, 3, 5), (5, 4, 1)], ids=str)
def test_of_equal_tokens_the_lower_index_comes_first(size):
    """A zero head makes all tokens equally probable, exactly, in every precision."""
    models, weights = make(size)
    weights = weights._replace(head=jnp.zeros((32, WIDTH)))
    check(draft(models, weights), models.shape, lambda *_: lambda path: np.full(32, -5 * np.log(2)), np.arange(48))


def test_of_equal_nodes_the_parent_comes_first():
    """With one possible token every node is certain, as probable as its children; the chain is kept from its root."""
    models, weights = make((4, 5, 1), vocabulary=(9,))
    trees = draft(models, weights)
    check(trees, models.shape, lambda *_: lambda path: np.zeros(1), np.array([9]))
    assert trees.parent.tolist() == [[[0, 0, 1, 2]] * 2]
    assert not np.any(trees.log_prob) and not np.any(trees.entropy)


@pytest.mark.parametrize("vocabulary", [None, UNSORTED], ids=["all", "some"])
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_proposals_are_the_most_probable_tokens(vocabulary, scale):
    _, weights = make((8, 3, 3), vocabulary=vocabulary)
    outputs = np.random.default_rng(4).normal(scale=scale, size=(2, 3, 4, WIDTH)).astype(np.float32)
    found = propose(weights, jnp.asarray(outputs), 6)
    expected = log_softmax(outputs @ np.asarray(weights.head).T)
    ranked = np.argsort(-expected, axis=-1, kind="stable")[..., :6]
    ids = np.arange(48) if vocabulary is None else np.array(vocabulary)
    np.testing.assert_array_equal(found.token, ids[ranked])
    np.testing.assert_allclose(found.log_prob, np.take_along_axis(expected, ranked, -1), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(found.entropy, -np.sum(np.exp(expected) * expected, axis=-1), rtol=1e-3, atol=1e-4)
    assert found.token.shape == found.log_prob.shape == (2, 3, 4, 6) and found.entropy.shape == (2, 3, 4)


def test_extreme_logits_stay_finite():
    _, weights = make((8, 3, 3))
    found = propose(weights, jnp.linspace(-1e6, 1e6, 4 * WIDTH).reshape(4, WIDTH), 6)
    assert all(np.all(np.isfinite(part)) for part in found)
    assert np.all(found.entropy >= 0)


def test_proposals_of_equal_tokens_are_ordered():
    """Small whole numbers make exact ties."""
    _, weights = make((8, 3, 3))
    outputs = jnp.zeros((1, WIDTH)).at[0, 0].set(1.0)
    scores = jnp.array([0.0, 2.0, 1.0, 2.0, 1.0, 2.0, 0.0, 1.0])
    weights = weights._replace(head=jnp.zeros((8, WIDTH)).at[:, 0].set(scores))
    assert propose(weights, outputs, 8).token.tolist() == [[1, 3, 5, 2, 4, 7, 0, 6]]


def test_drafter_weights_stack_specialists_and_slice_the_head():
    _, weights = make((8, 3, 3), specialists=2)
    each = [jax.tree.map(lambda leaf, n=n: leaf[n].astype(jnp.bfloat16), weights.params) for n in range(2)]
    table = jax.random.normal(jax.random.key(1), (2, 48, WIDTH))
    made = drafter_weights(each, table[0], table[1], [np.array(UNSORTED)])
    np.testing.assert_array_equal(made.head, table[1][np.array(UNSORTED)])
    assert made.vocabulary.tolist() == list(UNSORTED) and made.vocabulary.dtype == jnp.int32
    for leaf, *parts in zip(jax.tree.leaves(made.params), *map(jax.tree.leaves, each), strict=True):
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, jnp.stack(parts))
    whole = drafter_weights(each, table[0], table[1], [None] * 2)
    assert whole.vocabulary is None
    np.testing.assert_array_equal(whole.head, table[1])
