"""Steps accept as many drafted tokens, on average, as the verifier's probabilities of the drafted paths say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taps_jax.models.llama import Llama, causal_mask
from taps_jax.speculative import composition
from taps_jax.speculative.decode import Prompt, advance, empty_state, insert
from taps_jax.speculative.sampling import Sampling
from taps_jax.speculative.tree import DraftTree, TreeShape
from tests.references.draft_tree import expected_acceptance_reference
from tests.speculative.test_distribution import CONFIG, make_pair, repeat_siblings

SHAPE = TreeShape(8, 3, 3)
ROWS, STEPS = 256, 8
LIMIT = STEPS * SHAPE.path_length + 1  # no row finishes
PROMPT_LENGTH = 4
LONGEST = PROMPT_LENGTH + LIMIT + SHAPE.path_length
NO_STOP = np.array([-1], np.int32)


@jax.jit
def last_probs(params, sequences, lengths):
    """[n, V] the verifier's probabilities after each right-padded sequence, read from its beginning."""
    apply = functools.partial(Llama(CONFIG).apply, {"params": params})
    size = sequences.shape[1]
    features, _ = apply(sequences, jnp.arange(size)[None], causal_mask(size))
    last = jnp.take_along_axis(features, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return jax.nn.softmax(apply(last, method=Llama.logits))


def node_probs(params: dict, histories: list[list[int]], tree: DraftTree) -> np.ndarray:
    """[B, M, V] the verifier's probabilities after each node; histories are the committed tokens with the root."""
    batch, nodes = tree.token.shape
    sequences, lengths = np.zeros((batch * nodes, LONGEST), np.int32), np.zeros(batch * nodes, np.int32)
    for place in range(batch * nodes):
        row, node = divmod(place, nodes)
        path = []
        while node:
            path.insert(0, tree.token[row, node])
            node = tree.parent[row, node]
        sequence = [*histories[row], *path]
        sequences[place, : len(sequence)], lengths[place] = sequence, len(sequence)
    return np.asarray(last_probs(params, sequences, lengths)).reshape(batch, nodes, -1)


def sampled_steps(quality: str) -> tuple[np.ndarray, np.ndarray]:
    """Accepted drafted tokens of ROWS * STEPS steps at temperature 1, and their expected numbers."""
    models, weights = make_pair(SHAPE, quality)
    step = jax.jit(functools.partial(advance, models))  # traced here: the trees may be monkeypatched
    state = empty_state(models, weights, ROWS, LONGEST, LIMIT)
    prompts = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (ROWS, PROMPT_LENGTH))
    for row, tokens in enumerate(prompts):
        sampling = Sampling(jnp.float32(1), jnp.float32(1), jnp.int32(0), jax.random.key(row))
        prompt = Prompt(jnp.asarray(tokens), jnp.int32(PROMPT_LENGTH), jnp.int32(LIMIT), sampling)
        state = insert(models, weights, state, jnp.int32(row), prompt, NO_STOP)
    accepted, expected = [], []
    for _ in range(STEPS):
        output, counts = np.asarray(state.output), np.asarray(state.count)
        histories = [[*prompts[row], *output[row, : counts[row]]] for row in range(ROWS)]
        state, record = step(weights, state, NO_STOP)
        tree = jax.device_get(record.tree)
        for tokens, parents, probs in zip(
            tree.token, tree.parent, node_probs(weights.verifier, histories, tree), strict=True
        ):
            nodes = [{"token": token, "parent": parent} for token, parent in zip(tokens, parents, strict=True)]
            expected.append(expected_acceptance_reference(nodes, probs))
        accepted.extend(np.asarray(record.path.count))
    return np.array(accepted), np.array(expected)


@pytest.mark.parametrize("quality", ["good", "repeated", pytest.param("bad", marks=pytest.mark.slow)])
def test_mean_acceptance_is_the_expected_one(monkeypatch, quality):
    if quality == "repeated":
        monkeypatch.setattr(composition, "grow", repeat_siblings(composition.grow))
    accepted, expected = sampled_steps(quality)
    assert len(accepted) >= 2000
    difference = accepted - expected
    error = np.std(difference, ddof=1) / np.sqrt(len(difference))
    assert abs(np.mean(difference)) < 4 * error
    assert 4 * error < 0.15 * np.mean(accepted)  # tight enough to see one token in seven lost or gained
