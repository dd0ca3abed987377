"""The parts of a decoding step, each ready to be timed alone.

Shapes: B rows, M tree nodes, W draft vocabulary, V vocabulary, k = top_k.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from taps_jax.benchmarks.timing import Timing, time_call
from taps_jax.speculative.decode import DecodeState, Models, Prompt, Weights, advance, empty_state, insert, step
from taps_jax.speculative.drafting import DrafterWeights, Level, extend, grow, keep_best
from taps_jax.speculative.sampling import Sampling, choose
from taps_jax.speculative.tree import DraftTree, TreeShape, accept, ancestor_matrix
from taps_jax.speculative.verification import Verified, commit, verify

_PROMPT_TOKENS = 60
_CACHE_SIZE = 320
_MOST_NEW_TOKENS = 128
_NO_STOP = jnp.zeros(0, jnp.int32)


class Parts:
    """Times the parts of a speculative decoder with B rows that have each read a prompt of 60 tokens."""

    def __init__(self, models: Models, weights: Weights, batch: int = 1, repeats: int = 15):
        self._models, self._weights, self._batch, self._repeats = models, weights, batch, repeats
        self._state = started(models, weights, batch)
        self._start = self._state.length - self._state.pairs.count
        self._extend = jax.jit(functools.partial(extend, models.drafter))
        self._output, self._drafter_cache = self._extend(
            weights.drafter, self._state.drafter_cache, self._start, self._state.pairs
        )
        self._grow = jax.jit(functools.partial(grow, models.drafter), static_argnames=("shape",))
        self._verify = jax.jit(functools.partial(verify, models.verifier))
        self._step = jax.jit(advance, static_argnames=("models",))

    def plain_step(self) -> Timing:
        models, weights = Models(self._models.verifier), Weights(self._weights.verifier)
        state = started(models, weights, self._batch)
        return self._time(lambda: self._step(models, weights, state, _NO_STOP))

    def verify(self, nodes: int) -> Timing:
        tree, state = binary_tree(self._batch, nodes), self._state
        return self._time(lambda: self._verify(self._weights.verifier, state.cache, state.length, tree))

    def choose(self, nodes: int, temperature: float = 0.0) -> Timing:
        """The verifier's token after every node, from its logits."""
        depth = binary_tree(self._batch, nodes).depth
        logits = jax.random.normal(jax.random.key(0), (*depth.shape, self._models.verifier.config.vocab_size))
        sampling = self._state.sampling._replace(temperature=jnp.full(self._batch, temperature))
        levels = nodes.bit_length()
        once = jax.jit(choose, static_argnames=("levels",))
        return self._time(lambda: once(logits, sampling, self._state.length, depth, levels=levels))

    def extend(self) -> Timing:
        state = self._state
        return self._time(lambda: self._extend(self._weights.drafter, state.drafter_cache, self._start, state.pairs))

    def grow(self, shape: TreeShape, drafting: DrafterWeights | None = None) -> Timing:
        """All levels and the choice of nodes; with another head if `drafting` is given."""
        drafting, state = drafting or self._weights.drafter, self._state
        return self._time(
            lambda: self._grow(drafting, self._drafter_cache, state.length, self._output, state.root, shape=shape)
        )

    def rerank(self, shape: TreeShape) -> Timing:
        """Keeping the best candidates of all levels."""
        k, levels = shape.top_k, []
        for level in range(shape.depth + 1):
            size = (1, self._batch, k if level == 0 else k * k)
            log_prob = -jnp.abs(jax.random.normal(jax.random.key(level), size)) - level
            parent = jnp.full(size, -1) if level == 0 else jnp.zeros(size, jnp.int32)
            levels.append(Level(jnp.zeros(size, jnp.int32), log_prob, log_prob, parent))
        once = jax.jit(keep_best, static_argnames=("shape",))
        return self._time(lambda: once(levels, self._state.root, shape=shape))

    def commit(self, shape: TreeShape) -> Timing:
        """Accepting a path and keeping what it computed, the cache updated in place."""
        nodes, config = shape.num_nodes, self._models.verifier.config
        tree = binary_tree(self._batch, nodes)
        state = started(self._models, self._weights, self._batch)
        rows = (self._batch, config.num_key_value_heads, nodes, config.head_dim)
        new = jax.tree.map(lambda leaf: jnp.zeros(rows, leaf.dtype), state.cache)
        features = jnp.zeros((self._batch, nodes, config.hidden_size), state.pairs.features.dtype)
        best, path_length = tree.token, max(shape.path_length, nodes.bit_length())

        def accept_and_commit(cache, new, features):
            path = accept(tree, best, path_length)
            return commit(cache, state.length, tree, Verified(features, None, new), path, best)

        once, box = jax.jit(accept_and_commit, donate_argnums=0), [state.cache]

        def call():
            box[0], pairs = once(box[0], new, features)
            return pairs

        return self._time(call)

    def whole_step(self) -> Timing:
        return self._time(lambda: self._step(self._models, self._weights, self._state, _NO_STOP))

    def host_loop(self) -> Timing:
        """The step as a host loop runs it: one donated call after another, a few integers read back from each."""
        box = [started(self._models, self._weights, self._batch)]

        def once():
            box[0], _ = step(self._models, self._weights, box[0], _NO_STOP)
            return jax.device_get((box[0].count, box[0].active))

        return self._time(once)

    def _time(self, function) -> Timing:
        return time_call(function, self._repeats)


def started(models: Models, weights: Weights, batch: int) -> DecodeState:
    """Rows that have read a prompt of 60 tokens."""
    state = empty_state(models, weights, batch, _CACHE_SIZE, _MOST_NEW_TOKENS)
    sampling = Sampling(jnp.float32(0), jnp.float32(1), jnp.int32(0), jax.random.key(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, models.verifier.config.vocab_size, 64), jnp.int32)
    prompt = Prompt(tokens, jnp.int32(_PROMPT_TOKENS), jnp.int32(_MOST_NEW_TOKENS), sampling)
    for row in range(batch):
        state = insert(models, weights, state, jnp.int32(row), prompt, _NO_STOP)
    return state


def binary_tree(batch: int, nodes: int) -> DraftTree:
    """A tree of the wanted size; which one hardly matters to its cost."""
    rows = lambda values: jnp.tile(jnp.asarray(values, jnp.int32), (batch, 1))
    parent = rows([max(0, (node - 1) // 2) for node in range(nodes)])
    depth = rows([(node + 1).bit_length() - 1 for node in range(nodes)])
    floats = jnp.zeros((batch, nodes), jnp.float32)
    return DraftTree(
        token=rows(range(1, nodes + 1)),
        parent=parent,
        depth=depth,
        log_prob=floats,
        entropy=floats,
        ancestor=ancestor_matrix(parent, nodes.bit_length()),
        origin=depth,
        valid=jnp.ones((batch, nodes), bool),
    )
