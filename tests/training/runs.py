"""A small training run as Python: the same job on any mesh, in one process or several."""

import json
from pathlib import Path

from taps_jax.training.config import base_config
from taps_jax.training.loop import train
from tests.tiny_hf import WORDS


def write_conversations(path: Path, count: int = 16) -> Path:
    """Answers of 4 to 19 words."""
    messages = lambda n: [
        {"role": "user", "content": " ".join(WORDS[n : n + 4])},
        {"role": "assistant", "content": " ".join(WORDS[n : n + 4 + n])},
    ]
    path.write_text("".join(json.dumps({"messages": messages(n)}) + "\n" for n in range(count)))
    return path


def run_losses(folder: Path, workdir: str, data: int = 1, tensor: int = 1, steps: int = 5, **changes) -> list[float]:
    """Trains on `folder`'s verifier and conversations; the loss of every step so far.

    Args:
      folder: with `verifier` and `conversations.jsonl`.
      workdir: in it.
      data, tensor: the mesh.
      steps: to train to.
      **changes: to the config, dots written as two underscores.
    """
    config = base_config()
    config.verifier = str(folder / "verifier")
    config.data.conversations = (str(folder / "conversations.jsonl"),)
    config.data.batch_size = 4
    config.features.source = "online"
    config.mesh.data, config.mesh.tensor = data, tensor
    config.optimizer.learning_rate, config.optimizer.warmup_steps = 1e-2, 2
    config.total_steps, config.log_every, config.checkpoint_every = steps, 1, 2
    for name, value in changes.items():
        config.update_from_flattened_dict({name.replace("__", "."): value})
    train(config, folder / workdir)
    return read_losses(folder / workdir)


def read_losses(workdir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (workdir / "metrics.jsonl").read_text().splitlines()]
