"""Trees as arrays: sizes, ancestors and acceptance, against walking the nodes one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taps_jax.speculative.tree import DraftTree, TreeShape, accept, ancestor_matrix, root_tree
from tests.references.draft_tree import accept_greedy_reference, grow_reference

VOCAB = 4  # few tokens: choices agree often and siblings repeat
SIZES, ROWS = (1, 2, 5, 13, 34, 60), 50
SHAPES = [
    TreeShape(*size) for size in [(60, 5, 10), (8, 3, 3), (16, 2, 4), (60, 0, 10), (9, 6, 1), (3, 5, 4), (2, 0, 1)]
]

jit_accept = jax.jit(accept, static_argnames="path_length")


def random_parents(rng: np.random.Generator, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Parents before their children, and which slots are used: chains, bushes, and anything between."""
    newest, oldest = rng.choice([1, 3, nodes], size=2)  # how many candidates for a parent, from either end
    parent, valid = np.arange(nodes), rng.random(nodes) > rng.choice([0.0, 0.2, 0.7])
    valid[0] = True
    for node in range(1, nodes):
        if valid[node]:  # an unused slot points to itself
            parent[node] = rng.choice(np.flatnonzero(valid[:node])[-newest:][:oldest])
    return parent, valid


def walk_up(parent: np.ndarray) -> np.ndarray:
    """[M, M] bool: the nodes met on the way from each node to its root."""
    met = np.zeros((len(parent), len(parent)), bool)
    for node in range(len(parent)):
        above = node
        met[node, above] = True
        while parent[above] != above:
            above = parent[above]
            met[node, above] = True
    return met


def make_tree(parent, valid, token, depth) -> DraftTree:
    """A batch of trees, each argument [B, M]; what acceptance must not read is filled with noise."""
    parent, noise = np.asarray(parent), jax.random.normal(jax.random.key(0), np.shape(parent))
    return DraftTree(
        token=jnp.asarray(token, jnp.int32),
        parent=jnp.asarray(parent, jnp.int32),
        depth=jnp.asarray(depth, jnp.int32),
        log_prob=noise,
        entropy=noise,
        ancestor=jnp.asarray(np.stack([walk_up(row) for row in parent])),
        origin=jnp.ones(parent.shape, jnp.int32),
        valid=jnp.asarray(valid),
    )


@pytest.mark.parametrize("nodes", SIZES)
def test_ancestors_are_those_met_walking_up(nodes):
    rng = np.random.default_rng(nodes)
    parent = np.stack([random_parents(rng, nodes)[0] for _ in range(ROWS)])
    expected = np.stack([walk_up(row) for row in parent])
    levels = int(expected.sum(axis=-1).max()) - 1
    found = jax.jit(ancestor_matrix, static_argnames="levels")(jnp.asarray(parent), levels=levels)
    np.testing.assert_array_equal(found, expected)
    if nodes > 30:
        assert levels > 20  # chains are among them


@pytest.mark.parametrize("nodes", SIZES)
def test_acceptance_equals_the_reference(nodes):
    """300 trees in all, accepted a batch at a time."""
    rng = np.random.default_rng(100 + nodes)
    parents, valid = map(np.stack, zip(*(random_parents(rng, nodes) for _ in range(ROWS)), strict=True))
    depth = np.stack([walk_up(parent).sum(axis=-1) - 1 for parent in parents])
    length = int(depth.max()) + 1
    # Unused slots claim any depth and token: only `valid` tells them apart.
    depth = np.where(valid, depth, rng.integers(0, length, depth.shape))
    token, best = rng.integers(VOCAB, size=depth.shape), rng.integers(VOCAB, size=depth.shape)
    drawn = np.take_along_axis(best, parents, axis=1)
    token = np.where(rng.random(token.shape) < 0.4, drawn, token)
    path = jit_accept(make_tree(parents, valid, token, depth), jnp.asarray(best), path_length=length)
    ties = 0
    for row in range(ROWS):
        used = np.flatnonzero(valid[row])
        place = {node: index for index, node in enumerate(used)}
        tree = [{"token": token[row, node], "parent": place[parents[row, node]]} for node in used]
        nodes_wanted, bonus = accept_greedy_reference(tree, best[row, used])
        wanted = used[nodes_wanted]
        assert path.count[row] == len(wanted) - 1
        np.testing.assert_array_equal(path.nodes[row, : len(wanted)], wanted)
        np.testing.assert_array_equal(path.nodes[row, len(wanted) :], 0)
        assert best[row, path.nodes[row, path.count[row]]] == bonus
        if len(wanted) > 1:
            rivals = (parents[row] == wanted[-2]) & (token[row] == token[row, wanted[-1]]) & valid[row]
            ties += rivals.sum() > 1
    if nodes > 10:
        assert np.mean(path.count) > 0.5  # the trees are worth testing: paths get accepted,
        assert np.any(path.nodes[:, 1:] > 1 + np.arange(length - 1))  # not the first branches alone,
        assert ties > 0  # and some of equal ones


def test_a_longer_path_wins_over_an_earlier_one():
    tree = make_tree(*([row] for row in ([0, 0, 0, 1, 2, 4], [True] * 6, [9, 5, 5, 6, 7, 8], [0, 1, 1, 2, 2, 3])))
    path = jit_accept(tree, jnp.array([[5, 7, 7, 0, 8, 3]]), path_length=5)
    assert path.nodes.tolist() == [[0, 2, 4, 5, 0]]
    assert path.count.tolist() == [3]


@pytest.mark.parametrize("parent", [[0, 0, 2, 3], [0, 0, 0, 2]], ids=["own", "claimed"])
@pytest.mark.parametrize(("token", "count"), [(5, 1), (4, 0)])
def test_unused_slots_are_never_accepted(parent, token, count):
    """They hold the token that the verifier chooses and the greatest depth, and still lose."""
    tree = make_tree([parent], [[True, True, False, False]], [[9, token, 5, 5]], [[0, 1, 3, 2]])
    path = jit_accept(tree, jnp.full((1, 4), 5), path_length=4)
    assert path.count.tolist() == [count]
    assert path.nodes.tolist() == [[0, count, 0, 0]]


def test_a_root_alone_accepts_nothing():
    tree = root_tree(jnp.array([7, 8]))
    path = jit_accept(tree, jnp.array([[7], [0]]), path_length=1)
    assert tree.token.tolist() == [[7], [8]] and tree.ancestor.tolist() == [[[True]], [[True]]]
    assert path.nodes.tolist() == [[0], [0]] and path.count.tolist() == [0, 0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("peak", [0.0, 50.0])
def test_shapes_predict_the_size_of_grown_trees(shape, peak):
    """A flat distribution fills the levels, a peaked one the depth."""
    logits = peak * (np.arange(20) == 3)
    log_probs = logits - np.log(np.sum(np.exp(logits)))
    expand = lambda path: log_probs
    tree = grow_reference(log_probs, expand, shape.depth, shape.top_k, shape.total_token)
    deepest = max(node["depth"] for node in tree)
    assert shape.num_nodes == len(tree)
    assert shape.path_length >= deepest + 1
    if peak:
        assert shape.path_length == deepest + 1


def test_known_shapes():
    paper, chain = TreeShape(60, 5, 10), TreeShape(60, 5, 1)
    assert (paper.num_candidates, paper.num_nodes, paper.path_length) == (510, 60, 7)
    assert (chain.num_candidates, chain.num_nodes, chain.path_length) == (6, 7, 7)
    assert TreeShape(3, 5, 10).path_length == 3
    assert hash(TreeShape(60, 5, 10)) == hash(paper) and TreeShape(60, 5, 10) == paper  # a static argument of jit


@pytest.mark.parametrize("size", [(1, 5, 10), (0, 0, 1), (8, -1, 3), (8, 3, 0)])
def test_impossible_shapes_are_refused(size):
    with pytest.raises(ValueError, match="at least"):
        TreeShape(*size)
