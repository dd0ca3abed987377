"""What a grid's config asks for: drafters, averages of them, and the rows of the table."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from taps_jax.checkpoints.average import average_drafters
from taps_jax.checkpoints.hf_drafter import LoadedDrafter
from taps_jax.checkpoints.verifier import Verifier
from taps_jax.errors import InputError
from taps_jax.evaluation.replaying import Row
from taps_jax.loading import check_together, load_drafters, shipped_drafters
from taps_jax.speculative.composition import Composition


def base_config() -> ConfigDict:
    """Every field of a grid's configuration, locked: setting a field that is not here is an error."""
    config = ConfigDict()
    config.verifier = "smollm2"
    config.system_prompt = ""  # of every conversation; "" is none
    config.max_new_tokens = 128
    config.seed = 0
    config.tree = "60/5/10"  # of every specialist, and of merge:trie's joined tree; "auto": the machine's fastest
    config.batch_size = 8  # questions answered at once
    config.drafters = ConfigDict()  # directories by name; empty: those that come with the package
    config.averages = ConfigDict()  # weights by drafter, by the average's name
    config.rows = ()  # (label, composition, drafters or averages)
    config.drafters.unlock()
    config.averages.unlock()
    return config


class PlannedRow(NamedTuple):
    """A row of the table: how it is called, and which of the stacked drafters share a step how."""

    label: str
    names: tuple[str, ...]
    row: Row


@dataclasses.dataclass(frozen=True)
class Plan:
    """Drafters, averages included, in the order they are stacked, and the rows."""

    drafters: tuple[LoadedDrafter, ...]
    rows: tuple[PlannedRow, ...]

    def members(self, row: PlannedRow) -> list[LoadedDrafter]:
        return [self.drafters[member] for member in row.row.members]


def read_plan(config: ConfigDict, verifier: Verifier, drafters: Sequence[str] = ()) -> Plan:
    """Loads the drafters that a config names and makes its averages.

    Args:
      config: as `base_config`.
      verifier: which they draft for.
      drafters: NAME=DIRECTORY, to use instead of the config's.
    Raises:
      InputError: a drafter cannot be used, or a row or an average is not what it should be.
    """
    given = drafters or [f"{name}={folder}" for name, folder in config.drafters.items()]
    if given:
        drafters = load_drafters(given, verifier)
    else:
        drafters = shipped_drafters(verifier)
        if not drafters:
            raise InputError(f"config.drafters is empty, and no drafter for {verifier.name} comes with taps_jax")
    drafters = (*drafters, *(_average(drafters, name, weights) for name, weights in config.averages.items()))
    check_together(drafters)
    return Plan(drafters, planned_rows(config.rows, [drafter.name for drafter in drafters]))


def _average(drafters: Sequence[LoadedDrafter], name: str, weights: ConfigDict) -> LoadedDrafter:
    found = {drafter.name: drafter for drafter in drafters}
    unknown = [given for given in weights if given not in found]
    if unknown:
        raise InputError(f"config.averages.{name} names {', '.join(unknown)}; there are {', '.join(found)}")
    return average_drafters([found[given] for given in weights], list(weights.values()), name)


def planned_rows(rows: Sequence[tuple[str, str, Sequence[str]]], drafters: Sequence[str]) -> tuple[PlannedRow, ...]:
    """Rows of a config as rows of what is stacked.

    Args:
      rows: (label, composition, names).
      drafters: names of what is stacked, in order.
    Raises:
      InputError: a row is malformed, names what is not there or repeats a label.
    """
    if not rows:
        raise InputError("config.rows is empty, expected (label, composition, drafters) for each")
    planned: list[PlannedRow] = []
    for given in rows:
        try:
            label, composition, names = given
            names = (names,) if isinstance(names, str) else tuple(names)
            rule = Composition(composition)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"config.rows holds {given!r}, expected (label, one of {', '.join(Composition)}, drafters)"
            ) from error
        unknown = [name for name in names if name not in drafters]
        if unknown:
            raise InputError(f"row {label!r} names {', '.join(unknown)}; there are {', '.join(drafters)}")
        if (rule is Composition.SINGLE) != (len(names) == 1):
            raise InputError(f"row {label!r}: {rule} of {len(names)} drafters")
        if label in (row.label for row in planned):
            raise InputError(f"config.rows has two rows {label!r}")
        planned.append(PlannedRow(label, names, Row(tuple(drafters.index(name) for name in names), rule)))
    return tuple(planned)


def weights_hash(drafter: LoadedDrafter) -> str:
    """12 hexadecimal digits for a drafter's parameters and draft vocabulary."""
    digest = hashlib.sha256()
    for path, leaf in sorted(jax.tree_util.tree_leaves_with_path(drafter.params), key=lambda item: str(item[0])):
        digest.update(str(path).encode())
        digest.update(np.asarray(leaf).tobytes())
    if drafter.vocabulary is not None:
        digest.update(np.asarray(drafter.vocabulary, np.int32).tobytes())
    return digest.hexdigest()[:12]
