"""Writing files so that nothing half-written remains."""

import os
from pathlib import Path


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


def cache_folder() -> Path:
    """Where what can be computed again is kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "taps_jax"
