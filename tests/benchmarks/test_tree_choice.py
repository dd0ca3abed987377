"""The remembered choice of a draft tree."""

import types

import numpy as np
import pytest

from taps_jax.benchmarks import tree_choice
from taps_jax.benchmarks.tree_choice import TreeChoice, cached_tree
from taps_jax.speculative.tree import TreeShape
from taps_jax.speculative.tree_search import Choice

FOUND = TreeChoice([Choice(TreeShape(12, 2, 3), 2.5, 60.0)], 40.0)


@pytest.fixture
def searches(monkeypatch, tmp_path) -> list[int]:
    """The batch sizes of the searches made, with a cache folder of the test's own."""
    made = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tree_choice, "find_tree", lambda _, __, batch_size, ___: made.append(batch_size) or FOUND)
    return made


def decoder(weight: float = 0.0):
    drafter = types.SimpleNamespace(params={"fc": np.full(3, weight)}, vocabulary=np.arange(4))
    return types.SimpleNamespace(fingerprint="abc"), drafter


def test_a_search_is_made_once_per_verifier_drafter_and_batch(searches):
    for _ in range(2):
        assert cached_tree(*decoder(), 1, iter) == FOUND
        assert cached_tree(*decoder(), 4, iter) == FOUND
        assert cached_tree(*decoder(weight=1.0), 1, iter) == FOUND
    assert searches == [1, 4, 1]


def test_a_damaged_memory_is_made_anew(searches, tmp_path):
    cached_tree(*decoder(), 1, iter)
    (file,) = tmp_path.rglob("trees.json")
    file.write_text("{")
    assert cached_tree(*decoder(), 1, iter) == FOUND
    assert searches == [1, 1]


def test_the_choice_says_whether_speculation_pays():
    assert "from 1.50 on speculation is faster, and here it is 1.67x its speed, faster" in str(FOUND)
