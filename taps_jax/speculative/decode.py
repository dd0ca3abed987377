"""Decoding state and the jitted functions that advance it: insert a prompt, take a step, run many steps.

One step is draft (extend, grow, compose) -> verify -> accept -> commit. With no drafter the tree is the root alone and
the same step is plain decoding. Every array has a leading batch axis; rows advance, stop and are refilled on their own.

Shapes: B batch, T prompt bucket, S cache positions, O output slots, L path slots, E stop tokens.
"""

import functools
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from taps_jax.models.cache import KVCache, empty_cache
from taps_jax.models.drafter import Drafter, stacked
from taps_jax.models.llama import Llama, causal_mask
from taps_jax.speculative.composition import Composition, Routing, draft, empty_routing
from taps_jax.speculative.drafting import CommittedPairs, DrafterWeights
from taps_jax.speculative.sampling import Sampling, choose, greedy
from taps_jax.speculative.tree import AcceptedPath, DraftTree, TreeShape, accept, root_tree
from taps_jax.speculative.verification import commit, verify


class Models(NamedTuple):
    """The static half of a decoder: hashable modules, sizes and how specialists are composed.

    `drafter` and `shape` are None for plain decoding.
    """

    verifier: Llama
    drafter: Drafter | None = None
    shape: TreeShape | None = None
    composition: Composition = Composition.SINGLE

    @property
    def path_length(self) -> int:
        return self.shape.path_length if self.shape else 1


class Weights(NamedTuple):
    """The array half of a decoder."""

    verifier: dict
    drafter: DrafterWeights | None = None


@flax.struct.dataclass
class DecodeState:
    """Where B rows of decoding stand.

    Attributes:
      cache: the verifier's keys and values, `length` positions filled.
      length: [B] int32, committed tokens the verifier has read; the root is at this position.
      root: [B] int32, the last committed token, not yet read.
      output: [B, O] int32, generated tokens; `count` are set.
      count: [B] int32, generated tokens; the first comes from the prompt's own pass.
      limit: [B] int32, most tokens to generate.
      steps: [B] int32, verification steps taken.
      active: [B] bool, false when the row is free or has finished.
      sampling: per-row settings.
      drafter_cache: leaves [N, B, K, S, E], or None for plain decoding.
      pairs: committed positions the drafters have not read yet, or None.
      routing: what the choice among specialists rests on, or None.
    """

    cache: KVCache
    length: Array
    root: Array
    output: Array
    count: Array
    limit: Array
    steps: Array
    active: Array
    sampling: Sampling
    drafter_cache: KVCache | None
    pairs: CommittedPairs | None
    routing: Routing | None


class StepRecord(NamedTuple):
    """What one step did: the tree, its accepted path, how many tokens each row committed [B], and the routing."""

    tree: DraftTree
    path: AcceptedPath
    committed: Array
    routing: Routing | None


class Prompt(NamedTuple):
    """One prompt for one row.

    Attributes:
      tokens: [T] int32, padded on the right.
      length: [] int32.
      limit: [] int32, most tokens to generate.
      sampling: settings, each a scalar.
    """

    tokens: Array
    length: Array
    limit: Array
    sampling: Sampling


def empty_state(models: Models, weights: Weights, batch: int, cache_size: int, max_new_tokens: int) -> DecodeState:
    """A state of B free rows."""
    config = models.verifier.config
    dtype = weights.verifier["model"]["norm"]["weight"].dtype
    # Distinct buffers: a donated state must not hold the same one twice.
    zeros = lambda: jnp.zeros(batch, jnp.int32)
    slots = models.path_length
    drafter_cache = pairs = routing = None
    if models.drafter:
        specialists = jax.tree.leaves(weights.drafter.params)[0].shape[0]
        drafter_cache = empty_cache(models.drafter.config.layer, (specialists, batch), cache_size, dtype)
        features = jnp.zeros((batch, slots, config.hidden_size), dtype)
        pairs = CommittedPairs(features, jnp.zeros((batch, slots), jnp.int32), jnp.ones(batch, jnp.int32))
        routing = empty_routing(specialists, batch, config.hidden_size, dtype)
    return DecodeState(
        cache=empty_cache(config, (batch,), cache_size, dtype),
        length=zeros(),
        root=zeros(),
        output=jnp.zeros((batch, max_new_tokens + slots), jnp.int32),
        count=zeros(),
        limit=zeros(),
        steps=zeros(),
        active=jnp.zeros(batch, bool),
        sampling=greedy(batch),
        drafter_cache=drafter_cache,
        pairs=pairs,
        routing=routing,
    )


@functools.partial(jax.jit, static_argnames=("models",), donate_argnames=("state",))
def insert(
    models: Models, weights: Weights, state: DecodeState, row: Array, prompt: Prompt, stop: Array
) -> DecodeState:
    """Reads a prompt into one row and chooses its first token; compiled once per prompt bucket T.

    Args:
      models, weights: the decoder.
      state: donated.
      row: [] int32, the row to fill; what it held is lost.
      prompt: the prompt; length + limit + L must not exceed S, nor T exceed S.
      stop: [E] int32 stop tokens.
    """
    size = prompt.tokens.shape[0]
    tokens, positions = prompt.tokens[None], jnp.arange(size)[None]
    apply = functools.partial(models.verifier.apply, {"params": weights.verifier})
    features, new = apply(tokens, positions, causal_mask(size))
    last = jax.lax.dynamic_slice_in_dim(features, prompt.length - 1, 1, axis=1)
    sampling = jax.tree.map(lambda setting: setting[None], prompt.sampling)
    before = (prompt.length - 1)[None]
    logits = apply(last, method=Llama.logits)
    root = choose(logits, sampling, before, jnp.zeros((1, 1), jnp.int32), 1)[0, 0]
    write = lambda old, rows: jax.lax.dynamic_update_slice(old, rows.astype(old.dtype), (row, 0, 0, 0))
    set_row = lambda values, value: values.at[row].set(value)
    drafter_cache, pairs, routing = state.drafter_cache, state.pairs, state.routing
    if models.drafter:
        # The pair of the last prompt token waits for the first step; its slot here is overwritten then.
        following = weights.drafter.embedding[jnp.roll(tokens, -1, axis=1)]
        x = stacked(models.drafter, Drafter.fuse, (None, None))(weights.drafter.params, following, features)
        kv = stacked(models.drafter, Drafter.keys_values, (0, None))(weights.drafter.params, x, positions)
        drafter_cache = jax.vmap(lambda old, rows: jax.tree.map(write, old, rows))(
            drafter_cache, KVCache((kv[0],), (kv[1],))
        )
        pairs = CommittedPairs(
            pairs.features.at[row, 0].set(last[0, 0].astype(pairs.features.dtype)),
            pairs.tokens.at[row, 0].set(root),
            set_row(pairs.count, 1),
        )
        routing = routing._replace(score=routing.score.at[:, row].set(0.0), chosen=set_row(routing.chosen, -1))
    return DecodeState(
        cache=jax.tree.map(write, state.cache, new),
        length=set_row(state.length, prompt.length),
        root=set_row(state.root, root),
        output=state.output.at[row, 0].set(root),
        count=set_row(state.count, 1),
        limit=set_row(state.limit, prompt.limit),
        steps=set_row(state.steps, 0),
        active=set_row(state.active, (prompt.limit > 1) & ~jnp.any(root == stop)),
        sampling=jax.tree.map(set_row, state.sampling, prompt.sampling),
        drafter_cache=drafter_cache,
        pairs=pairs,
        routing=routing,
    )


def advance(models: Models, weights: Weights, state: DecodeState, stop: Array) -> tuple[DecodeState, StepRecord]:
    """One step of every active row; see `step` and `run` for the jitted drivers."""
    if models.drafter:
        with jax.named_scope("draft"):
            tree, drafter_cache, routing = draft(
                models.composition,
                models.drafter,
                weights.drafter,
                state.drafter_cache,
                state.length,
                state.pairs,
                state.routing,
                state.root,
                models.shape,
            )
    else:
        tree, drafter_cache, routing = root_tree(state.root), None, None
    with jax.named_scope("verify"):
        verified = verify(models.verifier, weights.verifier, state.cache, state.length, tree)
        best = choose(verified.logits, state.sampling, state.length, tree.depth, models.path_length)
    with jax.named_scope("commit"):
        path = accept(tree, best, models.path_length)
        cache, pairs = commit(state.cache, state.length, tree, verified, path, best)
        committed, stopped = _cut_at_stop(pairs, stop)
        committed = jnp.where(state.active, jnp.minimum(committed, state.limit - state.count), 0)
        stopped = stopped <= committed
        count = state.count + committed
        write = jax.vmap(lambda old, new, at: jax.lax.dynamic_update_slice(old, new, (at,)))
        next_root = jnp.take_along_axis(pairs.tokens, path.count[:, None], axis=1)[:, 0]
        new_state = state.replace(
            cache=cache,
            length=state.length + jnp.where(state.active, pairs.count, 0),
            root=jnp.where(state.active, next_root, state.root),
            output=jnp.where(state.active[:, None], write(state.output, pairs.tokens, state.count), state.output),
            count=count,
            steps=state.steps + state.active,
            active=state.active & ~stopped & (count < state.limit),
            drafter_cache=drafter_cache,
            pairs=_keep_inactive(state, pairs) if models.drafter else None,
            routing=routing,
        )
    return new_state, StepRecord(tree, path, committed, routing)


@functools.partial(jax.jit, static_argnames=("models",), donate_argnames=("state",))
def step(models: Models, weights: Weights, state: DecodeState, stop: Array) -> tuple[DecodeState, StepRecord]:
    """One jitted step; `state` is donated."""
    return advance(models, weights, state, stop)


@functools.partial(jax.jit, static_argnames=("models",), donate_argnames=("state",))
def run(models: Models, weights: Weights, state: DecodeState, stop: Array, most_steps: Array) -> DecodeState:
    """Steps on the device until an active row finishes or `most_steps` are taken; `state` is donated."""
    started = state.active

    def unfinished(carry):
        taken, state = carry
        return (taken < most_steps) & jnp.all(state.active == started) & jnp.any(started)

    def body(carry):
        taken, state = carry
        return taken + 1, advance(models, weights, state, stop)[0]

    return jax.lax.while_loop(unfinished, body, (0, state))[1]


def _cut_at_stop(pairs: CommittedPairs, stop: Array) -> tuple[Array, Array]:
    """Tokens to commit, [B], up to and with the first stop token; and that stop token's ordinal, beyond any if none."""
    slots = jnp.arange(pairs.tokens.shape[1])
    is_stop = jnp.any(pairs.tokens[..., None] == stop, axis=-1) & (slots < pairs.count[:, None])
    ordinal = jnp.min(jnp.where(is_stop, slots + 1, slots.shape[0] + 1), axis=-1)
    return jnp.minimum(pairs.count, ordinal), ordinal


def _keep_inactive(state: DecodeState, pairs: CommittedPairs) -> CommittedPairs:
    """New pairs for active rows; finished rows keep theirs, so that their lengths stay consistent."""
    return jax.tree.map(
        lambda new, old: jnp.where(state.active.reshape(-1, *[1] * (new.ndim - 1)), new.astype(old.dtype), old),
        pairs,
        state.pairs,
    )
