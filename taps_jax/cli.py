"""What every command line shares: flags, one-line errors, the compile cache, progress."""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict
from tqdm import tqdm

from taps_jax.errors import InputError, report_input_errors

# transformers would warn on every start that it has no PyTorch, which only its own models need.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def run(main: Callable[[], None]) -> None:
    """Parses flags, turns on the compile cache and runs `main`; bad input exits with one line and status 1."""

    def start(argv: list[str]) -> None:
        if len(argv) > 1:
            print(f"error: unexpected argument {argv[1]!r}, options look like --name=value", file=sys.stderr)
            sys.exit(1)
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # orbax tells of every file it writes
        use_compile_cache()
        report_input_errors(main)

    app.run(start, flags_parser=_parse_flags)


def loaded_config(flag: flags.FlagHolder) -> ConfigDict:
    """The value of a config-file flag.

    Raises:
      InputError: the file could not be loaded, which ml_collections says only when the value is first used.
    """
    try:
        flag.value.keys()
    except OSError as error:
        raise InputError(" ".join(str(error).rpartition("failure to load: ")[2].split())) from error
    return flag.value


def use_compile_cache() -> None:
    """Keeps compiled functions in a user cache folder, unless JAX_COMPILATION_CACHE_DIR says where (or is empty)."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(base / "taps_jax" / "xla"))


def progress(items: Iterable, title: str, total: int | None = None, initial: int = 0) -> tqdm:
    """`items` with a progress bar on stderr that names what is going on; `initial` of `total` are done already."""
    return tqdm(items, desc=title, total=total, initial=initial, file=sys.stderr, dynamic_ncols=True, mininterval=0.5)


def _parse_flags(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError, SyntaxError) as error:
        # Config files are loaded and overridden while flags are parsed, and raise what they like.
        message = " ".join(str(error).strip("'\"").split())
        print(f"error: {message}", file=sys.stderr)
        sys.exit(1)
