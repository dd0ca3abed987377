"""Merged trees against a reference that knows nothing of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taps_jax.speculative.merging import concatenate, join
from taps_jax.speculative.tree import DraftTree, ancestor_matrix
from tests.references.merged_tree import concat_reference, trie_reference

LEVELS, ROWS = 3, 12


def random_tree(rng, nodes: int) -> list[tuple]:
    """A tree of at most `nodes` nodes with few tokens, so that trees share paths, and coarse log-probs, so that they
    tie; distinct siblings, parents first, no node deeper than LEVELS, no child more probable than its parent."""
    tree, depth, taken = [(0, 5, 0.0, 0.0)], [0], set()
    for _ in range(int(rng.integers(1, nodes))):
        for _ in range(20):
            parent, token = int(rng.integers(len(tree))), int(rng.integers(3))
            if depth[parent] < LEVELS and (parent, token) not in taken:
                taken.add((parent, token))
                log_prob = tree[parent][2] - float(rng.integers(0, 4)) / 2
                tree.append((parent, token, log_prob, float(rng.integers(1, 9)) / 4))
                depth.append(depth[parent] + 1)
                break
    return tree


def as_arrays(rows: list[list[list[tuple]]], nodes: int) -> DraftTree:
    """rows[row][specialist] -> leaves [N, B, M]; slots after a tree's last node are unused."""
    specialists, batch = len(rows[0]), len(rows)
    shape = (specialists, batch, nodes)
    token, depth, origin = (np.zeros(shape, np.int32) for _ in range(3))
    log_prob, entropy = (np.zeros(shape, np.float32) for _ in range(2))
    parent = np.broadcast_to(np.arange(nodes, dtype=np.int32), shape).copy()
    valid = np.zeros(shape, bool)
    for row, trees in enumerate(rows):
        for number, tree in enumerate(trees):
            for node, (above, value, worth, spread) in enumerate(tree):
                place = number, row, node
                token[place], parent[place], log_prob[place], entropy[place] = value, above, worth, spread
                depth[place] = depth[number, row, above] + 1 if node else 0
                origin[place] = 1 << number if node else 0
                valid[place] = True
    flat = jnp.asarray(parent.reshape(-1, nodes))
    ancestor = ancestor_matrix(flat, LEVELS).reshape(*shape, nodes)
    return DraftTree(*map(jnp.asarray, (token, parent, depth, log_prob, entropy, ancestor, origin, valid)))


def described(tree: DraftTree, row: int) -> list[tuple]:
    """The drafted nodes of a row as the reference gives them, in the order of their slots."""
    found, paths = [], {0: ()}
    for node in range(1, tree.token.shape[1]):
        if not tree.valid[row, node]:
            assert int(tree.parent[row, node]) == node and int(tree.origin[row, node]) == 0
            continue
        parent = int(tree.parent[row, node])
        assert parent < node and bool(tree.valid[row, parent])
        paths[node] = (*paths[parent], int(tree.token[row, node]))
        origin = int(tree.origin[row, node])
        specialists = {bit for bit in range(8) if origin >> bit & 1}
        found.append((paths[node], float(tree.log_prob[row, node]), float(tree.entropy[row, node]), specialists))
        assert int(tree.depth[row, node]) == len(paths[node])
    for node in paths:
        assert set(np.flatnonzero(tree.ancestor[row, node])) == chain(tree, row, node)
    assert bool(tree.valid[row, 0]) and int(tree.token[row, 0]) == 5 and int(tree.origin[row, 0]) == 0
    return found


def chain(tree: DraftTree, row: int, node: int) -> set[int]:
    """A node and its ancestors."""
    found = {node}
    while node:
        node = int(tree.parent[row, node])
        found.add(node)
    return found


@pytest.fixture(scope="module", params=[2, 3, 4])
def drawn(request):
    """Rows of random trees, as lists and as arrays."""
    rng, nodes = np.random.default_rng(request.param), 9
    rows = [[random_tree(rng, nodes) for _ in range(request.param)] for _ in range(ROWS)]
    return rows, as_arrays(rows, nodes)


def test_concatenation(drawn):
    rows, trees = drawn
    merged = jax.device_get(concatenate(trees, LEVELS))
    assert merged.token.shape == (ROWS, 1 + len(rows[0]) * 8)
    for row, lists in enumerate(rows):
        assert described(merged, row) == concat_reference(lists)


def test_trie_at_every_budget(drawn):
    rows, trees = drawn
    shared = several = cut = 0
    for most_nodes in range(1, 2 + len(rows[0]) * 8):
        merged = jax.device_get(join(trees, LEVELS, most_nodes))
        assert merged.token.shape == (ROWS, most_nodes)
        for row, lists in enumerate(rows):
            expected = trie_reference(lists, most_nodes)
            assert described(merged, row) == expected
            whole = trie_reference(lists, 100)
            shared += len(whole) < len(concat_reference(lists))
            several += any(len(specialists) > 1 for *_, specialists in expected)
            cut += len(expected) < len(whole)
    assert min(shared, several, cut) > 20  # the drawn trees show what the test is about


def test_one_specialist_is_left_as_it_is():
    rng = np.random.default_rng(0)
    rows = [[random_tree(rng, 9)] for _ in range(ROWS)]
    merged = jax.device_get(join(as_arrays(rows, 9), LEVELS, 9))
    for row, lists in enumerate(rows):
        assert described(merged, row) == concat_reference(lists)
