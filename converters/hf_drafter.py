"""Drafters: published EAGLE-1/2, HASS and TAPS heads to this project's layout, and to the layouts of other engines.

python -m converters.hf_drafter --from=yuhuili/EAGLE-LLaMA3-Instruct-8B --to=eagle-flax
python -m converters.hf_drafter --from=state_final --to=hass-flax --verifier=meta-llama/Meta-Llama-3-8B-Instruct
python -m converters.hf_drafter --from=runs/hass/drafter --to=hass-sglang --reverse --flavour=sglang
python -m converters.hf_drafter --from=runs/hass/drafter --to=hass-eagle --reverse --flavour=eagle --verifier=DIR

The second is for the folders of accelerate, which have no config.json.
"""

from pathlib import Path

from absl import flags

from converters import common
from taps_jax import cli
from taps_jax.checkpoints.convert_drafter import export_drafter, import_drafter
from taps_jax.checkpoints.flavours import FLAVOURS

_FROM = flags.DEFINE_string("from", None, "Directory or hub id of a drafter.")
_VERIFIER = flags.DEFINE_string(
    "verifier", None, "Gives the shape where there is no config.json, and the embedding that flavour eagle stores."
)
_REVERSE = flags.DEFINE_bool("reverse", False, "From this project's layout to another engine's.")
_FLAVOUR = flags.DEFINE_enum("flavour", "eagle", list(FLAVOURS), "Whose layout --reverse writes.")
_OUTPUT = common.define_output(sharded=False)


def main() -> None:
    source, output = common.given(_FROM), _OUTPUT.given()
    if _REVERSE.value:
        converted = export_drafter(Path(source), _FLAVOUR.value, _VERIFIER.value, output)
    else:
        converted = import_drafter(source, _VERIFIER.value, output)
    common.print_summary(output.target, *converted)


if __name__ == "__main__":
    cli.run(main)
