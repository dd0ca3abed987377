"""From names on a command line to a decoder: a verifier, drafters that fit it, and the size of the draft tree."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from taps_jax.assets import ASSETS
from taps_jax.checkpoints.hf_drafter import LoadedDrafter, check_fits, read_drafter
from taps_jax.checkpoints.verifier import Verifier
from taps_jax.errors import InputError
from taps_jax.models.drafter import Drafter
from taps_jax.models.llama import embedding_table, head_table
from taps_jax.speculative.composition import Composition
from taps_jax.speculative.decode import Models, Weights
from taps_jax.speculative.drafting import drafter_weights
from taps_jax.speculative.tree import TreeShape

# On a CPU a verification pass costs the more the more nodes it has; on a GPU 60 cost little more than one.
_DEFAULT_TREES = {"cpu": TreeShape(total_token=8, depth=3, top_k=3)}
# Checks no more nodes than a single drafter's tree, and never does worse than the wrong one of several.
DEFAULT_COMPOSITION = Composition.MERGE_TRIE
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


def parsed_tree(text: str, name: str) -> TreeShape | None:
    """A tree's size from TOTAL_TOKEN/DEPTH/TOP_K; None for `auto`.

    Args:
      text: what was given.
      name: of what gave it, for the message.
    Raises:
      InputError: it is neither, or a number is bad.
    """
    if text == "auto":
        return None
    parts = text.split("/")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        raise InputError(f"{name} is {text!r}, expected auto or three numbers such as 60/5/10")
    return tree_shape(*map(int, parts))


def load_drafter(directory: str | Path, verifier: Verifier, allow_other_verifier: bool = False) -> LoadedDrafter:
    """Reads a drafter in float32 and checks that it fits `verifier`.

    Raises:
      InputError: it is absent, damaged, or does not fit.
    """
    drafter = read_drafter(Path(directory), jnp.float32, verifier.config)
    check_fits(drafter, verifier, allow_other_verifier)
    return drafter


def load_drafters(
    names: Sequence[str], verifier: Verifier, allow_other_verifier: bool = False
) -> tuple[LoadedDrafter, ...]:
    """Reads several drafters, each a directory or `NAME=DIR`, and checks that they fit `verifier` and one another.

    Raises:
      InputError: one cannot be used, or not together with the others, or two have one name.
    """
    drafters = []
    for given in names:
        name, _, directory = given.rpartition("=")
        drafter = load_drafter(directory, verifier, allow_other_verifier)
        drafters.append(dataclasses.replace(drafter, name=name) if name else drafter)
    seen = [drafter.name for drafter in drafters]
    for name in seen:
        if seen.count(name) > 1:
            raise InputError(f"two drafters are named {name}: give names, as in --drafter=NAME=DIR")
    check_together(drafters)
    return tuple(drafters)


def shipped_drafters(verifier: Verifier) -> tuple[LoadedDrafter, ...]:
    """The specialists that come with the package for `verifier`; none for most verifiers."""
    folders = sorted(path.parent for path in (ASSETS / "drafters").glob("*/*/config.json"))
    fitting = [str(folder) for folder in folders if _trained_on(folder) == verifier.fingerprint]
    return load_drafters(fitting, verifier)


def _trained_on(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text())["taps_jax"]["verifier_fingerprint"]


def check_together(drafters: Sequence[LoadedDrafter]) -> None:
    """Refuses specialists that cannot be stacked; warns on stderr when their draft vocabularies differ.

    Raises:
      InputError: their shapes differ, or the verifiers they were trained on.
    """
    for other in drafters[1:]:
        first = drafters[0]
        found = {**_must_agree(first), "verifier fingerprint": first.fingerprint}
        for field, value in {**_must_agree(other), "verifier fingerprint": other.fingerprint}.items():
            if value != found[field]:
                raise InputError(
                    f"drafters {first.name} and {other.name} do not fit together: {field} is {found[field]} and {value}"
                )
        if not _same_list(first.vocabulary, other.vocabulary):
            print(
                f"note: the draft vocabularies of {first.name} ({_draft_tokens(first)} tokens) and {other.name} "
                f"({_draft_tokens(other)}) differ: drafting costs as much as with both lists, and a narrow list looks "
                "confident to a router",
                file=sys.stderr,
            )


def _must_agree(drafter: LoadedDrafter) -> dict[str, object]:
    """The shape, but for what only bounds positions: rope tables are computed for any."""
    fields = dataclasses.asdict(drafter.config.layer)
    del fields["max_position_embeddings"]
    return fields


def _draft_tokens(drafter: LoadedDrafter) -> int:
    """Tokens that a drafter may propose."""
    return drafter.config.layer.vocab_size if drafter.vocabulary is None else len(drafter.vocabulary)


def _same_list(one, other) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def plain_decoder(verifier: Verifier) -> tuple[Models, Weights]:
    """The verifier alone, a token a step."""
    return Models(verifier.module), Weights(verifier.params)


def speculative_decoder(
    verifier: Verifier,
    drafters: Sequence[LoadedDrafter],
    shape: TreeShape,
    composition: Composition = Composition.SINGLE,
) -> tuple[Models, Weights]:
    """The verifier with one drafter, or with several and how they share a step.

    Raises:
      InputError: the tree proposes more tokens per node than the draft vocabulary has, or several drafters have no
        rule to share a step by.
    """
    if composition is Composition.SINGLE and len(drafters) > 1:
        raise InputError(f"{len(drafters)} drafters need a composition, such as {Composition.MERGE_TRIE}")
    biased = any(drafter.config.fc_bias for drafter in drafters)
    weights = drafter_weights(
        [_with_bias(drafter.params) if biased else drafter.params for drafter in drafters],
        embedding_table(verifier.params),
        head_table(verifier.params),
        [drafter.vocabulary for drafter in drafters],
    )
    smallest = min(map(_draft_tokens, drafters))
    if shape.top_k > smallest:
        raise InputError(f"top_k {shape.top_k} exceeds the draft vocabulary of {smallest} tokens")
    config = dataclasses.replace(drafters[0].config, fc_bias=biased)
    return Models(verifier.module, Drafter(config), shape, composition), Weights(verifier.params, weights)


def _with_bias(params: dict) -> dict:
    """A drafter without a fusion bias as one whose bias is zero, so that it stacks with those that have one."""
    weight = params["fc"]["weight"]
    return {**params, "fc": {"bias": jnp.zeros(weight.shape[0], weight.dtype), **params["fc"]}}
