"""What training is for, measured while it runs: the acceptance length along answers that are not trained on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from taps_jax.data.batches import Example, pad_rows
from taps_jax.models.drafter import Drafter, stack_specialists
from taps_jax.models.llama import Llama, embedding_table, head_table
from taps_jax.speculative.decode import Models, Weights
from taps_jax.speculative.drafting import drafter_weights
from taps_jax.speculative.replay import count_steps, position_chunks, read_text, trees_at
from taps_jax.speculative.tree import TreeShape, accept
from taps_jax.training.features import verifier_features

_LENGTH_STEP = 64  # texts are padded to a multiple, so that few lengths compile


class HeldOut:
    """Drafts along held-out rows with whatever parameters training has reached.

    Args:
      verifier, verifier_params: what the drafter is for.
      drafter: the module.
      vocabulary: [W] token ids that it may propose, or None.
      examples: the rows; every answer in them counts.
      shape: of the draft trees.
    """

    def __init__(
        self,
        verifier: Llama,
        verifier_params: dict,
        drafter: Drafter,
        vocabulary: np.ndarray | None,
        examples: list[Example],
        shape: TreeShape,
    ):
        self._models = Models(verifier, drafter, shape)
        self._verifier = verifier_params
        # Without a specialist: its parameters come with every call.
        self._drafting = drafter_weights(
            [{}], embedding_table(self._verifier), head_table(self._verifier), [vocabulary]
        )
        self._examples = examples

    def acceptance_length(self, params: dict) -> float:
        """Tokens per step over all held-out answers, had each been written with trees of the drafter `params`.

        The first token of an answer, which reading the prompt yields, is not counted (TAPS, section 5).
        """
        cast = jax.tree.map(lambda leaf: leaf.astype(self._drafting.embedding.dtype), params)
        weights = Weights(self._verifier, self._drafting._replace(params=stack_specialists([cast])))
        tokens = steps = 0
        for example in self._examples:
            for accepted in self._accepted(weights, example):
                tokens += len(accepted)
                steps += count_steps(accepted)
        return tokens / steps

    def uncovered_mass(self) -> float:
        """The verifier's mean probability, at the held-out positions, of tokens that the drafter cannot propose."""
        if self._drafting.vocabulary is None:
            return 0.0
        total = count = 0.0
        for example in self._examples:
            # Position j predicts token j + 2, which the verifier predicts from feature j + 1.
            rows = np.flatnonzero(example.supervised) + 1
            features = verifier_features(self._models.verifier, self._verifier, _padded(example.tokens)[None])[0]
            mass = _mass_outside(features, head_table(self._verifier), self._drafting.vocabulary)
            total += float(jnp.sum(mass[rows]))
            count += len(rows)
        return total / count

    def _accepted(self, weights: Weights, example: Example) -> list[np.ndarray]:
        """For each answer, how many nodes would be accepted at each of its tokens but the last."""
        positions = np.flatnonzero(example.supervised) + 1  # a root and the token after it are of one answer
        breaks = np.flatnonzero(np.diff(positions) > 1) + 1
        read = read_text(self._models, weights, _padded(example.tokens))
        levels = self._models.shape.path_length - 1
        found = []
        for answer in np.split(positions, breaks):
            start, end = int(answer[0]), int(answer[-1]) + 1
            text = np.full(end + 1 + levels, -1, np.int32)
            text[: end + 1] = example.tokens[: end + 1]
            counts = []
            for chunk, used in position_chunks(start, end):
                following = jnp.asarray(text[chunk[:, None] + np.arange(1, levels + 1)])
                counts.append(
                    np.asarray(_accepted_at(self._models, weights, read, jnp.asarray(chunk), following))[:used]
                )
            found.append(np.concatenate(counts))
        return found


@functools.partial(jax.jit, static_argnames=("models",))
def _accepted_at(models: Models, weights: Weights, read, positions: Array, following: Array) -> Array:
    """Accepted nodes [P] of one drafter's trees at some positions, given the text after each, [P, L - 1]."""
    tree = jax.tree.map(lambda leaf: leaf[0], trees_at(models, weights, read, positions))
    best = jnp.take_along_axis(jnp.pad(following, ((0, 0), (0, 1)), constant_values=-1), tree.depth, axis=1)
    return accept(tree, best, models.shape.path_length).count


@jax.jit
def _mass_outside(features: Array, head: Array, vocabulary: Array) -> Array:
    """Probability [T] outside the draft vocabulary after each feature [T, D]; one row of logits at a time."""

    def outside(feature: Array) -> Array:
        p = jax.nn.softmax((head @ feature.astype(head.dtype)).astype(jnp.float32))
        return 1 - jnp.sum(p[vocabulary])

    return jax.lax.map(outside, features, batch_size=64)


def _padded(tokens: np.ndarray) -> Array:
    return jnp.asarray(pad_rows([tokens], -(-len(tokens) // _LENGTH_STEP) * _LENGTH_STEP)[0])
