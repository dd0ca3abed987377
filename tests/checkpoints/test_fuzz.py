"""Random damage to small checkpoints ends in a clear error or in a correct load, and leaves nothing half-written."""

import json
import random
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from taps_jax.checkpoints.convert import convert_verifier
from taps_jax.checkpoints.convert_drafter import import_drafter
from taps_jax.checkpoints.hf_drafter import drafter_config, write_drafter
from taps_jax.checkpoints.hf_verifier import hf_config
from taps_jax.checkpoints.write import Output
from taps_jax.errors import InputError
from taps_jax.models.drafter import init_drafter
from tests.tiny_hf import write_tiny_verifier

ODD_VALUES = [None, "x", -1, 0, 3, 2.5, [], {}, True, 10**18, float("inf"), ["LlamaForCausalLM"], {"rope_type": 3}]


def flip_header_bytes(directory: Path, chance: random.Random) -> None:
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    for _ in range(chance.randint(1, 4)):
        data[chance.randrange(min(len(data), 1500))] = chance.randrange(256)
    path.write_bytes(data)


def truncate(directory: Path, chance: random.Random) -> None:
    path = directory / chance.choice(["model.safetensors", "config.json"])
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def rename_key(directory: Path, chance: random.Random) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = chance.choice(sorted(tensors))
    changed = chance.choice(
        [name[1:], name + "x", name.replace(".", "/"), "module." + name, "layers.0", ".", name[::-1]]
    )
    tensors[changed] = tensors.pop(name)
    save_file(tensors, path)


def change_shape(directory: Path, chance: random.Random) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = chance.choice(sorted(tensors))
    value = tensors[name]
    tensors[name] = chance.choice(
        [value[:-1], value.reshape(-1), value[None], value[:0], np.float32(1), value.astype(int)]
    )
    save_file({key: np.ascontiguousarray(one) for key, one in tensors.items()}, path)


def damage_config(directory: Path, chance: random.Random) -> None:
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    name = chance.choice(sorted(fields))
    if chance.random() < 0.4:
        del fields[name]
    else:
        fields[name] = chance.choice(ODD_VALUES)
    path.write_text(json.dumps(fields))


DAMAGES = [flip_header_bytes, truncate, rename_key, change_shape, damage_config]


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("whole")
    verifier = write_tiny_verifier(root / "verifier")
    config = drafter_config(hf_config(verifier))
    write_drafter(root / "drafter", config, init_drafter(config, jax.random.key(0)), np.array([1, 2, 9]), "abc")
    return {"verifier": verifier, "drafter": root / "drafter"}


def convert(kind: str, source: Path, target: Path) -> None:
    if kind == "verifier":
        convert_verifier(str(source), "flax", Output(target))
    else:
        import_drafter(str(source), None, Output(target))


@pytest.mark.parametrize("rounds", [50, pytest.param(250, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["verifier", "drafter"])
def test_damage_ends_in_a_clear_error_or_a_correct_load(kind, rounds, sources, tmp_path):
    convert(kind, sources[kind], tmp_path / "whole")
    file = {"verifier": "flax_model.safetensors", "drafter": "model.safetensors"}[kind]
    whole = load_file(tmp_path / "whole" / file)
    errors = 0
    for seed in range(rounds):
        chance = random.Random(seed)
        damaged, out = tmp_path / "damaged", tmp_path / "out"
        shutil.copytree(sources[kind], damaged)
        DAMAGES[seed % len(DAMAGES)](damaged, chance)
        try:
            convert(kind, damaged, out)
        except InputError as error:
            errors += 1
            assert "\n" not in str(error) and len(str(error)) < 2000, seed
            assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "whole"], seed
        else:
            loaded = load_file(out / file)
            assert loaded.keys() == whole.keys(), seed
            same = all(np.array_equal(loaded[name], value) for name, value in whole.items())
            # Bytes that were flipped in the data, behind a short header, are numbers like any others.
            assert same or DAMAGES[seed % len(DAMAGES)] is flip_header_bytes, seed
            shutil.rmtree(out)
        shutil.rmtree(damaged)
    assert errors > 0.6 * rounds
