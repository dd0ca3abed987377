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

_FROM, _TO = common.define_from_to("Directory or hub id of a drafter.")
_VERIFIER = flags.DEFINE_string(
    "verifier", None, "Gives the shape where there is no config.json, and the embedding that flavour eagle stores."
)
_REVERSE = flags.DEFINE_bool("reverse", False, "From this project's layout to another engine's.")
_FLAVOUR = flags.DEFINE_enum("flavour", "eagle", list(FLAVOURS), "Whose layout --reverse writes.")
_DTYPE = common.define_dtype()
_FORCE = common.define_force()


def main() -> None:
    source, target, dtype = common.given(_FROM), Path(common.given(_TO)), common.given_dtype(_DTYPE)
    if _REVERSE.value:
        converted = export_drafter(
            Path(source), target, _FLAVOUR.value, _VERIFIER.value, dtype, _FORCE.value, cli.progress
        )
    else:
        converted = import_drafter(source, target, _VERIFIER.value, dtype, _FORCE.value, cli.progress)
    common.print_summary(target, *converted)


if __name__ == "__main__":
    cli.run(main)
