"""Training conversations whose answers the verifier writes itself."""

from collections.abc import Iterable, Iterator
from typing import Any

from taps_jax.data.answering import Answer


def conversation_rows(answers: Iterable[Answer], stop_tokens: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """A conversation row for every question, when its last turn is answered.

    Yields:
      {"id", "category", "messages", "complete"}. `complete` is false when the last answer was cut short, so that
      training does not take the cut for the verifier's end of turn.
    """
    for answer in answers:
        if answer.last:
            yield {
                "id": answer.question.question_id,
                "category": answer.question.category,
                "messages": list(answer.messages),
                "complete": answer.completion.tokens[-1] in stop_tokens,
            }
