"""The installed command: `taps-convert verifier|drafter|gguf|inspect|average`, each with the flags of its module."""

import importlib
import sys

from taps_jax import cli

_MODULES = {
    "verifier": "hf_verifier",
    "drafter": "hf_drafter",
    "gguf": "gguf",
    "inspect": "inspect",
    "average": "average",
}


def main() -> None:
    names = "|".join(_MODULES)
    if len(sys.argv) < 2 or sys.argv[1] not in _MODULES:
        wanted = len(sys.argv) > 1 and sys.argv[1] in ("--help", "-h", "help")
        print(f"usage: taps-convert {names} --help", file=sys.stdout if wanted else sys.stderr)
        sys.exit(0 if wanted else 1)
    # Only the module that is asked for is imported: they define flags of the same names.
    module = importlib.import_module(f"converters.{_MODULES[sys.argv.pop(1)]}")
    sys.modules["__main__"].__doc__ = module.__doc__  # what --help shows
    cli.run(module.main, operand="DIR_OR_FILE" if module.__name__.endswith("inspect") else None)


if __name__ == "__main__":
    main()
