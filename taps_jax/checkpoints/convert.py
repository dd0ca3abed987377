"""Converting verifiers: Hugging Face directories and GGUF files to Flax names and back, in bounded memory."""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from taps_jax.checkpoints.gguf import gguf_config, gguf_tensors, gguf_tokenizer, open_gguf
from taps_jax.checkpoints.hf_verifier import FLAX_STEM, OWN_FIELDS, hub_directory, is_flax, read_json, verifier_tensors
from taps_jax.checkpoints.keymap import flatten, from_flax, shape_problems, to_flax
from taps_jax.checkpoints.tensors import StoredTensors, described
from taps_jax.checkpoints.write import Output, Written, write_tensors
from taps_jax.errors import InputError
from taps_jax.files import new_directory
from taps_jax.models.config import LlamaConfig, llama_config_from_hf, llama_config_to_hf
from taps_jax.models.llama import abstract_llama

# What a verifier is besides weights and shape.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "LICENSE*",
    "USE_POLICY*",
)


class Converted(NamedTuple):
    """What was written, and what was left out of it by name."""

    written: Written
    left_out: list[str]


def convert_verifier(source: str, layout: str, output: Output) -> Converted:
    """Writes a verifier with Flax or Hugging Face names; nothing appears unless all of it is right.

    Args:
      source: a directory with names of either kind, or a hub id.
      layout: `flax` or `hf`.
      output: where and how.
    Raises:
      InputError: the source is not a verifier or damaged (all problems at once), or the target is in the way.
    """
    directory = hub_directory(source, f"{source!r} is not a directory")
    path = directory / "config.json"
    fields = read_json(path)
    config = llama_config_from_hf(fields, str(path))
    if layout == "hf" and not is_flax(directory):
        raise InputError(f"{directory}: has no {FLAX_STEM}*.safetensors, --reverse starts from a Flax directory")
    if layout == "flax" and is_flax(directory):
        raise InputError(f"{directory}: has Flax names already, --reverse gives it Hugging Face names")
    with ExitStack() as stack:
        stored, left_out = verifier_tensors(directory, config, stack)
        with new_directory(output.target, output.force, [directory]) as temporary:
            written = _write(temporary, layout, stored, config, str(directory), output)
            _write_config(temporary, layout, fields, config, stored, output.dtype)
            for pattern in _COMPANIONS:
                for file in directory.glob(pattern):
                    if file.is_file():
                        shutil.copyfile(file, temporary / file.name)
    return Converted(written, left_out)


def convert_gguf(source: Path, layout: str, output: Output) -> Converted:
    """Writes the verifier of a GGUF file, dequantised, with its tokenizer; arguments as for `convert_verifier`.

    Raises:
      InputError: the file is not a supported one or damaged, or the target is in the way.
    """
    if not source.is_file():
        raise InputError(f"{source}: no such file")
    reader = open_gguf(source)
    config, tokenizer = gguf_config(reader, source), gguf_tokenizer(reader, source)
    stored = gguf_tensors(reader, source, config)
    with new_directory(output.target, output.force, [source]) as temporary:
        written = _write(temporary, layout, stored, config, str(source), output)
        tokenizer.save_pretrained(temporary)
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        _write_json(temporary / "generation_config.json", ends)
        _write_config(temporary, layout, {**llama_config_to_hf(config), **ends}, config, stored, output.dtype)
    return Converted(written, [])


def _write(
    directory: Path,
    layout: str,
    stored: StoredTensors,
    config: LlamaConfig,
    where: str,
    output: Output,
) -> Written:
    wrong = stored.problems + shape_problems(flatten(abstract_llama(config)), stored)
    if wrong:
        raise InputError(f"{where}: {described(wrong)}")
    named = {to_flax(name) if layout == "flax" else name: tensor for name, tensor in stored.tensors.items()}
    written = write_tensors(directory, FLAX_STEM if layout == "flax" else "model", named, output)
    if written.problems:
        raise InputError(
            f"{where}: {described([f'{from_flax(name)} {wrong}' for name, wrong in written.problems.items()])}"
        )
    return written


def _write_config(
    directory: Path,
    layout: str,
    fields: dict[str, Any],
    config: LlamaConfig,
    stored: StoredTensors,
    dtype: np.dtype | None,
) -> None:
    """The source's fields, with the rotary base where transformers 4 and 5 look for it."""
    rope = llama_config_to_hf(config)
    fields = {**fields, "architectures": rope["architectures"], "model_type": rope["model_type"]}
    fields |= {name: rope[name] for name in ("rope_theta", "rope_parameters")}
    if config.rope_scaling:
        fields["rope_scaling"] = rope["rope_scaling"]
    kinds = {dtype} if dtype is not None else {tensor.dtype for tensor in stored.tensors.values()}
    if len(kinds) == 1:
        fields.pop("torch_dtype", None)
        fields["dtype"] = str(kinds.pop())
    fields.pop(OWN_FIELDS, None)
    if layout == "flax":
        fields[OWN_FIELDS] = {"layout": "flax"}
    _write_json(directory / "config.json", fields)


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n")
