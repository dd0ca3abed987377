"""Trains a drafter.

    python -m taps_jax.train --config=configs/smollm2.py --workdir=runs/smollm2 [--config.total_steps=100]

The same command goes on where an interrupted run stopped. The trained drafter is in WORKDIR/drafter. On several
machines that share WORKDIR, run it on each with --coordinator=auto under Slurm, or with the address of the first:

    python -m taps_jax.train ... --coordinator=HOST:PORT --num_processes=2 --process_id=0    # and 1 on the other
"""

from pathlib import Path

from absl import flags
from ml_collections import config_flags

from taps_jax import cli, processes
from taps_jax.training.loop import train

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file; --config.x=y overrides a field.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for checkpoints, metrics and the trained drafter.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of the first of several processes, or auto.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many processes train together.", lower_bound=1)
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.", lower_bound=0)
flags.mark_flags_as_required(["config", "workdir"])


def main() -> None:
    if _COORDINATOR.value:
        processes.join(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
    exported = train(cli.loaded_config(_CONFIG), Path(_WORKDIR.value))
    print(f"drafter written to {exported}")


if __name__ == "__main__":
    cli.run(main)
