"""Reading GGUF files of the llama architecture: configuration, weights, tokenizer and chat template."""

import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from jax.sharding import Mesh
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from taps_jax.checkpoints.keymap import fill
from taps_jax.checkpoints.tensors import DTYPES, StoredTensor, StoredTensors
from taps_jax.errors import InputError
from taps_jax.models.config import LlamaConfig, llama_config_from_hf
from taps_jax.models.llama import abstract_llama
from taps_jax.sharding import verifier_shardings

_SUPPORTED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL, _USER_DEFINED = 3, 4  # kinds of token in tokenizer.ggml.token_type
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def open_gguf(path: Path) -> GGUFReader:
    """Opens a GGUF file of the llama architecture.

    Raises:
      InputError: it is not a readable GGUF file, or of another architecture.
    """
    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise InputError(f"{path}: not a readable GGUF file: {error}") from error
    architecture = _field(reader, path, "general.architecture")
    if architecture != "llama":
        raise InputError(f"{path}: general.architecture is {architecture!r}, only 'llama' is supported")
    return reader


def gguf_config(reader: GGUFReader, path: Path) -> LlamaConfig:
    """The model's shape; `path` names the file in errors.

    Raises:
      InputError: a field is missing, or the model uses rope scaling, which is not supported in GGUF.
    """
    tensors = {tensor.name for tensor in reader.tensors}
    scaled = "rope_freqs.weight" in tensors or reader.get_field("llama.rope.scaling.type") is not None
    if scaled:
        raise InputError(f"{path}: rope scaling in GGUF files is not supported, use the Hugging Face checkpoint")
    read = lambda name: _field(reader, path, f"llama.{name}")
    optional = lambda name: _field(reader, path, f"llama.{name}", None)
    fields = {
        "vocab_size": len(_field(reader, path, "tokenizer.ggml.tokens")),
        "hidden_size": read("embedding_length"),
        "intermediate_size": read("feed_forward_length"),
        "num_hidden_layers": read("block_count"),
        "num_attention_heads": read("attention.head_count"),
        "num_key_value_heads": optional("attention.head_count_kv"),
        "head_dim": optional("attention.key_length"),
        "rms_norm_eps": _as_written(read("attention.layer_norm_rms_epsilon")),
        "rope_theta": _as_written(_field(reader, path, "llama.rope.freq_base", 10000.0)),
        "max_position_embeddings": read("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(name.endswith("attn_q.bias") for name in tensors),
    }
    return llama_config_from_hf(fields, str(path))


def gguf_tensors(reader: GGUFReader, path: Path, config: LlamaConfig) -> StoredTensors:
    """Dequantised tensors in Hugging Face names and row order.

    Raises:
      InputError: a tensor has an unsupported quantisation.
    """
    kinds = sorted({tensor.tensor_type.name for tensor in reader.tensors} - set(_SUPPORTED))
    if kinds:
        raise InputError(f"{path}: tensors of type {', '.join(kinds)}, supported are {', '.join(_SUPPORTED)}")
    stored = StoredTensors()
    for tensor in reader.tensors:
        kept = DTYPES.get(tensor.tensor_type.name, DTYPES["F32"])
        shape = tuple(int(size) for size in tensor.shape[::-1])
        read = lambda index, tensor=tensor, kept=kept: _read(tensor, config, index).astype(kept, copy=False)
        stored.add(_hf_name(tensor.name), StoredTensor(shape, kept, read))
    return stored


def gguf_params(reader: GGUFReader, path: Path, config: LlamaConfig, dtype, mesh: Mesh | None = None) -> dict:
    """Dequantised parameters, on the default device or laid out on a mesh.

    Raises:
      InputError: a tensor has an unsupported quantisation, is missing, unexpected, misshapen or not finite.
    """
    abstract = abstract_llama(config)
    shardings = mesh and verifier_shardings(mesh, abstract)
    return fill(abstract, gguf_tensors(reader, path, config), dtype, str(path), shardings)


def gguf_tokenizer(reader: GGUFReader, path: Path) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer and chat template stored in the file.

    Raises:
      InputError: the file holds another kind of tokenizer.
    """
    kind = _field(reader, path, "tokenizer.ggml.model")
    words = _field(reader, path, "tokenizer.ggml.pre", "default")
    splitters = {
        # Digits are split one by one before the byte-level pattern; the pattern alone would keep "12" together.
        "smollm": lambda: [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ],
        "gpt-2": lambda: [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)],
        "llama-bpe": lambda: [
            pre_tokenizers.Split(Regex(_LLAMA3_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
    }
    if kind != "gpt2" or words not in splitters:
        raise InputError(
            f"{path}: tokenizer {kind!r} with pre-tokenizer {words!r} is not supported; "
            f"'gpt2' with {', '.join(map(repr, splitters))} is"
        )
    texts = _field(reader, path, "tokenizer.ggml.tokens")
    kinds = _field(reader, path, "tokenizer.ggml.token_type")
    if len(kinds) != len(texts):
        raise InputError(f"{path}: tokenizer.ggml.token_type has {len(kinds)} entries for {len(texts)} tokens")
    named = {}
    for role, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = _field(reader, path, f"tokenizer.ggml.{field}_token_id", None)
        if index is not None:
            if not 0 <= index < len(texts):
                raise InputError(f"{path}: tokenizer.ggml.{field}_token_id is {index}, there are {len(texts)} tokens")
            named[f"{role}_token"] = texts[index]
    vocabulary = {text: index for index, text in enumerate(texts)}
    try:
        merges = [tuple(merge.split(" ", 1)) for merge in _field(reader, path, "tokenizer.ggml.merges")]
        # Llama 3 has merged words that no merge rule reaches; its own tokenizer looks whole words up first.
        backend = Tokenizer(BPE(vocabulary, merges, ignore_merges=words == "llama-bpe"))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise InputError(f"{path}: tokenizer.ggml.merges is not usable: {error}") from error
    backend.pre_tokenizer = pre_tokenizers.Sequence(splitters[words]())
    backend.decoder = decoders.ByteLevel()
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [text for text, kind in zip(texts, kinds, strict=True) if kind == wanted]
        add = backend.add_special_tokens if special else backend.add_tokens
        add([AddedToken(text, normalized=False, special=special) for text in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=_field(reader, path, "tokenizer.chat_template", None),
        clean_up_tokenization_spaces=False,
        **named,
    )


_REQUIRED = object()


def _field(reader: GGUFReader, path: Path, name: str, default: Any = _REQUIRED) -> Any:
    field = reader.get_field(name)
    if field is not None:
        return field.contents()
    if default is _REQUIRED:
        raise InputError(f"{path}: field {name} is missing")
    return default


def _as_written(value: Any) -> Any:
    """The shortest decimal that gives a stored float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _hf_name(name: str) -> str:
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if block:
        return f"model.layers.{block[1]}.{_NAMES.get(block[2], block[2])}.{block[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_NAMES.get(stem, stem)}.{kind}"


def _read(tensor, config: LlamaConfig, index: Any) -> np.ndarray:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(tensor.name.split(".")[-2])
    if heads:  # its rows change places
        return _half_split_rows(_values(tensor, ...), heads)[index]
    first, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
    return _values(tensor, first)[(slice(None), *rest)] if rest else _values(tensor, first)


def _values(tensor, rows: Any) -> np.ndarray:
    """Dequantised rows of a tensor in its stored order."""
    stored = np.asarray(tensor.data)[rows]
    if tensor.tensor_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return stored
    return dequantize(stored, tensor.tensor_type)


def _half_split_rows(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from GGUF's interleaved rotary pairs to Hugging Face's two halves."""
    pairs = value.reshape(heads, value.shape[0] // heads // 2, 2, *value.shape[1:])
    return pairs.swapaxes(1, 2).reshape(value.shape)
