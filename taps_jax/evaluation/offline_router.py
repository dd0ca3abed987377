"""Routing whole questions after the fact: which specialist stored traces would have chosen, and what it would have got.

TAPS's question-level tables, from the traces of each specialist alone; nothing is decoded again.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from taps_jax.evaluation.cells import Cell
from taps_jax.evaluation.trace import Steps


class Routed(NamedTuple):
    """What an offline rule does on a workload.

    Attributes:
      shares: of the questions, by specialist.
      tau: acceptance length, pooled over the chosen specialists' steps.
      gap_closed: (tau - best single's) / (oracle's - best single's); None where the oracle gains nothing.
    """

    shares: dict[str, float]
    tau: float
    gap_closed: float | None


def route_offline(cells: Sequence[Cell]) -> dict[str, Routed]:
    """Rules on one workload at one temperature.

    `confidence` takes the specialist whose drafted nodes have the highest mean path probability over the whole answer;
    `entropy` the one whose first tree of a question has the lowest mean draft entropy; `oracle` the one with the
    greatest acceptance length. The first of equals wins.

    Args:
      cells: of single specialists, on the same answers.
    Returns:
      "oracle", "confidence" and "entropy".
    Raises:
      ValueError: a cell composes specialists, or the cells have different answers.
    """
    names = [cell.specialists[0] for cell in cells]
    answers = [[(answer.question_id, answer.turn, answer.tokens) for answer in cell.answers] for cell in cells]
    if any(len(cell.specialists) > 1 for cell in cells) or any(other != answers[0] for other in answers):
        raise ValueError("routing offline needs cells of single specialists on the same answers")
    steps = [_by_question(cell) for cell in cells]
    sums = np.array(
        [[_tokens_and_steps(parts) for parts in found.values()] for found in steps], np.float64
    )  # [N, Q, 2]
    scores = {
        "oracle": sums[..., 0] / sums[..., 1],
        "confidence": np.array([[_confidence(parts) for parts in found.values()] for found in steps]),
        "entropy": np.array([[-_first_entropy(parts) for parts in found.values()] for found in steps]),
    }
    taus = {rule: _tau(sums, np.argmax(score, axis=0)) for rule, score in scores.items()}
    best_single = max(float(part[:, 0].sum() / part[:, 1].sum()) for part in sums)
    room = taus["oracle"] - best_single
    return {
        rule: Routed(
            _shares(names, np.argmax(score, axis=0)),
            taus[rule],
            (taus[rule] - best_single) / room if room > 1e-9 else None,
        )
        for rule, score in scores.items()
    }


def _by_question(cell: Cell) -> dict[str, list[Steps]]:
    """Steps of each question's turns; questions without a step are left out."""
    found: dict[str, list[Steps]] = {}
    for answer in cell.answers:
        if answer.steps is not None:
            found.setdefault(answer.question_id, []).append(answer.steps)
    return found


def _tokens_and_steps(parts: list[Steps]) -> tuple[int, int]:
    return sum(int(part.committed.sum()) for part in parts), sum(len(part.committed) for part in parts)


def _confidence(parts: list[Steps]) -> float:
    return float(np.concatenate([np.exp(part.log_prob[part.drafted]) for part in parts]).mean())


def _first_entropy(parts: list[Steps]) -> float:
    first = parts[0]
    return float(first.entropy[0][first.drafted[0]].mean())


def _tau(sums: np.ndarray, chosen: np.ndarray) -> float:
    tokens, steps = sums[chosen, np.arange(len(chosen))].sum(axis=0)
    return float(tokens / steps)


def _shares(names: Sequence[str], chosen: np.ndarray) -> dict[str, float]:
    return {name: float(np.mean(chosen == index)) for index, name in enumerate(names)}


def offline_tables(cells: Sequence[Cell]) -> list[dict]:
    """`route_offline` for every workload and temperature that has at least two single specialists.

    Args:
      cells: of a whole grid; averages count as specialists of their own.
    Returns:
      [{"workload", "temperature", "rule", "shares", "tau", "gap_closed"}].
    """
    columns: dict[tuple[str, float], list[Cell]] = {}
    for cell in cells:
        if len(cell.specialists) == 1:
            columns.setdefault((cell.workload, cell.temperature), []).append(cell)
    return [
        {"workload": workload, "temperature": temperature, "rule": rule, **_plain(routed)}
        for (workload, temperature), singles in columns.items()
        if len(singles) > 1
        for rule, routed in route_offline(singles).items()
    ]


def _plain(routed: Routed) -> Mapping:
    rounded = lambda value: None if value is None else round(value, 6)
    shares = {name: rounded(share) for name, share in routed.shares.items()}
    return {"shares": shares, "tau": rounded(routed.tau), "gap_closed": rounded(routed.gap_closed)}
