"""Verifiers: Hugging Face to Flax names, and back.

python -m converters.hf_verifier --from=meta-llama/Meta-Llama-3-8B-Instruct --to=llama3-flax --dtype=bfloat16
python -m converters.hf_verifier --from=llama3-flax --to=llama3-hf --reverse --max_shard_size=5GB

Both kinds of directory are taken by every --verifier flag.
"""

from pathlib import Path

from absl import flags

from converters import common
from taps_jax import cli
from taps_jax.checkpoints.convert import convert_verifier
from taps_jax.checkpoints.write import parsed_size

_FROM, _TO = common.define_from_to("Directory or hub id of a verifier.")
_REVERSE = flags.DEFINE_bool("reverse", False, "From Flax to Hugging Face names.")
_DTYPE = common.define_dtype()
_MAX_SHARD_SIZE = common.define_max_shard_size()
_FORCE = common.define_force()


def main() -> None:
    target = Path(common.given(_TO))
    converted = convert_verifier(
        common.given(_FROM),
        target,
        "hf" if _REVERSE.value else "flax",
        common.given_dtype(_DTYPE),
        parsed_size(_MAX_SHARD_SIZE.value, "--max_shard_size"),
        _FORCE.value,
        cli.progress,
    )
    common.print_summary(target, *converted)


if __name__ == "__main__":
    cli.run(main)
