"""Acceptance length on a trace written by hand, and tables."""

import math

from taps_jax.evaluation.metrics import totals
from taps_jax.evaluation.tables import format_table
from taps_jax.speculative.engine import Completion


def completion(tokens: int, steps: int) -> Completion:
    return Completion(0, tuple(range(tokens)), steps, 1.0)


def test_acceptance_length_pools_over_steps_and_leaves_out_the_first_token():
    # 10 tokens in 3 steps: 9 committed. 1 token: the prompt's own, no step. A stop cut the third: 4 in 2 steps.
    found = totals([completion(10, 3), completion(1, 0), completion(5, 2)])
    assert (found.answers, found.tokens, found.committed, found.steps) == (3, 16, 13, 5)
    assert found.acceptance_length == 13 / 5


def test_acceptance_length_without_steps_is_not_a_number():
    assert math.isnan(totals([completion(1, 0)]).acceptance_length)


def test_tables_align():
    table = format_table(("name", "x"), [("a", "1"), ("longer", "10.5")])
    assert table.splitlines() == [
        "| name   |    x |",
        "| ------ | ---: |",
        "| a      |    1 |",
        "| longer | 10.5 |",
    ]
