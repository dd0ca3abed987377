"""What a checkpoint is, whether it is whole, and what loads it."""

import math
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from taps_jax.checkpoints.flavours import FLAVOURS, flavour_problems
from taps_jax.checkpoints.gguf import gguf_config, gguf_tensors, gguf_tokenizer, open_gguf
from taps_jax.checkpoints.hf_drafter import open_drafter, read_vocabulary
from taps_jax.checkpoints.hf_verifier import hf_config, is_flax, read_json, verifier_tensors
from taps_jax.checkpoints.keymap import flatten, shape_problems
from taps_jax.checkpoints.tensors import StoredTensors, is_finite, stored_in
from taps_jax.errors import InputError
from taps_jax.models.config import LlamaConfig
from taps_jax.models.llama import abstract_llama


class Description(NamedTuple):
    """What `converters.inspect` prints.

    Attributes:
      kind: in words.
      facts: (name, value) pairs.
      problems: that keep it from being whole.
      loads_with: commands or engines.
    """

    kind: str
    facts: list[tuple[str, str]]
    problems: list[str]
    loads_with: list[str]


def describe(path: Path, verifier: LlamaConfig | None = None) -> Description:
    """Looks at a directory or file, and reads every tensor once to see that it is finite.

    Args:
      path: of a checkpoint.
      verifier: gives the shape of a drafter without config.json.
    Raises:
      InputError: there is nothing, or it is no checkpoint that is supported.
    """
    if path.is_file():
        return _describe_gguf(path)
    if not path.is_dir():
        raise InputError(f"{path}: no such file or directory")
    with ExitStack() as stack:
        if is_flax(path) or _looks_whole(path, stack):
            return _describe_verifier(path, stack)
        return _describe_drafter(path, stack, verifier)


def _looks_whole(path: Path, stack: ExitStack) -> bool:
    """Whether a directory is a verifier's: its config has several layers, or a tensor has a verifier's name."""
    config = path / "config.json"
    layers = read_json(config).get("num_hidden_layers") if config.exists() else None
    if isinstance(layers, int) and layers > 1:
        return True
    return any(name.startswith("model.layers.") for name in stored_in(path, "model", stack).tensors)


def _describe_gguf(path: Path) -> Description:
    reader = open_gguf(path)
    config = gguf_config(reader, path)
    stored = gguf_tensors(reader, path, config)
    gguf_tokenizer(reader, path)
    kinds = sorted({tensor.tensor_type.name for tensor in reader.tensors})
    problems = stored.problems + shape_problems(flatten(abstract_llama(config)), stored) + _not_finite(stored)
    facts = [*_counts(stored), ("stored as", ", ".join(kinds)), *_shape(config)]
    return Description("verifier in a GGUF file", facts, problems, ["taps_jax --verifier", "converters.gguf"])


def _describe_verifier(path: Path, stack: ExitStack) -> Description:
    config = hf_config(path)
    stored, left_out = verifier_tensors(path, config, stack)
    problems = stored.problems + shape_problems(flatten(abstract_llama(config)), stored) + _not_finite(stored)
    facts = [*_counts(stored), *_shape(config)]
    if left_out:
        facts.append(("implied by others", ", ".join(left_out[:3])))
    if not (path / "tokenizer.json").exists() and not (path / "tokenizer.model").exists():
        problems.append("no tokenizer.json or tokenizer.model")
    if is_flax(path):
        loads = ["taps_jax --verifier", "converters.hf_verifier --reverse"]
        return Description("verifier with Flax names", facts, problems, loads)
    loads = ["transformers", "taps_jax --verifier", "converters.hf_verifier"]
    return Description("verifier with Hugging Face names", facts, problems, loads)


def _describe_drafter(path: Path, stack: ExitStack, verifier: LlamaConfig | None) -> Description:
    opened = open_drafter(path, stack, verifier)
    stored = opened.stored
    problems = stored.problems + shape_problems(flatten(opened.abstract()), stored) + _not_finite(stored)
    vocabulary = read_vocabulary(path, opened.config.layer.vocab_size)
    facts = [
        *_counts(stored),
        *_shape(opened.config.layer),
        ("fusion bias", "yes" if opened.config.fc_bias else "no"),
        ("draft vocabulary", "all tokens" if vocabulary is None else f"{len(vocabulary)} tokens"),
        ("trained on verifier", opened.fingerprint or "not said"),
    ]
    if opened.left_out:
        facts.append(("no part of it", ", ".join(opened.left_out)))
    facts += [("note", note) for note in opened.notes]
    loads = ["taps_jax --drafter"]
    for name, flavour in FLAVOURS.items():
        if not flavour_problems(path, name):
            loads.append(flavour.loads_with)
    return Description("EAGLE-1/2 or HASS drafter", facts, problems, loads)


def _counts(stored: StoredTensors) -> list[tuple[str, str]]:
    tensors = stored.tensors.values()
    parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    kinds = ", ".join(sorted({str(tensor.dtype) for tensor in tensors}))
    return [("tensors", str(len(tensors))), ("parameters", f"{parameters:,}"), ("types", kinds)]


def _shape(config: LlamaConfig) -> list[tuple[str, str]]:
    heads = f"{config.num_attention_heads} heads, {config.num_key_value_heads} for keys, of {config.head_dim}"
    scaling = " scaled as in Llama 3.1" if config.rope_scaling else ""
    return [
        ("layers", str(config.num_hidden_layers)),
        ("width", f"{config.hidden_size}, {config.intermediate_size} inside"),
        ("attention", heads + (", normed" if config.qk_norm else "")),
        ("vocabulary", f"{config.vocab_size:,}{', head tied' if config.tie_word_embeddings else ''}"),
        ("rotary base", f"{config.rope_theta:g}{scaling}"),
    ]


def _not_finite(stored: StoredTensors) -> list[str]:
    return [
        f"{name} holds values that are not finite"
        for name, tensor in stored.tensors.items()
        if not all(is_finite(block) for block in tensor.blocks())
    ]
