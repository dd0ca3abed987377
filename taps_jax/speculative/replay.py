"""Drafting along a text that is already written: the trees that decoding would have verified, without decoding.

Speculative decoding never changes the text, so what a drafter would have had accepted is known from the text alone.
One pass of verifier and drafters reads it; then trees grow from as many of its positions at once as fit in memory.

Shapes: N specialists, B texts, T tokens, P positions, K key/value heads, S cache positions (T here), D model width.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from taps_jax.models.cache import KVCache
from taps_jax.models.drafter import Drafter, stacked
from taps_jax.models.layers import attend
from taps_jax.models.llama import causal_mask
from taps_jax.speculative.composition import FORGETTING, Composition, certainty, compose
from taps_jax.speculative.decode import Models, Weights
from taps_jax.speculative.drafting import DrafterWeights, grow, token_log_probs
from taps_jax.speculative.tree import AcceptedPath, DraftTree, TreeShape, accept

_POSITIONS_AT_ONCE = 16


class ReadText(NamedTuple):
    """What the drafters know after every token of one text.

    Attributes:
      tokens: [T] int32.
      cache: leaves [N, 1, K, S, E], pair j at position j.
      outputs: [N, T, D], predicted features after pair j.
    """

    tokens: Array
    cache: KVCache
    outputs: Array


@functools.partial(jax.jit, static_argnames=("models",))
def read_text(models: Models, weights: Weights, tokens: Array) -> ReadText:
    """Reads tokens [T], which may be padded on the right: no position sees a later one."""
    rows, size = tokens[None], tokens.shape[0]
    positions, mask = jnp.arange(size)[None], causal_mask(size)
    features, _ = models.verifier.apply({"params": weights.verifier}, rows, positions, mask)
    drafters = weights.drafter
    following = drafters.embedding[jnp.roll(rows, -1, axis=1)]
    x = stacked(models.drafter, Drafter.fuse, (None, None))(drafters.params, following, features)
    new = stacked(models.drafter, Drafter.keys_values, (0, None))(drafters.params, x, positions)
    q = stacked(models.drafter, Drafter.queries, (0, None))(drafters.params, x, positions)
    attended = jax.vmap(lambda q, new: attend(q, new, mask, None, None))(q, new)
    outputs = stacked(models.drafter, Drafter.finish, (0, 0))(drafters.params, x, attended)
    return ReadText(tokens, KVCache((new[0],), (new[1],)), outputs[:, 0])


@functools.partial(jax.jit, static_argnames=("models",))
def trees_at(models: Models, weights: Weights, read: ReadText, positions: Array) -> DraftTree:
    """The tree of every specialist at some positions.

    Args:
      models, weights: the decoder.
      read: a text.
      positions: [P] int32, at least 1; the root is the token there.
    Returns:
      Leaves [N, P, M, ...].
    """
    repeat = lambda leaf: jnp.broadcast_to(leaf, (leaf.shape[0], positions.shape[0], *leaf.shape[2:]))
    cache = jax.tree.map(repeat, read.cache)
    output, root = read.outputs[:, positions - 1], read.tokens[positions]
    return grow(models.drafter, weights.drafter, cache, positions, output, root, models.shape)


@functools.partial(jax.jit, static_argnames=("rule", "shape"))
def compose_at(
    rule: Composition, shape: TreeShape, trees: DraftTree, score: Array | None, following: Array
) -> tuple[DraftTree, AcceptedPath, Array, Array]:
    """What a rule makes of the specialists' trees at some positions, and what of it the text accepts.

    Args:
      rule: how they share a step.
      shape: size of each tree.
      trees: leaves [N, P, M, ...], from `trees_at`.
      score: [N, P] float32 for the rules that choose by what came before, see `turn_scores`; else None.
      following: [P, L - 1] int32, the text's tokens after each position, -1 beyond its end.
    Returns:
      The tree of each position with leaves [P, ...], its accepted path, the scores [N, P] and the chosen [P].
    """
    tree, score, chosen = compose(rule, trees, shape, score)
    best = jnp.take_along_axis(jnp.pad(following, ((0, 0), (0, 1)), constant_values=-1), tree.depth, axis=1)
    return tree, accept(tree, best, shape.path_length), score, chosen


def turn_scores(
    rule: Composition, weights: DrafterWeights, read: ReadText, first: DraftTree, start: int, count: int
) -> np.ndarray | None:
    """Scores [N, count] by which a rule chooses at each position of one answer, None if it needs the trees there.

    Args:
      rule: how specialists share a step.
      weights: of the specialists.
      read: the text.
      first: the specialists' trees at `start`, leaves [N, 1, M, ...].
      start: where the answer begins.
      count: positions of the answer to score.
    """
    if rule is Composition.ROUTE_ENTROPY:
        return np.repeat(np.asarray(certainty(first)), count, axis=1)
    if rule is not Composition.ROUTE_LIKELIHOOD:
        return None
    score = np.zeros((first.token.shape[0], count), np.float32)
    for chunk, used in position_chunks(start + 1, start + count):
        found = np.asarray(_log_probs_at(weights, read, jnp.asarray(chunk)))
        for offset in range(used):
            at = int(chunk[offset]) - start
            score[:, at] = np.float32(FORGETTING) * score[:, at - 1] + found[:, offset]
    return score


@jax.jit
def _log_probs_at(weights: DrafterWeights, read: ReadText, positions: Array) -> Array:
    """Each specialist's log-probability of the text's tokens at `positions` [P] -> [N, P]."""
    return token_log_probs(weights, read.outputs[:, None, positions - 2], read.tokens[positions][None])[:, 0]


def position_chunks(start: int, end: int) -> Iterator[tuple[np.ndarray, int]]:
    """Positions start..end-1 in arrays of one size, padded with the last, each with how many of its entries count."""
    for first in range(start, end, _POSITIONS_AT_ONCE):
        chunk = np.minimum(np.arange(first, first + _POSITIONS_AT_ONCE), end - 1).astype(np.int32)
        yield chunk, min(_POSITIONS_AT_ONCE, end - first)


def count_steps(accepted: np.ndarray) -> int:
    """Steps to write a text, given what would be accepted at each of its positions but the last, [T - 1].

    Position 0 is the token that reading the prompt yields; a step at i commits accepted[i] + 1 tokens.
    """
    steps = position = 0
    while position < len(accepted):
        position += int(accepted[position]) + 1
        steps += 1
    return steps
