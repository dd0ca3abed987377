"""Questions in MT-Bench format: one JSON object per line with an id, a category and one or more user turns."""

import dataclasses
from pathlib import Path

from taps_jax.data.jsonl import read_rows
from taps_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Question:
    """A question of one or more user turns; `reference` holds known answers, if any."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] = ()


def read_questions(path: Path) -> list[Question]:
    """Reads a questions file.

    Raises:
      InputError: a line is malformed, an id repeats, or there are no questions; the message names the line.
    """
    questions: list[Question] = []
    seen: dict[int | str, str] = {}
    for place, row in read_rows(path):
        identity, turns = row.get("question_id"), row.get("turns")
        if not isinstance(identity, int | str) or isinstance(identity, bool):
            raise InputError(f"{place}: question_id is {identity!r}, expected a number or a string")
        if identity in seen:
            raise InputError(f"{place}: question_id {identity!r} was already used in {seen[identity]}")
        if not isinstance(turns, list) or not turns:
            raise InputError(f"{place}: turns is {turns!r}, expected a list of at least one string")
        if not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise InputError(f"{place}: turns holds an item that is not a string or is empty")
        reference = row.get("reference") or []
        if not isinstance(reference, list):
            raise InputError(f"{place}: reference is {reference!r}, expected a list")
        seen[identity] = place
        questions.append(Question(identity, str(row.get("category", "")), tuple(turns), tuple(map(str, reference))))
    if not questions:
        raise InputError(f"{path}: no questions found")
    return questions
