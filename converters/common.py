"""Flags and summary that the conversion commands share."""

import resource
import sys
import time
from pathlib import Path

from absl import flags

from taps_jax.checkpoints.convert import parsed_dtype
from taps_jax.checkpoints.write import Written
from taps_jax.errors import InputError

_STARTED = time.perf_counter()


def define_from_to(of: str) -> tuple[flags.FlagHolder, flags.FlagHolder]:
    """`--from` and `--to`; `of` says what `--from` may be."""
    return flags.DEFINE_string("from", None, of), flags.DEFINE_string("to", None, "Directory to write.")


def define_dtype() -> flags.FlagHolder:
    """`--dtype`."""
    return flags.DEFINE_string("dtype", None, "float32, float16 or bfloat16; without it each tensor keeps its type.")


def define_force() -> flags.FlagHolder:
    """`--force`."""
    return flags.DEFINE_bool("force", False, "Replace an older checkpoint at --to.")


def define_max_shard_size() -> flags.FlagHolder:
    """`--max_shard_size`."""
    return flags.DEFINE_string("max_shard_size", "5GB", "Of a weights file; a larger model is written in several.")


def given(flag: flags.FlagHolder) -> str:
    """A flag's value.

    Raises:
      InputError: it is missing.
    """
    if flag.value is None:
        raise InputError(f"--{flag.name} is missing")
    return flag.value


def given_dtype(flag: flags.FlagHolder):
    """The type that `--dtype` names, or None."""
    return parsed_dtype(flag.value)


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
