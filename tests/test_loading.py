"""Drafters that cannot be composed are refused by name, and lists that differ are told."""

import dataclasses

import numpy as np
import pytest

from taps_jax.checkpoints.hf_drafter import LoadedDrafter
from taps_jax.errors import InputError
from taps_jax.loading import check_together
from taps_jax.models.config import DrafterConfig
from tests.tiny import make_config


def drafter(name: str, fingerprint: str = "f", vocabulary=None, **changes) -> LoadedDrafter:
    config = DrafterConfig(dataclasses.replace(make_config(num_hidden_layers=1), **changes), False)
    return LoadedDrafter(name, config, {}, vocabulary, fingerprint)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (drafter("b", hidden_size=64), "a and b do not fit together: hidden_size is 32 and 64"),
        (drafter("b", vocab_size=50), "vocab_size is 48 and 50"),
        (drafter("b", rope_theta=5e5), r"rope_theta is 10000.0 and 500000.0"),
        (drafter("b", fingerprint="g"), "verifier fingerprint is f and g"),
    ],
)
def test_misfits_are_refused(other, message):
    with pytest.raises(InputError, match=message):
        check_together([drafter("a"), other])


def test_drafters_that_fit_may_have_been_trained_to_other_lengths(capsys):
    check_together([drafter("a"), drafter("b", max_position_embeddings=64)])
    assert capsys.readouterr().err == ""


def test_lists_that_differ_are_told(capsys):
    one, other = np.arange(10, dtype=np.int32), np.arange(20, dtype=np.int32)
    check_together([drafter("a", vocabulary=one), drafter("b", vocabulary=one.copy())])
    assert capsys.readouterr().err == ""
    check_together([drafter("a", vocabulary=one), drafter("b", vocabulary=other)])
    assert "a (10 tokens) and b (20) differ" in capsys.readouterr().err
