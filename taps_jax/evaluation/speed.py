"""Measured decoding speed of the cells of a grid, in speed.csv."""

import csv
from pathlib import Path
from typing import NamedTuple

from taps_jax.files import replacing


class Speed(NamedTuple):
    """How fast a row decoded real answers, and how fast plain decoding did in the same run.

    Attributes:
      row, workload, temperature: the cell.
      answers: how many were decoded.
      identical: how many of them had the tokens of plain decoding.
      tokens, seconds: of the row.
      plain_tokens, plain_seconds: of plain decoding.
    """

    row: str
    workload: str
    temperature: float
    answers: int
    identical: int
    tokens: int
    seconds: float
    plain_tokens: int
    plain_seconds: float

    @property
    def pair(self) -> tuple[float, float]:
        """Tokens per second of the row and of plain decoding."""
        return self.tokens / self.seconds, self.plain_tokens / self.plain_seconds


class Speeds:
    """The speeds in a working folder by (row, workload, temperature)."""

    def __init__(self, workdir: Path):
        self._path = workdir / "speed.csv"
        self.found: dict[tuple[str, str, float], Speed] = {}
        if self._path.exists():
            with self._path.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    kinds = Speed.__annotations__
                    speed = Speed(**{name: kinds[name](value) for name, value in row.items()})
                    self.found[speed[:3]] = speed

    def add(self, speeds: list[Speed]) -> None:
        """Writes speeds, in place of older ones of the same cells."""
        self.found |= {speed[:3]: speed for speed in speeds}
        with replacing(self._path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(Speed._fields)
            writer.writerows(self.found.values())
