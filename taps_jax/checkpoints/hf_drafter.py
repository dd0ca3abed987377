"""Drafter directories in the EAGLE layout: config.json, model.safetensors, perhaps draft_vocab.safetensors."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from taps_jax.checkpoints.hf_verifier import open_safetensors, read_json
from taps_jax.checkpoints.keymap import fill, flatten
from taps_jax.checkpoints.verifier import Verifier
from taps_jax.errors import InputError
from taps_jax.files import replacing
from taps_jax.models.config import DrafterConfig, LlamaConfig, llama_config_from_hf, llama_config_to_hf
from taps_jax.models.drafter import init_drafter

_OWN_FIELDS = "taps_jax"  # config.json's object of fields that other engines ignore


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


def drafter_config(verifier: LlamaConfig, fc_bias: bool = False) -> DrafterConfig:
    """The shape of a drafter for `verifier`: one of its layers."""
    layer = dataclasses.replace(verifier, num_hidden_layers=1, tie_word_embeddings=False)
    return DrafterConfig(layer, fc_bias)


def write_drafter(
    directory: Path, config: DrafterConfig, params: dict, vocabulary: np.ndarray | None, fingerprint: str
) -> None:
    """Writes a drafter; each file appears when complete, config.json last.

    Args:
      directory: created if absent.
      config: its shape.
      params: one specialist; written in its dtype.
      vocabulary: [W] int32 ids it may propose, or None for all.
      fingerprint: of the verifier it was trained on.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.asarray(leaf) for name, leaf in flatten(params).items()}
    _write_safetensors(directory / "model.safetensors", tensors)
    extra = directory / "draft_vocab.safetensors"
    if vocabulary is None:
        extra.unlink(missing_ok=True)
    else:
        _write_safetensors(extra, {"token_ids": np.asarray(vocabulary, np.int32)})
    fields = {
        **llama_config_to_hf(config.layer),
        "bias": config.fc_bias,
        "dtype": str(next(iter(tensors.values())).dtype),
        _OWN_FIELDS: {"verifier_fingerprint": fingerprint},
    }
    with replacing(directory / "config.json") as temporary:
        temporary.write_text(json.dumps(fields, indent=2) + "\n")


def read_drafter(directory: Path, dtype) -> LoadedDrafter:
    """Reads a drafter directory.

    Raises:
      InputError: it is absent, not an EAGLE-2/HASS drafter, or damaged; all problems with its tensors at once.
    """
    if not directory.is_dir():
        raise InputError(f"drafter {directory}: no such directory")
    path = directory / "config.json"
    fields = read_json(path)
    layer = llama_config_from_hf(fields, str(path))
    if layer.num_hidden_layers != 1:
        raise InputError(f"{path}: num_hidden_layers is {layer.num_hidden_layers}, a drafter has 1")
    with ExitStack() as stack:
        file = open_safetensors(directory / "model.safetensors", stack)
        names = set(file.keys())
        config = DrafterConfig(layer, fc_bias="fc.bias" in names)
        abstract = jax.eval_shape(lambda: init_drafter(config, jax.random.key(0)))
        params = fill(abstract, _trained(file), dtype, str(directory / "model.safetensors"))
    own = fields.get(_OWN_FIELDS) or {}
    vocabulary = _read_vocabulary(directory / "draft_vocab.safetensors", layer.vocab_size)
    return LoadedDrafter(directory.resolve().name, config, params, vocabulary, own.get("verifier_fingerprint"))


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


def _trained(file) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
        if name != "embed_tokens.weight":  # a frozen copy of the verifier's
            yield name, lambda name=name: file.get_tensor(name)


def _read_vocabulary(path: Path, vocab_size: int) -> np.ndarray | None:
    if not path.exists():
        return None
    with ExitStack() as stack:
        file = open_safetensors(path, stack)
        if list(file.keys()) != ["token_ids"]:
            raise InputError(f"{path}: holds {sorted(file.keys())}, expected ['token_ids']")
        ids = file.get_tensor("token_ids")
    if ids.ndim != 1 or not ids.size or ids.min() < 0 or ids.max() >= vocab_size or np.any(np.diff(ids) <= 0):
        raise InputError(f"{path}: token_ids must be ascending ids below {vocab_size}")
    return ids.astype(np.int32)


def _write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    with replacing(path) as temporary:
        save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, temporary, {"format": "pt"})
        temporary.chmod(0o644)  # save_file leaves it readable by its owner only


def cast_params(params: dict, dtype) -> dict:
    """`params` in another dtype."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)
