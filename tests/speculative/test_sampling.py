"""Choosing tokens, and that sampling returns the same tokens with and without drafting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taps_jax.speculative.engine import Engine, Request, cache_size_for
from taps_jax.speculative.sampling import Sampling, choose, greedy, tempered, truncate
from taps_jax.speculative.tree import TreeShape
from tests.tiny import CONFIG, make_decoder

TEMPERATURES = (0.3, 0.7, 1.0, 2.0)
TRUNCATIONS = ((1.0, 0), (0.9, 0), (1.0, 5), (0.9, 5))
MOST_TOKENS = 20
STOP = (7,)

jit_choose = jax.jit(choose, static_argnames="levels")


def make_sampling(temperature, top_p, top_k, seed: int = 0) -> Sampling:
    """Settings of as many rows as there are temperatures."""
    keys = jax.random.split(jax.random.key(seed), len(temperature))
    return Sampling(jnp.float32(temperature), jnp.float32(top_p), jnp.int32(top_k), keys)


def kept_reference(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> set[int]:
    """Tokens that survive top-k, then top-p of what is left, one token at a time; ties with the last one stay."""
    weights = np.exp((logits - logits.max()).astype(np.float64) / (temperature or 1.0))
    probs = {token: weight / weights.sum() for token, weight in enumerate(weights)}
    if top_k:
        last = sorted(probs.values(), reverse=True)[: min(top_k, len(probs))][-1]
        probs = {token: prob for token, prob in probs.items() if prob >= last}
    if top_p < 1:
        mass, total = 0.0, sum(probs.values())
        for prob in sorted(probs.values(), reverse=True):
            mass += prob / total
            if mass >= top_p:
                break
        probs = {token: other for token, other in probs.items() if other >= prob}
    return set(probs)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [3, 48, 1000])
def test_truncate_keeps_what_the_reference_keeps(vocab, ties):
    settings = [(t, p, k) for t in (0.0, 0.3, 1.0, 2.0) for p in (0.05, 0.5, 0.9, 0.99, 1.0) for k in (0, 1, 5, 2000)]
    logits = np.random.default_rng(vocab).normal(scale=3.0, size=(len(settings), 2, vocab)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    sampling = make_sampling(*zip(*settings, strict=True))
    result = np.asarray(truncate(jnp.asarray(logits), sampling))
    scaled = np.asarray(tempered(jnp.asarray(logits), sampling.temperature))
    for row, setting in enumerate(settings):
        for node in range(2):
            kept = np.isfinite(result[row, node])
            assert set(np.flatnonzero(kept)) == kept_reference(logits[row, node], *setting), setting
            np.testing.assert_array_equal(result[row, node][kept], scaled[row, node][kept])
            assert np.all(result[row, node][~kept] == -np.inf)


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (1.0, 0, {0, 1, 2, 3}),
        (0.6, 0, {0, 1}),
        (0.8, 0, {0, 1, 2, 3}),  # reached by one of two equal tokens
        (1.0, 3, {0, 1, 2, 3}),
        (1.0, 2, {0, 1}),
        (0.6, 2, {0}),  # after top-k the first token has two thirds, before it a half
    ],
)
def test_truncate_by_hand(top_p, top_k, kept):
    logits = jnp.log(jnp.array([[[0.5, 0.25, 0.125, 0.125]]]))
    result = truncate(logits, make_sampling([1.0], [top_p], [top_k]))
    assert set(np.flatnonzero(np.isfinite(result[0, 0]))) == kept
    assert kept_reference(np.asarray(logits[0, 0]), 1.0, top_p, top_k) == kept


def test_tempered_divides_sampled_rows_only():
    logits = jax.random.normal(jax.random.key(0), (3, 2, 9))
    result = tempered(logits, jnp.array([0.0, 0.5, 2.0]))
    np.testing.assert_allclose(result, np.asarray(logits) * np.array([1.0, 2.0, 0.5])[:, None, None], rtol=1e-6)


def test_greedy_rows_take_the_first_maximum():
    logits = jnp.round(jax.random.normal(jax.random.key(0), (4, 6, 20)))  # rounding makes ties
    expected = np.argmax(logits, axis=-1)
    assert np.any(np.sum(np.asarray(logits) == np.max(logits, axis=-1, keepdims=True), axis=-1) > 1)
    place = (jnp.arange(4), jnp.broadcast_to(jnp.arange(6) % 3, (4, 6)), 3)
    np.testing.assert_array_equal(jit_choose(logits, greedy(4), *place), expected)
    for top_p, top_k in TRUNCATIONS:
        mixed = make_sampling([0.0, 1.0, 0.0, 1.0], [top_p] * 4, [top_k] * 4)
        tokens = np.asarray(jit_choose(logits, mixed, *place))
        np.testing.assert_array_equal(tokens[::2], expected[::2])
        assert np.any(tokens[1::2] != expected[1::2])


def test_a_single_kept_token_is_the_argmax():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 20))
    sampling = make_sampling([2.0, 2.0], [1e-6, 1.0], [0, 1])
    tokens = jit_choose(logits, sampling, jnp.zeros(2, jnp.int32), jnp.zeros((2, 3), jnp.int32), 1)
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=-1))


@pytest.mark.parametrize(("top_p", "top_k"), TRUNCATIONS)
def test_a_draw_depends_on_key_and_position_alone(top_p, top_k):
    """A node at depth d chooses as the root d positions later would, whatever the tree and the other rows."""
    logits = jax.random.normal(jax.random.key(0), (2, 5, 30))
    depth, position = jnp.array([[0, 1, 1, 2, 3], [0, 1, 2, 3, 3]]), jnp.array([4, 17])
    sampling = make_sampling([0.7, 1.5], [top_p] * 2, [top_k] * 2)
    tree = jit_choose(logits, sampling, position, depth, 4)
    for row in range(2):
        alone = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], sampling)
        for node in range(5):
            at = (position + depth[:, node])[row : row + 1]
            root = jit_choose(logits[row : row + 1, node : node + 1], alone, at, jnp.zeros((1, 1), jnp.int32), 1)
            assert root[0, 0] == tree[row, node]


def test_keys_and_positions_give_independent_draws():
    logits, position = jnp.zeros((2, 200, 1000)), jnp.array([5, 5])
    depth = jnp.broadcast_to(jnp.arange(200), (2, 200))
    tokens = np.asarray(jit_choose(logits, make_sampling([1.0] * 2, [1.0] * 2, [0] * 2), position, depth, 200))
    assert np.mean(tokens[0] == tokens[1]) < 0.02  # other keys
    assert all(len(set(row)) > 160 for row in tokens)  # other positions: 181 distinct tokens expected


def make_requests(seed: int = 0) -> list[Request]:
    """Every temperature with every truncation and two greedy rows, each with its own prompt."""
    rng = np.random.default_rng(0)
    settings = [(t, p, k) for p, k in TRUNCATIONS for t in TEMPERATURES]
    settings[5:5], settings[10:10] = [(0.0, 0.9, 5)], [(0.0, 1.0, 0)]
    prompts = [tuple(rng.integers(8, CONFIG.vocab_size, rng.integers(1, 30)).tolist()) for _ in settings]
    return [
        Request(prompt, MOST_TOKENS, *setting, seed=(seed, index))
        for index, (prompt, setting) in enumerate(zip(prompts, settings, strict=True))
    ]


def decode(shape: TreeShape | None, requests: list[Request], batch_size: int) -> tuple[list[tuple[int, ...]], int]:
    """Tokens of every request, and steps taken by all."""
    models, weights = make_decoder(shape)
    size = cache_size_for(30, MOST_TOKENS, models.path_length)
    engine = Engine(models, weights, STOP, batch_size=batch_size, cache_size=size, max_new_tokens=MOST_TOKENS)
    done = sorted(engine.decode(requests), key=lambda completion: completion.index)
    assert [completion.index for completion in done] == list(range(len(requests)))
    return [completion.tokens for completion in done], sum(completion.steps for completion in done)


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    return decode(None, make_requests(), 1)[0]


def test_plain_answers_vary(plain):
    """The requests below are worth comparing: some stop early, some do not."""
    lengths = [len(tokens) for tokens in plain]
    assert min(lengths) < MOST_TOKENS == max(lengths)
    assert all(STOP[0] not in tokens[:-1] for tokens in plain)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("shape", [TreeShape(8, 3, 3), TreeShape(16, 2, 4)], ids=str)
def test_speculative_sampling_returns_the_plain_tokens(plain, shape, batch_size):
    tokens, steps = decode(shape, make_requests(), batch_size)
    assert tokens == plain
    assert steps < sum(len(answer) - 1 for answer in plain)  # drafted tokens were accepted


def test_plain_batches_return_the_same_tokens(plain):
    assert decode(None, make_requests(), 4)[0] == plain


def test_seeds(plain):
    requests, shape = make_requests(seed=1), TreeShape(8, 3, 3)
    tokens = decode(shape, requests, 4)[0]
    assert decode(shape, requests, 4)[0] == tokens
    for request, one, other in zip(requests, plain, tokens, strict=True):
        assert (one == other) == (request.temperature == 0), request
