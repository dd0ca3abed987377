"""What the decoding flags mean together."""

import jax
import jax.numpy as jnp
import pytest
from absl import flags
from absl.testing import flagsaver

from taps_jax import decoder_flags
from taps_jax.checkpoints.hf_drafter import drafter_config, write_drafter
from taps_jax.checkpoints.verifier import load_verifier
from taps_jax.errors import InputError
from taps_jax.loading import DEFAULT_COMPOSITION
from taps_jax.models.drafter import init_drafter
from taps_jax.speculative.composition import Composition
from tests.tiny_hf import write_tiny_verifier


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return load_verifier(str(write_tiny_verifier(tmp_path_factory.mktemp("tiny") / "verifier")), jnp.float32)


@pytest.fixture(scope="module")
def names(verifier, tmp_path_factory) -> list[str]:
    """Two drafters as the command line names them."""
    folder = tmp_path_factory.mktemp("drafters")
    config = drafter_config(verifier.config)
    for number, name in enumerate(("one", "two")):
        params = init_drafter(config, jax.random.key(number))
        write_drafter(folder / name, config, params, None, verifier.fingerprint)
    return [str(folder / "one"), f"zwei={folder / 'two'}"]


def drafting(verifier, names, compose=None):
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(drafter=names, compose=compose):
        return decoder_flags.given_drafting(verifier)


def test_names_and_compositions(verifier, names):
    found = drafting(verifier, names)
    assert found.names == ("one", "zwei") and found.composition is DEFAULT_COMPOSITION
    assert str(drafting(verifier, names, "route:confidence")) == "route:confidence(one+zwei)"
    single = drafting(verifier, names, "single:zwei")
    assert single.names == ("zwei",) and single.composition is Composition.SINGLE
    assert str(drafting(verifier, names[:1], "merge:trie")) == "single:one"  # one drafter has nothing to merge with


@pytest.mark.parametrize(
    ("compose", "message"),
    [
        ("both", "--compose is 'both', expected single:NAME, route:confidence"),
        ("single", "--compose is 'single', expected single:NAME"),
        ("single:three", "--compose=single:three: the drafters are one, zwei"),
    ],
)
def test_bad_compositions(verifier, names, compose, message):
    with pytest.raises(InputError, match=message):
        drafting(verifier, names, compose)


def test_bad_drafters(verifier, names):
    with pytest.raises(InputError, match="two drafters are named one: give names"):
        drafting(verifier, [names[0], names[0]])
    with pytest.raises(InputError, match="--drafter=DIR is missing, and no drafter for .* comes with taps_jax"):
        drafting(verifier, None)


def test_the_fastest_tree_is_for_one_drafter(verifier, names):
    with pytest.raises(InputError, match=r"--tree=auto is for one drafter, merge:trie\(one\+zwei\) has 2"):
        decoder_flags.chosen_tree(None, verifier, drafting(verifier, names, "merge:trie"), 1)
