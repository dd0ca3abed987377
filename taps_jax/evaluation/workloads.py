"""The benchmarks' questions: from the hub, from a folder of files, or the small ones that come with the package."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from taps_jax.assets import ASSETS
from taps_jax.data.jsonl import read_rows
from taps_jax.data.questions import Question, read_questions
from taps_jax.errors import InputError

EMBEDDED = ("mini_mt_bench", "mini_gsm8k", "mini_math_500", "mini_svamp")
_SUFFIXES = ("jsonl", "json", "csv", "parquet")


class _Source(NamedTuple):
    """Where a benchmark is on the hub, and which of its columns hold question and reference."""

    path: str
    config: str | None
    split: str
    question: tuple[str, ...]
    reference: str | None


_HUB = {
    "mt_bench": _Source("HuggingFaceH4/mt_bench_prompts", None, "train", ("prompt",), "reference"),
    "gsm8k": _Source("openai/gsm8k", "main", "test", ("question",), "answer"),
    "math_500": _Source("HuggingFaceH4/MATH-500", None, "test", ("problem",), "answer"),
    "svamp": _Source("ChilleD/SVAMP", None, "test", ("Body", "Question"), "Answer"),
}
NAMES = (*_HUB, *EMBEDDED)


def load_workload(name: str, data_dir: Path | None = None) -> list[Question]:
    """The questions of a benchmark.

    Args:
      name: mt_bench, gsm8k, math_500 or svamp; or mini_ and one of these, which come with the package; with `data_dir`
        any name of a file there.
      data_dir: a folder with NAME.jsonl in MT-Bench format, or NAME.jsonl, .json, .csv or .parquet with the original
        datasets' fields.
    Raises:
      InputError: there is no such workload, or its rows are not questions; the message names the row.
    """
    if name in EMBEDDED:
        return read_questions(ASSETS / "questions" / f"{name}.jsonl")
    if data_dir is not None:
        for suffix in _SUFFIXES:
            path = data_dir / f"{name}.{suffix}"
            if path.is_file():
                return _read_file(path, _HUB.get(name))
        raise InputError(f"{data_dir}: no {name}.jsonl, .json, .csv or .parquet")
    if name not in _HUB:
        raise InputError(f"workload is {name!r}, expected one of {', '.join(NAMES)}, or a file's name with --data_dir")
    return _questions(_HUB[name], _hub_rows(name, _HUB[name]))


def _hub_rows(name: str, source: _Source) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets

    try:
        rows = datasets.load_dataset(source.path, source.config, split=source.split)
    except Exception as error:  # the hub client raises many kinds: no network, no access, no such dataset
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"workload {name} could not be had from the hub ({source.path}): {reason}; "
            f"--data_dir=FOLDER reads {name}.jsonl there instead"
        ) from error
    return ((f"{source.path}, row {number}", row) for number, row in enumerate(rows))


def _read_file(path: Path, source: _Source | None) -> list[Question]:
    rows = list(_READERS[path.suffix](path))
    if not rows or source is None or "turns" in rows[0][1]:
        if path.suffix != ".jsonl":
            raise InputError(f"{path}: no rows with the fields of a known benchmark")
        return read_questions(path)
    return _questions(source, rows)


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{path}: expected a list of objects")
    return ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))


def _csv_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        for row in reader:
            yield f"{path}, line {reader.line_num}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise InputError(f"{path}: not a Parquet file: {error}") from error
    return ((f"{path}, row {number}", row) for number, row in enumerate(rows))


_READERS: dict[str, Callable[[Path], Iterable[tuple[str, dict[str, Any]]]]] = {
    ".jsonl": read_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
}


def _questions(source: _Source, rows: Iterable[tuple[str, dict[str, Any]]]) -> list[Question]:
    """Rows with a benchmark's original fields; numbered from 0 in their order where they carry no number."""
    found: list[Question] = []
    seen: dict[int | str, str] = {}
    for number, (place, row) in enumerate(rows):
        missing = [field for field in source.question if field not in row]
        if missing:
            raise InputError(f"{place}: no field {missing[0]!r}, found {', '.join(map(str, row))}")
        parts = [row[field] for field in source.question]
        turns = parts[0] if isinstance(parts[0], list) else [_joined(parts)]
        if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise InputError(f"{place}: {' and '.join(source.question)} is empty or not text")
        identity = row.get("question_id", row.get("prompt_id", number))
        if identity in seen:
            raise InputError(f"{place}: question_id {identity!r} was already used in {seen[identity]}")
        seen[identity] = place
        reference = row.get(source.reference)
        references = tuple(
            map(str, reference if isinstance(reference, list) else [reference] * (reference is not None))
        )
        category = row.get("category") or row.get("subject") or row.get("Type") or "math"
        found.append(Question(identity, str(category), tuple(turns), tuple(map(str, references))))
    if not found:
        raise InputError(f"{source.path}: no questions found")
    return found


def _joined(parts: list[Any]) -> str:
    """SVAMP keeps a story and its question apart, with or without a full stop between them."""
    texts = [str(part).strip() for part in parts]
    return " ".join(text if text.endswith((".", "?", "!")) or text is texts[-1] else f"{text}." for text in texts)
