"""The EAGLE-2/HASS drafter: one decoder layer over the verifier's features.

For position j the drafter reads the embedding of token j+1 and the verifier's feature at j, and predicts the feature
at j+1; the verifier's frozen head turns that into a distribution for token j+2. The embedding comes first in the
concatenation; the layer has no input norm and the drafter no final norm. Embedding and head belong to the verifier and
are not parameters here.

Specialists are stacked: parameters carry a leading axis N and `stacked` maps a method over it.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from taps_jax.models.config import DrafterConfig, LlamaConfig
from taps_jax.models.layers import MLP, Attention, Linear, RMSNorm, attend, rotary_angles
from taps_jax.models.llama import init_params


class DrafterLayer(nn.Module):
    """A decoder layer without input norm."""

    config: LlamaConfig

    def setup(self):
        self.self_attn = Attention(self.config)
        self.post_attention_layernorm = RMSNorm(self.config.rms_norm_eps)
        self.mlp = MLP(self.config)

    def finish(self, x: Array, attended: Array) -> Array:
        """Residual stream x [B, T, D] and attention [B, T, H * E] -> predicted features [B, T, D]."""
        x = x + self.self_attn.output(attended)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """One specialist. The methods are the stages of a forward pass, so that callers choose what is attended to."""

    config: DrafterConfig

    def setup(self):
        self.fc = Linear(self.config.layer.hidden_size, self.config.fc_bias)
        self.layers = [DrafterLayer(self.config.layer)]

    def fuse(self, embeddings: Array, features: Array) -> Array:
        """Embeddings of the next tokens and features, each [B, T, D] -> layer input [B, T, D]."""
        return self.fc(jnp.concatenate([embeddings, features.astype(embeddings.dtype)], axis=-1))

    def keys_values(self, x: Array, positions: Array) -> tuple[Array, Array]:
        """Layer input x [B, T, D] at positions [B, T] -> keys and values, each [B, K, T, E]."""
        return self.layers[0].self_attn.keys_values(x, rotary_angles(self.config.layer, positions))

    def queries(self, x: Array, positions: Array) -> Array:
        """Layer input x [B, T, D] at positions [B, T] -> queries [B, T, H, E]."""
        return self.layers[0].self_attn.queries(x, rotary_angles(self.config.layer, positions))

    def finish(self, x: Array, attended: Array) -> Array:
        """Layer input [B, T, D] and attention result [B, T, H * E] -> predicted features [B, T, D]."""
        return self.layers[0].finish(x, attended)

    def __call__(self, embeddings, features, positions, mask, cached=None, length=None):
        """Predicted features [B, T, D] and the new keys and values; arguments as for the verifier's layers."""
        x = self.fuse(embeddings, features)
        new = self.keys_values(x, positions)
        attended = attend(self.queries(x, positions), new, mask, cached, length)
        return self.finish(x, attended), new


def init_drafter(config: DrafterConfig, key: Array) -> dict:
    """Random parameters of one specialist."""
    width = ((1, 1, config.layer.hidden_size), jnp.float32)
    return init_params(Drafter(config), key, width, width, ((1, 1), jnp.int32), ((1, 1, 1), bool))


def stack_specialists(drafters: list[dict]) -> dict:
    """Parameters of N specialists of one shape -> the same tree with a leading axis N."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *drafters)


def stacked(drafter: Drafter, method: Callable, in_axes: tuple) -> Callable:
    """`method` of `drafter` over stacked parameters: call with (params [N, ...], *arguments).

    Args:
      drafter: the module of one specialist.
      method: an unbound method, such as `Drafter.fuse`.
      in_axes: for each argument 0 if it has a leading axis N, None if all specialists share it.
    """
    apply = lambda params, *args: drafter.apply({"params": params}, *args, method=method)
    return jax.vmap(apply, in_axes=(0, *in_axes))
