"""Answers that repeat themselves: easy to draft, so they flatter a drafter."""

from collections.abc import Sequence

LOOPING_SHARE = 0.3
_LENGTH = 8


def repeated_share(tokens: Sequence[int]) -> float:
    """The share of an answer's 8-grams that it has had before; 0 if it is shorter."""
    grams = [tuple(tokens[start : start + _LENGTH]) for start in range(len(tokens) - _LENGTH + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def is_looping(tokens: Sequence[int]) -> bool:
    """Whether more than 30% of an answer's 8-grams are repeated."""
    return repeated_share(tokens) > LOOPING_SHARE
