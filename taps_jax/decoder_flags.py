"""The flags of every command that decodes with drafters: which verifier, which drafters, composed how, which tree."""

import sys
from typing import NamedTuple

from absl import flags

from taps_jax import cli
from taps_jax.benchmarks.tree_choice import cached_tree
from taps_jax.checkpoints.hf_drafter import LoadedDrafter
from taps_jax.checkpoints.verifier import Verifier
from taps_jax.errors import InputError
from taps_jax.loading import DEFAULT_COMPOSITION, load_drafters, parsed_tree, shipped_drafters, tree_shape
from taps_jax.speculative.composition import Composition
from taps_jax.speculative.tree import TreeShape

VERIFIER = flags.DEFINE_string("verifier", "smollm2", "smollm2, a GGUF file, a directory or a hub id.")
DRAFTER = flags.DEFINE_multi_string(
    "drafter",
    None,
    "Drafter directory, or NAME=DIRECTORY; several are composed. Without one, the specialists that come with the "
    "package for the verifier.",
)
COMPOSE = flags.DEFINE_string(
    "compose", None, f"How several drafters share a step: single:NAME, {', '.join(list(Composition)[1:])}."
)
ALLOW_OTHER = flags.DEFINE_bool("allow_other_verifier", False, "Use a drafter trained on another verifier.")
TREE = flags.DEFINE_string(
    "tree", None, "TOTAL_TOKEN/DEPTH/TOP_K, or auto: the fastest on this machine, measured once and remembered."
)
TOTAL_TOKEN = flags.DEFINE_integer("total_token", None, "Nodes of the draft tree, root included.")
DEPTH = flags.DEFINE_integer("depth", None, "Expansions after the first drafted level.")
TOP_K = flags.DEFINE_integer("top_k", None, "Tokens proposed per expanded node, nodes expanded per level.")


class Drafting(NamedTuple):
    """Drafters, and how they share a step."""

    drafters: tuple[LoadedDrafter, ...]
    composition: Composition

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(drafter.name for drafter in self.drafters)

    def __str__(self) -> str:
        """As `--compose` takes it, with the names of what is composed."""
        joined = "+".join(self.names)
        return f"single:{joined}" if self.composition is Composition.SINGLE else f"{self.composition}({joined})"


def given_drafting(verifier: Verifier) -> Drafting:
    """The drafters that the flags name, or those that come with the package, and their composition.

    Raises:
      InputError: there are none, they cannot be used, or the composition is not one or names no drafter.
    """
    given = COMPOSE.value or ""
    if not given.startswith("single:") and given not in ("", *list(Composition)[1:]):
        raise InputError(f"--compose is {given!r}, expected single:NAME, {', '.join(list(Composition)[1:])}")
    if DRAFTER.value:
        drafters = load_drafters(DRAFTER.value, verifier, ALLOW_OTHER.value)
    else:
        drafters = shipped_drafters(verifier)
        if not drafters:
            raise InputError(f"--drafter=DIR is missing, and no drafter for {verifier.name} comes with taps_jax")
    if given.startswith("single:"):
        name = given.removeprefix("single:")
        chosen = tuple(drafter for drafter in drafters if drafter.name == name)
        if not chosen:
            raise InputError(f"--compose={given}: the drafters are {', '.join(d.name for d in drafters)}")
        return Drafting(chosen, Composition.SINGLE)
    if len(drafters) == 1:
        return Drafting(drafters, Composition.SINGLE)
    return Drafting(drafters, Composition(given) if given else DEFAULT_COMPOSITION)


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
    return parsed_tree(TREE.value, "--tree")


def chosen_tree(given: TreeShape | None, verifier: Verifier, drafting: Drafting, batch_size: int) -> TreeShape:
    """`given`, or for None the fastest tree on this machine, told on stderr.

    Raises:
      InputError: the fastest is asked for several drafters, for which there is no search.
    """
    if given:
        return given
    if len(drafting.drafters) > 1:
        raise InputError(f"--tree=auto is for one drafter, {drafting} has {len(drafting.drafters)}")
    found = cached_tree(verifier, drafting.drafters[0], batch_size, cli.progress)
    print(found, file=sys.stderr)
    return found.best.shape
