"""HASS's aligned passes: the drafter trained on its own features in the pattern that drafting produces.

Pass n reads the newest drafter features. Its query i sees verifier features at columns j <= i - (n-1), and on each of
the n-1 nearest columns one earlier pass's features: column i those of the newest pass, column i-1 the one before, and
so on (Zhang et al., HASS, section 3.2). Only those diagonals are computed, not n full attentions. EAGLE-2 is one pass.

Shapes: B batch, T positions, D model width, H query heads, K key/value heads, G = H / K, E head width, P passes.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

from taps_jax.models.drafter import Drafter
from taps_jax.models.layers import NEGATIVE


def aligned_passes(
    drafter: Drafter, params: dict, embeddings: Array, features: Array, passes: int, zero_logit_mask: bool = False
) -> Array:
    """Predicted features of every pass; gradients do not flow from a pass into the features it was fed.

    Args:
      drafter: the module.
      params: one specialist.
      embeddings: [B, T, D], of the token after each position.
      features: [B, T, D], the verifier's (with noise, in training).
      passes: P.
      zero_logit_mask: the original's mask, which sets hidden logits to 0 rather than minus infinity.
    Returns:
      [P, B, T, D].
    """
    positions = jnp.broadcast_to(jnp.arange(features.shape[1]), features.shape[:2])

    # The backward pass computes each pass again, one at a time: their attention weights never exist together.
    @jax.checkpoint
    def one_pass(params: dict, source: Array, earlier: list[tuple[Array, Array]]):
        def call(method, *args):
            return drafter.apply({"params": params}, *args, method=method)

        x = call(Drafter.fuse, embeddings, source)
        newest = call(Drafter.keys_values, x, positions)
        attended = attend_aligned(call(Drafter.queries, x, positions), [*earlier, newest], zero_logit_mask)
        return call(Drafter.finish, x, attended), newest

    source, sources, predictions = features, [], []
    for _ in range(passes):
        prediction, keys_values = one_pass(params, source, sources)
        sources = [*sources, keys_values]
        predictions.append(prediction)
        own = jnp.concatenate([features[:, :1], prediction[:, :-1].astype(features.dtype)], axis=1)
        source = jax.lax.stop_gradient(own)
    return jnp.stack(predictions)


def attend_aligned(q: Array, sources: list[tuple[Array, Array]], zero_logit_mask: bool) -> Array:
    """Attention of one pass over its sources.

    Args:
      q: [B, T, H, E], from the newest source.
      sources: keys and values, each [B, K, T, E]; the verifier's first, the newest last.
      zero_logit_mask: see `aligned_passes`.
    Returns:
      [B, T, H * E].
    """
    batch, size, heads, width = q.shape
    kv_heads = sources[0][0].shape[1]
    grouped = q.reshape(batch, size, kv_heads, heads // kv_heads, width)
    newest = len(sources) - 1
    rows, columns = jnp.arange(size)[:, None], jnp.arange(size)
    raw = jnp.einsum("btkge,bkse->bkgts", grouped, sources[0][0], preferred_element_type=jnp.float32)
    parts = [jnp.where(columns <= rows - newest, raw / math.sqrt(width), NEGATIVE)]
    for index, (keys, _) in enumerate(sources[1:], start=1):
        back = newest - index
        raw = jnp.einsum("btkge,bkte->bkgt", grouped, _shift(keys, back), preferred_element_type=jnp.float32)
        parts.append(jnp.where(jnp.arange(size) >= back, raw / math.sqrt(width), NEGATIVE)[..., None])
    if zero_logit_mask:
        later = size - 1 - jnp.arange(size)  # columns after i, each at logit 0: together one column at their logarithm
        null = jnp.where(later > 0, jnp.log(jnp.maximum(later, 1)), NEGATIVE)
        parts.append(jnp.broadcast_to(null[:, None], (*raw.shape[:3], size, 1)))
    weights = jax.nn.softmax(jnp.concatenate(parts, axis=-1), axis=-1).astype(q.dtype)
    out = jnp.einsum("bkgts,bkse->btkge", weights[..., :size], sources[0][1])
    for index, (_, values) in enumerate(sources[1:], start=1):
        shifted = _shift(values, newest - index).swapaxes(1, 2)[:, :, :, None]
        out = out + weights[..., size + index - 1].transpose(0, 3, 1, 2)[..., None] * shifted
    return out.reshape(batch, size, heads * width)


def _shift(rows: Array, back: int) -> Array:
    """rows [B, K, T, E] -> row i holds what was at i - back; the first `back` rows are zero."""
    return jnp.pad(rows, ((0, 0), (0, 0), (back, 0), (0, 0)))[:, :, : rows.shape[2]]
