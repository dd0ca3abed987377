"""Several processes that train together: joining them, waiting for one another, and who writes."""

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils

from taps_jax.errors import InputError


def join(coordinator: str, count: int | None, index: int | None) -> None:
    """Makes this process one of several; must come before anything is computed.

    Args:
      coordinator: HOST:PORT of the first process, or "auto" for what the cluster's environment says (Slurm and others).
      count, index: how many processes, and which of them this is; with "auto" neither is needed.
    Raises:
      InputError: the others could not be reached, or count and index are missing.
    """
    if coordinator != "auto" and (count is None or index is None):
        raise InputError("--coordinator needs --num_processes and --process_id, or to be auto")
    try:
        jax.distributed.initialize(None if coordinator == "auto" else coordinator, count, index)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"--coordinator={coordinator}: cannot join the other processes: {reason}") from error


def is_first() -> bool:
    """Whether this is the process that writes files and prints."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Returns when every process has come to the point called `name`."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def to_host(array: Array) -> np.ndarray:
    """A whole array in this process's memory, wherever its parts are; all processes must call it together."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)
