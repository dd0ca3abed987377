"""One optimizer step on a drafter: noise, aligned passes, loss, clipping, AdamW.

Shapes: A parts of a batch, b rows of a part, T positions, D model width, W draft vocabulary, P passes.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array

from taps_jax.models.drafter import Drafter
from taps_jax.training.alignment import aligned_passes
from taps_jax.training.objective import LossParts, LossWeights, distillation_loss


@flax.struct.dataclass
class TrainState:
    """What training changes: float32 parameters, optimizer state, and the number of optimizer steps taken."""

    params: dict
    opt_state: optax.OptState
    step: Array


class Frozen(NamedTuple):
    """The verifier's share of the drafter: its embedding [V, D] and the head's rows [W, D] of the draft vocabulary."""

    embedding: Array
    head: Array


class Batch(NamedTuple):
    """Training rows, padded on the right.

    Attributes:
      tokens: [A, b, T] int32.
      features: [A, b, T, D], the verifier's.
      supervised: [A, b, T] bool, see `supervised_positions`.
      length: [A, b] int32, tokens of each row.
      row: [A, b] int32, which example each row is; with `epoch` it fixes the row's noise.
      epoch: [] int32.
    """

    tokens: Array
    features: Array
    supervised: Array
    length: Array
    row: Array
    epoch: Array


class Metrics(NamedTuple):
    """Of one step: the loss, its parts per pass [P], and how many positions were supervised."""

    loss: Array
    parts: LossParts
    supervised: Array


def make_optimizer(
    learning_rate: float,
    warmup_steps: int,
    schedule_steps: int,
    *,
    b1: float,
    b2: float,
    weight_decay: float,
    clip_value: float,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW with elementwise clipping; the rate rises for `warmup_steps`, then falls to 0 at `schedule_steps`, both
    linearly."""
    schedule = optax.schedules.join_schedules(
        [
            optax.schedules.linear_schedule(0.0, learning_rate, warmup_steps),
            optax.schedules.linear_schedule(learning_rate, 0.0, max(1, schedule_steps - warmup_steps)),
        ],
        [warmup_steps],
    )
    adamw = optax.adamw(schedule, b1, b2, weight_decay=weight_decay)
    return optax.chain(optax.clip(clip_value), adamw), schedule


def init_state(params: dict, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))


def make_train_step(
    drafter: Drafter,
    optimizer: optax.GradientTransformation,
    *,
    weights: LossWeights,
    passes: int,
    noise: float,
    zero_logit_mask: bool,
    seed: int,
    dtype,
) -> Callable[[TrainState, Frozen, Batch], tuple[TrainState, Metrics]]:
    """The jitted step; its state argument is donated.

    Args:
      drafter: the module.
      optimizer: from `make_optimizer`.
      weights, passes, zero_logit_mask: the objective.
      noise: feature noise is uniform in +-noise/2 * 512 / row length (EAGLE).
      seed: of the noise.
      dtype: of the computation; parameters and optimizer stay float32.
    """

    def part_loss(params: dict, frozen: Frozen, part: Batch, count: Array) -> tuple[Array, LossParts]:
        features, targets, embeddings = _inputs(part, frozen, noise, seed, dtype)
        compute = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        predictions = aligned_passes(drafter, compute, embeddings, features, passes, zero_logit_mask)
        return distillation_loss(predictions, targets, part.supervised, frozen.head, weights, count=count)

    @functools.partial(jax.jit, donate_argnums=(0,))
    def train_step(state: TrainState, frozen: Frozen, batch: Batch) -> tuple[TrainState, Metrics]:
        count = jnp.sum(batch.supervised)
        gradient_of = jax.value_and_grad(part_loss, has_aux=True)

        def add_part(total, arrays):
            part = Batch(*arrays, batch.epoch)
            result = gradient_of(state.params, frozen, part, count)
            return jax.tree.map(jnp.add, total, result), None

        shapes = jax.eval_shape(gradient_of, state.params, frozen, jax.tree.map(_first, batch), count)
        zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        ((loss, parts), gradient), _ = jax.lax.scan(add_part, zero, tuple(batch)[:-1])
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.step + 1), Metrics(loss, parts, count)

    return train_step


def _first(leaf: Array) -> Array:
    return leaf[0] if leaf.ndim else leaf


def _inputs(part: Batch, frozen: Frozen, noise: float, seed: int, dtype) -> tuple[Array, Array, Array]:
    """Noisy features, clean targets one position later, and embeddings one position later, each [b, T, D]."""
    clean = part.features.astype(dtype)
    base = jax.random.fold_in(jax.random.key(seed), part.epoch)
    draw = lambda row: jax.random.uniform(jax.random.fold_in(base, row), clean.shape[1:], jnp.float32, -0.5, 0.5)
    scale = noise * 512 / part.length[:, None, None]
    noisy = clean + (jax.vmap(draw)(part.row) * scale).astype(dtype)
    embeddings = frozen.embedding[_one_later(part.tokens)].astype(dtype)
    return noisy, _one_later(clean), embeddings


def _one_later(rows: Array) -> Array:
    """rows [b, T, ...] -> position j holds what was at j + 1; the last one is zero."""
    return jnp.pad(rows[:, 1:], ((0, 0), (0, 1), *[(0, 0)] * (rows.ndim - 2)))
