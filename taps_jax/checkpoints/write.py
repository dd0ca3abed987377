"""Writing safetensors in shards, a block of rows at a time."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from taps_jax.checkpoints.tensors import DTYPES, StoredTensor, is_finite
from taps_jax.errors import InputError

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclasses.dataclass(frozen=True)
class Output:
    """Where and how a checkpoint is written.

    Attributes:
      target: directory; must not exist, unless `force`.
      dtype: of all tensors; None keeps each one's.
      force: replaces an older checkpoint.
      max_shard_bytes: of a file; a tensor that is larger has one to itself.
      progress: wraps an iterable, as `cli.progress` does.
    """

    target: Path
    dtype: np.dtype | None = None
    force: bool = False
    max_shard_bytes: int = 5 * 10**9
    progress: Callable[[Iterable, str, int], Iterable] = lambda items, title, total: items


@dataclasses.dataclass(frozen=True)
class Written:
    """What was written: tensors, their parameters and bytes, and what is wrong with a tensor by its name."""

    tensors: int
    parameters: int
    nbytes: int
    problems: dict[str, str]


def parsed_size(text: str, name: str) -> int:
    """Bytes from `5GB` and the like.

    Raises:
      InputError: it is not a size; `name` says of what.
    """
    number, unit = text[:-2], text[-2:].upper()
    if unit not in _UNITS or not number.strip().isdigit() or int(number) < 1:
        raise InputError(f"{name} is {text!r}, expected a size such as 5GB or 500MB")
    return int(number) * _UNITS[unit]


def write_tensors(directory: Path, stem: str, tensors: dict[str, StoredTensor], output: Output) -> Written:
    """Writes `stem.safetensors`, or shards of it and their index.

    The safetensors library wants all tensors of a file in memory before it writes one; here each passes through in
    blocks, so that memory does not depend on the size of the model.

    Args:
      directory: exists.
      stem: of the file names.
      tensors: by the names that they get.
      output: how; the files go to `directory`, which takes its target's name later.
    Returns:
      Counts, and the problems of tensors that are not finite, or not after the change of type.
    """
    dtype = output.dtype
    size = lambda tensor: math.prod(tensor.shape) * (dtype or tensor.dtype).itemsize
    shards = _shards({name: size(tensor) for name, tensor in tensors.items()}, output.max_shard_bytes)
    files = [f"{stem}.safetensors"]
    if len(shards) > 1:
        files = [f"{stem}-{index:05}-of-{len(shards):05}.safetensors" for index in range(1, len(shards) + 1)]
    bar = iter(output.progress(tensors, "tensors", len(tensors)))
    problems: dict[str, str] = {}
    for file, names in zip(files, shards, strict=True):
        with (directory / file).open("wb") as out:
            out.write(_header({name: tensors[name] for name in names}, dtype))
            for name in names:
                next(bar)
                wrong = _write_blocks(out, tensors[name], dtype)
                if wrong:
                    problems[name] = wrong
    next(bar, None)
    total = sum(map(size, tensors.values()))
    if len(shards) > 1:
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (directory / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return Written(len(tensors), sum(math.prod(tensor.shape) for tensor in tensors.values()), total, problems)


def _write_blocks(out, tensor: StoredTensor, dtype: np.dtype | None) -> str | None:
    """Writes a tensor's data, and says what is wrong with it."""
    finite, fits = True, True
    for block in tensor.blocks():
        finite = finite and is_finite(block)
        if dtype is not None and dtype != block.dtype:
            with np.errstate(over="ignore"):
                block = block.astype(dtype)
            fits = fits and (not finite or is_finite(block))
        out.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8))
    if not finite:
        return "holds values that are not finite"
    return None if fits else f"holds values beyond the range of {dtype}"


def _shards(sizes: dict[str, int], most: int) -> list[list[str]]:
    shards, room = [[]], most
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= size
    return shards


def _header(tensors: dict[str, StoredTensor], dtype: np.dtype | None) -> bytes:
    """Length and JSON of a safetensors header, padded so that the data is aligned."""
    entries, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        kind = dtype or tensor.dtype
        end = offset + math.prod(tensor.shape) * kind.itemsize
        entries[name] = {"dtype": _NAMES[kind], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
