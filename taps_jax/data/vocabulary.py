"""Draft vocabularies: the token ids that a drafter may propose."""

from collections.abc import Iterable

import numpy as np

from taps_jax.errors import InputError


def frequent_tokens(
    answers: Iterable[np.ndarray], size: int, stop_tokens: tuple[int, ...], vocab_size: int
) -> np.ndarray:
    """The `size` most frequent tokens of the training answers, stop tokens always, filled up by token id.

    Args:
      answers: token ids of each training answer.
      size: W.
      stop_tokens: ids that end an answer.
      vocab_size: V.
    Returns:
      [W] int32, ascending.
    Raises:
      InputError: W leaves no room for the stop tokens or exceeds V.
    """
    if not len(stop_tokens) <= size <= vocab_size:
        raise InputError(f"draft vocabulary of {size} tokens, expected {len(stop_tokens)} to {vocab_size}")
    counts = np.zeros(vocab_size, np.int64)
    for tokens in answers:
        np.add.at(counts, tokens, 1)
    counts[list(stop_tokens)] = np.iinfo(np.int64).max
    # A stable sort keeps equally frequent tokens, and those that never occur, in the order of their ids.
    order = np.argsort(-counts, kind="stable")
    return np.sort(order[:size]).astype(np.int32)


def uncovered_share(answers: Iterable[np.ndarray], vocabulary: np.ndarray) -> float:
    """The share of the answers' tokens that `vocabulary` lacks."""
    tokens = np.concatenate(list(answers))
    return float(np.mean(~np.isin(tokens, vocabulary)))
