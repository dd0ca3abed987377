"""One cell of a table: a row (drafters and how they share a step) on a workload at a temperature."""

from typing import NamedTuple

from taps_jax.evaluation.trace import TracedAnswer


class Cell(NamedTuple):
    """Everything that tables, figures and the token view of one cell are made from.

    Attributes:
      row: the row's name.
      specialists: names of the drafters that the row composes; `Steps.chosen` and the bits of `origin` count these.
      compose: how they share a step, a value of `Composition`.
      nodes: tree nodes that the verifier checks per step.
      workload: its name.
      temperature: 0 is greedy.
      answers: traces in the order of the questions, then turns.
      questions: texts of the questions by (question_id, turn).
      pieces: for every generated token its text, by (question_id, turn).
      correct: whether the final answer is the reference, by question_id; questions without a reference are absent.
      speed: tokens per second of real decoding and of plain decoding in the same run, None when only replayed.
    """

    row: str
    specialists: tuple[str, ...]
    compose: str
    nodes: int
    workload: str
    temperature: float
    answers: tuple[TracedAnswer, ...]
    questions: dict[tuple[str, int], str]
    pieces: dict[tuple[str, int], tuple[str, ...]]
    correct: dict[str, bool]
    speed: tuple[float, float] | None
