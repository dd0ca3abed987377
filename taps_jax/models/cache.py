"""Key/value caches: per-layer arrays that models read and callers write.

A model never writes its cache. It returns the keys and values of its new positions, and the caller appends those it
keeps: all of a prompt, or the accepted path of a draft tree. So a rejected branch never reaches a cache.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from taps_jax.models.config import LlamaConfig


class KVCache(NamedTuple):
    """Keys and values of every layer, each [..., K, S, E] with leading batch axes (B, or N and B)."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]

    @property
    def size(self) -> int:
        return self.keys[0].shape[-2]

    def layer(self, index: int) -> tuple[Array, Array]:
        return self.keys[index], self.values[index]


def empty_cache(config: LlamaConfig, leading: tuple[int, ...], size: int, dtype) -> KVCache:
    """A zeroed cache of `size` positions for `config.num_hidden_layers` layers."""
    shape = (*leading, config.num_key_value_heads, size, config.head_dim)
    layers = range(config.num_hidden_layers)
    return KVCache(*(tuple(jnp.zeros(shape, dtype) for _ in layers) for _ in range(2)))


def append(cache: KVCache, new: KVCache, start: Array) -> KVCache:
    """Writes `new` [B, K, U, E] per layer at positions start..start+U-1 of each row; start [B] int32.

    The caller guarantees start + U <= S: a later write would be clamped to fit and overwrite kept positions.
    """
    return jax.tree.map(lambda old, rows: _write_rows(old, rows, start), cache, new)


def _write_rows(old: Array, rows: Array, start: Array) -> Array:
    rows = rows.astype(old.dtype)
    if old.shape[0] == 1:  # stays one in-place dynamic_update_slice; under vmap it would become a scatter
        return jax.lax.dynamic_update_slice(old, rows, (0, 0, start[0], 0))
    return jax.vmap(lambda o, r, s: jax.lax.dynamic_update_slice(o, r, (0, s, 0)))(old, rows, start)
