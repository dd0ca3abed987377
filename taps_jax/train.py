"""Trains a drafter.

    python -m taps_jax.train --config=configs/smollm2.py --workdir=runs/smollm2 [--config.total_steps=100]

The same command goes on where an interrupted run stopped. The trained drafter is in WORKDIR/drafter.
"""

from pathlib import Path

from absl import flags
from ml_collections import config_flags

from taps_jax import cli
from taps_jax.training.loop import train

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file; --config.x=y overrides a field.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for checkpoints, metrics and the trained drafter.")
flags.mark_flags_as_required(["config", "workdir"])


def main() -> None:
    exported = train(cli.loaded_config(_CONFIG), Path(_WORKDIR.value))
    print(f"drafter written to {exported}")


if __name__ == "__main__":
    cli.run(main)
