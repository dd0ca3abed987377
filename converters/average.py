"""A drafter between others: the weighted sum of their parameters, added up in float32.

python -m converters.average --from=math --from=chat --weights=0.5,0.5 --to=averaged
python -m converters.average --from=A --from=B --from=C --weights=0.5,0.3,0.2 --to=averaged --force
"""

from pathlib import Path

import jax
import jax.numpy as jnp
from absl import flags

from converters import common
from taps_jax import cli
from taps_jax.checkpoints.average import average_drafters
from taps_jax.checkpoints.hf_drafter import read_drafter, stored_dtype, write_drafter
from taps_jax.checkpoints.write import Written
from taps_jax.errors import InputError
from taps_jax.files import new_directory

_FROM = flags.DEFINE_multi_string("from", None, "Drafter directory; once for each.")
_TO = common.define_to()
_WEIGHTS = flags.DEFINE_string("weights", None, "As many numbers as drafters, with commas, adding up to 1.")
_ALLOW_UNNORMALISED = flags.DEFINE_bool("allow_unnormalised", False, "Take weights that do not add up to 1.")
_FORCE = common.define_force()


def main() -> None:
    sources, target = [Path(name) for name in common.given(_FROM)], Path(common.given(_TO))
    try:
        weights = [float(weight) for weight in common.given(_WEIGHTS).split(",")]
    except ValueError as error:
        raise InputError(f"--weights is {_WEIGHTS.value!r}, expected numbers with commas between them") from error
    dtype = stored_dtype(sources[0])
    drafters = [read_drafter(source, jnp.float32) for source in cli.progress(sources, "drafters")]
    result = average_drafters(drafters, weights, target.name, _ALLOW_UNNORMALISED.value)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), result.params)
    with new_directory(target, _FORCE.value, sources) as temporary:
        write_drafter(temporary, result.config, params, result.vocabulary, result.fingerprint)
    leaves = jax.tree.leaves(params)
    size = sum(leaf.nbytes for leaf in leaves)
    common.print_summary(target, Written(len(leaves), sum(leaf.size for leaf in leaves), size, {}), [])


if __name__ == "__main__":
    cli.run(main)
