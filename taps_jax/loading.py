"""From names on a command line to a decoder: a verifier, a drafter that fits it, and the size of the draft tree."""

from pathlib import Path

import jax
import jax.numpy as jnp

from taps_jax.checkpoints.hf_drafter import LoadedDrafter, check_fits, read_drafter
from taps_jax.checkpoints.verifier import Verifier
from taps_jax.errors import InputError
from taps_jax.models.drafter import Drafter
from taps_jax.models.llama import embedding_table, head_table
from taps_jax.speculative.decode import Models, Weights
from taps_jax.speculative.drafting import drafter_weights
from taps_jax.speculative.tree import TreeShape

# On a CPU a verification pass costs the more the more nodes it has; on a GPU 60 cost little more than one.
_DEFAULT_TREES = {"cpu": TreeShape(total_token=8, depth=3, top_k=3)}
_PAPER_TREE = TreeShape(total_token=60, depth=5, top_k=10)


def tree_shape(total_token: int | None = None, depth: int | None = None, top_k: int | None = None) -> TreeShape:
    """The draft tree's size; what is None takes the platform's default.

    Raises:
      InputError: a number is too small.
    """
    default = _DEFAULT_TREES.get(jax.default_backend(), _PAPER_TREE)
    given = {"total_token": total_token, "depth": depth, "top_k": top_k}
    sizes = {name: getattr(default, name) if value is None else value for name, value in given.items()}
    try:
        return TreeShape(**sizes)
    except ValueError as error:
        raise InputError(str(error)) from error


def load_drafter(directory: str | Path, verifier: Verifier, allow_other_verifier: bool = False) -> LoadedDrafter:
    """Reads a drafter in float32 and checks that it fits `verifier`.

    Raises:
      InputError: it is absent, damaged, or does not fit.
    """
    drafter = read_drafter(Path(directory), jnp.float32)
    check_fits(drafter, verifier, allow_other_verifier)
    return drafter


def plain_decoder(verifier: Verifier) -> tuple[Models, Weights]:
    """The verifier alone, a token a step."""
    return Models(verifier.module), Weights(verifier.params)


def speculative_decoder(verifier: Verifier, drafter: LoadedDrafter, shape: TreeShape) -> tuple[Models, Weights]:
    """The verifier with a drafter.

    Raises:
      InputError: the tree proposes more tokens per node than the draft vocabulary has.
    """
    weights = drafter_weights(
        [drafter.params], embedding_table(verifier.params), head_table(verifier.params), [drafter.vocabulary]
    )
    if shape.top_k > weights.head.shape[0]:
        raise InputError(f"top_k {shape.top_k} exceeds the draft vocabulary of {weights.head.shape[0]} tokens")
    return Models(verifier.module, Drafter(drafter.config), shape), Weights(verifier.params, weights)
