"""A grid's working folder: answers and traces as they finish, so that a run that was stopped goes on where it was.

    grid.json                            settings, and which files each cell is made from; written before any of them
    answers/WORKLOAD-TEMPERATURE-HASH.jsonl   an answered turn a line, as it finishes
    traces/HASH/00000.parquet            the steps of a row along some answers
    vocabulary.json                      the text of every token id
    checks/HASH.json                     how real decoding compared with a row's traces
    speed.csv                            measured times, kept apart since they alone differ between runs

Hashes cover everything that decides the content, so what is found by its hash can be used, and nothing else is.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet

from taps_jax.data.jsonl import read_rows
from taps_jax.errors import InputError
from taps_jax.evaluation.cells import Cell
from taps_jax.evaluation.speed import Speeds
from taps_jax.evaluation.trace import Steps, TracedAnswer, from_table, to_table
from taps_jax.files import replacing

_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class StoredAnswer:
    """One answered turn.

    Attributes:
      question_id: as text.
      turn: which of the question's.
      question: the user's text.
      prompt: ids of the conversation up to the answer.
      tokens: generated ids, the stop token included.
      pieces: the text of each of them.
      correct: whether it gives the reference's answer; None where there is none.
    """

    question_id: str
    turn: int
    question: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    correct: bool | None

    @property
    def key(self) -> tuple[str, int]:
        return self.question_id, self.turn


@dataclasses.dataclass(frozen=True)
class StoredCell:
    """Where one cell's parts are; the fields before `answers` are those of `Cell`."""

    row: str
    specialists: tuple[str, ...]
    compose: str
    nodes: int
    workload: str
    temperature: float
    answers: str
    traces: str


def fingerprint(*parts: Any) -> str:
    """12 hexadecimal digits that stand for values made of what JSON knows."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


class Answers:
    """The answers of one workload at one temperature; each is on disk when `add` returns."""

    def __init__(self, path: Path):
        """Reads what is there; a last line that was cut off is dropped."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            whole, newline, cut = path.read_bytes().rpartition(b"\n")
            if cut:
                with replacing(path) as temporary:
                    temporary.write_bytes(whole + newline)
        rows = (row for _, row in read_rows(path)) if path.exists() else ()
        self.found = {answer.key: answer for answer in map(_answer_from_row, rows)}

    def add(self, answer: StoredAnswer) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(answer), ensure_ascii=False) + "\n")
        self.found[answer.key] = answer


def _answer_from_row(row: dict[str, Any]) -> StoredAnswer:
    return StoredAnswer(**{name: tuple(value) if isinstance(value, list) else value for name, value in row.items()})


class Traces:
    """The steps of one cell, in parts of some answers each."""

    def __init__(self, folder: Path):
        self._folder = folder

    def part(self, number: int) -> Path:
        return self._folder / f"{number:05}.parquet"

    def write(self, number: int, answers: Iterable[TracedAnswer]) -> None:
        with replacing(self.part(number)) as temporary:
            pyarrow.parquet.write_table(to_table(answers), temporary, compression="zstd")

    def read(self) -> dict[tuple[str, int], Steps]:
        """Steps by (question_id, turn); answers of one token have none."""
        tables = map(pyarrow.parquet.read_table, sorted(self._folder.glob("*.parquet")))
        return {key: steps for table in tables for key, steps in from_table(table)}


def write_vocabulary(workdir: Path, pieces: Sequence[str]) -> None:
    """Keeps the text of every token id, so that a report can be made without the verifier."""
    with replacing(workdir / "vocabulary.json") as temporary:
        temporary.write_text(json.dumps(pieces, ensure_ascii=False), encoding="utf-8")


def read_vocabulary(workdir: Path) -> list[str]:
    """The text of every token id."""
    return json.loads((workdir / "vocabulary.json").read_text(encoding="utf-8"))


def write_grid(
    workdir: Path, settings: dict[str, Any], questions: dict[str, list[str]], cells: Sequence[StoredCell]
) -> None:
    """Says what the grid consists of.

    Args:
      workdir: the working folder.
      settings: what the report tells about the run.
      questions: ids by workload, in order.
      cells: rows, workloads and temperatures in order.
    """
    content = {
        "format": _FORMAT,
        "settings": settings,
        "questions": questions,
        "cells": [dataclasses.asdict(cell) for cell in cells],
    }
    with replacing(workdir / "grid.json") as temporary:
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


class Cells(Sequence[Cell]):
    """The cells of a working folder, each read when it is asked for: together they may not fit in memory."""

    def __init__(self, workdir: Path, questions: dict[str, list[str]], cells: Sequence[StoredCell]):
        self._workdir, self._questions, self._cells = workdir, questions, cells
        self._speeds = Speeds(workdir).found

    def __len__(self) -> int:
        return len(self._cells)

    def __getitem__(self, index: int) -> Cell:
        stored = self._cells[index]
        answers = Answers(self._workdir / stored.answers).found
        steps = Traces(self._workdir / stored.traces).read()
        order = {identity: place for place, identity in enumerate(self._questions[stored.workload])}
        used = sorted((key for key in answers if key[0] in order), key=lambda key: (order[key[0]], key[1]))
        lacking = [key for key in used if len(answers[key].tokens) > 1 and key not in steps]
        if lacking or not used:
            raise InputError(
                f"{self._workdir / stored.traces}: {len(lacking)} of {len(used)} answers have no trace: run eval again"
            )
        speed = self._speeds.get((stored.row, stored.workload, stored.temperature))
        return Cell(
            row=stored.row,
            specialists=stored.specialists,
            compose=stored.compose,
            nodes=stored.nodes,
            workload=stored.workload,
            temperature=stored.temperature,
            answers=tuple(TracedAnswer(*key, answers[key].tokens, steps.get(key)) for key in used),
            questions={key: answers[key].question for key in used},
            pieces={key: answers[key].pieces for key in used},
            correct={key[0]: answers[key].correct for key in used if answers[key].correct is not None},
            speed=speed and speed.pair,
        )

    def __iter__(self) -> Iterator[Cell]:
        return map(self.__getitem__, range(len(self)))


def load_cells(workdir: Path) -> tuple[dict[str, Any], Cells]:
    """The settings and cells of a grid that has been run.

    Raises:
      InputError: the folder holds none, or another version's.
    """
    path = workdir / "grid.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read, expected a working folder of eval --config: {error}") from error
    if content.get("format") != _FORMAT:
        raise InputError(f"{path}: format is {content.get('format')!r}, expected {_FORMAT}")
    cells = [StoredCell(**{**cell, "specialists": tuple(cell["specialists"])}) for cell in content["cells"]]
    return content["settings"], Cells(workdir, content["questions"], cells)
