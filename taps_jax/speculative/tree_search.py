"""Choosing the draft tree's size: acceptance lengths of many sizes from one wide trace, weighed by measured times.

The trace holds, for every position of some texts, all candidates of one wide and deep growth. What a smaller size would
have drafted there is read off it: fewer tokens per node, a narrower beam, fewer levels, fewer nodes kept. That is exact
except where a narrower beam expands a node that the wide beam passed over; such a node counts as a leaf here, so
acceptance lengths are slightly low rather than high.

Shapes: P positions, C candidates, K the trace's top_k.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from taps_jax.speculative.decode import Models, Weights
from taps_jax.speculative.replay import count_steps, position_chunks, read_text, trees_at
from taps_jax.speculative.tree import TreeShape


class Text(NamedTuple):
    """A prompt and the answer that was decoded from it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Trace(NamedTuple):
    """Candidates at every position of some texts, in drafting order.

    Attributes:
      shape: the size they were grown with, all candidates kept.
      log_prob: [P, C] float32, cumulative.
      parent: [P, C] int32 candidate index, -1 for the root.
      true: [P, depth + 1] int32, the candidate that continues the text at each level, -1 if there is none.
      lengths: positions of each text; their sum is P.
    """

    shape: TreeShape
    log_prob: np.ndarray
    parent: np.ndarray
    true: np.ndarray
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens that steps must commit."""
        return sum(self.lengths)


class Choice(NamedTuple):
    """A size with what it promises: acceptance length, milliseconds a step."""

    shape: TreeShape
    acceptance_length: float
    step_ms: float

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.acceptance_length / self.step_ms


def wide_shape(depth: int, top_k: int) -> TreeShape:
    """A size that keeps every candidate."""
    return TreeShape(1 + top_k + depth * top_k**2, depth, top_k)


def trace_texts(models: Models, weights: Weights, texts: Sequence[Text], depth: int, top_k: int) -> Trace:
    """Drafts along some texts with one specialist.

    Args:
      models, weights: a speculative decoder; its tree's size does not matter.
      texts: answers of at least two tokens.
      depth, top_k: of the trace, the most that a size can be asked about.
    """
    shape = wide_shape(depth, top_k)
    models = models._replace(shape=shape)
    size = -(-max(len(text.prompt) + len(text.answer) for text in texts) // 64) * 64
    parts, lengths = [], []
    for text in texts:
        tokens = np.full(size + 1, -1, np.int32)
        tokens[: len(text.prompt) + len(text.answer)] = (*text.prompt, *text.answer)
        read = read_text(models, weights, jnp.maximum(tokens[:-1], 0))
        start, steps = len(text.prompt), len(text.answer) - 1
        lengths.append(steps)
        for chunk, used in position_chunks(start, start + steps):
            found = _candidates(models, weights, read, chunk, tokens)
            parts.append([part[:used] for part in jax.device_get(found)])
    return Trace(shape, *(np.concatenate(part) for part in zip(*parts, strict=True)), tuple(lengths))


def _candidates(models, weights, read, positions, text):
    tree = jax.tree.map(lambda leaf: leaf[0], trees_at(models, weights, read, jnp.asarray(positions)))
    after = jnp.asarray(text)[jnp.minimum(positions[:, None] + tree.depth, text.shape[0] - 1)]
    on_text = ~jnp.any(tree.ancestor & ~(tree.token == after)[:, None], axis=-1)
    levels = jnp.arange(1, models.shape.depth + 2)
    here = on_text[:, 1:, None] & (tree.depth[:, 1:, None] == levels)
    true = jnp.where(jnp.any(here, axis=1), jnp.argmax(here, axis=1), -1)
    return tree.log_prob[:, 1:], tree.parent[:, 1:] - 1, true


def acceptance_length(trace: Trace, accepted: np.ndarray) -> float:
    """Tokens per step when `accepted` [P] drafted nodes would be accepted at each position."""
    ends = np.cumsum(trace.lengths)
    texts = np.split(accepted, ends[:-1])
    return trace.tokens / sum(map(count_steps, texts))


def accepted_by_shape(trace: Trace, shapes: Sequence[TreeShape]) -> Iterator[tuple[TreeShape, np.ndarray]]:
    """Accepted nodes [P] at every position, for sizes no wider or deeper than the trace."""
    by_top_k: dict[int, list[TreeShape]] = {}
    for shape in shapes:
        by_top_k.setdefault(shape.top_k, []).append(shape)
    for top_k, group in by_top_k.items():
        drafted = _drafted_with(trace, top_k)
        ranks: dict[int, np.ndarray] = {}
        for shape in group:
            if shape.depth not in ranks:
                ranks[shape.depth] = _true_ranks(trace, drafted, shape.depth)
            kept = ranks[shape.depth] < shape.num_nodes - 1
            yield shape, np.cumprod(kept, axis=1).sum(axis=1)


def _drafted_with(trace: Trace, top_k: int) -> np.ndarray:
    """Which candidates [P, C] a growth with a smaller `top_k` has."""
    wide, positions = trace.shape.top_k, len(trace.log_prob)
    drafted = np.zeros(trace.log_prob.shape, bool)
    drafted[:, :top_k] = True
    level = slice(0, wide)
    for depth in range(trace.shape.depth):
        scores = np.where(drafted[:, level], trace.log_prob[:, level], -np.inf)
        beam = np.argsort(-scores, axis=1, kind="stable")[:, :top_k] + level.start
        expanded = np.zeros_like(drafted)
        expanded[np.arange(positions)[:, None], beam] = True
        level = slice(wide + depth * wide**2, wide + (depth + 1) * wide**2)
        first_siblings = np.arange(wide**2) % wide < top_k
        drafted[:, level] = np.take_along_axis(expanded, trace.parent[:, level], axis=1) & first_siblings
    return drafted


def _true_ranks(trace: Trace, drafted: np.ndarray, depth: int) -> np.ndarray:
    """Place of the text's own nodes [P, depth + 1] among the candidates of the first levels; beyond all if absent."""
    wide = trace.shape.top_k
    count = wide + depth * wide**2
    scores = np.where(drafted[:, :count], trace.log_prob[:, :count], -np.inf)
    ranks = np.full((len(scores), depth + 1), count, np.int64)
    for level in range(depth + 1):
        node = trace.true[:, level]
        rows = np.flatnonzero((node >= 0) & np.take_along_axis(drafted, np.maximum(node, 0)[:, None], axis=1)[:, 0])
        own = scores[rows, node[rows]][:, None]
        before = (scores[rows] > own) | ((scores[rows] == own) & (np.arange(count) < node[rows][:, None]))
        ranks[rows, level] = before.sum(axis=1)
    return ranks


def rank_shapes(trace: Trace, shapes: Sequence[TreeShape], step_ms: Callable[[TreeShape], float]) -> list[Choice]:
    """Sizes by the tokens per second they promise, best first."""
    choices = [
        Choice(shape, acceptance_length(trace, accepted), step_ms(shape))
        for shape, accepted in accepted_by_shape(trace, shapes)
    ]
    return sorted(choices, key=lambda choice: -choice.tokens_per_second)
