"""Steps and the engine: drafting changes how many steps a text takes and nothing else, wherever the text ends."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taps_jax.errors import InputError
from taps_jax.models.config import DrafterConfig
from taps_jax.models.drafter import Drafter
from taps_jax.models.llama import Llama, causal_mask
from taps_jax.speculative import engine
from taps_jax.speculative.decode import Models, Prompt, Weights, empty_state, insert, run, step
from taps_jax.speculative.engine import Completion, Engine, Request, cache_size_for, prompt_bucket
from taps_jax.speculative.sampling import greedy
from taps_jax.speculative.tree import TreeShape
from tests.tiny import make_config, make_decoder

CONFIG = make_config(vocab_size=24)
DRAFTER = Drafter(DrafterConfig(dataclasses.replace(CONFIG, num_hidden_layers=1)))
CHAIN, SMALL, WIDE, PAPER = (TreeShape(*size) for size in [(5, 3, 1), (8, 3, 3), (16, 2, 4), (60, 5, 10)])
PROMPT_LENGTHS = (1, 9, 31, 32, 33, 20)  # around a bucket's edge
MOST_TOKENS = 24
NO_STOP = (-1, -1)  # two, like the other stop lists, so that all share a compilation
ROOMY = 128


@functools.cache
def make_weights(seed: int) -> Weights:
    """A verifier whose context matters; the drafters of odd seeds are often right, those of even seeds rarely.

    The good ones are the verifier's first layer reading the embedding alone. Embeddings have unit size, so that the
    input norm that drafters lack changes nothing.
    """
    _, weights = make_decoder(SMALL, CONFIG, seed)
    table = weights.verifier["model"]["embed_tokens"]
    table["weight"] /= jnp.sqrt(jnp.mean(table["weight"] ** 2, axis=-1, keepdims=True))
    params = weights.drafter.params
    if seed % 2:
        own = weights.verifier["model"]["layers_0"]
        layer = jax.tree.map(lambda leaf: leaf[None], {name: own[name] for name in params["layers_0"]})
        fc = {"weight": jnp.eye(CONFIG.hidden_size, 2 * CONFIG.hidden_size)[None]}
        params = {**params, "layers_0": layer, "fc": fc}
    return Weights(weights.verifier, weights.drafter._replace(embedding=table["weight"], params=params))


def make_models(shape: TreeShape | None) -> Models:
    return Models(Llama(CONFIG), DRAFTER, shape) if shape else Models(Llama(CONFIG))


def make_engine(shape: TreeShape | None, seed: int, batch: int = 1, stop=NO_STOP, cache_size: int = ROOMY) -> Engine:
    weights = make_weights(seed) if shape else Weights(make_weights(seed).verifier)
    return Engine(make_models(shape), weights, stop, batch_size=batch, cache_size=cache_size, max_new_tokens=96)


def make_prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng((seed, length)).integers(0, CONFIG.vocab_size, length).tolist())


def make_requests(seed: int, limits=(MOST_TOKENS,) * len(PROMPT_LENGTHS)) -> list[Request]:
    return [Request(make_prompt(seed, length), limit) for length, limit in zip(PROMPT_LENGTHS, limits, strict=True)]


def decode(engine: Engine, requests: list[Request], on_tokens=None) -> list[Completion]:
    """Completions in the order of the requests, each of which must complete once."""
    done = sorted(engine.decode(requests, on_tokens), key=lambda completion: completion.index)
    assert [completion.index for completion in done] == list(range(len(requests)))
    return done


def texts(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.tokens for completion in completions]


@jax.jit
def next_tokens(params: dict, tokens, lengths):
    """The verifier's greedy choice after each right-padded row, read from its beginning."""
    apply = functools.partial(Llama(CONFIG).apply, {"params": params})
    features, _ = apply(tokens, jnp.arange(tokens.shape[1])[None], causal_mask(tokens.shape[1]))
    last = jnp.take_along_axis(features, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return jnp.argmax(apply(last, method=Llama.logits), axis=-1)


@functools.cache
def greedy_texts(seed: int) -> list[tuple[int, ...]]:
    """What follows the prompts of `make_requests`, decoded without caches."""
    params, lengths = make_weights(seed).verifier, np.array(PROMPT_LENGTHS)
    tokens = np.zeros((len(lengths), max(lengths) + MOST_TOKENS), np.int32)
    for row, length in enumerate(PROMPT_LENGTHS):
        tokens[row, :length] = make_prompt(seed, length)
    rows = np.arange(len(lengths))
    for ahead in range(MOST_TOKENS):
        tokens[rows, lengths + ahead] = next_tokens(params, tokens, lengths + ahead)
    return [tuple(tokens[row, length : length + MOST_TOKENS].tolist()) for row, length in enumerate(PROMPT_LENGTHS)]


@functools.cache
def committed_by_step(shape: TreeShape, seed: int, prompt: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """At least `count` greedy tokens: the first one, then those of every step, with nothing cut."""
    models, weights = make_models(shape), make_weights(seed)
    state = empty_state(models, weights, 1, ROOMY, 96)
    tokens = jnp.zeros(prompt_bucket(len(prompt)), jnp.int32).at[: len(prompt)].set(jnp.asarray(prompt))
    sampling = jax.tree.map(lambda setting: setting[0], greedy(1))
    asked = Prompt(tokens, jnp.int32(len(prompt)), jnp.int32(96), sampling)
    state = insert(models, weights, state, jnp.int32(0), asked, jnp.array(NO_STOP))
    counts = [0, 1]
    while counts[-1] < count:
        state, record = step(models, weights, state, jnp.array(NO_STOP))
        assert record.committed[0] == record.path.count[0] + 1
        counts.append(counts[-1] + int(record.committed[0]))
    return [tuple(state.output[0, a:b].tolist()) for a, b in itertools.pairwise(counts)]


def cut(pieces: list[tuple[int, ...]], stop: tuple[int, ...], limit: int) -> tuple[tuple[int, ...], int]:
    """Where a text ends, token by token: its tokens, and the steps taken by then."""
    tokens = []
    for steps, piece in enumerate(pieces):
        for token in piece:
            tokens.append(token)
            if token in stop or len(tokens) == limit:
                return tuple(tokens), steps
    raise AssertionError("the text is too short for this limit")


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("shape", [None, CHAIN, SMALL, WIDE, PAPER], ids=str)
def test_greedy_texts_are_those_of_the_verifier_alone(shape, batch):
    steps, variety = {0: 0, 1: 0}, []
    for seed in range(20):
        done = decode(make_engine(shape, seed, batch), make_requests(seed))
        assert texts(done) == greedy_texts(seed)
        steps[seed % 2] += sum(completion.steps for completion in done)
        variety.append(np.mean([len(set(text)) for text in texts(done)]))
    assert np.mean(variety) > 3  # texts that repeat one token would prove little
    most = 10 * len(PROMPT_LENGTHS) * (MOST_TOKENS - 1)
    if shape is None:
        assert steps == {0: most, 1: most}
    else:
        assert steps[0] < most and steps[1] < most / 2  # accepted tokens are what is being tested


def test_answers_do_not_depend_on_the_batch_or_on_neighbours():
    """Rows finish at different times and are refilled; a row must not see what it held before."""
    limits = (1, 24, 5, 17, 2, 9)
    requests = [request for seed in (1, 3, 5) for request in make_requests(seed, limits)]
    stop = (7, 19)
    alone = [decode(make_engine(SMALL, 1, stop=stop), [request])[0] for request in requests]
    assert len({len(text) for text in texts(alone)}) > 4
    for order in (requests, requests[::-1]):
        wanted = alone if order is requests else alone[::-1]
        for batch in (1, 4):
            done = decode(make_engine(SMALL, 1, batch, stop), order)
            assert texts(done) == texts(wanted)
            assert [completion.steps for completion in done] == [completion.steps for completion in wanted]


def test_completions_come_as_rows_finish_and_requests_are_read_as_rows_free():
    taken = []

    def requests():
        for index, limit in enumerate((20, 2, 2, 2)):
            taken.append(index)
            yield Request(make_prompt(0, 5), limit)

    order = []
    for completion in make_engine(None, 0, batch=2).decode(requests()):
        order.append(completion.index)
        if len(order) == 1:
            assert taken == [0, 1]
    assert order == [1, 2, 3, 0]
    assert list(make_engine(None, 0, batch=2).decode([])) == []


@pytest.mark.parametrize("batch", [1, 4])
def test_nothing_is_returned_or_counted_after_a_stop(batch):
    """Every token of the vocabulary as the stop, and every limit, on texts committed several tokens at a time."""
    inside = bonus = first = in_prompt = 0
    seed, requests = 1, make_requests(1)
    pieces = [committed_by_step(SMALL, seed, request.tokens, MOST_TOKENS) for request in requests]
    for token in range(CONFIG.vocab_size):
        done = decode(make_engine(SMALL, seed, batch, (-1, token)), requests)
        for request, piece, completion in zip(requests, pieces, done, strict=True):
            assert (completion.tokens, completion.steps) == cut(piece, (token,), MOST_TOKENS)
            last = piece[completion.steps]
            if completion.tokens[-1] == token:
                inside += len(last) >= 4 and 1 <= last.index(token) < len(last) - 1
                bonus += len(last) >= 2 and last.index(token) == len(last) - 1
                first += completion.steps == 0
                in_prompt += token in request.tokens
    # The cases are among them: within an accepted path of three or more, as its bonus, and from the prompt's own pass.
    assert min(inside, bonus, first, in_prompt) >= 2


def test_the_limit_cuts_inside_an_accepted_path():
    seed, inside = 1, 0
    for length in PROMPT_LENGTHS:
        prompt = make_prompt(seed, length)
        pieces = committed_by_step(SMALL, seed, prompt, MOST_TOKENS)
        limits = range(1, MOST_TOKENS + 1)
        for stop in (NO_STOP, (-1, 11)):
            done = decode(make_engine(SMALL, seed, 4, stop), [Request(prompt, limit) for limit in limits])
            for limit, completion in zip(limits, done, strict=True):
                assert (completion.tokens, completion.steps) == cut(pieces, stop, limit)
                ended = sum(len(piece) for piece in pieces[: completion.steps + 1])
                inside += len(pieces[completion.steps]) >= 4 and len(completion.tokens) < ended
    assert inside > 10


@pytest.mark.parametrize("shape", [None, SMALL, PAPER], ids=str)
def test_certain_verifiers_sample_their_greedy_text(shape):
    """One token holds all the probability, for the drafter too; every setting returns it and nothing is NaN."""
    seed, sharpen = 1, 1e4
    weights = make_weights(seed)
    head = {"weight": weights.verifier["lm_head"]["weight"] * sharpen}
    drafter = weights.drafter._replace(head=head["weight"]) if shape else None
    certain = Weights({**weights.verifier, "lm_head": head}, drafter)
    engine = Engine(make_models(shape), certain, NO_STOP, batch_size=1, cache_size=ROOMY, max_new_tokens=96)
    for setting in ((1.0, 1.0, 0), (0.3, 0.9, 0), (1.0, 0.9, 5)):
        requests = [Request(request.tokens, MOST_TOKENS, *setting) for request in make_requests(seed)]
        assert texts(decode(engine, requests)) == greedy_texts(seed)


def test_finished_rows_stand_still():
    """Committed tokens and the first one make up the text; steps after its end change and count nothing."""
    models, weights, limits = make_models(SMALL), make_weights(1), (3, 12)
    state = empty_state(models, weights, 2, ROOMY, 96)
    sampling = jax.tree.map(lambda setting: setting[0], greedy(1))
    for row, limit in enumerate(limits):
        tokens = jnp.asarray(make_prompt(1, 32))
        prompt = Prompt(tokens, jnp.int32(20 + row), jnp.int32(limit), sampling)
        state = insert(models, weights, state, jnp.int32(row), prompt, jnp.array(NO_STOP))
    committed, finished = np.zeros(2, int), [None, None]
    for _ in range(12):
        state, record = step(models, weights, state, jnp.array(NO_STOP))
        committed += record.committed
        for row, limit in enumerate(limits):
            stand = [state.length, state.root, state.count, state.steps, state.active, *state.pairs]
            stand = [np.asarray(leaf[row]).tolist() for leaf in stand] + state.output[row, :limit].tolist()
            if finished[row] is None and not state.active[row]:
                finished[row] = stand
            assert finished[row] in (None, stand)
    assert tuple(committed + 1) == limits == tuple(state.count.tolist())


@pytest.mark.parametrize("shape", [None, CHAIN, SMALL], ids=str)
@pytest.mark.parametrize(("length", "size"), [(1, 64), (40, 128)])
def test_generation_may_end_at_the_end_of_the_cache(shape, length, size):
    path = make_models(shape).path_length
    limit = size - length - path
    assert cache_size_for(length, limit, path) == size < cache_size_for(length, limit + 1, path)
    requests = [Request(make_prompt(seed, length), limit) for seed in range(3)]
    for seed in (0, 1):
        done = decode(make_engine(shape, seed, 2, cache_size=size), requests)
        assert [len(text) for text in texts(done)] == [limit] * 3
        assert texts(done) == texts(decode(make_engine(None, seed, 4), requests))


def test_a_callback_sees_the_text_grow_step_by_step():
    seen = {}
    requests = make_requests(1, limits=(1, 24, 5, 17, 2, 9))
    engine = make_engine(SMALL, 1, batch=2)
    done = decode(engine, requests, lambda index, tokens, last: seen.setdefault(index, []).append((tokens, last)))
    assert texts(done) == [text[: len(tokens)] for text, tokens in zip(greedy_texts(1), texts(done), strict=True)]
    for completion in done:
        calls = seen[completion.index]
        assert [last for _, last in calls] == [False] * (len(calls) - 1) + [True]
        assert calls[-1][0] == completion.tokens and len(calls) == max(completion.steps, 1)
        pieces = committed_by_step(SMALL, 1, requests[completion.index].tokens, MOST_TOKENS)
        grown = np.cumsum([len(piece) for piece in pieces])[1 : completion.steps]
        assert [len(tokens) for tokens, _ in calls[:-1]] == grown.tolist()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((), 4), "needs a prompt"),
        (Request((1, 2), 0), "max_new_tokens >= 1"),
        (Request((1,) * 100, 50), "needs a cache of 192, it holds 128"),
        (Request((1,) * 4, 97), "at most 96 new tokens"),
        (Request((1,) * 500, 13), "max_position_embeddings of 512"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_requests_that_do_not_fit_are_refused(request_, message):
    with pytest.raises(InputError, match=message):
        list(make_engine(SMALL, 0).decode([request_]))


def test_caches_beyond_the_memory_are_refused(monkeypatch):
    monkeypatch.setattr(engine, "free_bytes", lambda: 1_000_000)
    sizes = {"cache_size": 4096, "max_new_tokens": 8}
    with pytest.raises(InputError, match="batch_size 8 with caches of 4096 positions needs .* lower batch_size"):
        Engine(*make_decoder(None), (), batch_size=8, **sizes)
    monkeypatch.setattr(engine, "free_bytes", lambda: None)
    Engine(*make_decoder(None), (), batch_size=8, **sizes)


def test_a_drafter_reads_beyond_its_own_positions():
    """Rope follows from the position, whatever number of them the drafter's config names."""
    texts = {}
    for most in (CONFIG.max_position_embeddings, 16):
        models, weights = make_decoder(TreeShape(8, 3, 3))
        layer = dataclasses.replace(models.drafter.config.layer, max_position_embeddings=most)
        models = models._replace(drafter=Drafter(dataclasses.replace(models.drafter.config, layer=layer)))
        decoding = Engine(models, weights, (), cache_size=128, max_new_tokens=40)
        (done,) = decoding.decode([Request(tuple(range(40)), 40)])
        texts[most] = (done.tokens, done.steps)
    assert len(set(texts.values())) == 1


def test_buckets():
    assert [prompt_bucket(length) for length in (1, 31, 32, 33, 64, 65, 8192)] == [32, 32, 32, 64, 64, 128, 8192]
    with pytest.raises(InputError, match="8193"):
        prompt_bucket(8193)
    assert [cache_size_for(*sizes) for sizes in [(32, 27, 5), (32, 28, 5), (1, 1, 1), (65, 1, 1)]] == [64, 128, 64, 128]


@pytest.mark.parametrize("shape", [None, SMALL], ids=str)
def test_prompts_of_one_bucket_share_a_compilation(shape):
    config = make_config(vocab_size=25)  # nobody else's, so nothing is compiled yet
    models, weights = make_decoder(shape, config)
    engine = Engine(models, weights, NO_STOP, batch_size=2, cache_size=ROOMY, max_new_tokens=32)
    before = insert._cache_size(), run._cache_size()
    compiled = lambda: (insert._cache_size() - before[0], run._cache_size() - before[1])
    engine.warm_up([9])
    assert compiled() == (1, 1) and engine.seconds == 0
    for seed in range(2):
        requests = [
            Request(make_prompt(seed, length), length, temperature=length % 2, top_k=seed, seed=(seed, length))
            for length in (1, 7, 15, 30, 31, 32)
        ]
        assert [len(text) for text in texts(decode(engine, requests))] == [1, 7, 15, 30, 31, 32]
        assert compiled() == (1, 1)
    decode(engine, [Request(make_prompt(0, 33), 3)])
    assert compiled() == (2, 1) and engine.seconds > 0
