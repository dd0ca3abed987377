"""Several specialists in one step: what each rule makes of their trees, exact output, and caches that keep up."""

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taps_jax.speculative.composition import Composition
from taps_jax.speculative.decode import Models, Prompt, Weights, empty_state, insert, step
from taps_jax.speculative.engine import Engine, Request
from taps_jax.speculative.merging import join
from taps_jax.speculative.replay import compose_at, read_text, trees_at
from taps_jax.speculative.sampling import Sampling
from taps_jax.speculative.tree import DraftTree, TreeShape
from tests.references.draft_tree import expected_acceptance_reference
from tests.speculative.test_recompute import SIZE, STOP, drafter_forward, from_scratch
from tests.tiny import make_config, make_decoder

CONFIG = make_config(vocab_size=10)
SHAPE = TreeShape(8, 2, 3)
RULES = [rule for rule in Composition if rule is not Composition.SINGLE]


@functools.cache
def decoder(specialists: int) -> tuple[Models, Weights]:
    """Random specialists whose guesses differ."""
    return make_decoder(SHAPE, CONFIG, seed=3, specialists=specialists)


def verifier_probs(path: tuple[int, ...]) -> np.ndarray:
    """Some distribution that depends on the whole path and nothing else."""
    seed = int.from_bytes(hashlib.sha256(repr(path).encode()).digest()[:4], "little")
    return np.random.default_rng(seed).dirichlet(np.full(CONFIG.vocab_size, 0.3))


def expected_acceptance(tree: DraftTree, place: int) -> float:
    """Accepted tokens that a verifier of such probabilities gives, over distinct paths."""
    paths, nodes, probs = {}, [], []
    for node, (token, parent) in enumerate(zip(tree.token[place], tree.parent[place], strict=True)):
        if node and parent == node:  # not in use
            continue
        paths[node] = () if not node else (*paths[int(parent)], int(token))
        nodes.append({"token": int(token), "parent": list(paths).index(int(parent))})
        probs.append(verifier_probs(paths[node]))
    return expected_acceptance_reference(nodes, np.array(probs))


@pytest.fixture(scope="module", params=[2, 3])
def drafted(request):
    """Trees [N, P] of all specialists at positions of a random text."""
    models, weights = decoder(request.param)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 10, 64), jnp.int32)
    positions = jnp.arange(4, 20, dtype=jnp.int32)
    return trees_at(models, weights, read_text(models, weights, tokens), positions)


def composed(rule: Composition, trees: DraftTree):
    following = jnp.full((trees.token.shape[1], SHAPE.path_length - 1), -1, jnp.int32)
    score = None
    if rule is Composition.ROUTE_LIKELIHOOD:  # what came before decides
        score = jnp.asarray(np.random.default_rng(1).normal(size=trees.token.shape[:2]), jnp.float32)
    tree, _, score, chosen = jax.device_get(compose_at(rule, SHAPE, trees, score, following))
    return tree, score, chosen


def test_merged_trees_are_expected_to_accept_at_least_as_much(drafted):
    """Side by side never less than any single tree; joined at the union's size exactly as much as side by side."""
    specialists, places = drafted.token.shape[:2]
    concat, _, _ = composed(Composition.MERGE_CONCAT, drafted)
    union = jax.device_get(join(drafted, SHAPE.path_length - 1, 1 + specialists * (SHAPE.num_nodes - 1)))
    trie, _, _ = composed(Composition.MERGE_TRIE, drafted)
    singles = jax.device_get(drafted)
    gained = 0
    for place in range(places):
        whole = expected_acceptance(concat, place)
        alone = [
            expected_acceptance(jax.tree.map(lambda leaf, n=n: leaf[n], singles), place) for n in range(specialists)
        ]
        assert whole >= max(alone) - 1e-9
        assert expected_acceptance(union, place) == pytest.approx(whole, abs=1e-9)
        assert expected_acceptance(trie, place) <= whole + 1e-9
        gained += whole > max(alone) + 1e-3
    assert gained > places / 2
    assert trie.token.shape[1] == SHAPE.num_nodes and concat.token.shape[1] == union.token.shape[1]


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.routes])
def test_a_routed_tree_is_the_chosen_ones(drafted, rule):
    tree, score, chosen = composed(rule, drafted)
    singles = jax.device_get(drafted)
    assert len(set(chosen.tolist())) > 1
    for place, choice in enumerate(chosen):
        assert choice == np.argmax(score[:, place])
        for found, expected in zip(jax.tree.leaves(tree), jax.tree.leaves(singles), strict=True):
            np.testing.assert_array_equal(found[place], expected[choice, place])


def test_routing_scores_are_means_over_drafted_nodes(drafted):
    singles = jax.device_get(drafted)
    _, confidence, _ = composed(Composition.ROUTE_CONFIDENCE, drafted)
    _, certainty, _ = composed(Composition.ROUTE_ENTROPY, drafted)
    for number, place in np.ndindex(*singles.token.shape[:2]):
        used = [node for node in range(1, SHAPE.num_nodes) if singles.valid[number, place, node]]
        probs = [np.exp(singles.log_prob[number, place, node]) for node in used]
        assert confidence[number, place] == pytest.approx(np.mean(probs), rel=1e-5)
        entropies = [singles.entropy[number, place, node] for node in used]
        assert certainty[number, place] == pytest.approx(-np.mean(entropies), rel=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_every_specialist_keeps_up_with_what_is_committed(rule):
    """Caches of all specialists, chosen or not, against reading the committed tokens from scratch, step by step."""
    models, weights = decoder(2)
    models = models._replace(composition=rule)
    prompts = [[1, 7, 3, 3], [2, 9, 0, 4, 4, 8, 1]]
    state = empty_state(models, weights, len(prompts), SIZE, 48)
    for row, prompt in enumerate(prompts):
        padded = jnp.zeros(16, jnp.int32).at[: len(prompt)].set(jnp.asarray(prompt))
        sampling = Sampling(jnp.float32(row), jnp.float32(1), jnp.int32(0), jax.random.key(2))
        place = jnp.int32(row), Prompt(padded, jnp.int32(len(prompt)), jnp.int32(48), sampling)
        state = insert(models, weights, state, *place, STOP)
    used, longest = set(), 0
    for _ in range(8):
        state, record = step(models, weights, state, STOP)
        if rule.routes:
            used |= set(np.asarray(record.routing.chosen).tolist())
        longest = max(longest, int(record.path.count.max()))
        for row, prompt in enumerate(prompts):
            check_caches(models, weights, state, row, prompt)
    assert longest > 0
    if rule in (Composition.ROUTE_CONFIDENCE, Composition.ROUTE_ENTROPY_STEP, Composition.ROUTE_LIKELIHOOD):
        assert used == {0, 1}


def check_caches(models, weights, state, row: int, prompt: list[int]) -> None:
    committed = prompt + state.output[row, : int(state.count[row])].tolist()
    length, waiting = int(state.length[row]), int(state.pairs.count[row])
    assert length == len(committed) - 1
    features, _, _ = from_scratch(models, weights, committed[:-1])
    following = jnp.zeros((1, SIZE), jnp.int32).at[0, :length].set(jnp.asarray(committed[1:]))
    for number in range(2):
        params = jax.tree.map(lambda leaf, number=number: leaf[number], weights.drafter.params)
        fresh = drafter_forward(models.drafter, params, weights.drafter.embedding[following], features)
        for cached, part in zip(jax.tree.leaves(state.drafter_cache), fresh, strict=True):
            read = length - waiting
            np.testing.assert_allclose(cached[number, row, :, :read], part[0, :, :read], atol=3e-5)


@pytest.mark.parametrize("rule", RULES)
def test_answers_are_the_verifiers_own(rule):
    """Three specialists, three rows at once that refill, greedy and sampled rows side by side."""
    models, weights = decoder(3)
    requests = [
        Request(tuple(np.random.default_rng(seed).integers(0, 10, 3 + seed).tolist()), 24, temperature, seed=(seed,))
        for seed, temperature in enumerate((0.0, 1.0, 0.5, 2.0, 0.0))
    ]
    sizes = {"batch_size": 3, "cache_size": 64, "max_new_tokens": 24}
    plain = Engine(Models(models.verifier), Weights(weights.verifier), (), **sizes)
    engine = Engine(models._replace(composition=rule), weights, (), **sizes)
    texts = [sorted((done.index, done.tokens) for done in each.decode(requests)) for each in (plain, engine)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("rule", RULES)
def test_one_compilation_serves_every_prompt_of_a_bucket(rule):
    models, weights = make_decoder(SHAPE, make_config(vocab_size=11), seed=4, specialists=2)
    models = models._replace(composition=rule)
    engine = Engine(models, weights, (), cache_size=64, max_new_tokens=6)
    before = step._cache_size()
    for length in (2, 9, 31):
        list(engine.decode([Request((1,) * length, 6, length % 2)], on_step=lambda *_: None))
    assert step._cache_size() - before == 1
