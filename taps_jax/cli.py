"""What every command line shares: flags, one-line errors, the compile cache, progress."""

import os
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict
from tqdm import tqdm

from taps_jax.errors import InputError, report_input_errors
from taps_jax.files import cache_folder

# transformers would warn on every start that it has no PyTorch, which only its own models need.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


_operands: list[str] = []


def run(main: Callable[[], None] | dict[str, Callable[[], None]], operand: str | None = None) -> None:
    """Parses flags, turns on the compile cache and runs `main`; bad input exits with one line and status 1.

    Args:
      main: the command, or several by the name that the first argument gives.
      operand: what one argument that is no flag means, if the command takes one; `given_operand` has it.
    """

    def start(argv: list[str]) -> None:
        names = list(main) if isinstance(main, dict) else []
        if names and (len(argv) < 2 or argv[1] not in names):
            _fail(f"expected one of {', '.join(names)} as the first argument")
        extra = argv[2 if names else 1 :]
        if operand:
            if not extra:
                _fail(f"{operand} is missing")
            _operands[:] = [extra.pop(0)]
        if extra:
            _fail(f"unexpected argument {extra[0]!r}, options look like --name=value")
        command = main[argv[1]] if names else main
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # orbax tells of every file it writes
        use_compile_cache()
        report_input_errors(command)

    app.run(start, flags_parser=_parse_flags)


def given_operand() -> str:
    """The argument that is no flag."""
    return _operands[0]


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
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))


def progress(items: Iterable, title: str, total: int | None = None, initial: int = 0) -> tqdm:
    """`items` with a progress bar on stderr that names what is going on; `initial` of `total` are done already."""
    return tqdm(items, desc=title, total=total, initial=initial, file=sys.stderr, dynamic_ncols=True, mininterval=0.5)


def _parse_flags(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError, SyntaxError) as error:
        # Config files are loaded and overridden while flags are parsed, and raise what they like.
        message = " ".join(str(error).strip("'\"").split())
        _fail(message)


def _fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)
