"""What a decoding step costs, part by part."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from taps_jax.benchmarks.parts import Parts
from taps_jax.benchmarks.timing import Machine, Timing
from taps_jax.models.llama import head_table
from taps_jax.speculative.decode import Models, Weights
from taps_jax.speculative.drafting import DrafterWeights

VERIFY_NODES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 60, 120)
DRAFT_VOCABULARIES = (4096, 8192, 16384, 32768)


class Row(NamedTuple):
    """One line of the report; `bound` is the least time in ms that the machine allows, None where that says nothing."""

    name: str
    timing: Timing
    bound: float | None = None


def measure_decoding(models: Models, weights: Weights, machine: Machine) -> Iterator[Row]:
    """Times the parts of a decoding step at one row, after a prompt of 60 tokens.

    Args:
      models, weights: a speculative decoder.
      machine: its limits.
    """
    parts, shape = Parts(models, weights), models.shape
    layers_gb, head_gb = _verifier_gigabytes(weights.verifier)
    read_gb = layers_gb + head_gb
    yield Row("plain step", parts.plain_step(), machine.bound(read_gb, _gigaflops(read_gb, 1, weights)))
    for nodes in sorted({*VERIFY_NODES, shape.num_nodes}):
        bound = machine.bound(read_gb, _gigaflops(read_gb, nodes, weights))
        yield Row(f"verify {nodes} nodes", parts.verify(nodes), bound)
    yield from _drafting(parts, models, weights, machine)
    yield Row(f"choose after {shape.num_nodes} nodes, greedy", parts.choose(shape.num_nodes))
    yield Row(f"choose after {shape.num_nodes} nodes, temperature 1", parts.choose(shape.num_nodes, 1.0))
    yield Row("accept and commit", parts.commit(shape))
    yield Row(f"whole step, tree {shape}", parts.whole_step())
    yield Row("whole step, donated, called and read by the host", parts.host_loop())


def _drafting(parts: Parts, models: Models, weights: Weights, machine: Machine) -> Iterator[Row]:
    """Extending and growing, with the decoder's own head and with other sizes of it."""
    own, shape = weights.drafter, models.shape
    layer_gb = sum(leaf.nbytes for leaf in jax.tree.leaves(own.params)) / 1e9
    yield Row("draft: extend", parts.extend(), machine.bound(layer_gb, 0))
    full = head_table(weights.verifier)
    heads = {f"{size} ids": _sliced(own, full, size) for size in DRAFT_VOCABULARIES if size < full.shape[0]}
    heads["full head"] = own._replace(head=full, vocabulary=None)
    heads[f"own head of {own.head.shape[0]} ids"] = own
    for name, drafting in heads.items():
        head_gb = drafting.head.nbytes / 1e9
        for depth in sorted({0, shape.depth}):
            levels = dataclasses.replace(shape, depth=depth)
            bound = machine.bound(head_gb + depth * (layer_gb + head_gb), 0)
            yield Row(f"draft: grow {levels}, {name}", parts.grow(levels, drafting), bound)
    yield Row("draft: rerank", parts.rerank(shape))


def _sliced(weights: DrafterWeights, head: jax.Array, size: int) -> DrafterWeights:
    return weights._replace(head=jnp.array(head[:size]), vocabulary=jnp.arange(size, dtype=jnp.int32))


def _verifier_gigabytes(params: dict) -> tuple[float, float]:
    """What a step reads: the layers, and the head (the embedding is looked up row by row)."""
    layers = {name: part for name, part in params["model"].items() if name.startswith("layers_")}
    return sum(leaf.nbytes for leaf in jax.tree.leaves(layers)) / 1e9, head_table(params).nbytes / 1e9


def _gigaflops(read_gb: float, rows: int, weights: Weights) -> float:
    """Two operations per weight and row."""
    return 2 * rows * read_gb / head_table(weights.verifier).dtype.itemsize
