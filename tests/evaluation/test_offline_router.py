"""Offline rules on traces of three questions, worked out by hand."""

import math

import pytest

from taps_jax.evaluation.cells import Cell
from taps_jax.evaluation.offline_router import offline_tables, route_offline
from taps_jax.evaluation.trace import TracedAnswer, stack_steps


def step(position, committed, prob, entropy):
    """A tree of a root and one node, accepted if two tokens are committed."""
    arrays = (1, 2), (0, 0), (0.0, math.log(prob)), (0.0, entropy), (0, 1), (False, committed == 2)
    return (position, committed, 0, (0.0,), *arrays)


def make_cell(name: str, questions: dict[str, list[tuple]]) -> Cell:
    """From question to its steps' (committed, probability, entropy)."""
    answers = []
    for identity, steps in questions.items():
        rows, position = [], 0
        for committed, prob, entropy in steps:
            rows.append(step(position, committed, prob, entropy))
            position += committed
        answers.append(TracedAnswer(identity, 0, (1,) * 5, stack_steps(rows)))
    answers.append(TracedAnswer("stepless", 0, (1,), None))
    return Cell(name, (name,), "single", 2, "w", 0.0, tuple(answers), {}, {}, {}, None)


# Each question's answer has five tokens, four of them from steps.
MATH = make_cell(
    "math",
    {
        "a": [(2, 0.9, 1.0), (2, 0.7, 5.0)],  # tau 2, confidence 0.8, first entropy 1
        "b": [(1, 0.5, 3.0), (1, 0.3, 1.0), (2, 0.4, 1.0)],  # tau 4/3, confidence 0.4, first entropy 3
        "c": [(1, 0.6, 2.0), (1, 0.6, 2.0), (1, 0.6, 2.0), (1, 0.6, 2.0)],  # tau 1, confidence 0.6, entropy 2
    },
)
CHAT = make_cell(
    "chat",
    {
        "a": [(1, 0.2, 4.0), (1, 0.2, 4.0), (2, 0.2, 4.0)],  # tau 4/3, confidence 0.2, first entropy 4
        "b": [(2, 0.5, 3.0), (2, 0.3, 1.0)],  # tau 2, confidence 0.4: a tie; entropy 3: a tie
        "c": [(2, 0.5, 1.0), (2, 0.5, 1.0)],  # tau 2, confidence 0.5, entropy 1
    },
)


def test_rules_choose_by_question():
    found = route_offline([MATH, CHAT])
    # Math alone: 12 tokens in 9 steps; chat alone: 12 in 7.
    oracle, best = 12 / 6, 12 / 7
    assert found["oracle"].tau == oracle and found["oracle"].gap_closed == 1
    assert found["oracle"].shares == pytest.approx({"math": 1 / 3, "chat": 2 / 3})
    assert found["confidence"].shares == {"math": 1, "chat": 0}  # b is a tie, and the first wins
    assert found["confidence"].tau == 12 / 9
    assert found["confidence"].gap_closed == pytest.approx((12 / 9 - best) / (oracle - best))
    assert found["entropy"].shares == pytest.approx({"math": 2 / 3, "chat": 1 / 3})
    assert found["entropy"].tau == 12 / (2 + 3 + 2)
    assert found["entropy"].gap_closed == pytest.approx(0)


def test_an_oracle_without_gain_has_no_gap():
    found = route_offline([MATH, MATH._replace(specialists=("same",))])
    assert found["oracle"].gap_closed is None and found["oracle"].shares == {"math": 1, "same": 0}


def test_tables_take_single_specialists_of_each_column():
    composed = MATH._replace(specialists=("math", "chat"), compose="merge:trie")
    rows = offline_tables([MATH, CHAT, composed, MATH._replace(temperature=1.0)])
    assert [(row["temperature"], row["rule"]) for row in rows] == [
        (0.0, "oracle"), (0.0, "confidence"), (0.0, "entropy"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="single specialists"):
        route_offline([MATH, composed])
    with pytest.raises(ValueError, match="same answers"):
        route_offline([MATH, CHAT._replace(answers=CHAT.answers[1:])])
