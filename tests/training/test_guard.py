"""Runs that end early: by SIGKILL or SIGTERM at any time, and by a loss that is no number."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from taps_jax.errors import InputError
from taps_jax.training.guard import Step, check_finite
from tests.conftest import ROOT
from tests.tiny_hf import WORDS, write_tiny_verifier

STEPS = 12


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("guard")
    write_tiny_verifier(root / "verifier")
    rows = [
        {
            "messages": [
                {"role": "user", "content": " ".join(WORDS[number : number + 4])},
                {"role": "assistant", "content": " ".join(WORDS[number + 5 : number + 15])},
            ]
        }
        for number in range(20)
    ]
    (root / "conversations.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def start(workspace: Path, workdir: str, *flags: str) -> subprocess.Popen:
    command = [
        *(sys.executable, "-m", "taps_jax.train", "--config=configs/smollm2.py"),
        f"--workdir={workspace / workdir}",
        f"--config.verifier={workspace / 'verifier'}",
        f"--config.data.conversations=('{workspace / 'conversations.jsonl'}',)",
        "--config.data.draft_vocabulary=20",
        "--config.log_every=1",
        "--config.checkpoint_every=2",
        f"--config.total_steps={STEPS}",
        *flags,
    ]
    environment = os.environ | {"XLA_FLAGS": ""}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def logged(workdir: Path) -> list[dict]:
    path = workdir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def wait_for_step(process: subprocess.Popen, workdir: Path, step: int) -> None:
    while process.poll() is None and (not (rows := logged(workdir)) or rows[-1]["step"] < step):
        time.sleep(0.01)


@pytest.fixture(scope="module")
def uninterrupted(workspace) -> Path:
    finish(start(workspace, "whole"))
    return workspace / "whole"


def check_same(workdir: Path, whole: Path) -> None:
    for name in ("model.safetensors", "draft_vocab.safetensors", "config.json"):
        assert (workdir / "drafter" / name).read_bytes() == (whole / "drafter" / name).read_bytes()
    losses = lambda folder: [(row["step"], row["loss"]) for row in logged(folder)]
    assert losses(workdir) == losses(whole) and len(losses(whole)) == STEPS


@pytest.mark.slow
def test_killed_at_any_time_a_run_ends_bit_identical(workspace, uninterrupted):
    for step in (1, 4, 9):
        process = start(workspace, "killed")
        wait_for_step(process, workspace / "killed", step)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    finish(start(workspace, "killed"))
    check_same(workspace / "killed", uninterrupted)


def test_asked_to_terminate_a_run_saves_and_says_so(workspace, uninterrupted):
    process = start(workspace, "terminated")
    wait_for_step(process, workspace / "terminated", 3)
    process.send_signal(signal.SIGTERM)
    out = finish(process)
    last = logged(workspace / "terminated")[-1]["step"]
    assert f"asked to terminate, saved step {last} of {STEPS}" in out
    assert (workspace / "terminated" / "checkpoints" / str(last)).is_dir()
    assert not (workspace / "terminated" / "drafter").exists()
    finish(start(workspace, "terminated"))
    check_same(workspace / "terminated", uninterrupted)


def test_a_loss_that_is_no_number_stops_the_run(workspace):
    process = start(workspace, "nan", "--config.optimizer.learning_rate=1e38", "--config.optimizer.warmup_steps=0")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    line = err.strip().splitlines()[-1]
    assert line.startswith("error: the loss is ") and "whose rows are [" in line and "checkpoint" in line
    assert not (workspace / "nan" / "drafter").exists()


@pytest.mark.parametrize(
    ("good", "words"), [(None, "there is no checkpoint yet"), (4, "checkpoint 4 is the last good")]
)
def test_the_first_bad_step_is_named_with_its_rows(good, words):
    steps = [
        Step(number, jnp.float32(loss), np.array([number, 7]), jnp.int32(1))
        for number, loss in ((5, 1.0), (6, float("nan")), (7, float("inf")))
    ]
    with pytest.raises(InputError, match=rf"the loss is nan at step 6, whose rows are \[6, 7\]; {words}"):
        check_finite(steps, good)
    check_finite(steps[:1], good)
