"""Tiny random models for tests of logic; nothing here says anything about acceptance on real text."""

import dataclasses

import jax
import jax.numpy as jnp

from taps_jax.models.config import DrafterConfig, LlamaConfig
from taps_jax.models.drafter import Drafter, init_drafter, stack_specialists
from taps_jax.models.llama import Llama, embedding_table, head_table, init_llama
from taps_jax.speculative.decode import Models, Weights
from taps_jax.speculative.drafting import DrafterWeights
from taps_jax.speculative.tree import TreeShape

CONFIG = LlamaConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)


def make_config(**changes) -> LlamaConfig:
    return dataclasses.replace(CONFIG, **changes)


def make_verifier_params(config: LlamaConfig = CONFIG, seed: int = 0, sharpness: float = 1.0) -> dict:
    """Random parameters; a greater `sharpness` gives more peaked next-token distributions."""
    params = init_llama(config, jax.random.key(seed))
    head = params["model"]["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    head["weight"] = head["weight"] * sharpness
    return params


def make_decoder(
    shape: TreeShape | None,
    config: LlamaConfig = CONFIG,
    seed: int = 0,
    specialists: int = 1,
    vocabulary: tuple[int, ...] | None = None,
    sharpness: float = 4.0,
    fc_bias: bool = False,
) -> tuple[Models, Weights]:
    """A random verifier with random specialists, or for plain decoding when `shape` is None."""
    params = make_verifier_params(config, seed, sharpness)
    if shape is None:
        return Models(Llama(config)), Weights(params)
    drafter_config = DrafterConfig(dataclasses.replace(config, num_hidden_layers=1), fc_bias)
    drafters = [init_drafter(drafter_config, jax.random.key(seed + 100 + n)) for n in range(specialists)]
    ids = None if vocabulary is None else jnp.asarray(vocabulary, jnp.int32)
    head = head_table(params) if ids is None else head_table(params)[ids]
    drafter_weights = DrafterWeights(stack_specialists(drafters), embedding_table(params), head, ids)
    return Models(Llama(config), Drafter(drafter_config), shape), Weights(params, drafter_weights)
