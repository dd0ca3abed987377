"""What a decoding step costs, part by part.

Shapes: M tree nodes, W draft vocabulary, D model width.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from taps_jax.benchmarks.timing import Machine, Timing, time_call
from taps_jax.models.llama import head_table
from taps_jax.speculative.decode import DecodeState, Models, Prompt, Weights, advance, empty_state, insert, step
from taps_jax.speculative.drafting import DrafterWeights, extend, grow
from taps_jax.speculative.sampling import Sampling
from taps_jax.speculative.tree import DraftTree, TreeShape, ancestor_matrix
from taps_jax.speculative.verification import verify

VERIFY_NODES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 60, 120)
DRAFT_VOCABULARIES = (4096, 8192, 16384, 32768)
_PROMPT_TOKENS = 60
_CACHE_SIZE = 320


class Row(NamedTuple):
    """One line of the report; `bound` is the least time in ms that the machine allows, None where that says nothing."""

    name: str
    timing: Timing
    bound: float | None


def measure_decoding(models: Models, weights: Weights, machine: Machine) -> Iterator[Row]:
    """Times the parts of a decoding step at one row, after a prompt of 60 tokens.

    Args:
      models, weights: a speculative decoder.
      machine: its limits.
    """
    plain_models, plain_weights = Models(models.verifier), Weights(weights.verifier)
    state = _started(models, weights)
    plain_state = _started(plain_models, plain_weights)
    layers_gb, head_gb = _verifier_gigabytes(weights.verifier)
    read_gb = layers_gb + head_gb

    step_once = jax.jit(advance, static_argnames=("models",))
    stop = jnp.zeros(0, jnp.int32)
    yield Row(
        "plain step",
        time_call(lambda: step_once(plain_models, plain_weights, plain_state, stop)),
        machine.bound(read_gb, _gigaflops(read_gb, 1, weights)),
    )
    verify_tree = jax.jit(functools.partial(verify, models.verifier))
    for nodes in VERIFY_NODES:
        tree = _binary_tree(nodes)
        yield Row(
            f"verify {nodes} nodes",
            time_call(lambda tree=tree: verify_tree(weights.verifier, state.cache, state.length, tree)),
            machine.bound(read_gb, _gigaflops(read_gb, nodes, weights)),
        )
    yield from _drafting(models, weights, state, machine)
    yield Row(
        f"whole step, tree {_name(models.shape)}", time_call(lambda: step_once(models, weights, state, stop)), None
    )
    yield Row("whole step, state donated, one call from the host each", _host_loop(models, weights, stop), None)


def _drafting(models: Models, weights: Weights, state: DecodeState, machine: Machine) -> Iterator[Row]:
    """Extending and growing, with the decoder's own head and with other sizes of it."""
    drafter, shape = models.drafter, models.shape
    own = weights.drafter
    extend_all = jax.jit(functools.partial(extend, drafter))
    grow_tree = jax.jit(functools.partial(grow, drafter), static_argnames=("shape",))
    start = state.length - state.pairs.count
    layer_gb = sum(leaf.nbytes for leaf in jax.tree.leaves(own.params)) / 1e9
    output, cache = extend_all(own, state.drafter_cache, start, state.pairs)
    yield Row(
        "draft: extend",
        time_call(lambda: extend_all(own, state.drafter_cache, start, state.pairs)),
        machine.bound(layer_gb, 0),
    )
    full = head_table(weights.verifier)
    heads = {f"{size} ids": _sliced(own, full, size) for size in DRAFT_VOCABULARIES if size < full.shape[0]}
    heads["full head"] = own._replace(head=full, vocabulary=None)
    for name, drafting in heads.items():
        head_gb = drafting.head.nbytes / 1e9
        for depth in sorted({0, shape.depth}):
            levels = dataclasses.replace(shape, depth=depth)
            yield Row(
                f"draft: grow {_name(levels)}, {name}",
                time_call(lambda d=drafting, s=levels: grow_tree(d, cache, state.length, output, state.root, shape=s)),
                machine.bound(head_gb + depth * (layer_gb + head_gb), 0),
            )


def _sliced(weights: DrafterWeights, head: jax.Array, size: int) -> DrafterWeights:
    return weights._replace(head=jnp.array(head[:size]), vocabulary=jnp.arange(size, dtype=jnp.int32))


def _started(models: Models, weights: Weights) -> DecodeState:
    """One row that has read a prompt."""
    state = empty_state(models, weights, 1, _CACHE_SIZE, 128)
    sampling = Sampling(jnp.float32(0), jnp.float32(1), jnp.int32(0), jax.random.key(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, models.verifier.config.vocab_size, 64), jnp.int32)
    prompt = Prompt(tokens, jnp.int32(_PROMPT_TOKENS), jnp.int32(128), sampling)
    return insert(models, weights, state, jnp.int32(0), prompt, jnp.zeros(0, jnp.int32))


def _host_loop(models: Models, weights: Weights, stop: jax.Array) -> Timing:
    """The step as a host loop runs it: one donated call after another, a few integers read back from each."""
    box = [_started(models, weights)]

    def once():
        box[0], _ = step(models, weights, box[0], stop)
        return jax.device_get((box[0].count, box[0].active))

    return time_call(once)


def _binary_tree(nodes: int) -> DraftTree:
    """A tree of the wanted size; which one hardly matters to its cost."""
    parent = jnp.asarray([[max(0, (node - 1) // 2) for node in range(nodes)]], jnp.int32)
    depth = jnp.asarray([[(node + 1).bit_length() - 1 for node in range(nodes)]], jnp.int32)
    floats = jnp.zeros((1, nodes), jnp.float32)
    return DraftTree(
        token=jnp.arange(1, nodes + 1, dtype=jnp.int32)[None],
        parent=parent,
        depth=depth,
        log_prob=floats,
        entropy=floats,
        ancestor=ancestor_matrix(parent, nodes.bit_length()),
        origin=depth,
        valid=jnp.ones((1, nodes), bool),
    )


def _verifier_gigabytes(params: dict) -> tuple[float, float]:
    """What a step reads: the layers, and the head (the embedding is looked up row by row)."""
    layers = {name: part for name, part in params["model"].items() if name.startswith("layers_")}
    return sum(leaf.nbytes for leaf in jax.tree.leaves(layers)) / 1e9, head_table(params).nbytes / 1e9


def _gigaflops(read_gb: float, rows: int, weights: Weights) -> float:
    """Two operations per weight and row."""
    return 2 * rows * read_gb / head_table(weights.verifier).dtype.itemsize


def _name(shape: TreeShape) -> str:
    return f"{shape.total_token}/{shape.depth}/{shape.top_k}"
