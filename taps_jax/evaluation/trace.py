"""What happened at every step of an answer, kept for all later analyses: trees, accepted paths, routing.

Shapes: S steps of an answer, M tree nodes, N specialists.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from taps_jax.speculative.decode import StepRecord


class Steps(NamedTuple):
    """The verification steps of one answer.

    Attributes:
      position: [S] int32, index among the generated tokens of the step's root; the first step's is 0.
      committed: [S] int32, tokens the step committed, cut at the stop token and at the limit.
      chosen: [S] int32, the specialist whose tree was verified; 0 where nothing is routed.
      score: [S, N] float32, what the router compared, greater is better; zeros where nothing is routed.
      token, parent: [S, M] int32; an unused slot is its own parent.
      log_prob: [S, M] float32, cumulative under the drafter; the root's is 0.
      entropy: [S, M] float32, nats, of the distribution that proposed the node; the root's is 0.
      origin: [S, M] int32, bit n set if specialist n proposed the node; the root's is 0.
      accepted: [S, M] bool, drafted nodes whose tokens were committed.
    """

    position: np.ndarray
    committed: np.ndarray
    chosen: np.ndarray
    score: np.ndarray
    token: np.ndarray
    parent: np.ndarray
    log_prob: np.ndarray
    entropy: np.ndarray
    origin: np.ndarray
    accepted: np.ndarray

    @property
    def drafted(self) -> np.ndarray:
        """[S, M] bool, nodes in use other than the root."""
        slots = np.arange(self.parent.shape[1])
        return (self.parent != slots) & (slots > 0)

    @property
    def depth(self) -> np.ndarray:
        """[S, M] int32, 0 for the root and for unused slots."""
        depth = np.zeros_like(self.parent)
        for node in range(1, depth.shape[1]):  # parents come first
            above = np.take_along_axis(depth, self.parent[:, node : node + 1], axis=1)[:, 0]
            depth[:, node] = np.where(self.drafted[:, node], above + 1, 0)
        return depth

    @property
    def bonus(self) -> np.ndarray:
        """[S] bool, whether the step's last committed token is the verifier's own."""
        return self.accepted.sum(axis=1) < self.committed


class TracedAnswer(NamedTuple):
    """One answered turn: which, its generated tokens (the first of which needs no step), and the steps."""

    question_id: str
    turn: int
    tokens: tuple[int, ...]
    steps: Steps


def steps_from_records(records: Iterable[StepRecord]) -> Steps:
    """From what decoding did in one row, step by step; leaves without a batch axis."""
    rows, position = [], 0
    for record in records:
        tree, committed = record.tree, int(record.committed)
        accepted = np.zeros(tree.token.shape, bool)
        accepted[record.path.nodes[1 : 1 + min(int(record.path.count), committed)]] = True
        score = record.routing.score if record.routing else np.zeros(1, np.float32)
        chosen = record.routing.chosen if record.routing else 0
        arrays = (tree.token, tree.parent, tree.log_prob, tree.entropy, tree.origin, accepted)
        rows.append((position, committed, int(chosen), score, *arrays))
        position += committed
    return stack_steps(rows)


def stack_steps(rows: list[tuple]) -> Steps:
    """Steps from tuples of the fields of one step each; at least one."""
    types = (*[np.int32] * 3, np.float32, *[np.int32] * 2, *[np.float32] * 2, np.int32, bool)
    return Steps(*(np.asarray(values, kind) for values, kind in zip(zip(*rows, strict=True), types, strict=True)))


_LISTS = {
    "score": pa.float32(),
    "token": pa.int32(),
    "parent": pa.int32(),
    "log_prob": pa.float32(),
    "entropy": pa.float32(),
    "origin": pa.int32(),
    "accepted": pa.bool_(),
}
SCHEMA = pa.schema(
    [("question_id", pa.string()), ("turn", pa.int32())]
    + [(name, pa.int32()) for name in ("position", "committed", "chosen")]
    + [(name, pa.list_(kind)) for name, kind in _LISTS.items()]
)


def to_table(answers: Iterable[TracedAnswer]) -> pa.Table:
    """A table with a row per step; answers without steps leave none."""
    columns: dict[str, list] = {name: [] for name in SCHEMA.names}
    for answer in answers:
        if answer.steps is None:
            continue
        columns["question_id"] += [answer.question_id] * len(answer.steps.position)
        columns["turn"] += [answer.turn] * len(answer.steps.position)
        for name, values in answer.steps._asdict().items():
            columns[name] += list(values) if values.ndim == 1 else values.tolist()
    return pa.table(columns, schema=SCHEMA)


def from_table(table: pa.Table) -> Iterator[tuple[tuple[str, int], Steps]]:
    """The steps of every answer in a table by (question_id, turn), in the table's order."""
    ids, turns = table["question_id"].to_pylist(), table["turn"].to_pylist()
    keys = list(zip(ids, turns, strict=True))
    starts = [row for row, key in enumerate(keys) if row == 0 or key != keys[row - 1]]
    for start, end in zip(starts, [*starts[1:], len(keys)], strict=True):
        part = table.slice(start, end - start)
        rows = list(zip(*(part[name].to_pylist() for name in Steps._fields), strict=True))
        yield keys[start], stack_steps(rows)
