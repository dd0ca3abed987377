"""A training step measured beside its plain formulation on the same batch.

The plain formulation is the one in which the objective is usually written: every pass attends over all its sources in
full, [n, T, T] scores of n sources, and the logits of all positions exist at once in float32, [B, T, W].

Shapes: B rows, T positions, D model width, W draft vocabulary, P passes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from taps_jax.benchmarks.timing import Timing, time_call
from taps_jax.models.drafter import Drafter, init_drafter
from taps_jax.models.layers import NEGATIVE
from taps_jax.numerics import top_k
from taps_jax.training.objective import LossWeights
from taps_jax.training.step import Batch, Frozen, TrainState, init_state, make_optimizer, make_train_step

PASSES = 3
WEIGHTS = LossWeights()


class StepCost(NamedTuple):
    """What one optimizer step takes.

    Attributes:
      name: of the formulation.
      timing: milliseconds.
      tokens: supervised positions of its batch.
      temporary: bytes that the compiled step needs beyond its arguments and results.
      loss: of the first step, to compare formulations by.
    """

    name: str
    timing: Timing
    tokens: int
    temporary: int
    loss: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.timing.median * 1e3


def measure_training(drafter: Drafter, frozen: Frozen, batch: Batch, dtype, repeats: int = 3) -> list[StepCost]:
    """The step that training takes and the plain one, in this order, with one optimizer and batch."""
    optimizer, _ = make_optimizer(1e-3, 1, 100, b1=0.9, b2=0.95, weight_decay=0.01, clip_value=0.5)
    costs = []
    for name, step in (
        ("taps_jax", _step(drafter, optimizer, dtype)),
        ("plain", plain_step(drafter, optimizer, dtype)),
    ):
        state = init_state(init_drafter(drafter.config, jax.random.key(0)), optimizer)
        compiled = step.lower(state, frozen, batch).compile()
        state, metrics = compiled(state, frozen, batch)
        loss, box = float(metrics.loss), [state]

        def again(compiled=compiled, box=box):
            box[0], found = compiled(box[0], frozen, batch)
            return found.loss

        timing = time_call(again, repeats)
        costs.append(StepCost(name, timing, int(batch.supervised.sum()), _temporary(compiled), loss))
    return costs


def compiled_memory(drafter: Drafter, vocabulary: int, rows: int, length: int, dtype) -> int:
    """Temporary bytes of a step that is compiled for these sizes and not run."""
    width = drafter.config.layer.hidden_size
    optimizer, _ = make_optimizer(1e-3, 1, 100, b1=0.9, b2=0.95, weight_decay=0.01, clip_value=0.5)
    params = jax.eval_shape(lambda: init_drafter(drafter.config, jax.random.key(0)))
    state = jax.eval_shape(lambda params: init_state(params, optimizer), params)
    table = jax.ShapeDtypeStruct((vocabulary, width), dtype)
    batch = jax.eval_shape(lambda: make_batch(np.random.default_rng(0), rows, length, width, 2, dtype))
    return _temporary(_step(drafter, optimizer, dtype).lower(state, Frozen(table, table), batch).compile())


def estimated_memory(drafter: Drafter, vocabulary: int, rows: int, length: int, chunk: int = 256) -> dict[str, int]:
    """Temporary bytes of a step by arithmetic, computing in bfloat16: what must exist at once, by what it is.

    The backward pass computes the activations of one pass at a time again; a chunk of the loss keeps the verifier's
    distribution and the logits of one pass in float32, and their gradient.
    """
    layer = drafter.config.layer
    tokens, width = rows * length, layer.hidden_size
    heads = layer.num_attention_heads * layer.head_dim
    kv = layer.num_key_value_heads * layer.head_dim
    parameters = sum(leaf.size for leaf in jax.tree.leaves(_abstract(drafter)))
    per_token = 4 * width + 2 * heads + 2 * kv + 3 * layer.intermediate_size  # inputs, residuals, attention, MLP
    scores = rows * layer.num_attention_heads * length * (length + PASSES)
    return {
        "inputs and outputs of all passes": PASSES * tokens * (3 * width + 2 * kv) * 2,
        "activations of one pass": tokens * per_token * 2,
        "attention scores of one pass, weights, gradient": scores * (4 + 2 + 4),
        "distribution, logits and gradient of a chunk": 3 * chunk * vocabulary * 4,
        "float32 gradient and bfloat16 copy of the parameters": parameters * (4 + 2),
    }


def make_batch(rng: np.random.Generator, rows: int, length: int, width: int, vocabulary: int, dtype) -> Batch:
    """Random tokens and features in rows of length / 2 to length tokens, whose first third is the question."""
    lengths = np.linspace(length // 2, length, rows).astype(np.int32)
    place = np.arange(length)
    supervised = (place >= lengths[:, None] // 3) & (place < lengths[:, None] - 2)
    return Batch(
        jnp.asarray(rng.integers(0, vocabulary, (1, rows, length)), jnp.int32),
        jnp.asarray(rng.normal(size=(1, rows, length, width)), dtype),
        jnp.asarray(supervised[None]),
        jnp.asarray(lengths[None]),
        jnp.arange(rows, dtype=jnp.int32)[None],
        jnp.int32(0),
    )


def plain_step(drafter: Drafter, optimizer: optax.GradientTransformation, dtype):
    """A step of the plain formulation, without noise and without metrics but the loss."""

    def loss_of(params: dict, frozen: Frozen, batch: Batch) -> Array:
        compute = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        later = lambda rows: jnp.pad(rows[:, 1:], ((0, 0), (0, 1), *[(0, 0)] * (rows.ndim - 2)))
        features = batch.features[0].astype(dtype)
        targets = later(features)
        embeddings = frozen.embedding[later(batch.tokens[0])].astype(dtype)
        target_p = jax.nn.softmax(_logits(targets, frozen.head), axis=-1)
        _, best = top_k(target_p, WEIGHTS.topk_size)
        total = 0.0
        for prediction in _full_passes(drafter, compute, embeddings, features):
            log_q = jax.nn.log_softmax(_logits(prediction, frozen.head), axis=-1)
            soft = -jnp.sum(target_p * log_q, axis=-1)
            chosen_p, chosen_q = (jnp.take_along_axis(values, best, axis=-1) for values in (target_p, log_q))
            difference = jnp.abs(prediction.astype(jnp.float32) - targets.astype(jnp.float32))
            feature = jnp.mean(jnp.where(difference < 1, 0.5 * difference**2, difference - 0.5), axis=-1)
            each = WEIGHTS.feature * feature + WEIGHTS.soft * soft - WEIGHTS.topk * jnp.sum(chosen_p * chosen_q, -1)
            total = total + jnp.sum(each * batch.supervised[0])
        return total / (jnp.sum(batch.supervised) + 1e-5)

    @jax.jit
    def step(state: TrainState, frozen: Frozen, batch: Batch):
        loss, gradient = jax.value_and_grad(loss_of)(state.params, frozen, batch)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1), _Loss(loss)

    return step


class _Loss(NamedTuple):
    loss: Array


def _full_passes(drafter: Drafter, params: dict, embeddings: Array, features: Array) -> list[Array]:
    """Predictions [B, T, D] of every pass, each by attention over all its sources at all columns."""
    call = lambda method, *args: drafter.apply({"params": params}, *args, method=method)
    size = features.shape[1]
    positions = jnp.broadcast_to(jnp.arange(size), features.shape[:2])
    behind = jnp.arange(size)[:, None] - jnp.arange(size)
    source, sources, predictions = features, [], []
    for _ in range(PASSES):
        x = call(Drafter.fuse, embeddings, source)
        sources.append(call(Drafter.keys_values, x, positions))
        q, newest = call(Drafter.queries, x, positions), len(sources) - 1
        batch, _, heads, width = q.shape
        scores = []
        for index, (keys, _) in enumerate(sources):
            grouped = q.reshape(batch, size, keys.shape[1], -1, width)
            raw = jnp.einsum("btkge,bkse->bkgts", grouped, keys, preferred_element_type=jnp.float32)
            seen = behind >= newest if index == 0 else behind == newest - index
            scores.append(jnp.where(seen, raw / np.sqrt(width), NEGATIVE))
        weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q.dtype)
        values = jnp.concatenate([values for _, values in sources], axis=2)
        attended = jnp.einsum("bkgts,bkse->btkge", weights, values).reshape(batch, size, heads * width)
        predictions.append(call(Drafter.finish, x, attended))
        own = jnp.concatenate([features[:, :1], predictions[-1][:, :-1].astype(features.dtype)], axis=1)
        source = jax.lax.stop_gradient(own)
    return predictions


def _step(drafter: Drafter, optimizer, dtype):
    settings = {"passes": PASSES, "noise": 0.0, "zero_logit_mask": False, "seed": 0, "dtype": dtype}
    return make_train_step(drafter, optimizer, weights=WEIGHTS, **settings)


def _logits(features: Array, head: Array) -> Array:
    return jnp.einsum("btd,wd->btw", features.astype(head.dtype), head, preferred_element_type=jnp.float32)


def _abstract(drafter: Drafter) -> dict:
    return jax.eval_shape(lambda: init_drafter(drafter.config, jax.random.key(0)))


def _temporary(compiled) -> int:
    return compiled.memory_analysis().temp_size_in_bytes
