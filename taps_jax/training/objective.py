"""The training loss of EAGLE-2 and HASS, computed over chunks of supervised positions.

Logits never exist for a whole batch. Supervised positions are gathered to the front and taken a chunk at a time; the
verifier's target distribution is computed once per chunk for all passes, and a chunk's gradient with respect to the
predicted features is computed with its loss, so no logits are kept or recomputed for the backward pass.

Shapes: P passes, R supervised rows (padded), c chunk rows, D model width, W draft vocabulary.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from taps_jax.numerics import row_sums, top_k

_LEAST_OVERLAP = 1e-30  # keeps the loss finite where the drafter misses the verifier's tokens altogether


@dataclasses.dataclass(frozen=True)
class LossWeights:
    """Parts of the loss per pass (TAPS/HASS, "harmonized objective distillation").

    Attributes:
      feature: of the smooth-L1 distance to the verifier's next feature.
      soft: of the cross-entropy against the verifier's distribution.
      topk: of the cross-entropy over its `topk_size` most probable tokens; 0 gives EAGLE-2.
      topk_size: K.
      overlap: of -log sum(min(p, q)), the negative logarithm of how often a sampled token of the drafter's is
        accepted (LK losses, arXiv 2602.23881).
      passes: of each pass, [P]; empty weighs all alike.
    """

    feature: float = 1.0
    soft: float = 0.1
    topk: float = 1.0
    topk_size: int = 10
    overlap: float = 0.0
    passes: tuple[float, ...] = ()


class LossParts(NamedTuple):
    """Sums over supervised positions, each [P] float32.

    Attributes:
      feature, soft, topk, overlap: the unweighted parts; `overlap` is 0 when it has no weight.
      agreement: positions where the drafter's most probable token is the verifier's.
      agreement3: positions where the verifier's most probable token is among the drafter's first three.
    """

    feature: Array
    soft: Array
    topk: Array
    overlap: Array
    agreement: Array
    agreement3: Array


def distillation_loss(
    predictions: Array,
    targets: Array,
    supervised: Array,
    head: Array,
    weights: LossWeights,
    chunk: int = 256,
    count: Array | None = None,
) -> tuple[Array, LossParts]:
    """Loss summed over passes and averaged over supervised positions.

    Args:
      predictions: [P, B, T, D], predicted features.
      targets: [B, T, D], the verifier's features one position later.
      supervised: [B, T] bool.
      head: [W, D], frozen; the distributions are over its rows.
      weights: of the parts.
      chunk: rows whose logits exist at once.
      count: [] what to divide by, for a batch that is one of several whose losses are added; its own supervised
        positions if None.
    Returns:
      The loss, and its parts averaged the same way (divided by count + 1e-5, as the original does: 0 when no position
      is supervised).
    """
    positions = supervised.size
    flat = supervised.reshape(-1)
    padded = -(-positions // chunk) * chunk
    (index,) = jnp.nonzero(flat, size=padded, fill_value=positions)
    valid = index < positions
    rows = jnp.minimum(index, positions - 1)
    prediction_rows = predictions.reshape(predictions.shape[0], positions, -1)[:, rows]
    target_rows = jax.lax.stop_gradient(targets.reshape(positions, -1)[rows])
    total, parts = _summed_loss((weights, chunk), prediction_rows, target_rows, valid, head)
    scale = 1 / ((jnp.sum(flat) if count is None else count) + 1e-5)
    return total * scale, jax.tree.map(lambda part: part * scale, parts)


class _Target(NamedTuple):
    """The verifier's side of a chunk, computed once for all passes.

    Attributes:
      features: [c, D] float32.
      p: [c, W], its distribution.
      top_p, top_token: [c, K], the most probable tokens.
    """

    features: Array
    p: Array
    top_p: Array
    top_token: Array


def _target(features: Array, head: Array, topk_size: int) -> _Target:
    p = jax.nn.softmax(_logits(features, head), axis=-1)
    return _Target(features.astype(jnp.float32), p, *top_k(p, topk_size))


def _pass_loss(
    prediction: Array, target: _Target, keep: Array, head: Array, weights: LossWeights
) -> tuple[Array, LossParts, Array]:
    """Summed loss of one pass over a chunk, its parts, and its gradient [c, D], written out.

    With logits l of softmax q, cross-entropies against weights w are sum(w) logsumexp(l) - w.l, so that their gradient
    is sum(w) q - w; and sum(min(p, q)) has the gradient q (1[q < p] - sum of q where q < p).
    """
    logits = _logits(prediction, head)
    top_logits = jnp.take_along_axis(logits, target.top_token, axis=-1)
    most = jnp.max(logits, axis=-1)
    total, expected, better = row_sums(jnp.exp(logits - most[:, None]), target.p * logits, logits > top_logits[:, :1])
    normaliser = most + jnp.log(total)
    q = jnp.exp(logits - normaliser[:, None])
    difference = prediction.astype(jnp.float32) - target.features
    distance = jnp.abs(difference)
    feature = jnp.mean(jnp.where(distance < 1, 0.5 * distance**2, distance - 0.5), axis=-1)
    soft = normaliser - expected
    topk = jnp.sum(target.top_p * (normaliser[:, None] - top_logits), axis=-1)
    toward = weights.soft + weights.topk * jnp.sum(target.top_p, axis=-1, keepdims=True)
    gradient = toward * q - weights.soft * target.p
    overlap = jnp.zeros_like(soft)
    if weights.overlap:
        short = jnp.where(q < target.p, q, 0.0)
        shared, missing = row_sums(jnp.minimum(target.p, q), short)
        shared = jnp.maximum(shared, _LEAST_OVERLAP)
        overlap = -jnp.log(shared)
        gradient = gradient + (weights.overlap / shared)[:, None] * (q * missing[:, None] - short)
    rows = jnp.arange(len(logits))[:, None]
    gradient = gradient.at[rows, target.top_token].add(-weights.topk * target.top_p)
    by_feature = weights.feature / difference.shape[-1] * jnp.clip(difference, -1, 1)
    back = jnp.einsum("cw,wd->cd", gradient.astype(head.dtype), head, preferred_element_type=jnp.float32)
    each = (feature, soft, topk, overlap, better < 1, better < 3)
    parts = LossParts(*(jnp.sum(part * keep) for part in each))
    loss = weights.feature * parts.feature + weights.soft * parts.soft + weights.topk * parts.topk
    return loss + weights.overlap * parts.overlap, parts, (by_feature + back) * keep[:, None]


def _logits(features: Array, head: Array) -> Array:
    return jnp.einsum("...d,wd->...w", features.astype(head.dtype), head, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed_loss(settings, predictions, targets, valid, head):
    return _over_chunks(settings, predictions, targets, valid, head, with_gradient=False)[0]


def _summed_loss_forward(settings, predictions, targets, valid, head):
    return _over_chunks(settings, predictions, targets, valid, head, with_gradient=True)


def _summed_loss_backward(settings, gradient, cotangents):
    return (gradient * cotangents[0]).astype(gradient.dtype), None, None, None


_summed_loss.defvjp(_summed_loss_forward, _summed_loss_backward)


def _over_chunks(settings, predictions, targets, valid, head, with_gradient):
    """((loss, parts), gradient or None) of predictions [P, R, D], chunk by chunk and pass by pass; chunks without
    valid rows cost nothing."""
    weights, chunk = settings
    passes, rows, width = predictions.shape
    pass_weights = jnp.asarray(weights.passes or (1.0,) * passes)
    as_chunks = (
        predictions.reshape(passes, rows // chunk, chunk, width).swapaxes(0, 1),
        targets.reshape(-1, chunk, width),
        valid.reshape(-1, chunk),
    )

    def of_chunk(prediction, features, keep):
        target = _target(features, head, weights.topk_size)

        def of_pass(_, arrays):
            prediction, weight = arrays
            loss, parts, gradient = _pass_loss(prediction, target, keep.astype(jnp.float32), head, weights)
            gradient = (weight * gradient).astype(prediction.dtype) if with_gradient else None
            return None, (weight * loss, parts, gradient)

        return jax.lax.scan(of_pass, None, (prediction, pass_weights))[1]

    def body(total, arrays):
        evaluate = lambda: of_chunk(*arrays)
        shapes = jax.eval_shape(evaluate)
        skip = lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        losses, parts, gradient = jax.lax.cond(jnp.any(arrays[2]), evaluate, skip)
        return jax.tree.map(jnp.add, total, (jnp.sum(losses), parts)), gradient

    zero = (jnp.zeros(()), LossParts(*(jnp.zeros(passes) for _ in LossParts._fields)))
    sums, gradients = jax.lax.scan(body, zero, as_chunks)
    if with_gradient:
        gradients = gradients.swapaxes(0, 1).reshape(passes, rows, width)
    return sums, gradients
