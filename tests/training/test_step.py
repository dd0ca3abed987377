"""One optimizer step: accumulation, noise, clipping, AdamW, its schedule and its dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from taps_jax.models.config import DrafterConfig
from taps_jax.models.drafter import Drafter, init_drafter
from taps_jax.training.alignment import aligned_passes
from taps_jax.training.objective import LossWeights, distillation_loss
from taps_jax.training.step import Batch, Frozen, _inputs, init_state, make_optimizer, make_train_step
from tests.tiny import make_config

WIDTH, VOCAB, ROWS, LENGTH = 16, 24, 8, 10
LAYER = make_config(vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=24, head_dim=4, num_hidden_layers=1)
DRAFTER = Drafter(DrafterConfig(LAYER))
WEIGHTS = LossWeights(topk_size=4)
ADAMW = {"b1": 0.9, "b2": 0.95, "weight_decay": 0.01}


def make_frozen() -> Frozen:
    rng = np.random.default_rng(1)
    return Frozen(*(jnp.asarray(rng.normal(size=(VOCAB, WIDTH)), jnp.float32) for _ in range(2)))


def fresh_params() -> dict:
    """New arrays each time, since a step consumes those of its state."""
    return init_drafter(DRAFTER.config, jax.random.key(0))


def make_batch(parts: int = 1, padded: int = LENGTH, order=range(ROWS)) -> Batch:
    """Eight rows of 5 to 10 tokens, in `parts` parts, padded to `padded`."""
    rng = np.random.default_rng(0)
    length = np.array([10, 7, 9, 5, 10, 6, 8, 10], np.int32)
    inside = np.arange(padded) < length[:, None]
    tokens, features = rng.integers(0, VOCAB, (ROWS, LENGTH)), rng.normal(size=(ROWS, LENGTH, WIDTH))
    answer = (rng.random((ROWS, LENGTH)) < 0.5) & (np.arange(LENGTH) < length[:, None] - 2)
    widen = lambda rows: np.pad(rows, [(0, 0), (0, padded - LENGTH), *[(0, 0)] * (rows.ndim - 2)])
    split = lambda rows, dtype: jnp.asarray(rows[list(order)].reshape(parts, -1, *rows.shape[1:]), dtype)
    return Batch(
        split(widen(tokens) * inside, jnp.int32),
        split(widen(features) * inside[..., None], jnp.float32),
        split(widen(answer), bool),
        split(length, jnp.int32),
        split(np.arange(ROWS) + 100, jnp.int32),
        jnp.int32(2),
    )


def make_step(optimizer, noise: float = 0.2, dtype=jnp.float32, seed: int = 7):
    return make_train_step(
        DRAFTER,
        optimizer,
        weights=WEIGHTS,
        passes=2,
        noise=noise,
        zero_logit_mask=False,
        seed=seed,
        dtype=dtype,
    )


@pytest.fixture(scope="module")
def plain():
    """A step with plain gradient descent at rate 1: what it subtracts is the gradient."""
    optimizer = optax.sgd(1.0)
    step = make_step(optimizer)

    def run(batch: Batch):
        state, metrics = step(init_state(fresh_params(), optimizer), make_frozen(), batch)
        return jax.tree.map(lambda a, b: np.asarray(a - b), fresh_params(), state.params), metrics, state

    return run


def test_accumulating_over_parts_gives_the_same_update(plain):
    """The loss is divided by the whole batch's supervised positions, which differ from part to part."""
    gradient, metrics, state = plain(make_batch(1))
    by_part = make_batch(4)
    counts = np.asarray(by_part.supervised.sum((1, 2)))
    assert len(set(counts.tolist())) > 1 and int(metrics.supervised) == counts.sum()
    found, others, _ = plain(by_part)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=3e-6), gradient, found)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), metrics, others)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient)) > 1e-2
    assert int(state.step) == 1


def test_the_order_of_rows_does_not_change_the_update(plain):
    """Rows move to other parts and other places in them; each keeps its noise."""
    gradient, metrics, _ = plain(make_batch(4))
    found, others, _ = plain(make_batch(4, order=[5, 1, 7, 0, 2, 6, 3, 4]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient, found)
    assert float(others.loss) == pytest.approx(float(metrics.loss), rel=1e-5)


def noise_of(batch: Batch, noise: float = 0.2, seed: int = 7, epoch: int = 2) -> np.ndarray:
    """The noise that a step adds, [b, T, D]."""
    part = Batch(*(leaf[0] for leaf in batch[:-1]), jnp.int32(epoch))
    noisy, _, _ = _inputs(
        part._replace(features=jnp.zeros_like(part.features)), make_frozen(), noise, seed, jnp.float32
    )
    return np.asarray(noisy)


def test_noise_belongs_to_seed_epoch_and_row():
    want = noise_of(make_batch())
    np.testing.assert_array_equal(want, noise_of(make_batch()))
    np.testing.assert_array_equal(want, noise_of(make_batch(padded=13))[:, :LENGTH])
    order = [5, 1, 7, 0, 2, 6, 3, 4]
    np.testing.assert_array_equal(want[order], noise_of(make_batch(order=order)))
    batch = make_batch()
    others = [
        noise_of(batch, seed=8),
        noise_of(batch, epoch=3),
        noise_of(batch._replace(row=batch.row + ROWS)),
        *(np.roll(want, shift, 0) * 0.5 for shift in range(1, ROWS)),
    ]
    assert all(np.mean(other == want) < 0.01 for other in others)


def test_noise_is_even_and_as_wide_as_the_row_is_short():
    """Uniform in +-noise/2 * 512 / length."""
    batch = make_batch()
    length = np.asarray(batch.length)[0]
    relative = noise_of(batch) / (0.2 * 512 / length)[:, None, None]
    assert np.abs(relative).max() <= 0.5 and np.abs(relative).max((1, 2)).min() > 0.45
    assert np.all(np.abs(relative.mean((1, 2))) < 0.12)  # 160 draws: a standard deviation of 0.023
    assert relative.std() == pytest.approx(1 / np.sqrt(12), rel=0.05)
    assert not noise_of(batch, noise=0.0).any()


def test_inputs_are_shifted_and_targets_are_clean():
    """Position j reads feature j with noise and the embedding of token j+1; its target is the clean feature j+1."""
    batch, frozen = make_batch(), make_frozen()
    part = Batch(*(leaf[0] for leaf in batch[:-1]), batch.epoch)
    noisy, targets, embeddings = _inputs(part, frozen, 0.2, 7, jnp.float32)
    np.testing.assert_allclose(noisy - noise_of(batch), part.features, atol=1e-5)
    np.testing.assert_array_equal(targets[:, :-1], part.features[:, 1:])
    np.testing.assert_array_equal(embeddings[:, :-1], frozen.embedding[part.tokens[:, 1:]])


def adamw(params, gradients, rate, clip, b1, b2, weight_decay, eps=1e-8) -> np.ndarray:
    """AdamW in NumPy with elementwise clipping; `rate` of the step number from 0."""
    params, mean, square = params.astype(np.float64), 0.0, 0.0
    for step, gradient in enumerate(gradients):
        gradient = np.clip(gradient, -clip, clip)
        mean, square = b1 * mean + (1 - b1) * gradient, b2 * square + (1 - b2) * gradient**2
        corrected = mean / (1 - b1 ** (step + 1)), square / (1 - b2 ** (step + 1))
        params = params - rate(step) * (corrected[0] / (np.sqrt(corrected[1]) + eps) + weight_decay * params)
    return params


def test_a_step_is_clipped_adamw():
    """With the gradient that JAX takes of the loss composed here, in which about half the elements are clipped."""
    batch, frozen = make_batch(), make_frozen()
    part = jax.tree.map(lambda leaf: leaf[0], batch[:-1])
    tokens, features, supervised = part[:3]
    later = lambda rows: jnp.concatenate([rows[:, 1:], jnp.zeros_like(rows[:, :1])], 1)

    @jax.jit
    def loss(params):
        predictions = aligned_passes(DRAFTER, params, frozen.embedding[later(tokens)], features, 2)
        return distillation_loss(predictions, later(features), supervised, frozen.head, WEIGHTS)[0]

    gradient = jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(fresh_params()))
    clip = float(np.median(np.abs(np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(gradient)]))))
    optimizer, schedule = make_optimizer(1e-2, 0, 100, **ADAMW, clip_value=clip)
    state, metrics = make_step(optimizer, noise=0.0)(init_state(fresh_params(), optimizer), frozen, batch)
    assert float(metrics.loss) == pytest.approx(float(loss(fresh_params())), rel=1e-5)
    assert float(schedule(0)) == pytest.approx(1e-2)
    mean = optax.tree_utils.tree_get(state.opt_state, "mu")
    jax.tree.map(
        lambda m, g: np.testing.assert_allclose(m, 0.1 * np.clip(g, -clip, clip), rtol=1e-3, atol=1e-2 * clip),
        mean,
        gradient,
    )

    def check(before, gradient, after):
        want = adamw(np.asarray(before), [gradient], lambda step: 1e-2, clip, **ADAMW)
        # A first Adam update is the gradient's sign: where the gradient is mere rounding, so is the sign.
        sure = np.abs(gradient) > 1e-2 * clip
        assert sure.mean() > 0.9
        np.testing.assert_allclose(np.asarray(after)[sure], want[sure], rtol=1e-5, atol=1e-6)

    jax.tree.map(check, fresh_params(), gradient, state.params)


def test_several_updates_equal_numpy():
    """Elements of every size against the clip value, over warmup and descent."""
    optimizer, schedule = make_optimizer(0.1, 2, 6, **ADAMW, clip_value=0.5)
    rng = np.random.default_rng(2)
    params = {"w": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)}
    before = np.asarray(params["w"])
    gradients = [rng.normal(size=(3, 4)) for _ in range(7)]
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update({"w": jnp.asarray(gradient, jnp.float32)}, state, params)
        params = optax.apply_updates(params, updates)
    want = adamw(before, gradients, lambda step: float(schedule(step)), 0.5, **ADAMW)
    np.testing.assert_allclose(params["w"], want, rtol=1e-5, atol=1e-6)
    assert np.abs(want - adamw(before, gradients, lambda step: float(schedule(step)), 9.0, **ADAMW)).max() > 1e-3


@pytest.mark.parametrize(
    ("warmup", "steps", "golden"),
    [
        (4, 12, {0: 0.0, 1: 0.25, 3: 0.75, 4: 1.0, 6: 0.75, 8: 0.5, 11: 0.125, 12: 0.0, 100: 0.0}),
        (0, 10, {0: 1.0, 1: 0.9, 9: 0.1, 10: 0.0}),
        (3, 3, {0: 0.0, 2: 2 / 3, 3: 1.0, 4: 0.0}),
    ],
)
def test_schedule(warmup, steps, golden):
    _, schedule = make_optimizer(2.0, warmup, steps, **ADAMW, clip_value=0.5)
    assert [float(schedule(step)) / 2 for step in golden] == pytest.approx(list(golden.values()), abs=1e-6)


def test_parameters_and_moments_stay_float32_when_computing_in_bfloat16(plain):
    optimizer, _ = make_optimizer(1e-2, 0, 100, **ADAMW, clip_value=0.5)
    step = make_step(optimizer, dtype=jnp.bfloat16)
    state, metrics = step(init_state(fresh_params(), optimizer), make_frozen(), make_batch())
    floats = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in floats} == {jnp.dtype("float32")}
    assert all(np.isfinite(leaf).all() for leaf in floats)
    exact = float(plain(make_batch())[1].loss)
    assert float(metrics.loss) == pytest.approx(exact, rel=0.02) and float(metrics.loss) != exact
    # Updates of 1e-2 on parameters of 0.2 are not rounded to bfloat16's steps.
    weight = np.asarray(state.params["fc"]["weight"])
    assert np.mean(weight == np.asarray(jnp.asarray(weight).astype(jnp.bfloat16).astype(jnp.float32))) < 0.05
