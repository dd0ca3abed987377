"""Training batches: padded rows in an order fixed by (seed, epoch), addressed by one integer position."""

import dataclasses
import hashlib
from collections.abc import Iterator

import numpy as np

from taps_jax.data.tokenize import Encoded, supervised_positions


@dataclasses.dataclass(frozen=True)
class Example:
    """One row to train on: tokens [T] int32 and supervised [T] bool."""

    tokens: np.ndarray
    supervised: np.ndarray


def to_example(encoded: Encoded, max_length: int) -> Example | None:
    """Cuts a conversation to `max_length` tokens; None if no supervised position is left."""
    supervised = supervised_positions(encoded.answer[:max_length])
    return Example(encoded.tokens[:max_length], supervised) if supervised.any() else None


def digest(examples: list[Example]) -> str:
    """Identifies the examples and their order."""
    found = hashlib.sha256()
    for example in examples:
        found.update(len(example.tokens).to_bytes(4, "little"))
        found.update(example.tokens.tobytes() + example.supervised.tobytes())
    return found.hexdigest()[:16]


def batch_rows(num_examples: int, batch_size: int, seed: int, position: int) -> Iterator[tuple[int, np.ndarray]]:
    """Endless batches of example indices from batch number `position` on.

    The order of an epoch is a permutation drawn from (seed, epoch); its incomplete last batch is left out, so every
    batch has the same shape. Nothing depends on the number of devices.

    Yields:
      The epoch, and [batch_size] example indices.
    """
    per_epoch = num_examples // batch_size
    while True:
        epoch, offset = divmod(position, per_epoch)
        order = np.random.default_rng((seed, epoch)).permutation(num_examples)
        for start in range(offset, per_epoch):
            yield epoch, order[start * batch_size : (start + 1) * batch_size]
            position += 1


def pad_rows(rows: list[np.ndarray], length: int) -> np.ndarray:
    """Stacks rows [t_i, ...] into [B, length, ...], zeros on the right."""
    out = np.zeros((len(rows), length, *rows[0].shape[1:]), rows[0].dtype)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return out
