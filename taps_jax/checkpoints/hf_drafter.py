"""Drafter directories: this project's own, and the layouts in which EAGLE-1/2, HASS and TAPS heads are published."""

import dataclasses
import json
import re
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from taps_jax.checkpoints.hf_verifier import OWN_FIELDS, read_json
from taps_jax.checkpoints.keymap import fill, flatten
from taps_jax.checkpoints.tensors import StoredTensors, add_safetensors, described, stored_in
from taps_jax.checkpoints.verifier import Verifier
from taps_jax.errors import InputError
from taps_jax.files import replacing
from taps_jax.models.config import LLAMA, DrafterConfig, LlamaConfig, llama_config_from_hf, llama_config_to_hf
from taps_jax.models.drafter import init_drafter

# What engines call the same head in their own copies of it.
_ENGINE_ARCHITECTURES = ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM")
# Copies of the verifier's tables, and what the configuration implies.
_FROZEN = ("embed_tokens.weight", "lm_head.weight", "layers.0.self_attn.rotary_emb.inv_freq")
# Norms that variants of the head have and EAGLE-1, EAGLE-2 and HASS do not.
_EXTRA_NORMS = ("embedding_layernorm", "hidden_states_layernorm", "pre_lm_head_layernorm")


@dataclasses.dataclass(frozen=True)
class LoadedDrafter:
    """A drafter as read from its directory.

    Attributes:
      name: the directory's name.
      config: its shape.
      params: one specialist.
      vocabulary: [W] int32 ids it may propose, ascending, or None for all.
      fingerprint: of the verifier it was trained on, or None if the directory does not say.
    """

    name: str
    config: DrafterConfig
    params: dict
    vocabulary: np.ndarray | None
    fingerprint: str | None


@dataclasses.dataclass(frozen=True)
class OpenDrafter:
    """A drafter's directory before its tensors are read.

    Attributes:
      fields: of config.json, empty if there is none.
      config: its shape.
      stored: the trained tensors.
      left_out: names and files that are no part of the drafter.
      notes: what a user should know and is no error.
    """

    fields: dict[str, Any]
    config: DrafterConfig
    stored: StoredTensors
    left_out: list[str]
    notes: list[str]

    def abstract(self) -> dict:
        """Shapes of the parameters."""
        return jax.eval_shape(lambda: init_drafter(self.config, jax.random.key(0)))

    @property
    def fingerprint(self) -> str | None:
        """Of the verifier it was trained on, if config.json says."""
        own = self.fields.get(OWN_FIELDS)
        return own.get("verifier_fingerprint") if isinstance(own, dict) else None


def drafter_config(verifier: LlamaConfig, fc_bias: bool = False) -> DrafterConfig:
    """The shape of a drafter for `verifier`: one of its layers."""
    layer = dataclasses.replace(verifier, num_hidden_layers=1, tie_word_embeddings=False)
    return DrafterConfig(layer, fc_bias)


def write_drafter(
    directory: Path, config: DrafterConfig, params: dict, vocabulary: np.ndarray | None, fingerprint: str | None
) -> None:
    """Writes a drafter; each file appears when complete, config.json last.

    Args:
      directory: created if absent.
      config: its shape.
      params: one specialist; written in its dtype.
      vocabulary: [W] int32 ids it may propose, or None for all.
      fingerprint: of the verifier it was trained on, if known.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.asarray(leaf) for name, leaf in flatten(params).items()}
    write_arrays(directory / "model.safetensors", tensors)
    extra = directory / "draft_vocab.safetensors"
    if vocabulary is None:
        extra.unlink(missing_ok=True)
    else:
        write_arrays(extra, {"token_ids": np.asarray(vocabulary, np.int32)})
    fields = {
        **llama_config_to_hf(config.layer),
        "bias": config.fc_bias,
        "dtype": str(next(iter(tensors.values())).dtype),
    }
    if fingerprint:
        fields[OWN_FIELDS] = {"verifier_fingerprint": fingerprint}
    with replacing(directory / "config.json") as temporary:
        temporary.write_text(json.dumps(fields, indent=2) + "\n")


def write_arrays(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file of a few small arrays, which appears when complete."""
    with replacing(path) as temporary:
        save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, temporary, {"format": "pt"})
        temporary.chmod(0o644)  # save_file leaves it readable by its owner only


def open_drafter(directory: Path, stack: ExitStack, verifier: LlamaConfig | None = None) -> OpenDrafter:
    """Finds a drafter's tensors and shape.

    Args:
      directory: in one of the published layouts.
      stack: closes the files.
      verifier: gives the shape when the directory has no config.json, as training programs leave it.
    Raises:
      InputError: it is absent, or not an EAGLE-1/2 or HASS drafter.
    """
    if not directory.is_dir():
        raise InputError(f"drafter {directory}: no such directory")
    path = directory / "config.json"
    if not path.exists() and verifier is None:
        raise InputError(f"{path}: file not found; --verifier gives the shape that it would")
    fields = read_json(path) if path.exists() else {}
    stored = stored_in(directory, "model", stack).renamed(lambda name: name.removeprefix("module."))
    _refuse_other_kinds(fields, stored.tensors, str(directory))
    layer = _layer(fields, path) if fields else _derived_layer(stored, verifier, directory)
    left_out = [name for name in stored.tensors if name in _FROZEN]
    left_out += [name for name in ("model_1.safetensors", "pytorch_model_1.bin") if (directory / name).exists()]
    has_bias, said = "fc.bias" in stored.tensors, fields.get("bias")
    notes = []
    if isinstance(said, bool) and said != has_bias:
        notes.append(f"{path} says bias {str(said).lower()}, but fc.bias is {'present' if has_bias else 'absent'}")
    embedding = stored.tensors.get("embed_tokens.weight")
    if embedding and embedding.shape != (layer.vocab_size, layer.hidden_size):
        expected = [layer.vocab_size, layer.hidden_size]
        stored.problems.append(f"embed_tokens.weight has shape {list(embedding.shape)}, expected {expected}")
    stored = stored.renamed(lambda name: None if name in _FROZEN else name)
    return OpenDrafter(fields, DrafterConfig(layer, fc_bias=has_bias), stored, left_out, notes)


def read_drafter(directory: Path, dtype, verifier: LlamaConfig | None = None) -> LoadedDrafter:
    """Reads a drafter directory.

    Args:
      directory: in one of the published layouts.
      dtype: of the parameters.
      verifier: gives the shape when there is no config.json.
    Raises:
      InputError: it is absent, not an EAGLE-1/2 or HASS drafter, or damaged; all problems with its tensors at once.
    """
    with ExitStack() as stack:
        opened = open_drafter(directory, stack, verifier)
        params = fill(opened.abstract(), opened.stored, dtype, str(directory))
    for note in opened.notes:
        print(f"note: {note}", file=sys.stderr)
    vocabulary = read_vocabulary(directory, opened.config.layer.vocab_size)
    return LoadedDrafter(directory.resolve().name, opened.config, params, vocabulary, opened.fingerprint)


def stored_dtype(directory: Path) -> np.dtype:
    """The type in which a drafter's tensors are stored, float32 if in several.

    Raises:
      InputError: there are none.
    """
    with ExitStack() as stack:
        kinds = {tensor.dtype for tensor in stored_in(directory, "model", stack).tensors.values()}
    return kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)


def check_fits(drafter: LoadedDrafter, verifier: Verifier, allow_other_verifier: bool = False) -> None:
    """Refuses a drafter that cannot, or should not, draft for `verifier`.

    Raises:
      InputError: its width or vocabulary differ, or it was trained on another verifier and that is not allowed.
    """
    for field in ("hidden_size", "vocab_size"):
        own, wanted = getattr(drafter.config.layer, field), getattr(verifier.config, field)
        if own != wanted:
            raise InputError(f"drafter {drafter.name} has {field} {own}, verifier {verifier.name} has {wanted}")
    if drafter.fingerprint is None:
        print(f"note: drafter {drafter.name} does not say which verifier it was trained on", file=sys.stderr)
    elif drafter.fingerprint != verifier.fingerprint and not allow_other_verifier:
        raise InputError(
            f"drafter {drafter.name} was trained on a verifier with fingerprint {drafter.fingerprint}, {verifier.name} "
            f"has {verifier.fingerprint}; --allow_other_verifier uses it all the same (output stays exact)"
        )


def _refuse_other_kinds(fields: dict[str, Any], names: Iterable[str], where: str) -> None:
    """Raises InputError for what is recognised and is not an EAGLE-1/2 or HASS head."""
    architectures = str(fields.get("architectures") or "")
    names = list(names)
    kind = None
    if "Eagle3" in architectures or "d2t" in names or any(name.startswith("midlayer.") for name in names):
        kind = "an EAGLE-3 head"
    elif "speculators_model_type" in fields:
        kind = f"a speculators checkpoint ({fields['speculators_model_type']})"
    elif "medusa_num_heads" in fields or any(re.match(r"(medusa_head\.)?\d+\.\d+\.linear\.", name) for name in names):
        kind = "a Medusa head"
    elif any(name.split(".")[0] in _EXTRA_NORMS for name in names):
        kind = "an EAGLE head with extra norms"
    elif any(name.startswith(("model.layers.", "model/")) for name in names):
        kind = "a whole model"
    if kind:
        raise InputError(f"{where}: this is {kind}, supported are EAGLE-1, EAGLE-2 and HASS drafters")


def read_vocabulary(directory: Path, vocab_size: int) -> np.ndarray | None:
    """Ids [W] int32 that the directory's drafter may propose, or None for all.

    Raises:
      InputError: they are not ascending ids.
    """
    path = directory / "draft_vocab.safetensors"
    if not path.exists():
        return None
    with ExitStack() as stack:
        stored = StoredTensors()
        add_safetensors(path, stored, stack, {"I32": np.dtype(np.int32), "I64": np.dtype(np.int64)})
        if stored.problems or list(stored.tensors) != ["token_ids"]:
            found = described(stored.problems) or f"holds {sorted(stored.tensors)}, expected ['token_ids']"
            raise InputError(f"{path}: {found}")
        ids = stored.tensors["token_ids"].read(...)
    if ids.ndim != 1 or not ids.size or ids.min() < 0 or ids.max() >= vocab_size or np.any(np.diff(ids) <= 0):
        raise InputError(f"{path}: token_ids must be ascending ids below {vocab_size}")
    return ids.astype(np.int32)


def cast_params(params: dict, dtype) -> dict:
    """`params` in another dtype."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)


def _layer(fields: dict[str, Any], path: Path) -> LlamaConfig:
    if fields.get("architectures") in [[name] for name in _ENGINE_ARCHITECTURES]:
        fields = {**fields, "architectures": [LLAMA]}
    layer = llama_config_from_hf(fields, str(path))
    if layer.num_hidden_layers != 1:
        raise InputError(f"{path}: num_hidden_layers is {layer.num_hidden_layers}, a drafter has 1")
    return dataclasses.replace(layer, tie_word_embeddings=False)


def _derived_layer(stored: StoredTensors, verifier: LlamaConfig, directory: Path) -> LlamaConfig:
    """The shape that the tensors say, with the verifier's for what they do not."""
    layer = drafter_config(verifier).layer
    rows = {}
    for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj"):
        tensor = stored.tensors.get(f"layers.0.{part}.weight")
        if tensor is None or not tensor.shape:
            raise InputError(f"{directory}: missing tensor layers.0.{part}.weight")
        rows[part] = tensor.shape[0]
    return dataclasses.replace(
        layer,
        num_attention_heads=max(1, rows["self_attn.q_proj"] // layer.head_dim),
        num_key_value_heads=max(1, rows["self_attn.k_proj"] // layer.head_dim),
        intermediate_size=rows["mlp.gate_proj"],
        attention_bias="layers.0.self_attn.q_proj.bias" in stored.tensors,
        mlp_bias="layers.0.mlp.gate_proj.bias" in stored.tensors,
    )
