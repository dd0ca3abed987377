"""Drafting every row of a table along decoded texts: trees are grown once and composed for each row."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from taps_jax.evaluation.trace import Steps, stack_steps
from taps_jax.speculative.composition import Composition
from taps_jax.speculative.decode import Models, Weights
from taps_jax.speculative.replay import ReadText, compose_at, position_chunks, read_text, trees_at, turn_scores
from taps_jax.speculative.tree import DraftTree


class Row(NamedTuple):
    """Specialists by their places among those stacked, and how they share a step."""

    members: tuple[int, ...]
    composition: Composition


def replay_answer(
    models: Models, weights: Weights, rows: Mapping[str, Row], prompt: Sequence[int], answer: Sequence[int]
) -> dict[str, Steps | None]:
    """The steps that each row would have taken to write `answer`.

    Args:
      models, weights: a decoder with all specialists of all rows stacked; its own composition does not matter.
      rows: by name.
      prompt, answer: token ids.
    Returns:
      Steps by row name; None when the answer's only token is the one that reading the prompt yields. `origin` bits and
      `score` columns are places among the row's own members.
    """
    start, count = len(prompt), len(answer) - 1
    if not count:
        return dict.fromkeys(rows)
    size = -(-(start + count + 1) // 64) * 64
    levels = models.shape.path_length - 1
    text = np.full(size + levels + 1, -1, np.int32)
    text[: start + count + 1] = (*prompt, *answer)
    read = read_text(models, weights, jnp.asarray(np.maximum(text[:size], 0)))
    parts: dict[str, list] = {name: [] for name in rows}
    scores: dict[str, np.ndarray | None] = {}
    for chunk, used in position_chunks(start, start + count):
        trees = trees_at(models, weights, read, jnp.asarray(chunk))
        if not scores:
            first = jax.tree.map(lambda leaf: leaf[:, :1], trees)
            scores = {
                name: turn_scores(row.composition, *_members(weights, read, first, row), start, count)
                for name, row in rows.items()
            }
        following = jnp.asarray(text[chunk[:, None] + np.arange(1, levels + 1)])
        for name, row in rows.items():
            score = scores[name]
            score = None if score is None else jnp.asarray(score[:, chunk - start])
            found = compose_at(row.composition, models.shape, _of_members(trees, row), score, following)
            parts[name].append(jax.tree.map(lambda leaf, used=used: leaf[:used], jax.device_get(_slim(found))))
    return {name: _walk(found, count) for name, found in parts.items()}


def _of_members(trees: DraftTree, row: Row) -> DraftTree:
    members = np.asarray(row.members)
    trees = jax.tree.map(lambda leaf: leaf[members], trees)
    bits = (1 << np.arange(len(members), dtype=np.int32))[:, None, None]
    return trees.replace(origin=jnp.where(trees.origin > 0, bits, 0))


def _slim(found) -> tuple:
    """What the trace keeps, positions first."""
    tree, path, score, chosen = found
    arrays = (tree.token, tree.parent, tree.log_prob, tree.entropy, tree.origin)
    return path.nodes, path.count, chosen, score.T, *arrays


def _members(weights: Weights, read: ReadText, first: DraftTree, row: Row):
    """The parts of a row's own specialists."""
    members = np.asarray(row.members)
    pick = lambda tree: jax.tree.map(lambda leaf: leaf[members], tree)
    drafter = weights.drafter
    own = None if drafter.own is None else drafter.own[members]
    alone = drafter._replace(params=pick(drafter.params), own=own)
    return alone, read._replace(outputs=read.outputs[members], cache=pick(read.cache)), pick(first)


def _walk(parts: list[tuple], count: int) -> Steps:
    """From what each position would accept to the steps that are taken."""
    nodes, accepted_count, chosen, score, *tree = (np.concatenate(part) for part in zip(*parts, strict=True))
    rows, at = [], 0
    while at < count:
        accepted = np.zeros(tree[0].shape[1], bool)
        accepted[nodes[at, 1 : 1 + accepted_count[at]]] = True
        committed = min(int(accepted_count[at]) + 1, count - at)
        rows.append((at, committed, chosen[at], score[at], *(leaf[at] for leaf in tree), accepted))
        at += committed
    return stack_steps(rows)
