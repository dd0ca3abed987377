"""The optimizer step and the feature cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from taps_jax.checkpoints.hf_drafter import drafter_config
from taps_jax.data.batches import Example
from taps_jax.errors import InputError
from taps_jax.models.drafter import Drafter, init_drafter
from taps_jax.models.llama import Llama
from taps_jax.training import features as features_module
from taps_jax.training.features import cache_features, verifier_features
from taps_jax.training.objective import LossWeights
from taps_jax.training.step import Batch, Frozen, init_state, make_optimizer, make_train_step
from tests.tiny import CONFIG, make_verifier_params

OPTIMIZER = {"b1": 0.9, "b2": 0.95, "weight_decay": 0.01, "clip_value": 0.5}


def make_batch(parts: int, length: int = 12, order=range(8)) -> Batch:
    rng = np.random.default_rng(0)
    order = list(order)
    tokens = rng.integers(0, 48, (8, 12))[order]
    features = rng.normal(size=(8, 12, 32)).astype(np.float32)[order]
    supervised = (rng.random((8, 12)) < 0.5)[order]
    pad = lambda rows: np.pad(rows, [(0, 0), (0, length - 12), *[(0, 0)] * (rows.ndim - 2)])
    split = lambda rows: jnp.asarray(rows.reshape(parts, -1, *rows.shape[1:]))
    lengths, rows = np.full(8, 12, np.int32), np.arange(8, dtype=np.int32)[order]
    return Batch(*map(split, (pad(tokens), pad(features), pad(supervised), lengths, rows)), jnp.int32(2))


def run_step(batch: Batch, dtype=jnp.float32, seed: int = 0, noise: float = 0.2):
    config = drafter_config(CONFIG)
    optimizer, _ = make_optimizer(1e-2, 0, 100, **OPTIMIZER)
    train_step = make_train_step(
        Drafter(config),
        optimizer,
        weights=LossWeights(),
        passes=3,
        noise=noise,
        zero_logit_mask=False,
        seed=seed,
        dtype=dtype,
    )
    verifier = make_verifier_params()
    frozen = Frozen(verifier["model"]["embed_tokens"]["weight"], verifier["lm_head"]["weight"])
    return train_step(init_state(init_drafter(config, jax.random.key(0)), optimizer), frozen, batch)


def test_parts_padding_and_order_do_not_change_an_update():
    """Noise belongs to (seed, epoch, row), and the loss is divided by the whole batch's supervised positions."""
    want, metrics = run_step(make_batch(1))
    for other in (make_batch(4), make_batch(1, length=16), make_batch(2, order=[5, 1, 7, 0, 2, 6, 3, 4])):
        found, others = run_step(other)
        assert float(others.loss) == pytest.approx(float(metrics.loss), rel=1e-5)
        # Adam's first update is nearly the gradient's sign, so the gradient itself is compared, in its first moment.
        moments = (optax.tree_utils.tree_get(state.opt_state, "mu") for state in (found, want))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *moments)


def test_noise_matters_and_follows_the_seed():
    losses = [
        float(run_step(make_batch(1), seed=seed, noise=noise)[1].loss) for seed, noise in ((0, 0.2), (1, 0.2), (0, 0.0))
    ]
    assert len(set(losses)) == 3


def test_parameters_stay_float32_when_computing_in_bfloat16():
    state, metrics = run_step(make_batch(1), dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert float(metrics.loss) == pytest.approx(float(run_step(make_batch(1))[1].loss), rel=0.03)


def test_one_update_by_hand():
    """AdamW after elementwise clipping; the first update of Adam is the gradient over its own size."""
    optimizer, schedule = make_optimizer(0.1, 0, 10, **OPTIMIZER)
    params = {"w": jnp.array([1.0, -2.0, 3.0])}
    gradient = {"w": jnp.array([0.2, -7.0, 0.0])}
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    clipped = np.array([0.2, -0.5, 0.0])
    want = -0.1 * (clipped / (np.abs(clipped) + 1e-8) + 0.01 * np.array([1.0, -2.0, 3.0]))
    np.testing.assert_allclose(updates["w"], want, rtol=1e-5)
    assert float(schedule(0)) == pytest.approx(0.1)


def test_schedule():
    _, schedule = make_optimizer(1.0, 4, 12, **OPTIMIZER)
    found = [float(schedule(step)) for step in (0, 1, 4, 8, 12, 50)]
    assert found == pytest.approx([0.0, 0.25, 1.0, 0.5, 0.0, 0.0])


@pytest.fixture
def rows():
    rng = np.random.default_rng(1)
    return [Example(rng.integers(0, 48, n).astype(np.int32), np.ones(n, bool)) for n in (5, 70, 9, 64, 30)]


def build(folder, rows, fingerprint="f", dtype="float16", scale=1.0):
    params = make_verifier_params()
    params["model"]["norm"]["weight"] = params["model"]["norm"]["weight"] * scale
    silent = lambda items, title, total: items
    return cache_features(folder, Llama(CONFIG), params, rows, fingerprint, dtype, silent)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_cached_features_are_the_verifiers(tmp_path, rows, monkeypatch, dtype, tolerance):
    monkeypatch.setattr(features_module, "_SHARD_TOKENS", 64)
    cache = build(tmp_path, rows, dtype=dtype)
    assert len(list(tmp_path.glob("shard-*.npy"))) == 2
    for index, example in enumerate(rows):
        want = verifier_features(Llama(CONFIG), make_verifier_params(), jnp.asarray(example.tokens[None]))[0]
        np.testing.assert_allclose(cache.row(index).astype(np.float32), want, atol=tolerance * 4)
    padded = cache(np.array([2, 0]), np.zeros((2, 80), np.int32))
    assert padded.shape == (2, 80, 32) and not padded[1, 5:].any() and padded[0, 8].any()


def test_a_cache_is_reused_completed_and_replaced(tmp_path, rows, monkeypatch):
    monkeypatch.setattr(features_module, "_SHARD_TOKENS", 64)
    build(tmp_path, rows)
    computed = []
    compute = features_module._compute
    monkeypatch.setattr(features_module, "_compute", lambda *args: computed.append(1) or compute(*args))
    build(tmp_path, rows)
    assert not computed
    (tmp_path / "shard-00001.npy").unlink()
    build(tmp_path, rows)
    assert len(computed) == 1
    build(tmp_path, rows, fingerprint="other")
    build(tmp_path, rows[:3], fingerprint="other")
    assert len(computed) > 3


def test_values_beyond_float16_and_full_disks_are_refused(tmp_path, rows, monkeypatch):
    with pytest.raises(InputError, match="a feature exceeds 65504, set features.dtype='bfloat16'"):
        build(tmp_path / "a", rows, scale=1e6)
    assert not list((tmp_path / "a").glob("*.part")) and not list((tmp_path / "a").glob("*.npy"))
    usage = dataclasses.make_dataclass("Usage", ["free"])(10)
    monkeypatch.setattr(features_module.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(InputError, match="the feature cache needs 0.0 GB, the disk has 0.0 GB free"):
        build(tmp_path / "b", rows)
