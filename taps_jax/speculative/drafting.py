"""Growing EAGLE-2 dynamic draft trees with N stacked specialists.

Shapes: N specialists, B batch, R rows to extend by, D model width, W draft vocabulary, k = top_k, C candidates.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from taps_jax.models.cache import KVCache, append
from taps_jax.models.drafter import Drafter, stack_specialists, stacked
from taps_jax.models.layers import NEGATIVE, attend, project
from taps_jax.numerics import top_k as best_of
from taps_jax.speculative.tree import DraftTree, TreeShape, ancestor_matrix

# A specialist's log-probability of a token that it cannot propose: one in a hundred thousand.
LOG_PROB_FLOOR = -11.5


class DrafterWeights(NamedTuple):
    """What drafting reads.

    Attributes:
      params: stacked specialists, leaves with a leading axis N.
      embedding: [V, D], the verifier's token embedding.
      head: [W, D], the rows of the verifier's head that specialists may propose from.
      vocabulary: [W] int32, the token ids of those rows, or None when W = V.
      own: [N, W] bool, which of them each specialist may propose, or None when each may propose all.
    """

    params: dict
    embedding: Array
    head: Array
    vocabulary: Array | None
    own: Array | None = None


def drafter_weights(
    specialists: list[dict], embedding: Array, head: Array, vocabularies: list[np.ndarray | None]
) -> DrafterWeights:
    """Stacks specialists and takes the head's rows of all their draft vocabularies, once.

    Args:
      specialists: parameters of N drafters of one shape, cast to the embedding's dtype.
      embedding, head: the verifier's, each [V, D].
      vocabularies: of each specialist its ids, or None for all.
    """
    cast = jax.tree.map(lambda leaf: jnp.asarray(leaf, embedding.dtype), stack_specialists(specialists))
    if all(ids is None for ids in vocabularies):
        return DrafterWeights(cast, embedding, head, None)
    everything = np.arange(head.shape[0])
    lists = [everything if ids is None else np.asarray(ids) for ids in vocabularies]
    if all(np.array_equal(ids, lists[0]) for ids in lists):
        union, own = lists[0], None
    else:
        union = np.unique(np.concatenate(lists))
        own = jnp.asarray(np.stack([np.isin(union, ids) for ids in lists]))
    if np.array_equal(union, everything):
        return DrafterWeights(cast, embedding, head, None, own)
    ids = jnp.asarray(union, jnp.int32)
    return DrafterWeights(cast, embedding, head[ids], ids, own)


class CommittedPairs(NamedTuple):
    """Newly committed positions that the drafters have not read yet.

    Attributes:
      features: [B, R, D], the verifier's features at those positions.
      tokens: [B, R] int32, the token that follows each of them.
      count: [B] int32, how many of the R slots are used, at least 1.
    """

    features: Array
    tokens: Array
    count: Array


class Proposals(NamedTuple):
    """The k best next tokens after each of some nodes.

    Attributes:
      token: [..., k] int32.
      log_prob: [..., k] float32.
      entropy: [...] float32, nats, of the whole distribution.
    """

    token: Array
    log_prob: Array
    entropy: Array


def propose(weights: DrafterWeights, outputs: Array, top_k: int) -> Proposals:
    """The k most probable tokens by the drafter (temperature 1) after predicted features `outputs` [N, ..., D]."""
    logits = _logits(weights, outputs)
    flat = logits.reshape(-1, logits.shape[-1])
    top, index = best_of(flat, top_k)
    shifted = flat - top[:, :1]  # the largest logit is at hand: no second pass for it
    exps = jnp.exp(shifted)
    total = jnp.sum(exps, axis=-1)
    log_total = jnp.log(total)
    entropy = log_total - jnp.sum(exps * shifted, axis=-1) / total
    token = index.astype(jnp.int32) if weights.vocabulary is None else weights.vocabulary[index]
    lead = outputs.shape[:-1]
    log_prob = top - top[:, :1] - log_total[:, None]
    return Proposals(token.reshape(*lead, top_k), log_prob.reshape(*lead, top_k), entropy.reshape(lead))


def token_log_probs(weights: DrafterWeights, outputs: Array, tokens: Array) -> Array:
    """Each specialist's log-probabilities of tokens [B, R] by its predictions `outputs` [N, B, R, D] -> [N, B, R].

    A token that a specialist cannot propose, or hardly would, counts as `LOG_PROB_FLOOR`.
    """
    logits = _logits(weights, outputs)
    ids = jnp.arange(logits.shape[-1]) if weights.vocabulary is None else weights.vocabulary
    is_token = tokens[..., None] == ids
    found = jnp.max(jnp.where(is_token, logits, NEGATIVE), axis=-1)
    return jnp.maximum(found - jax.nn.logsumexp(logits, axis=-1), LOG_PROB_FLOOR)


def _logits(weights: DrafterWeights, outputs: Array) -> Array:
    """outputs [N, ..., D] -> float32 logits [N, ..., W]; ids that a specialist lacks are out of its reach."""
    logits = project(outputs, weights.head).astype(jnp.float32)
    if weights.own is None:
        return logits
    own = weights.own.reshape(weights.own.shape[0], *[1] * (logits.ndim - 2), -1)
    return jnp.where(own, logits, NEGATIVE)


def extend(
    drafter: Drafter,
    weights: DrafterWeights,
    cache: KVCache,
    start: Array,
    pairs: CommittedPairs,
    every_row: bool = False,
) -> tuple[Array, KVCache]:
    """Lets every specialist read the newly committed positions.

    Keys and values are computed for all R slots (those beyond `count` are overwritten by the next call), the rest of
    the layer only for the last committed one, the only output that drafting needs, unless `every_row` is asked for.

    Args:
      drafter: the module of one specialist.
      weights: N stacked specialists.
      cache: one layer, leaves [N, B, K, S, E], holding `start` pairs per row.
      start: [B] int32.
      pairs: what to read.
      every_row: return the outputs of all slots.
    Returns:
      Predicted features at the last committed position [N, B, D], or of all slots [N, B, R, D]; the extended cache.
    """
    rows = pairs.tokens.shape[1]
    positions = start[:, None] + jnp.arange(rows)
    embeddings = weights.embedding[pairs.tokens]
    x = stacked(drafter, Drafter.fuse, (None, None))(weights.params, embeddings, pairs.features)
    new = KVCache(*((part,) for part in stacked(drafter, Drafter.keys_values, (0, None))(weights.params, x, positions)))
    slots = jnp.arange(rows)
    asked = jnp.broadcast_to(slots, pairs.tokens.shape) if every_row else (pairs.count - 1)[:, None]
    x_asked = jnp.take_along_axis(x, asked[None, :, :, None], axis=2)
    q = stacked(drafter, Drafter.queries, (0, None))(weights.params, x_asked, start[:, None] + asked)
    sees = slots <= asked[..., None]
    attended = jax.vmap(attend, in_axes=(0, 0, None, 0, None))(q, _pair(new), sees, _pair(cache), start)
    output = stacked(drafter, Drafter.finish, (0, 0))(weights.params, x_asked, attended)
    return output if every_row else output[:, :, 0], jax.vmap(append, in_axes=(0, 0, None))(cache, new, start)


def grow(
    drafter: Drafter,
    weights: DrafterWeights,
    cache: KVCache,
    length: Array,
    output: Array,
    root: Array,
    shape: TreeShape,
) -> DraftTree:
    """Each specialist's dynamic tree (EAGLE-2): expand the k best nodes of every level, then keep the best overall.

    Args:
      drafter, weights, cache: as for `extend`, already extended.
      length: [B] int32, pairs in the cache.
      output: [N, B, D], predicted features at the last committed position.
      root: [B] int32, last committed token.
      shape: size of the tree.
    Returns:
      Trees with leaves [N, B, M, ...].
    """
    k = shape.top_k
    lead = output.shape[:2]
    first = propose(weights, output, k)
    levels = [Level(first.token, first.log_prob, _spread(first.entropy, k), jnp.full((*lead, k), -1, jnp.int32))]
    beam = _Beam(first.token, first.log_prob, jnp.broadcast_to(jnp.arange(k), (*lead, k)))
    beam_features = jnp.broadcast_to(output[:, :, None], (*lead, k, output.shape[-1]))
    sees = jnp.broadcast_to(jnp.eye(k, dtype=bool), (*lead, k, k))
    tree_pairs = None
    step = stacked(drafter, Drafter.fuse, (0, 0))
    for level in range(shape.depth):
        positions = jnp.broadcast_to((length + level)[:, None], (lead[1], k))
        x = step(weights.params, weights.embedding[beam.token], beam_features)
        new = stacked(drafter, Drafter.keys_values, (0, None))(weights.params, x, positions)
        tree_pairs = new if tree_pairs is None else jax.tree.map(_join_nodes, tree_pairs, new)
        q = stacked(drafter, Drafter.queries, (0, None))(weights.params, x, positions)
        attended = jax.vmap(attend, in_axes=(0, 0, 0, 0, None))(q, tree_pairs, sees, _pair(cache), length)
        outputs = stacked(drafter, Drafter.finish, (0, 0))(weights.params, x, attended)
        found = propose(weights, outputs, k)
        total = beam.log_prob[..., None] + found.log_prob
        parent = jnp.broadcast_to(beam.candidate[..., None], total.shape)
        flatten = lambda a: a.reshape(*lead, k * k)
        levels.append(Level(flatten(found.token), flatten(total), flatten(_spread(found.entropy, k)), flatten(parent)))
        best, chosen = best_of(flatten(total), k)
        row = chosen // k
        candidate = k + level * k * k + chosen
        beam = _Beam(_take(flatten(found.token), chosen), best, candidate)
        beam_features = jnp.take_along_axis(outputs, row[..., None], axis=2)
        own = jnp.broadcast_to(jnp.eye(k, dtype=bool), (*lead, k, k))
        sees = jnp.concatenate([jnp.take_along_axis(sees, row[..., None], axis=2), own], axis=-1)
    return keep_best(levels, root, shape)


class Level(NamedTuple):
    """Candidates of one drafted level, each [N, B, c]; parent is a candidate index, -1 for the root."""

    token: Array
    log_prob: Array
    entropy: Array
    parent: Array


class _Beam(NamedTuple):
    """The nodes to expand next, each [N, B, k]; candidate is their index among all candidates."""

    token: Array
    log_prob: Array
    candidate: Array


def keep_best(levels: list[Level], root: Array, shape: TreeShape) -> DraftTree:
    """The root and the M-1 best candidates, in drafting order.

    A parent's cumulative log-probability is at least its child's and its index is lower, and top_k prefers the lower
    index among equals, so a kept node's parent is always kept.
    """
    joined = Level(*(jnp.concatenate(parts, axis=-1) for parts in zip(*levels, strict=True)))
    level_sizes = [level.token.shape[-1] for level in levels]
    depth_of = jnp.repeat(jnp.arange(1, len(levels) + 1), jnp.array(level_sizes), total_repeat_length=sum(level_sizes))
    _, kept = best_of(joined.log_prob, shape.num_nodes - 1)
    kept = jnp.sort(kept, axis=-1)
    parent_candidate = _take(joined.parent, kept)
    search = jnp.vectorize(jnp.searchsorted, signature="(m),(m)->(m)")
    parent = jnp.where(parent_candidate < 0, 0, 1 + search(kept, parent_candidate)).astype(jnp.int32)
    lead = kept.shape[:-1]

    def with_root(value, nodes: Array) -> Array:
        first = jnp.broadcast_to(jnp.asarray(value, nodes.dtype), lead)[..., None]
        return jnp.concatenate([first, nodes], axis=-1)

    parent = with_root(0, parent)
    depth = with_root(0, depth_of[kept].astype(jnp.int32))
    origin_bit = (1 << jnp.arange(lead[0], dtype=jnp.int32))[:, None, None]
    return DraftTree(
        token=with_root(root, _take(joined.token, kept)),
        parent=parent,
        depth=depth,
        log_prob=with_root(0.0, _take(joined.log_prob, kept)),
        entropy=with_root(0.0, _take(joined.entropy, kept)),
        ancestor=jax.vmap(lambda p: ancestor_matrix(p, shape.path_length - 1))(parent),
        origin=with_root(0, jnp.broadcast_to(origin_bit, kept.shape)),
        valid=jnp.ones(parent.shape, bool),
    )


def _pair(cache: KVCache) -> tuple[Array, Array]:
    return cache.layer(0)


def _spread(entropy: Array, k: int) -> Array:
    return jnp.broadcast_to(entropy[..., None], (*entropy.shape, k))


def _join_nodes(old: Array, new: Array) -> Array:
    return jnp.concatenate([old, new], axis=-2)


def _take(values: Array, index: Array) -> Array:
    return jnp.take_along_axis(values, index, axis=-1)
