"""Tensors in files, described without being read: safetensors and PyTorch's, in one file or in shards.

What is wrong with a set of files is collected beside the tensors that can be read, so that all is told at once.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from taps_jax.errors import InputError

# Names in a safetensors header of the types that weights may have.
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
_BLOCK_BYTES = 32 * 2**20
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
      shape: its shape.
      dtype: its type.
      read: the part that an index (an int, a slice or a tuple of them) selects.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Any], np.ndarray]

    def blocks(self) -> Iterable[np.ndarray]:
        """The tensor in pieces of whole rows, none of more than about 32 MiB unless a row is."""
        if not self.shape:
            yield self.read(...)
            return
        row = max(1, math.prod(self.shape[1:]) * self.dtype.itemsize)
        step = max(1, _BLOCK_BYTES // row)
        for start in range(0, self.shape[0], step):
            yield self.read(slice(start, min(start + step, self.shape[0])))


@dataclasses.dataclass
class StoredTensors:
    """Tensors by name, and what is wrong with the files that hold them."""

    tensors: dict[str, StoredTensor] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)

    def add(self, name: str, tensor: StoredTensor) -> None:
        if name in self.tensors:
            self.problems.append(f"tensor {name} is stored twice")
        self.tensors[name] = tensor

    def renamed(self, rename: Callable[[str], str | None]) -> "StoredTensors":
        """The same under other names; what `rename` gives None for is left out."""
        result = StoredTensors(problems=list(self.problems))
        for name, tensor in self.tensors.items():
            new = rename(name)
            if new is not None:
                result.add(new, tensor)
        return result


def described(problems: list[str]) -> str:
    """The first of many problems, and how many more there are."""
    more = len(problems) - _SHOWN
    return "; ".join(problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def is_finite(value: np.ndarray) -> bool:
    """Whether no entry is infinite or not a number; bfloat16 included."""
    flat = value.reshape(-1)
    step = _BLOCK_BYTES // 4
    parts = (flat[start : start + step] for start in range(0, flat.size, step))
    return all(np.isfinite(part.astype(np.float32, copy=False)).all() for part in parts)


def stored_in(directory: Path, stem: str, stack: ExitStack) -> StoredTensors:
    """The tensors of a directory that saves them as transformers does.

    Args:
      directory: where to look.
      stem: of the safetensors files, such as `model` for `model.safetensors` or its shards.
      stack: closes the files.
    Raises:
      InputError: there are no weights, or an index is not one.
    """
    candidates = [(f"{stem}.safetensors", add_safetensors)]
    if stem == "model":
        candidates.append(("pytorch_model.bin", add_torch))
    for file, add in candidates:
        index = directory / f"{file}.index.json"
        result = StoredTensors()
        if (directory / file).exists():
            add(directory / file, result, stack)
            return result
        if index.exists():
            _add_shards(directory, index, add, result, stack)
            return result
    wanted = " nor ".join(f"{file} nor {file}.index.json" for file, _ in candidates)
    raise InputError(f"{directory}: no weights found, neither {wanted}")


def add_safetensors(path: Path, result: StoredTensors, stack: ExitStack, dtypes: dict = DTYPES) -> None:
    """Adds the tensors of a safetensors file, or the problem that it is not one; `dtypes` are those allowed."""
    try:
        duplicate = _duplicate_key(path)
        file = stack.enter_context(safe_open(path, framework="numpy"))
        names = list(file.keys())
    except (OSError, SafetensorError, ValueError) as error:
        result.problems.append(f"{path.name}: not a readable safetensors file: {_line(error)}")
        return
    if duplicate:
        result.problems.append(f"{path.name}: tensor {duplicate} is stored twice")
    for name in names:
        tensor = file.get_slice(name)
        kind = tensor.get_dtype()
        if kind not in dtypes:
            result.problems.append(f"{name} is of type {kind}, expected {', '.join(dtypes)}")
            continue
        shape = tuple(tensor.get_shape())
        read = lambda index, file=file, name=name, shape=shape: _read_slice(file, name, shape, index)
        result.add(name, StoredTensor(shape, dtypes[kind], read))


def add_torch(path: Path, result: StoredTensors, stack: ExitStack) -> None:
    """Adds the tensors of a file that `torch.save` wrote, mapped into memory and without unpickling objects.

    Raises:
      InputError: torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise InputError(f"{path}: needs torch to be read, run: pip install torch") from error
    types = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    try:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files from before torch 1.6 cannot be mapped
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling raises many kinds
        result.problems.append(f"{path.name}: not a PyTorch file of tensors only: {_line(error)}")
        return
    if not isinstance(state, dict):
        result.problems.append(f"{path.name}: holds a {type(state).__name__}, expected tensors by name")
        return
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in types:
            found = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            result.problems.append(f"{name} is of type {found}, expected {', '.join(DTYPES)}")
            continue
        dtype = DTYPES[types[tensor.dtype]]
        read = lambda index, tensor=tensor, dtype=dtype: _as_numpy(tensor[index], dtype)
        result.add(str(name), StoredTensor(tuple(tensor.shape), dtype, read))


def _add_shards(directory: Path, index: Path, add: Callable, result: StoredTensors, stack: ExitStack) -> None:
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{index}: weight_map is missing, or the file is not JSON") from error
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise InputError(f"{index}: weight_map is not an object of file names")
    for file in sorted(set(places.values())):
        if Path(file).name != file:
            result.problems.append(f"{index.name} names {file!r}, expected a file beside it")
        elif not (directory / file).exists():
            result.problems.append(f"{index.name} names {file}, which is absent")
        else:
            found = StoredTensors()
            add(directory / file, found, stack)
            result.problems += found.problems
            for name, tensor in found.tensors.items():
                if places.get(name) != file and name in places:
                    result.problems.append(f"{name} is in {file}, {index.name} says {places[name]}")
                result.add(name, tensor)
            if not found.problems:
                lost = [name for name, place in places.items() if place == file and name not in found.tensors]
                result.problems += [f"{name} is not in {file}, where {index.name} puts it" for name in lost]


def _read_slice(file, name: str, shape: tuple[int, ...], index: Any) -> np.ndarray:
    if not shape or index is ...:
        return file.get_tensor(name)
    return file.get_slice(name)[index]


def _as_numpy(tensor, dtype: np.dtype) -> np.ndarray:
    import torch

    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]  # torch has no bfloat16 to give to NumPy
    return tensor.contiguous().view(bits).numpy().view(dtype)


def _duplicate_key(path: Path) -> str | None:
    """A name that the header has twice; the safetensors library keeps one of them silently."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise ValueError("the header is longer than the file")
        header = file.read(size)
    twice: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict:
        names = [name for name, _ in pairs]
        twice.extend(name for name in set(names) if names.count(name) > 1)
        return dict(pairs)

    if len(header) > 4_000_000:  # names of half a million tensors: not worth a second parse
        return None
    json.loads(header, object_pairs_hook=collect)
    return twice[0] if twice else None


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
