"""Verifiers in GGUF files, dequantised, to Flax or Hugging Face directories.

python -m converters.gguf --from=model.gguf --to=model-hf --format=hf --dtype=bfloat16
python -m converters.gguf --from=model.gguf --to=model-flax --format=flax
"""

from pathlib import Path

from absl import flags

from converters import common
from taps_jax import cli
from taps_jax.checkpoints.convert import convert_gguf
from taps_jax.checkpoints.verifier import embedded_gguf
from taps_jax.checkpoints.write import parsed_size

_FROM, _TO = common.define_from_to("GGUF file, or smollm2 for the embedded one.")
_FORMAT = flags.DEFINE_enum("format", "flax", ["flax", "hf"], "Names of the tensors.")
_DTYPE = common.define_dtype()
_MAX_SHARD_SIZE = common.define_max_shard_size()
_FORCE = common.define_force()


def main() -> None:
    source, target = common.given(_FROM), Path(common.given(_TO))
    converted = convert_gguf(
        embedded_gguf() if source == "smollm2" else Path(source),
        target,
        _FORMAT.value,
        common.given_dtype(_DTYPE),
        parsed_size(_MAX_SHARD_SIZE.value, "--max_shard_size"),
        _FORCE.value,
        cli.progress,
    )
    common.print_summary(target, *converted)


if __name__ == "__main__":
    cli.run(main)
