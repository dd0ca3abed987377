"""Speculative sampling draws from the verifier's own distribution, whatever the drafter and the tree.

The distribution of the first three generated tokens is enumerated with the verifier alone and compared with samples
of the real decoding loop by a chi-square test. The first token comes from the prompt's pass, the others from steps.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from taps_jax.models.config import DrafterConfig
from taps_jax.models.drafter import Drafter, init_drafter, stack_specialists
from taps_jax.models.llama import Llama, causal_mask, embedding_table, head_table
from taps_jax.speculative import composition, decode
from taps_jax.speculative.composition import Routing
from taps_jax.speculative.decode import Models, Prompt, Weights, advance, empty_state, insert
from taps_jax.speculative.drafting import DrafterWeights
from taps_jax.speculative.sampling import Sampling, truncate
from taps_jax.speculative.tree import TreeShape
from tests.tiny import make_config, make_verifier_params

VOCAB = 9
CONFIG = make_config(
    vocab_size=VOCAB,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
)
PROMPT = (3, 1, 4, 1, 5)
DRAWN = 3
ROWS, BATCHES = 4000, 50
NO_STOP = np.array([-1], np.int32)

PLAIN, SMALL, WIDE = None, TreeShape(8, 3, 3), TreeShape(16, 2, 4)
SETTINGS = [  # temperature, top_p, top_k
    (0.3, 1.0, 0),
    (0.5, 1.0, 0),
    (1.0, 1.0, 0),
    (2.0, 1.0, 0),
    (1.0, 0.9, 0),
    (1.0, 1.0, 3),
    (0.7, 0.9, 3),
]
DEFAULT = [(SMALL, "good", (0.5, 1.0, 0)), (SMALL, "good", (1.0, 0.9, 0))]
FULL = [
    *((PLAIN, "none", setting) for setting in SETTINGS),
    *itertools.product([SMALL, WIDE], ["good", "bad", "repeated"], SETTINGS),
]
SLOW = [case for case in FULL if case not in DEFAULT]
THRESHOLD = 1e-3 / len(FULL)


def make_verifier(sharpness: float = 3.0) -> dict:
    """One random layer whose embeddings are large enough for the context to matter."""
    params = make_verifier_params(CONFIG, seed=1, sharpness=sharpness)
    table = params["model"]["embed_tokens"]
    table["weight"] = table["weight"] / jnp.sqrt(jnp.mean(table["weight"] ** 2, axis=-1, keepdims=True))
    return params


def make_pair(shape: TreeShape | None, quality: str, sharpness: float = 3.0) -> tuple[Models, Weights]:
    """A verifier with a good or bad drafter.

    The good one is the verifier's only layer, reading the embedding alone: with embeddings of unit size the input norm
    that drafters lack changes nothing, so it ranks next tokens almost as the verifier does.
    """
    params = make_verifier(sharpness)
    if shape is None:
        return Models(Llama(CONFIG)), Weights(params)
    config = DrafterConfig(dataclasses.replace(CONFIG, num_hidden_layers=1), fc_bias=False)
    specialist = init_drafter(config, jax.random.key(2))
    if quality != "bad":
        width = CONFIG.hidden_size
        layer = {name: params["model"]["layers_0"][name] for name in specialist["layers_0"]}
        fc = {"weight": jnp.eye(width, 2 * width, dtype=jnp.float32)}
        specialist = {**specialist, "layers_0": layer, "fc": fc}
    drafter = DrafterWeights(stack_specialists([specialist]), embedding_table(params), head_table(params), None)
    return Models(Llama(CONFIG), Drafter(config), shape), Weights(params, drafter)


def repeat_siblings(grow):
    """`grow` with all children of the root holding the best one's token, each with what was drafted below it."""

    def grow_repeated(*args):
        trees = grow(*args)
        return trees.replace(token=jnp.where(trees.depth == 1, trees.token[..., 1:2], trees.token))

    return grow_repeated


def ignore_temperature(monkeypatch):
    """Makes steps draw the bonus token at temperature 1."""
    seen = {}

    def remember(logits, sampling, *place):
        seen["sampling"], seen["place"] = sampling, place
        return choose(logits, sampling, *place)

    def commit_wrong(cache, length, tree, verified, path, best):
        plain = seen["sampling"]._replace(temperature=jnp.ones_like(seen["sampling"].temperature))
        last = jnp.take_along_axis(path.nodes, path.count[:, None], axis=1)
        is_last = jnp.arange(best.shape[1]) == last
        best = jnp.where(is_last, choose(verified.logits, plain, *seen["place"]), best)
        return commit(cache, length, tree, verified, path, best)

    choose, commit = decode.choose, decode.commit
    monkeypatch.setattr(decode, "choose", remember)
    monkeypatch.setattr(decode, "commit", commit_wrong)


def make_sampler(models: Models, weights: Weights):
    """A jitted function from [R] keys and three settings to [R, DRAWN] tokens and how many came from drafts.

    It is traced when first called, so monkeypatches in place then stay in it.
    """
    size = len(PROMPT) + DRAWN + 2 * models.path_length
    everything = jnp.int32(DRAWN + models.path_length)  # no row stops before it has its tokens

    @jax.jit
    def sample(weights, keys, temperature, top_p, top_k):
        def start(key):
            state = empty_state(models, weights, 1, size, DRAWN + models.path_length)
            prompt = Prompt(jnp.array(PROMPT), jnp.int32(len(PROMPT)), everything, Sampling(*settings, key))
            return insert(models, weights, state, jnp.int32(0), prompt, NO_STOP)

        settings = (temperature, top_p, top_k)
        state = jax.vmap(start)(keys)
        # [R, 1, ...] -> [R, ...], but the drafters' [R, N, 1, ...] -> [N, R, ...].
        by_specialist = lambda leaf: jnp.moveaxis(leaf[:, :, 0], 0, 1)
        drafter_cache, routing = jax.tree.map(by_specialist, state.drafter_cache), state.routing
        if routing is not None:
            routing = Routing(by_specialist(routing.score), routing.chosen[:, 0], by_specialist(routing.output))
        rest = jax.tree.map(lambda leaf: leaf[:, 0], state.replace(drafter_cache=None, routing=None))
        state = rest.replace(drafter_cache=drafter_cache, routing=routing)

        def advance_counted(carry):
            state, accepted = carry
            short = state.count < DRAWN  # the others are done, and must not outgrow their cache
            state, record = advance(models, weights, state.replace(active=short), NO_STOP)
            return state, accepted + jnp.sum(jnp.where(short, record.path.count, 0))

        unfinished = lambda carry: jnp.any(carry[0].count < DRAWN)
        state, accepted = jax.lax.while_loop(unfinished, advance_counted, (state, 0))
        return state.output[:, :DRAWN], accepted

    return functools.partial(sample, weights)


def draw(sampler, setting, batches: int = BATCHES, seed: int = 0) -> tuple[np.ndarray, float]:
    """Counts of the VOCAB^3 continuations, and drafted tokens accepted per sample."""
    temperature, top_p, top_k = setting
    counts, accepted = np.zeros(VOCAB**DRAWN, np.int64), 0
    for batch in range(batches):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), batch), ROWS)
        tokens, new = sampler(keys, jnp.float32(temperature), jnp.float32(top_p), jnp.int32(top_k))
        place = np.ravel_multi_index(np.asarray(tokens).T, (VOCAB,) * DRAWN)
        counts += np.bincount(place, minlength=counts.size)
        accepted += int(new)
    return counts, accepted / (ROWS * batches)


def next_probs(logits: np.ndarray, setting) -> np.ndarray:
    """[n, V] logits -> probabilities in float64: temperature, then top-k, then top-p of what is left."""
    temperature, top_p, top_k = setting
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    ranked = np.argsort(-probs, axis=-1)
    order = np.take_along_axis(probs, ranked, axis=-1)
    order[:, top_k or VOCAB :] = 0.0
    order /= order.sum(axis=-1, keepdims=True)
    order[np.cumsum(order, axis=-1) - order >= top_p] = 0.0  # the tokens before it reach top_p
    order /= order.sum(axis=-1, keepdims=True)
    np.put_along_axis(probs, ranked, order, axis=-1)
    return probs


@jax.jit
def next_logits(params: dict, tokens):
    """[n, V] the verifier's logits after each row of [n, T] tokens."""
    apply = functools.partial(Llama(CONFIG).apply, {"params": params})
    size = tokens.shape[1]
    features, _ = apply(tokens, jnp.arange(size)[None], causal_mask(size))
    return apply(features[:, -1], method=Llama.logits)


def exact_distribution(params: dict, setting) -> np.ndarray:
    """[V^3] probabilities of the continuations, from one causal pass over prompt and prefix each."""
    result = np.ones(1)
    for drawn in range(DRAWN):
        prefixes = np.array([[*PROMPT, *end] for end in itertools.product(range(VOCAB), repeat=drawn)])
        probs = next_probs(np.asarray(next_logits(params, prefixes)), setting)
        result = (result[:, None] * probs).reshape(-1)
    return result


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """Chi-square test of counts against probabilities, rare cells pooled; 0 if an impossible cell was seen."""
    if np.any(counts[probs == 0]):
        return 0.0
    expected = probs * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum()).astype(float)
    wanted = np.append(expected[~rare], expected[rare].sum())
    if wanted[-1] < 5:  # even pooled they are rare: one more row for the least of the others
        least = np.argmin(wanted[:-1])
        for cells in (observed, wanted):
            cells[least] += cells[-1]
        observed, wanted = observed[:-1], wanted[:-1]
    statistic = np.sum((observed - wanted) ** 2 / wanted)
    return float(chi2.sf(statistic, max(len(wanted) - 1, 1)))


@pytest.fixture(scope="module")
def sampler_for():
    """Samplers by shape and drafter; each compiles once for all settings."""
    patch = pytest.MonkeyPatch()
    keys, cache = jax.random.split(jax.random.key(0), ROWS), {}

    def get(shape, quality):
        if (shape, quality) not in cache:
            with patch.context() as inner:
                if quality == "repeated":
                    inner.setattr(composition, "grow", repeat_siblings(composition.grow))
                sampler = make_sampler(*make_pair(shape, quality))
                sampler(keys, jnp.float32(1), jnp.float32(1), jnp.int32(0))
            cache[shape, quality] = sampler
        return cache[shape, quality]

    return get


def check(sampler, shape, quality, setting):
    counts, accepted = draw(sampler, setting)
    assert counts.sum() == ROWS * BATCHES >= 200_000
    assert p_value(counts, exact_distribution(make_verifier(), setting)) > THRESHOLD
    if quality == "good":
        assert accepted > 0.5
    if shape is not None:
        assert accepted > 0.01


@pytest.mark.parametrize(("shape", "quality", "setting"), DEFAULT, ids=str)
def test_samples_follow_the_verifier(sampler_for, shape, quality, setting):
    check(sampler_for(shape, quality), shape, quality, setting)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "quality", "setting"), SLOW, ids=str)
def test_samples_follow_the_verifier_everywhere(sampler_for, shape, quality, setting):
    check(sampler_for(shape, quality), shape, quality, setting)


def test_a_bonus_token_that_ignores_the_temperature_is_caught(monkeypatch):
    """The test can fail: a tenth of the samples tells a wrong bonus token from a right one."""
    setting = (0.5, 1.0, 0)
    ignore_temperature(monkeypatch)
    counts, _ = draw(make_sampler(*make_pair(SMALL, "good")), setting, batches=BATCHES // 10)
    assert p_value(counts, exact_distribution(make_verifier(), setting)) < THRESHOLD / 1000


@pytest.mark.parametrize("sharpness", [1e4, pytest.param(1e7, marks=pytest.mark.slow)])
def test_point_masses(sharpness):
    """A verifier that is certain gives the greedy tokens at every setting, with nothing that is not a number."""
    params, (models, weights) = make_verifier(sharpness), make_pair(SMALL, "good", sharpness)
    sampler, keys = make_sampler(models, weights), jax.random.split(jax.random.key(0), ROWS)
    tokens, _ = sampler(keys, jnp.float32(0), jnp.float32(1), jnp.int32(0))
    greedy = np.ravel_multi_index(np.asarray(tokens[0]), (VOCAB,) * DRAWN)
    logits = Llama(CONFIG).apply({"params": params}, jnp.ones((1, 3, CONFIG.hidden_size)), method=Llama.logits)
    for temperature, top_p, top_k in SETTINGS:
        probs = exact_distribution(params, (temperature, top_p, top_k))
        assert probs[greedy] == 1
        one_row = (jnp.float32([temperature]), jnp.float32([top_p]), jnp.int32([top_k]), keys[:1])
        kept = truncate(logits, Sampling(*one_row))
        assert not np.any(np.isnan(kept)) and np.all(np.max(kept, axis=-1) > -np.inf)
        tokens, _ = sampler(keys, jnp.float32(temperature), jnp.float32(top_p), jnp.int32(top_k))
        assert set(np.ravel_multi_index(np.asarray(tokens).T, (VOCAB,) * DRAWN)) == {greedy}
