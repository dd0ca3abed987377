"""The loss against the slow reference, its gradients, and which positions it trains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taps_jax.checkpoints.keymap import flatten
from taps_jax.data.tokenize import supervised_positions
from taps_jax.models.config import DrafterConfig
from taps_jax.models.drafter import Drafter, init_drafter
from taps_jax.training.alignment import aligned_passes
from taps_jax.training.objective import LossParts, LossWeights, distillation_loss
from tests.references.hass import hass_loss_reference, numerical_gradient
from tests.tiny import make_config

WIDTH, VOCAB, ROWS, LENGTH = 16, 20, 3, 9
LAYER = make_config(vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=24, head_dim=4, num_hidden_layers=1)
SHAPE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rope_theta": LAYER.rope_theta,
    "rms_norm_eps": LAYER.rms_norm_eps,
}
DRAFTER = Drafter(DrafterConfig(LAYER, fc_bias=True))
EMPTY_ROW = 2


@pytest.fixture(scope="module")
def params() -> dict:
    return jax.tree.map(lambda leaf: leaf * 2, init_drafter(DRAFTER.config, jax.random.key(0)))


@pytest.fixture(scope="module")
def tables() -> tuple[np.ndarray, np.ndarray]:
    """Embedding and head."""
    rng = np.random.default_rng(1)
    return rng.normal(size=(VOCAB, WIDTH)).astype(np.float32), rng.normal(size=(VOCAB, WIDTH)).astype(np.float32)


@pytest.fixture
def batch() -> dict:
    """Row 0 full, row 1 padded from position 6 on, row 2 without a supervised position."""
    rng = np.random.default_rng(2)
    mask = (rng.random((ROWS, LENGTH)) < 0.7).astype(np.int64)
    mask[:, -1] = mask[1, 6:] = mask[EMPTY_ROW] = 0
    features = rng.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
    noise = (0.1 * rng.normal(size=features.shape)).astype(np.float32)
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH))
    features[1, 6:] = noise[1, 6:] = tokens[1, 6:] = 0
    assert mask[:2].any(1).all()
    return {"tokens": tokens, "features": features, "noise": noise, "mask": mask}


def later(rows) -> jax.Array:
    """Position j holds what was at j + 1."""
    return jnp.concatenate([rows[:, 1:], jnp.zeros_like(rows[:, :1])], axis=1)


def loss_of(params, batch, tables, passes, weights, chunk=7, zero_logit_mask=False) -> tuple[jax.Array, LossParts]:
    noisy = jnp.asarray(batch["features"] + batch["noise"])
    predictions = aligned_passes(
        DRAFTER, params, jnp.asarray(tables[0])[later(batch["tokens"])], noisy, passes, zero_logit_mask
    )
    targets, mask = jnp.asarray(later(batch["features"])), jnp.asarray(batch["mask"] > 0)
    return distillation_loss(predictions, targets, mask, jnp.asarray(tables[1]), weights, chunk)


# One compilation for all tests of the same batch shape.
gradient_of = jax.jit(
    jax.grad(lambda *args: loss_of(*args, 3, LossWeights(topk_size=4, overlap=0.8, passes=(1.0, 0.5, 2.0)))[0])
)


@pytest.mark.parametrize(
    ("passes", "weights", "zero_logit_mask"),
    [
        (1, LossWeights(topk=0.0), False),  # EAGLE-2
        (1, LossWeights(0.7, 0.3, 0.9, 5), True),
        (2, LossWeights(0.7, 0.3, 0.9, 5), False),
        (3, LossWeights(), False),
        (3, LossWeights(0.2, 1.5, 2.0, 1), True),
        (1, LossWeights(0.0, 0.0, 0.0, 1, overlap=1.0), False),
        (3, LossWeights(0.7, 0.3, 0.9, 5, overlap=2.0, passes=(1.0, 0.25, 3.0)), False),
    ],
)
def test_loss_and_parts_equal_the_reference(params, batch, tables, passes, weights, zero_logit_mask):
    loss, parts = loss_of(params, batch, tables, passes, weights, zero_logit_mask=zero_logit_mask)
    want = hass_loss_reference(
        {name: np.asarray(leaf) for name, leaf in flatten(params).items()},
        SHAPE,
        *tables,
        batch,
        passes,
        weights.feature,
        weights.soft,
        weights.topk_size,
        weights.topk,
        zero_logit_mask,
        overlap_weight=weights.overlap,
        pass_weights=weights.passes or None,
    )
    assert float(loss) == pytest.approx(want["loss"], rel=1e-5)
    for name in ("feature", "soft", "topk", *["overlap"] * (weights.overlap > 0)):
        assert getattr(parts, name).tolist() == pytest.approx(want[name], rel=1e-5)
    best = np.asarray(later(batch["features"]) @ tables[1].T).argmax(-1)
    right = [(best == (prediction @ tables[1].T).argmax(-1)) & batch["mask"] for prediction in want["preds"]]
    share = [np.sum(each) / (batch["mask"].sum() + 1e-5) for each in right]
    assert parts.agreement.tolist() == pytest.approx(share, rel=1e-5)
    for found, prediction in zip(parts.agreement3, want["preds"], strict=True):
        first_three = np.argsort(-(prediction @ tables[1].T), axis=-1)[..., :3]
        among = (first_three == best[..., None]).any(-1) & batch["mask"].astype(bool)
        assert float(found) == pytest.approx(among.sum() / (batch["mask"].sum() + 1e-5), rel=1e-5)


def test_drafter_gradients_equal_finite_differences(params, batch, tables):
    """Three passes; the reference holds the drafter's own features fixed, as training detaches them."""
    gradient = flatten(gradient_of(params, batch, tables))
    flat = {name: np.asarray(leaf, np.float64) for name, leaf in flatten(params).items()}
    beyond = {"topk": 4, "overlap_weight": 0.8, "pass_weights": (1.0, 0.5, 2.0)}
    sources = hass_loss_reference(flat, SHAPE, *tables, batch, 3, **beyond)["sources"]
    loss = lambda p: hass_loss_reference(p, SHAPE, *tables, batch, 3, **beyond, fixed_sources=sources)["loss"]
    rng = np.random.default_rng(3)
    for name, leaf in flat.items():
        for _ in range(3):
            index = tuple(int(rng.integers(size)) for size in leaf.shape)
            want = numerical_gradient(loss, flat, name, index)
            assert float(gradient[name][index]) == pytest.approx(want, rel=2e-3, abs=2e-5), (name, index)


def test_a_row_without_answers_leaves_the_gradient_as_it_is(params, batch, tables):
    before = gradient_of(params, batch, tables)
    assert all(np.isfinite(leaf).all() and np.any(leaf) for leaf in jax.tree.leaves(before))
    for name in ("tokens", "features", "noise"):
        batch[name][EMPTY_ROW] = 3 * batch[name][0] + 1 if name != "tokens" else batch[name][0]
    jax.tree.map(np.testing.assert_array_equal, before, gradient_of(params, batch, tables))
    batch["features"][0] *= 2  # whereas a row with answers does change it
    after = gradient_of(params, batch, tables)
    assert all(np.any(a != b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))


def test_a_batch_without_answers_has_no_loss(params, batch, tables):
    batch["mask"][:] = 0
    loss, parts = loss_of(params, batch, tables, 3, LossWeights())
    assert float(loss) == 0 and not np.any(jax.tree.leaves(parts))
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, 0), gradient_of(params, batch, tables))


def draw_rows():
    """Random predictions, targets, supervised positions and head; distances on both sides of 1."""
    keys = jax.random.split(jax.random.key(4), 4)
    return (
        jax.random.normal(keys[0], (2, 2, 13, 8)),
        jax.random.normal(keys[1], (2, 13, 8)),
        jax.random.bernoulli(keys[2], 0.4, (2, 13)),
        jax.random.normal(keys[3], (20, 8)),
    )


def unchunked(predictions, targets, supervised, head, weights: LossWeights) -> jax.Array:
    """The objective written plainly over all positions, for JAX to differentiate."""
    p = jax.nn.softmax(targets @ head.T)
    log_q = jax.nn.log_softmax(predictions @ head.T)
    least = jnp.sort(p, axis=-1)[..., -weights.topk_size, None]
    difference = jnp.abs(predictions - targets)
    feature = jnp.where(difference < 1, 0.5 * difference**2, difference - 0.5).mean(-1)
    soft, topk = -(p * log_q).sum(-1), -jnp.where(p >= least, p * log_q, 0).sum(-1)
    each = weights.feature * feature + weights.soft * soft + weights.topk * topk
    return jnp.sum(each * supervised) / (supervised.sum() + 1e-5)


WEIGHTS = LossWeights(0.7, 0.3, 0.9, 5)
plain_loss = jax.jit(jax.value_and_grad(unchunked), static_argnums=4)
# ((loss, parts), gradient); compiled once for all tests that share shapes and chunk.
chunked = jax.jit(jax.value_and_grad(distillation_loss, has_aux=True), static_argnums=(4, 5))


@pytest.mark.parametrize("chunk", [1, 7, 26, 256])
def test_chunks_give_the_plain_loss_and_gradient(chunk):
    """26 positions: chunks that divide them, one that does not, and one that is longer."""
    predictions, targets, supervised, head = draw_rows()
    want, gradient = plain_loss(predictions, targets, supervised, head, WEIGHTS)
    (loss, _), found = chunked(predictions, targets, supervised, head, WEIGHTS, chunk)
    assert float(loss) == pytest.approx(float(want), rel=1e-5)
    np.testing.assert_allclose(found, gradient, rtol=1e-4, atol=1e-6)
    assert np.any(np.asarray(gradient))


def test_the_gradient_follows_what_the_loss_is_multiplied_by():
    """The custom derivative scales with the cotangent, and a bfloat16 prediction gets a bfloat16 gradient."""
    predictions, targets, supervised, head = draw_rows()
    (_, once) = chunked(predictions, targets, supervised, head, WEIGHTS, 7)
    loss = lambda rows: 3 * distillation_loss(rows.astype(jnp.float32), targets, supervised, head, WEIGHTS, 7)[0]
    thrice = jax.jit(jax.grad(loss))(predictions.astype(jnp.bfloat16))
    assert thrice.dtype == jnp.bfloat16
    np.testing.assert_allclose(thrice.astype(jnp.float32), 3 * once, atol=0.01)


def test_targets_and_head_are_frozen():
    predictions, targets, supervised, head = draw_rows()
    loss = lambda t, h: distillation_loss(predictions, t, supervised, h, WEIGHTS, 8)[0]
    assert not any(np.any(gradient) for gradient in jax.grad(loss, argnums=(0, 1))(targets, head))


def test_padding_changes_nothing():
    """Longer rows and another row, all unsupervised and full of large numbers."""
    predictions, targets, supervised, head = draw_rows()
    pad = lambda rows, value: jnp.pad(
        rows,
        [(0, 0)] * (rows.ndim - 3) + [(0, 1), (0, 5), (0, 0)] if rows.ndim > 2 else [(0, 1), (0, 5)],
        constant_values=value,
    )
    want, _ = chunked(predictions, targets, supervised, head, WEIGHTS, 7)
    found = distillation_loss(pad(predictions, 1e4), pad(targets, -1e4), pad(supervised, False), head, WEIGHTS, 7)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), want, found)


def test_losses_of_parts_of_a_batch_add_up():
    """With the whole batch's count, rows one by one give what they give together, gradients too."""
    predictions, targets, supervised, head = draw_rows()
    whole = chunked(predictions, targets, supervised, head, WEIGHTS, 7)
    parts = [
        chunked(predictions, targets, supervised & only, head, WEIGHTS, 7, supervised.sum())
        for only in (jnp.array([[True], [False]]), jnp.array([[False], [True]]))
    ]
    assert float(parts[0][0][0]) != pytest.approx(float(parts[1][0][0]))
    jax.tree.map(lambda a, *b: np.testing.assert_allclose(sum(b), a, rtol=1e-5, atol=1e-7), whole, *parts)


def test_parts_by_hand():
    """Head and features are multiples of unit vectors, so that probabilities can be written down."""
    log = float(np.log(3))  # a logit of log 3 over three of 0: probabilities 1/2, 1/6, 1/6, 1/6
    unit = lambda index: log * np.eye(4)[index]
    targets = jnp.asarray([[unit(0), unit(1), unit(2), unit(3)]], jnp.float32)
    predictions = jnp.asarray([[[unit(0), unit(2), unit(2), unit(3)]], [[unit(3), unit(1), unit(2), unit(1)]]])
    supervised = jnp.asarray([[True, True, True, False]])
    _, parts = distillation_loss(predictions, targets, supervised, jnp.eye(4), LossWeights(topk_size=1), 2)
    # Pass 1 errs at position 1, pass 2 at position 0; position 3 does not count.
    scale = 1 / (3 + 1e-5)
    assert parts.agreement.tolist() == pytest.approx([2 * scale] * 2)
    # A wrong prediction is off by log 3 in two of four entries.
    assert parts.feature.tolist() == pytest.approx([2 * (log - 0.5) / 4 * scale] * 2, rel=1e-5)
    right, wrong = np.log(2) / 2, np.log(6) / 2  # of the most probable token, which has 1/2
    assert parts.topk.tolist() == pytest.approx([(2 * right + wrong) * scale] * 2, rel=1e-5)
    rest = np.log(6) / 2, np.log(2) / 6 + 2 * np.log(6) / 6
    soft = 2 * (right + rest[0]) + wrong + rest[1]
    assert parts.soft.tolist() == pytest.approx([soft * scale] * 2, rel=1e-5)


def test_overlap_by_hand():
    """Half a point mass in common costs log 2; nothing in common costs a finite amount and has no NaN gradient."""
    head = 200 * jnp.eye(4)
    targets = jnp.asarray([[[1.0, 0, 0, 0], [1.0, 0, 0, 0], [1.0, 0, 0, 0]]])
    predictions = jnp.asarray([[[[1.0, 1.0, 0, 0], [1.0, 0, 0, 0], [0, 0, 0, 1.0]]]])
    weights = LossWeights(0.0, 0.0, 0.0, 1, overlap=1.0)
    for supervised, want in (([1, 0, 0], np.log(2)), ([0, 1, 0], 0.0), ([0, 0, 1], -np.log(1e-30))):
        args = (predictions, targets, jnp.asarray([supervised], bool), head, weights, 2)
        (loss, parts), gradient = chunked(*args)
        assert float(loss) == pytest.approx(want, rel=1e-4, abs=1e-6)
        assert parts.overlap.tolist() == pytest.approx([float(loss)], abs=1e-6)
        assert np.isfinite(gradient).all()


def test_exactly_the_supervised_positions_receive_gradient():
    """Position j is trained when tokens j+1 and j+2 are of one answer; its stop token belongs to it."""
    #        sys usr  ?  gen  I   am  ok end  usr gen  No end
    answer = [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1]
    trained = [3, 4, 5, 9]  # (I, am), (am, ok), (ok, end) and (No, end)
    supervised = supervised_positions(np.array(answer, bool))
    assert np.flatnonzero(supervised).tolist() == trained
    predictions, targets, _, head = draw_rows()
    mask = jnp.zeros((2, 13), bool).at[1, :12].set(supervised)  # the second of two rows, padded by one
    _, gradient = chunked(predictions, targets, mask, head, WEIGHTS, 7)
    touched = np.any(np.asarray(gradient) != 0, axis=-1)
    assert [np.flatnonzero(row).tolist() for row in touched[:, 1]] == [trained] * 2
    assert not touched[:, 0].any()


@pytest.mark.parametrize(
    ("answer", "trained"),
    [
        ("0001", []),  # an answer cut to one token
        ("0011", [1]),
        ("1100", []),  # no position precedes token 0
        ("1110", [0]),
        ("0110110", [0, 3]),  # two answers never join
        ("1", []),
        ("00", []),
    ],
)
def test_supervised_positions_at_the_edges(answer, trained):
    found = supervised_positions(np.array([flag == "1" for flag in answer]))
    assert found.dtype == bool and len(found) == len(answer)
    assert np.flatnonzero(found).tolist() == trained
