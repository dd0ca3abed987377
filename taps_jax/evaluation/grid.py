"""One table: rows of drafters on workloads at temperatures, from one loaded verifier.

Every text is decoded once, plainly and batched. Speculative decoding would not change it, so what a row's drafters
would have had accepted follows from drafting along the text (`replaying`); some answers are decoded for real to check.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from taps_jax.checkpoints.verifier import Verifier
from taps_jax.data.questions import Question
from taps_jax.evaluation.answering import Recipe, plain_engine, write_answers
from taps_jax.evaluation.plan import Plan, PlannedRow, weights_hash
from taps_jax.evaluation.replaying import replay_answer
from taps_jax.evaluation.store import Answers, StoredAnswer, StoredCell, Traces, fingerprint
from taps_jax.evaluation.trace import TracedAnswer
from taps_jax.loading import DEFAULT_COMPOSITION, speculative_decoder
from taps_jax.speculative.tree import TreeShape

_ANSWERS_A_PART = 16


class Column(NamedTuple):
    """A workload at a temperature, whose texts all rows share.

    Attributes:
      workload: its name.
      questions: those used.
      recipe: how they are put and answered.
      answers: the file of answers in the working folder.
      key: stands for what decides the answers.
    """

    workload: str
    questions: tuple[Question, ...]
    recipe: Recipe
    answers: str
    key: str

    @property
    def turns(self) -> int:
        return sum(len(question.turns) for question in self.questions)


@dataclasses.dataclass(frozen=True)
class Grid:
    """What a run computes, and where it keeps it.

    Attributes:
      workdir: the working folder.
      verifier: shared by all rows.
      plan: drafters and rows.
      shape: size of every specialist's tree.
      columns: in the table's order.
      batch_size: questions answered at once.
    """

    workdir: Path
    verifier: Verifier
    plan: Plan
    shape: TreeShape
    columns: tuple[Column, ...]
    batch_size: int

    def cell(self, row: PlannedRow, column: Column) -> StoredCell:
        """Where a row's traces of a column are; another tree, other weights or questions give another place."""
        weights = [weights_hash(drafter) for drafter in self.plan.members(row)]
        ids = [str(question.question_id) for question in column.questions]
        key = fingerprint(column.key, ids, str(self.shape), row.row.composition, row.names, weights)
        return StoredCell(
            row=row.label,
            specialists=row.names,
            compose=row.row.composition,
            nodes=row.row.composition.num_nodes(self.shape, len(row.names)),
            workload=column.workload,
            temperature=column.recipe.temperature,
            answers=column.answers,
            traces=f"traces/{key}",
        )

    def stored(self, column: Column) -> list[StoredAnswer]:
        """The column's answers in the order of its questions, then turns."""
        found = Answers(self.workdir / column.answers).found
        keys = (
            (str(question.question_id), turn) for question in column.questions for turn in range(len(question.turns))
        )
        return [found[key] for key in keys]


def _keys(column: Column) -> list[tuple[str, int]]:
    return [(str(question.question_id), turn) for question in column.questions for turn in range(len(question.turns))]


def make_columns(
    verifier: Verifier,
    workloads: dict[str, Sequence[Question]],
    recipes: Sequence[Recipe],
    num_questions: int | None = None,
) -> tuple[Column, ...]:
    """Every workload by every recipe. Answers are shared between runs that use more or fewer of the same questions."""
    columns = []
    for (name, questions), recipe in itertools.product(workloads.items(), recipes):
        texts = [[str(question.question_id), *question.turns] for question in questions]
        key = fingerprint(verifier.fingerprint, verifier.stop_tokens, texts, recipe)
        file = f"answers/{name}-{recipe.temperature:g}-{key}.jsonl"
        columns.append(Column(name, tuple(questions[:num_questions]), recipe, file, key))
    return tuple(columns)


def answer(grid: Grid) -> Iterator[None]:
    """Writes the answers that are missing; yields after each."""
    for column in grid.columns:
        answers = Answers(grid.workdir / column.answers)
        make_engine = plain_engine(grid.verifier, grid.batch_size, column.recipe.max_new_tokens)
        for _ in write_answers(make_engine, grid.verifier, column.questions, column.recipe, answers):
            yield


def missing_answers(grid: Grid) -> int:
    """How many answers there are still to write."""
    return sum(len(set(_keys(column)) - Answers(grid.workdir / column.answers).found.keys()) for column in grid.columns)


def replay(grid: Grid) -> Iterator[None]:
    """Writes the traces that are missing, all rows of an answer at once; yields after each answer."""
    models, weights = speculative_decoder(grid.verifier, grid.plan.drafters, grid.shape, DEFAULT_COMPOSITION)
    for column, number, rows in _missing_parts(grid):
        answers = grid.stored(column)[number * _ANSWERS_A_PART : (number + 1) * _ANSWERS_A_PART]
        traced: dict[str, list[TracedAnswer]] = {row.label: [] for row in rows}
        for stored in answers:
            steps = replay_answer(models, weights, {row.label: row.row for row in rows}, stored.prompt, stored.tokens)
            for label, found in steps.items():
                traced[label].append(TracedAnswer(*stored.key, stored.tokens, found))
            yield
        for row in rows:
            Traces(grid.workdir / grid.cell(row, column).traces).write(number, traced[row.label])


def missing_traces(grid: Grid) -> int:
    """How many answers there are still to replay."""
    return sum(
        min(_ANSWERS_A_PART, column.turns - number * _ANSWERS_A_PART) for column, number, _ in _missing_parts(grid)
    )


def _missing_parts(grid: Grid) -> Iterator[tuple[Column, int, list[PlannedRow]]]:
    for column in grid.columns:
        folders = [(row, Traces(grid.workdir / grid.cell(row, column).traces)) for row in grid.plan.rows]
        for number in range(-(-column.turns // _ANSWERS_A_PART)):
            rows = [row for row, traces in folders if not traces.part(number).exists()]
            if rows:
                yield column, number, rows
