"""The metrics file of a training run: one JSON object per logged step."""

import json
from pathlib import Path

import jax
import numpy as np

from taps_jax.files import replacing
from taps_jax.training.step import Metrics


class MetricsLog:
    """Appends to `path`, after cutting what was logged later than `first_step`, where the run goes on."""

    def __init__(self, path: Path, first_step: int):
        self._path = path
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= first_step]
        with replacing(path) as temporary:
            temporary.write_text("".join(kept))

    def write(self, step: int, metrics: Metrics, learning_rate: float, tokens_per_second: float) -> str:
        """Logs one step and returns it in a few words."""
        loss, parts, supervised = jax.device_get(metrics)
        row = {
            "step": step,
            "loss": float(loss),
            **{name: np.round(values, 5).tolist() for name, values in parts._asdict().items()},
            "supervised": int(supervised),
            "learning_rate": learning_rate,
            "tokens_per_second": round(tokens_per_second, 1),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        agreement = "/".join(f"{value:.2f}" for value in row["agreement"])
        return f"loss {row['loss']:.3f}, agreement {agreement}, {row['tokens_per_second']:.0f} tokens/s"
