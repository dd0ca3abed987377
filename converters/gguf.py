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

_FROM = flags.DEFINE_string("from", None, "GGUF file, or smollm2 for the embedded one.")
_FORMAT = flags.DEFINE_enum("format", "flax", ["flax", "hf"], "Names of the tensors.")
_OUTPUT = common.define_output(sharded=True)


def main() -> None:
    source, output = common.given(_FROM), _OUTPUT.given()
    file = embedded_gguf() if source == "smollm2" else Path(source)
    common.print_summary(output.target, *convert_gguf(file, _FORMAT.value, output))


if __name__ == "__main__":
    cli.run(main)
