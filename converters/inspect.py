"""What a checkpoint is, whether it is whole, and what loads it. Every tensor is read once; status 1 if it is not whole.

python -m converters.inspect runs/smollm2/drafter
python -m converters.inspect model.gguf
python -m converters.inspect state_final --verifier=meta-llama/Meta-Llama-3-8B-Instruct
"""

import sys
from pathlib import Path

from absl import flags

from taps_jax import cli
from taps_jax.checkpoints.convert_drafter import verifier_config
from taps_jax.checkpoints.describe import describe

_VERIFIER = flags.DEFINE_string("verifier", None, "Gives the shape of a drafter that has no config.json.")


def main() -> None:
    path = Path(cli.given_operand())
    found = describe(path, verifier_config(_VERIFIER.value) if _VERIFIER.value else None)
    print(f"{path}: {found.kind}")
    for name, value in found.facts:
        print(f"  {name + ':':<20} {value}")
    for problem in found.problems:
        print(f"  {'problem:':<20} {problem}")
    print(f"  {'whole:':<20} {'no' if found.problems else 'yes'}")
    if not found.problems:
        print(f"  {'loads with:':<20} {', '.join(found.loads_with)}")
    sys.exit(1 if found.problems else 0)


if __name__ == "__main__":
    cli.run(main, operand="DIR_OR_FILE")
