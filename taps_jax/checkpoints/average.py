"""Averages of drafters: one checkpoint out of several (TAPS, checkpoint averaging)."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from taps_jax.checkpoints.hf_drafter import LoadedDrafter
from taps_jax.errors import InputError


def average(params: Sequence[dict], weights: Sequence[float]) -> dict:
    """The weighted sum of parameter trees of one structure, added up in float32, in the first one's dtypes."""

    def add(*leaves):
        total = sum(np.float32(weight) * leaf.astype(jnp.float32) for weight, leaf in zip(weights, leaves, strict=True))
        return total.astype(leaves[0].dtype)

    return jax.tree.map(add, *params)


def average_drafters(
    drafters: Sequence[LoadedDrafter], weights: Sequence[float], name: str, allow_unnormalised: bool = False
) -> LoadedDrafter:
    """A drafter between others.

    Args:
      drafters: of one shape, for one verifier, with one draft vocabulary.
      weights: as many, adding up to 1.
      name: the result's.
      allow_unnormalised: takes weights that do not add up to 1.
    Raises:
      InputError: the weights do not add up to 1, or the drafters are not alike.
    """
    if len(weights) != len(drafters):
        raise InputError(f"{name}: {len(weights)} weights for {len(drafters)} drafters")
    if not all(map(math.isfinite, weights)):
        raise InputError(f"{name}: the weights {', '.join(map(str, weights))} are not all finite")
    if abs(sum(weights) - 1) > 1e-6 and not allow_unnormalised:
        raise InputError(f"{name}: the weights {', '.join(map(str, weights))} add up to {sum(weights):g}, expected 1")
    first = drafters[0]
    for other in drafters[1:]:
        for field, found, expected in _differences(first, other):
            raise InputError(f"{name}: {field} of {first.name} is {expected}, of {other.name} {found}")
    return dataclasses.replace(first, name=name, params=average([drafter.params for drafter in drafters], weights))


def _differences(first: LoadedDrafter, other: LoadedDrafter):
    """(field, other's value, first's value) of what keeps two drafters from being averaged."""
    if other.fingerprint != first.fingerprint:
        yield "verifier fingerprint", other.fingerprint, first.fingerprint
    fields = dataclasses.asdict(first.config.layer)
    for field, value in dataclasses.asdict(other.config.layer).items():
        if value != fields[field] and field != "max_position_embeddings":
            yield field, value, fields[field]
    if other.config.fc_bias != first.config.fc_bias:
        yield "fc.bias", other.config.fc_bias, first.config.fc_bias
    sizes = [drafter.vocabulary is not None and len(drafter.vocabulary) for drafter in (other, first)]
    if sizes[0] != sizes[1] or (sizes[0] and not np.array_equal(other.vocabulary, first.vocabulary)):
        yield "draft vocabulary", *(f"a list of {size} tokens" if size else "all tokens" for size in sizes)
