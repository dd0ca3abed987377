"""Hugging Face tensor names and parameter paths: the same words, `layers.0` being one dict key `layers_0`."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from taps_jax.errors import InputError


def flatten(params: dict) -> dict[str, Any]:
    """Nested parameters -> {Hugging Face name: leaf}."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {re.sub(r"layers_(\d+)", r"layers.\1", ".".join(key.key for key in path)): leaf for path, leaf in leaves}


def unflatten(tensors: dict[str, Any]) -> dict:
    """{Hugging Face name: leaf} -> nested parameters."""
    params: dict = {}
    for name, leaf in tensors.items():
        *folders, last = re.sub(r"layers\.(\d+)", r"layers_\1", name).split(".")
        node = params
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = leaf
    return params


def fill(abstract: dict, tensors: Iterable[tuple[str, Callable[[], np.ndarray]]], dtype, where: str) -> dict:
    """Parameters of the shapes in `abstract`, read one tensor at a time.

    Args:
      abstract: nested shapes, as from `jax.eval_shape`.
      tensors: pairs of a Hugging Face name and a function that reads that tensor.
      dtype: of the result.
      where: the source, for error messages.
    Raises:
      InputError: tensors are missing, unexpected, misshapen or not finite; all problems at once.
    """
    expected = flatten(abstract)
    loaded: dict[str, jax.Array] = {}
    problems = []
    for name, read in tensors:
        if name not in expected:
            problems.append(f"unexpected tensor {name}")
            continue
        value = read()
        if value.shape != expected[name].shape:
            problems.append(f"{name} has shape {list(value.shape)}, expected {list(expected[name].shape)}")
        elif not np.isfinite(value.astype(np.float32, copy=False)).all():
            problems.append(f"{name} holds values that are not finite")
        else:
            loaded[name] = jax.numpy.asarray(value, dtype)
            continue
        loaded[name] = None
    problems += [f"missing tensor {name}" for name in expected if name not in loaded]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise InputError(f"{where}: {shown}")
    return unflatten(loaded)
