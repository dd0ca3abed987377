"""The verifier against transformers' Llama, its config parsing, its cache and its building blocks."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig as HFConfig
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from taps_jax.checkpoints.hf_verifier import hf_config, hf_params
from taps_jax.errors import InputError
from taps_jax.models import layers
from taps_jax.models.cache import append, empty_cache
from taps_jax.models.config import Llama3RopeScaling, llama_config_from_hf, llama_config_to_hf
from taps_jax.models.layers import RMSNorm, inverse_frequencies, project, rotary_angles
from taps_jax.models.llama import Llama, abstract_llama, causal_mask, embedding_table, head_table
from tests.tiny import CONFIG, make_config, make_verifier_params
from tests.tiny_hf import draw_parameters

# An original length of 64 puts this width's frequencies on both sides of the ramp, and within it.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DEFAULT = {"rope_type": "default", "rope_theta": 500000.0}
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
VARIANTS = {
    "llama3_head_dim": {"rope_parameters": LLAMA3, "head_dim": 16},
    "default": {"rope_parameters": DEFAULT},
    "attention_bias": {"rope_parameters": LLAMA3, "attention_bias": True},
    "mlp_bias": {"rope_parameters": DEFAULT, "mlp_bias": True},
    "tied": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "multi_head": {"rope_parameters": DEFAULT, "num_key_value_heads": 4},
}


def make_torch_llama(changes: dict) -> LlamaForCausalLM:
    model = LlamaForCausalLM._from_config(HFConfig(**SHAPE | changes), attn_implementation="eager").eval()
    draw_parameters(model, 0.15)
    return model


def torch_logits(model: LlamaForCausalLM, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    # An explicit mask, for transformers takes a jump in positions for the start of another sequence.
    size = tokens.shape[1]
    mask = torch.full((size, size), torch.finfo(torch.float32).min).triu(1).expand(len(tokens), 1, size, size)
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor(tokens), position_ids=torch.tensor(positions), attention_mask=mask, use_cache=False
        )
    return out.logits.numpy()


@functools.partial(jax.jit, static_argnames=("config",))
def full_forward(config, params, tokens, positions=None):
    """Features and logits of whole sequences [B, T] without a cache."""
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    apply = functools.partial(Llama(config).apply, {"params": params})
    features, _ = apply(tokens, positions, causal_mask(tokens.shape[1]))
    return features, apply(features, method=Llama.logits)


@functools.partial(jax.jit, static_argnames=("config",))
def cached_forward(config, params, tokens, positions, mask, cache, length):
    return Llama(config).apply({"params": params}, tokens, positions, mask, cache, length)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant, tmp_path):
    model = make_torch_llama(VARIANTS[variant])
    model.save_pretrained(tmp_path)
    config = hf_config(tmp_path)
    params = hf_params(tmp_path, config, jnp.float32)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 24))
    # Queries look back over short and very long distances.
    far = np.concatenate([np.arange(8), np.arange(1000, 1008), np.arange(8184, 8192)])
    positions = np.stack([np.arange(24), far])
    expected = torch_logits(model, tokens, positions)
    _, logits = full_forward(config, params, jnp.asarray(tokens), jnp.asarray(positions))
    assert expected.std() > 0.5  # else 1e-4 would mean little
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


def test_head_dim_of_a_variant_differs_from_hidden_over_heads(tmp_path):
    make_torch_llama(VARIANTS["llama3_head_dim"]).save_pretrained(tmp_path)
    config = hf_config(tmp_path)
    assert (config.head_dim, config.hidden_size // config.num_attention_heads) == (16, 12)
    assert abstract_llama(config)["model"]["layers_0"]["self_attn"]["k_proj"]["weight"].shape == (32, 48)


def test_features_are_what_the_head_reads():
    params = make_verifier_params()
    features, logits = full_forward(CONFIG, params, jnp.arange(12).reshape(2, 6))
    np.testing.assert_allclose(logits, features @ head_table(params).T, atol=1e-5)
    tied = make_verifier_params(make_config(tie_word_embeddings=True))
    assert "lm_head" not in tied
    assert head_table(tied) is embedding_table(tied)


FIELDS = {**SHAPE, "head_dim": 16, "hidden_act": "silu", "architectures": ["LlamaForCausalLM"]}


def test_config_of_transformers_4_equals_that_of_5():
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    new = llama_config_from_hf(FIELDS | {"rope_parameters": LLAMA3}, "new")
    assert new.rope_theta == 500000.0
    assert new.rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 64)
    assert llama_config_from_hf(FIELDS | {"rope_theta": 500000.0, "rope_scaling": scaling}, "old") == new
    # The name of the type in configs before transformers 4.43.
    scaling["type"] = scaling.pop("rope_type")
    assert llama_config_from_hf(FIELDS | {"rope_theta": 500000.0, "rope_scaling": scaling}, "older") == new
    plain = llama_config_from_hf(FIELDS | {"rope_parameters": DEFAULT}, "new")
    assert plain.rope_scaling is None
    assert llama_config_from_hf(FIELDS | {"rope_theta": 500000, "rope_scaling": None}, "old") == plain


def test_config_defaults_of_optional_fields():
    fields = {name: value for name, value in FIELDS.items() if name not in ("head_dim", "num_key_value_heads")}
    config = llama_config_from_hf(fields, "here")
    assert (config.head_dim, config.num_key_value_heads, config.rope_theta) == (12, 4, 10000.0)
    assert not (config.attention_bias or config.mlp_bias or config.tie_word_embeddings)
    assert llama_config_from_hf(fields | {"head_dim": None, "num_key_value_heads": None}, "here") == config


@pytest.mark.parametrize("variant", VARIANTS)
def test_config_round_trip(variant):
    config = llama_config_from_hf(FIELDS | VARIANTS[variant], "here")
    fields = json.loads(json.dumps(llama_config_to_hf(config)))
    assert llama_config_from_hf(fields, "there") == config
    # Each of the two ways to write the rope fields must do by itself.
    for one in ("rope_parameters", "rope_scaling"):
        assert llama_config_from_hf({name: value for name, value in fields.items() if name != one}, one) == config
    read = HFConfig(**fields)
    assert read.head_dim == config.head_dim
    assert read.rope_parameters["rope_theta"] == config.rope_theta
    assert read.rope_parameters["rope_type"] == ("llama3" if config.rope_scaling else "default")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
        ({"head_dim": -1}, "head_dim is -1"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": None, "hidden_size": 50}, "hidden_size 50 is not a multiple of num_attention_heads 4"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear' is not supported"),
        ({"rope_parameters": {**LLAMA3, "factor": None}}, "llama3 rope scaling needs positive numbers for factor"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_scaling": "llama3"}, "must be objects or null"),
    ],
)
def test_config_errors(changes, message):
    with pytest.raises(InputError) as error:
        llama_config_from_hf(FIELDS | changes, "some/config.json")
    assert str(error.value).startswith("some/config.json: ")
    assert message in str(error.value)


def test_config_problems_are_reported_together():
    fields = {name: value for name, value in FIELDS.items() if name not in ("vocab_size", "rms_norm_eps")}
    fields |= {"hidden_act": "relu", "quantization_config": {"bits": 8}, "rope_scaling": {"rope_type": "dynamic"}}
    with pytest.raises(InputError) as error:
        llama_config_from_hf(fields, "here")
    for problem in ("vocab_size", "rms_norm_eps", "'relu'", "quantization_config", "'dynamic'"):
        assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_cached_decoding_equals_the_full_forward():
    """Two rows of different prompt length, prefilled together and continued one token at a time."""
    params, prompts, steps = make_verifier_params(), (5, 9), 6
    tokens = jax.random.randint(jax.random.key(1), (2, 15), 0, CONFIG.vocab_size)
    whole, _ = full_forward(CONFIG, params, tokens)
    length = jnp.asarray(prompts)
    cache = empty_cache(CONFIG, (2,), 16, jnp.float32)
    start = jnp.zeros(2, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    features, new = cached_forward(CONFIG, params, tokens[:, :9], positions, causal_mask(9), cache, start)
    cache = append(cache, new, start)  # row 0 gets 4 rows that are not its own; they lie beyond its length
    for row, prompt in enumerate(prompts):
        np.testing.assert_allclose(features[row, :prompt], whole[row, :prompt], atol=1e-5)
    for _ in range(steps):
        fed = jnp.take_along_axis(tokens, length[:, None], axis=1)
        features, new = cached_forward(CONFIG, params, fed, length[:, None], causal_mask(1), cache, length)
        cache = append(cache, new, length)
        for row in range(2):
            np.testing.assert_allclose(features[row, 0], whole[row, length[row]], atol=1e-5)
        length = length + 1


def test_append_writes_one_row_where_it_writes_two():
    """The single-row form of the write is another program than the batched one."""
    new = jax.tree.map(lambda leaf: jnp.ones_like(leaf), empty_cache(CONFIG, (2,), 3, jnp.float32))
    cache, start = empty_cache(CONFIG, (2,), 8, jnp.bfloat16), jnp.asarray([1, 4])
    both = append(cache, new, start)
    assert both.size == 8
    for row in range(2):
        pick = functools.partial(jax.tree.map, lambda leaf, row=row: leaf[row : row + 1])
        alone = append(pick(cache), pick(new), start[row : row + 1])
        jax.tree.map(np.testing.assert_array_equal, alone, pick(both))
        written = np.asarray(both.keys[1][row, 0, :, 0], np.float32)
        assert written.nonzero()[0].tolist() == list(range(start[row], start[row] + 3))


def test_tree_mask_equals_separate_paths():
    params, parents, prefix = make_verifier_params(), (-1, 0, 0, 1, 1, 2, 5), 6
    nodes = len(parents)
    paths = [[node] for node in range(nodes)]
    for node, parent in enumerate(parents):
        paths[node] = (paths[parent] if parent >= 0 else []) + [node]
    depth = jnp.asarray([len(path) - 1 for path in paths])
    mask = np.zeros((1, nodes, nodes), bool)
    for node, path in enumerate(paths):
        mask[0, node, path] = True
    tokens = jax.random.randint(jax.random.key(3), (prefix + nodes,), 0, CONFIG.vocab_size)
    start, length = jnp.zeros(1, jnp.int32), jnp.asarray([prefix])
    cache = empty_cache(CONFIG, (1,), 8, jnp.float32)
    positions = jnp.arange(prefix)[None]
    _, new = cached_forward(CONFIG, params, tokens[None, :prefix], positions, causal_mask(prefix), cache, start)
    cache = append(cache, new, start)
    features, _ = cached_forward(CONFIG, params, tokens[None, prefix:], prefix + depth[None], mask, cache, length)
    padded = [[*range(prefix), *(prefix + node for node in path)] + [0] * (4 - len(path)) for path in paths]
    separate, _ = full_forward(CONFIG, params, tokens[jnp.asarray(padded)])
    for node, path in enumerate(paths):
        np.testing.assert_allclose(features[0, node], separate[node, prefix + len(path) - 1], atol=1e-5)


def test_both_forms_of_a_product_agree(monkeypatch):
    weight = jax.random.normal(jax.random.key(0), (24, 40))
    x = jax.random.normal(jax.random.key(1), (64, 40))
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    for rows_on_the_left in (layers._LEFT_OPERAND_ROWS, range(1, 65), range(0)):
        monkeypatch.setattr(layers, "_LEFT_OPERAND_ROWS", rows_on_the_left)
        products = jax.jit(lambda x: [project(x[:rows], weight) for rows in range(1, 65)])(x)  # one compilation
        for rows, product in enumerate(products, start=1):
            np.testing.assert_allclose(product, exact[:rows], atol=1e-4, err_msg=f"{rows} {rows_on_the_left}")
    np.testing.assert_allclose(project(x[:6].reshape(2, 3, 40), weight), exact[:6].reshape(2, 3, 24), atol=1e-4)
    assert project(x.astype(jnp.bfloat16), weight).dtype == weight.dtype


def test_rms_norm_rounds_as_transformers_does():
    x = np.random.default_rng(5).normal(size=(64, 96)).astype(np.float32) * 3
    weight = np.random.default_rng(6).normal(size=96).astype(np.float32)
    theirs = LlamaRMSNorm(96, 1e-5).to(torch.bfloat16)
    with torch.no_grad():
        theirs.weight.copy_(torch.tensor(weight))
        expected = theirs(torch.tensor(x).to(torch.bfloat16)).float().numpy()
    params = {"params": {"weight": jnp.asarray(weight, jnp.bfloat16)}}
    ours = jax.jit(RMSNorm(1e-5).apply)(params, jnp.asarray(x, jnp.bfloat16))
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(ours, np.float32), expected)


@pytest.mark.parametrize("factor", [None, 8.0, 32.0], ids=["default", "llama_3.1", "llama_3.2"])
def test_rotary_angles_equal_transformers(factor):
    scaled = {**LLAMA3, "factor": factor, "original_max_position_embeddings": 8192}
    fields = {**FIELDS, "head_dim": 128, "max_position_embeddings": 131072}
    fields["rope_parameters"] = scaled if factor else DEFAULT
    theirs = LlamaRotaryEmbedding(HFConfig(**fields))
    config = llama_config_from_hf(fields, "here")
    positions = [0, 1, 1000, 8192]
    # One unit in the last place of a frequency would be 5e-4 radians at 8192: the tolerances below notice it.
    np.testing.assert_allclose(inverse_frequencies(config), theirs.inv_freq.numpy(), rtol=2e-7)
    expected = [part[0, :, :64].numpy() for part in theirs(torch.zeros(1), torch.tensor([positions]))]
    for ours, part in zip(rotary_angles(config, jnp.asarray(positions)), expected, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, part, atol=1e-5)
