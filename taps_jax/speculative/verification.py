"""One verifier pass over a draft tree, and what it commits.

Shapes: B batch, M tree nodes, L path slots, D model width, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from taps_jax.models.cache import KVCache, append
from taps_jax.models.llama import Llama
from taps_jax.speculative.drafting import CommittedPairs
from taps_jax.speculative.tree import AcceptedPath, DraftTree


class Verified(NamedTuple):
    """The verifier's view of a tree.

    Attributes:
      features: [B, M, D].
      logits: [B, M, V] float32.
      new: keys and values of the nodes, not yet in the cache.
    """

    features: Array
    logits: Array
    new: KVCache


def verify(verifier: Llama, params: dict, cache: KVCache, length: Array, tree: DraftTree) -> Verified:
    """Runs the verifier on all nodes at once; each sees the `length` [B] committed positions and its ancestors."""
    positions = length[:, None] + tree.depth
    features, new = verifier.apply({"params": params}, tree.token, positions, tree.ancestor, cache, length)
    logits = verifier.apply({"params": params}, features, method=Llama.logits)
    return Verified(features, logits, new)


def commit(
    cache: KVCache, length: Array, tree: DraftTree, verified: Verified, path: AcceptedPath, best: Array
) -> tuple[KVCache, CommittedPairs]:
    """Keeps what the accepted path computed.

    Args:
      cache: the verifier's cache, `length` [B] positions filled.
      tree, verified: the tree and the verifier's view of it.
      path: its accepted path, L slots.
      best: [B, M] int32, the verifier's choice after each node.
    Returns:
      The cache with the rows of root and accepted nodes at `length` onwards (slots after them hold rows that a later
      commit overwrites), and the pairs for the drafters: the features of those nodes, each with the token that follows
      it, which are the accepted tokens and then the bonus.
    """

    def gather(rows: Array) -> Array:
        return jnp.take_along_axis(rows, path.nodes[:, None, :, None], axis=2)

    cache = append(cache, jax.tree.map(gather, verified.new), length)
    features = jnp.take_along_axis(verified.features, path.nodes[..., None], axis=1)
    # On an accepted path, the choice after a node is the next node's token.
    following = jnp.take_along_axis(best, path.nodes, axis=1)
    return cache, CommittedPairs(features, following, path.count + 1)
