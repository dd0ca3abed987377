"""Reading and writing JSON lines, with errors that name the line."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from taps_jax.errors import InputError


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place, object) for every line that is not blank; `place` names file and line for messages.

    Raises:
      InputError: the file cannot be read, or a line is not a JSON object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
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


class replacing:  # noqa: N801 - reads as a verb: with replacing(path) as temporary
    """A temporary name beside `path` that takes its place when the block ends without an error."""

    def __init__(self, path: Path):
        self._path = path
        self._temporary = path.with_name(path.name + ".part")

    def __enter__(self) -> Path:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return self._temporary

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            os.replace(self._temporary, self._path)
        else:
            self._temporary.unlink(missing_ok=True)
