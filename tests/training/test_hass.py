"""The HASS passes and loss against the slow NumPy reference, and where gradients may and may not flow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taps_jax.checkpoints.hf_drafter import drafter_config
from taps_jax.checkpoints.keymap import flatten, unflatten
from taps_jax.data.tokenize import supervised_positions
from taps_jax.models.drafter import Drafter, init_drafter
from taps_jax.training.alignment import aligned_passes, attend_aligned
from taps_jax.training.objective import LossWeights, distillation_loss
from tests.references.hass import hass_loss_reference, hass_passes_reference, numerical_gradient, source_table
from tests.tiny import make_config

CONFIG = make_config(vocab_size=20, hidden_size=16, intermediate_size=24, head_dim=4)
SHAPE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rope_theta": CONFIG.rope_theta,
    "rms_norm_eps": CONFIG.rms_norm_eps,
}
ROWS, LENGTH = 3, 9


def setup(fc_bias: bool, seed: int = 0):
    """A drafter with parameters and a batch; row 1 is padded from position 6 on, row 2 has an empty mask."""
    config = drafter_config(CONFIG, fc_bias)
    params = jax.tree.map(lambda leaf: leaf * 2, init_drafter(config, jax.random.key(seed)))
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    mask = (rng.random((ROWS, LENGTH)) < 0.7).astype(np.int64)
    mask[:, -1] = mask[1, 6:] = mask[2] = 0
    features, noise = draw(ROWS, LENGTH, 16), 0.1 * draw(ROWS, LENGTH, 16)
    features[1, 6:] = noise[1, 6:] = 0
    tokens = rng.integers(0, 20, (ROWS, LENGTH))
    batch = {"tokens": tokens, "features": features, "noise": noise, "mask": mask}
    return Drafter(config), params, batch, draw(20, 16), draw(20, 16)


def shifted(rows):
    return np.concatenate([rows[:, 1:], np.zeros_like(rows[:, :1])], axis=1)


def our_loss(drafter, params, batch, table, head, passes, zero_logit_mask, weights, chunk=7):
    embeddings = jnp.asarray(table)[shifted(batch["tokens"])]
    noisy, target = jnp.asarray(batch["features"] + batch["noise"]), jnp.asarray(shifted(batch["features"]))
    predictions = aligned_passes(drafter, params, embeddings, noisy, passes, zero_logit_mask)
    return distillation_loss(predictions, target, jnp.asarray(batch["mask"] > 0), jnp.asarray(head), weights, chunk)


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("zero_logit_mask", [False, True])
@pytest.mark.parametrize("fc_bias", [False, True])
def test_loss_equals_the_reference(passes, zero_logit_mask, fc_bias):
    drafter, params, batch, table, head = setup(fc_bias)
    weights = LossWeights(0.7, 0.3, 0.9, 5)
    loss, parts = our_loss(drafter, params, batch, table, head, passes, zero_logit_mask, weights)
    flat = {name: np.asarray(leaf) for name, leaf in flatten(params).items()}
    want = hass_loss_reference(
        flat, SHAPE, table, head, batch, passes, 0.7, 0.3, 5, 0.9, zero_logit_mask=zero_logit_mask
    )
    assert float(loss) == pytest.approx(want["loss"], rel=1e-5)
    for name in ("feature", "soft", "topk"):
        assert getattr(parts, name).tolist() == pytest.approx(want[name], rel=1e-5)
    right = [
        np.sum(
            (np.argmax(prediction @ head.T, -1) == np.argmax(shifted(batch["features"]) @ head.T, -1)) * batch["mask"]
        )
        / (batch["mask"].sum() + 1e-5)
        for prediction in want["preds"]
    ]
    assert parts.agreement.tolist() == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("zero_logit_mask", [False, True])
def test_passes_equal_the_reference(zero_logit_mask):
    drafter, params, batch, table, _ = setup(True)
    embeddings = jnp.asarray(table)[shifted(batch["tokens"])]
    found = aligned_passes(drafter, params, embeddings, jnp.asarray(batch["features"]), 3, zero_logit_mask)
    flat = {name: np.asarray(leaf) for name, leaf in flatten(params).items()}
    for row in range(ROWS):
        want = hass_passes_reference(
            flat, SHAPE, np.asarray(embeddings[row]), batch["features"][row], 3, zero_logit_mask
        )
        np.testing.assert_allclose(found[:, row], np.stack(want), rtol=1e-4, atol=1e-4)


def test_gradients_equal_finite_differences():
    """The drafter's own features are held fixed in the reference, as they are detached in training."""
    drafter, params, batch, table, head = setup(True)
    weights = LossWeights(topk_size=4)
    gradient = jax.grad(lambda p: our_loss(drafter, p, batch, table, head, 3, False, weights)[0])(params)
    gradient = flatten(gradient)
    flat = {name: np.asarray(leaf, np.float64) for name, leaf in flatten(params).items()}
    sources = hass_loss_reference(flat, SHAPE, table, head, batch, 3, topk=4)["sources"]
    loss = lambda p: hass_loss_reference(p, SHAPE, table, head, batch, 3, topk=4, fixed_sources=sources)["loss"]
    rng = np.random.default_rng(3)
    for name, leaf in flat.items():
        for _ in range(3):
            index = tuple(int(rng.integers(size)) for size in leaf.shape)
            want = numerical_gradient(loss, flat, name, index)
            assert float(gradient[name][index]) == pytest.approx(want, rel=2e-3, abs=2e-5), (name, index)


def test_a_row_without_answers_changes_nothing():
    drafter, params, batch, table, head = setup(False)
    gradient = lambda b: jax.grad(lambda p: our_loss(drafter, p, b, table, head, 3, False, LossWeights())[0])(params)
    changed = {**batch, "features": batch["features"].copy(), "tokens": batch["tokens"].copy()}
    changed["features"][2] *= 5
    changed["tokens"][2] = 1
    jax.tree.map(np.testing.assert_array_equal, gradient(batch), gradient(changed))
    empty = {**batch, "mask": np.zeros_like(batch["mask"])}
    assert float(our_loss(drafter, params, empty, table, head, 3, False, LossWeights())[0]) == 0
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, 0), gradient(empty))


def test_the_chunked_gradient_is_that_of_one_chunk():
    drafter, params, batch, table, head = setup(False)
    by_chunk = [
        jax.grad(lambda p, c=chunk: our_loss(drafter, p, batch, table, head, 2, False, LossWeights(), c)[0])(params)
        for chunk in (4, 64)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *by_chunk)


GOLDEN_SOURCES = {  # row: query, column: key; which pass's features, -1 unseen
    1: ["0.....", "00....", "000...", "0000..", "00000.", "000000"],
    2: ["1.....", "01....", "001...", "0001..", "00001.", "000001"],
    3: ["2.....", "12....", "012...", "0012..", "00012.", "000012"],
}


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_which_source_each_query_sees(passes):
    """Queries are zero, so weights are even over what is seen; values name their source and column."""
    size = 6
    golden = np.array([[-1 if cell == "." else int(cell) for cell in row] for row in GOLDEN_SOURCES[passes]])
    np.testing.assert_array_equal(source_table(passes, size), golden)
    width = passes * size
    sources = []
    for source in range(passes):
        values = np.zeros((1, 1, size, width), np.float32)
        values[0, 0, np.arange(size), source * size + np.arange(size)] = 1
        sources.append((jnp.zeros((1, 1, size, width)), jnp.asarray(values)))
    weights = np.asarray(attend_aligned(jnp.zeros((1, size, 1, width)), sources, False))[0].reshape(size, passes, size)
    found = np.where(weights.sum(1) > 0, weights.argmax(1), -1)
    np.testing.assert_array_equal(found, golden)
    np.testing.assert_allclose(weights.sum((1, 2)), 1, rtol=1e-6)


def test_exactly_the_supervised_positions_get_gradient():
    """12 tokens: a prompt of 4, an answer of 4 with its stop token, a user turn of 2, an answer of 2 with its stop."""
    answer = np.array([0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1], bool)
    # Position j reads token j+1 and predicts token j+2, both of one answer: 4-5, 5-6, 6-7, and 10-11.
    assert np.flatnonzero(supervised_positions(answer)).tolist() == [3, 4, 5, 9]
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    predictions, targets, head = draw(3, 1, 12, 8), draw(1, 12, 8), draw(20, 8)
    supervised = jnp.asarray(supervised_positions(answer))[None]
    gradient = jax.grad(lambda p: distillation_loss(p, targets, supervised, head, LossWeights(topk_size=3), 5)[0])(
        predictions
    )
    touched = np.any(np.asarray(gradient) != 0, axis=-1)[:, 0]
    assert [np.flatnonzero(row).tolist() for row in touched] == [[3, 4, 5, 9]] * 3


def test_names_survive_the_reference_layout():
    """The reference takes the drafter's parameters under the names of a checkpoint."""
    _, params, *_ = setup(True)
    jax.tree.map(np.testing.assert_array_equal, unflatten(flatten(params)), params)
