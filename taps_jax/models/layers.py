"""Building blocks of a Llama decoder layer: projections, norm, rotary positions, attention, MLP.

Shapes: B batch, T query positions, U new key positions, S cache positions, D model width, H query heads,
K key/value heads, G = H / K, E head width.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from taps_jax.models.config import LlamaConfig

NEGATIVE = -1e30  # stands for minus infinity in masked scores: rows that see nothing stay finite

# On CPU, XLA repacks the whole weight for a product of a few rows with it as right operand; as left operand it is read
# once. Measured on 2 cores at width 576: 8 rows 22 ms against 42 ms. One row is a matrix-vector product and needs
# neither; from about 40 rows on the packing is paid for. In between, rows that do not fill the last vector cost more
# than a few more of them: 10 rows 65 ms, padded to 16 it is 57 ms.
_LEFT_OPERAND_ROWS = range(2, 41)


def project(x: Array, weight: Array) -> Array:
    """`x @ weight.T` for a weight stored `[out, in]`.

    Args:
      x: [..., in].
      weight: [out, in].
    Returns:
      [..., out], in the dtype of `weight`.
    """
    rows = math.prod(x.shape[:-1])
    flat = x.reshape(rows, x.shape[-1]).astype(weight.dtype)
    if jax.default_backend() == "cpu" and rows in _LEFT_OPERAND_ROWS:
        step = 1 if rows < 4 else 4 if rows < 8 else 8
        padded = jnp.pad(flat, ((0, -rows % step), (0, 0)))
        # The barrier keeps the compiler from turning this back into the form with the weight on the right.
        out = jax.lax.optimization_barrier(jnp.einsum("oi,ti->ot", weight, padded)).T[:rows]
    else:
        out = jnp.einsum("ti,oi->to", flat, weight)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def uniform_fan_in(key: Array, shape: tuple[int, ...], fan_in: int, dtype=jnp.float32) -> Array:
    """Uniform in +-1/sqrt(fan_in), the initialisation of `torch.nn.Linear` that EAGLE and HASS train from."""
    bound = 1 / math.sqrt(fan_in)
    return jax.random.uniform(key, shape, dtype, -bound, bound)


class Linear(nn.Module):
    """A projection whose `weight` is stored `[out, in]`, as in Hugging Face checkpoints."""

    features: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        fan_in = x.shape[-1]
        weight = self.param("weight", uniform_fan_in, (self.features, fan_in), fan_in)
        y = project(x, weight)
        if self.use_bias:
            y = y + self.param("bias", uniform_fan_in, (self.features,), fan_in)
        return y


class Embedding(nn.Module):
    """Token embedding table `[V, D]`."""

    vocab_size: int
    width: int

    def setup(self):
        self.weight = self.param("weight", nn.initializers.normal(0.02), (self.vocab_size, self.width))

    def __call__(self, tokens: Array) -> Array:
        return self.weight[tokens]


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, multiplied by the weight after casting back, as Hugging Face does."""

    eps: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],))
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * weight


def inverse_frequencies(config: LlamaConfig) -> np.ndarray:
    """Rotary angle per position, [E/2] float32, with Llama 3.1's scaling when the config asks for it."""
    # Rounded step by step as PyTorch rounds: one unit in the last place here is 5e-4 radians at position 8192.
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    powers = np.power(np.float64(config.rope_theta), exponents.astype(np.float64))
    frequencies = np.float32(1) / powers.astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = np.float32(2 * np.pi) / frequencies
    turns = np.float32(scaling.original_max_position_embeddings) / wavelengths
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0).astype(np.float32)
    return ((1 - smooth) * frequencies / np.float32(scaling.factor) + smooth * frequencies).astype(np.float32)


def rotary_angles(config: LlamaConfig, positions: Array) -> tuple[Array, Array]:
    """Cosines and sines for `positions` [...]: two float32 arrays [..., E/2]; no table, so no length limit."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, rotary: tuple[Array, Array]) -> Array:
    """Applies half-split rotary positions to x [B, T, heads, E], rotary [B, T, E/2]."""
    cos, sin = (part[..., None, :] for part in rotary)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attend(q: Array, new: tuple[Array, Array], new_mask: Array, cached: tuple[Array, Array] | None, length) -> Array:
    """Attention of queries over the filled part of a cache and over new keys that are not in it yet.

    Args:
      q: [B, T, H, E].
      new: keys and values, each [B, K, U, E].
      new_mask: [B or 1, T, U] bool, which new keys each query sees.
      cached: keys and values, each [B, K, S, E], or None.
      length: [B] int32, how many cache positions are filled; every query sees all of them.
    Returns:
      [B, T, H * E].
    """
    batch, t, heads, width = q.shape
    kv_heads = new[0].shape[1]
    grouped = q.reshape(batch, t, kv_heads, heads // kv_heads, width)

    def scores(keys: Array, mask: Array) -> Array:
        raw = jnp.einsum("btkge,bkse->bkgts", grouped, keys, preferred_element_type=jnp.float32)
        return jnp.where(mask[:, None, None], raw / math.sqrt(width), NEGATIVE)

    parts = [scores(new[0], new_mask)]
    if cached is not None:
        size = cached[0].shape[2]
        visible = jnp.arange(size)[None, None, :] < length[:, None, None]
        parts.insert(0, scores(cached[0], jnp.broadcast_to(visible, (batch, t, size))))
    weights = jax.nn.softmax(jnp.concatenate(parts, axis=-1), axis=-1).astype(q.dtype)
    split = weights.shape[-1] - new[0].shape[2]
    out = jnp.einsum("bkgts,bkse->btkge", weights[..., split:], new[1])
    if cached is not None:
        out = out + jnp.einsum("bkgts,bkse->btkge", weights[..., :split], cached[1])
    return out.reshape(batch, t, heads * width)


class Attention(nn.Module):
    """Grouped-query attention, in pieces so that a caller may decide what is attended to."""

    config: LlamaConfig

    def setup(self):
        c, bias = self.config, self.config.attention_bias
        self.q_proj = Linear(c.num_attention_heads * c.head_dim, bias)
        self.k_proj = Linear(c.num_key_value_heads * c.head_dim, bias)
        self.v_proj = Linear(c.num_key_value_heads * c.head_dim, bias)
        self.o_proj = Linear(c.hidden_size, bias)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.rms_norm_eps)
            self.k_norm = RMSNorm(c.rms_norm_eps)

    def queries(self, x: Array, rotary: tuple[Array, Array]) -> Array:
        """x [B, T, D] -> rotated queries [B, T, H, E]."""
        q = self.q_proj(x).reshape(*x.shape[:2], self.config.num_attention_heads, self.config.head_dim)
        return rotate(self.q_norm(q) if self.config.qk_norm else q, rotary)

    def keys_values(self, x: Array, rotary: tuple[Array, Array]) -> tuple[Array, Array]:
        """x [B, T, D] -> rotated keys and values, each [B, K, T, E]."""
        shape = (*x.shape[:2], self.config.num_key_value_heads, self.config.head_dim)
        k = self.k_proj(x).reshape(shape)
        k = rotate(self.k_norm(k) if self.config.qk_norm else k, rotary)
        v = self.v_proj(x).reshape(shape)
        return k.swapaxes(1, 2), v.swapaxes(1, 2)

    def output(self, attended: Array) -> Array:
        """attended [B, T, H * E] -> [B, T, D]."""
        return self.o_proj(attended)


class MLP(nn.Module):
    """SwiGLU feed-forward block."""

    config: LlamaConfig

    def setup(self):
        bias = self.config.mlp_bias
        self.gate_proj = Linear(self.config.intermediate_size, bias)
        self.up_proj = Linear(self.config.intermediate_size, bias)
        self.down_proj = Linear(self.config.hidden_size, bias)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))
