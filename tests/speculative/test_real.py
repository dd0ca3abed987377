"""Lossless decoding with the real verifier, with a drafter that is nearly always wrong and one that is often right.

The full sets are marked slow: `bash launch/test.sh -m slow tests/speculative/test_real.py`, 40 minutes on 2 cores.
TAPS_JAX_BENCHMARKS may name a folder of the benchmarks' questions (mt_bench.jsonl, gsm8k.jsonl, math_500.jsonl and
svamp.jsonl in MT-Bench format); without it the project's own are used.
"""

import dataclasses
import itertools
import os
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
from taps_jax.models.llama import Llama, causal_mask, embedding_table, head_table
from taps_jax.speculative.decode import Models, Weights
from taps_jax.speculative.drafting import drafter_weights
from taps_jax.speculative.engine import Engine, Request, cache_size_for
from taps_jax.speculative.tree import TreeShape

MOST_TOKENS, SAMPLED_TOKENS, GREEDY_SET_TOKENS = 32, 12, 64
DRAFT_VOCABULARY = 8192
FEW, MANY = 3, 20
SMALL, MIDDLE, PAPER, CHAIN = TreeShape(8, 3, 3), TreeShape(16, 3, 4), TreeShape(60, 5, 10), TreeShape(6, 4, 1)
GREEDY_SET = 40
TIE = 1e-4  # two products that differ in rounding may order logits this close either way
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
    most_tokens: int
    plain: dict = dataclasses.field(default_factory=dict)

    def requests(self, count: int, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0) -> list[Request]:
        return [
            Request(prompt, self.most_tokens, temperature, top_p, top_k, seed=(11, index))
            for index, prompt in enumerate(self.prompts[:count])
        ]

    def decode(self, models: Models, weights: Weights, requests: list[Request], batch_size: int = 1) -> Decoded:
        size = cache_size_for(max(map(len, self.prompts)), self.most_tokens, models.path_length)
        engine = Engine(
            models,
            weights,
            self.verifier.stop_tokens,
            batch_size=batch_size,
            cache_size=size,
            max_new_tokens=self.most_tokens,
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
        weights = Weights(verifier.params, drafter_weights([params], *tables, [ids]))
        return Models(verifier.module, Drafter(config), shape), weights


def first_turns(verifier: Verifier, files: list[Path], count: int) -> list[tuple[int, ...]]:
    """Prompts from the files in turn."""
    questions = itertools.chain.from_iterable(zip(*map(read_questions, files), strict=False))
    render = lambda text: encode_prompt(verifier.tokenizer, [{"role": "user", "content": text}])
    prompts = [render(question.turns[0]) for question in itertools.islice(questions, count)]
    assert len(prompts) == count
    return prompts


@pytest.fixture(scope="module")
def bench(smollm2: Verifier, questions_dir: Path) -> Bench:
    """Held-out chat and maths questions, alternating."""
    files = [questions_dir / "chat_heldout.jsonl", questions_dir / "math_heldout.jsonl"]
    return Bench(smollm2, first_turns(smollm2, files, MANY), MOST_TOKENS)


@pytest.fixture(scope="module")
def sampled_bench(bench) -> Bench:
    return Bench(bench.verifier, bench.prompts, SAMPLED_TOKENS)


@pytest.fixture(scope="module")
def greedy_bench(smollm2: Verifier, questions_dir: Path) -> Bench:
    """Questions of the named benchmarks, or else of this project's training files, which are the larger ones."""
    folder = os.environ.get("TAPS_JAX_BENCHMARKS")
    if folder:
        files = [Path(folder) / f"{name}.jsonl" for name in ("mt_bench", "gsm8k", "math_500", "svamp")]
    else:
        files = [questions_dir / f"{name}_train.jsonl" for name in ("chat", "math")]
    return Bench(smollm2, first_turns(smollm2, files, GREEDY_SET), GREEDY_SET_TOKENS)


def random_drafter(verifier: Verifier) -> dict:
    return init_drafter(drafter_config(verifier.config), jax.random.key(0))


def fitted_drafter(verifier: Verifier, texts: list[tuple[int, ...]]) -> dict:
    """A drafter that predicts the features of some texts by least squares; its layer only passes them on."""
    size = max(map(len, texts))
    read = jax.jit(
        lambda params, tokens: verifier.module.apply(
            {"params": params}, tokens, jnp.arange(size)[None], causal_mask(size)
        )[0][0]
    )
    table, inputs, targets = np.asarray(embedding_table(verifier.params)), [], []
    for text in texts:
        tokens = np.zeros((1, size), np.int32)
        tokens[0, : len(text)] = text
        features = np.asarray(read(verifier.params, tokens))[: len(text)]
        inputs.append(np.concatenate([table[list(text[1:])], features[:-1]], axis=-1))
        targets.append(features[1:])
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


def differences(bench: Bench, found: Decoded, plain: Decoded) -> list[str]:
    """Where two greedy answers part, unless it is at a tie of the verifier; ties are printed."""
    bad = []
    for index, (one, other) in enumerate(zip(found.tokens, plain.tokens, strict=True)):
        if one == other:
            continue
        at = next(i for i, (a, b) in enumerate(itertools.zip_longest(one, other)) if a != b)
        text = jnp.array([(*bench.prompts[index], *other[:at])])
        size = text.shape[1]
        params = {"params": bench.verifier.params}
        features, _ = bench.verifier.module.apply(params, text, jnp.arange(size)[None], causal_mask(size))
        logits = bench.verifier.module.apply(params, features[:, -1:], method=Llama.logits)
        second, first = np.sort(np.asarray(logits)[0, 0])[-2:]
        line = f"prompt {index}, token {at}: gap of the verifier's best two {first - second:.2e}"
        if first - second < TIE:
            print("tie:", line)
        else:
            bad.append(line)
    return bad


@pytest.fixture(scope="module")
def greedy_params(greedy_bench) -> dict:
    return fitted_to(greedy_bench, GREEDY_SET)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [SMALL, MIDDLE, PAPER, CHAIN], ids=str)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_greedy_set(greedy_bench, greedy_params, batch_size, shape):
    """40 prompts of 64 tokens."""
    plain = greedy_bench.decode_plainly(GREEDY_SET)
    decoder = greedy_bench.speculative(shape, greedy_params, plain.tokens)
    found = greedy_bench.decode(*decoder, greedy_bench.requests(GREEDY_SET), batch_size)
    assert not differences(greedy_bench, found, plain)
    assert found.steps < plain.steps


@pytest.fixture(scope="module")
def fitted_params(sampled_bench) -> dict:
    return fitted_to(sampled_bench, MANY)


def every_setting(bench: Bench) -> list[Request]:
    """Each prompt at each setting, the settings mixed so that rows decoded together differ."""
    settings = list(itertools.product(TEMPERATURES, TRUNCATIONS))
    return [
        dataclasses.replace(request, temperature=temperature, top_p=top_p, top_k=top_k)
        for request in bench.requests(MANY)
        for temperature, (top_p, top_k) in settings
    ]


@pytest.fixture(scope="module")
def sampled_plainly(sampled_bench) -> Decoded:
    plain = Models(sampled_bench.verifier.module), Weights(sampled_bench.verifier.params)
    return sampled_bench.decode(*plain, every_setting(sampled_bench), batch_size=4)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [SMALL, PAPER], ids=["small", "paper"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_sampled_answers_are_the_plain_ones(sampled_bench, fitted_params, sampled_plainly, batch_size, shape):
    """The drafter is fitted to the greedy answers, so it is often right at low temperatures and rarely at high ones."""
    decoder = sampled_bench.speculative(shape, fitted_params, sampled_bench.decode_plainly(MANY).tokens)
    found = sampled_bench.decode(*decoder, every_setting(sampled_bench), batch_size)
    assert found.tokens == sampled_plainly.tokens
    assert found.steps < sampled_plainly.steps


@pytest.mark.slow
@pytest.mark.parametrize("shape", [SMALL, PAPER], ids=["small", "paper"])
def test_sampled_answers_are_the_plain_ones_with_a_random_drafter(sampled_bench, sampled_plainly, shape):
    greedy = sampled_bench.decode_plainly(MANY).tokens
    decoder = sampled_bench.speculative(shape, random_drafter(sampled_bench.verifier), greedy)
    requests = every_setting(sampled_bench)[:: len(TEMPERATURES) * len(TRUNCATIONS) + 1]
    expected = sampled_plainly.tokens[:: len(TEMPERATURES) * len(TRUNCATIONS) + 1]
    assert sampled_bench.decode(*decoder, requests, batch_size=4).tokens == expected


@pytest.mark.slow
def test_settings_and_seeds_matter(sampled_bench, sampled_plainly):
    greedy = sampled_bench.decode_plainly(MANY).tokens
    settings = len(TEMPERATURES) * len(TRUNCATIONS)
    for index in range(settings):
        assert sampled_plainly.tokens[index::settings] != greedy
    requests = [dataclasses.replace(request, seed=(12, 0)) for request in every_setting(sampled_bench)[-4:]]
    plain = Models(sampled_bench.verifier.module), Weights(sampled_bench.verifier.params)
    assert sampled_bench.decode(*plain, requests, batch_size=4).tokens != sampled_plainly.tokens[-4:]
