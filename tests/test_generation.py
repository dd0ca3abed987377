"""The Python API on a tiny verifier: lossless, streaming, per-prompt settings, and clear errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import taps_jax
from taps_jax.checkpoints.hf_drafter import drafter_config, write_drafter
from taps_jax.errors import InputError
from taps_jax.models.drafter import init_drafter
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
