"""Aligned passes against the slow reference, what each query sees, and where gradients stop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taps_jax.checkpoints.keymap import flatten
from taps_jax.models.config import DrafterConfig
from taps_jax.models.drafter import Drafter, init_drafter
from taps_jax.training.alignment import aligned_passes, attend_aligned
from tests.references.hass import drafter_layer_reference, hass_passes_reference, source_table
from tests.tiny import make_config

BATCH, SIZE, WIDTH = 2, 7, 16


def make(fc_bias: bool = False, kv_heads: int = 2):
    """A drafter, its parameters (scaled up, so that attention is far from even), embeddings and features."""
    config = make_config(
        hidden_size=WIDTH, intermediate_size=24, head_dim=4, num_hidden_layers=1, num_key_value_heads=kv_heads
    )
    config = DrafterConfig(config, fc_bias)
    params = jax.tree.map(lambda leaf: leaf * 2, init_drafter(config, jax.random.key(0)))
    rng = np.random.default_rng(0)
    embeddings, features = (jnp.asarray(rng.normal(size=(BATCH, SIZE, WIDTH)), jnp.float32) for _ in range(2))
    return Drafter(config), params, embeddings, features


def reference_shape(drafter: Drafter) -> dict:
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps")
    return {name: getattr(drafter.config.layer, name) for name in names}


def check_against_reference(passes: int, zero_logit_mask: bool, fc_bias: bool, kv_heads: int) -> np.ndarray:
    drafter, params, embeddings, features = make(fc_bias, kv_heads)
    found = np.asarray(aligned_passes(drafter, params, embeddings, features, passes, zero_logit_mask))
    flat = {name: np.asarray(leaf) for name, leaf in flatten(params).items()}
    assert ("fc.bias" in flat) == fc_bias
    for row in range(BATCH):
        want = hass_passes_reference(
            flat, reference_shape(drafter), embeddings[row], features[row], passes, zero_logit_mask
        )
        np.testing.assert_allclose(found[:, row], np.stack(want), rtol=1e-4, atol=1e-4)
    return found


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("fc_bias", [False, True])
def test_passes_equal_the_reference(passes, fc_bias):
    """Under both masks, which do differ: only at the last position does the zero-logit mask hide nothing."""
    exact = check_against_reference(passes, False, fc_bias, kv_heads=2)
    zero = check_against_reference(passes, True, fc_bias, kv_heads=2)
    assert exact.shape == (passes, BATCH, SIZE, WIDTH)
    assert np.abs(exact - zero)[:, :, :-1].max(-1).min() > 1e-3
    np.testing.assert_allclose(exact[0, :, -1], zero[0, :, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_other_head_groupings_equal_the_reference(kv_heads):
    for zero_logit_mask in (False, True):
        check_against_reference(3, zero_logit_mask, False, kv_heads)


# Row: query, column: key. The digit is the source that the query uses there, 0 being the verifier's features and n
# those that pass n predicted; a dot is unseen.
SEEN = {
    1: ["0.....", "00....", "000...", "0000..", "00000.", "000000"],
    2: ["1.....", "01....", "001...", "0001..", "00001.", "000001"],
    3: ["2.....", "12....", "012...", "0012..", "00012.", "000012"],
}


def golden(passes: int) -> np.ndarray:
    return np.array([[-1 if cell == "." else int(cell) for cell in row] for row in SEEN[passes]])


def read_back(passes: int, size: int, zero_logit_mask: bool) -> np.ndarray:
    """Attention weights [query, source, key]: queries are zero, and values say where they come from."""
    width = passes * size
    keys = jax.random.normal(jax.random.key(1), (1, 1, size, width))  # must not matter to zero queries
    named = np.eye(width, dtype=np.float32).reshape(passes, 1, 1, size, width)
    sources = [(keys, jnp.asarray(values)) for values in named]
    out = attend_aligned(jnp.zeros((1, size, 1, width)), sources, zero_logit_mask)
    return np.asarray(out)[0].reshape(size, passes, size)


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_which_source_each_query_sees(passes):
    table = golden(passes)
    np.testing.assert_array_equal(source_table(passes, 6), table)
    weights = read_back(passes, 6, zero_logit_mask=False)
    seen = weights > 0
    assert seen.sum(1).max() == 1  # a column comes from one source only
    np.testing.assert_array_equal(np.where(seen.any(1), seen.argmax(1), -1), table)
    # All scores are zero, so a query that sees n columns gives each 1/n.
    columns = (table >= 0).sum(1)
    np.testing.assert_allclose(weights.sum(1), (table >= 0) / columns[:, None], rtol=1e-6)


def test_more_passes_than_positions_see_what_exists():
    """Early queries lack some of the diagonals; none may wrap around."""
    weights = read_back(4, 2, zero_logit_mask=False)
    np.testing.assert_array_equal(weights[0], [[0, 0], [0, 0], [0, 0], [1, 0]])
    np.testing.assert_array_equal(weights[1], [[0, 0], [0, 0], [0.5, 0], [0, 0.5]])


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_the_zero_logit_mask_gives_later_columns_a_share(passes):
    """The same columns are seen, but every score is zero, so all six columns of the row weigh the same."""
    weights = read_back(passes, 6, zero_logit_mask=True)
    table = golden(passes)
    np.testing.assert_array_equal(np.where((weights > 0).any(1), (weights > 0).argmax(1), -1), table)
    np.testing.assert_allclose(weights.sum(1), (table >= 0) / 6, rtol=1e-5)


def test_no_gradient_reaches_the_features_fed_to_a_pass():
    """Pass n reads at its first n-1 positions nothing but what it was fed: there its gradient is exactly zero."""
    drafter, params, embeddings, features = make()
    passes = lambda rows: aligned_passes(drafter, params, embeddings, rows, 3)
    predictions, back = jax.vjp(jax.jit(passes), features)

    def gradient(number: int, position: int) -> np.ndarray:
        picked = jnp.zeros_like(predictions).at[number - 1, :, position].set(1)
        return np.abs(np.asarray(back(picked)[0])).max((0, 2)) > 0

    flows = {(number, position): gradient(number, position).tolist() for number in (1, 2, 3) for position in range(4)}
    for (number, position), reached in flows.items():
        direct = max(0, position + 2 - number)  # verifier columns that the query sees
        assert reached == [column < direct for column in range(SIZE)], (number, position)


def test_parameter_gradients_are_those_of_passes_fed_constants():
    """Later passes differentiate their own computation only, not how the features they read came about."""
    drafter, params, embeddings, features = make(fc_bias=True)
    fixed = aligned_passes(drafter, params, embeddings, features, 3)
    constants = [features, *(jnp.concatenate([features[:, :1], fixed[n][:, :-1]], 1) for n in (0, 1))]
    positions = jnp.broadcast_to(jnp.arange(SIZE), (BATCH, SIZE))
    goal = jnp.asarray(np.random.default_rng(5).normal(size=fixed.shape), jnp.float32)

    def with_constants(p):
        call = lambda method, *args: drafter.apply({"params": p}, *args, method=method)
        inputs = [call(Drafter.fuse, embeddings, source) for source in constants]
        stored = [call(Drafter.keys_values, x, positions) for x in inputs]
        outputs = [
            call(Drafter.finish, x, attend_aligned(call(Drafter.queries, x, positions), stored[: number + 1], False))
            for number, x in enumerate(inputs)
        ]
        return jnp.sum(jnp.stack(outputs) * goal)

    found = jax.jit(jax.grad(lambda p: jnp.sum(aligned_passes(drafter, p, embeddings, features, 3) * goal)))(params)
    want = jax.jit(jax.grad(with_constants))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), found, want)


def test_a_position_depends_on_nothing_after_it():
    """Changing position 4 leaves the predictions before it as they were, in every pass."""
    drafter, params, embeddings, features = make()
    before = aligned_passes(drafter, params, embeddings, features, 3)
    after = aligned_passes(drafter, params, embeddings.at[:, 4].add(1), features.at[:, 4].add(1), 3)
    np.testing.assert_array_equal(before[:, :, :4], after[:, :, :4])
    assert np.all(np.abs(np.asarray(before - after)[:, :, 4]).max(-1) > 1e-3)


def test_a_pass_reads_predictions_one_position_earlier():
    """Pass 2 by hand: position 0 keeps the verifier's feature, position i gets what pass 1 predicted at i-1."""
    drafter, params, embeddings, features = make()
    found = np.asarray(aligned_passes(drafter, params, embeddings, features, 2))
    flat = {name: np.asarray(leaf) for name, leaf in flatten(params).items()}
    fed = np.concatenate([features[0, :1], found[0, 0, :-1]])
    want = drafter_layer_reference(flat, reference_shape(drafter), embeddings[0], [features[0], fed])
    np.testing.assert_allclose(found[1, 0], want, rtol=1e-4, atol=1e-4)
