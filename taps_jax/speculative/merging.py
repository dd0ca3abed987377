"""Merging the trees of N specialists into one that a single verifier pass checks.

Shapes: N specialists, B batch, M nodes per specialist's tree, U = 1 + N * (M - 1) nodes of the concatenation.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from taps_jax.numerics import top_k as best_of
from taps_jax.speculative.tree import DraftTree, ancestor_matrix


def concatenate(trees: DraftTree, levels: int) -> DraftTree:
    """The specialists' trees side by side under the shared root, equal paths kept apart (TAPS, merged trees).

    Args:
      trees: leaves [N, B, M, ...], with one root per row.
      levels: the greatest depth of any node.
    Returns:
      Leaves [B, U, ...]: the root, the first specialist's nodes, the second's, and so on.
    """
    specialists, _, nodes = trees.token.shape
    blocks = jnp.arange(specialists, dtype=jnp.int32)[:, None, None] * (nodes - 1)
    # A block's first node has index 1 in its own tree; the root stays 0 for all.
    parent = jnp.where(trees.parent > 0, trees.parent + blocks, 0)
    parent = jnp.where(trees.valid, parent, jnp.arange(nodes) + blocks)
    side_by_side = functools.partial(_side_by_side, specialists=specialists)
    parent = side_by_side(parent)
    return DraftTree(
        token=side_by_side(trees.token),
        parent=parent,
        depth=side_by_side(trees.depth),
        log_prob=side_by_side(trees.log_prob),
        entropy=side_by_side(trees.entropy),
        ancestor=ancestor_matrix(parent, levels),
        origin=side_by_side(trees.origin),
        valid=side_by_side(trees.valid),
    )


def join(trees: DraftTree, levels: int, most_nodes: int) -> DraftTree:
    """The specialists' trees as one trie: equal paths joined, then the best nodes overall.

    A node is worth its path probability under the specialist that gives it the highest, whose entropy it also takes;
    its origin names all that proposed it. A parent is worth at least as much as its child and, of equals, the node
    that comes first in the concatenation is kept, so the parents of kept nodes are kept.

    Args:
      trees: leaves [N, B, M, ...].
      levels: the greatest depth of any node.
      most_nodes: nodes of the result, root included; slots that the union does not fill are not valid.
    Returns:
      Leaves [B, most_nodes, ...], in the order of the concatenation.
    """
    union = concatenate(trees, levels)
    size = union.token.shape[-1]
    alike = (
        (union.token[:, :, None] == union.token[:, None, :])
        & (union.depth[:, :, None] == union.depth[:, None, :])
        & union.valid[:, :, None]
        & union.valid[:, None, :]
    )
    same = jnp.broadcast_to(jnp.eye(size, dtype=bool), alike.shape)
    first = jnp.broadcast_to(jnp.arange(size), union.token.shape)
    for _ in range(levels):  # after round d, nodes of depth d know the first node with their path
        of_parent = jnp.take_along_axis(first, union.parent, axis=-1)
        same = alike & (of_parent[:, :, None] == of_parent[:, None, :])
        first = jnp.argmax(same, axis=-1)
    worth = jnp.where(same, union.log_prob[:, None, :], -jnp.inf)
    best = jnp.argmax(worth, axis=-1)
    log_prob = jnp.max(worth, axis=-1)
    entropy = jnp.take_along_axis(union.entropy, best, axis=-1)
    origin = jax.lax.reduce(
        jnp.where(same, union.origin[:, None, :], 0), jnp.int32(0), jax.lax.bitwise_or, dimensions=(2,)
    )
    stands = union.valid & (first == jnp.arange(size))
    return _keep(union, stands, log_prob, entropy, origin, first, levels, most_nodes)


def _keep(
    union: DraftTree,
    stands: Array,
    log_prob: Array,
    entropy: Array,
    origin: Array,
    first: Array,
    levels: int,
    most_nodes: int,
) -> DraftTree:
    """The `most_nodes` best of the nodes that stand for their path; `first` [B, U] leads from a node to its path's."""
    size = union.token.shape[-1]
    candidates = min(most_nodes, size)
    score = jnp.where(stands, log_prob, -jnp.inf).at[:, 0].set(jnp.inf)
    found, kept = best_of(score, candidates)
    # Unused slots go last, where sorting cannot mix them with nodes.
    kept = jnp.sort(jnp.where(found > -jnp.inf, kept, size), axis=-1)
    kept = jnp.pad(kept, ((0, 0), (0, most_nodes - candidates)), constant_values=size)
    valid = kept < size
    kept = jnp.minimum(kept, size - 1)
    take = lambda values: jnp.take_along_axis(values, kept, axis=-1)
    only_valid = lambda values: jnp.where(valid, take(values), 0)
    own_slot = jnp.arange(most_nodes)
    parent_in_union = jnp.take_along_axis(first, take(union.parent), axis=-1)
    is_parent = (kept[:, None, :] == parent_in_union[:, :, None]) & valid[:, None, :]
    parent = jnp.where(valid, jnp.argmax(is_parent, axis=-1), own_slot).astype(jnp.int32)
    return DraftTree(
        token=only_valid(union.token),
        parent=parent,
        depth=only_valid(union.depth),
        log_prob=only_valid(log_prob),
        entropy=only_valid(entropy),
        ancestor=ancestor_matrix(parent, levels),
        origin=only_valid(origin),
        valid=valid,
    )


def _side_by_side(values: Array, specialists: int) -> Array:
    """[N, B, M] -> [B, U]: the first specialist's root, then all others' nodes."""
    return jnp.concatenate([values[0, :, :1], *(values[n, :, 1:] for n in range(specialists))], axis=-1)
