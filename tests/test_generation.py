"""The Python API on a tiny verifier: lossless, streaming, per-prompt settings, and clear errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import taps_jax
from taps_jax.checkpoints.hf_drafter import drafter_config, write_drafter
from taps_jax.errors import InputError
from taps_jax.loading import check_together, load_drafters, speculative_decoder
from taps_jax.models.drafter import init_drafter
from taps_jax.speculative.composition import Composition
from taps_jax.speculative.tree import TreeShape
from tests.tiny_hf import WORDS, write_tiny_verifier

PROMPTS = ["w1 w2 w3", " ".join(WORDS[:37]), [{"role": "system", "content": "w9"}, {"role": "user", "content": "w4"}]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A tiny verifier and a random drafter with a draft vocabulary."""
    folder = tmp_path_factory.mktemp("pair")
    verifier = taps_jax.load_verifier(str(write_tiny_verifier(folder / "verifier")), jnp.float32)
    config = drafter_config(verifier.config)
    ids = np.arange(3, 40)
    write_drafter(folder / "drafter", config, init_drafter(config, jax.random.key(0)), ids, verifier.fingerprint)
    return verifier, taps_jax.load_drafter(folder / "drafter", verifier)


@pytest.mark.parametrize("temperature", [0.0, 1.0, [0.0, 0.5, 2.0]])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_drafter_does_not_change_the_answers(pair, temperature, batch_size):
    verifier, drafter = pair
    settings = {"max_new_tokens": 20, "temperature": temperature, "top_p": 0.9, "seed": 3}
    plain = taps_jax.generate(verifier, PROMPTS, **settings)
    speculative = taps_jax.generate(verifier, PROMPTS, drafter, batch_size=batch_size, **settings)
    assert [answer.tokens for answer in speculative] == [answer.tokens for answer in plain]
    assert all(0 < len(answer.tokens) <= 20 for answer in plain)
    assert all(answer.steps == len(answer.tokens) - 1 for answer in plain)


def test_streamed_pieces_make_up_the_text(pair):
    verifier, drafter = pair
    pieces = {0: "", 1: "", 2: ""}
    count = 0

    def collect(index, piece):
        nonlocal count
        pieces[index] += piece
        count += 1

    answers = taps_jax.generate(verifier, PROMPTS, drafter, max_new_tokens=12, batch_size=2, on_text=collect)
    assert [pieces[index] for index in range(3)] == [answer.text for answer in answers]
    assert count > len(PROMPTS)


@pytest.fixture(scope="module")
def specialists(pair, tmp_path_factory):
    """Two more random drafters, one with a fusion bias and a narrower draft vocabulary."""
    folder, verifier = tmp_path_factory.mktemp("specialists"), pair[0]
    for name, biased, ids in (("one", False, np.arange(3, 40)), ("two", True, np.arange(3, 30))):
        config = drafter_config(verifier.config, biased)
        params = init_drafter(config, jax.random.key(len(name) + biased))
        write_drafter(folder / name, config, params, ids, verifier.fingerprint)
    return load_drafters([str(folder / "one"), f"zwei={folder / 'two'}"], verifier)


def test_several_drafters_are_named_and_stacked(pair, specialists, capsys):
    verifier, _ = pair
    assert [drafter.name for drafter in specialists] == ["one", "zwei"]
    check_together(specialists)
    assert "draft vocabularies of one (37 tokens) and zwei (27) differ" in capsys.readouterr().err
    models, weights = speculative_decoder(verifier, specialists, TreeShape(8, 3, 3), Composition.MERGE_TRIE)
    assert models.drafter.config.fc_bias
    bias = weights.drafter.params["fc"]["bias"]
    np.testing.assert_array_equal(bias[0], 0)
    np.testing.assert_array_equal(bias[1], specialists[1].params["fc"]["bias"])
    assert weights.drafter.own.sum(axis=1).tolist() == [37, 27]


@pytest.mark.parametrize("compose", ["merge:trie", "route:entropy"])
def test_several_drafters_do_not_change_the_answers_and_say_whose_tokens_they_are(pair, specialists, compose):
    verifier, _ = pair
    settings = {"max_new_tokens": 20, "temperature": [0.0, 1.0, 0.7], "seed": 3}
    plain = taps_jax.generate(verifier, PROMPTS, **settings)
    pieces = {0: [], 1: [], 2: []}
    collect = lambda index, piece, names: pieces[index].append((piece, names))
    composed = taps_jax.generate(
        verifier, PROMPTS, specialists, compose=compose, batch_size=2, on_origin=collect, **settings
    )
    assert [answer.tokens for answer in composed] == [answer.tokens for answer in plain]
    for index, answer in enumerate(composed):
        assert "".join(piece for piece, _ in pieces[index]) == answer.text
        drafted = sum(bool(names) for _, names in pieces[index])
        # A step commits its drafted tokens and one of the verifier's own, unless cut at a stop or the limit.
        assert 0 <= drafted - (len(answer.tokens) - 1 - answer.steps) <= 1
    assert any(names for found in pieces.values() for _, names in found)


def test_drafters_that_do_not_fit_together(pair, specialists):
    one, two = specialists
    layer = dataclasses.replace(two.config.layer, rope_theta=5e5)
    other = dataclasses.replace(two, config=dataclasses.replace(two.config, layer=layer))
    with pytest.raises(InputError, match=r"one and zwei do not fit together: rope_theta is 10000.0 and 500000.0"):
        check_together([one, other])
    with pytest.raises(InputError, match="one and zwei do not fit together: verifier fingerprint"):
        check_together([one, dataclasses.replace(two, fingerprint="other")])
    with pytest.raises(InputError, match="compose is 'both', expected one of single, route:confidence"):
        taps_jax.generate(pair[0], PROMPTS, specialists, compose="both")


def test_seeds(pair):
    verifier, drafter = pair
    draw = lambda seed: [
        a.tokens for a in taps_jax.generate(verifier, PROMPTS, drafter, max_new_tokens=16, temperature=1.0, seed=seed)
    ]
    assert draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0, expected at least 0"),
        ({"top_p": 0.0}, "top_p is 0.0, expected above 0"),
        ({"top_k": [1, 2]}, "top_k has 2 values for 3 prompts"),
        ({"max_new_tokens": 500}, "exceeds the verifier's max_position_embeddings of 256"),
    ],
)
def test_bad_settings(pair, settings, message):
    with pytest.raises(InputError, match=message):
        taps_jax.generate(pair[0], PROMPTS, **settings)


def test_no_prompts(pair):
    assert taps_jax.generate(pair[0], []) == []
