"""Metrics of a training run: one JSON object per logged step, and the same numbers for TensorBoard and wandb."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from taps_jax.errors import InputError
from taps_jax.files import replacing
from taps_jax.training.step import Metrics


class MetricsLog:
    """Appends to `path`, after cutting what was logged later than `first_step`, where the run goes on.

    Args:
      path: the JSON-lines file.
      first_step: the last step that stays.
      wandb_project: to send the numbers to as well, or empty.
      run_config: what wandb shows as the run's settings.
    Raises:
      InputError: wandb is asked for and not installed.
    """

    def __init__(self, path: Path, first_step: int, wandb_project: str = "", run_config: dict[str, Any] | None = None):
        self._path = path
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= first_step]
        with replacing(path) as temporary:
            temporary.write_text("".join(kept))
        self._board = _tensorboard(path.parent / "tensorboard", first_step)
        self._wandb = _wandb(wandb_project, path.parent.name, run_config) if wandb_project else None

    def write(self, step: int, metrics: Metrics, **others: float) -> str:
        """Logs one step and returns it in a few words.

        Args:
          step: the step.
          metrics: of it.
          others: numbers by name, such as learning_rate.
        """
        loss, parts, supervised = jax.device_get(metrics)
        row = {
            "step": step,
            "loss": float(loss),
            **{name: np.round(values, 5).tolist() for name, values in parts._asdict().items()},
            "supervised": int(supervised),
            **others,
        }
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        scalars = dict(_scalars(row))
        if self._board:
            for name, value in scalars.items():
                self._board.add_scalar(name, value, step)
        if self._wandb:
            self._wandb.log(scalars, step=step)
        agreement = "/".join(f"{value:.2f}" for value in row["agreement"])
        found = f", acceptance length {others['acceptance_length']:.2f}" if "acceptance_length" in others else ""
        return f"loss {row['loss']:.3f}, agreement {agreement}{found}, {others['tokens_per_second']:.0f} tokens/s"

    def close(self) -> None:
        """Flushes what is buffered."""
        if self._board:
            self._board.close()
        if self._wandb:
            self._wandb.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The logged steps of a metrics file.

    Raises:
      InputError: it is absent or has none.
    """
    rows = [json.loads(line) for line in _lines(path)]
    if not rows:
        raise InputError(f"{path}: no metrics found, expected the metrics.jsonl of a training run")
    return rows


def _lines(path: Path) -> list[str]:
    """Whole lines; the last one is left out where a run was killed while writing it."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]


def _scalars(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers by name; lists by pass, as in `agreement/pass1`."""
    for name, value in row.items():
        if isinstance(value, list):
            yield from ((f"{name}/pass{number}", one) for number, one in enumerate(value, start=1))
        elif name != "step":
            yield name, value


def _tensorboard(folder: Path, first_step: int):
    """A writer of TensorBoard's event files, None where tensorboardX is not installed."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return None
    # Events that a killed run wrote after its last checkpoint are hidden by those with the same steps.
    return SummaryWriter(str(folder), purge_step=first_step + 1)


def _wandb(project: str, name: str, run_config: dict[str, Any] | None):
    try:
        import wandb
    except ImportError as error:
        raise InputError(f"wandb_project is {project!r}, but the package wandb is not installed") from error
    return wandb.init(project=project, name=name, config=run_config, resume="allow")
