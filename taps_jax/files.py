"""Writing files so that nothing half-written remains."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from taps_jax.errors import InputError


class replacing:  # noqa: N801 - reads as a verb: with replacing(path) as temporary
    """A temporary name beside `path` that takes its place when the block ends without an error."""

    def __init__(self, path: Path):
        self._path = path
        self._temporary = path.with_name(path.name + ".part")

    def __enter__(self) -> Path:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return self._temporary

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            os.replace(self._temporary, self._path)
        else:
            self._temporary.unlink(missing_ok=True)


@contextmanager
def new_directory(path: Path, force: bool, sources: Iterable[Path] = ()) -> Iterator[Path]:
    """A temporary directory beside `path` that takes its name when the block ends without an error.

    Args:
      path: must not exist, or be empty, unless `force`.
      force: replaces an older checkpoint, which must hold a config.json, so that nothing else is ever deleted.
      sources: what is read, which must not be replaced.
    Raises:
      InputError: `path` is in the way, or is or holds a source.
    """
    path = path.absolute()
    for source in sources:
        if path.resolve() in (source.resolve(), *source.resolve().parents):
            raise InputError(f"{path} is what is read, {source}, or a folder above it, which would be replaced")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        if not force:
            raise InputError(f"{path} exists; --force replaces it")
        if not (path / "config.json").is_file():
            raise InputError(f"{path} exists and holds no config.json, so --force does not replace it")
    temporary, old = (path.with_name(f".{path.name}.{ending}") for ending in ("part", "old"))
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        yield temporary
        if path.exists():
            path.rename(old)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def cache_folder() -> Path:
    """Where what can be computed again is kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "taps_jax"
