"""Every number of a report on a trace of three questions, worked out by hand.

Trees have a root and two nodes: a chain (node 2 below node 1) or two siblings (both below the root).
"""

import math

import numpy as np
import pytest

from taps_jax.evaluation.cells import Cell
from taps_jax.evaluation.summary import node_kinds, summarise
from taps_jax.evaluation.trace import TracedAnswer, stack_steps

STOP = 9
CHAIN, SIBLINGS = (0, 0, 1), (0, 0, 0)


def step(position, committed, parent, accepted, chosen=0, probs=(0.5, 0.25), entropies=(1.0, 2.0), origins=(1, 2)):
    return (
        position,
        committed,
        chosen,
        (0.0, 0.0),
        (1, 2, 3),
        parent,
        (0.0, *map(math.log, probs)),
        (0.0, *entropies),
        (0, *origins),
        (False, *accepted),
    )


@pytest.fixture
def cell() -> Cell:
    answers = (
        # Two turns. In the first: a whole chain and the bonus, nothing but the bonus, then one node of two and the end
        # of the sequence inside the path: its token was the stop, so there is no bonus.
        TracedAnswer(
            "a",
            0,
            (5, 2, 3, 4, 6, STOP),
            stack_steps(
                [
                    step(0, 3, CHAIN, (True, True)),
                    step(3, 1, SIBLINGS, (False, False), chosen=1),
                    step(4, 1, CHAIN, (True, False), chosen=1, probs=(0.8, 0.4), origins=(3, 1)),
                ]
            ),
        ),
        TracedAnswer("a", 1, (5, 7, STOP), stack_steps([step(0, 2, SIBLINGS, (False, True), entropies=(3.0, 4.0))])),
        # The only token came with the prompt: no steps.
        TracedAnswer("b", 0, (STOP,), None),
        # One step.
        TracedAnswer("c", 0, (1, STOP), stack_steps([step(0, 1, CHAIN, (False, False), chosen=1)])),
    )
    return Cell(
        row="Routed",
        specialists=("math", "chat"),
        compose="route:confidence",
        nodes=3,
        workload="w",
        temperature=0.0,
        answers=answers,
        questions={},
        pieces={},
        correct={"a": True, "c": False},
        speed=None,
    )


def numbers(*cells: Cell) -> list[dict]:
    return summarise(cells, {"seed": 1})["cells"]


def test_acceptance_lengths(cell):
    (found,) = numbers(cell)
    assert (found["questions"], found["answers"], found["tokens"]) == (3, 4, 12)
    assert (found["committed"], found["steps"]) == (8, 5)
    assert found["tau"] == 8 / 5
    assert found["tau_eagle"] == 8 / (2 + 0 + 0)
    assert found["tau_hass"] == pytest.approx(1 + ((2 + 0 + 1 + 1) / 4 + 0) / 2)  # question b has no steps
    assert found["tau_spec_bench"] == (3 + 1 + 2 + 2 + 1) / 5
    low, high = found["tau_interval"]
    assert 1 <= low < 8 / 5 < high <= 7 / 4  # from question c alone to question a alone


def test_acceptance_by_depth_leaves_out_steps_that_the_end_cut(cell):
    # Depth 1: all five steps tried, three accepted. Depth 2: of those three the first accepted, the second had no
    # bonus and says nothing, the third went on with the bonus, where its tree had no deeper node.
    assert numbers(cell)[0]["acceptance_by_depth"] == [3 / 5, 1 / 2]


def test_nodes_are_accepted_rejected_or_unreached(cell):
    kinds = [node_kinds(answer.steps) for answer in cell.answers if answer.steps is not None]
    first, second, third = kinds
    assert first["accepted"][:, 1:].tolist() == [[True, True], [False, False], [True, False]]
    assert first["rejected"][:, 1:].tolist() == [[False, False], [True, True], [False, False]]
    assert first["unreached"][:, 1:].tolist() == [[False, False], [False, False], [False, True]]
    assert second["rejected"][:, 1:].tolist() == [[True, False]]
    assert third["rejected"][:, 1:].tolist() == [[True, False]]
    assert third["unreached"][:, 1:].tolist() == [[False, True]]
    assert not any(kind[name][:, 0].any() for kind in kinds for name in kind)
    (found,) = numbers(cell)
    nodes = found["nodes"]
    assert {name: kind["count"] for name, kind in nodes.items()} == {"accepted": 4, "rejected": 4, "unreached": 2}
    assert nodes["accepted"]["confidence"] == pytest.approx((0.5 + 0.25 + 0.8 + 0.25) / 4, abs=1e-6)
    assert nodes["rejected"]["confidence"] == pytest.approx((0.5 + 0.25 + 0.5 + 0.5) / 4, abs=1e-6)
    assert nodes["unreached"]["confidence"] == pytest.approx((0.4 + 0.25) / 2, abs=1e-6)
    assert nodes["accepted"]["entropy"] == (1 + 2 + 1 + 4) / 4
    assert nodes["rejected"]["entropy"] == (1 + 2 + 3 + 1) / 4
    assert nodes["unreached"]["entropy"] == 2


def test_shares(cell):
    (found,) = numbers(cell)
    assert found["routing_shares"] == {"math": 2 / 5, "chat": 3 / 5}
    assert found["origin_shares"] == {"math": 2 / 4, "chat": 3 / 4}  # of origins 1, 2, 3 (both) and 2
    assert found["nodes_verified"] == 3 and found["nodes_used"] == 3
    assert found["accuracy"] == 1 / 2
    (alone,) = numbers(cell._replace(specialists=("math",), compose="single"))
    assert alone["routing_shares"] is None and alone["origin_shares"] is None


def test_loops_are_told_and_left_out(cell):
    steps = cell.answers[1].steps
    looping = TracedAnswer("d", 0, (1,) * 30, steps)
    (found,) = numbers(cell._replace(answers=(*cell.answers, looping)))
    assert found["looping_share"] == 1 / 5
    assert found["tau"] == pytest.approx(10 / 6, abs=1e-6) and found["tau_without_loops"] == 8 / 5


def test_differences_are_paired(cell):
    """The other row accepts one token more in question c, and so takes no step there that commits one."""
    answers = list(cell.answers)
    answers[3] = TracedAnswer("c", 0, (1, 2, STOP), stack_steps([step(0, 2, CHAIN, (True, False))]))
    other = cell._replace(row="Other", answers=tuple(answers))
    elsewhere = cell._replace(row="Other", temperature=1.0)
    (found,) = summarise([cell, other, elsewhere], {})["differences"]
    assert found["rows"] == ["Routed", "Other"] and (found["workload"], found["temperature"]) == ("w", 0.0)
    assert found["difference"] == pytest.approx(8 / 5 - 9 / 5)
    low, high = found["interval"]
    assert low == -1 and high == 0  # c alone, and a alone


def test_a_cell_without_steps_has_no_numbers(cell):
    (found,) = numbers(cell._replace(answers=(cell.answers[2],), correct={}))
    for name in ("tau", "tau_eagle", "tau_hass", "tau_spec_bench", "accuracy", "nodes_used"):
        assert found[name] is None
    assert found["tau_interval"] == [None, None] and found["acceptance_by_depth"] == []


def test_types_are_plain(cell):
    (found,) = numbers(cell)
    assert not any(isinstance(value, np.generic) for value in found.values())
