"""Reading and writing JSON lines, with errors that name the line."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from taps_jax.errors import InputError
from taps_jax.files import replacing


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place, object) for every line that is not blank; `place` names file and line for messages.

    Raises:
      InputError: the file cannot be read, or a line is not a JSON object.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON strings may hold other line separators as they are
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{place}: not valid JSON: {error}") from error
        if not isinstance(row, dict):
            raise InputError(f"{place}: expected a JSON object, found {type(row).__name__}")
        yield place, row


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes one JSON object per line; the file appears only when complete."""
    with replacing(path) as temporary:
        temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
