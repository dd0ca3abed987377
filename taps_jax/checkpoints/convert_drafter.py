"""Converting drafters: published heads to this project's layout, and to the layouts that other engines load."""

import dataclasses
import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from taps_jax.checkpoints.flavours import BIAS, EMBEDDING, FLAVOURS, TOKEN_MAP, flavour_problems
from taps_jax.checkpoints.gguf import gguf_config, gguf_tensors, open_gguf
from taps_jax.checkpoints.hf_drafter import OpenDrafter, open_drafter, read_vocabulary
from taps_jax.checkpoints.hf_verifier import OWN_FIELDS, hf_config, hub_directory, verifier_tensors
from taps_jax.checkpoints.keymap import flatten, shape_problems
from taps_jax.checkpoints.tensors import StoredTensor, described
from taps_jax.checkpoints.verifier import find_verifier
from taps_jax.checkpoints.write import Output, Written, write_tensors
from taps_jax.errors import InputError
from taps_jax.files import new_directory
from taps_jax.models.config import LlamaConfig, llama_config_to_hf

_VOCABULARY = "draft_vocab.safetensors"


class ConvertedDrafter(NamedTuple):
    """What was written, what was left out, and what a user should know."""

    written: Written
    left_out: list[str]
    notes: list[str]


def import_drafter(source: str, verifier: str | None, output: Output) -> ConvertedDrafter:
    """Writes a published head in this project's layout: the trained tensors, and a config.json that fits them.

    Args:
      source: a directory or hub id.
      verifier: gives the shape where the source has no config.json.
      output: where and how.
    Raises:
      InputError: the source is not an EAGLE-1/2 or HASS head or damaged, or the target is in the way.
    """
    directory = hub_directory(source, f"{source!r} is not a directory")
    with ExitStack() as stack:
        config = verifier_config(verifier) if verifier else None
        opened = open_drafter(directory, stack, config)
        _check(opened, directory)
        vocabulary = read_vocabulary(directory, opened.config.layer.vocab_size)
        fields = {
            **opened.fields,
            **llama_config_to_hf(opened.config.layer),
            "bias": opened.config.fc_bias,
            "dtype": _dtype_name(opened.stored.tensors, output.dtype),
        }
        fields.pop("torch_dtype", None)
        with new_directory(output.target, output.force, [directory]) as temporary:
            written = _write(temporary, opened.stored.tensors, str(directory), output)
            if vocabulary is not None:
                shutil.copyfile(directory / _VOCABULARY, temporary / _VOCABULARY)
            _write_config(temporary, fields)
    return ConvertedDrafter(written, opened.left_out, opened.notes)


def export_drafter(source: Path, flavour: str, verifier: str | None, output: Output) -> ConvertedDrafter:
    """Writes a drafter in the layout of `FLAVOURS[flavour]`, and checks the result by that engine's rules.

    Args:
      source: a drafter's directory.
      flavour: whose layout.
      verifier: whose embedding goes along; `eagle` needs it.
      output: where and how.
    Raises:
      InputError: the drafter cannot be loaded by that engine, or is damaged, or the target is in the way.
    """
    rules = FLAVOURS[flavour]
    if rules.embedding == "required" and not verifier:
        raise InputError(f"flavour {flavour} stores a copy of the verifier's embedding, --verifier says whose")
    with ExitStack() as stack:
        opened = open_drafter(source, stack, verifier_config(verifier) if verifier else None)
        _check(opened, source)
        config, tensors, notes = opened.config, dict(opened.stored.tensors), list(opened.notes)
        if config.layer.qk_norm or config.layer.attention_bias or config.layer.mlp_bias:
            raise InputError(f"{source}: its layer has norms or biases that the engines' Llama layer lacks")
        if rules.bias == "refused" and config.fc_bias:
            if np.any(tensors.pop(BIAS).read(...)):
                raise InputError(f"{source}: its fc.bias is trained, and {rules.loads_with} has no place for one")
            notes.append("fc.bias is all zeros and was left out")
        elif rules.bias == "required" and not config.fc_bias:
            width = tensors["fc.weight"].shape[0]
            zeros = np.zeros(width, tensors["fc.weight"].dtype)
            tensors[BIAS] = StoredTensor((width,), zeros.dtype, lambda index: zeros[index])
            notes.append("fc.bias is not trained and was written as zeros, which the engine asks for")
        if rules.embedding == "required":
            tensors[EMBEDDING] = _embedding(verifier, opened, stack)
        fields = {
            **llama_config_to_hf(config.layer),
            "architectures": [rules.architecture],
            "bias": BIAS in tensors,
            "dtype": _dtype_name(tensors, output.dtype),
        }
        if opened.fingerprint:
            fields[OWN_FIELDS] = {"verifier_fingerprint": opened.fingerprint}
        vocabulary = read_vocabulary(source, config.layer.vocab_size)
        with new_directory(output.target, output.force, [source]) as temporary:
            written = _write(temporary, tensors, str(source), output)
            _write_config(temporary, fields)
            if vocabulary is not None and flavour == "sglang":
                _write_token_map(temporary / TOKEN_MAP, vocabulary)
                notes.append(f"serve with --speculative-token-map {output.target / TOKEN_MAP}")
            elif vocabulary is not None:
                notes.append(f"its list of {len(vocabulary)} draft tokens has no place there: it will use them all")
            problems = flavour_problems(temporary, flavour)
            if problems:
                raise InputError(f"{source}: does not fit {rules.loads_with}: {described(problems)}")
    return ConvertedDrafter(written, opened.left_out, notes)


def _check(opened: OpenDrafter, directory: Path) -> None:
    problems = opened.stored.problems + shape_problems(flatten(opened.abstract()), opened.stored)
    if problems:
        raise InputError(f"{directory}: {described(problems)}")


def _write(directory: Path, tensors: dict[str, StoredTensor], where: str, output: Output) -> Written:
    one_file = dataclasses.replace(output, max_shard_bytes=10**15)  # what loads drafters looks for one
    written = write_tensors(directory, "model", tensors, one_file)
    if written.problems:
        raise InputError(f"{where}: {described([f'{name} {wrong}' for name, wrong in written.problems.items()])}")
    return written


def _write_config(directory: Path, fields: dict) -> None:
    (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def _dtype_name(tensors: dict[str, StoredTensor], dtype: np.dtype | None) -> str:
    return str(dtype if dtype is not None else tensors["fc.weight"].dtype)


def verifier_config(name: str) -> LlamaConfig:
    """The shape of a verifier, without its weights.

    Raises:
      InputError: nothing by that name, or not a supported verifier.
    """
    path = find_verifier(name)
    return gguf_config(open_gguf(path), path) if path.is_file() else hf_config(path)


def _embedding(name: str, opened: OpenDrafter, stack: ExitStack) -> StoredTensor:
    """The embedding of a verifier, unread.

    Raises:
      InputError: it does not fit the drafter.
    """
    path = find_verifier(name)
    if path.is_file():
        reader = open_gguf(path)
        stored = gguf_tensors(reader, path, gguf_config(reader, path))
    else:
        stored, _ = verifier_tensors(path, hf_config(path), stack)
    tensor = stored.tensors.get("model.embed_tokens.weight")
    layer = opened.config.layer
    if tensor is None or tensor.shape != (layer.vocab_size, layer.hidden_size):
        found = "none" if tensor is None else list(tensor.shape)
        raise InputError(f"verifier {name}: embedding is {found}, expected {[layer.vocab_size, layer.hidden_size]}")
    kept = opened.stored.tensors["fc.weight"].dtype  # a file of one type is what loaders expect
    return dataclasses.replace(tensor, dtype=kept, read=lambda index: tensor.read(index).astype(kept))


def _write_token_map(path: Path, vocabulary: np.ndarray) -> None:
    """SGLang's list of the token ids that are drafted."""
    try:
        import torch
    except ImportError as error:
        raise InputError("SGLang's token map is a file of torch's, run: pip install torch") from error
    torch.save(vocabulary.tolist(), path)
