"""Reading verifier directories, as transformers saves them or with Flax names: config.json, weights, tokenizer."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from taps_jax.checkpoints.keymap import fill, from_flax
from taps_jax.checkpoints.tensors import StoredTensors, stored_in
from taps_jax.errors import InputError
from taps_jax.models.config import LlamaConfig, llama_config_from_hf
from taps_jax.models.llama import abstract_llama
from taps_jax.sharding import verifier_shardings

OWN_FIELDS = "taps_jax"  # config.json's object of fields that other programs ignore
FLAX_STEM = "flax_model"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def read_json(path: Path) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
      InputError: the file is absent, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: file not found") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def hf_config(directory: Path) -> LlamaConfig:
    """The verifier's shape from `config.json`.

    Raises:
      InputError: the architecture is not supported, or a field is bad.
    """
    path = directory / "config.json"
    return llama_config_from_hf(read_json(path), str(path))


def is_flax(directory: Path) -> bool:
    """Whether a verifier directory has Flax names."""
    return any(directory.glob(f"{FLAX_STEM}*.safetensors*"))


def verifier_tensors(directory: Path, config: LlamaConfig, stack: ExitStack) -> tuple[StoredTensors, list[str]]:
    """The directory's tensors by Hugging Face name, and the names of those left out because others imply them.

    Raises:
      InputError: there are no weights.
    """
    if is_flax(directory):
        return stored_in(directory, FLAX_STEM, stack).renamed(from_flax), []
    stored = stored_in(directory, "model", stack)
    left_out = [name for name in stored.tensors if name.endswith("rotary_emb.inv_freq")]
    head, embedding = stored.tensors.get(_HEAD), stored.tensors.get(_EMBEDDING)
    if head and config.tie_word_embeddings:
        left_out.append(_HEAD)
        if embedding and not _equal(head, embedding):
            stored.problems.append(f"config.json ties the embeddings, but {_HEAD} differs from {_EMBEDDING}")
    return stored.renamed(lambda name: None if name in left_out else name), left_out


def hf_params(directory: Path, config: LlamaConfig, dtype, mesh: Mesh | None = None) -> dict:
    """Parameters from the directory's weights, on the default device or laid out on a mesh.

    Raises:
      InputError: files are absent or damaged, tensors missing, unexpected, misshapen or not finite.
    """
    abstract = abstract_llama(config)
    with ExitStack() as stack:
        stored, _ = verifier_tensors(directory, config, stack)
        return fill(abstract, stored, dtype, str(directory), mesh and verifier_shardings(mesh, abstract))


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


def hub_directory(name: str, expected: str) -> Path:
    """The directory called `name`, or the hub's repository of that name, downloaded.

    Args:
      name: a directory or a hub id.
      expected: what the name may be besides, for the message.
    Raises:
      InputError: it is neither.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "pytorch_model*.bin", "tokenizer*", "*.jinja", "*.model"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # the hub client raises many kinds: bad name, no network, no access
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{expected}, and as a hub id it failed: {reason}") from error


def _equal(one, other) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return all(np.array_equal(a, b) for a, b in zip(one.blocks(), other.blocks(), strict=True))
