"""Training checkpoints through orbax: the drafter's parameters, optimizer state, step and what they belong to."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from taps_jax.errors import InputError
from taps_jax.training.step import TrainState


class Checkpoints:
    """The checkpoints of one run; the verifier is never stored.

    `identity` names what a run's state depends on (verifier fingerprint, data, objective): a checkpoint with another
    identity is refused rather than continued.
    """

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any]):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)
        self._folder, self._identity = folder, identity

    def save(self, step: int, state: TrainState) -> None:
        """Starts writing `state`; it appears when complete."""
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), identity=ocp.args.JsonSave(self._identity))
        self._manager.save(step, args=items)

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def restore(self, state: TrainState) -> TrainState | None:
        """The newest checkpoint in the shapes and shardings of `state`; None if there is none.

        Raises:
          InputError: it belongs to another run.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        items = ocp.args.Composite(identity=ocp.args.JsonRestore())
        found = self._manager.restore(step, args=items).identity
        changed = [name for name in self._identity if found.get(name) != self._identity[name]]
        if changed:
            raise InputError(
                f"{self._folder}: checkpoint {step} was trained with another {', '.join(changed)}; "
                "use another --workdir or the same settings"
            )
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        return self._manager.restore(step, args=items).state

    def close(self) -> None:
        """Waits for writes under way."""
        self._manager.wait_until_finished()
        self._manager.close()
