"""Numbers about decoded answers."""

from collections.abc import Iterable
from typing import NamedTuple

from taps_jax.speculative.engine import Completion


class Totals(NamedTuple):
    """Sums over answers: generated tokens, those that verification steps committed, and the steps."""

    answers: int
    tokens: int
    committed: int
    steps: int

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per verification step, pooled; not a number if no step was taken.

        The token that a prompt's own pass yields needs no step and is not counted. Tokens after a stop or beyond the
        limit were never committed.
        """
        return self.committed / self.steps if self.steps else float("nan")


def totals(completions: Iterable[Completion]) -> Totals:
    """Sums over completions."""
    completions = list(completions)
    tokens = sum(len(completion.tokens) for completion in completions)
    return Totals(
        len(completions), tokens, tokens - len(completions), sum(completion.steps for completion in completions)
    )
