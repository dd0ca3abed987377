"""The same training on any number of devices and processes; checkpoints move between them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.tiny_hf import write_tiny_verifier
from tests.training.runs import run_losses, write_conversations

# What runs on four emulated devices: every mesh, and runs that go on from a checkpoint with fewer devices.
ON_FOUR = """
import json, shutil, sys
from pathlib import Path
from tests.training.runs import run_losses
folder = Path(sys.argv[1])
meshes = [(2, 1), (4, 1), (2, 2), (1, 4)]
losses = {f"{d}x{t}": run_losses(folder, f"mesh{d}{t}", d, t) for d, t in meshes}
run_losses(folder, "first", 4, 1, steps=3)
for devices in (1, 2):
    shutil.copytree(folder / "first", folder / f"restored{devices}")
    losses[f"restored on {devices}"] = run_losses(folder, f"restored{devices}", devices, 1)
print(json.dumps(losses))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("devices")
    write_tiny_verifier(folder / "verifier")
    write_conversations(folder / "conversations.jsonl")
    return folder


@pytest.fixture(scope="module")
def alone(folder) -> list[float]:
    """Losses of one device."""
    return run_losses(folder, "alone")


def start(script: str, *arguments: str, devices: int) -> subprocess.Popen:
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    command = [sys.executable, "-c", script, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)


def result(process: subprocess.Popen):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def test_losses_and_checkpoints_do_not_depend_on_the_mesh(folder, alone):
    found = result(start(ON_FOUR, str(folder), devices=4))
    assert len(found) == 6 and len(alone) == 5 and abs(alone[4] - alone[0]) > 0.1
    for name, losses in found.items():
        assert losses == pytest.approx(alone, rel=1e-5), name


ONE_OF_TWO = """
import json, sys
from pathlib import Path
from taps_jax import processes
folder, address, index = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
processes.join(address, 2, index)
from tests.training.runs import run_losses
heldout = {"heldout__conversations": (str(folder / "conversations.jsonl"),), "heldout__rows": 2}
print(json.dumps(run_losses(folder, "together", 2, 1, features__source="cached", **heldout)))
"""


def test_two_processes_train_together(folder):
    """Through a shared workdir and the feature cache, with held-out rows; as one process does."""
    heldout = {"heldout__conversations": (str(folder / "conversations.jsonl"),), "heldout__rows": 2}
    want = run_losses(folder, "cached", features__source="cached", **heldout)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    both = [start(ONE_OF_TWO, str(folder), address, str(index), devices=1) for index in range(2)]
    for found in map(result, both):
        assert found == pytest.approx(want, rel=1e-5)
    name = "drafter/model.safetensors"
    assert (folder / "together" / name).stat().st_size == (folder / "cached" / name).stat().st_size
