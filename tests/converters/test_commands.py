"""The conversion commands as a user runs them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from taps_jax.checkpoints.hf_drafter import drafter_config, write_drafter
from taps_jax.checkpoints.hf_verifier import hf_config
from taps_jax.models.drafter import init_drafter
from tests.conftest import ROOT
from tests.tiny_hf import write_tiny_verifier


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("work")
    config = drafter_config(hf_config(write_tiny_verifier(root / "hf")))
    for index, name in enumerate(("a", "b", "c")):
        write_drafter(root / name, config, init_drafter(config, jax.random.key(index)), None, "abc")
    return root


def run(*arguments: str, module: str = "converters.command") -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def succeed(*arguments: str, **kwargs) -> str:
    done = run(*arguments, **kwargs)
    assert not done.returncode, done.stderr
    return done.stdout


def test_a_verifier_there_and_back(work):
    out = succeed(f"--from={work / 'hf'}", f"--to={work / 'flax'}", module="converters.hf_verifier")
    assert "21 tensors" in out and "peak memory" in out and "parameters" in out
    succeed("verifier", f"--from={work / 'flax'}", f"--to={work / 'back'}", "--reverse", "--max_shard_size=50KB")
    assert len(list((work / "back").glob("model-*.safetensors"))) > 1
    found = succeed("inspect", work / "back")
    assert "verifier with Hugging Face names" in found and "whole:               yes" in found
    assert "loads with:          transformers" in found
    assert "verifier with Flax names" in succeed("inspect", work / "flax")


def test_a_drafter_in_and_out(work):
    succeed("drafter", f"--from={work / 'a'}", f"--to={work / 'half'}", "--dtype=bfloat16")
    assert json.loads((work / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    succeed("drafter", f"--from={work / 'half'}", f"--to={work / 'sglang'}", "--reverse", "--flavour=sglang")
    found = succeed("inspect", work / "sglang")
    assert "EAGLE-1/2 or HASS drafter" in found and "SGLang" in found and "vLLM" not in found


def test_average(work):
    names = [f"--from={work / name}" for name in ("a", "b", "c")]
    succeed("average", *names, "--weights=0.5,0.3,0.2", f"--to={work / 'mean'}")
    parts = [load_file(work / name / "model.safetensors") for name in ("a", "b", "c")]
    for name, value in load_file(work / "mean" / "model.safetensors").items():
        expected = sum(np.float32(weight) * part[name] for weight, part in zip((0.5, 0.3, 0.2), parts, strict=True))
        np.testing.assert_array_equal(value, expected)
    succeed("average", names[0], names[0], "--weights=0.5,0.5", f"--to={work / 'same'}")
    for name, value in load_file(work / "same" / "model.safetensors").items():
        np.testing.assert_array_equal(value, parts[0][name])
    refused = run("average", *names, "--weights=0.5,0.3,0.3", f"--to={work / 'sum'}")
    assert refused.returncode == 1 and "add up to 1.1, expected 1" in refused.stderr
    succeed("average", *names, "--weights=0.5,0.3,0.3", f"--to={work / 'sum'}", "--allow_unnormalised")


@pytest.mark.slow
def test_gguf_to_hugging_face(work):
    out = succeed("gguf", "--from=smollm2", f"--to={work / 'smollm2'}", "--format=hf", "--dtype=bfloat16")
    assert "272 tensors, 134,515,008 parameters, 269.0 MB" in out
    assert (work / "smollm2" / "tokenizer.json").exists()
    shutil.rmtree(work / "smollm2")


def test_bad_input_gives_one_line(work):
    cases = {
        ("verifier", f"--from={work / 'a'}", f"--to={work / 'x'}"): "unexpected tensor fc.weight",
        ("verifier", f"--to={work / 'x'}"): "--from is missing",
        ("drafter", f"--from={work / 'hf'}", f"--to={work / 'x'}"): "this is a whole model, supported are EAGLE-1",
        ("verifier", f"--from={work / 'hf'}", f"--to={work / 'x'}", "--dtype=int8"): "float32|float16|bfloat16",
        ("gguf", f"--from={work / 'hf' / 'config.json'}", f"--to={work / 'x'}"): "not a readable GGUF file",
        ("inspect",): "DIR_OR_FILE is missing",
        ("inspect", work / "nothing"): "no such file or directory",
        ("average", f"--from={work / 'a'}", "--weights=x", f"--to={work / 'x'}"): "expected numbers with commas",
    }
    for arguments, message in cases.items():
        done = run(*arguments)
        assert done.returncode == 1 and message in done.stderr, (arguments, done.stderr)
        assert "Traceback" not in done.stderr and not (work / "x").exists()


@pytest.mark.parametrize("name", ["drafter", "inspect"])
def test_help_has_examples(name):
    done = run(name, "--help")
    assert "python -m converters." in done.stdout
    assert "Traceback" not in done.stderr


def test_a_wrong_command_lists_those_there_are():
    done = run("models")
    assert done.returncode == 1 and "verifier|drafter|gguf|inspect|average" in done.stderr
