"""Where conversations come from: local files, datasets of the hub, and mixtures of both by count."""

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from taps_jax.data.conversations import Conversation, Counts, clean
from taps_jax.errors import InputError

# The paper's two training sets.
HUB_NAMES = {"sharegpt": "Aeala/ShareGPT_Vicuna_unfiltered", "mathinstruct": "TIGER-Lab/MathInstruct"}
_SUFFIXES = (".jsonl", ".json", ".parquet")


class Part(NamedTuple):
    """A source and how many conversations are taken from it; None takes all, in their order."""

    source: str
    count: int | None


def parsed_mixture(text: str) -> list[Part]:
    """`A:1000+B:2000` as parts; a part without a number takes all.

    Raises:
      InputError: a part is empty or its number is 0.
    """
    parts = []
    for given in text.split("+"):
        counted = re.fullmatch(r"(.+):(\d+)", given.strip())
        source, count = (counted[1], int(counted[2])) if counted else (given.strip(), None)
        if not source or count == 0:
            raise InputError(f"data.conversations has {text!r}, expected SOURCE:COUNT, joined by +")
        parts.append(Part(source, count))
    return parts


def read_mixture(text: str, seed: int, counts: Counts) -> Iterator[Conversation]:
    """The cleaned conversations of a mixture; a part with a number is drawn without replacement, from `seed`.

    Raises:
      InputError: a source cannot be read, has no usable conversation, or fewer than asked for.
    """
    for index, (source, count) in enumerate(parsed_mixture(text)):
        rows = read_source(source)
        if count is None:
            before = counts.kept
            yield from clean(rows, counts)
            if counts.kept == before:
                raise InputError(f"{source}: no usable conversation found:\n{counts.table()}")
            continue
        rows = rows if hasattr(rows, "__getitem__") else list(rows)
        order = np.random.default_rng((seed, index)).permutation(len(rows))
        usable = clean((rows[int(place)] for place in order), counts)
        drawn = list(itertools.islice(usable, count))
        if len(drawn) < count:
            raise InputError(
                f"{source}: {count:,} conversations asked for, {len(drawn):,} of {len(rows):,} rows are usable"
            )
        yield from drawn


def read_source(source: str) -> Iterable[Any]:
    """The rows of a local file, or of a dataset of the hub (its split `train`); broken lines are rows that are text.

    Raises:
      InputError: there is no such file or dataset, or it cannot be read.
    """
    path = Path(source)
    if path.suffix in _SUFFIXES or path.exists():
        return _read_file(path)
    import datasets

    name = HUB_NAMES.get(source, source)
    try:
        return datasets.load_dataset(name, split="train")
    except Exception as error:  # the hub client raises many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{source!r} is not a file ({', '.join(_SUFFIXES)}), and as a dataset {name} it failed: {reason}"
        ) from error


def _read_file(path: Path) -> Iterable[Any]:
    if path.suffix not in _SUFFIXES:
        raise InputError(f"{path}: expected a file that ends in {', '.join(_SUFFIXES)}")
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_table(path).to_pylist()
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return (_row(line) for line in text.split("\n") if line.strip())
        rows = json.loads(text)
    except (OSError, ValueError) as error:  # undecodable, not JSON, and pyarrow's kinds are ValueErrors
        raise InputError(f"{path}: cannot be read: {error}") from error
    if not isinstance(rows, list):
        raise InputError(f"{path}: expected a list of rows, found {type(rows).__name__}")
    return rows


def _row(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return line
