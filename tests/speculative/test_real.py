"""Lossless decoding with the real verifier, with a drafter that is nearly always wrong and one that is often right."""

import dataclasses
import itertools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taps_jax.checkpoints.hf_drafter import drafter_config
from taps_jax.checkpoints.verifier import Verifier
from taps_jax.data.questions import read_questions
from taps_jax.data.tokenize import encode_prompt
from taps_jax.data.vocabulary import frequent_tokens
from taps_jax.models.drafter import Drafter, init_drafter
from taps_jax.models.llama import causal_mask, embedding_table, head_table
from taps_jax.speculative.decode import Models, Weights
from taps_jax.speculative.drafting import drafter_weights
from taps_jax.speculative.engine import Engine, Request, cache_size_for
from taps_jax.speculative.tree import TreeShape

MOST_TOKENS = 32
DRAFT_VOCABULARY = 8192
FEW, MANY = 3, 20
SMALL, PAPER = TreeShape(8, 3, 3), TreeShape(60, 5, 10)
TEMPERATURES = (0.3, 0.7, 1.0, 2.0)
TRUNCATIONS = ((1.0, 0), (0.9, 50))


class Decoded(NamedTuple):
    """Answers by request, and the steps they took together."""

    tokens: list[tuple[int, ...]]
    steps: int


@dataclasses.dataclass
class Bench:
    """The verifier with prompts, and what was decoded from them plainly."""

    verifier: Verifier
    prompts: list[tuple[int, ...]]
    plain: dict = dataclasses.field(default_factory=dict)

    def requests(self, count: int, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0) -> list[Request]:
        return [
            Request(prompt, MOST_TOKENS, temperature, top_p, top_k, seed=(11, index))
            for index, prompt in enumerate(self.prompts[:count])
        ]

    def decode(self, models: Models, weights: Weights, requests: list[Request], batch_size: int = 1) -> Decoded:
        size = cache_size_for(max(map(len, self.prompts)), MOST_TOKENS, models.path_length)
        engine = Engine(
            models,
            weights,
            self.verifier.stop_tokens,
            batch_size=batch_size,
            cache_size=size,
            max_new_tokens=MOST_TOKENS,
        )
        done = sorted(engine.decode(requests), key=lambda completion: completion.index)
        return Decoded([completion.tokens for completion in done], sum(completion.steps for completion in done))

    def decode_plainly(self, count: int, *setting: float) -> Decoded:
        if (count, setting) not in self.plain:
            decoder = Models(self.verifier.module), Weights(self.verifier.params)
            self.plain[count, setting] = self.decode(*decoder, self.requests(count, *setting))
        return self.plain[count, setting]

    def speculative(self, shape: TreeShape, params: dict, answers: list[tuple[int, ...]]) -> tuple[Models, Weights]:
        """A decoder with one specialist, whose draft vocabulary is the most frequent tokens of some answers."""
        verifier, config = self.verifier, drafter_config(self.verifier.config)
        ids = frequent_tokens(
            map(np.array, answers), DRAFT_VOCABULARY, verifier.stop_tokens, verifier.config.vocab_size
        )
        tables = embedding_table(verifier.params), head_table(verifier.params)
        weights = Weights(verifier.params, drafter_weights([params], *tables, ids))
        return Models(verifier.module, Drafter(config), shape), weights


@pytest.fixture(scope="module")
def bench(smollm2: Verifier, questions_dir: Path) -> Bench:
    """Held-out chat and maths questions, alternating."""
    files = [read_questions(questions_dir / name)[:MANY] for name in ("chat_heldout.jsonl", "math_heldout.jsonl")]
    questions = itertools.islice(itertools.chain.from_iterable(zip(*files, strict=True)), MANY)
    render = lambda text: encode_prompt(smollm2.tokenizer, [{"role": "user", "content": text}])
    return Bench(smollm2, [render(question.turns[0]) for question in questions])


def random_drafter(verifier: Verifier) -> dict:
    return init_drafter(drafter_config(verifier.config), jax.random.key(0))


def fitted_drafter(verifier: Verifier, texts: list[tuple[int, ...]]) -> dict:
    """A drafter that predicts the features of some texts by least squares; its layer only passes them on."""
    inputs, targets = [], []
    for text in texts:
        tokens = jnp.array([text])
        size = tokens.shape[1]
        features, _ = verifier.module.apply(
            {"params": verifier.params}, tokens, jnp.arange(size)[None], causal_mask(size)
        )
        embeddings = embedding_table(verifier.params)[tokens[0]]
        inputs.append(jnp.concatenate([embeddings[1:], features[0, :-1]], axis=-1))
        targets.append(features[0, 1:])
    solution = np.linalg.lstsq(np.concatenate(inputs), np.concatenate(targets), rcond=1e-4)[0]
    params = random_drafter(verifier)
    layer = params["layers_0"]
    for block, name in (("self_attn", "o_proj"), ("mlp", "down_proj")):
        layer[block][name]["weight"] = jnp.zeros_like(layer[block][name]["weight"])
    params["fc"]["weight"] = jnp.asarray(solution.T, jnp.float32)
    return params


def fitted_to(bench: Bench, count: int) -> dict:
    answers = bench.decode_plainly(count).tokens
    return fitted_drafter(
        bench.verifier, [(*prompt, *answer) for prompt, answer in zip(bench.prompts, answers, strict=False)]
    )


@pytest.mark.parametrize("quality", [pytest.param("random", marks=pytest.mark.slow), "fitted"])
def test_greedy_answers_are_the_plain_ones(bench, quality):
    plain = bench.decode_plainly(FEW)
    assert [len(tokens) for tokens in plain.tokens] == [MOST_TOKENS] * FEW
    params = random_drafter(bench.verifier) if quality == "random" else fitted_to(bench, FEW)
    found = bench.decode(*bench.speculative(SMALL, params, plain.tokens), bench.requests(FEW))
    assert found.tokens == plain.tokens
    assert found.steps <= plain.steps
    if quality == "fitted":
        assert plain.steps / found.steps > 2  # most tokens come from accepted paths


@pytest.fixture(scope="module")
def fitted_params(bench) -> dict:
    return fitted_to(bench, MANY)


@pytest.mark.slow
@pytest.mark.parametrize("setting", itertools.product(TEMPERATURES, TRUNCATIONS), ids=str)
@pytest.mark.parametrize("shape", [SMALL, PAPER], ids=["small", "paper"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_sampled_answers_are_the_plain_ones(bench, fitted_params, batch_size, shape, setting):
    """The drafter is fitted to the greedy answers, so it is often right at low temperatures and rarely at high ones."""
    temperature, truncation = setting
    greedy, plain = bench.decode_plainly(MANY), bench.decode_plainly(MANY, temperature, *truncation)
    assert plain.tokens != greedy.tokens
    decoder = bench.speculative(shape, fitted_params, greedy.tokens)
    found = bench.decode(*decoder, bench.requests(MANY, temperature, *truncation), batch_size)
    assert found.tokens == plain.tokens
    assert found.steps < plain.steps


@pytest.mark.slow
@pytest.mark.parametrize("shape", [SMALL, PAPER], ids=["small", "paper"])
def test_sampled_answers_are_the_plain_ones_with_a_random_drafter(bench, shape):
    """Every question has another setting, four at a time."""
    settings = itertools.cycle(itertools.product(TEMPERATURES, TRUNCATIONS))
    requests = [
        dataclasses.replace(request, temperature=temperature, top_p=top_p, top_k=top_k)
        for request, (temperature, (top_p, top_k)) in zip(bench.requests(MANY), settings, strict=False)
    ]
    plain = bench.decode(Models(bench.verifier.module), Weights(bench.verifier.params), requests)
    decoder = bench.speculative(shape, random_drafter(bench.verifier), plain.tokens)
    assert bench.decode(*decoder, requests, batch_size=4).tokens == plain.tokens
