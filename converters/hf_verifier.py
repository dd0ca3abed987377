"""Verifiers: Hugging Face to Flax names, and back.

python -m converters.hf_verifier --from=meta-llama/Meta-Llama-3-8B-Instruct --to=llama3-flax --dtype=bfloat16
python -m converters.hf_verifier --from=llama3-flax --to=llama3-hf --reverse --max_shard_size=5GB

Both kinds of directory are taken by every --verifier flag.
"""

from absl import flags

from converters import common
from taps_jax import cli
from taps_jax.checkpoints.convert import convert_verifier

_FROM = flags.DEFINE_string("from", None, "Directory or hub id of a verifier.")
_REVERSE = flags.DEFINE_bool("reverse", False, "From Flax to Hugging Face names.")
_OUTPUT = common.define_output(sharded=True)


def main() -> None:
    output = _OUTPUT.given()
    converted = convert_verifier(common.given(_FROM), "hf" if _REVERSE.value else "flax", output)
    common.print_summary(output.target, *converted)


if __name__ == "__main__":
    cli.run(main)
