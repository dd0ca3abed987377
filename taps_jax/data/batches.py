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


def batch_rows(
    lengths: np.ndarray, batch_size: int, seed: int, position: int, window: int = 1
) -> Iterator[tuple[int, np.ndarray]]:
    """Endless batches of example indices from batch number `position` on.

    The order of an epoch is a permutation drawn from (seed, epoch); its incomplete last batch is left out, so every
    batch has as many rows. Nothing depends on the number of devices.

    Args:
      lengths: [examples], tokens of each.
      batch_size: rows of a batch.
      seed: of the order.
      position: batches that came before.
      window: batches among which rows of about one length are put together; 1 leaves rows where chance put them.
    Yields:
      The epoch, and [batch_size] example indices.
    """
    per_epoch = len(lengths) // batch_size
    while True:
        epoch, offset = divmod(position, per_epoch)
        rng = np.random.default_rng((seed, epoch))
        order = rng.permutation(len(lengths))[: per_epoch * batch_size]
        if window > 1:
            order = np.concatenate(
                [_by_length(part, lengths, batch_size, rng) for part in _parts(order, window * batch_size)]
            )
        yield from ((epoch, rows) for rows in _parts(order[offset * batch_size :], batch_size))
        position += per_epoch - offset


def _by_length(rows: np.ndarray, lengths: np.ndarray, batch_size: int, rng: np.random.Generator) -> np.ndarray:
    """Rows sorted by length, in batches that come in random order."""
    batches = _parts(rows[np.argsort(lengths[rows], kind="stable")], batch_size)
    return np.concatenate([batches[place] for place in rng.permutation(len(batches))])


def _parts(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def pad_rows(rows: list[np.ndarray], length: int) -> np.ndarray:
    """Stacks rows [t_i, ...] into [B, length, ...], zeros on the right."""
    out = np.zeros((len(rows), length, *rows[0].shape[1:]), rows[0].dtype)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return out
