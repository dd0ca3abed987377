"""The drafter's directory: what is written, what is read back, and what is refused."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from taps_jax.checkpoints.hf_drafter import check_fits, drafter_config, read_drafter, write_drafter
from taps_jax.errors import InputError
from taps_jax.models.drafter import init_drafter
from tests.tiny import CONFIG, make_config

KEYS = {
    "fc.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight",
    "layers.0.post_attention_layernorm.weight",
}


@dataclasses.dataclass
class StandInVerifier:
    """What `check_fits` looks at."""

    config: object = CONFIG
    fingerprint: str = "abc"
    name: str = "tiny"


def written(directory: Path, fc_bias: bool = False, vocabulary=None) -> Path:
    config = drafter_config(CONFIG, fc_bias)
    write_drafter(directory, config, init_drafter(config, jax.random.key(1)), vocabulary, "abc")
    return directory


@pytest.mark.parametrize("fc_bias", [False, True])
def test_files_have_eagle_keys_and_round_trip(tmp_path, fc_bias):
    directory = written(tmp_path / "d", fc_bias, np.array([1, 5, 7]))
    tensors = load_file(directory / "model.safetensors")
    assert set(tensors) == KEYS | ({"fc.bias"} if fc_bias else set())
    assert tensors["fc.weight"].shape == (32, 64)
    fields = json.loads((directory / "config.json").read_text())
    assert fields["bias"] is fc_bias and fields["num_hidden_layers"] == 1 and fields["rope_theta"] == 10000.0
    drafter = read_drafter(directory, jnp.float32)
    assert drafter.config == drafter_config(CONFIG, fc_bias) and drafter.fingerprint == "abc" and drafter.name == "d"
    assert drafter.vocabulary.tolist() == [1, 5, 7]
    jax.tree.map(np.testing.assert_array_equal, drafter.params, init_drafter(drafter.config, jax.random.key(1)))


def test_rewriting_without_a_vocabulary_removes_the_old_one(tmp_path):
    written(tmp_path, vocabulary=np.array([1, 2]))
    assert read_drafter(written(tmp_path), jnp.float32).vocabulary is None


def test_bias_is_decided_by_the_tensors(tmp_path):
    directory = written(tmp_path, fc_bias=True)
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**fields, "bias": False}))
    assert read_drafter(directory, jnp.float32).config.fc_bias


def test_a_frozen_embedding_is_left_out(tmp_path):
    directory = written(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    save_file({**tensors, "embed_tokens.weight": np.zeros((48, 32), np.float32)}, directory / "model.safetensors")
    assert "embed_tokens" not in read_drafter(directory, jnp.float32).params


def test_all_problems_with_tensors_are_reported_together(tmp_path):
    directory = written(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    tensors["fc.wieght"] = tensors.pop("fc.weight")
    tensors["layers.0.mlp.up_proj.weight"] = np.zeros((3, 3), np.float32)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(InputError) as error:
        read_drafter(directory, jnp.float32)
    for part in ("unexpected tensor fc.wieght", "missing tensor fc.weight", "up_proj.weight has shape [3, 3]"):
        assert part in str(error.value)


@pytest.mark.parametrize("ids", [[3, 3], [5, 1], [-1, 2], [0, 48], []])
def test_a_bad_vocabulary_is_refused(tmp_path, ids):
    directory = written(tmp_path, vocabulary=np.array([1, 2]))
    save_file({"token_ids": np.array(ids, np.int32)}, directory / "draft_vocab.safetensors")
    with pytest.raises(InputError, match="token_ids must be ascending ids below 48"):
        read_drafter(directory, jnp.float32)


def test_several_layers_are_refused(tmp_path):
    directory = written(tmp_path)
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 2}))
    with pytest.raises(InputError, match="num_hidden_layers is 2, a drafter has 1"):
        read_drafter(directory, jnp.float32)


@pytest.mark.parametrize("change", [{"hidden_size": 64}, {"vocab_size": 50}])
def test_width_and_vocabulary_must_fit(tmp_path, change):
    drafter = read_drafter(written(tmp_path), jnp.float32)
    (field, value), *_ = change.items()
    with pytest.raises(InputError, match=rf"has {field} {getattr(CONFIG, field)}, verifier tiny has {value}"):
        check_fits(drafter, StandInVerifier(make_config(**change)))


def test_another_verifier_needs_permission(tmp_path, capsys):
    drafter = read_drafter(written(tmp_path), jnp.float32)
    check_fits(drafter, StandInVerifier())
    with pytest.raises(InputError, match="--allow_other_verifier"):
        check_fits(drafter, StandInVerifier(fingerprint="xyz"))
    check_fits(drafter, StandInVerifier(fingerprint="xyz"), allow_other_verifier=True)
    assert not capsys.readouterr().err
    check_fits(dataclasses.replace(drafter, fingerprint=None), StandInVerifier())
    assert "does not say which verifier" in capsys.readouterr().err
