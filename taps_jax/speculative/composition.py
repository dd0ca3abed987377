"""Drafting with N specialists: every rule that turns what they propose into the one tree the verifier checks.

Whatever the rule, every specialist reads every committed token, so that it can draft whenever it is chosen.

Shapes: N specialists, B batch, R committed rows, M tree nodes, D model width.
"""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from taps_jax.models.cache import KVCache
from taps_jax.models.drafter import Drafter
from taps_jax.speculative.drafting import CommittedPairs, DrafterWeights, extend, grow, token_log_probs
from taps_jax.speculative.merging import concatenate, join
from taps_jax.speculative.tree import DraftTree, TreeShape

# What one committed token still counts for when the next is scored: the last ten or so decide.
FORGETTING = 0.9


class Composition(enum.StrEnum):
    """How specialists share a step.

    `ROUTE_CONFIDENCE`: all draft; the tree with the highest mean path probability is verified (TAPS).
    `ROUTE_ENTROPY`: the specialist whose first tree of a turn has the lowest mean draft entropy drafts the turn (TAPS).
    `ROUTE_ENTROPY_STEP`: the same choice at every step.
    `ROUTE_LIKELIHOOD`: the specialist that gave the tokens committed so far the highest probability, old ones counting
    less and less, drafts.
    `MERGE_CONCAT`: all trees side by side, N times the nodes (TAPS).
    `MERGE_TRIE`: equal paths joined, as many nodes as one tree.
    """

    SINGLE = "single"
    ROUTE_CONFIDENCE = "route:confidence"
    ROUTE_ENTROPY = "route:entropy"
    ROUTE_ENTROPY_STEP = "route:entropy-step"
    ROUTE_LIKELIHOOD = "route:likelihood"
    MERGE_CONCAT = "merge:concat"
    MERGE_TRIE = "merge:trie"

    @property
    def routes(self) -> bool:
        return self.value.startswith("route:")

    def num_nodes(self, shape: TreeShape, specialists: int) -> int:
        """Nodes that the verifier checks per step."""
        return 1 + specialists * (shape.num_nodes - 1) if self is Composition.MERGE_CONCAT else shape.num_nodes


class Routing(NamedTuple):
    """What a router remembers of a row's turn.

    Attributes:
      score: [N, B] float32, of each specialist by the rule, greater is better; for the likelihood a running sum.
      chosen: [B] int32, the specialist whose tree was verified last; -1 before a turn's first step. Always 0 when
        nothing is routed.
      output: [N, B, D], predicted features at the last position the drafters have read.
    """

    score: Array
    chosen: Array
    output: Array


def empty_routing(specialists: int, batch: int, width: int, dtype) -> Routing:
    """Nothing known of any row."""
    return Routing(
        jnp.zeros((specialists, batch)), jnp.full(batch, -1, jnp.int32), jnp.zeros((specialists, batch, width), dtype)
    )


def draft(
    rule: Composition,
    drafter: Drafter,
    weights: DrafterWeights,
    cache: KVCache,
    length: Array,
    pairs: CommittedPairs,
    routing: Routing,
    root: Array,
    shape: TreeShape,
) -> tuple[DraftTree, KVCache, Routing]:
    """Lets all specialists read what was committed, and drafts one tree per row.

    Args:
      rule: how specialists share the step.
      drafter, weights: N stacked specialists.
      cache: one layer, leaves [N, B, K, S, E], holding `length - pairs.count` pairs per row.
      length: [B] int32, committed positions, those of `pairs` included.
      pairs: what the drafters have not read yet.
      routing: as the last step left it.
      root: [B] int32, last committed token.
      shape: size of each specialist's tree, and of a joined one.
    Returns:
      The tree with leaves [B, ...], the extended cache, and what the router knows now.
    """
    batch, specialists = root.shape[0], routing.score.shape[0]
    every_row = rule is Composition.ROUTE_LIKELIHOOD
    outputs, cache = extend(drafter, weights, cache, length - pairs.count, pairs, every_row)
    output = _at_last(outputs, pairs.count) if every_row else outputs
    grow_all = lambda: grow(drafter, weights, cache, length, output, root, shape)
    if not rule.routes:
        tree, _, chosen = compose(rule, grow_all(), shape)
        return tree, cache, routing._replace(chosen=chosen)

    def grow_chosen(chosen: Array) -> DraftTree:
        """At one row only the chosen specialist needs to draft; at more, rows choose differently and all do."""
        if batch > 1 or specialists == 1:
            return _select(grow_all(), chosen)
        one = lambda leaf: jax.lax.dynamic_index_in_dim(leaf, chosen[0], 0)
        alone = weights._replace(
            params=jax.tree.map(one, weights.params), own=None if weights.own is None else one(weights.own)
        )
        trees = grow(drafter, alone, jax.tree.map(one, cache), length, one(output), root, shape)
        tree = jax.tree.map(lambda leaf: leaf[0], trees)
        return tree.replace(origin=tree.origin << chosen[:, None])

    def grow_and_choose() -> tuple[DraftTree, Array, Array]:
        trees = grow_all()
        _, score, chosen = compose(rule, trees, shape)
        if rule is Composition.ROUTE_ENTROPY:  # stays as the turn's first step chose
            chosen = jnp.where(routing.chosen < 0, chosen, routing.chosen)
        return _select(trees, chosen), score, chosen

    if rule is Composition.ROUTE_LIKELIHOOD:
        score = _score_committed(weights, routing, outputs, pairs)
        chosen = _first_best(score)
        tree = grow_chosen(chosen)
    elif rule is Composition.ROUTE_ENTROPY and batch == 1:
        tree, score, chosen = jax.lax.cond(
            routing.chosen[0] < 0,
            grow_and_choose,
            lambda: (grow_chosen(routing.chosen), routing.score, routing.chosen),
        )
    else:
        tree, score, chosen = grow_and_choose()
    return tree, cache, Routing(score, chosen, output)


def compose(
    rule: Composition, trees: DraftTree, shape: TreeShape, score: Array | None = None
) -> tuple[DraftTree, Array, Array]:
    """One tree per row from those that all specialists have drafted.

    Args:
      rule: how they share the step.
      trees: leaves [N, B, M, ...].
      shape: size of each of them.
      score: [N, B], to choose by instead of by the trees.
    Returns:
      The tree with leaves [B, ...]; scores [N, B], greater is better; the chosen [B], 0 where nothing is routed.
    """
    levels = shape.path_length - 1
    if rule.routes:
        if score is None:
            score = confidence(trees) if rule is Composition.ROUTE_CONFIDENCE else certainty(trees)
        chosen = _first_best(score)
        return _select(trees, chosen), score, chosen
    if rule is Composition.MERGE_CONCAT:
        tree = concatenate(trees, levels)
    elif rule is Composition.MERGE_TRIE:
        tree = join(trees, levels, shape.num_nodes)
    else:
        tree = jax.tree.map(lambda leaf: leaf[0], trees)
    specialists, batch = trees.token.shape[:2]
    return tree, jnp.zeros((specialists, batch)), jnp.zeros(batch, jnp.int32)


def confidence(trees: DraftTree) -> Array:
    """Mean path probability of the drafted nodes of each tree; leaves [..., M] -> [...]."""
    return _mean_over_drafted(jnp.exp(trees.log_prob), trees)


def certainty(trees: DraftTree) -> Array:
    """Minus the mean entropy of the distributions that proposed the drafted nodes, nats; leaves [..., M] -> [...]."""
    return -_mean_over_drafted(trees.entropy, trees)


def _mean_over_drafted(values: Array, trees: DraftTree) -> Array:
    drafted = trees.valid & (trees.depth > 0)
    return jnp.sum(jnp.where(drafted, values, 0.0), axis=-1) / jnp.sum(drafted, axis=-1)


def _score_committed(weights: DrafterWeights, routing: Routing, outputs: Array, pairs: CommittedPairs) -> Array:
    """Running log-likelihoods [N, B] with the tokens of `pairs`; the output before each token predicts it."""
    rows = pairs.tokens.shape[1]
    predicting = jnp.concatenate([routing.output[:, :, None], outputs[:, :, :-1]], axis=2)
    log_prob = token_log_probs(weights, predicting, pairs.tokens)
    row = jnp.arange(rows)
    counts = row < pairs.count[:, None]
    # The first token of a turn comes from the prompt's own pass, before any drafter has predicted it.
    counts &= (routing.chosen >= 0)[:, None]
    age = jnp.where(counts, pairs.count[:, None] - 1 - row, 0)
    fresh = jnp.sum(jnp.where(counts, FORGETTING**age * log_prob, 0.0), axis=-1)
    return FORGETTING**pairs.count * routing.score + fresh


def _at_last(outputs: Array, count: Array) -> Array:
    """Outputs [N, B, R, D] -> [N, B, D] at the last of `count` [B] slots."""
    return jnp.take_along_axis(outputs, (count - 1)[None, :, None, None], axis=2)[:, :, 0]


def _first_best(score: Array) -> Array:
    return jnp.argmax(score, axis=0).astype(jnp.int32)


def _select(trees: DraftTree, chosen: Array) -> DraftTree:
    """Leaves [N, B, ...] -> [B, ...], each row from its chosen [B] specialist."""
    return jax.tree.map(lambda leaf: leaf[chosen, jnp.arange(leaf.shape[1])], trees)
