"""The verifier's features of training rows: computed in every step, or once into memory-mapped shards.

A cache folder holds `index.json` (what it belongs to and which rows each shard has) and one `.npy` file per shard with
the features of its rows one after another, [tokens, D], and beside it a `.crc32` file with its checksum. Shards appear
when complete, so an interrupted run goes on with the first one missing.
"""

import functools
import json
import shutil
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from taps_jax import processes
from taps_jax.data.batches import Example, digest, pad_rows
from taps_jax.errors import InputError
from taps_jax.files import replacing
from taps_jax.models.llama import Llama, causal_mask

_SHARD_TOKENS = 32_768
_BATCH_TOKENS = 2_048
_LENGTH_STEP = 64  # rows are padded to a multiple, so that few lengths compile
Progress = Callable[[Iterable, str, int], Iterable]


class FeatureSource(Protocol):
    """Where a training step's features come from."""

    def __call__(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray | Array:
        """Features [B, T, D] of `rows` [B], whose padded tokens are [B, T]."""
        ...


@functools.partial(jax.jit, static_argnames=("module",))
def verifier_features(module: Llama, params: dict, tokens: Array) -> Array:
    """Features [B, T, D] of rows padded on the right, tokens [B, T]; padding is never seen, being later."""
    size = tokens.shape[1]
    return module.apply({"params": params}, tokens, jnp.arange(size)[None], causal_mask(size))[0]


class OnlineFeatures:
    """Features computed when they are needed."""

    def __init__(self, module: Llama, params: dict):
        self._module, self._params = module, params

    def __call__(self, rows: np.ndarray, tokens: np.ndarray) -> Array:
        return verifier_features(self._module, self._params, jnp.asarray(tokens))


class CachedFeatures:
    """Features read from a cache folder."""

    def __init__(self, shards: list[np.ndarray], places: list[tuple[int, int, int]]):
        self._shards, self._places = shards, places

    def __call__(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return pad_rows([self.row(int(row)) for row in rows], tokens.shape[1])

    def row(self, row: int) -> np.ndarray:
        """Features [t, D] of one row."""
        shard, start, length = self._places[row]
        return np.asarray(self._shards[shard][start : start + length])


def cache_features(
    folder: Path,
    module: Llama,
    params: dict,
    examples: list[Example],
    fingerprint: str,
    dtype: str,
    progress: Progress,
) -> CachedFeatures:
    """Opens the cache of `examples` in `folder`, computing what is missing; says on stdout how large it becomes.

    Several processes share the folder: all compute, the first one writes.

    Args:
      folder: created if absent; contents that belong to other rows or another verifier are replaced.
      module, params: the verifier.
      examples: the training rows.
      fingerprint: of the verifier.
      dtype: "bfloat16" or "float16".
      progress: wraps an iterable of shards, given (shards, title, total).
    Raises:
      InputError: the disk is too small, a feature does not fit in float16, or a shard is not as it was written.
    """
    lengths = [len(example.tokens) for example in examples]
    plan = _plan(lengths)
    width = module.config.hidden_size
    key = f"{fingerprint} {dtype} {digest(examples)}"
    index = folder / "index.json"
    if processes.is_first() and (not index.exists() or json.loads(index.read_text()).get("key") != key):
        shutil.rmtree(folder, ignore_errors=True)
        with replacing(index) as temporary:
            temporary.write_text(json.dumps({"key": key, "dtype": dtype, "width": width, "shards": plan}, indent=1))
    processes.wait_for_all("feature index")
    shards = [_shard(folder, number) for number in range(len(plan))]
    missing = [number for number, shard in enumerate(shards) if not (shard.exists() and _checksum(shard).exists())]
    processes.wait_for_all("missing features")
    if missing:
        _check_space(folder, sum(lengths[row] for number in missing for row in plan[number]) * width * 2)
        for number in progress(missing, "verifier features", len(missing)):
            rows = [examples[row].tokens for row in plan[number]]
            features = _compute(module, params, rows)
            if processes.is_first():
                _write_shard(shards[number], features, dtype)
        processes.wait_for_all("features")
    kept = [shards[number] for number in sorted(set(range(len(plan))) - set(missing))]
    for shard in progress(kept, "checking features", len(kept)) if kept else ():
        _check_shard(shard)
    places: list[tuple[int, int, int]] = [(0, 0, 0)] * len(examples)
    for number, rows in enumerate(plan):
        start = 0
        for row in rows:
            places[row] = (number, start, lengths[row])
            start += lengths[row]
    mapped = [np.load(shard, mmap_mode="r").view(jnp.dtype(dtype)) for shard in shards]
    return CachedFeatures(mapped, places)


def _plan(lengths: list[int]) -> list[list[int]]:
    """Rows of each shard, shortest first, so that rows computed together are about as long."""
    shards: list[list[int]] = []
    size = _SHARD_TOKENS
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        if size >= _SHARD_TOKENS:
            shards.append([])
            size = 0
        shards[-1].append(row)
        size += lengths[row]
    return shards


def _shard(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.npy"


def _checksum(shard: Path) -> Path:
    return shard.with_suffix(".crc32")


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    print(f"{folder}: verifier features take {needed / 1e9:.2f} GB more, {free / 1e9:.1f} GB are free")
    if needed > free:
        raise InputError(
            f"{folder}: the feature cache needs {needed / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB free; "
            "set features.source='online' to compute features in every step instead"
        )


def _compute(module: Llama, params: dict, rows: list[np.ndarray]) -> list[np.ndarray]:
    features = []
    start = 0
    while start < len(rows):
        padded = -(-len(rows[-1]) // _LENGTH_STEP) * _LENGTH_STEP
        count = max(1, _BATCH_TOKENS // padded)
        group = rows[start : start + count]
        filler = [np.zeros(1, np.int32)] * (count - len(group))  # every batch has the same shape
        tokens = pad_rows(group + filler, padded)
        out = processes.to_host(verifier_features(module, params, jnp.asarray(tokens)).astype(jnp.float32))
        features += [out[index, : len(row)] for index, row in enumerate(group)]
        start += count
    return features


def _write_shard(path: Path, features: list[np.ndarray], dtype: str) -> None:
    values = np.concatenate(features)
    if dtype == "float16" and np.abs(values).max() > np.finfo(np.float16).max:
        raise InputError(f"{path}: a feature exceeds {np.finfo(np.float16).max:.0f}, set features.dtype='bfloat16'")
    with replacing(path) as temporary:
        with temporary.open("wb") as file:
            np.save(file, values.astype(jnp.dtype(dtype)).view(np.uint16))  # .npy has no name for bfloat16
        checksum = _crc32(temporary)
    with replacing(_checksum(path)) as temporary:
        temporary.write_text(f"{checksum:08x}\n")


def _check_shard(path: Path) -> None:
    expected = _checksum(path).read_text().strip()
    found = f"{_crc32(path):08x}"
    if found != expected:
        raise InputError(
            f"{path}: damaged, its checksum is {found} and was {expected}; remove it to have it computed again"
        )


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            value = zlib.crc32(block, value)
    return value
