"""Published drafter layouts in, other engines' layouts out, and what is refused."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from taps_jax.checkpoints.convert_drafter import export_drafter, import_drafter
from taps_jax.checkpoints.flavours import FLAVOURS, flavour_problems
from taps_jax.checkpoints.hf_drafter import drafter_config, read_drafter, write_drafter
from taps_jax.checkpoints.write import Output
from taps_jax.errors import InputError
from taps_jax.models.drafter import init_drafter
from tests.tiny_hf import write_tiny_verifier


@pytest.fixture
def verifier(tmp_path) -> Path:
    return write_tiny_verifier(tmp_path / "verifier")


def config_of(verifier: Path, fc_bias: bool = False):
    from taps_jax.checkpoints.hf_verifier import hf_config

    return drafter_config(hf_config(verifier), fc_bias)


def drafter_in(directory: Path, verifier: Path, fc_bias: bool = False, vocabulary=None) -> Path:
    config = config_of(verifier, fc_bias)
    write_drafter(directory, config, init_drafter(config, jax.random.key(5)), vocabulary, "abc")
    return directory


def embedding_of(verifier: Path) -> np.ndarray:
    return load_file(verifier / "model.safetensors")["model.embed_tokens.weight"]


def published(directory: Path, verifier: Path, layout: str, fc_bias: bool) -> dict[str, np.ndarray]:
    """A head as others publish it; returns its trained tensors."""
    drafter_in(directory, verifier, fc_bias)
    trained = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    everything = {**trained, "embed_tokens.weight": embedding_of(verifier)}
    if layout == "safetensors":
        save_file(everything, directory / "model.safetensors", {"format": "pt"})
    elif layout == "bin":
        torch.save({name: torch.tensor(value) for name, value in everything.items()}, directory / "pytorch_model.bin")
    elif layout == "module":
        save_file({f"module.{name}": value for name, value in everything.items()}, directory / "model.safetensors")
    else:  # what accelerate leaves: no config, the frozen head beside the drafter
        (directory / "config.json").unlink()
        head = torch.tensor(load_file(verifier / "model.safetensors")["lm_head.weight"])
        torch.save({name: torch.tensor(value) for name, value in everything.items()}, directory / "pytorch_model.bin")
        torch.save({"weight": head}, directory / "pytorch_model_1.bin")
    return trained


@pytest.mark.parametrize("fc_bias", [False, True])
@pytest.mark.parametrize("layout", ["safetensors", "bin", "module", "accelerate"])
def test_published_layouts_come_in(layout, fc_bias, verifier, tmp_path):
    trained = published(tmp_path / "head", verifier, layout, fc_bias)
    converted = import_drafter(str(tmp_path / "head"), str(verifier), Output(tmp_path / "out"))
    result = load_file(tmp_path / "out" / "model.safetensors")
    assert result.keys() == trained.keys() and ("fc.bias" in result) == fc_bias
    assert all(np.array_equal(result[name], value) for name, value in trained.items())
    assert ("pytorch_model_1.bin" in converted.left_out) == (layout == "accelerate")
    assert "embed_tokens.weight" in converted.left_out
    drafter = read_drafter(tmp_path / "out", jnp.float32)
    assert drafter.config == config_of(verifier, fc_bias)


def test_a_missing_config_needs_a_verifier(verifier, tmp_path):
    published(tmp_path / "head", verifier, "accelerate", False)
    with pytest.raises(InputError, match=r"config\.json: file not found"):
        import_drafter(str(tmp_path / "head"), None, Output(tmp_path / "out"))


@pytest.mark.parametrize("said", [False, True])
@pytest.mark.parametrize("fc_bias", [False, True])
def test_the_bias_is_decided_by_the_key_and_a_contradiction_told(said, fc_bias, verifier, tmp_path):
    trained = published(tmp_path / "head", verifier, "safetensors", fc_bias)
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bias": said}))
    converted = import_drafter(str(tmp_path / "head"), None, Output(tmp_path / "out"))
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == trained.keys()
    assert bool(converted.notes) == (said != fc_bias)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["bias"] is fc_bias


def test_a_source_is_never_replaced(verifier, tmp_path):
    source = drafter_in(verifier / "drafter", verifier)
    for target in (source, verifier):
        with pytest.raises(InputError, match="or a folder above it, which would be replaced"):
            import_drafter(str(source), None, Output(target, force=True))
    assert (source / "config.json").exists() and (verifier / "config.json").exists()


def test_a_renamed_key_fails_by_name(verifier, tmp_path):
    published(tmp_path / "head", verifier, "safetensors", False)
    path = tmp_path / "head" / "model.safetensors"
    tensors = load_file(path)
    tensors["layers.0.mlp.up.weight"] = tensors.pop("layers.0.mlp.up_proj.weight")
    save_file(tensors, path)
    with pytest.raises(InputError) as error:
        import_drafter(str(tmp_path / "head"), None, Output(tmp_path / "out"))
    assert "unexpected tensor layers.0.mlp.up.weight" in str(error.value)
    assert "missing tensor layers.0.mlp.up_proj.weight" in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fields", "names", "kind"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, ["fc.weight"], "an EAGLE-3 head"),
        ({}, ["midlayer.mlp.up_proj.weight"], "an EAGLE-3 head"),
        ({}, ["d2t", "fc.weight"], "an EAGLE-3 head"),
        ({"speculators_model_type": "eagle3"}, ["fc.weight"], "a speculators checkpoint (eagle3)"),
        ({"medusa_num_heads": 4}, ["0.0.linear.weight"], "a Medusa head"),
        ({}, ["2.0.linear.weight"], "a Medusa head"),
        ({}, ["embedding_layernorm.weight", "fc.weight"], "an EAGLE head with extra norms"),
        ({}, ["model.layers.0.mlp.up_proj.weight"], "a whole model"),
    ],
)
def test_other_heads_are_refused_by_name(fields, names, kind, verifier, tmp_path):
    directory = drafter_in(tmp_path / "head", verifier)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    save_file({name: np.ones((2, 2), np.float32) for name in names}, directory / "model.safetensors")
    with pytest.raises(InputError) as error:
        import_drafter(str(directory), None, Output(tmp_path / "out"))
    assert f"this is {kind}, supported are EAGLE-1" in str(error.value)


@pytest.mark.parametrize("flavour", list(FLAVOURS))
def test_each_flavour_has_the_keys_its_engine_asks_for(flavour, verifier, tmp_path):
    source = drafter_in(tmp_path / "drafter", verifier, vocabulary=np.array([1, 4, 7]))
    converted = export_drafter(source, flavour, str(verifier), Output(tmp_path / "out"))
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert all(np.array_equal(after[name], value) for name, value in before.items())
    extra = {"eagle": {"embed_tokens.weight"}, "sglang": {"fc.bias"}, "vllm": set()}[flavour]
    assert after.keys() - before.keys() == extra
    if flavour == "eagle":
        np.testing.assert_array_equal(after["embed_tokens.weight"], embedding_of(verifier))
    if flavour == "sglang":
        assert not after["fc.bias"].any()
        assert torch.load(tmp_path / "out" / "hot_token_ids.pt", weights_only=True) == [1, 4, 7]
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["architectures"] == [FLAVOURS[flavour].architecture]
    assert fields["rope_theta"] == fields["rope_parameters"]["rope_theta"] and fields["num_hidden_layers"] == 1
    assert not flavour_problems(tmp_path / "out", flavour)
    assert converted.notes
    # What was exported comes in again, but for a bias that is only zeros.
    again = import_drafter(str(tmp_path / "out"), None, Output(tmp_path / "again"))
    back = load_file(tmp_path / "again" / "model.safetensors")
    assert all(np.array_equal(back[name], value) for name, value in before.items()) and again.written.tensors >= 9


def test_flavours_disagree_about_the_bias(verifier, tmp_path):
    source = drafter_in(tmp_path / "drafter", verifier, fc_bias=True)
    with pytest.raises(InputError, match=r"its fc\.bias is trained, and vLLM"):
        export_drafter(source, "vllm", None, Output(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    export_drafter(source, "sglang", None, Output(tmp_path / "sglang"))
    assert flavour_problems(tmp_path / "sglang", "vllm")
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"fc.bias": np.zeros_like(tensors["fc.bias"])}, source / "model.safetensors")
    export_drafter(source, "vllm", None, Output(tmp_path / "vllm"))
    assert "fc.bias" not in load_file(tmp_path / "vllm" / "model.safetensors")


def test_the_checker_finds_every_key(verifier, tmp_path):
    source = drafter_in(tmp_path / "drafter", verifier)
    export_drafter(source, "sglang", None, Output(tmp_path / "out"))
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        save_file({key: value for key, value in tensors.items() if key != name}, path)
        assert flavour_problems(tmp_path / "out", "sglang") == [f"missing tensor {name}"]
    save_file(tensors | {"layers.0.input_layernorm.weight": np.ones(32, np.float32)}, path)
    assert flavour_problems(tmp_path / "out", "sglang") == ["unexpected tensor layers.0.input_layernorm.weight"]


def test_flavour_eagle_asks_for_the_verifier(verifier, tmp_path):
    source = drafter_in(tmp_path / "drafter", verifier)
    with pytest.raises(InputError, match="--verifier says whose"):
        export_drafter(source, "eagle", None, Output(tmp_path / "out"))
    other = write_tiny_verifier(tmp_path / "other", hidden_size=64)
    with pytest.raises(InputError, match=r"embedding is \[44, 64\], expected \[44, 32\]"):
        export_drafter(source, "eagle", str(other), Output(tmp_path / "out"))
