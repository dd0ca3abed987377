"""Every number of a report, from the traces of its cells.

Definitions, over the verification steps of a cell; a step's accepted nodes are drafted nodes whose tokens were kept.

    tau                committed tokens / steps, pooled over all answers; 95% bootstrap interval over questions
    tau_eagle          committed tokens / (steps - 1 per turn), as EAGLE's and TAPS's scripts count
    tau_hass           mean over questions of the mean accepted nodes per step, plus 1, as HASS's script counts
    tau_spec_bench     mean over all steps of accepted nodes plus 1, as Spec-Bench counts: an answer's last step has a
                       bonus token even if the answer ended before it
    acceptance_by_depth  of the steps that accepted d - 1 nodes and whose answer went on, the share that accepted d
    reached, unreached a node is reached if its parent is the root or accepted and the answer went on after the parent;
                       reached nodes are accepted or rejected, the others never had their turn
    confidence         a node's path probability under the drafter; entropy: of the distribution that proposed it, nats
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from taps_jax.evaluation.bootstrap import difference_interval, ratio_interval
from taps_jax.evaluation.cells import Cell
from taps_jax.evaluation.loops import is_looping
from taps_jax.evaluation.offline_router import offline_tables
from taps_jax.evaluation.trace import Steps, TracedAnswer
from taps_jax.speculative.composition import Composition

SCHEMA = 1


def summarise(cells: Sequence[Cell], settings: dict[str, Any]) -> dict[str, Any]:
    """The content of results.json.

    Args:
      cells: read one at a time.
      settings: told as they are.
    Returns:
      {"schema", "settings", "cells": numbers of each cell, "differences": of tau between rows of a column,
      "offline_routing": what `offline_router` finds}.
    """
    found, sums = [], {}
    for cell in cells:
        by_question = _by_question(cell.answers)
        sums[cell.row, cell.workload, cell.temperature] = by_question
        found.append(_cell(cell, by_question))
    return {
        "schema": SCHEMA,
        "settings": settings,
        "cells": found,
        "differences": _differences(sums),
        "offline_routing": offline_tables(cells),
    }


def _by_question(answers: Iterable[TracedAnswer]) -> dict[str, tuple[int, int]]:
    """Committed tokens and steps of each question, over its turns."""
    sums: dict[str, tuple[int, int]] = {}
    for answer in answers:
        committed, steps = sums.get(answer.question_id, (0, 0))
        if answer.steps is not None:
            committed, steps = committed + int(answer.steps.committed.sum()), steps + len(answer.steps.committed)
        sums[answer.question_id] = committed, steps
    return sums


def _cell(cell: Cell, by_question: dict[str, tuple[int, int]]) -> dict[str, Any]:
    committed, steps = zip(*by_question.values(), strict=True)
    traced = [answer.steps for answer in cell.answers if answer.steps is not None]
    looping = [answer for answer in cell.answers if is_looping(answer.tokens)]
    straight = [answer for answer in cell.answers if not is_looping(answer.tokens)]
    return {
        "row": cell.row,
        "specialists": list(cell.specialists),
        "compose": cell.compose,
        "workload": cell.workload,
        "temperature": cell.temperature,
        "questions": len(by_question),
        "answers": len(cell.answers),
        "tokens": sum(len(answer.tokens) for answer in cell.answers),
        "committed": sum(committed),
        "steps": sum(steps),
        "tau": _ratio(sum(committed), sum(steps)),
        "tau_interval": [_rounded(end) for end in ratio_interval(committed, steps)],
        "tau_eagle": _ratio(sum(committed), sum(len(part.committed) - 1 for part in traced)),
        "tau_hass": _tau_hass(cell.answers),
        "tau_spec_bench": _mean([part.accepted.sum(axis=1) + 1 for part in traced]),
        "nodes_verified": cell.nodes,
        "nodes_used": _mean([1 + part.drafted.sum(axis=1) for part in traced]),
        "acceptance_by_depth": _acceptance_by_depth(traced),
        "nodes": _node_means(traced),
        "routing_shares": _routing_shares(cell, traced),
        "origin_shares": _origin_shares(cell, traced),
        "looping_share": _ratio(len(looping), len(cell.answers)),
        "tau_without_loops": _pooled_tau(straight),
        "accuracy": _ratio(sum(cell.correct.values()), len(cell.correct)),
    }


def _rounded(value: float) -> float | None:
    """As results tell it: enough digits, the same on every machine; None for what is not a number."""
    return round(float(value), 6) if np.isfinite(value) else None


def _ratio(above: float, below: float) -> float | None:
    return _rounded(above / below) if below else None


def _mean(parts: list[np.ndarray]) -> float | None:
    values = np.concatenate(parts) if parts else np.zeros(0)
    return _rounded(values.mean(dtype=np.float64)) if values.size else None


def _pooled_tau(answers: list[TracedAnswer]) -> float | None:
    sums = _by_question(answers).values()
    return _ratio(sum(committed for committed, _ in sums), sum(steps for _, steps in sums))


def _tau_hass(answers: Iterable[TracedAnswer]) -> float | None:
    accepted: dict[str, list[np.ndarray]] = {}
    for answer in answers:
        if answer.steps is not None:
            accepted.setdefault(answer.question_id, []).append(answer.steps.accepted.sum(axis=1))
    means = [np.concatenate(parts).mean() for parts in accepted.values()]
    return _rounded(np.mean(means) + 1) if means else None


def _acceptance_by_depth(traced: list[Steps]) -> list[float | None]:
    """For depths 1, 2, ... up to the deepest drafted node."""
    deepest = max((int(part.depth.max()) for part in traced), default=0)
    accepted = np.concatenate([part.accepted.sum(axis=1) for part in traced]) if traced else np.zeros(0)
    went_on = np.concatenate([part.bonus for part in traced]) if traced else np.zeros(0, bool)
    shares = []
    for depth in range(1, deepest + 1):
        tried = (accepted >= depth) | ((accepted == depth - 1) & went_on)
        shares.append(_ratio(int((accepted >= depth).sum()), int(tried.sum())))
    return shares


def node_kinds(steps: Steps) -> dict[str, np.ndarray]:
    """Which drafted nodes of an answer's trees were accepted, rejected and never reached, each [S, M] bool."""
    reachable = steps.accepted.copy()
    reachable[:, 0] = True
    last = np.argmax(np.where(reachable, steps.depth, -1), axis=1)  # the answer may end with the deepest of them
    reachable[np.arange(len(last)), last] &= steps.bonus
    reached = np.take_along_axis(reachable, steps.parent, axis=1) & steps.drafted
    rejected = reached & ~steps.accepted
    return {"accepted": steps.accepted, "rejected": rejected, "unreached": steps.drafted & ~steps.accepted & ~rejected}


def _node_means(traced: list[Steps]) -> dict[str, dict[str, Any]]:
    kinds = [node_kinds(part) for part in traced]
    return {
        name: {
            "count": int(sum(kind[name].sum() for kind in kinds)),
            "confidence": _mean([np.exp(part.log_prob[kind[name]]) for part, kind in zip(traced, kinds, strict=True)]),
            "entropy": _mean([part.entropy[kind[name]] for part, kind in zip(traced, kinds, strict=True)]),
        }
        for name in ("accepted", "rejected", "unreached")
    }


def _routing_shares(cell: Cell, traced: list[Steps]) -> dict[str, float | None] | None:
    """Of all steps, the share that each specialist drafted; None where nothing is routed."""
    if not Composition(cell.compose).routes:
        return None
    return {name: _mean([part.chosen == index for part in traced]) for index, name in enumerate(cell.specialists)}


def _origin_shares(cell: Cell, traced: list[Steps]) -> dict[str, float | None] | None:
    """Of the accepted nodes, the share that each specialist proposed; one may count for several. None for one."""
    if len(cell.specialists) == 1:
        return None
    origins = [part.origin[part.accepted] for part in traced]
    return {name: _mean([part >> index & 1 for part in origins]) for index, name in enumerate(cell.specialists)}


def _differences(sums: dict[tuple[str, str, float], dict[str, tuple[int, int]]]) -> list[dict[str, Any]]:
    """Tau of one row minus that of another on the same questions, for every pair of rows of a column."""
    found = []
    keys = list(sums)
    for place, (row, *column) in enumerate(keys):
        for other, *others in keys[place + 1 :]:
            if others != column:
                continue
            one, two = (list(zip(*sums[name, *column].values(), strict=True)) for name in (row, other))
            found.append(
                {
                    "rows": [row, other],
                    "workload": column[0],
                    "temperature": column[1],
                    "difference": _rounded(sum(one[0]) / max(1, sum(one[1])) - sum(two[0]) / max(1, sum(two[1]))),
                    "interval": [_rounded(end) for end in difference_interval(one, two)],
                }
            )
    return found
