"""The verifier: a Llama-architecture decoder as a pure function of (parameters, tokens, cache).

Parameters are a plain dict with Hugging Face's names (`model/layers_0/self_attn/q_proj/weight`, `[out, in]`).
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from taps_jax.models.cache import KVCache
from taps_jax.models.config import LlamaConfig
from taps_jax.models.layers import MLP, Attention, Embedding, Linear, RMSNorm, attend, project, rotary_angles


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP with residual connections."""

    config: LlamaConfig

    def setup(self):
        self.input_layernorm = RMSNorm(self.config.rms_norm_eps)
        self.self_attn = Attention(self.config)
        self.post_attention_layernorm = RMSNorm(self.config.rms_norm_eps)
        self.mlp = MLP(self.config)

    def __call__(self, x, rotary, mask, cached, length):
        normed = self.input_layernorm(x)
        new = self.self_attn.keys_values(normed, rotary)
        attended = attend(self.self_attn.queries(normed, rotary), new, mask, cached, length)
        x = x + self.self_attn.output(attended)
        return x + self.mlp(self.post_attention_layernorm(x)), new


class LlamaModel(nn.Module):
    """Embedding, decoder layers and final norm."""

    config: LlamaConfig

    def setup(self):
        c = self.config
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        self.layers = [DecoderLayer(c) for _ in range(c.num_hidden_layers)]
        self.norm = RMSNorm(c.rms_norm_eps)

    def __call__(self, tokens, positions, mask, cache, length):
        x = self.embed_tokens(tokens)
        rotary = rotary_angles(self.config, positions)
        new = []
        for index, layer in enumerate(self.layers):
            x, rows = layer(x, rotary, mask, None if cache is None else cache.layer(index), length)
            new.append(rows)
        return self.norm(x), KVCache(*zip(*new, strict=True))


class Llama(nn.Module):
    """The verifier. Its features (after the final norm) are what drafters read and what the head reads."""

    config: LlamaConfig

    def setup(self):
        self.model = LlamaModel(self.config)
        if not self.config.tie_word_embeddings:
            self.lm_head = Linear(self.config.vocab_size)

    def __call__(
        self,
        tokens: Array,
        positions: Array,
        mask: Array,
        cache: KVCache | None = None,
        length: Array | None = None,
    ) -> tuple[Array, KVCache]:
        """Features of new tokens, which see the first `length` cache positions and each other as `mask` says.

        Args:
          tokens: [B, T] int32.
          positions: [B, T] int32, absolute positions.
          mask: [B or 1, T, T] bool, entry (i, j): token i sees token j; the diagonal must be true.
          cache: keys and values of committed tokens, or None when there are none.
          length: [B] int32, filled cache positions; needed with a cache.
        Returns:
          Features [B, T, D] and the new keys and values, [B, K, T, E] per layer, for the caller to append.
        """
        features, new = self.model(tokens, positions, mask, cache, length)
        if self.is_initializing():
            self.logits(features)
        return features, new

    def logits(self, features: Array) -> Array:
        """features [..., D] -> float32 logits [..., V]."""
        if self.config.tie_word_embeddings:
            return project(features, self.model.embed_tokens.weight).astype(jnp.float32)
        return self.lm_head(features).astype(jnp.float32)


def causal_mask(size: int) -> Array:
    """[1, size, size] bool, each position seeing itself and those before it."""
    return jnp.tril(jnp.ones((1, size, size), bool))


def embedding_table(params: dict) -> Array:
    """The token embedding [V, D] of a verifier's parameters."""
    return params["model"]["embed_tokens"]["weight"]


def head_table(params: dict) -> Array:
    """The head [V, D] of a verifier's parameters: its own, or the embedding when they are tied."""
    return params["lm_head"]["weight"] if "lm_head" in params else embedding_table(params)


def init_params(module: nn.Module, key: Array, *shapes: tuple[tuple[int, ...], jnp.dtype]) -> dict:
    """Freshly initialised parameters, from the shapes and dtypes of the module's arguments."""
    return module.init(key, *(jnp.zeros(shape, dtype) for shape, dtype in shapes))["params"]


def init_llama(config: LlamaConfig, key: Array) -> dict:
    """Random parameters in the layout that checkpoints fill."""
    token = ((1, 1), jnp.int32)
    return init_params(Llama(config), key, token, token, ((1, 1, 1), bool))


def abstract_llama(config: LlamaConfig) -> dict:
    """Shapes and dtypes of the parameters, without making them."""
    return jax.eval_shape(lambda: init_llama(config, jax.random.key(0)))
