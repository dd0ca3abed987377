"""The drafter's forward pass against a PyTorch module of the same definition, stacking and its cache."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from taps_jax.checkpoints.keymap import flatten, unflatten
from taps_jax.models.cache import KVCache, append, empty_cache
from taps_jax.models.config import DrafterConfig
from taps_jax.models.drafter import Drafter, init_drafter, stack_specialists, stacked
from taps_jax.models.layers import attend
from taps_jax.models.llama import causal_mask
from tests.tiny import make_config

LAYER = make_config(
    num_hidden_layers=1, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rope_theta=500000.0
)
EPS = LAYER.rms_norm_eps


class TorchDrafter(nn.Module):
    """EAGLE-2's drafter layer, with the parameter names of its checkpoints."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        c = self.c = config.layer
        linear = functools.partial(nn.Linear, bias=False)
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=config.fc_bias)
        attention = {
            "q_proj": linear(c.hidden_size, c.num_attention_heads * c.head_dim),
            "k_proj": linear(c.hidden_size, c.num_key_value_heads * c.head_dim),
            "v_proj": linear(c.hidden_size, c.num_key_value_heads * c.head_dim),
            "o_proj": linear(c.num_attention_heads * c.head_dim, c.hidden_size),
        }
        mlp = {
            "gate_proj": linear(c.hidden_size, c.intermediate_size),
            "up_proj": linear(c.hidden_size, c.intermediate_size),
            "down_proj": linear(c.intermediate_size, c.hidden_size),
        }
        layer = {
            "self_attn": nn.ModuleDict(attention),
            "mlp": nn.ModuleDict(mlp),
            "post_attention_layernorm": nn.RMSNorm(c.hidden_size, EPS),
        }
        self.layers = nn.ModuleList([nn.ModuleDict(layer)])

    def forward(self, embeddings, features, positions):
        batch, size = positions.shape
        attention, mlp = self.layers[0]["self_attn"], self.layers[0]["mlp"]
        x = self.fc(torch.cat([embeddings, features], dim=-1))
        heads = lambda y: y.view(batch, size, -1, self.c.head_dim).transpose(1, 2)
        q, k, v = (heads(attention[name](x)) for name in ("q_proj", "k_proj", "v_proj"))
        groups = self.c.num_attention_heads // self.c.num_key_value_heads
        k, v = self.rotate(k, positions).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = self.rotate(q, positions) @ k.transpose(2, 3) / math.sqrt(self.c.head_dim)
        scores = scores.masked_fill(torch.ones(size, size).triu(1).bool(), -math.inf)
        attended = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, size, -1)
        y = x + attention["o_proj"](attended)
        normed = self.layers[0]["post_attention_layernorm"](y)
        return y + mlp["down_proj"](nn.functional.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))

    def rotate(self, x, positions):
        exponents = torch.arange(0, self.c.head_dim, 2, dtype=torch.float32) / self.c.head_dim
        angles = positions[:, None, :, None].float() / self.c.rope_theta**exponents
        cos, sin = angles.cos().repeat(1, 1, 1, 2), angles.sin().repeat(1, 1, 1, 2)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin


def make_inputs(batch: int, size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random embeddings and features, [B, T, D] each."""
    rng = np.random.default_rng(seed)
    draw = lambda: rng.normal(size=(batch, size, LAYER.hidden_size)).astype(np.float32)
    return draw(), draw()


def make_params(config: DrafterConfig, seed: int) -> dict:
    """Random parameters whose norm is not all ones."""
    params = init_drafter(config, jax.random.key(seed))
    norm = params["layers_0"]["post_attention_layernorm"]
    norm["weight"] = 1 + 0.3 * jax.random.normal(jax.random.key(seed + 50), norm["weight"].shape)
    return params


@pytest.mark.parametrize("fc_bias", [False, True])
def test_forward_equals_pytorch(fc_bias):
    config = DrafterConfig(LAYER, fc_bias)
    torch.manual_seed(0)
    theirs = TorchDrafter(config)
    with torch.no_grad():
        theirs.layers[0]["post_attention_layernorm"].weight.normal_(1, 0.3)
    params = unflatten({name: jnp.asarray(value.detach().numpy()) for name, value in theirs.named_parameters()})
    assert jax.tree.structure(params) == jax.tree.structure(init_drafter(config, jax.random.key(0)))
    embeddings, features = make_inputs(2, 12)
    # The second row spreads over distances that a table of 2048 angles would not hold.
    positions = np.stack([np.arange(12), [0, 1, 2, 3, 50, 51, 52, 1000, 1001, 5000, 5001, 5002]])
    with torch.no_grad():
        expected = theirs(*map(torch.tensor, (embeddings, features, positions))).numpy()
    predicted, (keys, values) = jax.jit(Drafter(config).apply)(
        {"params": params}, embeddings, features, positions, causal_mask(12)
    )
    np.testing.assert_allclose(predicted, expected, atol=1e-5, rtol=0)
    assert keys.shape == values.shape == (2, LAYER.num_key_value_heads, 12, LAYER.head_dim)


@pytest.mark.parametrize("fc_bias", [False, True])
def test_parameters_are_those_of_eagle_checkpoints(fc_bias):
    names = {name for name, _ in TorchDrafter(DrafterConfig(LAYER, fc_bias)).named_parameters()}
    shapes = {name: leaf.shape for name, leaf in flatten(make_params(DrafterConfig(LAYER, fc_bias), 0)).items()}
    assert set(shapes) == names
    assert ("fc.bias" in names) == fc_bias
    assert shapes["fc.weight"] == (LAYER.hidden_size, 2 * LAYER.hidden_size)


def test_stacked_specialists_equal_each_alone():
    config = DrafterConfig(LAYER, True)
    drafter, specialists = Drafter(config), [make_params(config, seed) for seed in range(3)]
    params = stack_specialists(specialists)
    embeddings, features = make_inputs(2, 7)
    features = np.stack([features, 2 * features, -features])  # each specialist reads its own
    positions = np.broadcast_to(np.arange(7), (2, 7))
    shared = jax.jit(stacked(drafter, Drafter.__call__, (None, 0, None, None)))
    predicted, new = shared(params, embeddings, features, positions, causal_mask(7))
    assert predicted.shape == (3, 2, 7, LAYER.hidden_size)
    alone = jax.jit(drafter.apply)
    for index, specialist in enumerate(specialists):
        one, one_new = alone({"params": specialist}, embeddings, features[index], positions, causal_mask(7))
        np.testing.assert_allclose(predicted[index], one, atol=1e-5)
        for stacked_part, part in zip(new, one_new, strict=True):
            np.testing.assert_allclose(stacked_part[index], part, atol=1e-5)
    spread = np.ptp(np.asarray(predicted), axis=0).mean()
    assert spread > 0.1  # the specialists differ, so an index mixed up would show


def test_stacked_stages_equal_the_whole():
    """The stages by which the decoder drives the drafters give what one call gives."""
    config = DrafterConfig(LAYER)
    drafter, params = Drafter(config), stack_specialists([make_params(config, seed) for seed in range(3)])
    embeddings, features = make_inputs(2, 5)
    positions = np.broadcast_to(np.arange(5), (2, 5))
    x = stacked(drafter, Drafter.fuse, (None, None))(params, embeddings, features)
    whole, new = stacked(drafter, Drafter.__call__, (None,) * 4)(
        params, embeddings, features, positions, causal_mask(5)
    )
    keys_values = stacked(drafter, Drafter.keys_values, (0, None))(params, x, positions)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), keys_values, new)
    queries = stacked(drafter, Drafter.queries, (0, None))(params, x, positions)
    attended = jax.vmap(lambda *parts: attend(parts[0], parts[1:], causal_mask(5), None, None))(queries, *keys_values)
    finished = stacked(drafter, Drafter.finish, (0, 0))(params, x, attended)
    np.testing.assert_allclose(finished, whole, atol=1e-5)


def test_cached_forward_equals_the_full_forward():
    """Rows of different committed length, extended by several positions at a time and then one by one."""
    config = DrafterConfig(dataclasses.replace(LAYER, rope_theta=10000.0))
    drafter, params = Drafter(config), make_params(config, 4)
    apply = jax.jit(lambda *arguments: drafter.apply({"params": params}, *arguments))
    embeddings, features = make_inputs(2, 13)
    whole, _ = apply(embeddings, features, np.broadcast_to(np.arange(13), (2, 13)), causal_mask(13))
    cache, length = empty_cache(config.layer, (2,), 16, jnp.float32), jnp.zeros(2, jnp.int32)
    take = jax.vmap(lambda values, at: values[at])
    # Positions fed and positions kept: row 0 rejects what follows its third, then both go on from where they stand.
    for fed, kept in ((5, [3, 5]), (4, [4, 4]), (1, [1, 1]), (1, [1, 1])):
        at = length[:, None] + jnp.arange(fed)
        predicted, new = apply(take(embeddings, at), take(features, at), at, causal_mask(fed), cache.layer(0), length)
        np.testing.assert_allclose(predicted, take(whole, at), atol=1e-5)
        cache = append(cache, KVCache((new[0],), (new[1],)), length)
        length = length + jnp.asarray(kept)
    assert length.tolist() == [9, 11]
