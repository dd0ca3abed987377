"""What a training run starts from: its rows, the drafter's shape and first parameters, its draft vocabulary."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from taps_jax.checkpoints.hf_drafter import cast_params, check_fits, drafter_config, read_drafter
from taps_jax.checkpoints.verifier import Verifier
from taps_jax.data.batches import Example, digest
from taps_jax.data.examples import Dataset, load_examples
from taps_jax.data.vocabulary import frequent_tokens, uncovered_share
from taps_jax.errors import InputError
from taps_jax.models.config import DrafterConfig
from taps_jax.models.drafter import init_drafter


class Start(NamedTuple):
    """The drafter before the first step.

    Attributes:
      config: its shape.
      params: float32.
      vocabulary: [W] int32 token ids that it may propose, or None for all.
    """

    config: DrafterConfig
    params: dict
    vocabulary: np.ndarray | None


class Rows(NamedTuple):
    """The rows of a run, and the account of the data they come from."""

    training: list[Example]
    heldout: list[Example]
    dataset: Dataset


def load_rows(config: ConfigDict, verifier: Verifier) -> Rows:
    """Reads the conversations to train on and those to hold out.

    Raises:
      InputError: a source cannot be used, or fewer rows are left to train on than a batch takes.
    """
    dataset = _load(config, config.data.conversations, verifier)
    rows, heldout = dataset.examples, config.heldout
    if heldout.conversations:
        apart = _load(config, heldout.conversations, verifier).examples
        return Rows(rows, apart[: heldout.rows or None], dataset)
    if heldout.rows > len(rows) - config.data.batch_size:
        raise InputError(
            f"heldout.rows is {heldout.rows}, which leaves fewer than data.batch_size {config.data.batch_size} of "
            f"{len(rows)} rows to train on"
        )
    chosen = set(np.random.default_rng((config.seed, len(rows))).permutation(len(rows))[: heldout.rows].tolist())
    training = [example for place, example in enumerate(rows) if place not in chosen]
    return Rows(training, [rows[place] for place in sorted(chosen)], dataset)


def first_drafter(config: ConfigDict, verifier: Verifier, examples: list[Example]) -> Start:
    """A drafter of random parameters, or the one that `drafter.init_from` names.

    Raises:
      InputError: the draft vocabulary's size is impossible, or the drafter to start from does not fit.
    """
    size = config.data.draft_vocabulary
    vocabulary = None
    if size:
        counted = config.data.vocabulary_conversations
        counted = _load(config, counted, verifier).examples if counted else examples
        vocabulary = frequent_tokens(_answers(counted), size, verifier.stop_tokens, verifier.config.vocab_size)
        share = uncovered_share(_answers(examples), vocabulary)
        print(f"draft vocabulary: {size} tokens, {share:.2%} of answers uncovered")
    if not config.drafter.init_from:
        shape = drafter_config(verifier.config, config.drafter.fc_bias)
        return Start(shape, init_drafter(shape, jax.random.key(config.seed)), vocabulary)
    loaded = read_drafter(Path(config.drafter.init_from), jnp.float32, verifier.config)
    check_fits(loaded, verifier)
    return Start(loaded.config, cast_params(loaded.params, jnp.float32), vocabulary)


def run_identity(
    config: ConfigDict, verifier: Verifier, examples: list[Example], vocabulary: np.ndarray | None
) -> dict[str, Any]:
    """What a checkpoint must share with the run that continues it."""
    fields = json.loads(config.to_json_best_effort())
    for name in (
        *("total_steps", "log_every", "checkpoint_every", "keep_checkpoints", "keep_best", "wandb_project"),
        *("mesh", "features", "verifier", "heldout"),
    ):
        fields.pop(name)
    for name in ("conversations", "vocabulary_conversations", "system_prompt"):
        fields["data"].pop(name)  # the digest of the examples says what they come to
    proposes = None if vocabulary is None else hashlib.sha256(vocabulary.tobytes()).hexdigest()[:16]
    return {
        **fields,
        "verifier_fingerprint": verifier.fingerprint,
        "conversations": digest(examples),
        "vocabulary": proposes,
    }


def _load(config: ConfigDict, sources: tuple[str, ...], verifier: Verifier) -> Dataset:
    data = config.data
    return load_examples(
        sources, verifier.tokenizer, verifier.stop_tokens, data.max_length, data.system_prompt, config.seed
    )


def _answers(examples: list[Example]) -> list[np.ndarray]:
    """The tokens of each example that the drafter learns to predict."""
    return [example.tokens[2:][example.supervised[:-2]] for example in examples]
