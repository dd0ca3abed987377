"""Hugging Face tensor names, Flax paths and nested parameters: the same words in three spellings.

`model.layers.0.mlp.up_proj.weight` in Hugging Face files is `model/layers_0/mlp/up_proj/weight` in Flax files and
`params["model"]["layers_0"]["mlp"]["up_proj"]["weight"]` in memory.
"""

import re
from typing import Any

import jax
import numpy as np

from taps_jax.checkpoints.tensors import StoredTensor, StoredTensors, described, is_finite
from taps_jax.errors import InputError


def flatten(params: dict) -> dict[str, Any]:
    """Nested parameters -> {Hugging Face name: leaf}."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {from_flax("/".join(key.key for key in path)): leaf for path, leaf in leaves}


def unflatten(tensors: dict[str, Any]) -> dict:
    """{Hugging Face name: leaf} -> nested parameters."""
    params: dict = {}
    for name, leaf in tensors.items():
        *folders, last = to_flax(name).split("/")
        node = params
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = leaf
    return params


def to_flax(name: str) -> str:
    """A Hugging Face name as a Flax path."""
    return re.sub(r"\blayers\.(\d+)", r"layers_\1", name).replace(".", "/")


def from_flax(path: str) -> str:
    """A Flax path as a Hugging Face name."""
    return re.sub(r"\blayers_(\d+)", r"layers.\1", path.replace("/", "."))


def shape_problems(expected: dict[str, Any], stored: StoredTensors) -> list[str]:
    """What keeps `stored` from being the tensors that `expected` has shapes of, by Hugging Face name."""
    problems = [f"unexpected tensor {name}" for name in stored.tensors if name not in expected]
    for name, tensor in stored.tensors.items():
        if name in expected and tensor.shape != tuple(expected[name].shape):
            problems.append(f"{name} has shape {list(tensor.shape)}, expected {list(expected[name].shape)}")
    return problems + [f"missing tensor {name}" for name in expected if name not in stored.tensors]


def fill(abstract: dict, stored: StoredTensors, dtype, where: str, shardings: dict | None = None) -> dict:
    """Parameters of the shapes in `abstract`, each read from its file to its devices before the next.

    Args:
      abstract: nested shapes, as from `jax.eval_shape`.
      stored: by Hugging Face names.
      dtype: of the result.
      where: the source, for error messages.
      shardings: nested like `abstract`; a device then gets its part only. None puts all on the default device.
    Raises:
      InputError: files are damaged, tensors missing, unexpected, misshapen or not finite; all problems at once.
    """
    expected = flatten(abstract)
    places = flatten(shardings) if shardings else {}
    problems = list(stored.problems)
    wrong = shape_problems(expected, stored)
    loaded = {}
    for name, tensor in stored.tensors.items():
        if name in expected and tensor.shape == tuple(expected[name].shape):
            try:
                loaded[name] = _placed(tensor, dtype, places.get(name))
            except _NotFiniteError:
                problems.append(f"{name} holds values that are not finite")
    problems += wrong
    if problems:
        raise InputError(f"{where}: {described(problems)}")
    return unflatten(loaded)


class _NotFiniteError(ValueError):
    pass


def _placed(tensor: StoredTensor, dtype, sharding) -> jax.Array:
    def part(index) -> np.ndarray:
        value = tensor.read(index)
        if not is_finite(value):
            raise _NotFiniteError
        return value.astype(dtype, copy=False)

    if sharding is None:
        return jax.numpy.asarray(part(...))
    return jax.make_array_from_callback(tensor.shape, sharding, part)
