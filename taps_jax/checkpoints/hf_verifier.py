"""Reading Hugging Face verifier directories: config.json, safetensors (one file or shards), tokenizer."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from taps_jax.checkpoints.keymap import fill
from taps_jax.errors import InputError
from taps_jax.models.config import LlamaConfig, llama_config_from_hf
from taps_jax.models.llama import abstract_llama


def read_json(path: Path) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
      InputError: the file is absent, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: file not found") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def hf_config(directory: Path) -> LlamaConfig:
    """The verifier's shape from `config.json`.

    Raises:
      InputError: the architecture is not LlamaForCausalLM, or a field is bad.
    """
    path = directory / "config.json"
    fields = read_json(path)
    architectures = fields.get("architectures") or ["LlamaForCausalLM"]
    if architectures != ["LlamaForCausalLM"]:
        raise InputError(f"{path}: architectures is {architectures}, only ['LlamaForCausalLM'] is supported")
    return llama_config_from_hf(fields, str(path))


def hf_params(directory: Path, config: LlamaConfig, dtype) -> dict:
    """Parameters from the directory's safetensors.

    Raises:
      InputError: files are absent or damaged, tensors missing, unexpected, misshapen or not finite.
    """
    with ExitStack() as stack:
        return fill(abstract_llama(config), _tensors(directory, config, stack), dtype, str(directory))


def hf_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The directory's tokenizer; never runs code from it.

    Raises:
      InputError: transformers cannot load it.
    """
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exceptions for a damaged file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{directory}: no usable tokenizer: {reason}") from error


def generation_stop_tokens(directory: Path) -> list[int]:
    """End-of-sequence ids of `generation_config.json`, which may hold none, one or several.

    Raises:
      InputError: they are not integers.
    """
    path = directory / "generation_config.json"
    found = read_json(path).get("eos_token_id") if path.exists() else None
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if any(not isinstance(one, int) or isinstance(one, bool) or one < 0 for one in ids):
        raise InputError(f"{path}: eos_token_id is {found!r}, expected an id or a list of ids")
    return ids


def open_safetensors(path: Path, stack: ExitStack):
    """Opens a safetensors file until `stack` closes.

    Raises:
      InputError: the file is absent or damaged.
    """
    try:
        return stack.enter_context(safe_open(path, framework="numpy"))
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: not a readable safetensors file: {error}") from error


def _tensors(directory: Path, config: LlamaConfig, stack: ExitStack) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    for path in _shards(directory):
        file = open_safetensors(path, stack)
        for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
            if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings):
                continue  # derived from the config, or a second copy of the embedding
            yield name, lambda file=file, name=name: file.get_tensor(name)


def _shards(directory: Path) -> list[Path]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise InputError(f"{directory}: neither model.safetensors nor model.safetensors.index.json found")
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise InputError(f"{index}: weight_map is missing")
    return [directory / name for name in sorted(set(names.values()))]
