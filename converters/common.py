"""Flags and summary that the conversion commands share."""

import dataclasses
import resource
import sys
import time
from pathlib import Path
from typing import NamedTuple

from absl import flags

from taps_jax import cli
from taps_jax.checkpoints.tensors import DTYPES
from taps_jax.checkpoints.write import Output, Written, parsed_size
from taps_jax.errors import InputError

_STARTED = time.perf_counter()
_DTYPES = {str(dtype): dtype for dtype in DTYPES.values()}


class OutputFlags(NamedTuple):
    """The flags that say where and how a checkpoint is written."""

    to: flags.FlagHolder
    force: flags.FlagHolder
    dtype: flags.FlagHolder
    max_shard_size: flags.FlagHolder | None

    def given(self) -> Output:
        """What they say.

        Raises:
          InputError: `--to` is missing, or `--max_shard_size` is not a size.
        """
        output = Output(
            Path(given(self.to)),
            _DTYPES[self.dtype.value] if self.dtype.value else None,
            self.force.value,
            progress=cli.progress,
        )
        if self.max_shard_size is None:
            return output
        return dataclasses.replace(output, max_shard_bytes=parsed_size(self.max_shard_size.value, "--max_shard_size"))


def define_to() -> flags.FlagHolder:
    """`--to`."""
    return flags.DEFINE_string("to", None, "Directory to write.")


def define_force() -> flags.FlagHolder:
    """`--force`."""
    return flags.DEFINE_bool("force", False, "Replace an older checkpoint at --to.")


def define_output(sharded: bool) -> OutputFlags:
    """`--to`, `--force`, `--dtype` and, if `sharded`, `--max_shard_size`."""
    dtype = flags.DEFINE_enum("dtype", None, list(_DTYPES), "Of all tensors; without it each keeps its own.")
    size = "Of a weights file; a larger model is written in several."
    most = flags.DEFINE_string("max_shard_size", "5GB", size) if sharded else None
    return OutputFlags(define_to(), define_force(), dtype, most)


def given(flag: flags.FlagHolder) -> str:
    """A flag's value.

    Raises:
      InputError: it is missing.
    """
    if flag.value is None:
        raise InputError(f"--{flag.name} is missing")
    return flag.value


def print_summary(target: Path, written: Written, left_out: list[str], notes: list[str] | tuple = ()) -> None:
    """What was done, on standard output; what a user should know besides, on standard error."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if left_out:
        print(f"left out: {', '.join(left_out[:5])}{f' and {len(left_out) - 5} more' if len(left_out) > 5 else ''}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{target}: {written.tensors} tensors, {written.parameters:,} parameters, {written.nbytes / 1e6:,.1f} MB; "
        f"peak memory {peak / 1e6:,.0f} MB, {time.perf_counter() - _STARTED:.1f} s"
    )
