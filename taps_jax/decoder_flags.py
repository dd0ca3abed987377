"""The flags of every command that decodes with a drafter: which verifier, which drafter, which draft tree."""

import sys

from absl import flags

from taps_jax import cli
from taps_jax.benchmarks.tree_choice import cached_tree
from taps_jax.checkpoints.hf_drafter import LoadedDrafter
from taps_jax.checkpoints.verifier import Verifier
from taps_jax.errors import InputError
from taps_jax.loading import load_drafter, tree_shape
from taps_jax.speculative.tree import TreeShape

VERIFIER = flags.DEFINE_string("verifier", "smollm2", "smollm2, a GGUF file, a directory or a hub id.")
DRAFTER = flags.DEFINE_string("drafter", None, "Drafter directory.")
ALLOW_OTHER = flags.DEFINE_bool("allow_other_verifier", False, "Use a drafter trained on another verifier.")
TREE = flags.DEFINE_string(
    "tree", None, "TOTAL_TOKEN/DEPTH/TOP_K, or auto: the fastest on this machine, measured once and remembered."
)
TOTAL_TOKEN = flags.DEFINE_integer("total_token", None, "Nodes of the draft tree, root included.")
DEPTH = flags.DEFINE_integer("depth", None, "Expansions after the first drafted level.")
TOP_K = flags.DEFINE_integer("top_k", None, "Tokens proposed per expanded node, nodes expanded per level.")


def given_drafter(verifier: Verifier) -> LoadedDrafter:
    """The drafter that the flags name.

    Raises:
      InputError: none is named, or it cannot be used.
    """
    if DRAFTER.value is None:
        raise InputError("--drafter=DIR is missing")
    return load_drafter(DRAFTER.value, verifier, ALLOW_OTHER.value)


def given_tree() -> TreeShape | None:
    """The tree that the flags give, the platform's default where they are silent; None for `--tree=auto`.

    Raises:
      InputError: the flags contradict each other or a number is bad.
    """
    sizes = (TOTAL_TOKEN.value, DEPTH.value, TOP_K.value)
    if TREE.value is None:
        return tree_shape(*sizes)
    if any(size is not None for size in sizes):
        raise InputError("give either --tree or --total_token, --depth and --top_k")
    if TREE.value == "auto":
        return None
    parts = TREE.value.split("/")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        raise InputError(f"--tree is {TREE.value!r}, expected auto or three numbers such as 60/5/10")
    return tree_shape(*map(int, parts))


def chosen_tree(given: TreeShape | None, verifier: Verifier, drafter: LoadedDrafter, batch_size: int) -> TreeShape:
    """`given`, or for None the fastest tree on this machine, told on stderr."""
    if given:
        return given
    found = cached_tree(verifier, drafter, batch_size, cli.progress)
    print(found, file=sys.stderr)
    return found.best.shape
