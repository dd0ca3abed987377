"""Draft trees as arrays: nodes with parent pointers, and the longest path a verifier agrees with.

Shapes: B batch, M tree nodes, L path slots (depth of the deepest possible node, plus one for the root).
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """Size of a draft tree, in EAGLE's terms.

    Attributes:
      total_token: nodes including the root.
      depth: expansions after the first drafted level, so a tree has depth + 1 drafted levels.
      top_k: tokens proposed per expanded node, and nodes expanded per level.
    """

    total_token: int
    depth: int
    top_k: int

    def __post_init__(self):
        if self.total_token < 2 or self.depth < 0 or self.top_k < 1:
            raise ValueError(f"tree {self}: total_token must be at least 2, depth at least 0 and top_k at least 1")

    def __str__(self) -> str:
        """As `--tree` takes it."""
        return f"{self.total_token}/{self.depth}/{self.top_k}"

    @property
    def num_candidates(self) -> int:
        return self.top_k + self.depth * self.top_k**2

    @property
    def num_nodes(self) -> int:
        """M: fewer than total_token when there are not that many candidates."""
        return min(self.total_token, 1 + self.num_candidates)

    @property
    def path_length(self) -> int:
        """L: nodes on the longest path from the root, root included."""
        return min(self.depth + 2, self.num_nodes)


@flax.struct.dataclass
class DraftTree:
    """A tree of proposed tokens per row; node 0 is the root and parents come before their children.

    Attributes:
      token: [B, M] int32; the root's is the last committed token.
      parent: [B, M] int32; the root is its own parent.
      depth: [B, M] int32, 0 for the root.
      log_prob: [B, M] float32, cumulative log-probability under the drafter, 0 for the root.
      entropy: [B, M] float32, nats, of the draft distribution that proposed the node; 0 for the root.
      ancestor: [B, M, M] bool, entry (i, j): j is i or one of its ancestors. Attention mask and acceptance structure.
      origin: [B, M] int32, bit n set if specialist n proposed the node; 0 for the root.
      valid: [B, M] bool, false for unused slots, which are never accepted.
    """

    token: Array
    parent: Array
    depth: Array
    log_prob: Array
    entropy: Array
    ancestor: Array
    origin: Array
    valid: Array


@flax.struct.dataclass
class AcceptedPath:
    """The accepted nodes of a tree.

    Attributes:
      nodes: [B, L] int32, from the root down; slots after the last accepted node hold 0.
      count: [B] int32, accepted drafted nodes; the root is not counted.
    """

    nodes: Array
    count: Array


def root_tree(token: Array) -> DraftTree:
    """A tree of the root alone, which makes a speculative step a plain decoding step; token [B]."""
    shape = (token.shape[0], 1)
    zeros, floats = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    yes = jnp.ones(shape, bool)
    return DraftTree(token[:, None], zeros, zeros, floats, floats, yes[:, :, None], zeros, yes)


def ancestor_matrix(parent: Array, levels: int) -> Array:
    """Ancestors of every node, itself included.

    Args:
      parent: [B, M] int32; unused slots must point to themselves.
      levels: the greatest depth of any node.
    Returns:
      [B, M, M] bool.
    """
    nodes = parent.shape[-1]
    own = jnp.eye(nodes, dtype=bool)
    ancestor = jnp.broadcast_to(own, (*parent.shape, nodes))
    for _ in range(levels):
        ancestor = own | jnp.take_along_axis(ancestor, parent[..., None], axis=-2)
    return ancestor


def accept(tree: DraftTree, best: Array, path_length: int) -> AcceptedPath:
    """The longest path of `tree` on which the verifier's choice at each node is the next drafted token.

    Args:
      tree: M nodes per row.
      best: [B, M] int32, the token the verifier chooses after each node.
      path_length: L, at least the greatest depth plus one.
    Returns:
      The path to the deepest surviving node, the first of equals.
    """
    expected = jnp.take_along_axis(best, tree.parent, axis=-1)
    agrees = ((tree.token == expected) & tree.valid).at[:, 0].set(True)
    alive = ~jnp.any(tree.ancestor & ~agrees[:, None, :], axis=-1)
    deepest = jnp.argmax(jnp.where(alive & tree.valid, tree.depth, -1), axis=-1)
    on_path = jnp.take_along_axis(tree.ancestor, deepest[:, None, None], axis=1)[:, 0]
    slot = jnp.where(on_path, tree.depth, path_length)
    node_ids = jnp.arange(tree.token.shape[-1], dtype=jnp.int32)
    place = lambda slots: jnp.zeros(path_length, jnp.int32).at[slots].set(node_ids, mode="drop")
    count = jnp.take_along_axis(tree.depth, deepest[:, None], axis=-1)[:, 0]
    return AcceptedPath(jax.vmap(place)(slot), count)
