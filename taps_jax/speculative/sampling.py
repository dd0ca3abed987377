"""Choosing tokens: greedy, or a draw whose noise depends on a row's key and the token's absolute position only.

A draw is argmax(log-probability + Gumbel noise). Because the noise of a position is fixed, the token chosen after a
given prefix is the same whether the prefix was decoded token by token or verified inside a draft tree: speculative and
plain decoding with the same seed return the same tokens.

Shapes: B batch, M tree nodes, L path slots, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from taps_jax.numerics import argmax


class Sampling(NamedTuple):
    """Per-row decoding settings.

    Attributes:
      temperature: [B] float32; 0 is greedy.
      top_p: [B] float32 in (0, 1]; 1 keeps every token.
      top_k: [B] int32; 0 keeps every token.
      key: [B] random keys.
    """

    temperature: Array
    top_p: Array
    top_k: Array
    key: Array


def greedy(batch: int) -> Sampling:
    """Settings of B greedy rows."""
    zeros = jnp.zeros(batch)
    return Sampling(zeros, zeros + 1, jnp.zeros(batch, jnp.int32), jax.random.split(jax.random.key(0), batch))


def choose(logits: Array, sampling: Sampling, position: Array, depth: Array, levels: int) -> Array:
    """The verifier's choice after each node of a tree.

    Args:
      logits: [B, M, V] float32.
      sampling: settings of the B rows.
      position: [B] int32, absolute position of the root.
      depth: [B, M] int32, depth of each node, below `levels`.
      levels: L, number of distinct depths.
    Returns:
      [B, M] int32 tokens. The first of equal tokens wins.
    """

    def draw() -> Array:
        return jax.lax.cond(
            jnp.any((sampling.top_p < 1) | (sampling.top_k > 0)),
            lambda: argmax(truncate(logits, sampling) + noise()),
            lambda: argmax(tempered(logits, sampling.temperature) + noise()),
        )

    def noise() -> Array:
        keys = jax.vmap(lambda key, at: jax.vmap(lambda i: jax.random.fold_in(key, at + 1 + i))(jnp.arange(levels)))
        gumbel = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:])))
        by_level = gumbel(keys(sampling.key, position))
        per_node = jnp.take_along_axis(by_level, depth[..., None], axis=1)
        return jnp.where(sampling.temperature[:, None, None] > 0, per_node, 0.0)

    return jax.lax.cond(jnp.any(sampling.temperature > 0), draw, lambda: argmax(logits))


def tempered(logits: Array, temperature: Array) -> Array:
    """logits [B, M, V] divided by temperature [B]; greedy rows stay as they are."""
    return logits / jnp.where(temperature > 0, temperature, 1.0)[:, None, None]


def truncate(logits: Array, sampling: Sampling) -> Array:
    """Tempered logits [B, M, V] with the tokens outside top-k, then top-p, at minus infinity.

    Tokens as probable as the last one kept are kept too, so the result does not depend on token order.
    """
    scaled = tempered(logits, sampling.temperature)
    k = jnp.where(sampling.top_k > 0, sampling.top_k, logits.shape[-1])[:, None]
    probs = jax.nn.softmax(scaled, axis=-1)
    probs = jnp.where(probs >= _cut(probs, jnp.ones_like(probs), k)[..., None], probs, 0.0)
    probs = probs / jnp.sum(probs, axis=-1, keepdims=True)
    p = sampling.top_p[:, None]
    nucleus = jnp.where(p < 1, _cut(probs, probs, p), 0.0)
    return jnp.where((probs > 0) & (probs >= nucleus[..., None]), scaled, -jnp.inf)


def _cut(probs: Array, mass: Array, enough: Array) -> Array:
    """The greatest probability c [B, M] such that the `mass` of tokens with probs >= c reaches `enough` [B, 1].

    Non-negative floats order like their bit patterns, so 31 halvings of the pattern find c exactly, where sorting the
    vocabulary for every node would cost ten times the verifier's pass on a CPU.
    """
    bits = jax.lax.bitcast_convert_type(probs, jnp.int32)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low + 1) // 2
        reached = jnp.sum(jnp.where(bits >= middle[..., None], mass, 0.0), axis=-1) >= enough
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle - 1)

    low = jnp.zeros(probs.shape[:-1], jnp.int32)
    high = jnp.full(probs.shape[:-1], jnp.float32(1).view(jnp.int32))
    low, _ = jax.lax.fori_loop(0, 31, halve, (low, high))
    return jax.lax.bitcast_convert_type(low, jnp.float32)
