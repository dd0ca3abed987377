"""Training rows: cutting, padding, the order of an epoch and resuming in it, and draft vocabularies."""

import itertools

import numpy as np
import pytest

from taps_jax.data.batches import batch_rows, pad_rows, to_example
from taps_jax.data.tokenize import Encoded
from taps_jax.data.vocabulary import frequent_tokens, uncovered_share
from taps_jax.errors import InputError
from taps_jax.training.feeding import padded_length


def take(count: int, examples: int = 11, size: int = 3, seed: int = 4, position: int = 0, window: int = 1):
    """Of examples whose lengths are scattered."""
    lengths = np.arange(examples) * 7 % 11
    batches = batch_rows(lengths, size, seed, position, window)
    return [(epoch, rows.tolist()) for epoch, rows in itertools.islice(batches, count)]


def test_an_epoch_is_a_permutation_without_its_incomplete_batch():
    """Eleven examples in batches of three: nine a time, in an order drawn from (seed, epoch)."""
    batches = take(12)
    assert [epoch for epoch, _ in batches] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    for epoch in range(4):
        order = np.random.default_rng((4, epoch)).permutation(11)
        assert [row for of, rows in batches if of == epoch for row in rows] == order[:9].tolist()
    assert {row for _, rows in batches for row in rows} == set(range(11))  # nobody is left out of every epoch


def test_a_divisible_epoch_covers_everything_once():
    for epoch, group in itertools.groupby(take(9, examples=9), lambda batch: batch[0]):
        assert sorted(row for _, rows in group for row in rows) == list(range(9)), epoch


def test_resuming_anywhere_goes_on_exactly():
    batches = take(20)
    for position in range(16):
        assert take(4, position=position) == batches[position : position + 4]


def test_a_window_puts_rows_of_about_one_length_together():
    """Of 40 rows in batches of four, each window of five batches has the rows that it would have by chance."""
    by_chance, by_length = take(20, examples=40, size=4), take(20, examples=40, size=4, window=5)
    spread = lambda batches: sum(np.ptp(np.array(rows) * 7 % 11) for _, rows in batches)
    assert spread(by_length) < 0.5 * spread(by_chance)
    rows_of = lambda batches, start: sorted(row for _, rows in batches[start : start + 5] for row in rows)
    assert all(rows_of(by_length, start) == rows_of(by_chance, start) for start in range(0, 20, 5))
    means = [np.mean(np.array(rows) * 7 % 11) for _, rows in by_length[:5]]
    assert means != sorted(means)  # short ones do not come first
    for position in (1, 7, 10, 13):
        assert (
            take(6, examples=40, size=4, window=5, position=position)
            == take(20, examples=40, size=4, window=5)[position : position + 6]
        )


@pytest.mark.parametrize(("longest", "padded"), [(1, 96), (96, 96), (97, 192), (200, 288), (289, 320), (320, 320)])
def test_batches_have_one_of_four_lengths(longest, padded):
    assert padded_length(longest, 320) == padded
    assert padded_length(300, 300) == 320 and padded_length(20, 20) == 32
    assert len({padded_length(length, 1024) for length in range(1, 1025)}) == 4


def test_one_batch_per_epoch():
    assert [epoch for epoch, _ in take(3, examples=3)] == [0, 1, 2]
    assert take(2, examples=5, position=7)[0] == take(9, examples=5)[7]


def test_seeds_and_epochs_have_their_own_order():
    starts = [(seed, position) for seed in (4, 5) for position in (0, 3)]
    orders = [tuple(row for _, rows in take(3, seed=seed, position=at) for row in rows) for seed, at in starts]
    assert len(set(orders)) == 4


def test_padding():
    assert pad_rows([np.array([1, 2]), np.array([3])], 3).tolist() == [[1, 2, 0], [3, 0, 0]]
    features = [np.ones((2, 4), np.float16), np.ones((3, 4), np.float16)]
    padded = pad_rows(features, 3)
    assert padded.shape == (2, 3, 4) and padded.dtype == np.float16
    assert padded.sum((1, 2)).tolist() == [8, 12] and not padded[0, 2].any()
    assert pad_rows([np.array([True])], 2).tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("cut", "supervised"),
    [
        (9, [2, 3, 6]),  # position j is trained when tokens j+1 and j+2 are of one answer
        (8, [2, 3]),  # the second answer is down to one token
        (7, [2, 3]),
        (5, [2]),
        (4, None),  # one token of the first answer: nothing to train
        (1, None),
    ],
)
def test_cutting_to_a_length(cut, supervised):
    #                  0  1  2  3  4  5  6  7  8
    answer = np.array([0, 0, 0, 1, 1, 1, 0, 1, 1], bool)
    example = to_example(Encoded(np.arange(9, dtype=np.int32) + 10, answer), cut)
    if supervised is None:
        assert example is None
    else:
        assert example.tokens.tolist() == list(range(10, 10 + cut)) and example.tokens.dtype == np.int32
        assert len(example.supervised) == cut and np.flatnonzero(example.supervised).tolist() == supervised


ANSWERS = [np.array([7, 7, 7, 5, 5, 9]), np.array([9, 5, 4]), np.array([], int)]


@pytest.mark.parametrize(
    ("size", "stops", "golden"),
    [
        # 5 and 7 occur three times, 9 twice, 4 once.
        (1, (8,), [8]),
        (2, (8,), [5, 8]),  # of equally frequent tokens the lower id
        (3, (8,), [5, 7, 8]),
        (5, (8,), [4, 5, 7, 8, 9]),
        (7, (8,), [0, 1, 4, 5, 7, 8, 9]),  # filled up by id
        (2, (11, 7), [7, 11]),
        (2, (), [5, 7]),
        (12, (8,), list(range(12))),
    ],
)
def test_frequent_tokens(size, stops, golden):
    found = frequent_tokens(ANSWERS, size, stops, 12)
    assert found.tolist() == golden and found.dtype == np.int32


@pytest.mark.parametrize(("size", "stops", "least"), [(0, (8,), 1), (1, (8, 9), 2), (13, (8,), 1)])
def test_sizes_of_a_draft_vocabulary_that_cannot_be(size, stops, least):
    with pytest.raises(InputError, match=f"draft vocabulary of {size} tokens, expected {least} to 12"):
        frequent_tokens(ANSWERS, size, stops, 12)


def test_uncovered_share():
    """Of nine tokens, 5 and 7 are six."""
    assert uncovered_share(ANSWERS, np.array([5, 7, 8])) == pytest.approx(3 / 9)
    assert uncovered_share(ANSWERS, np.arange(12)) == 0
    assert uncovered_share(ANSWERS, np.array([8])) == 1
