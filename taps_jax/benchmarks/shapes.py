"""Random weights in the shape of a known model, to measure speed where its weights are not at hand."""

import dataclasses

import jax
import jax.numpy as jnp

from taps_jax.checkpoints.hf_drafter import drafter_config
from taps_jax.errors import InputError
from taps_jax.models.config import LlamaConfig
from taps_jax.models.drafter import Drafter, init_drafter
from taps_jax.models.llama import Llama, abstract_llama, embedding_table, head_table
from taps_jax.speculative.decode import Models, Weights
from taps_jax.speculative.drafting import drafter_weights
from taps_jax.speculative.tree import TreeShape

_LLAMA3_8B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=None,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
)
_SMOLLM2_135M = dataclasses.replace(
    _LLAMA3_8B,
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    rope_theta=100_000.0,
    tie_word_embeddings=True,
)
SHAPES = {"llama3-8b": _LLAMA3_8B, "smollm2-135m": _SMOLLM2_135M}


def named_shape(name: str) -> LlamaConfig:
    """The verifier's shape called `name`.

    Raises:
      InputError: the name is unknown.
    """
    if name not in SHAPES:
        raise InputError(f"--shape is {name!r}, expected one of {', '.join(SHAPES)}")
    return SHAPES[name]


def random_decoder(name: str, dtype: jnp.dtype, shape: TreeShape) -> tuple[Models, Weights]:
    """A decoder of random weights, made on the device leaf by leaf.

    Raises:
      InputError: the name is unknown.
    """
    config = named_shape(name)
    drafter = drafter_config(config)
    params = _random(abstract_llama(config), dtype)
    specialist = _random(jax.eval_shape(lambda: init_drafter(drafter, jax.random.key(0))), dtype)
    weights = drafter_weights([specialist], embedding_table(params), head_table(params), [None])
    return Models(Llama(config), Drafter(drafter), shape), Weights(params, weights)


def _random(abstract: dict, dtype: jnp.dtype) -> dict:
    leaves, structure = jax.tree.flatten(abstract)
    make = jax.jit(lambda key, shape: jax.random.normal(key, shape, dtype) * 0.02, static_argnums=1)
    return structure.unflatten(make(jax.random.key(number), leaf.shape) for number, leaf in enumerate(leaves))
