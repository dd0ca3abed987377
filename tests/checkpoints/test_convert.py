"""Verifiers there and back: every tensor bit for bit, the same config, and transformers' logits at both ends."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from taps_jax.checkpoints.convert import convert_verifier
from taps_jax.checkpoints.hf_verifier import hf_config, hf_params
from taps_jax.checkpoints.verifier import load_verifier
from taps_jax.checkpoints.write import Output, parsed_size
from taps_jax.errors import InputError
from taps_jax.models.llama import Llama, causal_mask
from tests.conftest import ROOT
from tests.models import test_llama
from tests.tiny_hf import draw_parameters, write_tiny_verifier

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
SHAPE = test_llama.SHAPE | {"max_position_embeddings": 16384, "bos_token_id": None, "eos_token_id": 1}
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
QWEN3 = {"head_dim": 32, **PLAIN}
VARIANTS = {
    "llama2": {"num_key_value_heads": 4},
    "llama3": PLAIN,
    "llama31": {"rope_parameters": LLAMA3},
    "tied": {"tie_word_embeddings": True, **PLAIN},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3": QWEN3,
    "qwen3_tied": {**QWEN3, "tie_word_embeddings": True},
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def save_model(directory: Path, variant: str, dtype: str = "float32", shard: str = "1GB"):
    """A random model of the variant, every parameter drawn, as transformers saves it."""
    config, model = (Qwen3Config, Qwen3ForCausalLM) if variant.startswith("qwen3") else (LlamaConfig, LlamaForCausalLM)
    built = model._from_config(config(**SHAPE | VARIANTS[variant]), attn_implementation="eager").eval()
    draw_parameters(built, 0.1)
    built = built.to(DTYPES[dtype])
    built.save_pretrained(directory, max_shard_size=shard)
    (directory / "tokenizer.json").write_text("{}")
    return built


def convert(source: Path, target: Path, layout: str, shard_bytes: int = 10**9, **changes):
    return convert_verifier(str(source), layout, Output(target, max_shard_bytes=shard_bytes, **changes))


def all_tensors(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        found |= load_file(file)
    return found


def there_and_back(source: Path, tmp_path: Path) -> Path:
    convert(source, tmp_path / "flax", "flax", shard_bytes=40_000)
    convert(tmp_path / "flax", tmp_path / "back", "hf", shard_bytes=30_000)
    return tmp_path / "back"


def check_same(source: Path, back: Path) -> None:
    before, after = all_tensors(source), all_tensors(back)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype and value.shape == after[name].shape
        assert torch.equal(value.view(torch.uint8), after[name].view(torch.uint8))
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (source, back))
    assert {name: new.get(name) for name in old} == old
    assert new["rope_theta"] == new["rope_parameters"]["rope_theta"]


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_round_trips_are_bit_identical(variant, dtype, tmp_path):
    save_model(tmp_path / "hf", variant, dtype, shard="30KB")
    back = there_and_back(tmp_path / "hf", tmp_path)
    check_same(tmp_path / "hf", back)
    assert (back / "tokenizer.json").exists() and (back / "generation_config.json").exists()


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_logits_equal_transformers(variant, tmp_path):
    model = save_model(tmp_path / "hf", variant)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 12))
    reopened = AutoModelForCausalLM.from_pretrained(
        there_and_back(tmp_path / "hf", tmp_path), attn_implementation="eager"
    ).eval()
    config = hf_config(tmp_path / "flax")
    params = hf_params(tmp_path / "flax", config, jnp.float32)
    mask = torch.full((12, 12), torch.finfo(torch.float32).min).triu(1).expand(2, 1, 12, 12)
    for start in (0, 1000, 8180):
        positions = np.tile(np.arange(start, start + 12), (2, 1))
        arguments = {"position_ids": torch.tensor(positions), "attention_mask": mask, "use_cache": False}
        with torch.no_grad():
            expected, again = (one(torch.tensor(tokens), **arguments).logits.numpy() for one in (model, reopened))
        np.testing.assert_array_equal(again, expected)
        llama = Llama(config)
        features, _ = llama.apply({"params": params}, jnp.asarray(tokens), jnp.asarray(positions), causal_mask(12))
        logits = llama.apply({"params": params}, features, method=Llama.logits)
        np.testing.assert_allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_pytorch_files_load_like_safetensors(dtype, sharded, tmp_path):
    save_model(tmp_path / "hf", "llama3", dtype)
    expected = load_file(tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "model.safetensors").unlink()
    if sharded:
        names = sorted(expected)
        halves = {"pytorch_model-1.bin": names[:9], "pytorch_model-2.bin": names[9:]}
        for file, part in halves.items():
            torch.save({name: expected[name] for name in part}, tmp_path / "hf" / file)
        index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
        (tmp_path / "hf" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        torch.save(expected, tmp_path / "hf" / "pytorch_model.bin")
    after = all_tensors(there_and_back(tmp_path / "hf", tmp_path))
    assert after.keys() == expected.keys()
    assert all(torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in expected.items())


def test_pickled_objects_are_refused(tmp_path):
    save_model(tmp_path / "hf", "llama3")
    (tmp_path / "hf" / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Path("x")}, tmp_path / "hf" / "pytorch_model.bin")
    with pytest.raises(InputError, match="not a PyTorch file of tensors only"):
        convert(tmp_path / "hf", tmp_path / "out", "flax")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("tied", "stored"), [(True, True), (True, False), (False, True), (False, False)])
def test_tied_flag_and_stored_head(tied, stored, tmp_path):
    save_model(tmp_path / "hf", "llama3")
    path, config = tmp_path / "hf" / "model.safetensors", tmp_path / "hf" / "config.json"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if not stored:
        del tensors["lm_head.weight"]
    save_file(tensors, path, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": tied}))
    if not tied and not stored:
        with pytest.raises(InputError, match=r"missing tensor lm_head\.weight"):
            convert(tmp_path / "hf", tmp_path / "flax", "flax")
        return
    converted = convert(tmp_path / "hf", tmp_path / "flax", "flax")
    assert converted.left_out == (["lm_head.weight"] if tied and stored else [])
    params = hf_params(tmp_path / "flax", hf_config(tmp_path / "flax"), jnp.float32)
    assert ("lm_head" in params) == (not tied)


def test_a_tied_head_that_differs_is_refused(tmp_path):
    save_model(tmp_path / "hf", "llama3")
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    with pytest.raises(InputError, match="ties the embeddings, but lm_head.weight differs"):
        convert(tmp_path / "hf", tmp_path / "flax", "flax")


@pytest.mark.parametrize("style", ["transformers 4", "transformers 5"])
def test_both_places_of_the_rotary_base(style, tmp_path):
    save_model(tmp_path / "hf", "llama3")
    path = tmp_path / "hf" / "config.json"
    fields = json.loads(path.read_text())
    fields.pop("rope_parameters", None), fields.pop("rope_theta", None)
    base = {"rope_theta": 500000.0} if style[-1] == "4" else {"rope_parameters": PLAIN["rope_parameters"]}
    path.write_text(json.dumps(fields | base))
    assert hf_config(tmp_path / "hf").rope_theta == 500000.0
    back = json.loads((there_and_back(tmp_path / "hf", tmp_path) / "config.json").read_text())
    assert back["rope_theta"] == back["rope_parameters"]["rope_theta"] == 500000.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architectures is ['MixtralForCausalLM']"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"use_sliding_window": True}, "use_sliding_window is set"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected an integer from 1 to 1000"),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta is 1000000.0, but 10000.0"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type 'yarn' is not supported"),
    ],
)
def test_what_the_model_lacks_is_refused_by_name(changes, message, tmp_path):
    save_model(tmp_path / "hf", "llama3")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InputError) as error:
        convert(tmp_path / "hf", tmp_path / "out", "flax")
    assert message in str(error.value) and str(path) in str(error.value)


def test_all_problems_of_shards_are_told_together(tmp_path):
    save_model(tmp_path / "hf", "llama3", shard="20KB")
    index = tmp_path / "hf" / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    files = sorted(set(places.values()))
    (tmp_path / "hf" / files[0]).unlink()
    (tmp_path / "hf" / files[1]).write_bytes((tmp_path / "hf" / files[1]).read_bytes()[:-10])
    moved = load_file(tmp_path / "hf" / files[2])
    first = next(iter(moved))
    save_file({**moved, "model.layers.0.wrong.weight": moved[first].clone()}, tmp_path / "hf" / files[2])
    again = load_file(tmp_path / "hf" / files[3])
    save_file({**again, first: moved[first]}, tmp_path / "hf" / files[3])
    with pytest.raises(InputError) as error:
        convert(tmp_path / "hf", tmp_path / "out", "flax")
    for part in (
        f"names {files[0]}, which is absent",
        f"{files[1]}: not a readable safetensors file",
        f"{first} is in {files[3]}, model.safetensors.index.json says {files[2]}",
        f"tensor {first} is stored twice",
        "unexpected tensor model.layers.0.wrong.weight",
    ):
        assert part in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_name_that_a_header_has_twice(tmp_path):
    save_model(tmp_path / "hf", "llama3")
    path = tmp_path / "hf" / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    entry = '"model.norm.weight":{"dtype":"F32","shape":[48],"data_offsets":'
    header = data[8 : 8 + size].decode().rstrip()
    again = entry + header.split(entry)[1].split("}")[0] + "}"
    header = f"{header[:-1]},{again}}}".encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    with pytest.raises(InputError, match=r"model\.safetensors: tensor model\.norm\.weight is stored twice"):
        convert(tmp_path / "hf", tmp_path / "out", "flax")


def test_integers_are_no_weights(tmp_path):
    save_model(tmp_path / "hf", "llama3")
    path = tmp_path / "hf" / "model.safetensors"
    save_file(load_file(path) | {"model.norm.weight": torch.ones(48, dtype=torch.int64)}, path)
    with pytest.raises(InputError, match=r"model\.norm\.weight is of type I64, expected F32, F16, BF16"):
        convert(tmp_path / "hf", tmp_path / "out", "flax")


def test_values_that_are_not_finite_or_do_not_fit(tmp_path):
    save_model(tmp_path / "hf", "llama3")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(InputError, match=r"model\.norm\.weight holds values beyond the range of float16"):
        convert(tmp_path / "hf", tmp_path / "out", "flax", dtype=np.dtype(np.float16))
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(InputError, match=r"model\.norm\.weight holds values that are not finite"):
        convert(tmp_path / "hf", tmp_path / "out", "flax")
    assert not (tmp_path / "out").exists()


def test_changing_the_type(tmp_path):
    save_model(tmp_path / "hf", "llama3")
    convert(tmp_path / "hf", tmp_path / "flax", "flax", dtype=np.dtype(jnp.bfloat16))
    convert(tmp_path / "flax", tmp_path / "back", "hf")
    before, after = load_file(tmp_path / "hf" / "model.safetensors"), all_tensors(tmp_path / "back")
    assert all(torch.equal(after[name], value.bfloat16()) for name, value in before.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


def test_nothing_is_overwritten_without_permission(tmp_path):
    save_model(tmp_path / "hf", "llama3")
    convert(tmp_path / "hf", tmp_path / "flax", "flax")
    with pytest.raises(InputError, match="exists; --force replaces it"):
        convert(tmp_path / "hf", tmp_path / "flax", "flax")
    convert(tmp_path / "hf", tmp_path / "flax", "flax", force=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    with pytest.raises(InputError, match=r"holds no config\.json"):
        convert(tmp_path / "hf", tmp_path / "mine", "flax", force=True)
    with pytest.raises(InputError, match="or a folder above it, which would be replaced"):
        convert(tmp_path / "hf", tmp_path, "flax", force=True)
    with pytest.raises(InputError, match="has Flax names already"):
        convert(tmp_path / "flax", tmp_path / "again", "flax")
    with pytest.raises(InputError, match="--reverse starts from a Flax directory"):
        convert(tmp_path / "hf", tmp_path / "again", "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flax", "hf", "mine"]


def test_a_flax_directory_is_a_verifier(tmp_path):
    write_tiny_verifier(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "flax", "flax")
    assert load_verifier(str(tmp_path / "flax")).fingerprint == load_verifier(str(tmp_path / "hf")).fingerprint


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("300mb", 3 * 10**8), ("1KB", 1000)])
def test_sizes(text, size):
    assert parsed_size(text, "--x") == size


@pytest.mark.parametrize("text", ["5", "GB", "-1GB", "0GB", "5TB", ""])
def test_bad_sizes(text):
    with pytest.raises(InputError, match="expected a size such as 5GB"):
        parsed_size(text, "--x")


def in_process(code: str, devices: int = 1) -> dict:
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def test_on_four_devices_nothing_large_is_replicated(tmp_path):
    write_tiny_verifier(tmp_path / "hf")
    found = in_process(
        f"""
        import json, jax
        from taps_jax.checkpoints.keymap import flatten
        from taps_jax.checkpoints.verifier import load_verifier
        from taps_jax.sharding import make_mesh
        params = load_verifier({str(tmp_path / "hf")!r}, mesh=make_mesh(1, 4)).params
        sums = {{name: float(jax.numpy.abs(leaf).sum()) for name, leaf in flatten(params).items()}}
        held = {{name: sum(shard.data.nbytes for shard in leaf.addressable_shards) / leaf.nbytes
                for name, leaf in flatten(params).items()}}
        print(json.dumps([held, sums]))
        """,
        devices=4,
    )
    held, sums = found
    assert {name for name, copies in held.items() if copies != 1} == {name for name in held if "norm" in name}
    expected = load_file(tmp_path / "hf" / "model.safetensors")
    assert sums == pytest.approx({name: float(value.abs().sum()) for name, value in expected.items()}, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["convert", "load"])
def test_memory_is_bounded_by_the_largest_tensor(kind, tmp_path):
    """A checkpoint of 400 MB in six shards, whose largest tensor has 105 MB."""
    shape = SHAPE | {"vocab_size": 51200, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(tmp_path / "hf", max_shard_size="80MB")
    largest = 51200 * 512 * 4
    found = in_process(
        f"""
        import json, pathlib, threading, time, jax, numpy
        from taps_jax.checkpoints.convert import convert_verifier
        from taps_jax.checkpoints.hf_verifier import hf_config, hf_params
        from taps_jax.checkpoints.write import Output
        jax.numpy.zeros(3).block_until_ready()
        directory = pathlib.Path({str(tmp_path / "hf")!r})
        config = hf_config(directory)
        # Memory of its own: pages of mapped files are the system's to take back.
        def now():
            for line in open("/proc/self/status"):
                if line.startswith("RssAnon"):
                    return int(line.split()[1]) * 1024
        start, peak, going = now(), 0, True
        def watch():
            global peak
            while going:
                peak = max(peak, now())
                time.sleep(0.0005)
        watcher = threading.Thread(target=watch)
        watcher.start()
        if {kind!r} == "convert":
            target = pathlib.Path({str(tmp_path / "out")!r})
            convert_verifier(str(directory), "flax", Output(target, max_shard_bytes=8 * 10**7))
            weights = 0
        else:
            params = hf_params(directory, config, numpy.float32)
            weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        going = False
        watcher.join()
        print(json.dumps([peak - start - weights, weights]))
        """
    )
    extra, _ = found
    print(f"extra memory {extra / 1e6:.0f} MB, largest tensor {largest / 1e6:.0f} MB")
    assert extra < 1.1 * largest
    shutil.rmtree(tmp_path / "hf")
