"""From rows to train on to batches on devices."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from taps_jax.data.batches import Example, batch_rows, pad_rows
from taps_jax.errors import InputError
from taps_jax.training.features import FeatureSource
from taps_jax.training.step import Batch

_LENGTHS = 4  # a run compiles its step for at most so many row lengths
_LENGTH_STEP = 32


class Order(NamedTuple):
    """How rows become batches.

    Attributes:
      size: rows of a batch, over all devices.
      parts: that its rows are split into, one after another.
      window: batches among which rows of about one length are put together.
      seed: of the order of rows.
    """

    size: int
    parts: int
    window: int
    seed: int


class Feeder:
    """The batches of a run.

    Args:
      order: which rows come when.
      examples: the rows.
      source: of their features.
      sharding: of the batches' leaves [A, b, ...].
    Raises:
      InputError: there are fewer rows than a batch takes.
    """

    def __init__(self, order: Order, examples: list[Example], source: FeatureSource, sharding: NamedSharding):
        if order.size > len(examples):
            raise InputError(f"data.batch_size is {order.size}, but there are only {len(examples)} rows to train on")
        self._order, self._examples, self._source, self._sharding = order, examples, source, sharding
        self._lengths = np.array([len(example.tokens) for example in examples], np.int32)

    def after(self, step: int) -> Iterator[tuple[np.ndarray, Batch]]:
        """The rows of each batch from the one after `step` on, and the batch."""
        size, parts, window, seed = self._order
        for epoch, rows in batch_rows(self._lengths, size, seed, step, window):
            chosen = [self._examples[row] for row in rows]
            padded = padded_length(int(self._lengths[rows].max()), int(self._lengths.max()))
            tokens = pad_rows([example.tokens for example in chosen], padded)
            leaves = {
                "tokens": tokens,
                "features": self._source(rows, tokens),
                "supervised": pad_rows([example.supervised for example in chosen], padded),
                "length": self._lengths[rows],
                "row": rows.astype(np.int32),
            }
            split = {name: leaf.reshape(parts, -1, *leaf.shape[1:]) for name, leaf in leaves.items()}
            yield rows, Batch(**jax.device_put(split, self._sharding), epoch=jnp.int32(epoch))


def padded_length(longest: int, longest_of_all: int) -> int:
    """What rows of a batch are padded to: one of four lengths, the greatest of which every row fits in."""
    most = -(-longest_of_all // _LENGTH_STEP) * _LENGTH_STEP
    step = -(-most // (_LENGTHS * _LENGTH_STEP)) * _LENGTH_STEP
    return min(-(-longest // step) * step, most)
