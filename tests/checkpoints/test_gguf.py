"""GGUF files: tiny ones written here, and the embedded SmolLM2 against transformers' own GGUF loading."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFValueType, GGUFWriter, dequantize, get_tensor_name_map, quantize
from gguf.constants import GGML_QUANT_SIZES
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM

from taps_jax.checkpoints.gguf import gguf_config, gguf_params, gguf_tokenizer, open_gguf
from taps_jax.checkpoints.keymap import flatten
from taps_jax.checkpoints.verifier import embedded_gguf, load_verifier
from taps_jax.data.tokenize import encode_prompt
from taps_jax.errors import InputError
from taps_jax.models.llama import Llama, abstract_llama, causal_mask
from taps_jax.speculative.decode import Models, Weights
from taps_jax.speculative.engine import Engine, Request, cache_size_for
from tests.tiny import make_config

MERGES = ["a b", "ab c", "1 2", "Ġ a"]
# "xyz" is a word that no merge reaches.
TOKENS = [*sorted(ByteLevel.alphabet()), "ab", "abc", "12", "Ġa", "xyz", "<s>", "<end>", "<tool>", "<pad>"]
KINDS = [{"<s>": 3, "<end>": 3, "<pad>": 3, "<tool>": 4}.get(token, 1) for token in TOKENS]
# Rows of 256, which K-quants need; 4 query heads of 64 over 2 key heads.
CONFIG = make_config(
    vocab_size=len(TOKENS),
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    rope_theta=100000.0,
    max_position_embeddings=2048,
)
FIELDS = {
    "llama.context_length": 2048,
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 256,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": KINDS,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": TOKENS.index("<s>"),
    "tokenizer.ggml.eos_token_id": TOKENS.index("<end>"),
    "tokenizer.chat_template": "{% for m in messages %}<s>{{ m.content }}<end>{% endfor %}",
}
OPTIONAL = {"llama.attention.head_count_kv", "llama.rope.freq_base", "tokenizer.chat_template"} | {
    f"tokenizer.ggml.{name}" for name in ("pre", "bos_token_id", "eos_token_id")
}
GGUF_NAMES = get_tensor_name_map(MODEL_ARCH.LLAMA, CONFIG.num_hidden_layers)


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows: the two halves of a head's rotary dimensions side by side in pairs."""
    order = [
        head * (len(rows) // heads) + half * (len(rows) // heads // 2) + index
        for head, index, half in itertools.product(range(heads), range(len(rows) // heads // 2), range(2))
    ]
    return rows[order]


def random_blocks(shape: tuple[int, int], kind: GGMLQuantizationType, rng: np.random.Generator) -> np.ndarray:
    """Bytes of a K-quant with small scales; gguf cannot quantise to these types."""
    block, size = GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    scale = np.float16(rng.normal(size=(*data.shape[:2], 2)) * 1e-2).view(np.uint8)
    if kind == GGMLQuantizationType.Q4_K:
        data[..., :4] = scale  # scale and minimum come first
    else:
        data[..., -2:] = scale[..., :2]  # Q6_K ends with its scale
    return data.reshape(shape[0], -1)


def make_tensors(kind: str, config=CONFIG) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Stored rows and their float32 values, in Hugging Face's names and row order; vectors are float32."""
    quantisation, rng = GGMLQuantizationType[kind], np.random.default_rng(2)
    stored, values = {}, {}
    for name, leaf in flatten(abstract_llama(config)).items():
        value = rng.normal(size=leaf.shape).astype(np.float32)
        if value.ndim == 1 or kind == "F32":
            stored[name] = values[name] = value
            continue
        raw = random_blocks(leaf.shape, quantisation, rng) if kind.endswith("_K") else quantize(value, quantisation)
        stored[name], values[name] = raw, dequantize(raw, quantisation)
    return stored, values


def write_gguf(path, stored: dict[str, np.ndarray], kind: str = "F32", architecture="llama", **fields):
    """Writes `stored` with FIELDS changed by `fields`, where `__` stands for a dot and None removes a field."""
    writer = GGUFWriter(path, architecture)
    for name, value in (FIELDS | {name.replace("__", "."): value for name, value in fields.items()}).items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            kinds = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
            writer.add_key_value(name, value, kinds[type(value)])
    for name, rows in stored.items():
        if "q_proj" in name or "k_proj" in name:
            rows = interleave(rows, CONFIG.num_attention_heads if "q_proj" in name else CONFIG.num_key_value_heads)
        raw = GGMLQuantizationType[kind] if rows.dtype == np.uint8 else None
        gguf_name = GGUF_NAMES.get_name(name, (".weight", ".bias")) or name
        writer.add_tensor(gguf_name, rows, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_parameters_equal_the_dequantised_originals(kind, tmp_path):
    stored, values = make_tensors(kind)
    path = write_gguf(tmp_path / "model.gguf", stored, kind)
    reader = open_gguf(path)
    params = flatten(gguf_params(reader, path, gguf_config(reader, path), jnp.float32))
    assert params.keys() == values.keys()
    for name, value in values.items():
        assert params[name].dtype == jnp.float32
        np.testing.assert_array_equal(params[name], value, err_msg=name)


def test_parameters_in_bfloat16_with_biases(tmp_path):
    config = make_config(**{**CONFIG.__dict__, "attention_bias": True})
    stored, values = make_tensors("Q8_0", config)
    path = write_gguf(tmp_path / "model.gguf", stored, "Q8_0")
    reader = open_gguf(path)
    assert gguf_config(reader, path) == config
    for name, leaf in flatten(gguf_params(reader, path, config, jnp.bfloat16)).items():
        assert leaf.dtype == jnp.bfloat16
        np.testing.assert_array_equal(leaf, values[name].astype(jnp.bfloat16), err_msg=name)


def test_config_and_its_defaults(tmp_path):
    stored, _ = make_tensors("F32")
    read = lambda path: gguf_config(open_gguf(path), path)
    assert read(write_gguf(tmp_path / "plain.gguf", stored)) == CONFIG
    del stored["lm_head.weight"]
    changes = {"llama__attention__head_count_kv": None, "llama__rope__freq_base": None}
    path = write_gguf(tmp_path / "tied.gguf", stored, **changes, llama__attention__key_length=32)
    expected = {"num_key_value_heads": 4, "rope_theta": 10000.0, "head_dim": 32, "tie_word_embeddings": True}
    assert read(path) == make_config(**CONFIG.__dict__ | expected)


def test_a_file_loads_as_a_verifier(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", make_tensors("Q8_0")[0], "Q8_0")
    verifier = load_verifier(str(path))
    assert (verifier.name, verifier.config) == (str(path), CONFIG)
    assert verifier.stop_tokens == (TOKENS.index("<end>"),)
    assert encode_prompt(verifier.tokenizer, [{"role": "user", "content": "abc"}]) == tuple(
        map(TOKENS.index, ("<s>", "abc", "<end>"))
    )


@pytest.mark.parametrize(
    ("words", "text", "pieces"),
    [
        ("gpt-2", "abc 12", ["abc", "Ġ", "12"]),
        ("smollm", "abc 12", ["abc", "Ġ", "1", "2"]),
        ("llama-bpe", "xyz abc", ["xyz", "Ġ", "abc"]),
        ("llama-bpe", "1212", ["12", "1", "2"]),  # three digits at a time
        ("gpt-2", "xyz", ["x", "y", "z"]),
        ("gpt-2", "<s>ab<tool>12<end>", ["<s>", "ab", "<tool>", "12", "<end>"]),
    ],
)
def test_tokenizer_splits_words_as_the_file_says(words, text, pieces, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", {}, tokenizer__ggml__pre=words)
    tokenizer = gguf_tokenizer(open_gguf(path), path)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "<end>", None)
    # Control tokens vanish from answers, tokens that a user defined do not.
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace("<s>", "").replace("<end>", "")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model\n" * 20, b"GGUF\x03\0\0\0" + b"\xff" * 64])
def test_not_a_gguf_file(content, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"model\.gguf: not a readable GGUF file"):
        load_verifier(str(path))


def test_a_file_cut_short(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf", make_tensors("Q8_0")[0], "Q8_0").read_bytes()
    path = tmp_path / "model.gguf"
    for size in (30, 200, 2000, len(whole) // 2, len(whole) - 100):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match=r"model\.gguf: not a readable GGUF file"):
            open_gguf(path)


@pytest.mark.parametrize("name", ["mistral3", "gpt2"])
def test_other_architectures(name, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", {}, architecture=name)
    with pytest.raises(InputError, match=rf"model\.gguf: general\.architecture is '{name}'.*'llama'"):
        load_verifier(str(path))


@pytest.mark.parametrize("name", sorted(set(FIELDS) - OPTIONAL))
def test_missing_fields(name, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", {}, **{name: None})
    with pytest.raises(InputError, match=rf"model\.gguf: field {name} is missing"):
        load_verifier(str(path))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count_kv", 3),
        ("llama.attention.head_count_kv", [2, 2]),
        ("tokenizer.ggml.token_type", KINDS[:-1]),
        ("tokenizer.ggml.merges", ["a b", "q nowhere"]),
        ("tokenizer.ggml.eos_token_id", len(TOKENS)),
    ],
)
def test_bad_fields(name, value, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", make_tensors("Q8_0")[0], "Q8_0", **{name: value})
    with pytest.raises(InputError) as error:
        load_verifier(str(path))
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "missing tensor model.layers.1.mlp.up_proj.weight"),
        (
            {"model.layers.0.block_sparse_moe.gate.weight": np.ones((4, 256), np.float32)},
            "unexpected tensor model.layers.0.ffn_gate_inp.weight",
        ),
        ({"model.norm.weight": np.ones(128, np.float32)}, "model.norm.weight has shape [128], expected [256]"),
        ({"model.norm.weight": np.full(256, np.nan, np.float32)}, "model.norm.weight holds values that are not finite"),
    ],
)
def test_tensor_problems(change, message, tmp_path):
    stored = {name: rows for name, rows in (make_tensors("Q8_0")[0] | change).items() if rows is not None}
    path = write_gguf(tmp_path / "model.gguf", stored, "Q8_0")
    with pytest.raises(InputError) as error:
        load_verifier(str(path))
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


def test_unsupported_contents(tmp_path):
    path = tmp_path / "model.gguf"
    stored = make_tensors("Q5_0")[0]
    for changes, message in (
        ({}, r"tensors of type Q5_0, supported are F32, .*Q6_K"),
        ({"llama__rope__scaling__type": "yarn"}, "rope scaling in GGUF files is not supported"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer 'llama' .* is not supported"),
        ({"tokenizer__ggml__pre": "qwen2"}, ".*pre-tokenizer 'qwen2' is not supported"),
    ):
        write_gguf(path, stored, "Q5_0", **changes)
        with pytest.raises(InputError, match=rf"model\.gguf: {message}"):
            load_verifier(str(path))
    write_gguf(path, stored | {"rope_freqs.weight": np.ones(32, np.float32)}, "Q5_0")
    with pytest.raises(InputError, match=r"model\.gguf: rope scaling in GGUF files is not supported"):
        load_verifier(str(path))


@pytest.fixture(scope="module")
def transformers_smollm2():
    # One thread: on a busy machine PyTorch's threads wait for each other longer than they compute.
    threads, path = torch.get_num_threads(), embedded_gguf()
    torch.set_num_threads(1)
    yield AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def prompts(smollm2, questions_dir):
    """The prompts of ten chat and ten maths questions."""
    encoded = []
    for path in sorted(questions_dir.glob("*_heldout.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines()[:10]:
            message = {"role": "user", "content": json.loads(line)["turns"][0]}
            encoded.append(encode_prompt(smollm2.tokenizer, [message]))
    return encoded


def test_smollm2_logits_equal_transformers(smollm2, transformers_smollm2, prompts):
    assert len(prompts) == 20
    size, rows = max(map(len, prompts)), 4
    model = Llama(smollm2.config)

    @jax.jit
    def run(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(size), tokens.shape)
        features, _ = model.apply({"params": params}, tokens, positions, causal_mask(size))
        return model.apply({"params": params}, features, method=Llama.logits)

    for start in range(0, len(prompts), rows):
        batch = prompts[start : start + rows]
        ours = run(smollm2.params, jnp.asarray([(*prompt, *[0] * (size - len(prompt))) for prompt in batch]))
        for prompt, row in zip(batch, np.asarray(ours), strict=True):
            with torch.no_grad():
                expected = transformers_smollm2(torch.tensor([prompt]), use_cache=False).logits[0].numpy()
            logits = row[: len(prompt)]
            np.testing.assert_allclose(logits, expected, atol=2e-3, rtol=0)
            np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))


def test_smollm2_greedy_text_equals_transformers(smollm2, transformers_smollm2, prompts):
    chosen, new = [prompts[0], prompts[10]], 32
    engine = Engine(
        Models(smollm2.module),
        Weights(smollm2.params),
        smollm2.stop_tokens,
        cache_size=cache_size_for(max(map(len, chosen)), new, 1),
        max_new_tokens=new,
    )
    completions = list(engine.decode(Request(prompt, new) for prompt in chosen))
    assert [completion.index for completion in completions] == [0, 1]
    for prompt, completion in zip(chosen, completions, strict=True):
        out = transformers_smollm2.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=new,
        )
        expected = out[0, len(prompt) :].tolist()
        assert list(completion.tokens) == expected
        assert len(expected) > 16
